"""lox beside other ways of logging: the same training with each, as ratios to that by hand; and where they work.

Oryx works with JAX 0.5.0 and with none that is newer, which is too old for lox. It has an environment of its own, and
is measured against the program by hand there.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import jax
import training
import ways
from timing import Table, take_turns
from ways import Way

HERE = Path(__file__).parent
WITH_ORYX = HERE.parent / ".nox" / "oryx" / "bin" / "python"  # the session `oryx` makes it
SECONDS = 15.0  # for each kind of time, shared by the ways that take turns
PATIENCE = 300  # with a process
Numbers = dict[str, Any]  # "run" and "lower" in seconds, "ops"; "values": "right", or what is wrong


# --- measuring, in one process ---------------------------------------------------------------------


def count_instructions(compiled: Any) -> int:
    return len(re.findall(r"= \S+ ([a-z][\w-]*)\(", compiled.as_text()))


def measure(kinds: tuple[type[Way], ...], lanes: int, seconds: float) -> dict[str, Numbers]:
    """Measure those of these ways that give the right values, in turns with the program by hand."""
    prng_key = jax.random.key(0)
    batches = training.data(prng_key)
    params = jax.vmap(training.init)(jax.random.split(prng_key, lanes)) if lanes else training.init(prng_key)
    args = params, batches

    def calling(way: Way, function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with way.listening():
                return jax.block_until_ready(function(*args))

        return call

    def lowering(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: jax.jit(lambda *args: function(*args)).lower(*args)

    found: dict[str, Numbers] = {}
    expected: ways.Logs = {}
    calls, lowers = {}, {}
    for kind in (ways.ByHand, *kinds):
        found[kind.name] = numbers = {}
        try:
            way = kind(lanes)
            function = way.training()
            single = kind is not ways.PythonLoop
            call = calling(way, jax.jit(function) if single else function)
            verdicts = []
            for _ in range(3):  # it may differ from call to call
                logs = way.logs(call())
                expected = expected or logs  # by hand comes first
                verdicts.append(ways.verdict(expected, logs))
            numbers["values"] = next((verdict for verdict in verdicts if verdict != "right"), "right")
            if single:
                numbers["ops"] = count_instructions(jax.jit(function).lower(*args).compile())
        except Exception as error:
            numbers["values"] = ways.reason(error)
        if numbers["values"] == "right":
            calls[kind.name] = call
            if single:
                lowers[kind.name] = lowering(function)
    for quantity, functions, clock in ("run", calls, time.perf_counter), ("lower", lowers, time.process_time):
        best = take_turns(list(functions.values()), seconds=seconds, clock=clock)
        for name, least in zip(functions, best, strict=True):
            found[name][quantity] = least
    return found


# --- in other processes ----------------------------------------------------------------------------


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def output_of(kind: type[Way], script: str, *arguments: str, **environment: str) -> tuple[list[Any], str]:
    """Run a script of this folder where that way works: return the lines of JSON that it prints, and why it failed."""
    python = WITH_ORYX if kind is ways.Oryx else Path(sys.executable)
    if not python.exists():
        return [], "not installed: it needs JAX 0.5.0, in an environment that `.venv/bin/nox -s oryx` makes"
    command = [python, "-W", "ignore", HERE / script, *arguments]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=os.environ | environment) as process:
        try:
            printed, errors = process.communicate(timeout=PATIENCE)
            why = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1] if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            why = f"it does not end, at least not in {PATIENCE} s"
    return [json.loads(line) for line in printed.splitlines() if line[:1] in "[{"], why


def measure_oryx() -> None:
    """What happens where Oryx works."""
    found = {str(lanes): measure((ways.Oryx,), lanes, SECONDS / 3) for lanes in LANES}
    print(json.dumps({"versions": versions("oryx", "jax"), "numbers": found}))


# --- the table of ratios ---------------------------------------------------------------------------

LANES = (0, training.SEEDS)
QUANTITIES = {"run": "run", "lower": "trace+lower", "ops": "instructions"}


def ratio(numbers: Numbers, by_hand: Numbers, quantity: str) -> str:
    if quantity not in numbers or numbers["values"] != "right":
        return "-"
    value = numbers[quantity] / by_hand[quantity]
    return f"{value:.{2 if value < 2 else 1 if value < 10 else 0}f}"


def absolute(numbers: Numbers, quantity: str) -> str:
    return f"{numbers[quantity]:,}" if quantity == "ops" else f"{1e3 * numbers[quantity]:.3g} ms"


def table() -> Iterator[Table]:
    groups = {"beside the result": ways.RETURNED, "while the program runs": ways.STREAMED}
    packages = dict.fromkeys(kind.package for kinds in groups.values() for kind in kinds if kind is not ways.Oryx)
    named = [f"{package} {number}" for package, number in versions(*packages).items()]
    # Those that stream take so much longer that the others would have few turns among them.
    found = {}
    for title, kinds in groups.items():
        here = tuple(kind for kind in kinds if kind is not ways.Oryx)
        found[title] = {str(lanes): measure(here, lanes, SECONDS) for lanes in LANES}
    lines, why = output_of(ways.Oryx, "peers.py")
    if lines:
        found["oryx"] = lines[0]["numbers"]
        named.append(
            "oryx {oryx}, measured with jax {jax} against the program by hand there".format(**lines[0]["versions"])
        )
    else:
        found["oryx"] = {str(lanes): {"by hand": {}, "oryx": {"values": why}} for lanes in LANES}

    hand = [found["beside the result"][str(lanes)]["by hand"] for lanes in LANES]
    rows = [["by hand", *(absolute(numbers, quantity) for quantity in QUANTITIES for numbers in hand)]]
    for title, kinds in groups.items():
        rows.append([f"- {title}"])
        for kind in kinds:
            both = found["oryx" if kind is ways.Oryx else title].values()
            cells = [ratio(x[kind.name], x["by hand"], quantity) for quantity in QUANTITIES for x in both]
            wrong = dict.fromkeys(x[kind.name]["values"] for x in both if x[kind.name]["values"] != "right")
            rows.append([kind.name, *cells, f"no: {'; '.join(wrong)}" if wrong else "right"])
    yield Table(
        "The same training, logged in several ways: time and instructions as ratios to the program by hand",
        ["", *(head for title in QUANTITIES.values() for head in (title, f"×{training.SEEDS}")), "values"],
        rows,
        [f"×{training.SEEDS}: as many seeds under vmap", *named],
        found,
    )


# --- the table of situations -----------------------------------------------------------------------

TRIED: tuple[type[Way], ...] = (
    *(ways.Spool, ways.Tap, ways.Oryx, ways.Linen, ways.Clu, ways.JaxTap),
    *(ways.Callback, ways.IoCallback, ways.Print),
)


def right() -> Iterator[Table]:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    columns: dict[str, dict[str, tuple[str, str]]] = {}
    for kind in TRIED:
        lines, why = output_of(kind, "right.py", kind.name, **devices)
        columns[kind.name] = {"": ("error", why), **{name: (found, note) for name, found, note in lines}}
    names = list(max(columns.values(), key=len))[1:]
    notes: list[str] = []

    def cell(kind: str, name: str) -> str:
        found, note = columns[kind].get(name, columns[kind][""])
        if note and note not in notes:
            notes.append(note)
        return f"{'by hand' if note and found == 'right' else found}{f' [{notes.index(note) + 1}]' if note else ''}"

    yield Table(
        "What is logged in these places: do all values come out, once, right and in order?",
        ["", *columns],
        [[name, *(cell(kind, name) for kind in columns)] for name in names],
        [f"[{n}] {note}" for n, note in enumerate(notes, 1)],
    )


CASES = {"peers": table, "peers-right": right}


if __name__ == "__main__":
    measure_oryx()
