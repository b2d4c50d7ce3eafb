"""Conditions on runs, as people type them: `lr=0.1`, `depth>=3`, `optimizer.name~^adam`, `state=killed`."""

import dataclasses
import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from lox import _errors
from lox.store import Run
from lox.store._table import flat_config

_CONDITION = re.compile(r"\s*(?P<name>[^=!<>~]+?)\s*(?P<sign>==|!=|>=|<=|=|>|<|~)\s*(?P<value>.*?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_LONGEST = 2000  # characters
_OF_RUNS = ("name", "state")  # which may be asked for like values of the config
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Condition:
    """A name in the config with dots for dicts inside, or `name` or `state`; a sign; and a value as it was typed."""

    name: str
    sign: str
    text: str

    def holds(self, run: Run) -> bool:
        """Tell whether a run meets it; one that has no such value does not, except for `!=`."""
        value = flat_config(run.config).get(self.name, _MISSING)
        if value is _MISSING and self.name in _OF_RUNS:
            return self.holds_for(getattr(run, self.name))
        return self.sign == "!=" if value is _MISSING else self.holds_for(value)

    def holds_for(self, value: Any) -> bool:
        """Tell whether a value meets it."""
        if self.sign == "~":
            return re.search(self.text, value if isinstance(value, str) else json.dumps(value)) is not None
        if self.sign in ("=", "=="):
            return self._equals(value)
        if self.sign == "!=":
            return not self._equals(value)
        return _is_number(value) and _ORDERS[self.sign](value, _parsed(self.text))

    def _equals(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in (self.text, _parsed(self.text))
        wanted = _parsed(self.text)
        if isinstance(value, float) and _is_number(wanted):
            # 0.1 may have been a float32; NaN is what was asked for if somebody asks for it.
            return math.isclose(value, wanted, rel_tol=1e-6) or (value != value and wanted != wanted)
        return type(value) is type(wanted) and value == wanted


def condition(text: str) -> Condition:
    """Parse one condition."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _errors.OptionError(
            f"{text!r} is not a condition. Write the name of a value in the config, a sign (= != > >= < <= ~) and a "
            "value: lr=0.1, opt.depth>=3; ~ is for regular expressions."
        )
    if match["sign"] in _ORDERS and not _is_number(_parsed(match["value"])):
        raise _errors.OptionError(f"{text!r} compares with {match['value']!r}, which is not a number.")
    if match["sign"] == "~":
        try:
            re.compile(match["value"])
        except re.error as error:
            raise _errors.OptionError(
                f"{match['value']!r} in {text!r} is not a regular expression: {error}."
            ) from error
    return Condition(match["name"], match["sign"], match["value"])


def parse(text: str) -> Callable[[Run], bool]:
    """Return a function that tells whether a run meets all conditions of a line.

    They are separated by blanks; a value with blanks is in quotes. A word that is not a condition is looked for in the
    names of runs.
    """
    if len(text) > _LONGEST:
        raise _errors.OptionError(f"the filter has {len(text)} characters; at most {_LONGEST} are read.")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _errors.OptionError(f"the filter {text!r} cannot be read: {error}.") from error
    named = [word for word in words if _CONDITION.fullmatch(word) is None]
    conditions = [condition(word) for word in words if word not in named]
    return lambda run: all(word in run.name for word in named) and all(one.holds(run) for one in conditions)


def select(runs: Sequence[Run], texts: Sequence[str], place: str) -> list[Run]:
    """Return the runs that meet all conditions; an error if there are none, or if a name is in no config."""
    conditions = [condition(text) for text in texts]
    names = list(dict.fromkeys(name for run in runs for name in flat_config(run.config)))
    for one in conditions:
        if one.name not in (*names, *_OF_RUNS):
            known = f"The names are {_errors.listing(names[:20])}." if names else "No run has a config."
            hint = _errors.nearest(one.name, names)
            raise _errors.RunNotFoundError(f"no run in {place!r} has {one.name!r} in its config. {known}{hint}")
    chosen = [run for run in runs if all(one.holds(run) for one in conditions)]
    if not chosen:
        raise _errors.RunNotFoundError(
            f"no run in {place!r} has {' and '.join(texts)} in its config. `lox ls {place}` shows what they have."
        )
    return chosen


def _parsed(text: str) -> Any:
    """Return what JSON says about a text, with Python's spelling too; else the text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null", "nan": "NaN"}.get(text, text))
    except ValueError:
        return text


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
