"""spool and its siblings neither retrace nor recompile, and leave a function's own cache alone."""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import subprocess
import sys
import textwrap
import time
import typing
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lox
import lox.testing


class Counter:
    """Counts how often a function was traced."""

    def __init__(self) -> None:
        self.traces = 0

    def fun(self, x: Any, y: Any = 1.0) -> Any:
        self.traces += 1

        def step(carry: Any, t: Any) -> Any:
            lox.log({"carry": carry}, step=t)
            return carry + x, None

        lox.log({"x": x})
        return jax.lax.scan(step, x * y, jnp.arange(3))[0]


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collect the names of the programs that XLA compiles meanwhile."""
    compiled: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Compiling"):
                compiled.append(record.getMessage().split(" with global shapes")[0])

    logger, handler = logging.getLogger("jax"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        with jax.log_compiles():
            yield compiled
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def consume(transform: Any) -> Any:
    return {
        "spool": lambda f: lox.spool(f),
        "spool mean": lambda f: lox.spool(f, reduce="mean"),
        "tap": lambda f: lox.tap(f, len),
        "nolog": lambda f: lox.nolog(f),
        "keep": lambda f: lox.keep(f, []),
    }[transform]


TRANSFORMS = ["spool", "spool mean", "tap", "nolog", "keep"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_second_call_of_a_jitted_function_neither_retraces_nor_recompiles(transform: str) -> None:
    counter = Counter()
    f = jax.jit(counter.fun)
    f_transformed = consume(transform)(f)
    x = jnp.float32(2.0)
    jax.block_until_ready(f_transformed(x))
    traces = counter.traces
    with count_compilations() as compiled:
        for _ in range(3):
            jax.block_until_ready(f_transformed(x))
            jax.block_until_ready(consume(transform)(f)(x))  # a new wrapper knows what the old one knew
    assert compiled == []
    assert counter.traces == traces == 1


class Recorder(lox.Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def write(self, run: Any, logs: lox.logdict) -> None:
        self.events += [f"{run.name} {key} {value}" for key, values in logs.items() for value in values]


def by_logger(method: str, **options: Any) -> Any:
    def call(f: Any, x: Any) -> list[str]:
        with Recorder() as logger:
            getattr(logger, method)(f, logger.init(jax.random.key(7)), **options)(x)
        return logger.events

    return call


def by_callback(transform: Any, **options: Any) -> Any:
    def call(f: Any, x: Any) -> list[str]:
        events: list[str] = []
        transform(f, lambda given: events.append(str(given)), **options)(x)
        return events

    return call


WITH_NEW_ONES = {
    "tap": by_callback(lox.tap),
    "tap(buffer)": by_callback(lox.tap, buffer=2),
    "tap(reduce)": by_callback(lox.tap, reduce="mean"),
    "watch": by_callback(lox.watch),
    "logger.tap": by_logger("tap"),
    "logger.tap(buffer)": by_logger("tap", buffer=2),
    "logger.spool": by_logger("spool"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_NEW_ONES)
def test_a_new_callback_or_logger_for_every_call_compiles_nothing_again(case: str, capsys: Any) -> None:
    counter, call = Counter(), WITH_NEW_ONES[case]
    f, x = jax.jit(counter.fun), jnp.float32(np.inf)
    events = call(f, x)
    assert events and counter.traces == 1
    with count_compilations() as compiled:
        for _ in range(3):
            assert call(f, x) == events
    assert compiled == []
    assert counter.traces == 1


def root_mean_square(scale: Any = 1.0) -> lox.Reduction:
    return lox.Reduction(
        init=lambda x: (x, 0.0),
        update=lambda state, x: (state[0] + scale * x**2, state[1] + 1.0),
        finish=lambda state: jnp.sqrt(state[0] / state[1]),
    )


@pytest.mark.parametrize("case", ["spool", "tap", "tap(buffer)"])
def test_a_reduction_made_anew_for_every_call_compiles_nothing_again(case: str) -> None:
    counter, seen = Counter(), []
    f, x = jax.jit(counter.fun), jnp.float32(2)
    transform = {
        "spool": lambda reduction: seen.append(lox.spool(f, reduce=reduction)(x)[1]),
        "tap": lambda reduction: lox.tap(f, seen.append, reduce=reduction)(x),
        "tap(buffer)": lambda reduction: lox.tap(f, seen.append, reduce={"carry": reduction}, buffer=3)(x),
    }[case]
    transform(root_mean_square())
    with count_compilations() as compiled:
        for _ in range(3):
            transform(root_mean_square())
    assert compiled == [] and counter.traces == 1
    assert len({str(logs) for logs in seen if "carry" in logs}) == 1
    count = len(seen)
    transform(root_mean_square(4.0))  # which is another
    assert [str(logs) for logs in seen[count:]] != [str(logs) for logs in seen[:count][-(len(seen) - count) :]]


factor, table = 1.0, {"factor": 1.0}


def scaled(x: Any) -> Any:
    return factor * x


def test_reductions_that_may_mean_something_else_are_different() -> None:
    def using(update: Any) -> lox.Reduction:
        return lox.Reduction(init=lambda x: x, update=update, finish=lambda state: state)

    def by_itself(state: Any, x: Any) -> Any:
        return by_itself if x is None else x

    global factor
    array, same = jnp.ones(()), Counter()
    makers: dict[str, Any] = {
        "nothing": lambda: using(lambda state, x: x),
        "a number": lambda n=2: using(lambda state, x: n * x),
        "a global": lambda: using(lambda state, x: factor * x),
        "a function": lambda: using(lambda state, x: scaled(x)),
        "in a function": lambda: using(lambda state, x: (lambda: factor * x)()),
    }
    changing: dict[str, Any] = {
        "a dict": lambda: using(lambda state, x: table["factor"] * x),
        "an array": lambda: using(lambda state, x: array * x),
        "an object": lambda: using(lambda state, x: same.traces * x),
        "a module of the user": lambda: using(lambda state, x: sys.modules and lox.testing and x),
        "a function that calls itself": lambda: using(lambda state, x: by_itself(state, x)),
    }
    before = {name: make() for name, make in makers.items()}
    for name, make in makers.items():
        assert make() == before[name] and hash(make()) == hash(before[name]), name
    for name, make in changing.items():
        reduction = make()
        assert reduction == reduction and make() != reduction, name
    assert makers["a number"](2) != makers["a number"](2.0) != makers["a number"](-0.0) != makers["a number"](0.0)
    factor = 3.0
    try:
        different = {name for name, make in makers.items() if make() != before[name]}
        assert different == {"a global", "a function", "in a function"}
    finally:
        factor = 1.0


@pytest.mark.slow
def test_programs_keep_neither_callbacks_nor_loggers_alive() -> None:
    f = jax.jit(Counter().fun)

    class Callback:
        def __call__(self, logs: lox.logdict) -> None:
            pass

    def use() -> list[Any]:
        callback = Callback()
        with Recorder() as logger:
            state = logger.init(jax.random.key(7))
            logger.tap(f, state)(1.0)
            logger.spool(f, state)(1.0)
            lox.tap(f, callback)(1.0)
            lox.tap(f, callback, buffer=2)(1.0)
        return [weakref.ref(callback), weakref.ref(logger)]

    refs, deadline = use(), time.monotonic() + 30
    while any(ref() for ref in refs) and time.monotonic() < deadline:  # the thread of the logger may not have ended yet
        gc.collect()
        time.sleep(0.01)
    assert [ref() for ref in refs] == [None, None]


def test_counting_compilations_works() -> None:
    with count_compilations() as compiled:
        jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(jnp.float32(1)))
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_functions_own_cache_stays_intact(transform: str) -> None:
    counter = Counter()
    f = jax.jit(counter.fun)
    x = jnp.float32(2.0)
    with lox.testing.capture() as before:
        f(x)
    size = f._cache_size()
    for _ in range(5):
        consume(transform)(f)(x)
        consume(transform)(lambda x: f(x))(x)
    assert f._cache_size() <= size + 1  # one entry for all calls inside a transformation
    with count_compilations() as compiled, lox.testing.capture() as after:
        f(x)
    assert compiled == []
    assert counter.traces == 1
    assert list(map(str, before)) == list(map(str, after)) and len(after) == 4


def test_a_spooled_function_spools_the_same_under_jit_again_and_again() -> None:
    counter = Counter()
    g = jax.jit(lox.spool(counter.fun))
    results = [str(g(jnp.float32(2.0))[1]) for _ in range(3)]
    assert results == ["{'x': 2.0, 'carry': [2.0, 4.0, 6.0]}"] * 3
    assert counter.traces == 1


def test_an_eager_scan_is_compiled_once() -> None:
    def step(carry: Any, t: Any) -> Any:
        lox.log({"carry": carry})
        return carry + 1, None

    def f(x: Any) -> Any:
        return jax.lax.scan(step, x, None, length=3)[0]

    x = jnp.float32(0)
    jax.block_until_ready(lox.spool(f)(x))
    with count_compilations() as compiled:
        jax.block_until_ready(lox.spool(f)(x))
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, programs",
    [
        ({}, ["half", "finish"]),
        ({"reduce": "mean"}, ["half", "half", "finish"]),
        ({"reduce": "std"}, ["half", "half", "finish"]),
    ],
)
def test_logs_of_a_few_jitted_functions_are_joined_by_one_program(options: Any, programs: list[str]) -> None:
    """With a state, there is a program for the first call, which begins it, and one for the others."""

    @jax.jit
    def half(x: Any) -> Any:
        lox.log({"x": x, "y": {"z": -x}}, step=1)
        return x / 2

    def f(x: Any) -> Any:
        return half(half(half(x)))

    x = jnp.float32(8)
    with count_compilations() as compiled:
        out, logs = lox.spool(f, **options)(x)
    assert [name.removeprefix("Compiling ").removeprefix("jit(").removesuffix(")") for name in compiled] == programs
    values = {"mean": (8 + 4 + 2) / 3, "std": float(np.std([8, 4, 2])), None: [8, 4, 2]}[options.get("reduce")]
    np.testing.assert_allclose(logs["x"], values, rtol=1e-6)
    assert logs.step["x"].tolist() == ([1, 1, 1] if not options else 1)
    assert float(out) == 1.0
    with count_compilations() as compiled:
        lox.spool(f, **options)(x)
    assert compiled == []


@jax.jit
def train(x: Any, i: Any) -> Any:
    lox.log({"loss": x.sum(), "norm": {"x": x}}, step=i)
    return x * 0.5


@jax.jit
def evaluate(x: Any, i: Any) -> Any:
    lox.log({"accuracy": x[0]}, step=i, where=i % 2 == 0)
    return x + 1


@jax.jit
def again(x: Any, i: Any) -> Any:
    """Logs a key that `train` logs too, as another type and with another step."""
    lox.log({"loss": i}, epoch=0.5)
    return x


def note(x: Any, i: Any) -> Any:
    lox.log({"i": i}, step=i)
    lox.log({"i": 10 * i})
    return x


# What a Python loop calls in every iteration.
CALLED: dict[str, tuple[Any, ...]] = {
    "one": (train,),
    "two": (train, evaluate),
    "two with a common key": (train, again),
    "log calls": (note,),
    "all": (train, evaluate, again, note),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [2, 17, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 40)]])
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("options", [{}, {"interval": 3}, {"reduce": {"loss": "mean"}}], ids=str)
def test_events_of_a_python_loop_are_those_of_one_program(called: str, number: int, options: Any) -> None:
    """However many there are, and whatever has logged them: they are joined in several ways."""
    if "reduce" in options and called == "log calls":
        options = {"reduce": {"i": "mean"}}

    def loop(x: Any) -> Any:
        for i in range(number):
            for function in CALLED[called]:
                x = function(x, i)
        return x

    x = jnp.arange(3.0)
    out, logs = lox.spool(loop, **options)(x)
    out_of_one, logs_of_one = jax.jit(lox.spool(loop, **options))(x)
    np.testing.assert_allclose(out, out_of_one, rtol=1e-6)
    logs_of_one = logs_of_one.compact()
    assert [*logs] == [*logs_of_one]
    for (path, a), (path_of_one, b) in zip(
        jax.tree_util.tree_leaves_with_path(logs), jax.tree_util.tree_leaves_with_path(logs_of_one), strict=True
    ):
        assert path == path_of_one
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(path))
    assert jax.tree.structure(logs) == jax.tree.structure(logs_of_one)


@pytest.mark.slow
def test_a_long_python_loop_needs_few_programs_to_join_its_events() -> None:
    def loop(x: Any, number: int) -> Any:
        for i in range(number):
            x = evaluate(train(x, i), i)
        return x

    lox.spool(loop)(jnp.ones(3), 1)
    with count_compilations() as compiled:
        _, logs = lox.spool(loop)(jnp.ones(3), 1000)
    assert logs["loss"].shape == (1000,)
    assert len(compiled) <= 12, compiled  # four rounds by sixteens, with or without a rest, and one in the end
    lox.spool(loop)(jnp.ones(3), 61)
    with count_compilations() as compiled:
        lox.spool(loop)(jnp.ones(3), 93)
    assert len(compiled) == 1, compiled  # with the same rest, only the last one is new


def counting(x: Any, t: Any) -> Any:
    lox.log({"x": x}, step=t)
    return x + 1, None


def doubling(x: Any) -> Any:
    lox.log({"x": x})
    return 2 * x


def is_small(x: Any) -> Any:
    return x < 5


LOOPS = {
    "scan": lambda x: lax.scan(counting, x, jnp.arange(3))[0],
    "while": lambda x: lax.while_loop(is_small, doubling, x),
    "cond": lambda x: lax.cond(x > 0, doubling, jnp.sin, x),
}


NESTED = {
    "spool(tap)": lambda f: lox.spool(lox.tap(f, len), capacity=9),
    "spool(tap(buffer))": lambda f: lox.spool(lox.tap(f, len, buffer=2), capacity=9),
    "spool(watch)": lambda f: lox.spool(lox.watch(f), reduce="mean"),
    "spool(nolog)": lambda f: lox.spool(lox.nolog(f)),
    "tap(spool)": lambda f: lox.tap(lox.spool(f, keep_logs=True, capacity=9), len),
    "tap(tap)": lambda f: lox.tap(lox.tap(f, len, reduce="mean"), len),
    "nolog(spool)": lambda f: lox.nolog(lox.spool(f, keep_logs=True, capacity=9)),
    "vmap(spool)": lambda f: in_lanes(lox.spool(f, capacity=9)),
    "vmap(spool mean)": lambda f: in_lanes(lox.spool(f, reduce="mean")),
    "vmap(tap)": lambda f: in_lanes(lox.tap(f, len)),
    "vmap(tap(buffer))": lambda f: in_lanes(lox.tap(f, len, buffer=2)),
    "vmap(watch)": lambda f: in_lanes(lox.watch(f)),
    "vmap(nolog)": lambda f: in_lanes(lox.nolog(f)),
    "tap(vmap(spool))": lambda f: lox.tap(in_lanes(lox.spool(f, keep_logs=True, capacity=9)), len),
}


def in_lanes(f: Any) -> Any:
    return lambda x: jax.vmap(f)(x * jnp.arange(1.0, 5.0))


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("nested", NESTED)
def test_a_transformation_inside_of_others_compiles_a_loop_once(nested: str, loop: str) -> None:
    x, results = jnp.float32(1), []
    for _ in range(2):
        results.append(jax.block_until_ready(NESTED[nested](LOOPS[loop])(x)))
    with count_compilations() as compiled:
        results.append(jax.block_until_ready(NESTED[nested](LOOPS[loop])(x)))
    assert compiled == []
    assert len({str(result) for result in results}) == 1


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_static_arguments(transform: str) -> None:
    def f(x: Any, n: int, mode: str) -> Any:
        for i in range(n):
            lox.log({mode: x + i})
        return x * n

    jitted = jax.jit(f, static_argnums=1, static_argnames="mode")
    for n in (1, 3, 1, 3):
        result = consume(transform)(jitted)(jnp.float32(2.0), n, mode="m")
        if transform == "spool":
            out, logs = result
            assert float(out) == 2.0 * n
            assert str(logs) == ("{'m': 2.0}" if n == 1 else "{'m': [2.0, 3.0, 4.0]}")


def test_numbers_as_arguments_and_keywords() -> None:
    @jax.jit
    def f(x: Any, *, scale: Any) -> Any:
        lox.log({"y": x * scale})
        return x

    for n in range(4):  # other numbers do not make other programs
        assert str(lox.spool(f)(n, scale=2.0)[1]) == str({"y": 2.0 * n})


class Model:
    """Methods that are jitted in the ways that users write."""

    def __init__(self) -> None:
        self.traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x: Any) -> Any:
        self.traces += 1
        lox.log({"x": x}, step=1)
        return x * 2

    @functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="mode", donate_argnums=2)
    def train(self, n: int, x: Any, *, mode: str = "a") -> Any:
        self.traces += 1
        for i in range(n):
            lox.log({mode: x.sum()}, step=i)
        return x * n


def python_function(f: Any) -> Any:
    return lambda x: f(f(x))


PATTERNS: dict[str, Any] = {
    "method": lambda model: (model.step, ()),
    "method anew": lambda model: (lambda: model.step, ()),
    "static and donated": lambda model: (model.train, (3,)),
    "static by name": lambda model: (functools.partial(model.train, mode="b"), (2,)),
    "partial": lambda model: (functools.partial(Model.step, model), ()),
    "partial of a partial": lambda model: (functools.partial(functools.partial(model.train, mode="b"), 3), ()),
    "python": lambda model: (python_function(model.step), ()),
}


@pytest.mark.slow
@pytest.mark.sample(10)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_neither_retrace_nor_recompile(pattern: str, transform: str) -> None:
    model = Model()
    fun, args = PATTERNS[pattern](model)
    get = fun if pattern == "method anew" else lambda: fun
    expected = lox.spool(lambda *args: get()(*args))(*args, jnp.ones(4))
    traces = model.traces
    transformed = consume(transform)(get())
    jax.block_until_ready(transformed(*args, jnp.ones(4)))
    assert model.traces <= traces + 1
    traces = model.traces
    inputs = [jnp.ones(4) for _ in range(6)]
    with count_compilations() as compiled:
        for n in range(3):
            results = [transformed(*args, inputs[2 * n]), consume(transform)(get())(*args, inputs[2 * n + 1])]
            jax.block_until_ready(results)
            for result in results if transform == "spool" else ():
                assert str(result) == str(expected)
                assert str(result[1].step) == str(expected[1].step)
    assert compiled == []
    assert model.traces == traces
    donated = pattern in ("static and donated", "static by name", "partial of a partial")
    assert [x.is_deleted() for x in inputs] == [donated] * 6


def test_a_static_argument_that_is_compared_by_identity() -> None:
    """Also if it is a pytree, which flattening and rebuilding would make another object."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(eq=False)
    class Config:
        scale: float

    config, seen = Config(3.0), []

    @functools.partial(jax.jit, static_argnums=0)
    def f(config: Config, x: Any) -> Any:
        seen.append(config)
        lox.log({"x": x * config.scale})
        return x

    for transform in TRANSFORMS:
        for _ in range(2):
            consume(transform)(f)(config, jnp.float32(1))
    assert all(given is config for given in seen) and len(seen) == 1


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["args", "kwargs", "self", "given", "options", "transformed"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_names_of_arguments(transform: str, name: str) -> None:
    """Those that wrappers have, too. JAX compares static and donated names with the signature."""
    namespace: dict[str, Any] = {"lox": lox}
    exec(f"def f(x, {name}):\n    lox.log({{'v': x * {name}}})\n    return x * {name}", namespace)
    f, x = namespace["f"], jnp.float32(3)
    for options in ({}, {"static_argnums": 1}, {"static_argnames": name}, {"donate_argnames": name}):
        jitted = jax.jit(f, **options)
        make = lambda options=options: 2.0 if "static" in str(options) else jnp.float32(2)  # noqa: E731
        for _ in range(2):
            results = [consume(transform)(jitted)(x, make()), consume(transform)(jitted)(x, **{name: make()})]
            for result in results:
                out, logs = result if transform.startswith("spool") else (result, None)
                assert float(out) == 6 and (logs is None or str(logs) == "{'v': 6.0}")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_arguments_counted_from_the_last(transform: str) -> None:
    def f(*args: Any) -> Any:
        *_, x, n = args
        lox.log({"x": x})
        return x * n

    jitted = jax.jit(f, static_argnums=-1, donate_argnums=(-2,))
    for n in (2.0, 3.0, 3.0):
        result = consume(transform)(jitted)(jnp.zeros(3), jnp.ones(2), n)
        out, logs = result if transform.startswith("spool") else (result, None)
        assert out.tolist() == [n, n]
        assert logs is None or str(logs) == "{'x': [1.0, 1.0]}"


def test_a_jit_with_shardings_keeps_them() -> None:
    device = jax.devices()[-1]
    placed = jax.sharding.SingleDeviceSharding(device)
    f = jax.jit(lambda x: (lox.log({"x": x}), x + 1)[1], in_shardings=placed, out_shardings=placed)
    for _ in range(2):
        out, logs = lox.spool(f)(jnp.zeros(2))
        assert out.devices() == {device} and str(logs) == "{'x': [0.0, 0.0]}"


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX calls every program with host calls from Python")
def test_the_program_of_a_tapped_jitted_function_has_no_effects() -> None:
    """So that C++ calls it. JAX calls programs with effects from Python, which takes longer than all the rest."""
    f = jax.jit(lambda x: (lox.log({"x": x}, step=1), x * 2)[1])
    tapped = lox.tap(f, lambda logs: None)
    tapped(1.0)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: event == "call" and calls.append(frame.f_code.co_name))
    try:
        tapped(1.0)
    finally:
        sys.setprofile(None)
    assert "call" in calls and "cache_miss" not in calls


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_nan_is_found_in_every_call_while_they_are_debugged(transform: str) -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}), jnp.log(x))[1])
    transformed = consume(transform)(f)
    transformed(-1.0)
    with jax.debug_nans(True):
        for _ in range(2):
            transformed(1.0)
            with pytest.raises(FloatingPointError):
                jax.block_until_ready(transformed(-1.0))
    transformed(-1.0)


def test_other_host_calls_are_in_order_with_those_of_a_tapped_jitted_function() -> None:
    events: list[str] = []

    inner = lox.tap(lambda x: (lox.log({"c": x}), x)[1], lambda logs: events.append(f"inner {logs}"))

    @jax.jit
    def f(x: Any) -> Any:
        lox.log({"a": x})
        inner(2.0)
        lox.log({"b": x})
        return x

    for _ in range(3):
        lox.tap(f, lambda logs: events.append(str(logs)), argnames=["a", "b"])(1.0)
        assert events == ["{'a': 1.0}", "inner {'c': 2.0}", "{'b': 1.0}"]
        events.clear()


def test_donated_arguments_are_donated() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return x

    f = jax.jit(lambda x: (lox.log({"s": x.sum()}), x + 1)[1], donate_argnums=0)
    for _ in range(3):
        x = inner(jnp.ones(8))
        out, logs = lox.spool(f)(x)
        assert x.is_deleted()
        assert str(logs) == "{'s': 8.0}"
        assert out.tolist() == [2.0] * 8


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("options", [{}, {"reduce": {"a": "mean"}}, {"prefix": "p/"}, {"interval": 2}], ids=str)
@pytest.mark.parametrize("loop", ["once", "scan", "where", "while"])
def test_a_step_that_keys_share_is_one_result_of_a_program(loop: str, options: Any) -> None:
    def log(x: Any, i: Any) -> Any:
        lox.log({"b": x, "a": x, "c": {"d": x + 1}}, step=i, where=i % 2 == 0 if loop == "where" else None)
        return x + 1

    def f(x: Any) -> Any:
        if loop == "once":
            return log(x, 3)
        if loop == "while":
            return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, log(s[1], s[0])), (0, x))[1]
        return lax.fori_loop(0, 3, lambda i, x: log(x, i), x)

    if loop == "while":
        options = {**options, "capacity": 16}
    jitted = jax.jit(f)
    x = jnp.float32(5)
    want, want_logs = jax.jit(lox.spool(f, **options))(x)
    for spooled in (lox.spool(jitted, **options), lox.spool(lambda x: jitted(jitted(x) - jitted(x) + x), **options)):
        for _ in range(2):
            out, logs = spooled(x)
            assert out == want
            kept = [k for k in logs if options.get("reduce", {}).get(k) is None]
            assert sorted(logs) == sorted(want_logs)
            if loop in ("once", "scan") and "interval" not in options:
                assert len({id(logs.step[k]) for k in kept}) == 1
            # But no value is another one, as any of them may be donated.
            assert len({id(v) for v in jax.tree.leaves([out, dict(logs)])}) == 1 + 3
    _, logs = lox.spool(jitted, **options)(x)
    logs, want_logs = logs.compact(), want_logs.compact()
    assert list(logs) == list(want_logs)
    jax.tree.map(np.testing.assert_array_equal, logs, want_logs)


def test_nothing_is_kept_alive() -> None:
    def make() -> tuple[Any, Any]:
        big = jnp.ones(1000)

        @jax.jit
        def f(x: Any) -> Any:
            lox.log({"x": (x * big).sum()})
            return x

        return f, weakref.ref(f)

    f, ref = make()
    for _ in range(3):
        lox.spool(f)(jnp.float32(1))
        lox.nolog(f)(jnp.float32(1))
    del f
    jax.clear_caches()
    gc.collect()
    assert ref() is None


def test_another_shape_is_another_program() -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}), x)[1])
    for n in (1, 2, 3, 1, 2, 3):
        assert lox.spool(f)(jnp.ones(n))[1]["x"].shape == (n,)


def test_outer_jit_of_a_spooled_jitted_function() -> None:
    f = jax.jit(lambda x: (lox.log({"x": x}), x + 1)[1])
    spooled = lox.spool(f)
    assert str(spooled(1.0)[1]) == "{'x': 1.0}"
    assert str(jax.jit(spooled)(2.0)[1]) == "{'x': 2.0}"
    assert str(jax.vmap(spooled)(jnp.arange(2.0))[1]) == "{'x': [0.0, 1.0]}"
    assert float(jax.grad(lambda x: spooled(x)[1]["x"] ** 2)(3.0)) == 6.0


def scanned(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
        lox.log({"x": x}, step=i)
        return x + 1, None

    return lax.scan(step, x, jnp.arange(4))[0]


@pytest.mark.slow
def test_export() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialize")
    for fun in (lox.spool(scanned), lox.spool(scanned, reduce="mean"), lox.nolog(scanned)):
        exported = jax.export.export(jax.jit(lambda x, fun=fun: jax.tree.leaves(fun(x))))(jnp.float32(1))
        again = jax.export.deserialize(exported.serialize())
        for a, b in zip(again.call(jnp.float32(1)), jax.tree.leaves(fun(jnp.float32(1))), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_compilation_cache(tmp_path: Path) -> None:
    """A program compiled by one process is used by the next, unless it calls back."""
    script = """
        import jax, jax.numpy as jnp, lox, sys
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        hits = []
        jax.monitoring.register_event_listener(lambda name, **kwargs: "cache_hits" in name and hits.append(name))

        def f(x):
            def step(x, i):
                lox.log({"x": x}, step=i)
                return x + 1, None
            return jax.lax.scan(step, x, jnp.arange(4))[0]

        print(jax.jit(lox.spool(f))(1.0)[1])
        print(bool(hits))
        lox.tap(jax.jit(f), print, buffer=2)(1.0)
        lox.tap(jax.jit(f), print)(1.0)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, path, tmp_path / "cache"], capture_output=True, text=True, env={**os.environ}, check=True
        )
        outputs.append(done.stdout.splitlines())
    streamed = ["{'x': [1.0, 2.0]}", "{'x': [3.0, 4.0]}", *[f"{{'x': {n}.0}}" for n in range(1, 5)]]
    assert outputs[0] == ["{'x': [1.0, 2.0, 3.0, 4.0]}", "False", *streamed]
    assert outputs[1] == ["{'x': [1.0, 2.0, 3.0, 4.0]}", "True", *streamed]


def test_type_hints_of_what_has_none() -> None:
    spooled = lox.spool(functools.partial(lambda x, y: x, 1))
    assert typing.get_type_hints(spooled) == {"args": Any, "kwargs": Any, "return": Any}
