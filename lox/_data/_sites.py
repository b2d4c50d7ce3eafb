"""The user's source lines, for messages and warnings."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType

import jax

from lox import _errors

_NOT_USER_CODE = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # all of lox
    os.path.dirname(jax.__file__) + os.sep,
    contextlib.__file__,
)


def user_frame() -> FrameType:
    """The innermost stack frame that is neither in lox nor in JAX."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """The user's line that calls lox."""
    frame = user_frame()
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_qualname.replace('.<locals>', '')})"


def warn(message: str) -> None:
    """Warn at the user's line that calls lox. Not by `stacklevel`: the number of frames in between varies."""
    frame = user_frame()
    warnings.warn_explicit(
        message,
        _errors.LoxWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warner() -> Callable[[str], None]:
    """Make a `warn` for other threads, which have no user code on their stack: it points to the line running now."""
    frame = user_frame()
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>")
    # With a new registry, or Python would show the same warning only once.
    return lambda message: warnings.warn_explicit(message, _errors.LoxWarning, *place, {})
