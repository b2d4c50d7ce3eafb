"""`SaveLogger` end to end: from a compiled training to events that others can read."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from timing import Row, compare

import lox

STEPS, FLUSHES = 10_000, 200
KEYS = ("loss", "accuracy", "grad_norm")


def training(x: Any, steps: int = STEPS) -> Any:
    """Do little but log, so that logging is what is measured."""

    def step(x, i):
        x = x * 0.999 + 0.1
        lox.log({key: x + n for n, key in enumerate(KEYS)}, step=i)
        return x, None

    return jax.lax.scan(step, x, jnp.arange(steps))[0]


def hand_over(logger: lox.Logger) -> None:
    """Do what `flush` does, except waiting for the disk, which differs between machines."""
    logger._pipeline.catch_up()
    logger.pause()


def logged(logger: lox.Logger, lanes: int, steps: int = STEPS) -> Callable[[], None]:
    """Return a function that trains, and returns when others can read every event."""
    states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), lanes))
    xs = jnp.arange(lanes, dtype=jnp.float32)
    compiled = jax.jit(jax.vmap(lambda state, x: logger.tap(training, state, buffer=100)(x, steps)))

    def call() -> None:
        compiled(states, xs)
        hand_over(logger)

    return call


def counted(lanes: int) -> Callable[[], None]:
    """Return a function that throws the same events away on the host."""
    count = 0

    def receive(logs: lox.logdict) -> None:
        nonlocal count
        count += len(logs["loss"])

    xs = jnp.arange(lanes, dtype=jnp.float32)
    compiled = jax.jit(lox.tap(jax.vmap(training), receive, buffer=100))

    def call() -> None:
        nonlocal count
        count = 0
        compiled(xs)
        jax.effects_barrier()
        assert count == STEPS

    return call


def throughput() -> Iterator[Row]:
    """Measure nanoseconds per value of one lane; 1000 / x is millions of events per second."""
    for lanes in (1, 64):
        folder = tempfile.mkdtemp()
        with lox.SaveLogger(folder) as saver, lox.JsonlLogger(f"{folder}/jsonl") as plain:
            save = logged(saver, lanes)
            events = STEPS * lanes * len(KEYS)
            name = f"SaveLogger, tap(buffer=100), {lanes} lane{'s' * (lanes > 1)}"
            options: dict[str, Any] = {"unit": "ns", "count": events}
            yield compare(f"{name}: thrown away", save, counted(lanes), **options)
            if lanes == 1:  # with more, it takes seconds
                yield compare(f"{name}: JsonlLogger", save, logged(plain, lanes), **options)
        shutil.rmtree(folder)


def flushes() -> Iterator[Row]:
    """Measure whether flushes get slower as the run gets longer."""
    times = [float("inf")] * FLUSHES
    for _ in range(3):
        folder = tempfile.mkdtemp()
        with lox.SaveLogger(folder) as logger:
            state = logger.init(jax.random.key(0))
            compiled = jax.jit(lambda state, x: logger.tap(lambda x: training(x, 100), state, buffer=100)(x))
            compiled(state, 0.0)
            for i in range(FLUSHES):
                compiled(state, 0.0)
                jax.effects_barrier()
                start = time.perf_counter()
                hand_over(logger)
                times[i] = min(times[i], time.perf_counter() - start)
        shutil.rmtree(folder)
    tenth = FLUSHES // 10
    last, first = (statistics.median(part) * 1e6 for part in (times[-tenth:], times[:tenth]))
    yield Row(f"SaveLogger, last / first of {FLUSHES} flushes", "us", last, first, 1.5)


CASES = {"save": throughput, "save-flush": flushes}
