"""`lox.watch`: the first NaN or infinity.

A flag in the state says whether an event has failed. Until then every event is checked on the device; the host is
called once, for the first that fails.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _lanes
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned, pick
from lox._data._logdict import SINGLE
from lox._engine import _emit
from lox._engine._devices import PLACE
from lox._engine._emit import RELEASE, Deliver, Packet
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Keep
from lox._engine._primitive import bind
from lox._engine._selection import Names, Selection
from lox._errors import NonFiniteError
from lox._transforms._call import P, R, wraps
from lox._transforms._deliver import HostFunction, connect, one_for
from lox._transforms._state import typed_like
from lox._transforms._tap import run


class Report(HostFunction):
    """Describes the failed event to the callback.

    If the program runs on several devices, and perhaps in several processes, an error on one of them would let the
    others wait for it forever. So the event is kept until the program ends: then every process is told.
    """

    ordered = False

    def __init__(self, callback: Callable[[NonFiniteError], Any]):
        super().__init__(callback)
        self._lock = threading.Lock()  # several devices may call at once
        self._kept: dict[int, NonFiniteError] = {}  # by program
        # The devices on which the failed program has ended, by program and number of devices.
        self._ended: dict[tuple[int, int], set[int]] = {}

    def __call__(self, packet: Packet, token: int = 0) -> None:
        """Take the event, or the end of the program."""
        program = min(token, ~token)
        if packet.signal == RELEASE:
            (flag,) = packet.content().bundles[0].values
            if (device := int(flag.tree.max())) and (packet.eager or self._is_first(program, device)):
                self._release(program, packet.eager)
        elif (error := self._error(packet)) is None:
            return
        elif packet.one_of_several:
            with self._lock:
                self._kept.setdefault(program, error)
                for known in [known for known in self._ended if known[0] == program]:
                    del self._ended[known]  # it is another execution
        else:
            self.callback(error)

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

    def _error(self, packet: Packet) -> NonFiniteError | None:
        (event,) = packet.content().bundles
        event = event.even()
        assert event.valid is not None  # which says where it failed
        if not event.valid.tree.any():
            return None
        failed = iter(np.argwhere(event.valid.tree)[0])
        lane = tuple(int(next(failed)) if flag else 0 for flag in event.valid.flags)  # the first, outermost vmap first
        named = lane if any(event.valid.flags) else ()
        places = {
            name: event.steps.pop(name) for name in map(PLACE.format, range(len(event.values))) if name in event.steps
        }
        numbers = itertools.count()
        for key in event.keys:
            value = jax.tree.unflatten(event.treedef(key), [pick(x, lane) for x in event.leaves(key)])
            for tree_path, x in jax.tree_util.tree_leaves_with_path(value):
                place = places.get(PLACE.format(next(numbers)))
                # As complex numbers, which all of them fit into.
                if jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x.astype(np.complex128)).all():
                    steps = {name: pick(step, lane).item() for name, step in event.steps.items()}
                    path = jax.tree_util.keystr(tree_path) + ("" if place is None else str(pick(place, lane).tolist()))
                    return NonFiniteError(key, path, x, steps, named, str(event.site))
        return None


@dataclasses.dataclass(frozen=True)
class Watch(Handler):
    """Checks events until one fails. The state is the token, and whether one has failed."""

    selection: Selection
    deliver: Deliver

    waits: ClassVar[bool] = True
    claims: ClassVar[bool] = False

    @property
    def names(self) -> Names | None:
        """The names of the selection."""
        return Names.of(self.selection)

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want all logs, since they flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        return {"token": _emit.new_token(), "failed": Laned(jnp.zeros((), bool))}

    def event(self, frame: Frame, event: Event) -> None:
        """Check the selected keys, and let the event flow on unchanged."""
        named = event.in_scope()
        selected = self.selection.keys(named)
        leaves = [x for key in selected for x in named.values[key]]
        bad = [_not_finite(x) for x in leaves if jnp.issubdtype(x.tree.dtype, jnp.inexact)]
        if bad:
            valid = [] if event.valid is None else [event.valid]
            lanes = _lanes.union(*map(_lanes.lanes_of, [*bad, *valid]))
            assert lanes is not None  # all belong to one event
            fails = functools.reduce(jnp.logical_or, [_lanes.widen(x, lanes).tree for x in bad])
            for x in valid:
                fails &= _lanes.widen(x, lanes).tree
            failed = jnp.any(frame.state["failed"].tree)
            named = named.replace(valid=Laned(fails & ~failed, lanes.flags))
            failed_event = named.bundle(selected)

            token = frame.state["token"]
            token = _emit.emit(self.deliver, [failed_event], token, conditional=True, everywhere=True)
            frame.state = {"token": token, "failed": Laned(failed | jnp.any(fails))}
        bind(event)

    def allows(self, frame: Frame, struct: Any) -> bool:
        """Allow it: the flag may begin to vary over devices."""
        return True

    def extend(self, frame: Frame, struct: Any) -> None:
        """Change the type of the flag, which may vary over devices inside shard_map."""
        target = struct["failed"]
        failed = Laned(typed_like(jnp.any(frame.state["failed"].tree), target.tree), target.flags)
        frame.state = {**frame.state, "failed": failed}

    def for_rules(self) -> Handler:
        """Check only events of the primal."""
        return Keep()

    def finish(self, frame: Frame) -> Any:
        """Return the last token."""
        token, failed = frame.state["token"], jnp.any(frame.state["failed"].tree)
        if not isinstance(failed, _compat.Tracer) and len(failed.sharding.device_set) == 1:
            return token
        flag = Bundle([Laned(failed.astype(jnp.int32))], {}, None, ("",), (SINGLE,), True, Site(""))
        return _emit.emit(self.deliver, [flag], token, signal=RELEASE, everywhere=True)


def _not_finite(x: Laned) -> Laned:
    finite = jnp.isfinite(x.tree)
    return Laned(~finite.all(tuple(range(x.ndim, finite.ndim))), x.flags)


def watch(
    fun: Callable[P, R],
    callback: Callable[[NonFiniteError], Any] | None = None,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
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
    report = one_for(_raise if callback is None else callback, Report)
    selection = Selection.of(argnames, tags)

    @wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        connection = connect(report)
        return run(Watch(selection, connection.deliver), fun, args, kwargs, connection, {})

    return watched


def _raise(error: NonFiniteError) -> None:
    raise error
