"""Runs as a table: what they are, how they ended, and how to choose among them."""

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import f32

import lox
from lox.store import Writer

KEYS = jax.vmap(jax.random.key)(jnp.array([7, 8]))
LRS = jnp.array([0.5, 1.0])


def train(lr: Any) -> Any:
    def step(w: Any, i: Any) -> Any:
        lox.log({"loss": (w - 3.0) ** 2}, step=i)
        return w - lr * (w - 3.0), None

    return jax.lax.scan(step, 0.0, jnp.arange(3))[0]


def sweep(path: Any, lrs: Any = LRS, **options: Any) -> None:
    with lox.SaveLogger(path, **options) as logger:
        config = lambda lr: {"lr": lr, "optimizer": {"name": "adam", "b": 0.9}}  # noqa: E731
        states = jax.vmap(lambda key, lr: logger.init(key, config(lr)))(KEYS, lrs)
        jax.vmap(lambda state, lr: logger.tap(train, state)(lr))(states, lrs)


def test_the_table(tmp_path: Any) -> None:
    before = time.time()
    sweep(tmp_path)
    table = lox.runs(tmp_path)
    assert [run.name for run in table] == ["7 lr=0.5", "8 lr=1"]
    assert [(run.events, run.attempts, run.state) for run in table] == [(3, 1, "finished")] * 2
    for run in table:
        assert run.first is not None and run.last is not None
        assert before <= run.first.timestamp() <= run.last.timestamp() <= time.time()
    lines = repr(table).splitlines()
    assert lines[0].split() == [
        "name",
        "key",
        "lr",
        "optimizer.name",
        "optimizer.b",
        "attempts",
        "events",
        "first",
        "last",
        "state",
    ]
    assert lines[1].startswith("7 lr=0.5  7    0.5  adam            0.9") and lines[1].endswith("finished")
    assert len({len(line.rstrip()) for line in lines[1:]}) == 1
    page = table._repr_html_()
    assert page.count("<tr>") == 3 and "8 lr=1" in page
    assert [run.name for run in table[1:]] == ["8 lr=1"] and isinstance(table[:1], lox.store.RunTable)


def test_the_table_as_a_frame(tmp_path: Any) -> None:
    pytest.importorskip("pandas")
    sweep(tmp_path)
    lox.save({"x": f32(1)}, tmp_path)
    frame = lox.runs(tmp_path).to_dataframe()
    assert frame["name"].tolist() == ["7 lr=0.5", "8 lr=1", "run"]
    assert frame["config.lr"].tolist()[:2] == [0.5, 1.0] and np.isnan(frame["config.lr"][2])
    assert frame["events"].tolist() == [3, 3, 1]
    assert frame["state"].tolist() == ["finished"] * 3
    assert len(lox.runs(tmp_path).where({"lr": 9}).to_dataframe()) == 0


def test_an_empty_directory_is_an_empty_table(tmp_path: Any) -> None:
    table = lox.runs(tmp_path)
    assert len(table) == 0 and repr(table) == "<no runs>" and "no runs" in table._repr_html_()
    with pytest.raises(lox.RunNotFoundError):
        lox.runs(tmp_path / "elsewhere")


def test_text_of_users_is_harmless(tmp_path: Any) -> None:
    lox.save({"x": f32(1)}, tmp_path, config={"<b>\x1b[31m\nk": "<script>\x1b]0;t\x07"})
    table = lox.runs(tmp_path)
    assert "\x1b" not in repr(table) and len(repr(table).splitlines()) == 2
    assert "<script>" not in table._repr_html_() and "<b>" not in table._repr_html_()


def test_a_long_table_is_cut_in_the_middle(tmp_path: Any) -> None:
    with Writer(tmp_path) as writer:
        writer.open_runs([f"run{n}" for n in range(200)])
    lines = repr(lox.runs(tmp_path)).splitlines()
    assert len(lines) == 42 and lines[21].startswith("…") and lines[-1].startswith("run199")


def test_how_runs_end(tmp_path: Any) -> None:
    def states() -> dict[str, str]:
        return {run.name: run.state for run in lox.runs(tmp_path)}

    with pytest.raises(ValueError, match="boom"), lox.SaveLogger(tmp_path) as logger:
        logger.log(logger.init(jax.random.key(0)), {"x": 1})
        raise ValueError("boom")
    logger = lox.SaveLogger(tmp_path)
    one, two = [logger.init(jax.random.key(n)) for n in (1, 2)]
    logger.close(one)
    assert states() == {"0": "failed", "1": "finished", "2": "running"}
    logger.log(two, {"x": 1})
    logger.close()
    assert states() == {"0": "failed", "1": "finished", "2": "finished"}


@pytest.mark.slow
def test_a_run_that_was_killed(tmp_path: Any) -> None:
    program = """
        import sys, time, jax, lox
        logger = lox.SaveLogger(sys.argv[1])
        logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
        logger.flush()
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (run,) = lox.runs(tmp_path)
        assert (run.state, run.events) == ("running", 1)
        os.kill(process.pid, signal.SIGKILL)
    (run,) = lox.runs(tmp_path)
    assert (run.state, run.events) == ("killed", 1)


def test_runs_are_chosen_by_their_config(tmp_path: Any) -> None:
    sweep(tmp_path)
    sweep(tmp_path, LRS / 10)
    names = lambda where: [run.name for run in lox.runs(tmp_path, where=where)]  # noqa: E731
    assert names({"lr": 0.05}) == ["7 lr=0.05"]
    assert names({"lr": lambda lr: lr >= 0.5, "optimizer.name": "adam"}) == ["7 lr=0.5", "8 lr=1"]
    assert names(lambda run: run.key_data[-1] == 8) == ["8 lr=1", "8 lr=0.1"]
    assert names({"missing": None}) == []
    logs = lox.load(tmp_path, where={"lr": 0.05})
    assert isinstance(logs, lox.logdict) and logs["loss"].shape == (3,)
    chosen = lox.load(tmp_path, where={"optimizer.b": 0.9})
    assert chosen.stack()["loss"].shape == (4, 3)
    assert chosen.configs["lr"] == [0.5, 1.0, 0.05, 0.1]
    first = lox.load(tmp_path, KEYS, where=lambda run: run.config["lr"] >= 0.5)
    np.testing.assert_array_equal(first["loss"], chosen.stack()["loss"][:2])
    with pytest.raises(lox.RunNotFoundError, match=r"no run in .* has \{'lr': 3\} in its config"):
        lox.load(tmp_path, where={"lr": 3})
    with pytest.raises(lox.OptionError, match="`where` is 3"):
        lox.runs(tmp_path, where=3)  # type: ignore[arg-type]


def test_several_runs_of_one_prng_key_are_named(tmp_path: Any) -> None:
    sweep(tmp_path)
    sweep(tmp_path, LRS / 10)
    with pytest.warns(lox.LoxWarning, match="'7 lr=0.5' and '7 lr=0.05'.*the newest is loaded.*where="):
        logs = lox.load(tmp_path, KEYS)
    np.testing.assert_array_equal(logs["loss"][0], lox.load(tmp_path, "7 lr=0.05")["loss"])


def test_events_of_lanes_that_differ(tmp_path: Any) -> None:
    """A row may be for many runs, some of which have no event in it."""
    with Writer(tmp_path) as writer:
        runs = writer.open_runs([f"{n}" for n in range(70)])
        valid = np.arange(70)[:, None] >= np.arange(3)[None] * 30
        logs = lox.logdict.from_arrays({"x": np.zeros((3, 70), np.float32)}, valid=valid.T, lanes=1)
        writer.append(runs, logs)
        writer.append(runs[3], {"y": f32(1)})
    assert [run.events for run in lox.runs(tmp_path)] == [int(v.sum()) + (n == 3) for n, v in enumerate(valid)]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["one", "stacked"])
def test_wall_time_as_a_step(tmp_path: Any, keys: Any) -> None:
    before = time.time()
    sweep(tmp_path)
    logs = lox.load(tmp_path, "7 lr=0.5" if keys is None else keys, wall=True)
    wall = logs.wall["loss"]
    assert wall.shape == logs["loss"].shape and wall.dtype == np.float64
    assert (before <= wall).all() and (wall <= time.time()).all()
    assert datetime.datetime.fromtimestamp(float(np.ravel(wall)[0])).year >= 2024
    lox.save(lox.logdict({"x": f32(1)}, steps={"wall": {"x": 3}}), tmp_path / "other")
    with pytest.raises(lox.OptionError, match="step called 'wall'"):
        lox.load(tmp_path / "other", wall=True)
