"""`lox.nolog` and `lox.keep`: programs without some of their logs."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from lox._engine import _handler, _trace
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame
from lox._engine._primitive import bind
from lox._engine._selection import Names, Selection
from lox._record import record
from lox._transforms import _call
from lox._transforms._call import P, R


@record
class Remove(_handler.Drop):
    """Removes the selected logs, or those not selected, and leaves the others as they are."""

    selection: Selection
    inverted: bool

    @property
    def names(self) -> Names | None:
        """The names of the selection."""
        return Names.of(self.selection, removing=not self.inverted, rules=True)

    def staying(self, event: Any, scope: str) -> list[str]:
        """The keys that are not removed."""
        # A plain `nolog` also removes logs marked `explicit`, which only need to be named to appear.
        chosen = self.selection.keys(dataclasses.replace(event, explicit=False), scope)
        keys = event.values if isinstance(event, Event) else event.keys
        return [k for k in keys if (scope + k in chosen) == self.inverted]

    def wants(self, meta: Meta, scope: str) -> bool:
        """Keep logs with keys that stay."""
        return bool(self.staying(meta, scope))

    def event(self, frame: Frame, event: Event) -> None:
        """Bind the keys that stay."""
        staying = self.staying(event, event.scope)
        if staying:
            bind(event.only(staying))


def _removing(fun: Callable[P, R], handler: Remove) -> Callable[P, R]:
    call = _call.calling(fun, handler, _trace.run_staged)

    @_call.wraps(fun)
    def removed(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(args, kwargs)

    return removed


def nolog(
    fun: Callable[P, R],
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
) -> Callable[P, R]:
    """Remove logs from a function, at no cost: it compiles to the same program as without its log lines.

    >>> import lox
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     return x + 1
    >>> lox.nolog(f)(1)
    2

    Args:
        fun: Any function of JAX arrays, jitted or not.
        argnames: Remove these keys only; globs such as `"debug/*"` are allowed.
        tags: Remove logs with one of these tags only.

    Returns:
        A function with the signature and result of `fun`.
    """
    return _removing(fun, Remove(Selection.of(argnames, tags), inverted=False))


def keep(
    fun: Callable[P, R],
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
) -> Callable[P, R]:
    """Remove all logs but the selected ones: the complement of `nolog`.

    >>> import lox
    >>> def f(x):
    ...     lox.log({"x": x, "y": 2 * x})
    ...     return x
    >>> print(lox.spool(lox.keep(f, "y"))(1)[1])
    {'y': 2}

    Args:
        fun: Any function of JAX arrays, jitted or not.
        argnames: Keep these keys; globs such as `"train/*"` are allowed.
        tags: Keep logs with one of these tags.

    Returns:
        A function with the signature and result of `fun`.
    """
    return _removing(fun, Remove(Selection.of(argnames, tags), inverted=True))


strip = nolog  # an alias
