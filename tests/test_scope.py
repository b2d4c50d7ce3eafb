"""scope: names for parts of a program."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lox


@jax.jit
def layer(x: Any) -> Any:
    with lox.scope("in"):
        lox.log({"x": x}, step=3)
    return jnp.sin(x)


def model(x: Any) -> Any:
    with lox.scope("a"):
        x = layer(x)

        def body(c: Any, _: Any) -> Any:
            with lox.scope("b"):
                return layer(c), None

        x, _ = lax.scan(body, x, None, length=2)
    with lox.scope("c"):
        x = lax.cond(x > 0, layer, lambda x: x, x)
        x = jax.checkpoint(layer)(x)
    return layer(x)


KEYS = {"a/in/x": 1, "a/b/in/x": 2, "c/in/x": 2, "in/x": 1}


def counts(logs: lox.logdict) -> dict[str, int]:
    return {key: jnp.size(logs[key]) for key in logs}


TRANSFORMS = {
    "plain": lambda f: lambda: lox.spool(f)(1.0),
    "jit inside": lambda f: lambda: lox.spool(jax.jit(f))(1.0),
    "jit outside": lambda f: lambda: jax.jit(lox.spool(f))(1.0),
    "grad": lambda f: lambda: lox.spool(jax.grad(f))(1.0),
    "jit(grad)": lambda f: lambda: lox.spool(jax.jit(jax.grad(f)))(1.0),
    "linearize": lambda f: lambda: lox.spool(lambda x: jax.linearize(f, x)[0])(1.0),
    "remat": lambda f: lambda: lox.spool(jax.grad(jax.checkpoint(f)))(1.0),
    "vmap of one lane": lambda f: lambda: lox.spool(jax.vmap(f))(jnp.ones(1)),
    "tap": lambda f: lambda: lox.spool(lox.tap(f, lambda logs: None, buffer=10))(1.0),
    "keep_logs": lambda f: lambda: lox.spool(lambda x: lox.spool(f, keep_logs=True)(x)[0])(1.0),
}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_one_jitted_layer_reports_under_every_scope(name: str) -> None:
    for _ in range(2):
        _, logs = TRANSFORMS[name](model)()
        assert counts(logs.compact()) == KEYS
        assert all((logs.step[key] == 3).all() for key in logs)


@pytest.mark.slow
def test_each_transformation_selects_by_the_whole_name() -> None:
    _, logs = lox.spool(model, argnames="a/*")(1.0)
    assert list(logs) == ["a/in/x", "a/b/in/x"]
    _, logs = lox.spool(lox.nolog(model, "a/*"))(1.0)
    assert list(logs) == ["c/in/x", "in/x"]
    _, logs = lox.spool(lox.keep(jax.jit(model), "c/*"))(1.0)
    assert list(logs) == ["c/in/x"]
    seen: list[str] = []
    lox.tap(jax.jit(model), lambda logs: seen.extend(logs), argnames=["a/b/*"], prefix="p/")(1.0)
    assert seen == ["p/a/b/in/x"] * 2
    _, logs = lox.spool(model, reduce={"a/b/in/x": "count"}, argnames="a/b/in/x")(1.0)
    assert int(logs["a/b/in/x"]) == 2


def test_what_nolog_removes_costs_nothing() -> None:
    def bare(x: Any) -> Any:
        with lox.scope("a"):
            return jnp.sin(x)

    def logged(x: Any) -> Any:
        with lox.scope("a"):
            lox.log({"x": jnp.cos(x)})
            return jnp.sin(x)

    bare.__name__ = logged.__name__ = "f"
    texts = [jax.jit(f).lower(1.0).as_text() for f in (bare, lox.nolog(logged, "a/x"))]
    assert texts[0] == texts[1]


def test_a_branch_that_lanes_disagree_about() -> None:
    def f(x: Any) -> Any:
        with lox.scope("s"):
            return lax.cond(x > 0, layer, lambda x: x, x)

    _, logs = lox.spool(jax.vmap(f))(jnp.array([-1.0, 1.0]))
    assert list(logs) == ["s/in/x"]
    assert logs.lane(1)["s/in/x"].tolist() == [1.0]
    assert logs.lane(0)["s/in/x"].shape == (0,)


def test_gradients_are_logged_under_the_scope_too() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return lox.log_grad("dx", x) * 3.0

    def f(x: Any) -> Any:
        with lox.scope("a"):
            x = inner(x)
        with lox.scope("b"):
            return inner(x)

    for g in (jax.grad(f), jax.jit(jax.grad(f))):
        _, logs = lox.spool(g)(1.0)
        assert {k: float(v) for k, v in logs.items()} == {"a/dx": 9.0, "b/dx": 3.0}


def test_scopes_around_a_transformed_function_do_not_count() -> None:
    with lox.scope("outside"):
        assert list(lox.spool(model)(1.0)[1]) == list(KEYS)
        assert list(jax.jit(lox.spool(model))(1.0)[1]) == list(KEYS)


def test_the_default_sink_knows_those_of_the_innermost_jit_or_loop() -> None:
    def f(x: Any) -> Any:
        with lox.scope("a"):
            lox.log({"x": x})
            lax.scan(lambda c, _: (c, lox.log({"y": c}) and None), x, None, length=1)
        return x

    with lox.testing.capture() as eager:
        f(1.0)
    with lox.testing.capture() as compiled:
        jax.jit(f)(1.0)
    # A loop is lowered by itself, without the scopes around it.
    assert sorted(k for logs in eager for k in logs) == ["a/x", "y"]
    assert sorted(k for logs in compiled for k in logs) == ["a/x", "y"]


def test_a_scope_is_a_decorator_and_wants_a_string() -> None:
    @lox.scope("d")
    def f(x: Any) -> Any:
        lox.log({"x": x})
        return x

    assert list(lox.spool(f)(1)[1]) == ["d/x"]
    with pytest.raises(lox.LogTypeError, match=r"`lox.scope` got 3: it must be a string."):
        lox.scope(3)  # type: ignore[arg-type]
    with lox.scope("a/b"), lox.scope(""):
        pass


def test_a_scope_that_is_not_unicode() -> None:
    with pytest.raises(lox.LogTypeError, match=r"`lox.scope` got 'a\\ud800': .* half a character"):
        lox.scope("a\ud800")


def test_logify_in_a_scope() -> None:
    def f(x: Any) -> Any:
        with lox.scope("a"):
            lox.logify.log("loss", x, reduction="sum")
        return x

    assert lox.logify.logify(f)(2.0)[1].asdict() == {"a/loss": {"sum": 2.0}}
