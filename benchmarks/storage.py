"""The store beside other ways to keep logs on disk: pickle, npz, JSONL and TensorBoard's event files.

Every store gets the same blocks of events and is flushed after each. Stores that would take minutes to read get, and
lox with them, fewer events: the number stands in the name of the row.
"""

import importlib.util
import json
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from timing import Row, compare

import lox
from lox._data._logdict import Layout
from lox.store import Writer

FLUSHES, EVENTS, KEYS = 200, 20, 5  # events of each key in a flush
RUN = jax.random.key(0)


def block(start: int, events: int = EVENTS, keys: int = KEYS) -> lox.logdict:
    """Some events of each key."""
    steps = np.arange(start, start + events)
    logs = lox.logdict({f"key{i}": np.sin(steps + i).astype(np.float32) for i in range(keys)})
    logs.steps = {"step": dict.fromkeys(logs, steps)}
    logs._layouts = dict.fromkeys(logs, Layout(True, ((),), (1,), (("step", ()),)))  # as `spool` and `tap` give them
    return logs


# --- the stores: each appends blocks of one run, and reads one key of it back ---------------------


class Lox:
    def __init__(self, path: Path):
        self.path, self.writer = path, Writer(path)
        self.run = self.writer.open_run(key_data=jax.random.key_data(RUN))

    def append(self, logs: lox.logdict) -> None:
        self.writer.append(self.run, logs)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def read(self, key: str) -> np.ndarray:
        return lox.load(self.path, argnames=key)[key]


class Pickle:
    """The whole file is written again at each append."""

    def __init__(self, path: Path):
        self.file, self.blocks = path / "logs.pkl", []

    def append(self, logs: lox.logdict) -> None:
        self.blocks.append((dict(logs), logs.steps))
        with open(self.file, "wb") as file:
            pickle.dump(self.blocks, file)

    def close(self) -> None:
        pass

    def read(self, key: str) -> np.ndarray:
        with open(self.file, "rb") as file:
            return np.concatenate([values[key] for values, _ in pickle.load(file)])


class Npz:
    """One file for each append."""

    def __init__(self, path: Path):
        self.path, self.number = path, 0

    def append(self, logs: lox.logdict) -> None:
        np.savez(self.path / f"{self.number:06d}.npz", step=logs.steps["step"]["key0"], **logs)
        self.number += 1

    def close(self) -> None:
        pass

    def read(self, key: str) -> np.ndarray:
        return np.concatenate([np.load(file)[key] for file in sorted(self.path.glob("*.npz"))])


class Jsonl:
    """One line for each event."""

    def __init__(self, path: Path):
        self.path = path / "logs.jsonl"
        self.file = open(self.path, "w")  # noqa: SIM115

    def append(self, logs: lox.logdict) -> None:
        columns = {"step": logs.steps["step"]["key0"].tolist(), **{key: x.tolist() for key, x in logs.items()}}
        lines = zip(*columns.values(), strict=True)
        self.file.writelines(json.dumps(dict(zip(columns, line, strict=True))) + "\n" for line in lines)
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def read(self, key: str) -> np.ndarray:
        with open(self.path) as file:
            return np.asarray([json.loads(line)[key] for line in file], np.float32)


class TensorBoard:
    def __init__(self, path: Path):
        from tensorboard.summary import Writer as EventWriter

        self.path, self.writer = path, EventWriter(str(path))

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

        found = EventAccumulator(str(self.path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
        return np.asarray([make_ndarray(event.tensor_proto) for event in found.Tensors(key)])


PEERS: dict[str, Callable[[Path], Any]] = {"pickle": Pickle, "npz": Npz, "JSONL": Jsonl}
if importlib.util.find_spec("tensorboard"):
    PEERS["TensorBoard"] = TensorBoard


def note_what_is_missing() -> None:
    if "TensorBoard" not in PEERS:
        print("TensorBoard is not installed: its writer is not measured.", flush=True)


class Directory:
    """A temporary directory with a subdirectory for each store."""

    def __enter__(self) -> "Directory":
        self.path = Path(tempfile.mkdtemp())
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path)

    def open(self, name: str) -> Any:
        path = self.path / name
        path.mkdir()
        return Lox(path) if name.startswith("lox") else PEERS[name](path)


# --- appending -----------------------------------------------------------------------------------


def append() -> Iterator[Row]:
    """What a flush costs, and whether it costs more and more."""
    note_what_is_missing()
    tenth = FLUSHES // 10
    for name in ("lox", *PEERS):
        # In pairs: TensorBoard's threads would slow down everyone else.
        times = flush_times({"lox", name})
        last, first = (statistics.median(part) * 1e6 for part in (times[name][-tenth:], times[name][:tenth]))
        yield Row(f"store, last / first flushes: {name}", "us", last, first, 1.5 if name == "lox" else None)
        if name != "lox":
            ours, theirs = (statistics.median(times[which]) * 1e6 for which in ("lox", name))
            yield Row(f"store, one flush: {name}", "us", ours, theirs)


def flush_times(names: set[str]) -> dict[str, np.ndarray]:
    """The time of each flush, the best of some runs; the stores take turns."""
    times = {name: np.full(FLUSHES, np.inf) for name in names}
    for _ in range(5):
        with Directory() as directory:
            stores = {name: directory.open(name) for name in names}
            for i in range(FLUSHES):
                logs = block(i * EVENTS)
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
    """All events of a run with one key."""
    note_what_is_missing()
    for name in PEERS:
        events = READ_EVENTS[name]
        with Directory() as directory:
            stores = {which: directory.open(which) for which in ("lox", name)}
            for start in range(0, events, events // 20):
                logs = block(start, events // 20, keys=1)
                for store in stores.values():
                    store.append(logs)
            for store in stores.values():
                store.close()
            ours, theirs = (store.read("key0") for store in stores.values())
            np.testing.assert_array_equal(ours, theirs)
            assert len(ours) == events
            calls = [lambda store=store: store.read("key0") for store in stores.values()]
            yield compare(f"store, read {events:,}: {name}", *calls)


LANES = 1024
RUN_STEPS = {"pickle": 1000, "npz": 1000, "JSONL": 100, "TensorBoard": 100}


def read_one() -> Iterator[Row]:
    """One key of one run among many, which were written together."""
    note_what_is_missing()
    keys, run, chosen = jax.random.split(RUN, LANES), LANES // 2, "key3"
    for name in PEERS:
        steps = np.arange(RUN_STEPS[name])
        lanes = np.arange(1, LANES + 1)[:, None]
        values = {f"key{i}": np.sin(steps * lanes + i).astype(np.float32) for i in range(KEYS)}
        with Directory() as directory:
            path = directory.path / "lox"
            write_lanes(path, keys, values)
            theirs = LANES_OF[name](directory.path, values, run, chosen)

            def ours(path: Path = path) -> np.ndarray:
                return lox.load(path, keys[run], argnames=chosen)[chosen]

            np.testing.assert_array_equal(ours(), theirs())
            yield compare(f"store, 1 of {LANES} runs × {len(steps)}: {name}", ours, theirs, seconds=2)


def write_lanes(path: Path, keys: Any, values: dict[str, np.ndarray]) -> None:
    """As `vmap(spool(f))` returns them: lanes, then events; ten at a time."""
    with Writer(path) as writer:
        numbers = writer.open_runs(key_data=jax.random.key_data(keys))
        for start in range(0, values["key0"].shape[1], 10):
            logs = lox.logdict({key: x[:, start : start + 10] for key, x in values.items()})
            steps = np.broadcast_to(np.arange(start, start + 10), (LANES, 10))
            logs.steps = {"step": dict.fromkeys(logs, steps)}
            logs._layouts = dict.fromkeys(logs, Layout(True, ((),), (1,), (("step", ()),)))
            writer.append(numbers, logs)


def pickled_lanes(path: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    (path / "all.pkl").write_bytes(pickle.dumps(values))
    return lambda: pickle.loads((path / "all.pkl").read_bytes())[key][run]


def npz_lanes(path: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    for start in range(0, values[key].shape[1], 10):
        np.savez(path / f"{start:06d}.npz", **{k: x[:, start : start + 10] for k, x in values.items()})
    return lambda: np.concatenate([np.load(file)[key][run] for file in sorted(path.glob("*.npz"))])


def jsonl_lanes(path: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    with open(path / "all.jsonl", "w") as file:
        for i in range(values[key].shape[1]):
            for lane in range(LANES):
                line = {"run": lane, "step": i, **{k: float(x[lane, i]) for k, x in values.items()}}
                file.write(json.dumps(line) + "\n")

    def read() -> np.ndarray:
        with open(path / "all.jsonl") as file:
            return np.asarray([line[key] for line in map(json.loads, file) if line["run"] == run], np.float32)

    return read


def board_lanes(path: Path, values: dict[str, np.ndarray], run: int, key: str) -> Callable[[], np.ndarray]:
    # It has a directory for each run: the other 1023 do not matter to it.
    board = TensorBoard(path / "board")
    logs = lox.logdict({k: x[run] for k, x in values.items()})
    logs.steps = {"step": {k: np.arange(len(x)) for k, x in logs.items()}}
    board.append(logs)
    board.close()
    return lambda: board.read(key)


LANES_OF = {"pickle": pickled_lanes, "npz": npz_lanes, "JSONL": jsonl_lanes, "TensorBoard": board_lanes}


CASES = {"store-append": append, "store-read": read, "store-read-one": read_one}
