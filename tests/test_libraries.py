"""Logs inside other people's libraries."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lox
import lox.testing


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is installed with the newest JAX only")


# --- Flax ----------------------------------------------------------------------------------------


def scanned(**options: Any) -> tuple[Any, Any, Any]:
    """A module that scans a cell over three inputs, and what to call it with."""
    nn = library("flax.linen")

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
    nnx = library("flax.nnx")

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


# --- Equinox -------------------------------------------------------------------------------------

KINDS = ["lax", "checkpointed", "bounded"]
STARTS = jnp.array([4.0, 32.0, 1.0])
HALVED = [[4.0, 2.0], [32.0, 16.0, 8.0, 4.0, 2.0], []]


def halving(kind: str) -> Any:
    """Halve a number until it is at most one, in a loop of Equinox's."""
    eqxi = library("equinox.internal")

    def body(x: Any) -> Any:
        lox.log({"x": x})
        return x / 2

    options = {"base": 2} if kind == "bounded" else {}
    return lambda x: eqxi.while_loop(lambda x: x > 1, body, x, max_steps=8, kind=kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spooled",
    [
        lambda f: lox.spool(jax.vmap(f), capacity=8),
        lambda f: lox.spool(jax.jit(jax.vmap(f)), capacity=8),
        lambda f: jax.jit(lox.spool(jax.vmap(f), capacity=8)),
        lambda f: jax.vmap(lox.spool(f, capacity=8)),
        lambda f: jax.jit(jax.vmap(lox.spool(f, capacity=8))),
    ],
    ids=["spool(vmap)", "spool(jit(vmap))", "jit(spool(vmap))", "vmap(spool)", "jit(vmap(spool))"],
)
def test_lanes_of_an_equinox_loop_that_have_finished_do_not_log(kind: str, spooled: Any) -> None:
    f = halving(kind)
    out, logs = spooled(f)(STARTS)
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED
    assert out.tolist() == [1.0, 1.0, 1.0]
    assert lox.spool(f, capacity=8)(4.0)[1]["x"].tolist() == [4.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_an_equinox_loop_under_two_vmaps(kind: str) -> None:
    f = halving(kind)
    twice = jnp.stack([STARTS, STARTS[::-1]])
    for g in (
        lox.spool(jax.vmap(jax.vmap(f)), capacity=8),
        jax.vmap(lox.spool(jax.vmap(f), capacity=8)),
        jax.vmap(jax.vmap(lox.spool(f, capacity=8))),
    ):
        logs = g(twice)[1]
        assert [logs.lane(0).lane(i)["x"].tolist() for i in range(3)] == HALVED
        assert [logs.lane(1).lane(i)["x"].tolist() for i in range(3)] == HALVED[::-1]
    # One of them has lanes that do not differ.
    logs = lox.spool(jax.vmap(lambda x: jax.vmap(lambda y: f(x) + y)(jnp.ones(2))), capacity=8)(STARTS)[1]
    assert logs["x"].shape == (5, 3)
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_an_equinox_loop_are_reduced_and_streamed(kind: str) -> None:
    f = halving(kind)
    for g in (lambda how: lox.spool(jax.vmap(f), reduce=how), lambda how: jax.vmap(lox.spool(f, reduce=how))):
        assert g("count")(STARTS)[1]["x"].tolist() == [2, 5, 0]
        logs = g("sum")(STARTS)[1]
        assert logs["x"][:2].tolist() == [6.0, 62.0] and logs.valid["x"].tolist() == [True, True, False]

    received: list[Any] = []
    for g in (lox.tap(jax.vmap(f), received.append), jax.vmap(lox.tap(f, received.append))):
        jax.block_until_ready(g(STARTS))
        jax.effects_barrier()
        lanes = [[float(logs["x"][i]) for logs in received if logs.valid["x"][i]] for i in range(3)]
        assert lanes == HALVED
        received.clear()
    for g in (lox.tap(jax.vmap(f), received.append, buffer=3), jax.vmap(lox.tap(f, received.append, buffer=3))):
        jax.block_until_ready(g(STARTS))
        jax.effects_barrier()
        assert [[x for logs in received for x in logs.lane(i)["x"].tolist()] for i in range(3)] == HALVED
        received.clear()
    with lox.testing.capture() as events:
        jax.block_until_ready(jax.jit(jax.vmap(f))(STARTS))
    assert [logs.valid["x"].sum() for logs in events] == [2, 2, 1, 1, 1]


def test_a_tap_inside_an_equinox_loop() -> None:
    eqxi = library("equinox.internal")
    received: list[Any] = []

    def body(x: Any) -> Any:
        return lox.tap(lambda x: (lox.log({"x": x}), x / 2)[1], received.append)(x)

    for kind in KINDS:
        options = {"base": 2} if kind == "bounded" else {}
        f = lambda x: eqxi.while_loop(lambda x: x > 1, body, x, max_steps=8, kind=kind, **options)  # noqa: B023, E731
        jax.block_until_ready(jax.vmap(f)(STARTS))
        jax.effects_barrier()
        assert [[float(logs["x"][i]) for logs in received if logs.valid["x"][i]] for i in range(3)] == HALVED
        received.clear()


def test_asking_for_any_lane_is_not_having_finished() -> None:
    eqxi = library("equinox.internal")

    def f(x: Any) -> Any:  # all lanes go on until the last has finished
        return jax.lax.while_loop(lambda x: eqxi.unvmap_any(x > 1), lambda x: (lox.log({"x": x}), x / 2)[1], x)

    logs = lox.spool(jax.vmap(f), capacity=8)(STARTS)[1]
    assert logs.lane(0)["x"].tolist() == [4.0, 2.0, 1.0, 0.5, 0.25]
