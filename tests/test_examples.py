"""The examples run as programs of their own, and the tests read back the runs that they have saved.

Examples of trackers are next to the tests of trackers. `--nightly` runs each example as it is; otherwise it runs with
smaller numbers, and its results are not expected to be good.
"""

import ast
import os
import re
import sys
from pathlib import Path

import forks
import jax
import jax.numpy as jnp
import machine
import numpy as np
import pytest

import lox

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
# Their lines with numbers, and smaller ones.
SMALLER = {
    "equinox_optax": ("STEPS, MICRO, BATCH, LENGTH, SHOWN = 300, 4, 16, 40, 50", (30, 4, 16, 40, 10)),
    "flax_nnx": ("STEPS, EVERY, EVALUATE, BATCH = 300, 10, 50, 64", (60, 10, 20, 64)),
    "neural_ode": ("UPDATES, BATCH, SHOWN = 300, 32, 50", (30, 32, 10)),
    "ppo_sweep": ("SEEDS, UPDATES = 16, 60", (4, 20)),
    "resume_orbax": ("SEEDS, STEPS, SAVE = 4, 1000, 100", (4, 1000, 100)),
    "transformer": ("BATCH, STEPS = 16, 250", (16, 30)),
}


def needs(*packages):
    """Skip a test where Python is too old for them, or for a JAX that they work with."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is installed with the newest JAX only")


class Example:
    """An example: the names of its numbers are attributes, with the values that it runs with."""

    def __init__(self, name, folder, nightly):
        self.name, self.folder, self.nightly = name, folder, nightly
        line, smaller = SMALLER[name]
        names, numbers = line.split(" = ")
        source = (EXAMPLES / f"{name}.py").read_text()
        assert source.count(line) == 1
        values = ast.literal_eval(numbers) if nightly else smaller
        vars(self).update(zip(names.split(", "), values, strict=True))
        self.file = folder / f"{name}.py"
        self.file.write_text(source.replace(line, f"{names} = {', '.join(map(str, values))}"))

    def run(self):
        """Run it with every warning as an error, and return its output."""
        environment = {**forks.user_environment(), "PYTHONWARNINGS": "error"}
        environment["PYTHONPATH"] += os.pathsep + str(EXAMPLES)  # one imports another
        if not self.nightly:
            environment["XLA_FLAGS"] = forks.FAST
        done = forks.run(
            [self.file], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=machine.HANG
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def example(tmp_path, request):
    return lambda name: Example(name, tmp_path, request.config.option.nightly)


def counts(logs):
    """Return how many events each key has, after a look at whether they are in order."""
    assert all((np.diff(logs.step[key]) >= 0).all() for key in logs)
    return {key: len(logs.step[key]) for key in logs}


def test_ppo_sweep(tmp_path, example):
    ppo = example("ppo_sweep")
    out = ppo.run()
    directory = tmp_path / "lox-ppo-sweep"
    runs = lox.runs(directory)
    assert [run.config["lr"] for run in runs] == [lr for lr in (3e-4, 1e-3, 3e-3) for _ in range(ppo.SEEDS)]
    assert {run.state for run in runs} == {"finished"}

    loaded = lox.load(directory, wall=True)
    logs = loaded.stack()
    assert counts(loaded[runs[0].name]) == {
        **dict.fromkeys(["loss/policy", "loss/value", "entropy", "gradients"], 2 * ppo.UPDATES),
        **dict.fromkeys(["episode_length", "visited"], ppo.UPDATES),
    }
    assert logs["entropy"].shape == (3 * ppo.SEEDS, 2 * ppo.UPDATES)
    # Streamed by one call for 20 events of all runs.
    walls = logs.wall["entropy"]
    assert (walls == walls[0]).all()
    assert (np.diff(walls[0]) > 0).nonzero()[0].tolist() == list(range(19, 2 * ppo.UPDATES - 1, 20))

    assert "episode_length, higher is better" in out and out.count(f" of {ppo.SEEDS}") == 3
    assert f"curves of {3 * ppo.SEEDS} runs: lox-ppo-sweep/curves.html" in out
    assert "lr=0.003" in (directory / "curves.html").read_text(encoding="utf-8")
    if ppo.nightly:
        lengths = logs["episode_length"]
        slow, _, fast = lengths[:, -10:].reshape(3, -1).mean(1)
        assert fast > 2 * slow > 2 * lengths[:, 0].mean()
        assert f"lr=0.003   16  {fast:.4g} [" in out  # the mean and its interval


def test_transformer(tmp_path, example):
    needs("optax")
    transformer = example("transformer")
    out = transformer.run()
    steps = transformer.STEPS
    logs = lox.load(tmp_path / "lox-transformer", jax.random.key(0))
    in_layers = ["layers/norm", "layers/attention_entropy"]
    assert counts(logs) == dict.fromkeys(in_layers, 4 * steps) | {"loss": steps, "grad_norm": steps}
    for key in in_layers:
        assert logs.layer[key].tolist() == [0, 1, 2, 3] * steps
        assert logs.step[key].tolist() == [step for step in range(steps) for _ in range(4)]
    assert logs.step["loss"].tolist() == logs.step["grad_norm"].tolist() == list(range(steps))
    assert 3 < logs["loss"][0] < 4 and logs["loss"][-1] < logs["loss"][0]
    entropy = logs["layers/attention_entropy"]
    assert entropy.min() > 0 and entropy.max() < 6  # bits, over at most 64 letters
    (run_,) = lox.runs(tmp_path / "lox-transformer")
    assert run_.config["devices"] == (8 if jax.default_backend() == "cpu" else jax.device_count())
    assert f"{4 * steps} events of a key, each layer once per step, in order" in out
    assert "layer 3" in (tmp_path / "lox-transformer" / "layers.html").read_text(encoding="utf-8")
    if transformer.nightly:
        assert logs["loss"][-10:].mean() < 0.5


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


@pytest.mark.nightly
def test_neural_ode(tmp_path, example):
    needs("diffrax", "equinox", "optax")
    ode = example("neural_ode")
    out = ode.run()
    logs = lox.load(tmp_path / "lox-neural-ode", jax.random.key(0))
    keys = ["loss", "grad_norm", "solver/evaluations", "solver/steps", "solver/step_size"]
    assert counts(logs) == dict.fromkeys(keys, ode.UPDATES)
    # Means over 32 trajectories are exact: Tsit5 evaluates six times a step, and once before.
    assert (logs["solver/evaluations"] == 6 * logs["solver/steps"] + 1).all()
    shown = [line.split() for line in out.splitlines() if re.match(r" +\d+ +\d\.\d{5} ", line)]
    assert [int(step) for step, *_ in shown] == list(range(0, ode.UPDATES, ode.SHOWN))
    assert [float(loss) for _, loss, *_ in shown] == pytest.approx(logs["loss"][:: ode.SHOWN], abs=1e-5)
    steps, again = map(int, re.search(r"one solution: (\d+), of which (\d+) were", out).groups())
    (times,) = re.findall(r"from t (.*)", out)
    assert len(times.split()) == steps and len(set(times.split())) == steps - again
    if ode.nightly:
        assert logs["loss"][-20:].mean() < 0.05 * logs["loss"][0]
        assert logs["solver/steps"][-1] > logs["solver/steps"][0]  # the field has become less simple


def test_flax_nnx(tmp_path, example):
    needs("flax", "optax")
    nnx = example("flax_nnx")
    out = nnx.run()
    logs = lox.load(tmp_path / "lox-flax-nnx", jax.random.key(0))
    keys = ["block0/active", "block1/active", "loss", "accuracy"]
    train, evaluated = [f"train/{key}" for key in [*keys, "grad_norm"]], [f"eval/{key}" for key in keys]
    in_training, in_evaluation = range(0, nnx.STEPS, nnx.EVERY), range(0, nnx.STEPS + 1, nnx.EVALUATE)
    assert counts(logs) == dict.fromkeys(train, len(in_training)) | dict.fromkeys(evaluated, len(in_evaluation))
    assert all(logs.step[key].tolist() == list(in_training) for key in train)
    assert all(logs.step[key].tolist() == list(in_evaluation) for key in evaluated)
    assert f"step {nnx.STEPS}/{nnx.STEPS} (100%, done)" in out  # from the console
    if nnx.nightly:
        assert logs["eval/accuracy"][0] < 0.5 and logs["eval/accuracy"][-1] > 0.85
        assert logs["train/loss"][-5:].mean() < 0.3 * logs["train/loss"][0]


def test_equinox_optax(tmp_path, example):
    needs("equinox", "optax")
    import optax

    equinox = example("equinox_optax")
    out = equinox.run()
    logs = lox.load(tmp_path / "lox-equinox-optax", jax.random.key(0))
    keys = ["loss", "largest_error", "learning_rate", "grad_norm", "values"]
    assert counts(logs) == dict.fromkeys(keys, equinox.STEPS)  # though there are four micro-batches in a step
    with jax.numpy_dtype_promotion("standard"):
        rates = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, equinox.STEPS)(jnp.arange(equinox.STEPS))
    assert logs["learning_rate"] == pytest.approx(np.asarray(rates), abs=1e-8)
    from_micro_batches, at_once = re.search(r"the last loss: (\S+) from .*, (\S+) from all", out).groups()
    assert float(from_micro_batches) == pytest.approx(logs["loss"][-1], abs=1e-6)
    assert float(at_once) == pytest.approx(logs["loss"][-1], abs=1e-6)
    assert re.search(r"'loss' is NaN at step=\d+\.\n  logged at .*equinox_optax\.py:\d+ \(loss\)", out)
    if equinox.nightly:
        assert logs["loss"][-10:].mean() < 0.1 * logs["loss"][0]
        assert equinox.run() == out  # a second time
        assert len(lox.runs(tmp_path / "lox-equinox-optax")) == 1


@pytest.mark.nightly
def test_resume_orbax(tmp_path, example):
    needs("optax", "orbax.checkpoint")
    out = example("resume_orbax").run()
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
