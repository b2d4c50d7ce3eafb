"""The store returns what was written to it."""

import collections
import dataclasses
import datetime
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import boolean, f32, i32, same
from optional import devices

import lox
from lox.store import KeyData, Reader, Writer, _from_rows, _group, names
from lox.store._catalog import resolve
from lox.store._group import Entry


def bits(x):
    return np.asarray(x).reshape(-1).view(np.uint8).tolist()


def loss(n, start=0):
    """Make n events of one key, with steps."""
    steps = np.arange(start, start + n, dtype=np.int32)
    return lox.logdict({"loss": steps.astype(np.float32) / 2}, steps={"step": {"loss": steps}})


# --- dtypes ---

SMALL = [
    name
    for name in (
        *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"),
        *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
    if hasattr(ml_dtypes, name)
]
WORDS = {
    2: np.arange(2**16, dtype=np.uint16),
    4: np.uint32([0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F800000]),
    8: np.uint64([0, 1, 1 << 63, 0x7FF0000000000000, 0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF, 0x3FF0000000000000]),
}


def every_pattern(name):
    """Make values of a dtype with all kinds of bits; for small dtypes, all values."""
    if name == "bool":
        return boolean([0, 1, 1, 0, 1])
    if name in ("int2", "uint2", "int4", "uint4"):
        return np.arange(-8, 16).astype(np.dtype(getattr(ml_dtypes, name)))
    if name in SMALL:
        width = int(name[5]) if name[5] != "8" else 8
        return np.arange(2**width, dtype=np.uint8).view(getattr(ml_dtypes, name))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if dtype.kind == "c":
        return WORDS[dtype.itemsize // 2].repeat(2).view(dtype)
    return (WORDS[dtype.itemsize] if dtype.itemsize > 1 else np.arange(256, dtype=np.uint8)).view(dtype)


PLAIN = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"


@pytest.mark.parametrize("name", [*PLAIN.split(), *SMALL])
def test_every_dtype_comes_back_bit_by_bit(tmp_path, name):
    values = every_pattern(name)
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        writer.append(run, {"array": values, "scalar": values[-1], "matrix": values.reshape(1, -1)})
        writer.append(run, {"array": values[::-1], "scalar": values[0], "matrix": values.reshape(1, -1)})
    logs = lox.load(tmp_path)
    for key, expected in {
        "array": np.stack([values, values[::-1]]),
        "scalar": np.stack([values[-1], values[0]]),
        "matrix": np.stack([values, values])[:, None],
    }.items():
        assert (logs[key].dtype, logs[key].shape) == (values.dtype, expected.shape)
        assert bits(logs[key]) == bits(expected), key


@pytest.mark.parametrize("name", ["int32", "int64", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"])
def test_steps_of_every_dtype(tmp_path, name):
    values = every_pattern(name)[:9]
    lox.save(lox.logdict({"x": np.zeros(len(values))}, steps={"t": {"x": values}}), tmp_path)
    actual = lox.load(tmp_path).t["x"]
    assert actual.dtype == values.dtype
    assert bits(actual) == bits(values)


def test_prng_keys(tmp_path):
    one, many = jax.random.key(3), jax.random.split(jax.random.key(4), (2, 3))
    rbg = jax.random.key(5, impl="rbg")
    lox.save({"one": one, "many": many, "rbg": {"inside": rbg}}, tmp_path)
    logs = lox.load(tmp_path)
    assert logs["one"].dtype == one.dtype
    assert logs["rbg"]["inside"].dtype == rbg.dtype
    assert logs["many"].shape == (1, 2, 3)
    for actual, expected in [(logs["one"], one), (logs["many"], many), (logs["rbg"]["inside"], rbg)]:
        same(jax.random.key_data(actual)[0], jax.random.key_data(expected))
    assert jax.random.uniform(logs["one"][0]) == jax.random.uniform(one)


def test_key_data_replaces_prng_keys_in_callbacks(tmp_path):
    with Writer(tmp_path) as writer:
        writer.append(writer.open_run(), {"k": KeyData(np.uint32([0, 7]), "threefry2x32")})
    same(jax.random.key_data(lox.load(tmp_path)["k"]), np.uint32([[0, 7]]))


@pytest.mark.parametrize("value", ["text", np.asarray(["a"]), np.datetime64("2026-01-01"), object(), np.longdouble(1)])
def test_what_cannot_be_stored(tmp_path, value):
    with pytest.raises(lox.LogTypeError, match=r"'x' has .*lox cannot store"):
        lox.save({"x": value}, tmp_path)


def test_foreign_byte_order(tmp_path):
    lox.save({"x": np.arange(3, dtype=">f4")}, tmp_path)
    same(lox.load(tmp_path)["x"], f32([[0, 1, 2]]))


# --- shapes and structures ---


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 0, 5), (2, 3, 4, 5), (1,) * 12, (70_000,)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64"])
def test_shapes(tmp_path, shape, dtype):
    events = np.random.default_rng(0).normal(size=(3, *shape)).astype(dtype)
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        for event in events:
            writer.append(run, {"x": event})
    same(lox.load(tmp_path)["x"], events)


Point = collections.namedtuple("Point", "y x")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    mean: object
    count: object


def test_pytrees(tmp_path):
    logs = {
        "none": None,
        "tuple": (f32(1),),
        "list": [f32(1), f32(2)],
        "nested": [f32([1, 2]), (i32(3), None, [])],
        "dict": {"b": f32(1), "a": {"c": f32(2)}},
        "numbers": {3: f32(3), 1: f32(1)},
        "tuples": {(2, "x"): f32(2), (1, "y"): f32(1)},
        "empty": {"nothing": {}, "list": [], "tuple": ()},
    }
    lox.save(logs, tmp_path)
    expected = {key: jax.tree.map(lambda x: x[None], value) for key, value in logs.items()}
    actual = lox.load(tmp_path)
    same(actual, expected)
    assert jax.tree.structure(dict(actual)) == jax.tree.structure(expected)


def test_classes_come_back_as_dicts(tmp_path):
    lox.save({"point": Point(y=f32(1), x=[f32(2)]), "state": State(mean=f32(3), count=i32(4))}, tmp_path)
    same(
        lox.load(tmp_path),
        {"point": {"y": f32([1]), "x": [f32([2])]}, "state": {"mean": f32([3]), "count": i32([4])}},
    )


def test_dict_keys_that_cannot_be_stored(tmp_path):
    with pytest.raises(lox.LogTypeError, match=r"'x' has a dict with the key .*use strings or numbers"):
        lox.save({"x": {frozenset(): f32(1)}}, tmp_path)


def test_a_key_that_changes(tmp_path):
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        writer.append(run, {"x": f32(1), "y": f32([1])})
        writer.append(run, {"x": i32(2), "y": f32([2])})
        writer.append(run, lox.logdict({"x": f32(3), "late": i32(0)}, steps={"step": {"x": 5}}))
        writer.append(run, {"x": f32(4), "y": f32([1, 2])})
        writer.append(run, {"x": f32(5), "y": f32([3])})
    logs = lox.load(tmp_path, argnames=["x", "late"])
    assert logs["x"].dtype == np.float32
    assert logs["x"].tolist() == [1, 2, 3, 4, 5]  # in order, although from four files
    assert logs.step["x"].tolist() == [-1, -1, 5, -1, -1]
    with pytest.warns(lox.LoxWarning) as warned:
        logs = lox.load(tmp_path)
    assert str(warned[0].message) == (
        "the events of 'y' do not fit into one array, and are kept apart: 3 in 'y@1', 1 in 'y@2'. Log them under keys "
        'of their own, for instance with `with lox.scope("eval"):` around one of them.'
    )
    assert list(logs) == ["x", "y@1", "y@2", "late"]
    same(logs["y@1"], f32([[1], [2], [3]]))
    same(logs["y@2"], f32([[1, 2]]))
    assert len(list(tmp_path.glob("*/*.arrows"))) == 5


def test_events_that_do_not_fit_together_are_kept_apart(tmp_path):
    values = [f32(1), {"a": f32(2)}, f32([1, 2]), f32(3), jax.random.key(1), f32([[1, 2]]), {"a": f32([4, 5])}]
    with Writer(tmp_path) as writer:
        for number in range(2):
            run = writer.open_run(f"run {number}")
            for n, value in enumerate(values):
                logs = {"y": value if not isinstance(value, jax.Array) else _key_data(value), "y@scalar": f32(0)}
                writer.append(run, lox.logdict(logs, steps={"step": {"y": n}}))
        alone = writer.open_run("alone")
        writer.append(alone, {"y": f32([7, 8, 9])})
    expected = {
        "y@scalar'": [0, 3],
        "y@scalar": [-1] * 7,
        "y@scalar''": [1],
        "y@2": [2],
        "y@scalar'''": [4],
        "y@1x2": [5],
        "y@2'": [6],
    }
    with pytest.warns(lox.LoxWarning, match="the events of 'y' do not fit into one array"):
        everything = dict(lox.load(tmp_path).items())
    assert list(everything) == ["run 0", "run 1", "alone"]
    for name in ("run 0", "run 1"):
        logs = everything[name]
        assert {k: logs.step[k].tolist() if k in logs.step else [-1] * 7 for k in logs} == expected
        same(logs["y@scalar'"], f32([1, 3]))
        same(logs["y@1x2"], f32([[[1, 2]]]))
        assert jax.dtypes.issubdtype(logs["y@scalar'''"].dtype, jax.dtypes.prng_key)
    same(everything["alone"], {"y": f32([[7, 8, 9]])})
    with pytest.warns(lox.LoxWarning, match="the events of 'y' do not fit into one array"):
        logs = lox.load(tmp_path, argnames="y").stack()
    assert list(logs) == ["y@scalar", "y@scalar'", "y@2", "y@scalar''", "y@1x2", "y@2'", "y@3"]
    same(logs["y@scalar"][:2], f32([[1, 3], [1, 3]]))
    assert logs.valid["y@3"].tolist() == [[False], [False], [True]]
    same(logs["y@3"][2], f32([[7, 8, 9]]))


def _key_data(prng_key):
    from lox.store._prng_keys import KeyData, impl_name

    return KeyData(np.asarray(jax.random.key_data(prng_key)), impl_name(prng_key))


# --- logs of transformations ---


def train(xs):
    def body(carry, x):
        i, total = carry
        lox.log({"x": x}, episode=i // 2, step=i)
        lox.log({"total": {"sum": total + x}})
        return (i + 1, total + x), None

    (n, total), _ = jax.lax.scan(body, (0, jnp.zeros((), xs.dtype)), xs)
    lox.log({"n": n}, step=n)
    return total


def ragged(xs):
    def body(i, x):
        lox.log({"x": x}, where=x > 0, step=i)
        lox.log({"all": x})
        return i + 1, None

    return jax.lax.scan(body, 0, xs)[0]


def test_spooled_logs(tmp_path):
    _, logs = lox.spool(train)(f32([1, 2, 4]))
    lox.save(logs, tmp_path, jax.random.key(42))
    loaded = lox.load(tmp_path, jax.random.key(42))
    same(loaded, {"x": f32([1, 2, 4]), "total": {"sum": f32([1, 3, 7])}, "n": i32([3])})
    same(loaded.steps["step"], {"x": i32([0, 1, 2]), "n": i32([3])})
    same(loaded.episode["x"], i32([0, 0, 1]))
    assert str(loaded) == "{'x': [1.0, 2.0, 4.0], 'total': {'sum': [1.0, 3.0, 7.0]}, 'n': [3]}"
    same(loaded.slice[1:]["x"], f32([2, 4]))  # it knows its event axis
    same((loaded + loaded)["n"], i32([3, 3]))


@pytest.mark.parametrize("jit", [False, True])
def test_ragged_logs_are_compacted(tmp_path, jit):
    spooled = lox.spool(ragged)
    _, logs = (jax.jit(spooled) if jit else spooled)(f32([1, -1, 2, -1]))
    lox.save(logs, tmp_path)
    loaded = lox.load(tmp_path)
    same(loaded, {"x": f32([1, 2]), "all": f32([1, -1, 2, -1])})
    same(loaded.step["x"], i32([0, 2]))
    assert loaded.valid == {}


def test_a_key_without_events(tmp_path):
    lox.save(lox.spool(ragged)(f32([-1, -1]))[1], tmp_path)
    loaded = lox.load(tmp_path)
    same(loaded, {"x": f32([]), "all": f32([-1, -1])})
    same(loaded.step["x"], i32([]))


LANES = f32([[1, -1, 2, -1], [-1, -1, 3, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_lanes_as_runs(tmp_path, inside):
    f = lox.spool(jax.vmap(ragged)) if inside else jax.vmap(lox.spool(ragged))
    _, logs = f(LANES)
    prng_keys = jax.random.split(jax.random.key(0))
    lox.save(logs, tmp_path, prng_keys)
    for i, expected in enumerate([([1, 2], [0, 2]), ([3, 4], [2, 3])]):
        loaded = lox.load(tmp_path, prng_keys[i])
        same(loaded, {"x": f32(expected[0]), "all": LANES[i]})
        same(loaded.step["x"], i32(expected[1]))
        same(loaded, logs.lane(i))


@pytest.mark.parametrize("inside", [True, False])
def test_lanes_of_one_run(tmp_path, inside):
    f = lox.spool(jax.vmap(ragged)) if inside else jax.vmap(lox.spool(ragged))
    _, logs = f(LANES)
    lox.save(logs, tmp_path, jax.random.key(0))
    loaded = lox.load(tmp_path)
    # Slots that are valid in no lane are gone; lanes come after events.
    same(loaded.valid, {"x": boolean([[1, 0], [1, 1], [0, 1]])})
    same(loaded["all"], LANES.T)
    for i in range(2):
        same(loaded.lane(i), logs.lane(i))
        same(loaded.lane(i).step["x"], logs.lane(i).step["x"])


def test_nested_lanes(tmp_path):
    def f(x):
        lox.log({"x": x, "same": 1.0})
        return x

    xs = np.arange(6, dtype=np.float32).reshape(2, 3)
    prng_keys = jax.random.split(jax.random.key(0), (2, 3))
    _, logs = lox.spool(jax.vmap(jax.vmap(f)))(xs)
    lox.save(logs, tmp_path, prng_keys)
    for i in range(2):
        for j in range(3):
            same(lox.load(tmp_path, prng_keys[i, j]), {"x": xs[i, j][None], "same": f32([1])})


def test_lanes_that_do_not_fit(tmp_path):
    _, logs = lox.spool(jax.vmap(ragged))(LANES)
    with pytest.raises(lox.MismatchError, match="'x' has 2 lanes, but there are 3 runs"):
        lox.save(logs, tmp_path, jax.random.split(jax.random.key(0), 3))


def test_dropped_events_warn(tmp_path):
    def f(n):
        return jax.lax.while_loop(lambda i: i < n, lambda i: [lox.log({"i": i}), i + 1][1], 0)

    logs = jax.jit(lox.spool(f, capacity=2))(5)[1]
    with pytest.warns(lox.LoxWarning, match="3 were dropped"):
        lox.save(logs, tmp_path)
    same(lox.load(tmp_path), {"i": i32([0, 1])})


def test_tapped_events(tmp_path):
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        lox.tap(train, lambda logs: writer.append(run, logs))(f32([1, 2, 4]))
    expected = lox.spool(train)(f32([1, 2, 4]))[1]
    loaded = lox.load(tmp_path)
    same(loaded, {"x": expected["x"], "total": expected["total"], "n": np.asarray(expected["n"])[None]})
    same(loaded.episode["x"], expected.episode["x"])


@pytest.mark.parametrize("buffer", [None, 3])
def test_tapped_lanes(tmp_path, buffer):
    prng_keys = jax.random.split(jax.random.key(0))
    with Writer(tmp_path) as writer:
        runs = writer.open_runs(key_data=jax.random.key_data(prng_keys), key_impl="threefry2x32")
        lox.tap(jax.vmap(ragged), lambda logs: writer.append(runs, logs), buffer=buffer)(LANES)
    logs = lox.spool(jax.vmap(ragged))(LANES)[1]
    for i in range(2):
        same(lox.load(tmp_path, prng_keys[i]), logs.lane(i))
        same(lox.load(tmp_path, prng_keys[i]).step["x"], logs.lane(i).step["x"])


@pytest.mark.slow
def test_1024_lanes(tmp_path):
    lanes, steps = 1024, 40
    prng_keys = jax.random.split(jax.random.key(0), lanes)

    def f(key):
        def body(carry, i):
            x = jax.random.normal(jax.random.fold_in(key, i))
            carry = carry + x
            lox.log({"a": x, "b": carry, "c": {"d": x > 0, "e": i}, "f": jnp.stack([x, carry])}, step=i)
            lox.log({"sometimes": x}, where=x > 0, step=i)
            return carry, None

        return jax.lax.scan(body, 0.0, jnp.arange(steps))[0]

    with Writer(tmp_path) as writer:
        runs = writer.open_runs(key_data=jax.random.key_data(prng_keys), key_impl="threefry2x32")
        jax.block_until_ready(
            lox.tap(jax.jit(jax.vmap(f)), lambda logs: writer.append(runs, logs), buffer=16)(prng_keys)
        )
    _, expected = jax.jit(lox.spool(jax.vmap(f)))(prng_keys)
    expected = jax.tree.map(np.asarray, expected)
    for i in (0, 500, 1023):
        same(lox.load(tmp_path, prng_keys[i]), expected.lane(i))
    stacked = lox.load(tmp_path, prng_keys)
    for key in ("a", "b", "f"):
        same(stacked[key], np.swapaxes(expected[key], 0, 1))
    same(stacked["c"]["d"], np.swapaxes(expected["c"]["d"], 0, 1))
    same(stacked["c"]["e"], np.broadcast_to(i32(range(steps)), (lanes, steps)))
    assert int(stacked.valid["sometimes"].sum()) == int(expected.valid["sometimes"].sum())
    same(stacked.lane(77), expected.lane(77))


def test_runs_that_are_alike_are_not_compared_with_each_other(tmp_path, monkeypatch):
    lanes = 64
    prng_keys = jax.random.split(jax.random.key(0), lanes)
    with Writer(tmp_path) as writer:
        runs = writer.open_runs(key_data=jax.random.key_data(prng_keys), key_impl="threefry2x32")
        values = np.arange(lanes * 3, dtype=np.float32).reshape(lanes, 3)
        writer.append(runs, lox.logdict.from_arrays({"x": values.T}, steps={"step": i32(range(3))}, lanes=1))
    compared = []
    fit = _from_rows._fit
    monkeypatch.setattr(_from_rows, "_fit", lambda *chunks: compared.append(chunks) or fit(*chunks))
    same(lox.load(tmp_path, prng_keys)["x"], values)
    assert len(compared) < lanes


# --- names ---


@pytest.mark.parametrize(
    ("prng_key", "name"),
    [
        (jax.random.key(0), "0"),
        (jax.random.key(42), "42"),
        (jax.random.PRNGKey(42), "42"),
        (jax.random.wrap_key_data(jnp.asarray([1, 2], jnp.uint32)), str(2**32 + 2)),
        (jax.random.key(42, impl="rbg"), "rbg-42"),
        (jax.random.key(42, impl="unsafe_rbg"), "unsafe_rbg-42"),
        (jax.random.wrap_key_data(jnp.asarray([1, 2, 3, 4], jnp.uint32), impl="rbg"), "x5009cb7c"),
        (jax.random.wrap_key_data(jnp.asarray([2**31, 7], jnp.uint32)), "xb5ff5ab3"),
    ],
)
def test_names(tmp_path, prng_key, name):
    lox.save({"x": 1}, tmp_path, prng_key)
    (run,) = lox.runs(tmp_path)
    assert run.name == name
    same(lox.load(tmp_path, prng_key), {"x": np.asarray([1])})
    raw = not jnp.issubdtype(prng_key.dtype, jax.dtypes.prng_key)
    same(jax.random.key_data(run.key), prng_key if raw else jax.random.key_data(prng_key))


def test_no_two_prng_keys_share_a_name():
    rng = np.random.default_rng(0)
    words = [*rng.integers(0, 3, (50, 4), np.uint32), *rng.integers(0, 2**32, (50, 4), np.uint32)]
    words += [np.concatenate([w[:2], w[:2]]) for w in words]
    keys = {(impl, *map(int, w)) for impl in ("rbg", "unsafe_rbg") for w in words}
    keys |= {("threefry2x32", *map(int, w[:2])) for w in words}
    assert len({names.base_name(k[1:], k[0]) for k in keys}) == len(keys)


def test_bad_prng_keys(tmp_path):
    lox.save({"x": 1}, tmp_path)
    for key in (42, np.zeros(3), np.uint32(3), object()):
        with pytest.raises(lox.LogTypeError, match="give the run's PRNG key"):
            lox.load(tmp_path, key)


# --- modes ---

PRNG_KEY = jax.random.key(42)


def test_new(tmp_path):
    for i in range(3):
        lox.save({"x": i}, tmp_path, PRNG_KEY, mode="new")
    assert [run.name for run in lox.runs(tmp_path)] == ["42", "42.1", "42.2"]
    with pytest.warns(lox.LoxWarning, match="3 runs, '42', '42.1' and '42.2': the newest is loaded"):
        assert lox.load(tmp_path, PRNG_KEY)["x"].tolist() == [2]
    assert lox.load(tmp_path, "42.1")["x"].tolist() == [1]


def test_append(tmp_path):
    lox.save({"x": 0}, tmp_path, PRNG_KEY, mode="new")
    lox.save({"x": 1}, tmp_path, PRNG_KEY, mode="new")
    lox.save({"x": 2, "y": 0.5}, tmp_path, PRNG_KEY)
    lox.save({"x": 3}, tmp_path, PRNG_KEY)
    assert [run.name for run in lox.runs(tmp_path)] == ["42", "42.1"]
    with pytest.warns(lox.LoxWarning, match="the newest is loaded"):
        same(lox.load(tmp_path, PRNG_KEY), {"x": np.asarray([1, 2, 3]), "y": np.asarray([0.5])})
    assert lox.load(tmp_path, "42")["x"].tolist() == [0]


def test_overwrite(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    lox.save({"x": 0}, tmp_path, PRNG_KEY, mode="new")
    lox.save({"x": 1}, tmp_path, PRNG_KEY, mode="new")
    lox.save({"x": 9}, tmp_path, jax.random.key(1))
    groups = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    (groups[1] / "plot.png").write_text("mine too")
    (groups[0] / "meta.json.123.tmp").write_text("of a crash")
    (groups[0] / "p0000-000.arrows.damaged").write_text("of a repair")
    lox.save({"x": 2}, tmp_path, PRNG_KEY, mode="overwrite")
    assert [run.name for run in lox.runs(tmp_path)] == ["1", "42"]
    assert lox.load(tmp_path, PRNG_KEY)["x"].tolist() == [2]
    assert lox.load(tmp_path, jax.random.key(1))["x"].tolist() == [9]
    assert not groups[0].exists()
    assert [p.name for p in groups[1].iterdir()] == ["plot.png"]  # what lox did not write stays
    assert (tmp_path / "notes.txt").read_text() == "mine"
    lox.save({"x": 3}, tmp_path, PRNG_KEY, mode="new")
    assert [run.name for run in lox.runs(tmp_path)] == ["1", "42", "42.1"]


def test_overwrite_keeps_the_other_lanes(tmp_path):
    prng_keys = jax.random.split(PRNG_KEY, 3)
    _, logs = lox.spool(jax.vmap(lambda x: lox.log({"x": x})))(f32([0, 1, 2]))
    lox.save(logs, tmp_path, prng_keys)
    lox.save({"x": 9.0}, tmp_path, prng_keys[1], mode="overwrite")
    assert [lox.load(tmp_path, key)["x"].tolist() for key in prng_keys] == [[0], [9], [2]]


def test_overwrite_leaves_a_living_writer_alone(tmp_path):
    with Writer(tmp_path) as writer:
        run = writer.open_run("a")
        writer.append(run, loss(2))
        with Writer(tmp_path) as other:
            other.append(other.open_run("a", mode="overwrite"), loss(1))
        writer.append(run, loss(2, 2))
    assert len(lox.load(tmp_path)["loss"]) == 1
    assert writer.group.exists()
    with Writer(tmp_path) as other:
        other.append(other.open_run("a", mode="overwrite"), loss(3))
    assert not writer.group.exists()
    assert len(lox.load(tmp_path)["loss"]) == 3


def test_an_interrupted_overwrite(tmp_path, monkeypatch):
    """The entry of the new run decides: old files that are left are ignored."""
    lox.save({"x": 0}, tmp_path, PRNG_KEY)
    monkeypatch.setattr("lox.store._group.Group.delete", lambda self: None)
    lox.save({"x": 1}, tmp_path, PRNG_KEY, mode="overwrite")
    monkeypatch.undo()
    assert lox.load(tmp_path)["x"].tolist() == [1]
    assert len(list(tmp_path.iterdir())) == 2
    lox.save({"x": 2}, tmp_path, PRNG_KEY, mode="overwrite")
    assert len(list(tmp_path.iterdir())) == 1


def test_error(tmp_path):
    lox.save({"x": 0}, tmp_path, PRNG_KEY, mode="error")
    with pytest.raises(lox.RunExistsError, match=r"(?s)the run '42' is already in .*Use another PRNG key") as error:
        lox.save({"x": 0}, tmp_path, PRNG_KEY, mode="error")
    assert isinstance(error.value, FileExistsError)
    assert lox.load(tmp_path)["x"].tolist() == [0]


def test_unknown_mode(tmp_path):
    with pytest.raises(lox.OptionError, match="`mode` is 'never'; choose one of 'new', 'append', 'overwrite' and"):
        lox.save({"x": 0}, tmp_path / "new", mode="never")
    assert not (tmp_path / "new").exists()


# --- load ---


def test_one_run_or_many(tmp_path):
    lox.save({"x": f32(0)}, tmp_path)
    assert isinstance(lox.load(tmp_path), lox.logdict)
    lox.save({"x": f32(1), "y": f32(2)}, tmp_path, jax.random.key(1))
    runs = lox.load(tmp_path)
    assert repr(runs) == "<2 runs: 'run' and '1'>"
    assert list(runs) == ["run", "1"]
    assert len(runs) == 2
    assert "1" in runs
    assert "2" not in runs
    same(runs["1"], {"x": f32([1]), "y": f32([2])})
    assert [(name, list(logs)) for name, logs in runs.items()] == [("run", ["x"]), ("1", ["x", "y"])]
    with pytest.raises(KeyError):
        runs["2"]


def test_repr_of_many_runs(tmp_path):
    with Writer(tmp_path) as writer:
        writer.open_runs([str(i) for i in range(20)])
    assert repr(lox.load(tmp_path)) == "<20 runs: '0', '1', '2', '3', ..., '18' and '19'>"


def test_stack(tmp_path):
    with Writer(tmp_path) as writer:
        for name, n in [("a", 3), ("b", 1)]:
            writer.append(writer.open_run(name), loss(n))
        writer.append(1, {"k": KeyData(np.uint32([0, 7]), "threefry2x32"), "same": f32(1)})
        writer.append(0, {"same": f32(0)})
    logs = lox.load(tmp_path).stack()
    same(logs["loss"], f32([[0, 0.5, 1], [0, np.nan, np.nan]]))
    same(logs.step["loss"], i32([[0, 1, 2], [0, -1, -1]]))
    same(logs["same"], f32([[0], [1]]))
    same(logs.valid, {"loss": boolean([[1, 1, 1], [1, 0, 0]]), "k": boolean([[0], [1]])})
    same(logs.lane(1)["loss"], f32([0]))
    same(jax.random.key_data(logs["k"]), np.uint32([[[0, 0]], [[0, 7]]]))
    assert logs.filter("loss").reduce("mean")["loss"].tolist() == [0.5, 0]


def test_several_prng_keys_stack(tmp_path):
    prng_keys = jax.random.split(PRNG_KEY, 3)
    for i, key in enumerate(prng_keys):
        lox.save({"x": f32(i)}, tmp_path, key)
    same(lox.load(tmp_path, prng_keys[::-1])["x"], f32([[2], [1], [0]]))
    with pytest.raises(lox.OptionError, match="the same PRNG key twice"):
        lox.load(tmp_path, prng_keys[jnp.asarray([0, 0])])


def test_argnames(tmp_path):
    lox.save({"train/loss": 1.0, "train/acc": 2.0, "lr": 3.0}, tmp_path)
    assert list(lox.load(tmp_path, argnames="train/*")) == ["train/loss", "train/acc"]
    assert list(lox.load(tmp_path, argnames=["lr", "train/acc"])) == ["train/acc", "lr"]
    assert list(lox.load(tmp_path, argnames="lr")) == ["lr"]
    assert list(lox.load(tmp_path, argnames=[])) == []
    with pytest.raises(lox.LogTypeError, match="`argnames` takes names, not 3"):
        lox.load(tmp_path, argnames=[3])


def test_keys_come_in_the_order_of_logging(tmp_path):
    steps = {"step": {"b": 1, "d": 1}}
    logs = lox.logdict({key: f32(0) for key in "abcdef"}, steps=steps)
    lox.save(logs, tmp_path)
    assert list(lox.load(tmp_path)) == list("abcdef")


def test_loaded_arrays_are_the_users_own(tmp_path):
    lox.save(loss(3), tmp_path)
    logs = lox.load(tmp_path)
    logs["loss"][:] = 7
    assert lox.load(tmp_path)["loss"].tolist() == [0, 0.5, 1]


def test_missing(tmp_path):
    with pytest.raises(lox.RunNotFoundError, match=r"no directory .*nowhere'. Check the path") as error:
        lox.load(tmp_path / "nowhere")
    assert isinstance(error.value, FileNotFoundError)
    with pytest.raises(lox.RunNotFoundError, match="has no runs: lox has written nothing to it"):
        lox.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(lox.StoreError, match="is a file: give the directory"):
        lox.load(tmp_path / "file")
    with pytest.raises(lox.StoreError, match=r"'.*file' is a file: choose a directory"):
        lox.save({"x": 1}, tmp_path / "file")
    with Writer(tmp_path / "a"), pytest.raises(lox.RunNotFoundError, match="has no runs yet"):
        lox.load(tmp_path / "a")
    lox.save({"x": 1}, tmp_path / "b", PRNG_KEY)
    with pytest.raises(lox.RunNotFoundError, match=r"there is no run '7' in .*b'. The runs are '42'."):
        lox.load(tmp_path / "b", jax.random.key(7))
    with pytest.raises(lox.RunNotFoundError, match="there is no run 'x'"):
        lox.load(tmp_path / "b", "x")


def test_runs(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    config = {"lr": np.float32(0.5), "layers": (1, 2), "f": len, "a": jnp.arange(2), "nested": {"x": None}}
    lox.save({"x": 1}, tmp_path, PRNG_KEY, config=config)
    lox.save({"x": 1}, tmp_path)
    first, second = lox.runs(tmp_path)
    assert first.config == {"lr": 0.5, "layers": [1, 2], "f": str(len), "a": [0, 1], "nested": {"x": None}}
    assert first.key == PRNG_KEY
    assert (first.key_data, first.key_impl) == ((0, 42), "threefry2x32")
    assert before <= first.opened <= second.opened <= datetime.datetime.now(datetime.UTC)
    assert (second.name, second.key, second.config) == ("run", None, None)


# --- Writer ---


def test_reading_flushes_the_writers_of_this_process(tmp_path):
    writer = Writer(tmp_path)
    writer.append(writer.open_run(), loss(3))
    assert len(lox.load(tmp_path)["loss"]) == 3
    assert lox.runs(tmp_path / "." / "")[0].name == "run"
    writer.append(0, loss(3))
    assert len(lox.load(tmp_path / ".." / tmp_path.name)["loss"]) == 6
    writer.close()


def test_small_appends_are_collected(tmp_path):
    with Writer(tmp_path, buffer_bytes=1000) as writer:
        run = writer.open_run()
        for i in range(20):
            writer.append(run, loss(1, i))
        assert not list(writer.group.glob("*.arrows"))
        for i in range(40):
            writer.append(run, loss(1, 20 + i))
        (segment,) = writer.group.glob("*.arrows")
        written = segment.stat().st_size
        writer.flush()
        assert segment.stat().st_size > written
        writer.flush(fsync=True)
    assert lox.load(tmp_path).step["loss"].tolist() == list(range(60))


def test_segments_rotate(tmp_path):
    with Writer(tmp_path, buffer_bytes=100, segment_bytes=3000) as writer:
        run = writer.open_run()
        for i in range(200):
            writer.append(run, loss(2, 2 * i))
    segments = sorted(p.name for p in writer.group.glob("*.arrows"))
    assert segments[:2] == ["p0000-000.arrows", "p0000-001.arrows"]
    assert len(segments) > 3
    assert lox.load(tmp_path).step["loss"].tolist() == list(range(400))


def test_process_number(tmp_path):
    with Writer(tmp_path, process=3) as writer:
        writer.append(writer.open_run(), loss(1))
    assert [p.name for p in writer.group.glob("*.arrows")] == ["p0003-000.arrows"]
    assert json.loads((writer.group / "meta.json").read_text())["process"] == 3


def test_a_writer_without_runs_leaves_nothing(tmp_path):
    Writer(tmp_path).close()
    lox.save({"x": 1}, tmp_path, jax.random.key(0))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(lox.RunExistsError):
        lox.save({"x": 1}, tmp_path, jax.random.key(0), mode="error")
    assert sorted(tmp_path.iterdir()) == before and len(before) == 1


def test_meta(tmp_path):
    writer = Writer(tmp_path, config={"lr": 0.1})
    meta = json.loads((writer.group / "meta.json").read_text())
    assert (meta["format"], meta["status"], meta["config"]) == ("lox-arrow/2", "open", {"lr": 0.1})
    assert meta["versions"]["lox"] == lox.__version__
    writer.open_run()
    writer.close()
    assert json.loads((writer.group / "meta.json").read_text())["status"] == "closed"
    assert sorted(p.name for p in writer.group.iterdir()) == ["meta.json", "runs.jsonl"]


def test_many_schemas(tmp_path):
    writer = Writer(tmp_path, buffer_bytes=1)
    run = writer.open_run()
    with pytest.warns(lox.LoxWarning, match="more than 64 different sets of keys, shapes or dtypes") as warned:
        for _ in range(2):
            for i in range(70):
                writer.append(run, {f"k{i}": f32(i)})
    writer.close()
    assert len(warned) == 1
    logs = lox.load(tmp_path)
    assert [logs[f"k{i}"].tolist() for i in range(70)] == [[i, i] for i in range(70)]


def test_threads(tmp_path):
    with Writer(tmp_path, buffer_bytes=500) as writer:
        runs = writer.open_runs([str(i) for i in range(4)])

        def work(run):
            for i in range(100):
                writer.append(run, loss(1, i))
                if i % 30 == 0:
                    writer.flush()

        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for logs in lox.load(tmp_path).values():
        assert logs.step["loss"].tolist() == list(range(100))


def test_closed(tmp_path):
    writer = Writer(tmp_path)
    run = writer.open_run()
    writer.append(run, loss(1))
    writer.close()
    writer.close()
    writer.flush()
    assert writer.closed
    with pytest.raises(lox.StoreError, match=r"is closed\. Make a new one"):
        writer.append(run, loss(1))
    with pytest.raises(lox.StoreError, match="is closed"):
        writer.open_run()


def test_an_exception_inside_the_context(tmp_path):
    with pytest.raises(ZeroDivisionError), Writer(tmp_path) as writer:
        writer.append(writer.open_run(), loss(2))
        raise ZeroDivisionError
    assert len(lox.load(tmp_path)["loss"]) == 2


def test_wall_times_never_go_backwards(tmp_path):
    with Writer(tmp_path) as writer:
        run = writer.open_run()
        for i, wall in enumerate([5e9, 4e9, 5e9, 6e9]):
            writer.append(run, {"x": i32(i)} if i % 2 else {"x": i32(i), "y": i32(i)}, wall=wall)
    assert lox.load(tmp_path)["x"].tolist() == [0, 1, 2, 3]


def test_mismatched_event_counts(tmp_path):
    with Writer(tmp_path) as writer, pytest.raises(lox.MismatchError, match="'x' have different numbers of events"):
        writer.append(writer.open_run(), lox.logdict({"x": f32([1, 2])}, steps={"step": {"x": i32([1, 2, 3])}}))


# --- Reader ---


def test_poll(tmp_path):
    reader = Reader(tmp_path / "later")
    assert reader.poll() == {}
    with Writer(tmp_path / "later") as writer:
        a, b = writer.open_runs(["a", "b"])
        writer.append(a, loss(2))
        writer.flush()
        assert {name: logs.step["loss"].tolist() for name, logs in reader.poll().items()} == {"a": [0, 1]}
        assert reader.poll() == {}
        writer.append(b, loss(1))
        writer.append(a, loss(2, 2))
        writer.append(a, {"late": f32(1)})
        writer.flush()
        news = reader.poll()
        assert {name: logs.step["loss"].tolist() for name, logs in news.items()} == {"a": [2, 3], "b": [0]}
        same(news["a"]["late"], f32([1]))
        with Writer(tmp_path / "later") as other:
            other.append(other.open_run("a", mode="append"), loss(1, 4))
        assert reader.poll(argnames="loss")["a"].step["loss"].tolist() == [4]
    assert reader.poll() == {}
    assert [run.name for run in reader.runs()] == ["a", "b"]
    assert reader.load("a").step["loss"].tolist() == [0, 1, 2, 3, 4]
    assert list(reader.load("a", argnames="late")) == ["late"]
    with pytest.raises(lox.RunNotFoundError, match="no run 'c'"):
        reader.load("c")


def test_poll_of_a_run_that_an_older_writer_continues(tmp_path):
    """The order is that in which the attempts at a run began, not that of the writers."""
    with Writer(tmp_path) as older:
        older.open_run("other")
        with Writer(tmp_path) as newer:
            newer.append(newer.open_run("a"), loss(2))
        older.append(older.open_run("a", mode="append"), loss(2, 2))
    assert lox.load(tmp_path, "a").step["loss"].tolist() == [0, 1, 2, 3]
    assert Reader(tmp_path).poll()["a"].step["loss"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_import_is_light():
    code = "import lox, sys; print([m for m in ('nanoarrow', 'rich', 'pyarrow', 'pickle5') if m in sys.modules])"
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert actual.stdout.strip() == "[]"


def test_poll_of_events_that_do_not_fit_together(tmp_path):
    reader = Reader(tmp_path)
    with Writer(tmp_path) as writer:
        run = writer.open_run("a")
        writer.append(run, {"x": f32(1), "y": f32(2)})
        writer.append(run, {"x": f32([1, 2])})
    with pytest.warns(lox.LoxWarning, match="the events of 'x' do not fit into one array"):
        same(reader.poll()["a"], {"x@scalar": f32([1]), "x@2": f32([[1, 2]]), "y": f32([2])})
    assert reader.poll() == {}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_must_not_write(tmp_path):
    code = f"""
import os, numpy as np, lox, warnings
warnings.simplefilter("ignore")
writer = lox.store.Writer({str(tmp_path)!r})
run = writer.open_run()
writer.append(run, {{"x": np.float32(1)}})
if os.fork() == 0:
    try:
        writer.append(run, {{"x": np.float32(2)}})
    except lox.StoreError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
writer.close()
"""
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "belongs to the process that this one was forked from" in actual.stdout
    assert lox.load(tmp_path)["x"].tolist() == [1]


@pytest.mark.parametrize("mode", ["new", "append", "overwrite"])
def test_one_prng_key_twice_is_two_runs(tmp_path, mode):
    lox.save({"x": 0.0}, tmp_path, PRNG_KEY)
    with Writer(tmp_path) as writer:
        runs = writer.open_runs(key_data=[[0, 42], [0, 42]], mode=mode)
        for run in runs:
            writer.append(run, {"x": np.float64(run + 1)})
    actual = {name: logs["x"].tolist() for name, logs in lox.load(tmp_path).items()}
    assert (
        actual
        == {
            "new": {"42": [0], "42.1": [1], "42.2": [2]},
            "append": {"42": [0, 1], "42.1": [2]},
            "overwrite": {"42": [1], "42.1": [2]},
        }[mode]
    )
    assert writer.run_names == list(actual)[-2:]


@pytest.mark.slow
def test_a_writer_that_is_not_closed(tmp_path):
    code = f"""
import numpy as np, lox
def f():
    writer = lox.store.Writer({str(tmp_path)!r})
    writer.append(writer.open_run(), {{"x": np.float32(1)}})
f()
writer = lox.store.Writer({str(tmp_path)!r})
writer.append(writer.open_run(mode="append"), {{"x": np.float32(2)}})
"""
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert actual.stderr == ""
    assert lox.load(tmp_path)["x"].tolist() == [1, 2]


def test_device_lanes(tmp_path):
    """Logs of `shard_map` have lanes that are named after mesh axes."""
    mesh = jax.sharding.Mesh(devices(2).reshape(2, 1), ("x", "y"))
    spec = jax.sharding.PartitionSpec(("x", "y"))
    f = jax.shard_map(lambda x: (lox.log({"a": x}), x)[1], mesh=mesh, in_specs=spec, out_specs=spec)
    _, logs = lox.spool(f)(jnp.arange(2.0))
    assert logs._layouts["a"].flags == ((("x", "y"),),)
    lox.save(logs, tmp_path)
    assert lox.load(tmp_path)._layouts["a"].flags == logs._layouts["a"].flags


def test_steps_of_different_keys_are_kept_apart(tmp_path):
    logs = lox.logdict({"x": f32([1, 2]), "y": f32([3, 4]), "z": f32([5, 6])})
    logs.steps = {"step": {"x": i32([0, 1]), "y": i32([5, 6]), "z": i32([0, 1])}}
    lox.save(logs, tmp_path)
    loaded = lox.load(tmp_path)
    same(loaded, dict(logs))
    same(loaded.steps["step"], logs.steps["step"])
    assert len(list(tmp_path.glob("*/*.arrows"))) == 2  # keys with the same steps share a file


def entry(group, name, base, mode, opened, number=0):
    return Entry(group, number, name, base, base, mode, 0, opened, None, None, None)


def test_two_runs_that_chose_the_same_name():
    """If processes begin a run at the same moment, the later one gets the next number, for every reader."""
    entries = [
        entry("b", "42", "42", "new", 2.0),
        entry("a", "42", "42", "new", 1.0),
        entry("c", "42", "42", "new", 2.0),
    ]
    for order in itertools.permutations(entries):
        actual = resolve(list(order))
        assert {name: record.entries[0].group for name, record in actual.items()} == {
            "42": "a",
            "42.1": "b",
            "42.2": "c",
        }


def test_the_time_decides_what_is_overwritten():
    """Not the age of the group: an old writer may begin a run after another one has overwritten its first."""
    entries = [
        entry("old", "42", "42", "new", 1.0, 0),
        entry("young", "42", "42", "overwrite", 2.0)._replace(began=True),
        entry("old", "42.1", "42", "new", 3.0, 1),
    ]
    actual = resolve(entries)
    assert {name: record.entries[0].group for name, record in actual.items()} == {"42": "young", "42.1": "old"}


@pytest.mark.parametrize("mode", ["append", "new", "overwrite"])
def test_a_clock_that_is_set_back(tmp_path, monkeypatch, mode):
    """What was written later comes later, whatever the clock says."""
    real = time.time
    for hours in range(3):
        now = lambda hours=hours: real() - 3600 * hours  # noqa: E731
        monkeypatch.setattr(time, "time", now)
        clock = types.SimpleNamespace(
            datetime=types.SimpleNamespace(now=lambda tz, now=now: datetime.datetime.fromtimestamp(now(), tz)),
            UTC=datetime.UTC,
        )
        monkeypatch.setattr(_group, "datetime", clock)
        lox.save({"v": f32(hours)}, tmp_path, jax.random.key(1), mode=mode)
    expected = {
        "append": {"1": [0, 1, 2]},
        "new": {"1": [0], "1.1": [1], "1.2": [2]},
        "overwrite": {"1": [2]},
    }[mode]
    assert {run.name: lox.load(tmp_path, run.name)["v"].tolist() for run in lox.runs(tmp_path)} == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)  # that there are several
        assert lox.load(tmp_path, jax.random.key(1))["v"].tolist() == list(expected.values())[-1]


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Writer("runs") as writer:
        run = writer.open_run("a")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.append(run, {"x": f32(1)})
        writer.open_run("b")
    assert list(lox.load(tmp_path / "runs")) == ["a", "b"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [2, 63, 64, 65, 130])
@pytest.mark.parametrize("chance", [None, 0.9, 0.1])
def test_runs_that_log_together(tmp_path, count, chance):
    """Whichever runs come in one call, every run gets its own events in order, and what all share too."""
    rng = np.random.default_rng(count)
    expected = {name: [] for name in map(str, range(count))}
    with Writer(tmp_path) as writer:
        numbers = writer.open_runs(list(expected))
        for start, stop in [(0, count), (0, count), (count // 3, count), (0, 1 + count // 2), (0, count)]:
            chosen = numbers[start:stop]
            if start == 0 and stop < count:
                chosen = rng.permutation(chosen)
            shape = (4, len(chosen))
            data = {"x": rng.normal(size=shape), "m": rng.normal(size=(*shape, 2)), "i": rng.integers(0, 9, shape)}
            valid = None if chance is None else rng.random(shape) < chance
            steps = {"step": rng.integers(0, 100, 4), "time": rng.random(shape)}
            logs = lox.logdict.from_arrays(data, steps=steps, valid=valid, lanes=1)
            shared = lox.logdict.from_arrays({"shared": rng.random(4)}, steps={"step": steps["step"]})
            writer.append(chosen, logs | shared)
            for lane, number in enumerate(chosen.tolist()):
                happened = slice(None) if valid is None else valid[:, lane]
                event = {key: x[:, lane][happened] for key, x in data.items()}
                event |= {"step": steps["step"][happened], "time": steps["time"][:, lane][happened]}
                expected[str(number)].append(event | {"shared": shared["shared"]})
    by_poll = Reader(tmp_path).poll()
    for name, events in expected.items():
        whole = {key: np.concatenate([event[key] for event in events]) for key in events[0]}
        for actual in lox.load(tmp_path, name), by_poll[name]:
            for key in ("x", "m", "i", "shared"):
                if key in actual or len(whole[key]):
                    same(actual[key], whole[key])
            if len(whole["x"]):
                same((actual.step["x"], actual.time["x"]), (whole["step"], whole["time"]))


def test_a_config_that_contains_itself(tmp_path):
    config = {"lr": 0.1}
    config["again"] = config
    with pytest.raises(lox.LogTypeError, match=r"`config\['again'\]` is `config` again"):
        Writer(tmp_path, config=config)
    with Writer(tmp_path) as writer, pytest.raises(lox.LogTypeError, match="what contains itself"):
        writer.open_run("a", config=config)
