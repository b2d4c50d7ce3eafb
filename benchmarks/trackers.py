"""Loggers beside the clients that they stand for: the time of an event, and how long a training waits for them."""

import csv
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from storage import block
from timing import Row, compare

import lox
from lox.loggers import CsvLogger, JsonlLogger, TensorBoardLogger, WandbLogger

QUIETLY = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "console": "off"}


def folder() -> str:
    return tempfile.mkdtemp(prefix="lox-bench-")


def wandb_logger(**options: Any) -> WandbLogger:
    return WandbLogger(mode="offline", dir=folder(), project="bench", settings=QUIETLY, **options)


# --- throughput: the same events through a logger, and through the client by hand -----------------


def through(logger: lox.Logger, logs: lox.logdict) -> Callable[[], None]:
    state = logger.init(jax.random.key(0))

    def write() -> None:
        logger.log(state, logs)
        logger.flush()

    return write


def csv_by_hand(logs: lox.logdict) -> Callable[[], None]:
    file = open(Path(folder()) / "x.csv", "w", newline="")  # noqa: SIM115

    def write() -> None:
        columns = [logs.steps["step"]["key0"].tolist(), *[x.tolist() for x in logs.values()]]
        csv.writer(file).writerows(zip(*columns, strict=True))
        file.flush()

    return write


def jsonl_by_hand(logs: lox.logdict) -> Callable[[], None]:
    file = open(Path(folder()) / "x.jsonl", "w")  # noqa: SIM115

    def write() -> None:
        columns = {"step": logs.steps["step"]["key0"].tolist(), **{key: x.tolist() for key, x in logs.items()}}
        lines = zip(*columns.values(), strict=True)
        file.writelines(json.dumps(dict(zip(columns, line, strict=True))) + "\n" for line in lines)
        file.flush()

    return write


def tensorboard_by_hand(logs: lox.logdict) -> Callable[[], None]:
    from tensorboard.summary import Writer

    writer = Writer(folder())

    def write() -> None:
        for key, values in logs.items():
            for step, value in zip(logs.steps["step"][key].tolist(), values.tolist(), strict=True):
                writer.add_scalar(key, value, step)
        writer.flush()

    return write


def wandb_by_hand(logs: lox.logdict) -> Callable[[], None]:
    import wandb

    settings = wandb.Settings(**QUIETLY)
    run = wandb.init(mode="offline", dir=folder(), project="bench", reinit="create_new", settings=settings)

    def write() -> None:
        columns = {key: x.tolist() for key, x in logs.items()}
        for line in zip(*columns.values(), strict=True):  # steps of its own, since ours begin anew at every turn
            run.log(dict(zip(columns, line, strict=True)))

    return write


def throughput() -> Iterator[Row]:
    keys = 5
    for name, make, by_hand, events, goal in (
        ("CsvLogger", lambda: CsvLogger(folder()), csv_by_hand, 2_000, None),
        ("JsonlLogger", lambda: JsonlLogger(folder()), jsonl_by_hand, 2_000, None),
        ("TensorBoardLogger", lambda: TensorBoardLogger(folder()), tensorboard_by_hand, 10_000, 1 / 50),
        ("WandbLogger", wandb_logger, wandb_by_hand, 500, None),
    ):
        client = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}.get(name, "json")
        if not importlib.util.find_spec(client):
            continue
        logs = block(0, events, keys)
        with make() as logger:
            calls = through(logger, logs), by_hand(logs)
            label = f"{name}, {events:,} × {keys}: by hand"
            yield compare(label, *calls, unit="us", count=events * keys, goal=goal, seconds=2)


# --- how long a training waits --------------------------------------------------------------------

STEPS, WIDTH = 200, 512


def training_loop(x: Any) -> Any:
    """Steps of several milliseconds with three metrics each."""
    weights = jnp.eye(WIDTH) * 0.99 + 0.001

    def step(x, i):
        for _ in range(4):
            x = jnp.tanh(x @ weights)
        lox.log({"loss": x.mean(), "norm": jnp.abs(x).sum(), "first": x[0, 0]}, step=i)
        return x, None

    return jax.lax.scan(step, x, jnp.arange(STEPS))[0]


def held_up() -> Iterator[Row]:
    """A loop with a logger, beside the same loop without logs. What is left in the queue is not timed."""
    one = jnp.ones((WIDTH, WIDTH))
    eight = jnp.ones((8, WIDTH // 8, WIDTH))
    loggers = [
        ("TensorBoardLogger, 1 run", lambda: TensorBoardLogger(folder()), one[None]),
        ("TensorBoardLogger, 8 runs", lambda: TensorBoardLogger(folder()), eight),
    ]
    if importlib.util.find_spec("wandb"):
        loggers += [
            ("WandbLogger, 1 run", wandb_logger, one[None]),
            ("WandbLogger, 8 runs", wandb_logger, eight),
            ("WandbLogger, 8 runs aggregated", lambda: wandb_logger(aggregate=True), eight),
        ]
    for name, make, x in loggers:
        with make() as logger:
            keys = jax.random.split(jax.random.key(0), len(x))
            states = jax.vmap(logger.init)(keys)
            logged = jax.jit(jax.vmap(lambda state, x, tap=logger.tap: tap(training_loop, state, buffer=100)(x)))
            plain = jax.jit(jax.vmap(lox.nolog(training_loop)))
            np.testing.assert_allclose(logged(states, x), plain(x), rtol=1e-5)
            yield compare(
                f"{name}, tap(buffer=100): no logs",
                lambda logged=logged, states=states, x=x: jax.block_until_ready(logged(states, x)),
                lambda plain=plain, x=x: jax.block_until_ready(plain(x)),
                goal=1.03,
                count=STEPS,
                seconds=6,
                between=logger.flush,
            )


CASES = {"trackers": throughput, "held": held_up}
