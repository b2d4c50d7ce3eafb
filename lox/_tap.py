"""`lox.tap`: logs to a callback, while the program runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from lox import _call, _compat, _emit, _engine, _errors
from lox._engine import Handler, Run
from lox._event import Event
from lox._lanes import Laned
from lox._logdict import logdict
from lox._primitive import bind
from lox._select import Selection

Callback = Callable[[logdict], Any]


class Delivery:
    """Calls the user's callback from the host, and keeps what it raises: XLA would pass on the text only."""

    def __init__(self, callback: Callback):
        self.callback = callback
        self.error: BaseException | None = None

    def __call__(self, logs: logdict) -> None:
        try:
            self.callback(logs)
        except BaseException as error:
            self.error = error
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delivery) and self.callback == other.callback

    def __hash__(self) -> int:
        return hash(self.callback)

    def pop_error(self) -> BaseException | None:
        """What the callback has raised since the last time."""
        error, self.error = self.error, None
        return error


@dataclasses.dataclass(frozen=True)
class Stream(Handler):
    """Emits every event. The state is the token that keeps them in order."""

    selection: Selection
    deliver: Delivery
    prefix: str

    def initial_state(self) -> Any:
        """The token before the first event."""
        return Laned(_emit.new_token())

    def event(self, run: Run, event: Event) -> None:
        """Emit the selected keys, and let all flow on."""
        keys = self.selection.keys(event)
        if keys:
            chosen = event.only(keys).prefixed(self.prefix)
            run.state = Laned(_emit.emit(self.deliver, chosen, run.state.tree), run.state.flags)
        bind(event.replace(seen=True))

    @property
    def replicated_state(self) -> bool:
        """Devices have no common order: the token is passed by."""
        return True

    def for_rules(self) -> Handler:
        """Only events of the primal are streamed."""
        return _engine.MarkSeen()


def tap(
    fun: Callable[..., Any],
    callback: Callback = print,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    prefix: str = "",
    interval: int | None = None,
    reduce: Any = None,
    buffer: int | None = None,
) -> Callable[..., Any]:
    """Stream a function's logs to a callback while it runs.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(xs):
    ...     def step(carry, x):
    ...         carry += x
    ...         lox.log({"carry": carry})
    ...         return carry, x
    ...     return jax.lax.scan(step, 0, xs)[0]
    >>> y = lox.tap(f, lambda logs: print("Logging:", logs))(jnp.arange(3))
    Logging: {'carry': 0}
    Logging: {'carry': 1}
    Logging: {'carry': 3}

    Every event reaches the callback once, in program order, as a `logdict` of NumPy arrays that it may keep; all lanes
    of a `vmap` come in one call. The logs flow on: an outer `spool` or `tap` sees them too.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host. What it raises aborts the call. It must not call JAX.
        argnames: Stream these keys only; globs such as `"train/*"` are allowed.
        tags: Stream logs with one of these tags only.
        prefix: Put in front of every key.
        interval: Stream events 0, k, 2k, ... of each key.
        reduce: Combine the events of each key while the program runs, and call once when the function ends.
        buffer: Call once for up to that many events.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        OptionError: An option that makes no sense.
    """
    if not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of a logdict.")
    deliver = Delivery(callback)
    selection = Selection.of(argnames, tags)
    interval, buffer = _call.count_option("interval", interval), _call.count_option("buffer", buffer)
    handler = Stream(selection, deliver, prefix)

    def stream(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        out, run = _engine.run_function(handler, fun, args, kwargs)
        return out, run.state.tree

    @functools.wraps(fun)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        try:
            out, token = _call.call(fun, handler, stream, args, kwargs)
            if not isinstance(token, _compat.Tracer):
                jax.block_until_ready(token)  # the token is there once the last callback has returned
        except Exception:
            error = deliver.pop_error()
            if error is not None:
                raise error from None
            raise
        return out

    return tapped
