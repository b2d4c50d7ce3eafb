import copy
import gc
import json
import pickle
import threading
import traceback
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import boolean, f32, i32, same

import lox


def run(xs):
    """Two keys in a loop, one of them with steps, and a single event after it."""

    def body(carry, x):
        i, total = carry
        lox.log({"x": x}, episode=i // 2, step=i)
        lox.log({"total": {"sum": total + x}})
        return (i + 1, total + x), None

    (n, total), _ = jax.lax.scan(body, (0, jnp.zeros((), xs.dtype)), xs)
    lox.log({"n": n}, step=n)
    return total


def ragged(xs):
    """Negative values are not logged."""

    def body(i, x):
        lox.log({"x": x}, where=x > 0, step=i)
        return i + 1, None

    return jax.lax.scan(body, 0, xs)[0]


LANES = f32([[1, -1, 2, -1], [-1, -1, 3, 4]])
NAN = np.nan


JITTED = jax.jit(run)


@pytest.fixture(params=["a Python function", "a jitted function", "a jit around"])
def logs(request):
    """Those of a jitted function have their steps only once somebody looks at them."""
    transformed = {
        "a Python function": lox.spool(run),
        "a jitted function": lox.spool(JITTED),
        "a jit around": jax.jit(lox.spool(run)),
    }
    for _ in range(2):
        logs = transformed[request.param](f32([1, 2, 4]))[1]
    return logs


def to_numpy(logs):
    return jax.tree.map(np.asarray, logs)


def is_numpy(logs):
    return all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(logs))


# --- a dict ---


def test_is_a_dict(logs):
    assert isinstance(logs, dict)
    assert list(logs) == ["x", "total", "n"]
    assert len(logs) == 3
    assert "x" in logs
    assert "step" not in logs
    assert [k for k, _ in logs.items()] == ["x", "total", "n"]
    assert type(dict(logs)) is dict
    assert lox.logdict({"a": 1}) == {"a": 1}
    assert lox.logdict() == {}
    assert lox.logdict([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}


def test_dict_methods(logs):
    logs.update({"new": 1})
    assert list(logs) == ["x", "total", "n", "new"]
    assert logs.pop("new") == 1
    same(logs.pop("total"), {"sum": f32([1, 3, 7])})
    del logs["x"]
    logs["y"] = 2
    assert list(logs) == ["n", "y"]
    again = jax.tree.map(lambda x: x, logs)
    assert again == {"n": 3, "y": 2}
    same(again.steps, {"step": {"n": i32(3)}})  # a removed key takes its steps along


def test_asdict(logs):
    plain = logs.asdict()
    assert type(plain) is dict
    assert list(plain) == ["x", "total", "n"]
    same(plain, {"x": f32([1, 2, 4]), "total": {"sum": f32([1, 3, 7])}, "n": i32(3)})


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "copied",
    [
        lambda x: x.copy(),
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: jax.tree.map(lambda leaf: leaf, x),
        jax.jit(lambda x: x),
    ],
    ids=["method", "copy", "deepcopy", "pickle", "tree", "jit"],
)
def test_copies(logs, copied):
    new = copied(logs)
    assert type(new) is lox.logdict
    same(new, logs)
    for name in ("step", "episode"):
        same(new.steps[name], logs.steps[name])
    assert jax.tree.structure(new) == jax.tree.structure(logs)
    same(new.slice[1:]["x"], f32([2, 4]))


def test_a_copy_is_independent(logs):
    new = logs.copy()
    new["x"] = 0
    new.steps["step"]["x"] = 0
    same(logs["x"], f32([1, 2, 4]))
    same(logs.step["x"], i32([0, 1, 2]))


def test_what_is_set_before_anything_is_read_stays():
    for name in ("steps", "dropped", "note"):
        for _ in range(2):
            _, logs = lox.spool(JITTED)(f32([1, 2, 4]))
        setattr(logs, name, {"mine": {"x": 5}})
        assert getattr(logs, name) == {"mine": {"x": 5}}
        assert getattr(copy.copy(logs), name) == {"mine": {"x": 5}}
        assert list(logs.valid) == []
        assert logs._layout("n").ndims == (0,)
    del logs["n"], logs["total"]
    logs["x"] = logs["x"] + 1
    same(logs, {"x": f32([2, 3, 5])})
    same(logs.step["x"], i32([0, 1, 2]))


def test_threads_may_look_at_new_logs_at_once():
    spooled = lox.spool(JITTED)
    for _ in range(50):
        _, logs = spooled(f32([1, 2, 4]))
        seen, ready = [], threading.Barrier(4)

        def look(logs=logs, ready=ready, seen=seen):
            ready.wait()
            seen.append(logs.steps)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(steps is seen[0] for steps in seen)


@pytest.mark.slow
def test_logs_may_be_looked_at_while_others_are_read():
    """Garbage is collected at any time, and what is collected may look at its logs."""

    class Trainer:
        def __init__(self):
            self.me, self.logs = self, spooled(f32([1, 2, 4]))[1]

        def __del__(self):
            seen.append(self.logs.steps)

    seen, spooled = [], lox.spool(JITTED)
    spooled(f32([1, 2, 4]))
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        for n in range(1, 60):
            gc.disable()
            gc.collect()
            logs = spooled(f32([1, 2, 4]))[1]
            Trainer()
            gc.set_threshold(gc.get_count()[0] + n)
            gc.enable()
            same(logs.steps["step"]["x"], i32([0, 1, 2]))
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
        gc.enable()
    gc.collect()
    assert len(seen) == 59


@pytest.mark.parametrize("remove", ["pop", "del", "replace", "clear"])
def test_values_that_are_removed_do_not_stay_alive(remove):
    f = jax.jit(lambda x: (lox.log({"big": x * 2, "tree": [x * 3, x * 4], "loss": x.sum()}, step=1), x)[1])
    one = jax.jit(lambda x: (lox.log({"big": x * 2}, step=1), x)[1])
    for spooled in (lox.spool(f), lox.spool(one)):
        for _ in range(2):
            _, logs = spooled(jnp.arange(1000.0))
        alive = [weakref.ref(x) for key in ("big", "tree") for x in jax.tree.leaves(logs.get(key))]
        for key in [key for key in logs if key != "loss"]:
            if remove == "pop":
                logs.pop(key)
            elif remove == "del":
                del logs[key]
            elif remove == "replace":
                logs[key] = 0
        if remove == "clear":
            logs.clear()
        assert [x() is None for x in alive] == [True] * len(alive)
        assert logs._unread is not None
        assert logs.steps["step"].keys() >= {"big"}


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(logs, protocol):
    new = pickle.loads(pickle.dumps(logs, protocol))
    same(new, logs)
    same(new.steps, logs.steps)
    assert jax.tree.structure(new) == jax.tree.structure(logs)


def test_keys_of_a_jitted_function_share_their_step():
    f = lox.spool(jax.jit(lambda x: (lox.log({"b": x, "a": {"c": x, "d": x + 1}}, step=7), x)[1]))
    for _ in range(2):
        _, logs = f(f32(1))
        assert list(logs) == list(logs.step) == ["b", "a"]
        same(logs, {"b": f32(1), "a": {"c": f32(1), "d": f32(2)}})
        assert logs.step["a"] is logs.step["b"]
        assert logs.step["a"] == 7


# --- steps ---


def test_steps(logs):
    same(logs.step, {"x": i32([0, 1, 2]), "n": i32(3)})
    same(logs.episode, {"x": i32([0, 0, 1])})
    same(logs.steps["step"], {"x": i32([0, 1, 2]), "n": i32(3)})
    assert set(logs.steps) == {"step", "episode"}


NAMES = ["update", "items", "keys", "copy", "steps", "valid", "slice", "filter", "reduce_"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_steps_named_like_methods(name, wrap):
    _, logs = wrap(lox.spool(lambda: lox.log({"x": 1}, **{name: 5})["x"]))()
    same(logs.steps[name], {"x": i32(5)})
    assert list(logs.items()) == [("x", 1)]
    assert logs.valid == {}


def test_unknown_step(logs):
    with pytest.raises(AttributeError) as info:
        logs.epoch  # noqa: B018
    assert type(info.value) is lox.StepError
    assert isinstance(info.value, lox.LoxError)
    assert str(info.value) == ("these logs have no step 'epoch'. The steps are 'episode' and 'step'.")
    assert not hasattr(logs, "epoch")
    assert getattr(logs, "epoch", None) is None


def test_unknown_step_where_there_is_none():
    with pytest.raises(lox.StepError) as info:
        lox.logdict({"x": 1}).step  # noqa: B018
    assert str(info.value) == "these logs have no step 'step'. Nothing was logged with a step."


# --- text ---


def test_str(logs):
    assert str(logs) == "{'x': [1.0, 2.0, 4.0], 'total': {'sum': [1.0, 3.0, 7.0]}, 'n': 3}"
    assert str(to_numpy(logs)) == str(logs)
    assert f"{logs}" == str(logs)
    assert str(lox.logdict()) == "{}"
    assert str(lox.logdict({"a": 1, "b": 2.5, "c": True})) == "{'a': 1, 'b': 2.5, 'c': True}"
    assert str(lox.logdict({"a": f32([[1, 2], [3, 4]])})) == "{'a': [[1.0, 2.0], [3.0, 4.0]]}"


def test_str_of_many_events_is_short():
    assert str(lox.logdict({"a": np.arange(1000)})) == "{'a': [0, 1, 2, ..., 997, 998, 999]}"


def test_str_leaves_out_invalid_events():
    _, logs = jax.jit(lox.spool(ragged))(f32([1, -1, 2]))
    assert str(logs) == "{'x': [1.0, 2.0]}"
    _, logs = jax.jit(lox.spool(jax.vmap(ragged)))(LANES)
    assert str(logs) == "{'x': [[1.0, -], [2.0, 3.0], [-, 4.0]]}"


def test_repr(logs):
    assert repr(logs) == repr(dict(logs))
    assert repr(logs) == (
        "{'x': Array([1., 2., 4.], dtype=float32), "
        "'total': {'sum': Array([1., 3., 7.], dtype=float32)}, "
        "'n': Array(3, dtype=int32)}"
    )


def test_str_and_repr_inside_jit(capsys):
    @jax.jit
    def f(xs):
        _, logs = lox.spool(run)(xs)
        print(logs)
        repr(logs)
        return logs

    f(f32([1, 2]))
    out = capsys.readouterr().out
    assert out == "{'x': float32[2], 'total': {'sum': float32[2]}, 'n': int32[]}\n"


# --- a pytree ---


def test_structure_does_not_depend_on_the_source_line():
    def f(x):
        lox.log({"x": x}, step=0)
        lox.log({"y": x})

    def g(x):
        lox.log({"x": x + 1}, step=1)

        lox.log({"y": x})

    a, b = lox.spool(f)(1.0)[1], lox.spool(g)(1.0)[1]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    both = jax.tree.map(lambda *x: jnp.stack(x), a, b)
    same(both, {"x": f32([1, 2]), "y": f32([1, 1])})
    same(both.step, {"x": i32([0, 1])})

    def either(x):
        return jax.lax.cond(x > 0, lambda: lox.spool(f)(x)[1], lambda: lox.spool(g)(x)[1])

    same(either(1.0), {"x": f32(1), "y": f32(1)})
    same(either(-1.0).step, {"x": i32(1)})


def test_structure_does_not_depend_on_the_order_of_keys():
    a = lox.spool(lambda: lox.log({"x": 1, "y": 2})["x"])()[1]
    b = lox.spool(lambda: lox.log({"y": 2, "x": 1})["x"])()[1]
    assert list(a) == ["x", "y"]
    assert list(b) == ["y", "x"]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    same(jax.tree.map(lambda x, y: x + y, a, b), {"x": i32(2), "y": i32(4)})


@pytest.mark.slow
def test_through_jit_vmap_scan_and_cond(logs):
    doubled = jax.jit(lambda logs: jax.tree.map(lambda x: x * 2, logs))(logs)
    same(doubled, {"x": f32([2, 4, 8]), "total": {"sum": f32([2, 6, 14])}, "n": i32(6)})
    same(doubled.step, {"x": i32([0, 2, 4]), "n": i32(6)})

    xs = f32([[1, 2, 4], [1, 0, 0]])
    batched = jax.vmap(lox.spool(run))(xs)[1]
    expected = {
        "x": xs,
        "total": {"sum": f32([[1, 3, 7], [1, 1, 1]])},
        "n": i32([3, 3]),
    }
    same(batched, expected)
    same(batched.step["x"], i32([[0, 1, 2]] * 2))

    scanned = jax.lax.scan(lambda c, xs: (c, lox.spool(run)(xs)[1]), 0, xs)[1]
    same(scanned, expected)
    carried = jax.lax.fori_loop(0, 2, lambda i, logs: jax.tree.map(lambda x: x + 1, logs), logs)
    same(carried["x"], f32([3, 4, 6]))
    same(jax.vmap(lambda logs: logs.slice[::2])(batched)["x"], xs[:, ::2])


def test_tree_paths_name_the_keys(logs):
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(logs)]
    assert any("'x'" in p for p in paths)
    assert len(paths) == len(jax.tree.leaves(logs)) == 6


@pytest.mark.slow
def test_gradients_flow_through_logs():
    def loss(xs):
        _, logs = lox.spool(run)(xs)
        return logs["total"]["sum"].sum() + logs.reduce("mean")["x"]

    grad = jax.grad(loss)(f32([1, 2, 4]))
    np.testing.assert_allclose(grad, [3 + 1 / 3, 2 + 1 / 3, 1 + 1 / 3], rtol=1e-6)


def test_vmap_outside_and_inside():
    xs = jnp.arange(6.0).reshape(2, 3)
    outside = jax.vmap(lox.spool(run))(xs)[1]
    inside = lox.spool(jax.vmap(run))(xs)[1]
    same(outside["x"], np.asarray(xs))
    same(inside["x"], np.asarray(xs).T)
    same(inside.step["x"], i32([0, 1, 2]))  # the same in all lanes
    same(inside["n"], i32(3))
    same(outside["n"], i32([3, 3]))


# --- combining ---


def single(x, **steps):
    with lox.testing.capture():
        return lox.log({"x": jnp.asarray(x)}, **steps)


def test_add(logs):
    both = logs + logs.slice[:1]
    same(
        both,
        {
            "x": f32([1, 2, 4, 1]),
            "total": {"sum": f32([1, 3, 7, 1])},
            "n": i32([3, 3]),
        },
    )
    same(both.step, {"x": i32([0, 1, 2, 0]), "n": i32([3, 3])})
    same(both.episode, {"x": i32([0, 0, 1, 0])})
    assert both.valid == {}
    same(logs["x"], f32([1, 2, 4]))


def test_add_single_events():
    both = single(1, step=0) + single(2, step=1)
    same(both, {"x": i32([1, 2])})
    same(both.step, {"x": i32([0, 1])})
    three = both + single(3, step=2)
    same(three, {"x": i32([1, 2, 3])})
    same((single(0, step=-5) + three).step, {"x": i32([-5, 0, 1, 2])})


def test_add_fills_steps_that_are_missing():
    both = single(1, step=0) + single(2, time=0.5)
    same(both.step, {"x": i32([0, -1])})
    same(both.time, {"x": f32([NAN, 0.5])})


def test_add_promotes_dtypes():
    same(single(jnp.bfloat16(1)) + single(f32(2)), {"x": f32([1, 2])})
    with jax.numpy_dtype_promotion("standard"):
        same(single(1) + single(2.5), {"x": f32([1, 2.5])})


def test_add_keeps_keys_of_either():
    both = lox.logdict({"x": i32(1)}) + lox.logdict({"y": i32(2)})
    same(both, {"x": i32(1), "y": i32(2)})


def test_add_does_not_mix_shapes():
    with pytest.raises(lox.MismatchError, match=r"^'x' is logged with different shape:\n"):
        _ = single([1, 2]) + single(1)


def test_add_keeps_valid():
    whole = jax.jit(lox.spool(ragged))
    a, b = whole(f32([1, -1]))[1], whole(f32([-1, 2]))[1]
    both = a + b
    same(both, {"x": f32([1, NAN, NAN, 2])})
    same(both.valid, {"x": boolean([1, 0, 0, 1])})
    same(both.step, {"x": i32([0, -1, -1, 1])})
    same(both.compact(), {"x": f32([1, 2])})
    full = a.compact() + b
    same(full, {"x": f32([1, NAN, 2])})
    same(full.valid, {"x": boolean([1, 0, 1])})


def test_add_under_vmap_joins_events():
    xs = jnp.arange(4.0).reshape(2, 2)
    outside = jax.vmap(lox.spool(run))(xs)[1]
    same((outside + outside)["x"], f32([[0, 1, 0, 1], [2, 3, 2, 3]]))
    inside = lox.spool(jax.vmap(run))(xs)[1]
    same((inside + inside)["x"], f32([[0, 2], [1, 3], [0, 2], [1, 3]]))


def test_sum():
    whole = sum([single(1), single(2), single(3)])
    assert type(whole) is lox.logdict
    same(whole, {"x": i32([1, 2, 3])})
    same(sum([single(1)]), {"x": i32(1)})


def test_add_something_else(logs):
    with pytest.raises(TypeError):
        _ = logs + 3


def test_merge(logs):
    other = single(9, time=1)
    merged = logs | other
    assert type(merged) is lox.logdict
    same(merged, {"x": i32(9), "total": {"sum": f32([1, 3, 7])}, "n": i32(3)})
    same(merged.step, {"n": i32(3)})  # the other's value comes with the other's steps
    same(merged.time, {"x": i32(1)})
    same(logs["x"], f32([1, 2, 4]))


def test_merge_with_plain_dicts(logs):
    merged = logs | {"new": 1}
    assert type(merged) is lox.logdict
    assert list(merged) == ["x", "total", "n", "new"]
    same(merged.step, logs.step)
    merged = {"x": 1, "new": 1} | logs
    assert type(merged) is lox.logdict
    assert list(merged) == ["x", "new", "total", "n"]
    same(merged["x"], f32([1, 2, 4]))
    same(merged.step, logs.step)
    logs |= {"new": 1}
    assert type(logs) is lox.logdict
    assert list(logs) == ["x", "total", "n", "new"]
    same(logs.slice[1:]["x"], f32([2, 4]))


def test_merge_drops_valid_of_what_it_replaces():
    logs = jax.jit(lox.spool(ragged))(f32([1, -1]))[1]
    merged = logs | single(1)
    assert merged.valid == {}


# --- choosing ---


@pytest.mark.sample(15)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "x", "step"),
    [
        (slice(1, None), [2, 4], [1, 2]),
        (slice(None, None, 2), [1, 4], [0, 2]),
        (slice(-1, None), [4], [2]),
        (slice(None, None, -1), [4, 2, 1], [2, 1, 0]),
        (slice(5, None), [], []),
    ],
)
@pytest.mark.parametrize("convert", [lambda x: x, to_numpy], ids=["jax", "numpy"])
def test_slice(logs, convert, index, x, step):
    part = convert(logs).slice[index]
    same(part["x"], f32(x))
    same(part.step, {"x": i32(step), "n": i32(3)})
    same(part["n"], i32(3))
    same(part["total"], {"sum": f32([1, 3, 7])[index]})


@pytest.mark.parametrize("index", [0, (slice(None), 0), "x", None])
def test_slice_takes_slices(logs, index):
    with pytest.raises(TypeError) as info:
        _ = logs.slice[index]
    assert str(info.value) == f"`logs.slice` takes a slice such as [a:b:c], not {index!r}."
    assert isinstance(info.value, lox.LoxError)


def test_slice_of_ragged_logs():
    logs = jax.jit(lox.spool(ragged))(f32([1, -1, 2]))[1].slice[1:]
    same(logs, {"x": f32([NAN, 2])})
    same(logs.valid, {"x": boolean([0, 1])})


@pytest.mark.parametrize(
    ("which", "keys"),
    [
        ("train/loss", ["train/loss"]),
        ("train/*", ["train/loss", "train/acc"]),
        (["*loss", "lr"], ["train/loss", "lr", "test/loss"]),
        ("nothing", []),
        ([], []),
        (lambda key: key.startswith("t"), ["train/loss", "train/acc", "test/loss"]),
    ],
)
def test_filter(which, keys):
    def f():
        lox.log({"train/loss": 1, "lr": 2, "train/acc": 3}, step=0)
        lox.log({"test/loss": 4})

    logs = lox.spool(f)()[1].filter(which)
    assert type(logs) is lox.logdict
    assert list(logs) == keys
    expected = [k for k in keys if k != "test/loss"]
    assert sorted(logs.steps.get("step", {})) == sorted(expected)


def test_prefix(logs):
    named = logs.prefix("train/")
    same(
        named,
        {
            "train/x": f32([1, 2, 4]),
            "train/total": {"sum": f32([1, 3, 7])},
            "train/n": i32(3),
        },
    )
    same(named.step, {"train/x": i32([0, 1, 2]), "train/n": i32(3)})
    same(named.slice[1:]["train/x"], f32([2, 4]))
    whole = jax.jit(lox.spool(ragged))(f32([1, -1]))[1].prefix("p/")
    same(whole.valid, {"p/x": boolean([1, 0])})
    same(whole.compact(), {"p/x": f32([1])})


# --- reduce ---

ARRAYS = [
    f32([3, 1, 2, 2]),
    f32([[3, -1], [0, 2], [5, 5]]),
    i32([4, -1, 7]),
    np.array([200, 100, 50], np.uint8),
    boolean([1, 0, 1]),
    np.asarray(jnp.array([1.5, 2.5, 4.0], jnp.bfloat16)),
    np.array([0.5, 1.5], np.float16),
    np.array([1 + 2j, 3 - 1j], np.complex64),
]
ROUNDED = {"mean", "std", "var", "sum"}
REDUCED = {
    "mean": lambda x: jnp.mean(x, 0),
    "sum": lambda x: jnp.sum(x, 0),
    "min": lambda x: jnp.min(x, 0),
    "max": lambda x: jnp.max(x, 0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "replace": lambda x: x[-1],
    "std": lambda x: jnp.std(x, 0),
    "var": lambda x: jnp.var(x, 0),
    "count": lambda x: jnp.int32(len(x)),
    "append": lambda x: x,
}


def logged(xs):
    def body(i, x):
        lox.log({"x": x}, step=i)
        return i + 1, None

    return jax.lax.scan(body, 0, xs)[0]


def check_reduced(logs, how, values):
    expected = np.asarray(REDUCED[how](jnp.asarray(values)))
    got = np.asarray(logs["x"])
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if how in ROUNDED and got.dtype.kind not in "iub":
        rtol = 1e-2 if got.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(got.astype(np.complex64), expected.astype(np.complex64), rtol=rtol)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("how", REDUCED)
@pytest.mark.parametrize("xs", ARRAYS, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_reduce(how, xs):
    whole = lox.spool(logged)(xs)[1]
    steps = i32(np.arange(len(xs)))
    steps = steps if how == "append" else steps[-1]
    in_loop = lox.spool(logged, reduce=how)(xs)[1]
    for logs in (whole.reduce(how), to_numpy(whole).reduce(how), in_loop):
        check_reduced(logs, how, xs)
        same(logs.step, {"x": steps})
        assert logs.valid == {}
    assert is_numpy(to_numpy(whole).reduce(how))


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("how", REDUCED)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_reduce_respects_valid(how, dtype):
    xs = np.array([-9, 3, -9, 1, 2, -9], dtype)
    kept = xs[xs > 0]
    padded = jax.jit(lox.spool(ragged))(xs)[1]
    in_loop = lox.spool(ragged, reduce=how)(xs)[1]
    for logs in (padded.reduce(how), to_numpy(padded).reduce(how), in_loop):
        logs = logs.compact()
        check_reduced(logs, how, kept)
        same(logs.step, {"x": i32([1, 3, 4]) if how == "append" else i32(4)})
        assert logs.valid == {}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("how", [h for h in REDUCED if h != "append"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_reduce_over_no_events(how, dtype):
    xs = np.array([-1, -1], dtype)
    result = np.asarray(REDUCED[how](jnp.asarray(xs)))
    missing = NAN if result.dtype.kind == "f" else 0
    padded = jax.jit(lox.spool(ragged))(xs)[1]
    in_loop = lox.spool(ragged, reduce=how)(xs)[1]
    for logs in (padded.reduce(how), to_numpy(padded).reduce(how), in_loop):
        same(logs, {"x": np.full((), missing, result.dtype)})
        same(logs.valid, {"x": boolean(False)})
        same(logs.step, {"x": i32(-1)})


def test_reduce_compacted_logs_without_events():
    logs = lox.spool(ragged)(f32([-1, -1]))[1]
    same(logs, {"x": f32([])})
    same(logs.reduce("mean"), {"x": f32(NAN)})
    same(logs.reduce("mean").valid, {"x": boolean(False)})
    same(logs.reduce("mean").step, {"x": i32(-1)})
    same(logs.reduce("count"), {"x": i32(0)})
    same(logs.reduce("last"), {"x": f32(NAN)})


@pytest.mark.slow
def test_reduce_per_lane():
    inside = jax.jit(lox.spool(jax.vmap(ragged)))(LANES)[1]
    outside = jax.vmap(lox.spool(ragged))(LANES)[1]
    for logs in (inside, outside, to_numpy(inside), to_numpy(outside)):
        same(logs.reduce("sum"), {"x": f32([3, 7])})
        same(logs.reduce("max"), {"x": f32([2, 4])})
        same(logs.reduce("mean"), {"x": f32([1.5, 3.5])})
        same(logs.reduce("count"), {"x": i32([2, 2])})
        same(logs.reduce("first"), {"x": f32([1, 3])})


def test_reduce_by_key(logs):
    reduced = logs.reduce({"x": "max"})
    same(reduced, {"x": f32(4), "total": {"sum": f32([1, 3, 7])}, "n": i32(3)})
    same(reduced.step, {"x": i32(2), "n": i32(3)})
    same(logs.reduce("count"), {"x": i32(3), "total": i32(3), "n": i32(3)})


def test_reduce_by_a_reduction_that_does_not_exist(logs):
    with pytest.raises(lox.OptionError) as info:
        logs.reduce("median")
    assert str(info.value) == (
        "there is no reduction 'median' (for 'x'). Choose 'append', 'count', 'first', 'last', "
        "'max', 'mean', 'min', 'replace', 'std', 'sum' and 'var', or give a `lox.Reduction`."
    )
    with pytest.raises(lox.OptionError) as info:
        logs.reduce({"y": "mean"})
    assert str(info.value) == "`reduce` names 'y'; the keys are 'x', 'total' and 'n'."


@pytest.mark.slow
def test_reduce_by_a_custom_reduction(logs):
    product = lox.Reduction(jnp.ones_like, lambda state, x: state * x, lambda state: state)
    same(logs.reduce({"x": product})["x"], f32(8))
    inside = jax.jit(lox.spool(jax.vmap(ragged)))(LANES)[1]
    same(inside.reduce(product), {"x": f32([2, 12])})
    outside = jax.vmap(lox.spool(ragged))(LANES)[1]
    same(outside.reduce(product), {"x": f32([2, 12])})


def test_reduce_of_a_nested_value(logs):
    same(logs.reduce("last")["total"], {"sum": f32(7)})


# --- compact and lane ---


def test_compact_does_nothing_where_nothing_is_ragged(logs):
    for convert in (lambda x: x, to_numpy):
        new = convert(logs).compact()
        same(new, logs)
        same(new.steps, convert(logs).steps)
        assert jax.tree.structure(new) == jax.tree.structure(logs)


@pytest.mark.parametrize("convert", [lambda x: x, to_numpy], ids=["jax", "numpy"])
def test_compact(convert):
    logs = convert(jax.jit(lox.spool(ragged))(f32([-1, 5, -1, 7]))[1])
    same(logs, {"x": f32([NAN, 5, NAN, 7])})
    same(logs.valid, {"x": boolean([0, 1, 0, 1])})
    same(logs.step, {"x": i32([-1, 1, -1, 3])})
    logs = logs.compact()
    same(logs, {"x": f32([5, 7])})
    same(logs.step, {"x": i32([1, 3])})
    assert logs.valid == {}


def test_compact_with_lanes_inside():
    expected = {"x": f32([[1, NAN], [2, 3], [NAN, 4]])}
    valid = {"x": boolean([[1, 0], [1, 1], [0, 1]])}
    eager = lox.spool(jax.vmap(ragged))(LANES)[1]
    for logs in (eager, jax.jit(lox.spool(jax.vmap(ragged)))(LANES)[1].compact()):
        same(logs, expected)
        same(logs.valid, valid)
        same(logs.step, {"x": i32([0, 2, 3])})


def test_compact_with_lanes_outside():
    logs = jax.vmap(lox.spool(ragged))(LANES)[1]
    same(logs, {"x": f32([[1, NAN, 2, NAN], [NAN, NAN, 3, 4]])})
    same(logs.valid, {"x": boolean([[1, 0, 1, 0], [0, 0, 1, 1]])})
    logs = logs.compact()
    same(logs, {"x": f32([[1, 2, NAN], [NAN, 3, 4]])})
    same(logs.valid, {"x": boolean([[1, 1, 0], [0, 1, 1]])})
    same(logs.step, {"x": i32([[0, 2, -1], [-1, 2, 3]])})


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "batched",
    [
        lox.spool(jax.vmap(ragged)),
        jax.vmap(lox.spool(ragged)),
        jax.jit(lox.spool(jax.vmap(ragged))),
        jax.jit(jax.vmap(lox.spool(ragged))),
        lox.spool(jax.jit(jax.vmap(ragged))),
    ],
    ids=["inside", "outside", "jit-inside", "jit-outside", "inside-jit"],
)
@pytest.mark.parametrize("convert", [lambda x: x, to_numpy], ids=["jax", "numpy"])
def test_lane(batched, convert):
    logs = convert(batched(LANES)[1])
    for lane, (x, step) in enumerate([([1, 2], [0, 2]), ([3, 4], [2, 3])]):
        one = logs.lane(lane)
        same(one, {"x": f32(x)})
        same(one.step, {"x": i32(step)})
        assert one.valid == {}
        alone = lox.spool(ragged)(LANES[lane])[1]
        same(one, alone)
        same(logs.lane(lane - 2), one)


def test_lane_of_what_is_the_same_in_all_lanes():
    xs = jnp.arange(6.0).reshape(2, 3)
    for logs in (lox.spool(jax.vmap(run))(xs)[1], jax.vmap(lox.spool(run))(xs)[1]):
        one = logs.lane(1)
        same(one, {"x": f32([3, 4, 5]), "total": {"sum": f32([3, 7, 12])}, "n": i32(3)})
        same(one.step, {"x": i32([0, 1, 2]), "n": i32(3)})


def test_lane_of_nested_vmaps():
    xs = jnp.arange(12.0).reshape(2, 3, 2)

    def f(x):
        jax.lax.scan(lambda c, x: (c, lox.log({"x": x})["x"]), 0, x)

    for batched in (
        lox.spool(jax.vmap(jax.vmap(f))),
        jax.vmap(lox.spool(jax.vmap(f))),
        jax.vmap(jax.vmap(lox.spool(f))),
    ):
        logs = batched(xs)[1]
        same(logs.lane(1).lane(2), {"x": f32([10, 11])})


def test_there_is_no_lane(logs):
    with pytest.raises(lox.LoxError) as info:
        logs.lane(0)
    assert str(info.value) == "these logs have no lanes: nothing was logged under `vmap`."


# --- NumPy stays NumPy ---


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [
        lambda logs: logs + logs,
        lambda logs: logs | logs,
        lambda logs: logs.slice[1:],
        lambda logs: logs.filter("x"),
        lambda logs: logs.prefix("p/"),
        lambda logs: logs.reduce("mean"),
        lambda logs: logs.reduce("count"),
        lambda logs: logs.compact(),
        lambda logs: logs.lane(0),
        lambda logs: logs.copy(),
    ],
)
def test_numpy_stays_numpy(act):
    for batched in (lox.spool(jax.vmap(ragged)), jax.vmap(lox.spool(ragged))):
        logs = to_numpy(jax.jit(batched)(LANES)[1])
        assert is_numpy(logs)
        assert is_numpy(act(logs))
        assert is_numpy(logs.valid)


def test_callbacks_may_use_their_logdict():
    seen = []

    def callback(logs):
        total = logs + logs
        seen.append((str(total), str(total.reduce("sum")), str(logs.prefix("p/"))))

    lox.tap(logged, callback)(f32([1, 2]))
    assert seen == [
        ("{'x': [1.0, 1.0]}", "{'x': 2.0}", "{'p/x': 1.0}"),
        ("{'x': [2.0, 2.0]}", "{'x': 4.0}", "{'p/x': 2.0}"),
    ]


def test_made_by_hand():
    logs = lox.logdict({"x": f32([1, 2, 3])}, steps={"step": {"x": i32([0, 1, 2])}})
    same(logs.step, {"x": i32([0, 1, 2])})
    same(logs.slice[1:], {"x": f32([2, 3])})
    same(logs.reduce("max"), {"x": f32(3)})
    masked = lox.logdict({"x": f32([1, 2, 3])}, valid={"x": boolean([1, 0, 1])})
    same(masked.compact(), {"x": f32([1, 3])})


# --- misspelt names, `valid` of keys that are not ragged, steps named like methods ---


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("redcue", " Did you mean 'reduce'?"),
        ("stpe", " Did you mean 'step'?"),
        ("iloc", ""),
        ("to_datafram", " Did you mean 'to_dataframe'?"),
    ],
)
def test_a_misspelt_attribute_gets_a_suggestion(name, hint):
    _, logs = lox.spool(run)(jnp.arange(3))
    with pytest.raises(lox.StepError) as info:
        getattr(logs, name)
    assert str(info.value) == f"these logs have no step {name!r}. The steps are 'episode' and 'step'.{hint}"
    lines = traceback.format_exception(info.value)
    assert lines[-1] == f"lox.StepError: {info.value}\n"  # and Python adds no second one


@pytest.mark.parametrize("mapping", [lambda logs: logs, lambda logs: logs.valid])
def test_a_misspelt_key_gets_a_suggestion(mapping):
    _, logs = lox.spool(run)(jnp.arange(3))
    with pytest.raises(lox.KeyNotFoundError) as info:
        mapping(logs)["totl"]
    assert str(info.value) == "these logs have no key 'totl'. The keys are 'x', 'total' and 'n'. Did you mean 'total'?"
    assert isinstance(info.value, KeyError)
    with pytest.raises(lox.KeyNotFoundError, match=r"^these logs have no key 3\. They are empty\.$"):
        mapping(lox.logdict())[3]


def test_valid_of_a_key_that_is_not_ragged_is_all_true():
    _, logs = lox.spool(run)(jnp.arange(3))
    assert len(logs.valid) == 0 and dict(logs.valid) == {} and logs.valid == {} and not logs.valid
    assert "x" not in logs.valid and logs.valid.get("x") is None
    same(logs.valid["x"], boolean([True] * 3))
    same(logs.valid["total"], boolean([True] * 3))
    same(logs.valid["n"], boolean(True))
    _, outside = jax.vmap(lox.spool(run))(jnp.ones((2, 3)))
    same(outside.valid["x"], boolean([[True] * 3] * 2))
    _, inside = lox.spool(jax.vmap(run))(jnp.ones((2, 3)))
    same(inside.valid["x"], boolean([True] * 3))
    same(jax.jit(lambda logs: logs["x"][np.flatnonzero(logs.valid["x"])])(logs), i32([0, 1, 2]))
    assert lox.spool(run)(jnp.arange(3))[1].valid["n"]  # also for logs without another reference


def test_valid_can_be_changed():
    _, logs = jax.jit(lox.spool(ragged))(i32([1, -1, 2]))
    (key,) = logs.valid
    mask = logs.valid.pop(key)
    assert logs.valid == {} and logs.valid.pop(key, None) is None
    logs.valid[key] = mask
    assert list(logs.valid) == [key] and repr(logs.valid) == repr({key: mask})
    del logs.valid[key]
    assert logs.valid == {}
    logs.valid = {key: mask}
    same(logs.valid[key], boolean([True, False, True]))
    logs.valid.update(other=mask)
    assert logs.valid.setdefault("third", mask) is mask and list(logs.valid) == [key, "other", "third"]
    assert logs.valid.popitem() == ("third", mask)
    assert type(copy.copy(logs.valid)) is type(pickle.loads(pickle.dumps(logs.valid))) is dict
    same(
        jax.tree.map(np.asarray, logs.valid), {key: boolean([True, False, True]), "other": boolean([True, False, True])}
    )
    logs.valid.clear()
    assert logs.valid == {}


@pytest.mark.parametrize("name", ["update", "items", "slice", "valid", "steps"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_step_named_like_a_method_is_read_by_name(name, wrap):
    def f(x):
        lox.log({"x": x}, **{name: 7})
        return x

    _, logs = wrap(lox.spool(f))(1)
    same(logs.steps[name], {"x": i32(7)})
    assert getattr(logs, name) is not logs.steps[name]  # that is still the method
    assert list(logs.items()) == [("x", logs["x"])]
    same((logs + logs).steps[name]["x"], i32([7, 7]))


def test_filter_takes_functions_of_the_key_or_of_key_and_value():
    logs = lox.logdict({"a": 1, "b": 2, "train/a": 3})
    assert logs.filter(lambda key: key.endswith("a")) == {"a": 1, "train/a": 3}
    assert logs.filter(lambda key, value: key < "c" and value > 1) == {"b": 2}
    assert logs.filter(lambda key, other="b": key == other) == {"b": 2}
    assert logs.filter({"a", "b"}.__contains__) == {"a": 1, "b": 2}
    assert logs.filter(str.isalpha) == {"a": 1, "b": 2}
    _, spooled = lox.spool(run)(jnp.arange(3))
    few = spooled.filter(lambda key, value: jnp.ndim(jax.tree.leaves(value)[0]) == 0)
    assert list(few) == ["n"] and list(few.steps) == ["step"]


# --- compaction that waits until the logs are read ---


@jax.jit
def every_other(x):
    def body(x, i):
        lox.log({"i": i, "x": x}, where=i % 2 == 0, step=i)
        return x + 1, None

    return jax.lax.scan(body, x, jnp.arange(6))[0]


def unseen():
    logs = lox.spool(every_other)(0)[1]
    assert logs._padded is not None  # not read yet
    return logs


LOOKS = {
    "item": lambda logs: logs["i"],
    "get": lambda logs: logs.get("i"),
    "items": lambda logs: dict(logs.items())["i"],
    "values": lambda logs: next(iter(logs.values())),
    "pop": lambda logs: logs.pop("i"),
    "popitem": lambda logs: dict([logs.popitem(), logs.popitem()])["i"],
    "setdefault": lambda logs: logs.setdefault("i", 3),
    "dict": lambda logs: dict(logs)["i"],
    "dict display": lambda logs: {**logs}["i"],
    "keywords": lambda logs: (lambda **actual: actual)(**logs)["i"],
    "update": lambda logs: (lambda actual: (actual.update(logs), actual)[1])({})["i"],
    "or": lambda logs: (logs | {})["i"],
    "ror": lambda logs: ({} | logs)["i"],
    "view": lambda logs: types.MappingProxyType(logs)["i"],
    "asdict": lambda logs: logs.asdict()["i"],
    "copy": lambda logs: logs.copy()["i"],
    "copy.copy": lambda logs: copy.copy(logs)["i"],
    "copy.deepcopy": lambda logs: copy.deepcopy(logs)["i"],
    "pickle": lambda logs: pickle.loads(pickle.dumps(logs))["i"],
    "json": lambda logs: np.asarray(json.loads(json.dumps(logs, default=lambda x: x.tolist()))["i"], np.int32),
    "tree": lambda logs: jax.tree.map(lambda x: x, logs)["i"],
    "leaves": lambda logs: jax.tree.leaves(logs)[0],
    "argument of jit": lambda logs: jax.jit(lambda logs: logs)(logs)["i"],
    "inside jit": lambda logs: jax.jit(lambda: logs["i"])(),
    "inside jit, then outside": lambda logs: (jax.jit(lambda: logs["i"])(), logs["i"])[1],
    "inside vmap": lambda logs: jax.vmap(lambda x: logs["i"] + 0 * x)(jnp.arange(2))[1],
    "inside grad": lambda logs: (jax.grad(lambda x: x * logs["i"][0].astype(x.dtype))(1.0), logs["i"])[1],
    "step": lambda logs: logs.step["i"],
    "steps": lambda logs: logs.steps["step"]["i"],
    "slice": lambda logs: logs.slice[:]["i"],
    "filter": lambda logs: logs.filter("i")["i"],
    "add": lambda logs: (logs + lox.logdict())["i"],
    "frame": lambda logs: i32(logs.to_dataframe("wide")["i"].tolist()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_logs_are_compact_when_they_are_read(look):
    if look == "frame":
        pytest.importorskip("pandas")
    logs = unseen()
    same(LOOKS[look](logs), i32([0, 2, 4]))
    assert logs._padded is None or look == "frame"
    assert len(logs.valid) == len(logs.dropped) == 0


def test_changes_apply_to_the_compacted_logs():
    logs = unseen()
    logs["i"] = 5
    assert logs["i"] == 5
    same(logs["x"], i32([0, 2, 4]))
    logs = unseen()
    del logs["i"]
    same(logs, {"x": i32([0, 2, 4])})
    logs = unseen()
    logs.update(i=5, y=6)
    same(logs, {"i": 5, "x": i32([0, 2, 4]), "y": 6})
    logs = unseen()
    logs.clear()
    assert logs == {} and not logs.valid
    logs = unseen()
    logs.valid = {"i": True}
    assert dict(logs.valid) == {"i": True}
    same(logs["i"], i32([0, 2, 4]))


def test_text_comparison_and_structure_of_unread_logs():
    assert str(unseen()) == "{'i': [0, 2, 4], 'x': [0, 2, 4]}"
    assert repr(unseen()) == repr({"i": jnp.array([0, 2, 4]), "x": jnp.array([0, 2, 4])})
    assert unseen() != {}
    assert jax.tree.structure(unseen()) == jax.tree.structure(unseen().copy())
    assert type(unseen()) is lox.logdict
    with pytest.raises(lox.KeyNotFoundError, match="these logs have no key 'y'"):
        unseen()["y"]
    with pytest.raises(lox.StepError, match="these logs have no step 'epoch'"):
        unseen().epoch  # noqa: B018


def test_keys_are_known_without_waiting():
    logs = unseen()
    assert len(logs) == 2 and "i" in logs and list(logs.keys()) == ["i", "x"] and logs
    assert logs._padded is not None


def test_several_threads_read_at_once():
    for _ in range(20):
        logs, actual = unseen(), []
        threads = [threading.Thread(target=lambda: actual.append(logs["i"].tolist())) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert actual == [[0, 2, 4]] * 4


def test_logs_from_arrays():
    """With lanes and without, they equal what `spool` returns for the same events."""

    def f(x):
        def body(carry, i):
            lox.log({"x": x + i.astype(jnp.float32), "y": {"z": jnp.stack([x, x])}}, step=i)
            return carry, None

        return jax.lax.scan(body, 0, jnp.arange(3))[0]

    xs = jnp.arange(2.0)
    _, alone = lox.spool(f)(xs[0])
    made = lox.logdict.from_arrays(
        {"x": f32([0, 1, 2]), "y": {"z": np.zeros((3, 2), np.float32)}}, steps={"step": i32([0, 1, 2])}
    )
    same(made, alone)
    same(made.steps["step"], alone.steps["step"])
    same(made.reduce("mean"), alone.reduce("mean"))
    _, spooled = lox.spool(jax.vmap(f))(xs)
    made = lox.logdict.from_arrays(
        {
            "x": f32([[0, 1], [1, 2], [2, 3]]),
            "y": {"z": np.broadcast_to(f32([[0, 0], [1, 1]]), (3, 2, 2))},
        },
        steps={"step": i32([0, 1, 2])},
        lanes=1,
    )
    for lane in range(2):
        same(made.lane(lane), spooled.lane(lane))
        same(made.lane(lane).step, spooled.lane(lane).step)
    made = lox.logdict.from_arrays(
        {"x": f32([[0, 1], [1, 2]])}, steps={"step": i32([[0, 5], [1, 6]])}, valid=boolean([[1, 0], [1, 1]]), lanes=1
    )
    same(made.lane(0), {"x": f32([0, 1])})
    same(made.lane(1), {"x": f32([2])})
    same(made.lane(1).step, {"x": i32([6])})
    one = lox.logdict.from_arrays({"x": f32([7, 8])}, steps={"step": np.int32(3)}, events=False, lanes=1)
    same(one.lane(1), {"x": f32(8)})


@pytest.mark.parametrize(
    "arrays, options, message",
    [
        (
            {"a": f32([1, 2]), "b": {"c": f32([1])}},
            {},
            "with events=True and lanes=0, all arrays must begin with the same 1 axes: ['b']['c'] has the shape (1,), "
            "but ['a'] has (2,).",
        ),
        (
            {"a": f32([1, 2])},
            {"lanes": 1},
            "with events=True and lanes=1, all arrays must begin with the same 2 axes: ['a'] has the shape (2,).",
        ),
        (
            {"a": f32([1, 2])},
            {"steps": {"step": i32([1, 2, 3])}},
            "the step 'step' has the shape (3,) beside events of the shape (2,).",
        ),
        ({"a": f32([1, 2])}, {"valid": boolean([True])}, "`valid` has the shape (1,) beside events of the shape (2,)."),
    ],
)
def test_arrays_that_are_not_logs(arrays, options, message):
    with pytest.raises(lox.MismatchError) as error:
        lox.logdict.from_arrays(arrays, **options)
    assert str(error.value) == message


def test_lanes_that_are_not_there():
    """JAX would clamp the index, and give the last lane instead."""
    f = lambda x: lox.log({"x": x})  # noqa: E731
    inside, outside = lox.spool(jax.vmap(f))(jnp.arange(3.0))[1], jax.vmap(lox.spool(f))(jnp.arange(3.0))[1]
    for logs in (inside, outside):
        assert [float(logs.lane(n)["x"]) for n in (0, 2, -1, np.int64(1))] == [0.0, 2.0, 2.0, 1.0]
        for index in (3, 99, -4):
            with pytest.raises(lox.OptionError) as error:
                logs.lane(index)
            assert str(error.value) == f"there is no lane {index}: there are 3, from 0 to 2."
        for index in ("0", 1.0, None, True):
            with pytest.raises(lox.LogTypeError) as error:
                logs.lane(index)
            assert str(error.value) == f"`lane` got {index!r}: it takes the number of a lane, `logs.lane(0)`."
        assert jax.jit(lambda logs, n: logs.lane(n)["x"])(logs, 1).tolist() == 1.0
    nested = lox.spool(jax.vmap(jax.vmap(f)))(jnp.arange(6.0).reshape(2, 3))[1]
    assert float(nested.lane((1, 2))["x"]) == float(nested.lane(1).lane(2)["x"]) == 5.0
    with pytest.raises(lox.OptionError, match="there is no lane 3: there are 3"):
        nested.lane((1, 3))


def test_a_key_as_an_attribute():
    with pytest.raises(lox.StepError) as error:
        lox.logdict({"loss": 1.0}).loss  # noqa: B018
    assert str(error.value) == (
        "these logs have no step 'loss'. Nothing was logged with a step. 'loss' is a key: `logs['loss']`."
    )


@pytest.mark.parametrize("way", ["plain", "jit(spool)", "spool(jit)", "a Python function that calls a jit", "tree.map"])
def test_steps_are_in_the_order_of_the_keys(way: str) -> None:
    def f(x):
        lox.log({"second": x}, step=1, episode=2)
        lox.log({"first": x}, step=1)
        return x

    jitted = jax.jit(f)
    spooled = {
        "plain": lox.spool(f),
        "jit(spool)": jax.jit(lox.spool(f)),
        "spool(jit)": lox.spool(jitted),
        "a Python function that calls a jit": lox.spool(lambda x: jitted(x)),
        "tree.map": lambda x: jax.tree.map(lambda y: y, lox.spool(f)(x)),
    }[way]
    for _ in range(3):
        logs = spooled(jnp.float32(1))[1]
        assert list(logs) == list(logs.step) == ["second", "first"]
        assert list(logs.episode) == ["second"]
