"""Logs that JAX hides: their events, or an error that says where they are, but never an empty result."""

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

import lox
import lox.testing

X = jnp.float32(3)


def double(x: Any) -> Any:
    lox.log({"x": x})
    return x * 2


TRANSFORMATIONS = {
    "spool": lox.spool,
    "reduce": lambda f: lox.spool(f, reduce="mean"),
    "tap": lambda f: lox.tap(f, lambda logs: None),
    "buffer": lambda f: lox.tap(f, lambda logs: None, buffer=2),
    "nolog": lox.nolog,
    "keep": lambda f: lox.keep(f, []),
    "watch": lox.watch,
}


def cannot_reach(where: str) -> str:
    return (
        rf"cannot reach the log of 'x': it is inside {re.escape(where)}.*\n  logged at test_hidden\.py:\d+ \(double\)\n"
    )


@pytest.fixture(params=TRANSFORMATIONS)
def transform(request: Any) -> Any:
    return TRANSFORMATIONS[request.param]


def run_before(f: Any) -> Any:
    """A jitted function that has been called twice, so that JAX dispatches it without looking inside."""
    jitted = jax.jit(f)
    with lox.testing.capture() as events:
        for _ in range(3):
            jax.block_until_ready(jitted(X))
    assert len(events) == 3
    return jitted


# --- primitives that keep effects to themselves --------------------------------------------------


@jax.custom_batching.custom_vmap
def with_vmap_rule(x: Any) -> Any:
    return double(x)


with_vmap_rule.def_vmap(lambda size, batched, x: (x * 2, True))
partitioned = custom_partitioning(double)
partitioned.def_partition(
    partition=lambda mesh, args, result: (mesh, double, result.sharding, [a.sharding for a in args]),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="->",
)


def in_composite(x: Any) -> Any:
    return jax.lax.composite(double, "lox.test")(x)


def test_a_composite_without_its_logs_is_still_one() -> None:
    assert "composite" in jax.jit(lox.nolog(in_composite)).lower(X).as_text()


HIDING = [with_vmap_rule, jax.custom_batching.sequential_vmap(double), partitioned, in_composite]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("f", HIDING)
def test_a_hidden_effect_in_a_function_that_has_run_before(f: Any) -> None:
    jitted = run_before(f)
    for g in (jitted, lambda x: jitted(x), jax.jit(lambda x: jitted(x) + 1)):
        _, logs = lox.spool(g)(X)
        assert str(logs) == "{'x': 3.0}"
        events: list[Any] = []
        jax.block_until_ready(lox.tap(g, events.append)(X))
        assert list(map(str, events)) == ["{'x': 3.0}"]
        with lox.testing.capture() as events:
            jax.block_until_ready(lox.nolog(g)(X))
        assert not events
    with lox.testing.capture() as events:
        jax.block_until_ready(jitted(X))
    assert len(events) == 1


def in_linear_call(x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda _, x: double(x), lambda _, ct: ct * 2, (), x)


def in_pallas_call(x: Any) -> Any:
    def kernel(x: Any, y: Any) -> None:
        y[...] = double(x[...])

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((), jnp.float32), interpret=True)(x)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(("f", "name"), [(in_linear_call, "linear_call"), (in_pallas_call, "pallas_call")])
def test_an_opaque_primitive_in_a_function_that_has_run_before_is_an_error(f: Any, name: str, transform: Any) -> None:
    jitted = run_before(f)
    for g in (jitted, lambda x: jitted(x), jax.jit(lambda x: jitted(x) + 1)):
        with pytest.raises(lox.TransformError, match=cannot_reach(f"`{name}`")):
            transform(g)(X)


# --- executables ---------------------------------------------------------------------------------


def compiled() -> Any:
    return jax.jit(double).lower(X).compile()


def test_an_executable_that_logs_is_an_error(transform: Any) -> None:
    executable = compiled()
    text = cannot_reach("an executable, which is already compiled.") + (
        r"Either call the jitted function:      jax\.jit\(f\) instead of jax\.jit\(f\)\.lower\(\.\.\.\)\.compile\(\)\n"
        r"or compile the transformed function:  jax\.jit\(lox\.spool\(f\)\)\.lower\(\.\.\.\)\.compile\(\)"
    )
    for f in (executable, lambda x: executable(x), lambda x: jax.jit(lambda y: y + executable(X))(x)):
        with pytest.raises(lox.TransformError, match=text):
            transform(f)(X)
    with lox.testing.capture() as events:
        assert float(executable(X)) == 6.0
        jax.effects_barrier()
    assert list(map(str, events)) == ["{'x': 3.0}"]


def test_an_executable_of_a_tapped_function_is_an_error() -> None:
    # The events have reached its callback, but an outer spool would miss them.
    executable = jax.jit(lox.tap(double, lambda logs: None)).lower(X).compile()
    assert float(executable(X)) == 6.0
    with pytest.raises(lox.TransformError, match=cannot_reach("an executable")):
        lox.spool(executable)(X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lox.LoxWarning")  # there is no log to keep
def test_an_executable_without_logs_is_a_function_like_others(transform: Any) -> None:
    for f in (lambda x: x * 2, lox.nolog(double)):
        executable = jax.jit(f).lower(X).compile()
        for g in (executable, lambda x, executable=executable: executable(x)):
            assert float(jax.tree.leaves(transform(g)(X))[0]) == 6.0
    out, logs = jax.jit(lox.spool(double)).lower(X).compile()(X)
    assert (float(out), str(logs)) == (6.0, "{'x': 3.0}")


@pytest.mark.slow
def test_an_exported_function_that_logs_is_an_error(transform: Any) -> None:
    def quiet(x: Any) -> Any:
        lox.log({"x": x}, explicit=True)  # without callbacks of its own, or JAX would refuse to export it
        return x * 2

    exported = jax.export.export(jax.jit(quiet))(X)
    read = jax.export.deserialize(exported.serialize())
    assert float(exported.call(X)) == float(read.call(X)) == 6.0
    for f in (exported.call, lambda x: exported.call(x), jax.jit(exported.call), read.call):
        with pytest.raises(
            lox.TransformError, match="cannot reach the log of an unknown key: it is inside `call_exported`"
        ):
            transform(f)(X)


def test_to_export_a_log_that_prints_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        r"cannot export the log of 'x': no transformation takes it, so it calls the host to print, and "
        r"`jax\.export` cannot save such calls\.\n  logged at test_hidden\.py:\d+ \(double\)\n"
        r"Either return the logs:   jax\.export\.export\(jax\.jit\(lox\.spool\(f\)\)\)\n"
        r"or leave them out:        jax\.export\.export\(jax\.jit\(lox\.nolog\(f\)\)\)"
    )
    for f in (double, jax.jit(double), lambda x: jax.lax.cond(x > 0, double, lambda x: x, x)):
        with pytest.raises(lox.TransformError, match=text):
            jax.export.export(jax.jit(f))(X)
        assert float(jax.export.export(jax.jit(lox.nolog(f)))(X).call(X)) == 6.0
    monkeypatch.setenv("LOX_SINK", "off")
    assert float(jax.export.export(jax.jit(lambda x: double(x)))(X).call(X)) == 6.0


# --- primitives that hold a Python function ------------------------------------------------------


opaque_p = Primitive("opaque")
opaque_p.def_impl(lambda x, fun: fun(x))
opaque_p.def_abstract_eval(lambda x, fun: jax.make_jaxpr(lambda x: fun(x))(x).out_avals[0])
mlir.register_lowering(opaque_p, mlir.lower_fun(lambda x, fun: fun(x), multiple_results=False))


@pytest.mark.sample(23)
@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("fun", [double, lambda x: double(x), jax.jit(double)], ids=["def", "lambda", "jit"])
def test_a_primitive_that_holds_a_function_that_logs_is_an_error(fun: Any, jitted: bool, transform: Any) -> None:
    f = lambda x: opaque_p.bind(x, fun=fun)  # noqa: E731
    f = jax.jit(f) if jitted else f
    with lox.testing.capture() as events:
        f(X), jax.block_until_ready(f(X))
    assert len(events) == 2
    for g in (f, lambda x: f(x), jax.jit(lambda x: f(x) + 1)):
        with pytest.raises(lox.TransformError, match=cannot_reach("`opaque`")):
            transform(g)(X)


@pytest.mark.filterwarnings("ignore::lox.LoxWarning")  # there is no log to keep
@pytest.mark.parametrize("jitted", [False, True])
def test_a_primitive_that_holds_another_function_is_not(jitted: bool, transform: Any) -> None:
    f = lambda x: opaque_p.bind(x, fun=lambda x: 2 * x)  # noqa: E731
    f = jax.jit(f) if jitted else f
    assert float(jax.tree.leaves(transform(f)(X))[0]) == 6.0
    # Nor if all that it logs stays inside.
    f = lambda x: opaque_p.bind(x, fun=lambda x: lox.spool(double)(x)[0])  # noqa: E731
    assert float(jax.tree.leaves(transform(f)(X))[0]) == 6.0


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
def test_equinox_noinline(jitted: bool, transform: Any) -> None:
    eqxi = pytest.importorskip("equinox.internal", reason="Equinox is installed with the newest JAX only")
    inner = eqxi.noinline(double)
    f = jax.jit(lambda x: inner(x)) if jitted else inner
    with pytest.raises(lox.TransformError, match=cannot_reach("`noinline`")):
        transform(f)(X)
    silent = eqxi.noinline(lambda x: x * 2)
    assert float(jax.tree.leaves(transform(jax.jit(lambda x: silent(x)) if jitted else silent)(X))[0]) == 6.0
