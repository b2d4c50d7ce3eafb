"""`lox.watch`: the first NaN or infinity, and the events before it.

A flag in the state says whether an event has failed. Until then every event is checked on the device, and goes into the
ring of its line. Loops are split into blocks of iterations, which only do that: no branch and no host call. In between,
and outside of loops, the host is called if the flag says so, and gets the rings.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
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
from lox._engine._handler import Frame, Handler, Keep, Tally
from lox._engine._primitive import bind
from lox._engine._selection import Names, Selection
from lox._errors import NonFiniteError
from lox._transforms._call import P, R, count_option, wraps
from lox._transforms._deliver import connect, one_for
from lox._transforms._report import Report
from lox._transforms._ring import ORDER, Line, Ring
from lox._transforms._state import typed_like
from lox._transforms._tap import run

# The events of a key between two checks: so many that a check costs little, so few that it comes soon.
_EVENTS = 100
_FEWEST, _MOST = _EVENTS // 2, 2 * _EVENTS  # if a loop can then be split into equal blocks

_NOTHING = jax.tree.structure(())


@dataclasses.dataclass(frozen=True)
class Record(Handler):
    """Checks events and records them, until one fails.

    The state is whether one has failed, the number of events so far, and a ring for every line.
    """

    selection: Selection
    last: int | None

    @property
    def names(self) -> Names | None:
        """The names of the selection."""
        return Names.of(self.selection)

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want all logs, since they flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        failed, count = Laned(jnp.zeros((), bool)), Laned(jnp.zeros((), jnp.int32))
        return {"failed": failed, "count": count, "rings": collections.OrderedDict()}

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
        line = Line.of(bundle, selected, frame.devices)

        valid = [] if event.valid is None else [event.valid]
        lanes = _lanes.union(*map(_lanes.lanes_of, [*bad, *valid]))
        assert lanes is not None  # all belong to one event
        none = jnp.zeros(lanes.present(), bool)
        fails = functools.reduce(jnp.logical_or, [_lanes.widen(x, lanes).tree for x in bad], none)
        for x in valid:
            fails &= _lanes.widen(x, lanes).tree
        failed = jnp.any(frame.state["failed"].tree)

        number = jnp.max(frame.state["count"].tree) + 1
        bundle = dataclasses.replace(bundle, steps={**bundle.steps, ORDER: Laned(number)})
        rings = frame.state["rings"].copy()
        ring = rings.get(line)
        ring = Ring.empty(bundle, self.last or 1) if ring is None else ring
        rings[line] = ring.take(bundle, ~failed, Laned(fails & ~failed, lanes.flags))
        state = {"failed": Laned(failed | jnp.any(fails)), "count": Laned(number), "rings": rings}
        frame.state = {**frame.state, **state}
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
        changed = {"rings": rings}
        for name, joined in (("failed", jnp.any), ("count", jnp.max)):
            target = struct[name]
            changed[name] = Laned(typed_like(joined(state[name].tree), target.tree), target.flags)
        frame.state = {**state, **changed}

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


@dataclasses.dataclass(frozen=True)
class Watch(Record):
    """Calls the host once an event has failed. The state has the token, too."""

    deliver: Deliver

    waits: ClassVar[bool] = True

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        return {**super().initial_state(), "token": _emit.new_token()}

    def event(self, frame: Frame, event: Event) -> None:
        """Record the event and report it if it has failed, and let it flow on unchanged."""
        if self.record(frame, event.in_scope()):
            self.check(frame)
        bind(event)

    def check(self, frame: Frame) -> None:
        """Call the host if an event has failed."""
        rings, sent = frame.state["rings"], []
        for line, ring in rings.items():
            nothing = (_NOTHING,) * len(line.watched)
            sent += [Bundle([], {}, ring.failed, line.watched, nothing, True, Site(line.site)), ring.recorded()]
        failed = jnp.any(frame.state["failed"].tree)
        if isinstance(failed, _compat.Tracer) or np.asarray(_compat.own_copy(failed)):
            token, options = frame.state["token"], dict(signal=RECORD, conditional=True, everywhere=True)
            token = _emit.emit(self.deliver, sent, token, self.route(frame), **options)
            frame.state = {**frame.state, "token": token}
        kept = {} if self.last is None else {line: ring.told() for line, ring in rings.items()}
        frame.state = {**frame.state, "rings": collections.OrderedDict(kept)}

    def route(self, frame: Frame) -> Laned | None:
        """The numbers of the runs that the events belong to."""
        del frame
        return None

    def split(self, frame: Frame, jaxprs: Iterable[Any], length: int | None = None) -> "Checked | None":
        """Split a loop into blocks, unless one of its iterations logs enough for a check."""
        total: dict[str, Tally] = {}
        for jaxpr in jaxprs:
            for key, tally in _interpret.tally(jaxpr, frame.eqn_scope, _all_keys).items():
                total[key] = total.get(key, Tally()) + tally
        most = max((t.count for t in total.values()), default=0)
        if not 0 < most <= _FEWEST:
            return None
        fewest, iterations, largest = (int(n // most) for n in (_FEWEST, _EVENTS, _MOST))
        if length is not None:
            # What remains after equal blocks would be a second copy of the body.
            equal = (n for n in range(largest, max(fewest, 2) - 1, -1) if length % n == 0)
            iterations = length if length <= largest else next(equal, iterations)
        return Checked(self, max(iterations, 1))

    def finish(self, frame: Frame) -> Any:
        """Return the last token."""
        token, failed = frame.state["token"], jnp.any(frame.state["failed"].tree)
        if not isinstance(failed, _compat.Tracer) and len(failed.sharding.device_set) == 1:
            return token
        flag = Bundle([Laned(failed.astype(jnp.int32))], {}, None, ("",), (SINGLE,), True, Site(""))
        return _emit.emit(self.deliver, [flag], token, signal=RELEASE, everywhere=True)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A loop in blocks, each of which is followed by a check."""

    watch: Watch
    iterations: int

    def run(self, frame: Frame, bounded: bool, execute: Callable[[Frame], Any], room_for: int | None = None) -> Any:
        """Run a block by `execute(frame)`, which records its events, then check."""
        del bounded, room_for
        state = {name: x for name, x in frame.state.items() if name in ("failed", "count", "rings")}
        record = Record(self.watch.selection, self.watch.last)
        inner = Frame(record, state, scope=frame.eqn_scope, alike=frame.alike, devices=frame.devices)
        out = execute(inner)
        frame.state = {**frame.state, **inner.state}
        self.watch.check(frame)
        return out

    def flush(self, frame: Frame, room_for: int | None = None) -> None:
        """Nothing waits."""


def _all_keys(meta: Meta, scope: str) -> list[str]:
    return [scope + key for key in meta.keys]


def _without_tangent(x: Any) -> Any:
    return lax.stop_gradient(x) if isinstance(x, _compat.Tracer) else x


def _not_finite(x: Laned) -> Laned:
    finite = jnp.isfinite(x.tree)
    return Laned(~finite.all(tuple(range(x.ndim, finite.ndim))), x.flags)


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
    ...     lox.spool(lox.watch(f))(9.0)
    ... except lox.NonFiniteError as error:
    ...     print(error)
    'x' is inf at step=5.
      logged at ...

    It only adds a check of each value to the program, on the device; the host is called only when one fails. The logs
    flow on as without it: to an outer `spool` or `tap`, or else to the console.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host with the error, once per call of the function, which then continues. By default the
            error is raised. It must not call JAX.
        argnames: Watch these keys only; globs such as `"train/*"` are allowed.
        tags: Watch logs with one of these tags only.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        NonFiniteError: At the call; it says which key, at which steps, in which lane, and where it was logged.
    """
    if callback is not None and not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of an error.")
    last = count_option("last", last)
    report = one_for(_raise if callback is None else callback, Report, last)
    selection = Selection.of(argnames, tags)

    @wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        connection = connect(report)
        return run(Watch(selection, last, connection.deliver), fun, args, kwargs, connection, {})

    return watched


def _raise(error: NonFiniteError) -> None:
    raise error
