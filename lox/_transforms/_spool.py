"""`lox.spool`: logs as a result."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lox import _compat, _errors
from lox._data import _reduce, _series
from lox._data._lanes import Laned
from lox._data._logdict import logdict, warn_of_dropped
from lox._data._series import Series
from lox._engine import _handler, _trace
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Tally
from lox._engine._primitive import bind
from lox._engine._selection import Names, Selection
from lox._transforms import _call
from lox._transforms._call import P, R
from lox._transforms._fold import Fold
from lox._transforms._slots import Buffer, Room

Options = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Collect(Handler):
    """Stacks events, or reduces them while the program runs.

    A piece has the series of each key. The state has, for each key, its reduction, or its buffer if it is logged in a
    loop of unknown length.
    """

    selection: Selection
    reduce: Any = None  # a Reduction for all keys, or pairs of key and Reduction
    capacity: int | Options | None = None
    interval: int | None = None
    keep_logs: bool = False

    @property
    def names(self) -> Names | None:
        """The names in the options."""
        return Names.of(self.selection, reduce=self.reduce, capacity=self.capacity)

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want selected logs, and all if they are kept for others."""
        return self.keep_logs or bool(self.selection.keys(meta, scope))

    def initial_state(self) -> dict[str, Fold | Buffer]:
        """Start empty: the state of a key begins with its first event."""
        return {}

    def reduction(self, key: str, logged: _reduce.Reduction | None) -> _reduce.Reduction | None:
        """The reduction of a key: that of spool's mapping, else that of the log, else that of spool for all keys."""
        how = dict(self.reduce).get(key, logged) if isinstance(self.reduce, tuple) else logged or self.reduce
        return None if how is not None and how.name == "append" else how

    def event(self, frame: Frame, event: Event) -> None:
        """Take the selected keys."""
        if self.keep_logs:
            bind(event.replace(seen=True))
        event = event.in_scope()
        keys = self.selection.keys(event)
        event = event.owned() if keys else event
        for key in keys:
            reduction = self.reduction(key, event.reductions[key])
            state = frame.state.get(key)
            if isinstance(state, Room):
                state = state.buffer(key, event) if reduction is None else None
            if state is not None:
                self._check_same_reduction(state, reduction, key, event)
                state = state.fitting(event).take(event)
            elif reduction is not None:
                self._check_not_stacked(frame, key, reduction, event)
                state = Fold.empty(reduction, key, event, self.interval or 1).take(event)
            elif frame.unbounded:
                capacity = self._capacity(key, event.site)
                state = Buffer.empty(capacity, key, event, self.interval or 1).take(event)
            if state is not None:
                frame.state = {**frame.state, key: state}
            else:
                series = event.series(key)
                in_loop = _compat.in_python_loop(_trace.run_function.__code__)
                frame.collect({key: series.expanded() if in_loop else series})
            frame.note(key, event.valid is None)

    def _capacity(self, key: str, site: str) -> int:
        capacity = dict(self.capacity).get(key) if isinstance(self.capacity, tuple) else self.capacity
        if capacity is None:
            raise _errors.unbounded_loop(key, site)
        return capacity

    def _check_same_reduction(self, state: Fold | Buffer, reduction: Any, key: str, event: Event) -> None:
        before = state.reduction if isinstance(state, Fold) else None
        before = _reduce.MEAN if before is _reduce.WEIGHTED_MEAN else before
        if before != reduction:
            site = state.site if isinstance(state, Fold) else state.series.site
            raise _errors.mismatch(key, "reductions", _name(before), str(site), _name(reduction), event.site)

    def _check_not_stacked(self, frame: Frame, key: str, reduction: Any, event: Event) -> None:
        thinned = [{key: series} for series in frame.notes[key].kept] if key in frame.notes else []
        for piece in [*thinned, *frame.pieces]:
            if key in piece:
                site = str(piece[key].site)
                raise _errors.mismatch(key, "reductions", _name(None), site, _name(reduction), event.site)

    def counts(self, meta: Meta, scope: str) -> list[str]:
        """The keys that are stacked."""
        logged = {scope + key: how for key, how in zip(meta.keys, meta.reductions, strict=True)}
        return [key for key in self.selection.keys(meta, scope) if self.reduction(key, logged[key]) is None]

    def before(self, frame: Frame, find: Callable[[], dict[str, Tally]]) -> None:
        """With an interval, make room for the events that loops keep: the others are not even stored."""
        if self.interval is None:
            return
        for key, tally in find().items():
            if tally.looped and tally.count < math.inf and key not in frame.state:
                note = self._thin_out(frame, key)
                known = note.seen if tally.exact and isinstance(note.seen, int) else None
                room = Room.within(int(tally.count), self.interval, _as_laned(note.seen), known)
                frame.state = {**frame.state, key: room}
                note.coming = tally

    def after(self, frame: Frame, completed: bool) -> None:
        """Move the kept events from the state to the notes."""
        for key, note in frame.notes.items():
            if note.coming is None:
                continue
            state, tally, note.coming = frame.state[key], note.coming, None
            frame.state = {k: v for k, v in frame.state.items() if k != key}
            if isinstance(state, Room) or not completed:  # no event came
                continue
            if isinstance(state, Fold):
                frame.state = {**frame.state, key: state}
            elif tally.exact and isinstance(note.seen, int):
                self.check(frame, {key: state.full()})
                note.kept.append(state.full())
                note.seen += int(tally.count)
            else:
                self.check(frame, {key: state.series})
                note.kept.append(state.finish(certain=False))
                note.seen = state.seen

    def _thin_out(self, frame: Frame, key: str) -> Any:
        """Apply the interval to the stacked events of a key."""
        assert self.interval is not None
        note = frame.notes.setdefault(key, Thinned([], 0, None))
        stacked = frame.piece() if frame.pieces else {}
        if key in stacked:
            kept, note.seen = _series.every(stacked.pop(key), self.interval, note.seen)
            note.kept.append(kept)
            frame.pieces = [stacked] if stacked else []
        return note

    def check(self, frame: Frame, piece: dict[str, Series]) -> None:
        """Raise now and not at the end, when the result of a long computation would be lost."""
        for key, series in piece.items():
            _series.check_fit_all(frame.models.setdefault(key, {}), series)

    def gather(self, pieces: list[dict[str, Series]]) -> dict[str, Series]:
        """Join the series of each key."""
        by_key: dict[str, list[Series]] = {}
        for piece in pieces:
            for key, series in piece.items():
                by_key.setdefault(key, []).append(series)
        return {key: _series.concatenate(parts) for key, parts in by_key.items()}

    def unroll(self, piece: dict[str, Series], reverse: bool) -> dict[str, Series]:
        """Unroll the series of each key."""
        return {key: _series.unroll(series, reverse) for key, series in piece.items()}

    def unify(self, pieces: list[dict[str, Series]]) -> list[Callable[[Any], Any]] | None:
        """Pad the series of branches that log differently; `valid` marks the padding."""
        keys = dict.fromkeys(k for p in pieces for k in p)
        if all(_alike(p, pieces[0]) for p in pieces[1:]):
            return None
        shapes = {k: _series.common_shape([p.get(k) for p in pieces]) for k in keys}

        def fit(piece: dict[str, Series]) -> dict[str, Series]:
            return {k: _series.conform(piece.get(k), shape) for k, shape in shapes.items()}

        return [fit] * len(pieces)

    def allows(self, frame: Frame, struct: dict[str, Any]) -> bool:
        """Allow new keys, unless they have earlier events, which must come first."""
        stacked = {key for piece in frame.pieces for key in piece}
        return not any(key not in frame.state and (key in stacked or key in frame.notes) for key in struct)

    def extend(self, frame: Frame, struct: dict[str, Any]) -> None:
        """Start new keys empty, or with their stacked events."""
        state = {}
        stacked = frame.piece() if frame.pieces else {}
        for key, target in struct.items():
            before = frame.state.get(key)
            note = frame.notes.pop(key, None) if before is None else None
            if note is not None:  # the key was thinned out so far, and is now logged in a loop of unknown length
                every_event = dataclasses.replace(Buffer.from_struct(target), interval=1)
                kept = _series.concatenate(note.kept)
                _series.check_fit(kept, target.series)
                buffer = every_event.take_series(kept)
                # Without the type of `target`, which may lack the steps of the kept events.
                state[key] = dataclasses.replace(buffer, interval=target.interval, seen=_as_laned(note.seen))
                if key in stacked:
                    state[key] = state[key].take_series(stacked.pop(key))
            elif before is None and key in stacked:
                series = stacked.pop(key)
                if isinstance(target, Fold):
                    raise _errors.mismatch(
                        key, "reductions", _name(None), str(series.site), _name(target.reduction), str(target.site)
                    )
                _series.check_fit(series, target.series)
                state[key] = Buffer.from_struct(target).take_series(series)
            elif before is None:
                state[key] = type(target).from_struct(target)
            else:
                state[key] = before.conform(target)
        frame.state, frame.pieces = state, [stacked] if stacked else []

    def split_state(self, state: dict[str, Any], keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """Split by key."""
        inside = {k: v for k, v in state.items() if k in keys}
        return inside, lambda part: {**state, **part}

    def for_rules(self) -> Handler:
        """Drop logs, or leave them to others but not to the console."""
        return _handler.MarkSeen() if self.keep_logs else _handler.Drop()


@dataclasses.dataclass
class Thinned:
    """The events of a key that an interval has kept at the outermost level."""

    kept: list[Series]
    seen: int | Laned  # how many events there were; a plain integer while it is known
    coming: Tally | None  # the events of what is running now


def _as_laned(seen: int | Laned) -> Laned:
    return Laned(jnp.asarray(seen, jnp.int32)) if isinstance(seen, int) else seen


def _name(reduction: _reduce.Reduction | None) -> str:
    return "no reduction" if reduction is None else f"reduce={reduction.name!r}"


def _alike(a: dict[str, Series], b: dict[str, Series]) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def finish(handler: Collect, frame: Frame, prefix: str) -> logdict:
    """The logs that a frame has collected, as users see them."""
    series: dict[str, Series] = dict(frame.piece() if frame.pieces else {})
    if handler.interval is not None:
        for key in [*series, *frame.notes]:
            note = handler._thin_out(frame, key)
            series[key] = _series.concatenate(note.kept)
    reduced, dropped = set(), {}
    for key, state in frame.state.items():
        series[key] = state.finish(frame.keys.get(key, False))
        if isinstance(state, Fold):
            reduced.add(prefix + key)
        else:
            dropped[prefix + key] = state.dropped()
    ordered = [dataclasses.replace(series[k], key=prefix + k if prefix else k) for k in frame.keys if k in series]
    logs = logdict.from_series(ordered, reduced)
    logs.dropped = dropped
    return logs


def spool(
    fun: Callable[P, R],
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    keep_logs: bool = False,
    interval: int | None = None,
    reduce: Any = None,
    prefix: str = "",
    capacity: int | Mapping[str, int] | None = None,
    unify: bool = True,
) -> Callable[P, tuple[R, logdict]]:
    """Make a function return its logs beside its result.

    >>> import lox
    >>> def f(x, y):
    ...     lox.log({"x": x, "y": y})
    ...     return x * y
    >>> z, logs = lox.spool(f)(3, 4)
    >>> print(z, logs)
    12 {'x': 3, 'y': 4}

    A key that is logged once, outside of loops, is the value itself; any other has a leading axis of events, in the
    order in which they happened. Nothing is printed inside `fun`.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        argnames: Return these keys only; globs such as `"train/*"` are allowed.
        tags: Return logs with one of these tags only.
        keep_logs: Leave the logs to outer transformations too. By default they are consumed.
        interval: Keep events 0, k, 2k, ... of each key.
        reduce: Combine the events of each key while the program runs, in constant memory: `"mean"`, `"sum"`, `"min"`,
            `"max"`, `"first"`, `"last"`, `"count"`, `"std"`, `"var"`, a `lox.Reduction`, or a mapping from key to one
            of them. `"append"` stacks, which is the default.
        prefix: Put in front of every key.
        capacity: Room for that many events of each key that is logged inside `while_loop`, whose length is unknown.
        unify: Accepted for compatibility: branches that log differently are always united.

    Returns:
        A function with the signature of `fun` that returns `(result, logs)`.

    Raises:
        OptionError: An option that makes no sense.
        SpoolError: At the call: a key is logged in `while_loop`, with neither `capacity` nor `reduce` for it.
        MismatchError: At the call: events of one key do not fit together.
    """
    prefix = _call.prefix_option(prefix)
    if not unify:
        raise _errors.OptionError(
            "`unify` is False, but branches that log differently are always united: leave it out."
        )
    handler = Collect(
        Selection.of(argnames, tags),
        _call.reduce_option(reduce),
        _call.count_option("capacity", capacity),
        _call.count_option("interval", interval),
        keep_logs,
    )
    return collecting(fun, handler, prefix)


def collecting(fun: Callable[P, R], handler: Collect, prefix: str = "") -> Callable[P, tuple[R, logdict]]:
    """`spool` with checked options."""

    def collect(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, logdict]:
        out, frame = _trace.run_function(handler, fun, args, kwargs)
        with _compat.own_transfers():
            return out, finish(handler, frame, prefix)

    @functools.wraps(fun)
    def spooled(*args: P.args, **kwargs: P.kwargs) -> tuple[R, logdict]:
        out, logs = _call.call(fun, (handler, prefix), collect, args, kwargs)
        if (logs.valid or logs.dropped) and not _is_traced(logs):
            if logs.dropped:  # there may be a warning, which must not be delayed but needs the values
                warn_of_dropped(logs)
                return out, logs.without_empty_slots()
            logs = logs.compacted_when_looked_at()
        return out, logs

    return spooled


def _is_traced(logs: logdict) -> bool:
    return any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(logs))
