"""`SaveLogger` from end to end: from a compiled training to events that others can read."""

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
    """A loop that does little but log, so that what is measured is the logging."""

    def step(x, i):
        x = x * 0.999 + 0.1
        lox.log({key: x + n for n, key in enumerate(KEYS)}, step=i)
        return x, None

    return jax.lax.scan(step, x, jnp.arange(steps))[0]


def hand_over(logger: lox.Logger) -> None:
    """What `flush` does, but for waiting for the disk, of which every machine has another."""
    logger._pipeline.catch_up()
    logger.pause()


def logged(logger: lox.Logger, lanes: int) -> Callable[[], None]:
    """A call trains and returns when every event can be read by others."""
    states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), lanes))
    xs = jnp.arange(lanes, dtype=jnp.float32)
    run = jax.jit(jax.vmap(lambda state, x: logger.tap(training, state, buffer=100)(x)))

    def call() -> None:
        run(states, xs)
        hand_over(logger)

    return call


def counted(lanes: int) -> Callable[[], None]:
    """The same events, thrown away on the host."""
    count = 0

    def receive(logs: lox.logdict) -> None:
        nonlocal count
        count += len(logs["loss"])

    xs = jnp.arange(lanes, dtype=jnp.float32)
    run = jax.jit(lox.tap(jax.vmap(training), receive, buffer=100))

    def call() -> None:
        nonlocal count
        count = 0
        run(xs)
        jax.effects_barrier()
        assert count == STEPS

    return call


def throughput() -> Iterator[Row]:
    """Nanoseconds for one value of one lane; a thousand divided by it is millions of events per second."""
    for lanes in (1, 64):
        path = tempfile.mkdtemp()
        with lox.SaveLogger(path) as saver, lox.JsonlLogger(f"{path}/jsonl") as plain:
            save = logged(saver, lanes)
            events = STEPS * lanes * len(KEYS)
            name = f"SaveLogger, tap(buffer=100), {lanes} lane{'s' * (lanes > 1)}"
            options: dict[str, Any] = {"unit": "ns", "count": events}
            yield compare(f"{name}: thrown away", save, counted(lanes), **options)
            if lanes == 1:  # with more of them it takes seconds
                yield compare(f"{name}: JsonlLogger", save, logged(plain, lanes), **options)
        shutil.rmtree(path)


def flushes() -> Iterator[Row]:
    """Whether a flush costs more as the run gets longer."""
    times = [float("inf")] * FLUSHES
    for _ in range(3):
        path = tempfile.mkdtemp()
        with lox.SaveLogger(path) as logger:
            state = logger.init(jax.random.key(0))
            run = jax.jit(lambda state, x: logger.tap(lambda x: training(x, 100), state, buffer=100)(x))
            run(state, 0.0)
            for i in range(FLUSHES):
                run(state, 0.0)
                jax.effects_barrier()
                start = time.perf_counter()
                hand_over(logger)
                times[i] = min(times[i], time.perf_counter() - start)
        shutil.rmtree(path)
    tenth = FLUSHES // 10
    last, first = (statistics.median(part) * 1e6 for part in (times[-tenth:], times[:tenth]))
    yield Row(f"SaveLogger, last / first of {FLUSHES} flushes", "us", last, first, 1.5)


CASES = {"save": throughput, "save-flush": flushes}
