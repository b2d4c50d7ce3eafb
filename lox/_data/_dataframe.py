"""Logs as arrays with their axes in one order, and as pandas data frames."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _axes
from lox._data._lanes import Flags

if TYPE_CHECKING:
    from lox._data._logdict import logdict

_EVENT = _axes.EVENT


@dataclasses.dataclass(frozen=True)
class Column:
    """One leaf of one key as NumPy arrays `(*lanes, event, *item)`; `steps` and `valid` have the same lanes."""

    name: str
    values: np.ndarray
    steps: dict[str, np.ndarray]
    valid: np.ndarray
    lanes: tuple[str, ...]


def columns(logs: "logdict") -> Iterator[Column]:
    """All leaves of all keys. Arrays that do not depend on the lane are repeated for each."""
    for x in jax.tree.leaves(logs):
        if isinstance(x, _compat.Tracer):
            raise _errors.LogTypeError(
                "these logs are being traced: return them from the jitted function first, and convert them outside."
            )
    keys = [(key, *_arrays_of(logs, key)) for key in logs]
    sizes: dict[Any, int] = {}
    for _, _, parts in keys:
        for x, axes in parts.values():
            sizes.update(_axes.sizes(x, axes))
    # Only lanes that some array has: a vmap on which nothing depends leaves no axis.
    present = sorted(sizes.keys() - {_EVENT})
    names = dict(
        zip(present, ["lane"] if len(present) == 1 else [f"lane_{n}" for n in range(len(present))], strict=True)
    )
    for _, under, parts in keys:
        lanes = [axis for axis in present if axis in under]

        def ordered(part: tuple[np.ndarray, list[Any]], lanes: Any = lanes) -> np.ndarray:
            return _axes.align(*part, [*lanes, _EVENT], {axis: sizes[axis] for axis in lanes})

        leaves = {name: ordered(part) for (kind, name), part in parts.items() if kind == "value"}
        for name, values in leaves.items():
            lead = values.shape[: len(lanes) + 1]
            steps = {n: ordered(part) for (kind, n), part in parts.items() if kind == "step"}
            valid = ordered(parts["valid", ""]) if ("valid", "") in parts else np.ones(lead, bool)
            yield Column(
                name,
                values,
                {n: np.broadcast_to(x, lead) for n, x in steps.items()},
                np.broadcast_to(valid, lead),
                tuple(names[axis] for axis in lanes),
            )


def _arrays_of(logs: "logdict", key: str) -> tuple[list[Any], dict[tuple[str, str], tuple[np.ndarray, list[Any]]]]:
    """The vmaps around a key, and its arrays with the names of their leading axes."""
    layout, outer = logs._layout(key), logs._outer(key)
    # Named such that they sort as they nest: a vmap of the whole logs is outside of those around the log.
    around: list[Any] = [(0, n) for n in range(outer)]
    inside = [(1, n) for n in range(max(len(f) for f in layout.flags))]

    def axes(flags: Flags, events: bool = layout.events) -> list[Any]:
        return [*around, *([_EVENT] if events else []), *[a for a, f in zip(inside, flags, strict=False) if f]]

    parts: dict[tuple[str, str], tuple[np.ndarray, list[Any]]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(logs[key])
    for (tree_path, leaf), flags in zip(leaves, layout.flags, strict=True):
        parts["value", key + jax.tree_util.keystr(tree_path)] = _numpy(leaf, key), axes(flags)
    step_flags = dict(layout.step_flags)
    for name, steps in logs.steps.items():
        if key in steps:
            parts["step", name] = _numpy(steps[key], key), axes(step_flags.get(name, ()))
    if key in logs.valid:
        parts["valid", ""] = _numpy(logs.valid[key], key), axes(layout.valid_flags)
    return around + inside, parts


def _numpy(x: Any, key: str) -> np.ndarray:
    if _compat.is_split(x):
        raise _errors.in_other_processes([key], x.shape)
    if hasattr(x, "dtype") and _arrays.is_prng_key(x.dtype):
        x = jax.random.key_data(x)
    return np.asarray(x)


def plain_dtype(x: np.ndarray) -> np.ndarray:
    """Cast to a dtype that pandas knows: bfloat16 and the like become float32."""
    if x.dtype.isbuiltin == 1:
        return x
    return x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32)


def to_dataframe(logs: "logdict", form: str = "long") -> Any:
    """See `logdict.to_dataframe`."""
    if form not in ("long", "wide"):
        raise _errors.OptionError(f"`form` is {form!r}; choose 'long' or 'wide'.")
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("`to_dataframe` needs pandas: pip install pandas") from error

    all_columns = list(columns(logs))
    for name in [name for column in all_columns for name in (column.name, *column.steps)]:
        if name != _errors.encodable(name):
            raise _errors.LogTypeError(
                f"`to_dataframe` cannot name a column {name!r}: pandas does not take half a character. "
                "Log it under another name, or leave it out: `logs.filter(...)`."
            )
    lanes = sorted({name for column in all_columns for name in column.lanes})
    steps = list(dict.fromkeys(name for column in all_columns for name in column.steps))
    frames = [_long(pd, column) for column in all_columns]
    if form == "wide":
        return _wide(pd, all_columns, frames, lanes, steps)
    order = ["key", *lanes, _EVENT, *(_column(name, lanes) for name in steps), "value"]
    full = [f for f in frames if len(f)] or frames  # empty ones would change the dtypes
    frame = pd.concat(full, ignore_index=True) if full else pd.DataFrame(columns=order)
    return _with_whole_steps(frame.reindex(columns=order), all_columns, lanes)


def _column(step: str, lanes: list[str]) -> str:
    return f"step_{step}" if step in ("key", _EVENT, "value", *lanes) else step


def _long(pd: Any, column: Column) -> Any:
    """A row for every valid event in every lane."""
    keep = column.valid.reshape(-1)
    data: dict[str, Any] = {"key": np.full(int(keep.sum()), column.name, object)}
    lead = column.valid.shape
    for name, index in zip(column.lanes, np.indices(lead), strict=False):
        data[name] = index.reshape(-1)[keep]
    data[_EVENT] = (np.cumsum(column.valid, -1) - 1).reshape(-1)[keep]
    for name, x in column.steps.items():
        data[_column(name, list(column.lanes))] = _steps(pd, x.reshape(-1)[keep])
    values = plain_dtype(column.values)
    values = values.reshape(-1, *values.shape[len(lead) :])[keep]
    if values.ndim > 1:
        cells = np.empty(len(values), object)
        cells[:] = list(values)
        values = cells
    data["value"] = values
    return pd.DataFrame(data)


def _steps(pd: Any, x: np.ndarray) -> Any:
    """Mark missing integer steps, which are -1; missing floats are NaN already."""
    x = plain_dtype(x)
    if x.dtype.kind not in "iu":
        return x
    steps = pd.array(x.astype(np.int64), dtype="Int64")
    steps[x == -1] = pd.NA
    return steps


def _with_whole_steps(frame: Any, all_columns: list[Column], lanes: list[str]) -> Any:
    """Make integer steps integers again, of a dtype with missing values only where needed."""
    for step in {name for column in all_columns for name in column.steps}:
        name = _column(step, lanes)
        if all(c.steps[step].dtype.kind in "iu" for c in all_columns if step in c.steps):
            frame[name] = frame[name].astype("Int64" if frame[name].isna().any() else np.int64)
    return frame


def _wide(pd: Any, all_columns: list[Column], frames: list[Any], lanes: list[str], steps: list[str]) -> Any:
    """A row for every lane and every combination of steps, a column for every key."""
    index = [*lanes, *(_column(name, lanes) for name in steps)]
    parts = []
    for column, frame in zip(all_columns, frames, strict=True):
        frame = frame.reindex(columns=[*index, "value"])
        # Repeated steps get another row; keys without steps are aligned by the number of the event.
        frame[_EVENT] = frame.groupby(index, dropna=False, sort=False).cumcount() if index else np.arange(len(frame))
        parts.append(frame.set_index([*index, _EVENT])["value"].rename(column.name))
    if not parts:
        return pd.DataFrame()
    wide = _with_whole_steps(pd.concat(parts, axis=1, sort=False).reset_index(), all_columns, lanes)
    wide = wide.sort_values([*index, _EVENT], kind="stable", ignore_index=True)
    return wide.drop(columns=_EVENT) if steps and not wide[_EVENT].any() else wide
