"""The host half of `lox.tap`: events go to a callback as they come, or several at once.

A program that runs while its caller waits does not know the callback: its token is the number of a host function, which
is looked up when a packet comes. So it is compiled once for all callbacks and loggers. A program that is being traced
by JAX may run at any time later, and keeps its host function.
"""

import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _bundle
from lox._data._bundle import Bundle, Models, check_fit_all
from lox._data._logdict import logdict
from lox._engine._emit import BEGIN, FLUSH, RELEASE, Deliver, Packet

Callback = Callable[[logdict], Any]
_Kind = TypeVar("_Kind", bound="HostFunction")


class HostFunction:
    """Calls the user's callback from the host."""

    ordered = True  # for `emit`: with other host calls

    def __init__(self, callback: Callable[[Any], Any]):
        self.callback = callback

    def __call__(self, packet: Packet, token: int = 0) -> int | None:
        """Take a packet, on the host."""
        raise NotImplementedError

    def end(self, token: int) -> None:
        """Called when no more packets of the program with this token will come."""


_numbers = itertools.count(1)  # of whatever tokens stand for
_functions: Any = weakref.WeakValueDictionary()  # by their numbers, while someone else needs them
_unused: dict[Any, list[tuple[int, Any]]] = {}  # for each default device: numbers, and as arrays there


class Lookup:
    """Hands every packet to the host function whose number is its token."""

    def __init__(self, ordered: bool):
        self.ordered = ordered  # for `emit`

    def connect(self, function: HostFunction) -> "Connection":
        """Give the function a number for this call, which no other has."""
        device = jax.config.jax_default_device
        try:
            number, token = _unused[device].pop()
        except (KeyError, IndexError):
            number = next(_numbers)
            with _compat.own_transfers():
                token = jax.device_put(np.int32(number))  # this takes longer than all the rest
        _functions[number] = function

        def release() -> None:
            _functions.pop(number, None)
            _unused.setdefault(device, []).append((number, token))
            function.end(number)

        return Connection(self, {"token": token}, function, release)

    def __call__(self, packet: Packet, token: int = 0) -> int | None:
        """Take a packet, on the host."""
        function = _functions.get(~token if token < 0 else token)
        if function is None:
            raise _errors.LoxError(
                "events came after the call of the tapped function has failed, or when their logger was gone: "
                "they are lost."
            )
        return function(packet, token)


_lookups = {ordered: Lookup(ordered) for ordered in (True, False)}
ALONE = _lookups[False]  # for programs in which only the token keeps the order


class Connection(NamedTuple):
    """How a program gets to a host function."""

    deliver: Deliver  # what is compiled in
    given: dict[str, Any]  # the token, if the function is looked up
    function: HostFunction  # which must exist while packets may come
    release: Callable[[], None]  # called when no more packets will come; raises what was kept until then


def connect(function: HostFunction) -> Connection:
    """Let programs that begin now get to this function; those that are only traced keep it."""
    if _compat.is_evaluating():
        return _lookups[function.ordered].connect(function)
    return Connection(function, {}, function, lambda: None)


class Delivery(HostFunction):
    """Delivers every event to the callback as it arrives.

    If the callback raises in a program on several devices, the exception is kept until the program ends: it would stop
    one device only, and the others would wait for that one until XLA ends the process. No more events are delivered.
    """

    def __init__(self, callback: Callback):
        super().__init__(callback)
        self._raised: dict[int, BaseException] = {}  # by program

    def __call__(self, packet: Packet, token: int = 0) -> int | None:
        """Take the events of one call, on the host."""
        if not packet.one_of_several:
            return self.take(packet, token)
        number = ~token
        try:
            new = None if number in self._raised else self.take(packet, number)
        except BaseException as error:
            self._raised[number], new = error, None
        if packet.signal == RELEASE:
            self.end(number)
        return None if new is None else ~new

    def take(self, packet: Packet, token: int) -> int | None:
        """Take the events of one call, in order."""
        del token
        if packet.signal is None and (logs := packet.logs()):
            self.callback(logs)
        return None

    def end(self, token: int) -> None:
        """Raise what the callback has raised."""
        if (error := self._raised.pop(token, None)) is not None:
            raise error


class PacketDelivery(HostFunction):
    """Hands every packet to the callback as it arrives."""

    def __call__(self, packet: Packet, token: int = 0) -> int | None:
        """Take a packet, on the host."""
        del token
        self.callback(packet)


class Pending:
    """The events that one execution of a program has not delivered yet."""

    def __init__(self) -> None:
        self.bundles: list[Bundle] = []
        self.counts: Counter[str] = Counter()

    def add(self, bundles: list[Bundle]) -> None:
        """Add the events of a call."""
        self.bundles += bundles
        self.counts.update(_counts(bundles))

    def would_exceed(self, bundles: list[Bundle], size: int) -> bool:
        """Whether any key would have more than `size` events."""
        return any(self.counts[key] + n > size for key, n in _counts(bundles).items())


def _counts(bundles: list[Bundle]) -> dict[str, int]:
    return {key: bundle.count() for bundle in bundles for key in bundle.keys}


def _that_fit(bundles: list[Bundle]) -> Iterator[list[Bundle]]:
    """Split events, in order, into as few parts as possible such that the events of a key in a part fit together."""
    part: list[Bundle] = []
    models: Models = {}
    for bundle in bundles:
        try:
            check_fit_all(models, bundle)
        except _errors.MismatchError:
            yield part
            part, models = [], {}
            check_fit_all(models, bundle)
        part.append(bundle)
    if part:
        yield part


class BufferedDelivery(Delivery):
    """Calls the user's callback once for several events: up to `size` of each key.

    Every execution of a program has its own buffer, whose number is the token: a compiled program may run several times
    at once.
    """

    def __init__(self, callback: Callback, size: int):
        super().__init__(callback)
        self.size = size
        self.pending: dict[int, Pending] = {}

    def take(self, packet: Packet, token: int) -> int | None:
        """Keep the events, and pass them on if there are enough."""
        if packet.signal == BEGIN:
            number = next(_numbers)
            self.pending[number] = Pending()
            return number
        bundles = [part for bundle in packet.content().bundles if (part := bundle.occurred()) is not None]
        pending = self.pending.pop(token, None) or Pending()  # they stay removed if the callback raises
        if packet.signal == FLUSH:
            self._send(pending.bundles)
            return None
        if pending.would_exceed(bundles, self.size):
            self._send(pending.bundles)
            pending = Pending()
        pending.add(bundles)
        at_once = any(key in packet.at_once for bundle in bundles for key in bundle.keys)
        if at_once or max(pending.counts.values(), default=0) >= self.size:
            self._send(pending.bundles)
            return None
        self.pending[token] = pending
        return None

    def _send(self, bundles: list[Bundle]) -> None:
        bundles = [bundle.expanded() for bundle in bundles]
        try:
            whole = [_bundle.gather(bundles)]
        except _errors.MismatchError:
            whole = map(_bundle.gather, _that_fit(bundles))
        for part in whole:
            if part:
                self.callback(logdict.from_bundles(part))


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
