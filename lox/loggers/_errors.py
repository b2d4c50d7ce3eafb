"""Errors on the host while a program runs: warned about at once, raised where the user can catch them."""

import threading

from lox._data._sites import warner
from lox._errors import LoxError, LoxWarning, StoreError

_KEPT = 32  # different errors to keep, so that errors for hours do not fill the memory
_MORE = (LoxError, "")


class ErrorLog:
    """Collects exceptions from several threads, and warns of the first one at once."""

    def __init__(self, owner: str):
        self._owner = owner
        self._lock = threading.Lock()
        self._errors: dict[tuple[type, str], tuple[Exception, int]] = {}
        self._warned = False
        self._warn = warner()  # names the line that made the logger

    def add(self, error: BaseException, doing: str, quietly: bool = False) -> None:
        """Keep an error, with what the logger was doing; without a warning if it is about to be raised anyway."""
        if not isinstance(error, Exception):  # raised later, it would end the program there
            cause, error = error, LoxError(f"a host method raised {error!r}")
            error.__cause__ = cause
        with self._lock:
            # A full disk is one error, whichever file it was about.
            refused = error.errno if isinstance(error, StoreError) else None
            kind = (type(error), str(refused or error))
            first, count = self._errors.get(kind, (error, 0))
            if refused and count:
                first = error  # the last one says how it ended
            if not count:
                error.add_note(f"{self._owner} was {doing}.")
            if not count and len(self._errors) >= _KEPT:
                kind, first, count = _MORE, *self._errors.get(_MORE, (LoxError("and other errors"), 0))
            self._errors[kind] = first, count + 1
            warned, self._warned = self._warned, self._warned or not quietly
        if not (warned or quietly):
            self.warn(
                f"{self._owner} failed {doing}: {type(error).__name__}: {str(error).rstrip('.')}. "
                "The program goes on; all errors are raised by `flush` and `close`."
            )

    def warn(self, message: str) -> None:
        """Warn, from any thread. A warning that filters turn into an error is kept like the other errors."""
        try:
            self._warn(message)
        except LoxWarning as warning:
            with self._lock:
                self._errors.setdefault((LoxWarning, message), (warning, 1))

    def take(self) -> list[Exception]:
        """Return and forget the errors since the last call."""
        with self._lock:
            errors, self._errors = self._errors, {}
            self._warned = False
        for error, count in errors.values():
            if count > 1:
                error.add_note(f"This happened {count} times.")
        return [error for error, _ in errors.values()]


def raise_all(owner: str, errors: list[Exception]) -> None:
    """Raise the error, or all of them as a group."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{owner} had {len(errors)} errors, the first of them: {errors[0]}", errors)
