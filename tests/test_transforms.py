"""Every event once, with its primal value, under every transformation and inside every primitive."""

import contextlib
import functools
import subprocess
import sys
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from exact import f32, same
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import batching, mlir, xla
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optional import devices

import lox
import lox.testing
from lox._engine import _interpret

X = jnp.float32(0.5)
XS = jnp.arange(1.0, 6.0)


def noted(x: Any, key: str = "v") -> Any:
    lox.log({key: x})
    return x


# --- functions, and how many events each has ------------------------------------------------------


def straight(x: Any) -> Any:
    return noted(jnp.sin(noted(jnp.sin(x), "y")), "z") ** 2


def constant(x: Any) -> Any:
    lox.log({"c": jnp.float32(3.0)})
    return x * x


def scanned(x: Any) -> Any:
    def body(c: Any, t: Any) -> Any:
        c = noted(jnp.sin(c) * t, "c")
        noted(t, "t")
        return c, c

    return lax.scan(body, x, XS)[0]


def looped(x: Any) -> Any:
    return lax.fori_loop(0, 5, lambda i, c: jnp.sin(noted(c, "c")), x)


def whiled(x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.sin(noted(s[1], "c"))), (0, x))[1]


def branched(x: Any) -> Any:
    return lax.cond(x > 0, lambda x: jnp.sin(noted(x, "b")), lambda x: jnp.cos(noted(-x, "b")), x)


def remat_in_scan(x: Any) -> Any:
    return lax.scan(lambda c, t: (jax.checkpoint(straight)(c) * t, None), x, XS)[0]


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.sin(noted(x, "primal"))


with_jvp.defjvp(lambda p, t: (jnp.sin(noted(p[0], "rule")), 100.0 * t[0]))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.sin(noted(x, "primal"))


def _fwd(x: Any) -> Any:
    return jnp.sin(noted(x, "fwd")), x


def _bwd(x: Any, ct: Any) -> Any:
    noted(ct, "bwd")
    return (100.0 * ct,)


with_vjp.defvjp(_fwd, _bwd)

FUNCTIONS: dict[str, tuple[Any, dict[str, int]]] = {
    "straight": (straight, {"y": 1, "z": 1}),
    "jit": (jax.jit(straight), {"y": 1, "z": 1}),
    "constant": (constant, {"c": 1}),
    "scan": (scanned, {"c": 5, "t": 5}),
    "fori": (looped, {"c": 5}),
    "while": (whiled, {"c": 5}),
    "cond": (branched, {"b": 1}),
    "remat": (jax.checkpoint(straight), {"y": 1, "z": 1}),
    "remat everything": (
        jax.checkpoint(straight, policy=jax.checkpoint_policies.everything_saveable),
        {"y": 1, "z": 1},
    ),
    "remat dots": (jax.checkpoint(straight, policy=jax.checkpoint_policies.dots_saveable), {"y": 1, "z": 1}),
    "scan of remat": (remat_in_scan, {"y": 5, "z": 5}),
    "remat of scan": (jax.checkpoint(scanned), {"c": 5, "t": 5}),
}
UNARY: dict[str, Any] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "value_and_grad": jax.value_and_grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.float32(1),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.float32(1)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "grad(grad)": lambda f: jax.grad(jax.grad(f)),
    "grad(remat)": lambda f: jax.grad(jax.checkpoint(f)),
}
REVERSE = {"grad", "jit(grad)", "value_and_grad", "vjp", "jacrev", "hessian", "grad(jit)", "grad(grad)", "grad(remat)"}


def counts(logs: lox.logdict) -> dict[str, int]:
    return {k: len(v) if v.ndim else 1 for k, v in logs.items()}


QUICK = {"jit", "grad"}


@pytest.mark.sample(24)
@pytest.mark.parametrize("transform", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in UNARY])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_event_once(name: str, transform: str) -> None:
    f, expected = FUNCTIONS[name]
    if name == "while" and transform in REVERSE:
        pytest.skip("JAX has no reverse mode for while loops")
    g = UNARY[transform](f)
    _, logs = lox.spool(f, capacity=9)(X)
    _, transformed = lox.spool(g, capacity=9)(X)
    assert counts(transformed) == expected
    for key in logs:
        np.testing.assert_allclose(transformed[key], logs[key], rtol=1e-6)
    assert counts(jax.jit(lox.spool(g, capacity=9))(X)[1].compact()) == expected
    with lox.testing.capture() as events:
        jax.block_until_ready(g(X))
    assert {k: sum(k in e for e in events) for k in expected} == expected
    streamed: list[lox.logdict] = []
    lox.tap(g, streamed.append)(X)
    assert {k: sum(k in e for e in streamed) for k in expected} == expected


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "cond"])
def test_lanes(name: str) -> None:
    f, expected = FUNCTIONS[name]
    lanes = jnp.array([0.1, 0.2, 0.3])
    single = [lox.spool(f, capacity=9)(x)[1] for x in lanes]
    for spooled in (lox.spool(jax.vmap(f), capacity=9), jax.vmap(lox.spool(f, capacity=9))):
        for logs in (spooled(lanes)[1], jax.jit(spooled)(lanes)[1]):
            for n in range(3):
                for key in expected:
                    np.testing.assert_allclose(logs.lane(n)[key], single[n][key], rtol=1e-6)


def test_vmap_inside_puts_lanes_after_events_and_outside_before() -> None:
    f = lambda x: lax.scan(lambda c, t: (noted(c + t), None), x, jnp.arange(5.0))[0]  # noqa: E731
    lanes = jnp.zeros(3)
    assert lox.spool(jax.vmap(f))(lanes)[1]["v"].shape == (5, 3)
    assert jax.vmap(lox.spool(f))(lanes)[1]["v"].shape == (3, 5)


def test_nested_vmaps_outer_first_and_only_where_it_matters() -> None:
    def f(x: Any, y: Any, lr: Any) -> Any:
        lox.log({"xy": x * y, "x": x, "lr": lr})
        return x

    g = jax.vmap(jax.vmap(f, in_axes=(None, 0, None)), in_axes=(0, None, None))
    logs = lox.spool(g)(jnp.ones(2), jnp.ones(3), 0.1)[1]
    assert {k: v.shape for k, v in logs.items()} == {"xy": (2, 3), "x": (2,), "lr": ()}


def test_vmap_with_other_axes_names_and_sizes() -> None:
    logs = lox.spool(jax.vmap(noted, in_axes=1, out_axes=1))(jnp.ones((3, 5)))[1]
    assert logs["v"].shape == (5, 3)
    logs = lox.spool(jax.vmap(lambda x: noted(lax.psum(x, "i")), axis_name="i"))(jnp.arange(4.0))[1]
    assert float(logs["v"]) == 6.0


def test_vmapped_branches_that_log_alike_have_no_valid() -> None:
    logs = jax.jit(lox.spool(jax.vmap(branched)))(jnp.array([1.0, -2.0]))[1]
    assert logs.valid == {}
    assert logs["b"].tolist() == [1.0, 2.0]


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["literal", "constant", "closure", "jit", "cond", "inner scan"])
@pytest.mark.parametrize("transform", ["grad", "jit(grad)", "grad(jit)", "linearize", "grad(remat)", "jvp", "plain"])
def test_a_loop_invariant_log_counts_once_per_iteration(kind: str, transform: str) -> None:
    weight = jnp.float32(2.0)

    def invariant(x: Any) -> None:
        if kind == "literal":
            lox.log({"v": jnp.float32(0.1)})
        elif kind == "constant":
            lox.log({"v": weight * 1})
        elif kind == "closure":
            lox.log({"v": x * 1})
        elif kind == "jit":
            jax.jit(noted)(weight)
        elif kind == "cond":
            lax.cond(weight > 0, noted, noted, weight)
        else:
            lax.scan(lambda c, _: (noted(c), None), weight, None, length=1)

    def f(x: Any) -> Any:
        def body(c: Any, t: Any) -> Any:
            invariant(x)
            return jnp.sin(c) * x, None

        return lax.scan(body, x, jnp.arange(5.0))[0]

    g = UNARY[transform](f)
    assert lox.spool(g)(X)[1]["v"].shape == (5,)
    assert jax.jit(lox.spool(g))(X)[1]["v"].shape == (5,)
    with lox.testing.capture() as events:
        jax.block_until_ready(jax.jit(g)(X))
    assert len(events) == 5


@pytest.mark.slow
def test_a_while_loop_under_remat_reports_once() -> None:
    def f(x: Any) -> Any:
        steps = lax.while_loop(lambda c: c < 3, lambda c: noted(c) + 1, lax.stop_gradient(x) * 0)
        return jnp.sin(x * steps)

    for g in (
        jax.grad(jax.checkpoint(f)),
        jax.grad(lambda x: lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, None, length=1)[0]),
    ):
        assert lox.spool(g, capacity=9)(X)[1]["v"].tolist() == [0.0, 1.0, 2.0]
        with lox.testing.capture() as events:
            jax.block_until_ready(jax.jit(g)(X))
        assert len(events) == 3


def test_reverse_scan_reports_in_the_order_of_execution() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, t: (c + noted(t), None), x, jnp.arange(4.0), reverse=True, unroll=2)[0]

    assert lox.spool(f)(X)[1]["v"].tolist() == [3.0, 2.0, 1.0, 0.0]
    received: list[Any] = []
    lox.tap(f, lambda logs: received.append(float(logs["v"])))(X)
    assert received == [3.0, 2.0, 1.0, 0.0]


def test_loops_of_length_zero_and_one() -> None:
    def f(n: int) -> Any:
        return lambda x: lax.scan(lambda c, _: (noted(c), None), x, None, length=n)[0]

    assert lox.spool(f(0))(X)[1]["v"].shape == (0,)
    assert lox.spool(f(1))(X)[1]["v"].shape == (1,)
    assert lox.spool(f(0), reduce="mean")(X)[1].valid == {"v": False}


def test_call_sites_interleave_in_the_order_of_execution() -> None:
    def f(x: Any) -> Any:
        noted(jnp.float32(-1))

        def body(c: Any, t: Any) -> Any:
            noted(t)
            noted(t + 0.5)
            return c, None

        lax.scan(body, x, jnp.arange(2.0))
        return noted(jnp.float32(9))

    assert lox.spool(f)(X)[1]["v"].tolist() == [-1.0, 0.0, 0.5, 1.0, 1.5, 9.0]


def test_one_jitted_function_called_k_times_gives_k_events() -> None:
    inner = jax.jit(noted)
    f = lambda x: inner(x) + inner(x + 1) + inner(x + 2)  # noqa: E731
    for _ in range(2):
        assert lox.spool(f)(X)[1]["v"].tolist() == [0.5, 1.5, 2.5]
        assert lox.spool(jax.jit(f))(X)[1]["v"].tolist() == [0.5, 1.5, 2.5]


def test_a_log_in_the_condition_counts_once_per_evaluation() -> None:
    f = lambda x: lax.while_loop(lambda c: noted(c) < 3, lambda c: c + 1, x)  # noqa: E731
    assert lox.spool(f, capacity=10)(jnp.float32(0))[1]["v"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_stacked_events_before_a_while_loop_keep_their_place() -> None:
    def f(x: Any) -> Any:
        x = lax.scan(lambda c, _: (noted(c) + 1, None), x, None, length=2)[0]
        x = jax.jit(lambda x: lax.while_loop(lambda c: c < 4, lambda c: noted(c) + 1, x))(x)
        return noted(x)

    for g in (f, jax.jit(f)):
        assert lox.spool(g, capacity=10)(jnp.float32(0))[1]["v"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("fun", [with_jvp, with_vjp], ids=["jvp", "vjp"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("depth", ["direct", "jit", "scan"])
def test_differentiating_a_spooled_function_reports_the_primal(fun: Any, jit: bool, depth: str) -> None:
    def f(x: Any) -> Any:
        if depth == "jit":
            return jax.jit(fun)(2 * x)
        if depth == "scan":
            return lax.scan(lambda c, _: (fun(2 * c), None), x, None, length=1)[0]
        return fun(2 * x)

    g = jax.value_and_grad(lox.spool(f), has_aux=True)
    with lox.testing.capture() as escaped:
        (value, logs), grad = (jax.jit(g) if jit else g)(X)
        plain = jax.grad(lambda x: lox.nolog(f)(x))(X)
    assert escaped == []
    assert counts(logs) == {"primal": 1}
    assert float(value) == float(jnp.sin(X * 2))
    assert float(grad) == float(plain) == 200.0


@pytest.mark.parametrize("jit", [False, True])
def test_rules_that_log_stay_silent_though_the_function_does_not_log(jit: bool) -> None:
    @jax.custom_vjp
    def quiet(x: Any) -> Any:
        return jnp.sin(x)

    quiet.defvjp(_fwd, _bwd)
    f = lambda x: jax.jit(quiet)(x) + quiet(noted(x))  # noqa: E731
    g = jax.grad(lox.spool(f), has_aux=True)
    with lox.testing.capture() as escaped:
        grad, logs = (jax.jit(g) if jit else g)(X)
    assert escaped == []
    assert counts(logs) == {"v": 1}
    assert float(grad) == 200.0


def test_spooling_a_gradient_reports_the_rules() -> None:
    grad, logs = lox.spool(jax.grad(lambda x: with_vjp(2 * x)))(X)
    assert float(grad) == 200.0
    assert {k: float(v) for k, v in logs.items()} == {"fwd": 1.0, "bwd": 1.0}
    assert counts(lox.spool(jax.grad(lambda x: with_jvp(2 * x)))(X)[1]) == {"rule": 1}


@pytest.mark.parametrize(
    "flowing", [lambda f: lox.tap(f, lambda logs: None), lambda f: lambda x: lox.spool(f, keep_logs=True)(x)[0]]
)
def test_logs_that_flow_on_are_not_doubled_by_derivative_rules(flowing: Any) -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(noted(x))

    f.defjvp(lambda p, t: (f(*p), t[0]))

    @jax.custom_vjp
    def g(x: Any) -> Any:
        return jnp.sin(noted(x))

    g.defvjp(lambda x: (g(x), None), lambda _, ct: (ct,))
    for h in (f, g):
        for grad in (jax.grad, lambda h: jax.grad(jax.jit(h))):
            assert counts(lox.spool(grad(h))(X)[1]) == counts(lox.spool(grad(flowing(h)))(X)[1]) == {"v": 1}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("loop", ["none", "scan", "fori", "cond", "remat"])
@pytest.mark.parametrize("logs", [False, True])
def test_a_forward_rule_may_call_its_function(loop: str, logs: bool) -> None:
    f = jax.custom_vjp(lambda x: jnp.cos(noted(x) if logs else x))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (11 * ct,))

    def g(x: Any) -> Any:
        if loop == "scan":
            x = lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]
        elif loop == "fori":
            x = lax.fori_loop(0, 3, lambda _, c: f(c), x)
        else:
            wrap = {"none": lambda f: f, "cond": lambda f: lambda x: lax.cond(x > 0, f, f, x), "remat": jax.checkpoint}
            x = wrap[loop](lambda x: f(f(f(x))))(x)
        lox.log({"last": x})
        return x

    values = np.float32([1.0, np.cos(1.0), np.cos(np.cos(1.0))])
    for transformed in (
        lox.spool(jax.grad(g)),
        jax.jit(lox.spool(jax.grad(g))),
        lox.spool(jax.jit(jax.grad(g))),
        lox.spool(jax.grad(jax.jit(g))),
    ):
        grad, got = transformed(1.0)
        assert float(grad) == 11.0**3
        np.testing.assert_allclose(got.pop("last"), np.cos(values[-1]), rtol=1e-5)
        assert list(got) == ["v"] * logs
        if logs:
            np.testing.assert_allclose(got["v"], values, rtol=1e-5)


def test_rules_still_see_which_arguments_are_not_differentiated() -> None:
    @jax.custom_vjp
    def f(x: Any, y: Any) -> Any:
        return noted(x) * y

    def fwd(x: Any, y: Any) -> Any:
        assert x.perturbed and not y.perturbed
        return x.value * y.value, y.value

    f.defvjp(fwd, lambda y, ct: (ct * y, None), symbolic_zeros=True)
    for g in (lox.nolog(f), lambda x, y: lox.spool(f)(x, y)[0], lox.tap(f, lambda logs: None)):
        assert float(jax.grad(g)(1.0, 2.0)) == float(jax.jit(jax.grad(g))(1.0, 2.0)) == 2.0


@pytest.mark.slow
def test_gradients_flow_through_spooled_values() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, t: (noted(c * t), None), x, jnp.array([2.0, 3.0]))[0]

    def loss(x: Any, **options: Any) -> Any:
        return lox.spool(f, **options)(x)[1]["v"].sum()

    assert float(jax.grad(loss)(1.0)) == 2.0 + 6.0
    assert float(jax.grad(functools.partial(loss, reduce="mean"))(1.0)) == 4.0
    assert float(jax.grad(functools.partial(loss, reduce="max"))(1.0)) == 6.0
    assert float(jax.jit(jax.grad(functools.partial(loss, reduce="sum")))(1.0)) == 8.0


@pytest.mark.slow
def test_the_derivative_of_the_result_is_untouched() -> None:
    for f in (straight, scanned, branched, remat_in_scan):
        expected = jax.grad(lox.nolog(f))(X)
        got = jax.grad(lambda x, f=f: lox.spool(f)(x)[0])(X)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        tapped = jax.grad(lox.tap(f, lambda logs: None))(X)
        np.testing.assert_allclose(tapped, expected, rtol=1e-6)


# --- never stricter than the function -------------------------------------------------------------


def test_python_control_flow_on_concrete_values() -> None:
    def f(x: Any, n: int, mode: str, config: dict[str, Any]) -> Any:
        if x > 0 and mode == "up":
            noted(x)
        for i in range(n):
            x = x + config["add"]
            lox.log({"loop": x}, step=i)
        assert float(x) == float(np.asarray(x))
        return jnp.zeros(int(x))

    config = {"add": 1, "unhashable": [object()]}
    out, logs = lox.spool(f)(jnp.float32(2), 3, mode="up", config=config)
    assert out.shape == (5,) and str(logs) == "{'v': 2.0, 'loop': [3.0, 4.0, 5.0]}"
    received: list[str] = []
    assert lox.tap(f, lambda logs: received.append(str(logs)))(jnp.float32(2), 1, "up", config).shape == (3,)
    assert received == ["{'v': 2.0}", "{'loop': 3.0}"]
    assert lox.nolog(f)(jnp.float32(2), 1, "up", config).shape == (3,)


def test_closures_over_outer_tracers() -> None:
    @jax.jit
    def outer(y: Any) -> Any:
        def f(x: Any) -> Any:
            body = lambda c, _: (noted(c * y), None)  # noqa: E731
            return lax.scan(body, x, None, length=2)[0]

        return lox.spool(f)(jnp.float32(1.0))[1]["v"]

    assert outer(jnp.float32(3.0)).tolist() == [3.0, 9.0]
    assert jax.vmap(outer)(jnp.array([1.0, 2.0])).tolist() == [[1.0, 1.0], [2.0, 4.0]]
    assert float(jax.grad(lambda y: outer(y).sum())(3.0)) == 1.0 + 2 * 3.0


def test_results_that_are_not_arrays() -> None:
    out, _ = lox.spool(lambda x: {"a": noted(x), "b": None, "c": "text"})(X)
    assert out["c"] == "text" and out["b"] is None


@pytest.mark.slow
def test_without_jit_and_with_checks() -> None:
    with jax.disable_jit():
        assert lox.spool(scanned)(X)[1]["c"].shape == (5,)
        assert lox.spool(whiled)(X)[1]["c"].shape == (5,)  # a Python loop then: no capacity needed
    ragged = lambda x: lax.cond(x > 9, noted, lambda x: x, x)  # noqa: E731
    with jax.debug_nans(True):
        assert lox.spool(jax.jit(scanned))(X)[1]["c"].shape == (5,)
        assert lox.spool(ragged)(X)[1]["v"].shape == lox.spool(jax.jit(ragged))(X)[1]["v"].shape == (0,)
        assert lox.spool(ragged, reduce="mean")(X)[1].valid == {"v": False}
    with jax.checking_leaks():
        assert jax.jit(lox.spool(scanned))(X)[1]["c"].shape == (5,)


def test_x64() -> None:
    enabled = jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()
    with enabled:
        f = lambda x: lax.scan(lambda c, t: (noted(c + t), None), x, jnp.arange(3.0))[0]  # noqa: E731
        logs = lox.spool(f)(jnp.float64(0))[1]
        assert logs["v"].dtype == jnp.float64
        assert lox.spool(f, reduce="mean")(jnp.float64(0))[1]["v"].dtype == jnp.float64


def test_nested_transformations_of_lox() -> None:
    inner = lambda x: lox.spool(straight)(x)[0]  # noqa: E731
    assert lox.spool(inner)(X)[1] == {}
    keeping = lambda x: lox.spool(straight, keep_logs=True)(x)[0]  # noqa: E731
    assert counts(lox.spool(keeping)(X)[1]) == {"y": 1, "z": 1}
    received: list[Any] = []
    _, logs = lox.spool(lox.tap(lox.tap(scanned, received.append), received.append))(X)
    assert counts(logs) == {"c": 5, "t": 5} and len(received) == 20
    assert lox.spool(lox.nolog(straight, "y"))(X)[1].keys() == {"z"}


# --- primitives -----------------------------------------------------------------------------------

V = jnp.arange(1.0, 5.0)


def _custom_vmap(x: Any) -> Any:
    f = jax.custom_batching.custom_vmap(lambda x: noted(x * 2))
    f.def_vmap(lambda size, batched, x: (noted(x * 2), batched[0]))
    return f(x)


def _sequential_vmap(x: Any) -> Any:
    return jax.vmap(jax.custom_batching.sequential_vmap(lambda x: noted(x * 2)))(x)


def _odeint(x: Any) -> Any:
    from jax.experimental.ode import odeint

    return odeint(lambda y, t: noted(-y), x, jnp.array([0.0, 0.1]))


PRIMITIVES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "custom_gradient": (jax.custom_gradient(lambda x: (noted(x), lambda g: g)), (4,)),
    "switch": (lambda x: lax.switch(1, [noted, lambda x: noted(x + 1), noted], x), (4,)),
    "linear solve": (
        lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda m, b: noted(b / 2), symmetric=True),
        (4,),
    ),
    "root": (lambda x: lax.custom_root(lambda y: y - x, x, lambda f, x0: noted(x0), lambda g, y: y), (4,)),
    "root's function": (
        lambda x: lax.custom_root(lambda y: noted(y - x), x, lambda f, x0: f(x0), lambda g, y: y),
        (4,),
    ),
    "map in batches": (lambda x: lax.map(noted, x, batch_size=2), (2, 2)),
    "custom_vmap": (_custom_vmap, (4,)),
    "vmap of custom_vmap": (jax.vmap(_custom_vmap), (4,)),
    "sequential_vmap": (_sequential_vmap, (4,)),
    "closure_convert": (
        lambda x: jax.closure_convert(lambda y: noted(x + y), x)[0](x, *jax.closure_convert(lambda y: x + y, x)[1]),
        (4,),
    ),
    "associative_scan": (lambda x: lax.associative_scan(lambda a, b: a + noted(jnp.sum(b)) * 0 + b, x), (4,)),
}


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives(name: str) -> None:
    f, shape = PRIMITIVES[name]
    expected = lox.nolog(f)(V)
    for g in (f, jax.jit(f)):
        for spooled in (lox.spool(g), jax.jit(lox.spool(g))):
            out, logs = spooled(V)
            assert logs["v"].shape == shape
            np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIMITIVES)
def test_no_rule_counts_too_few_events(name: str) -> None:
    """What an interval or a buffer makes room for."""
    f, _ = PRIMITIVES[name]
    tally = _interpret.tally(jax.make_jaxpr(f)(V), "", lambda meta, scope: meta.keys)["v"]
    events = lox.spool(f)(V)[1].event_counts()["v"]
    assert tally.count == events if tally.exact else tally.count >= events


def twice_primitive(name: str, eager: str) -> Any:
    """A primitive that runs a jaxpr two times, one after the other."""
    twice_p = jax.extend.core.Primitive(name)
    twice_p.multiple_results = True

    def impl(*args: Any, jaxpr: Any) -> Any:
        run = jax.extend.core.jaxpr_as_fun(jaxpr)
        return run(*run(*args))

    if eager != "none":
        twice_p.def_impl(impl if eager == "own" else functools.partial(xla.apply_primitive, twice_p))
    twice_p.def_effectful_abstract_eval(lambda *args, jaxpr: (jaxpr.out_avals, jaxpr.effects))
    mlir.register_lowering(twice_p, mlir.lower_fun(impl, multiple_results=True))

    def batch(args: Any, dims: Any, jaxpr: Any) -> Any:
        mapped = jax.make_jaxpr(jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr), in_axes=dims))(*args)
        return twice_p.bind(*args, jaxpr=mapped), [0] * len(dims)

    batching.primitive_batchers[twice_p] = batch
    return twice_p


def doubled(x: Any) -> Any:
    lox.log({"x": x})
    return x * 2


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("eager", ["own", "as JAX", "none"])
@pytest.mark.parametrize("name", ["twice", "closed_call", "scan"])
def test_a_rule_for_a_primitive_of_ones_own(name: str, eager: str) -> None:
    """It has none at first, even if one of JAX's primitives has the same name."""
    twice_p = twice_primitive(name, eager)

    def f(x: Any) -> Any:
        return twice_p.bind(x, jaxpr=jax.make_jaxpr(doubled)(1.0))[0]

    with pytest.raises(lox.TransformError, match=f"it is inside `{name}`, whose body lox does not know"):
        lox.spool(f)(1.0)

    def count(params: Any, inside: Any) -> Any:
        return {key: tally + tally for key, tally in inside[0].items()}

    @_interpret.rule(twice_p, count=count)
    def _(frame: Any, primitive: Any, params: Any, args: Any) -> Any:
        return _interpret.interpret(frame, params["jaxpr"], _interpret.interpret(frame, params["jaxpr"], args))

    for g in f, jax.jit(f):
        out, logs = lox.spool(g)(1.0)
        assert out == 4
        assert logs["x"].tolist() == [1, 2]
    out, logs = lox.spool(jax.vmap(f))(jnp.arange(2.0))
    assert out.tolist() == [0, 4]
    assert logs["x"].tolist() == [[0, 1], [0, 2]]

    def loop(x: Any) -> Any:
        return lax.scan(lambda c, _: (f(c), None), x, length=3)

    _, logs = lox.spool(loop, interval=2)(1.0)
    assert logs["x"].tolist() == [1, 4, 16]
    blocks: list[Any] = []
    lox.tap(loop, blocks.append, buffer=4)(1.0)
    jax.effects_barrier()
    assert np.concatenate([block["x"] for block in blocks]).tolist() == [1, 2, 4, 8, 16, 32]


@pytest.mark.slow
def test_solvers() -> None:
    out, logs = lox.spool(_odeint, capacity=64)(V)
    with lox.testing.capture() as events:
        np.testing.assert_allclose(_odeint(V), out, rtol=1e-6)
    assert logs["v"].shape == (len(events), 4)
    grad = jax.grad(lambda x: lox.spool(_odeint, capacity=64)(x)[0].sum())(V)
    np.testing.assert_allclose(grad, jax.grad(lambda x: lox.nolog(_odeint)(x).sum())(V), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "fun"),
    [
        ("reduce", lambda x: lax.reduce(x, 0.0, lambda a, b: noted(a * b) + 1, (0,))),
        ("reduce_window", lambda x: lax.reduce_window(x, 0.0, lambda a, b: noted(a * b) + 1, (2,), (1,), "SAME")),
        ("scatter", lambda x: x.at[0].apply(lambda v: noted(jnp.sin(v)))),
    ],
)
def test_what_cannot_be_reached_is_an_error(name: str, fun: Any) -> None:
    for transformed in (lox.spool(fun), lox.tap(fun), lox.nolog(fun), jax.jit(lox.spool(fun))):
        with pytest.raises(lox.TransformError) as info:
            transformed(V)
        assert str(info.value).startswith(
            f"cannot reach the log of 'v': it is inside `{name}`, whose body lox does not know how to rewrite.\n"
            "  logged at test_transforms.py:"
        )


def test_a_primitive_without_a_rule_and_without_logs_is_left_alone() -> None:
    add = jax.custom_jvp(lambda a, b: a + b)
    add.defjvp(lambda p, t: (p[0] + p[1], t[0] + t[1]))
    f = lambda x: lax.reduce(noted(x), 0.0, add, (0,))  # noqa: E731
    for spooled in (lox.spool(jax.jit(f)), jax.jit(lox.spool(f))):
        assert float(spooled(V)[0]) == 10.0


# --- several devices ------------------------------------------------------------------------------


def mesh() -> Mesh:
    return Mesh(devices(8), ("i",))


def sharded(v: Any) -> Any:
    lox.log({"local": v.sum()})
    lox.log({"total": lax.psum(v.sum(), "i")})
    return lax.scan(lambda c, t: (noted(c.sum() * t, "scan") * 0 + c, None), v, jnp.arange(3.0))[0]


@pytest.mark.parametrize("jit", [False, True])
def test_shard_map(jit: bool) -> None:
    f = lox.spool(jax.shard_map(sharded, mesh=mesh(), in_specs=P("i"), out_specs=P("i")))
    out, logs = (jax.jit(f) if jit else f)(jnp.arange(16.0))
    assert {k: v.shape for k, v in logs.items()} == {"local": (8,), "total": (), "scan": (3, 8)}
    assert out.tolist() == list(range(16))
    assert logs["local"].tolist() == [4.0 * n + 1 for n in range(8)]
    assert float(logs["total"]) == 120.0


def test_shard_map_in_a_loop_reduced() -> None:
    f = jax.shard_map(sharded, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))
    g = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]  # noqa: E731
    logs = jax.jit(lox.spool(g, reduce="sum"))(jnp.arange(16.0))[1]
    assert logs["local"].tolist() == [2 * (4.0 * n + 1) for n in range(8)]
    assert float(logs["total"]) == 240.0


@pytest.mark.slow
def test_shard_map_whose_devices_loop_differently() -> None:
    def f(v: Any) -> Any:
        return lax.while_loop(lambda c: (c < 3).all(), lambda c: noted(c) + 1, v)

    g = jax.shard_map(f, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))
    logs = lox.spool(g, capacity=5)(jnp.arange(8.0))[1]
    assert [logs.lane(n)["v"].ravel().tolist() for n in range(4)] == [[0.0, 1.0, 2.0], [1.0, 2.0], [2.0], []]


def test_shard_map_tapped_and_untouched() -> None:
    f = jax.shard_map(sharded, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))
    received: list[Any] = []
    jax.block_until_ready(jax.jit(lox.tap(f, received.append))(jnp.arange(16.0)))
    jax.effects_barrier()
    assert [logs["local"].tolist() for logs in received if "local" in logs] == [[4.0 * n + 1 for n in range(8)]]
    with lox.testing.capture() as events:
        jax.block_until_ready(jax.jit(f)(jnp.arange(16.0)))
    assert sum("scan" in logs for logs in events) == 24


def test_shard_map_over_several_axes_and_partly_manual() -> None:
    two = Mesh(devices(8).reshape(4, 2), ("a", "b"))

    def f(v: Any) -> Any:
        lox.log({"local": v.sum(), "a": lax.psum(v.sum(), "b"), "all": lax.psum(v.sum(), ("a", "b"))})
        return v

    g = jax.shard_map(f, mesh=two, in_specs=P("a", "b"), out_specs=P("a", "b"))
    logs = jax.jit(lox.spool(g))(jnp.ones((8, 4)))[1]
    assert {k: v.shape for k, v in logs.items()} == {"local": (8,), "a": (4,), "all": ()}
    partly = jax.shard_map(
        lambda v: noted(v.sum()) * 0 + v, mesh=two, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    assert jax.jit(lox.spool(partly))(jnp.ones((8, 4)))[1]["v"].shape == (4,)


def test_gradient_of_shard_map() -> None:
    def f(v: Any) -> Any:
        return lax.psum(jnp.sin(noted(v.sum()) * 0 + v).sum(), "i")

    g = jax.shard_map(f, mesh=mesh(), in_specs=P("i"), out_specs=P())
    assert jax.jit(lox.spool(jax.grad(g)))(jnp.arange(16.0))[1]["v"].shape == (8,)


def test_sharded_arrays() -> None:
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh(), P("i")))
    inner = jax.jit(lambda x: noted(x) * 2, out_shardings=NamedSharding(mesh(), P()))
    out, logs = jax.jit(lox.spool(lambda x: inner(x * 1)))(x)
    assert out.sharding.is_fully_replicated
    assert logs["v"].tolist() == x.tolist()
    received: list[Any] = []
    jax.block_until_ready(jax.jit(lox.tap(lambda x: noted(x.sum()), received.append))(x))
    jax.effects_barrier()
    assert [float(logs["v"]) for logs in received] == [120.0]


def test_explicit_sharding() -> None:
    from jax.sharding import AxisType

    explicit = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,), devices=devices(8))
    with jax.set_mesh(explicit) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(explicit):
        x = jax.device_put(jnp.arange(16.0), P("i"))
        f = lambda x: lax.scan(lambda c, _: (noted(jnp.sin(c)), None), x, None, length=3)[0]  # noqa: E731
        stacked = jax.jit(lox.spool(f))(x)[1]["v"]
        mean = jax.jit(lox.spool(f, reduce="mean"))(x)[1]["v"]
        looped = lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, noted(s[1]) * 2), (0, x))  # noqa: E731
        buffered = jax.jit(lox.spool(looped, capacity=4))(x)[1]["v"]
    assert stacked.shape == (3, 16) and mean.shape == (16,) and buffered.shape == (4, 16)
    np.testing.assert_allclose(mean, np.asarray(stacked).mean(0), rtol=1e-6)


# --- what JAX evaluates, optimizes or offloads in special ways -------------------------------------


def _optimized() -> Any:
    f = jax.custom_vjp(lambda x: noted(2 * x))

    def fwd(x: Any) -> Any:
        lox.log({"fwd": x})
        return 2 * x, x

    def bwd(x: Any, g: Any) -> Any:
        lox.log({"bwd": g * x})
        return (2 * g,)

    f.defvjp(fwd, bwd, optimize_remat=True)
    return f


@pytest.mark.parametrize("jit", [False, True])
def test_a_forward_rule_with_optimize_remat(jit: bool) -> None:
    f = _optimized()
    grad = jax.jit(jax.grad(f)) if jit else jax.grad(f)
    expected = {"fwd": f32(3), "bwd": f32(3)}
    received: list[Any] = []
    for transform in (lox.spool, lambda g: jax.jit(lox.spool(g))):
        out, logs = transform(grad)(3.0)
        assert out == 2.0
        same(logs, expected)
    assert lox.tap(grad, received.append)(3.0) == 2.0
    same([dict(x) for x in received], [{"fwd": f32(3)}, {"bwd": f32(3)}])
    _, logs = lox.spool(jax.vmap(grad))(jnp.arange(2.0))
    same(logs, {"fwd": f32([0, 1]), "bwd": f32([0, 1])})
    assert lox.spool(lox.nolog(grad))(3.0) == (2.0, {})
    # Without a backward pass the rule is still called, although JAX could call the function.
    forward = lambda x: jax.vjp(f, x)[0]  # noqa: E731
    out, logs = lox.spool(jax.jit(forward) if jit else forward)(3.0)
    assert out == 6.0
    same(logs, {"fwd": f32(3)})
    assert "log" not in str(jax.make_jaxpr(lox.nolog(forward))(3.0))
    assert lox.spool(lox.nolog(forward))(3.0) == (6.0, {})


def test_eager_remat_asks_for_no_more_than_jax() -> None:
    double_p = jax.extend.core.Primitive("double")  # it has no lowering, so nothing that contains it can be compiled
    double_p.def_impl(lambda x: 2 * jnp.asarray(x))
    double_p.def_abstract_eval(lambda x: x)

    def f(x: Any) -> Any:
        y = double_p.bind(x)
        lox.log({"y": y})
        return lax.scan(lambda c, _: (noted(c + 1), None), y, length=2)[0]

    with_rule = jax.custom_batching.custom_vmap(f)
    with_rule.def_vmap(lambda size, batched, x: (x, batched[0]))
    for layer in (jax.checkpoint(f), with_rule):
        received: list[Any] = []
        for _ in range(2):
            out, logs = lox.spool(layer)(1.0)
            assert out == 4.0
            same(logs, {"y": f32(2), "v": f32([3, 4])})
        assert lox.tap(layer, received.append)(1.0) == 4.0
        same([dict(x) for x in received], [{"y": f32(2)}, {"v": f32(3)}, {"v": f32(4)}])
        assert lox.spool(lox.nolog(layer))(1.0) == (4.0, {})


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_jet(jit: bool, capsys: Any) -> None:
    from jax.experimental.jet import jet

    def f(x: Any) -> Any:
        lox.log({"x": x}, step=3.0)
        y = lox.log_grad("dy", x * x)
        lox.log({"y": y})
        return y * y

    g = jax.jit(f) if jit else f
    expected = (16.0, [32.0, 48.0])  # x**4 and its derivatives

    def taylor(fun: Any) -> Any:
        return lambda x: jet(fun, (x,), ((1.0, 0.0),))

    def check(out: Any) -> None:
        np.testing.assert_allclose(np.asarray(jax.tree.leaves(out)), np.asarray(jax.tree.leaves(expected)), rtol=1e-5)

    check(taylor(g)(2.0))
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == ["{'x': 2.0} step=3.0", "{'y': 4.0}"]
    for spooled in (lox.spool(taylor(g)), jax.jit(lox.spool(taylor(g)))):
        out, logs = spooled(2.0)
        check(out)
        same(logs, {"x": f32(2), "y": f32(4)})
        assert logs.step["x"] == 3
    (value, logs), (terms, log_terms) = taylor(lox.spool(g))(2.0)
    check((value, terms))
    same(logs, {"x": f32(2), "y": f32(4)})
    np.testing.assert_allclose(log_terms["y"], [4.0, 2.0], rtol=1e-5)
    received: list[Any] = []
    check(taylor(lox.tap(g, received.append))(2.0))
    check(lox.tap(taylor(g), received.append)(2.0))
    same([dict(x) for x in received], [{"x": f32(2)}, {"y": f32(4)}] * 2)
    check(taylor(lox.nolog(g))(2.0))
    check(lox.nolog(taylor(g))(2.0))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_jet_is_imported_only_when_used() -> None:
    code = "import sys, lox; lox.log({'x': 1}); assert 'jax.experimental.jet' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_checkpoint_policies_that_offload() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: Any) -> Any:
        return jnp.cos(noted(checkpoint_name(jnp.sin(x), "a")))

    f = jax.grad(lambda x: lax.scan(lambda c, _: (layer(c), None), x, length=2)[0])
    expected = jax.jit(lox.nolog(f))(0.5)
    values = [np.sin(f32(0.5)), np.sin(np.cos(np.sin(f32(0.5))))]
    for transform in (lambda g: jax.jit(lox.spool(g)), lambda g: lox.spool(jax.jit(g))):
        out, logs = transform(f)(0.5)
        np.testing.assert_allclose((out, *logs["v"]), (expected, *values), rtol=1e-6)
    for options in ({}, {"buffer": 2}):
        for transform in (lambda g: jax.jit(lox.tap(g, received.append, **options)), None):  # noqa: B023
            received: list[Any] = []
            tapped = transform(f) if transform else lox.tap(jax.jit(f), received.append, **options)
            np.testing.assert_allclose(tapped(0.5), expected, rtol=1e-6)
            jax.effects_barrier()
            np.testing.assert_allclose(np.concatenate([np.ravel(x["v"]) for x in received]), values, rtol=1e-6)
    with lox.testing.capture() as events:
        np.testing.assert_allclose(jax.jit(f)(0.5), expected, rtol=1e-6)
        jax.effects_barrier()
    np.testing.assert_allclose([x["v"] for x in events], values, rtol=1e-6)


# --- one model, trained and evaluated under vmaps of different size ---


def hidden(w: Any, x: Any) -> Any:
    lox.log({"h": w * x})
    return w * x


def trained_and_evaluated(w: Any, scoped: bool = False) -> Any:
    """As with Equinox: the model is a function of one example, mapped over 4 to train and over 6 to evaluate."""

    def loss(w: Any) -> Any:
        return (jax.vmap(lambda x: hidden(w, x))(jnp.arange(4.0)) ** 2).mean()

    def step(w: Any, i: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w)
        lox.log({"loss": value}, step=i)
        return w - 0.125 * gradient, None

    w, _ = lax.scan(step, w, jnp.arange(2))
    scope = lox.scope("eval") if scoped else contextlib.nullcontext()
    with scope:
        return jax.vmap(lambda x: hidden(w, x))(jnp.arange(6.0)).mean()


def unrolled_in_environments(w: Any, scoped: bool = False) -> Any:
    """As with Brax: environments are stepped together inside a loop, and more of them to evaluate the policy."""

    def unroll(count: int, length: int) -> Any:
        def step(state: Any, _: Any) -> Any:
            return jax.vmap(lambda s: s + hidden(w, s))(state), None

        return lax.scan(step, jnp.arange(count, dtype=jnp.float32), None, length)[0]

    train = unroll(4, 3)
    scope = lox.scope("eval") if scoped else contextlib.nullcontext()
    with scope:
        return train.sum() + unroll(6, 2).sum()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("f", [trained_and_evaluated, unrolled_in_environments])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_one_key_under_two_vmaps(f: Any, jit: bool, tmp_path: Any) -> None:
    plain = jax.jit(f) if jit else f
    scoped = functools.partial(f, scoped=True)
    scoped = jax.jit(scoped) if jit else scoped
    for options in ({}, {"reduce": "mean"}, {"interval": 2}, {"capacity": 9}):
        with pytest.raises(
            lox.MismatchError, match=r"'h' is logged under different vmaps[^\n]*\n  4 lanes, and then 6"
        ):
            lox.spool(plain, **options)(1.0)
        logs = lox.spool(scoped, **options)(1.0)[1]
        assert logs["h"].shape[-1] == 4 and logs["eval/h"].shape[-1] == 6
    events: list[Any] = []
    lox.tap(plain, events.append, argnames="h")(1.0)
    sizes = [len(e["h"]) for e in events]
    assert sizes == sorted(sizes) and set(sizes) == {4, 6}
    blocks: list[Any] = []
    lox.tap(plain, blocks.append, argnames="h", buffer=100)(1.0)
    assert [x.tolist() for b in blocks for x in b["h"]] == [e["h"].tolist() for e in events]
    for options in ({}, {"buffer": 3}):
        path = tmp_path / str(options)
        with lox.SaveLogger(path) as logger:
            logger.tap(plain, logger.init(jax.random.key(0)), **options)(1.0)
        with pytest.warns(lox.LoxWarning, match="the events of 'h' do not fit into one array"):
            logs = lox.load(path, jax.random.key(0))
        assert logs["h@4"].tolist() == [e["h"].tolist() for e in events if len(e["h"]) == 4]
        assert logs["h@6"].tolist() == [e["h"].tolist() for e in events if len(e["h"]) == 6]


def test_one_key_under_one_vmap_called_again() -> None:
    def f(n: int) -> None:
        for i in range(n):
            jax.vmap(lambda x, i=i: hidden(i, x))(jnp.arange(3.0))
        lox.log({"h": 7.0})  # the same in all lanes

    assert lox.spool(f)(2)[1]["h"].tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [7.0, 7.0, 7.0]]
    assert lox.spool(f, reduce="max")(2)[1]["h"].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["cond", "cond in scan", "scan", "while"])
@pytest.mark.parametrize(
    "options",
    [{}, {"interval": 2}, {"capacity": 9}, {"capacity": 9, "interval": 2}, {"reduce": "sum"}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("buffer", [None, 3], ids=lambda n: f"buffer={n}")
def test_keys_in_another_order(loop: str, options: dict[str, Any], buffer: int | None) -> None:
    """Two lines that log the same keys in different orders are traced, and every key has the events of both."""

    def ab(x: Any) -> None:
        lox.log({"a": x, "b": x + 0.5})

    def ba(x: Any) -> None:
        lox.log({"b": x + 0.5, "a": x})

    def branch(x: Any, swap: Any) -> Any:
        return jax.lax.cond(swap, lambda x: (ba(x), x)[1], lambda x: (ab(x), x)[1], x)

    def body(i: Any, x: Any) -> Any:
        if loop == "cond in scan":
            return branch(x + 1, i % 2 == 0)
        ab(x + 1)
        ba(x + 2)
        return x + 2

    def f(x: Any) -> Any:
        if loop == "cond":
            return branch(branch(x, x > 0), x > 5)
        if loop == "while":
            return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[0], c[1])), (0, x))[1]
        return jax.lax.scan(lambda x, i: (body(i, x), None), x, jnp.arange(4))[0]

    if loop == "while" and "reduce" not in options:
        options = {**options, "capacity": 12}
    x = jnp.float32(1)
    with jax.disable_jit(), lox.testing.capture() as events:
        f(x)
    expected = {key: [float(e[key]) for e in events if key in e] for key in ("a", "b")}
    every = options.get("interval", 1)
    expected = {key: values[::every] for key, values in expected.items()}
    if options.get("reduce"):
        expected = {key: [sum(values)] for key, values in expected.items()}
    received: list[Any] = []
    if buffer is None:
        _, logs = lox.spool(f, **options)(x)
        got = {key: np.ravel(logs.compact()[key]).tolist() for key in expected}
        assert got == expected
    options = {name: value for name, value in options.items() if name != "capacity"}
    jax.jit(lox.tap(f, received.append, buffer=buffer, **options))(x)
    jax.effects_barrier()
    got = {key: [v for logs in received if key in logs for v in np.ravel(logs[key]).tolist()] for key in expected}
    assert (got if "reduce" not in options else {k: [sum(v)] for k, v in got.items()}) == expected


@pytest.mark.parametrize("removed", [lox.nolog, lambda f: lox.keep(f, "kept")], ids=["nolog", "keep"])
def test_results_that_jax_does_not_know_are_returned_as_they_are(removed):
    """As from `spool`, `tap` and the function itself: a function, a string, a number, None."""

    def f(x):
        lox.log({"x": x})
        lox.log({"kept": x}, explicit=True)
        return {"x": 2 * x, "fun": jnp.tanh, "name": "f", "number": 3, "none": None, "array": jnp.zeros(2)}

    @jax.jit
    def g(x):
        out = removed(f)(x)
        assert out["fun"] is jnp.tanh and out["name"] == "f" and out["number"] == 3 and out["none"] is None
        assert isinstance(out["number"], int)
        return out["fun"](out["x"]) + out["array"]

    assert g(1.0).tolist() == pytest.approx([np.tanh(2.0)] * 2)
    assert jax.vmap(g)(jnp.ones(3)).shape == (3, 2)
    assert jax.jacobian(g)(1.0).shape == (2,)


# --- constants ------------------------------------------------------------------------------------

WEIGHTS = jnp.arange(1.0, 4.0)


def jitted_with_a_constant(x):
    @jax.jit
    def inner(x):
        lox.log({"x": x})
        return x * WEIGHTS.sum()

    return inner(x)


def scanned_with_a_constant(x):
    def body(x, _):
        lox.log({"x": x})
        return x * WEIGHTS.sum(), None

    return lax.scan(body, x, None, length=3)[0]


def branched_with_a_constant(x):
    def logged(x):
        lox.log({"x": x})
        return x * WEIGHTS.sum() + np.ones((), np.float32)

    return lax.cond(x > 0, logged, lambda x: x, x)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
@pytest.mark.parametrize("fun", [jitted_with_a_constant, scanned_with_a_constant, branched_with_a_constant])
def test_functions_that_close_over_arrays(fun, wrap):
    with lox.testing.capture():
        result = wrap(fun)(2.0)
    received = []
    assert lox.nolog(wrap(fun))(2.0) == lox.tap(wrap(fun), received.append)(2.0) == result
    again, logs = lox.spool(wrap(fun))(2.0)
    jax.effects_barrier()
    assert again == result
    assert np.ravel(logs["x"]).tolist() == [float(event["x"]) for event in received]


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="JAX has no remat3")
def test_the_new_remat_behind_a_flag():
    @jax.checkpoint
    def fun(x):
        lox.log({"x": x})
        return jnp.sin(jnp.sin(x))

    jax.config.update("jax_remat3", True)
    try:
        result, logs = lox.spool(jax.grad(fun))(1.0)
        assert lox.nolog(jax.grad(fun))(1.0) == result
    finally:
        jax.config.update("jax_remat3", False)
    assert result == pytest.approx(np.cos(np.sin(1.0)) * np.cos(1.0)) and str(logs) == "{'x': 1.0}"
