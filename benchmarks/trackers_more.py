"""Neptune, MLflow and Trackio: what a number costs, and how much a training loop is held up.

Clients write to this machine. Whoever is not installed is left out.
"""

import contextlib
import contextvars
import functools
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import Row, compare

import lox
from lox._logdict import Layout
from lox.loggers import MLflowLogger, NeptuneLogger, TrackioLogger

EVENTS, KEYS = 200, 5
SEEDS, STEPS, BUFFER = 8, 200, 100


# --- the loggers, and the same numbers handed to their clients by hand ----------------------------


Made = tuple[lox.Logger, Callable[[], Any], Callable[[], Any]]  # the logger, the client by hand, and its end


def neptune(folder: str) -> Made:
    import neptune

    os.environ["NEPTUNE_DATA_DIRECTORY"] = folder
    run = neptune.init_run(mode="offline", capture_stdout=False, capture_stderr=False, capture_hardware_metrics=False)

    def by_hand() -> None:
        for step, values in numbers():
            for key, value in values.items():
                run[key].append(value, step=step)
        run.wait()

    return NeptuneLogger(), by_hand, run.stop


def mlflow(folder: str) -> Made:
    import mlflow
    from mlflow.entities import Metric

    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("by hand")).info.run_id

    def by_hand() -> None:
        for step, values in numbers():
            now = int(time.time() * 1000)
            client.log_batch(run, [Metric(key, value, now, step) for key, value in values.items()])

    return MLflowLogger("bench", uri), by_hand, lambda: client.set_terminated(run)


def trackio(folder: str) -> Made:
    os.environ.setdefault("TRACKIO_DIR", folder)
    import trackio

    options = {"auto_log_cpu": False, "auto_log_gpu": False}
    # In a context of its own, or the next one would end it.
    start = functools.partial(trackio.init, project=f"bench-{os.path.basename(folder)}", **options)
    run = contextvars.Context().run(start)

    def by_hand() -> None:
        for step, values in numbers():
            run.log(values, step=step)
        with run._client_lock:
            run._flush_queues_inline()

    return TrackioLogger(f"bench-lox-{os.path.basename(folder)}", **options), by_hand, run.finish


TRACKERS = {
    name: make
    for name, make, modules in (
        ("Neptune", neptune, ["neptune"]),
        ("MLflow", mlflow, ["mlflow", "sqlalchemy"]),
        ("Trackio", trackio, ["trackio"]),
    )
    if all(importlib.util.find_spec(module) for module in modules)
}


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[lox.Logger, Callable[[], Any]]]:
    """A logger, and its client by hand, in a folder of their own."""
    folder = tempfile.mkdtemp()
    try:
        with other_cores(), quietly():
            logger, by_hand, end = TRACKERS[name](folder)
        yield logger, by_hand
        with quietly():
            logger.close()
            end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what clients have to say."""
    for name in ("neptune", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def other_cores() -> Iterator[None]:
    """Threads that are started meanwhile may use all cores: the program is measured on one, but a writer has others."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- what a number costs -------------------------------------------------------------------------

STEPS_OF_BLOCK = np.arange(EVENTS)
VALUES = {f"key{i}": np.sin(STEPS_OF_BLOCK + i).astype(np.float32) for i in range(KEYS)}


def numbers() -> Iterator[tuple[int, dict[str, float]]]:
    """Event by event, as a callback gets them."""
    for step in range(EVENTS):
        yield step, {key: float(x[step]) for key, x in VALUES.items()}


def throughput() -> Iterator[Row]:
    logs = lox.logdict(VALUES)
    logs.steps = {"step": dict.fromkeys(logs, STEPS_OF_BLOCK)}
    logs._layouts = dict.fromkeys(logs, Layout(True, ((),), (1,), (("step", ()),)))  # as `spool` and `tap` give them
    for name in TRACKERS:
        with opened(name) as (logger, by_hand):
            with quietly():
                state = logger.init(jax.random.key(0))

            def ours(logger: lox.Logger = logger, state: Any = state) -> None:
                logger.log(state, logs)
                logger.flush()

            yield compare(f"{name}, per number: client by hand", ours, by_hand, unit="us", count=EVENTS * KEYS)


# --- how much a loop is held up ------------------------------------------------------------------


def training(key: Any, x: Any) -> Any:
    """About ten milliseconds of work per step for eight seeds, three metrics, as in a small experiment."""

    def step(w: Any, i: Any) -> Any:
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        w = w - 0.01 * (y.T @ y) / len(y)
        lox.log({"loss": jnp.mean(y**2), "norm": jnp.sum(w**2), "max": jnp.max(y)}, step=i)
        return w, None

    w = jax.random.normal(key, (128, 128)) / 12
    return jax.lax.scan(step, w, jnp.arange(STEPS))[0]


def held_up() -> Iterator[Row]:
    keys, x = jax.random.split(jax.random.key(0), SEEDS), jnp.ones((640, 128))
    plain = jax.jit(jax.vmap(lox.nolog(training), in_axes=(0, None)))
    for name in TRACKERS:
        with opened(name) as (logger, _):
            with quietly():
                states = jax.vmap(logger.init)(keys)
            held = Held(logger)
            tapped = jax.jit(
                jax.vmap(
                    lambda state, key, logger=logger: logger.tap(training, state, buffer=BUFFER)(key, x),
                )
            )
            best = {"lox": float("inf"), "reference": float("inf")}
            calls = {"lox": lambda f=tapped, s=states: f(s, keys), "reference": lambda: plain(keys, x)}
            shares = []
            for turn in range(6):
                for which, call in calls.items():
                    with other_cores():
                        # Starts the writer's thread from here. Started from a callback, it would stay on the one core.
                        logger.log(jax.tree.map(lambda x: x[0], states), {"turn": turn})
                        logger.flush()
                        held.seconds = 0.0
                        start = time.perf_counter()
                        jax.block_until_ready(call())
                        elapsed = time.perf_counter() - start
                        logger.flush()  # not counted: the program has what it wants
                    if turn:  # the first one compiles
                        best[which] = min(best[which], elapsed)
                        shares += [(elapsed, elapsed - held.seconds)] if which == "lox" else []
            milliseconds = [1e3 * best[which] / STEPS for which in ("lox", "reference")]
            yield Row(f"{name}, step with tap(buffer={BUFFER}): nolog", "ms", *milliseconds, goal=1.03)
            # The same without the noise of two runs: how long the program waited for the logger to take its events.
            milliseconds = [1e3 * mean / STEPS for mean in np.mean(shares, 0)]
            yield Row(f"{name}, step with tap(buffer={BUFFER}): less waiting", "ms", *milliseconds, goal=1.03)


class Held:
    """Adds up the time for which callbacks, and the program with them, wait for a logger."""

    def __init__(self, logger: lox.Logger):
        self.seconds, self._receive = 0.0, logger._pipeline.receive_tap
        logger._pipeline.receive_tap = self._timed  # type: ignore[method-assign]

    def _timed(self, logs: Any) -> None:
        start = time.perf_counter()
        self._receive(logs)
        self.seconds += time.perf_counter() - start


CASES = {"trackers-throughput": throughput, "trackers-held-up": held_up}
