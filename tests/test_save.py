"""`SaveLogger`: what it promises beyond the contract of all loggers, also when things go wrong."""

import datetime
import errno
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import same
from machine import HANG, Disk, finish, load_whatever_is_whole, refuse, start, wait_for
from spec_programs import with_steps

import lox
from lox.loggers import _queue as _writer
from lox.loggers._files import _save
from lox.store import Reader

KILLS = int(os.environ.get("LOX_KILL_N", "3"))
FULL_SIZE = bool(os.environ.get("LOX_FULL_SIZE"))


# --- the examples of the specification ---


def check_carry(logs, times=1):
    same(logs, {"carry": np.asarray([0, 1, 3] * times, np.int32)})
    same(logs.step, {"carry": np.asarray([0, 1, 2] * times, np.int32)})
    same(logs.episode, {"carry": np.asarray([0, 0, 1] * times, np.int32)})


def test_quick_start_loggers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prng_key, xs = jax.random.key(0), jnp.arange(3)
    logger = lox.loggers.SaveLogger("./.lox/")
    assert not os.path.exists(".lox")
    logger_state = logger.init(prng_key)
    y = logger.spool(with_steps, logger_state)(xs)
    assert int(y) == 3
    check_carry(lox.load("./.lox/"))  # at once, although the logger is neither flushed nor closed

    console_logger = lox.loggers.ConsoleLogger()
    save_logger = lox.loggers.SaveLogger("./.lox/")
    multi_logger = lox.loggers.MultiLogger(console_logger, save_logger)
    multi_logger_state = multi_logger.init(prng_key)
    y = multi_logger.tap(with_steps, multi_logger_state)(xs)
    assert int(y) == 3
    assert [run.name for run in lox.runs(".lox")] == ["0", "0.1"]  # neither asks nor overwrites
    with pytest.warns(lox.LoxWarning, match="2 runs, '0' and '0.1': the newest is loaded"):
        check_carry(lox.load(".lox", prng_key))
    for name in ("0", "0.1"):
        check_carry(lox.load(".lox", name))
    multi_logger.close()
    logger.close()


def test_sharp_bits_loggers_and_state(tmp_path):
    def f(x):
        lox.log({"loss": x}, tags=["metric"])
        lox.log({"gradient_norm": 2 * x}, tags=["debug"])
        return x

    logger = lox.loggers.SaveLogger(tmp_path / "logs")
    logger_state = logger.init(jax.random.key(0))
    y = logger.spool(f, logger_state)(1.0)
    assert float(y) == 1.0
    same(lox.load(tmp_path / "logs"), {"loss": np.ones(1, np.float32), "gradient_norm": np.full(1, 2, np.float32)})
    y = logger.tap(f, logger_state, tags=["metric"])(3.0)
    logs = lox.load(tmp_path / "logs", jax.random.key(0))
    assert {key: logs[key].tolist() for key in logs} == {"loss": [1.0, 3.0], "gradient_norm": [2.0]}
    assert lox.load(tmp_path / "logs", argnames="g*").keys() == {"gradient_norm"}
    logger.close()


def test_spooled_logs_can_be_saved_too(tmp_path):
    def f(x):
        lox.log({"x": x})
        return x + 1.0

    _, logs = lox.spool(f)(1.0)
    lox.save(logs, tmp_path, jax.random.key(0))
    with lox.SaveLogger(tmp_path, mode="append") as logger:
        logger.log(logger.init(jax.random.key(0)), lox.spool(f)(2.0)[1])
    same(lox.load(tmp_path, jax.random.key(0)), {"x": np.asarray([1, 2], np.float32)})


# --- modes ---


def log_one(path, value, **options):
    with lox.SaveLogger(path, **options) as logger:
        state = logger.init(jax.random.key(42))
        logger.log(state, {"x": value})


def xs_of(path):
    return {run.name: lox.load(path, run.name)["x"].tolist() for run in lox.runs(path)}


def test_modes(tmp_path):
    log_one(tmp_path, 1)
    log_one(tmp_path, 2)
    assert xs_of(tmp_path) == {"42": [1], "42.1": [2]}
    log_one(tmp_path, 3, mode="append")
    assert xs_of(tmp_path) == {"42": [1], "42.1": [2, 3]}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(lox.RunExistsError, match=r"the run '42.1' is already in .*\nUse another PRNG key or directory"):
        log_one(tmp_path, 4, mode="error")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "mine.txt").write_text("not lox's")
    log_one(tmp_path, 5, mode="overwrite")
    assert xs_of(tmp_path) == {"42": [5]}
    assert (tmp_path / "mine.txt").read_text() == "not lox's"
    assert len(list(tmp_path.iterdir())) == 2
    log_one(tmp_path / "fresh", 6, mode="error")
    assert xs_of(tmp_path / "fresh") == {"42": [6]}


def test_the_same_key_twice_in_one_logger(tmp_path):
    def twice(mode):
        with lox.SaveLogger(tmp_path / mode, mode=mode) as logger:
            for value in (1, 2):
                logger.log(logger.init(jax.random.key(42)), {"x": value})
        return xs_of(tmp_path / mode)

    assert twice("new") == {"42": [1], "42.1": [2]}
    assert twice("append") == {"42": [1, 2]}
    assert twice("overwrite") == {"42": [2]}
    with pytest.raises(lox.RunExistsError):
        twice("error")
    assert xs_of(tmp_path / "error") == {"42": [1]}


def test_a_run_that_exists_inside_a_compiled_program(tmp_path):
    log_one(tmp_path, 1)
    with lox.SaveLogger(tmp_path, mode="error") as logger:

        @jax.jit
        def run(prng_key, x):
            logger.log(logger.init(prng_key), {"x": x})
            return 2 * x

        with pytest.warns(lox.LoxWarning, match="failed opening run '42': RunExistsError"):
            assert int(run(jax.random.key(42), 5)) == 10  # the program does not notice
            with pytest.raises(ExceptionGroup, match=r"SaveLogger had 2 errors.*the run '42' is already in"):
                logger.flush()
        run(jax.random.key(43), 6)
    assert xs_of(tmp_path) == {"42": [1], "43": [6]}


def test_wrong_arguments(tmp_path):
    with pytest.raises(
        ValueError, match="`mode` is 'overwite'; choose one of 'new', 'append', 'overwrite' and 'error'"
    ):
        lox.SaveLogger(tmp_path, mode="overwite")
    with pytest.raises(TypeError, match="`path` is None; it must be the name of a folder"):
        lox.SaveLogger(None)
    (tmp_path / "file").write_text("")
    with pytest.raises(lox.StoreError, match=r"file' is a file: choose a directory"):
        lox.SaveLogger(tmp_path / "file").init(jax.random.key(0))


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with lox.SaveLogger("runs") as logger:
        monkeypatch.chdir("elsewhere")
        logger.log(logger.init(jax.random.key(42)), {"x": 1})
    assert xs_of(tmp_path / "runs") == {"42": [1]}
    assert not os.listdir(".")


# --- values ---


def test_config_of_each_run(tmp_path):
    prng_keys, lrs = jax.random.split(jax.random.key(0), 3), jnp.array([0.5, 0.25, 0.125])
    with lox.SaveLogger(tmp_path) as logger:
        init = lambda prng_key, lr: logger.init(prng_key, {"lr": lr, "name": "adam", "net": {"sizes": (2, 3)}})  # noqa: E731
        jax.jit(jax.vmap(init))(prng_keys, lrs)
        logger.flush()
        actual = lox.runs(tmp_path)
        logger.init(jax.random.key(9))
    assert [run.config for run in actual] == [
        {"lr": lr, "name": "adam", "net": {"sizes": [2, 3]}} for lr in (0.5, 0.25, 0.125)
    ]
    assert (jnp.stack([run.key for run in actual]) == prng_keys).all()
    assert not lox.runs(tmp_path)[-1].config


DTYPES = (
    "bool int4 uint4 int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32 float8_e4m3fn float8_e5m2 complex64"
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buffer": 2}, None], ids=["tap", "buffer", "spool"])
def test_all_dtypes_bit_by_bit(tmp_path, options):
    bits = np.random.default_rng(0).integers(0, 256, (3, 16), np.uint8)
    values = {}
    for name in DTYPES.split():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        if name in ("bool", "int4", "uint4"):
            values[name] = (bits % 2).astype(dtype)
        else:
            values[name] = bits.view(dtype).copy()
            if name.startswith("float8"):  # XLA itself makes one NaN of all of these
                values[name][np.isnan(values[name].astype(np.float32))] = 0

    def f(xs):
        def step(carry, x):
            lox.log({"tree": (x, {"again": x})}, step=carry)
            return carry + 1, None

        return jax.lax.scan(step, 0, xs)[0]

    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        act = logger.spool(f, state) if options is None else logger.tap(f, state, **options)
        jax.jit(act)(values)
    first, other = lox.load(tmp_path)["tree"]
    for name, x in values.items():
        for actual in (first[name], other["again"][name]):
            assert (actual.dtype, actual.shape) == (x.dtype, x.shape), name
            assert actual.tobytes() == x.tobytes(), name


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buffer": 2}, None], ids=["tap", "buffer", "spool"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prng_keys_as_values(tmp_path, impl, options):
    def f(key):
        def step(key, i):
            key, sub = jax.random.split(key)
            lox.log({"key": sub, "tree": {"both": jnp.stack([key, sub]), "i": i}}, step=i)
            return key, None

        return jax.lax.scan(step, key, jnp.arange(3))[0]

    prng_keys = jax.random.split(jax.random.key(0, impl=impl), 2)
    with lox.SaveLogger(tmp_path) as logger:

        def run(key):
            state = logger.init(key)
            return logger.spool(f, state)(key) if options is None else logger.tap(f, state, **options)(key)

        jax.jit(jax.vmap(run))(prng_keys)
        logger.log(logger.init(jax.random.key(9)), {"key": prng_keys[0]})
    logs, expected = lox.load(tmp_path, prng_keys), jax.vmap(lox.spool(f))(prng_keys)[1]
    for actual, key in (logs["key"], expected["key"]), (logs["tree"]["both"], expected["tree"]["both"]):
        assert (actual.dtype, actual.shape) == (key.dtype, key.shape)
        assert (actual == key).all()
    same(logs["tree"]["i"], expected["tree"]["i"])
    assert (lox.load(tmp_path, jax.random.key(9))["key"] == prng_keys[:1]).all()


def test_prng_keys_are_words_to_other_loggers(tmp_path):
    loggers = lox.SaveLogger(tmp_path), lox.JsonlLogger(tmp_path / "json")
    with lox.MultiLogger(*loggers) as logger:
        state = logger.init(jax.random.key(0))
        lox.tap(lambda key: lox.log({"key": key}))
        logger.tap(lambda key: lox.log({"key": key, "x": 1}), state)(jax.random.key(5))
    assert json.loads((tmp_path / "json" / "0.jsonl").read_text()) == {"key": [0, 5], "x": 1}
    assert (lox.load(tmp_path)["key"] == jax.random.key(5)[None]).all()


HOSTILE = [
    "../evil",
    "/etc/passwd",
    "",
    "\n",
    "\0",
    "k" * 10_000,
    "schlüssel/钥匙/🔑",
    "run",
    "wall",
    "step",
    "CON",
    "a.b",
]


def test_hostile_keys(tmp_path):
    directory = tmp_path / "runs"
    with lox.SaveLogger(directory) as logger:
        state = logger.init(jax.random.key(0))
        for i, key in enumerate(HOSTILE):
            jax.jit(lambda i, key=key: logger.tap(lambda i: lox.log({key: i, "all": i}, step=i), state)(i))(i)
        logger.log(state, {key: i for i, key in enumerate(HOSTILE)}, **{"run": 7, "../evil": 8})
    logs = lox.load(directory)
    assert {key: logs[key].tolist() for key in HOSTILE} == {key: [i, i] for i, key in enumerate(HOSTILE)}
    assert logs["all"].tolist() == list(range(len(HOSTILE)))
    assert logs.steps["../evil"]["\n"].tolist() == [-1, 8]
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    names = {p.name for p in directory.rglob("*") if p.is_file()}
    assert all(name in ("meta.json", "runs.jsonl") or name.startswith("p0000-") for name in names)


def test_lanes_inside_a_run(tmp_path):
    def f(x):
        jax.lax.cond(x > 0, lambda: lox.log({"x": x}, step=0) and None, lambda: None)
        return x

    with lox.SaveLogger(tmp_path) as logger:
        jax.jit(logger.tap(jax.vmap(f), logger.init(jax.random.key(0))))(jnp.array([1, -1, 2]))
    logs = lox.load(tmp_path)
    assert logs["x"].shape == (1, 3) and logs.valid["x"].tolist() == [[True, False, True]]
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == [[1], [], [2]]


# --- many lanes ---


@pytest.mark.slow
def test_a_thousand_lanes(tmp_path):
    """1024 lanes × 5 keys × 10,000 steps with LOX_FULL_SIZE=1."""
    lanes, steps = 1024, 10_000 if FULL_SIZE else 300

    def train(w, lr):
        def step(w, i):
            w = w - lr * (w - 3.0)
            lox.log({"loss": (w - 3.0) ** 2, "w": w, "lr": lr, "grad": lr * (w - 3.0)}, step=i)
            lox.log({"seed": jnp.round(lr * 1e6).astype(jnp.int32) + i})
            return w, None

        return jax.lax.scan(step, w, jnp.arange(steps))[0]

    prng_keys, lrs = jax.random.split(jax.random.key(0), lanes), jnp.linspace(1e-4, 1e-1, lanes)
    begin = time.perf_counter()
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(lambda key, lr: logger.init(key, {"lr": lr}))(prng_keys, lrs)
        run = jax.jit(jax.vmap(lambda state, lr: logger.tap(train, state, buffer=100)(0.0, lr)))
        out = run(states, lrs)
    written = time.perf_counter()
    logs = lox.load(tmp_path, prng_keys)
    print(f"{lanes} lanes × 5 keys × {steps} steps: written {written - begin:.1f} s, "
          f"read {time.perf_counter() - written:.1f} s")  # fmt: skip
    expected_out, expected = jax.jit(jax.vmap(lox.spool(train), in_axes=(None, 0)))(0.0, lrs)
    np.testing.assert_array_equal(out, expected_out)
    assert set(logs) == set(expected) and not logs.valid
    for key in expected:
        actual, wanted = logs[key], np.asarray(expected[key])
        assert (actual.shape, actual.dtype) == ((lanes, steps), wanted.dtype)
        assert actual.tobytes() == wanted.tobytes(), key
    for key in set(expected) - {"seed"}:
        assert (logs.step[key] == np.arange(steps)).all()
    assert np.array_equal(np.float32([run.config["lr"] for run in lox.runs(tmp_path)]), lrs)
    assert len(list(tmp_path.iterdir())) == 1  # one group for all of them
    assert logger._writer is None  # closed


def test_lanes_need_few_calls(tmp_path, monkeypatch):
    calls = []
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 256))
        really = logger._writer.append_bundles
        monkeypatch.setattr(
            logger._writer, "append_bundles", lambda runs, logs: calls.append(len(runs)) or really(runs, logs)
        )
        f = lambda x: jax.lax.scan(lambda c, i: (c, lox.log({"x": x + i})), 0, jnp.arange(10))[0]  # noqa: E731
        jax.jit(jax.vmap(lambda s, x: logger.tap(f, s, buffer=10)(x)))(states, jnp.arange(256))
        logger.flush()
        assert calls == [256]


# --- when events reach the disk ---


def rows_on_disk(path):
    """Read events as another process does, without a flush."""
    return sum(len(logs["x"]) for logs in Reader(path).poll().values() if "x" in logs)


def test_events_are_written_soon_without_a_flush(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        for n in range(3):
            logger.log(state, {"x": n})
            wait_for(lambda n=n: rows_on_disk(tmp_path) == n + 1)


def test_small_writes_are_coalesced(tmp_path, monkeypatch):
    # A program that takes no time, without a pause.
    monkeypatch.setattr(_save, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(_writer, "_PAUSE", HANG)
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        batches, writer = [], logger._writer
        really = writer._write_pending
        writer._write_pending = lambda: batches.append(writer._pending) or really()
        jax.jit(logger.tap(lambda: jax.lax.fori_loop(0, 5000, lambda i, c: (lox.log({"x": i}), c)[1], 0), state))()
        logger.flush()
    assert lox.load(tmp_path)["x"].tolist() == list(range(5000))
    assert sum(size > 0 for size in batches) <= 4  # the first, one for each 64 KiB, and the rest


def test_load_and_runs_see_what_was_logged(tmp_path):
    loggers = [lox.SaveLogger(tmp_path), lox.SaveLogger(tmp_path), lox.SaveLogger(tmp_path / "other")]
    f = lambda n: lox.log({"x": n}) and None  # noqa: E731
    steps = [jax.jit(lambda state, n, logger=logger: logger.tap(f, state)(n)) for logger in loggers]
    states = [logger.init(jax.random.key(seed)) for seed, logger in enumerate(loggers)]
    for n in range(5):
        for step, state in zip(steps, states, strict=True):
            step(state, n)
        assert xs_of(tmp_path) == {"0": list(range(n + 1)), "1": list(range(n + 1))}
    for logger in loggers:
        logger.close()
    assert xs_of(tmp_path / "other") == {"2": list(range(5))}


def test_loading_keeps_the_errors_of_the_logger(tmp_path, monkeypatch):
    logger = lox.SaveLogger(tmp_path)
    state = logger.init(jax.random.key(0))
    logger.log(state, {"x": 1})
    logger.flush()
    with monkeypatch.context() as patched, pytest.warns(lox.LoxWarning, match="failed writing 'x': OSError: broken"):
        patched.setattr(logger._writer, "append_bundles", lambda *_: (_ for _ in ()).throw(OSError("broken")))
        logger.log(state, {"x": 2})
        assert lox.load(tmp_path)["x"].tolist() == [1]
    with pytest.raises(OSError, match="broken"):
        logger.close()


@pytest.mark.slow
def test_closing_at_exit_and_the_output(tmp_path):
    code = """
        import jax, jax.numpy as jnp, lox
        logger = lox.SaveLogger("runs")
        state = logger.init(jax.random.key(42))
        f = lambda: jax.lax.fori_loop(0, 1000, lambda i, c: (lox.log({"x": i}), c)[1], 0)
        jax.jit(logger.tap(f, state))()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert xs_of(tmp_path / "runs") == {"42": list(range(1000))}
    (group,) = (tmp_path / "runs").iterdir()
    assert json.loads((group / "meta.json").read_text())["status"] == "closed"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c(tmp_path):
    code = """
        import jax, lox, sys, time
        with lox.SaveLogger("runs") as logger:
            state = logger.init(jax.random.key(42))
            step = jax.jit(lambda state, n: logger.log(state, {"x": n}))
            for n in range(100):
                step(state, n)
            print("begun", flush=True)
            time.sleep(float(sys.argv[1]))
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(HANG)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(2)
    _, err = process.communicate(timeout=HANG)
    assert err.rstrip().endswith("KeyboardInterrupt") and "lox" not in err.replace(str(Path(__file__).parents[1]), "")
    assert xs_of(tmp_path / "runs") == {"42": list(range(100))}


# --- other processes ---


def check_training(logs, seed, least=0):
    n = len(logs["x"])
    assert n >= least
    steps = np.arange(n, dtype=np.int32)
    same(logs, {"x": 3 * steps + np.int32(seed), "y": np.stack([steps, -steps], 1)})
    same(logs.step, {"x": steps, "y": steps})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_a_training_at_any_moment(tmp_path):
    """LOX_KILL_N=100 kills more of them."""
    out = finish(start("kill_training", tmp_path, KILLS, int(time.time())))
    acknowledged = json.loads(out)
    assert len(acknowledged) == KILLS and min(acknowledged) >= 50
    torn = 0
    for i, least in enumerate(acknowledged):
        runs, warned = load_whatever_is_whole(tmp_path / str(i))
        for seed in range(3):
            check_training(runs[str(seed)], seed, least)
        torn += warned
    print(f"{KILLS} kills, {torn} torn tails, {sum(acknowledged)} acknowledged steps of 3 runs")


@pytest.mark.slow
def test_other_processes_read_and_write_meanwhile(tmp_path):
    """Two processes train with the same PRNG keys on the same directory, while this one reads."""
    slow, other = start("tail_training", tmp_path, 8, stdin=subprocess.PIPE), start("race_training", tmp_path, 20)
    reader, seen = Reader(tmp_path), {}

    def has_come(name, number):
        for run, logs in reader.poll().items():
            seen.setdefault(run, []).extend(logs["x"].tolist())
        return len(seen.get(name, [])) == number

    name = slow.stdout.readline().strip()
    for n in range(8):  # events come little by little, without a flush
        wait_for(lambda n=n: has_come(name, 10 * (n + 1)))
        slow.stdin.write("\n")
        slow.stdin.flush()
    finish(slow)
    finish(other)
    has_come(name, 80)
    assert sorted(seen) == ["0", "0.1", "1", "1.1", "2", "2.1"]
    assert sorted(map(len, seen.values())) == [80] * 3 + [200] * 3
    for name, xs in seen.items():
        assert xs == [3 * i + int(name[0]) for i in range(len(xs))]
        check_training(lox.load(tmp_path, name), int(name[0]))
    assert [run.config for run in lox.runs(tmp_path)].count({"seed": 2}) == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_have_loggers_of_their_own(tmp_path):
    """A fork reads without waiting for its parent's logger, writes with its own, and closes only that."""
    code = """
        import os, warnings, jax, lox
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks, but this one does not compute
        warnings.simplefilter("ignore", DeprecationWarning)
        logger = lox.SaveLogger("runs")
        state = logger.init(jax.random.key(42))
        logger.log(state, {"x": 1})
        logger.flush()
        logger._writer._lock.acquire()  # as if its thread were in the middle of writing
        if os.fork() == 0:
            assert lox.load("runs")["x"].tolist() == [1]
            writer = lox.store.Writer("runs")
            writer.append(writer.open_run("child"), {"x": 2})
            assert lox.load("runs", "child")["x"].tolist() == [2]
            lox.store._open._close_all()
            os._exit(0 if writer.closed else 1)  # JAX's own clean-up would crash in a fork
        logger._writer._lock.release()
        assert os.wait()[1] == 0
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert xs_of(tmp_path / "runs") == {"42": [1], "child": [2]}


# --- a disk that refuses ---


def a_training(logger, state):
    @jax.jit
    def run(x):
        def step(x, i):
            x = x + 1
            lox.log({"x": x, "wide": jnp.zeros(100)}, step=i)
            return x, None

        return logger.tap(lambda x: jax.lax.scan(step, x, jnp.arange(500))[0], state, buffer=50)(x)

    return run


@pytest.mark.parametrize("room", [0, 50_000])
def test_disk_full(tmp_path, monkeypatch, room):
    logger = lox.SaveLogger(tmp_path)
    run = a_training(logger, logger.init(jax.random.key(0)))
    assert int(run(0)) == 500
    logger.flush()
    disk = Disk(monkeypatch, room)
    with pytest.warns(lox.LoxWarning, match=r"SaveLogger: cannot write .*No space left on device"):
        assert int(run(500)) == 1000  # as if nothing had happened
        with pytest.raises(
            lox.StoreError, match=r"cannot write '.*arrows': No space left on device.*\n.*Free some space"
        ):
            logger.flush()
    with pytest.warns(lox.LoxWarning, match="not all that was logged is on disk"):
        actual = lox.load(tmp_path)["x"]
    assert len(actual) >= 500 and actual.tolist() == list(range(1, len(actual) + 1))  # earlier data intact
    disk.room = 1 << 30  # there is room again
    logger.flush()
    logger.close()
    same(lox.load(tmp_path)["x"], np.arange(1, 1001, dtype=np.int32))


def test_full_until_the_end(tmp_path, monkeypatch):
    logger = lox.SaveLogger(tmp_path)
    run = a_training(logger, logger.init(jax.random.key(0)))
    run(0)
    logger.flush()
    Disk(monkeypatch, 0)
    with pytest.warns(lox.LoxWarning, match="No space left"):
        assert int(run(500)) == 1000
        with pytest.raises(lox.StoreError) as caught:
            logger.close()
    assert caught.value.errno == errno.ENOSPC
    assert "500 events were not written" in str(caught.value)
    monkeypatch.undo()
    same(lox.load(tmp_path)["x"], np.arange(1, 501, dtype=np.int32))


def test_an_error_of_the_program_comes_first(tmp_path, monkeypatch):
    with pytest.warns(lox.LoxWarning), pytest.raises(ZeroDivisionError) as caught, lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        Disk(monkeypatch, 0)
        logger.log(state, {"x": np.zeros(20_000)})
        1 / 0  # noqa: B018
    assert "SaveLogger had an error too: StoreError: cannot write" in caught.value.__notes__[0]


def test_read_only_directory(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.mkdir", refuse)
        with pytest.raises(
            lox.StoreError, match=r"Read-only file system\.\nChoose another directory, or make this one"
        ):
            lox.SaveLogger(tmp_path / "new").init(jax.random.key(0))
    logger = lox.SaveLogger(tmp_path)
    run = a_training(logger, logger.init(jax.random.key(0)))
    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        with pytest.warns(lox.LoxWarning, match="SaveLogger: cannot write .*Read-only file system"):
            assert int(run(0)) == 500
            with pytest.raises(lox.StoreError, match=r"cannot write '.*arrows': Read-only file system"):
                logger.flush()
    logger.close()  # writable again, and nothing was lost
    same(lox.load(tmp_path)["x"], np.arange(1, 501, dtype=np.int32))


def test_a_directory_that_cannot_be_made_by_a_compiled_program(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    logger = lox.SaveLogger(tmp_path / "file")

    @jax.jit
    def run(prng_key, x):
        return a_training(logger, logger.init(prng_key))(x)

    with pytest.warns(lox.LoxWarning, match="SaveLogger failed opening run '7': StoreError: .*is a file"):
        assert int(run(jax.random.key(7), 0)) == 500
        with pytest.raises(ExceptionGroup, match=r"SaveLogger had 2 errors, the first of them: '.*file' is a file"):
            logger.close()


def test_one_failing_logger_does_not_stop_the_other(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    from rich.console import Console

    out = io.StringIO()
    save, console = lox.SaveLogger(tmp_path), lox.ConsoleLogger(console=Console(file=out, width=200), every=0.0)
    logger = lox.MultiLogger(save, console)
    run = a_training(logger, logger.init(jax.random.key(42)))
    disk = Disk(monkeypatch, 0)
    with pytest.warns(lox.LoxWarning, match="SaveLogger: cannot write .*No space left"):
        assert int(run(0)) == 500
        with pytest.raises(lox.StoreError, match="No space left"):
            logger.flush()
    disk.room = 1 << 30
    logger.close()
    assert "run 42 | step 499 | x 500 | wide 0" in out.getvalue().splitlines()[-1]
    same(lox.load(tmp_path)["x"], np.arange(1, 501, dtype=np.int32))


def test_threads_log_at_once(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        states = [logger.init(jax.random.key(seed)) for seed in range(4)]

        def work(state):
            for n in range(50):
                logger.log(state, {"x": n})

        threads = [threading.Thread(target=work, args=(state,)) for state in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert xs_of(tmp_path) == {str(seed): list(range(50)) for seed in range(4)}


# --- short names of modes, as for files ---


def test_modes_as_files_have_them(tmp_path):
    prng_key = jax.random.key(3)
    lox.save({"x": 1}, tmp_path, prng_key, mode="w")
    lox.save({"x": 2}, tmp_path, prng_key, mode="a")
    same(lox.load(tmp_path, prng_key), {"x": np.asarray([1, 2])})
    with lox.SaveLogger(tmp_path, mode="a") as logger:
        logger.log(logger.init(prng_key), {"x": np.asarray(3)})
    same(lox.load(tmp_path, prng_key), {"x": np.asarray([1, 2, 3])})
    with pytest.raises(lox.RunExistsError):
        lox.save({"x": 4}, tmp_path, prng_key, mode="x")
    with lox.SaveLogger(tmp_path, mode="w") as logger:
        logger.log(logger.init(prng_key), {"x": np.asarray(5)})
    same(lox.load(tmp_path), {"x": np.asarray([5])})
    with pytest.raises(lox.OptionError, match="`mode` is 'r'; choose one of 'new', 'append', 'overwrite' and 'error'"):
        lox.save({"x": 4}, tmp_path, prng_key, mode="r")


PRNG_KEYS = jax.vmap(jax.random.key)(jnp.array([3, 4, 5]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("make", [dict, lox.logdict])
@pytest.mark.parametrize("raw", [False, True])
def test_plain_arrays_are_split_over_an_array_of_prng_keys(tmp_path, wrap, make, raw):
    x, y = np.arange(3, dtype=np.float32), np.arange(6, dtype=np.int32).reshape(3, 2)
    histogram = jax.vmap(lambda x: lox.Histogram(x, 4, (0, 6)))(jnp.asarray(y, jnp.float32))

    @wrap
    def save(prng_keys, x):
        values = {"x": x, "tree": {"y": y, "same": 7.0}, "h": histogram, "key": PRNG_KEYS}
        lox.save(make(values), tmp_path, jax.random.key_data(prng_keys) if raw else prng_keys)

    save(PRNG_KEYS, x)
    jax.effects_barrier()
    assert [run.name for run in lox.runs(tmp_path)] == ["3", "4", "5"]
    for n, prng_key in enumerate(PRNG_KEYS):
        logs = lox.load(tmp_path, prng_key)
        same(logs["x"], x[n : n + 1])
        assert logs["tree"]["y"].tolist() == y[n : n + 1].tolist() and logs["tree"]["same"].tolist() == [7.0]
        same(logs["h"].counts, np.asarray(histogram.counts)[n : n + 1])
        assert (logs["key"] == PRNG_KEYS[n : n + 1]).all()


def test_plain_arrays_for_a_grid_of_prng_keys(tmp_path):
    prng_keys = jax.vmap(jax.vmap(jax.random.key))(jnp.arange(6).reshape(2, 3))
    lox.save({"x": np.arange(12).reshape(2, 3, 2)}, tmp_path, prng_keys)
    same(lox.load(tmp_path, jax.random.key(4)), {"x": np.asarray([[8, 9]])})


def test_plain_arrays_that_do_not_fit_the_prng_keys(tmp_path):
    message = r"`lox.save` got PRNG keys of shape \(3,\), but 'x' has the shape {}: .*for each: `jax.vmap"
    for wrap in (lambda f: f, jax.jit):
        for shape in ((5,), (2, 3)):
            with pytest.raises(lox.MismatchError, match=message.format(re.escape(str(shape)))):
                wrap(lambda x: lox.save({"x": x}, tmp_path, PRNG_KEYS))(np.zeros(shape))
    logs = lox.logdict({"x": np.zeros((3, 5))}, steps={"step": {"x": np.arange(5)}})
    with pytest.raises(lox.MismatchError, match=r"'x' has events.*`lox.logdict.from_arrays\(..., lanes=1\)`"):
        lox.save(logs, tmp_path, PRNG_KEYS)
    assert not list(tmp_path.iterdir())
    lox.save({"x": np.zeros(5)}, tmp_path, PRNG_KEYS[0])  # one event
    same(lox.load(tmp_path), {"x": np.zeros((1, 5))})


def test_logs_that_do_not_depend_on_the_lane_are_in_every_run(tmp_path):
    def f(x):
        lox.log({"x": x, "same": jnp.arange(3)})

    lox.save(lox.spool(jax.vmap(f))(jnp.arange(3))[1], tmp_path, PRNG_KEYS)
    assert lox.load(tmp_path, PRNG_KEYS)["same"].tolist() == [[[0, 1, 2]]] * 3
    assert lox.load(tmp_path, PRNG_KEYS)["x"].tolist() == [[0], [1], [2]]


# --- save inside programs ---


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_save_inside_a_program(tmp_path, wrap):
    prng_key = jax.random.key(5)

    @wrap
    def f(x, prng_key):
        _, logs = lox.spool(with_steps)(x)
        lox.save(logs, tmp_path, prng_key, config={"scale": x[1], "name": "a"})
        lox.save({"last": x[-1], "one": 1, "key": prng_key}, tmp_path, prng_key)
        return x

    for _ in range(2):
        f(jnp.arange(3), prng_key)
    jax.effects_barrier()
    logs = lox.load(tmp_path, prng_key)
    same(logs["carry"], np.asarray([0, 1, 3] * 2, np.int32))
    same(logs.step["carry"], np.asarray([0, 1, 2] * 2, np.int32))
    same(logs["last"], np.asarray([2, 2], np.int32))
    assert [run.config for run in lox.runs(tmp_path)] == [{"scale": 1, "name": "a"}]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_save_under_vmap_makes_a_run_per_prng_key(tmp_path, wrap):
    prng_keys = jax.vmap(jax.random.key)(jnp.array([3, 4, 5]))
    save = wrap(jax.vmap(lambda key, x: lox.save({"x": x, "same": 7}, tmp_path, key, mode="w", config={"x": x})))
    for scale in (1, 2):
        save(prng_keys, scale * jnp.arange(3))
    jax.effects_barrier()
    same(lox.load(tmp_path, prng_keys)["x"], np.asarray([[0], [2], [4]], np.int32))
    assert [(run.name, run.config) for run in lox.runs(tmp_path)] == [("3", {"x": 0}), ("4", {"x": 2}), ("5", {"x": 4})]
    jax.effects_barrier()
    raw = jax.vmap(jax.random.PRNGKey)(jnp.array([3, 4, 5]))
    same(lox.load(tmp_path, raw)["same"], np.asarray([[7]] * 3, np.int32))


def test_save_under_vmap_of_one_run_writes_lane_after_lane(tmp_path):
    jax.jit(jax.vmap(lambda x: lox.save({"x": x}, tmp_path)))(jnp.arange(3))
    jax.effects_barrier()
    same(lox.load(tmp_path), {"x": np.asarray([0, 1, 2], np.int32)})


def test_save_in_loops_and_branches(tmp_path):
    def body(c, i):
        jax.lax.cond(i % 2 == 0, lambda: lox.save({"i": i}, tmp_path), lambda: None)
        return c, None

    jax.jit(lambda: jax.lax.scan(body, 0, jnp.arange(5)))()
    jax.effects_barrier()
    same(lox.load(tmp_path), {"i": np.asarray([0, 2, 4], np.int32)})


def test_ragged_logs_saved_inside_a_program(tmp_path):
    def f(x):
        lox.log({"x": x}, where=x > 1)
        return x

    prng_keys = jax.random.split(jax.random.key(0), 3)
    each = lambda key, xs: lox.save(lox.spool(lambda xs: jax.lax.map(f, xs))(xs)[1], tmp_path, key)  # noqa: E731
    jax.jit(jax.vmap(each))(prng_keys, jnp.array([[0, 1], [1, 2], [3, 4]]))
    jax.effects_barrier()
    assert [lox.load(tmp_path, key).get("x", np.zeros(0)).tolist() for key in prng_keys] == [[], [2], [3, 4]]


# --- files that are written once ---


def test_rotation_writes_every_file_once(tmp_path, monkeypatch):
    """Nothing is appended to, and what is there never changes; the list of runs and the metadata are replaced."""
    opened, real = [], os.open

    def watched(file, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(tmp_path) in str(file):
            assert not os.path.exists(file), f"{file} is opened again"
            opened.append(file)
        return real(file, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    seen = {}
    with lox.SaveLogger(tmp_path, rotate=("500 B", "1 h")) as logger:
        for seed in range(3):
            state = logger.init(jax.random.key(seed))
            for i in range(200):
                logger.log(state, {"x": float(i)}, step=i)
                if i % 50 == 0:
                    logger._pipeline.catch_up()
                    for file in tmp_path.glob("*/*.arrows"):
                        data = file.read_bytes()
                        assert seen.setdefault(file, data) == data
                if i == 100:
                    logger.flush()
                    assert lox.load(tmp_path, str(seed))["x"].tolist() == list(range(101))
    assert len(list(tmp_path.glob("*/*.arrows"))) == len(opened) > 6
    for seed in range(3):
        assert lox.load(tmp_path, str(seed))["x"].tolist() == list(range(200))


def test_rotation_by_age(tmp_path):
    logger = lox.SaveLogger(tmp_path, rotate=datetime.timedelta(seconds=0.3))
    state = logger.init(jax.random.key(0))
    for i in range(3):
        logger.log(state, {"x": float(i)})
    logger._pipeline.catch_up()
    reader, seen, deadline = lox.store.Reader(tmp_path), [], time.monotonic() + 60
    while len(seen) < 3:  # although no further event comes; on a busy machine they may not all be in the first file
        assert time.monotonic() < deadline
        seen += [x for logs in reader.poll().values() for x in logs["x"].tolist()]
    assert seen == [0.0, 1.0, 2.0]
    logger.close()


@pytest.mark.parametrize("rotate", ["16", "MB", "1 week", 0, "1 GB", -1, True, "0 s", ("1 MB", None), 1.5])
def test_a_wrong_rotation(tmp_path, rotate):
    with pytest.raises(lox.OptionError, match="`rotate` is"):
        lox.SaveLogger(tmp_path, rotate=rotate)
