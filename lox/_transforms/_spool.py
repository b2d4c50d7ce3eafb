"""`lox.spool`: logs as a result."""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lox import _compat, _errors
from lox._data import _bundle, _reduce
from lox._data._bundle import Bundle, Keys
from lox._data._lanes import Laned
from lox._data._logdict import Recipe, logdict, warn_of_dropped
from lox._engine import _handler, _trace
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Packed, ProgramSource, Tally
from lox._engine._primitive import bind
from lox._engine._selection import Names, Selection
from lox._record import record, struct
from lox._transforms import _call, _fold
from lox._transforms._call import P, R
from lox._transforms._fold import Fold
from lox._transforms._slots import Buffer, Room
from lox._transforms._state import holder, split

Options = tuple[tuple[str, Any], ...]


@record
class Collect(Handler):
    """Stacks events, or reduces them while the program runs.

    A piece is a list of bundles. The state has the reduction of each key, and the buffers of keys that are logged in a
    loop of unknown length.
    """

    selection: Selection
    reduce: Any = None  # a Reduction for all keys, or pairs of key and Reduction
    capacity: int | Options | None = None
    interval: int | None = None
    keep_logs: bool = False

    def __hash__(self) -> int:
        """Computed once, since every call of a transformed function asks for it."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.selection, self.reduce, self.capacity, self.interval, self.keep_logs))

    @functools.cached_property
    def names(self) -> Names | None:  # type: ignore[override]
        """The names in the options."""
        return Names.of(self.selection, reduce=self.reduce, capacity=self.capacity)

    @property
    def collects(self) -> bool:  # type: ignore[override]
        """Whether events are stacked. Under `disable_jit` it depends on the loops around them."""
        return not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def passes_on(self) -> bool:
        """If they are kept for others."""
        return self.keep_logs

    @property
    def only_collects(self) -> bool:  # type: ignore[override]
        """Whether no key has to be known before its events come."""
        return self.reduce is None and self.capacity is None and self.interval is None and self.names is None

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want selected logs, and all if they are kept for others."""
        return self.keep_logs or bool(self.selection.keys(meta, scope))

    def initial_state(self) -> dict[Keys, Fold | Buffer]:
        """Start empty: the state of a key begins with its first event."""
        return {}

    def reduction(self, key: str, logged: _reduce.Reduction | None) -> _reduce.Reduction | None:
        """The reduction of a key: that of spool's mapping, else that of the log, else that of spool for all keys."""
        how = dict(self.reduce).get(key, logged) if isinstance(self.reduce, tuple) else logged or self.reduce
        return None if how is not None and how.name == "append" else how

    def event(self, frame: Frame, event: Event) -> None:
        """Take the selected keys."""
        if self.keep_logs and not frame.passed_on and not _compat.is_evaluating():  # else nobody is outside
            bind(event, seen=True)
        event = event.in_scope()
        keys = self.selection.keys(event)
        event = event.owned() if keys else event
        stacked = []
        for key in keys:
            reduction = self.reduction(key, event.reductions[key])
            if reduction is None:
                stacked.append(key)
            else:
                self.wait(frame, key, reduction, event)
            frame.note(key, event.valid is None)
        if stacked:
            if not frame.waiting.keys().isdisjoint(stacked):
                frame.complete()  # which of the two reductions came first matters for the message
            self._stack(frame, event.bundle(stacked))

    def reduces(self, meta: Meta, scope: str) -> bool:
        """Whether selected keys are reduced."""
        return self._reduces(meta) and len(self.counts(meta, scope)) < len(self.selection.keys(meta, scope))

    def grows(self, frame: Frame, logs: Iterable[tuple[Meta, str]]) -> bool:
        """Whether logs have keys that are reduced, but were not yet."""
        known = {key for keys in frame.state for key in keys}
        for meta, scope in logs:
            if not self._reduces(meta):
                continue
            new = [key for key in self.selection.keys(meta, scope) if key not in known]
            if new and not {*new} <= {*self.counts(meta, scope)}:
                return True
        return False

    def expect(self, frame: Frame, event: Event) -> None:
        """Reduce the keys that are reduced."""
        event = event.in_scope()
        for key in self.selection.keys(event):
            reduction = self.reduction(key, event.reductions[key])
            if reduction is not None:
                self.wait(frame, key, reduction, event)

    def wait(self, frame: Frame, key: str, reduction: _reduce.Reduction, event: Event) -> None:
        """Let an event wait for those of other keys, to be taken together with them."""
        if key in frame.waiting:
            frame.complete()
        frame.waiting[key] = reduction, event

    def complete(self, frame: Frame) -> None:
        """Reduce the events that wait."""
        waiting, frame.waiting = frame.waiting, {}
        for reduction, events in _fold.groups(waiting):
            self._fold(frame, reduction, events)

    def _fold(self, frame: Frame, reduction: _reduce.Reduction, events: dict[str, Event]) -> None:
        inside, state, new = split(frame.state, events)
        rooms: list[str] = []
        for keys, part in inside.items():
            first = events[keys[0]]
            if isinstance(part, Buffer):
                site = str(part.events.site)
                raise _errors.mismatch(keys[0], "reductions", _name(None), site, _name(reduction), first.site)
            if isinstance(part, Fold):
                self._check_same_reduction(part, reduction, first)
                # In a loop, at first, what was added before is the result of another iteration.
                state[keys] = part.fitting(events).take(events, apart=part.chained or not frame.fresh)
            else:
                rooms += keys
        if empty := {key: event for key, event in events.items() if key in {*new, *rooms}}:
            self._check_not_stacked(frame, reduction, empty)
            state[tuple(empty)] = Fold.empty(reduction, empty, self.interval or 1).take(empty)
        frame.state = state

    def _stack(self, frame: Frame, event: Bundle) -> None:
        inside, state, new = split(frame.state, event.keys)
        _check_not_reduced(inside, event)
        for keys, part in inside.items():
            state[keys] = part.fitting(event.only(keys)).take(event.only(keys))
        if new and frame.unbounded:
            by_capacity: dict[int, list[str]] = {}
            for key in new:
                by_capacity.setdefault(self._capacity(key, str(event.site)), []).append(key)
            for capacity, keys in by_capacity.items():
                part = event.only(keys)
                state[tuple(keys)] = Buffer.empty(capacity, part, self.interval or 1).take(part)
        elif new:
            part, in_loop = event.only(new), _compat.in_python_loop(_trace.run_function.__code__)
            piece = [part.expanded() if in_loop else part]
            if _compat.is_evaluating():
                packed = Packed.of(piece, part.keys)
                frame.collect(packed, packed.source)
            else:
                frame.collect(piece)
        frame.state = state

    def _capacity(self, key: str, site: str) -> int:
        capacity = dict(self.capacity).get(key) if isinstance(self.capacity, tuple) else self.capacity
        if capacity is None:
            given = dict(self.capacity) if isinstance(self.capacity, tuple) else {}
            raise _errors.unbounded_loop(key, site, given)
        return capacity

    def _check_same_reduction(self, state: Fold, reduction: _reduce.Reduction, event: Event) -> None:
        before = _plain(state.reduction)
        if before != reduction:
            site = str(state.sites[0])
            raise _errors.mismatch(state.keys[0], "reductions", _name(before), site, _name(reduction), event.site)

    def _check_not_stacked(self, frame: Frame, reduction: _reduce.Reduction, events: dict[str, Event]) -> None:
        thinned = [bundle for key in events if key in frame.notes for bundle in frame.notes[key].kept]
        for bundle in [*thinned, *[bundle for piece in frame.pieces for bundle in piece]]:
            for key in bundle.keys:
                if key in events:
                    site = str(bundle.site)
                    how = _name(reduction)
                    raise _errors.mismatch(key, "reductions", _name(None), site, how, events[key].site)

    def counts(self, meta: Meta, scope: str) -> list[str]:
        """The keys that are stacked."""
        if not self._reduces(meta):
            return self.selection.keys(meta, scope)
        logged = {scope + key: how for key, how in zip(meta.keys, meta.reductions, strict=True)}
        return [key for key in self.selection.keys(meta, scope) if self.reduction(key, logged[key]) is None]

    def _reduces(self, meta: Meta) -> bool:
        """Whether a key of a log may be reduced."""
        return self.reduce is not None or any(how is not None for how in meta.reductions)

    @property
    def foresees(self) -> bool:
        """With an interval, loops have room for the events that they keep: the others are not even stored."""
        return self.interval is not None

    def before(self, frame: Frame, tallies: dict[str, Tally]) -> None:
        """Make room for the events that loops keep."""
        assert self.interval is not None
        for key, tally in tallies.items():
            if tally.looped and tally.count < math.inf and holder(frame.state, key) is None:
                note = self._thin_out(frame, key)
                known = note.seen if tally.exact and isinstance(note.seen, int) else None
                room = Room.within(int(tally.count), self.interval, _as_laned(note.seen), known)
                frame.state = {**frame.state, (key,): room}
                note.coming = tally

    def after(self, frame: Frame, completed: bool) -> None:
        """Move the kept events from the state to the notes."""
        for key, note in frame.notes.items():
            if note.coming is None:
                continue
            inside, frame.state, _ = split(frame.state, [key])
            state, tally, note.coming = inside[key,], note.coming, None
            if isinstance(state, Room) or not completed:  # no event came
                continue
            if isinstance(state, Fold):
                frame.state = {**frame.state, (key,): state}
            elif tally.exact and isinstance(note.seen, int):
                self.check(frame, [state.full()])
                note.kept.append(state.full())
                note.seen += int(tally.count)
            else:
                self.check(frame, [state.events])
                note.kept.append(state.finish(certain=False))
                note.seen = state.seen

    def _thin_out(self, frame: Frame, key: str) -> Any:
        """Apply the interval to the stacked events of a key."""
        assert self.interval is not None
        note = frame.notes.setdefault(key, Thinned([], 0, None))
        stacked = frame.piece() if frame.pieces else []
        if (events := _bundle.part(stacked, (key,))) is not None:
            kept, note.seen = _bundle.every(events, self.interval, note.seen)
            note.kept.append(kept)
            stacked = _bundle.without(stacked, [key])
            frame.pieces = [stacked] if stacked else []
        return note

    def check(self, frame: Frame, piece: list[Bundle]) -> None:
        """Raise now and not at the end, when the result of a long computation would be lost."""
        for bundle in piece:
            if frame.state:
                _check_not_reduced(split(frame.state, bundle.keys)[0], bundle)
            _bundle.check_fit_all(frame.models, bundle)

    def gather(self, pieces: list[list[Bundle]]) -> list[Bundle]:
        """Join the events of each key."""
        return _bundle.gather([bundle for piece in pieces for bundle in piece])

    def unroll(self, piece: list[Bundle], reverse: bool) -> list[Bundle]:
        """Unroll the events of each key."""
        return [_bundle.unroll(bundle, reverse) for bundle in piece]

    def unify(self, pieces: list[list[Bundle]]) -> list[Callable[[Any], Any]] | None:
        """Pad the events of branches that log differently; `valid` marks the padding."""
        if all(_alike(p, pieces[0]) for p in pieces[1:]):
            return None
        groups = _bundle.together((n, bundle) for n, piece in enumerate(pieces) for bundle in piece)
        shapes = [(keys, _bundle.common_shape([_bundle.part(p, keys) for p in pieces])) for keys in groups]

        def fit(piece: list[Bundle]) -> list[Bundle]:
            return [_bundle.conform(_bundle.part(piece, keys), shape) for keys, shape in shapes]

        return [fit] * len(pieces)

    def allows(self, frame: Frame, struct: dict[Keys, Any]) -> bool:
        """Allow new keys, unless they have earlier events, which must come first."""
        earlier = {key for piece in frame.pieces for bundle in piece for key in bundle.keys} | frame.notes.keys()
        return not any(key in earlier and holder(frame.state, key) is None for keys in struct for key in keys)

    def extend(self, frame: Frame, struct: dict[Keys, Any]) -> None:
        """Start new keys empty, or with their stacked events."""
        state: dict[Keys, Any] = {}
        stacked = frame.piece() if frame.pieces else []
        for keys, target in struct.items():
            inside, _, new = split(frame.state, keys)
            for mine, before in inside.items():
                state[mine] = before.conform(target.only(mine))
            # New keys share a state if they have the same earlier events.
            groups: dict[Any, list[str]] = {}
            for key in new:
                groups.setdefault((holder([b.keys for b in stacked], key), key in frame.notes and key), []).append(key)
            for mine in map(tuple, groups.values()):
                state[mine] = self._begin(frame, mine, target.only(mine), _bundle.part(stacked, mine))
        frame.state, rest = state, _bundle.without(stacked, [key for keys in state for key in keys])
        frame.pieces = [rest] if rest else []

    def _begin(self, frame: Frame, keys: Keys, target: Any, stacked: Bundle | None) -> Fold | Buffer:
        """The state of new keys, which has the type of `target` and holds their stacked events."""
        note = frame.notes.pop(keys[0], None)
        if note is not None:  # the key was thinned out so far, and is now logged in a loop of unknown length
            every_event = dataclasses.replace(Buffer.from_struct(target), interval=1)
            kept = _bundle.concatenate(note.kept)
            _bundle.check_fit(kept, target.events, keys[0])
            buffer = every_event.take_all(kept)
            # Without the type of `target`, which may lack the steps of the kept events.
            buffer = dataclasses.replace(buffer, interval=target.interval, seen=_as_laned(note.seen))
            return buffer if stacked is None else buffer.take_all(stacked)
        if stacked is None:
            return type(target).from_struct(target)
        if isinstance(target, Fold):
            raise _errors.mismatch(
                *(keys[0], "reductions", _name(None), str(stacked.site), _name(target.reduction), str(target.sites[0]))
            )
        for key in keys:
            _bundle.check_fit(stacked, target.events, key)
        return Buffer.from_struct(target).take_all(stacked)

    def split_state(self, state: dict[Keys, Any], keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """Split by key."""
        inside = {k: v for k, v in state.items() if not keys.isdisjoint(k)}
        outside = {k: v for k, v in state.items() if k not in inside}
        return inside, lambda part: {**outside, **part}

    def for_rules(self) -> Handler:
        """Drop logs, or leave them to others but not to the console."""
        return _handler.MarkSeen() if self.keep_logs else _handler.Drop()


@struct
class Thinned:
    """The events of a key that an interval has kept at the outermost level."""

    kept: list[Bundle]
    seen: int | Laned  # how many events there were; a plain integer while it is known
    coming: Tally | None  # the events of what is running now


def _check_not_reduced(inside: dict[Keys, Any], events: Bundle) -> None:
    """Raise if one of these states of keys is a reduction, while their events are stacked."""
    for keys, part in inside.items():
        if isinstance(part, Fold):
            before, site = _name(_plain(part.reduction)), str(part.sites[0])
            raise _errors.mismatch(keys[0], "reductions", before, site, _name(None), str(events.site))


def _as_laned(seen: int | Laned) -> Laned:
    return Laned(jnp.asarray(seen, jnp.int32)) if isinstance(seen, int) else seen


def _plain(reduction: _reduce.Reduction) -> _reduce.Reduction:
    return _reduce.MEAN if reduction is _reduce.WEIGHTED_MEAN else reduction


def _name(reduction: _reduce.Reduction | None) -> str:
    return "no reduction" if reduction is None else f"reduce={reduction.name!r}"


def _alike(a: list[Bundle], b: list[Bundle]) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def finish(handler: Collect, frame: Frame, prefix: str) -> logdict:
    """The logs that a frame has collected, as users see them."""
    if not _compat.is_evaluating():
        return _finish(handler, frame, prefix)
    logs = _finish_at_once(frame, prefix) if handler.interval is None else None
    if logs is not None:
        return logs
    kept = [note.kept for note in frame.notes.values()]
    with _compat.as_wide_as(jax.tree.leaves((frame.state, frame.pieces, kept))):
        return _finish(handler, frame, prefix)


def _finish(handler: Collect, frame: Frame, prefix: str) -> logdict:
    bundles = frame.piece() if frame.pieces else []
    if handler.interval is not None:
        keys = dict.fromkeys([*(key for bundle in bundles for key in bundle.keys), *frame.notes])
        bundles = [_bundle.concatenate(handler._thin_out(frame, key).kept) for key in keys]
    return _finished(bundles, frame.state, frame.keys, prefix)


def _finished(
    bundles: list[Bundle], state: dict[Keys, Fold | Buffer], certain: dict[str, bool], prefix: str
) -> logdict:
    """The logs of stacked events and of a state, in the order of the keys, for which it says what is certain."""
    reduced, dropped = set(), {}
    for keys, part in state.items():
        if isinstance(part, Fold):
            bundles += part.finish(certain.get(keys[0], False))
            reduced.update(prefix + key for key in keys)
        else:
            bundles.append(part.finish(certain.get(keys[0], False)))
            dropped |= dict.fromkeys([prefix + key for key in keys], part.dropped())
    order = [prefix + key for key in certain]
    logs = logdict.from_bundles([bundle.prefixed(prefix) for bundle in bundles], order, reduced)
    logs.dropped = {key: dropped[key] for key in order if key in dropped}
    return logs


_FEW = 16  # pieces that are joined by one program: for every number of them another is compiled


def _finish_at_once(frame: Frame, prefix: str) -> logdict | None:
    """The logs if they are just the arrays that programs have returned, or if one more program joins them.

    None if that cannot be done, or is not worth it.
    """
    pieces = frame.pieces
    if not (pieces or frame.state) or not all([type(piece) is Packed for piece in pieces]):
        return None
    arrays = [x for piece in pieces for x in piece.arrays]
    if not frame.state and len(pieces) <= _FEW:
        sources = tuple([piece.source for piece in pieces])
        if all([type(source) is ProgramSource for source in sources]):
            return _arranged(_arrangement(sources, prefix, _compat.debugged()), arrays)
        if len(pieces) == 1:
            return None
    leaves, state = jax.tree.flatten(frame.state) if frame.state else ([], None)
    if not _compat.are_on_one_device([*leaves, *arrays]):
        return None
    with _compat.as_wide_as([*leaves, *arrays]):
        if len(pieces) > _FEW:
            pieces = _joined_by_source(pieces)
            if len(pieces) > _FEW:
                return None
            arrays = [x for piece in pieces for x in piece.arrays]
        structures = tuple([piece.structure for piece in pieces])
        finished = _finishing(structures, state, tuple(frame.keys.items()), prefix, _compat.debugged())
        return _made(finished([*leaves, *arrays]))


def _arranged(arrangement: "_Arrangement", arrays: list[Any]) -> logdict | None:
    if arrangement.join is None:
        return jax.tree.unflatten(arrangement.structure, [arrays[n] for n in arrangement.places])
    if not _compat.are_on_one_device(arrays):
        return None
    with _compat.as_wide_as(arrays) if arrangement.is_wide else _NO_CONTEXT:
        return _made(arrangement.join(arrays))


_NO_CONTEXT = contextlib.nullcontext()


class _Arrangement(NamedTuple):
    structure: Any  # of the logs
    places: list[int]  # in the arrays that programs have returned
    join: Any = None  # if they are not what programs have returned: a program
    is_wide: bool = False  # whether some have 64 bits


@functools.lru_cache(256)
def _arrangement(sources: tuple[ProgramSource, ...], prefix: str, debugged: Any) -> _Arrangement:
    # An object for each array, by which it is found again.
    bundles = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), [b for s in sources for b in s.types])
    leaves = jax.tree.leaves(bundles)
    certain: dict[str, bool] = {}
    for source in sources:
        certain |= {key: is_certain or certain.get(key, False) for key, is_certain in source.keys.items()}
    if len(certain) < sum(len(source.keys) for source in sources) or any(b.valid is not None for b in bundles):
        join = _finishing(tuple([s.structure for s in sources]), None, tuple(certain.items()), prefix, debugged)
        return _Arrangement(None, [], join, _compat.has_64_bits(leaves))
    place = {id(x): n for n, x in enumerate(leaves)}
    leaves, structure = jax.tree.flatten(_finished(bundles, {}, certain, prefix))
    return _Arrangement(structure, [place[id(x)] for x in leaves])


def _joined_by_source(pieces: list[Packed]) -> list[Packed]:
    """Join pieces of every source whose keys no other one has: a Python loop may have called it many times.

    Only until few are left: where the number of iterations varies, every other program would be another one.
    """
    sources: dict[Any, list[Packed]] = {}
    for piece in pieces:
        sources.setdefault(piece.source, []).append(piece)
    having = collections.Counter(key for source in sources for key in source.keys)
    if having and max(having.values()) > 1:
        return pieces  # of one key, some events of one source come between those of another
    alike, before = list(sources.values()), math.inf
    while _FEW < (number := sum(map(len, alike))) < before:
        alike, before = [_by_sixteens(pieces) for pieces in alike], number
    return [piece for pieces in alike for piece in pieces]


def _by_sixteens(pieces: list[Packed]) -> list[Packed]:
    chunks = [pieces[n : n + _FEW] for n in range(0, len(pieces), _FEW)]
    return [_join_few(chunk) if len(chunk) > 1 else chunk[0] for chunk in chunks]


def _join_few(pieces: list[Packed]) -> Packed:
    joining = _joining(tuple([piece.structure for piece in pieces]), _compat.debugged())
    arrays, structure = jax.tree.flatten(joining([x for piece in pieces for x in piece.arrays]))
    return Packed(structure, arrays, pieces[0].source)


def _unpacked(arrays: list[Any], structures: Iterable[Any]) -> list[Any]:
    rest = iter(arrays)
    return [jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)]) for tree in structures]


@functools.lru_cache(256)
def _joining(structures: tuple[Any, ...], debugged: Any) -> Any:
    del debugged  # on which the result depends

    def join(arrays: list[Any]) -> list[Bundle]:
        return _bundle.gather([bundle for piece in _unpacked(arrays, structures) for bundle in piece])

    return jax.jit(join)


@functools.lru_cache(256)
def _finishing(structures: tuple[Any, ...], state: Any, certain: Any, prefix: str, debugged: Any) -> Any:
    del debugged

    def finish(arrays: list[Any]) -> list[Any]:
        pieces = _unpacked(arrays, structures if state is None else (state, *structures))
        before = {} if state is None else pieces.pop(0)
        bundles = [bundle for piece in pieces for bundle in piece]
        return Recipe.of(_finished(_bundle.gather(bundles) if bundles else [], before, dict(certain), prefix))

    return jax.jit(finish)


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
        interval: Keep events 0, k, 2k, ... of each key, counted anew in every call.
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
    is_plain = argnames is tags is reduce is capacity is interval is None and keep_logs is False and unify is True
    if is_plain and type(prefix) is str and not prefix:
        return collecting(fun, _ALL)  # at once, since a function may be spooled anew in every call
    handler = _handler_of(argnames, tags, reduce, capacity, interval, keep_logs, prefix, unify)
    return collecting(fun, handler, prefix)


@_call.remembered
def _handler_of(
    argnames: Any, tags: Any, reduce: Any, capacity: Any, interval: Any, keep_logs: bool, prefix: Any, unify: bool
) -> Collect:
    _call.prefix_option(prefix)
    if not unify:
        raise _errors.OptionError(
            "`unify` is False, but branches that log differently are always united: leave it out."
        )
    return Collect(
        Selection.of(argnames, tags),
        _call.reduce_option(reduce),
        _call.count_option("capacity", capacity),
        _call.count_option("interval", interval),
        keep_logs,
    )


_tracing, _eval_trace, _checks = _compat.tracing, _compat.eval_trace, _compat.checks
_ALL = _handler_of(None, None, None, None, None, False, "", True)


def collecting(fun: Callable[P, R], handler: Collect, prefix: str = "") -> Callable[P, tuple[R, logdict]]:
    """`spool` with checked options."""
    call = _call.calling(fun, (handler, prefix), _collect, _collect_alone)

    def spooled(*args: Any, **kwargs: Any) -> Any:  # `P.args` would be an object to make
        program = call.usual
        if program is None or _tracing.trace is not _eval_trace or _checks.value:  # `is_usual`, without another call
            out, logs = call(args, kwargs)
            logs = _made(logs) if type(logs) is list else logs
            return out, _looked_at_later(logs) if logs._may_be_ragged else logs
        out, arrays = program(*args, **kwargs)
        recipe = arrays[0]
        logs = recipe.logs(arrays)
        return out, _looked_at_later(logs) if recipe.is_ragged else logs

    return _call.named(spooled, fun, call.attributes)


def _collect(options: tuple[Collect, str], fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, logdict]:
    handler, prefix = options
    out, frame = _trace.run_function(handler, fun, args, kwargs)
    with _compat.own_transfers():
        return out, finish(handler, frame, prefix)


def _collect_alone(options: tuple[Collect, str], fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same as a program of its own, which returns a recipe and arrays."""
    out, logs = _collect(options, fun, args, kwargs)
    return out, Recipe.of(logs)


def _made(arrays: list[Any]) -> logdict:
    return arrays[0].logs(arrays)


def _looked_at_later(logs: logdict) -> logdict:
    """Logs that have no empty slots once someone looks at them."""
    if _is_traced(logs):
        return logs
    if logs.dropped:  # there may be a warning, which must not be delayed but needs the values
        warn_of_dropped(logs.dropped)
        return logs.without_empty_slots()
    if any(map(_compat.is_global, jax.tree.leaves(logs))):
        return logs.without_empty_slots()  # now, in all processes: perhaps only one of them looks at it
    return logs.compacted_when_looked_at()


def _is_traced(logs: logdict) -> bool:
    return any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(logs))
