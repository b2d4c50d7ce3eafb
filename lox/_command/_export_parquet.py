"""Parquet: numbers are `value`, arrays are `array` with their `shape`, both in double precision.

That holds every dtype exactly but integers of 64 bits, which have columns of their own: `value_int64`, `array_uint64`.
Complex numbers and histograms are JSON in `json`, pictures are PNG files in `png`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lox import _errors
from lox._command import _choose
from lox._command._rows import Rows, Table, pixels
from lox._data._image import png
from lox.loggers._files._rows import strict_json

_ROWS = 1 << 18  # of a row group


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "lox-jax[parquet]"') from error
    return pyarrow


def _is_wide(dtype: Any) -> bool:
    """Tell whether double precision cannot hold these integers."""
    return np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize == 8


class _Layout:
    """The columns of the file."""

    def __init__(self, table: Table, pa: Any):
        self.table, self.pa = table, pa
        segments = [s.schema for s in _choose.segments(table.reader, table.names) if s.schema is not None]
        steps: dict[str, set[str]] = {name: set() for name in table.step_columns}
        dtypes: dict[str, set[str]] = {}
        for schema in segments:
            for step in schema.steps:
                if step.name in steps:
                    steps[step.name].add(step.dtype)
            for key in schema.keys:
                if key.name in table.keys:
                    dtypes.setdefault(key.name, set()).update(column.dtype for column in key.columns)
        # Integers of two dtypes in one key may meet in one of 64 bits.
        found = set().union(*dtypes.values(), *[_WIDE for of_key in dtypes.values() if len(of_key) > 1])
        self.wide = [name for name in ("int64", "uint64") if name in found]
        double, integer, text = pa.float64(), pa.int64(), pa.string()
        fields = [("run", text), ("key", text), ("dtype", text), ("lane", text), ("event", integer)]
        for name, column in table.step_columns.items():
            whole = all(dtype.startswith(("int", "uint", "bool")) and dtype != "uint64" for dtype in steps[name])
            fields.append((_errors.encodable(column), integer if whole else double))
        fields += [("wall", double)] if table.has_wall else []
        self.config_types = {column: self._config_type(column) for column in table.config_columns}
        fields += [(_errors.encodable(column), kind) for column, kind in self.config_types.items()]
        fields += [("value", double), ("array", pa.list_(double)), ("shape", pa.list_(pa.int32()))]
        for name in self.wide:
            fields += [(f"value_{name}", getattr(pa, name)()), (f"array_{name}", pa.list_(getattr(pa, name)()))]
        self.schema = pa.schema([*fields, ("json", text), ("png", pa.binary())])

    def _config_type(self, column: str) -> Any:
        """Return the type that all values have in common, or that of JSON."""
        kinds = {type(c[column]) for c in self.table.configs.values() if c.get(column) is not None}
        pa = self.pa
        for python, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
            if kinds == {python}:
                return arrow
        return pa.float64() if kinds == {int, float} else pa.string()

    def batch(self, rows: Rows) -> Any:
        """Return the rows of one leaf."""
        pa, count, leaf = self.pa, len(rows), rows.leaf
        data: dict[str, Any] = {
            "run": pa.repeat(_errors.encodable(rows.run), count),
            "key": pa.repeat(_errors.encodable(leaf.name), count),
            "dtype": pa.repeat(leaf.kind, count),
            "lane": pa.array([lane or None for lane in rows.lanes], pa.string()),
            "event": pa.array(rows.events.astype(np.int64)),
        }
        for step, (x, missing) in rows.steps.items():
            kind = self.schema.field(_errors.encodable(self.table.step_columns[step])).type
            wide = x.astype(np.int64 if kind == pa.int64() else np.float64)
            data[_errors.encodable(self.table.step_columns[step])] = pa.array(wide, kind, mask=np.asarray(missing))
        if rows.wall is not None:
            data["wall"] = pa.array(rows.wall.astype(np.float64))
        for column, kind in self.config_types.items():
            data[_errors.encodable(column)] = pa.array([_config_value(rows.config.get(column), kind, pa)] * count, kind)
        data |= self._values(rows)
        columns = [data.get(field.name, pa.nulls(count, field.type)) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _values(self, rows: Rows) -> dict[str, Any]:
        pa, leaf = self.pa, rows.leaf
        if leaf.kind == "image":
            pictures = [png(pixels(leaf.value(lane, event))) for lane, event in zip(*rows.at, strict=True)]
            return {"png": pa.array(pictures, pa.binary())}
        if leaf.kind == "histogram" or leaf.values.dtype.kind == "c":
            return {"json": pa.array([json.dumps(strict_json(x)) for x in rows.plain()], pa.string())}
        x = leaf.values[rows.at]
        wide = _is_wide(x.dtype) if x.dtype.isbuiltin == 1 else False
        name = f"_{x.dtype}" if wide else ""
        numbers = x if wide else x.astype(np.float64)
        if not leaf.shape:
            exact = {f"value{name}": pa.array(numbers)}
            if wide:  # what double precision holds is there too, so that one column does for most
                with np.errstate(all="ignore"):
                    rounded = x.astype(np.float64)
                fits = np.abs(rounded) < 2.0**53
                exact["value"] = pa.array(rounded, mask=~fits)
            return exact
        size = int(np.prod(leaf.shape))
        offsets = pa.array(np.arange(len(x) + 1, dtype=np.int32) * size)
        shape = pa.array([list(leaf.shape)] * len(x), pa.list_(pa.int32()))
        return {f"array{name}": pa.ListArray.from_arrays(offsets, pa.array(numbers.reshape(-1))), "shape": shape}


_WIDE = {"int64", "uint64"}


def _config_value(x: Any, kind: Any, pa: Any) -> Any:
    if x is None or kind != pa.string():
        return x
    return _errors.encodable(x) if isinstance(x, str) else json.dumps(strict_json(x))


def write(table: Table, file: Path) -> int:
    """Write all rows, a row group at a time; return their number."""
    pa = _pyarrow()
    layout, count, waiting, batches = _Layout(table, pa), 0, 0, []
    with pa.parquet.ParquetWriter(file, layout.schema) as writer:
        for rows in table.rows():
            if not len(rows):
                continue
            batches.append(layout.batch(rows))
            waiting += len(rows)
            count += len(rows)
            if waiting >= _ROWS:
                writer.write_table(pa.Table.from_batches(batches, layout.schema))
                waiting, batches = 0, []
        if batches:
            writer.write_table(pa.Table.from_batches(batches, layout.schema))
    return count
