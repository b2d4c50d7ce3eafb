"""Backward rules that call a function again: its events count once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lox
import lox.testing

pytestmark = pytest.mark.slow


def noted(x: Any, key: str = "v") -> Any:
    lox.log({key: x})
    return x


def shrink(x: Any, i: Any) -> Any:
    lox.log({"error": x}, step=i)
    return x * 0.5


def recomputing(step: Any, how: str) -> Any:
    """A loop of three steps whose backward rule calls each step again, as solver libraries do."""

    def loop(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, x: step(x, i), x)

    def pull_back(x: Any, i: Any, ct: Any) -> Any:
        return jax.vjp(lambda y: step(y, i), x * jnp.array([1.0, 0.5, 0.25])[i])[1](ct)[0]

    def backward(x: Any, ct: Any) -> Any:
        noted(ct, "cotangent")
        noted(x, "residual")
        if how == "python":
            for i in (2, 1, 0):
                ct = pull_back(x, i, ct)
        elif how == "scan":
            ct = lax.scan(lambda ct, i: (pull_back(x, i, ct), None), ct, jnp.array([2, 1, 0]))[0]
        elif how == "while":
            start = (2, lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, step(c[1], c[0])), (0, x)), ct)
            ct = lax.while_loop(lambda c: c[0] >= 0, lambda c: (c[0] - 1, c[1], pull_back(x, c[0], c[2])), start)[2]
        else:
            ct = jax.checkpoint(lambda x, ct: jax.vjp(loop, x)[1](ct)[0])(x, ct)
        return (ct,)

    solve = jax.custom_vjp(loop)
    solve.defvjp(lambda x: (loop(x), x), backward)
    return solve


AROUND: dict[str, Any] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda x: f(2 * x), x),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("how", ["python", "scan", "while", "remat"])
@pytest.mark.parametrize("step", [shrink, jax.jit(shrink)], ids=["step", "jitted step"])
def test_what_a_backward_rule_recomputes_is_not_an_event(around: str, how: str, step: Any) -> None:
    f = recomputing(step, how)
    g = AROUND[around](f)
    for grad in (jax.grad(g), jax.jit(jax.grad(g))):
        out, logs = lox.spool(grad, capacity=9)(jnp.float32(8))
        logs = logs.compact()
        assert float(out) == 0.125
        assert logs["error"].reshape(-1).tolist() == [8.0, 4.0, 2.0]
        assert logs.step["error"].tolist() == [0, 1, 2]
        # Events from the rule's own lines stay.
        assert (logs["cotangent"].reshape(()), logs["residual"].reshape(())) == (1.0, 8.0)


def test_recomputation_reaches_neither_a_tap_nor_the_console() -> None:
    f = recomputing(shrink, "scan")
    for grad in (jax.grad(f), jax.jit(jax.grad(f)), jax.jit(jax.value_and_grad(jax.jit(f)))):
        received: list[Any] = []
        jax.block_until_ready(lox.tap(grad, received.append, "error")(jnp.float32(8)))
        jax.effects_barrier()
        with lox.testing.capture() as events:
            jax.block_until_ready(grad(jnp.float32(8)))
        expected = [(8.0, 0), (4.0, 1), (2.0, 2)]
        assert [(float(e["error"]), int(e.step["error"])) for e in received] == expected
        assert [(float(e["error"]), int(e.step["error"])) for e in events if "error" in e] == expected
        assert lox.spool(grad, "error", reduce="sum")(jnp.float32(8))[1]["error"] == 14.0
    # Differentiating the spooled function reports the primal, as always.
    assert list(jax.grad(lox.spool(f), has_aux=True)(jnp.float32(8))[1]) == ["error"]


def test_a_tap_inside_a_recomputed_function() -> None:
    for buffer in (None, 2):
        received: list[Any] = []
        step = lox.tap(shrink, received.append, buffer=buffer)
        f = recomputing(step, "scan")
        for grad in (jax.grad(f), jax.jit(jax.grad(f))):
            jax.block_until_ready(lox.nolog(grad)(jnp.float32(8)))
            jax.effects_barrier()
            assert [x for e in received for x in e["error"].reshape(-1).tolist()] == [8.0, 4.0, 2.0]
            received.clear()


def test_recomputation_in_lanes() -> None:
    f = recomputing(shrink, "while")
    xs = jnp.array([8.0, 16.0])
    for g in (jax.vmap(jax.grad(f)), jax.grad(lambda x: jax.vmap(f)(x).sum())):
        logs = lox.spool(g, "error", capacity=9)(xs)[1]
        assert [logs.lane(i)["error"].tolist() for i in range(2)] == [[8.0, 4.0, 2.0], [16.0, 8.0, 4.0]]


def test_a_helper_that_logs_values_and_cotangents_alike() -> None:
    square = jax.jit(lambda x: x * x)

    def check(x: Any) -> Any:
        noted(square(x))
        return x

    f = jax.custom_vjp(lambda x: 2 * x)
    f.defvjp(lambda x: (2 * check(x), x), lambda x, ct: (2 * check(ct) + 0 * x,))
    branching = jax.custom_vjp(lambda x: 2 * x)
    branching.defvjp(lambda x: (2 * check(x), x), lambda x, ct: (2 * check(ct) if ct > 0 else ct,))  # if it can
    conditional = jax.custom_vjp(lambda x: 2 * x)
    conditional.defvjp(
        lambda x: (2 * check(x), x), lambda x, ct: (lax.cond(ct > 0, lambda x: check(x) * 0 + 2, lambda x: x, x),)
    )
    looped = jax.custom_vjp(lambda x: 2 * x)
    looped.defvjp(
        lambda x: (2 * check(x), x),
        lambda x, ct: (2 * lax.scan(lambda c, _: (check(c), None), ct, None, length=1)[0],),
    )
    for g, second in ((f, 1.0), (branching, 1.0), (conditional, 9.0), (looped, 1.0)):
        for _ in range(2):
            grad, logs = lox.spool(jax.grad(g))(jnp.float32(3))
            assert float(grad) == 2.0
            assert logs["v"].tolist() == [9.0, second]
    grad, logs = jax.jit(lox.spool(jax.grad(f)))(jnp.float32(3))
    assert logs["v"].tolist() == [9.0, 1.0]


def test_nested_rules_that_recompute() -> None:
    inner = recomputing(shrink, "scan")

    def outer_fwd(x: Any) -> Any:
        return inner(x), x

    outer = jax.custom_vjp(inner)
    outer.defvjp(outer_fwd, lambda x, ct: jax.vjp(inner, x)[1](ct))
    through = jax.custom_vjp(inner)
    through.defvjp(lambda x: jax.vjp(inner, x), lambda pull, ct: pull(ct))
    for f in (outer, through, lambda x: outer(inner(x) * 8)):
        grad, logs = lox.spool(jax.grad(f), "error")(jnp.float32(8))
        assert float(grad) == 0.125
        assert logs["error"].tolist()[:3] == [8.0, 4.0, 2.0]
    assert lox.spool(jax.grad(lambda x: outer(inner(x) * 8)), "error")(jnp.float32(8))[1]["error"].shape == (6,)


def test_a_forward_rule_that_does_not_log_leaves_it_to_the_backward_rule() -> None:
    f = jax.custom_vjp(lambda x: shrink(x, 0))
    f.defvjp(lambda x: (x * 0.5, x), lambda x, ct: jax.vjp(lambda x: shrink(x, 0), x)[1](ct))
    assert float(lox.spool(jax.grad(f))(jnp.float32(8))[1]["error"]) == 8.0
