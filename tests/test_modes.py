"""JAX's modes: a transformed function is never stricter than the function."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
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

ONE, FIVE, XS = jnp.float32(1), jnp.float32(5), jnp.arange(4.0)


def straight(x: Any) -> Any:
    for _ in range(3):
        lox.log({"c": x})
        x = x * x
    return x


def scanned(x: Any) -> Any:
    def step(c: Any, t: Any) -> Any:
        lox.log({"c": c}, step=t)
        return c + t * ONE, None

    return lax.scan(step, x, XS)[0]


def whiled(x: Any) -> Any:
    def body(c: Any) -> Any:
        lox.log({"c": c})
        return c + ONE

    return lax.while_loop(lambda c: c < FIVE, body, x)


def branch(x: Any) -> Any:
    def large(x: Any) -> Any:
        lox.log({"c": x}, size=x)
        return x

    return lax.cond(x > FIVE, large, lambda x: x, x)


def nested(x: Any) -> Any:
    lox.log({"c": x})
    return jax.jit(scanned)(x) + branch(x)


def ignore(logs: Any) -> None:
    del logs


FUNCTIONS: list[Any] = [scanned, whiled, nested]
EVERY: dict[str, Callable[..., Any]] = {
    "spool": lambda f: lox.spool(f, capacity=10),
    "reduce": lambda f: lox.spool(f, reduce="mean"),
    "min": lambda f: lox.spool(f, reduce="min"),
    "std": lambda f: lox.spool(f, reduce="std"),
    "interval": lambda f: lox.spool(f, interval=2, capacity=10),
    "tap": lambda f: lox.tap(f, ignore),
    "tap interval": lambda f: lox.tap(f, ignore, interval=2),
    "tap reduce": lambda f: lox.tap(f, ignore, reduce="mean"),
    "buffer": lambda f: lox.tap(f, ignore, buffer=2),
    "buffer reduce": lambda f: lox.tap(f, ignore, buffer=2, reduce="max"),
    "watch": lox.watch,
    "spool of tap": lambda f: lox.spool(lox.tap(f, ignore), capacity=10),
    "nolog": lox.nolog,
}
every = pytest.mark.parametrize("transform", list(EVERY.values()), ids=list(EVERY))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- transfer guards ---


@pytest.mark.sample(1)
@every
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_transfer_guard(transform: Callable[..., Any], jit: bool) -> None:
    lox.config.sink = "off"
    for f in FUNCTIONS:
        f = jax.jit(f) if jit else f
        expected = transform(f)(ONE)
        with jax.transfer_guard("disallow"):
            fresh = transform(jax.jit(lambda x: f(x)) if jit else lambda x: f(x))  # noqa: B023
            results = [transform(f)(ONE), fresh(ONE), fresh(ONE)]
        for result in results:
            same(result, expected)


def test_transfer_guard_of_a_compiled_tap() -> None:
    events: list[float] = []
    f = jax.jit(lox.tap(scanned, lambda logs: events.append(float(logs["c"]))))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready([f(ONE), f(ONE)])
    with jax.transfer_guard("disallow_explicit"):
        jax.block_until_ready(f(ONE))
    jax.effects_barrier()
    assert events == [1.0, 1.0, 2.0, 4.0] * 3


def test_transfer_guard_still_guards_the_function() -> None:
    def f(x: Any) -> Any:
        lox.log({"x": x})
        return x + np.float32(1)

    for transform in EVERY.values():
        with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            transform(f)(ONE)


def test_transfer_guard_default_sink() -> None:
    with lox.testing.capture() as events, jax.transfer_guard("disallow"):
        straight(ONE)
        jax.jit(straight)(ONE)
        lox.log({"x": 1.0, "y": np.arange(2)}, step=3)
        jax.effects_barrier()
    assert [float(e["c"]) for e in events[:-1]] == [1.0] * 6
    assert events[-1].step["x"] == 3


def test_transfer_guard_logger(tmp_path: Path) -> None:
    prng_key = jax.random.key(0)
    with lox.SaveLogger(tmp_path) as logger, jax.transfer_guard("disallow"):
        for f in (scanned, jax.jit(scanned)):
            state = logger.init(prng_key, config={"lr": ONE})
            logger.tap(f, state)(ONE)
            logger.tap(f, state, buffer=3)(ONE)
            logger.spool(f, state)(ONE)
            logger.log(state, {"end": 1.0}, step=4)
        jax.jit(lambda prng_key: logger.log(logger.init(prng_key), {"x": ONE}))(prng_key)
        logger.flush()
    runs = lox.load(tmp_path)
    assert [list(logs) for logs in runs.values()] == [["c", "end"], ["c", "end"], ["x"]]
    assert [len(logs["c"]) for logs in list(runs.values())[:2]] == [12, 12]


# --- leaks of tracers ---


@pytest.mark.sample(1)
@every
def test_checking_leaks(transform: Callable[..., Any]) -> None:
    lox.config.sink = "off"
    for f in FUNCTIONS:
        with jax.checking_leaks():
            jax.block_until_ready(transform(lambda x: f(x))(ONE))  # noqa: B023
            jax.block_until_ready(jax.jit(transform(lambda x: f(x)))(ONE))  # noqa: B023


def test_checking_leaks_vmapped_branches_with_loops() -> None:
    def f(x: Any) -> Any:
        return lax.cond(x > FIVE, scanned, whiled, x)

    with jax.checking_leaks():
        logs = lox.spool(jax.vmap(f), capacity=10)(jnp.array([1.0, 6.0]))[1]
    assert logs.lane(0)["c"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert logs.lane(1)["c"].tolist() == [6.0, 6.0, 7.0, 9.0]


# --- NaNs and infinities ---


def rarely(x: Any) -> Any:
    return lax.scan(lambda c, t: (c, branch(t)), x, XS)[1].sum()


def in_some_lanes(x: Any) -> Any:
    return jax.vmap(branch)(x * jnp.array([1.0, 6.0, 2.0], jnp.float32)).sum()


DEBUGGERS: dict[str, Any] = {"nans": jax.debug_nans, "infs": jax.debug_infs}


@pytest.mark.sample(2)
@pytest.mark.parametrize("debug", list(DEBUGGERS.values()), ids=list(DEBUGGERS))
@every
def test_debugging_of_numbers_after_compilation(transform: Callable[..., Any], debug: Any) -> None:
    for f in (rarely, jax.jit(in_some_lanes)):
        before = transform(f)(ONE)
        with debug(True):
            transform(f)(ONE)
        same(transform(f)(ONE), before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["mean", "sum", "min", "max", "first", "last", "count", "std", "var"])
@pytest.mark.parametrize("debug", list(DEBUGGERS.values()), ids=list(DEBUGGERS))
def test_debugging_of_numbers_under_reductions(how: str, debug: Any) -> None:
    for f in (jax.jit(in_some_lanes), lambda x: rarely(x) + in_some_lanes(x)):
        lox.spool(f, reduce=how)(ONE)
        with debug(True):
            lox.spool(f, reduce=how)(ONE)
            lox.tap(f, ignore, reduce=how, buffer=2)(ONE)


def test_debug_nans_pads_with_zeros_and_finds_those_of_the_program() -> None:
    f = jax.jit(in_some_lanes)
    assert np.isnan(lox.spool(f)(ONE)[1]["c"]).tolist() == [[True, False, True]]
    with jax.debug_nans(True):
        assert lox.spool(f)(ONE)[1]["c"].tolist() == [[0.0, 6.0, 0.0]]
        with pytest.raises(FloatingPointError):
            lox.spool(jax.jit(lambda x: branch(jnp.log(-x))))(ONE)


# --- threads ---


class Failure(Exception):
    """Every thread raises the same error."""

    def __init__(self, number: int):
        super().__init__("no")
        self.number = number


def in_threads(work: Callable[[int], Any], count: int = 3) -> None:
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("options", [{}, {"buffer": 2}, {"reduce": "max"}], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_threads_whose_one_callback_raises(jit: bool, options: Any) -> None:
    def callback(logs: Any) -> None:
        raise Failure(int(np.max(logs["x"])))

    def f(x: Any) -> Any:
        lox.log({"x": x})
        return x

    f = jax.jit(f) if jit else f

    def work(k: int) -> None:
        for n in range(10):
            with pytest.raises(Failure) as info:
                lox.tap(f, callback, **options)(k * 100 + n)
            assert info.value.number == k * 100 + n

    in_threads(work)


def test_threads_one_of_which_raises() -> None:
    f = jax.jit(lambda x: lax.scan(lambda c, t: (c, lox.log({"x": t}) and None), x, x + jnp.arange(5))[0])
    received: dict[int, list[int]] = {k: [] for k in range(3)}

    def work(k: int) -> None:
        def callback(logs: Any) -> None:
            if k == 1:
                raise Failure(int(logs["x"]))
            received[k].append(int(logs["x"]))

        for n in range(10):
            if k == 1:
                with pytest.raises(Failure) as info:
                    lox.tap(f, callback)(100 * n)
                assert info.value.number == 100 * n
                with pytest.raises(lox.NonFiniteError, match="'y' is inf"):
                    lox.watch(jax.jit(lambda x: lox.log({"y": x / 0}) and x))(1.0)
            else:
                lox.tap(f, callback)(100 * n)

    in_threads(work)
    assert received == {0: [100 * n + i for n in range(10) for i in range(5)], 1: [], 2: received[0]}


def test_what_an_inner_callback_raises_in_one_program_with_an_outer_one() -> None:
    inner: list[int] = []

    def fail(logs: Any) -> None:
        inner.append(int(logs["x"]))
        raise Failure(int(logs["x"]))

    f = jax.jit(lox.tap(lambda x: lox.log({"x": x}) and x, fail))
    for transform in (lambda f: lox.tap(f, ignore), lox.watch, lambda f: lox.tap(lox.watch(f), ignore, buffer=3)):
        with pytest.raises(Failure) as info:
            transform(f)(7)
        assert info.value.number == 7
    assert inner == [7, 7, 7]


def test_compiled_taps_in_threads() -> None:
    def callback(logs: Any) -> None:
        raise Failure(int(logs["x"]))

    f = jax.jit(lox.tap(lambda x: lox.log({"x": x}) and x, callback))
    good = jax.jit(lambda x: lox.log({"x": x}) and 2 * x)
    received: list[int] = []

    def work(k: int) -> None:
        for n in range(10):
            with pytest.raises(Exception, match="Failure: no"):
                jax.block_until_ready(f(n))
                jax.effects_barrier()
            assert int(lox.tap(good, lambda logs: received.append(int(logs["x"])))(n)) == 2 * n

    in_threads(work)
    assert sorted(received) == sorted(3 * list(range(10)))


# --- export ---


def everything(x: Any) -> Any:
    lox.log({"first": x, "tree": {"a": x, "b": [x, 2 * x]}}, step=3)
    lox.log({"histogram": lox.Histogram(x, bins=3, range=(0.0, 2.0)), "image": lox.Image(jnp.ones((2, 2)))})
    jax.vmap(lambda t: (branch(6 * t), lox.log({"lane": t}, step=x)) and t)(XS)
    scanned(x)
    whiled(x)
    return x


def exported() -> bytes:
    from jax import export

    f = jax.jit(lox.spool(everything, capacity={"c": 9}))
    data = export.export(f)(jax.ShapeDtypeStruct((), jnp.float32)).serialize()
    return bytes(data)


def test_export_round_trip(tmp_path: Path) -> None:
    from jax import export

    pytest.importorskip("flatbuffers")
    (tmp_path / "exported").write_bytes(exported())
    script = "import pathlib, sys, jax, lox, jax.export; " + "; ".join(
        [
            "e = jax.export.deserialize(bytearray(pathlib.Path('exported').read_bytes()))",
            "_, logs = e.call(jax.numpy.float32(1))",
            "print(logs, logs.step, logs.valid, logs.lane(1), logs.compact().to_dataframe().to_string(), sep='\\n')",
        ]
    )
    expected, logs = jax.jit(lox.spool(everything, capacity={"c": 9}))(ONE), None
    _, logs = again = export.deserialize(bytearray((tmp_path / "exported").read_bytes())).call(ONE)
    same(again, expected)
    assert list(logs) == list(expected[1]) and str(logs) == str(expected[1])
    assert jax.tree.map(jnp.shape, logs.steps) == jax.tree.map(jnp.shape, expected[1].steps)
    same(logs.lane(1), expected[1].lane(1))
    environment = {**os.environ, "PYTHONPATH": str(Path(lox.__file__).parents[1])}
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    _, logs = expected
    parts = [logs, logs.step, logs.valid, logs.lane(1), logs.compact().to_dataframe().to_string()]
    assert (process.stdout, process.stderr) == ("\n".join(map(str, parts)) + "\n", "")


def test_export_of_logify_and_of_loggers_states(tmp_path: Path) -> None:
    from jax import export

    pytest.importorskip("flatbuffers")

    def f(x: Any) -> Any:
        lox.logify.log("x", x, reduction="mean")
        return x

    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.PRNGKey(0))
        g = jax.jit(lambda state, x: (state, lox.logify.logify(f)(x)))
        data = export.export(g)(state, ONE).serialize()
        same(export.deserialize(data).call(state, ONE), g(state, ONE))


# --- others ---


@pytest.mark.sample(1)
@every
def test_rank_promotion_and_checks(transform: Callable[..., Any]) -> None:
    lox.config.sink = "off"
    for f in (nested, lambda x: jax.vmap(whiled)(x * jnp.array([1.0, 2.0]))):
        expected = transform(f)(ONE)
        with jax.numpy_rank_promotion("raise"), jax.enable_checks(True):
            same(transform(f)(ONE), expected)


def test_no_tracing_the_second_time() -> None:
    for name in ("spool", "reduce", "interval", "nolog"):  # JAX counts every call of a program with effects as tracing
        f = EVERY[name](jax.jit(nested))
        expected = f(ONE)
        str(expected)  # compacts them
        with jax.no_tracing():
            same(f(ONE), expected)


def test_precision_and_devices_between_calls() -> None:
    f = jax.jit(scanned)
    expected = lox.spool(f)(ONE)
    with jax.default_matmul_precision("highest"), jax.threefry_partitionable(True):
        same(lox.spool(f)(ONE), expected)
    events: list[float] = []
    device = devices(4)[3]
    with jax.default_device(device):
        x = jnp.ones(())
        out, logs = lox.spool(f)(x)
        lox.tap(f, lambda logs: events.append(float(logs["c"])))(x)
        lox.tap(scanned, lambda logs: events.append(float(logs["c"])), interval=2)(x)
    assert events == [1.0, 1.0, 2.0, 4.0, 1.0, 2.0]
    assert out.devices() == logs["c"].devices() == {device}
    same(lox.spool(f)(ONE), expected)


@pytest.mark.sample(1)
@every
def test_x64_between_calls(transform: Callable[..., Any]) -> None:
    lox.config.sink = "off"
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    for f in (lambda x: nested(x) + in_some_lanes(x), jax.jit(lambda x: nested(x) + rarely(x))):
        first = transform(f)(ONE)
        with enable(True):
            transform(f)(ONE)
        same(transform(f)(ONE), first)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("options", [{}, {"interval": 2}, {"reduce": "mean"}, {"reduce": "last"}], ids=str)
def test_events_of_64_bits_stay_so_after_their_context_has_ended(options: Any, jit: bool) -> None:
    """They are joined outside of it, where JAX would make a step of 2**40 a zero."""
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

    def log(i: Any) -> Any:
        lox.log({"x": jnp.float64(1 / 3) + i, "n": i}, step=2**40 + i)
        return i

    def fun() -> None:
        with wide(True):
            for i in range(3):
                (jax.jit(log) if jit else log)(i)

    _, logs = lox.spool(fun, **options)()
    events = {"interval": [0, 2], "mean": 1.0, "last": 2}.get(
        options.get("reduce", next(iter(options), None)), [0, 1, 2]
    )
    steps = 2 if "reduce" in options else events
    np.testing.assert_array_equal(
        np.asarray(logs["x"]), np.float64(1 / 3) + np.asarray(events, np.float64), strict=True
    )
    np.testing.assert_array_equal(np.asarray(logs.step["x"]), 2**40 + np.asarray(steps, np.int64), strict=True)
    assert logs["n"].dtype == (np.float64 if options.get("reduce") == "mean" else np.int64)
