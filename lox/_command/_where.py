"""Conditions on the config of runs, as they are typed: `lr=0.1`, `depth>=3`, `opt.name!=sgd`."""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from lox import _errors
from lox.store._table import Run, flat_config

_CONDITION = re.compile(r"\s*(?P<name>[^=!<>]+?)\s*(?P<sign>==|!=|>=|<=|=|>|<)\s*(?P<value>.*?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclasses.dataclass(frozen=True)
class Condition:
    """One condition."""

    name: str
    sign: str
    text: str  # the value as it was typed

    def holds(self, config: dict[str, Any]) -> bool:
        """Tell whether a flat config meets it; one that has no such value does not."""
        if self.name not in config:
            return False
        value = config[self.name]
        if self.sign in ("=", "=="):
            return self._equals(value)
        if self.sign == "!=":
            return not self._equals(value)
        wanted = _parsed(self.text)
        if isinstance(value, str):
            return _ORDERS[self.sign](value, self.text)
        return _is_number(value) and _is_number(wanted) and _ORDERS[self.sign](value, wanted)

    def _equals(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in (self.text, _parsed(self.text))
        wanted = _parsed(self.text)
        if isinstance(value, float) and _is_number(wanted):
            return math.isclose(value, wanted, rel_tol=1e-6)  # 0.1 may have been a float32
        return type(value) is type(wanted) and value == wanted


def _parsed(text: str) -> Any:
    """Return what JSON says about a text, with Python's spelling too; else the text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null", "nan": "NaN"}.get(text, text))
    except ValueError:
        return text


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def parse(text: str) -> Condition:
    """Parse a condition."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _errors.OptionError(
            f"--where {text!r} is not a condition. Write the name of a value in the config, a sign (= != > >= < <=) "
            "and a value, in quotes for the shell: --where 'lr=0.1' --where 'opt.depth>=3'."
        )
    return Condition(match["name"], match["sign"], match["value"])


def select(runs: Sequence[Run], texts: Sequence[str], place: str) -> list[Run]:
    """Return the runs that meet all conditions; an error if there are none, or if a name is in no config."""
    conditions = [parse(text) for text in texts]
    configs = [flat_config(run.config) for run in runs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    for condition in conditions:
        if condition.name not in names:
            known = f"The names are {_errors.listing(names[:20])}." if names else "No run has a config."
            raise _errors.RunNotFoundError(
                f"no run in {place!r} has {condition.name!r} in its config. {known}"
                f"{_errors.nearest(condition.name, names)}"
            )
    chosen = [run for run, c in zip(runs, configs, strict=True) if all(one.holds(c) for one in conditions)]
    if not chosen:
        raise _errors.RunNotFoundError(
            f"no run in {place!r} has {' and '.join(texts)} in its config. `lox ls {place}` shows what they have."
        )
    return chosen
