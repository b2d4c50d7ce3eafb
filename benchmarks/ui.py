"""The dashboard beside TensorBoard and Trackio, on the same data.

    python benchmarks/ui.py            # both sizes, some minutes
    python benchmarks/ui.py seeds      # 1 M points: 64 runs with 15,625 events of one key
    python benchmarks/ui.py sweep      # 1,024 runs with 100 keys and 100 events each

Every server is started anew and asked for one key of all runs, again and again until the answer is complete: that is
the time to data. Then it is asked once more, with everything in memory. In the browser (chromium, headless; with a
server that has read nothing yet), the time counts from the address to the last answer with data for the first screen;
for lox also to the first chart. What each sends is not the same: lox sends means and bands over all lanes, two points
per pixel; TensorBoard all points of all runs (here it keeps all of them; by default it samples 1,000 of each); Trackio
at most 3,000 points of each run.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lox

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0


@dataclass(frozen=True)
class Size:
    runs: int
    events: int
    keys: int

    @property
    def names(self) -> list[str]:
        return ["loss"] if self.keys == 1 else [f"part{n // 10}/key{n % 10}" for n in range(self.keys)]

    def __str__(self) -> str:
        points = self.runs * self.events * self.keys
        return f"{self.runs:,} runs x {self.keys} keys x {self.events:,} events = {points / 1e6:.1f} M points"


SIZES = {"seeds": Size(64, 15_625, 1), "sweep": Size(1024, 100, 100)}


def values(size: Size, run: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(run)
    curve = np.exp(-np.arange(size.events) / size.events * 3)
    return {name: (curve + 0.1 * rng.normal(size=size.events)).astype(np.float32) for name in size.names}


# --- the same data for each ---


def write_lox(size: Size, folder: Path) -> None:
    for run in range(size.runs):
        logs = lox.logdict.from_arrays(values(size, run), steps={"step": np.arange(size.events)})
        lox.save(logs, folder, jax.random.key(run), config={"lr": [0.1, 0.01][run % 2], "seed": run})


def write_tensorboard(size: Size, folder: Path, source: Path) -> None:
    command = [sys.executable, "-m", "lox", "export", str(source), "--to", "tensorboard", "-o", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def write_trackio(size: Size, folder: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import ui; from trackio.sqlite_storage import SQLiteStorage\n"
        f"size = ui.{size!r}\n"
        "for run in range(size.runs):\n"
        "    columns = {k: v.tolist() for k, v in ui.values(size, run).items()}\n"
        "    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]\n"
        "    SQLiteStorage.bulk_log('bench', f'run{run}', rows, steps=list(range(size.events)))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment(folder))


def environment(trackio: Path | None = None) -> dict[str, str]:
    more = {} if trackio is None else {"TRACKIO_DIR": str(trackio), "TRACKIO_SHOW_BRANDING": "0"}
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


# --- the servers ---


def lox_server(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "lox", "ui", str(folder), "--port", str(port), "--no-browser"]


def tensorboard_server(folder: Path, port: int) -> list[str]:
    keep_all = ["--samples_per_plugin", "scalars=1000000"]  # 0, which should mean all, keeps none
    return [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port), *keep_all]


def trackio_server(folder: Path, port: int) -> list[str]:
    program = f"import trackio; trackio.show('bench', open_browser=False, block_thread=True, server_port={port})"
    return [sys.executable, "-c", program]


def lox_data(address: str, size: Size) -> tuple[bool, int]:
    body = get(f"{address}/api/panel?{urllib.parse.urlencode({'key': size.names[0]})}")
    groups = json.loads(body)["groups"]
    whole = sum(group["n"][0] for group in groups) == size.runs and groups[0]["points"] == size.events
    return whole, len(body)


def tensorboard_data(address: str, size: Size) -> tuple[bool, int]:
    asked = json.dumps([{"plugin": "scalars", "tag": size.names[0]}])
    url = f"{address}/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
    body = get(url, urllib.parse.urlencode({"requests": asked}).encode())
    found = json.loads(body)[0].get("runToSeries", {})
    return len(found) == size.runs and all(len(series) == size.events for series in found.values()), len(body)


def trackio_data(address: str, size: Size) -> tuple[bool, int]:
    whole, length = 0, 0
    for first in range(0, size.runs, 64):  # it takes no more than some at once
        runs = [{"run": f"run{n}"} for n in range(first, min(first + 64, size.runs))]
        asked = json.dumps({"project": "bench", "runs": runs}).encode()
        body = get(f"{address}/api/get_logs_batch", asked, "application/json")
        answer = json.loads(body)
        whole += sum(bool(run.get("logs")) for run in answer["data"])
        length += len(body)
    return whole == size.runs, length


@dataclass(frozen=True)
class Contestant:
    name: str
    server: Callable[[Path, int], list[str]]
    data: Callable[[str, Size], tuple[bool, int]]
    request: str  # what is in the address of requests for data


CONTESTANTS = [
    Contestant("lox", lox_server, lox_data, "/api/panel"),
    Contestant("TensorBoard", tensorboard_server, tensorboard_data, "timeSeries"),
    Contestant("Trackio", trackio_server, trackio_data, "/api/get_logs"),
]


def get(url: str, body: bytes | None = None, kind: str = "application/x-www-form-urlencoded") -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": kind} if body else {})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return answer.read()


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    null = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=null, stderr=null, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


# --- measuring ---


def waited(ask: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """Ask until there is an answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, json.JSONDecodeError, KeyError):
            if answer := ask():
                return answer
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        time.sleep(0.02)
    raise TimeoutError


def memory(process: subprocess.Popen[bytes]) -> float:
    """Return the memory of a process and its children in MB."""
    total, waiting = 0, [process.pid]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total / 1024


@contextlib.contextmanager
def started(contestant: Contestant, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], float]]:
    """Start a server; give its address when it answers, and how long that took."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    env = environment(folder if contestant.name == "Trackio" else None)
    start = time.perf_counter()
    with running(contestant.server(folder, port), env) as process:
        waited(lambda: get(address + "/"), process)
        yield address, process, time.perf_counter() - start


def measure(contestant: Contestant, size: Size, folder: Path, browser: bool) -> dict[str, Any]:
    with started(contestant, folder) as (address, process, up):

        def complete() -> bool:
            return contestant.data(address, size)[0]

        asked = time.perf_counter()
        waited(complete, process)
        first = time.perf_counter() - asked
        again = []
        for _ in range(3):
            asked = time.perf_counter()
            _, length = contestant.data(address, size)
            again.append(time.perf_counter() - asked)
        found = {"start": up, "data": first, "again": min(again), "kB": length / 1000, "MB": memory(process)}
    if browser:
        with started(contestant, folder) as (address, _, _):  # another one, which has read nothing yet
            found |= in_browser(contestant, address)
    return found


def in_browser(contestant: Contestant, address: str) -> dict[str, float]:
    """Return when the data of the first screen had arrived, in seconds after the address was entered."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import chromium, package

    if package():
        return {}
    last = (
        "const all = performance.getEntriesByType('resource');"
        "const e = all.filter(r => r.name.includes(arguments[0]) && r.responseEnd);"
        "return [e.length, Math.max(0, ...e.map(r => r.responseEnd)) / 1000, performance.now() / 1000]"
    )
    drawn = "const p = document.querySelector('.panel[data-loaded]'); return p ? performance.now() / 1000 : 0"
    with chromium(1280, 900) as driver:
        driver.get(address + ("/?project=bench" if contestant.name == "Trackio" else "/"))
        chart = 0.0
        deadline = time.monotonic() + 120
        seen: tuple[int, float] = (0, 0.0)
        quiet = time.monotonic()
        patience = 3 if contestant.name == "lox" else 20  # a request that is under way is not listed
        while time.monotonic() < deadline and (not seen[0] or time.monotonic() - quiet < patience):
            if contestant.name == "lox" and not chart:
                chart = driver.execute_script(drawn)
            count, end, _ = driver.execute_script(last, contestant.request)
            if (count, end) != seen:
                seen, quiet = (count, end), time.monotonic()
                if contestant.name == "Trackio" and count > 400:
                    break  # which asks for everything again each second
            time.sleep(0.005 if contestant.name == "lox" and not chart else 0.1)
        return {"page": seen[1], **({"chart": chart} if chart else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", choices=[*SIZES, []], default=list(SIZES))
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--only", choices=[c.name for c in CONTESTANTS])
    given = parser.parse_args()
    columns = {"start": ".2f", "data": ".2f", "again": ".3f", "page": ".2f", "chart": ".2f", "kB": ",.0f", "MB": ",.0f"}
    for name in given.sizes or SIZES:
        size = SIZES[name]
        print(f"\n{size}", flush=True)
        print(f"{'':14}" + "".join(f"{column:>10}" for column in columns), flush=True)
        folder = Path(tempfile.mkdtemp(prefix="lox-ui-"))
        try:
            write_lox(size, folder / "lox")
            for contestant in CONTESTANTS:
                if given.only and contestant.name != given.only:
                    continue
                own = folder / contestant.name.lower()
                if contestant.name == "TensorBoard":
                    write_tensorboard(size, own, folder / "lox")
                elif contestant.name == "Trackio":
                    own.mkdir()
                    write_trackio(size, own)
                try:
                    found = measure(contestant, size, own, not given.no_browser)
                except (TimeoutError, RuntimeError) as error:
                    print(f"{contestant.name:14}{type(error).__name__}: {error}", flush=True)
                    continue
                cells = [f"{found[c]:{form}}" if c in found else "" for c, form in columns.items()]
                row = "".join(f"{cell:>10}" for cell in cells)
                print(f"{contestant.name:14}{row}", flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
