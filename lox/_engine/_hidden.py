"""Logs that JAX would hide from a transformation.

A transformation finds logs by looking into what it runs. Three things cannot be looked into, or are never shown to it:

* A jitted function that has run before: JAX's C++ cache answers, past every trace, unless the program has effects. Some
  primitives keep the effects of their body to themselves. So every compiled program that logs is marked, and a marked
  one never enters that cache.
* An executable, `jit(f).lower(x).compile()`: all that is left of its logs is the mark.
* A primitive that holds a Python function instead of a jaxpr. That it logs shows when the function is called.

Where a transformation is around, each of them is an error instead of an event that is lost.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from lox import _compat, _errors
from lox._compat import LogMark


class _Around(threading.local):
    depth = 0


_around = _Around()  # how many transformations are on the stack of this thread


@contextmanager
def transforming() -> Iterator[None]:
    """While a transformation runs a function: its logs must not get past it."""
    _around.depth += 1
    try:
        yield
    finally:
        _around.depth -= 1


def pass_on(primitive: Any, args: Any, params: dict[str, Any]) -> Any:
    """Bind a primitive in which no log was found: there must be none when it runs."""
    return primitive.bind(*args, **params)


def check(mark: LogMark, frame: FrameType) -> None:
    """Called where a log happens or is traced, in Python: see to it that a transformation around can know of it."""
    frames = iter(_frames(frame))
    for frame in frames:
        if frame.f_code is _TRANSFORMING:
            return  # the transformation is nearer than anything that could hide the log from it
        if frame.f_code is _PASS_ON:
            raise _errors.opaque_primitive(frame.f_locals["primitive"].name, mark.keys, mark.site)
        if frame.f_code is _compat.WITHOUT_EFFECTS:
            # Only the types of its results are wanted, so that nobody will ever see the log.
            params = next(iter(v for v in frame.f_locals.values() if isinstance(v, dict)), {})
            primitive = next((p for f in frames if (p := f.f_locals.get("primitive")) is not None), None)
            if primitive is not None:
                _compat.note_hidden(primitive, params, mark)
            return


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_log(mark: LogMark, frame: FrameType) -> None:
    """The same for a call of `lox.log`, which with nothing around goes to the default sink and needs no check."""
    if _around.depth or not _compat.is_evaluating():
        check(mark, frame)


def _check_dispatch(mark: LogMark, frame: FrameType) -> None:
    if _around.depth:
        check(mark, frame)


def _check_executable(mark: LogMark) -> None:
    if _around.depth:
        raise _errors.executable(mark.keys, mark.site)


_PASS_ON: CodeType = pass_on.__code__
_TRANSFORMING: CodeType


def install(run_function: Callable[..., Any]) -> None:
    """Look after every program that logs; `run_function` is how transformations call functions."""
    global _TRANSFORMING
    _TRANSFORMING = run_function.__code__
    _compat.watch_dispatch(_check_dispatch)
    _compat.watch_staging(check)
    _compat.watch_executables(_check_executable)
