"""The device half of `lox.tap`: the handler that emits events and splits loops into blocks."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from lox import _compat
from lox._data import _bundle
from lox._data._bundle import Bundle, Keys
from lox._data._lanes import Laned
from lox._engine import _devices, _emit, _handler, _interpret
from lox._engine._emit import Deliver
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler
from lox._engine._primitive import bind
from lox._engine._selection import Names
from lox._record import record
from lox._transforms._deliver import BufferedDelivery, Delivery
from lox._transforms._fold import Fold
from lox._transforms._slots import Buffer, Room, Tick
from lox._transforms._spool import Collect
from lox._transforms._state import split


@record
class Stream(Handler):
    """Emits events as they happen, or once at the end for keys that are reduced.

    With `buffer`, loops are split into blocks of iterations with at most that many events of any key. `collect` takes
    the events of a block, which leave in one call. Events outside of loops still leave one by one, and are joined on
    the host; those of reduced keys are combined on the device, and leave when there are enough of them.

    The state is the token that keeps emissions in order, and for each key its reduction and its counter for `interval`.
    """

    collect: Collect
    deliver: Deliver
    prefix: str
    buffer: int | None

    waits: ClassVar[bool] = True  # whether a call returns only after the last callback
    claims: ClassVar[bool] = True  # whether no log is left for the console

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
        if isinstance(self.deliver, BufferedDelivery):
            with _compat.own_transfers():
                token = _emit.emit(self.deliver, [], token, signal=_emit.BEGIN)
        return {"token": token, "folds": {}, "counts": {}}

    def event(self, frame: Frame, event: Event) -> None:
        """Emit or reduce the selected keys, and let all flow on."""
        original, event = event, event.in_scope()
        selected = self.collect.selection.keys(event)
        how = {key: self.collect.reduction(key, event.reductions[key]) for key in selected}
        reduced = {key: reduction for key, reduction in how.items() if reduction is not None}
        if reduced:
            owned = event.owned()
            for key, reduction in reduced.items():
                self.collect.wait(frame, key, reduction, owned)
            if self.buffer:
                frame.complete()
                enough = self.take_reduced(frame, dict.fromkeys(reduced, self.buffer))
                self.emit_all(frame, [], enough, conditional=self.buffer > 1)
        if direct := [k for k in selected if k not in reduced]:
            self._emit_direct(frame, event.bundle(direct))
        for key in selected:
            frame.note(key, event.valid is None)
        if not _compat.is_evaluating():  # else nobody is outside
            bind(original, seen=True)

    def reduces(self, meta: Meta, scope: str) -> bool:
        """Whether the selected keys are reduced until the end."""
        return not self.buffer and self.collect.reduces(meta, scope) and not self.collect.counts(meta, scope)

    @property
    def programs(self) -> dict[Any, Any]:  # type: ignore[override]
        """Those of the options, as there is another stream in every call."""
        return self.collect.programs

    def complete(self, frame: Frame) -> None:
        """Reduce the events that wait."""
        inner = Frame(self.collect, frame.state["folds"], frame.unbounded)
        inner.waiting, frame.waiting = frame.waiting, {}
        inner.complete()
        frame.state = {**frame.state, "folds": inner.state}

    def _emit_direct(self, frame: Frame, event: Bundle) -> None:
        """Emit an event; with an interval, those of its keys that are due."""
        interval, due = self.collect.interval, [event]
        if interval is not None:
            ticks, counts = _ticks(frame.state["counts"], event.keys)
            due = []
            for keys, tick in ticks.items():
                part = event.only(keys)
                counts[keys] = tick.take(part)
                due.append(part.only_where(tick.count.map(lambda n: n % interval == 0)))
            frame.state = {**frame.state, "counts": counts}
        self._emit(frame, due, conditional=interval is not None)

    def _emit(
        self, frame: Frame, bundles: list[Bundle], at_once: Iterable[str] = (), conditional: bool = False
    ) -> None:
        """Emit events in one call, or in one for each way in which devices share them."""

        def send(token: Any) -> Any:
            parts = _devices.arranged(bundles, frame.devices, frame.alike)
            first = {key: axes for axes, part in parts for key in part.keys}
            every = frozenset().union(*frame.devices)
            # Where each device sends its own, nobody knows which is the last.
            hasty = [key for key, axes in first.items() if axes != every or _compat.is_without_order()]
            options: Any = dict(at_once=[self.prefix + key for key in (*at_once, *hasty)], conditional=conditional)
            options["nested"] = len(frame.devices) > 1

            def emit(keys: list[str], token: Any) -> Any:
                leaving = _bundle.without([part for _, part in parts], first.keys() - keys)
                leaving = [self.leaving(part.prefixed(self.prefix)) for part in leaving]
                return _emit.emit(self.deliver, leaving, token, self.route(frame), **options)

            return _emit.from_first(emit, first, token)

        token = frame.state["token"]
        if conditional and frame.devices and _devices.are_valid_together(bundles):
            # Nothing is gathered for events that no device sends.
            token = lax.cond(_bundle.any_valid(bundles), send, lambda token: token, token)
        else:
            token = send(token)
        frame.state = {**frame.state, "token": token}

    def leaving(self, bundle: Bundle) -> Bundle:
        """The events to send to the host."""
        return bundle

    def route(self, frame: Frame) -> Laned | None:
        """The numbers of the runs that events belong to."""
        del frame
        return None

    # --- blocks of iterations ---

    def split(self, frame: Frame, jaxprs: Sequence[Any], length: int | None = None) -> "Blocks | None":
        """How to split a loop whose iterations run these jaxprs; None if it cannot be split."""
        del length
        if not self.buffer:
            return None
        scope, collect = frame.eqn_scope, self.collect
        total = _interpret.add_tallies(_interpret.tally(jaxpr, scope, collect.selection.keys) for jaxpr in jaxprs)
        most = max((t.count for t in total.values()), default=0)
        if not most or most == math.inf:
            return None
        interval = collect.interval or 1
        iterations = int(self.buffer * interval // most)
        if iterations > interval:
            iterations -= iterations % interval  # so that every block begins with an event to keep
        if iterations < 2:
            return None
        logs = [log for jaxpr in jaxprs for log in _interpret.metas_in(jaxpr)]
        stacked = {key for meta, inner in logs for key in collect.counts(meta, scope + inner)}
        counts = {key: int(t.count) for key, t in total.items()}
        return Blocks(
            self,
            iterations,
            {key: n for key, n in counts.items() if key in stacked},
            {key: n for key, n in counts.items() if key not in stacked},
        )

    def emit_all(self, frame: Frame, stacked: list[Bundle], reduced: list[Bundle], conditional: bool = False) -> None:
        """Emit several events of each key in one call; it is not delayed if there are reduced keys."""
        if stacked or reduced:
            bundles = self._in_order(frame, [*stacked, *reduced])
            at_once = [key for bundle in reduced for key in bundle.keys]
            self._emit(frame, [bundle.expanded() for bundle in bundles], at_once, conditional and not stacked)

    def _in_order(self, frame: Frame, bundles: list[Bundle]) -> list[Bundle]:
        """Sort by the order in which keys were first logged."""
        order = {key: n for n, key in enumerate(frame.keys)}
        return sorted(bundles, key=lambda b: order.get(b.keys[0], len(order)))

    def take_reduced(self, frame: Frame, at: dict[str, int]) -> list[Bundle]:
        """Take the reductions of these keys that have at least that many events, and restart them."""
        results, interval = [], self.collect.interval or 1
        alike: dict[int, list[str]] = {}
        for key, number in at.items():
            alike.setdefault(number, []).append(key)
        for number, keys in alike.items():
            inside, folds, _ = split(frame.state["folds"], keys)
            for mine, fold in inside.items():
                finished, enough = fold.finish(certain=False), None
                if number > 1:
                    # All lanes leave together, or there would be a call for each.
                    enough = jnp.max(fold.count.tree) > (number - 1) * interval
                    finished = [bundle.only_if(enough) for bundle in finished]
                results += finished
                folds[mine] = fold.restarted(enough)
            frame.state = {**frame.state, "folds": folds}
        return results

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
        return _handler.MarkSeen()

    def finish(self, frame: Frame) -> Any:
        """Emit what was reduced; returns the last token."""
        folds = frame.state["folds"]
        if self.buffer:
            at = dict.fromkeys([key for keys in folds for key in keys], 1)
            self.emit_all(frame, [], self.take_reduced(frame, at))
            if self.waits:  # else the host delivers what it has without being told
                self._signal(frame, _emit.FLUSH)
        else:
            finished = [bundle for keys in folds for bundle in folds[keys].finish(frame.keys.get(keys[0], False))]
            for bundle in self._in_order(frame, finished):
                self._emit(frame, [bundle])
        if isinstance(self.deliver, Delivery):
            # Nobody waits for this program: if it runs on several devices, it says itself that it has come to its end.
            self._signal(frame, _emit.RELEASE)
        return frame.state["token"]

    def _signal(self, frame: Frame, signal: str) -> None:
        frame.state = {**frame.state, "token": _emit.emit(self.deliver, [], frame.state["token"], signal=signal)}


def _ticks(counts: dict[Keys, Tick], keys: Iterable[str]) -> tuple[dict[Keys, Tick], dict[Keys, Tick]]:
    """The counters of these keys, and those of all others."""
    inside, outside, new = split(counts, keys)
    return {**inside, new: Tick()} if new else inside, outside


@record
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
            inner.state = {**inner.state, **self._rooms(frame.state["counts"])}
        out = execute(inner)
        bundles, folds, counted = list(inner.piece() if inner.pieces else []), {}, {}
        for keys, state in inner.state.items():
            if isinstance(state, Fold):
                folds[keys] = state
            elif isinstance(state, Buffer):
                bundles.append(state.finish(certain=False))
                if interval is not None:
                    counted[keys] = Tick(state.seen, state.events.site)
        _, counts, _ = split(frame.state["counts"], [key for keys in counted for key in keys])
        for key, certain in inner.keys.items():
            frame.note(key, certain)
        frame.state = {**frame.state, "folds": folds, "counts": {**counts, **counted}}
        self._emit(frame, bundles, room_for)
        return out

    def _rooms(self, counts: dict[Keys, Tick]) -> dict[Keys, Room]:
        """Room for the events of a block, one for all keys that were logged together so far and may be here."""
        rooms: dict[Keys, Room] = {}
        for keys, tick in _ticks(counts, self.stacked)[0].items():
            for count in {self.stacked[key] for key in keys}:
                alike = tuple(key for key in keys if self.stacked[key] == count)
                room = Room.within(count * self.iterations, self.stream.collect.interval or 1, tick.count, None)
                rooms[alike] = room
        return rooms

    def flush(self, frame: Frame, room_for: int | None = None) -> None:
        """Emit the reductions of the loop's keys: all of them, or those that leave no room for that many iterations."""
        self._emit(frame, [], room_for)

    def _emit(self, frame: Frame, stacked: list[Bundle], room_for: int | None) -> None:
        buffer, interval = self.stream.buffer or 1, self.stream.collect.interval or 1
        at = dict.fromkeys(self.reduced, 1)
        if room_for is not None:
            for key, count in self.reduced.items():
                at[key] = max(buffer - max(-(-count * room_for // interval), 1) + 1, 1)
        reduced = self.stream.take_reduced(frame, at)
        self.stream.emit_all(frame, stacked, reduced, conditional=max(at.values(), default=1) > 1)
