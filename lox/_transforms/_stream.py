"""The device half of `lox.tap`: the handler that emits events and splits loops into blocks."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lox._data import _lanes
from lox._data._lanes import Laned
from lox._data._series import Series
from lox._engine import _emit, _handler, _interpret
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Tally
from lox._engine._primitive import bind
from lox._engine._selection import Names
from lox._transforms._deliver import BEGIN, DUE, FLUSH, AtOnce, Delivery, signal
from lox._transforms._fold import Fold
from lox._transforms._slots import Buffer, Room, Tick
from lox._transforms._spool import Collect


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
            token = _emit.emit(self.deliver, signal(BEGIN), token)
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
                values={**leaving.values, DUE: due_now},
                treedefs={**leaving.treedefs, DUE: jax.tree.structure([0] * len(due_now))},
                reductions={**leaving.reductions, DUE: None},
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
        return _handler.MarkSeen()

    def finish(self, frame: Frame) -> Any:
        """Emit what was reduced; returns the last token."""
        if self.buffer:
            self.emit_all(frame, [], self.take_reduced(frame, dict.fromkeys(frame.state["folds"], 1)))
            self._emit(frame, signal(FLUSH))
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
