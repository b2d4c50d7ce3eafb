"""Loggers compared with their clients: the cost of a number, and how long a training waits for them.

Clients write to this machine. Those that are not installed are left out.
"""

import contextlib
import contextvars
import csv
import functools
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from storage import make_logs
from timing import Row, compare

import lox
from lox.loggers import (
    CsvLogger,
    JsonlLogger,
    MLflowLogger,
    NeptuneLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

KEYS = 5
WANDB = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "console": "off"}
TRACKIO = {"auto_log_cpu": False, "auto_log_gpu": False}


# --- the same events handed to the clients by hand ------------------------------------------------

ByHand = tuple[Callable[[], Any], Callable[[], Any]]  # what is timed, and the end


def rows(logs: lox.logdict) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield event by event, as a callback gets them."""
    columns = {key: x.tolist() for key, x in logs.items()}
    for step, *values in zip(logs.steps["step"]["key0"].tolist(), *columns.values(), strict=True):
        yield step, dict(zip(columns, values, strict=True))


def csv_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    file = open(f"{folder}/x.csv", "w", newline="")  # noqa: SIM115

    def write() -> None:
        csv.writer(file).writerows([step, *values.values()] for step, values in rows(logs))
        file.flush()

    return write, file.close


def jsonl_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    file = open(f"{folder}/x.jsonl", "w")  # noqa: SIM115

    def write() -> None:
        file.writelines(json.dumps({"step": step, **values}) + "\n" for step, values in rows(logs))
        file.flush()

    return write, file.close


def tensorboard_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    from tensorboard.summary import Writer

    writer = Writer(folder)

    def write() -> None:
        for step, values in rows(logs):
            for key, value in values.items():
                writer.add_scalar(key, value, step)
        writer.flush()

    return write, writer.close


def wandb_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    import wandb

    settings = wandb.Settings(**WANDB)
    run = wandb.init(mode="offline", dir=folder, project="bench", reinit="create_new", settings=settings)

    def write() -> None:
        for _, values in rows(logs):  # without steps, which would start again at every turn
            run.log(values)

    return write, run.finish


def neptune_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    import neptune

    run = neptune.init_run(mode="offline", capture_stdout=False, capture_stderr=False, capture_hardware_metrics=False)

    def write() -> None:
        for step, values in rows(logs):
            for key, value in values.items():
                run[key].append(value, step=step)
        run.wait()

    return write, run.stop


def mlflow_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    import mlflow
    from mlflow.entities import Metric

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.create_run(client.create_experiment("by hand")).info.run_id

    def write() -> None:
        for step, values in rows(logs):
            now = int(time.time() * 1000)
            client.log_batch(run, [Metric(key, value, now, step) for key, value in values.items()])

    return write, lambda: client.set_terminated(run)


def trackio_by_hand(folder: str, logs: lox.logdict) -> ByHand:
    import trackio

    # In a context of its own, or the next `init` would end the run.
    start = functools.partial(trackio.init, project=f"bench-{os.path.basename(folder)}", **TRACKIO)
    run = contextvars.Context().run(start)

    def write() -> None:
        for step, values in rows(logs):
            run.log(values, step=step)
        with run._client_lock:
            run._flush_queues_inline()

    return write, run.finish


# --- the loggers ----------------------------------------------------------------------------------


def mlflow_logger(folder: str) -> lox.Logger:
    os.makedirs(folder)
    return MLflowLogger("bench", f"sqlite:///{folder}/mlflow.db")


def trackio_logger(folder: str) -> lox.Logger:
    return TrackioLogger(f"bench-lox-{os.path.basename(folder)}", **TRACKIO)


def wandb_logger(folder: str, **options: Any) -> lox.Logger:
    return WandbLogger(mode="offline", dir=folder, project="bench", settings=WANDB, **options)


@dataclass(frozen=True)
class Tracker:
    name: str
    make: Callable[[str], lox.Logger]
    by_hand: Callable[[str, lox.logdict], ByHand]
    events: int  # at once
    client: tuple[str, ...] = ()  # what has to be installed
    goal: float | None = None  # the ratio to the client's time
    needs_client: bool = True  # for the logger too, and not only by hand

    def can(self, by_hand: bool) -> bool:
        return not (by_hand or self.needs_client) or all(importlib.util.find_spec(module) for module in self.client)


TRACKERS = [
    Tracker("CsvLogger", CsvLogger, csv_by_hand, 2000),
    Tracker("JsonlLogger", JsonlLogger, jsonl_by_hand, 2000),
    Tracker(
        "TensorBoardLogger",
        TensorBoardLogger,
        tensorboard_by_hand,
        10_000,
        ("tensorboard",),
        1 / 50,
        needs_client=False,
    ),
    Tracker("WandbLogger", wandb_logger, wandb_by_hand, 500, ("wandb",)),
    Tracker("NeptuneLogger", lambda folder: NeptuneLogger(), neptune_by_hand, 200, ("neptune",)),
    Tracker("MLflowLogger", mlflow_logger, mlflow_by_hand, 200, ("mlflow", "sqlalchemy")),
    Tracker("TrackioLogger", trackio_logger, trackio_by_hand, 200, ("trackio",)),
]


@contextlib.contextmanager
def in_a_folder() -> Iterator[str]:
    """Make a temporary folder for clients to write to."""
    folder = tempfile.mkdtemp(prefix="lox-bench-")
    os.environ["NEPTUNE_DATA_DIRECTORY"] = folder
    os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="lox-bench-"))  # read once, by its import
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide what clients print."""
    for name in ("neptune", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def throughput() -> Iterator[Row]:
    for tracker in [tracker for tracker in TRACKERS if tracker.can(by_hand=True)]:
        logs = make_logs(0, tracker.events, KEYS)
        with in_a_folder() as folder:
            with quietly():
                logger = tracker.make(f"{folder}/lox")
                state = logger.init(jax.random.key(0))
                by_hand, end = tracker.by_hand(folder, logs)

            def with_lox(logger: lox.Logger = logger, state: Any = state, logs: lox.logdict = logs) -> None:
                logger.log(state, logs)
                logger.flush()

            name = f"{tracker.name}, {tracker.events:,} × {KEYS}: by hand"
            yield compare(name, with_lox, by_hand, unit="us", count=tracker.events * KEYS, goal=tracker.goal, seconds=2)
            with quietly():
                logger.close()
                end()


# --- how long a training waits --------------------------------------------------------------------

SEEDS, STEPS, BUFFER, TURNS = 8, 200, 100, 8
WIDTH = 16


def training(prng_key: Any) -> Any:
    """Do several milliseconds of work per step for eight seeds, with three metrics, as in a small experiment.

    Matrices are so small that XLA uses one thread. With more, it would compete with the logger for the cores, unlike a
    training on an accelerator.
    """

    products = 3000 if jax.default_backend() == "cpu" else 300

    def step(w: Any, i: Any) -> Any:
        y = jax.lax.fori_loop(0, products, lambda _, y: jnp.tanh(y @ w), jnp.eye(WIDTH))
        w = w - 0.01 * (y.T @ y) / WIDTH
        lox.log({"loss": jnp.mean(y**2), "norm": jnp.sum(w**2), "max": jnp.max(y)}, step=i)
        return w, None

    w = jax.random.normal(prng_key, (WIDTH, WIDTH)) / WIDTH**0.5
    return jax.lax.scan(step, w, jnp.arange(STEPS))[0]


@contextlib.contextmanager
def other_cores() -> Iterator[None]:
    """Start threads on the other cores: the training has one core to itself, as it would have an accelerator."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - before
    os.sched_setaffinity(0, others or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class WaitingTime:
    """Adds up the time that callbacks, and so the program, wait for a logger."""

    def __init__(self, logger: lox.Logger):
        self.seconds, self._receive = 0.0, logger._pipeline.receive
        logger._pipeline.receive = self._timed  # type: ignore[method-assign]

    def _timed(self, packet: Any) -> None:
        start = time.perf_counter()
        self._receive(packet)
        self.seconds += time.perf_counter() - start


def held_up() -> Iterator[Row]:
    """Compare a loop with a logger to the same loop without logs. What remains in the queue is not timed."""
    prng_keys = jax.random.split(jax.random.key(0), SEEDS)
    plain = jax.jit(jax.vmap(lox.nolog(training)))
    loggers = [(tracker.name, tracker.make) for tracker in TRACKERS if tracker.can(by_hand=False)]
    if importlib.util.find_spec("wandb"):
        loggers.append(("WandbLogger, aggregated", functools.partial(wandb_logger, aggregate=True)))
    for name, make in loggers:
        with in_a_folder() as folder:
            with quietly(), other_cores():
                logger = make(f"{folder}/lox")
                states = jax.vmap(logger.init)(prng_keys)
                first = jax.tree.map(lambda x: x[0], states)
            waiting = WaitingTime(logger)
            tapped = jax.jit(
                jax.vmap(lambda state, prng_key, tap=logger.tap: tap(training, state, buffer=BUFFER)(prng_key)),
            )
            np.testing.assert_allclose(tapped(states, prng_keys), plain(prng_keys), rtol=1e-5)
            best = {"lox": float("inf"), "reference": float("inf")}
            calls = {"lox": lambda f=tapped, s=states: f(s, prng_keys), "reference": lambda: plain(prng_keys)}
            shares = []
            for turn in range(TURNS):
                for which in sorted(calls, reverse=bool(turn % 2)):
                    with other_cores():
                        # Starts the writer's thread here. Started from a callback, it would stay on the one core.
                        logger.log(first, {"turn": turn})
                        logger.flush()
                    waiting.seconds = 0.0
                    start = time.perf_counter()
                    jax.block_until_ready(calls[which]())
                    elapsed = time.perf_counter() - start
                    logger.flush()  # not timed, because the program has its results
                    best[which] = min(best[which], elapsed)
                    shares += [(elapsed, elapsed - waiting.seconds)] if which == "lox" else []
            milliseconds = [1e3 * best[which] / STEPS for which in ("lox", "reference")]
            yield Row(f"{name}, 8 runs, tap(buffer={BUFFER}): no logs", "ms", *milliseconds, goal=1.03)
            # The same without the noise of two measurements: how long the program waited for the logger.
            milliseconds = [1e3 * mean / STEPS for mean in np.mean(shares, 0)]
            yield Row(f"{name}, 8 runs: less waiting", "ms", *milliseconds, goal=1.03)
            with quietly():
                logger.close()


CASES = {"trackers": throughput, "held": held_up}
