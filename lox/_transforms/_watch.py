"""`lox.watch`: the first NaN or infinity, and the events before it.

Every event is checked on the device, and goes into the ring of its line. Loops are split into blocks of iterations,
which only do that: no branch and no host call. In between, and outside of loops, the host is called if an event has
failed, and gets the rings.

Nothing may be written over the event that has failed. If the events of a loop are small, their rings have room for a
whole block, and an iteration writes one row per line and nothing else (`Stack`). Otherwise the state has the number of
the event that has failed, and from then on nothing is written (`Record`).
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lox import _compat, _errors
from lox._data import _lanes
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned
from lox._data._logdict import SINGLE
from lox._engine import _emit, _interpret
from lox._engine._emit import RECORD, RELEASE, Deliver
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Keep
from lox._engine._primitive import bind, log_p
from lox._engine._selection import Names, Selection
from lox._errors import NonFiniteError
from lox._record import record
from lox._transforms._call import P, R, count_option, wraps
from lox._transforms._deliver import connect, one_for
from lox._transforms._report import Report
from lox._transforms._ring import FAILS, ORDER, Line, Ring
from lox._transforms._state import typed_like
from lox._transforms._tap import run

# The events of a key between two checks: so many that a check costs little, so few that it comes soon.
_EVENTS = 100
_FEWEST, _MOST = _EVENTS // 2, 2 * _EVENTS  # if a loop can then be split into equal blocks

_LARGEST = 1 << 18  # the numbers in a ring that has room for a block: 1 MB

# Events have odd numbers, which never become 0, even after an overflow.
_NONE = 0  # has failed
_TOLD = -2  # the host knows of the event that has failed


@record
class Record(Handler):
    """Checks events and records them, until one fails.

    The state has the number of the event that has failed, that of the last event, and a ring for every line.
    """

    selection: Selection
    last: int | None

    room: ClassVar[int] = 0  # for events of a line that come after a failure, before the next check

    @property
    def names(self) -> Names | None:
        """The names of the selection."""
        return Names.of(self.selection)

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want all logs, since they flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        with _compat.own_transfers():
            failed, number = Laned(jnp.full((), _NONE, jnp.int32)), Laned(jnp.full((), -1, jnp.int32))
        return {"failed": failed, "number": number, "rings": collections.OrderedDict()}

    def event(self, frame: Frame, event: Event) -> None:
        """Record the event, and let it flow on unchanged."""
        self.record(frame, event.in_scope())
        bind(event)

    def record(self, frame: Frame, event: Event) -> bool:
        """Check the selected keys, and add the event to the ring of its line; returns whether there was one to add."""
        selected = tuple(self.selection.keys(event))
        leaves = [x for key in selected for x in event.values[key]]
        bad = [_not_finite(x) for x in leaves if jnp.issubdtype(x.tree.dtype, jnp.inexact)]
        keys = selected if self.last is None else tuple(event.values)
        if not (bad or self.last):
            return False
        bundle = jax.tree.map(_without_tangent, event.bundle(keys))
        line = Line.of(bundle, selected if bad else (), frame.devices, self.room)

        number, failed, running = jnp.max(frame.state["number"].tree) + 2, _first(frame.state["failed"]), None
        arrays = jax.tree.leaves(bundle, is_leaf=_lanes.is_laned)
        flags = (False,) * max((len(x.flags) for x in arrays), default=0)  # like a step, with which it shares a row
        more = {ORDER: Laned(number, flags)}
        fails = _fails(bad, event.valid) if bad else jnp.zeros((), bool)
        if not self.room:
            running = failed == _NONE
            failed = jnp.where(running & fails, number, failed)
        elif bad:
            more[FAILS] = Laned(fails, flags)
        bundle = dataclasses.replace(bundle, steps={**bundle.steps, **more})
        rings = frame.state["rings"].copy()
        ring = rings.get(line)
        ring = Ring.empty(bundle, line, self.last) if ring is None else ring
        rings[line] = ring.take(bundle, running)
        frame.state = {**frame.state, "failed": Laned(failed), "number": Laned(number), "rings": rings}
        return True

    def allows(self, frame: Frame, struct: Any) -> bool:
        """Allow it: there may be new lines, and the flag may begin to vary over devices."""
        return True

    def extend(self, frame: Frame, struct: Any) -> None:
        """Start the rings of new lines empty, and let the others vary over devices where they do inside shard_map."""
        state, rings = frame.state, collections.OrderedDict[Line, Ring]()
        for line, target in struct["rings"].items():
            ring = state["rings"].get(line)
            rings[line] = Ring.from_struct(target) if ring is None else ring.conform(target)
        joined = {"failed": _first(state["failed"]), "number": jnp.max(state["number"].tree)}
        frame.state = {**state, **{name: _like(x, struct[name]) for name, x in joined.items()}, "rings": rings}

    def split_state(self, state: dict[str, Any], keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """Split the rings by key; all else takes part."""
        rings = state["rings"]
        inside = collections.OrderedDict((line, ring) for line, ring in rings.items() if not keys.isdisjoint(line.keys))

        def rejoin(part: dict[str, Any]) -> dict[str, Any]:
            # In the same order as before, or the type of the state would never settle.
            return {**part, "rings": collections.OrderedDict({**rings, **part["rings"]})}

        return {**state, "rings": inside}, rejoin

    def for_rules(self) -> Handler:
        """Check only events of the primal."""
        return Keep()


@record
class Stack(Record):
    """Records all events of a block. Which has failed is found afterwards, in the rings."""

    room: ClassVar[int] = _MOST


@record
class Watch(Record):
    """Calls the host once an event has failed. The state has the token, too."""

    deliver: Deliver

    waits: ClassVar[bool] = True
    claims: ClassVar[bool] = False

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        return {**super().initial_state(), "token": _emit.new_token()}

    def event(self, frame: Frame, event: Event) -> None:
        """Record the event, and let it flow on unchanged; outside of programs, report it at once if it has failed."""
        if self.last is None and _compat.is_evaluating() and _is_finite_now(event):
            bind(event)  # of events that have not failed nothing is recorded
            return
        recorded = self.record(frame, event.in_scope())
        if recorded and not isinstance(_compat.current_trace(), _compat.StagingTrace):
            self.report(frame)
        bind(event)

    def leave(self, frame: Frame, before: dict[str, Any]) -> None:
        """Check once for all events of a block: a program with many checks takes long to compile."""
        if self.last is None or frame.state["number"].tree is not before["number"].tree:
            self.report(frame)

    def report(self, frame: Frame) -> None:
        """Call the host if an event has failed."""
        rings, sent = frame.state["rings"], []
        if not any(line.watched for line in rings):
            return
        failed = _first(frame.state["failed"])
        if isinstance(failed, _compat.Tracer) or np.asarray(_compat.own_copy(failed)) != _NONE:
            for line, ring in rings.items():
                sent += [_mark(line, ring, failed), self.leaving(ring.recorded(_up_to(failed)))]
            options: Any = dict(signal=RECORD, conditional=True, everywhere=True)
            token = _emit.emit(self.deliver, sent, frame.state["token"], self.route(frame), **options)
            told = jnp.where(failed == _NONE, failed, jnp.full_like(failed, _TOLD))
            frame.state = {**frame.state, "token": token, "failed": Laned(told)}
        kept = {} if self.last is None else rings
        frame.state = {**frame.state, "rings": collections.OrderedDict(kept)}

    def leaving(self, bundle: Bundle) -> Bundle:
        """The events to send to the host."""
        return bundle

    def route(self, frame: Frame) -> Laned | None:
        """The numbers of the runs that the events belong to."""
        del frame
        return None

    def split(self, frame: Frame, jaxprs: Sequence[Any], length: int | None = None) -> "Checked | None":
        """Split a loop into blocks, unless one of its iterations logs enough for a check."""
        total = _interpret.add_tallies(_interpret.tally(j, frame.eqn_scope, _all_keys) for j in jaxprs)
        most = max((t.count for t in total.values()), default=0)
        if not 0 < most <= _FEWEST:
            return None
        fewest, iterations, largest = (int(n // most) for n in (_FEWEST, _EVENTS, _MOST))
        if length is not None:
            # What remains after equal blocks would be a second copy of the body.
            equal = (n for n in range(largest, max(fewest, 2) - 1, -1) if length % n == 0)
            iterations = length if length <= largest else next(equal, iterations)
        largest = _LARGEST // ((self.last or 0) + _MOST)
        kind = Stack if length is not None and all(_is_small(jaxpr, largest) for jaxpr in jaxprs) else Record
        return Checked(self, max(iterations, 1), kind(self.selection, self.last))

    def finish(self, frame: Frame) -> Any:
        """Check what was not checked; return the last token."""
        self.report(frame)
        token, failed = frame.state["token"], jnp.any(frame.state["failed"].tree != _NONE)
        if not isinstance(failed, _compat.Tracer) and len(failed.sharding.device_set) == 1:
            return token
        flag = Bundle([Laned(failed.astype(jnp.int32))], {}, None, ("",), (SINGLE,), True, Site(""))
        return _emit.emit(self.deliver, [flag], token, signal=RELEASE, everywhere=True)


@record
class Checked:
    """A loop in blocks, each of which is followed by a check."""

    watch: Watch
    iterations: int
    record: Record

    def run(self, frame: Frame, bounded: bool, execute: Callable[[Frame], Any], room_for: int | None = None) -> Any:
        """Run a block by `execute(frame)`, which records its events, then check."""
        del bounded, room_for
        state = {name: x for name, x in frame.state.items() if name in ("failed", "number", "rings")}
        inner = Frame(self.record, state, scope=frame.eqn_scope, alike=frame.alike, devices=frame.devices)
        out = execute(inner)
        state = inner.state
        if self.record.room:
            state = {**state, "failed": Laned(_found(state))}
        frame.state = {**frame.state, **state}
        self.watch.report(frame)
        return out

    def flush(self, frame: Frame, room_for: int | None = None) -> None:
        """Nothing waits."""


def _first(failed: Laned) -> Any:
    """The number of the event that has failed first, on all devices together."""
    if not failed.tree.ndim:
        return failed.tree
    most = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(failed.tree == _NONE, most, failed.tree))
    return jnp.where(first == most, _NONE, first)


def _up_to(failed: Any) -> Callable[[Any], Any]:
    """Which events to send, by number: up to the one that has failed; all from lanes in which none has.

    None from lanes of which the host knows already: it would get the same events again.
    """

    def is_sent(order: Any) -> Any:
        before = order - failed <= 0  # right even after an overflow
        return (order != 0) & jnp.where(failed == _NONE, True, (failed != _TOLD) & before)

    return is_sent


def _found(state: dict[str, Any]) -> Any:
    """The number of the event that has failed first, according to the rings if it was not known before."""
    failed, number = _first(state["failed"]), jnp.max(state["number"].tree)
    first = jnp.ones((), jnp.int32)
    for ring in state["rings"].values():
        steps = ring.events().steps
        if FAILS in steps:
            lanes = _lanes.union(*[_lanes.lanes_of(steps[name], 1) for name in (ORDER, FAILS)])
            assert lanes is not None  # both belong to one event
            order, fails = (_lanes.widen(steps[name], lanes, 1).tree for name in (ORDER, FAILS))
            ages = order - number  # right even after an overflow
            first = jnp.minimum(first, jnp.min(jnp.where(fails & (order != 0), ages, 1)))
    return jnp.where((failed == _NONE) & (first <= 0), number + first, failed)


def _like(x: Any, target: Laned) -> Laned:
    return Laned(typed_like(x, target.tree), target.flags)


def _mark(line: Line, ring: Ring, failed: Any) -> Bundle:
    """Say which event has failed, if it is from this line: the condition for a host call."""
    order, here = ring.events().steps[ORDER], Laned(jnp.zeros((), bool))
    if line.watched:
        is_here = (failed != _NONE) & jnp.any(order.tree == failed, 0)  # empty slots have no number either
        here = Laned(is_here, order.flags)
    count = len(line.watched)
    return Bundle([Laned(failed)] * count, {}, here, line.watched, (SINGLE,) * count, True, Site(line.site))


def _fails(bad: list[Laned], valid: Laned | None) -> Any:
    """Whether an event fails in any lane in which it happens."""
    if valid is None:
        return functools.reduce(jnp.logical_or, [jnp.any(x.tree) for x in bad])
    lanes = _lanes.union(*map(_lanes.lanes_of, [*bad, valid]))
    assert lanes is not None  # all belong to one event
    *wide, happens = [_lanes.widen(x, lanes).tree for x in [*bad, valid]]
    return jnp.any(functools.reduce(jnp.logical_or, wide) & happens)


def _is_small(jaxpr: Any, largest: int) -> bool:
    """Whether events have at most so many numbers, and happen in every iteration.

    If it depends on a value whether they do, a `vmap` around it lets JAX copy the rings in every iteration.
    """
    for eqn in _compat.split_jaxpr(jaxpr)[0].eqns if _compat.has_logs(jaxpr) else ():
        if eqn.primitive is log_p:
            meta, sizes = eqn.params["meta"], [x.aval.size for x in eqn.invars]
            if sum(sizes) > largest or (meta.has_valid and sizes[-1] > 1):
                return False
        inside = [j for j in _interpret.executed_jaxprs(eqn.primitive, eqn.params) if _compat.has_logs(j)]
        if inside and (eqn.primitive.name in ("cond", "while") or not all(_is_small(j, largest) for j in inside)):
            return False
    return True


def _all_keys(meta: Meta, scope: str) -> list[str]:
    return [scope + key for key in meta.keys]


def _without_tangent(x: Any) -> Any:
    return lax.stop_gradient(x) if isinstance(x, _compat.Tracer) else x


def _not_finite(x: Laned) -> Laned:
    finite = jnp.isfinite(x.tree)
    return Laned(~finite.all(tuple(range(x.ndim, finite.ndim))), x.flags)


def _is_finite_now(event: Event) -> bool:
    """Whether all values of an event outside of programs are finite, as far as that is known at once."""
    arrays = [x.tree for leaves in event.values.values() for x in leaves]
    arrays = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    if any(isinstance(x, _compat.Tracer) or _compat.is_global(x) for x in arrays):
        return False
    return all([bool(np.isfinite(x).all() if x.size <= _SMALL else _all_finite(x)) for x in map(_on_host, arrays)])


_SMALL = 64  # elements that are faster to check on the host than where they are
_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())


def _on_host(x: Any) -> Any:
    return np.asarray(x) if x.size <= _SMALL else x


def watch(
    fun: Callable[P, R],
    callback: Callable[[NonFiniteError], Any] | None = None,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    last: int | None = None,
) -> Callable[P, R]:
    """Stop a function at the first logged value that is NaN or infinite.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(x):
    ...     def step(x, i):
    ...         x = x * x
    ...         lox.log({"x": x}, step=i)
    ...         return x, None
    ...
    ...     return jax.lax.scan(step, x, jnp.arange(100))
    >>> try:
    ...     lox.spool(lox.watch(f, last=3))(9.0)
    ... except lox.NonFiniteError as error:
    ...     print(error)
    ...     print("the last steps:", error.logs.step["x"])
    'x' is inf at step=5.
      logged at ...
    the last steps: [3 4 5]

    Every value is checked on the device, where the program keeps what the error says; the host is called only if one
    has failed. Loops are checked after every 100 events of a key or so, and at their end: the error comes a little
    later than the value, and names the right one. Without loops it comes at once, or when a jitted function returns.
    The logs flow on as without it: to an outer `spool` or `tap`, or else to the console.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host with the error, once per call of the function, which then continues. By default the
            error is raised. It must not call JAX.
        argnames: Watch these keys only; globs such as `"train/*"` are allowed.
        tags: Watch logs with one of these tags only.
        last: Keep the last events of every key, watched or not, up to this number, in each lane: a flight recorder.
            `error.logs` has them, up to the one that failed; of a key whose values have several shapes, those like the
            newest. Each log line needs memory for as many events on the device, and for a few hundred more if they are
            small. By default, `error.logs` has only the event that failed.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        NonFiniteError: At the call; it says which key, at which steps, in which lane, and where it was logged.
        OptionError: `last` is not a positive integer.
    """
    watching = watcher(Watch, Report, callback, argnames, tags, last)

    @wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        return watching(fun, args, kwargs)

    return watched


def watcher(
    kind: type[Watch],
    reporting: type[Report],
    callback: Callable[[NonFiniteError], Any] | None,
    argnames: str | Iterable[str] | None,
    tags: str | Iterable[str] | None,
    last: int | None,
    *options: Any,
) -> Callable[..., Any]:
    """How `watch` with these options calls a function: `(fun, args, kwargs, **given)`.

    `given` becomes part of the state of the handler, whose class is `kind`; `options` are those of the host function.
    """
    if callback is not None and not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of an error.")
    last = count_option("last", last)
    report = one_for(_raise if callback is None else callback, reporting, last, *options)
    selection = Selection.of(argnames, tags)

    def watching(fun: Callable[..., Any], args: Any, kwargs: Any, **given: Any) -> Any:
        connection = connect(report)
        return run(kind(selection, last, connection.deliver), fun, args, kwargs, connection, given)

    return watching


def _raise(error: NonFiniteError) -> None:
    raise error
