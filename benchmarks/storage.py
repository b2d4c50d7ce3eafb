"""The store compared with other ways to keep logs on disk: pickle, npz, JSONL and TensorBoard's event files.

Every store gets the same events and is flushed after each append. Stores that would take minutes to read get fewer
events, and so does lox: the number is in the name of the row.
"""

import importlib.util
import itertools
import json
import pickle
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from timing import Row, compare

import lox
from lox._data._logdict import Layout
from lox.store import Writer, _segment

FLUSHES, EVENTS, KEYS = 200, 20, 5  # events of each key in a flush
RUN = jax.random.key(0)


def make_logs(start: int, events: int = EVENTS, keys: int = KEYS) -> lox.logdict:
    """Make some events of each key."""
    steps = np.arange(start, start + events)
    logs = lox.logdict({f"key{i}": np.sin(steps + i).astype(np.float32) for i in range(keys)})
    logs.steps = {"step": dict.fromkeys(logs, steps)}
    logs._layouts = dict.fromkeys(logs, Layout(True, ((),), (1,), (("step", ()),)))  # as from `spool` and `tap`
    return logs


# --- the stores: each appends events of one run, and reads one key back ---------------------------


class Lox:
    def __init__(self, folder: Path):
        self.folder, self.writer = folder, Writer(folder)
        self.run = self.writer.open_run(key_data=jax.random.key_data(RUN))

    def append(self, logs: lox.logdict) -> None:
        self.writer.append(self.run, logs)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def read(self, key: str) -> np.ndarray:
        return lox.load(self.folder, argnames=key)[key]


class Pickle:
    """Writes the whole file again at each append."""

    def __init__(self, folder: Path):
        self.file, self.appended = folder / "logs.pkl", []

    def append(self, logs: lox.logdict) -> None:
        self.appended.append((dict(logs), logs.steps))
        with open(self.file, "wb") as file:
            pickle.dump(self.appended, file)

    def close(self) -> None:
        pass

    def read(self, key: str) -> np.ndarray:
        with open(self.file, "rb") as file:
            return np.concatenate([values[key] for values, _ in pickle.load(file)])


class Npz:
    """Writes one file per append."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0

    def append(self, logs: lox.logdict) -> None:
        np.savez(self.folder / f"{self.number:06d}.npz", step=logs.steps["step"]["key0"], **logs)
        self.number += 1

    def close(self) -> None:
        pass

    def read(self, key: str) -> np.ndarray:
        return np.concatenate([np.load(file)[key] for file in sorted(self.folder.glob("*.npz"))])


class Jsonl:
    """Writes one line per event."""

    def __init__(self, folder: Path):
        self.folder = folder / "logs.jsonl"
        self.file = open(self.folder, "w")  # noqa: SIM115

    def append(self, logs: lox.logdict) -> None:
        columns = {"step": logs.steps["step"]["key0"].tolist(), **{key: x.tolist() for key, x in logs.items()}}
        lines = zip(*columns.values(), strict=True)
        self.file.writelines(json.dumps(dict(zip(columns, line, strict=True))) + "\n" for line in lines)
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def read(self, key: str) -> np.ndarray:
        with open(self.folder) as file:
            return np.asarray([json.loads(line)[key] for line in file], np.float32)


class TensorBoard:
    def __init__(self, folder: Path):
        from tensorboard.summary import Writer as EventWriter

        self.folder, self.writer = folder, EventWriter(str(folder))

    def append(self, logs: lox.logdict) -> None:
        steps = logs.steps["step"]["key0"].tolist()
        for key, values in logs.items():
            for step, value in zip(steps, values.tolist(), strict=True):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def read(self, key: str) -> np.ndarray:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

        events = EventAccumulator(str(self.folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
        return np.asarray([make_ndarray(event.tensor_proto) for event in events.Tensors(key)])


PEERS: dict[str, Callable[[Path], Any]] = {"pickle": Pickle, "npz": Npz, "JSONL": Jsonl}
if importlib.util.find_spec("tensorboard"):
    PEERS["TensorBoard"] = TensorBoard


def note_what_is_missing() -> None:
    if "TensorBoard" not in PEERS:
        print("TensorBoard is not installed: its writer is not measured.", flush=True)


class Directory:
    """A temporary directory with a subdirectory for each store."""

    def __enter__(self) -> "Directory":
        self.folder = Path(tempfile.mkdtemp())
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def open(self, name: str) -> Any:
        folder = self.folder / name
        folder.mkdir()
        return Lox(folder) if name.startswith("lox") else PEERS[name](folder)


# --- appending -----------------------------------------------------------------------------------


def append() -> Iterator[Row]:
    """Measure what a flush costs, and whether flushes get slower."""
    note_what_is_missing()
    tenth = FLUSHES // 10
    for name in ("lox", *PEERS):
        # In pairs, because TensorBoard's threads slow down all others.
        times = flush_times({"lox", name})
        last, first = (statistics.median(part) * 1e6 for part in (times[name][-tenth:], times[name][:tenth]))
        yield Row(f"store, last / first flushes: {name}", "us", last, first, 1.5 if name == "lox" else None)
        if name != "lox":
            medians = (statistics.median(times[which]) * 1e6 for which in ("lox", name))
            yield Row(f"store, one flush: {name}", "us", *medians)


def flush_times(names: set[str]) -> dict[str, np.ndarray]:
    """Return the time of each flush, the best of several rounds in which the stores take turns."""
    times = {name: np.full(FLUSHES, np.inf) for name in names}
    for _ in range(5):
        with Directory() as directory:
            stores = {name: directory.open(name) for name in names}
            for i in range(FLUSHES):
                logs = make_logs(i * EVENTS)
                for name, store in stores.items():
                    start = time.perf_counter()
                    store.append(logs)
                    times[name][i] = min(times[name][i], time.perf_counter() - start)
            for store in stores.values():
                store.close()
    return times


# --- reading -------------------------------------------------------------------------------------

READ_EVENTS = {"pickle": 2_000_000, "npz": 2_000_000, "JSONL": 200_000, "TensorBoard": 20_000}


def read() -> Iterator[Row]:
    """Read all events of a run with one key."""
    note_what_is_missing()
    for name in PEERS:
        events = READ_EVENTS[name]
        with Directory() as directory:
            stores = {which: directory.open(which) for which in ("lox", name)}
            for start in range(0, events, events // 20):
                logs = make_logs(start, events // 20, keys=1)
                for store in stores.values():
                    store.append(logs)
            for store in stores.values():
                store.close()
            lox_values, peer_values = (store.read("key0") for store in stores.values())
            np.testing.assert_array_equal(lox_values, peer_values)
            assert len(lox_values) == events
            calls = [lambda store=store: store.read("key0") for store in stores.values()]
            yield compare(f"store, read {events:,}: {name}", *calls)


LANES = 1024
RUN_STEPS = {"pickle": 1000, "npz": 1000, "JSONL": 100, "TensorBoard": 100}


def read_one() -> Iterator[Row]:
    """Read one key of one run among many that were written together."""
    note_what_is_missing()
    prng_keys, run, chosen = jax.random.split(RUN, LANES), LANES // 2, "key3"
    for name in PEERS:
        steps = np.arange(RUN_STEPS[name])
        lanes = np.arange(1, LANES + 1)[:, None]
        values = {f"key{i}": np.sin(steps * lanes + i).astype(np.float32) for i in range(KEYS)}
        with Directory() as directory:
            folder = directory.folder / "lox"
            write_lanes(folder, prng_keys, values)
            read_peer = LANES_OF[name](directory.folder, values, run, chosen)

            def read_lox(folder: Path = folder) -> np.ndarray:
                return lox.load(folder, prng_keys[run], argnames=chosen)[chosen]

            np.testing.assert_array_equal(read_lox(), read_peer())
            yield compare(f"store, 1 of {LANES} runs × {len(steps)}: {name}", read_lox, read_peer, seconds=2)


def write_lanes(folder: Path, prng_keys: Any, values: dict[str, np.ndarray]) -> None:
    """Write lanes, then events, as `vmap(spool(f))` returns them, ten events at a time."""
    with Writer(folder) as writer:
        numbers = writer.open_runs(key_data=jax.random.key_data(prng_keys))
        for start in range(0, values["key0"].shape[1], 10):
            logs = lox.logdict({key: x[:, start : start + 10] for key, x in values.items()})
            steps = np.broadcast_to(np.arange(start, start + 10), (LANES, 10))
            logs.steps = {"step": dict.fromkeys(logs, steps)}
            logs._layouts = dict.fromkeys(logs, Layout(True, ((),), (1,), (("step", ()),)))
            writer.append(numbers, logs)


def pickled_lanes(folder: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    (folder / "all.pkl").write_bytes(pickle.dumps(values))
    return lambda: pickle.loads((folder / "all.pkl").read_bytes())[key][run]


def npz_lanes(folder: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    for start in range(0, values[key].shape[1], 10):
        np.savez(folder / f"{start:06d}.npz", **{k: x[:, start : start + 10] for k, x in values.items()})
    return lambda: np.concatenate([np.load(file)[key][run] for file in sorted(folder.glob("*.npz"))])


def jsonl_lanes(folder: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    with open(folder / "all.jsonl", "w") as file:
        for i in range(values[key].shape[1]):
            for lane in range(LANES):
                line = {"run": lane, "step": i, **{k: float(x[lane, i]) for k, x in values.items()}}
                file.write(json.dumps(line) + "\n")

    def read() -> np.ndarray:
        with open(folder / "all.jsonl") as file:
            return np.asarray([line[key] for line in map(json.loads, file) if line["run"] == run], np.float32)

    return read


def board_lanes(folder: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    # TensorBoard has a directory for each run, so the other 1023 do not matter.
    board = TensorBoard(folder / "board")
    logs = lox.logdict({k: x[run] for k, x in values.items()})
    logs.steps = {"step": {k: np.arange(len(x)) for k, x in logs.items()}}
    board.append(logs)
    board.close()
    return lambda: board.read(key)


# --- what checksums cost ---------------------------------------------------------------------------


def without_checksums(call: Callable[[], Any]) -> Callable[[], Any]:
    """Make all checksums zeros, which cost nothing to compute or to compare."""
    real = _segment.checksums

    def zeros(columns: Any) -> bytes:
        return b"0" * sum(8 * -(-len(data) // _segment.BLOCK) for data in columns)

    def bare() -> None:
        _segment.checksums = zeros
        call()
        _segment.checksums = real

    return bare


def checksums() -> Iterator[Row]:
    """Measure a flush and a load with and without checksums, in turns."""
    for name, logs in (("one flush", make_logs(0)), ("one flush of 100,000", make_logs(0, 100_000))):
        with Directory() as directory:
            store, bare = directory.open("lox"), directory.open("lox without")
            flush = lambda store=store, logs=logs: store.append(logs)  # noqa: E731
            flush_bare = without_checksums(lambda bare=bare, logs=logs: bare.append(logs))
            yield compare(f"store, {name}: without checksums", flush, flush_bare, unit="us", goal=1.05)
            store.close()
            bare.close()
    with Directory() as directory:
        store, bare = directory.open("lox"), directory.open("lox without")
        for start in range(0, 2_000_000, 100_000):
            logs = make_logs(start, 100_000, keys=1)
            store.append(logs)
            without_checksums(lambda logs=logs: bare.append(logs))()
        store.close()
        bare.close()
        read, read_bare = (lambda: store.read("key0")), without_checksums(lambda: bare.read("key0"))
        yield compare("store, read 2,000,000: without checksums", read, read_bare, goal=1.05)


# --- many runs in a directory ------------------------------------------------------------------------

FEW_RUNS, MANY_RUNS = 100, 10_000


def write_runs(folder: Path, count: int) -> None:
    """Write runs as `count` programs would, one after the other."""
    for seed in range(count):
        with Writer(folder) as writer:
            writer.append(writer.open_run(None, [0, seed], "threefry2x32", {"lr": seed / 10}), make_logs(0))


def write_npz(folder: Path, count: int) -> None:
    folder.mkdir()
    for seed in range(count):
        np.savez(folder / f"{seed}.npz", **make_logs(0))


def once(call: Callable[[], Any]) -> float:
    """Return the milliseconds of one call, the best of a few."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def runs_in(folder: Path, count: int) -> dict[str, float]:
    """Measure what is done with a directory of so many runs, in ms."""
    fresh = itertools.count(count)
    prng_key = jax.random.key(count // 2)
    all_keys = np.stack([np.zeros(count), np.arange(count)], 1).astype(np.uint32)

    def open_one() -> None:
        with Writer(folder) as writer:
            writer.open_run(None, [1, next(fresh)], "threefry2x32")

    return {
        "open one more": once(open_one),
        "load a key of one": once(lambda: lox.load(folder, prng_key, argnames="key3")),
        "list": once(lambda: lox.runs(folder)),
        "load a key of all": once(lambda: lox.load(folder, all_keys, argnames="key3")),
    }


def many_runs() -> Iterator[Row]:
    """Measure a directory with 10,000 runs against one with 100, against npz, and compacted."""
    with Directory() as directory:
        times, wrote = {}, 0.0
        for count in (FEW_RUNS, MANY_RUNS):
            start = time.perf_counter()
            write_runs(directory.folder / f"{count}", count)
            wrote = time.perf_counter() - start
            write_npz(directory.folder / f"npz{count}", count)
            times[count] = runs_in(directory.folder / f"{count}", count)
        for what, few in times[FEW_RUNS].items():
            of_all = what in ("list", "load a key of all")
            per = MANY_RUNS / FEW_RUNS if of_all else 1
            name = f"store, {MANY_RUNS:,} runs, {what}: {FEW_RUNS} runs" + ", each" * of_all
            yield Row(name, "ms", times[MANY_RUNS][what] / per, few)
        npz = directory.folder / f"npz{MANY_RUNS}"
        load_one = lambda: np.load(npz / "5000.npz")["key3"]  # noqa: E731
        load_all = lambda: [np.load(file)["key3"] for file in npz.iterdir()]  # noqa: E731
        for what, load in (("load a key of one", load_one), ("load a key of all", load_all)):
            yield Row(f"store, {MANY_RUNS:,} runs, {what}: npz", "ms", times[MANY_RUNS][what], once(load))
        folder = directory.folder / f"{MANY_RUNS}"
        files = sum(1 for file in folder.rglob("*") if file.is_file())
        start = time.perf_counter()
        lox.store.compact(folder)
        took = time.perf_counter() - start
        left = sum(1 for file in folder.rglob("*") if file.is_file())
        yield Row(f"store, {MANY_RUNS:,} runs, files: compacted", "files", left, files)
        yield Row(f"store, {MANY_RUNS:,} runs, compact: to write them", "s", took, wrote)
        for what, compacted in runs_in(folder, MANY_RUNS).items():
            yield Row(f"store, {MANY_RUNS:,} runs, compacted, {what}: not", "ms", compacted, times[MANY_RUNS][what])


def sweep() -> Iterator[Row]:
    """Measure 4,096 lanes with the same PRNG keys under one, two and three configs."""
    prng_keys = jax.vmap(jax.random.key)(np.arange(4096))
    words = np.asarray(jax.random.key_data(prng_keys))
    times: list[dict[str, float]] = []
    with Directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)  # which of several runs of a PRNG key is loaded
        folder = directory.folder / "lox"
        for lr in (0.1, 0.01, 0.001):
            values = {f"key{i}": np.sin(np.arange(20 * 4096) + i).reshape(20, 4096) for i in range(KEYS)}
            with Writer(folder) as writer:
                runs = writer.open_runs(None, words, "threefry2x32", [{"lr": lr}] * 4096)
                writer.append(runs, lox.logdict.from_arrays(values, steps={"step": np.arange(20)}, lanes=1))
            times.append(
                {
                    "runs": once(lambda: lox.runs(folder)),
                    "by config": once(lambda lr=lr: lox.load(folder, prng_keys, "key3", where={"lr": lr})),
                    "by key": once(lambda: lox.load(folder, prng_keys, "key3")),
                    "one by key": once(lambda: lox.load(folder, prng_keys[7], "key3")),
                }
            )
        for what in times[0]:
            for n in (1, 2):
                yield Row(f"store, 4,096 lanes × {n + 1}, {what}: × 1", "ms", times[n][what], times[0][what])
        files = [file for file in folder.rglob("*") if file.is_file()]
        yield Row("store, 4,096 lanes × 3: files", "files", len(files), 12_288)


LANES_OF = {"pickle": pickled_lanes, "npz": npz_lanes, "JSONL": jsonl_lanes, "TensorBoard": board_lanes}


CASES = {
    "store-append": append,
    "store-read": read,
    "store-read-one": read_one,
    "store-checksums": checksums,
    "store-runs": many_runs,
    "store-sweep": sweep,
}
