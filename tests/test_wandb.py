"""`lox.wandb` and `WandbLogger` with the real client, offline: every value and step is read back from its files."""

import concurrent.futures
import errno
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace as namespace

import forks as python_forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wandb_file
from machine import HANG

import lox
import lox.wandb
from lox.loggers import WandbLogger
from lox.loggers._module_api import SingleRuns
from lox.loggers._trackers import _wandb_file

pytestmark = pytest.mark.slow

wandb = pytest.importorskip("wandb")
EXAMPLES = Path(__file__).parent.parent / "examples"
PRNG_KEYS = jax.vmap(jax.random.key)(jnp.array([7, 8, 9]))


@pytest.fixture
def offline(tmp_path):
    """Return arguments, because the client reads its environment variables once per process."""
    quietly = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
    return {"mode": "offline", "dir": str(tmp_path), "project": "p", "settings": quietly}


def rows_of(file, *columns):
    return [tuple(row.get(column) for column in columns) for row in file.rows]


def train(x):
    def step(x, i):
        lox.log({"loss": x}, step=i, episode=i // 2)
        return x + jnp.float32(0.5), None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


# --- the module ---


def test_one_run_per_lane(tmp_path, offline):
    @jax.jit
    @jax.vmap
    def program(prng_key, rate):
        run = lox.wandb.init(prng_key, **offline, group="seeds", config={"rate": rate, "name": "sgd"}, tags=["a"])
        lox.wandb.log(run, {"x": rate}, step=3)
        lox.wandb.log(run, lox.spool(train)(rate)[1], prefix="train/")
        lox.wandb.finish(run)
        return run

    runs = program(PRNG_KEYS, jnp.array([0.0, 1.0, 2.0]))
    lox.wandb.flush()
    files = wandb_file.read_all(tmp_path)
    assert set(files) == {"7 rate=0", "8 rate=1", "9 rate=2"}
    for rate, file in zip((0, 1, 2), [files[name] for name in sorted(files)], strict=True):
        assert (file.group, file.project, file.exit_code) == ("seeds", "p", 0)
        assert file.config == {"rate": rate, "name": "sgd"}
        assert file.events("step", "episode") == {
            "x": [({"step": 3}, rate)],
            "train/loss": [({"step": n, "episode": n // 2}, rate + n / 2) for n in range(3)],
        }
    one = jax.tree.map(lambda x: x[0], runs)
    with pytest.raises(lox.LoxError, match="is finished: `init` begins a new one"):
        lox.wandb.log(one, {"x": 1.0})
    with pytest.raises(lox.LoxError, match="is finished"):
        lox.wandb.finish(one)


def test_eagerly(tmp_path, offline):
    run = lox.wandb.init(jax.random.key(1), **offline, name="mine", config={"a": 1})
    other = lox.wandb.init(jax.random.key(1), **offline, name="mine")
    lox.wandb.log(run, {"x": 1.5})
    lox.wandb.finish(run)  # while the other goes on
    lox.wandb.log(other, {"x": 2.5})
    lox.wandb.finish(other)
    files = wandb_file.read_all(tmp_path)
    assert {name: file.events() for name, file in files.items()} == {
        "mine-1": {"x": [({}, 1.5)]},
        "mine-1.1": {"x": [({}, 2.5)]},
    }
    with pytest.raises(lox.LogTypeError, match="`config` is 3; it must be a dict"):
        lox.wandb.init(jax.random.key(1), config=3)


# --- steps ---


def test_increasing_steps_are_those_of_wandb(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"a": 1.0}, step=5)
        logger.log(state, {"b": 2.0}, step=5)  # joins the row
        logger.log(state, {"a": 3.0}, step=9)
    file = wandb_file.read_all(tmp_path)["0"]
    assert rows_of(file, "_step", "step", "a", "b") == [(5, 5, 1.0, 2.0), (9, 9, 3.0, None)]
    assert file.metrics == {"step": "", "a": "step", "b": "step"}


def test_no_event_is_dropped_or_replaced(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        for value, step in enumerate([10, 10, 3, 11, 3, 12]):
            logger.log(state, {"a": value}, step=step)
            logger.log(state, {"loose": value})
            logger.flush()
    file = wandb_file.read_all(tmp_path)["0"]
    assert file.events("step") == {
        "a": [({"step": step}, value) for value, step in enumerate([10, 10, 3, 11, 3, 12])],
        "loose": [({}, value) for value in range(6)],
    }
    row_steps = [row["_step"] for row in file.rows]
    assert row_steps == sorted(set(row_steps))
    assert "loose" not in file.metrics


def test_spooled_keys_are_sorted_by_step(tmp_path, offline):
    def f():
        for step in range(4):
            lox.log({"fast": step}, step=step)
        lox.log({"slow": 1}, step=1)
        lox.log({"slow": 2}, step=3)

    with WandbLogger(**offline) as logger:
        logger.spool(f, logger.init(jax.random.key(0)))()
    file = wandb_file.read_all(tmp_path)["0"]
    assert rows_of(file, "_step", "fast", "slow") == [(0, 0, None), (1, 1, 1), (2, 2, None), (3, 3, 2)]


def test_other_steps_are_axes_of_their_own(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"win.rate": 0.5}, episode=100)
        logger.log(state, {"win.rate": 0.75}, episode=50)
        logger.log(state, {"step": 1.0, "_step": 2.0}, step=4)
    file = wandb_file.read_all(tmp_path)["0"]
    assert file.metrics["win\\.rate"] == "episode"
    assert rows_of(file, "_step", "episode", "win.rate")[:2] == [(0, 100, 0.5), (1, 50, 0.75)]
    # A key may have the name of a step or of one of W&B's own columns.
    assert rows_of(file, "_step", "step", "step [key]", "_step [key]")[2:] == [(4, 4, 1.0, 2.0)]


# --- values ---


def test_values(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        logger.log(state, {"f": np.float32(0.1), "i": np.int64(2**40), "b": True, "nan": np.nan, "inf": -np.inf})
        logger.log(state, {"pair": np.array([1, 2]), "tree": {"a": 1.5}})
    (row,) = wandb_file.read_all(tmp_path)["0"].rows
    assert (row["f"], row["i"], row["b"]) == (0.1, 2**40, True)
    assert np.isnan(float(row["nan"]))
    assert float(row["inf"]) == -np.inf
    assert (row["pair/0"], row["pair/1"], row["tree/a"]) == (1, 2, 1.5)


def test_names_that_are_not_unicode(tmp_path, offline):
    half, looks_like_it = "half \ud800", "half \\ud800"
    with WandbLogger(**offline) as logger:
        state = logger.init(PRNG_KEYS[0], {half: half})
        logger.log(state, {half: 1.0, looks_like_it: 2.0, "ok": 3.0}, **{"step \ud800": 0})
        logger.log(state, {"h \ud800": lox.Histogram(np.arange(3.0)), "i \ud800": lox.Image(np.zeros((2, 2)))})
    file = wandb_file.read_all(tmp_path)["7"]
    assert file.config == {looks_like_it: looks_like_it}
    first = {looks_like_it: 1.0, looks_like_it + " [key]": 2.0, "ok": 3.0, r"step \ud800": 0}
    assert [{name: x for name, x in row.items() if name in first} for row in file.rows[:1]] == [first]
    assert {r"h \ud800", r"i \ud800"} <= file.rows[-1].keys()


def test_a_folder_that_is_removed(tmp_path, offline):
    logger = WandbLogger(**offline)
    logger.log(logger.init(PRNG_KEYS[0]), {"a": 1.0})
    logger.flush()
    shutil.rmtree(tmp_path)
    for end in (logger.flush, logger.close):
        with pytest.raises(
            lox.StoreError, match=r"^run '7' has lost its file: '.*run-.*\.wandb' was removed or renamed"
        ):
            end()


FULL_DISK = """
import resource, sys, time, jax, lox
resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
settings = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
logger = lox.loggers.WandbLogger(mode="offline", dir=sys.argv[1], project="p", settings=settings)
state = logger.init(jax.random.key(7))
logger.log(state, {"a": 1.0})
logger.flush()
for n in range(2000):
    logger.log(state, {"a": n}, step=n)
if sys.argv[2] == "flush":
    for _ in range(1000):  # until W&B's process has come so far
        logger.flush()
        time.sleep(0.05)
    sys.exit("flush does not notice")
logger.close()
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs ulimit")
@pytest.mark.parametrize("how", ["flush", "close"])
def test_a_full_disk(tmp_path, how):
    """W&B drops what it cannot write, and says nothing; here a limit on the size of files stands for the disk."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), how]
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # its own process of W&B
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False, env=own)
    assert done.returncode == 1
    assert re.search(r"lox.StoreError: W&B did not write all of '.*run-.*\.wandb': failed to ", done.stderr)


def test_no_room_for_another_record(tmp_path, offline, monkeypatch):
    def refuse(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logger = WandbLogger(**offline)
    logger.log(logger.init(PRNG_KEYS[0]), {"a": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.TemporaryFile", refuse)
        with pytest.raises(lox.StoreError, match=r"cannot write '.*\.wandb': No space left on device.\nW&B drops what"):
            logger.flush()
    logger.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 400, 3000], ids=["part of a block", "several blocks", "many blocks"])
def test_the_end_of_the_file_is_found(tmp_path, offline, monkeypatch, rows):
    """Whatever is cut off, down to the last byte."""
    with WandbLogger(**offline) as logger:
        state = logger.init(PRNG_KEYS[0])
        run = logger._pipeline.runs[int(state.run)].resource
        logger.log(state, lox.logdict.from_arrays({"a": np.arange(float(rows))}, steps={"step": np.arange(rows)}))
    monkeypatch.setattr(_wandb_file, "_LATE", 0.0)
    _wandb_file.check_finished(run)
    file = Path(run.settings.sync_file)
    whole = file.read_bytes()
    for cut in (1, 5, 30, 100, len(whole) // 2, len(whole) - 7):
        file.write_bytes(whole[:-cut])
        with pytest.raises(lox.StoreError, match=r"W&B did not write all of .*: the end of the run is missing"):
            _wandb_file.check_finished(run)


def test_large_arrays_become_histograms_only_when_asked(tmp_path, offline):
    logger = WandbLogger(**offline)
    state = logger.init(jax.random.key(0))
    with pytest.warns(lox.LoxWarning, match="WandbLogger cannot show 'x'"):
        logger.log(state, {"x": np.zeros((40, 40), np.float32), "y": 1.0})
        with pytest.raises(lox.LogTypeError, match=r"shape \(40, 40\)(.|\n)*lox.Histogram(.|\n)*arrays='histogram'"):
            logger.close()
    with WandbLogger(**offline, arrays="histogram") as logger:
        logger.log(logger.init(jax.random.key(1)), {"x": np.arange(1600.0).reshape(40, 40)})
    files = wandb_file.read_all(tmp_path)
    assert files["0"].events() == {"y": [({}, 1.0)]}
    (row,) = files["1"].rows
    assert row["x"]["_type"] == "histogram"
    assert sum(row["x"]["values"]) == 1600


@pytest.mark.parametrize("how", ["spool", "tap"])
def test_histograms_and_images(tmp_path, how, offline):
    import PIL.Image

    def show(x):
        def step(x, i):
            lox.log({"h": lox.Histogram(x, 4, (0, 1)), "frame": lox.Image(x.reshape(2, 1, 3))}, step=i)
            return x / 2, None

        return jax.lax.scan(step, x, jnp.arange(2))[0]

    x = np.array([0.1, 0.2, 0.4, 0.6, 0.8, 1.0], np.float32)
    with WandbLogger(**offline) as logger:
        getattr(logger, how)(show, logger.init(jax.random.key(0)))(x)
    file = wandb_file.read_all(tmp_path)["0"]
    for n, row in enumerate(file.rows):
        counts = np.histogram(x / 2**n, 4, (0, 1))[0]
        assert row["step"] == n
        assert row["h"]["values"] == np.trim_zeros(counts).tolist()
        assert row["h"]["bins"] == [0.0, 0.25, 0.5, 0.75, 1.0][: np.count_nonzero(counts) + 1]
        pixels = np.asarray(PIL.Image.open(file.folder / "files" / row["frame"]["path"]))
        np.testing.assert_array_equal(pixels, np.round(255 * (x / 2**n).reshape(2, 1, 3)))


def test_more_bins_than_wandb_takes(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        values = np.linspace(0, 1, 4000, dtype=np.float32)
        logger.log(logger.init(jax.random.key(0)), {"h": lox.Histogram(values, 1000, (0, 1))})
    ((row,),) = [file.rows for file in wandb_file.read_all(tmp_path).values()]
    assert len(row["h"]["values"]) == 500
    assert sum(row["h"]["values"]) == 4000
    assert (row["h"]["bins"][0], row["h"]["bins"][-1]) == (0, 1)


# --- many lanes as one ---


def test_aggregate(tmp_path, offline):
    xs = jnp.array([0.0, 1.0, 5.0])
    with WandbLogger(**offline, name="all", aggregate=True) as logger:
        init = jax.vmap(lambda prng_key, rate: logger.init(prng_key, {"rate": rate, "kind": "sgd"}))
        states = init(PRNG_KEYS, xs)
        jax.jit(jax.vmap(lambda state, x: logger.tap(train, state, buffer=2)(x)))(states, xs)
    (file,) = wandb_file.read_all(tmp_path).values()
    assert file.name == "all"
    assert file.config == {"runs": ["7 rate=0", "8 rate=1", "9 rate=5"], "rate": [0, 1, 5], "kind": "sgd"}
    mean, std = 2.0, np.std([0, 1, 5], ddof=1)
    margin = 4.30265273 * std / np.sqrt(3)
    assert rows_of(file, "step", "episode", "loss") == [(n, n // 2, mean + n / 2) for n in range(3)]
    for n, row in enumerate(file.rows):
        actual = [row["loss/std"], row["loss/ci95_low"], row["loss/ci95_high"]]
        np.testing.assert_allclose(actual, [std, mean + n / 2 - margin, mean + n / 2 + margin], rtol=1e-6)
    assert file.metrics["loss/std"] == "step"


def test_aggregate_lanes_that_differ(tmp_path, offline):
    def f(x):
        lox.log({"late": x}, step=x.astype(jnp.int32))  # each lane has a step of its own, two the same
        lox.log({"big": x}, where=x > 1)
        lox.log({"h": lox.Histogram(x[None], 2, (0, 4))})

    with WandbLogger(**offline, aggregate=True) as logger:
        states = jax.vmap(logger.init)(PRNG_KEYS)
        jax.vmap(lambda state, x: logger.spool(f, state)(x))(states, jnp.array([1.0, 3.0, 3.0]))
    (file,) = wandb_file.read_all(tmp_path).values()
    assert file.events("step")["late"] == [({"step": 1}, 1), ({"step": 3}, 3)]
    assert file.events("step")["late/std"] == [({"step": 3}, 0)]  # one lane has no spread
    assert file.events("step")["big"] == [({}, 3)]
    assert file.events("step")["h"][0][1]["values"] == [1, 2]


def test_statistics_of_lanes_that_disagree(tmp_path, offline):
    """Lanes with other steps have rows of their own, however the events came together."""

    def f(offset, x):
        def step(x, i):
            lox.log({"x": x, "x/std": -1.0}, step=offset + i)
            return x + 1, None

        jax.lax.scan(step, x, jnp.arange(2))
        lox.log({"y": x})
        lox.log({"y": x + 1}, t=0.5)

    rows = {}
    for how, options in (("tap", {}), ("spool", {}), ("tap", {"buffer": 100})):
        path = tmp_path / f"{how}{len(options)}"
        path.mkdir()
        with WandbLogger(**offline | {"dir": str(path)}, aggregate=True) as logger:
            states = jax.vmap(logger.init)(PRNG_KEYS)

            def run(state, offset, x, logger=logger, how=how, options=options):
                getattr(logger, how)(f, state, **options)(offset, x)

            jax.vmap(run)(states, jnp.array([0, 0, 1]), jnp.array([0.0, 10.0, 20.0]))
        (file,) = wandb_file.read_all(path).values()
        rows[path.name] = sorted(
            (row.get("step", -1), row["x"], row.get("x/std [of x]")) for row in file.rows if "x" in row
        )
        ys = [(row.get("t"), row["y"], row["y/std"]) for row in file.rows if "y" in row]
        assert sorted(ys, key=str) == [(0.5, 11, 10), (None, 10, 10)]
    spread = pytest.approx(np.std([0, 10], ddof=1))
    assert rows["spool0"] == [(0, 5, spread), (1, 6, spread), (1, 20, None), (2, 21, None)]
    assert rows["tap0"] == rows["tap1"] == rows["spool0"]


def test_huge_and_negative_steps(tmp_path, offline):
    steps = [1, 2**63 - 1, 5, -2, -1, 2]
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        for n, step in enumerate(steps):
            logger.log(state, {"a": n}, step=np.int64(step))
            logger.flush()
    assert wandb_file.read_all(tmp_path)["0"].events("step")["a"] == [({"step": s}, n) for n, s in enumerate(steps)]


def test_runs_of_the_user_are_separate(tmp_path, offline):
    with WandbLogger(**offline) as logger:
        state = logger.init(jax.random.key(0))
        settings = wandb.Settings(**offline["settings"])
        run = wandb.init(**offline | {"settings": settings}, name="mine")  # returns an open run if it can
        for step in range(4):
            logger.log(state, {"a": step}, step=step)
            logger.flush()
            run.log({"theirs": step})
            run.log({"theirs": step})
        wandb.finish()
        logger.log(state, {"a": 4}, step=4)
    files = wandb_file.read_all(tmp_path)
    assert files["0"].events("step") == {"a": [({"step": n}, n) for n in range(5)]}
    assert [row["theirs"] for row in files["mine"].rows] == [n for n in range(4) for _ in range(2)]


def test_runs_that_fail(tmp_path, offline):
    with pytest.raises(ValueError, match="boom"), WandbLogger(**offline) as logger:
        logger.log(logger.init(jax.random.key(0)), {"a": 1})
        raise ValueError("boom")
    assert wandb_file.read_all(tmp_path)["0"].exit_code == 1


@pytest.fixture
def first_use():
    """Let the client forget before and after a test what it has read from its environment variables."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_first_use_from_several_threads(tmp_path, first_use, monkeypatch, offline):
    runs = SingleRuns(lox.wandb._Runs)  # the functions of `lox.wandb`
    monkeypatch.setenv("WANDB_RUN_ID", "sweep")  # as `wandb agent` sets it
    start = threading.Barrier(3)

    def work(n):
        start.wait()
        run = runs.init(jax.random.key(n), offline, None)
        runs.log(run, {"a": n})
        runs.finish(run)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    files = wandb_file.read_all(tmp_path)
    assert {name: file.events()["a"] for name, file in files.items()} == {str(n): [({}, n)] for n in range(3)}
    assert sorted(file.folder.name.rsplit("-", 2)[1] for file in files.values()) == ["sweep"] * 3


# --- the client's own ---


def test_settings_and_ids(tmp_path, offline):
    options = offline | {"id": "run", "settings": wandb.Settings(**offline["settings"]), "config": {"a": 1}}
    with WandbLogger(**options) as logger:
        jax.vmap(lambda prng_key: logger.init(prng_key, {"b": 2}))(PRNG_KEYS[:2])
        assert [run.resource.id for run in logger._pipeline.runs.values()] == ["run-7", "run-8"]
        assert wandb.run is None  # the user's own run, if there is one, is left alone
    assert wandb_file.read_all(tmp_path)["8"].config == {"a": 1, "b": 2}
    with pytest.raises(lox.LogTypeError, match="`config` is 3"):
        WandbLogger(config=3)
    with pytest.raises(TypeError, match="no_such_option"):
        WandbLogger(no_such_option=1).init(jax.random.key(0))


# --- runs that are resumed ---


def test_offline_another_run_says_what_it_resumes(tmp_path, offline):
    with WandbLogger(**offline, group="seeds", config={"a": 1}) as logger:
        states = jax.vmap(logger.init)(PRNG_KEYS)
        jax.vmap(lambda state, x: logger.tap(train, state)(x))(states, jnp.arange(3.0))
    with WandbLogger(**offline, group="seeds", config={"a": 1}) as logger:
        states = jax.vmap(lambda key, n: logger.resume(key, {"lr": 0.1}, epoch=n))(PRNG_KEYS, jnp.array([4, 5, 6]))
        jax.vmap(lambda state, x: logger.tap(train, state)(x))(states, jnp.arange(3.0))
    files = wandb_file.read_all(tmp_path)
    assert sorted(files) == ["7", "7.1", "8", "8.1", "9", "9.1"]
    for seed, first in ((7, 4), (8, 5), (9, 6)):
        before, after = files[f"{seed}"], files[f"{seed}.1"]
        assert (before.group, after.group) == ("seeds", "seeds")
        assert after.config == {"a": 1, "lr": 0.1, "resumes": {"run": f"{seed}", "at": {"epoch": first}}}
        assert after.events("step", "episode") == before.events("step", "episode")
        assert after.branch is None


def test_offline_with_one_run_for_all_lanes(tmp_path, offline):
    with WandbLogger(**offline, name="all", aggregate=True) as logger:
        states = jax.vmap(lambda key: logger.resume(key, step=4))(PRNG_KEYS)
        jax.vmap(lambda state: logger.log(state, {"a": 1.0}, step=4))(states)
    config = wandb_file.read_all(tmp_path)["all"].config
    assert config == {
        "runs": ["7.1", "8.1", "9.1"],
        "resumes": [{"run": f"{n}", "at": {"step": 4}} for n in (7, 8, 9)],
    }


@pytest.fixture
def forks(offline, monkeypatch):
    """Give the logger the answers that a server would, and the client the real arguments of a fork, but offline.

    What the client does with them offline is what it sends to a server later. That the server then has the history of
    the run up to there is W&B's promise, which is not tested here.
    """
    parents = {}

    def resumable(self, wanted):
        self._parents = dict(parents)
        return parents, "project 'p'"

    monkeypatch.setattr(WandbLogger, "_resumable", resumable)
    return parents


class Parent:
    """What `wandb.Api().runs` returns, as far as it is used."""

    def __init__(self, id, config):
        self.id, self.config = id, config


def test_online_a_run_is_forked(tmp_path, offline, forks):
    """What the client makes of our arguments: it records where to fork, and keeps all our rows, from the step on."""
    forks |= {
        "7": Parent("abc", {}),
        "7.1": Parent("def", {"lr": 0.5, "net": {"depth": 2}}),
    }
    with WandbLogger(**offline, id="sweep") as logger:
        state = logger.resume(jax.random.key(7), {"lr": 0.25}, step=10)
        for n in range(10, 13):
            logger.log(state, {"a": n}, step=n)
        logger.log(state, {"late": 1.0})
        logger.log(state, {"a": 0}, step=3)  # before the fork: a column tells the step
        assert [run.resource.id for run in logger._pipeline.runs.values()] == ["sweep-7.2"]
    file = wandb_file.read_all(tmp_path)["7.2"]
    assert file.branch == ("def", 9, "_step")
    assert file.config == {
        "lr": 0.25,
        "net": {"depth": 2},
        "resumes": {"run": "7.1", "at": {"step": 10}, "id": "def", "was": {"lr": 0.5}},
    }
    assert file.events("step")["a"] == [({"step": n}, n) for n in (10, 11, 12)] + [({"step": 3}, 0)]
    assert [row["_step"] for row in file.rows] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("step", [{"step": 0}, {"epoch": 3}], ids=str)
def test_online_where_there_is_nothing_to_fork(tmp_path, offline, forks, step):
    """From the first step on, or at a step that is not W&B's."""
    forks |= {"7": Parent("abc", {})}
    with WandbLogger(**offline) as logger:
        logger.log(logger.resume(jax.random.key(7), **step), {"a": 1}, step=0)
    file = wandb_file.read_all(tmp_path)["7.1"]
    assert (file.branch, file.config) == (None, {"resumes": {"run": "7", "at": step, "id": "abc"}})
    with (
        WandbLogger(**offline) as logger,
        pytest.raises(
            lox.RunNotFoundError, match="WandbLogger cannot resume '9' in project 'p': the last runs there are '7':"
        ),
    ):
        logger.resume(jax.random.key(9), step=3)


def test_online_the_server_is_asked_for_the_runs(monkeypatch):
    """The question, with the arguments of the real `wandb.Api.runs`; the answer is a server's."""
    asked, real = [], inspect.signature(wandb.Api.runs)

    class Api(wandb.Api):
        def __init__(self):
            pass

        def runs(self, *args, **kwargs):
            bound = real.bind(self, *args, **kwargs)
            asked.append({name: x for name, x in bound.arguments.items() if name != "self"})
            return [namespace(name="mine-7", id="a"), namespace(name="mine-7.1", id="b")]

    monkeypatch.setattr(wandb, "Api", Api)
    logger = WandbLogger(mode="online", project="p", entity="me", name="mine")
    existing, place = logger._resumable(["7 lr=0.1", "8"])
    assert (list(existing), place) == (["7", "7.1"], "project 'me/p'")
    assert asked == [
        {"path": "me/p", "filters": {"display_name": {"$regex": "^(mine\\-7|mine\\-8)"}}, "order": "+created_at"}
    ]
    mode = {"mode": "offline"}
    for options in (mode, {"settings": mode}, {"settings": wandb.Settings(**mode)}):
        assert WandbLogger(project="p", **options)._resumable(["7"]) is None
    assert WandbLogger(mode="online", aggregate=True)._resumable(["7"]) is None


@pytest.mark.nightly
def test_example(tmp_path):
    """As users start it, with W&B's environment variables."""
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_GROUP": "not this one", "WANDB_NOTES": "n"}
    environment = {
        **python_forks.user_environment(),
        **variables,
        "XLA_FLAGS": python_forks.FAST,
        "WANDB_SILENT": "true",
    }
    environment |= {"PYTHONWARNINGS": "error"}
    done = python_forks.run([EXAMPLES / "wandb_ppo.py"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("episodes lasted")
    assert not done.stderr
    files = wandb_file.read_all(tmp_path)
    together = files.pop("ppo, all seeds")
    assert len(files) == 8
    for file in files.values():
        assert (file.group, file.project) == ("ppo", "lox-ppo")
        events = file.events("step", "frames")
        assert [steps for steps, _ in events["loss/policy"]] == [{"step": n} for n in range(20)]
        assert [steps["frames"] for steps, _ in events["episode_length"]] == [512 * (n + 1) for n in range(10)]
        assert len(events["gradients"]) == 20
        assert len(events["visited"]) == 10
    means = [row["entropy"] for row in together.rows if "entropy" in row]
    each = [[row["entropy"] for row in file.rows if "entropy" in row] for file in files.values()]
    np.testing.assert_allclose(means, np.mean(each, 0), rtol=1e-5)
