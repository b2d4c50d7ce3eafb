"""What loggers do beyond the contract that they all share."""

import contextlib
import csv
import dataclasses
import errno
import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import same
from logger_cases import LaneRecorder, Recorder
from machine import HANG, Disk, wait_for
from spec_programs import with_steps

import lox
import lox.loggers
from lox.loggers import CsvLogger, JsonlLogger, MultiLogger
from lox.store.names import base_name

CARRY = [({"step": 0, "episode": 0}, 0), ({"step": 1, "episode": 0}, 1), ({"step": 2, "episode": 1}, 3)]


# --- state, keys and configs ---


def test_the_state_is_arrays():
    with Recorder() as logger:
        state = logger.init(jax.random.key(42))
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [((), np.int32), ((2,), np.uint32)]
        states = jax.jit(jax.vmap(logger.init))(jax.random.split(jax.random.key(0), 3))
        assert states.run.shape == (3,) and len(set(states.run.tolist())) == 3
        nested = jax.vmap(jax.vmap(logger.init))(jax.random.split(jax.random.key(0), (2, 3)))
        assert nested.run.shape == (2, 3)
    assert [run.name for run in logger.runs[:1]] == ["42"]
    assert len(logger.runs) == 10


@pytest.mark.slow
def test_names_are_unique_and_safe():
    keys = [jax.random.key(0), jax.random.key(42), *jax.random.split(jax.random.key(0), 50)]
    keys += [jax.random.key(seed, impl=impl) for seed in (0, 42) for impl in ("rbg", "unsafe_rbg")]
    keys += list(jax.random.split(jax.random.key(0, impl="rbg"), 5))
    names = [base_name(np.asarray(jax.random.key_data(k)), str(jax.random.key_impl(k))) for k in keys]
    assert names[:2] == ["0", "42"] and names[52:56] == ["rbg-0", "unsafe_rbg-0", "rbg-42", "unsafe_rbg-42"]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in names)
    assert base_name(np.asarray(jax.random.PRNGKey(42))) == "42"


def test_config_may_differ_between_lanes():
    fixed = {"name": "adam", "layers": (64, 64), "clip": None, "nesterov": True, "scale": np.ones(2)}
    with Recorder() as logger:
        prng_keys = jax.random.split(jax.random.key(0), 2)
        jax.jit(jax.vmap(lambda k, lr: logger.init(k, {**fixed, "lr": lr, "half": jnp.bfloat16(0.5)})))(
            prng_keys, jnp.array([0.5, 0.25])
        )
        jax.effects_barrier()
    assert [run.config["lr"] for run in logger.runs] == [0.5, 0.25]
    for run in logger.runs:
        assert {k: run.config[k] for k in ("name", "layers", "clip", "nesterov", "half")} == {
            "name": "adam", "layers": (64, 64), "clip": None, "nesterov": True, "half": 0.5,
        }  # fmt: skip
        assert type(run.config["nesterov"]) is bool and type(run.config["lr"]) is float
        same(run.config["scale"], np.ones(2))  # as it was given


def test_two_inits_of_one_program_are_two_runs():
    with Recorder() as logger:
        a, b = jax.jit(lambda prng_key: (logger.init(prng_key), logger.init(prng_key)))(jax.random.key(1))
        assert int(a.run) != int(b.run)
        jax.jit(lambda prng_key: logger.init(prng_key) and None)(
            jax.random.key(1)
        )  # the run begins although its state is unused
        jax.effects_barrier()
    assert [run.name for run in logger.runs] == ["1", "1.1", "1.2"]


def test_old_style_keys_and_wrong_ones():
    with Recorder() as logger:
        jax.vmap(logger.init)(jnp.stack([jax.random.PRNGKey(3), jax.random.PRNGKey(4)]))
        with pytest.raises(TypeError, match=r"`init` got 42 for the run's key: give it a PRNG key such as"):
            logger.init(42)
        with pytest.raises(
            TypeError, match=r"`init` got keys of shape \(3,\).*write `jax.vmap\(logger.init\)\(keys\)`"
        ):
            logger.init(jax.random.split(jax.random.key(0), 3))
        with pytest.raises(TypeError, match="`config` is 'adam'; it must be a dict of hyper-parameters"):
            logger.init(jax.random.key(0), "adam")
    assert [run.name for run in logger.runs] == ["3", "4"]


@dataclasses.dataclass
class Settings:
    parent: Any = None


def recursive_configs():
    config = {"lr": 0.1, "model": {"layers": [1]}}
    config["model"]["layers"].append(config["model"])
    yield config, r"`config\['model'\]\['layers'\]\[1\]` is `config\['model'\]` again"
    config = {}
    config["a"] = config
    yield config, r"`config\['a'\]` is `config` again"
    config = deep = {}
    for _ in range(200):
        deep["in"] = deep = {}
    yield config, r"`config(\['in'\]){101}` is more than 100 levels deep"


def begins_with_a_config(tmp_path):
    yield lambda config: Recorder().init(jax.random.key(0), config)
    yield lambda config: jax.jit(lambda prng_key: Recorder().init(prng_key, config))(jax.random.key(0))
    yield lambda config: lox.save({"x": 1}, tmp_path, config=config)
    yield lambda config: jax.jit(lambda x: lox.save({"x": x}, tmp_path, config=config))(1)
    if importlib.util.find_spec("wandb"):
        yield lambda config: lox.loggers.WandbLogger(config=config)
        yield lambda config: importlib.import_module("lox.wandb").init(jax.random.key(0), config=config)


def test_a_config_that_contains_itself(tmp_path):
    """An error before JAX sees it, which would not only fail, but leave Python with no room for another call."""
    shared = [1, 2]
    for begin in begins_with_a_config(tmp_path):
        for config, message in recursive_configs():
            with pytest.raises(lox.LogTypeError, match=f"^{message}.* Leave it out"):
                begin(config)
    with Recorder() as logger:
        logger.init(jax.random.key(0), {"a": shared, "b": shared})  # twice, but not inside itself
    assert logger.runs[0].config == {"a": [1, 2], "b": [1, 2]}
    settings = Settings()
    settings.parent = (settings,)
    with JsonlLogger(tmp_path / "text") as logger:
        logger.init(jax.random.key(0), {"s": settings})  # is written as text
    assert json.loads((tmp_path / "text" / "0.jsonl.config.json").read_text()) == {"s": "Settings(parent=(...,))"}
    message = r"`config\['s'\].parent\[0\]` is `config\['s'\]` again: what contains itself cannot be written"
    for begin in (lox.SaveLogger(tmp_path).init, lambda key, config: lox.save({}, tmp_path, key, config=config)):
        with pytest.raises(lox.LogTypeError, match=message):
            begin(jax.random.key(0), {"s": settings})


def test_wrong_states():
    with Recorder() as logger, Recorder() as other:
        state = logger.init(jax.random.key(0))
        with pytest.raises(lox.LoxError, match=r"Recorder has no run number .* made by another logger or in another"):
            other.log(state, {"a": 1})
        with pytest.raises(
            TypeError, match=r"`tap` got None for the logger's state: give it what `init\(key\)` returned"
        ):
            logger.tap(with_steps, None)
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 3))
        with pytest.raises(TypeError, match=r"`log` got the states of 3 runs: it takes one. .*map over the state"):
            logger.log(states, {"a": 1})
        with pytest.warns(lox.LoxWarning, match="has no run number"):
            jax.jit(lambda state: other.log(state, {"a": 1}))(state)  # only the host can tell
            with pytest.raises(lox.LoxError, match="has no run number"):
                other.flush()


def test_log_rejects_what_is_not_a_log():
    with Recorder() as logger:
        state = logger.init(jax.random.key(0))
        with pytest.raises(TypeError, match="`log` got 3; give it a dict of values or a logdict"):
            logger.log(state, 3)
        with pytest.raises(TypeError, match=r"the value of 'a'.*is not an array but str"):
            logger.log(state, {"a": "text"})
        with pytest.raises(TypeError, match="the key 3: keys are strings"):
            logger.log(state, {3: 3})
        with pytest.raises(TypeError, match=r"step 'step' with shape \(2,\), but 'a' has 1 event: give it one number"):
            logger.log(state, {"a": 1}, step=jnp.arange(2))
        with pytest.raises(ValueError, match="there is no reduction 'middle'"):
            logger.spool(with_steps, state, reduce="middle")
        logger.log(state, {})
        logger.log(state, lox.spool(with_steps)(jnp.arange(3))[1], step=jnp.arange(10, 13))
    assert logger.events == {
        "0": {"carry": [({"step": 10 + n, "episode": n // 2}, v) for n, (_, v) in enumerate(CARRY)]}
    }


# --- lanes ---


@pytest.mark.slow
def test_lanes_inside_a_run_come_after_the_event_axis():
    def f(x):
        lox.log({"x": x})
        return jax.lax.scan(lambda c, i: (c, lox.log({"y": c + i}) and None), x, jnp.arange(2.0))[0]

    xs = jnp.array([0.0, 10.0, 20.0])
    expected = {"x": [({}, [0.0, 10.0, 20.0])], "y": [({}, [0.0, 10.0, 20.0]), ({}, [1.0, 11.0, 21.0])]}
    for how in ("spool", "tap"):
        with Recorder() as logger:
            state = logger.init(jax.random.key(0))
            getattr(logger, how)(jax.vmap(f), state)(xs)
            state = logger.init(jax.random.key(1))
            jax.vmap(lambda x, state=state, how=how: getattr(logger, how)(f, state)(x))(xs)
            state = logger.init(jax.random.key(2))
            broadcast = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
            jax.vmap(lambda s, x, how=how: getattr(logger, how)(f, s)(x))(broadcast, xs)
        assert logger.events == {"0": expected, "1": expected, "2": expected}


def test_runs_with_lanes_inside():
    def f(x):
        lox.log({"x": x})
        return x

    for kind in (Recorder, LaneRecorder):
        for how in ("spool", "tap"):
            with kind() as logger:
                states = jax.vmap(logger.init)(jnp.stack([jax.random.key(0), jax.random.key(1)]))
                act = lambda s, xs: getattr(logger, how)(jax.vmap(f), s)(xs)  # noqa: B023, E731
                jax.jit(jax.vmap(act))(states, jnp.arange(6).reshape(2, 3))
            assert logger.events == {"0": {"x": [({}, [0, 1, 2])]}, "1": {"x": [({}, [3, 4, 5])]}}


def test_branches_that_lanes_disagree_about():
    def late(logger, x):
        return jax.lax.cond(x > 0, lambda: logger.log(logger.init(jax.random.key(5)), {"x": x}), lambda: None)

    with Recorder() as logger:
        states = jax.vmap(logger.init)(jnp.stack([jax.random.key(n) for n in range(3)]))
        log_if = lambda s, x: jax.lax.cond(x > 0, lambda: logger.log(s, {"a": x}), lambda: None)  # noqa: E731
        jax.jit(jax.vmap(log_if))(states, jnp.arange(3))
        body = lambda s: lambda x: (logger.log(s, {"w": x}), x + 1)[1]  # noqa: E731
        jax.vmap(lambda s, x: jax.lax.while_loop(lambda x: x < 3, body(s), x))(states, jnp.arange(3))
        jax.vmap(lambda x: late(logger, x))(jnp.arange(2))
    w = {n: [({}, v) for v in range(n, 3)] for n in range(3)}
    assert logger.events == {
        "0": {"w": w[0]},
        "1": {"a": [({}, 1)], "w": w[1]},
        "2": {"a": [({}, 2)], "w": w[2]},
        "5": {"x": [({}, 1)]},
    }


def test_logs_flow_on_unchanged():
    def f(x):
        lox.log({"x": x}, step=3)
        return x

    with Recorder() as logger:
        state = logger.init(jax.random.key(0))
        _, logs = lox.spool(logger.tap(f, state))(2)
        assert str(logs) == "{'x': 2}" and list(logs.steps) == ["step"]
        assert not lox.spool(logger.spool(f, state))(2)[1]
        assert str(lox.spool(logger.spool(f, state, keep_logs=True))(2)[1]) == "{'x': 2}"
        assert float(jax.grad(lambda x: logger.tap(f, state)(x) ** 2)(3.0)) == 6.0
    assert logger.events["0"]["x"] == [({"step": 3}, 2)] * 3 + [({"step": 3}, 3.0)]


def test_a_capacity_that_is_too_small_warns():
    def f(x):
        return jax.lax.while_loop(lambda x: x < 5, lambda x: (lox.log({"x": x}), x + 1)[1], x)

    with Recorder() as logger:
        state = logger.init(jax.random.key(0))
        with pytest.warns(lox.LoxWarning, match="'x' had more events than its capacity: 3 were dropped"):
            jax.jit(lambda s: logger.spool(f, s, capacity=2)(0))(state)
            logger.flush()
        with pytest.warns(lox.LoxWarning, match="'x' had more events than its capacity: 3 were dropped") as caught:
            logger.spool(f, state, capacity=2)(0)
            logger.flush()
        assert len(caught) == 1


# --- errors ---


class Broken(Recorder):
    def __init__(self, *where):
        super().__init__()
        self.where = where

    def open(self, run):
        super().open(run)
        if "open" in self.where:
            raise PermissionError(f"cannot open {run.name}")

    def write(self, run, logs):
        if "write" in self.where:
            raise ValueError(f"cannot write {run.name}")
        super().write(run, logs)

    def commit(self):
        if "commit" in self.where:
            raise OSError("cannot commit")

    def finish(self, run):
        super().finish(run)
        if "finish" in self.where:
            raise OSError(f"cannot finish {run.name}")
        if "exit" in self.where:
            sys.exit(3)


def test_an_eager_init_raises_at_once():
    logger = Broken("open")
    with pytest.raises(PermissionError, match="cannot open 0"):
        logger.init(jax.random.key(0))
    logger.close()


def test_a_compiled_init_that_fails_does_not_stop_the_program():
    logger = Broken("open")

    @jax.jit
    def run(prng_key):
        logger.log(logger.init(prng_key), {"a": 1})
        return jax.random.uniform(prng_key)

    with pytest.warns(lox.LoxWarning, match="Broken failed opening run '0': PermissionError: cannot open 0"):
        result = run(jax.random.key(0))
        jax.effects_barrier()
    assert float(result) == float(jax.random.uniform(jax.random.key(0)))
    with pytest.raises(ExceptionGroup, match="Broken had 2 errors") as caught:
        logger.close()
    assert [str(e) for e in caught.value.exceptions] == [
        "cannot open 0",
        "run '0' could not be opened, so its events are not written",
    ]
    assert logger.finished == []


def test_wrong_configs():
    with Recorder() as logger, pytest.raises(TypeError, match=r"`config` is .*are all keys of its dicts strings\?"):
        logger.init(jax.random.key(0), {1: 2, "a": 3})


@pytest.mark.slow
def test_a_compiled_function_with_a_logger_that_is_closed(tmp_path):
    @jax.jit
    def experiment(prng_key):
        logger.log(logger.init(prng_key), {"a": 1})
        return 0

    with JsonlLogger(tmp_path / "one") as logger:
        experiment(jax.random.key(0))
    with JsonlLogger(tmp_path / "two") as logger:  # unknown to the compiled function
        for _ in range(2):
            with pytest.raises(Exception, match="this JsonlLogger is closed, but a compiled function still uses it"):
                jax.block_until_ready(experiment(jax.random.key(1)))
                jax.effects_barrier()
        jax.clear_caches()
        experiment(jax.random.key(1))
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["0.jsonl"]
    assert (tmp_path / "two" / "1.jsonl").read_text().count("\n") == 1


def test_every_warning_is_shown():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # shows the same warning of the same line once
        for _ in range(3):
            logger = Broken("write")
            logger.log(logger.init(jax.random.key(0)), {"a": 1})
            with pytest.raises(ValueError, match="cannot write 0"):
                logger.close()
    assert len([warning for warning in caught if issubclass(warning.category, lox.LoxWarning)]) == 3


def test_all_errors_of_all_runs_are_raised():
    logger = Broken("write", "finish")
    states = jax.vmap(logger.init)(jnp.stack([jax.random.key(n) for n in range(3)]))
    with pytest.warns(lox.LoxWarning, match="cannot write 0") as warned:
        for _ in range(5):
            jax.vmap(lambda s: logger.log(s, {"a": 1}))(states)
        with pytest.raises(ExceptionGroup, match="3 errors, the first of them: cannot write 0") as caught:
            logger.flush()
        assert [str(e) for e in caught.value.exceptions] == [f"cannot write {n}" for n in range(3)]
        notes = caught.value.exceptions[0].__notes__
        assert notes[0] == "Broken was writing 'a' of run '0'."
        assert len(warned) == 1
        with pytest.raises(ExceptionGroup) as caught:
            logger.close()
    assert [str(e) for e in caught.value.exceptions] == [f"cannot finish {n}" for n in range(3)]


def test_errors_of_commit_and_of_a_client_that_exits():
    logger = Broken("commit", "exit")
    logger.init(jax.random.key(0))
    with pytest.raises(OSError, match="cannot commit"):
        logger.flush()
    with pytest.raises(ExceptionGroup) as caught:
        logger.close()
    assert [type(e) for e in caught.value.exceptions] == [OSError, lox.LoxError]
    assert "SystemExit(3)" in str(caught.value.exceptions[1])


def test_the_error_of_the_block_is_raised():
    with pytest.warns(lox.LoxWarning), pytest.raises(KeyError, match="mine") as caught, Broken("write") as logger:
        logger.log(logger.init(jax.random.key(0)), {"a": 1})
        raise KeyError("mine")
    assert caught.value.__notes__ == ["Broken had an error too: ValueError: cannot write 0"]


def test_one_failing_logger_does_not_stop_the_others(tmp_path):
    good, also_good = Recorder(), JsonlLogger(tmp_path)
    multi = MultiLogger(Broken("open"), good, Broken("write"), also_good)
    with pytest.warns(lox.LoxWarning):
        state = multi.init(jax.random.key(0))
        assert int(multi.tap(with_steps, state)(jnp.arange(3))) == 3
        with pytest.raises(ExceptionGroup) as caught:
            multi.close()
    assert {str(e) for e in caught.value.exceptions} == {
        "cannot open 0", "run '0' could not be opened, so its events are not written", "cannot write 0",
    }  # fmt: skip
    assert good.events == {"0": {"carry": CARRY}}
    assert len((tmp_path / "0.jsonl").read_text().splitlines()) == 3
    with pytest.raises(TypeError, match="`MultiLogger` takes loggers, not 3"):
        MultiLogger(3)


def test_nested_multi_loggers():
    a, b, c = Recorder(), Recorder(), Recorder()
    with MultiLogger(a, MultiLogger(b, c)) as multi:
        states = jax.vmap(multi.init)(jnp.stack([jax.random.key(0), jax.random.key(1)]))
        jax.vmap(lambda s, x: multi.log(s, {"x": x}))(states, jnp.arange(2))
    assert a.events == b.events == c.events == {"0": {"x": [({}, 0)]}, "1": {"x": [({}, 1)]}}


def test_a_bug_in_lox_is_raised_too(monkeypatch):
    from lox.loggers import _pipeline

    logger = Recorder()
    state = logger.init(jax.random.key(0))
    monkeypatch.setattr(_pipeline, "batches", lambda jobs: 1 / 0)
    with pytest.warns(lox.LoxWarning, match="failed handling 1 batches of events"):
        logger.log(state, {"a": 1})
        with pytest.raises(ZeroDivisionError):
            logger.close()


# --- the thread ---


def test_a_full_queue_makes_the_program_wait():
    class Slow(Recorder):
        queue_size = 2

        def write(self, run, logs):
            gate.wait()
            super().write(run, logs)

    gate = threading.Event()
    logger = Slow()
    state = logger.init(jax.random.key(0))
    sent = []

    def send():
        for n in range(20):
            logger.log(state, {"n": n})
            sent.append(n)

    thread = threading.Thread(target=send)
    thread.start()
    wait_for(lambda: len(sent) == 2)
    time.sleep(0.2)  # in which other events could come
    assert sent == [0, 1]
    gate.set()
    thread.join()
    logger.close()
    assert logger.events == {"0": {"n": [({}, n) for n in range(20)]}}


def test_a_busy_queue_is_written_in_few_calls():
    class Gated(Recorder):
        def write(self, run, logs):
            gate.wait()
            super().write(run, logs)

    gate = threading.Event()
    with Gated() as logger:
        state = logger.init(jax.random.key(0))
        for n in range(100):
            logger.log(state, {"n": n}, step=n)
        gate.set()
    assert logger.events == {"0": {"n": [({"step": n}, n) for n in range(100)]}}
    assert logger.writes <= 3


def run_script(body, tmp_path, **options):
    path = tmp_path / "script.py"
    path.write_text("import sys, os, jax, jax.numpy as jnp, lox\n" + textwrap.dedent(body))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, path, tmp_path], capture_output=True, text=True, env=env, timeout=HANG, **options
    )


@pytest.mark.slow
def test_open_loggers_are_closed_at_exit(tmp_path):
    done = run_script(
        """
        import time
        class Slow(lox.loggers.JsonlLogger):
            def write(self, run, logs):
                time.sleep(0.01)
                super().write(run, logs)
            def finish(self, run):
                super().finish(run)
                print("finished", run.name)
        logger = Slow(sys.argv[1])
        state = logger.init(jax.random.key(0))
        def step(c, i):
            lox.log({"x": i}, step=i)
            return c, None
        jax.jit(lambda s: logger.tap(lambda: jax.lax.scan(step, 0, jnp.arange(500)), s)())(state)
        class Bad(lox.Logger):
            def write(self, run, logs):
                raise ValueError("too bad")
        bad = Bad()
        bad.log(bad.init(jax.random.key(1)), {"a": 1})
        if os.fork() == 0:
            try:
                logger.log(state, {"x": 1})
            except lox.LoxError as error:
                assert "forked" in str(error), error
                lox.loggers._pipeline._close_all()  # at exit too, the child must neither write nor wait
                os._exit(0)  # JAX's own exit handlers may hang in a child
            os._exit(1)
        assert os.wait()[1] == 0
        """,
        tmp_path,
    )
    lines = (tmp_path / "0.jsonl").read_text().splitlines()
    assert [json.loads(line)["x"] for line in lines] == list(range(500))
    assert done.stdout == "finished 0\n", done.stderr
    assert "ValueError: too bad" in done.stderr


@pytest.mark.slow
def test_importing_lox_imports_neither_rich_nor_pandas(tmp_path):
    done = run_script(
        """
        lox.loggers.ConsoleLogger, lox.progress(10), lox.logdict({"a": 1})._repr_html_()
        print(sorted({"rich", "pandas", "wandb"} & {name.split(".")[0] for name in sys.modules}))
        """,
        tmp_path,
    )
    assert done.stdout == "[]\n", done.stderr


# --- plain files ---

HOSTILE = ["../evil", "a\nb", "", "x" * 10_000, "ü☃\N{GRINNING FACE}", 'quote"d', "comma,", "nul\0", "/abs", "step"]


@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger])
def test_hostile_keys_are_data(kind, tmp_path):
    folder = tmp_path / "runs"
    with kind(folder) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {key: n for n, key in enumerate(HOSTILE)}, step=99)
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    (path,) = folder.iterdir()
    if kind is JsonlLogger:
        (row,) = map(json.loads, path.read_text().splitlines())
    else:
        with open(path, newline="", encoding="utf-8") as file:
            (cells,) = csv.DictReader(file)
        row = {key: int(cell) for key, cell in cells.items()}
    expected = {"step": 99} | {key: n for n, key in enumerate(HOSTILE) if key != "step"} | {"step [key]": 9}
    assert row == expected


def test_late_keys_of_a_csv_widen_the_table(tmp_path):
    with CsvLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(3), {"lr": 0.1, "sizes": (1, 2)})
        logger.log(state, {"a": 1}, step=0)
        logger.log(state, {"b": 2.5, "a": 2}, step=1)
        logger.log(state, {"c": jnp.array([1.0, jnp.nan]), "tree": {"m": 1, "s": (2, 3)}}, epoch=0)
        logger.log(state, {"a": jnp.nan, "b": -jnp.inf})
    assert (tmp_path / "3.csv").read_text() == (
        "step,a,b,epoch,c,tree['m'],tree['s'][0],tree['s'][1]\n"
        "0,1,,,,,,\n"
        "1,2,2.5,,,,,\n"
        ',,,0,"[1.0, ""NaN""]",1,2,3\n'
        ",nan,-inf,,,,,\n"
    )
    assert json.loads((tmp_path / "3.csv.config.json").read_text()) == {"lr": 0.1, "sizes": [1, 2]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3.csv", "3.csv.config.json"]


HALF = "half \ud800"  # a character, which no file and no client can encode
LOOKS_LIKE_IT = "half \\ud800"


@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger])
def test_names_that_are_not_unicode_are_shown_by_their_code(kind, tmp_path):
    """All readers agree on that, and it is never the name of another key."""
    with kind(tmp_path) as logger:
        state = logger.init(jax.random.key(0), {HALF: HALF, LOOKS_LIKE_IT: {HALF: 1, LOOKS_LIKE_IT: 2}})
        logger.log(state, {HALF: 1, LOOKS_LIKE_IT: 2, "t": {HALF: 3, LOOKS_LIKE_IT: 4}}, **{HALF: 5})
    config = json.loads((tmp_path / f"0{logger.suffix}.config.json").read_text())
    inside = {r"'half \ud800'": 1, r"'half \\ud800'": 2}
    assert config == {r"'half \ud800'": LOOKS_LIKE_IT, r"'half \\ud800'": inside}
    names = [LOOKS_LIKE_IT, LOOKS_LIKE_IT + " [key]", LOOKS_LIKE_IT + " [key] [key]"]
    text = (tmp_path / f"0{logger.suffix}").read_text()
    if kind is JsonlLogger:
        leaves = {r"'half \ud800'": 3, r"'half \\ud800'": 4}
        assert json.loads(text) == dict(zip(names, [5, 1, 2], strict=True)) | {"t": leaves}
    else:
        assert text == ",".join([*names, r"t['half \\ud800']", r"t['half \ud800']"]) + "\n5,1,2,4,3\n"


FORMULAS = ["=cmd|' /C calc'!A0", "+1", "-a", "@SUM(A1)", "\tx", "\rx", "\nx", "\uff1d1", "'=quoted", "'quoted'"]


@pytest.mark.parametrize("library", ["csv", "pandas", "polars"])
def test_cells_of_a_csv_are_neither_rows_nor_formulas(tmp_path, library):
    """Every reader finds the same table, and a spreadsheet takes nothing in it for a formula."""
    keys = ["a\rb", "a\r\nb", *FORMULAS]
    with CsvLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {key: n + 0.5 for n, key in enumerate(keys)}, **{"=step": -1})
        logger.log(state, {"z": complex(0, -2), "x": -1.5, "inf": -np.inf, "late\r": -1})
    names = ["'=step", "a\rb", "a\r\nb", *["'" + key for key in FORMULAS], "z", "x", "inf", "late\r"]
    rows = [
        ["-1", *[str(n + 0.5) for n in range(len(keys))], *[""] * 4],
        ["", *[""] * len(keys), "-2j", "-1.5", "-inf", "-1"],
    ]
    file = tmp_path / "0.csv"
    if library == "csv":
        with open(file, newline="", encoding="utf-8") as opened:
            actual = list(csv.reader(opened))
    elif library == "pandas":
        table = pytest.importorskip(library).read_csv(file, dtype=str, keep_default_na=False)
        actual = [list(table.columns), *table.to_numpy().tolist()]
    else:
        table = pytest.importorskip(library).read_csv(file, infer_schema=False)
        actual = [table.columns, *[[cell or "" for cell in row] for row in table.rows()]]
    assert actual == [names, *rows]
    assert [name[1:] if name[0] == "'" else name for name in actual[0][1:]] == [*keys, "z", "x", "inf", "late\r"]


def test_late_keys_of_a_csv_with_large_cells(tmp_path):
    with CsvLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"xs": np.arange(50_000), 'quote"\nd': 0.5}, step=0)
        logger.log(state, {"late": 1.0}, step=1)
    header, first, second = (tmp_path / "0.csv").read_text().replace('"quote""\nd"', "quoted").splitlines()
    assert (header, second) == ("step,xs,quoted,late", "1,,,1.0")
    assert first == f'0,"{json.dumps(list(range(50_000)))}",0.5,'


def float32s():
    """Floats of all sizes, among them those at which NumPy and Python begin to write an exponent."""
    bits = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    bits[np.isnan(bits)] = np.nan  # some kinds of NaN cannot be cast without a warning
    powers = [np.float32(base) ** np.arange(first, last) for base, first, last in ((10, -45, 39), (2, -149, 128))]
    edges = [np.float32(edge).view(np.int32) + np.arange(-9, 9, dtype=np.int32) for edge in (1e-5, 1e-4, 1e6, 1e16)]
    some = [0.0, -0.0, np.nan, np.inf, -np.inf, *np.arange(-20, 20) / 7]
    return np.concatenate([bits, *powers, *(edge.view(np.float32) for edge in edges), some], dtype=np.float32)


@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger])
def test_numbers_are_written_as_by_hand(tmp_path, kind):
    """Whole columns are written at once, and are what `csv` and `json` write one by one."""
    x = float32s()
    short = [float(str(v)) for v in x]  # which is the same float32, in as few digits as possible
    columns = {
        "x": (x, short),
        "double": (x.astype(np.float64), x.astype(np.float64).tolist()),
        "n": (np.arange(len(x), dtype=np.int32) - 7, [n - 7 for n in range(len(x))]),
        "half": (x.astype(jnp.bfloat16), [float(str(v)) for v in x.astype(jnp.bfloat16)]),
        "odd": (np.arange(len(x)) % 2 == 1, [n % 2 == 1 for n in range(len(x))]),
        "z": (x.astype(np.complex64), [str(complex(v)) for v in x.astype(np.complex64)]),
        "list": (np.stack([x, -x], 1)[:, None], [[[v, -v]] for v in short]),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(plain for _, plain in columns.values()), strict=True)]
    late = {"x": 0.5, 'ünicode, "quoted"': 2}
    with kind(tmp_path) as logger:
        state = logger.init(jax.random.key(42))
        logger.log(state, lox.logdict.from_arrays({name: array for name, (array, _) in columns.items()}))
        logger.flush()
        logger.log(state, {name: np.asarray(value, np.float32) for name, value in late.items()})

    def strict(value):
        if isinstance(value, list):
            return [strict(v) for v in value]
        names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return names.get(str(value), value) if isinstance(value, float) else value

    by_hand = io.StringIO(newline="")
    if kind is JsonlLogger:
        for row in [*rows, {name: float(value) for name, value in late.items()}]:
            by_hand.write(json.dumps({name: strict(value) for name, value in row.items()}, allow_nan=False) + "\n")
    else:
        table = csv.DictWriter(by_hand, dict.fromkeys([*columns, *late]), lineterminator="\n")
        table.writeheader()
        table.writerows([{**row, "list": json.dumps(strict(row["list"]))} for row in rows])
        table.writerow({name: float(value) for name, value in late.items()})
    assert (tmp_path / f"42{kind.suffix}").read_text(encoding="utf-8") == by_hand.getvalue()


def test_numbers_in_jsonl_are_exact_and_valid_json(tmp_path):
    values = {
        "f32": jnp.float32(0.1), "f64": np.float64(0.1), "bf16": jnp.bfloat16(1.5), "nan": np.nan, "inf": -np.inf,
        "big": np.int64(2**60), "flag": True, "z": 1 + 2j, "grid": np.arange(4, dtype=np.uint8).reshape(2, 2),
        "none": np.zeros((0,)), "tree": {"a": [1, 2.5]},
    }  # fmt: skip
    with JsonlLogger(tmp_path) as logger:
        logger.log(logger.init(jax.random.key(0)), values)
    text = (tmp_path / "0.jsonl").read_text()
    assert "NaN" not in text.replace('"NaN"', "") and "Infinity" not in text.replace('"-Infinity"', "")
    assert json.loads(text) == {
        "f32": 0.1, "f64": 0.1, "bf16": 1.5, "nan": "NaN", "inf": "-Infinity", "big": 2**60, "flag": True,
        "z": "(1+2j)", "grid": [[0, 1], [2, 3]], "none": [], "tree": {"a": [1, 2.5]},
    }  # fmt: skip


def test_files_are_never_overwritten_and_more_runs_than_open_files(tmp_path):
    with JsonlLogger(tmp_path) as logger:
        prng_keys = jax.vmap(jax.random.key)(jnp.arange(200))
        states = jax.vmap(logger.init)(prng_keys)
        for n in range(2):
            jax.vmap(lambda s, n=n: logger.log(s, {"n": n}))(states)
            logger.flush()
    with JsonlLogger(tmp_path) as logger:
        logger.log(logger.init(jax.random.key(7)), {"n": "again" and 9})
    assert (tmp_path / "7.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n'
    assert (tmp_path / "7.1.jsonl").read_text() == '{"n": 9}\n'
    assert len(list(tmp_path.iterdir())) == 201


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CsvLogger(tmp_path / "file" / "runs").init(jax.random.key(0))
    with pytest.raises(TypeError, match="`path` is 3; it must be the name of a folder"):
        CsvLogger(3)


def test_the_queue_is_bounded_in_bytes_too():
    waiting = []

    class Slow(Recorder):
        queue_bytes = 10_000

        def write(self, run, logs):
            time.sleep(0.005)
            waiting.append(self._pipeline._writer._bytes)
            super().write(run, logs)

    with Slow() as logger:
        state = logger.init(jax.random.key(0))
        for n in range(30):
            logger.log(state, {"x": np.full(1000, n, np.float32)})  # 4 kB
    assert len(logger.events["0"]["x"]) == 30
    assert max(waiting) <= 3 * 4000  # one more than fits
    assert logger._pipeline._writer._bytes == 0


@pytest.mark.parametrize("kind", ["CsvLogger", "JsonlLogger", "TensorBoardLogger"])
@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO, errno.EINVAL])
def test_errors_that_the_disk_reports_last(tmp_path, monkeypatch, kind, reason):
    def fsync(descriptor):
        raise OSError(reason, os.strerror(reason))

    logger = getattr(lox.loggers, kind)(tmp_path)
    state = logger.init(jax.random.key(1))
    logger.log(state, {"x": 1.0}, step=0)
    logger.flush()
    monkeypatch.setattr(os, "fsync", fsync)
    logger.log(state, {"x": 2.0}, step=1)
    if reason == errno.EINVAL:  # not a file on a disk, so there is nothing to lose
        logger.flush()
    else:
        with pytest.raises(OSError) as info:
            logger.flush()
        assert info.value.errno == reason
    monkeypatch.undo()
    logger.close()


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("runs", [1, 70], ids=["open", "more than are kept open"])
@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger])
def test_a_disk_that_is_full_for_a_while_tears_no_row(tmp_path, monkeypatch, kind, runs):
    """What was accepted can be read; the rest is reported, and leaves no torn row in between."""
    disk = Disk(monkeypatch, room=1 << 30)
    logger = kind(tmp_path)
    states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(runs)))
    log = jax.vmap(lambda state, n: logger.log(state, {"x": jnp.full(5000, n)}, step=n), in_axes=(0, None))
    with pytest.warns(lox.LoxWarning, match="failed writing 'x' of run '0': StoreError: cannot write"):
        for n in range(6):
            disk.room = 100 if n in (2, 3) else 1 << 30
            log(states, n)
            refused = pytest.raises(
                lox.StoreError, match=r"cannot write '.*': No space left on device\.\n.*not written"
            )
            with refused if n in (2, 3) else contextlib.nullcontext():
                logger.flush()
    logger.close()
    for file in tmp_path.iterdir():
        if kind is JsonlLogger:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        else:
            csv.field_size_limit(1 << 20)
            cells = csv.DictReader(file.read_text().splitlines())
            rows = [{"step": int(row["step"]), "x": json.loads(row["x"])} for row in cells]
        assert rows == [{"step": n, "x": [n] * 5000} for n in (0, 1, 4, 5)]


def test_a_torn_row_does_not_get_into_a_wider_table(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, room=1 << 30)
    logger = CsvLogger(tmp_path)
    state = logger.init(jax.random.key(0))
    logger.log(state, {"a": 1.5}, step=0)
    logger.flush()
    with pytest.warns(lox.LoxWarning, match="cannot write"):
        disk.can_truncate = False  # not even what a failed write has left
        for key in ("a", "b"):
            disk.room = 2
            logger.log(state, {key: 2.5}, step=1)
            with pytest.raises(lox.StoreError, match=r"cannot write '.*0\.csv': no\."):
                logger.flush()
    disk.room, disk.can_truncate = 1 << 30, True
    logger.log(state, {"b": 3.5}, step=2)
    logger.log(state, {"a": 4.5}, step=3)
    logger.close()
    assert (tmp_path / "0.csv").read_text() == "step,a,b\n0,1.5,\n2,,3.5\n3,4.5,\n"


@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger])
def test_a_picture_that_does_not_fit_on_the_disk(tmp_path, monkeypatch, kind):
    really = pathlib.Path.write_bytes

    def write_half(file, data):
        really(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = kind(tmp_path)
    state = logger.init(jax.random.key(0))
    with monkeypatch.context() as patched, pytest.warns(lox.LoxWarning, match="No space left on device"):
        patched.setattr("pathlib.Path.write_bytes", write_half)
        logger.log(state, {"frame": lox.Image(np.zeros((2, 2)))})
        with pytest.raises(OSError, match="No space left on device"):
            logger.flush()
    logger.log(state, {"frame": lox.Image(np.zeros((2, 2)))})
    logger.close()
    (picture,) = tmp_path.glob("0.media/*.png")
    assert len(picture.read_bytes()) > 10


FILE_LOGGERS = {"CsvLogger": "0.csv", "JsonlLogger": "0.jsonl", "TensorBoardLogger": "0/events*", "SaveLogger": "*/*"}


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("kind", FILE_LOGGERS)
def test_files_that_are_removed_under_an_open_logger(tmp_path, kind, what):
    """`flush` and `close` say so: until then, everybody thinks that the events are safe."""
    logger = getattr(lox.loggers, kind)(tmp_path / "runs")
    state = logger.init(jax.random.key(0))
    logger.log(state, {"a": 1.0})
    logger.flush()
    files = sorted(logger.path.glob(FILE_LOGGERS[kind]))
    if what == "folder":
        shutil.rmtree(logger.path)
    else:
        for file in files:
            file.unlink()
    gone = r"^run '0' has lost its file: '.*runs.*' was removed or renamed while it was written\.\n.*`init`\."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)  # the second time, it fails while writing
        for end in (logger.flush, logger.flush, logger.close):
            logger.log(state, {"a": 2.0})
            with pytest.raises(lox.StoreError, match=gone) as caught:
                end()
            assert caught.value.filename in map(str, files)


@pytest.mark.parametrize("kind", ["CsvLogger", "JsonlLogger", "TensorBoardLogger"])
def test_files_of_many_runs_that_are_removed(tmp_path, kind):
    """Those that are not open are not made again, and one error speaks for all."""
    logger = getattr(lox.loggers, kind)(tmp_path)
    states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(70)))
    log = jax.vmap(lambda state: logger.log(state, {"a": 1.0}))
    log(states)
    logger.flush()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    lost = r"run '0' and 69 others have lost their files: '.*' was removed or renamed while it was written\."
    with pytest.warns(lox.LoxWarning, match="has lost its file"), pytest.raises(lox.StoreError, match=lost):
        log(states)
        logger.close()
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_file_that_is_removed_before_a_compiled_program_closes_its_run(tmp_path):
    logger = JsonlLogger(tmp_path)
    state = logger.init(jax.random.key(0))
    logger.log(state, {"a": 1.0})
    logger.flush()
    (tmp_path / "0.jsonl").unlink()
    with pytest.warns(
        lox.LoxWarning, match="JsonlLogger failed finishing run '0': StoreError: run '0' has lost its file"
    ):
        jax.jit(logger.close)(state)
        with pytest.raises(lox.StoreError, match="run '0' has lost its file"):
            logger.close()


def test_flush_reaches_files_that_are_no_longer_open(tmp_path, monkeypatch):
    synced = set()
    really = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), really(file)))
    with JsonlLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(70)))
        jax.vmap(lambda state: logger.log(state, {"a": 1.0}))(states)
        logger.flush()
        assert synced == {file.stat().st_ino for file in tmp_path.iterdir()}


MANY_LANES = """
import resource, sys, jax, jax.numpy as jnp, lox
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
loggers = [getattr(lox.loggers, name)(sys.argv[1] + "/" + name) for name in sys.argv[2:]]
with lox.MultiLogger(*loggers) as logger:
    states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(300)))
    logger.flush()
    for n in range(2):
        jax.vmap(lambda state: logger.log(state, {"a": 1.0, f"b{n}": 2.0}, step=n))(states)
        logger.flush()
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs ulimit")
def test_more_lanes_than_the_process_may_open_files(tmp_path):
    kinds = [kind for kind in FILE_LOGGERS if kind != "TensorBoardLogger" or importlib.util.find_spec("tensorboard")]
    command = [sys.executable, "-c", MANY_LANES, str(tmp_path), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    csv_text = "step,a,b0,b1\n0,1.0,2.0,\n1,1.0,,2.0\n"
    assert {file.name: file.read_text() for file in (tmp_path / "CsvLogger").iterdir()} == {
        f"{n}.csv": csv_text for n in range(300)
    }
    lines = '{"step": 0, "a": 1.0, "b0": 2.0}\n{"step": 1, "a": 1.0, "b1": 2.0}\n'
    assert {file.name: file.read_text() for file in (tmp_path / "JsonlLogger").iterdir()} == {
        f"{n}.jsonl": lines for n in range(300)
    }
    saved = lox.load(tmp_path / "SaveLogger", jax.vmap(jax.random.key)(jnp.arange(300)))
    assert saved["a"].tolist() == [[1.0, 1.0]] * 300
    if "TensorBoardLogger" in kinds:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for n in range(300):
            actual = EventAccumulator(str(tmp_path / "TensorBoardLogger" / str(n))).Reload()
            events = {tag: [(e.step, e.value) for e in actual.Scalars(tag)] for tag in actual.Tags()["scalars"]}
            assert events == {"a": [(0, 1.0), (1, 1.0)], "b0": [(0, 2.0)], "b1": [(1, 2.0)]}


# --- closing one run ---


class Ending(lox.Logger):
    def __init__(self):
        self.calls = []

    def write(self, run, logs):
        self.calls.append(f"{run.name}: {logs}")

    def finish(self, run):
        self.calls.append(f"{run.name} ends")


def logged(logger, state, x):
    logger.log(state, {"x": x})
    logger.close(state)
    return x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_closing_one_run_leaves_the_others(wrap):
    logger = Ending()
    first, second = logger.init(jax.random.key(1)), logger.init(jax.random.key(2))
    wrap(lambda state: logged(logger, state, 1.0))(first)
    jax.effects_barrier()
    logger.flush()
    assert logger.calls == ["1: {'x': [1.0]}", "1 ends"]
    logger.log(second, {"x": 2.0})
    with pytest.raises(lox.LoxError, match=r"^run '1' is closed\. Begin another with `init`\."):
        logger.log(first, {"x": 3.0})
    logger.close(first)  # does nothing the second time
    logger.close()
    assert logger.calls[2:] == ["2: {'x': [2.0]}", "2 ends"]
    with pytest.raises(lox.LoxError, match="`close`: this Ending is closed"):
        logger.close(second)


def test_closing_all_runs_ends_those_behind_one_that_has_ended(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 3))
        jax.vmap(lambda state, x: logger.log(state, {"x": x}, step=0))(states, jnp.arange(3.0))
        logger.close(jax.tree.map(lambda x: x[0], states))
        jax.vmap(logger.close)(states)
        logger.flush()
        assert [run.state for run in lox.runs(tmp_path)] == ["finished"] * 3


def test_the_run_is_that_of_the_state_in_every_call(tmp_path):
    logger, prng_keys = lox.SaveLogger(tmp_path), [jax.random.key(1), jax.random.key(2)]
    states = [logger.init(prng_key) for prng_key in prng_keys]
    for n, run in enumerate([0, 0, 1, 0, 1, 1]):
        logger.log(states[run], {"x": n})
    changing = states[0]._replace(run=np.array(states[0].run))  # as from a checkpoint
    for n in range(2):
        changing.run[...] = states[n].run
        logger.log(changing, {"x": 6 + n})
    assert [lox.load(tmp_path, key)["x"].tolist() for key in prng_keys] == [[0, 1, 3, 6], [2, 4, 5, 7]]
    logger.log(states[0], {"x": 8})
    logger.close(states[0])
    with pytest.raises(lox.LoxError, match=r"^run '1' is closed\. Begin another with `init`\."):
        logger.log(states[0], {"x": 9})
    logger.close()
    with pytest.raises(lox.LoxError, match="`log`: this SaveLogger is closed"):
        logger.log(states[0], {"x": 10})


def test_closing_the_runs_of_a_batch():
    for close in ("outside", "inside"):
        logger = Ending()
        states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(3)))
        if close == "outside":
            logger.close(jax.tree.map(lambda x: x[1:], states))
        else:
            jax.jit(jax.vmap(logger.close))(jax.tree.map(lambda x: x[1:], states))
            logger.flush()
        assert logger.calls == ["1 ends", "2 ends"]
        logger.close()
        assert logger.calls == ["1 ends", "2 ends", "0 ends"]


def test_events_after_a_run_was_closed_are_an_error():
    logger = Ending()
    state = logger.init(jax.random.key(1))
    log = jax.jit(lambda state: logger.log(state, {"x": 1.0}))
    log(state)
    logger.close(state)
    with pytest.warns(lox.LoxWarning, match="failed writing: LoxError: run '1' is closed"):
        log(state)
        jax.effects_barrier()
        with pytest.raises(lox.LoxError, match="run '1' is closed"):
            logger.flush()
    logger.close()
    assert logger.calls == ["1: {'x': [1.0]}", "1 ends"]


def test_closing_one_run_of_several_loggers_and_of_files(tmp_path):
    inner = Ending()
    with lox.MultiLogger(inner, lox.SaveLogger(tmp_path), lox.CsvLogger(tmp_path / "csv")) as logger:
        first, second = logger.init(jax.random.key(1)), logger.init(jax.random.key(2))
        logged(logger, first, 1.0)
        assert inner.calls == ["1: {'x': [1.0]}", "1 ends"]
        logger.log(second, {"x": 2.0})
        logged(logger, logger.init(jax.random.key(3)), 3.0)
    assert inner.calls[2:] == ["2: {'x': [2.0]}", "3: {'x': [3.0]}", "3 ends", "2 ends"]
    assert {name: logs["x"].tolist() for name, logs in lox.load(tmp_path).items()} == {"1": [1], "2": [2], "3": [3]}


def test_closing_something_that_is_not_a_state():
    with Ending() as logger, pytest.raises(lox.LogTypeError, match="`close` got 3 for the logger's state"):
        logger.close(3)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buffer": 3}], ids=str)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_prng_keys_and_integers_of_few_bits(tmp_path, jit, options):
    if options and jax.default_backend() != "cpu":
        pytest.skip("XLA for GPUs cannot take a slice of such numbers that is no whole number of bytes")

    def log(i):
        values = {"key": jax.random.wrap_key_data(jnp.stack([i, i + 7]).astype(jnp.uint32)), "u": i.astype(jnp.uint4)}
        lox.log({**values, "i": (jnp.arange(2, dtype=jnp.int32) - 8 + i).astype(jnp.int4)}, step=i)

    def loop():
        jax.lax.scan(lambda _, i: (log(i), None), None, jnp.arange(2, dtype=jnp.int32))

    def lanes():
        jax.vmap(log)(jnp.arange(2, dtype=jnp.int32))

    if importlib.util.find_spec("rich"):
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100)
        with lox.ConsoleLogger(console=console) as logger:
            logger.tap(jit(loop), logger.init(jax.random.key(0)), **options)()
        assert console.file.getvalue().splitlines()[-1].endswith(" run 0 | step 1 | key 4.5 | u 1 | i -6.5")
    with lox.MultiLogger(lox.SaveLogger(tmp_path), lox.CsvLogger(tmp_path), lox.JsonlLogger(tmp_path)) as logger:
        logger.tap(jit(loop), logger.init(jax.random.key(0)), **options)()
        logger.tap(jit(lanes), logger.init(jax.random.key(1)), **options)()
    keys, small = [[0, 7], [1, 8]], [[-8, -7], [-7, -6]]
    rows = [f'{n},"{keys[n]}",{n},"{small[n]}"\n' for n in range(2)]
    assert (tmp_path / "0.csv").read_text() == "".join(["step,key,u,i\n", *rows])
    assert (tmp_path / "1.csv").read_text() == f'step,key,u,i\n"[0, 1]","{keys}","[0, 1]","{small}"\n'
    rows = [{"step": n, "key": keys[n], "u": n, "i": small[n]} for n in range(2)]
    assert (tmp_path / "0.jsonl").read_text() == "".join(json.dumps(row) + "\n" for row in rows)
    row = {"step": [0, 1], "key": keys, "u": [0, 1], "i": small}
    assert (tmp_path / "1.jsonl").read_text() == json.dumps(row) + "\n"
    for name, wrap in (("0", lambda x: x), ("1", lambda x: [x])):
        logs = lox.load(tmp_path, name)
        assert jax.random.key_data(logs["key"]).tolist() == wrap(keys)
        assert (str(logs["u"].dtype), logs["u"].tolist()) == ("uint4", wrap([0, 1]))
        assert (str(logs["i"].dtype), logs["i"].tolist()) == ("int4", wrap(small))


@pytest.mark.parametrize("options", [{}, {"buffer": 3}])
def test_a_key_that_looks_like_a_leaf_of_another(tmp_path, options):
    """Both have a column, also if they are logged by different lines with the same steps."""

    def f(x):
        def step(c, i):
            lox.log({"stats": {"mean": c}}, step=i)
            lox.log({"stats['mean']": -c}, step=i)
            return c + 1, None

        return jax.lax.scan(step, x, jnp.arange(3))[0]

    with CsvLogger(tmp_path) as logger:
        logger.tap(f, logger.init(jax.random.key(0)), **options)(1.0)
    _, *rows = csv.reader((tmp_path / "0.csv").read_text().splitlines())
    values = [float(cell) for row in rows for cell in row[1:] if cell]
    assert sorted(values) == [-3, -2, -1, 1, 2, 3]


@pytest.mark.parametrize("hook", ["write", "write_lanes"])
@pytest.mark.parametrize("kind", [CsvLogger, JsonlLogger, lox.SaveLogger])
@pytest.mark.parametrize("how", ["tap", "spool", "log"])
def test_a_subclass_of_a_logger_sees_its_logs(tmp_path, kind, hook, how):
    """Whichever of the two it implements; what it hands on is written as without it, PRNG keys included."""
    seen = []

    def implemented(self, runs, logs):
        seen.append((len(runs) if isinstance(runs, list) else 1, sorted(logs)))
        getattr(kind, hook)(self, runs, logs)

    def f(x):
        lox.log({"x": x, "key": jax.random.key(3)}, step=2)

    def use(logger):
        with logger:
            states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.arange(2)))
            if how == "log":
                jax.vmap(lambda s, x: logger.log(s, {"x": x, "key": jax.random.key(3)}, step=2))(states, jnp.arange(2))
            else:
                jax.vmap(lambda s, x: getattr(logger, how)(f, s)(x))(states, jnp.arange(2))

    use(type("Seeing", (kind,), {hook: implemented})(tmp_path / "seen"))
    use(kind(tmp_path / "plain"))
    assert seen == ([(2, ["key", "x"])] if hook == "write_lanes" else [(1, ["key", "x"])] * 2)
    if kind is lox.SaveLogger:
        for logs in (seen_logs := [lox.load(tmp_path / name).stack() for name in ("seen", "plain")]):
            assert jnp.issubdtype(logs["key"].dtype, jax.dtypes.prng_key)
            logs["key"] = jax.random.key_data(logs["key"])
        same(dict(seen_logs[0]), dict(seen_logs[1]))
    else:
        files = [sorted((tmp_path / name).iterdir()) for name in ("seen", "plain")]
        assert [f.read_text() for f in files[0]] == [f.read_text() for f in files[1]]


# --- what crosses to the host ---


def host_calls(jaxpr):
    """The types of the arrays of each host call in a program, without the token."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "lox_emit":
            found.append([v.aval.str_short() for v in eqn.invars[1:]])
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                found += host_calls(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                found += host_calls(inner)
    return found


@pytest.mark.parametrize("options", [{}, {"buffer": 5}, {"interval": 2}, {"interval": 2, "buffer": 5}])
def test_keys_that_are_logged_together_share_their_steps_and_run(options):
    def f(x):
        def step(c, i):
            lox.log({key: c * n for n, key in enumerate("abcde")}, step=i)
            return c + 1, None

        return jax.lax.scan(step, x, jnp.arange(20))[0]

    with Recorder() as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 4))
        tapped = jax.vmap(lambda state, x: logger.tap(f, state, **options)(x))
        calls = host_calls(jax.make_jaxpr(tapped)(states, jnp.arange(4.0)).jaxpr)
    events = "5," if "buffer" in options else ""
    step = ["int32[5]" if events else "int32[]"]
    valid = [step[0].replace("int32", "bool")] if "interval" in options else []
    for call in calls:
        assert call == [f"float32[{events}4]"] * 5 + step + valid + ["int32[4]"]
    assert calls


@pytest.mark.slow
def test_events_for_a_logger_that_is_closed_are_told_at_exit(tmp_path):
    """If nobody closes it again, which nobody does after a `with`, the error comes when Python exits."""
    program = """
import warnings, jax, lox
warnings.simplefilter("ignore")
with lox.SaveLogger("runs") as logger:
    state = logger.init(jax.random.key(0))
    later = jax.jit(lambda state, x: logger.log(state, {"x": x}))
    later(state, 1.0)
later(state, 2.0)
jax.effects_barrier()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "lox._errors.LoxError" not in done.stderr  # under its public name
    assert "lox.LoxError: events came after the logger was closed: they are lost" in done.stderr
    assert lox.load(tmp_path / "runs", "0")["x"].tolist() == [1.0]
