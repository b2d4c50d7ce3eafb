"""Turns events into rows to store.

The events of a bundle become rows, run after run. Bundles whose rows have the same steps and `valid` go into one table:
what is logged together is stored together. What does not depend on the values is worked out once for each kind of
bundle and then looked up, because a callback in a training loop has microseconds.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data._bundle import Bundle, runs_outermost
from lox._data._lanes import Laned, is_laned
from lox._data._logdict import logdict
from lox.store import _dtypes, _structure
from lox.store._prng_keys import PRNGKeyWords, as_words
from lox.store._schema import MAX_RUNS, Column, Key, Schema

Array = np.ndarray[Any, Any]
_MOST = 1000


@dataclasses.dataclass(frozen=True)
class Rows:
    """RowMaker for one table: the bytes of the column `run` and of all others but `wall`."""

    schema: Schema
    count: int
    runs: bytes
    columns: list[bytes]


class RowMaker:
    """Makes rows of events, and remembers how."""

    def __init__(self) -> None:
        self._columns: dict[Any, _Columns] = {}
        self._schemas: dict[Any, Schema] = {}  # by what they contain
        self._schema_of: dict[tuple[int, ...], Schema] = {}  # by the identities of columns, which is quicker
        self._order: dict[str, int] = {}  # of keys, by when they were first seen

    def of_logs(self, runs: Any, logs: Mapping[str, Any]) -> list[Rows]:
        """Return the rows of these logs. `runs` is the number of a run, or an array of them, one per lane."""
        runs = np.asarray(runs, np.int32)
        logs = logs if isinstance(logs, logdict) else logdict(logs)
        for key in logs.keys() - self._order.keys() and logs:
            self._order.setdefault(key, len(self._order))
        bundles = [bundle.expanded() for bundle in logs.to_bundles(_on_host, () if runs.ndim else (False,))]
        for bundle in bundles:
            _check(bundle, runs.shape)
        if runs.ndim:
            route = Laned(runs, (True,) * runs.ndim)
            bundles = [runs_outermost(bundle, route) for bundle in bundles]
        return self.of(runs.reshape(-1), bundles)

    def of(self, runs: Array, bundles: Sequence[Bundle]) -> list[Rows]:
        """Return the rows of events whose outermost lane is the run."""
        tables: list[list[Bundle]] = []
        for bundle in bundles:
            for table in tables:
                if _same_events(table[0], bundle):
                    table.append(bundle)
                    break
            else:
                tables.append([bundle])
        return [self._rows(runs, table, *block) for table in tables for block in _blocks(runs, table[0])]

    def _rows(self, runs: Array, table: list[Bundle], start: int, stop: int, width: int) -> Rows:
        """Return the rows of the runs from `start` to `stop`, each of which has `width` runs."""
        first, parts = table[0], [self._columns_of(bundle, width) for bundle in table]
        rows = lambda x: _rows(x, start, stop, width)  # noqa: E731
        columns = [rows(first.steps[column.name]) for column in parts[0].steps]
        kept = None
        if first.valid is not None:
            valid = rows(first.valid)
            some = valid.any(tuple(range(1, valid.ndim)))
            kept = None if some.all() else np.flatnonzero(some)
            columns += [valid] if parts[0].valid is not None else []
        columns += [rows(x) for bundle in table for x in bundle.values]
        columns = columns if kept is None else [x[kept] for x in columns]
        if stop - start == width:  # one row for each event
            count = first.count() if kept is None else len(kept)
            numbers = runs[start : start + 1].tobytes() * count
        else:
            of_rows = np.repeat(runs[start:stop:width], first.count())
            of_rows = of_rows if kept is None else of_rows[kept]
            count, numbers = len(of_rows), of_rows.tobytes()
        return Rows(self._schema(parts, width), count, numbers, [x.tobytes() for x in columns])

    def _columns_of(self, bundle: Bundle, width: int) -> "_Columns":
        arrays = [*bundle.values, *bundle.steps.values(), *([] if bundle.valid is None else [bundle.valid])]
        forms = tuple([(x.tree.dtype, x.tree.shape[1 + bool(x.flags[0]) :], x.flags) for x in arrays])
        signature = (width, bundle.keys, bundle.treedefs, tuple(bundle.steps), bundle.valid is None, forms)
        columns = self._columns.get(signature)
        if columns is None:
            if len(self._columns) >= _MOST:
                self._columns.clear()
                self._schema_of.clear()
            columns = self._columns[signature] = _Columns(bundle, width)
            for key in bundle.keys:
                self._order.setdefault(key, len(self._order))
        return columns

    def _schema(self, parts: list["_Columns"], width: int) -> Schema:
        """Return one schema, and so use one segment, for bundles that differ only in the number of events or runs."""
        known = tuple([id(part) for part in parts])
        if known not in self._schema_of:
            static = (width, *[(part.keys, part.steps, part.valid) for part in parts])
            if static not in self._schemas:
                if len(self._schemas) >= _MOST:
                    self._schemas.clear()
                keys = tuple(Key(*key, self._order[key[0]]) for part in parts for key in part.keys)
                self._schemas[static] = Schema(parts[0].steps, parts[0].valid, keys, width)
            if len(self._schema_of) >= _MOST:
                self._schema_of.clear()
            self._schema_of[known] = self._schemas[static]
        return self._schema_of[known]


def _on_host(bundle: Bundle) -> Bundle:
    """Make sure that all arrays are NumPy's and can be stored."""
    bundle = as_words(bundle)
    arrays = [x.tree for x in (*bundle.values, *bundle.steps.values())]
    if all([type(x) is np.ndarray and x.dtype.isnative and x.dtype != object for x in arrays]):
        return bundle
    return jax.tree.map(lambda x: Laned(_as_array(x.tree, bundle.keys[0]), x.flags), bundle, is_leaf=is_laned)


def _as_array(x: Any, key: str) -> Array:
    array = np.asarray(x)
    if array.dtype == object:
        raise _errors.LogTypeError(f"{key!r} has a {type(x).__name__} in it, which lox cannot store: log arrays.")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check(bundle: Bundle, runs: tuple[int, ...]) -> None:
    """Raise if arrays of a bundle do not fit together or not the runs."""
    for key in bundle.keys:
        if not isinstance(key, str):
            raise _errors.LogTypeError(f"{key!r} is not a key: keys are strings.")
    arrays = [*bundle.values, *bundle.steps.values(), *([] if bundle.valid is None else [bundle.valid])]
    counts = sorted({x.tree.shape[0] for x in arrays})
    if len(counts) > 1:
        raise _errors.MismatchError(
            f"the arrays, steps and `valid` of {bundle.keys[0]!r} have different numbers of events: {counts}."
        )
    for x in arrays if runs else ():
        lanes = iter(x.tree.shape[1:])
        have = [next(lanes) if flag else None for flag in x.flags[: len(runs)]]
        if any(size not in (None, wanted) for size, wanted in zip(have, runs, strict=False)):
            there = " × ".join(str(size) for size in have if size is not None)
            raise _errors.MismatchError(
                f"{bundle.keys[0]!r} has {there} lanes, but there are {' × '.join(map(str, runs))} runs."
            )


def _same_events(a: Bundle, b: Bundle) -> bool:
    """Compare steps and `valid` by bits: two NaNs are the same step if they are the same NaN."""
    if (a.valid is None) != (b.valid is None) or a.steps.keys() != b.steps.keys() or a.count() != b.count():
        return False
    pairs = [(x, b.steps[name]) for name, x in a.steps.items()]
    pairs += [(a.valid, b.valid)] if a.valid is not None and b.valid is not None else []
    return all([_same(x, y) for x, y in pairs])


def _same(a: Laned, b: Laned) -> bool:
    x, y = a.tree, b.tree
    same_type = x.dtype == y.dtype and x.shape == y.shape and a.flags == b.flags
    return same_type and (x is y or x.tobytes() == y.tobytes())


def _blocks(runs: Array, bundle: Bundle) -> list[tuple[int, int, int]]:
    """Return which runs to store in rows of how many: first, last and number."""
    count = len(runs)
    if count == 1 or runs[-1] - runs[0] != count - 1 or not (runs[1:] - runs[:-1] == 1).all():
        return [(0, count, 1)]
    if bundle.valid is not None and 2 * np.count_nonzero(bundle.valid.tree) < bundle.valid.tree.size:
        return [(0, count, 1)]  # runs that hardly ever log together
    whole = count - count % MAX_RUNS
    return [block for block in ((0, whole, MAX_RUNS), (whole, count, count - whole)) if block[0] < block[1]]


def _rows(x: Laned, start: int, stop: int, width: int) -> Array:
    """Lay out an array as rows of `width` runs, sorted by run; what is the same for all runs is repeated."""
    array, blocks = x.tree, (stop - start) // width
    if blocks == 1 and not x.flags[0]:
        return array
    events, item = array.shape[0], array.shape[1 + bool(x.flags[0]) :]
    if not x.flags[0]:
        rows = np.broadcast_to(array, (blocks, *array.shape))
    else:
        rows = array[:, start:stop].reshape(events, blocks, width, *item).swapaxes(0, 1)
    return rows.reshape(events * blocks, *([width] if x.flags[0] and width > 1 else []), *item)


class _Columns:
    """What is known of the rows of a bundle without its values."""

    def __init__(self, bundle: Bundle, width: int):
        about = bundle.keys[0]
        steps = sorted(bundle.steps.items())
        self.steps = tuple(_column("step", name, x, "[]", about, width) for name, x in steps)
        self.valid = None
        if bundle.valid is not None and any(bundle.valid.flags[0 if width > 1 else 1 :]):
            self.valid = _column("valid", "valid", bundle.valid, "[]", about, width)
        self.keys = tuple(_key(key, bundle.treedef(key), bundle.leaves(key), width) for key in bundle.keys)


def _key(key: str, treedef: Any, leaves: list[Laned], width: int) -> tuple[str, str, tuple[Column, ...]]:
    value = jax.tree.unflatten(treedef, leaves)
    nodes, treedef = jax.tree.flatten(value, is_leaf=lambda x: isinstance(x, PRNGKeyWords | Laned))
    description = _structure.describe(jax.tree.unflatten(treedef, [0] * len(nodes)), repr(key))
    tree_paths = map(json.dumps, _structure.tree_paths(description))
    columns = [_column("value", key, x, path, key, width) for x, path in zip(nodes, tree_paths, strict=True)]
    return key, json.dumps(description), tuple(columns)


def _column(role: str, name: str, x: Laned | PRNGKeyWords, tree_path: str, key: str, width: int) -> Column:
    laned, words = (x.words, x.words.tree.shape[-1]) if isinstance(x, PRNGKeyWords) else (x, 0)
    shape = laned.tree.shape[1 + bool(laned.flags[0]) :]
    if isinstance(x, PRNGKeyWords):
        dtype, shape = f"key<{x.impl}>", shape[:-1]
    else:
        dtype = _dtypes.name_of(laned.tree.dtype, repr(key) if role == "value" else f"the step {name!r} of {key!r}")
    runs = width if laned.flags[0] and width > 1 else 0
    column = Column(role, name, dtype, shape, laned.flags[1:], tree_path, words, runs)
    if column.items > 2**31 - 1 or len(shape) > 60:
        raise _errors.LogTypeError(f"{key!r} is too large to be stored: one event has the shape {shape}.")
    return column
