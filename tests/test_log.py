import copy
import enum
import io
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import boolean, f32, i32, same

import lox
import lox.testing

# --- bad input ---


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({1: 2.0}, "`lox.log` got the key 1: keys are strings, not int."),
        ({("a",): 2.0}, "`lox.log` got the key ('a',): keys are strings, not tuple."),
        ({"x": "loss"}, "`lox.log` cannot log the value of 'x': 'loss' is not an array but str."),
        ({"x": b"raw"}, "`lox.log` cannot log the value of 'x': b'raw' is not an array but bytes."),
        ({"x": None}, "`lox.log` cannot log 'x': None holds no array."),
        ({"x": {}}, "`lox.log` cannot log 'x': {} holds no array."),
        ({"x": [1, "a"]}, "`lox.log` cannot log the value of 'x': 'a' is not an array but str."),
        ([("x", 1)], "`lox.log` takes a mapping from names to values, not list: `lox.log({'loss': x})`."),
        (3, "`lox.log` takes a mapping from names to values, not int: `lox.log({'loss': x})`."),
        (None, "`lox.log` takes a mapping from names to values, not NoneType: `lox.log({'loss': x})`."),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lox.spool, lox.tap, lox.nolog])
def test_bad_data(capsys, transform, data, message):
    def f():
        lox.log(data)

    with pytest.raises(TypeError) as info:
        transform(f)()
    assert isinstance(info.value, lox.LoxError)
    assert str(info.value) == message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["a"]), np.array([object()])])
def test_a_value_that_is_not_an_array_names_its_key(value):
    with pytest.raises(TypeError, match=r"^`lox\.log` cannot log the value of 'k'") as info:
        lox.log({"k": value})
    assert isinstance(info.value, lox.LogTypeError)


def test_a_number_too_large_for_an_array_names_its_key():
    with pytest.raises(lox.LogTypeError, match=r"^`lox\.log` cannot log the value of 'k'"):
        lox.log({"k": 2**100})


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            {"step": np.arange(2)},
            "`lox.log` got step 'step' with shape (2,): it must be a single number per event. "
            "Log an array under its own key.",
        ),
        (
            {"episode": np.zeros((1, 0))},
            "`lox.log` got step 'episode' with shape (1, 0): it must be a single number per event. "
            "Log an array under its own key.",
        ),
        ({"step": "one"}, "`lox.log` cannot log step 'step': 'one' is not an array but str."),
        ({"step": None}, "`lox.log` cannot log step 'step': None is not an array but NoneType."),
    ],
)
def test_bad_steps(steps, message):
    with pytest.raises(TypeError) as info:
        lox.log({"x": 1}, **steps)
    assert isinstance(info.value, lox.LoxError)
    assert str(info.value) == message


def test_a_bad_where():
    with pytest.raises(lox.LogTypeError, match=r"^`lox\.log` got `where` with shape \(2,\): "):
        lox.log({"x": 1}, where=jnp.ones(2, bool))


def test_nothing_is_logged_when_one_key_is_bad(capsys):
    with pytest.raises(lox.LogTypeError, match="'bad'"):
        lox.log({"good": 1, "bad": "text"})
    assert capsys.readouterr().out == ""


# --- what it takes ---


def test_an_empty_log_is_not_an_event(capsys):
    logs = lox.log({})
    assert logs == {}
    assert isinstance(logs, lox.logdict)
    assert capsys.readouterr().out == ""
    events = []
    lox.tap(lambda: lox.log({}, step=1, tags="t"), events.append)()
    assert events == []
    _, logs = lox.spool(lambda: lox.log({}, step=1))()
    assert logs == {}
    assert logs.steps == {}


def test_an_empty_log_compiles_to_nothing():
    def f(x):
        lox.log({}, step=x)
        return x

    assert "lox" not in str(jax.make_jaxpr(f)(1.0))


class Point(NamedTuple):
    x: float
    y: float


VALUES = [
    (3, i32(3), "3"),
    (2.5, f32(2.5), "2.5"),
    (True, boolean(True), "True"),
    (1j, np.asarray(1j, np.complex64), "1j"),
    (np.float32(1.5), f32(1.5), "1.5"),
    (np.int8(-3), np.int8(-3), "-3"),
    (np.arange(3, dtype=np.uint8), np.arange(3, dtype=np.uint8), "[0, 1, 2]"),
    (np.float16(0.5), np.float16(0.5), "0.5"),
    (jnp.bfloat16(1.5), np.asarray(jnp.bfloat16(1.5)), "1.5"),
    (jnp.ones((2, 2)), f32([[1, 1], [1, 1]]), "[[1.0, 1.0], [1.0, 1.0]]"),
    (jnp.zeros((0, 3)), f32(np.zeros((0, 3))), "[]"),
    ([1, 2.5], [i32(1), f32(2.5)], "[1, 2.5]"),
    ({"a": (1, {"b": True})}, {"a": (i32(1), {"b": boolean(True)})}, "{'a': (1, {'b': True})}"),
    (Point(1.0, 2.0), Point(f32(1), f32(2)), "Point(x=1.0, y=2.0)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("value", "expected", "text"), VALUES)
def test_values(capsys, value, expected, text):
    def f():
        return lox.log({"v": value})

    returned = f()
    assert capsys.readouterr().out == f"{{'v': {text}}}\n"
    same(returned, {"v": expected})

    returned = jax.jit(f)()
    jax.effects_barrier()
    assert capsys.readouterr().out == f"{{'v': {text}}}\n"
    same(returned, {"v": expected})

    for spooled in (lox.spool(f), jax.jit(lox.spool(f)), lox.spool(jax.jit(f))):
        returned, logs = spooled()
        same(returned, {"v": expected})
        same(logs, {"v": expected})
        assert str(logs) == f"{{'v': {text}}}"

    events = []
    lox.tap(f, events.append)()
    lox.tap(jax.jit(f), events.append)()
    for event in events:
        same(event, {"v": expected})
        assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(event))
    assert len(events) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("value", "expected", "text"), VALUES)
def test_values_in_a_loop(value, expected, text):
    del text

    def f():
        def body(carry, _):
            lox.log({"v": value})
            return carry, None

        return jax.lax.scan(body, 0, length=2)[0]

    logs = lox.spool(f)()[1]
    same(logs, {"v": jax.tree.map(lambda x: np.stack([x, x]), expected)})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_prng_keys(wrap):
    prng_key = jax.random.key(7)

    def f(prng_key):
        lox.log({"key": prng_key})
        return prng_key

    out, logs = lox.spool(wrap(f))(prng_key)
    assert logs["key"].dtype == prng_key.dtype
    assert logs["key"].shape == ()
    same(jax.random.key_data(logs["key"]), jax.random.key_data(prng_key))
    same(jax.random.key_data(out), jax.random.key_data(prng_key))


@pytest.mark.slow
def test_prng_keys_in_a_loop():
    prng_keys = jax.random.split(jax.random.key(7), 3)

    def f(prng_keys):
        jax.lax.scan(lambda c, key: (c, lox.log({"key": key})["key"]), 0, prng_keys)

    _, logs = lox.spool(f)(prng_keys)
    same(jax.random.key_data(logs["key"]), jax.random.key_data(prng_keys))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_prng_keys_can_be_printed_and_tapped(capsys, wrap):
    def f(key):
        lox.log({"key": key, "x": 1})

    wrap(f)(jax.random.key(7))
    jax.effects_barrier()
    out = capsys.readouterr().out
    assert out.startswith("{'key': ")
    assert out.endswith(", 'x': 1}\n")
    assert out.count("\n") == 1
    events = []
    lox.tap(wrap(f), events.append)(jax.random.key(7))
    assert [list(e) for e in events] == [["key", "x"]]


def words(tree):
    """Replace PRNG keys by arrays."""
    is_key = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_prng_keys_in_a_vmapped_branch(wrap):
    prng_keys = jax.random.split(jax.random.key(7), 3)
    data = np.asarray(jax.random.key_data(prng_keys))

    def f(n, key):
        return jax.lax.cond(n > 0, lambda key: (lox.log({"key": key}), n)[1], lambda key: n, key)

    f = wrap(jax.vmap(f))
    out, logs = lox.spool(f)(jnp.arange(3), prng_keys)
    same(out, i32([0, 1, 2]))
    same(logs.valid["key"], boolean([[False, True, True]]))
    same(words(logs)["key"][0, 1:], data[1:])
    same(words(logs.lane(2))["key"], data[2:])
    same(words(logs.lane(0))["key"], data[:0])
    for how in ("first", "last"):
        for reduced in (lox.spool(f, reduce=how)(jnp.arange(3), prng_keys)[1], logs.reduce(how)):
            same(reduced.valid["key"], boolean([False, True, True]))
            same(words(reduced)["key"][1:], data[1:])
    events = []
    lox.tap(f, events.append)(jnp.arange(3), prng_keys)
    lox.tap(f, events.append, buffer=2)(jnp.arange(3), prng_keys)
    same(events[0].valid["key"], boolean([False, True, True]))
    same(events[0]["key"][1:], data[1:])
    same(events[1]["key"][0, 1:], data[1:])
    assert len(events) == 2


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_prng_keys_in_a_while_loop(wrap):
    def f(n, prng_key):
        def body(carry):
            i, prng_key = carry
            lox.log({"key": prng_key})
            return i + 1, jax.random.fold_in(prng_key, i)

        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, prng_key))[0]

    prng_key, expected = jax.random.key(7), []
    for i in range(3):
        expected.append(jax.random.key_data(prng_key))
        prng_key = jax.random.fold_in(prng_key, i)
    expected, prng_key = np.asarray(expected), jax.random.key(7)
    same(words(lox.spool(wrap(f), capacity=5)(3, prng_key)[1]), {"key": expected})
    same(words(lox.spool(wrap(f), capacity=5, interval=2)(3, prng_key)[1]), {"key": expected[::2]})
    for how, n in (("first", 0), ("last", 2)):
        same(words(lox.spool(wrap(f), reduce=how)(3, prng_key)[1]), {"key": expected[n]})
        same(words(lox.spool(wrap(f), capacity=5)(3, prng_key)[1].reduce(how)), {"key": expected[n]})
    for buffer in (None, 2):
        events = []
        lox.tap(wrap(f), events.append, buffer=buffer)(3, prng_key)
        same(np.concatenate([e["key"].reshape(-1, 2) for e in events]), expected)
    lanes, logs = lox.spool(wrap(jax.vmap(f, in_axes=(0, None))), capacity=5)(jnp.arange(1, 4), prng_key)
    same(lanes, i32([1, 2, 3]))
    for lane in range(3):
        same(words(logs.lane(lane)), {"key": expected[: lane + 1]})


@pytest.mark.parametrize("options", [{"reduce": "first"}, {"reduce": "last"}, {"interval": 2}, {"capacity": 1}])
def test_prng_keys_outside_loops(options):
    def f(prng_key):
        lox.log({"key": prng_key}, where=True)
        lox.log({"key": jax.random.fold_in(prng_key, 1)}, where=False)

    prng_key = jax.random.key(7)
    _, logs = lox.spool(f, **options)(prng_key)
    same(words(logs)["key"].reshape(2), np.asarray(jax.random.key_data(prng_key)))


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_numbers_of_less_than_a_byte(capsys, wrap, dtype):
    def f(x, ys):
        lox.log({"x": x})
        jax.lax.scan(lambda c, y: (lox.log({"y": y}), (c, None))[1], 0, ys)

    if jax.default_backend() != "cpu":
        pytest.skip("XLA for GPUs cannot take a slice of such numbers that is no whole number of bytes")

    x = np.asarray([1, 0, 1, 1, 0]).astype(dtype)
    ys = np.stack([x, x[::-1]])
    args = jnp.asarray(x), jnp.asarray(ys)
    expected = [{"x": x}, {"y": ys[0]}, {"y": ys[1]}]
    events = []
    lox.tap(wrap(f), events.append)(*args)
    same([dict(e) for e in events], expected)
    events = []
    lox.tap(wrap(f), events.append, buffer=2)(*args)
    same(np.concatenate([e["y"] for e in events if "y" in e]), ys)
    same(np.concatenate([e["x"] for e in events if "x" in e]), x[None])
    with lox.testing.capture() as events:
        wrap(f)(*args)
        jax.effects_barrier()
    same([dict(e) for e in events], expected)
    same(lox.spool(wrap(f))(*args)[1], {"x": x, "y": ys})


# --- arrays that are donated after they were logged ---


def donating(p):
    update = jax.jit(lambda p: p + 1, donate_argnums=0)
    for _ in range(3):
        lox.log({"p": p}, step=p[0])
        p = update(p)
    return p


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"keep_logs": True}, [0, 1, 2]),
        ({"interval": 2}, [0, 2]),
        ({"capacity": 1}, [0, 1, 2]),
        ({"reduce": "first"}, 0),
        ({"reduce": "last"}, 2),
        ({"reduce": "max"}, 2),
    ],
)
def test_logs_survive_the_donation_of_what_was_logged(options, expected):
    for _ in range(2):
        _, logs = lox.spool(donating, **options)(jnp.zeros(2) + 0)
        same(logs, {"p": np.stack([f32(expected)] * 2, -1)})
        same(logs.step["p"], f32(2 if "reduce" in options else expected))


def test_logs_of_nested_transformations_survive_donation():
    expected = {"p": f32([[0, 0], [1, 1], [2, 2]])}
    (_, inner), outer = lox.spool(lambda p: lox.spool(donating, keep_logs=True)(p))(jnp.zeros(2) + 0)
    same(inner, expected)
    same(outer, expected)
    events = []
    lox.tap(donating, events.append, buffer=2)(jnp.zeros(2) + 0)
    same(np.concatenate([e["p"] for e in events]), expected["p"])


def test_a_log_that_is_traced_is_not_copied():
    def f(x):
        lox.log({"x": x, "y": np.ones(2, np.float32)})
        return x

    text = str(jax.make_jaxpr(lambda x: lox.spool(f)(x)[1].asdict())(jnp.zeros(2)))
    assert "name=_copy" not in text


# --- without jit ---


def scan_once(x):
    return jax.lax.scan(lambda c, x: (c, lox.log({"x": x})["x"]), 0, x[None])[0]


def fori_once(x):
    return jax.lax.fori_loop(0, 1, lambda i, c: (lox.log({"x": x}), c)[1], 0)


def while_once(x):
    return jax.lax.while_loop(lambda i: i < 1, lambda i: (lox.log({"x": x}), i + 1)[1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [scan_once, fori_once, while_once])
@pytest.mark.parametrize("options", [{"capacity": 3}, {"capacity": 3, "interval": 2}, {"reduce": "last"}])
def test_whether_there_is_an_event_axis_does_not_depend_on_disable_jit(loop, options):
    x = f32([1, 2])
    with_jit = lox.spool(loop, **options)(x)[1]
    with jax.disable_jit():
        without = lox.spool(loop, **options)(x)[1]
        single = lox.spool(lambda x: lox.log({"x": x}))(x)[1]
    same(with_jit, {"x": x if "reduce" in options else x[None]})
    same(without, {"x": x if "reduce" in options else x[None]})
    same(single, {"x": x})
    for buffer, expected in ((None, x), (2, x[None])):
        events = []
        with jax.disable_jit():
            lox.tap(loop, events.append, buffer=buffer)(x)
        same([dict(e) for e in events], [{"x": expected}])


def test_a_mapping_that_is_not_a_dict():
    import types

    same(lox.log(types.MappingProxyType({"x": 1})), {"x": i32(1)})


def test_several_keys_keep_their_order():
    _, logs = lox.spool(lambda: lox.log({"z": 1, "a": 2, "m": 3}))()
    assert list(logs) == ["z", "a", "m"]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("value", [7, 2.5, True, 1j])
def test_literals_in_compiled_functions(value):
    expected = np.asarray(jnp.asarray(value))

    def f(n):
        def body(i):
            lox.log({"v": value}, step=3, where=True)
            return i + 1

        return jax.lax.while_loop(lambda i: i < n, body, 0)

    for g in (f, jax.jit(f)):
        _, logs = lox.spool(g, capacity=5)(2)
        same(logs, {"v": np.stack([expected] * 2)})
        same(logs.step, {"v": i32([3, 3])})
        _, logs = lox.spool(g, reduce="last")(2)
        same(logs, {"v": expected})
        same(logs.step, {"v": i32(3)})
        events = []
        lox.tap(g, events.append)(2)
        for event in events:
            same(event, {"v": expected})
            same(event.step, {"v": i32(3)})
        assert len(events) == 2


# --- the return value ---


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lox.tap, lox.nolog])
def test_returns_the_event(transform):
    def f(x):
        return lox.log({"x": x, "y": {"z": 2 * x}}, prefix="p/", step=4, tags="t")

    with lox.testing.capture():
        logs = transform(f)(jnp.int32(1))
    assert isinstance(logs, lox.logdict)
    same(logs, {"p/x": i32(1), "p/y": {"z": i32(2)}})
    same(logs.steps, {"step": {"p/x": i32(4), "p/y": i32(4)}})
    assert logs.valid == {}


# --- its options ---


def test_prefix(capsys):
    lox.log({"x": 1}, prefix="train/")
    assert capsys.readouterr().out == "{'train/x': 1}\n"
    _, logs = lox.spool(lambda: lox.log({"x": 1}, prefix="train/", step=2))()
    same(logs, {"train/x": i32(1)})
    same(logs.step, {"train/x": i32(2)})


def test_steps_of_several_types():
    _, logs = lox.spool(lambda: lox.log({"x": 1}, step=2, time=0.5, done=True))()
    same(logs.steps, {"step": {"x": i32(2)}, "time": {"x": f32(0.5)}, "done": {"x": i32(1)}})


def test_an_event_without_the_step_of_another():
    def f():
        lox.log({"x": 1}, step=7)
        lox.log({"x": 2}, time=0.5)
        lox.log({"y": 3})

    _, logs = lox.spool(f)()
    same(logs, {"x": i32([1, 2]), "y": i32(3)})
    same(logs.step, {"x": i32([7, -1])})
    same(logs.time, {"x": f32([np.nan, 0.5])})


def test_an_event_without_a_small_step_has_minus_one():
    def f():
        lox.log({"x": 1}, done=True, level=np.uint8(3))
        lox.log({"x": 2})

    _, logs = lox.spool(f)()
    same(logs.done, {"x": i32([1, -1])})
    same(logs.level, {"x": i32([3, -1])})


def test_explicit_logs_appear_only_when_asked_for(capsys):
    def f():
        lox.log({"a": 1, "b": 2}, explicit=True, tags="debug")
        lox.log({"c": 3})

    f()
    jax.jit(f)()
    jax.effects_barrier()
    assert capsys.readouterr().out == "{'c': 3}\n{'c': 3}\n"
    same(lox.spool(f)()[1], {"c": i32(3)})
    same(lox.spool(f, argnames="a")()[1], {"a": i32(1)})
    same(lox.spool(f, tags="debug")()[1], {"a": i32(1), "b": i32(2)})
    lox.tap(f)()
    assert capsys.readouterr().out == "{'c': 3}\n"
    lox.tap(f, tags="debug")()
    assert capsys.readouterr().out == "{'a': 1, 'b': 2}\n"
    same(lox.spool(lox.nolog(f))()[1], {})


@pytest.mark.parametrize("tags", ["t", ["t"], ("t", "u"), {"t"}])
def test_tags(tags):
    def f():
        lox.log({"x": 1}, tags=tags)
        lox.log({"y": 2})

    same(lox.spool(f, tags="t")()[1], {"x": i32(1)})


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lox.nolog], ids=["eager", "jit", "nolog"])
@pytest.mark.parametrize("where", [None, True])
def test_an_event_as_it_is_returned(around, where, capsys):
    """Also if nobody has looked at its steps before."""

    def f(x):
        return lox.log(
            {"b": x, "a": {"u": x + 1, "v": 2.0}}, step=3, episode=4, **({} if where is None else {"where": where})
        )

    copied, flat, read = around(f)(1.0), around(f)(1.0), around(f)(1.0)
    copied = copy.copy(copied)
    children, tree = jax.tree.flatten(flat)
    for logs in (copied, jax.tree.unflatten(tree, children), read):
        assert (list(logs), logs["b"], logs["a"]) == (["b", "a"], 1.0, {"u": 2.0, "v": 2.0})
        assert logs.steps == {"step": {"b": 3, "a": 3}, "episode": {"b": 4, "a": 4}}
        assert list(logs.step) == ["b", "a"]
        assert logs.valid == ({} if where is None else {"b": True, "a": True})
        assert logs.dropped == {}
    assert (copied + read).step["b"].tolist() == [3, 3]
    capsys.readouterr()


class Name(enum.StrEnum):
    LOSS = "loss"
    EPOCH = "epoch"


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lox.nolog], ids=["eager", "jit", "nolog"])
@pytest.mark.parametrize("order", [1, -1])
def test_names_that_are_equal_but_not_the_same(around, order, capsys):
    """An event has the names that it was logged with, whichever were logged before."""
    for names in [(Name.LOSS, Name.EPOCH), ("loss", "epoch")][::order]:
        logs = around(lambda x, names=names: lox.log({names[0]: x}, **{names[1]: 1}))(2.0)
        assert [type(key) for key in logs] == [type(names[0])]
        assert [type(step) for step in logs.steps] == [type(names[1])]
        assert [type(key) for key in logs.epoch] == [type(names[0])]
    capsys.readouterr()


def test_what_an_event_offers():
    with lox.testing.capture():
        assert {"steps", "dropped", "valid", "reduce"} <= set(dir(lox.log({"x": 1.0}, step=2)))


class Disguised:
    """Passes for the array that it holds, as proxies do."""

    def __init__(self, array):
        self.array = array

    __class__ = property(lambda self: type(self.array))

    def __getattr__(self, name):
        return getattr(self.array, name)

    def __array__(self, *args, **kwargs):
        return np.asarray(self.array)


def test_an_array_in_disguise():
    with lox.testing.capture() as events:
        lox.log({"x": Disguised(jnp.float32(2.0))})
    assert [event["x"].tolist() for event in events] == [2.0]


@jax.tree_util.register_pytree_node_class
class WithTable:
    """What it has beside its array cannot be compared: `==` of two of them is no truth value."""

    def __init__(self, x, table):
        self.x, self.table = x, table

    def tree_flatten(self):
        return (self.x,), self.table

    @classmethod
    def tree_unflatten(cls, table, children):
        return cls(*children, table)


@pytest.mark.parametrize(
    "around", [lox.nolog, lambda f: jax.jit(lox.nolog(f)), lambda f: f], ids=["nolog", "jit", "off"]
)
def test_a_class_that_cannot_be_compared(around, monkeypatch):
    monkeypatch.setattr(lox.config, "_sink", "off")

    def f(x):
        for n in range(2):
            logs = lox.log({"value": WithTable(x + n, np.arange(3)), "other": x}, step=n)
        return logs["value"].x, logs.step["value"]

    x, step = around(f)(1.0)
    assert (x, step) == (2.0, 1)


def test_where_outside_loops():
    def f(x):
        lox.log({"x": x}, where=x > 0, step=3)
        return x

    _, logs = lox.spool(f)(1.0)
    same(logs, {"x": f32([1.0])})  # a key that may have no event has an event axis
    same(logs.step, {"x": i32([3])})
    _, logs = lox.spool(f)(-1.0)
    same(logs, {"x": f32([])})
    same(logs.step, {"x": i32([])})

    _, logs = jax.jit(lox.spool(f))(-1.0)
    same(logs, {"x": f32([np.nan])})
    same(logs.valid, {"x": boolean([False])})
    same(logs.step, {"x": i32([-1])})


def test_where_in_a_loop():
    def f(xs):
        def body(c, x):
            lox.log({"x": x}, where=x % 2 == 0)
            return c, None

        return jax.lax.scan(body, 0, xs)[0]

    same(lox.spool(f)(jnp.arange(5))[1], {"x": i32([0, 2, 4])})
    _, logs = jax.jit(lox.spool(f))(jnp.arange(5))
    same(logs, {"x": i32([0, 0, 2, 0, 4])})
    same(logs.valid, {"x": boolean([1, 0, 1, 0, 1])})
    events = []
    lox.tap(f, events.append)(jnp.arange(5))
    assert [int(e["x"]) for e in events] == [0, 2, 4]
    same(lox.spool(f, reduce="count")(jnp.arange(5))[1], {"x": i32(3)})
    same(lox.spool(f, reduce="sum")(jnp.arange(5))[1], {"x": i32(6)})


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_where_and_the_default_sink(capsys, wrap):
    f = wrap(lambda x: lox.log({"x": x}, where=x > 0)["x"])
    f(1)
    f(-1)
    jax.effects_barrier()
    assert capsys.readouterr().out == "{'x': 1}\n"


def test_where_takes_python_bools(capsys):
    lox.log({"x": 1}, where=False)
    lox.log({"x": 2}, where=True)
    assert capsys.readouterr().out == "{'x': 2}\n"


# --- the default sink ---


@pytest.fixture
def compiled():
    @jax.jit
    def f(x):
        lox.log({"x": x}, step=x)
        return x

    return f


def test_compiled_functions_follow_the_sink(capsys, compiled):
    def run(x):
        compiled(x)
        jax.effects_barrier()
        return capsys.readouterr().out

    assert run(1) == "{'x': 1} step=1\n"
    lox.config.sink = "off"
    assert run(2) == ""
    events = []
    lox.config.sink = events.append
    assert run(3) == ""
    assert run(4) == ""
    lox.config.sink = "console"
    assert run(5) == "{'x': 5} step=5\n"
    assert [str(e) for e in events] == ["{'x': 3}", "{'x': 4}"]
    same(events[0].step, {"x": i32(3)})
    assert all(type(x) is np.ndarray or np.isscalar(x) for x in jax.tree.leaves(events))


def test_eager_logs_follow_the_sink(capsys):
    events = []
    lox.config.sink = events.append
    lox.log({"x": 1})
    lox.config.sink = "off"
    lox.log({"x": 2})
    lox.config.sink = "console"
    lox.log({"x": 3})
    assert capsys.readouterr().out == "{'x': 3}\n"
    assert [str(e) for e in events] == ["{'x': 1}"]


@pytest.mark.parametrize("sink", ["consol", "", None, 1, True, ["console"]])
def test_a_sink_that_does_not_exist(sink):
    with pytest.raises(lox.OptionError) as info:
        lox.config.sink = sink
    assert str(info.value) == (f"`lox.config.sink` is {sink!r}; choose 'console', 'off' or a function.")
    assert lox.config.sink == "console"


def test_a_setting_that_does_not_exist():
    with pytest.raises(lox.OptionError) as info:
        lox.config.sinc = "off"
    assert str(info.value) == "`lox.config` has no setting 'sinc'; it has 'sink'."


@pytest.mark.parametrize("transform", [lox.spool, lox.tap])
def test_inside_spool_and_tap_the_sink_is_silent_for_every_log(capsys, transform):
    def f(x):
        lox.log({"x": x})
        lox.log({"e": x}, explicit=True)
        return x

    for g in (f, jax.jit(f)):
        transform(g, argnames=[])(1)
        jax.jit(transform(g, argnames=[]))(1)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


def test_a_loop_prints_in_order(capsys):
    @jax.jit
    def f():
        jax.lax.fori_loop(0, 50, lambda i, c: (lox.log({"i": i}), c)[1], 0)

    f()
    jax.effects_barrier()
    assert capsys.readouterr().out == "".join(f"{{'i': {i}}}\n" for i in range(50))


OFF = """
import jax, lox
f = jax.jit(lambda x: (lox.log({"x": x}), x * 2)[1])
g = jax.jit(lambda x: x * 2)
assert lox.config.sink == "off"
text = lambda f: f.lower(1.0).as_text().replace("__lambda_", "_lambda_")
assert text(f) == text(g), text(f)
assert f(1.0) == 2.0
lox.log({"eager": 1})
y, logs = lox.spool(f)(1.0)
print(y, logs)
lox.tap(f)(1.0)
"""


@pytest.mark.slow
def test_sink_off_in_the_environment_compiles_no_callback_in():
    import os

    done = subprocess.run(
        [sys.executable, "-c", OFF],
        env={**os.environ, "LOX_SINK": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2.0 {'x': 1.0}\n{'x': 1.0}\n"


@pytest.mark.slow
def test_a_sink_in_the_environment_that_does_not_exist():
    import os

    done = subprocess.run(
        [sys.executable, "-c", "import lox"],
        env={**os.environ, "LOX_SINK": "of"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "OptionError" in done.stderr
    assert "'of'" in done.stderr


@pytest.mark.slow
def test_import_is_light():
    code = "import sys, lox; print([m for m in ('pandas', 'wandb', 'neptune') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- hints ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tag": "metric"}, "`lox.log` cannot log step 'tag': 'metric' is not an array but str. {} "
         "Did you mean 'tags'?"),
        ({"reduction": "mean"}, "`lox.log` cannot log step 'reduction': 'mean' is not an array but str. {} "
         "Did you mean 'reduce'?"),
        ({"weights": np.ones(2)}, "`lox.log` got step 'weights' with shape (2,): it must be a single number per event. "
         "Log an array under its own key. {} Did you mean 'weight'?"),
        ({"name": "loss"}, "`lox.log` cannot log step 'name': 'loss' is not an array but str."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lox.spool])
def test_an_argument_that_is_not_a_step_gets_a_hint(transform, given, message):
    with pytest.raises(lox.LogTypeError) as info:
        transform(lambda: lox.log({"x": 1}, **given))()
    assert str(info.value) == message.format("Arguments that lox does not know are steps.")


def test_steps_as_one_dict_get_a_hint():
    with pytest.raises(lox.LogTypeError, match=r"Write `step=3, episode=1`: every step is a separate argument\.$"):
        lox.log({"x": 1}, steps={"step": 3, "episode": 1})


WIDER = "Let JAX use 64 bits, `jax.config.update('jax_enable_x64', True)`, or log it as a float."


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2**31, "2147483648"),
        (-(2**31) - 1, "-2147483649"),
        (np.int64(2**31), "int64 2147483648"),
        (np.uint64(2**63), "uint64 9223372036854775808"),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lox.spool, lox.tap])
def test_integers_that_need_64_bits_get_a_hint(transform, number, text):
    with pytest.raises(lox.LogTypeError) as info:
        transform(lambda: lox.log({"x": 1}, step=number))()
    kind = "uint32" if isinstance(number, np.uint64) else "int32"
    assert str(info.value) == f"`lox.log` cannot log step 'step': {text} does not fit into {kind}. {WIDER}"
    with pytest.raises(lox.LogTypeError) as info:
        transform(lambda: lox.log({"x": [1, number]}))()
    assert str(info.value) == f"`lox.log` cannot log the value of 'x': {text} does not fit into {kind}. {WIDER}"


# --- the console shows steps ---


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_console_shows_the_steps_of_an_event(capsys, wrap):
    def f(x):
        lox.log({"x": x, "y": 2 * x}, step=3, time=0.5)
        lox.log({"x": x})
        return x

    wrap(f)(1)
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == ["{'x': 1, 'y': 2} step=3 time=0.5", "{'x': 1}"]
    lox.tap(wrap(f))(1)
    assert capsys.readouterr().out == "{'x': 1, 'y': 2} step=3 time=0.5\n{'x': 1}\n"
    lox.tap(wrap(f), print)(1)
    assert capsys.readouterr().out == "{'x': 1, 'y': 2}\n{'x': 1}\n"  # a logdict prints as it always does


def test_the_console_shows_steps_of_lanes(capsys):
    def f(x, i):
        lox.log({"x": x}, step=i, shared=5)
        lox.log({"x": x}, where=x > 0, step=i, shared=5)
        return x

    jax.vmap(f)(jnp.arange(2), jnp.array([7, 8]))
    assert capsys.readouterr().out == ("{'x': [0, 1]} step=[7, 8] shared=5\n{'x': [-, 1]} step=[-, 8] shared=5\n")


@pytest.mark.slow
def test_no_name_that_is_printed_acts_on_the_terminal(capsys):
    """Neither in what the default sink and `tap` print, nor in the message of `watch`."""
    hostile, shown = "\x1b[31m\r\ud800step", "�[31m��step"

    def f(x):
        lox.log({"\x1b[31mx\ud800": x}, **{hostile: 1})
        return x

    f(1.0)
    lox.tap(f)(1.0)
    assert capsys.readouterr().out == 2 * f"{{'\\x1b[31mx\\ud800': 1.0}} {shown}=1\n"
    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(f)(jnp.nan)
    assert str(info.value).startswith(f"'\\x1b[31mx\\ud800' is NaN at {shown}=1.\n")


def test_an_output_that_cannot_encode_a_key(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    lox.log({"ü": 1}, ß=2)
    assert out.getvalue() == b"{'\\xfc': 1} \\xdf=2\n"


def test_buffered_events_are_printed_with_the_steps_of_each_key(capsys):
    def f(xs):
        def body(i, x):
            lox.log({"x": x}, step=i)
            lox.log({"y": x}, step=i, where=x > 1)
            return i + 1, None

        return jax.lax.scan(body, 0, xs)[0]

    lox.tap(f, argnames="x", buffer=2)(jnp.arange(3))
    lox.tap(f, buffer=3)(jnp.arange(3))
    assert capsys.readouterr().out == (
        "{'x': [0, 1]} step=[0, 1]\n{'x': [2]} step=[2]\n{'x': [0, 1, 2], 'y': [2]} step={'x': [0, 1, 2], 'y': [2]}\n"
    )


@pytest.mark.slow
def test_import_does_not_warn():
    done = subprocess.run([sys.executable, "-W", "error", "-c", "import lox"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_logs_that_are_logged_again_invent_no_event():
    """Over no events, a reduced key is NaN, with `valid` False: that is not an event."""

    def inner(n):
        def step(carry, i):
            lox.log({"x": i.astype(float), "y": i}, where=i < n)
            return carry, None

        jax.lax.scan(step, 0, jnp.arange(3))
        lox.log({"n": n})

    def outer():
        def step(carry, n):
            lox.log(lox.spool(inner, reduce={"x": "mean", "y": "count"})(n)[1], step=n)
            return carry, None

        return jax.lax.scan(step, 0, jnp.arange(3))[0]

    for f in (outer, jax.jit(outer)):
        logs = lox.spool(f)()[1]
        assert logs["x"].tolist() == [0.0, 0.5] and logs.step["x"].tolist() == [1, 2]
        assert logs["n"].tolist() == [0, 1, 2] and logs["y"].tolist() == [1, 2]
    logs = lox.spool(jax.vmap(lambda n: lox.log(lox.spool(inner, "x", reduce="mean")(n)[1], where=n != 2)))(
        jnp.arange(3)
    )
    assert [logs[1].lane(n)["x"].tolist() for n in range(3)] == [[], [0.0], []]
    # A reduction for some of the keys goes with them.
    reduced = lambda n: lox.log(lox.spool(inner, reduce="mean")(n)[1], reduce={"n": "max", "x": "sum"})  # noqa: E731
    logs = lox.spool(lambda: [reduced(2), reduced(3)])()[1]
    assert (float(logs["x"]), int(logs["n"]), logs["y"].shape) == (1.5, 3, (2,))
    # A value that holds padding would be as wrong.
    with pytest.raises(lox.LogTypeError) as error:
        jax.jit(lambda: lox.log(lox.spool(inner)(1)[1]))()
    assert str(error.value) == (
        "`lox.log` cannot log 'x' and 'y', of which only some events happened, as one value: the others are padding.\n"
        'Either log what they come to:   lox.spool(f, reduce="mean")\n'
        "or leave them to the outside:   lox.spool(f, keep_logs=True)"
    )


class Pair(NamedTuple):
    a: object
    b: object


EAGER = {
    "float": 0.5,
    "int": -3,
    "bool": True,
    "complex": 1 - 2j,
    "large int": 2**31 - 1,
    "float64": np.float64(0.1),
    "int64": np.int64(7),
    "uint8": np.uint8(200),
    "int64 array": np.arange(3),
    "float64 array": np.linspace(0, 1, 3),
    "float16 array": np.ones((2, 0), np.float16),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "int4": jnp.ones(2, jnp.int4),
    "array": jnp.arange(6.0).reshape(2, 3),
    "weak": jnp.asarray(1.0) * 2,
    "tree": {"b": 1.0, "a": Pair(jnp.ones(2), (np.int8(1), True))},
    "list": [1, 2.0],
    "key": jax.random.key(3),
    "sharded": "sharded",
}


@pytest.mark.parametrize("steps", [{}, {"step": 3, "b": np.int64(4), "a": jnp.float32(0.5)}, {"s": np.uint8(1)}])
@pytest.mark.parametrize("value", EAGER)
@pytest.mark.parametrize("x64", [False, True])
def test_outside_of_programs_an_event_is_the_same_without_passing_through_xla(value, steps, x64):
    """Only plain calls take the short way, and a weight means nothing to the sink."""
    if value == "sharded":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
        value = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, jax.P("d")))
    else:
        value = EAGER[value]
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(x64), lox.testing.capture() as events, lox.scope("s"):
        returned = [lox.log({"x": value, "y": 1}, prefix="p/", **steps, **more) for more in ({}, {"weight": 1.0})]
    assert len(events) == 2
    for short, long in (events, returned):
        assert str(short) == str(long) and [*short] == [*long]
        assert {k: short._layout(k) for k in short} == {k: long._layout(k) for k in long}
        assert jax.tree.structure([dict(short), short.steps]) == jax.tree.structure([dict(long), long.steps])
        for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(long), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert str(a) == str(b)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(events))


@pytest.mark.parametrize("value", [np.longdouble(1), np.clongdouble(1), np.ma.array([1.0, 2.0], mask=[0, 1])])
@pytest.mark.parametrize("more", [{}, {"weight": 1.0}])
def test_what_jax_has_no_array_for_is_refused_in_both_ways(capsys, value, more):
    with pytest.raises(lox.LogTypeError, match="'x'"):
        lox.log({"x": value}, **more)
    assert capsys.readouterr().out == ""


def test_the_sink_may_keep_what_it_gets_outside_of_programs():
    x, y = np.zeros(2), jax.jit(lambda x: x + 1)(jnp.zeros(2))
    with lox.testing.capture() as events:
        returned = lox.log({"x": x, "y": y})
    x += 1
    jax.jit(lambda x: x * 2, donate_argnums=0)(y)
    assert str(events[0]) == "{'x': [0.0, 0.0], 'y': [1.0, 1.0]}"
    assert str(returned["x"]) == "[0. 0.]"


def test_logs_where_jax_evaluates_inside_a_transformation():
    def f(x):
        with jax.ensure_compile_time_eval():
            lox.log({"hidden": 1.0})
        return x

    with lox.testing.capture() as events:
        _, logs = lox.spool(f)(1.0)
    assert str(logs) == "{'hidden': 1.0}" and not events
