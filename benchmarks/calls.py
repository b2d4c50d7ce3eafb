"""What one call costs, in the ways that programs are written, beside the same call by hand."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from timing import Row, compare

import lox

CALLS = 100


def many(call: Callable[[], Any], number: int = CALLS) -> Callable[[], None]:
    """Call that often, and wait for the results and for the host."""

    def calls() -> None:
        for _ in range(number):
            result = call()
        jax.block_until_ready(result)
        jax.effects_barrier()

    return calls


def per_call(
    name: str, ours: Callable[[], Any], by_hand: Callable[[], Any], goal: float | None = None, **options: Any
) -> Row:
    return compare(name, many(ours), many(by_hand), unit="us", count=CALLS, goal=goal, **{"seconds": 2.0, **options})


def double(x):
    lox.log({"x": x}, step=1)
    return x * 2


def double_by_hand(x):
    return x * 2, {"x": x}, 1


class Model:
    """Its methods are jitted with `self` as a static argument."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x):
        return double(x)

    @functools.partial(jax.jit, static_argnums=0)
    def step_by_hand(self, x):
        return double_by_hand(x)


def spools() -> Iterator[Row]:
    x, model = jnp.ones(3), Model()
    jitted, by_hand = jax.jit(double), jax.jit(double_by_hand)
    hand = functools.partial(by_hand, x)
    spooled = lox.spool(jitted)
    yield per_call("spool(jit f)", functools.partial(spooled, x), hand, 1.2)
    yield per_call("lox.spool(jit f) anew each time", lambda: lox.spool(jitted)(x), hand, 1.6)
    keys = [f"key{n}" for n in range(20)]
    measure = lambda x: (lox.log(dict.fromkeys(keys, x), step=1), x * 2)[1]  # noqa: E731
    measured, measured_inside = lox.spool(jax.jit(measure)), jax.jit(lox.spool(measure))
    measured_by_hand = jax.jit(lambda x: (x * 2, dict.fromkeys(keys, x), 1))
    yield per_call("spool(jit f, 20 keys)", lambda: measured(x), lambda: measured_by_hand(x), 1.2)
    yield per_call("jit(spool f, 20 keys)", lambda: measured_inside(x), lambda: measured_by_hand(x))
    method = lox.spool(model.step)
    yield per_call("spool(jitted method)", lambda: method(x), lambda: model.step_by_hand(x), 1.5)

    times, times_by_hand = (
        jax.jit(function, static_argnums=0)
        for function in (lambda n, x: (lox.log({"x": x}), x * n)[1], lambda n, x: (x * n, {"x": x}))
    )
    static = lox.spool(times)
    yield per_call("spool(jit f, static argument)", lambda: static(2, x), lambda: times_by_hand(2, x), 1.5)
    partial, partial_by_hand = lox.spool(functools.partial(jitted)), functools.partial(by_hand)
    yield per_call("spool(functools.partial(jit f))", lambda: partial(x), lambda: partial_by_hand(x), 1.5)
    yield per_call("spool(jit f, donated buffers)", *(trained(f) for f in (lox.spool(update), update_by_hand)), 1.5)
    two = lox.spool(lambda x: jitted(jitted(x)))
    yield per_call("spool(Python calling two jits)", lambda: two(x), lambda: by_hand(by_hand(x)[0]), 3)
    removed, without = lox.nolog(lambda x: jitted(jitted(x))), jax.jit(lambda x: x * 2)
    yield per_call("nolog(Python calling two jits): without logs", lambda: removed(x), lambda: without(without(x)))
    yield from loops(jitted, by_hand, x)
    inside = jax.jit(lox.spool(double))
    yield per_call("jit(spool f)", functools.partial(inside, x), hand, 1.2)


def counted(x, i):
    lox.log({"x": x}, step=i)
    return x + 1, None


def loops(jitted: Callable[..., Any], by_hand: Callable[..., Any], x: Any) -> Iterator[Row]:
    """A loop in Python, and a loop outside of jit that two transformations see."""

    def loop(x):
        for _ in range(CALLS):
            x = jitted(x)
        return x

    def loop_by_hand():
        out, logs = x, []
        for _ in range(CALLS):
            out, *rest = by_hand(out)
            logs.append(rest)
        return out, jax.tree.map(lambda *leaves: jnp.stack(leaves), *logs)

    spooled = lox.spool(loop)
    name = "spool(Python loop over a jit), per iteration"
    yield compare(name, lambda: jax.block_until_ready(spooled(x)), lambda: jax.block_until_ready(loop_by_hand()),
                  unit="us", count=CALLS, goal=3, seconds=2.0)  # fmt: skip

    def scan(x):
        return jax.lax.scan(counted, x, jnp.arange(10))[0]

    one, two = lox.spool(scan), lox.spool(lox.keep(scan, "x"))
    yield per_call("spool(keep(a scan outside of jit)): spool(it)", lambda: two(x), lambda: one(x), 3)


@functools.partial(jax.jit, donate_argnums=0)
def update(params, grads):
    lox.log({"grads": grads.sum()})
    return params - grads


@functools.partial(jax.jit, donate_argnums=0)
def update_by_hand(params, grads):
    return params - grads, {"grads": grads.sum()}


def trained(step: Callable[..., Any]) -> Callable[[], Any]:
    """Make calls that give each step the parameters of the one before, whose buffer they donate."""
    params, grads = jnp.zeros(1000), jnp.ones(1000)

    def call() -> Any:
        nonlocal params
        params, logs = step(params, grads)
        return logs

    return call


def taps() -> Iterator[Row]:
    x, jitted = jnp.ones(3), jax.jit(double)

    def callback(logs: Any) -> None:
        pass

    @jax.jit
    def called(x):
        jax.debug.callback(callback, {"x": x})
        return x * 2

    hand = functools.partial(called, x)
    inside, outside = jax.jit(lox.tap(double, callback)), lox.tap(jitted, callback)
    yield per_call("jit(tap f): jit with debug.callback", functools.partial(inside, x), hand, 0.7)
    yield per_call("tap(jit f): the same", functools.partial(outside, x), hand, 0.7)
    fresh = lambda: lox.tap(jitted, lambda logs: None)(x)  # noqa: E731
    yield per_call("tap(jit f, fresh lambda): the same", fresh, hand, 0.7)

    def total() -> lox.Reduction:
        return lox.Reduction(init=jnp.zeros_like, update=jnp.add, finish=jnp.positive)

    one = total()
    yield per_call(
        "tap(jit f, fresh Reduction): one Reduction",
        lambda: lox.tap(jitted, callback, reduce=total())(x),
        lambda: lox.tap(jitted, callback, reduce=one)(x),
        1.5,
    )


def without_transformation() -> Iterator[Row]:
    x, small = jnp.ones(3), jax.jit(lambda x: x * 2)
    hand = functools.partial(small, x)
    yield per_call("lox.log of a number: a small jit", lambda: lox.log({"loss": 0.5}, step=7), hand, 3)
    yield per_call("lox.log of an array: a small jit", lambda: lox.log({"loss": x}, step=7), hand, 3)
    for kind in (lox.SaveLogger, lox.CsvLogger, lox.loggers.TensorBoardLogger):
        with tempfile.TemporaryDirectory() as folder, kind(folder) as logger:
            name = f"{kind.__name__}.log of two scalars: a small jit"
            yield per_call(name, logs_to(logger), hand, 4, between=logger.flush)
    yield from transformed_python(x, many(hand))
    removed = jax.jit(lox.nolog(double))
    yield per_call("jit(nolog f): jit without a log", lambda: removed(x), hand, 1.05)

    off = jax.jit(double)
    off(x)
    sink, lox.config.sink = lox.config.sink, "off"
    yield per_call("jit f, config.sink='off': jit without a log", lambda: off(x), hand, 1.5)
    lox.config.sink = sink
    yield compiled_out()


def transformed_python(x: Any, hand: Callable[[], Any]) -> Iterator[Row]:
    """A log in a Python loop that is transformed as a whole, beside as many calls of a small jit."""

    def loop(x):
        for i in range(CALLS):
            lox.log({"loss": x}, step=i)
        return x

    for name, transformed in {
        "nolog": lox.nolog(loop),
        "spool": lox.spool(loop),
        "spool(reduce='mean')": lox.spool(loop, reduce="mean"),
        "tap": lox.tap(loop, lambda logs: None),
        "watch": lox.watch(loop),
    }.items():
        ours = functools.partial(transformed, x)
        name = f"lox.log in {name}(Python loop): a small jit"
        yield compare(name, lambda ours=ours: jax.block_until_ready(ours()), hand, unit="us", count=CALLS, seconds=2.0)


def logs_to(logger: lox.Logger) -> Callable[[], None]:
    state, loss, step = logger.init(jax.random.key(0)), jnp.float32(0.25), 0

    def call() -> None:
        nonlocal step
        step += 1
        logger.log(state, {"loss": loss, "accuracy": 0.5}, step=step)

    return call


def compiled_out() -> Row:
    """Measure in a process of its own, in which `LOX_SINK` is there from the beginning."""
    folders = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": folders, "LOX_SINK": "off", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout))


def calls() -> Iterator[Row]:
    sink, lox.config.sink = lox.config.sink, lambda logs: None
    try:
        yield from spools()
        yield from taps()
        yield from without_transformation()
    finally:
        lox.config.sink = sink


CASES = {"calls": calls}

if __name__ == "__main__":
    x, silent, plain = jnp.ones(3), jax.jit(double), jax.jit(lambda x: x * 2)
    row = per_call("jit f, LOX_SINK=off: jit without a log", lambda: silent(x), lambda: plain(x), 1.5)
    print(json.dumps({name: getattr(row, name) for name in ("name", "unit", "lox", "reference", "goal")}))
