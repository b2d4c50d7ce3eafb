"""`lox.tap`: stream logs to a callback while the program runs."""

import dataclasses
import functools
import itertools
import math
import operator
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from lox import _compat, _errors
from lox._data import _lanes
from lox._data._lanes import Laned
from lox._data._logdict import joined, logdict
from lox._data._series import Series, Site, check_fit_all
from lox._engine import _emit, _interpret
from lox._engine._event import Event, Meta
from lox._engine._interpret import Frame, Handler, Tally
from lox._engine._primitive import bind
from lox._engine._select import Names, Selection
from lox._engine._sink import show
from lox._transforms import _call
from lox._transforms._call import P, R
from lox._transforms._spool import Collect
from lox._transforms._state import Buffer, Fold, Room, Tick

Callback = Callable[[logdict], Any]
_Kind = TypeVar("_Kind", bound="HostFunction")


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


class HostFunction:
    """Calls the user's callback from the host."""

    def __init__(self, callback: Callable[[Any], Any]):
        self.callback = callback

    def __call__(self, argument: Any) -> int | None:
        """Call the callback."""
        self.callback(argument)


class Delivery(HostFunction):
    """Delivers every event to the callback as it arrives."""

    ordered = True  # for `emit`

    def __call__(self, logs: logdict, token: int = 0) -> int | None:
        """Take the events of one call, on the host."""
        return self.take(_only_due(logs), token)

    def take(self, logs: logdict, token: int, at_once: bool = False) -> int | None:
        """Pass the events on."""
        del token, at_once
        if logs:
            self.callback(logs)
        return None


# Internal keys, which differ from all keys of users.
_DUE = "\0due"  # travels with an event under `interval`: which of its keys are due
_FLUSH = "\0flush"  # a signal: deliver what is buffered
_BEGIN = "\0begin"  # a signal: begin with an empty buffer, whose number becomes the token


def _signal(key: str) -> Event:
    nothing = Laned(jnp.zeros((), bool))
    return Event.from_series(Series([nothing], {}, None, jax.tree.structure(0), True, key, Site("")))


class Pending:
    """The events that one execution of a program has not delivered yet."""

    def __init__(self) -> None:
        self.events: list[logdict] = []
        self.counts: Counter[str] = Counter()

    def add(self, logs: logdict) -> None:
        """Add the events of a call."""
        self.events.append(logs)
        self.counts.update(logs.event_counts())

    def would_exceed(self, logs: logdict, size: int) -> bool:
        """Whether any key would have more than `size` events."""
        return any(self.counts[key] + n > size for key, n in logs.event_counts().items())


def _that_fit(events: list[logdict]) -> Iterator[list[logdict]]:
    """Split events, in order, into as few parts as possible such that the events of a key in a part fit together."""
    part: list[logdict] = []
    models: dict[str, dict[Any, Series]] = {}

    def add(logs: logdict) -> None:
        for key in logs:
            check_fit_all(models.setdefault(key, {}), logs._to_series(key))
        part.append(logs)

    for logs in events:
        try:
            add(logs)
        except _errors.MismatchError:
            yield part
            part, models = [], {}
            add(logs)
    if part:
        yield part


class BufferedDelivery(Delivery):
    """Calls the user's callback once for several events: up to `size` of each key.

    Every execution of a program has its own buffer, whose number is the token: a compiled program may run several times
    at once. Events of several devices are unordered, so it is unknown which is the last: they are delivered
    immediately.
    """

    def __init__(self, callback: Callback, size: int):
        super().__init__(callback)
        self.size = size
        self.numbers = itertools.count(1)
        self.pending: dict[int, Pending] = {}

    def take(self, logs: logdict, token: int, at_once: bool = False) -> int | None:
        """Keep the events, and pass them on if there are enough."""
        if _BEGIN in logs:
            number = next(self.numbers)
            self.pending[number] = Pending()
            return number
        if token < 0:
            self._send(Pending(), logs)
            return None
        pending = self.pending.pop(token, None) or Pending()  # they stay removed if the callback raises
        if _FLUSH in logs:
            self._send(pending)
            return None
        if pending.would_exceed(logs, self.size):
            self._send(pending)
            pending = Pending()
        pending.add(logs)
        if at_once or max(pending.counts.values()) >= self.size:
            self._send(pending)
            pending = Pending()
        self.pending[token] = pending
        return None

    def _send(self, pending: Pending, *more: logdict) -> None:
        events = [*pending.events, *[logs for logs in more if logs and _FLUSH not in logs]]
        if not events:
            return
        try:
            whole = [joined(events)]
        except _errors.MismatchError:
            whole = [joined(part) for part in _that_fit(events)]
        for logs in whole:
            self.callback(logs)


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """Delivers immediately if there are events of these keys, each of which already stands for several."""

    delivery: Delivery
    keys: frozenset[str]

    ordered: ClassVar[bool] = True  # for `emit`

    def __call__(self, logs: logdict, token: int = 0) -> int | None:
        """Take the events of one call, on the host."""
        return self.delivery.take(logs, token, at_once=not self.keys.isdisjoint(logs))


@dataclasses.dataclass(frozen=True)
class Stream(Handler):
    """Emits events as they happen, or once at the end for keys that are reduced.

    With `buffer`, loops are split into blocks of iterations with at most that many events of any key. `collect` takes
    the events of a block, which leave in one call. Events outside of loops still leave one by one, and are joined on
    the host; those of reduced keys are combined on the device, and leave when there are enough of them.

    The state is the token that keeps emissions in order, and for each key its reduction and its counter for `interval`.
    """

    collect: Collect
    deliver: Delivery
    prefix: str
    buffer: int | None

    waits: ClassVar[bool] = True  # whether a call returns only after the last callback

    @property
    def names(self) -> Names | None:
        """The names in the options."""
        return self.collect.names

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want all logs, since even those not selected flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """The token before the first event; nothing is counted or reduced yet."""
        token = _emit.new_token()
        if self.buffer:
            token = _emit.emit(self.deliver, _signal(_BEGIN), token)
        return {"token": token, "folds": {}, "counts": {}}

    def event(self, frame: Frame, event: Event) -> None:
        """Emit or reduce the selected keys, and let all flow on."""
        original, event = event, event.in_scope()
        selected = self.collect.selection.keys(event)
        reduced = [k for k in selected if self.collect.reduction(k, event.reductions[k]) is not None]
        if reduced:
            inner = Frame(self._fold, frame.state["folds"], frame.unbounded)
            self._fold.event(inner, event.only(reduced))
            frame.state = {**frame.state, "folds": inner.state}
            if self.buffer:
                enough = self.take_reduced(frame, dict.fromkeys(reduced, self.buffer))
                self.emit_all(frame, [], enough, conditional=self.buffer > 1)
        direct = [k for k in selected if k not in reduced]
        interval = self.collect.interval
        if direct and interval is None:
            self._emit(frame, event.only(direct).prefixed(self.prefix))
        elif direct and interval is not None:
            self._emit_if_due(frame, event.only(direct), interval)
        for key in selected:
            frame.note(key, event.valid is None)
        bind(original.replace(seen=True))

    @functools.cached_property
    def _fold(self) -> Collect:
        return dataclasses.replace(self.collect, keep_logs=False)

    def _emit(self, frame: Frame, event: Event) -> None:
        def emit(keys: list[str], token: Any) -> Any:
            return _emit.emit(self.deliver, self.leaving(frame, event.only(keys)), token)

        shared = [*event.steps.values(), event.valid]
        token = _emit.once(emit, {k: [*x, *shared] for k, x in event.values.items()}, frame.alike, frame.state["token"])
        frame.state = {**frame.state, "token": token}

    def leaving(self, frame: Frame, event: Event) -> Event:
        """The event to send to the host."""
        del frame
        return event

    def series_leaving(self, frame: Frame, series: Series) -> Series:
        """The series to send to the host."""
        del frame
        return series

    def _emit_if_due(self, frame: Frame, event: Event, interval: int) -> None:
        counts, due = dict(frame.state["counts"]), {}
        for key in event.values:
            counter = counts.get(key) or Tick()
            due[key] = counter.count.map(lambda n: n % interval == 0)
            counts[key] = counter.take(key, event)

        def emit(keys: list[str], token: Any) -> Any:
            due_now = [due[k] for k in keys]
            valid = event.valid or Laned(jnp.ones((), bool))
            lanes = _lanes.union(*[_lanes.lanes_of(x) for x in [valid, *due_now]])
            assert lanes is not None  # the counters have taken the event
            any_due = functools.reduce(operator.or_, [_lanes.widen(x, lanes).tree for x in due_now])
            leaving = event.only(keys).prefixed(self.prefix)
            leaving = leaving.replace(
                values={**leaving.values, _DUE: due_now},
                treedefs={**leaving.treedefs, _DUE: jax.tree.structure([0] * len(due_now))},
                reductions={**leaving.reductions, _DUE: None},
                valid=Laned(_lanes.widen(valid, lanes).tree & any_due, lanes.flags),
            )
            return _emit.emit(self.deliver, self.leaving(frame, leaving), token, conditional=True)

        shared = [*event.steps.values(), event.valid]
        parts = {k: [*x, *shared, due[k]] for k, x in event.values.items()}
        token = _emit.once(emit, parts, frame.alike, frame.state["token"])
        frame.state = {**frame.state, "token": token, "counts": counts}

    # --- blocks of iterations ---

    def split(self, frame: Frame, jaxprs: Iterable[Any]) -> "Blocks | None":
        """How to split a loop whose iterations run these jaxprs; None if it cannot be split."""
        if not self.buffer:
            return None
        total: dict[str, Tally] = {}
        stacked: set[str] = set()
        for jaxpr in jaxprs:
            for key, tally in _interpret.tally(jaxpr, frame.eqn_scope, self.collect.selection.keys).items():
                total[key] = total.get(key, Tally()) + tally
            stacked.update(_interpret.tally(jaxpr, frame.eqn_scope, self.collect.counts))
        most = max((t.count for t in total.values()), default=0)
        if not most or most == math.inf:
            return None
        interval = self.collect.interval or 1
        iterations = int(self.buffer * interval // most)
        if iterations > interval:
            iterations -= iterations % interval  # so that every block begins with an event to keep
        if iterations < 2:
            return None
        counts = {key: int(t.count) for key, t in total.items()}
        return Blocks(
            self,
            iterations,
            {key: n for key, n in counts.items() if key in stacked},
            {key: n for key, n in counts.items() if key not in stacked},
        )

    def emit_all(self, frame: Frame, stacked: list[Series], reduced: list[Series], conditional: bool = False) -> None:
        """Emit several events of each key in one call; it is not delayed if there are reduced keys."""
        if stacked or reduced:
            order = {key: n for n, key in enumerate(frame.keys)}
            series = {s.key: s for s in sorted([*stacked, *reduced], key=lambda s: order.get(s.key, len(order)))}
            deliver = AtOnce(self.deliver, frozenset(self.prefix + s.key for s in reduced))

            def emit(keys: list[str], token: Any) -> Any:
                named = [self.series_leaving(frame, dataclasses.replace(series[k], key=self.prefix + k)) for k in keys]
                return _emit.emit_series(deliver, named, token, conditional and not stacked)

            frame.state = {**frame.state, "token": _emit.once(emit, series, frame.alike, frame.state["token"])}

    def take_reduced(self, frame: Frame, at: dict[str, int]) -> list[Series]:
        """Take the reductions of these keys that have at least that many events, and restart them."""
        folds, series = dict(frame.state["folds"]), []
        interval = self.collect.interval or 1
        for key, number in at.items():
            fold = folds.get(key)
            if fold is None:
                continue
            result, enough = fold.finish(certain=False), None
            if number > 1:
                # All lanes leave together, or there would be a call for each.
                enough = jnp.max(fold.count.tree) > (number - 1) * interval
                assert result.valid is not None
                result = dataclasses.replace(result, valid=result.valid.map(lambda v, e=enough: v & e))
            series.append(result)
            folds[key] = fold.restarted(enough)
        frame.state = {**frame.state, "folds": folds}
        return series

    def allows(self, frame: Frame, struct: dict[str, Any]) -> bool:
        """Allow new keys, since nothing is stacked outside of blocks."""
        return True

    def extend(self, frame: Frame, struct: dict[str, Any]) -> None:
        """Extend reductions and counters as `spool` does; the token does not change its type."""
        for part in ("folds", "counts"):
            inner = Frame(self.collect, frame.state[part])
            self.collect.extend(inner, struct[part])
            frame.state = {**frame.state, part: inner.state}

    def split_state(self, state: dict[str, Any], keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """Split by key; the token always takes part."""
        folds, rejoin_folds = self.collect.split_state(state["folds"], keys)
        counts, rejoin_counts = self.collect.split_state(state["counts"], keys)

        def rejoin(part: dict[str, Any]) -> dict[str, Any]:
            return {**part, "folds": rejoin_folds(part["folds"]), "counts": rejoin_counts(part["counts"])}

        return {**state, "folds": folds, "counts": counts}, rejoin

    def for_rules(self) -> Handler:
        """Stream only events of the primal."""
        return _interpret.MarkSeen()

    def finish(self, frame: Frame) -> Any:
        """Emit what was reduced; returns the last token."""
        if self.buffer:
            self.emit_all(frame, [], self.take_reduced(frame, dict.fromkeys(frame.state["folds"], 1)))
            self._emit(frame, _signal(_FLUSH))
            return frame.state["token"]
        for key in [k for k in frame.keys if k in frame.state["folds"]]:
            series = frame.state["folds"][key].finish(frame.keys.get(key, False))
            self._emit(frame, Event.from_series(series).prefixed(self.prefix))
        return frame.state["token"]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a loop is split: the iterations of a block, and the most events of each key in one iteration."""

    stream: Stream
    iterations: int
    stacked: dict[str, int]
    reduced: dict[str, int]

    def run(self, frame: Frame, bounded: bool, execute: Callable[[Frame], Any], room_for: int | None = None) -> Any:
        """Run as many iterations as fit by `execute(frame)`, emit their events in one call, then flush."""
        interval = self.stream.collect.interval
        inner = Frame(self.stream.collect, frame.state["folds"], scope=frame.eqn_scope)
        if interval is not None or not bounded:
            rooms = {}
            for key, count in self.stacked.items():
                seen = frame.state["counts"].get(key, Tick()).count
                rooms[key] = Room.within(count * self.iterations, interval or 1, seen, None)
            inner.state = {**inner.state, **rooms}
        out = execute(inner)
        series, folds, counts = dict(inner.piece() if inner.pieces else {}), {}, dict(frame.state["counts"])
        for key, state in inner.state.items():
            if isinstance(state, Fold):
                folds[key] = state
            elif isinstance(state, Buffer):
                series[key] = state.finish(certain=False)
                if interval is not None:
                    counts[key] = Tick(state.seen, state.series.site)
        for key, certain in inner.keys.items():
            frame.note(key, certain)
        frame.state = {**frame.state, "folds": folds, "counts": counts}
        self._emit(frame, [series[key] for key in inner.keys if key in series], room_for)
        return out

    def flush(self, frame: Frame, room_for: int | None = None) -> None:
        """Emit the reductions of the loop's keys: all of them, or those that leave no room for that many iterations."""
        self._emit(frame, [], room_for)

    def _emit(self, frame: Frame, stacked: list[Series], room_for: int | None) -> None:
        buffer, interval = self.stream.buffer or 1, self.stream.collect.interval or 1
        at = dict.fromkeys(self.reduced, 1)
        if room_for is not None:
            for key, count in self.reduced.items():
                at[key] = max(buffer - max(-(-count * room_for // interval), 1) + 1, 1)
        reduced = self.stream.take_reduced(frame, at)
        self.stream.emit_all(frame, stacked, reduced, conditional=max(at.values(), default=1) > 1)


def tap(
    fun: Callable[P, R],
    callback: Callback = show,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    prefix: str = "",
    interval: int | None = None,
    reduce: Any = None,
    buffer: int | None = None,
) -> Callable[P, R]:
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
    of a `vmap` come in one call. The logs flow on to an outer `spool` or `tap`.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host. If it raises, the call is aborted. It must not call JAX. By default, the event is
            printed with its steps: `{'loss': 0.5} step=3`.
        argnames: Stream these keys only; globs such as `"train/*"` are allowed.
        tags: Stream logs with one of these tags only.
        prefix: Put in front of every key.
        interval: Stream events 0, k, 2k, ... of each key.
        reduce: Combine the events of each key while the program runs, and call once when the function ends; with
            `buffer`, combine those of each call.
        buffer: Call once for up to that many events; the keys then have an event axis. The rest comes when the function
            ends. Events of a key that do not fit into one array come in separate calls, but it is an error if they are
            from the same iteration of a loop.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        OptionError: An option that makes no sense.
    """
    stream = streaming(Stream, callback, argnames, tags, prefix, interval, reduce, buffer)

    @functools.wraps(fun)
    def tapped(*args: P.args, **kwargs: P.kwargs) -> R:
        return stream(fun, args, kwargs)

    return tapped


def streaming(
    kind: type[Stream],
    callback: Callback,
    argnames: str | Iterable[str] | None,
    tags: str | Iterable[str] | None,
    prefix: str,
    interval: int | None,
    reduce: Any,
    buffer: int | None,
) -> Callable[..., Any]:
    """How `tap` with these options calls a function: `(fun, args, kwargs, **given)`.

    `given` becomes part of the state of the handler, whose class is `kind`.
    """
    if not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of a logdict.")
    prefix, reduction = _call.prefix_option(prefix), _call.reduce_option(reduce)
    interval, buffer = _call.count_option("interval", interval), _call.count_option("buffer", buffer)
    collect = Collect(Selection.of(argnames, tags), reduction, None, interval, keep_logs=True)

    def stream(fun: Callable[..., Any], args: Any, kwargs: Any, **given: Any) -> Any:
        deliver = one_for(callback, Delivery) if buffer is None else one_for(callback, BufferedDelivery, buffer)
        handler = kind(collect, deliver, prefix, buffer)

        def transform(fun: Callable[..., Any], args: Any, kwargs: Any, given: Any) -> tuple[Any, Any]:
            out, frame = _interpret.run_function(handler, fun, args, kwargs, given)
            with _compat.own_transfers():
                return out, handler.finish(frame)

        return finished(lambda: _call.call(fun, handler, transform, args, kwargs, given), kind.waits)

    return stream


def finished(call: Callable[[], tuple[Any, Any]], wait: bool = True) -> Any:
    """The result of `call()`, which also returns the last token; raises the exception of a callback unchanged."""
    try:
        if not wait or _compat.is_evaluating():
            out, token = call()
        else:
            with _interpret.failing_at_once():
                out, token = call()
        if wait and not isinstance(token, _compat.Tracer):
            jax.block_until_ready(token)  # it is ready once the last callback has returned
    except Exception as raised:
        error = _emit.error_behind(raised)
        if error is None:
            raise
        _compat.forget_failed_effects(type(error).__name__)
        raise error from None
    return out


class _Identity:
    """A callback as a key of a cache, compared by identity."""

    def __init__(self, callback: Callback):
        # Every access to a bound method makes a new object.
        method = isinstance(callback, types.MethodType)
        self.parts = (callback.__self__, callback.__func__) if method else (callback, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and all(a is b for a, b in zip(self.parts, other.parts, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.parts)))


# One for each callback, so that JAX's caches recognise a function that is tapped again for every call.
_host_functions: Any = weakref.WeakValueDictionary()


def one_for(callback: Callable[[Any], Any], kind: type[_Kind], *options: Any) -> _Kind:
    """The host function of this kind for a callback."""
    cache_key = (kind, _Identity(callback), *options)
    function = _host_functions.get(cache_key)
    if function is None:
        function = _host_functions[cache_key] = kind(callback, *options)
    return function
