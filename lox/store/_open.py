"""The open writers of this process, so that readers see everything logged before, and nothing is lost at exit."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lox import _errors
from lox._data import _sites


class _Writing(NamedTuple):
    folder: Path
    flush: Any  # both are weak references to methods
    close: Any
    pid: int

    @property
    def is_ours(self) -> bool:
        """Whether this process made it: a fork must not touch its parent's writers, whose locks may be held forever."""
        return self.pid == os.getpid()


# Reentrant, because a writer may be collected, and unregister, while its thread holds the lock.
_lock = threading.RLock()
_writing: list[_Writing] = []


def register(folder: Path, flush: Callable[[], Any], close: Callable[[], Any]) -> None:
    """Call `flush` before this process reads `folder`, and `close` at exit, if the object of these methods is alive."""
    with _lock:
        _writing[:] = [w for w in _writing if w.flush() is not None]
        _writing.append(_Writing(folder.resolve(), weakref.WeakMethod(flush), weakref.WeakMethod(close), os.getpid()))


def unregister(flush: Callable[[], Any]) -> None:
    """Undo `register`."""
    with _lock:
        _writing[:] = [w for w in _writing if w.flush() not in (None, flush)]


def flush(folder: Path) -> None:
    """Write everything that was logged to `folder`. A failure is a warning, and does not prevent reading."""
    folder = folder.resolve()
    with _lock:
        methods = [w.flush() for w in _writing if w.folder == folder and w.is_ours]
    # The newest first: a logger is made after the writer that it writes to.
    for method in reversed(methods):
        if method is None:
            continue
        try:
            method()
        except _errors.StoreError as error:
            _sites.warn(f"not all that was logged is on disk: {error}")


def is_open(group: Path) -> bool:
    """Tell whether this process has a writer for a group."""
    group = group.resolve()
    with _lock:
        methods = [w.flush() for w in _writing]
    return any(getattr(getattr(m, "__self__", None), "group", None) == group for m in methods if m is not None)


@atexit.register
def _close_all() -> None:
    with _lock:
        methods = [w.close() for w in _writing if w.is_ours]
    errors = []
    for method in reversed(methods):
        if method is not None:
            try:
                method()
            except Exception as error:
                errors.append(error)  # the others must be closed too
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("not all logs could be written", errors)
