"""Logs inside other people's libraries."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lox
import lox.testing

nn = pytest.importorskip("flax.linen", reason="Flax is installed with the newest JAX only")


def scanned(**options: Any) -> tuple[Any, Any, Any]:
    """A module that scans a cell over three inputs, and what to call it with."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, x: Any) -> Any:
            k = self.param("k", nn.initializers.ones, (2,))
            lox.log({"carry": carry.sum(), "k": k.sum(), "constant": 1.0})
            jax.jit(lambda k: lox.log({"inner": k.sum()}))(k)
            return carry * k + x, None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, xs: Any) -> Any:
            return nn.scan(Cell, split_rngs={"params": False}, **options)()(carry, xs)[0]

    model, args = Model(), (jnp.zeros(2), jnp.ones((3, 2)))
    return model, lox.nolog(model.init)(jax.random.key(0), *args), args


@pytest.mark.parametrize("options", [{"variable_broadcast": "params"}, {"variable_axes": {"params": 0}, "length": 3}])
def test_flax_scan_logs_once_per_iteration(options: dict[str, Any]) -> None:
    model, variables, args = scanned(**options)
    f = lambda v, *args: model.apply(v, *args).sum()  # noqa: E731
    for g in (f, jax.jit(f), jax.grad(f), jax.jit(jax.grad(f))):
        logs = lox.spool(g)(variables, *args)[1]
        assert {key: value.shape for key, value in logs.items()} == dict.fromkeys(
            ["carry", "k", "constant", "inner"], (3,)
        )
        assert logs["carry"].tolist() == [0.0, 2.0, 4.0]
    with lox.testing.capture() as events:
        jax.block_until_ready(f(variables, *args))
    assert len(events) == 6


def test_flax_modules_with_state() -> None:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            y = self.linear(x)
            lox.log({"y": y.sum()}, call=self.calls[...])
            return y

    model = Model(nnx.Rngs(0))

    @nnx.jit
    def loss(model: Any, x: Any) -> Any:
        return nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)[0]

    for n in (1, 2):
        _, logs = lox.spool(loss)(model, jnp.ones(2))
        assert logs["y"].shape == () and int(logs.call["y"]) == n
    assert int(model.calls[...]) == 2
    assert lox.nolog(loss)(model, jnp.ones(2)).shape == ()
