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
from lox._data._lanes import Laned, Lanes, pick
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
    """The event that failed: in a slot of a ring, in a lane."""

    ring: Bundle
    mark: Bundle
    lanes: Lanes
    slot: int
    lane: tuple[int, ...]
    number: np.int32

    def error(self, logs: logdict) -> NonFiniteError:
        """The error, for the first value that is not finite."""
        for key in self.mark.keys:
            value = jax.tree.unflatten(self.ring.treedef(key), [self._pick(x) for x in self.ring.leaves(key)])
            leaves = jax.tree_util.tree_leaves_with_path(value)
            for place, (tree_path, x) in zip(_places(self.ring, key), leaves, strict=True):
                if _not_finite(x).any():
                    hidden = {ORDER, *_places(self.ring)}
                    steps = {name: self._pick(x).item() for name, x in self.ring.steps.items() if name not in hidden}
                    where = str(self._pick(self.ring.steps[place]).tolist()) if place in self.ring.steps else ""
                    lane = self.lane if any(self.lanes.flags) else ()
                    path = jax.tree_util.keystr(tree_path) + where
                    return NonFiniteError(key, path, x, steps, lane, str(self.mark.site), logs)
        raise AssertionError("the device has found a value that is not finite")

    def _pick(self, x: Laned) -> Any:
        return pick(Laned(x.tree[self.slot], x.flags), self.lane)


def _not_finite(x: np.ndarray) -> np.ndarray:
    """Which elements are NaN or infinite: as complex numbers, which all of them fit into."""
    return ~np.isfinite(x.astype(np.complex128)) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, bool)


def _places(ring: Bundle, key: str | None = None) -> list[str]:
    """The steps with places of elements, one for every array of a key, or of all; most of them do not exist."""
    counts = [treedef.num_leaves for treedef in ring.treedefs]
    n = len(ring.keys) if key is None else ring.keys.index(key)
    first, stop = (0, sum(counts)) if key is None else (sum(counts[:n]), sum(counts[: n + 1]))
    return [PLACE.format(number) for number in range(first, stop)]


def _pairs(sent: list[Bundle]) -> Iterator[tuple[Bundle, Bundle]]:
    """For each ring its mark, which says which event has failed, and the events."""
    return zip(sent[::2], [bundle.even() for bundle in sent[1::2]], strict=True)


def first_failure(sent: list[Bundle]) -> Failure | None:
    """The first event that failed, in the first lane, outermost vmap first; None if none did."""
    failures = [failure for mark, ring in _pairs(sent) if mark.keys for failure in _failures(mark, ring)]
    return min(failures, key=lambda failure: failure.number - failures[0].number, default=None)


def _failures(mark: Bundle, ring: Bundle) -> Iterator[Failure]:
    """The event of this ring that failed, for every lane in which it did."""
    assert mark.valid is not None
    if not mark.valid.tree.any():
        return
    order, number = ring.steps[ORDER], mark.values[0]
    values = [x for key in mark.keys for x in ring.leaves(key)]
    bad = [Laned(_not_finite(x.tree).any(tuple(range(1 + x.ndim, x.tree.ndim))), x.flags) for x in values]
    of_events, of_mark = [order, *bad], [number, mark.valid]
    lanes = _lanes.union(*[_lanes.lanes_of(x, 1) for x in of_events], *map(_lanes.lanes_of, of_mark))
    assert lanes is not None  # all belong to one event
    orders, *bads = [_lanes.widen(x, lanes, 1).tree for x in of_events]
    numbers, valid = [_lanes.widen(x, lanes).tree for x in of_mark]
    for slot, *place in np.argwhere((orders == numbers) & valid & np.any(bads, axis=0)).tolist():
        index = iter(place)
        lane = tuple(next(index) if flag else 0 for flag in lanes.flags)
        yield Failure(ring, mark, lanes, slot, lane, numbers[tuple(place)])


def _ages(order: np.ndarray, number: np.int32) -> np.ndarray:
    """Numbers in the order of events: their differences are right even after an overflow."""
    return np.where(order == 0, np.iinfo(np.int32).min, order - number)


def recorded(sent: list[Bundle], failure: Failure, last: int | None) -> list[Bundle]:
    """The last events of every key, in order; unless `last` is given, those of the line that failed alone."""
    rings = [ring for mark, ring in _pairs(sent) if last is not None or mark is failure.mark]
    of_key: dict[str, list[Bundle]] = {}
    for ring in rings:
        steps = {name: x for name, x in ring.steps.items() if name not in _places(ring)}
        for key in ring.keys:
            # Of a value of which only an element was sent, there is nothing to show.
            if not any(place in ring.steps for place in _places(ring, key)):
                of_key.setdefault(key, []).append(dataclasses.replace(ring.only((key,)), steps=steps))
    joined = [_joined(parts, failure.number, last or 1) for parts in of_key.values()]
    return [part for events in joined if (part := events.occurred()) is not None]


def _joined(rings: list[Bundle], number: np.int32, last: int) -> Bundle:
    """The last events of a key from all of its rings, in order."""
    newest_first = sorted(rings, key=lambda ring: _ages(ring.steps[ORDER].tree, number).max(), reverse=True)
    fitting, models = list[Bundle](), Models()
    for ring in newest_first:
        try:
            _bundle.check_fit_all(models, ring)
        except _errors.MismatchError:
            continue  # they cannot be in one array, and the newest counts
        fitting.append(ring)
    events = _bundle.concatenate(fitting)
    order = events.steps[ORDER]
    ages = _ages(order.tree, number)
    places = np.argsort(ages, axis=0, kind="stable")[-last:]
    filled = np.take_along_axis(order.tree, places, 0) != 0
    places = np.take_along_axis(places, np.argsort(~filled, axis=0, kind="stable"), 0)  # empty slots come last
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
