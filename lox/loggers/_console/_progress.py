"""`lox.progress`: progress bars for loops inside compiled programs.

The loop carries a counter, and the count at which to call the host next. The host answers each call with the next such
count, from the speed it has measured, so it is called about ten times a second, whether an iteration takes a
nanosecond or a minute. All lanes of a vmap share one bar.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir

from lox import _compat, _errors
from lox._data import _sites
from lox.loggers._console import _render
from lox.loggers._console._screen import screen_of

_PERIOD = 0.1  # seconds between host calls
_UNKNOWN = -1  # the total of a loop of unknown length

_numbers = itertools.count()
_active: set[int] = set()  # bars on any screen


class _Bar:
    """One execution of one loop, on the host."""

    def __init__(self, owner: "progress", total: int):
        self.owner, self.every, self.patient = owner, owner.every, True
        self.total = None if total == _UNKNOWN else total
        self.done = 0
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def picture(self, width: int, height: int) -> Any:
        """Return the bar for a terminal."""
        del height
        return _render.bar_row(self.owner.name, self.done, self.total, self.elapsed, min(width, 100))

    def line(self) -> str:
        """Return a line for a file or a pipe."""
        name, count = _errors.printable(self.owner.name), _render.number(self.done, True)
        if self.total is None:
            return f"{name} {count}, {_render.duration(self.elapsed)}"
        share = f"{self.done / self.total:.0%}" if self.total else "100%"
        left = _render.remaining(self.done, self.total, self.elapsed)
        return f"{name} {share}, {count}/{_render.number(self.total, True)}, {left}"


class progress:
    """A progress bar for a loop, under jit, vmap and grad too.

    >>> import jax, jax.numpy as jnp, lox
    >>> @jax.jit
    ... def train(x):
    ...     def step(x, _):
    ...         return 0.9 * x, x
    ...
    ...     return lox.progress(1000).scan(step, x)[0]
    >>> y = train(1.0)  # doctest: +SKIP
    progress ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━  42%  420/1,000  4.2kit/s  eta 0:00

    It has the loops of `jax.lax`, with the same arguments: `scan`, `fori_loop` and `while_loop`. The host is called
    about ten times a second, however fast the loop is. All lanes of a `vmap` share one bar. Bars of inner loops
    disappear when they are full. The bar of an aborted loop disappears when the loop starts again, or at the end of a
    block `with lox.progress(1000) as bar: ...`.

    Args:
        total: The number of iterations. `scan` and `fori_loop` know it themselves; without it, a `while_loop` has a
            counter instead of a bar.
        name: The text before the bar.
        every: Seconds between lines, if the output is not a terminal.
        console: The `rich.console.Console` to draw on, instead of the standard output.
    """

    def __init__(self, total: int | None = None, name: str = "progress", every: float = 10.0, console: Any = None):
        if total is not None:
            whole = isinstance(total, int | np.integer) and not isinstance(total, bool)
            if not whole or not 0 <= total <= np.iinfo(np.int32).max:
                raise _errors.OptionError(f"`total` is {total!r}; it must be a number of iterations, below 2**31.")
        self.total, self.name, self.every, self._console = total, name, every, console
        self._bars: dict[int, _Bar] = {}
        self._lock = threading.Lock()
        self._warn = _sites.warner()

    # --- loops ---

    def scan(
        self, f: Callable[..., Any], init: Any, xs: Any = None, length: int | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """`jax.lax.scan` with a bar. Without `xs` and `length`, the length is the total given to `progress`."""
        leaves = jax.tree.leaves(xs)
        if not leaves and length is None:
            length = self.total
        total = leaves[0].shape[0] if leaves else length
        if total is None:
            raise _errors.OptionError("`scan` needs `xs`, `length` or a total: `lox.progress(1000).scan(step, init)`.")

        @functools.wraps(f)
        def body(carry: Any, x: Any) -> Any:
            bar, carry = carry
            carry, y = f(carry, x)
            return (self._step(bar), carry), y

        (bar, carry), ys = lax.scan(body, (self._begin(total), init), xs, length, **options)
        self._end(bar)
        return carry, ys

    def fori_loop(self, lower: Any, upper: Any, body_fun: Callable[..., Any], init_val: Any, **options: Any) -> Any:
        """`jax.lax.fori_loop` with a bar."""

        @functools.wraps(body_fun)
        def body(i: Any, carry: Any) -> Any:
            bar, carry = carry
            carry = body_fun(i, carry)
            return self._step(bar), carry

        bounds = [jnp.asarray(bound).astype(jnp.int32) for bound in (lower, upper)]
        begin = self._begin(jnp.maximum(bounds[1] - bounds[0], 0))
        bar, carry = lax.fori_loop(lower, upper, body, (begin, init_val), **options)
        self._end(bar)
        return carry

    def while_loop(self, cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
        """`jax.lax.while_loop` with a bar if a total was given, else with a counter."""

        @functools.wraps(body_fun)
        def body(carry: Any) -> Any:
            bar, carry = carry
            carry = body_fun(carry)
            return self._step(bar), carry

        begin = self._begin(_UNKNOWN if self.total is None else self.total)
        bar, carry = lax.while_loop(lambda carry: cond_fun(carry[1]), body, (begin, init_val))
        self._end(bar)
        return carry

    # --- inside the program: (number of the bar, count, count of the next call) ---

    def _begin(self, total: Any) -> Any:
        with _compat.own_transfers():
            total = jnp.asarray(total, jnp.int32)
            zero = jnp.zeros((), jnp.int32)
            number, due = tick_p.bind(total, zero, zero, owner=self, kind="begin")
        return number, zero, due

    def _step(self, bar: Any) -> Any:
        number, count, due = bar
        count = count + 1
        number, due = tick_p.bind(number, count, due, owner=self, kind="step")
        return number, count, due

    def _end(self, bar: Any) -> None:
        number, count, _ = bar
        with _compat.own_transfers():
            tick_p.bind(number, count, jnp.zeros_like(count), owner=self, kind="end")

    # --- on the host ---

    def _tick(self, kind: str, number: int, count: int) -> tuple[int, int]:
        """Handle a call; return the number of the bar and the count of the next call."""
        with self._lock:
            if kind == "begin":
                return self._open(total=number), 1
            bar = self._bars.get(number)
            if bar is None:  # closed, while the loop still runs
                return number, np.iinfo(np.int32).max
            bar.done = max(bar.done, count)
            if kind == "end":
                if bar.total is not None:
                    bar.total = bar.done  # a `while_loop` may end early
                self._close(number, keep=len(_active) == 1)  # of nested loops, the outermost stays on the screen
                return number, 0
            screen_of(self._console).changed(bar)
            speed = bar.done / max(bar.elapsed, 1e-6)
            ahead = min(max(1, int(speed * _PERIOD)), np.iinfo(np.int32).max - count)
            # At most double the count: the first iterations say little about the speed of the others.
            return number, count + min(ahead, max(count, 1))

    def _open(self, total: int) -> int:
        for old in list(self._bars):  # of the same loop, which was aborted, or is an inner one that starts again
            self._close(old, keep=False)
        number = next(_numbers)
        bar = self._bars[number] = _Bar(self, total)
        _active.add(number)
        screen_of(self._console).show(bar)
        return number

    def _close(self, number: int, keep: bool = True) -> None:
        _active.discard(number)
        screen_of(self._console).remove(self._bars.pop(number), keep)

    def close(self) -> None:
        """Remove the bar, for instance that of an aborted loop."""
        with self._lock:
            for number in list(self._bars):
                self._close(number)

    def __enter__(self) -> "progress":
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            jax.effects_barrier()
        finally:  # on a GPU, the barrier raises what callbacks of the loop have raised
            self.close()


# --- the primitive: a host call that happens only when it is due ---

tick_p = _compat.Primitive("lox_tick")
tick_p.multiple_results = True
host_tick_p = _compat.Primitive("lox_host_tick")
host_tick_p.multiple_results = True


@tick_p.def_effectful_abstract_eval
@host_tick_p.def_effectful_abstract_eval
def _abstract_eval(number: Any, *others: Any, **params: Any) -> Any:
    del others, params
    return [number, number], _compat.host_call_effects


def _call(owner: progress, kind: str, number: Any, count: Any) -> tuple[Any, Any]:
    try:
        return tuple(np.int32(x) for x in owner._tick(kind, int(number), int(count)))  # type: ignore[return-value]
    except Exception as error:  # a bar that cannot be drawn must not end the program
        owner._warn(f"the progress bar failed and is gone: {type(error).__name__}: {error}")
        return np.int32(number), np.int32(np.iinfo(np.int32).max)


@tick_p.def_impl
def _impl(number: Any, count: Any, due: Any, *, owner: progress, kind: str) -> list[Any]:
    if kind == "step" and int(count) < int(due):
        return [number, due]
    return [jnp.asarray(x) for x in _call(owner, kind, number, count)]


def _lower_host(ctx: Any, *operands: Any, owner: progress, kind: str) -> Any:
    return _compat.lower_host_call(ctx, functools.partial(_call, owner, kind), *operands)


mlir.register_lowering(host_tick_p, _lower_host)


def _when_due(number: Any, count: Any, due: Any, **params: Any) -> list[Any]:
    call = lambda: host_tick_p.bind(number, count, **params)  # noqa: E731
    if params["kind"] != "step":
        return call()
    return lax.cond(count >= due, call, lambda: [number, due])


mlir.register_lowering(tick_p, mlir.lower_fun(_when_due, multiple_results=True))


def _batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    # One bar for all lanes. With a `cond` in place of `tick_p`, vmap would call the host in every iteration.
    del axis_data
    shared = [x if d is None else jnp.max(x, d) for x, d in zip(operands, dims, strict=True)]
    return tick_p.bind(*shared, **params), [None, None]


batching.fancy_primitive_batchers[tick_p] = _batch
_compat.report_primals(tick_p)
