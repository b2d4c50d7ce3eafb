"""The host half of `lox.tap`: events go to a callback as they come, or several at once."""

import dataclasses
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from lox import _errors
from lox._data._lanes import Laned
from lox._data._logdict import joined, logdict
from lox._data._series import Series, Site, check_fit_all
from lox._engine._event import Event

Callback = Callable[[logdict], Any]
_Kind = TypeVar("_Kind", bound="HostFunction")


def _only_due(logs: logdict) -> logdict:
    due = logs.pop(DUE, None)
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
DUE = "\0due"  # travels with an event under `interval`: which of its keys are due
FLUSH = "\0flush"  # a signal: deliver what is buffered
BEGIN = "\0begin"  # a signal: begin with an empty buffer, whose number becomes the token


def signal(key: str) -> Event:
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
        if BEGIN in logs:
            number = next(self.numbers)
            self.pending[number] = Pending()
            return number
        if token < 0:
            self._send(Pending(), logs)
            return None
        pending = self.pending.pop(token, None) or Pending()  # they stay removed if the callback raises
        if FLUSH in logs:
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
        events = [*pending.events, *[logs for logs in more if logs and FLUSH not in logs]]
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
