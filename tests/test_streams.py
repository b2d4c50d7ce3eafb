"""tap and watch inside other transformations: every event once, in the right lane, under the right name."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from optional import devices

import lox
import lox.testing

pytestmark = pytest.mark.slow

NOTHING = lambda logs: None  # noqa: E731


def received(transform: Any, *args: Any) -> list[lox.logdict]:
    got: list[lox.logdict] = []
    transform(got.append)(*args)
    jax.effects_barrier()
    return got


def lanes_of(logs: list[lox.logdict], lane: int) -> list[tuple[str, list[float]]]:
    actual = []
    for event in logs:
        for key in event:
            valid = np.asarray(event.valid.get(key, True))
            one = event.filter(lambda k, key=key: k == key)
            if not valid.shape or valid[..., lane].any():
                actual.append((key, np.atleast_1d(np.asarray(one.lane(lane)[key])).tolist()))
    return actual


def branching(n: Any) -> Any:
    def first(x: Any) -> Any:
        lox.log({"a": x})
        return x + 1

    def second(x: Any) -> Any:
        lox.log({"b": x})
        return x + 1

    return lax.cond(n > 1, first, second, n)


def counting(n: Any) -> Any:
    def body(i: Any) -> Any:
        lox.log({"i": i})
        return i + 1

    return lax.while_loop(lambda i: i < n, body, 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("buffer", [None, 2])
@pytest.mark.parametrize("jit", [False, True])
def test_vmap_on_either_side_gives_the_events_of_each_lane(buffer: int | None, jit: bool) -> None:
    for fun, expected in (
        (branching, [[("b", [1])], [("a", [3])]]),
        (counting, [[("i", [0])], [("i", [0]), ("i", [1]), ("i", [2])]]),
    ):
        outside = lambda cb, fun=fun: jax.vmap(lox.tap(fun, cb, buffer=buffer))  # noqa: E731
        inside = lambda cb, fun=fun: lox.tap(jax.vmap(fun), cb, buffer=buffer)  # noqa: E731
        for transform in (outside, inside):
            transform = (lambda cb, t=transform: jax.jit(t(cb))) if jit else transform
            logs = received(transform, jnp.array([1, 3]))
            for lane in range(2):
                flat = [(k, [x]) for k, values in lanes_of(logs, lane) for x in values]
                assert flat == expected[lane]


def test_watch_does_not_look_at_branches_that_no_lane_takes() -> None:
    def f(x: Any) -> Any:
        def divided(x: Any) -> Any:
            lox.log({"a": x / 0})
            return x

        return lax.cond(x > 1, divided, lambda x: x, x)

    watched = lox.nolog(jax.vmap(lox.watch(f)))
    assert watched(jnp.array([0.0, 0.5])).tolist() == [0.0, 0.5]
    with pytest.raises(lox.NonFiniteError, match="in lane 1"):
        jax.vmap(lox.watch(f))(jnp.array([0.0, 2.0]))
        jax.effects_barrier()


@pytest.mark.parametrize("options", [{"buffer": 3}, {"buffer": 3, "reduce": "sum"}, {"buffer": 3, "interval": 2}])
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_vmap_inside_and_one_outside(loop: str, options: dict[str, Any]) -> None:
    def inner(y: Any) -> Any:
        lox.log({"y": y})
        return y * 2

    def f(x: Any) -> Any:
        if loop == "scan":
            return lax.scan(lambda y, _: (jax.vmap(inner)(y), None), jnp.ones(2) * x, length=4)[0]
        return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jax.vmap(inner)(c[1])), (0, jnp.ones(2) * x))[1]

    logs = received(lambda cb: jax.vmap(lox.tap(f, cb, **options)), jnp.arange(3.0))
    total = sum(np.asarray(event["y"]).sum(0) for event in logs)
    steps = [1, 2, 4, 8][:: options.get("interval", 1)]
    np.testing.assert_array_equal(total, np.outer(np.arange(3.0), np.ones(2)) * sum(steps))


@pytest.mark.parametrize("options", [{}, {"buffer": 2}])
def test_the_linear_part_of_a_loop_is_silent(options: dict[str, Any]) -> None:
    def f(x: Any) -> Any:
        def body(c: Any) -> Any:
            lox.log({"i": c[0]})
            return c[0] + 1, c[1] * 2.0

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    got: list[lox.logdict] = []
    _, linear = jax.linearize(lox.tap(f, got.append, **options), 1.0)
    linear(1.0)
    linear(2.0)
    jax.effects_barrier()
    assert np.concatenate([np.atleast_1d(e["i"]) for e in got]).tolist() == [0, 1, 2]


def test_a_loop_that_is_not_differentiated_under_remat() -> None:
    def f(x: Any) -> Any:
        def body(c: Any) -> Any:
            lox.log({"y": c[1]})
            return c[0] + 1, c[1] * 2.0

        return jnp.sin(x) * lax.while_loop(lambda c: c[0] < 3, body, (0, 1.0))[1]

    for transform in (
        lambda cb: jax.grad(lox.tap(jax.checkpoint(f), cb)),
        lambda cb: jax.grad(jax.checkpoint(lox.tap(f, cb))),
        lambda cb: jax.grad(jax.checkpoint(lox.tap(f, cb, buffer=2))),
        lambda cb: jax.grad(lox.watch(jax.checkpoint(lox.tap(f, cb)))),
    ):
        got = received(transform, 1.0)
        assert np.concatenate([np.atleast_1d(e["y"]) for e in got]).tolist() == [1.0, 2.0, 4.0]


def test_one_compiled_tap_that_runs_several_times_at_once() -> None:
    """Each call has a buffer of its own, and must not clear the buffers of others."""
    got: list[int] = []

    def f(x: Any) -> Any:
        lox.log({"v": x})
        lox.log({"v": x + 1})
        return x + 100

    tapped = jax.jit(lox.tap(f, lambda logs: got.extend(logs["v"].tolist()), buffer=5))

    @jax.jit
    def twice(x: Any) -> Any:
        y = tapped(x)
        return lax.cond(y > 0, tapped, lambda c: c, y)

    twice(0)
    jax.effects_barrier()
    assert sorted(got) == [0, 1, 100, 101]
    got.clear()
    threads = [threading.Thread(target=lambda: [tapped(1000 * n) for n in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jax.effects_barrier()
    assert sorted(got) == sorted([1000 * n + k for n in range(50) for k in (0, 1)] * 4)


def test_scopes_around_derivative_rules_count_once() -> None:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2

    def backward(_: Any, g: Any) -> Any:
        lox.log({"g": g})
        return (g * 2,)

    double.defvjp(lambda x: (x * 2, x), backward)

    @jax.jit
    def f(x: Any) -> Any:
        with lox.scope("o"):
            return double(x)

    for fun in (f, lox.tap(f, NOTHING), lox.watch(f), lox.keep(f, "*"), lox.nolog(f, "other")):
        assert list(lox.spool(jax.grad(fun))(1.0)[1]) == ["o/g"]


def test_two_reductions_of_a_key_with_an_interval() -> None:
    def f(xs: Any) -> None:
        lax.scan(lambda c, x: (c, lox.log({"x": x}) and None), 0, xs)
        lox.log({"x": 100.0}, reduce="mean")

    for options in ({}, {"interval": 1}, {"interval": 2}):
        with pytest.raises(lox.MismatchError, match="'x' is logged with different reductions"):
            lox.spool(f, **options)(jnp.arange(4.0))


def test_an_error_that_the_function_catches() -> None:
    def failing(logs: lox.logdict) -> None:
        raise RuntimeError

    def scan(xs: Any) -> None:
        lax.scan(lambda c, x: (c, lox.log({"x": x}) and None), 0, xs)

    def f(xs: Any) -> None:
        with pytest.raises(RuntimeError):
            lox.tap(scan, failing)(xs)
        for i in range(5):
            lox.log({"x": 100.0 + i})
        scan(xs)

    for options in ({}, {"interval": 1}):
        _, logs = lox.spool(f, **options)(jnp.arange(4.0))
        assert logs["x"].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0, 0.0, 1.0, 2.0, 3.0]


def test_an_error_of_the_user_is_not_taken_for_an_earlier_one() -> None:
    def h(x: Any) -> Any:
        lox.log({"x": x})
        return x

    def g(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(Exception, match="'x' is NaN"):
        jax.block_until_ready(jax.jit(lox.nolog(lox.watch(h)))(jnp.nan))
        jax.effects_barrier()
    lox._compat.forget_failed_effects("is NaN")  # on a GPU, JAX tells everyone who waits
    with pytest.raises(ValueError, match="mine"):
        lox.watch(g)(1.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("x", [1.3, 1, True, jnp.float32(1.3)])
def test_python_numbers(x: Any) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, i: (c, lox.log({"c": c}) and i), x, jnp.arange(2.0))[0]

    got: list[lox.logdict] = []
    rounded = np.asarray(jnp.asarray(x))
    for fun in (
        lox.tap(f, got.append, reduce="max"),
        lox.tap(f, got.append, buffer=3, interval=2),
        lox.tap(lox.tap(f, NOTHING, reduce="max"), got.append),
        lox.tap(f, got.append, interval=2),
        lambda x: lox.spool(lox.tap(f, got.append), reduce="max")(x)[0],
    ):
        got.clear()
        _, logs = lox.spool(fun)(x)
        assert got and all(np.all(np.asarray(event["c"]) == rounded) for event in got)
        assert np.all(np.asarray(logs.get("c", rounded)) == rounded)
    if isinstance(x, float):
        with lox.testing.capture() as events:
            jax.grad(lambda x: (lox.log({"x": x}), x)[1])(x)
        assert [float(event["x"]) for event in events] == [float(rounded)]


def test_a_shard_map_in_a_loop_that_logs_another_key() -> None:
    mesh = jax.sharding.Mesh(devices(2), ("i",))
    spec = jax.sharding.PartitionSpec("i")

    def f(x: Any) -> Any:
        def inside(c: Any) -> Any:
            lox.log({"x": c.sum()})
            return c + 1

        def step(c: Any, _: Any) -> Any:
            lox.log({"z": c.sum()})
            return jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec)(c), None

        return lax.scan(step, x, jnp.arange(4))[0]

    x = jnp.arange(4.0)
    _, logs = lox.spool(f)(x)
    _, thin = lox.spool(f, interval=2)(x)
    for key in logs:
        np.testing.assert_array_equal(thin[key], logs[key][::2])
    _, mean = lox.spool(f, reduce="mean")(x)
    np.testing.assert_allclose(mean["x"], np.asarray(logs["x"]).mean(0))
    blocks = received(lambda cb: lox.tap(f, cb, buffer=3), x)
    np.testing.assert_array_equal(np.concatenate([b["z"] for b in blocks if "z" in b]), logs["z"])


def test_integers_are_summed_as_jax_sums_them() -> None:
    def f(xs: Any) -> None:
        lax.scan(lambda c, x: (c, lox.log({"x": x}) and None), 0, xs)

    for dtype in ("int32", "uint8", "int16", "bool"):
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            xs = jnp.asarray([2**30] * 4 if dtype == "int32" else [1] * 4, dtype)
            actual = lox.spool(f, reduce="sum")(xs)[1]["x"]
            assert (int(actual), actual.dtype) == (int(xs.sum()), xs.sum().dtype)
        xs = jnp.asarray([1] * 4, dtype)
        assert lox.spool(f, reduce="sum")(xs)[1]["x"].dtype == xs.sum().dtype


@pytest.mark.nightly
def test_explicit_sharding() -> None:
    if not hasattr(jax.sharding, "use_abstract_mesh"):
        pytest.skip("JAX 0.7 makes no sharded array without a mesh around")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=devices(8))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d", None))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding)

    def f(x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            c = c * 1.5
            lox.log({"c": c, "m": c.sum()}, step=i)
            return c, None

        return lax.scan(step, x, jnp.arange(5))[0]

    logs = jax.tree.map(np.asarray, dict(lox.spool(f)(x)[1]))
    for jit in (lambda f: f, jax.jit):
        for how, exact in (("mean", np.mean), ("max", np.max), ("std", np.std), ("sum", np.sum)):
            actual = jit(lox.spool(f, reduce=how))(x)[1]
            for key in logs:
                np.testing.assert_allclose(actual[key], exact(logs[key], 0), rtol=1e-5)
        actual = jit(lox.spool(f, interval=2))(x)[1]
        for key in logs:
            np.testing.assert_array_equal(actual[key], logs[key][::2])
        for options in ({}, {"buffer": 3}):
            got = received(lambda cb, o=options, jit=jit: jit(lox.tap(f, cb, **o)), x)
            total = np.concatenate([np.reshape(e["m"], -1) for e in got])
            np.testing.assert_allclose(np.sort(total), np.sort(logs["m"]), rtol=1e-6)
