"""Jitted functions in transformed Python functions: C++ calls them from the second time on, and no event is lost."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import pjit
from jax._src.dispatch import runtime_tokens

import lox
import lox.testing
from lox._compat import order_effect
from lox._engine._handler import ProgramSource


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What JAX has dispatched from Python, since C++ did not know it."""
    calls: list[Any] = []
    original = pjit._get_fastpath_data

    def count(executable: Any, *args: Any) -> Any:
        calls.append(executable)
        return original(executable, *args)

    monkeypatch.setattr(pjit, "_get_fastpath_data", count)
    return calls


def logging(**steps: Any) -> Any:
    """Make a new jitted function that logs its argument."""

    @jax.jit
    def double(x: Any) -> Any:
        lox.log({"x": x}, **steps)
        return x * 2

    return double


def two() -> Any:
    f = logging(step=1)
    return lambda x: f(f(x))


def another_shape() -> Any:
    f, g = logging(), jax.jit(lambda x: (lox.log({"sum": x.sum()}), x.sum())[1])
    return lambda x: f(g(f(f(x))[None] * jnp.ones(3)))


def scopes() -> Any:
    f = logging(step=2)

    def model(x: Any) -> Any:
        with lox.scope("encoder"):
            x = f(x)
            with lox.scope("layer"):
                x = f(x)
        with lox.scope("decoder"):
            x = f(f(x))
        return f(x)

    return model


def scope_inside() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        with lox.scope("inside"):
            lox.log({"x": x})
        return x + 1

    def model(x: Any) -> Any:
        with lox.scope("outside"):
            x = f(x)
        return f(f(x))

    return model


def other_functions() -> Any:
    f, g = logging(), jax.jit(lambda x, y: x + y)
    return lambda x: f(g(g(x, y=1.0), jnp.sin(x)))


def prng_keys() -> Any:
    @jax.jit
    def draw(key: Any) -> Any:
        key, used = jax.random.split(key)
        lox.log({"used": used, "number": jax.random.uniform(used)})
        return key

    def run(x: Any) -> Any:
        key = draw(draw(jax.random.key(7)))
        return x + jax.random.uniform(key)

    return run


def static_and_donated() -> Any:
    @functools.partial(jax.jit, static_argnums=1, static_argnames="factor", donate_argnums=0)
    def f(x: Any, n: int, *, factor: int, more: Any = 1.0) -> Any:
        lox.log({"x": x, "n": n * factor}, step=n)
        return x * n + more

    return lambda x: f(f(f(x + 1, 2, factor=3), 2, factor=4, more=2.0), n=3, factor=3)


def tree() -> Any:
    @jax.jit
    def f(given: Any) -> Any:
        lox.log({"given": given, "other": given["a"]})
        return {"b": (given["a"], None), "a": given["b"][0] + 1}

    return lambda x: f(f({"a": x, "b": (x * 2, None)}))["a"]


def no_result() -> Any:
    f = jax.jit(lambda x: lox.log({"x": x}) and None)
    return lambda x: (f(x), f(x + 1), x)[2]


def no_argument() -> Any:
    f = jax.jit(lambda: (lox.log({"three": 3.0}), 4.0)[1])
    return lambda x: x + f() + f()


def loop() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        return lax.scan(lambda c, i: (lox.log({"c": c}, step=i), (c + 1, None))[1], x, jnp.arange(3))[0]

    g = logging()
    return lambda x: g(f(g(f(x))))


def ragged() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        def log(x: Any) -> Any:
            lox.log({"large": x}, step=4)
            return x + 1

        return lax.cond(x > 3, log, lambda x: x + 1, x)

    return lambda x: f(f(f(f(x))))


def eager_logs() -> Any:
    f = logging(step=1)

    def run(x: Any) -> Any:
        for i in range(20):
            lox.log({"x": x}, step=i)
            x = f(x) / 2 + 1
        return x

    return run


def long_loop() -> Any:
    f = logging(step=1)

    def run(x: Any) -> Any:
        for _ in range(40):
            x = f(x) / 2
        return x

    return run


def numpy_arguments() -> Any:
    f = logging()
    return lambda x: f(np.float32(2)) + f(3.0) + f(x)


def without_values() -> Any:
    f, g = jax.jit(lambda x: (lox.log({}), x)[1]), logging()
    return lambda x: g(f(f(x)))


def swapped() -> Any:
    inner = jax.jit(lambda a, b: a - b)
    outer = jax.jit(lambda a, b: inner(b, a))
    f = logging()
    return lambda x: f(outer(x, 5.0)) + outer(5.0, x)


BY_CPP: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        *(two, another_shape, scopes, scope_inside, other_functions, prng_keys, static_and_donated, tree, no_result),
        *(no_argument, loop, ragged, eager_logs, long_loop, numpy_arguments, without_values, swapped),
    )
}


def vmap() -> Any:
    f = logging(step=1)
    return lambda x: jax.vmap(lambda lane: lane + f(2.0) + f(2.0) + f(lane))(jnp.arange(3.0) * x).sum()


def grad() -> Any:
    f = logging(step=1)
    return lambda x: f(jax.grad(lambda y: y * f(2.0) + f(f(y)))(x))


def transformations_inside() -> Any:
    f = logging()

    def run(x: Any) -> Any:
        y, logs = lox.spool(lambda x: f(f(x)))(x)
        z = lox.nolog(lambda x: f(f(x)))(logs["x"].sum())
        return f(lox.spool(lambda x: f(f(x)), keep_logs=True)(y)[0] + f(z))

    return run


def backward_rule() -> Any:
    """The backward rule computes again what the forward rule has logged, which is not logged again."""
    f, g = logging(), jax.jit(lambda x: (lox.log({"g": x}), x)[1])

    @jax.custom_vjp
    def square(x: Any) -> Any:
        return f(x) * x

    square.defvjp(lambda x: (f(x) * x, x), lambda x, ct: (ct * f(x) * g(ct),))
    return lambda x: f(jax.grad(lambda y: f(square(f(y))))(x))


def remat() -> Any:
    f = logging()
    return lambda x: f(jax.checkpoint(lambda y: f(f(y)))(x)) + jax.grad(jax.checkpoint(lambda y: f(f(y))))(x)


def disabled_jit() -> Any:
    f = logging()

    def run(x: Any) -> Any:
        x = f(f(x))
        with jax.disable_jit():
            x = f(x)
        return f(x)

    return run


def debugged() -> Any:
    f, g = logging(), ragged()

    def run(x: Any) -> Any:
        x = g(f(x))
        with jax.debug_nans(True):
            x = f(g(f(x) - 10))
        return g(f(x))

    return run


def compile_time() -> Any:
    f, g = logging(), logging()

    def run(x: Any) -> Any:
        x = f(x)
        with jax.ensure_compile_time_eval():
            x = g(f(x))
        return g(f(x))

    return run


def reduced_beside() -> Any:
    f, g = logging(), jax.jit(lambda x: (lox.log({"mean": x}, reduce="mean"), x)[1])
    return lambda x: f(g(f(g(f(x)))))


def made_anew() -> Any:
    return lambda x: logging()(logging()(x))


def host_callback() -> Any:
    """While it runs, the host runs other programs."""

    def host(x: Any) -> Any:
        return np.asarray(np.float32(x) + 1)

    f = logging()
    g = jax.jit(lambda x: (lox.log({"g": x}), jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x))[1])
    return lambda x: f(g(f(g(x))))


def shard_map() -> Any:
    f, g = logging(), jax.jit(lambda x: (lox.log({"g": x}), x)[1])
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(lambda x: f(x) + g(2.0) + g(2.0), mesh=mesh, in_specs=spec, out_specs=spec)
    return lambda x: mapped(f(x[None] * jnp.ones(1)))[0]


OTHERS: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        *(vmap, grad, transformations_inside, backward_rule, remat, disabled_jit, debugged, compile_time),
        *(reduced_beside, made_anew, host_callback, shard_map),
    )
}


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(plain(a), plain(b))


def plain(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.slow
@pytest.mark.sample(7)
@pytest.mark.parametrize("case", BY_CPP | OTHERS)
def test_later_calls_give_what_the_first_gave(case: str, missed: list[Any]) -> None:
    run = (BY_CPP | OTHERS)[case]()
    x = jnp.float32(1.5)
    with lox.testing.capture() as leaked:
        first = lox.spool(run)(x)
        for _ in range(3):
            before = len(missed)
            later = lox.spool(run)(x)
            assert missed[before:] == [] or case in OTHERS
            same(later, first)
        same(lox.nolog(run)(x), first[0])
        before = len(missed)
        same(lox.nolog(run)(x), first[0])
        assert missed[before:] == [] or case in OTHERS or case == "no_result"  # by which its program would be known
        same(lox.spool(run)(x), first)
    assert not leaked


NOT_IN_JIT = ("disabled_jit", "debugged", "compile_time", "transformations_inside", "made_anew", "shard_map")


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", [case for case in BY_CPP | OTHERS if case not in NOT_IN_JIT])
def test_events_are_those_of_one_program(case: str) -> None:
    run, x = (BY_CPP | OTHERS)[case](), jnp.float32(1.5)
    out, logs = jax.jit(lox.spool(run))(x)
    want = logs.compact()
    for _ in range(3):
        got, logs = lox.spool(run)(x)
        np.testing.assert_allclose(got, out, rtol=1e-6)
        assert list(logs) == list(want)
        for a, b in zip(jax.tree.leaves((logs, logs.steps)), jax.tree.leaves((want, want.steps)), strict=True):
            np.testing.assert_allclose(plain(a), plain(b), rtol=1e-6)


@pytest.mark.slow
def test_streams_see_events_of_functions_that_spool_has_made_fast() -> None:
    run, x = two(), jnp.float32(1)
    for _ in range(3):
        lox.spool(run)(x)
        received: list[Any] = []
        lox.tap(run, received.append)(x)
        assert [float(logs["x"]) for logs in received] == [1, 2]
        assert lox.spool(run, reduce="sum")(x)[1]["x"] == 3
        assert lox.spool(run, "x", interval=2)(x)[1]["x"].tolist() == [1]
        with lox.testing.capture() as printed:
            run(x)
        assert [float(logs["x"]) for logs in printed] == [1, 2]
        with pytest.raises(lox.NonFiniteError):
            lox.watch(run)(x * jnp.nan)


def test_events_of_another_thread_are_not_of_this_function() -> None:
    f = logging()

    def run(x: Any) -> Any:
        thread = threading.Thread(target=f, args=(x + 10,))
        x = f(x)
        thread.start()
        thread.join()
        return f(x)

    for _ in range(3):
        with lox.testing.capture() as printed:
            assert lox.spool(run)(jnp.float32(1))[1]["x"].tolist() == [1, 2]
        assert [float(logs["x"]) for logs in printed] == [11]


def test_threads_spool_the_same_function_at_the_same_time() -> None:
    f, wrong = logging(), []

    def run(x: Any) -> Any:
        for _ in range(50):
            x = f(x) / 2 + 1
        return x

    def check(start: int) -> None:
        for _ in range(5):
            logs = lox.spool(run)(jnp.float32(start))[1]
            if logs["x"].tolist() != [start + n for n in range(50)]:
                wrong.append(logs)

    threads = [threading.Thread(target=check, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("order", ["reduced first", "stacked first"])
def test_a_key_that_is_stacked_and_reduced_is_an_error_in_every_call(order: str) -> None:
    stacked, reduced = logging(), jax.jit(lambda x: (lox.log({"x": x}, reduce="mean"), x)[1])
    lox.spool(lambda x: stacked(stacked(x)))(1.0)
    lox.spool(lambda x: reduced(reduced(x)))(1.0)
    first, then = (reduced, stacked) if order == "reduced first" else (stacked, reduced)
    for _ in range(3):
        with pytest.raises(lox.MismatchError, match="'x' is logged with different reductions"):
            lox.spool(lambda x: then(first(x)))(1.0)
        assert lox.spool(lambda x: stacked(stacked(x)))(1.0)[1]["x"].tolist() == [1, 2]


def test_events_that_do_not_fit_are_an_error_at_once_in_every_call() -> None:
    f, reached = logging(), []
    for _ in range(3):
        with pytest.raises(lox.MismatchError, match="'x' is logged with different shape"):
            lox.spool(lambda x: (f(x), f(x * jnp.ones(2)), reached.append(x)))(1.0)
    assert reached == []


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_call_that_fails_while_nans_are_debugged_has_no_events(warm: bool, where: str) -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}), jnp.log(x))[1])
    x = jnp.float32(1)
    if warm:
        lox.spool(lambda x: f(x))(x)

    def run(x: Any) -> Any:
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            f(-x)
        return f(x)

    for _ in range(3):
        with jax.debug_nans(True) if where == "around" else contextlib.nullcontext():
            assert lox.spool(run)(x)[1]["x"].tolist() == 1


def test_a_nan_in_an_event_is_found_in_every_call_while_they_are_debugged() -> None:
    f = jax.jit(lambda x: (lox.log({"log": jnp.log(x)}), x)[1])
    x = jnp.float32(1)
    for _ in range(3):
        assert jnp.isnan(lox.spool(lambda x: f(x))(-x)[1]["log"])
        with jax.debug_nans(True):
            assert lox.spool(lambda x: f(x))(x)[1]["log"] == 0
            with pytest.raises(FloatingPointError):
                lox.spool(lambda x: f(x))(-x)


def test_a_nan_is_found_if_they_are_debugged_everywhere() -> None:
    f = jax.jit(lambda x: (lox.log({"log": jnp.log(x)}), x)[1])
    x, found = jnp.float32(1), []

    def look() -> None:
        try:
            found.append(float(lox.spool(lambda x: f(x))(-x)[1]["log"]))
        except FloatingPointError:
            found.append("error")

    for is_debugged in (False, False, True, True, False, True):
        jax.config.update("jax_debug_nans", is_debugged)
        try:
            # In this thread, JAX remembers that NaNs are no longer debugged from a test before.
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        finally:
            jax.config.update("jax_debug_nans", False)
    np.testing.assert_equal(found, [np.nan, np.nan, "error", "error", np.nan, "error"])


@pytest.mark.parametrize("transform", [lox.spool, lox.nolog, lambda f: lox.tap(f, len)])
def test_keys_that_are_used_twice_are_found(transform: Any) -> None:
    draw = jax.jit(lambda key: (lox.log({"key": key}), jax.random.uniform(key))[1])
    for _ in range(2):
        with jax.debug_key_reuse(True):
            for use in (jax.random.uniform, draw):
                key = jax.random.key(0)
                with pytest.raises(jax.errors.KeyReuseError):
                    transform(lambda use=use, key=key: use(key) + use(key))()


def test_events_of_a_callback_are_not_of_the_function_that_calls_it() -> None:
    f = logging()

    def host(x: Any) -> Any:
        lox.log({"x": np.float32(-1)})
        return np.asarray(f(np.float32(x) + 10))

    @jax.jit
    def calls(x: Any) -> Any:
        lox.log({"x": x})
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)

    lox.spool(lambda x: f(x))(np.float32(1))
    for _ in range(3):
        with lox.testing.capture() as printed:
            assert lox.spool(lambda x: calls(x))(jnp.float32(1))[1]["x"] == 1
            lox.nolog(lambda x: calls(x))(jnp.float32(1))
        assert [float(logs["x"]) for logs in printed] == [-1, 11] * 2


def test_a_warning_of_names_does_not_depend_on_what_other_transformations_have_run() -> None:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2

    double.defvjp(lambda x: (lox.log({"rule": x}) and None, (x * 2, x))[1], lambda x, ct: (ct * 2,))
    f, with_rule, x = logging(), jax.jit(lambda x: double(x)), jnp.float32(1)
    for _ in range(2):
        lox.tap(lambda x: with_rule(x), len)(x)
        lox.spool(lambda x: with_rule(x))(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lox.keep(lambda x: f(with_rule(x)), "rule")(x)
            lox.nolog(lambda x: with_rule(x), "rule")(x)


@jax.tree_util.register_pytree_node_class
class Fragile:
    """A result that cannot always be made."""

    broken = False

    def __init__(self, x: Any):
        self.x = x

    def tree_flatten(self) -> Any:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Fragile":
        if cls.broken:
            raise ValueError("broken")
        return cls(*children)


def test_events_are_there_even_if_the_result_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}), Fragile(x + 1))[1])

    def run(x: Any) -> Any:
        x = f(x).x
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="broken"):
            patch.setattr(Fragile, "broken", True)
            f(x)
        return f(x + 1).x

    for _ in range(3):
        out, logs = lox.spool(run)(jnp.float32(1))
        assert (float(out), logs["x"].tolist()) == (4, [1, 2, 3])


def test_several_devices(missed: list[Any]) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    f, two = logging(), jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(two), "d")
    split = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    arrays = [jax.device_put(jnp.arange(4.0), two[0]), jax.device_put(jnp.arange(4.0), two[1]), split]
    for n in range(3):
        before = len(missed)
        for x in arrays:
            out, logs = lox.spool(lambda x: f(x))(x)
            assert out.sharding == x.sharding
            np.testing.assert_array_equal(logs["x"], np.arange(4))
            np.testing.assert_array_equal(out, 2 * np.arange(4))
        assert n == 0 or missed[before:] == []
    for _ in range(3):
        out, logs = lox.spool(lambda: [f(x) for x in arrays])()
        np.testing.assert_array_equal(logs["x"], [np.arange(4)] * 3)


def test_another_precision_is_another_program() -> None:
    f = logging()
    for _ in range(3):
        assert lox.spool(lambda: f(jnp.float32(1)))()[1]["x"].dtype == jnp.float32
        with jax.enable_x64(True):
            assert lox.spool(lambda: f(jnp.float64(1)))()[1]["x"].dtype == jnp.float64
            assert lox.spool(lambda: f(1.0))()[1]["x"].dtype == jnp.float64
        assert lox.spool(lambda: f(1.0))()[1]["x"].dtype == jnp.float32


def test_nothing_is_kept_alive() -> None:
    def run() -> list[Any]:
        f, array = logging(), jnp.arange(1000.0)
        held = jax.jit(lambda x: (lox.log({"held": x}), x + array)[1])
        for _ in range(3):
            out, logs = lox.spool(lambda x: f(held(x)))(jnp.arange(1000.0))
        return [weakref.ref(x) for x in (out, logs["x"], logs["held"], f, held, array)]

    alive = run()
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * len(alive)


@pytest.mark.slow
def test_many_scopes_need_one_program_and_little_memory(missed: list[Any]) -> None:
    f = logging()
    lox.spool(lambda x: f(x) / 2)(jnp.float32(1))
    before = len(missed)

    def run(x: Any) -> Any:
        for n in range(1000):
            with lox.scope(f"step{n}"):
                x = f(x) / 2
        return x

    for _ in range(2):
        logs = lox.spool(run)(jnp.float32(1))[1]
        assert list(logs) == [f"step{n}/x" for n in range(1000)]
    assert missed[before:] == []
    gc.collect()
    kept = [known for known in gc.get_objects() if type(known) is ProgramSource and "x" in "".join(known.keys)]
    assert len(kept) < 500


def test_functions_whose_logs_must_be_asked_for_cost_nothing(missed: list[Any]) -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}, explicit=True), x + 1)[1])
    x = jnp.float32(1)
    f(x)
    before = len(missed)
    with lox.testing.capture() as printed:
        result = f(f(x))
    assert (missed[before:], list(printed), float(result)) == ([], [], 3)
    for _ in range(2):
        assert lox.spool(lambda x: f(f(x)), "x")(x)[1]["x"].tolist() == [1, 2]
        assert lox.spool(f, "x")(x)[1]["x"] == 1
        assert lox.spool(lambda x: f(f(x)))(x)[1] == {}
        assert f(x) == 2


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The output of a process in which the sink is off from the beginning."""
    program = """
        import jax, jax.numpy as jnp
        from jax._src import pjit
        import lox

        missed = []
        original = pjit._get_fastpath_data
        pjit._get_fastpath_data = lambda *args: (missed.append(1), original(*args))[1]

        @jax.jit
        def f(x):
            lox.log({"x": x}, step=1)
            return x * 2

        @jax.jit
        def speaks(x):
            lox.log({"x": x})
            jax.debug.callback(lambda x: print("callback", x), x)
            return x

        x = jnp.float32(1)
        f(x)
        before = len(missed)
        print("result", f(f(x)), "dispatched from Python", len(missed) - before)
        for _ in range(2):
            print("spool", lox.spool(f)(x)[1], lox.spool(lambda x: f(f(x)))(x)[1], lox.spool(jax.vmap(f))(x[None])[1])
            lox.tap(lambda x: f(f(x)), lambda logs: print("tap", logs))(x)
            lox.tap(f, lambda logs: print("tap", logs))(x)
            print("mean", lox.spool(lambda x: f(f(x)), reduce="mean")(x)[1])
            jax.grad(lox.tap(f, lambda logs: print("grad", logs)))(x)
            f(x)
        for _ in range(2):
            speaks(x)
        jax.effects_barrier()
        for _ in range(2):
            print("spool", lox.spool(lambda x: speaks(speaks(x)))(x)[1])
            jax.effects_barrier()
    """
    environment = {**os.environ, "LOX_SINK": "off"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    yield subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.slow
def test_a_function_that_logs_costs_nothing_if_the_sink_is_off(silent: str) -> None:
    assert silent.splitlines()[0] == "result 4.0 dispatched from Python 0"


def test_transformations_see_the_events_of_such_a_function(silent: str) -> None:
    round = ["spool {'x': 1.0} {'x': [1.0, 2.0]} {'x': [1.0]}", *["tap {'x': 1.0}", "tap {'x': 2.0}", "tap {'x': 1.0}"]]
    round += ["mean {'x': 1.5}", "grad {'x': 1.0}"]
    calls = ["callback 1.0"]
    spooled = [*calls * 2, "spool {'x': [1.0, 1.0]}"]
    assert sorted(silent.splitlines()[1:]) == sorted([*round * 2, *calls * 2, *spooled * 2])


# --- programs that call the host, outside of transformations ---------------------------------------


def tapped(callback: Any, **options: Any) -> Any:
    return jax.jit(lox.tap(lambda x: (lox.log({"x": x.sum()}, step=1), x * 2)[1], callback, **options))


def in_a_loop(callback: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        lox.log({"x": x.sum()}, step=i)
        return x + 1, None

    return jax.jit(lox.tap(lambda x: lax.scan(step, x, jnp.arange(5))[0], callback, buffer=2))


def with_lanes(callback: Any) -> Any:
    return jax.jit(jax.vmap(lox.tap(lambda x: (lox.log({"x": x}), {"a": x, "b": (x, None)})[1], callback)))


def without_results(callback: Any) -> Any:
    return jax.jit(lox.tap(lambda x: lox.log({"x": x}), callback))


def with_constants(callback: Any) -> Any:
    array, number = jnp.arange(3.0), np.float32(3)
    run = lox.tap(lambda x, unused: (lox.log({"x": x + array, "number": number}), x * array)[1], callback)
    jitted = jax.jit(run)
    return lambda x: jitted(x, x)


def donated_and_static(callback: Any) -> Any:
    run = lambda x, n, *, m: (lox.log({"x": x, "n": n * m}), x * n)[1]  # noqa: E731
    jitted = jax.jit(lox.tap(run, callback), static_argnums=1, static_argnames="m", donate_argnums=0)
    return lambda x: jitted(x + 0, 2, m=3)


def prng_key(callback: Any) -> Any:
    run = lox.tap(lambda key, x: (lox.log({"x": x, "key": key}), jax.random.fold_in(key, 1))[1], callback)
    jitted = jax.jit(run)
    return lambda x: jitted(jax.random.key(3), x)


def in_a_branch(callback: Any) -> Any:
    run = lambda x: lax.cond(x.sum() > 2, lambda x: (lox.log({"x": x}), x)[1], lambda x: -x, x)  # noqa: E731
    return jax.jit(lox.tap(run, callback))


def differentiated(callback: Any) -> Any:
    return jax.jit(jax.value_and_grad(lox.tap(lambda x: (lox.log({"x": x}), (x**2).sum())[1], callback)))


def a_jit_inside_of_vmap(callback: Any) -> Any:
    return jax.vmap(tapped(callback))


def watched(callback: Any) -> Any:
    return jax.jit(lox.tap(lox.watch(lambda x: (lox.log({"x": x}), x + 1)[1]), callback))


CALLING = {
    "tap": tapped,
    "a buffer": in_a_loop,
    "lanes": with_lanes,
    "no results": without_results,
    "constants": with_constants,
    "donated and static": donated_and_static,
    "a PRNG key": prng_key,
    "a branch": in_a_branch,
    "grad": differentiated,
    "vmap of a jit": a_jit_inside_of_vmap,
    "watch": watched,
}


def as_lists(tree: Any) -> Any:
    """The numbers in a tree, without the axes of logs."""

    def plain(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tolist()

    return jax.tree.map(plain, (dict(tree), tree.steps) if isinstance(tree, lox.logdict) else tree)


@pytest.mark.sample(4)
@pytest.mark.parametrize("calling", CALLING.values(), ids=CALLING)
def test_cpp_calls_programs_that_call_the_host(calling: Callable[..., Any], missed: list[Any]) -> None:
    """Each call has the events and the results of one in a function that is new, in order."""
    events: list[Any] = []
    xs = [jnp.arange(3.0) + n for n in range(6)]
    expected, results = [], []
    for x in xs:
        results.append(calling(lambda logs: expected.append(as_lists(logs)))(x))
    jax.effects_barrier()
    f = calling(lambda logs: events.append(as_lists(logs)))
    first = f(xs[0])
    before = len(missed)
    outs = [first, *[f(x) for x in xs[1:]]]
    dispatched = [executable for executable in missed[before:] if executable is not None]  # None: JAX maps it first
    jax.effects_barrier()
    assert events == expected
    assert as_lists(outs) == as_lists(results)
    assert dispatched == []


def test_what_cpp_calls_outside_is_seen_by_transformations(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(lox.config, "sink", lambda logs: printed.append(float(logs["x"])))
    f, x = logging(step=1), jnp.float32(1)
    inside = tapped(lambda logs: printed.append(-float(logs["x"])))
    for _ in range(3):
        f(f(x))
        inside(x)
        jax.effects_barrier()
        assert printed == [1, 2, -1]
        assert lox.spool(f)(x)[1]["x"] == 1
        assert lox.spool(lambda x: f(f(x)))(x)[1]["x"].tolist() == [1, 2]
        assert lox.spool(jax.vmap(f))(x[None])[1]["x"].tolist() == [1]
        assert lox.nolog(lambda x: f(f(x)))(x) == 4
        assert lox.spool(jax.jit(lambda x: f(f(x))))(x)[1]["x"].tolist() == [1, 2]
        jax.effects_barrier()
        assert printed == [1, 2, -1]
        assert lox.spool(lambda x: inside(inside(x)))(x)[1]["x"].tolist() == [1, 2]
        jax.effects_barrier()
        assert printed == [1, 2, -1, -1, -2]
        printed.clear()


@pytest.mark.slow
def test_those_who_wait_for_effects_wait_for_what_cpp_has_called() -> None:
    """On a CPU, calls return only after their callbacks: see the next test."""
    events: list[float] = []

    def slow(logs: Any) -> None:
        time.sleep(0.05)
        events.append(float(logs["x"][0]))

    f = in_a_loop(slow)
    for _ in range(3):
        events.clear()
        f(jnp.float32(0))
        jax.effects_barrier()
        assert events == [0, 2, 4]


def test_what_cpp_has_called_last_on_each_device_is_waited_for() -> None:
    f = tapped(lambda logs: None)
    xs = [jax.device_put(jnp.arange(3.0), device) for device in jax.devices()[:2]]
    for x in xs:
        f(x)  # from Python
    jax.effects_barrier()
    assert runtime_tokens.output_runtime_tokens == {}
    known: list[Any] = []
    for _ in range(2):
        for x in xs:
            f(x)
        now = runtime_tokens.output_runtime_tokens
        assert now.keys() == {x.device for x in xs}
        assert all(token.device is device and all(token is not x for x in known) for device, token in now.items())
        known += now.values()
    jax.effects_barrier()
    assert runtime_tokens.output_runtime_tokens == {}


def test_what_cpp_calls_leaves_no_failure_of_an_earlier_program_behind() -> None:
    """On a GPU, the token of a program that has failed is still there when the next one is called."""

    class Failed:
        def block_until_ready(self) -> None:
            raise ValueError("an earlier program has failed")

    f = tapped(lambda logs: None)
    f(jnp.float32(1))
    jax.effects_barrier()
    runtime_tokens.set_token_result(order_effect, Failed())
    f(jnp.float32(1))
    jax.effects_barrier()


def test_an_error_waits_for_the_barrier_beside_other_programs() -> None:
    """A program that C++ has called fails later, and meanwhile JAX calls another one with effects from Python."""
    slow = jax.jit(lambda x: lax.fori_loop(0, 500, lambda _, c: jnp.sin(c @ x) / 300, x))
    other = jax.jit(lambda x: (jax.debug.callback(lambda x: None, x), x)[1])
    failing = False

    def fail(logs: Any) -> None:
        if failing:
            raise KeyError("boom")

    f, x = tapped(fail), jnp.ones((200, 200))
    for _ in range(2):
        f(slow(x))
        other(1.0)
    jax.effects_barrier()
    failing = True
    with pytest.raises(KeyError, match="boom"), lox.reraise():
        f(slow(x))
        other(1.0)
        jax.effects_barrier()
    failing = False
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # once more on 0.11, with or without lox's dispatch
        jax.effects_barrier()
    f(x)
    jax.effects_barrier()


def test_a_callback_that_fails_in_a_program_that_cpp_calls() -> None:
    events: list[float] = []

    def fail(logs: Any) -> None:
        if logs["x"] > 5:
            raise KeyError("too large")
        events.append(float(logs["x"]))

    f = tapped(fail)
    for x in (1.0, 2.0, 9.0, 3.0, 8.0, 4.0):
        if x > 5:
            with pytest.raises(KeyError, match="too large"), lox.reraise():
                jax.block_until_ready(f(jnp.float32(x)))
                jax.effects_barrier()
        else:
            f(jnp.float32(x))
            jax.effects_barrier()
    jax.effects_barrier()
    assert events == [1, 2, 3, 4]


def test_programs_with_other_effects_are_not_called_by_cpp() -> None:
    events: list[Any] = []

    def run(x: Any) -> Any:
        lox.log({"x": x})
        jax.debug.callback(lambda x: events.append(("debug", float(x))), x, ordered=True)
        return x * 2

    f = jax.jit(lox.tap(run, lambda logs: events.append(("lox", float(logs["x"])))))
    for n in range(4):
        f(jnp.float32(n))
    jax.effects_barrier()
    assert sorted(events) == sorted([(name, n) for name in ("lox", "debug") for n in range(4)])


def test_nans_are_found_in_programs_that_call_the_host() -> None:
    f = jax.jit(lox.tap(lambda x: (lox.log({"x": x}), jnp.log(x))[1], lambda logs: events.append(float(logs["x"]))))
    events: list[float] = []
    for _ in range(2):
        f(jnp.float32(-1))
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            f(jnp.float32(-1))
        f(jnp.float32(2))
    jax.effects_barrier()
    assert [x for x in events if x == 2] == [2, 2]


def test_nothing_of_a_program_that_calls_the_host_is_kept_alive() -> None:
    def run() -> list[Any]:
        array = jnp.arange(1000.0)
        held = jax.jit(lox.tap(lambda x: (lox.log({"x": x}), x + array)[1], lambda logs: None))
        for _ in range(3):
            out = held(array)
        jax.effects_barrier()
        return [weakref.ref(x) for x in (out, held, array)]

    alive = run()
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * len(alive)


def test_threads_wait_for_their_own_programs() -> None:
    events: list[float] = []
    f = tapped(lambda logs: events.append(float(logs["x"])))
    f(jnp.float32(-1))
    jax.effects_barrier()
    events.clear()

    def run(start: float) -> None:
        for n in range(20):
            f(jnp.float32(start + n))
        jax.effects_barrier()

    threads = [threading.Thread(target=run, args=(100.0 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(events) == [100.0 * t + n for t in range(4) for n in range(20)]
    for t in range(4):
        assert [x for x in events if x // 100 == t] == [100.0 * t + n for n in range(20)]
