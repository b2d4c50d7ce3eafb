"""The cases to measure, each with lox's version and a hand-written one."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import calls
import growth
import jax
import jax.numpy as jnp
import numpy as np
import peers
import saving
import storage
import trackers
import training
from timing import Row, compare

import lox

logged_training = functools.partial(training.logged, lox.log)
logged_nested = functools.partial(training.logged_nested, lox.log)


def blocking(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a call that waits for its results."""
    return lambda: jax.block_until_ready(function(*args))


def check_same(a: Any, b: Any) -> None:
    """Check that both sides return the same, or the comparison means nothing."""
    (a, a_logs), (b, b_logs) = a, b
    for x, y in zip(jax.tree.leaves((a, dict(a_logs))), jax.tree.leaves((b, b_logs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def count_instructions(function: Any, *args: Any) -> Counter[str]:
    """Count the instructions of the compiled program, by kind."""
    text = function.lower(*args).compile().as_text()
    return Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", text))


# --- spool: run time, and trace and lower --------------------------------------------------------


def programs() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], Any]]:
    prng_key = jax.random.key(0)
    params, batches = training.init(prng_key), training.data(prng_key)
    seeds = jax.vmap(training.init)(jax.random.split(prng_key, training.SEEDS))
    spool, vmap = lox.spool, jax.vmap
    lanes = {"in_axes": (0, None)}

    yield (
        "scan",
        spool(logged_training),
        training.by_hand,
        (params, batches),
    )
    yield (
        "nested scan",
        spool(logged_nested),
        training.by_hand_nested,
        (params, batches),
    )
    yield (
        "vmap(spool(scan))",
        vmap(spool(logged_training), **lanes),
        vmap(training.by_hand, **lanes),
        (seeds, batches),
    )
    yield (
        "spool(vmap(scan))",
        spool(vmap(logged_training, **lanes)),
        vmap(training.by_hand, **lanes, out_axes=(0, 1)),
        (seeds, batches),
    )


def run_time() -> Iterator[Row]:
    for name, spooled, by_hand, args in programs():
        spooled, by_hand = jax.jit(spooled), jax.jit(by_hand)
        check_same(spooled(*args), by_hand(*args))
        counts = [count_instructions(f, *args) for f in (spooled, by_hand)]
        totals = [sum(count.values()) for count in counts]
        yield Row(f"spool, compiled: {name}", "ops", *totals, equal=counts[0] == counts[1])
        calls = blocking(spooled, *args), blocking(by_hand, *args)
        yield compare(f"spool, run: {name}", *calls, goal=1.05, seconds=8)


def trace_and_lower() -> Iterator[Row]:
    def fresh(function: Callable[..., Any], args: Any) -> Callable[[], Any]:
        return lambda: jax.jit(lambda *args: function(*args)).lower(*args)

    for name, spooled, by_hand, args in programs():
        calls = fresh(spooled, args), fresh(by_hand, args)
        yield compare(f"spool, trace+lower: {name}", *calls, goal=1.6)


# --- nolog ---------------------------------------------------------------------------------------


def nolog() -> Iterator[Row]:
    prng_key = jax.random.key(0)
    args = training.init(prng_key), training.data(prng_key)
    removed, plain = jax.jit(lox.nolog(logged_training)), jax.jit(training.plain)

    # The first line of the text has the name of the function.
    texts = [f.lower(*args).as_text().splitlines()[1:] for f in (removed, plain)]
    yield Row("nolog, HLO", "lines", len(texts[0]), len(texts[1]), equal=texts[0] == texts[1])
    yield compare("nolog, run", blocking(removed, *args), blocking(plain, *args), goal=1.05)


# --- eager dispatch ------------------------------------------------------------------------------


def dispatch() -> Iterator[Row]:
    @jax.jit
    def logged(x, i):
        y = jnp.sin(x)
        lox.log({"x": x, "y": y}, step=i)
        return y + 1

    @jax.jit
    def by_hand(x, i):
        y = jnp.sin(x)
        return y + 1, {"x": x, "y": y}, {"step": i}

    x, i = jnp.float32(1.0), jnp.int32(0)
    spooled = lox.spool(logged)
    again = lambda: lox.spool(logged)(x, i)  # noqa: E731
    hand = lambda: by_hand(x, i)  # noqa: E731
    options = {"unit": "us", "number": 100}
    yield compare("spool, dispatch", lambda: spooled(x, i), hand, goal=2.0, **options)
    yield compare("spool, dispatch: spooled anew each time", again, hand, **options)
    tapped = jax.jit(lox.tap(logged, lambda logs: None))
    for ordered in (False, True):

        @jax.jit
        def called(x, i, ordered=ordered):
            jax.debug.callback(lambda x, y, i: None, x, jnp.sin(x), i, ordered=ordered)
            return jnp.sin(x) + 1

        name = f"tap, dispatch: debug.callback{' ordered' * ordered}"
        yield compare(name, lambda: tapped(x, i), lambda called=called: called(x, i), **options)


# --- reductions and intervals --------------------------------------------------------------------


def big_events(length: int) -> Callable[..., Any]:
    """Make a loop that logs 256 floats in every iteration."""

    def function(x):
        def step(x, i):
            x = x * 0.999 + 0.1
            lox.log({"x": x}, step=i)
            return x, None

        return jax.lax.scan(step, x, jnp.arange(length))[0]

    return function


def memory_of(function: Any, *args: Any) -> float:
    """Return the megabytes of temporaries and outputs of a compiled program."""
    analysis = jax.jit(function).lower(*args).compile().memory_analysis()
    return (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 1e6


def reductions() -> Iterator[Row]:
    events = 100_000
    function, x = big_events(events), jnp.zeros(256)
    stacked = lox.spool(function)
    stacked_mb = memory_of(stacked, x)
    for name, options in (
        ("reduce='mean'", {"reduce": "mean"}),
        ("reduce='std'", {"reduce": "std"}),
        ("interval=1000", {"interval": 1000}),
    ):
        mb = memory_of(lox.spool(function, **options), x)
        yield Row(f"memory, {name}: stacked", "MB", mb, stacked_mb, goal=(4 if "interval" in options else 2) / 103)

    def stack_then_mean(x):
        out, logs = stacked(x)
        return out, logs["x"].mean(0)

    mean = jax.jit(lox.spool(function, reduce="mean"))
    yield compare("reduce='mean', run: stacked", blocking(mean, x), blocking(jax.jit(stacked), x), goal=1.0, seconds=10)
    by_stacking = jax.jit(stack_then_mean)
    yield compare("reduce='mean', run: stacked, then mean", blocking(mean, x), blocking(by_stacking, x), goal=1.0)
    exact = np.asarray(stacked(x)[1]["x"], np.float64).mean(0)
    errors = [np.abs(np.asarray(f(x)[1], np.float64) / exact - 1).max() for f in (mean_of(mean), by_stacking)]
    yield Row("reduce='mean', error: stacked, then mean", "ppb", *(1e9 * max(e, 1e-12) for e in errors), goal=None)


def mean_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x):
        out, logs = function(x)
        return out, logs["x"]

    return call


# --- tap -----------------------------------------------------------------------------------------


def logged_sum(xs):
    def step(carry, x):
        carry += x
        lox.log({"carry": carry, "x": x})
        return carry, None

    return jax.lax.scan(step, 0.0, xs)[0]


def called_sum(callback: Callable[..., Any], ordered: bool = False) -> Callable[..., Any]:
    """Do the same with `jax.debug.callback`."""

    def function(xs):
        def step(carry, x):
            carry += x
            jax.debug.callback(callback, {"carry": carry, "x": x}, ordered=ordered)
            return carry, None

        return jax.lax.scan(step, 0.0, xs)[0]

    return function


def threaded_sum(xs):
    """Do the same by hand, with metrics as outputs of the scan."""

    def step(carry, x):
        carry += x
        return carry, {"carry": carry, "x": x}

    return jax.lax.scan(step, 0.0, xs)


class Received:
    """Counts the events that a callback gets, and checks that none is missing."""

    def __init__(self) -> None:
        self.events = 0

    def one(self, logs: Any) -> None:
        self.events += 1

    def several(self, logs: Any) -> None:
        self.events += len(logs["x"])

    def call(self, function: Callable[..., Any], xs: Any, events: int) -> Callable[[], None]:
        def call() -> None:
            self.events = 0
            jax.block_until_ready(function(xs))
            jax.effects_barrier()
            assert self.events == events, (self.events, events)

        return call


def tap() -> Iterator[Row]:
    events = 10_000
    xs = jnp.arange(events, dtype=jnp.float32)
    got = Received()
    options = {"unit": "us", "count": events, "seconds": 8}
    tapped = got.call(lox.tap(jax.jit(logged_sum), got.one), xs, events)
    for name, ordered in ("debug.callback", False), ("debug.callback ordered", True):
        by_callback = got.call(jax.jit(called_sum(got.one, ordered)), xs, events)
        yield compare(f"tap, per event: {name}", tapped, by_callback, goal=0.2, **options)
    by_callback = got.call(jax.jit(called_sum(got.one)), xs, events)
    for size, goal in (100, 0.02), (1000, None):
        buffered = got.call(lox.tap(jax.jit(logged_sum), got.several, buffer=size), xs, events)
        yield compare(f"tap(buffer={size}), per event: debug.callback", buffered, by_callback, goal=goal, **options)


def tap_overhead() -> Iterator[Row]:
    """Measure the cost of logging in a loop that only counts.

    Also unrolled, as small loops for a GPU are, where every iteration costs the start of its kernels.
    """
    events = 10_000
    got, start = Received(), jnp.float32(0)
    options = {"unit": "us", "count": events, "seconds": 6}
    goal = 1.3 if jax.default_backend() == "gpu" else None

    def scan(step, start, unroll):
        return jax.lax.scan(step, start, None, length=events, unroll=unroll)

    def logged(start, unroll):
        def step(count, _):
            lox.log({"x": count})
            return count + 1, None

        return scan(step, start, unroll)[0]

    def by_hand(start, unroll):
        return scan(lambda count, _: (count + 1, count), start, unroll)

    def called(start, unroll):
        def step(count, _):
            jax.debug.callback(got.one, {"x": count})
            return count + 1, None

        return scan(step, start, unroll)[0]

    for unroll in (1, 4):
        functions = [jax.jit(functools.partial(f, unroll=unroll)) for f in (logged, by_hand, called)]
        buffered = got.call(lox.tap(functions[0], got.several, buffer=1000), start, events)
        threaded, callback = blocking(functions[1], start), got.call(functions[2], start, events)
        name = f"tap(buffer=1000), unroll={unroll}"
        with_threaded = compare(f"{name}: by hand", buffered, threaded, goal=goal, **options)
        yield with_threaded
        with_callback = compare(f"{name}: debug.callback", buffered, callback, goal=0.05, **options)
        yield with_callback
        # What sending events to the host adds to a loop that returns them; noise may make it negative.
        extra = with_threaded.lox - with_threaded.reference, with_callback.reference - with_threaded.reference
        yield Row(f"{name}, added: debug.callback", "us", max(extra[0], 0.01), extra[1], goal=0.05)


def tap_lanes() -> Iterator[Row]:
    events, lanes = 2_000, 64
    xs = jnp.arange(events, dtype=jnp.float32)
    many = xs + jnp.arange(lanes, dtype=jnp.float32)[:, None]
    got = Received()
    options = {"unit": "us", "count": events}
    for name, callback, choice in ("tap", got.one, {}), ("tap(buffer=100)", got.several, {"buffer": 100}):
        one = got.call(jax.jit(lox.tap(logged_sum, callback, **choice)), xs, events)
        all_lanes = got.call(jax.jit(lox.tap(jax.vmap(logged_sum), callback, **choice)), many, events)
        yield compare(f"{name}, 64 lanes: one lane", all_lanes, one, goal=2.0, **options)


def watch() -> Iterator[Row]:
    prng_key = jax.random.key(0)
    args = training.init(prng_key), training.data(prng_key)
    watched, plain = jax.jit(lox.nolog(lox.watch(logged_training))), jax.jit(training.plain)
    yield compare("watch, run: plain", blocking(watched, *args), blocking(plain, *args))


CASES = {
    "run": run_time,
    "lower": trace_and_lower,
    "nolog": nolog,
    "dispatch": dispatch,
    "reduce": reductions,
    "tap": tap,
    "overhead": tap_overhead,
    "lanes": tap_lanes,
    "watch": watch,
    **storage.CASES,
    **saving.CASES,
    **trackers.CASES,
    **peers.CASES,
    **calls.CASES,
    **growth.CASES,
}
