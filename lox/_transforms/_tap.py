"""`lox.tap`: stream logs to a callback while the program runs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from lox import _compat, _errors
from lox._engine import _emit, _handler, _trace
from lox._engine._selection import Selection
from lox._engine._sink import show
from lox._transforms import _call
from lox._transforms._call import P, R
from lox._transforms._deliver import ALONE, BufferedDelivery, Callback, Connection, Delivery, connect, one_for
from lox._transforms._spool import Collect
from lox._transforms._stream import Stream


def tap(
    fun: Callable[P, R],
    callback: Callback = show,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
    prefix: str = "",
    interval: int | None = None,
    reduce: Any = None,
    buffer: int | None = None,
) -> Callable[P, R]:
    """Stream a function's logs to a callback while it runs.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(xs):
    ...     def step(carry, x):
    ...         carry += x
    ...         lox.log({"carry": carry})
    ...         return carry, x
    ...
    ...     return jax.lax.scan(step, 0, xs)[0]
    >>> y = lox.tap(f, lambda logs: print("Logging:", logs))(jnp.arange(3))
    Logging: {'carry': 0}
    Logging: {'carry': 1}
    Logging: {'carry': 3}

    Every event reaches the callback once, in program order, as a `logdict` of NumPy arrays that it may keep; all lanes
    of a `vmap` come in one call. The logs flow on to an outer `spool` or `tap`.

    Inside `shard_map`, an event that all devices get to together comes once, with an axis for the devices. Where they
    decide separately, or a value has more than 64 elements, each device sends its own, in order, with its place in the
    mesh as steps of the names of the mesh axes; there is no order between devices. Elsewhere on several devices, a
    value of more than 64 elements must not be sharded.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host. If it raises, the call is aborted; on several devices, when the program ends. It
            must not call JAX. By default, the event is printed with its steps: `{'loss': 0.5} step=3`.
        argnames: Stream these keys only; globs such as `"train/*"` are allowed.
        tags: Stream logs with one of these tags only.
        prefix: Put in front of every key.
        interval: Stream events 0, k, 2k, ... of each key, counted anew in every call.
        reduce: Combine the events of each key while the program runs, and call once when the function ends; with
            `buffer`, combine those of each call.
        buffer: Call once for up to that many events; the keys then have an event axis. The rest comes when the function
            ends. Events of a key that do not fit into one array come in separate calls, but it is an error if they are
            from the same iteration of a loop.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        OptionError: An option that makes no sense.
        LogTypeError: A large value would be gathered from several devices at every event.
    """
    if not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of a logdict.")
    stream = streaming(Stream, argnames, tags, prefix, interval, reduce, buffer)
    function = one_for(callback, Delivery) if buffer is None else one_for(callback, BufferedDelivery, buffer)

    @_call.wraps(fun)
    def tapped(*args: P.args, **kwargs: P.kwargs) -> R:
        return stream(fun, args, kwargs, connect(function))

    return tapped


def streaming(
    kind: type[Stream],
    argnames: str | Iterable[str] | None,
    tags: str | Iterable[str] | None,
    prefix: str,
    interval: int | None,
    reduce: Any,
    buffer: int | None,
) -> Callable[..., Any]:
    """How `tap` with these options calls a function: `(fun, args, kwargs, connection, **given)`.

    `given` becomes part of the state of the handler, whose class is `kind`.
    """
    collect = _collect_of(argnames, tags, prefix, interval, reduce, buffer)

    def stream(fun: Callable[..., Any], args: Any, kwargs: Any, connection: Connection, **given: Any) -> Any:
        return run(kind(collect, connection.deliver, prefix, buffer), fun, args, kwargs, connection, given)

    return stream


@_call.remembered
def _collect_of(argnames: Any, tags: Any, prefix: Any, interval: Any, reduce: Any, buffer: Any) -> Collect:
    _call.prefix_option(prefix)
    _call.count_option("buffer", buffer)
    reduction, interval = _call.reduce_option(reduce), _call.count_option("interval", interval)
    return Collect(Selection.of(argnames, tags), reduction, None, interval, keep_logs=True)


def run(
    handler: Any, fun: Callable[..., Any], args: Any, kwargs: Any, connection: Connection, given: dict[str, Any]
) -> Any:
    """Call a function with a handler whose last state is a token; raises the exception of a callback unchanged."""
    alone = _transformed_alone if handler.waits and handler.claims and connection.given else None
    try:
        at_once = handler.waits and not _compat.is_evaluating()
        with _handler.failing_at_once() if at_once else contextlib.nullcontext():
            call = _call.calling(fun, handler, _transformed, alone)
            out, token = call(args, kwargs, {**given, **connection.given})
        if handler.waits and not isinstance(token, _compat.Tracer):
            jax.block_until_ready(token)  # it is ready once the last callback has returned
            if len(token.sharding.device_set) > 1:
                jax.effects_barrier()  # on several devices it does not wait for callbacks
            connection.release()
    except Exception as raised:
        error = _emit.error_behind(raised)
        if error is None:
            raise
        _compat.forget_failed_effects(type(error).__name__)
        raise error from None
    return out


def _transformed(
    handler: Any, fun: Callable[..., Any], args: Any, kwargs: Any, given: dict[str, Any]
) -> tuple[Any, Any]:
    out, frame = _trace.run_function(handler, fun, args, kwargs, given)
    with _compat.own_transfers():
        return out, handler.finish(frame)


def _transformed_alone(handler: Any, fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """`_transformed` as the whole of a program, in which nobody else is interested in the logs."""
    fun = functools.partial(_transformed, dataclasses.replace(handler, deliver=ALONE), fun)
    return _trace.run_staged(_handler.Drop(), fun, args, {}, evaluate=_emit.alone)
