"""How the cost of logging grows with the program, beside the same by hand; and of loggers, and of `import lox`."""

import csv
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from saving import KEYS, STEPS, logged
from timing import Row, compare

import lox

# Log calls in a loop: the goals to trace and lower spool, reduce="mean" and tap(buffer=10), and to compile the second.
SITES = {
    50: (None, None, None, None),
    100: (None, None, None, None),
    200: (1.4, 2.0, 1.6, 1.5),
}


def blocking(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a call that waits for its results and for the host."""

    def call() -> None:
        jax.block_until_ready(function(*args))
        jax.effects_barrier()

    return call


def lowering(function: Callable[..., Any], compile: bool = False) -> Callable[[], Any]:
    """Return a call that traces and lowers, as if for the first time."""

    def call() -> None:
        jax.clear_caches()
        lowered = jax.jit(function).lower(1.0)
        if compile:
            lowered.compile()

    return call


def scan(step: Callable[..., Any], start: Any, length: int = 100) -> Any:
    return jax.lax.scan(step, start, jnp.arange(length))


def sites() -> Iterator[Row]:
    for number, goals in SITES.items():
        keys = [f"k{n}" for n in range(number)]

        def with_logs(x, keys=keys):
            def step(x, i):
                for key in keys:
                    x = x * 1.01
                    lox.log({key: x}, step=i)
                return x, None

            return scan(step, x)[0]

        def stacked(x, keys=keys):
            def step(x, i):
                logs = {}
                for key in keys:
                    logs[key] = x = x * 1.01
                return x, (logs, i)

            return scan(step, x)

        def summed(x, keys=keys):
            def step(state, i):
                x, sums = state[0], dict(state[1])
                for key in keys:
                    x = x * 1.01
                    sums[key] = sums[key] + x
                return (x, sums), None

            return scan(step, (x, dict.fromkeys(keys, 0.0)))[0]

        mean = lox.spool(with_logs, reduce="mean")
        tapped = lox.tap(with_logs, lambda logs: None, buffer=10)
        name = f"{number} log sites, trace+lower:"
        yield compare(f"{name} spool", lowering(lox.spool(with_logs)), lowering(stacked), goal=goals[0])
        yield compare(f"{name} reduce='mean'", lowering(mean), lowering(summed), goal=goals[1])
        yield compare(f"{name} tap(buffer=10)", lowering(tapped), lowering(stacked), goal=goals[2])
        name = f"{number} log sites, lower+compile: reduce='mean'"
        yield compare(name, lowering(mean, compile=True), lowering(summed, compile=True), goal=goals[3])


def depth() -> Iterator[Row]:
    def nested(x, depth):
        if depth == 0:
            lox.log({"x": x})
            return jnp.sin(x)
        return jax.lax.scan(lambda x, _: (nested(x, depth - 1), None), x, None, length=2)[0]

    def by_hand(x, depth):
        if depth == 0:
            return jnp.sin(x), x
        return jax.lax.scan(lambda x, _: by_hand(x, depth - 1), x, None, length=2)

    spooled, hand = lox.spool(functools.partial(nested, depth=8)), functools.partial(by_hand, depth=8)
    yield compare("8 nested scans, trace+lower: spool", lowering(spooled), lowering(hand), goal=1.3)


def sines(x, events):
    def step(x, _):
        x = jnp.sin(x) + 1e-3
        lox.log({"x": x})
        return x, None

    return scan(step, x, events)[0]


def sines_by_hand(x, events):
    return scan(lambda x, _: (jnp.sin(x) + 1e-3,) * 2, x, events)


def runs() -> Iterator[Row]:
    short, short_by_hand = (functools.partial(f, events=1000) for f in (sines, sines_by_hand))
    for lanes in (1024, 4096):
        functions = jax.jit(lox.spool(jax.vmap(short))), jax.jit(jax.vmap(short_by_hand, out_axes=(0, 1)))
        calls = (blocking(f, jnp.arange(float(lanes))) for f in functions)
        yield compare(f"spool, run: {lanes} lanes of 1000 events", *calls, goal=1.1)
    for events in (10_000, 1_000_000 if jax.default_backend() == "cpu" else 100_000):  # 13 us each on a GPU
        functions = (functools.partial(f, events=events) for f in (lox.spool(sines), sines_by_hand))
        calls = (blocking(jax.jit(f), jnp.float32(1)) for f in functions)
        yield compare(f"spool, run: {events} events", *calls, goal=1.1)


def watched() -> Iterator[Row]:
    weights, x = jax.random.normal(jax.random.key(0), (64, 64)) * 0.1, jnp.ones((64, 64))

    def with_logs(x):
        def step(x, i):
            x = jnp.tanh(x @ weights)
            lox.log({"norm": (x**2).sum(), "max": x.max()}, step=i)
            return x, None

        return scan(step, x, 1000)[0]

    def flagged(x):
        def step(state, _):
            x, finite = state
            x = jnp.tanh(x @ weights)
            return (x, finite & jnp.isfinite((x**2).sum()) & jnp.isfinite(x.max())), None

        return scan(step, (x, True), 1000)[0]

    for name, options in {"watch": {}, "watch(last=100)": {"last": 100}}.items():
        watch = lox.nolog(lox.watch(with_logs, **options))
        calls = blocking(jax.jit(watch), x), blocking(jax.jit(flagged), x)
        yield compare(f"{name}, run: a flag in the carry", *calls, goal=1.1)


# --- loggers -------------------------------------------------------------------------------------


def trained_by_hand(x, steps=STEPS):
    """Return what `saving.training` logs: the steps, and a column for each key."""

    def step(x, i):
        x = x * 0.999 + 0.1
        return x, (i, *(x + n for n in range(len(KEYS))))

    return scan(step, x, steps)[1]


def write_csv(folder: str, run: int, columns: list[Any]) -> None:
    with open(f"{folder}/{run}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *KEYS])
        for row in zip(*columns, strict=True):
            table.writerow(row)


def write_jsonl(folder: str, run: int, columns: list[Any]) -> None:
    with open(f"{folder}/{run}.jsonl", "w") as file:
        for row in zip(*columns, strict=True):
            file.write(json.dumps(dict(zip(["step", *KEYS], row, strict=True))) + "\n")


def plain_files() -> Iterator[Row]:
    for kind, write in (lox.CsvLogger, write_csv), (lox.JsonlLogger, write_jsonl):
        for lanes in (1, 16):
            compiled = jax.jit(jax.vmap(trained_by_hand))
            with tempfile.TemporaryDirectory() as folder, kind(f"{folder}/lox") as logger:

                def by_hand(lanes=lanes, compiled=compiled, folder=folder, write=write):
                    columns = [np.asarray(x) for x in compiled(jnp.arange(lanes, dtype=jnp.float32))]
                    for run in range(lanes):
                        write(folder, run, [x[run].tolist() for x in columns])

                name = f"{kind.__name__}, tap(buffer=100), {lanes} lane{'s' * (lanes > 1)}: by hand"
                yield compare(name, logged(logger, lanes), by_hand, goal=1.5)


def saved() -> Iterator[Row]:
    for lanes, goal in (1, 8.0), (1024, 4.0):
        compiled = jax.jit(jax.vmap(functools.partial(trained_by_hand, steps=2000)))
        with tempfile.TemporaryDirectory() as folder, lox.SaveLogger(f"{folder}/lox") as logger:

            def by_hand(lanes=lanes, compiled=compiled, folder=folder):
                columns = compiled(jnp.arange(lanes, dtype=jnp.float32))
                np.savez(f"{folder}/x.npz", *map(np.asarray, columns))

            name = f"SaveLogger, tap(buffer=100), {lanes} lane{'s' * (lanes > 1)}: npz"
            yield compare(name, logged(logger, lanes, steps=2000), by_hand, goal=goal)


# --- import --------------------------------------------------------------------------------------


def imported() -> Iterator[Row]:
    """Measure what the processor does, in processes that find compiled modules, as installed ones are."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def python(program: str) -> Callable[[], Any]:
            return lambda: subprocess.run([sys.executable, "-c", program], env=environment, check=True)

        calls = python("import jax, lox"), python("import jax")
        yield compare("import jax, lox: import jax", *calls, goal=1.05, seconds=20, clock=of_children)


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def growth() -> Iterator[Row]:
    for case in (sites, depth, runs, watched, plain_files, saved, imported):
        yield from case()


CASES = {"growth": growth}
