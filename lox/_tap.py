"""`lox.tap`: logs to a callback, while the program runs."""

import contextlib
import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lox import _call, _compat, _emit, _engine, _errors, _reduce
from lox._engine import Handler, Run
from lox._event import Event, Meta
from lox._lanes import Laned
from lox._logdict import joined, logdict
from lox._primitive import bind
from lox._select import Selection
from lox._series import Series, Site
from lox._spool import Collect
from lox._state import Fold

Callback = Callable[[logdict], Any]


def _only_due(logs: logdict) -> logdict:
    due = logs.pop(_DUE, None)
    if due is None:
        return logs
    for key, now in zip(list(logs), due, strict=True):
        if not now.any():
            del logs[key]
        elif not now.all():
            logs.valid[key] = logs.valid[key] & now if key in logs.valid else now
    return logs.copy()


class Delivery:
    """Calls the user's callback from the host, and keeps what it raises: XLA would pass on the text only."""

    def __init__(self, callback: Callback):
        self.callback = callback
        self.error: BaseException | None = None

    def __call__(self, logs: logdict, in_order: bool = True) -> None:
        """Take one event, on the host."""
        try:
            self.take(_only_due(logs), in_order)
        except BaseException as error:
            self.error = error
            raise

    def take(self, logs: logdict, in_order: bool) -> None:
        """Pass it on."""
        del in_order
        if logs:
            self.callback(logs)

    def pop_error(self) -> BaseException | None:
        """What the callback has raised since the last time."""
        error, self.error = self.error, None
        return error


# Keys of lox's own, which no user's key looks like.
_DUE = "\0due"  # travels with an event under `interval`: which of its keys are due
_FLUSH = "\0flush"  # an event that is none: deliver what is buffered
_BEGIN = "\0begin"  # another: begin with an empty buffer


def _signal(key: str) -> Event:
    nothing = Laned(jnp.zeros((), bool))
    return Event.from_series(Series([nothing], {}, None, jax.tree.structure(0), True, key, Site("")))


class BufferedDelivery(Delivery):
    """Calls the user's callback once for several events.

    Events of several devices come in no order, so that it cannot be known which is the last: those are not held back.
    """

    def __init__(self, callback: Callback, size: int, reduce: Any):
        super().__init__(callback)
        self.size, self.reduce = size, reduce
        self.events: list[logdict] = []

    def take(self, logs: logdict, in_order: bool) -> None:
        """Keep it, and pass on what there is if it is enough."""
        if _BEGIN in logs:
            self.events = []
            return
        if logs and _FLUSH not in logs:
            self.events.append(logs)
        if self.events and (_FLUSH in logs or not in_order or len(self.events) >= self.size):
            block, self.events = joined(self.events), []
            if self.reduce is not None:
                block = joined([block.reduce({key: self._reduction(key) for key in block})])
            self.callback(block)

    def _reduction(self, key: str) -> Any:
        return dict(self.reduce).get(key) if isinstance(self.reduce, tuple) else self.reduce


@dataclasses.dataclass(frozen=True)
class Stream(Handler):
    """Emits events as they happen, or once at the end for keys that are reduced.

    The state is the token that keeps emissions in order, and by key the reductions and the counters of `interval`.
    """

    collect: Collect
    deliver: Delivery
    prefix: str

    def wants(self, meta: Meta) -> bool:
        """All of them: those not selected still flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """The token before the first event, and nothing counted or reduced yet."""
        token = _emit.new_token()
        if isinstance(self.deliver, BufferedDelivery):  # what an aborted call may have left
            token = _emit.emit(self.deliver, _signal(_BEGIN), token)
        return {"token": token, "held": {}, "counts": {}}

    def event(self, run: Run, event: Event) -> None:
        """Emit or reduce the selected keys, and let all flow on."""
        selected = self.collect.selection.keys(event)
        reduced = [k for k in selected if self.collect.reduction(k, event.reductions[k]) is not None]
        if reduced:
            inner = Run(self.collect, run.state["held"], run.unbounded)
            self.collect.event(inner, event.only(reduced))
            run.state = {**run.state, "held": inner.state}
        direct = [k for k in selected if k not in reduced]
        interval = self.collect.interval
        if direct and interval is None:
            self._emit(run, event.only(direct).prefixed(self.prefix))
        elif direct and interval is not None:
            self._emit_if_due(run, event.only(direct), interval)
        for key in selected:
            run.note(key, event.mask is None)
        bind(event.replace(seen=True))

    def _emit(self, run: Run, event: Event) -> None:
        run.state = {**run.state, "token": _emit.emit(self.deliver, event, run.state["token"])}

    def _emit_if_due(self, run: Run, event: Event, interval: int) -> None:
        counts, due = dict(run.state["counts"]), []
        for key in event.values:
            counter = counts.get(key) or Fold.empty(_reduce.COUNT, key, event)
            due.append(counter.count.map(lambda n: n % interval == 0))
            counts[key] = counter.take(event, None)
        event = event.prefixed(self.prefix)
        event = event.replace(
            values={**event.values, _DUE: due},
            treedefs={**event.treedefs, _DUE: jax.tree.structure([0] * len(due))},
            reductions={**event.reductions, _DUE: None},
        )
        # On the device, so that the host is called only when there is something to tell.
        any_due = functools.reduce(operator.or_, [jnp.any(x.tree) for x in due])
        emit = lambda token: _emit.emit(self.deliver, event, token)  # noqa: E731
        token = jax.lax.cond(any_due, emit, lambda token: token, run.state["token"])
        run.state = {**run.state, "token": token, "counts": counts}

    def extend(self, run: Run, struct: dict[str, Any]) -> None:
        """The token does not change its type; the rest is as for `spool`."""
        for part in ("held", "counts"):
            inner = Run(self.collect, run.state[part])
            self.collect.extend(inner, struct[part])
            run.state = {**run.state, part: inner.state}

    def split_state(self, state: dict[str, Any], keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """By key; the token always takes part."""
        held, rejoin_held = self.collect.split_state(state["held"], keys)
        counts, rejoin_counts = self.collect.split_state(state["counts"], keys)

        def rejoin(part: dict[str, Any]) -> dict[str, Any]:
            return {**part, "held": rejoin_held(part["held"]), "counts": rejoin_counts(part["counts"])}

        return {**state, "held": held, "counts": counts}, rejoin

    def for_rules(self) -> Handler:
        """Only events of the primal are streamed."""
        return _engine.MarkSeen()

    def finish(self, run: Run) -> Any:
        """Emit what was reduced; returns the last token."""
        for key, held in run.state["held"].items():
            series = held.finish(run.keys.get(key, False), self.collect.interval)
            self._emit(run, Event.from_series(series).prefixed(self.prefix))
        if isinstance(self.deliver, BufferedDelivery):
            self._emit(run, _signal(_FLUSH))
        return run.state["token"]


def tap(
    fun: Callable[..., Any],
    callback: Callback = print,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    prefix: str = "",
    interval: int | None = None,
    reduce: Any = None,
    buffer: int | None = None,
) -> Callable[..., Any]:
    """Stream a function's logs to a callback while it runs.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(xs):
    ...     def step(carry, x):
    ...         carry += x
    ...         lox.log({"carry": carry})
    ...         return carry, x
    ...
    ...     return jax.lax.scan(step, 0, xs)[0]
    >>> y = lox.tap(f, lambda logs: print("Logging:", logs))(jnp.arange(3))
    Logging: {'carry': 0}
    Logging: {'carry': 1}
    Logging: {'carry': 3}

    Every event reaches the callback once, in program order, as a `logdict` of NumPy arrays that it may keep; all lanes
    of a `vmap` come in one call. The logs flow on: an outer `spool` or `tap` sees them too.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host. What it raises aborts the call. It must not call JAX.
        argnames: Stream these keys only; globs such as `"train/*"` are allowed.
        tags: Stream logs with one of these tags only.
        prefix: Put in front of every key.
        interval: Stream events 0, k, 2k, ... of each key.
        reduce: Combine the events of each key while the program runs, and call once when the function ends; with
            `buffer`, combine those of each call.
        buffer: Call once for up to that many events: the keys then have an event axis. What is left over comes when
            the function ends.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        OptionError: An option that makes no sense.
    """
    if not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of a logdict.")
    prefix, reduction = _call.prefix_option(prefix), _call.reduce_option(reduce)
    interval, buffer = _call.count_option("interval", interval), _call.count_option("buffer", buffer)
    collect = Collect(Selection.of(argnames, tags), None if buffer else reduction, None, interval, keep_logs=False)
    if isinstance(reduction, tuple):
        reduction = tuple((prefix + key, how) for key, how in reduction)

    @functools.wraps(fun)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if buffer is None:
            return call(_delivery(callback), args, kwargs)
        with _buffers.lend(callback, buffer, reduction) as deliver:
            return call(deliver, args, kwargs)

    def call(deliver: Delivery, args: Any, kwargs: Any) -> Any:
        handler = Stream(collect, deliver, prefix)

        def stream(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
            out, run = _engine.run_function(handler, fun, args, kwargs)
            return out, handler.finish(run)

        try:
            out, token = _call.call(fun, handler, stream, args, kwargs)
            if not isinstance(token, _compat.Tracer):
                jax.block_until_ready(token)  # the token is there once the last callback has returned
        except Exception:
            error = deliver.pop_error()
            if error is not None:
                raise error from None
            raise
        return out

    return tapped


class _Identity:
    """A callback as a key: two callbacks that are equal are still two."""

    def __init__(self, callback: Callback):
        # A bound method is made anew whenever it is looked up.
        method = isinstance(callback, types.MethodType)
        self.parts = (callback.__self__, callback.__func__) if method else (callback, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and all(a is b for a, b in zip(self.parts, other.parts, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.parts)))


# One for each callback, so that a function tapped anew for every call is the same function to JAX's caches, and finds
# what its callback has raised.
_deliveries: Any = weakref.WeakValueDictionary()


def _delivery(callback: Callback) -> Delivery:
    key = _Identity(callback)
    found = _deliveries.get(key)
    if found is None:
        found = _deliveries[key] = Delivery(callback)
    return found


class _Buffers:
    """Buffers to be lent: a call that runs at once gives its own back, for the next one to find it in JAX's caches."""

    def __init__(self) -> None:
        self.free: dict[Any, list[BufferedDelivery]] = {}
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, callback: Callback, size: int, reduce: Any) -> Iterator[BufferedDelivery]:
        """A buffer that no other call uses meanwhile; one that is compiled into a program is never given back."""
        key = (_Identity(callback), size, reduce)
        with self.lock:
            free = self.free.setdefault(key, [])
            buffer = free.pop() if free else BufferedDelivery(callback, size, reduce)
            if len(self.free) > 64:
                self.free.pop(next(iter(self.free)))
        compiled_in = not _compat.is_evaluating()
        try:
            yield buffer
        finally:
            if not compiled_in:
                buffer.events = []
                with self.lock:
                    self.free.setdefault(key, []).append(buffer)


_buffers = _Buffers()
