"""watch: the first NaN or infinity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from optional import devices

import lox


def squares(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        x = x * x
        lox.log({"x": x, "n": i}, step=i)
        return x, None

    return lax.scan(step, x, jnp.arange(100))[0]


FORMS = {
    "watch": lox.watch(squares),
    "watch(jit)": lox.watch(jax.jit(squares)),
    "watch(watch)": lox.watch(lox.watch(squares, argnames="n")),
    "watch(tap)": lox.watch(lox.tap(squares, lambda logs: None, buffer=8)),
    "grad": jax.grad(lox.watch(squares)),
    "watch(grad)": lox.watch(jax.grad(squares)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before, lox.config.sink = lox.config.sink, "off"
    yield
    lox.config.sink = before


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_it_stops_at_the_first_nan(name: str) -> None:
    for _ in range(2):
        with pytest.raises(lox.NonFiniteError) as info:
            FORMS[name](jnp.float32(9.0))
        error = info.value
        assert isinstance(error, FloatingPointError) and isinstance(error, lox.LoxError)
        assert (error.key, error.path, error.steps, error.lane) == ("x", "", {"step": 5}, ())
        assert np.isinf(error.value)
        first, second = str(error).splitlines()
        assert first == "'x' is inf at step=5."
        assert second.startswith("  logged at test_watch.py:") and second.endswith("(squares.step)")
    assert np.isfinite(FORMS[name](jnp.float32(0.5)))  # the process goes on


def test_it_names_the_lane() -> None:
    xs = jnp.array([0.5, 2.0, 9.0])
    for f in (lox.watch(jax.vmap(squares)), jax.vmap(lox.watch(squares))):
        with pytest.raises(lox.NonFiniteError, match=r"^'x' is inf at step=5 in lane 2\."):
            f(xs)
    with pytest.raises(lox.NonFiniteError, match=r"^'x' is inf at step=5 in lane \(1, 0\)\."):
        lox.watch(jax.vmap(jax.vmap(squares)))(jnp.array([[0.5], [9.0]]))


def test_a_callback_reports_once_and_the_function_goes_on() -> None:
    errors: list[lox.NonFiniteError] = []
    for f in (squares, jax.jit(squares)):
        out = lox.watch(f, callback=errors.append)(9.0)
        assert np.isinf(out)
    jax.jit(lox.watch(squares, callback=errors.append))(9.0)
    jax.effects_barrier()
    assert [str(e).splitlines()[0] for e in errors] == ["'x' is inf at step=5."] * 3


def test_arrays_and_pytrees() -> None:
    def f(x: Any) -> None:
        lox.log({"tree": {"w": [jnp.ones(3), jnp.array([[1.0, x], [jnp.inf, x]])]}}, step=1, episode=2)

    with pytest.raises(lox.NonFiniteError) as info:
        lox.watch(f)(jnp.nan)
    assert str(info.value).splitlines()[0] == (
        "'tree'['w'][1] has 2 NaN and 1 infinite of 4 values, the first at [0, 1] at step=1 at episode=2."
    )
    assert info.value.value.shape == (2, 2)
    with pytest.raises(lox.NonFiniteError, match="'z' is NaN"):
        lox.watch(lambda: lox.log({"z": jnp.complex64(complex(0, np.nan))}))()
    with pytest.raises(lox.NonFiniteError, match="'b' is NaN"):
        lox.watch(lambda: lox.log({"b": jnp.bfloat16(np.nan)}))()
    lox.watch(lambda: lox.log({"i": 3, "k": jax.random.key(0)}))()


def test_only_selected_and_valid_values() -> None:
    def f(x: Any) -> Any:
        lox.log({"a": x})
        lox.log({"b": x}, where=x > 0, tags="t")
        return lax.cond(x > 0, lambda: lox.log({"c": x}) and 1, lambda: 0)

    lox.watch(f, argnames="b")(jnp.nan)
    lox.watch(f, argnames=["b", "c"])(-jnp.inf)
    with pytest.raises(lox.NonFiniteError, match="'b' is inf"):
        lox.watch(f, tags="t")(jnp.inf)
    with pytest.raises(lox.NonFiniteError, match="'c' is inf"):
        lox.watch(f, argnames="c")(jnp.inf)
    # Lanes disagree, so only the one that took the branch reports.
    with pytest.raises(lox.NonFiniteError, match="'c' is inf in lane 1"):
        lox.watch(jax.vmap(f), argnames="c")(jnp.array([-jnp.inf, jnp.inf]))


def test_the_host_is_not_called_without_a_nan() -> None:
    text = jax.jit(lox.nolog(lox.watch(squares))).lower(1.0).as_text()
    before, _, inside = text.partition("stablehlo.case")
    assert "callback" not in before and "callback" in inside


def test_logs_flow_on_unchanged() -> None:
    _, logs = lox.spool(lox.watch(squares))(1.0)
    assert len(logs["x"]) == 100
    with lox.testing.capture() as events:
        lox.watch(lambda: lox.log({"x": 1.0}))()
    assert [str(e) for e in events] == ["{'x': 1.0}"]


def test_while_loops() -> None:
    def f(x: Any) -> Any:
        def body(c: Any) -> Any:
            lox.log({"c": c})
            return c * c

        return lax.while_loop(lambda c: c < 1e30, body, x) * jnp.nan

    lox.watch(f)(9.0)


def test_several_devices() -> None:
    mesh = jax.sharding.Mesh(devices(8), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(lambda x: squares(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    xs = jnp.ones(8)
    assert lox.watch(jax.jit(sharded))(xs).tolist() == xs.tolist()
    errors: list[Any] = []
    jax.jit(lox.watch(sharded, callback=errors.append))(xs.at[3].set(9.0))
    jax.effects_barrier()
    assert [e.key for e in errors] == ["x"]


def test_a_callback_has_to_be_callable() -> None:
    with pytest.raises(lox.LogTypeError, match="`callback` is 3; it must be a function of an error"):
        lox.watch(squares, callback=3)  # type: ignore[arg-type]


def test_a_value_that_is_the_same_in_all_lanes() -> None:
    with pytest.raises(lox.NonFiniteError) as info:
        jax.vmap(lambda x: (lox.watch(lambda: lox.log({"nan": jnp.nan}))(), x)[1])(jnp.arange(3.0))
    assert info.value.lane == ()
    assert str(info.value).splitlines()[0] == "'nan' is NaN."


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_two_lines_with_the_same_key(wrap: Any) -> None:
    """The error names the line that failed, though both log the same key, of the same type."""

    def f(x: Any) -> None:
        lox.log({"x": x})
        lox.log({"x": jnp.log(-x)})

    for number in range(2):  # the first line fails, then the second
        with pytest.raises(lox.NonFiniteError) as info:
            lox.watch(wrap(f))(jnp.float32([jnp.inf, 1.0][number]))
        assert info.value.site.endswith(
            f":{f.__code__.co_firstlineno + 1 + number} (test_two_lines_with_the_same_key.f)"
        )
