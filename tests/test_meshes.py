"""Meshes: explicit axes, the default of `jax.make_mesh`, shard_map, and several devices in one function."""

import contextlib
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


def mesh_of(kind: AxisType, shape: tuple[int, ...] = (DEVICES,), names: tuple[str, ...] = ("d",)) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices(int(np.prod(shape))))


def use(mesh: Mesh) -> Any:
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)


def within(mesh: Mesh, context: bool) -> Any:
    return use(mesh) if context else contextlib.nullcontext()


def put(x: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*(spec or mesh.axis_names))))


def steps_on_shards(mesh: Mesh, check: bool = True) -> Any:
    """Log a value of each device, one that all share, and both in a loop."""

    def body(x: Any) -> Any:
        total = lax.psum(x.sum(), "d")
        lox.log({"local": x.sum(), "total": total})

        def step(c: Any, i: Any) -> Any:
            lox.log({"c": c.sum(), "i": i}, step=i)
            return c + 1, None

        return lax.scan(step, x, jnp.arange(3))[0]

    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check)


def collected(f: Any, **options: Any) -> list[Any]:
    """Return what a tap with these options receives."""
    received: list[Any] = []
    jax.block_until_ready(lox.tap(f, received.append, **options)())
    jax.effects_barrier()
    return received


# --- shard_map ------------------------------------------------------------------------------------

X = np.arange(8, dtype=np.float32)
LOCAL = X.reshape(DEVICES, 2).sum(1)


@pytest.mark.sample(3)
@each_kind
@with_and_without_context
@jitted_or_not
def test_reduced_inside_shard_map(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind)
    f = steps_on_shards(mesh)
    with within(mesh, context):
        x = put(X, mesh)
        out, logs = lox.spool(jax.jit(f) if jit else f, reduce="mean")(x)
    same(out, X + 3)
    same(logs, {"local": f32(LOCAL), "total": f32(28), "c": f32(LOCAL + 2), "i": f32(1)})
    same(logs.step, {"c": i32(2), "i": i32(2)})


@pytest.mark.sample(6)
@each_kind
@with_and_without_context
@jitted_or_not
def test_every_second_event_inside_shard_map(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind)
    f = steps_on_shards(mesh)
    with within(mesh, context):
        x = put(X, mesh)
        logs = lox.spool(jax.jit(f) if jit else f, interval=2)(x)[1]
    same(logs, {"local": f32(LOCAL), "total": f32(28), "c": f32([LOCAL, LOCAL + 4]), "i": i32([0, 2])})


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
@jitted_or_not
def test_while_loops_inside_shard_map(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 12, lambda c: (lox.log({"c": c.sum()}), c + 1)[1], x)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    expected = [[s for s in range(int(first), 12, 2)] for first in LOCAL]
    with within(mesh, context):
        x = put(X, mesh)
        logs = lox.spool(jax.jit(f) if jit else f, capacity=7)(x)[1]
        sums = lox.spool(jax.jit(f) if jit else f, reduce="sum")(x)[1]
    assert [logs.lane(n)["c"].tolist() for n in range(DEVICES)] == expected
    same(logs.compact().dropped, {"c": i32([0] * DEVICES)})
    same(sums["c"], f32([sum(e) if e else np.nan for e in expected]))


@pytest.mark.sample(1)
@each_kind
def test_a_loop_around_shard_map_reduced(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    f = steps_on_shards(mesh)
    with use(mesh):
        x = put(X, mesh)
        g = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]  # noqa: E731
        for h in (jax.jit(lox.spool(g, reduce="sum")), lox.spool(g, reduce="sum"), lox.spool(jax.jit(g), reduce="sum")):
            same(h(x)[1], {"local": f32(2 * LOCAL + 6), "total": f32(80), "c": f32(6 * LOCAL + 30), "i": i32(6)})


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
def test_python_control_flow_in_shard_map(kind: AxisType, context: bool) -> None:
    """Outside of jit, values that are the same on all devices are concrete there."""
    if kind is AxisType.Explicit and not context and (0, 8) <= jax.__version_info__[:2] <= (0, 9):
        pytest.skip("JAX 0.8 and 0.9 fetch no such value without a mesh around")
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        total = lax.psum(x.sum(), "d")
        lox.log({"total": total})
        if total < 0:
            return x
        for _ in range(2):
            x = jax.nn.relu(x + 1)
            lox.log({"x": x.sum()})
        return jax.jit(lambda x: (lox.log({"done": x.sum()}), -x)[1])(x)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    with within(mesh, context):
        x = put(X, mesh)
        for transformed in (f, lox.nolog(f), lox.keep(f, "x"), lox.watch(f), lox.tap(f, lambda _: None)):
            with lox.testing.capture():
                same(transformed(x), -X - 2)
        expected = {"total": f32(28), "x": f32([LOCAL + 2, LOCAL + 4]), "done": f32(LOCAL + 4)}
        for spooled in (lox.spool(f), lox.spool(lox.tap(f, lambda _: None)), lox.spool(lox.watch(f))):
            out, logs = spooled(x)
            same(out, -X - 2)
            same(logs, expected)
        same(lox.spool(f, reduce="max")(x)[1], {"total": f32(28), "x": f32(LOCAL + 4), "done": f32(LOCAL + 4)})
        primal, logs = lox.spool(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(x)
        same(primal[0], -X - 2)
        same(logs, expected)


def on_devices(body: Any, mesh: Mesh) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def scalar(x: Any) -> Any:
    lox.log({"x": x.sum()}, step=3)
    return x + 1


def in_scan(x: Any) -> Any:
    return lax.scan(lambda c, i: (lox.log({"x": c.sum()}, step=i), (c + 1, None))[1], x, jnp.arange(3))[0]


def in_cond(x: Any) -> Any:
    return lax.cond(x.sum() > 6, scalar, lambda x: x, x)


def in_while(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 9, scalar, x)


def in_everything(x: Any) -> Any:
    return in_while(jax.jit(in_scan)(in_cond(scalar(x)) - 4))


@pytest.mark.nightly
@pytest.mark.parametrize("body", [in_scan, in_cond, in_while, in_everything])
def test_logs_in_a_shard_map_do_not_depend_on_concrete_values(body: Any) -> None:
    mesh = mesh_of(AxisType.Auto)

    def wants_values(x: Any) -> Any:
        return x if lax.psum(x.sum(), "d") < 0 else body(x)

    def everything(f: Any) -> tuple[list[Any], list[Any]]:
        results: list[Any] = []
        texts: list[Any] = []
        for options in ({"capacity": 20}, {"interval": 2, "capacity": 20}, {"reduce": "last"}):
            received: list[Any] = []
            out, logs = lox.spool(lox.tap(f, received.append), **options)(X)
            jax.effects_barrier()
            lanes = [dict(logs.lane(n)) for n in range(DEVICES)] if "reduce" not in options else []
            compact = logs.compact()
            results += [out, dict(compact), compact.steps, *lanes]
            texts.append(sorted(map(str, received)))
        return texts, results

    actual, expected = everything(on_devices(wants_values, mesh)), everything(on_devices(body, mesh))
    assert actual[0] == expected[0]
    same(actual[1], jax.tree.map(np.asarray, expected[1]))


@pytest.mark.sample(1)
@each_kind
def test_a_loop_in_a_shard_map_whose_length_is_a_value(kind: AxisType) -> None:
    """Outside of jit, such a `fori_loop` has a known length."""
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        lox.log({"first": x.sum()})
        return lax.fori_loop(0, lax.pmin(x[1], "d").astype(int) + 1, lambda _, c: scalar(c), x)

    f = on_devices(body, mesh)
    expected = {"first": f32(LOCAL), "x": f32([LOCAL, LOCAL + 2])}
    with use(mesh):
        x = put(X, mesh)
        received: list[Any] = []
        again = lox.spool(f, keep_logs=True)
        for spooled in (lox.spool(f), lox.spool(lox.tap(f, received.append)), lox.spool(lambda x: again(x)[0])):
            out, logs = spooled(x)
            same(out, X + 2)
            same(logs, expected)
        jax.effects_barrier()
        same([dict(logs) for logs in received], [{"first": f32(LOCAL)}, {"x": f32(LOCAL)}, {"x": f32(LOCAL + 2)}])
        with pytest.raises(lox.SpoolError, match="it is logged inside `while_loop`, whose length is unknown"):
            lox.spool(jax.jit(f))(x)


@pytest.mark.nightly
@each_kind
def test_a_while_loop_on_devices_next_to_other_events_of_its_key(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    first = [[n for n in range(int(s), 9, 2)] for s in LOCAL]

    def around(x: Any) -> Any:
        lox.log({"x": -1.0})
        x = on_devices(in_while, mesh)(x)
        lox.log({"x": -2.0}, step=4)
        return x

    with use(mesh):
        x = put(X, mesh)
        logs = lox.spool(around, capacity=7)(x)[1]
        every = lox.spool(around, capacity=7, interval=2)(x)[1]
    assert [logs.lane(n)["x"].tolist() for n in range(DEVICES)] == [[-1, *events, -2] for events in first]
    assert [logs.lane(n).step["x"].tolist() for n in range(DEVICES)] == [[-1, *[3] * len(e), 4] for e in first]
    assert [every.lane(n)["x"].tolist() for n in range(DEVICES)] == [[-1, *events, -2][::2] for events in first]
    same(logs.compact().dropped, {"x": i32([0] * DEVICES)})


@pytest.mark.parametrize("mapped_first", [True, False])
def test_a_while_loop_on_devices_next_to_a_vmap_of_another_size(mapped_first: bool) -> None:
    mesh = mesh_of(AxisType.Auto)

    def f(x: Any) -> Any:
        parts = [lambda: jax.vmap(lambda v: lox.log({"x": v}))(jnp.arange(3.0)), lambda: on_devices(in_while, mesh)(x)]
        for part in parts if mapped_first else parts[::-1]:
            part()

    lanes = ["3 lanes", r"4 lanes \(mesh axes d\)"]
    first, second = lanes if mapped_first else lanes[::-1]
    with pytest.raises(lox.MismatchError, match=rf"'x' is logged under .*:\n  {first} at .*\n  {second} at "):
        lox.spool(f, capacity=7)(X)


@pytest.mark.sample(3)
@each_kind
@jitted_or_not
@pytest.mark.parametrize("reduce", ["last", "first", "sum"])
def test_a_reduction_of_what_varies_over_devices_and_what_does_not(kind: AxisType, jit: bool, reduce: str) -> None:
    mesh = mesh_of(kind)

    def branches(x: Any) -> Any:
        def replicated(x: Any) -> Any:
            lox.log({"a": 3.0}, step=7)
            return x

        return lax.cond(x.sum() > 6, replicated, lambda x: (lox.log({"b": x.sum()}), x)[1], x)

    def one_after_another(x: Any) -> Any:
        x = on_devices(lambda x: (lox.log({"a": x.sum()}, step=x.sum().astype(int)), x)[1], mesh)(x)
        return on_devices(lambda x: (lox.log({"a": 3.0}, step=7), x)[1], mesh)(x)

    once = LOCAL > 6
    both = {"last": f32([3] * DEVICES), "first": f32(LOCAL), "sum": f32(LOCAL + 3)}[reduce]
    with use(mesh):
        x = put(X, mesh)
        for body, key, expected, steps in [
            (on_devices(branches, mesh), "a", np.where(once, f32(3), f32(np.nan)), np.where(once, i32(7), i32(-1))),
            (one_after_another, "a", both, i32([7] * DEVICES)),
        ]:
            logs = lox.spool(jax.jit(body) if jit else body, reduce=reduce)(x)[1]
            same(logs[key], expected)
            same(logs.step[key], steps)


def test_a_nested_shard_map_evaluated_eagerly() -> None:
    mesh = mesh_of(AxisType.Auto, (2, 2), ("a", "b"))

    def inner(x: Any) -> Any:
        lox.log({"x": x.sum()})
        return x * 2 if lax.psum(x.sum(), ("a", "b")) > 0 else x

    def outer(x: Any) -> Any:
        lox.log({"row": x.sum()})
        return jax.shard_map(inner, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})(x)

    f = jax.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    x = jnp.arange(4.0)
    with use(mesh):
        same(f(x), 2 * x)
        out, logs = lox.spool(f)(x)
    same(out, 2 * x)
    same(logs, {"row": f32([1, 5]), "x": f32([0, 1, 2, 3])})


@pytest.mark.sample(1)
@each_kind
@jitted_or_not
def test_a_shard_map_that_is_manual_over_some_axes(kind: AxisType, jit: bool) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        lox.log({"x": x, "total": lax.psum(x.sum(), "a")})
        return x * 2

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    f = jax.jit(f) if jit else f
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    halves = [x[:2].tolist(), x[2:].tolist()]
    with use(mesh):
        given = put(x, mesh)
        same(lox.nolog(f)(given), x * 2)
        out, logs = lox.spool(f)(given)
        same(out, x * 2)
        same(logs, {"x": x.reshape(2, 2, 4), "total": f32(120)})
        if jax.__version_info__ < (0, 11) and kind == AxisType.Explicit:
            for g in (lox.tap(f, print), lox.tap(f, print, buffer=2)):
                with pytest.raises(
                    lox.TransformError, match=r"'x' to the host .* JAX before 0\.11 .*\n  logged at test_"
                ):
                    g(given)
            return
        for options in ({}, {"buffer": 2}):
            (logs,) = collected(lambda: f(given), **options)
            assert np.asarray(logs["x"]).reshape(2, 2, 4).tolist() == halves
            assert np.asarray(logs["total"]).item() == 120
        with lox.testing.capture() as events:
            same(f(given), x * 2)
            jax.effects_barrier()
        assert sorted(logs["x"].tolist() for logs in events) == halves


ONCE = {"local": 4, "total": 1, "c": 12, "i": 3, "mine": 1, "ours": 1, "while": 6, "jitted": 1}


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", [{}, {"buffer": 2}, {"interval": 1}, {"interval": 1, "buffer": 2}], ids=str)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@each_kind
@jitted_or_not
def test_values_that_all_devices_share_come_once(
    kind: AxisType, jit: bool, check: bool, options: dict[str, Any]
) -> None:
    """It comes from the first device, unless devices decide for themselves whether there is an event."""
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        total, me = lax.psum(x.sum(), "d"), lax.axis_index("d")
        lox.log({"local": x.sum(), "total": total})
        lax.scan(lambda c, i: (lox.log({"c": c.sum(), "i": i}), (c + 1, None))[1], x, jnp.arange(3))
        lax.cond(me == 2, lambda: (lox.log({"mine": 5.0}), None)[1], lambda: None)
        lax.cond(total > 0, lambda: (lox.log({"ours": 5.0}), None)[1], lambda: None)
        lax.while_loop(lambda n: n < me, lambda n: (lox.log({"while": 1.0}), n + 1)[1], me * 0)
        jax.jit(lambda: (lox.log({"jitted": 1.0}), 0)[1])()
        return x

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check)
    f, x = jax.jit(f) if jit else f, put(X, mesh)
    counts: dict[str, int] = {}
    for logs in collected(lambda: f(x), **options):
        for key, value in logs.items():
            counts[key] = counts.get(key, 0) + np.asarray(value).size
    # Where types do not tell, every device reports.
    shared = dict.fromkeys(["total", "ours", "jitted"], 4) | {"i": 12}
    assert counts == (ONCE if check else ONCE | shared)


@each_kind
def test_what_is_the_same_along_one_of_two_axes(kind: AxisType) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        row, column, total = (lax.psum(x.sum(), axes) for axes in ("b", "a", ("a", "b")))
        lox.log({"x": x.sum(), "row": row, "column": column, "total": total})
        lox.log({"both": row, "sum": total}, step=0)
        return x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")))
    x = put(np.arange(4, dtype=np.float32).reshape(2, 2), mesh, "a", "b")
    first, second = collected(lambda: f(x))
    same(first, {"x": f32([0, 1, 2, 3]), "row": f32([1, 5]), "column": f32([2, 4]), "total": f32(6)})
    same(second, {"both": f32([1, 5]), "sum": f32(6)})


@each_kind
def test_a_value_that_fails_on_all_devices_is_reported_once(kind: AxisType) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        lox.log({"total": jnp.log(-lax.psum(x.sum(), "d"))})
        return x

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    errors: list[Any] = []
    jax.block_until_ready(lox.watch(f, errors.append)(put(X, mesh)))
    jax.effects_barrier()
    assert [e.key for e in errors] == ["total"]


WATCHED = {
    "sharded by the compiler": lambda f, mesh: f,
    "on all devices": lambda f, mesh: jax.shard_map(f, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")),
    "on some axes": lambda f, mesh: jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}),
}


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("how", WATCHED)
def test_watch_tells_once_in_every_execution(kind: AxisType, how: str) -> None:
    """When all devices have got to the end: an error on one would let the others wait for it."""
    if kind == AxisType.Explicit and how == "on some axes" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX before 0.11 has no host calls there")
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        return lax.scan(
            lambda c, i: (lox.log({"c": jnp.log(2.5 - i.astype(np.float32)) + c.sum()}, step=i), (c, None))[1], x, STEPS
        )[0]

    with use(mesh), lox.testing.capture():
        f, x = WATCHED[how](body, mesh), put(np.ones((4, 2), np.float32), mesh, "a", "b")
        errors: list[Any] = []
        told, raises = jax.jit(lox.nolog(lox.watch(f, errors.append))), jax.jit(lox.nolog(lox.watch(f)))
        for _ in range(20):
            jax.block_until_ready(told(x))
        jax.effects_barrier()
        assert [(e.key, e.steps) for e in errors] == [("c", {"step": 3})] * 20
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"'c' is NaN at step=3\."):
                jax.block_until_ready(raises(x))
            with pytest.raises(lox.NonFiniteError, match=r"'c' is NaN at step=3\."):
                lox.nolog(lox.watch(jax.jit(f)))(x)
            with pytest.raises(lox.NonFiniteError, match=r"'c' is NaN at step=3\."):
                lox.watch(f)(x)


STEPS = np.arange(5, dtype=np.int32)


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("mapped", [False, True])
def test_watch_does_not_gather_large_values(kind: AxisType, mapped: bool) -> None:
    mesh = mesh_of(kind)

    def f(x: Any, limit: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            lox.log({"w": {"small": x.sum(), "large": jnp.where(x >= limit, jnp.inf, x)}}, step=i)
            return x + 1, None

        return lax.scan(step, x, STEPS)[0]

    x, limit = np.arange(200, dtype=np.float32).reshape(2, 100), np.float32(201.5)
    if mapped:
        f, x, limit = jax.vmap(f), np.stack([x - 100, x]), np.float32([300, 201.5])
    with use(mesh):
        x = put(x, mesh, *[None] * (x.ndim - 1), "d")
        watched = lox.nolog(lox.watch(f))
        assert "all-gather" not in jax.jit(watched).lower(x, limit).compile().as_text()
        with pytest.raises(lox.NonFiniteError) as raised:
            watched(x, limit)
    error = raised.value
    assert str(error).startswith(f"'w'['large'][1, 99] is inf at step=3{' in lane 1' if mapped else ''}.\n")
    assert error.value == np.inf and error.steps == {"step": 3}


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("first", ["scan", "cond"])
def test_a_reduction_is_of_one_value_unless_devices_decide(kind: AxisType, first: str) -> None:
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        me = lax.axis_index("d")
        parts = [
            lambda: lax.scan(lambda c, i: (lox.log({"i": i, "both": i}), (c, None))[1], 0, jnp.arange(3)),
            lambda: lax.cond(me == 2, lambda: (lox.log({"mine": 5, "both": 5}), None)[1], lambda: None),
        ]
        for part in parts if first == "scan" else parts[::-1]:
            part()
        return x

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    _, logs = lox.spool(f, reduce="sum")(put(X, mesh))
    same({k: logs[k] for k in ("i", "both")}, {"i": i32(3), "both": i32([3, 3, 8, 3])})
    assert logs.lane(2)["mine"] == 5
    blocks = collected(lambda: f(put(X, mesh)), reduce="sum", buffer=2)
    assert sum(int(np.asarray(logs["i"]).sum()) for logs in blocks if "i" in logs) == 3


UNREDUCED = r"""cannot send .y. to the host: it is unreduced over the mesh axes .d., so each device has one term .*\.
(  logged at test_meshes\.py:\d+ \(test_unreduced_values\.f\)
)?Either add them up first:       lox\.log\({\.\.\.: jax\.reshard\(x, jax\.P\(\)\)}\)
or return it with the others:   lox\.spool\(f\)"""


def test_unreduced_values() -> None:
    if jax.__version_info__ < (0, 9):
        pytest.skip("XLA of JAX 0.8 aborts when a program returns an unreduced value, also without lox")
    mesh = mesh_of(AxisType.Explicit)

    def doubled(x: Any) -> Any:
        return jax.shard_map(lambda x: x * 2, in_specs=P("d"), out_specs=P(unreduced={"d"}), check_vma=False)(x)

    def f(x: Any) -> Any:
        y = doubled(x)
        lox.log({"y": y})
        return jax.sharding.reshard(y, P())

    with use(mesh), Recorder() as logger:
        x = put(X, mesh)
        state = logger.init(jax.random.key(0))
        tapped = lox.tap(jax.jit(f), lambda _: None)
        logged = jax.jit(lambda x: logger.log(state, {"y": doubled(x)}))
        for g in (jax.jit(f), tapped, lox.tap(jax.jit(f), lambda _: None, buffer=2), logged):
            with pytest.raises(lox.LogTypeError, match=UNREDUCED):
                g(x)
        out, logs = lox.spool(jax.jit(f))(x)
        same(out, f32([24, 32]))
        same(jax.jit(lambda y: jax.sharding.reshard(y, P()))(logs["y"]), f32([24, 32]))


# --- meshes of two axes ---------------------------------------------------------------------------

TABLE = np.arange(16, dtype=np.float32).reshape(4, 4)
CORNERS = f32([10, 18, 42, 50])  # the sums on the four devices


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
@jitted_or_not
def test_two_mesh_axes(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def body(x: Any) -> Any:
        lox.log({"local": x.sum(), "row": lax.psum(x.sum(), "b"), "all": lax.psum(x.sum(), ("a", "b"))})

        def step(c: Any, i: Any) -> Any:
            lox.log({"c": c.sum()}, step=i)
            return c + 1, None

        return lax.scan(step, x, jnp.arange(3))[0]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
    f = jax.jit(f) if jit else f
    once = {"local": CORNERS, "row": f32([28, 92]), "all": f32(120)}
    with within(mesh, context):
        x = put(TABLE, mesh)
        out, logs = lox.spool(f)(x)
        same(out, TABLE + 3)
        same(logs, {**once, "c": CORNERS + f32([[0], [4], [8]])})
        same(logs.step, {"c": i32([0, 1, 2])})
        same(lox.spool(f, reduce="mean")(x)[1], {**once, "c": CORNERS + 4})
        blocks = collected(lambda: f(x), argnames="c", buffer=2)
        same([b["c"] for b in blocks], [CORNERS + f32([[0], [4]]), CORNERS[None] + 8])
        # The last part of a reduction comes from the whole function, outside of shard_map.
        mean, rest = collected(lambda: f(x), argnames=["c", "local"], buffer=2, reduce="mean")
        same(mean, {"c": CORNERS[None] + 2})
        same(rest, {"local": CORNERS[None], "c": CORNERS[None] + 8})


def test_a_mesh_does_not_stick_to_numbers_that_are_not_on_it() -> None:
    """JAX answers operations on one device from a cache, whatever mesh the types in it have."""
    jax.clear_caches()  # so that the operations below are new to it
    mesh = mesh_of(AxisType.Auto)
    f = jax.shard_map(lambda x: (lox.log({"x": x.sum()}), x)[1], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    collected(lambda: f(put(X, mesh)), buffer=2, reduce="mean")
    number = jnp.zeros((), jnp.int32) + jnp.ones((), jnp.int32)
    assert jax.typeof(number).sharding.mesh.empty
    table = put(TABLE, mesh_of(AxisType.Explicit, (2, 2), ("a", "b")))
    same(table * number.astype(jnp.float32), TABLE)


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
@jitted_or_not
def test_values_over_two_mesh_axes(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def f(x: Any) -> Any:
        lox.log({"x": x})

        def step(c: Any, i: Any) -> Any:
            lox.log({"rows": c.sum(1)}, step=i)
            return c + 1, None

        return lax.scan(step, x, jnp.arange(3))[0]

    f = jax.jit(f) if jit else f
    rows = TABLE.sum(1) + f32([[0], [4], [8]])
    with within(mesh, context):
        x = put(TABLE, mesh)
        same(lox.spool(f)(x)[1], {"x": TABLE, "rows": rows})
        same(lox.spool(f, reduce="mean")(x)[1], {"x": TABLE, "rows": rows[1]})
        same(
            [dict(b) for b in collected(lambda: f(x), argnames="rows", buffer=2)],
            [{"rows": rows[:2]}, {"rows": rows[2:]}],
        )


@each_kind
@pytest.mark.parametrize("options", [{}, {"reduce": "max"}, {"interval": 2}], ids=str)
def test_one_key_over_two_mesh_axes_of_one_size(kind: AxisType, options: Any) -> None:
    mesh = mesh_of(kind, (2, 2), ("a", "b"))

    def over(axis: str, x: Any) -> Any:
        x = jax.sharding.reshard(x, P(axis)) if kind == AxisType.Explicit else x
        body = lambda x: (lox.log({"s": x.sum()}), x)[1]  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=P(axis))(x)

    with use(mesh):
        assert lox.spool(jax.jit(lambda x: over("a", over("a", x))), **options)(TABLE)[1]["s"].shape[-1] == 2
        with pytest.raises(
            lox.MismatchError, match=r"2 lanes \(mesh axes a\), and then . lanes \(mesh axes (a, )?b\), at"
        ):
            lox.spool(jax.jit(lambda x: over("b", over("a", x))), **options)(TABLE)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("context, jit", [(True, True), (True, False), (False, True)])  # as far as JAX itself can go
def test_gradients_of_sharded_values(kind: AxisType, context: bool, jit: bool) -> None:
    mesh = mesh_of(kind)

    def loss(w: Any, x: Any) -> Any:
        y = lox.log_grad("dy", w * x)
        lox.log({"y": y, "norm": (y * y).sum()})

        def step(c: Any, i: Any) -> Any:
            lox.log({"c": c.sum()}, step=i)
            return c * 2, None

        return lax.scan(step, y, jnp.arange(2))[0].sum()

    grad = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    spooled = jax.grad(lambda w, x: lox.spool(loss)(w, x), has_aux=True)
    y = X * (X + 1)
    primal = {"y": y, "norm": f32((y * y).sum()), "c": f32([y.sum(), 2 * y.sum()])}
    with within(mesh, context):
        w, x = put(X + 1, mesh), put(X, mesh)
        out, logs = lox.spool(grad)(w, x)
        same(out, 4 * X)
        same(dict(logs), {**primal, "dy": f32([4] * 8)})
        out, logs = (jax.jit(spooled) if jit else spooled)(w, x)
        same(out, 4 * X)
        same(dict(logs), primal)
        same(lox.spool(grad, "c", reduce="mean")(w, x)[1], {"c": f32(1.5 * y.sum())})
        same([dict(logs) for logs in collected(lambda: grad(w, x), argnames="c")], [{"c": c} for c in primal["c"]])


# --- meshes as context ----------------------------------------------------------------------------


@each_kind
def test_a_function_that_sets_the_mesh(kind: AxisType) -> None:
    mesh = mesh_of(kind)

    def main() -> Any:
        with use(mesh):
            assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
            if hasattr(jax.sharding, "get_mesh"):
                assert jax.sharding.get_mesh() == mesh
            x = put(X, mesh)
            y = jax.jit(lambda x: (lox.log({"x": x}), x * 2)[1])(x)
            lox.log({"y": y.sum()})
        assert jax.sharding.get_abstract_mesh().empty
        return y

    with lox.testing.capture() as events:
        for f in (main, lox.nolog(main), lox.keep(main, "y"), lox.watch(main), lox.tap(main, lambda _: None)):
            same(f(), X * 2)
    assert [list(logs) for logs in events] == [["x"], ["y"], ["y"], ["x"], ["y"]]
    for f in (lox.spool(main), lox.spool(lox.tap(main, lambda _: None)), lox.spool(main, keep_logs=True)):
        out, logs = f()
        same(out, X * 2)
        same(logs, {"x": X, "y": f32(56)})
    with pytest.raises(ValueError, match=r"can only be used outside of `jax\.jit`"):
        jax.jit(lox.spool(main))()


# --- lanes that are sharded -----------------------------------------------------------------------


def branch(v: Any) -> Any:
    return lax.cond(v > 3, lambda v: (lox.log({"big": v, "one": 1}), v * 2)[1], lambda v: v, v)


def loop(v: Any) -> Any:
    return lax.while_loop(lambda c: c < 5, lambda c: (lox.log({"c": c}), branch(c) + 1)[1], v)


def train(v: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        lox.log({"loss": c, "lr": 0.5}, step=i)
        return branch(c) * 1.5, None

    return lax.scan(step, v, jnp.arange(4))[0]


PROGRAMS = [branch, loop, train]
LANES = np.arange(8, dtype=np.float32)


@pytest.mark.sample(1)
@each_kind
@jitted_or_not
@pytest.mark.parametrize("program", PROGRAMS)
def test_lanes_over_a_mesh(program: Any, jit: bool, kind: AxisType) -> None:
    """The results are those of one device, whatever is done with the logs."""
    mesh = mesh_of(kind)
    f = jax.jit(jax.vmap(program)) if jit else jax.vmap(program)

    def everything(x: Any) -> list[Any]:
        results: list[Any] = [lox.nolog(f)(x), lox.watch(f)(x)]
        for options in ({"capacity": 20}, {"reduce": "mean"}, {"interval": 2, "capacity": 20}):
            out, logs = lox.spool(f, **options)(x)
            lanes = [dict(logs.lane(n)) for n in (0, 5)] if "reduce" not in options else []
            compact = logs.compact()
            results += [out, dict(compact), dict(compact.valid), compact.steps, dict(logs.reduce("max")), *lanes]
            texts.append(str(logs))
        for options in ({}, {"interval": 2}, {"reduce": "sum"}):
            received: list[Any] = []
            results.append(lox.tap(f, received.append, **options)(x))
            results += [dict(logs) for logs in received]
        return jax.tree.map(np.asarray, results)

    texts: list[str] = []
    with lox.testing.capture() as events:
        expected = everything(LANES)
    with use(mesh), lox.testing.capture() as events_of_mesh:
        same(everything(put(LANES, mesh)), expected)
    assert texts[:3] == texts[3:]
    assert len(events_of_mesh) == len(events)


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("program", PROGRAMS)
def test_transformed_inside_lanes_over_a_mesh(program: Any, kind: AxisType) -> None:
    mesh = mesh_of(kind)
    spooled = jax.jit(jax.vmap(lox.spool(program, capacity=20)))
    reduced = jax.jit(jax.vmap(lox.spool(program, reduce="mean")))
    received: list[Any] = []
    tapped = jax.jit(jax.vmap(lox.tap(program, received.append)))
    with use(mesh):
        x = put(LANES, mesh)
        for f in (spooled, reduced):
            same(dict(f(x)[1].compact()), jax.tree.map(np.asarray, dict(f(LANES)[1].compact())))
        jax.block_until_ready(tapped(x))
        jax.effects_barrier()
        actual, received[:] = [dict(logs) for logs in received], []
        jax.block_until_ready(tapped(LANES))
        jax.effects_barrier()
        same(actual, [dict(logs) for logs in received])


NOT_AROUND = [(AxisType.Explicit, False), (AxisType.Auto, False), (AxisType.Auto, True)]


@pytest.mark.nightly
@jitted_or_not
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind, spmd", NOT_AROUND, ids=["explicit", "auto", "spmd_axis_name"])
def test_lanes_over_a_mesh_that_only_the_arrays_know(program: Any, kind: AxisType, spmd: bool, jit: bool) -> None:
    """A vmap can be given the name of the mesh axis for its lanes."""
    mesh = mesh_of(kind)
    wrap = jax.jit if jit else lambda f: f
    f = wrap(jax.vmap(program, spmd_axis_name="d" if spmd else None))

    def everything(f: Any, x: Any) -> list[Any]:
        results = []
        for options in ({"capacity": 20}, {"reduce": "mean"}):
            out, logs = lox.spool(f, **options)(x)
            results += [out, dict(logs.compact()), logs.compact().steps]
        results.append([dict(logs) for logs in collected(lambda: f(x))])
        return jax.tree.map(np.asarray, results)

    expected = everything(wrap(jax.vmap(program)), LANES)
    same(everything(f, put(LANES, mesh)), expected)


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("reduce", ["mean", "std", "min", "sum"])
def test_reduced_lanes_outside_of_jit(kind: AxisType, reduce: str) -> None:
    def f(x: Any) -> Any:
        lox.log({"x": x, "pair": x * jnp.ones(2)}, weight=x + 1)
        lox.log({"x": 3 * x}, weight=x + 1, where=x > 3)
        return x

    expected = jax.tree.map(np.asarray, dict(lox.spool(jax.vmap(f), reduce=reduce)(LANES)[1]))
    same(dict(lox.spool(jax.vmap(f), reduce=reduce)(put(LANES, mesh_of(kind)))[1]), expected)


class Recorder(lox.Logger):
    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def write(self, run: Any, logs: Any) -> None:
        for key in logs:
            self.values.setdefault(run.name + " " + key, []).extend(np.asarray(logs[key]).tolist())


@pytest.mark.sample(1)
@each_kind
@pytest.mark.parametrize("options", [{}, {"buffer": 2}, {"reduce": "mean"}, {"interval": 2}], ids=str)
def test_a_logger_with_seeds_over_a_mesh(kind: AxisType, options: Any) -> None:
    mesh = mesh_of(kind)

    def recorded(prng_keys: Any, x: Any) -> Any:
        with Recorder() as logger:

            @jax.jit
            @jax.vmap
            def experiment(prng_key: Any, x: Any) -> Any:
                state = logger.init(prng_key, config={"x": x})
                y = logger.tap(train, state, **options)(x)
                logger.spool(train, state, prefix="again/", reduce=options.get("reduce"))(x)
                logger.log(state, {"final": y})
                return y

            out = experiment(prng_keys, x)
        return out, logger.values

    prng_keys = jax.random.split(jax.random.key(0), 8)
    out, expected = recorded(prng_keys, LANES)
    with use(mesh):
        actual = recorded(put(prng_keys, mesh), put(LANES, mesh))
    same(actual[0], np.asarray(out))
    assert actual[1] == expected


# --- several devices in one function --------------------------------------------------------------


def on(x: Any, place: Any) -> Any:
    if place == "mesh":
        return put(x, mesh_of(AxisType.Auto))
    return x if place is None else jax.device_put(x, devices(place + 1)[place])


@jax.jit
def learn(x: Any) -> Any:
    lox.log({"learn": x.mean(), "sum": x.sum()})
    return x + 1


@jax.jit
def evaluate(x: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        lox.log({"sum": c.sum()}, step=i)
        lox.log({"odd": c.mean()}, where=i % 2 == 1)
        return c, None

    return lax.scan(step, x, jnp.arange(3))[0]


PLACES = [("mesh", 0), (0, 1), (1, None), (2, "mesh"), (None, None)]


@pytest.mark.nightly
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_programs_on_several_devices_in_one_function(places: Any) -> None:
    def both(x: Any) -> Any:
        learn(on(x, places[0]))
        y = evaluate(on(x, places[1]))
        lox.log({"end": y.sum()})
        evaluate(on(x, places[0]))
        return y

    x = np.arange(4, dtype=np.float32)
    stacked = {"learn": f32(1.5), "sum": f32([6.0] * 7), "odd": f32([1.5] * 2), "end": f32(6)}
    plain = both(x)
    for spooled in (lox.spool(both), lox.spool(lox.tap(both, lambda _: None)), lox.spool(lox.watch(both))):
        out, logs = spooled(x)
        assert (out.sharding, out.committed) == (plain.sharding, plain.committed)
        same(logs, stacked)
    same(lox.spool(both, reduce="sum")(x)[1], {"learn": f32(1.5), "sum": f32(42), "odd": f32(3), "end": f32(6)})
    same(lox.spool(both, interval=3)(x)[1], {**stacked, "sum": f32([6.0] * 3), "odd": f32([1.5])})
    loss = [{"learn": 1.5, "sum": 6.0}]
    tested = [{"sum": 6.0}, {"sum": 6.0}, {"odd": 1.5}, {"sum": 6.0}]
    events = [*loss, *tested, {"end": 6.0}, *tested]
    received: list[Any] = []
    out = lox.tap(both, received.append)(x)
    assert (out.sharding, out.committed) == (plain.sharding, plain.committed)
    assert [{k: float(v) for k, v in logs.items()} for logs in received] == events
    for options in ({"buffer": 4}, {"buffer": 2, "reduce": "sum"}, {"interval": 2}, {"reduce": "sum"}):
        received.clear()
        lox.tap(both, received.append, **options)(x)
        total = sum(np.sum(logs.get("sum", 0.0)) for logs in received)
        assert total == (24 if "interval" in options else 42)
    with Recorder() as logger:
        state = logger.init(jax.random.key(0))
        logger.tap(both, state)(x)
        logger.spool(both, state, prefix="again/")(x)
    assert logger.values["0 sum"] == logger.values["0 again/sum"] == [6.0] * 7


def test_a_failed_value_on_the_second_device() -> None:
    def both(x: Any) -> Any:
        learn(on(x, 0))
        return evaluate(on(x / 0, 1))

    with pytest.raises(lox.NonFiniteError, match="'sum' is NaN"), lox.testing.capture():
        lox.watch(both)(jnp.zeros(4))


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
def test_a_branch_that_only_logs_the_number_of_the_iteration(kind: AxisType, context: bool) -> None:
    """Operands without a mesh are moved to an axis of size one."""
    mesh = mesh_of(kind)

    def f(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            branches = [lambda x, i: x, lambda x, i: (lox.log({"x": x}, step=i), x)[1]]
            return lax.switch((x % 2).astype(jnp.int32), branches, x, i) + 1, None

        return lax.scan(step, x, jnp.arange(2))[0]

    g = jax.jit(jax.vmap(f))
    with within(mesh, context):
        x = put(np.arange(4, dtype=np.float32), mesh)
        out, logs = lox.spool(g)(x)
        same(out, f32([2, 3, 4, 5]))
        for n in range(4):
            same(logs.lane(n)["x"], f32([n + (n + 1) % 2]))
            same(logs.lane(n).step["x"], i32([(n + 1) % 2]))
        same(lox.nolog(g)(x), f32([2, 3, 4, 5]))
        inside, logs = jax.jit(jax.vmap(lox.spool(f)))(x)
        same(inside, out)
        for n in range(4):
            same(logs.lane(n)["x"], f32([n + (n + 1) % 2]))
        seen: list[Any] = []
        same(lox.tap(g, lambda logs: seen.append(logs))(x), out)
        for n in range(4):
            same(
                np.concatenate([np.ravel(logs.lane(n).get("x", [])) for logs in seen]).astype(np.float32),
                f32([n + (n + 1) % 2]),
            )


@pytest.mark.sample(1)
@each_kind
@with_and_without_context
def test_branches_of_different_numbers_of_logs_over_a_mesh(kind: AxisType, context: bool) -> None:
    """The padding of shorter branches has no mesh; also when spooled inside the vmap."""
    mesh = mesh_of(kind)

    def f(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            def twice() -> Any:
                lox.log({"x": x}, step=i)
                lox.log({"x": x + 0.5}, step=i + 1)
                return x

            def once() -> Any:
                lox.log({"x": -x, "i": i})
                return x

            return lax.cond(x % 2 == 0, twice, once) + 1, None

        return lax.scan(step, x, jnp.arange(2))[0]

    with within(mesh, context):
        x = put(np.arange(4, dtype=np.float32), mesh)
        for out, logs in lox.spool(jax.jit(jax.vmap(f)))(x), jax.jit(jax.vmap(lox.spool(f)))(x):
            same(out, f32([2, 3, 4, 5]))
            for n in range(4):
                lane, first = logs.lane(n), n % 2
                even, odd = [n + first, n + first + 0.5], [-(n + 1 - first)]
                same(lane["x"], f32(odd + even if first else even + odd))
                same(lane.step["x"], i32([-1, 1, 2] if first else [0, 1, -1]))
                same(lane["i"], i32([1 - first]))


@each_kind
def test_events_of_a_branch_next_to_others_over_a_mesh(kind: AxisType) -> None:
    """The steps of a branch have lanes, and are joined with steps that have none."""
    mesh = mesh_of(kind)

    def f(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            def even() -> Any:
                lox.log({"x": x}, step=i)
                return True

            flag = lax.cond(x % 2 == 0, even, lambda: False)
            lox.log({"x": -x}, step=7)
            return x + 1, flag

        return lax.scan(step, x, jnp.arange(2))

    x = put(np.arange(4, dtype=np.float32), mesh)
    for (out, flags), logs in lox.spool(jax.jit(jax.vmap(f)))(x), jax.jit(jax.vmap(lox.spool(f)))(x):
        same(out, f32([2, 3, 4, 5]))
        same(flags, np.array([[True, False], [False, True]] * 2))
        for n in range(4):
            same(logs.lane(n)["x"], f32([-n, n + 1, -n - 1] if n % 2 else [n, -n, -n - 1]))
            same(logs.lane(n).step["x"], i32([7, 1, 7] if n % 2 else [0, 7, 7]))


@each_kind
def test_no_gradient_of_a_branch_that_a_lane_did_not_take(kind: AxisType) -> None:
    """A branch that was not taken may have a gradient of NaN, also for operands without a mesh."""
    mesh = mesh_of(kind)

    def f(x: Any, w: Any) -> Any:
        def root() -> Any:
            lox.log({"w": w})
            return x * jnp.sqrt(w - 4)

        return lax.cond(x > 10, root, lambda: x * w)

    def loss(w: Any, x: Any) -> Any:
        return jax.vmap(f, in_axes=(0, None))(x, w).sum()

    x = put(np.arange(4, dtype=np.float32), mesh)
    (value, grad), logs = lox.spool(jax.jit(lambda x: jax.value_and_grad(loss)(jnp.float32(4), x)))(x)
    same(value, f32(24))
    same(grad, f32(6))
    assert all(logs.lane(n)["w"].size == 0 for n in range(4))


@each_kind
@pytest.mark.parametrize("lengths", [(0, 0), (0, 2), (2, 0)], ids=str)
def test_loops_without_iterations_over_a_mesh(kind: AxisType, lengths: tuple[int, int]) -> None:
    mesh = mesh_of(kind)

    def f(x: Any) -> Any:
        def inner(x: Any, i: Any) -> Any:
            lox.log({"x": x, "key": jax.random.key(1)}, step=i)
            lox.log({"x": x + 1})
            return x, None

        outer = lambda x, _: (lax.scan(inner, x, jnp.arange(lengths[1]))[0], None)  # noqa: E731
        return lax.scan(outer, x, None, lengths[0])[0]

    out, logs = lox.spool(jax.jit(jax.vmap(f)))(put(np.arange(4, dtype=np.float32), mesh))
    same(out, f32([0, 1, 2, 3]))
    assert (logs["x"].shape, logs["key"].shape) == ((0, 4), (0,))


@pytest.mark.sample(1)
@each_kind
@jitted_or_not
def test_lanes_inside_shard_map(kind: AxisType, jit: bool) -> None:
    """With a vmap inside each device, some arrays of a key vary over both, some over neither."""
    mesh = mesh_of(kind)

    def body(x: Any) -> Any:
        jax.vmap(lambda v: lox.log({"v": v, "one": 1.0}))(x)

        def step(c: Any, i: Any) -> Any:
            jax.vmap(lambda v: lox.log({"w": v * i}, step=i))(c)
            return c, None

        return lax.scan(step, x, jnp.arange(3.0))[0]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    f, x, pairs = jax.jit(f) if jit else f, put(X, mesh), X.reshape(DEVICES, 2)
    same(lox.spool(f)(x)[1], {"v": pairs, "one": f32(1), "w": f32([pairs * i for i in range(3)])})
    same(lox.spool(f, interval=2)(x)[1], {"v": pairs, "one": f32(1), "w": f32([pairs * i for i in (0, 2)])})
    logs = lox.spool(f, reduce="sum")(x)[1]
    same(logs, {"v": pairs, "one": f32(1), "w": pairs * 3})
    assert logs.step["w"] == 2
    for options in ({}, {"reduce": "sum"}, {"interval": 2}, {"buffer": 2}, {"buffer": 2, "reduce": "sum"}):
        received = collected(lambda: f(x), **options)
        total = 0.0 if "interval" in options else float(X.sum())
        assert sum(np.sum(logs["w"]) for logs in received if "w" in logs) == total + 2 * X.sum(), options
        assert sum(np.sum(logs["one"]) for logs in received if "one" in logs) == 1, options


@pytest.mark.sample(3)
@pytest.mark.parametrize("transform", ["jit(vmap(watch))", "jit(watch(vmap))", "vmap(watch)", "watch(vmap)"])
@with_and_without_context
@each_kind
def test_watch_over_sharded_seeds(kind: AxisType, context: bool, transform: str) -> None:
    """Without a context, only the types of the arrays know the mesh."""

    def fun(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            lox.log({"x": x}, step=i)
            return x * 16, None

        return lax.scan(step, x, jnp.arange(300))[0]

    errors: list[lox.NonFiniteError] = []
    functions = {"watch": lambda f: lox.nolog(lox.watch(f, errors.append)), "vmap": jax.vmap, "jit": jax.jit}
    for name in reversed(transform.replace(")", "").split("(")):
        fun = functions[name](fun)
    mesh = mesh_of(kind)
    with within(mesh, context):
        jax.block_until_ready(fun(put(jnp.float32([0, 1, 0, 2, 0, 0, 0, 0]), mesh)))
        jax.effects_barrier()
    assert (errors[0].key, errors[0].steps, errors[0].lane) == ("x", {"step": 32}, (1,))


@each_kind
@pytest.mark.parametrize("number", [2, 10])
def test_values_on_a_mesh_of_one_device_beside_others(kind: AxisType, number: int) -> None:
    on_mesh, other = put(jnp.arange(2.0), mesh_of(kind, (1,))), jnp.arange(2.0) + 2

    def fun() -> None:
        for _ in range(number):
            lox.log({"x": on_mesh})
            lox.log({"x": other})

    _, logs = lox.spool(fun)()
    assert np.asarray(logs["x"]).tolist() == [[0, 1], [2, 3]] * number
