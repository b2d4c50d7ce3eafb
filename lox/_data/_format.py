"""Logs as one line of text."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays
from lox._data._histogram import Histogram
from lox._data._image import Image

if TYPE_CHECKING:
    from lox._data._logdict import logdict

_MANY = 1000  # from this many elements on, only the ends are shown
_EDGE = 3


def compact(logs: "logdict") -> str:
    """Format as `{'xs': [0, 1, 2], 'loss': 0.1}`, without empty slots; where only some lanes are empty they are `-`."""
    # Nothing is computed on arrays of several processes: perhaps only one of them prints.
    if logs.valid and not any(_is_abstract(x) or _compat.is_global(x) for x in jax.tree.leaves(logs)):
        logs = logs.without_empty_slots()
    return "{" + ", ".join(f"{k!r}: {_value(v, logs.valid.get(k))}" for k, v in logs.items()) + "}"


def with_steps(logs: "logdict") -> str:
    """Format as `{'loss': 0.1} step=3`: a step that all keys share is shown once, others by key."""
    if logs.valid:
        logs = logs.without_empty_slots()
    parts = [compact(logs)]
    for name, steps in logs.steps.items():
        texts = {key: _step(steps[key], logs.valid.get(key)) for key in logs if key in steps}
        common = set(texts.values()) if len(texts) == len(logs) else set()
        by_key = "{" + ", ".join(f"{key!r}: {text}" for key, text in texts.items()) + "}"
        parts.append(f"{_errors.printable(name)}={common.pop() if len(common) == 1 else by_key}")
    return " ".join(parts)


def _step(step: Any, valid: Any) -> str:
    # A step that all lanes share has no axis to show missing lanes in.
    return _value(step, valid if np.shape(step) == np.shape(valid) else None)


def _is_abstract(x: Any) -> bool:
    """Whether the values are not known here: while tracing, or because other processes have some of them."""
    return isinstance(x, _compat.Tracer) or _compat.is_split(x) or (not hasattr(x, "__array__") and not np.isscalar(x))


def _value(value: Any, valid: Any = None) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_value(v, valid)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            inner = ", ".join(f"{n}={_value(v, valid)}" for n, v in zip(fields, value, strict=True))
            return f"{type(value).__name__}({inner})"
        inner = ", ".join(_value(v, valid) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    is_array = hasattr(value, "dtype")
    if is_array and (_is_abstract(value) or _arrays.is_prng_key(value.dtype)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if is_array or np.isscalar(value):
        return _array(np.asarray(value), None if valid is None or _is_abstract(valid) else np.asarray(valid))
    if isinstance(value, Histogram | Image) or jax.tree_util.all_leaves([value]):
        return str(value)  # histograms and images have their own text
    return str(jax.tree.map(_Text, value))  # a custom pytree formats itself, with its arrays in our format


class _Text:
    def __init__(self, value: Any):
        self._value = value

    def __repr__(self) -> str:
        return _value(self._value)


def _array(array: np.ndarray, valid: np.ndarray | None, size: int | None = None) -> str:
    if valid is not None and valid.ndim == 0:
        if not valid:
            return "-"
        valid = None
    if array.ndim == 0:
        return str(array[()])
    size = array.size if size is None else size
    indices = range(len(array))
    many = size >= _MANY and len(array) > 2 * _EDGE
    shown = [*indices[:_EDGE], *indices[-_EDGE:]] if many else indices
    text = [_array(array[i], None if valid is None else valid[i], size) for i in shown]
    if many:
        text.insert(_EDGE, "...")
    return f"[{', '.join(text)}]"
