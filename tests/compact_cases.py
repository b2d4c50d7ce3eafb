"""Stores of all kinds for tests of `compact`, and everything that can be seen of one."""

import os
import time
import warnings
import zlib

import jax
import ml_dtypes
import numpy as np

import lox
from lox.store import KeyData, Reader, Writer, _open

DTYPES = [np.float32, ml_dtypes.bfloat16, np.bool_, np.complex64, np.int8, np.float16]


def abandon(writer):
    """Leave a writer as a kill would: what was flushed is there, and it was never closed."""
    writer.flush()
    for segment in writer._open_segments():
        segment.abandon()
    writer.closed = True
    _open.unregister(writer.flush)
    for file in writer.group.iterdir():  # a while ago
        os.utime(file, (time.time() - 3600,) * 2)


# --- what can be seen ---


def exact(tree):
    """Return a value that is equal for the same bits only."""
    if isinstance(tree, dict):
        return [(repr(key), exact(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree).__name__, [exact(value) for value in tree]
    if tree is None:
        return None
    if isinstance(tree, jax.Array) and jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return str(tree.dtype), exact(np.asarray(jax.random.key_data(tree)))
    array = np.asarray(tree)
    return str(array.dtype), array.shape, array.tobytes()


def exact_logs(logs):
    steps = {name: dict(by_key) for name, by_key in logs.steps.items()}
    layouts = [(key, repr(logs._layouts[key].flags)) for key in logs]
    return exact(dict(logs)), exact(steps), exact(dict(logs.valid)), layouts


def hash_of(text):
    return zlib.crc32(text.encode(errors="replace"))


def everything(path, each=True):
    """Return all that `lox.runs`, `lox.load` and a first poll say, warnings included; also of each run by itself."""
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = lox.runs(path)
        for run in table:
            about = (run.name, run.key_data, run.key_impl, repr(run.config), run.opened, run.attempts, run.events)
            seen.append((about, run.first, run.last, run.state, run.resumed))
            if not each or (len(table) > 20 and table[0] is not run and hash_of(run.name) % 8):
                continue  # all at once below
            for options in ({}, {"wall": True}, {"attempts": "all"}, {"argnames": ["a", "e*"]}):
                seen.append((run.name, exact_logs(lox.load(path, run.name, **options))))
        seen.append(repr(table))
        keys = {
            run.key_data: run.key for run in table if run.key_data is not None and hash_of(run.name) % 8 == 0 and each
        }
        seen += [(data, exact_logs(lox.load(path, key))) for data, key in keys.items()]
        loaded = lox.load(path)
        if isinstance(loaded, lox.store.Runs):
            seen.append([(name, exact_logs(logs)) for name, logs in loaded.items()])
            seen.append(exact_logs(loaded.stack()))
            seen.append(repr(loaded.configs))
        seen.append([(name, exact_logs(logs)) for name, logs in Reader(path).poll().items()])
    return seen, [str(w.message) for w in caught]


# --- stores ---


def simple(path, groups=4, events=3):
    """A few runs, each in a group of its own."""
    for n in range(groups):
        with Writer(path) as writer:
            run = writer.open_run(f"r{n}", config={"n": n})
            for i in range(events):
                writer.append(run, lox.logdict({"x": np.float64(100 * n + i)}, steps={"step": {"x": i}}))


def random_store(path, rng, groups):
    """Groups of all kinds: lanes, dtypes, modes, ends; some were never closed."""
    keys = [[0, n] for n in range(5)]
    for _ in range(groups):
        some_group(path, rng, keys)


def some_group(path, rng, keys, living=False):
    writer = Writer(path, config={"group": int(rng.integers(3))}, process=int(rng.integers(2)))
    runs = []
    for _ in range(rng.integers(1, 4)):
        runs += open_some(writer, rng, keys)
    for _ in range(rng.integers(0, 6)):
        append_some(writer, rng, runs)
        if rng.random() < 0.3:
            writer.flush()
    if rng.random() < 0.3:
        ended = [run for run in runs if rng.random() < 0.5]
        writer.end_runs(ended, [None, "ValueError: boom"][rng.integers(2)])
    if living:
        return writer
    if rng.random() < 0.3:
        abandon(writer)
    else:
        writer.close()
    return None


def open_some(writer, rng, keys):
    mode = ["new", "append", "append", "overwrite"][rng.integers(4)]
    many = 1 if rng.random() < 0.5 else int(rng.choice([2, 3, 70]))
    config = {"lr": [0.1, float("nan"), float("inf")][rng.integers(3)], "deep": {"x": [1, None, "ü\ud800"]}}
    configs = [config] * many if rng.random() < 0.5 else None
    there = [record for record in writer._catalog.records.values() if record.entries[0].key_data]
    if there and rng.random() < 0.25:
        data = np.asarray([there[rng.integers(len(there))].entries[0].key_data], np.uint32)
        try:
            return writer.open_runs(key_data=data, mode="append", resumed=[("step", int(rng.integers(5)))]).tolist()
        except lox.RunNotFoundError:
            pass
    if many == 70:
        return writer.open_runs(key_data=[[1, n] for n in range(70)], configs=configs, mode=mode).tolist()
    if rng.random() < 0.5:
        data = [keys[n] for n in rng.choice(len(keys), many, replace=False)]
        return writer.open_runs(key_data=data, configs=configs, mode=mode).tolist()
    return writer.open_runs([f"n{n}" for n in rng.choice(6, many)], configs=configs, mode=mode).tolist()


def values(rng, dtype, shape):
    if dtype is np.complex64:
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return (rng.normal(size=shape) * 3).astype(dtype)


def append_some(writer, rng, runs):
    start, steps = int(rng.integers(5)), int(rng.integers(0, 4))
    dtype = DTYPES[rng.integers(len(DTYPES))]
    number = np.arange(start, start + steps)
    if len(runs) > 1 and rng.random() < 0.6:
        chosen = np.asarray(runs[rng.integers(len(runs)) :] if rng.random() < 0.5 else runs)
        chosen = rng.permutation(chosen) if rng.random() < 0.2 else chosen
        shape = (steps, len(chosen))
        arrays = {
            "a": values(rng, np.float32, shape),
            "b": values(rng, dtype, (*shape, 2)),
            "c": {"d": rng.random(shape)},
        }
        valid = rng.random(shape) < rng.choice([0.1, 0.9]) if rng.random() < 0.5 else None
        logs = lox.logdict.from_arrays(arrays, steps={"step": number}, valid=valid, lanes=1)
        writer.append(chosen, logs)
        return
    run = runs[rng.integers(len(runs))]
    kind = rng.integers(5)
    if kind == 0:
        writer.append(
            run, {"key": KeyData(rng.integers(0, 9, 2).astype(np.uint32), "threefry2x32"), "a": np.float32(1)}
        )
    elif kind == 1:  # a key that changes its shape
        writer.append(run, {"a": values(rng, np.float32, [(), (2,)][rng.integers(2)]), "e1": np.int64(3)})
    elif kind == 2:  # maybe without events
        logs = lox.logdict.from_arrays({"empty": np.zeros(steps, np.float32), "none": np.zeros((steps, 0))})
        writer.append(run, logs)
    elif kind == 3:  # lanes of one run
        valid = rng.random((steps, 3)) < 0.5
        arrays = {"lanes": values(rng, dtype, (steps, 3))}
        writer.append(run, lox.logdict.from_arrays(arrays, steps={"step": number}, valid=valid, lanes=1))
    else:
        arrays = {"b": values(rng, dtype, (steps, 2)), "e2": {"x": [rng.random(steps), (rng.random(steps),)]}}
        order = arrays if rng.random() < 0.5 else dict(reversed(arrays.items()))
        writer.append(run, lox.logdict.from_arrays(order, steps={"step": number}))
