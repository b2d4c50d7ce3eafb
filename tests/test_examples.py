"""The examples are run as a user would, as programs of their own, and what they have saved is read back.

Those of trackers are next to the tests of trackers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import machine
import numpy as np
import pytest

import lox

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
# What `conftest` has set up for the tests is not what a user has.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")}


def needs(*packages):
    """Skip a test where Python is too old for them, or for a JAX that they work with."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is installed with the newest JAX only")


def run(name, folder):
    """Run an example, in which every warning is an error, and return what it has printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=machine.HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counts(logs):
    """Return how many events each key has, after a look at whether they are in order."""
    assert all((np.diff(logs.step[key]) >= 0).all() for key in logs)
    return {key: len(logs.step[key]) for key in logs}


def test_ppo_sweep(tmp_path):
    out = run("ppo_sweep", tmp_path)
    directory = tmp_path / "lox-ppo-sweep"
    runs = lox.runs(directory)
    assert [run.config["lr"] for run in runs] == [3e-4] * 16 + [1e-3] * 16 + [3e-3] * 16
    assert {run.state for run in runs} == {"finished"}

    loaded = lox.load(directory, wall=True)
    logs = loaded.stack()
    assert counts(loaded[runs[0].name]) == {
        **dict.fromkeys(["loss/policy", "loss/value", "entropy", "gradients"], 120),
        **dict.fromkeys(["episode_length", "visited"], 60),
    }
    assert logs["entropy"].shape == (48, 120)
    # Streamed by one call for 20 events of all runs.
    walls = logs.wall["entropy"]
    assert (walls == walls[0]).all() and len(np.unique(walls)) == 6
    assert (np.diff(walls[0]) > 0).nonzero()[0].tolist() == [19, 39, 59, 79, 99]

    lengths = logs["episode_length"]
    slow, _, fast = lengths[:, -10:].reshape(3, -1).mean(1)
    assert fast > 2 * slow > 2 * lengths[:, 0].mean()
    assert "episode_length, higher is better" in out and out.count(" of 16") == 3
    assert f"lr=0.003   16  {fast:.4g} [" in out  # the mean and its interval
    assert "curves of 48 runs: lox-ppo-sweep/curves.html" in out
    assert "lr=0.003" in (directory / "curves.html").read_text(encoding="utf-8")


def test_transformer(tmp_path):
    needs("optax")
    out = run("transformer", tmp_path)
    logs = lox.load(tmp_path / "lox-transformer", jax.random.key(0))
    assert counts(logs) == {"layers/norm": 1000, "layers/attention_entropy": 1000, "loss": 250, "grad_norm": 250}
    for key in "layers/norm", "layers/attention_entropy":
        assert logs.layer[key].tolist() == [0, 1, 2, 3] * 250
        assert logs.step[key].tolist() == [step for step in range(250) for _ in range(4)]
    assert logs.step["loss"].tolist() == logs.step["grad_norm"].tolist() == list(range(250))
    assert 3 < logs["loss"][0] < 4 and logs["loss"][-10:].mean() < 0.5
    entropy = logs["layers/attention_entropy"]
    assert entropy.min() > 0 and entropy.max() < 6  # bits, over at most 64 letters
    (run_,) = lox.runs(tmp_path / "lox-transformer")
    assert run_.config["devices"] == (8 if jax.default_backend() == "cpu" else jax.device_count())
    assert "1000 events of a key, each layer once per step, in order" in out
    assert "layer 3" in (tmp_path / "lox-transformer" / "layers.html").read_text(encoding="utf-8")


def test_the_transformer_computes_its_layers_twice(monkeypatch):
    """Without which it would be no wonder that each logs once."""
    needs("optax")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which it changes
    with jax.numpy_dtype_promotion("standard"):
        import transformer

        def computed():
            params = jax.eval_shape(transformer.init, jax.random.key(0))
            program = jax.jit(jax.grad(lox.nolog(transformer.loss))).lower(params, jnp.zeros((16, 65), int), 0)
            return program.as_text().count("stablehlo.tanh")  # of which a layer has one

        assert computed() == 2
        monkeypatch.setattr(jax, "checkpoint", lambda fun: fun)
        assert computed() == 1
    monkeypatch.delitem(sys.modules, "transformer")


def test_neural_ode(tmp_path):
    needs("diffrax", "equinox", "optax")
    out = run("neural_ode", tmp_path)
    logs = lox.load(tmp_path / "lox-neural-ode", jax.random.key(0))
    keys = ["loss", "grad_norm", "solver/evaluations", "solver/steps", "solver/step_size"]
    assert counts(logs) == dict.fromkeys(keys, 300)
    assert logs["loss"][-20:].mean() < 0.05 * logs["loss"][0]
    # Means over 32 trajectories are exact: Tsit5 evaluates six times a step, and once before.
    assert (logs["solver/evaluations"] == 6 * logs["solver/steps"] + 1).all()
    assert logs["solver/steps"][-1] > logs["solver/steps"][0]  # the field has become less simple
    shown = [line.split() for line in out.splitlines() if re.match(r" +\d+ +\d\.\d{5} ", line)]
    assert [int(step) for step, *_ in shown] == list(range(0, 300, 50))
    assert [float(loss) for _, loss, *_ in shown] == pytest.approx(logs["loss"][::50], abs=1e-5)
    steps, again = map(int, re.search(r"one solution: (\d+), of which (\d+) were", out).groups())
    (times,) = re.findall(r"from t (.*)", out)
    assert len(times.split()) == steps and len(set(times.split())) == steps - again


def test_flax_nnx(tmp_path):
    needs("flax", "optax")
    out = run("flax_nnx", tmp_path)
    logs = lox.load(tmp_path / "lox-flax-nnx", jax.random.key(0))
    keys = ["block0/active", "block1/active", "loss", "accuracy"]
    train, evaluated = [f"train/{key}" for key in [*keys, "grad_norm"]], [f"eval/{key}" for key in keys]
    assert counts(logs) == dict.fromkeys(train, 30) | dict.fromkeys(evaluated, 7)
    assert all(logs.step[key].tolist() == list(range(0, 300, 10)) for key in train)
    assert all(logs.step[key].tolist() == list(range(0, 301, 50)) for key in evaluated)
    assert logs["eval/accuracy"][0] < 0.5 and logs["eval/accuracy"][-1] > 0.85
    assert logs["train/loss"][-5:].mean() < 0.3 * logs["train/loss"][0]
    assert "step 300/300 (100%, done)" in out  # from the console


def test_equinox_optax(tmp_path):
    needs("equinox", "optax")
    import optax

    out = run("equinox_optax", tmp_path)
    logs = lox.load(tmp_path / "lox-equinox-optax", jax.random.key(0))
    keys = ["loss", "largest_error", "learning_rate", "grad_norm", "values"]
    assert counts(logs) == dict.fromkeys(keys, 300)  # though there are four micro-batches in a step
    assert logs["loss"][-10:].mean() < 0.1 * logs["loss"][0]
    with jax.numpy_dtype_promotion("standard"):
        rates = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, 300)(jnp.arange(300))
    assert logs["learning_rate"] == pytest.approx(np.asarray(rates), abs=1e-8)
    from_micro_batches, at_once = re.search(r"the last loss: (\S+) from .*, (\S+) from all", out).groups()
    assert float(from_micro_batches) == pytest.approx(logs["loss"][-1], abs=1e-6)
    assert float(at_once) == pytest.approx(logs["loss"][-1], abs=1e-6)
    assert re.search(r"'loss' is NaN at step=300\.\n  logged at .*equinox_optax\.py:\d+ \(loss\)", out)

    assert run("equinox_optax", tmp_path) == out  # a second time
    assert len(lox.runs(tmp_path / "lox-equinox-optax")) == 1


def test_resume_orbax(tmp_path):
    needs("optax", "orbax.checkpoint")
    out = run("resume_orbax", tmp_path)
    (directory,) = tmp_path.glob("lox-resume-orbax/*/runs")
    runs = lox.runs(directory)
    assert [run.name for run in runs] == ["0", "1", "2", "3"]
    assert {(run.attempts, run.state, run.resumed) for run in runs} == {(2, "finished", "resumed exactly")}
    before, last = map(int, re.search(r"killed: (\d+) steps are logged, .* that of step (\d+)", out).groups())
    assert 200 <= last < before < 1000 and last % 100 == 0
    for run_ in runs:
        logs = lox.load(directory, run_.name)
        assert counts(logs) == {"loss": 1000, "grad_norm": 1000}
        assert all(logs.step[key].tolist() == list(range(1000)) for key in logs)
        assert logs["loss"][-10:].mean() < 0.1 * logs["loss"][0]
        twice = lox.load(directory, run_.name, attempts="all")
        assert twice.step["loss"][twice.attempt["loss"] == 1].tolist() == list(range(last, 1000))
    assert f"each run has each step once; {before - last} steps were computed twice, and came out the same" in out
