"""Choosing runs by a line of text: `lr=0.1 depth>2 optimizer.name~^adam`."""

import json
import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

from lox import _errors
from lox.store import Run
from lox.store._table import flat_config, has_values

_TERM = re.compile(r"(?P<name>[^=!<>~]+)(?P<operator>>=|<=|!=|==|=|>|<|~)(?P<value>.*)", re.DOTALL)
_ORDER = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_LONGEST = 2000  # characters


def parse(text: str) -> Callable[[Run], bool]:
    """Return a function that tells whether a run has all that is asked for.

    Terms are separated by blanks: a name in the config (with dots for dicts inside), or `name` or `state`; an operator,
    one of `=`, `!=`, `<`, `<=`, `>`, `>=` and `~` for a regular expression; and a value, in quotes if it has blanks. A
    word without an operator is looked for in the names of runs.
    """
    if len(text) > _LONGEST:
        raise _errors.OptionError(f"the filter has {len(text)} characters; at most {_LONGEST} are read.")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _errors.OptionError(f"the filter {text!r} cannot be read: {error}.") from error
    terms = [_term(word) for word in words]
    return lambda run: all(term(run) for term in terms)


def _term(word: str) -> Callable[[Run], bool]:
    match = _TERM.fullmatch(word)
    if match is None:
        return lambda run: word in run.name
    name, sign, text = match["name"], match["operator"], match["value"]
    if sign == "~":
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise _errors.OptionError(f"{text!r} in the filter is no regular expression: {error}.") from error
        return lambda run: (found := _value(run, name)) is not None and bool(pattern.search(_text(found)))
    wanted = _literal(text)
    if sign in _ORDER:
        if isinstance(wanted, bool) or not isinstance(wanted, int | float):
            raise _errors.OptionError(f"the filter {word!r} compares with {text!r}, which is not a number.")
        compare = _ORDER[sign]
        return lambda run: _is_number(found := _value(run, name)) and compare(found, wanted)

    def same(run: Run) -> bool:
        found = _value(run, name)
        if name in ("name", "state"):
            return found == text
        return any(has_values({name: found}, {name: value}) for value in (wanted, text))

    return same if sign != "!=" else lambda run: not same(run)


def _value(run: Run, name: str) -> Any:
    config = flat_config(run.config)
    if name in config:
        return config[name]
    return {"name": run.name, "state": run.state}[name] if name in ("name", "state") else None


def _literal(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
