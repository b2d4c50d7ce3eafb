"""Names tell runs apart: in lists, files and trackers."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lox
from lox.store import names

SEEDS = jnp.arange(3)
SPLIT = jax.random.split(jax.random.key(0), 3)
LRS = jnp.array([0.1, 0.01, 0.001])


class Recorder(lox.Logger):
    """Keeps the names of its runs."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def open(self, run: Any) -> None:
        self.names.append(run.name)

    def write(self, run: Any, logs: lox.logdict) -> None:
        pass


def named(init: Any, *args: Any) -> list[str]:
    with Recorder() as logger:
        jax.block_until_ready(init(logger)(*args))
        jax.effects_barrier()
    return logger.names


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_lanes_are_told_apart(jit: bool) -> None:
    wrap = jax.jit if jit else lambda f: f
    keys = jax.vmap(jax.random.key)(SEEDS)

    def init(config: Any, **options: Any) -> Any:
        return lambda logger: wrap(jax.vmap(lambda key, lr: logger.init(key, config(lr), **options)))

    assert named(lambda logger: wrap(logger.init), jax.random.key(42)) == ["42"]
    assert named(init(lambda lr: None), keys, LRS) == ["0", "1", "2"]
    assert named(init(lambda lr: {"lr": lr, "depth": 3}), keys, LRS) == ["0 lr=0.1", "1 lr=0.01", "2 lr=0.001"]
    assert named(init(lambda lr: None), SPLIT, LRS) == ["lane0", "lane1", "lane2"]
    assert named(init(lambda lr: {"lr": lr}), SPLIT, LRS) == ["lane0 lr=0.1", "lane1 lr=0.01", "lane2 lr=0.001"]
    template = "lr={lr:g} {opt.name} seed={key} {lane}"
    config = lambda lr: {"lr": lr, "opt": {"name": "adam"}}  # noqa: E731
    expected = ["lr=0.1 adam seed=0 0", "lr=0.01 adam seed=1 1", "lr=0.001 adam seed=2 2"]
    assert named(init(config, name=template), keys, LRS) == expected


def test_one_seed_for_several_learning_rates() -> None:
    key = jax.random.key(7)
    got = named(lambda logger: jax.vmap(lambda lr: logger.init(key, {"lr": lr})), LRS)
    assert got == ["7 lr=0.1", "7 lr=0.01", "7 lr=0.001"]


def test_lanes_that_never_begin_have_no_name() -> None:
    def begin(logger: Any) -> Any:
        return jax.vmap(lambda seed: jax.lax.cond(seed != 1, lambda: logger.init(jax.random.key(seed)).run, lambda: -1))

    assert named(begin, SEEDS) == ["0", "2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lr={learning_rate}", r"there is no 'learning_rate'. There are 'lr', 'key' and 'lane'"),
        ("{lr:d}", r"does not fit the config: .*'d'"),
        ("{lr", r"does not fit the config"),
        ("{}", r"there is no"),
        (3, r"it must be a string"),
    ],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_wrong_template_is_an_error_at_once(name: Any, message: str, jit: bool) -> None:
    with Recorder() as logger, pytest.raises(lox.LogTypeError, match=message):
        init = lambda lr: logger.init(jax.random.key(0), {"lr": lr}, name=name)  # noqa: E731
        (jax.jit(init).lower if jit else init)(jnp.float32(0.1))
    assert logger.names == []


def test_loggers_use_the_name(tmp_path: Any) -> None:
    keys = jax.vmap(jax.random.key)(SEEDS[:2])
    loggers = [
        lox.SaveLogger(tmp_path / "save"),
        lox.loggers.CsvLogger(tmp_path / "csv"),
        lox.loggers.JsonlLogger(tmp_path / "jsonl"),
        lox.loggers.TensorBoardLogger(tmp_path / "board"),
    ]
    for _ in range(2):
        with lox.loggers.MultiLogger(*[type(one)(one.path) for one in loggers]) as logger:
            init = lambda key, lr: logger.init(key, {"lr": lr})  # noqa: E731
            states = jax.vmap(init)(keys, LRS[:2])
            jax.vmap(lambda state: logger.log(state, {"x": 1.0}, step=0))(states)
    expected = ["0 lr=0.1", "0 lr=0.1 (2)", "1 lr=0.01", "1 lr=0.01 (2)"]
    assert sorted(run.name for run in lox.runs(tmp_path / "save")) == expected
    assert sorted(path.stem for path in (tmp_path / "csv").glob("*.csv")) == expected
    assert sorted(path.stem for path in (tmp_path / "jsonl").glob("*.jsonl")) == expected
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == expected
    with pytest.warns(lox.LoxWarning, match=r"'0 lr=0.1' and '0 lr=0.1 \(2\)', and so have 1 others"):
        np.testing.assert_array_equal(lox.load(tmp_path / "save", keys)["x"], np.ones((2, 1)))


def test_the_prng_key_identifies_a_run_whatever_its_name(tmp_path: Any) -> None:
    for mode, value in (("new", 1.0), ("append", 2.0), ("new", 3.0), ("overwrite", 4.0)):
        with lox.SaveLogger(tmp_path, mode=mode) as logger:
            logger.log(logger.init(SPLIT[1], name="my run"), {"x": value})
        found = {run.name: lox.load(tmp_path, run.name)["x"].tolist() for run in lox.runs(tmp_path)}
        expected = {
            1.0: {"my run": [1.0]},
            2.0: {"my run": [1.0, 2.0]},
            3.0: {"my run": [1.0, 2.0], "my run.1": [3.0]},
            4.0: {"my run": [4.0]},
        }
        assert found == expected[value]
        several = pytest.warns(lox.LoxWarning, match="2 runs") if len(found) > 1 else contextlib.nullcontext()
        with several:
            assert lox.load(tmp_path, SPLIT[1])["x"].tolist() == list(found.values())[-1]
    with pytest.raises(lox.RunExistsError, match="my run"), lox.SaveLogger(tmp_path, mode="error") as logger:
        logger.init(SPLIT[1], name="another")


@given(st.text(max_size=300))
def test_every_name_is_safe_as_a_file_name(name: str) -> None:
    safe = names.safe(name)
    assert 0 < len(safe.encode()) <= 120
    assert not re.search(r'[/\\:*?"<>|\x00-\x1f\x7f]', safe)
    assert safe not in (".", "..") and safe == safe.strip(" .")
    assert safe == names.safe(safe)


def test_names_that_are_taken_are_numbered() -> None:
    taken = names.Taken(["42", "lr=0.1"])
    assert [taken.take("42") for _ in range(3)] == ["42.1", "42.2", "42.3"]
    assert [taken.take("lr=0.1") for _ in range(2)] == ["lr=0.1 (2)", "lr=0.1 (3)"]
    assert [taken.take("a"), taken.take("a.1"), taken.take("a"), taken.take("a")] == ["a", "a.1", "a.2", "a.3"]


def test_parameters_with_the_same_last_name_are_told_apart_by_their_paths() -> None:
    configs = [{"actor": {"lr": rate}, "critic": {"lr": 10 * rate}} for rate in (0.5, 0.25)]
    assert names.of_runs([[0, 1], [0, 2]], configs=configs) == [
        "1 actor.lr=0.5 critic.lr=5",
        "2 actor.lr=0.25 critic.lr=2.5",
    ]


def test_many_lanes_of_one_prng_key() -> None:
    taken = names.Taken()
    assert len({taken.take(name) for name in names.of_runs([[0, 42]] * 20_000)}) == 20_000


def test_configs_keep_the_order_of_their_keys(tmp_path: Any) -> None:
    config = {"width": 2, "lr": jnp.float32(0.5), "adam": {"z": 1, "b": 2}}
    with lox.SaveLogger(tmp_path) as logger:
        jax.jit(lambda lr: logger.init(jax.random.key(0), {**config, "lr": lr}))(0.5)
    (run,) = lox.runs(tmp_path)
    assert repr(run.config) == "{'width': 2, 'lr': 0.5, 'adam': {'z': 1, 'b': 2}}"
