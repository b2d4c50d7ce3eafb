"""The host half of `lox.watch`: the error, from the rings that a program has sent."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _bundle, _lanes
from lox._data._bundle import Bundle, Models
from lox._data._lanes import Laned, pick
from lox._data._logdict import logdict
from lox._engine._devices import PLACE
from lox._engine._emit import RELEASE, Packet
from lox._errors import NonFiniteError
from lox._transforms._deliver import HostFunction
from lox._transforms._ring import ORDER


class Report(HostFunction):
    """Describes the failed event to the callback.

    If the program runs on several devices, and perhaps in several processes, an error on one of them would let the
    others wait for it forever. So the error is kept until the program ends: then every process is told.
    """

    ordered = False

    def __init__(self, callback: Callable[[NonFiniteError], Any], last: int | None = None):
        super().__init__(callback)
        self._last = last
        self._lock = threading.Lock()  # several devices may call at once
        self._kept: dict[int, NonFiniteError] = {}  # by program
        # The devices on which the failed program has ended, by program and number of devices.
        self._ended: dict[tuple[int, int], set[int]] = {}

    def __call__(self, packet: Packet, token: int = 0) -> None:
        """Take what failed, or the end of the program."""
        program = min(token, ~token)
        if packet.signal == RELEASE:
            (flag,) = packet.content().bundles[0].values
            if (device := int(flag.tree.max())) and (packet.eager or self._is_first(program, device)):
                self._release(program, packet.eager)
        elif (failure := first_failure(sent := packet.content().bundles)) is None:
            return
        else:
            events = recorded(sent, failure, self._last)
            error = failure.error(logdict.from_bundles(events))
            if not packet.one_of_several:
                self.record(packet, events)
                self.callback(error)
            elif self._keep(program, error):
                self.record(packet, events)

    def record(self, packet: Packet, events: list[Bundle]) -> None:
        """Take the events of `error.logs`, before the error is raised."""

    def _keep(self, program: int, error: NonFiniteError) -> bool:
        """Keep the error until the program ends; says whether it is the first."""
        with self._lock:
            first = self._kept.setdefault(program, error) is error
            for known in [known for known in self._ended if known[0] == program]:
                del self._ended[known]  # it is another execution
        return first

    def _is_first(self, program: int, device: int) -> bool:
        """Whether the failed program ends here first, of all devices of this process."""
        with self._lock:
            ended = self._ended.setdefault((program, math.isqrt(device - 1)), set())
            if device in ended:  # when the program ran before
                ended.clear()
            ended.add(device)
            return len(ended) == 1

    def _release(self, program: int, eager: bool) -> None:
        """Call the callback. What any device had to keep was kept before."""
        with self._lock:
            error = self._kept.pop(program, None)
        if error is None:
            if eager and _compat.this_process().processes == 1:
                return  # it was told at once, by a program on one device
            error = NonFiniteError("", "", None, {}, (), "")  # the other process knows more
        self.callback(error)


class Failure(NamedTuple):
    """The event that failed: the newest of a ring, in a lane."""

    ring: Bundle
    mark: Bundle
    lane: tuple[int, ...]
    slot: int
    age: int  # less than that of all later events

    def error(self, logs: logdict) -> NonFiniteError:
        """The error, for the first value that is not finite."""
        ring, named = self.ring, self.lane if any(_flags(self.mark, self.ring)) else ()
        for key in self.mark.keys:
            value = jax.tree.unflatten(ring.treedef(key), [self._pick(x) for x in ring.leaves(key)])
            numbers = [n for n, x in enumerate(ring.values) if any(x is leaf for leaf in ring.leaves(key))]
            for n, (tree_path, x) in zip(numbers, jax.tree_util.tree_leaves_with_path(value), strict=True):
                # As complex numbers, which all of them fit into.
                if jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x.astype(np.complex128)).all():
                    hidden = (ORDER, *_places(ring))
                    steps = {name: self._pick(x).item() for name, x in ring.steps.items() if name not in hidden}
                    place = ring.steps.get(PLACE.format(n))
                    path = jax.tree_util.keystr(tree_path) + ("" if place is None else str(self._pick(place).tolist()))
                    return NonFiniteError(key, path, x, steps, named, str(self.mark.site), logs)
        raise AssertionError("the device has found a value that is not finite")

    def _pick(self, x: Laned) -> Any:
        return pick(Laned(x.tree[self.slot], x.flags), self.lane)


def _pairs(sent: list[Bundle]) -> Iterator[tuple[Bundle, Bundle]]:
    """For each ring the mark that says where its newest event has failed, and its events."""
    return zip(sent[::2], [bundle.even() for bundle in sent[1::2]], strict=True)


def _flags(mark: Bundle, ring: Bundle) -> Any:
    assert mark.valid is not None
    return _lanes.with_depth(mark.valid.flags, len(ring.steps[ORDER].flags))


def _places(ring: Bundle) -> list[str]:
    names = map(PLACE.format, range(len(ring.values)))
    return [name for name in names if name in ring.steps]


def first_failure(sent: list[Bundle]) -> Failure | None:
    """The first event that failed, in the first lane, outermost vmap first; None if none did."""
    failures, first = [], None
    for mark, ring in _pairs(sent):
        assert mark.valid is not None
        flags = _flags(mark, ring)
        for place in np.argwhere(mark.valid.tree):
            index = iter(place)
            lane = tuple(int(next(index)) if flag else 0 for flag in flags)
            order = pick_lane(ring.steps[ORDER], lane)
            first = order[order != 0][0] if first is None else first
            ages = _ages(order, first)
            slot = int(np.argmax(ages))
            failures.append(Failure(ring, mark, lane, slot, int(ages[slot])))
    return min(failures, key=lambda failure: failure.age, default=None)


def pick_lane(x: Laned, lane: tuple[int, ...]) -> np.ndarray:
    """All events of a lane."""
    return x.tree[(slice(None), *[i for i, flag in zip(lane, x.flags, strict=True) if flag])]


def _ages(order: np.ndarray, first: Any) -> np.ndarray:
    """Numbers in the order of events: their differences are right even after the counter has overflowed."""
    return np.where(order == 0, np.iinfo(np.int32).min, order - first)


def recorded(sent: list[Bundle], failure: Failure, last: int | None) -> list[Bundle]:
    """The last events of every key, in order; unless `last` is given, those of the line that failed alone."""
    rings = [ring for mark, ring in _pairs(sent) if last is not None or mark is failure.mark]
    of_key: dict[str, list[Bundle]] = {}
    for ring in rings:
        shortened = {n for n, _ in enumerate(ring.values) if PLACE.format(n) in ring.steps}
        steps = {name: x for name, x in ring.steps.items() if name not in _places(ring)}
        for key in ring.keys:
            numbers = {n for n, x in enumerate(ring.values) if any(x is leaf for leaf in ring.leaves(key))}
            if not numbers & shortened:  # of a value of which only an element was sent, there is nothing to show
                of_key.setdefault(key, []).append(dataclasses.replace(ring.only((key,)), steps=steps))
    first = failure.ring.steps[ORDER].tree.flat[0]
    joined = [_joined(parts, first, last or 1) for parts in of_key.values()]
    return [part for events in joined if (part := events.occurred()) is not None]


def _joined(rings: list[Bundle], first: Any, last: int) -> Bundle:
    """The last events of a key from all of its rings, in order."""
    newest_first = sorted(rings, key=lambda ring: _ages(ring.steps[ORDER].tree, first).max(), reverse=True)
    fitting, models = list[Bundle](), Models()
    for ring in newest_first:
        try:
            _bundle.check_fit_all(models, ring)
        except _errors.MismatchError:
            continue  # they cannot be in one array, and the newest counts
        fitting.append(ring)
    events = _bundle.concatenate(fitting)
    order = events.steps[ORDER]
    ages = _ages(order.tree, first)
    places = np.argsort(ages, axis=0, kind="stable")[-last:]
    if order.ndim:  # each lane has its own; its empty slots come last
        places = _filled_first(places, np.take_along_axis(order.tree, places, 0) != 0)
    lanes = _lanes.lanes_of(order, 1)

    def sort(x: Laned) -> Laned:
        if not order.ndim:
            return Laned(x.tree[places], x.flags)
        wide = _lanes.union(lanes, _lanes.lanes_of(x, 1))
        assert wide is not None  # both belong to the same events
        x = _lanes.widen(x, wide, 1)
        index = _lanes.expand_to(Laned(places, order.flags), x.flags, x.tree.ndim, lead=1)
        return Laned(np.take_along_axis(x.tree, index, 0), x.flags)

    events = jax.tree.map(sort, events, is_leaf=_lanes.is_laned)
    return dataclasses.replace(events, steps={name: x for name, x in events.steps.items() if name != ORDER})


def _filled_first(places: np.ndarray, filled: np.ndarray) -> np.ndarray:
    return np.take_along_axis(places, np.argsort(~filled, axis=0, kind="stable"), 0)
