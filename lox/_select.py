"""Which logs a transformation is about."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from lox import _errors
from lox._event import Event


@dataclasses.dataclass(frozen=True)
class Selection:
    """By name and by tag; both must hold. None is no restriction, an empty list selects nothing."""

    argnames: tuple[str, ...] | None = None
    tags: frozenset[str] | None = None

    @classmethod
    def of(cls, argnames: str | Iterable[str] | None, tags: str | Iterable[str] | None) -> "Selection":
        """From what users write: a bare string is one name."""
        names = _strings("argnames", argnames)
        labels = _strings("tags", tags)
        return cls(names, None if labels is None else frozenset(labels))

    def keys(self, event: Any, path: str = "") -> list[str]:
        """The selected keys of an event, or of what is known about it beforehand; `path` is added to them."""
        keys = [path + k for k in (event.values if isinstance(event, Event) else event.keys)]
        if self.tags is not None and not self.tags & event.tags:
            return []
        if event.explicit and self.argnames is None and self.tags is None:
            return []
        if self.argnames is None:
            return keys
        return [k for k in keys if any(fnmatch.fnmatchcase(k, p) for p in self.argnames)]


def _strings(option: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    return names(option, given)


def names(option: str, given: Any) -> tuple[str, ...]:
    """What users write for names: one string, or several."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for item in found:
        if not isinstance(item, str):
            raise _errors.LogTypeError(f"`{option}` takes names, not {item!r}.")
    return found
