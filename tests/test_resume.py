"""Runs that go on after a checkpoint: the newest computation of a step counts, and nothing is lost."""

import csv
import functools
import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optional
import pytest
from machine import HANG

import lox
from lox.loggers import CsvLogger, JsonlLogger, MultiLogger, TensorBoardLogger
from lox.loggers._console import _render
from lox.loggers._console._board import Board
from lox.loggers._run import Run
from lox.store import names

KEYS = jax.vmap(jax.random.key)(jnp.arange(3))


def train(first: int, last: int, noise: float = 0.0) -> Any:
    def run(w: Any) -> Any:
        def step(w: Any, i: Any) -> Any:
            lox.log({"loss": jnp.sin(w) + jnp.where(i == 8, noise, 0.0)}, step=i)
            return w + 1, None

        return jax.lax.scan(step, w + first, jnp.arange(first, last))[0]

    return run


def attempt(path: Any, begin: Any, *steps: Any, key: Any = KEYS, log: Any = None, make: Any = lox.SaveLogger) -> None:
    """Begin or resume a run for each key, and log some steps of each."""
    with make(path) as logger:
        states = jax.vmap(begin(logger))(key)
        jax.vmap(lambda state, w: logger.tap(train(*steps), state)(w))(states, jnp.arange(float(len(key))))
        if log is not None:
            jax.vmap(lambda state: logger.log(state, log))(states)


def init(logger: Any) -> Any:
    return logger.init


def resumed_at(n: int, **options: Any) -> Any:
    return lambda logger: lambda key: logger.resume(key, step=n, **options)


def same(a: lox.logdict, b: lox.logdict) -> bool:
    return str(a) == str(b) and str(a.steps) == str(b.steps) and a.keys() == b.keys()


@pytest.mark.slow
@pytest.mark.parametrize("log", [None, {"note": 1.0}], ids=["", "and an event without a step"])
def test_the_newest_computation_of_a_step_counts(tmp_path: Any, log: Any) -> None:
    attempt(tmp_path / "whole", init, 0, 20)
    attempt(tmp_path / "runs", init, 0, 12, log=log)
    attempt(tmp_path / "runs", resumed_at(6), 6, 9, log=log)
    attempt(tmp_path / "runs", resumed_at(4), 4, 20)
    for which in (KEYS, "1"):
        assert same(lox.load(tmp_path / "runs", which), lox.load(tmp_path / "whole", which))
    everything = lox.load(tmp_path / "runs", "1", attempts="all")
    assert everything.step["loss"].tolist() == [*range(12), *range(6, 9), *range(4, 20)]
    assert everything.attempt["loss"].tolist() == [0] * 12 + [1] * 3 + [2] * 16
    assert [(run.attempts, run.resumed) for run in lox.runs(tmp_path / "runs")] == [(3, "resumed exactly")] * 3
    assert "finished, resumed exactly" in repr(lox.runs(tmp_path / "runs"))


def test_a_program_that_computes_something_else(tmp_path: Any) -> None:
    attempt(tmp_path, init, 0, 12)
    attempt(tmp_path, resumed_at(6), 6, 20, 0.25)
    assert [run.resumed for run in lox.runs(tmp_path)] == ["differs from step=8 on ('loss')"] * 3


def test_a_step_for_every_lane(tmp_path: Any) -> None:
    attempt(tmp_path / "whole", init, 0, 20)
    attempt(tmp_path / "runs", init, 0, 12)
    with lox.SaveLogger(tmp_path / "runs") as logger:
        states = jax.jit(jax.vmap(lambda key, n: logger.resume(key, step=n)))(KEYS, jnp.array([12, 3, 7]))
        for n, first in enumerate((12, 3, 7)):
            state = jax.tree.map(lambda x, n=n: x[n], states)
            logger.tap(train(first, 20), state)(float(n))
    assert same(lox.load(tmp_path / "runs", KEYS), lox.load(tmp_path / "whole", KEYS))


def test_a_state_of_the_process_before(tmp_path: Any) -> None:
    attempt(tmp_path / "whole", init, 0, 20)
    logger = lox.SaveLogger(tmp_path / "runs")
    states = jax.vmap(logger.init)(KEYS)
    jax.vmap(lambda state, w: logger.tap(train(0, 12), state)(w))(states, jnp.arange(3.0))
    logger.close()
    kept = jax.tree.map(np.asarray, states)  # as a checkpoint keeps it
    with lox.SaveLogger(tmp_path / "runs") as logger:
        states = jax.vmap(lambda state: logger.resume(state, step=9))(jax.tree.map(jnp.asarray, kept))
        jax.vmap(lambda state, w: logger.tap(train(9, 20), state)(w))(states, jnp.arange(3.0))
    assert same(lox.load(tmp_path / "runs", KEYS), lox.load(tmp_path / "whole", KEYS))


def test_runs_with_the_same_prng_key(tmp_path: Any) -> None:
    """A sweep: the config tells the runs apart."""
    key, lrs = jax.random.key(7), jnp.array([0.1, 0.2])

    def run(begin: str, first: int, last: int, **options: Any) -> None:
        with lox.SaveLogger(tmp_path) as logger:
            states = jax.vmap(lambda lr: getattr(logger, begin)(key, {"lr": lr}, **options))(lrs)
            jax.vmap(lambda state, w: logger.tap(train(first, last), state)(w))(states, lrs)

    run("init", 0, 5)
    run("resume", 3, 8, step=3)
    for run_info in lox.runs(tmp_path):
        logs = lox.load(tmp_path, run_info.name)
        assert logs.step["loss"].tolist() == list(range(8)) and run_info.attempts == 2
    with pytest.raises(lox.RunNotFoundError, match=r"'7 lr=0.1' and '7 lr=0.2'. Give `resume` the config or the name"):
        lox.SaveLogger(tmp_path).resume(key, step=3)
    with pytest.raises(lox.RunNotFoundError, match=r"cannot resume '9' in .*: there is no run"):
        lox.SaveLogger(tmp_path).resume(jax.random.key(9), step=3)


def test_runs_that_only_their_configs_tell_apart(tmp_path: Any) -> None:
    """A sweep of one program after the other: the names do not say more than the PRNG key."""
    key = jax.random.key(7)
    for lr in (0.1, 0.2):
        with lox.SaveLogger(tmp_path) as logger:
            logger.tap(train(0, 5), logger.init(key, {"lr": lr, "depth": 2}))(0.0)
    with lox.SaveLogger(tmp_path) as logger:
        logger.tap(train(3, 8), logger.resume(key, {"lr": 0.1}, step=3))(0.0)
    assert [(run.name, run.attempts, run.config["lr"]) for run in lox.runs(tmp_path)] == [
        ("7", 2, 0.1),
        ("7.1", 1, 0.2),
    ]
    for config in (None, {"lr": 0.3}, {"depth": 2}):
        with pytest.raises(lox.RunNotFoundError, match=r"its PRNG key has the runs '7' and '7.1'. Give `resume` the"):
            lox.SaveLogger(tmp_path).resume(key, config, step=3)


def test_lanes_with_the_same_prng_key(tmp_path: Any) -> None:
    keys = jax.vmap(jax.random.key)(jnp.array([7, 7, 8]))
    for first, begin in ((0, init), (1, resumed_at(1))):
        with lox.SaveLogger(tmp_path) as logger:
            states = jax.vmap(begin(logger))(keys)
            jax.vmap(lambda s, x, n=first, logger=logger: logger.log(s, {"x": x}, step=n))(states, jnp.arange(3.0))
    assert {run.name: lox.load(tmp_path, run.name)["x"].tolist() for run in lox.runs(tmp_path)} == {
        "7": [0.0, 0.0],
        "7.1": [1.0, 1.0],
        "8": [2.0, 2.0],
    }


@pytest.mark.parametrize("kind", ["SaveLogger", "CsvLogger", "JsonlLogger", "TensorBoardLogger"])
def test_resuming_at_step_0_begins_a_run_that_does_not_exist(tmp_path: Any, kind: str) -> None:
    if kind == "TensorBoardLogger":
        pytest.importorskip("tensorboard")
    for _ in range(2):
        with getattr(lox.loggers, kind)(tmp_path) as logger:
            states = jax.vmap(lambda key: logger.resume(key, step=0))(KEYS)
            jax.vmap(lambda state: logger.log(state, {"x": 1.0}, step=0))(states)
    if kind == "SaveLogger":
        assert [(run.name, run.attempts, run.resumed) for run in lox.runs(tmp_path)] == [
            (name, 2, "resumed exactly") for name in "012"
        ]
    else:
        assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"0", "1", "2"}


def test_wrong_steps(tmp_path: Any) -> None:
    logger = lox.SaveLogger(tmp_path)
    with pytest.raises(lox.OptionError, match="`resume` got 0 steps"):
        logger.resume(KEYS[0])
    with pytest.raises(lox.OptionError, match="`resume` got 2 steps"):
        logger.resume(KEYS[0], step=1, epoch=2)
    with pytest.raises(lox.OptionError, match="`attempts` is 'old'"):
        lox.load(tmp_path, attempts="old")


# --- config ---


def test_a_config_that_changes(tmp_path: Any) -> None:
    """What `resume` is not given stays, and what it changes is known."""
    key = jax.random.key(7)
    begun = {"lr": 0.1, "optimizer": {"name": "adam", "b1": 0.9}, "depth": 2}
    changes = [{"lr": 0.01}, {"optimizer": {"b1": 0.8}, "lr": 0.01, "clip": 1.0}, None, {"lr": 0.001}]
    with lox.SaveLogger(tmp_path) as logger:
        logger.log(logger.init(key, begun), {"x": 1.0}, step=0)
    for config in changes:
        with lox.SaveLogger(tmp_path) as logger:
            logger.log(logger.resume(key, config, step=0), {"x": 1.0}, step=0)
    (run,) = lox.runs(tmp_path)
    assert run.config == {"lr": 0.001, "optimizer": {"name": "adam", "b1": 0.8}, "depth": 2, "clip": 1.0}
    assert run.config_changes == [
        (1, {"lr": (0.1, 0.01)}),
        (2, {"optimizer.b1": (0.9, 0.8), "clip": (None, 1.0)}),
        (4, {"lr": (0.01, 0.001)}),
    ]
    titles, row = (line.split("  ") for line in repr(lox.runs(tmp_path)).splitlines())
    cells = dict(zip(*([x.strip() for x in cells if x.strip()] for cells in (titles, row)), strict=True))
    assert (cells["lr"], cells["optimizer.b1"], cells["clip"]) == ("0.1 → 0.01 → 0.001", "0.9 → 0.8", "1")
    assert (cells["optimizer.name"], cells["depth"]) == ("adam", "2")
    assert [run.name for run in lox.runs(tmp_path, where={"lr": 0.001, "depth": 2})] == ["7"]


def test_a_config_that_stays(tmp_path: Any) -> None:
    with lox.SaveLogger(tmp_path) as logger:
        logger.init(KEYS[0], {"lr": 0.1})
    with lox.SaveLogger(tmp_path) as logger:
        logger.resume(KEYS[0], {"lr": 0.1}, step=0)
    (run,) = lox.runs(tmp_path)
    assert (run.config, run.config_changes, run.attempts) == ({"lr": 0.1}, [], 2)


# --- names ---


@pytest.mark.parametrize(
    "wanted, existing, chosen",
    [
        (["42"], ["42"], ["42"]),
        (["42"], ["42", "42.1", "42.10", "42.9"], ["42.10"]),
        (["42"], ["42.1"], ["42.1"]),  # somebody has removed 42
        (["42"], ["421", "4", "42x"], [None]),
        (["42", "42"], ["42", "42.1", "42.2"], ["42.1", "42.2"]),  # the last two that were begun, in order
        (["42", "42"], ["42"], [None, "42"]),
        (["7 lr=0.1", "7 lr=0.2"], ["7 lr=0.2", "7 lr=0.1", "7 lr=0.1 (2)"], ["7 lr=0.1 (2)", "7 lr=0.2"]),
        (["7"], ["7 lr=0.1"], ["7 lr=0.1"]),  # alone, or without its config
        (["7 lr=0.5"], ["7 lr=0.1", "8 lr=0.1"], ["7 lr=0.1"]),  # with another config
        (["7 lr=0.5"], ["7 lr=0.1", "7 lr=0.2"], [None]),
        (["7 lr=0.1", "7 lr=0.5"], ["7 lr=0.1"], ["7 lr=0.1", None]),
        (["lr=0.1 seed=7"], ["lr=0.1 seed=8"], [None]),  # the first word is not the PRNG key
        (["0", "0.1"], ["0", "0.1", "0.1.1"], ["0", "0.1.1"]),
    ],
)
def test_which_run_is_resumed(wanted: Any, existing: Any, chosen: Any) -> None:
    seeds = [name.split(" ")[0] if name[0].isdigit() else "7" for name in wanted]
    assert names.to_resume(wanted, seeds, existing) == chosen
    assert names.to_resume(wanted, seeds, reversed(existing)) == chosen


# --- other loggers ---


def newest(rows: Any, firsts: Any) -> Any:
    """Return rows `(attempt, step, ...)` without those that a later attempt has computed again."""
    return [row[1:] for row in rows if all(row[0] >= number or row[1] < first for number, first in firsts.items())]


def read_text(path: Path, read: Any) -> Any:
    """Return the newest losses of each run, read as the documentation says."""
    runs = {}
    for file in [file for file in path.iterdir() if file.suffix in (".csv", ".jsonl")]:
        notes = file.with_name(f"{file.name}.attempts.json")
        firsts = {a["attempt"]: a["resumed"]["step"] for a in json.loads(notes.read_text())} if notes.exists() else {}
        rows = [(int(row.get("attempt") or 0), int(row["step"]), row["loss"]) for row in read(file)]
        runs[file.stem] = newest(rows, firsts)
    return runs


def csv_rows(file: Path) -> Any:
    with open(file, newline="") as table:
        return list(csv.DictReader(table))


def jsonl_rows(file: Path) -> Any:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_tensorboard(path: Path, key: str = "loss") -> Any:
    accumulators = optional.package("tensorboard.backend.event_processing.event_accumulator")
    runs = {}
    for folder in path.iterdir():
        events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        runs[folder.name] = [(e.step, e.value) for e in events.Scalars(key)]
    return runs


def read_tensorboard_server(path: Path, key: str = "loss") -> Any:
    """Return what TensorBoard's other implementation, the data server, shows; in a process of its own, as it leaks."""
    if isinstance(optional.package("tensorboard_data_server"), optional.Missing):
        pytest.skip("tensorboard_data_server is not installed")
    code = """if True:
        import json, sys, time
        from tensorboard.context import RequestContext
        from tensorboard.data import server_ingester
        from tensorboard.util.grpc_util import ChannelCredsType

        server = server_ingester.SubprocessServerDataIngester(
            server_ingester.get_server_binary(), sys.argv[1], reload_interval=0,
            channel_creds_type=ChannelCredsType.LOCAL, samples_per_plugin={"scalars": 0},
        )
        server.start()
        read = {}
        while len(read) < int(sys.argv[2]):
            time.sleep(0.1)
            options = dict(experiment_id="", plugin_name="scalars", downsample=10**6)
            read = server.data_provider.read_scalars(RequestContext(), **options)
        print(json.dumps({run: [(e.step, e.value) for e in tags[sys.argv[3]]] for run, tags in read.items()}))
    """
    command = [sys.executable, "-c", code, str(path), str(len(list(path.iterdir()))), key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    return {run: [tuple(event) for event in events] for run, events in json.loads(done.stdout).items()}


OTHERS = [
    pytest.param(CsvLogger, functools.partial(read_text, read=csv_rows), id="csv"),
    pytest.param(JsonlLogger, functools.partial(read_text, read=jsonl_rows), id="jsonl"),
    pytest.param(TensorBoardLogger, read_tensorboard, id="tensorboard"),
    pytest.param(TensorBoardLogger, read_tensorboard_server, id="tensorboard-server", marks=pytest.mark.slow),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("make, read", OTHERS)
def test_a_run_that_is_resumed_equals_one_that_never_stopped(make: Any, read: Any, tmp_path: Any) -> None:
    attempt(tmp_path / "whole", init, 0, 20, make=make)
    attempt(tmp_path / "runs", init, 0, 12, make=make)
    attempt(tmp_path / "runs", resumed_at(6), 6, 9, make=make)
    attempt(tmp_path / "runs", resumed_at(4), 4, 20, make=make)
    expected = read(tmp_path / "whole")
    assert [len(events) for events in expected.values()] == [20] * 3
    assert read(tmp_path / "runs") == expected
    assert len(list(tmp_path.glob("runs/*.media"))) == 0 and {path.name for path in (tmp_path / "runs").iterdir()} >= {
        path.name for path in (tmp_path / "whole").iterdir()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("make, read", OTHERS[:3])
def test_a_step_for_every_lane_of_other_loggers(make: Any, read: Any, tmp_path: Any) -> None:
    attempt(tmp_path / "whole", init, 0, 20, make=make)
    attempt(tmp_path / "runs", init, 0, 12, make=make)
    with make(tmp_path / "runs") as logger:
        states = jax.jit(jax.vmap(lambda key, n: logger.resume(key, step=n)))(KEYS, jnp.array([12, 3, 7]))
        for n, first in enumerate((12, 3, 7)):
            logger.tap(train(first, 20), jax.tree.map(lambda x, n=n: x[n], states))(float(n))
    assert read(tmp_path / "runs") == read(tmp_path / "whole")


@pytest.mark.sample(3)
@pytest.mark.parametrize("make, read", OTHERS[:3])
@pytest.mark.parametrize("same_key", [False, True])
def test_lanes_without_a_seed_and_lanes_with_the_same(make: Any, read: Any, same_key: bool, tmp_path: Any) -> None:
    """They are told apart by their order."""
    keys = jnp.stack([jax.random.key(7)] * 3) if same_key else jax.random.split(jax.random.key(7), 3)
    attempt(tmp_path / "whole", init, 0, 20, make=make, key=keys)
    attempt(tmp_path / "runs", init, 0, 12, make=make, key=keys)
    attempt(tmp_path / "runs", resumed_at(6), 6, 20, make=make, key=keys)
    assert read(tmp_path / "runs") == read(tmp_path / "whole")
    assert sorted(read(tmp_path / "runs")) == (["7", "7.1", "7.2"] if same_key else ["lane0", "lane1", "lane2"])


@pytest.mark.parametrize("make", [CsvLogger, JsonlLogger, TensorBoardLogger])
def test_a_run_that_does_not_exist(make: Any, tmp_path: Any) -> None:
    with (
        make(tmp_path) as logger,
        pytest.raises(
            lox.RunNotFoundError, match=rf"{make.__name__} cannot resume '7' in '{tmp_path}': it has no such run\."
        ),
    ):
        logger.resume(jax.random.key(7), step=3)
    attempt(tmp_path, init, 0, 2, make=make)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with (
        make(tmp_path) as logger,
        pytest.raises(
            lox.RunNotFoundError,
            match=r"cannot resume '7' in .*: the last runs there are '0', '1' and '2': give `resume` the config",
        ),
    ):
        jax.vmap(lambda key: logger.resume(key, step=3))(jax.vmap(jax.random.key)(jnp.array([1, 7])))
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    with pytest.warns(lox.LoxWarning, match=f"{make.__name__} failed opening run '7': RunNotFoundError"):
        logger = make(tmp_path)
        states = jax.jit(jax.vmap(lambda key: logger.resume(key, step=1)))(jax.vmap(jax.random.key)(jnp.array([1, 7])))
        jax.block_until_ready(states)
        logger.log(jax.tree.map(lambda x: x[0], states), {"loss": 5.0}, step=1)  # the other run goes on
        with pytest.raises(lox.RunNotFoundError, match="cannot resume '7'"):
            logger.close()
    assert sum(len(data) for data in before.values()) < sum(
        f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()
    )


@pytest.mark.parametrize("make, read", OTHERS[:3])
def test_a_run_that_is_still_open_ends(make: Any, read: Any, tmp_path: Any) -> None:
    """As in a notebook, where a training is interrupted and goes on."""
    attempt(tmp_path / "whole", init, 0, 20, make=make, key=KEYS[:1])
    with make(tmp_path / "runs") as logger:
        before = logger.init(KEYS[0])
        logger.tap(train(0, 12), before)(0.0)
        with pytest.raises(lox.RunNotFoundError, match="cannot resume '1'"):
            jax.vmap(lambda key: logger.resume(key, step=8))(KEYS[:2])
        logger.log(before, {"loss": 0.0}, step=12)  # nothing has happened to it
        state = logger.resume(before, step=8)
        with pytest.raises(lox.LoxError, match="run '0'"):
            logger.log(before, {"loss": 1.0}, step=13)
        logger.tap(train(8, 20), state)(0.0)
    assert read(tmp_path / "runs") == read(tmp_path / "whole")


def test_text_files(tmp_path: Any) -> None:
    """Byte by byte, with names that a file cannot have, or that a key and a step share, and half a line at the end."""
    key = jax.random.key(7)
    for make in (CsvLogger, JsonlLogger):
        with make(tmp_path) as logger:
            state = logger.init(key, {"lr": 0.1})
            logger.log(state, {"epoch": 5, "=a": 1, "attempt": 9}, step=0)
            logger.log(state, {"b": 1.5}, epoch=1)
    with open(tmp_path / "7.csv", "a") as torn, open(tmp_path / "7.jsonl", "a") as torn_too:
        torn.write("1,2")
        torn_too.write('{"step": 1')
    for make in (CsvLogger, JsonlLogger):
        with make(tmp_path) as logger:
            state = logger.resume(key, {"lr": 0.2}, step=1)
            logger.log(state, {"b": 2.5}, epoch=1)  # the step comes first, and not the key
            logger.log(state, {"epoch": 6, "=a": 2, "attempt": 8}, step=1)
        with make(tmp_path) as logger:
            logger.log(logger.resume(key, step=2), {"c": 3}, step=2)
    assert (tmp_path / "7.csv").read_text().splitlines() == [
        "step,epoch,'=a,attempt [key],epoch [step],b,attempt,c",
        "0,5,1,9,,,,",
        ",,,,1,1.5,,",
        ",,,,1,2.5,1,",
        "1,6,2,8,,,1,",
        "2,,,,,,2,3",
    ]
    assert [json.loads(line) for line in (tmp_path / "7.jsonl").read_text().splitlines()] == [
        {"step": 0, "epoch": 5, "=a": 1, "attempt [key]": 9},
        {"epoch [step]": 1, "b": 1.5},
        {"epoch [step]": 1, "b": 2.5, "attempt": 1},
        {"step": 1, "epoch": 6, "=a": 2, "attempt [key]": 8, "attempt": 1},
        {"step": 2, "c": 3, "attempt": 2},
    ]
    for suffix in ("csv", "jsonl"):
        assert json.loads((tmp_path / f"7.{suffix}.config.json").read_text()) == {"lr": 0.1}
        assert json.loads((tmp_path / f"7.{suffix}.attempts.json").read_text()) == [
            {"attempt": 1, "resumed": {"step": 1}, "config": {"lr": 0.2}},
            {"attempt": 2, "resumed": {"step": 2}, "config": {}},
        ]


def test_notes_of_a_file_that_was_removed(tmp_path: Any) -> None:
    for begin in (init, resumed_at(2), init, resumed_at(2)):
        if begin is init:
            (tmp_path / "0.csv").unlink(missing_ok=True)
        attempt(tmp_path, begin, 2, 4, make=CsvLogger, key=KEYS[:1])
    assert [row["attempt"] for row in csv_rows(tmp_path / "0.csv")] == ["", "", "1", "1"]


def test_a_sweep_whose_config_changes(tmp_path: Any) -> None:
    """The names have the config in them, and the runs are found all the same."""
    lrs = jnp.array([0.1, 0.2, 0.3])
    for make in (CsvLogger, TensorBoardLogger):
        with make(tmp_path) as logger:
            jax.vmap(lambda key, lr, logger=logger: logger.init(key, {"lr": lr}))(KEYS, lrs)
        with make(tmp_path) as logger:
            states = jax.vmap(lambda key, lr, logger=logger: logger.resume(key, {"lr": lr}, step=3))(KEYS, lrs / 2)
            runs = [logger._pipeline.runs[number].name for number in states.run.tolist()]
            assert runs == ["0 lr=0.1", "1 lr=0.2", "2 lr=0.3"]
        with make(tmp_path) as logger:
            states = jax.vmap(lambda key, logger=logger: logger.resume(key, step=3))(KEYS)
            assert [logger._pipeline.runs[number].name for number in states.run.tolist()] == runs


def test_tensorboard_hides_by_its_own_step(tmp_path: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.init(KEYS[0])
    with pytest.raises(lox.OptionError, match=r"at epoch=3: TensorBoard knows only the step 'step'.*`step='epoch'`"):
        logger.resume(KEYS[0], epoch=3)
    logger.close()


def test_what_tensorboard_shows_of_a_resumed_run(tmp_path: Any) -> None:
    """Histograms and pictures are hidden too; the config is a text at both steps; events without a step are counted."""
    key = jax.random.key(3)

    def log(logger: Any, state: Any, steps: Any) -> None:
        for n in steps:
            values = np.full(4, n, np.float32)
            media = {"h": lox.Histogram(values, 4, (0, 20)), "i": lox.Image(np.full((2, 2), n / 20, np.float32))}
            logger.log(state, media, step=n)
            logger.log(state, {"loose": n})

    with TensorBoardLogger(tmp_path) as logger:
        log(logger, logger.init(key, {"lr": 0.1}), range(10))
    for n in range(3):  # within a second, and with file names that must be sorted
        with TensorBoardLogger(tmp_path) as logger:
            log(logger, logger.resume(key, {"lr": 0.1 * n}, step=5 + n), range(5 + n, 12))
    accumulators = optional.package("tensorboard.backend.event_processing.event_accumulator")
    sizes = {name: 0 for name in ("scalars", "histograms", "images", "tensors")}
    events = accumulators.EventAccumulator(str(tmp_path / "3"), size_guidance=sizes).Reload()
    assert [e.step for e in events.Histograms("h")] == list(range(12))
    assert [e.step for e in events.Images("i")] == list(range(12))
    assert [(e.step, e.value) for e in events.Scalars("loose")] == [(n, n) for n in range(12)]
    assert [e.step for e in events.Tensors("config")] == [0, 5, 6, 7]


@pytest.mark.slow
def test_a_curve_that_does_not_go_on(tmp_path: Any) -> None:
    """TensorBoard hides its end, but not TensorBoard's data server, which sees single curves only."""
    with TensorBoardLogger(tmp_path) as logger:
        state = logger.init(KEYS[0])
        for n in range(6):
            logger.log(state, {"loss": n, "rare": n}, step=n)
    with TensorBoardLogger(tmp_path) as logger:
        logger.log(logger.resume(KEYS[0], step=3), {"loss": 3}, step=3)
    for key, read, steps in [
        ("loss", read_tensorboard, 4),
        ("loss", read_tensorboard_server, 4),
        ("rare", read_tensorboard, 3),
        ("rare", read_tensorboard_server, 6),
    ]:
        assert read(tmp_path, key)["0"] == [(n, n) for n in range(steps)], (key, read)


@pytest.mark.slow
def test_tensorboard_after_a_crash(tmp_path: Any) -> None:
    """Half an event at the end of a file does not keep TensorBoard from the next file."""
    attempt(tmp_path / "whole", init, 0, 20, make=TensorBoardLogger)
    attempt(tmp_path / "runs", init, 0, 12, make=TensorBoardLogger)
    for file in (tmp_path / "runs").glob("*/events*"):
        os.truncate(file, file.stat().st_size - 5)
    attempt(tmp_path / "runs", resumed_at(6), 6, 20, make=TensorBoardLogger)
    assert read_tensorboard(tmp_path / "runs") == read_tensorboard(tmp_path / "whole")


def test_the_console_says_so() -> None:
    out = io.StringIO()
    console = optional.package("rich.console").Console(file=out, width=200)
    with lox.loggers.ConsoleLogger(progress={"step": 20}, console=console) as logger:
        logger.tap(train(6, 20), logger.resume(KEYS[0], step=6))(0.0)
    assert "run 0, resumed at step 6 | step 19/20 (100%, done)" in out.getvalue()
    board = Board({"step": 20}, now=0.0)
    for number, first in enumerate((6, 8)):
        run = Run(number, np.array([0, number], np.uint32), {})
        run.resumed = ("step", first)
        board.add_run(run)
    view = board.view(now=10.0)
    assert _render.title(view) == "2 runs, resumed" and view.progress == (("step", 0.0, 20, 7.0),)
    assert _render.remaining(12, 20, 10.0, first=7.0) == "eta 0:16"  # 5 steps in 10 seconds, and 8 more


def test_several_loggers_and_one_that_has_no_such_run(tmp_path: Any) -> None:
    make = lambda path: MultiLogger(lox.SaveLogger(path / "save"), CsvLogger(path / "csv"))  # noqa: E731
    attempt(tmp_path, init, 0, 12, make=make)
    attempt(tmp_path, resumed_at(6), 6, 20, make=make)
    attempt(tmp_path / "whole", init, 0, 20, make=make)
    assert same(lox.load(tmp_path / "save", KEYS), lox.load(tmp_path / "whole" / "save", KEYS))
    read = functools.partial(read_text, read=csv_rows)
    assert read(tmp_path / "csv") == read(tmp_path / "whole" / "csv")
    lanes = jax.vmap(jax.random.key)(jnp.array([0, 5]))
    with lox.SaveLogger(tmp_path / "save") as logger:
        logger.init(jax.random.key(5))
    with pytest.warns(lox.LoxWarning, match="CsvLogger failed opening run '5'"):
        logger = make(tmp_path)
        states = jax.vmap(lambda key: logger.resume(key, step=15))(lanes)
        jax.vmap(lambda state: logger.log(state, {"loss": 7.0}, step=15))(states)
        with pytest.raises(ExceptionGroup) as raised:
            logger.close()
    first, second = raised.value.exceptions
    assert str(first).startswith(f"CsvLogger cannot resume '5' in {str(tmp_path / 'csv')!r}: the last runs there are")
    assert "run '5' could not be opened" in str(second)
    assert lox.load(tmp_path / "save", "5")["loss"].tolist() == [7.0]
    assert read(tmp_path / "csv")["0"][-1] == (15, "7.0")


def test_a_logger_of_your_own(tmp_path: Any) -> None:
    opened = []

    class Mine(lox.Logger):
        def open(self, run: Any) -> None:
            opened.append((run.name, run.config, run.resumed))

        def write(self, run: Any, logs: Any) -> None:
            pass

    with Mine() as logger:
        logger.init(KEYS[0])
        jax.jit(jax.vmap(lambda key, n: logger.resume(key, {"n": n}, epoch=n)))(KEYS[:2], jnp.array([3, 4]))
    assert opened == [("0", {}, None), ("0 n=3", {"n": 3}, ("epoch", 3)), ("1 n=4", {"n": 4}, ("epoch", 4))]


# --- kills ---


PROGRAM = """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np, lox

    directory, checkpoint, noise = sys.argv[1], sys.argv[2], float(sys.argv[3])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    logger = lox.SaveLogger(directory)

    @jax.jit
    def steps(states, w, first, noise):  # an argument: the program is the same, to the last bit
        def one(state, w):
            def step(w, i):
                w = w * 1.01 + 0.1
                lox.log({"w": w, "noisy": jnp.sin(w) + jnp.where(i >= 40, noise, 0.0)}, step=i)
                return w, None

            return logger.tap(lambda w: jax.lax.scan(step, w, first + jnp.arange(10))[0], state, buffer=3)(w)

        return jax.vmap(one)(states, w)

    if os.path.exists(checkpoint):
        saved = np.load(checkpoint)
        first, w = int(saved["first"]), jnp.asarray(saved["w"])
    else:
        first, w = 0, jnp.arange(2.0)
    states = jax.vmap(lambda key: logger.resume(key, step=first))(keys)
    print("ready", flush=True)
    while first < 3000:
        w = steps(states, w, first, noise)
        first += 10
        if first % 30 == 0:
            jax.block_until_ready(w)
            logger.flush()
            np.savez(checkpoint + ".new.npz", first=first, w=np.asarray(w))
            os.replace(checkpoint + ".new.npz", checkpoint)
    logger.close()
"""


def start(path: Path, noise: float) -> Any:
    code = textwrap.dedent(PROGRAM)
    command = [sys.executable, "-c", code, str(path / "runs"), str(path / "checkpoint.npz"), str(noise)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
@pytest.mark.slow
def test_kill_a_training_and_resume_it(tmp_path: Any) -> None:
    """`LOX_KILLS=100` kills more of them."""
    (tmp_path / "whole").mkdir()
    with start(tmp_path / "whole", 0.0) as process:
        assert process.wait() == 0
    expected = lox.load(tmp_path / "whole" / "runs", jax.vmap(jax.random.key)(jnp.arange(2)))
    rng = random.Random(0)
    kills = rounds = 0
    while kills < int(os.environ.get("LOX_KILLS", 10)):
        path = tmp_path / f"{rounds}"
        rounds += 1
        path.mkdir()
        for _ in range(50):
            with start(path, 0.0) as process:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
                time.sleep(rng.uniform(0, 0.5))
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
                if process.wait() == 0:
                    break
        logs = lox.load(path / "runs", jax.vmap(jax.random.key)(jnp.arange(2)))
        assert same(logs, expected)
        assert {run.resumed for run in lox.runs(path / "runs")} <= {
            "resumed exactly",
            "resumed, no step computed twice",
            None,
        }


@pytest.mark.slow
def test_kill_a_training_and_resume_one_that_computes_something_else(tmp_path: Any) -> None:
    checkpoint = tmp_path / "checkpoint.npz"
    with start(tmp_path, 0.0) as process:
        while process.poll() is None and (not checkpoint.exists() or int(np.load(checkpoint)["first"]) < 90):
            time.sleep(0.01)
        process.kill()
    checkpoint.unlink()  # all is computed again
    with start(tmp_path, 0.5) as process:
        assert process.wait() == 0
    assert [run.resumed for run in lox.runs(tmp_path / "runs")] == ["differs from step=40 on ('noisy')"] * 2


WITH_ORBAX = """
    import os, signal, sys
    import jax, jax.numpy as jnp, lox
    import orbax.checkpoint as ocp

    directory, checkpoints, killed_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    logger, manager = lox.SaveLogger(directory), ocp.CheckpointManager(checkpoints)

    def train_step(w, n):
        lox.log({"loss": jnp.sin(w)}, step=n)
        return w * 1.01 + 0.1

    one_step = jax.jit(jax.vmap(lambda state, w, n: logger.tap(train_step, state)(w, n), (0, 0, None)))
    first, w = manager.latest_step() or 0, jnp.arange(2.0)
    if first:
        w = manager.restore(first, args=ocp.args.StandardRestore({"w": w}))["w"]
        states = jax.vmap(lambda key: logger.resume(key, step=first))(keys)
    else:
        states = jax.vmap(logger.init)(keys)
    for n in range(first, 60):
        w = one_step(states, w, n)
        if n % 10 == 9:
            logger.flush()
            manager.save(n + 1, args=ocp.args.StandardSave({"w": w}))
            if n == 9:
                manager.wait_until_finished()  # or a program killed now would begin another run
        if n == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    logger.close()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_checkpoints_of_orbax(tmp_path: Any) -> None:
    """Killed while a checkpoint is being saved, and in between."""
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is installed with the newest JAX only")

    def run(path: Path, killed_at: int) -> int:
        code = textwrap.dedent(WITH_ORBAX)
        command = [sys.executable, "-c", code, str(path / "runs"), str(path / "checkpoints"), str(killed_at)]
        return subprocess.run(command, timeout=HANG).returncode

    assert run(tmp_path / "whole", -1) == 0
    for killed_at in (15, 29, 47):
        assert run(tmp_path / "killed", killed_at) == -signal.SIGKILL
    assert run(tmp_path / "killed", -1) == 0
    keys = KEYS[:2]
    logs = lox.load(tmp_path / "killed" / "runs", keys)
    assert same(logs, lox.load(tmp_path / "whole" / "runs", keys)) and logs.step["loss"].shape == (2, 60)
    assert {(run.attempts, run.resumed) for run in lox.runs(tmp_path / "killed" / "runs")} == {(4, "resumed exactly")}


def test_resuming_where_nothing_was_written_is_not_called_exact(tmp_path):
    """The first attempt has written steps 0 to 3, and the next begins at 4: no step can be compared."""
    for first in (0, 4):
        with lox.SaveLogger(tmp_path) as logger:
            state = logger.resume(jax.random.key(0), step=first)
            for n in range(first, first + 4):
                logger.log(state, {"loss": 1.0 / (n + 1)}, step=n)
    (run,) = lox.runs(tmp_path)
    assert run.resumed == "resumed, no step computed twice"
    assert lox.load(tmp_path, "0").step["loss"].tolist() == list(range(8))
