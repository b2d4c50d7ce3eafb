"""The user's line: where a log stands, and where a warning points to."""

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
    """The nearest frame that is neither lox's nor JAX's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """The line of the user's that calls lox."""
    frame = user_frame()
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_qualname.replace('.<locals>', '')})"


def warn(message: str) -> None:
    """Warn, with the line of the user's that calls lox; how many frames of lox and JAX lie in between varies."""
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
    """`warn` for threads on which nothing of the user's is being run: with the line that is being run now."""
    frame = user_frame()
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>")
    # Every time: Python would show the same warning once.
    return lambda message: warnings.warn_explicit(message, _errors.LoxWarning, *place, {})
