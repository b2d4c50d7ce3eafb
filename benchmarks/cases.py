"""What is measured: in every case lox's version and the hand-written one stand side by side."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import storage
import training
from timing import Row, compare

import lox


def blocking(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call that ends when its results are there."""
    return lambda: jax.block_until_ready(function(*args))


def check_same(a: Any, b: Any) -> None:
    """Both sides must return the same, or the comparison means nothing."""
    (a, a_logs), (b, b_logs) = a, b
    for x, y in zip(jax.tree.leaves((a, dict(a_logs))), jax.tree.leaves((b, b_logs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def count_instructions(function: Any, *args: Any) -> Counter[str]:
    """How many instructions of each kind the compiled program has."""
    text = function.lower(*args).compile().as_text()
    return Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", text))


# --- spool: run time, and trace and lower --------------------------------------------------------


def programs() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], Any]]:
    key = jax.random.key(0)
    params, batches = training.init(key), training.data(key)
    seeds = jax.vmap(training.init)(jax.random.split(key, training.SEEDS))
    spool, vmap = lox.spool, jax.vmap
    lanes = {"in_axes": (0, None)}

    yield (
        "scan",
        spool(training.logged),
        training.by_hand,
        (params, batches),
    )
    yield (
        "nested scan",
        spool(training.logged_nested),
        training.by_hand_nested,
        (params, batches),
    )
    yield (
        "vmap(spool(scan))",
        vmap(spool(training.logged), **lanes),
        vmap(training.by_hand, **lanes),
        (seeds, batches),
    )
    yield (
        "spool(vmap(scan))",
        spool(vmap(training.logged, **lanes)),
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
    key = jax.random.key(0)
    args = training.init(key), training.data(key)
    removed, plain = jax.jit(lox.nolog(training.logged)), jax.jit(training.plain)

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


# --- tap -----------------------------------------------------------------------------------------


def tap() -> Iterator[Row]:
    events = 10_000
    xs = jnp.arange(events, dtype=jnp.float32)
    seen: list[Any] = []

    def logged(xs):
        def step(carry, x):
            carry += x
            lox.log({"carry": carry, "x": x})
            return carry, None

        return jax.lax.scan(step, 0.0, xs)[0]

    def by_hand(ordered):
        def function(xs):
            def step(carry, x):
                carry += x
                jax.debug.callback(seen.append, {"carry": carry, "x": x}, ordered=ordered)
                return carry, None

            return jax.lax.scan(step, 0.0, xs)[0]

        return jax.jit(function)

    def counted(function):
        def call():
            seen.clear()
            function(xs)
            jax.effects_barrier()
            assert len(seen) == events

        return call

    tapped = counted(lox.tap(jax.jit(logged), seen.append))
    for name, ordered in ("debug.callback", False), ("debug.callback ordered", True):
        options = {"unit": "us", "count": events, "seconds": 8}
        yield compare(f"tap, per event: {name}", tapped, counted(by_hand(ordered)), **options)


CASES = {
    "run": run_time,
    "lower": trace_and_lower,
    "nolog": nolog,
    "dispatch": dispatch,
    "tap": tap,
    **storage.CASES,
}
