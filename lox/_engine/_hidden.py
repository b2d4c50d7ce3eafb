"""Logs that JAX would hide from a transformation.

A transformation finds logs by looking into what it runs. It cannot look into three things, or never sees them:

* A jitted function that has run before: JAX's C++ cache answers and bypasses every trace, unless the program has
  effects, and some primitives do not pass on the effects of their body. So every compiled program that logs is marked,
  and a marked one does not enter that cache, unless no transformation is around, whose calls look elsewhere in it.
* An executable, `jit(f).lower(x).compile()`: all that is left of its logs is the mark.
* A primitive that holds a Python function instead of a jaxpr, which shows that it logs only when it is called.

Inside a transformation each of them is an error instead of a lost event.
"""

import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from lox import _compat, _errors
from lox._compat import LogMark


class _Around(threading.local):
    """The frame of the transformation that runs a function on this thread, if one does.

    No log may bypass it, and it gets the events of programs that C++ calls.
    """

    frame: Any = None


around = _Around()


def is_transforming() -> bool:
    """Whether a transformation runs a function, even if it does not see what happens right now."""
    return around.frame is not None


def pass_on(primitive: Any, args: Any, params: dict[str, Any]) -> Any:
    """Bind a primitive in which no log was found. `check` looks for this function on the stack."""
    return primitive.bind(*args, **params)


def check(mark: LogMark, frame: FrameType) -> None:
    """Raise if the log that is run or traced here, in Python, is hidden from a surrounding transformation."""
    current: FrameType | None = frame
    while current is not None:  # not by `stack`: every log that is traced comes by here
        code = current.f_code
        if code is _TRANSFORMING:
            return  # nothing in between could hide the log from the transformation
        if code is _PASS_ON:
            raise _errors.opaque_primitive(current.f_locals["primitive"].name, mark.keys, mark.site)
        if code is _WITHOUT_EFFECTS:
            # JAX only asks for the types of its results, so nobody would ever see the log.
            params = next(iter(v for v in current.f_locals.values() if isinstance(v, dict)), {})
            callers = _compat.stack(current.f_back)
            primitive = next((p for f in callers if (p := f.f_locals.get("primitive")) is not None), None)
            if primitive is not None:
                _compat.note_hidden(primitive, params, mark)
            return
        current = current.f_back


def check_log(mark: LogMark, frame: FrameType) -> None:
    """`check` for a call of `lox.log`, which needs none outside of all transformations."""
    if is_transforming() or not _compat.is_evaluating():
        check(mark, frame)


def _check_dispatch(mark: LogMark, frame: FrameType) -> None:
    if is_transforming():
        check(mark, frame)


def _check_executable(mark: LogMark) -> None:
    if is_transforming():
        raise _errors.executable(mark.keys, mark.site)


_PASS_ON: CodeType = pass_on.__code__
_WITHOUT_EFFECTS: CodeType = _compat.WITHOUT_EFFECTS
_TRANSFORMING: CodeType


def install(run_function: Callable[..., Any]) -> None:
    """Check every program that logs; `run_function` is how transformations call functions."""
    global _TRANSFORMING
    _TRANSFORMING = run_function.__code__
    _compat.watch_dispatch(_check_dispatch)
    _compat.watch_staging(check)
    _compat.watch_executables(_check_executable)
