"""Runs that go on after a checkpoint: the newest computation of a step counts, and nothing is lost."""

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
import pytest

import lox

KEYS = jax.vmap(jax.random.key)(jnp.arange(3))


def train(first: int, last: int, noise: float = 0.0) -> Any:
    def run(w: Any) -> Any:
        def step(w: Any, i: Any) -> Any:
            lox.log({"loss": jnp.sin(w) + jnp.where(i == 8, noise, 0.0)}, step=i)
            return w + 1, None

        return jax.lax.scan(step, w + first, jnp.arange(first, last))[0]

    return run


def attempt(path: Any, begin: Any, *steps: Any, key: Any = KEYS, log: Any = None) -> None:
    """Begin or resume a run for each key, and log some steps of each."""
    with lox.SaveLogger(path) as logger:
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


def test_wrong_steps(tmp_path: Any) -> None:
    logger = lox.SaveLogger(tmp_path)
    with pytest.raises(lox.OptionError, match="`resume` got 0 steps"):
        logger.resume(KEYS[0])
    with pytest.raises(lox.OptionError, match="`resume` got 2 steps"):
        logger.resume(KEYS[0], step=1, epoch=2)
    with pytest.raises(lox.OptionError, match="`attempts` is 'old'"):
        lox.load(tmp_path, attempts="old")


PROGRAM = """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np, lox

    directory, checkpoint, noise = sys.argv[1], sys.argv[2], float(sys.argv[3])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    logger = lox.SaveLogger(directory)

    @jax.jit
    def steps(states, w, first):
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
        w = steps(states, w, first)
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


@pytest.mark.slow
def test_kill_a_training_and_resume_it(tmp_path: Any) -> None:
    """`LOX_KILLS=100` for more."""
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
        assert {run.resumed for run in lox.runs(path / "runs")} <= {"resumed exactly", None}
