"""log_grad: every cotangent once, in the backward pass, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import f32, i32, same
from jax import lax

import lox
import lox.testing

X = jnp.float32(0.3)
T = jnp.arange(1.0, 4.0)


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, t: (jnp.sin(lox.log_grad("ct", c)) * t, None), x, T)[0]


def expected() -> list[float]:
    """Return the cotangents at the three iterates, last first."""
    iterates = [X]
    for t in T[:-1]:
        iterates.append(jnp.sin(iterates[-1]) * t)
    cts, ct = [], jnp.float32(1.0)
    for c, t in zip(iterates[::-1], T[::-1], strict=True):
        ct = ct * t * jnp.cos(c)
        cts.append(float(ct))
    return cts


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "grad",
    [
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
        jax.value_and_grad,
        lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    ],
)
def test_every_cotangent_once_in_the_order_of_the_backward_pass(grad: Any) -> None:
    for spooled in (lox.spool(grad(scanned)), jax.jit(lox.spool(grad(scanned)))):
        np.testing.assert_allclose(spooled(X)[1]["ct"], expected(), rtol=1e-6)
    received: list[float] = []
    lox.tap(grad(scanned), lambda logs: received.append(float(logs["ct"])))(X)
    np.testing.assert_allclose(received, expected(), rtol=1e-6)
    with lox.testing.capture() as events:
        jax.block_until_ready(jax.jit(grad(scanned))(X))
    assert len(events) == 3


def test_nothing_without_a_backward_pass() -> None:
    for f in (scanned, jax.jit(scanned), lambda x: jax.jvp(scanned, (x,), (x,)), jax.jacfwd(scanned)):
        assert lox.spool(f)(X)[1] == {}
        with lox.testing.capture() as events:
            jax.block_until_ready(f(X))
        assert events == []


@pytest.mark.slow
def test_values_and_gradients_are_untouched() -> None:
    plain = lambda x: lax.scan(lambda c, t: (jnp.sin(c) * t, None), x, T)[0]  # noqa: E731
    assert float(scanned(X)) == float(plain(X))
    with lox.testing.capture():
        np.testing.assert_allclose(jax.grad(scanned)(X), jax.grad(plain)(X), rtol=1e-6)
        np.testing.assert_allclose(jax.hessian(scanned)(X), jax.hessian(plain)(X), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_differentiating_a_transformed_function_stays_silent(jit: bool) -> None:
    for transform in (lambda f: lambda x: lox.spool(f)(x)[0], lox.nolog, lambda f: lox.tap(f, print)):
        g = jax.grad(transform(scanned))
        with lox.testing.capture() as escaped:
            grad = (jax.jit(g) if jit else g)(X)
        assert escaped == []
        assert float(grad) != 0
    kept = jax.grad(lox.nolog(scanned, "other"))
    with lox.testing.capture() as events:
        (jax.jit(kept) if jit else kept)(X)
    assert len(events) == 3


def test_lanes() -> None:
    xs = jnp.array([0.1, 0.2])
    assert lox.spool(jax.vmap(jax.grad(scanned)))(xs)[1]["ct"].shape == (3, 2)
    assert jax.vmap(lox.spool(jax.grad(scanned)))(xs)[1]["ct"].shape == (2, 3)


def test_pytrees_with_arrays_that_have_no_gradient() -> None:
    def f(w: Any) -> Any:
        tree = lox.log_grad("g", {"w": w, "n": jnp.arange(2), "b": (2 * w,)}, tags="grads", reduce="sum")
        return (tree["w"] * 3 + tree["b"][0]).sum() + tree["n"].sum().astype(w.dtype)

    grad, logs = lox.spool(jax.grad(f), tags="grads")(jnp.ones(2))
    assert grad.tolist() == [5.0, 5.0]
    assert logs["g"]["w"].tolist() == [3.0, 3.0] and logs["g"]["b"][0].tolist() == [1.0, 1.0]
    assert logs["g"]["n"] is None


def test_what_has_no_gradient_is_an_error() -> None:
    with pytest.raises(lox.LogTypeError, match=r"^`lox.log_grad` cannot log 'g': 3 holds no floating-point array\.$"):
        lox.log_grad("g", 3)
    with pytest.raises(lox.LogTypeError, match=r"^`lox.log_grad` got the name 3: names are strings\.$"):
        lox.log_grad(3, 1.0)  # type: ignore[arg-type]


# --- steps ---


def stepped(x: Any) -> Any:
    return lax.scan(
        lambda c, i: (lox.log_grad("ct", 2 * c, step=i, time=i.astype(x.dtype) / 2), None), x, jnp.arange(3)
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grad", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f)), lambda f: jax.grad(jax.remat(f))]
)
def test_steps_come_with_the_cotangents_in_the_order_of_the_backward_pass(grad: Any) -> None:
    for spooled in (lox.spool(grad(stepped)), jax.jit(lox.spool(grad(stepped)))):
        grad_x, logs = spooled(X)
        assert float(grad_x) == 8.0
        same(logs, {"ct": f32([1, 2, 4])})
        same(logs.step, {"ct": i32([2, 1, 0])})
        same(logs.time, {"ct": f32([1, 0.5, 0])})


def test_steps_and_lanes() -> None:
    def each(xs: Any, steps: Any) -> Any:
        return jax.vmap(lambda x, i: lox.log_grad("ct", x**2, step=i))(xs, steps).sum()

    xs, steps = jnp.arange(1.0, 4.0), jnp.array([5, 6, 7])
    _, inside = lox.spool(jax.grad(each))(xs, steps)
    _, outside = lox.spool(jax.vmap(jax.grad(lambda x, i: lox.log_grad("ct", x**2, step=i))))(xs, steps)
    for logs in inside, outside:
        same(logs.step["ct"], i32([5, 6, 7]))
        same(logs.lane(1).step["ct"], i32(6))
        same(logs.lane(1)["ct"], f32(1))


def test_a_step_has_no_part_in_the_gradient() -> None:
    grad, logs = lox.spool(jax.grad(lambda x: lox.log_grad("ct", x**2, time=x)))(3.0)
    same((grad, logs["ct"], logs.time["ct"]), (f32(6), f32(1), f32(3)))
    assert float(jax.grad(jax.grad(lox.nolog(lambda x: lox.log_grad("ct", x**3, time=x))))(2.0)) == 12.0
    assert float(lox.spool(jax.hessian(lambda x: lox.log_grad("ct", x**3, time=x)))(2.0)[0]) == 12.0


def test_a_bad_step_is_an_error() -> None:
    with pytest.raises(lox.LogTypeError, match=r"step 'tag': 'x' is not an array but str.*Did you mean 'tags'\?$"):
        lox.log_grad("ct", X, tag="x")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_watch_lets_gradients_flow_on(capsys: Any, wrap: Any) -> None:
    """Also to the console, whether the gradient is taken inside or outside."""

    def f(x: Any) -> Any:
        return lox.log_grad("ct", x**2)

    wrap(lox.watch(jax.grad(f)))(X)
    jax.effects_barrier()
    inside = capsys.readouterr().out
    wrap(jax.grad(lox.watch(f)))(X)
    jax.effects_barrier()
    assert capsys.readouterr().out == inside == "{'ct': 1.0}\n"
    _, logs = lox.spool(wrap(jax.grad(lox.watch(f))))(X)
    same(logs["ct"], f32(1))
