"""What reaches the host from programs on several devices: `tap`, `buffer=` and loggers, compared with `spool`."""

import contextlib
import csv
import pathlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import f32, i32, same
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optional import devices

import lox

pytestmark = pytest.mark.slow

DEVICES = 4
KINDS = [AxisType.Explicit, AxisType.Auto]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["explicit", "auto"])
with_and_without_context = pytest.mark.parametrize("context", [True, False], ids=["set_mesh", "no context"])
jitted_or_not = pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
AROUND = [lambda f, g, **o: lox.tap(jax.jit(f), g, **o), lambda f, g, **o: jax.jit(lox.tap(f, g, **o))]
around_or_inside = pytest.mark.parametrize("tapped", AROUND, ids=["tap(jit)", "jit(tap)"])


def mesh_of(kind: AxisType, shape: tuple[int, ...] = (DEVICES,), names: tuple[str, ...] = ("d",)) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices(int(np.prod(shape))))


def within(mesh: Mesh, context: bool = True) -> Any:
    if not context:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)


def put(x: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def received_by(tapped: Any, f: Any, *args: Any, **options: Any) -> list[Any]:
    received: list[Any] = []
    jax.block_until_ready(tapped(f, received.append, **options)(*args))
    jax.effects_barrier()
    return received


def collected(f: Any, *args: Any, **options: Any) -> list[Any]:
    return received_by(lox.tap, f, *args, **options)


# --- large values that are sharded ----------------------------------------------------------------

LARGE = np.arange(128, dtype=np.float32)
WHY = r"""cannot send 'x' of shape \(128,\) to the host from a program on several devices: it has more than 64 \
elements, whose parts would be gathered from all of them at every event\.
  logged at test_sharded\.py:\d+ \(whole\)
Either log what is small:          lox\.Histogram\(x\), a mean, a norm
or log the part of each device:    inside of `jax\.shard_map`
or leave it where it is:           lox\.spool\(f\)""".replace("\\\n", "")


def whole(x: Any) -> Any:
    lox.log({"x": x, "norm": jnp.linalg.norm(x)})
    return x


def in_loop(x: Any) -> Any:
    return lax.scan(lambda c, _: (whole(c), None), x, None, 3)[0]


@pytest.mark.sample(3)
@each_kind
@with_and_without_context
@around_or_inside
@pytest.mark.parametrize("f", [whole, in_loop])
def test_a_large_sharded_value(kind: AxisType, context: bool, tapped: Any, f: Any) -> None:
    mesh = mesh_of(kind)
    with within(mesh, context):
        x = put(LARGE, mesh, "d")
        for options in ({}, {"buffer": 2}, {"reduce": "mean"}, {"interval": 2}):
            with pytest.raises(lox.LogTypeError, match=f"^{WHY}"):
                received_by(tapped, f, x, **options)
        same(lox.spool(jax.jit(whole))(x)[1]["x"], LARGE)
        assert len(received_by(tapped, f, x, argnames="norm")) == (1 if f is whole else 3)


@each_kind
def test_a_large_sharded_value_of_a_logger(kind: AxisType, tmp_path: pathlib.Path) -> None:
    mesh = mesh_of(kind)
    with lox.SaveLogger(tmp_path) as logger, within(mesh):
        state, x = logger.init(jax.random.key(0)), put(LARGE, mesh, "d")
        with pytest.raises(lox.LogTypeError, match=f"^{WHY}"):
            logger.tap(jax.jit(whole), state)(x)
        logger.tap(jax.jit(whole), state, "norm")(x)
    assert list(lox.load(tmp_path)) == ["norm"]


@each_kind
@with_and_without_context
@around_or_inside
def test_values_that_are_small_or_the_same_everywhere(kind: AxisType, context: bool, tapped: Any) -> None:
    mesh = mesh_of(kind)
    table = np.arange(100)

    def f(x: Any) -> Any:
        lox.log({"small": x[:64] if kind == AxisType.Auto else x.reshape(DEVICES, -1)[:, :16]})
        lox.log({"table": table, "range": jnp.arange(100) * 2})
        body = lambda x: (lox.log({"all": lax.psum(jnp.ones(100), "d")}), x)[1]  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    with within(mesh, context):
        received = received_by(tapped, f, put(LARGE, mesh, "d"))
    assert [sorted(logs) for logs in received] == [["small"], ["range", "table"], ["all"]]
    assert [logs[key].size for logs in received for key in logs] == [64, 100, 100, 100]
    same(received[1]["range"], i32(table * 2))


def test_a_replicated_value_on_an_explicit_mesh() -> None:
    mesh = mesh_of(AxisType.Explicit)
    for f, count in ((whole, 1), (in_loop, 3)):
        received = collected(jax.jit(f), put(LARGE, mesh))
        same([logs["x"] for logs in received], [LARGE] * count)


def test_a_large_value_on_one_device() -> None:
    same(collected(jax.jit(whole), LARGE)[0]["x"], LARGE)


@each_kind
@around_or_inside
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
def test_a_hundred_seeds_over_a_mesh(kind: AxisType, tapped: Any, options: Any) -> None:
    mesh = mesh_of(kind)

    def train(x: Any) -> Any:
        return lax.scan(lambda c, i: (lox.log({"c": c}, step=i), (c + 1, None))[1], x, jnp.arange(4))[0]

    with within(mesh):
        received = received_by(tapped, jax.vmap(train), put(LARGE, mesh, "d"), **options)
    values = np.concatenate([logs["c"].reshape(-1, 128) for logs in received])
    same(values, f32([LARGE + i for i in range(4)]))
    assert len(received) == (2 if options else 4)


SHAPES = [((128,), ("d",)), ((4, 128), (None, "d")), ((8, 4, 8), ("d",))]


@pytest.mark.sample(2)
@each_kind
@with_and_without_context
@jitted_or_not
@pytest.mark.parametrize("shape, spec", SHAPES, ids=str)
def test_a_histogram_of_a_sharded_array(
    kind: AxisType, context: bool, jit: bool, shape: Any, spec: Any, tmp_path: pathlib.Path
) -> None:
    mesh, x = mesh_of(kind), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def f(x: Any) -> Any:
        lox.log({"x": lox.Histogram(x)}, step=3)
        return x

    g = jax.jit(f) if jit else f
    expected = lox.spool(g)(x)[1]["x"]
    with lox.SaveLogger(tmp_path) as logger, within(mesh, context):
        sharded = put(x, mesh, *spec)
        (logs,) = collected(g, sharded)
        same(jax.tree.leaves(logs["x"]), jax.tree.leaves(expected))
        logger.tap(g, logger.init(jax.random.key(0)))(sharded)
    same(lox.load(tmp_path)["x"].counts, np.asarray(expected.counts)[None])


@pytest.mark.parametrize("shape, spec", SHAPES, ids=str)
def test_a_histogram_does_not_gather_the_array(shape: Any, spec: Any) -> None:
    x = put(np.zeros(shape, np.float32), mesh_of(AxisType.Auto), *spec)
    text = jax.jit(lambda x: lox.Histogram(x)).lower(x).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


@each_kind
@with_and_without_context
def test_the_console_leaves_out_a_large_sharded_value(kind: AxisType, context: bool) -> None:
    mesh = mesh_of(kind)
    f = jax.jit(lambda x: whole(whole(x) + 1))
    text = f"^{WHY}\nUntil then it is left out of what is printed\\.$"
    with within(mesh, context), lox.testing.capture() as events:
        x = put(LARGE, mesh, "d")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", lox.LoxWarning)
            f(x)
            first = len(told)
            f(x)
        jax.effects_barrier()
    assert all(re.search(text, str(w.message)) for w in told)
    assert (first, len(told)) == (2, 2)  # one for each line of the program, when it is compiled
    assert [list(logs) for logs in events] == [["norm"]] * 4


def test_a_log_of_a_large_sharded_value_alone() -> None:
    x = put(LARGE, mesh_of(AxisType.Auto), "d")
    with lox.testing.capture() as events, pytest.warns(lox.LoxWarning, match="cannot send 'deep/x' of shape"):
        jax.jit(lambda x: (lox.log({"deep/x": x}), x + 1)[1])(x)
    assert events == []


def test_no_warning_with_the_sink_compiled_out(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOX_SINK", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lox.LoxWarning)
        jax.jit(lambda x: whole(x))(put(LARGE, mesh_of(AxisType.Auto), "d"))


@each_kind
def test_watch_of_a_large_sharded_value(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    f = jax.jit(lambda x: (lox.log({"x": jnp.log(x)}, step=1), x)[1])
    with pytest.warns(lox.LoxWarning, match="left out"), within(mesh):
        lox.watch(f)(put(LARGE + 1, mesh, "d"))
        with pytest.raises(lox.NonFiniteError, match=r"'x'\[0\] is -inf at step=1"):
            lox.watch(f)(put(LARGE, mesh, "d"))


# --- inside shard_map, where all devices get to an event together ----------------------------------

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def once(x: Any) -> Any:
    lox.log({"x": x, "sum": x.sum(), "total": lax.psum(x.sum(), ("a", "b"))}, step=7)
    return x


def row(x: Any) -> Any:
    lox.log({"row": lax.psum(x.sum(), "b"), "column": lax.psum(x, "a")}, step=lax.axis_index("a"))
    return x


def loop(x: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        lox.log({"c": c.sum(), "i": i}, step=i)
        lox.log({"d": {"mean": c.mean(), "first": c[0]}}, step=i, mine=c.sum())
        return c + 1, None

    return lax.scan(step, x, jnp.arange(5))[0]


def branch(x: Any) -> Any:
    some = lambda x: (lox.log({"yes": x.sum(), "both": x.min()}), x + 1)[1]  # noqa: E731
    other = lambda x: (lox.log({"no": x.sum(), "both": x.max()}), x)[1]  # noqa: E731
    return lax.cond(lax.psum(x.sum(), ("a", "b")) > 0, some, other, x)


def until(x: Any) -> Any:
    test = lambda c: lax.psum(c.sum(), ("a", "b")) < 160  # noqa: E731
    return lax.while_loop(test, lambda c: (lox.log({"w": c.sum()}), c + 1)[1], x)


def lanes(x: Any) -> Any:
    jax.vmap(lambda v: lox.log({"v": v.sum(), "one": 1.0}))(x)
    return x


def nested(x: Any) -> Any:
    return jax.jit(loop)(jax.jit(once)(x))


def again(x: Any) -> Any:
    return jax.checkpoint(loop)(x)


def keys(x: Any) -> Any:
    lox.log({"key": jax.random.fold_in(jax.random.key(0), lax.axis_index("a")), "flag": x > 3, "c": lax.complex(x, x)})
    lox.log({"int4": x.astype(jnp.int4), "f8": x.astype(jnp.float8_e4m3fn), "bf": x.astype(jnp.bfloat16)})
    return x


BODIES = [once, row, loop, branch, until, lanes, nested, again, keys]


def numbers(x: Any) -> Any:
    """NumPy arrays that can be compared, whatever the dtype."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x) if x.dtype.kind in "biufc" else np.asarray(x).astype(np.float32)


def steps_of(logs: Any, key: str) -> dict[str, Any]:
    return {name: numbers(by_key[key]) for name, by_key in logs.steps.items() if key in by_key}


def joined(received: list[Any], spooled: Any) -> Any:
    """What a tap received, one event after the other, in the form of spooled logs."""
    joint: dict[str, Any] = {}
    for key in dict.fromkeys(key for logs in received for key in logs):
        events = [logs for logs in received if key in logs]
        join = np.concatenate if events[0]._layouts[key].events else np.stack
        parts = [(jax.tree.map(numbers, logs[key]), steps_of(logs, key)) for logs in events]
        tree = jax.tree.map(lambda *xs, join=join: join(xs), *parts)
        if not spooled._layouts[key].events:
            tree = jax.tree.map(lambda x: x[0] if len(x) == 1 else x, tree)
        joint[key] = tree, [logs._layouts[key].flags for logs in events]
    return joint


def compare(f: Any, x: Any, tapped: Any = lox.tap, capacity: int | None = None) -> None:
    """Assert that a tap gets what `spool` returns, at once and by two events."""
    _, spooled = lox.spool(f, capacity=capacity)(x)
    spooled = spooled.compact()
    for options in ({}, {"buffer": 2}, {"buffer": 2, "interval": 1}):
        received = received_by(tapped, f, x, **options)
        joint = joined(received, spooled)
        happened = [key for key in spooled if all(numbers(leaf).size for leaf in jax.tree.leaves(spooled[key]))]
        assert sorted(joint) == sorted(happened), options
        for key, ((value, steps), flags) in joint.items():
            same(jax.tree.leaves(value), [numbers(leaf) for leaf in jax.tree.leaves(spooled[key])])
            same(steps, steps_of(spooled, key))
            assert all(f == spooled._layouts[key].flags for f in flags), (key, flags)
        # Bundles of a line come in one call, from one device.
        if not options:
            assert len(received) < 4 * len(joint)


def on_devices(body: Any, mesh: Mesh, check: bool = True) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=check)


@pytest.mark.sample(2)
@each_kind
@jitted_or_not
@pytest.mark.parametrize("body", BODIES)
def test_events_of_all_devices_are_those_of_spool(kind: AxisType, jit: bool, body: Any) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))
    f = on_devices(body, mesh)
    with within(mesh):
        compare(jax.jit(f) if jit else f, put(X, mesh, "a", "b"), capacity=10 if body is until else None)


@pytest.mark.sample(2)
@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
def test_events_that_some_devices_have(kind: AxisType, options: Any) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        lox.log({"some": x.sum(), "one": 3.0}, where=x.sum() > 20, step=1)
        lox.log({"none": x.sum()}, where=x.sum() < 0)
        return x

    with within(mesh):
        x = put(X, mesh, "a", "b")
        spooled = lox.spool(on_devices(body, mesh))(x)[1]
        (logs,) = collected(on_devices(body, mesh), x, **options)
    assert list(logs) == ["some", "one"]
    event = (lambda x: x[0]) if options else lambda x: x
    same(event(logs.valid["some"]), np.array([False, False, True, True]))
    same(event(logs["some"])[2:], f32([42, 50]))
    same(event(logs["one"]), f32(3))
    for n in range(DEVICES):
        same(np.ravel(logs.lane(n)["some"] if "some" in logs.lane(n) else f32([])), np.ravel(spooled.lane(n)["some"]))


@pytest.mark.sample(1)
@each_kind
def test_lanes_around_and_devices(kind: AxisType) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))
    f = jax.vmap(on_devices(loop, mesh))
    x = np.stack([X, X + 1, X + 2])
    with within(mesh):
        compare(jax.jit(f), put(x, mesh, None, "a", "b"))
        one = received_by(lambda f, g: jax.vmap(lox.tap(f, g)), on_devices(loop, mesh), put(x, mesh, None, "a", "b"))
        expected = jax.vmap(lox.spool(on_devices(loop, mesh)))(put(x, mesh, None, "a", "b"))[1]["c"]
    c = np.stack([logs["c"] for logs in one if "c" in logs])
    same(c, np.swapaxes(expected, 0, 1))


@pytest.mark.sample(1)
@each_kind
@jitted_or_not
def test_gradients_and_devices(kind: AxisType, jit: bool) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        y = lox.log_grad("dy", jnp.sin(x).sum())
        lox.log({"y": y})
        return lax.psum(jax.checkpoint(loop)(x * y).sum(), ("a", "b"))

    f = jax.grad(jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P()))
    with within(mesh):
        compare(jax.jit(f) if jit else f, put(X, mesh, "a", "b"))


@pytest.mark.sample(1)
@each_kind
@jitted_or_not
def test_some_axes_of_the_mesh(kind: AxisType, jit: bool) -> None:
    if jax.__version_info__ < (0, 11) and kind == AxisType.Explicit:
        pytest.skip("JAX before 0.11 has no host calls there")
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        lox.log({"x": x, "total": lax.psum(x.sum(), "a")})
        return lax.scan(lambda c, i: (lox.log({"c": c.sum()}, step=i), (c + 1, None))[1], x, jnp.arange(3))[0]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    with within(mesh):
        compare(jax.jit(f) if jit else f, put(X, mesh, "a", "b"))


def test_a_large_value_beside_automatic_axes() -> None:
    mesh = mesh_of(AxisType.Auto, (2, 2), ("a", "b"))
    f = jax.shard_map(whole, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    with within(mesh), pytest.raises(lox.LogTypeError, match=r"cannot send 'x' of shape \(128,\) to the host"):
        collected(jax.jit(f), put(np.zeros(256, np.float32), mesh, ("a", "b")))


@each_kind
def test_a_shard_map_in_a_shard_map(kind: AxisType) -> None:
    if jax.__version_info__ < (0, 10):
        pytest.skip("JAX before 0.10 has no host calls there")
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def inner(x: Any) -> Any:
        lox.log({"x": x.sum(), "row": lax.psum(x.sum(), "b")}, step=1)
        return x

    def outer(x: Any) -> Any:
        return jax.shard_map(inner, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})(x)

    f = jax.jit(jax.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))
    with within(mesh):
        compare(f, put(np.arange(8, dtype=np.float32), mesh, ("a", "b")))


def around(jaxpr: Any, name: str, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The primitives around each primitive of that name."""
    found = []
    for eqn in jaxpr.eqns:
        found += [path] if eqn.primitive.name == name else []
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += around(inner, name, (*path, eqn.primitive.name)) if hasattr(inner, "eqns") else []
    return found


def test_nothing_is_gathered_for_events_that_are_not_sent() -> None:
    f = on_devices(loop, mesh_of(AxisType.Auto, (2, 2), ("a", "b")))
    always = around(jax.make_jaxpr(lox.tap(f, print, "c"))(X).jaxpr, "all_gather")
    assert len(always) == 1
    assert "cond" not in always[0]
    (seldom,) = around(jax.make_jaxpr(lox.tap(f, print, "c", interval=3))(X).jaxpr, "all_gather")
    assert "cond" in seldom
    assert around(jax.make_jaxpr(lox.tap(f, print, "i"))(X).jaxpr, "all_gather") == []
    received = collected(f, X, argnames="c", interval=3)
    assert [int(logs.step["c"]) for logs in received] == [0, 3]


# --- inside shard_map, each device by itself -------------------------------------------------------


def by_device(received: list[Any], key: str, step: str = "d") -> dict[int, list[Any]]:
    """The values of a key from each device, in the order in which they came."""
    found: dict[int, list[Any]] = {}
    for logs in received:
        if key in logs:
            places, values = np.atleast_1d(logs.steps[step][key]), logs[key]
            for place, value in zip(places, values if logs._layouts[key].events else [values], strict=True):
                found.setdefault(int(place), []).append(value.tolist())
    return dict(sorted(found.items()))


@pytest.mark.sample(6)
@each_kind
@jitted_or_not
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
def test_large_values_come_from_each_device(kind: AxisType, jit: bool, options: Any) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            lox.log({"c": c, "sum": c.sum(), "i": i}, step=i)
            return c + 1, None

        return lax.scan(step, x, jnp.arange(3))[0]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = np.arange(400, dtype=np.float32)
    received = collected(jax.jit(f) if jit else f, put(x, mesh, "d"), **options)
    parts = x.reshape(DEVICES, 100)
    assert by_device(received, "c") == {n: [(parts[n] + i).tolist() for i in range(3)] for n in range(DEVICES)}
    assert by_device(received, "c", "step").keys() == {0, 1, 2}
    shared = [logs for logs in received if "sum" in logs]
    assert [n for logs in shared for n in np.ravel(logs["i"]).tolist()] == [0, 1, 2]
    same(
        np.concatenate([logs["sum"].reshape(-1, 4) for logs in shared]), f32([parts.sum(1) + 100 * i for i in range(3)])
    )
    assert all("d" not in logs.steps or "sum" not in logs.steps["d"] for logs in received)


@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
def test_devices_that_decide_for_themselves(kind: AxisType, options: Any) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        me = lax.axis_index("d")
        lax.cond(me % 2 == 1, lambda: (lox.log({"odd": x.sum(), "one": 1.0}), None)[1], lambda: None)
        lax.while_loop(lambda n: n < me, lambda n: (lox.log({"n": n}, step=n), n + 1)[1], me * 0)
        return x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    received = collected(f, put(np.arange(8, dtype=np.float32), mesh, "d"), **options)
    assert by_device(received, "odd") == {1: [5.0], 3: [13.0]}
    assert by_device(received, "one") == {1: [1.0], 3: [1.0]}
    assert by_device(received, "n") == {1: [0], 2: [0, 1], 3: [0, 1, 2]}


@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
def test_devices_where_types_do_not_tell(kind: AxisType, options: Any) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))
    f = jax.jit(on_devices(loop, mesh, check=False))
    received = collected(f, put(X, mesh, "a", "b"), argnames="c", **options)
    sums = X.reshape(2, 2, 2, 2).sum((1, 3))
    found: dict[Any, list[Any]] = {}
    for logs in received:
        places = [np.atleast_1d(logs.steps[name]["c"]).tolist() for name in ("a", "b")]
        for place, value in zip(zip(*places, strict=True), np.atleast_1d(logs["c"]).tolist(), strict=True):
            found.setdefault(place, []).append(value)
    assert found == {(a, b): [sums[a, b] + 4 * i for i in range(5)] for a in range(2) for b in range(2)}


def test_a_step_with_the_name_of_a_mesh_axis() -> None:
    mesh = mesh_of(AxisType.Auto)
    body = lambda x: (lox.log({"x": x}, d=9), x)[1]  # noqa: E731
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    received = collected(f, put(np.zeros(400, np.float32), mesh, "d"))
    assert [int(logs.steps["d"]["x"]) for logs in received] == [9] * DEVICES


@pytest.mark.sample(2)
@each_kind
@jitted_or_not
def test_a_tap_inside_of_shard_map_says_which_device(kind: AxisType, jit: bool) -> None:
    mesh = mesh_of(kind)
    received: list[Any] = []
    for options in ({}, {"buffer": 2}):
        body = lox.tap(lambda x: (lox.log({"x": x.sum()}), x)[1], received.append, **options)
        f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        f = jax.jit(f) if jit else f
        received.clear()
        jax.block_until_ready(f(put(np.arange(8, dtype=np.float32), mesh, "d")))
        jax.effects_barrier()
        assert by_device(received, "x") == {0: [1.0], 1: [5.0], 2: [9.0], 3: [13.0]}


# --- order ----------------------------------------------------------------------------------------


@each_kind
def test_thousands_of_events_of_all_devices_are_in_order(kind: AxisType) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            lox.log({"x": c.sum()}, step=3 * i)
            lax.cond(i % 2 == 0, lambda: (lox.log({"x": c.min()}, step=3 * i + 1), 0)[1], lambda: 0)
            lox.log({"x": lax.pmax(c.max(), "d")}, step=3 * i + 2)
            return c + 1, None

        return lax.scan(step, x, jnp.arange(1000))[0]

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    received = collected(f, put(np.zeros(8, np.float32), mesh, "d"))
    steps = [n for i in range(1000) for n in (3 * i, 3 * i + 1, 3 * i + 2) if i % 2 == 0 or n != 3 * i + 1]
    assert [int(logs.step["x"]) for logs in received] == steps


@each_kind
def test_thousands_of_events_inside_of_shard_map_and_outside(kind: AxisType) -> None:
    mesh = mesh_of(kind)

    def step(c: Any, i: Any) -> Any:
        body = lambda c: (lox.log({"x": c.sum()}, step=3 * i + 1), c)[1]  # noqa: E731
        lox.log({"x": c.sum()}, step=3 * i)
        c = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(c)
        lox.log({"x": c.sum()}, step=3 * i + 2)
        return c, None

    f = jax.jit(lambda x: lax.scan(step, x, jnp.arange(500))[0])
    received = collected(f, put(np.zeros(8, np.float32), mesh, "d"))
    assert [int(logs.step["x"]) for logs in received] == list(range(1500))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_thousands_of_events_of_each_device_are_in_order(check: bool) -> None:
    mesh = mesh_of(AxisType.Auto)

    def body(x: Any) -> Any:
        me = lax.axis_index("d")

        def step(i: Any) -> Any:
            lox.log({"x": i})
            lax.cond(i % 2 == me % 2, lambda: (lox.log({"x": -i}), 0)[1], lambda: 0)
            return i + 1

        lax.while_loop(lambda i: i < 500 + me, step, me * 0)
        return x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check))
    received = collected(f, put(np.zeros(4, np.float32), mesh, "d"))
    expected = {
        me: [n for i in range(500 + me) for n in ((i, -i) if i % 2 == me % 2 else (i,))] for me in range(DEVICES)
    }
    assert by_device(received, "x") == expected


# --- buffers --------------------------------------------------------------------------------------


def counted(tapped: Any, f: Any, x: Any, **options: Any) -> tuple[int, list[Any]]:
    """The number of calls, and the events of 'x', in order."""
    received = received_by(tapped, f, x, **options)
    return len(received), np.concatenate([logs["x"] for logs in received]).tolist()


def of_sums(x: Any) -> Any:
    return lax.scan(lambda c, i: (lox.log({"x": c.sum()}, step=i), (c + 1, None))[1], x, jnp.arange(100))[0]


def one_by_one(x: Any) -> Any:
    for i in range(5):
        lox.log({"x": x.sum() + i})
    return lax.scan(lambda c, i: (lox.log({"x": c.sum() + i}), (c, None))[1], x, jnp.arange(5.0, 8.0))[0]


@pytest.mark.sample(1)
@each_kind
@around_or_inside
@pytest.mark.parametrize("inside", [True, False], ids=["shard_map", "jit"])
def test_a_buffer_holds_events_back(kind: AxisType, tapped: Any, inside: bool) -> None:
    mesh = mesh_of(kind)
    with within(mesh):
        x = put(np.zeros(8, np.float32), mesh, "d")
        wrap = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")) if inside else f  # noqa: E731
        many = lambda n: [float(n)] * DEVICES if inside else float(n)  # noqa: E731
        rate = 2 if inside else 8
        for _ in range(2):
            calls, events = counted(tapped, wrap(of_sums), x, buffer=10)
            assert (calls, events) == (10, [many(rate * i) for i in range(100)])
            calls, events = counted(tapped, wrap(one_by_one), x, buffer=10)
            assert (calls, events) == (1, [many(i) for i in range(8)])
            calls, events = counted(tapped, wrap(one_by_one), x, buffer=4)
            assert (calls, events) == (2, [many(i) for i in range(8)])


@pytest.mark.sample(1)
@each_kind
@around_or_inside
def test_a_buffer_of_events_from_everywhere(kind: AxisType, tapped: Any) -> None:
    mesh = mesh_of(kind)

    def f(x: Any) -> Any:
        lox.log({"total": x.sum()})
        x = jax.shard_map(one_by_one, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)
        lox.log({"total": x.sum() + 1})
        large = lambda x: (lox.log({"large": x + jnp.zeros(100)}), x)[1]  # noqa: E731
        return jax.shard_map(large, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    with within(mesh):
        x = put(np.zeros(4, np.float32), mesh, "d")
        for _ in range(3):
            received = received_by(tapped, f, x, buffer=10)
            assert sum(logs["total"].size for logs in received if "total" in logs) == 2
            assert sum(len(logs["x"]) for logs in received if "x" in logs) == 8
            assert sorted(by_device(received, "large")) == [0, 1, 2, 3]


# --- callbacks that raise --------------------------------------------------------------------------


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 3}], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["shard_map", "jit"])
def test_a_callback_that_raises_while_devices_wait_for_each_other(kind: AxisType, options: Any, inside: bool) -> None:
    mesh = mesh_of(kind)
    seen: list[int] = []

    def callback(logs: Any) -> None:
        seen.extend(np.ravel(logs.step["x"]).tolist())
        if seen[-1] >= 5:
            raise KeyError("enough")

    f = jax.shard_map(of_sums, mesh=mesh, in_specs=P("d"), out_specs=P("d")) if inside else of_sums
    with within(mesh):
        x = put(np.zeros(8, np.float32), mesh, "d")
        for _ in range(2):
            seen.clear()
            with pytest.raises(KeyError, match="enough"):
                lox.tap(jax.jit(f), callback, **options)(x)
            assert seen == [0, 1, 2, 3, 4, 5]
            seen.clear()
            with pytest.raises(KeyError, match="enough"), lox.reraise():
                jax.block_until_ready(jax.jit(lox.tap(f, callback, **options))(x))
                jax.effects_barrier()
            assert seen == [0, 1, 2, 3, 4, 5]
        assert counted(lox.tap, jax.jit(f), x, buffer=10)[0] == 10


def test_a_callback_that_raises_before_devices_meet_again() -> None:
    mesh = mesh_of(AxisType.Auto)

    def body(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            lox.log({"x": c.sum(), "total": lax.psum(c.sum(), "d")}, step=i)
            return c + lax.pmean(c.sum(), "d"), None

        return lax.psum(lax.scan(step, x, jnp.arange(20))[0], "d")

    def callback(logs: Any) -> None:
        raise KeyError("enough", np.ravel(logs.step["x"]).tolist())

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P()))
    x = put(np.zeros(8, np.float32), mesh, "d")
    for options, first in (({}, [0]), ({"buffer": 3}, [0, 1, 2])):
        with pytest.raises(KeyError) as info:
            lox.tap(f, callback, **options)(x)
        assert info.value.args == ("enough", first)


# --- loggers --------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 2}], ids=str)
@pytest.mark.parametrize("body", [once, row, loop, lanes, branch])
def test_what_loggers_store_is_what_spool_returns(
    kind: AxisType, body: Any, options: Any, tmp_path: pathlib.Path
) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))
    f = jax.jit(on_devices(body, mesh))
    with lox.SaveLogger(tmp_path / "tap") as tapping, lox.SaveLogger(tmp_path / "spool") as spooling, within(mesh):
        x = put(X, mesh, "a", "b")
        tapping.tap(f, tapping.init(jax.random.key(0)), **options)(x)
        spooling.spool(f, spooling.init(jax.random.key(0)))(x)
    actual, expected = lox.load(tmp_path / "tap"), lox.load(tmp_path / "spool")
    assert sorted(actual) == sorted(key for key in expected if key != "no")  # the branch that is not taken
    for key in actual:
        same(jax.tree.leaves(actual[key]), jax.tree.leaves(expected[key]))
        same(steps_of(actual, key), steps_of(expected, key))
        assert actual._layouts[key] == expected._layouts[key]


def test_rows_of_devices(tmp_path: pathlib.Path) -> None:
    mesh = mesh_of(AxisType.Auto)

    def body(x: Any) -> Any:
        lox.log({"sum": x.sum()}, step=1)
        lax.cond(lax.axis_index("d") > 1, lambda: (lox.log({"some": x.sum()}, step=2), None)[1], lambda: None)
        return x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    with lox.CsvLogger(tmp_path) as logger:
        logger.tap(f, logger.init(jax.random.key(0)))(put(np.arange(8, dtype=np.float32), mesh, "d"))
    (file,) = tmp_path.rglob("*.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert sorted(row["some"] for row in rows if row.get("some")) == ["13.0", "9.0"]
    assert sorted(row["d"] for row in rows if row.get("some")) == ["2", "3"]
