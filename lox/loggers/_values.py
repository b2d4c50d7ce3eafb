"""Converts what users give to `Logger.log` to logs."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox._data._series import Series, Site
from lox._engine._primitive import as_array
from lox.loggers._prng import is_prng_key


def as_logs(data: Mapping[str, Any], steps: Mapping[str, Any]) -> logdict:
    """Convert a logdict or a dict, which is one event, to logs with the given steps."""
    if not isinstance(data, Mapping):
        raise _errors.LogTypeError(f"`log` got {data!r}; give it a dict of values or a logdict.")
    logs = data.copy() if isinstance(data, logdict) else _one_event(data)
    for name, step in steps.items():
        step = _array(step, f"step {name!r}")
        for key in logs:
            logs = _with_step(logs, key, name, step)
    return logs


def _one_event(data: Mapping[str, Any]) -> logdict:
    series = []
    for key, value in data.items():
        if not isinstance(key, str):
            raise _errors.LogTypeError(f"`log` got the key {key!r}: keys are strings.")
        leaves, treedef = jax.tree.flatten(value)
        if not leaves:
            raise _errors.LogTypeError(f"`log` cannot log {key!r}: {value!r} holds no array.")
        arrays = [_array(x, f"the value of {key!r}") for x in leaves]
        for x in arrays:
            if not is_prng_key(x) and x.dtype.kind not in "biufcV":
                raise _errors.LogTypeError(f"`log` cannot log {key!r}: it is an array of {x.dtype}, not of numbers.")
        series.append(Series([Laned(x) for x in arrays], {}, None, treedef, True, key, Site("")))
    return logdict.from_series(series)


def _array(x: Any, what: str) -> Any:
    """Keep NumPy arrays; give numbers the dtype that JAX would, but not on a device."""
    if isinstance(x, np.ndarray | np.generic):
        # An operand of a program has at most 32 bits, unless x64 is enabled.
        return x if _compat.is_evaluating() or x.dtype.itemsize < 8 or x.dtype.kind not in "iu" else as_array(x, what)
    if isinstance(x, bool | int | float | complex):
        try:
            return np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(type(x))))
        except OverflowError:
            pass  # `as_array` has a message for it
    return as_array(x, what)


def _with_step(logs: logdict, key: str, name: str, step: Any) -> logdict:
    """Add a step: one number for all events of the key, or one for each."""
    layout, outer = logs._layout(key), logs._outer(key)
    first = jax.tree.leaves(logs[key])[0]
    lead = np.shape(first)[: outer + layout.events]  # lanes of outer vmaps, and the events
    if step.ndim and (not layout.events or step.shape != lead[outer:]):
        events = lead[-1] if layout.events else 1
        raise _errors.LogTypeError(
            f"`log` got step {name!r} with shape {step.shape}, but {key!r} has {events} event{'s' * (events != 1)}: "
            "give it one number, or one for each event."
        )
    logs.steps.setdefault(name, {})[key] = _arrays.numpy_for(step).broadcast_to(step, lead)
    flags = {**dict(layout.step_flags), name: ()}
    logs._layouts[key] = layout._replace(step_flags=tuple(sorted(flags.items())))
    return logs
