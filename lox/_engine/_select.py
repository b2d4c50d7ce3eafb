"""Which logs a transformation is about."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from lox import _errors
from lox._data import _sites
from lox._engine._event import Event


@dataclasses.dataclass(frozen=True)
class Selection:
    """By name and by tag; both must hold. None is no restriction, an empty list selects nothing."""

    argnames: tuple[str, ...] | None = None
    tags: frozenset[str] | None = None
    expected: bool = True  # to match something

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
        return [k for k in keys if _matches(k, self.argnames)]


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


# What was logged: keys and tags, once each.
Logged = dict[tuple[str, frozenset[str]], None]


@dataclasses.dataclass(frozen=True)
class Names:
    """What a transformation was asked for by name. If nothing of the sort is logged, that is told."""

    selection: Selection
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()  # by option
    removing: bool = False  # so that it is no surprise if there is nothing
    rules: bool = False  # whether it is about logs in derivative rules too

    @classmethod
    def of(cls, selection: Selection, removing: bool = False, rules: bool = False, **mappings: Any) -> "Names | None":
        """None if nothing was asked for by name; options that are no pairs of key and value name nothing."""
        keys = tuple((name, tuple(k for k, _ in of)) for name, of in mappings.items() if isinstance(of, tuple) and of)
        selective = bool(selection.argnames or selection.tags) and selection.expected
        return cls(selection, keys, removing, rules) if selective or keys else None

    def check(self, logged: Logged, has_rules: bool) -> None:
        """Warn of what is not there, unless it may be in derivative rules, which nobody has seen yet."""
        if not (self.rules and has_rules) and (logged or not self.removing):
            known = list(dict.fromkeys(key for key, _ in logged))
            problems = [text for option, keys in self.keys if (text := unmatched(option, keys, known))]
            for text in [*self._unselected(logged, known), *problems]:
                _sites.warn(text)

    def _unselected(self, logged: Logged, known: list[str]) -> list[str]:
        names, tags = self.selection.argnames, self.selection.tags
        if not self.selection.expected or names == () or tags == frozenset():  # which is to select nothing
            return []
        found = [unmatched("argnames", names, known)] if names else []
        if tags and not any(tags & of for _, of in logged):
            there = list(dict.fromkeys(tag for _, of in logged for tag in sorted(of)))
            which = "No log has a tag." if logged and not there else _there("tags", there)
            found.append(f"no log has {_one_of('tag', sorted(tags))}. {which}{_nearest(sorted(tags), there)}")
        if names and tags and not any(found) and not any(tags & of and _matches(key, names) for key, of in logged):
            found.append(f"no log has both {_one_of('key', names)} and {_one_of('tag', sorted(tags))}.")
        return [text for text in found if text]


def unmatched(option: str, names: Iterable[str], known: Iterable[str]) -> str:
    """What to tell of names that are none of the known keys: nothing, if there are none of the sort."""
    known, names = list(known), list(names)
    if option == "argnames":
        missing = [n for n in names if not any(fnmatch.fnmatchcase(key, n) for key in known)]
        if len(missing) < len(names):  # of several globs some may well be for other programs
            missing = [n for n in missing if not set(n) & set("*?[")]
    else:
        missing = [n for n in names if n not in known]
    if not missing:
        return ""
    there = f"{_there('keys', known)}{_nearest(missing, known)}"
    return f"`{option}` names {_errors.listing(missing)}, but there is no such key. {there}"


_MANY = 20


def _there(what: str, names: list[str]) -> str:
    if not names:
        return "Nothing is logged."
    if len(names) == 1:
        return f"The only {what[:-1]} is {names[0]!r}."
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return f"The {what} are {_errors.listing(names[:_MANY])}{more}."


def _nearest(names: Iterable[str], known: list[str]) -> str:
    return next((hint for name in names if (hint := _errors.nearest(name, known))), "")


def _one_of(what: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"the {what} {names[0]!r}" if len(names) == 1 else f"one of the {what}s {_errors.listing(names)}"


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, p) for p in patterns)
