"""Which logs a transformation selects."""

import fnmatch
from collections.abc import Iterable
from typing import Any

from lox import _errors
from lox._data import _sites
from lox._engine._event import Event
from lox._record import record


@record
class Selection:
    """A selection by name and by tag; both must match. None is no restriction, an empty list selects nothing."""

    argnames: tuple[str, ...] | None = None
    tags: frozenset[str] | None = None
    expected: bool = True  # to match something

    @classmethod
    def of(cls, argnames: str | Iterable[str] | None, tags: str | Iterable[str] | None) -> "Selection":
        """Make a selection of what users write: a bare string is one name."""
        return cls(
            None if argnames is None else names("argnames", argnames),
            None if tags is None else frozenset(names("tags", tags)),
        )

    def keys(self, event: Any, scope: str = "") -> list[str]:
        """The selected keys of an event or of its static part, with `scope` in front."""
        keys = [scope + k for k in (event.values if isinstance(event, Event) else event.keys)]
        if self.tags is not None and not self.tags & event.tags:
            return []
        if event.explicit and self.argnames is None and self.tags is None:
            return []
        if self.argnames is None:
            return keys
        return [k for k in keys if matches(k, self.argnames)]


def names(option: str, given: Any) -> tuple[str, ...]:
    """Convert to a tuple of names what users write: one string or several."""
    items = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for item in items:
        if not isinstance(item, str):
            raise _errors.LogTypeError(f"`{option}` takes names, not {item!r}.")
    return items


# The keys and tags of all logs, once each.
Logged = dict[tuple[str, frozenset[str]], None]


@record
class Names:
    """The names in a transformation's options. Warns if nothing is logged under them."""

    selection: Selection
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()  # by option
    removing: bool = False  # the transformation removes logs: then a function without any is no surprise
    rules: bool = False  # whether it concerns logs in derivative rules too

    @classmethod
    def of(cls, selection: Selection, removing: bool = False, rules: bool = False, **mappings: Any) -> "Names | None":
        """Collect the names; None if there are none. Options that are not pairs of key and value have none."""
        pairs = {option: given for option, given in mappings.items() if isinstance(given, tuple) and given}
        keys = tuple((option, tuple(key for key, _ in given)) for option, given in pairs.items())
        selective = bool(selection.argnames or selection.tags) and selection.expected
        return cls(selection, keys, removing, rules) if selective or keys else None

    def check(self, logged: Logged, has_rules: bool) -> None:
        """Warn about names that are not logged, unless they may be in derivative rules, which have not run yet."""
        if not (self.rules and has_rules) and (logged or not self.removing):
            known = list(dict.fromkeys(key for key, _ in logged))
            problems = [text for option, keys in self.keys if (text := unmatched(option, keys, known))]
            for text in [*self._unselected(logged, known), *problems]:
                _sites.warn(text)

    def _unselected(self, logged: Logged, known: list[str]) -> list[str]:
        names, tags = self.selection.argnames, self.selection.tags
        if not self.selection.expected or names == () or tags == frozenset():  # meant to select nothing
            return []
        texts = [unmatched("argnames", names, known)] if names else []
        if tags and not any(tags & labels for _, labels in logged):
            there = list(dict.fromkeys(tag for _, labels in logged for tag in sorted(labels)))
            which = "No log has a tag." if logged and not there else _there("tags", there)
            texts.append(f"no log has {_one_of('tag', sorted(tags))}. {which}{_nearest(sorted(tags), there)}")
        if names and tags and not any(texts) and not any(tags & have and matches(key, names) for key, have in logged):
            texts.append(f"no log has both {_one_of('key', names)} and {_one_of('tag', sorted(tags))}.")
        return [text for text in texts if text]


def unmatched(option: str, names: Iterable[str], known: Iterable[str]) -> str:
    """A warning about names that are not among the known keys; empty if all of them are."""
    known, names = list(known), list(names)
    if option == "argnames":
        missing = [n for n in names if not any(fnmatch.fnmatchcase(key, n) for key in known)]
        if len(missing) < len(names):  # some of several globs may be meant for other programs
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


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Tell whether a key matches any of these names or globs."""
    return any(fnmatch.fnmatchcase(key, p) for p in patterns)
