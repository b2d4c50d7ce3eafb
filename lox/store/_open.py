"""Who in this process is writing where, so that readers see what was logged before they were called."""

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lox import _errors

_pid = os.getpid()
_lock = threading.Lock()
_flushers: list[tuple[Path, Any]] = []


def register(path: Path, flush: Callable[[], Any]) -> None:
    """Call the bound method `flush` before this process reads `path`, for as long as its object lives."""
    with _lock:
        _flushers[:] = [(where, method) for where, method in _flushers if method() is not None]
        _flushers.append((path.resolve(), weakref.WeakMethod(flush)))


def unregister(flush: Callable[[], Any]) -> None:
    """The opposite of `register`."""
    with _lock:
        _flushers[:] = [(where, method) for where, method in _flushers if method() not in (None, flush)]


def flush(path: Path) -> None:
    """Let all that is logged reach `path`. What fails is told of, but does not keep anyone from reading."""
    path = path.resolve()
    with _lock:
        methods = [method() for where, method in _flushers if where == path]
    # The newest first: a logger is made after the writer that it writes to.
    for method in reversed(methods):
        if method is None:
            continue
        try:
            method()
        except _errors.StoreError as error:
            warnings.warn(f"not all that was logged is on disk: {error}", _errors.LoxWarning, stacklevel=4)


@atexit.register
def _flush_at_exit() -> None:
    """What nobody has closed is not lost."""
    with _lock:
        methods = [method() for _, method in _flushers]
    for method in reversed(methods):
        if method is not None and os.getpid() == _pid:
            method()


def is_open(group: Path) -> bool:
    """Whether this process has a writer for a group."""
    group = group.resolve()
    with _lock:
        methods = [method() for _, method in _flushers]
    return any(getattr(getattr(m, "__self__", None), "group", None) == group for m in methods if m is not None)
