"""Memory, precision and order of reductions, intervals and buffers."""

import gc
import queue
import resource
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lox

EVENTS = 100_000


def big(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        x = x * 0.999 + 0.1
        lox.log({"x": x}, step=i)
        return x, None

    return lax.scan(step, x, jnp.arange(EVENTS))[0]


def megabytes(fun: Any) -> float:
    analysis = jax.jit(fun).lower(jnp.zeros(256)).compile().memory_analysis()
    return (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 1e6


def test_stacking_needs_memory_for_all_events() -> None:
    assert 102 < megabytes(lox.spool(big)) < 106


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "sum", "min", "max", "first", "last", "count", "std", "var"])
def test_a_reduction_needs_no_more_memory_for_more_events(how: str) -> None:
    assert megabytes(lox.spool(big, reduce=how)) < 2


def test_with_an_interval_only_the_kept_events_exist() -> None:
    assert megabytes(lox.spool(big, interval=1000)) < 4
    nested = lambda x: lax.scan(lambda x, _: (big(x), None), x, None, length=3)[0]  # noqa: E731
    assert megabytes(lox.spool(nested, interval=1000)) < 4
    assert megabytes(lox.spool(jax.jit(big), interval=1000)) < 4
    assert megabytes(lox.tap(big, lambda logs: None, interval=1000, buffer=10)) < 4


def test_a_buffer_needs_memory_for_its_events_only() -> None:
    assert megabytes(lox.tap(big, lambda logs: None, buffer=100)) < 2


@pytest.mark.slow
def test_the_mean_of_many_events_is_exact() -> None:
    xs = np.random.default_rng(0).uniform(0.9, 1.1, EVENTS).astype(np.float32)

    def f(xs: Any) -> None:
        lax.scan(lambda c, x: (c, lox.log({"x": x, "y": -1000 * x}) and None), 0, xs)

    _, logs = jax.jit(lox.spool(f, reduce="mean"))(xs)
    exact = xs.astype(np.float64).mean()
    assert abs(float(logs["x"]) / exact - 1) < 1e-6
    _, logs = jax.jit(lox.spool(f, reduce="sum"))(xs)
    assert abs(float(logs["x"]) / (exact * EVENTS) - 1) < 1e-6
    _, logs = jax.jit(lox.spool(f, reduce="std"))(xs)
    assert abs(float(logs["x"]) / xs.astype(np.float64).std() - 1) < 1e-5
    blocks: list[lox.logdict] = []
    lox.tap(f, blocks.append, reduce="mean", buffer=EVENTS // 10)(xs)
    assert len(blocks) == 10
    assert abs(np.mean([b["x"][0] for b in blocks], dtype=np.float64) / exact - 1) < 1e-6


def test_a_million_events_through_a_bounded_pipeline() -> None:
    """With a slow consumer, no event is lost or out of order, nothing deadlocks, and memory stays flat."""
    blocks, per_block = 2000, 500
    pipeline: queue.Queue[Any] = queue.Queue(maxsize=4)
    problems: list[str] = []
    memory: list[int] = []

    def consume() -> None:
        expected = 0
        while (logs := pipeline.get()) is not None:
            steps = logs.step["i"]
            if not np.array_equal(steps, np.arange(expected, expected + len(steps))) or (logs["i"] != steps).any():
                problems.append(f"expected {expected}, got {steps}")
            expected += len(steps)
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if expected != blocks * per_block:
            problems.append(f"{expected} events")

    def f() -> Any:
        def step(c: Any, i: Any) -> Any:
            lox.log({"i": i, "c": c}, step=i)
            return c + 1.0, None

        return lax.scan(step, 0.0, jnp.arange(blocks * per_block))[0]

    consumer = threading.Thread(target=consume)
    consumer.start()
    lox.tap(jax.jit(f), pipeline.put, buffer=per_block)()
    pipeline.put(None)
    consumer.join()
    assert not problems
    # The peak memory of the process in kB, from the first tenth on.
    assert memory[-1] - memory[len(memory) // 10] < 20_000


@pytest.mark.slow
def test_single_events_come_in_order_too() -> None:
    received: list[int] = []
    pipeline: queue.Queue[Any] = queue.Queue(maxsize=10)

    def consume() -> None:
        while (logs := pipeline.get()) is not None:
            received.append(int(logs["i"]))

    consumer = threading.Thread(target=consume)
    consumer.start()
    lox.tap(lambda: lax.fori_loop(0, 30_000, lambda i, c: (lox.log({"i": i}), c)[1], 0), pipeline.put)()
    pipeline.put(None)
    consumer.join()
    assert received == list(range(30_000))


# --- what stays -----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a MultiLogger"])
def test_a_run_that_has_ended_is_forgotten(inside: bool) -> None:
    """A tracker's client has much to keep for a run, and a sweep has many runs."""

    class Client:
        pass

    class Tracker(lox.Logger):
        def open(self, run: Any) -> None:
            run.resource = Client()
            clients.append(weakref.ref(run.resource))
            configs.append(weakref.ref(run.config["table"]))

        def write(self, run: Any, logs: lox.logdict) -> None:
            del run, logs

    clients: list[Any] = []
    configs: list[Any] = []
    tracker = Tracker()
    with lox.loggers.MultiLogger(tracker) if inside else tracker as logger:
        states = [logger.init(jax.random.key(n), config={"table": np.zeros(3)}) for n in range(2)]
        for state in states:
            logger.log(state, {"x": 1.0})
        logger.close(states[0])
        logger.flush()
        gc.collect()
        assert [client() is None for client in clients] == [True, False]
        assert [config() is None for config in configs] == [True, False]
        with pytest.raises(lox.LoxError, match=r"run '0' is closed\. Begin another with `init`\."):
            logger.log(states[0], {"x": 1.0})
        logger.close(states[0])  # again, which is nothing new
