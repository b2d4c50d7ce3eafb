"""Turns logs into rows to store.

A key's events become rows, run after run. Keys whose rows have the same runs, steps and `valid` go into one table:
what is logged together is stored together. What does not depend on the values is worked out once for each kind of call
and then looked up, because a callback in a training loop has microseconds.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _axes
from lox._data._axes import EVENT
from lox._data._logdict import Layout, logdict
from lox.store import _dtypes, _structure
from lox.store._prng_keys import KeyData
from lox.store._schema import Column, Key, Schema

Array = np.ndarray[Any, Any]
_MAX_PLANS = 1000


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows for one table: the bytes of the column `run` and of all others but `wall`."""

    schema: Schema
    rows: int
    runs: bytes
    columns: list[bytes]


class Rows:
    """Makes rows of logs, and remembers how."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}
        self._schemas: dict[Any, Schema] = {}
        self._order: dict[str, int] = {}  # of keys, by when they were first seen

    def of(self, runs: Any, logs: Mapping[str, Any]) -> list[Piece]:
        """Return the rows of these logs. `runs` is the number of a run, or an array of them, one per lane."""
        runs = np.asarray(runs, np.int32)
        logs = logs if isinstance(logs, logdict) else logdict(logs)
        gathered = [_gather(key, logs) for key in logs]
        signature = (runs.shape, tuple([g.signature for g in gathered]))
        call = self._calls.get(signature)
        if call is None:
            if len(self._calls) >= _MAX_PLANS:
                self._calls.clear()
            for key in logs:
                self._order.setdefault(key, len(self._order))
            call = self._calls[signature] = _Call([_Plan(g, runs.shape) for g in gathered])
        return [self._piece(runs, gathered, call, members) for members in _tables(gathered, call.kinds)]

    def _piece(self, runs: Array, gathered: list["_Gathered"], call: "_Call", members: tuple[int, ...]) -> Piece:
        first, plan = gathered[members[0]], call.plans[members[0]]
        rows = plan.rows
        kept, valid_column = plan.kept(first)
        columns = [_raw(spread, x, kept) for spread, x in zip(plan.steps, first.steps, strict=True)]
        if valid_column is not None:
            columns.append(valid_column)
        for i in members:
            columns += [_raw(s, x, kept) for s, x in zip(call.plans[i].leaves, gathered[i].leaves, strict=True)]
        if runs.ndim == 0:
            rows = rows if kept is None else len(kept)
            numbers = runs.tobytes() * rows
        else:
            repeated = np.repeat(runs.ravel(), plan.events)
            repeated = repeated if kept is None else repeated[kept]
            rows, numbers = len(repeated), repeated.tobytes()
        schema = call.schemas.get(members)
        if schema is None:
            schema = call.schemas[members] = self._schema([call.plans[i] for i in members])
        return Piece(schema, rows, numbers, columns)

    def _schema(self, plans: list["_Plan"]) -> Schema:
        """Return one schema, and so use one segment, for calls that differ only in the number of events or lanes."""
        static = tuple(p.static for p in plans)
        if static not in self._schemas:
            if len(self._schemas) >= _MAX_PLANS:
                self._schemas.clear()
            keys = tuple(Key(p.key, p.structure, p.columns, self._order[p.key]) for p in plans)
            self._schemas[static] = Schema(plans[0].step_columns, plans[0].valid_column, keys)
        return self._schemas[static]


class _Call:
    """What is known of one kind of call: a plan for each key, and the schemas of the tables they make."""

    def __init__(self, plans: list["_Plan"]):
        self.plans = plans
        # Keys with the same number may share a table.
        kinds: dict[Any, int] = {}
        self.kinds = [kinds.setdefault(plan.shared, len(kinds)) for plan in plans]
        self.schemas: dict[tuple[int, ...], Schema] = {}


class _Gathered:
    """The arrays of one key, and everything about them except their values."""

    __slots__ = ("key", "layout", "leaves", "signature", "steps", "valid", "value")

    def __init__(self, key: str, value: Any, leaves: Any, steps: Any, valid: Any, layout: Any, signature: Any):
        self.key, self.value, self.leaves, self.steps, self.valid = key, value, leaves, steps, valid
        self.layout, self.signature = layout, signature


_SINGLE = jax.tree.structure(0)


def _gather(key: str, logs: logdict) -> _Gathered:
    value = logs[key]
    if type(value) is np.ndarray and value.dtype.isnative:
        leaves, treedef = [value], _SINGLE
    else:
        leaves, treedef = jax.tree.flatten(value)
        leaves = [x if type(x) is KeyData else _as_array(x, key) for x in leaves]
    names, steps = [], []
    for name in sorted(logs.steps):
        by_key = logs.steps[name]
        if key in by_key:
            step = by_key[key]
            names.append(name)
            steps.append(step if type(step) is np.ndarray and step.dtype.isnative else _as_array(step, key))
    valid = logs.valid.get(key)
    valid = valid if valid is None or type(valid) is np.ndarray else np.asarray(valid, bool)
    layout = logs._layouts.get(key) or logs._layout(key)
    signature = (
        key,
        treedef,
        layout,
        tuple([(x.dtype, x.shape) for x in leaves]),
        tuple([(name, x.dtype, x.shape) for name, x in zip(names, steps, strict=True)]),
        None if valid is None else valid.shape,
    )
    return _Gathered(key, value, leaves, steps, valid, layout, signature)


def _as_array(x: Any, key: str) -> Array:
    array = np.asarray(x)
    if array.dtype == object:
        raise _errors.LogTypeError(f"{key!r} has a {type(x).__name__} in it, which lox cannot store: log arrays.")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _tables(gathered: list[_Gathered], kinds: list[int]) -> list[tuple[int, ...]]:
    """Group keys into tables: those whose rows have the same steps and `valid`."""
    if len(gathered) == 1:
        return [(0,)]
    tables: list[list[int]] = []
    for i, key in enumerate(gathered):
        for table in tables:
            other = gathered[table[0]]
            if kinds[table[0]] == kinds[i] and _same(key.valid, other.valid) and _all_same(key.steps, other.steps):
                table.append(i)
                break
        else:
            tables.append([i])
    return [tuple(table) for table in tables]


def _all_same(a: list[Array], b: list[Array]) -> bool:
    return all([_same(x, y) for x, y in zip(a, b, strict=True)])


def _same(a: Array | None, b: Array | None) -> bool:
    # Compares bits: two NaNs are the same step if they are the same NaN.
    return a is b or (a is not None and b is not None and a.tobytes() == b.tobytes())


class _Spread:
    """Lays out an array as rows, `(run, event, *rest)`, repeated along lanes of runs that it lacks."""

    __slots__ = ("axes", "direct", "inner", "runs", "wanted")

    def __init__(self, shape: tuple[int, ...], layout: Layout, flags: Any, outer: int, runs: tuple[int, ...], key: str):
        # Axes come as (outer lanes, event, inner lanes, item); the first lanes are those of runs.
        flags = (True,) * outer + tuple(flags)
        lanes, event = _axes.lanes(flags), [EVENT] * layout.events
        self.axes = [*lanes[:outer], *event, *lanes[outer:]]
        self.wanted = [*range(len(runs)), *event, *[n for n in lanes if n >= len(runs)]]
        self.runs, self.inner = dict(enumerate(runs)), flags[len(runs) :]
        sizes = dict(zip(self.axes, shape, strict=False))
        have, expected = ([x[n] for n in lanes if n < len(runs)] for x in (sizes, runs))
        if have != expected:
            raise _errors.MismatchError(f"{key!r} has {_sizes(have)} lanes, but there are {_sizes(expected)} runs.")
        self.direct = self.axes == self.wanted

    def count(self, shape: tuple[int, ...]) -> int:
        return shape[self.axes.index(EVENT)] if EVENT in self.axes else 1

    def rest_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        inner = [axis for axis in self.wanted[len(self.runs) :] if axis != EVENT]
        return (*[shape[self.axes.index(axis)] for axis in inner], *shape[len(self.axes) :])

    def __call__(self, x: Array) -> Array:
        """Return the array as rows."""
        rows = math.prod(self.runs.values()) * self.count(x.shape)
        return _axes.align(x, self.axes, self.wanted, self.runs).reshape(rows, *self.rest_shape(x.shape))


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "no"


def _raw(spread: _Spread, x: Any, kept: Array | None) -> bytes:
    """Return the bytes of a column."""
    x = _words(x)
    if kept is None and spread.direct:
        return x.tobytes()
    rows = spread(x)
    return (rows if kept is None else rows[kept]).tobytes()


class _Plan:
    """What is known of a key's rows without its values."""

    def __init__(self, arrays: _Gathered, runs: tuple[int, ...]):
        self.key, layout = arrays.key, arrays.layout
        if not isinstance(self.key, str):
            raise _errors.LogTypeError(f"{self.key!r} is not a key: keys are strings.")
        outer = {np.ndim(x) - n for x, n in zip(arrays.leaves, layout.ndims, strict=True)} or {0}
        if len(outer) != 1 or min(outer) < 0:
            raise _errors.LoxError(
                f"the arrays of {self.key!r} have lost axes since they were logged, so they no longer hold its events."
            )
        front = outer.pop()
        flags = dict(layout.step_flags)
        names = [name for name, _, _ in arrays.signature[4]]
        spread = lambda x, f: _Spread(np.shape(_words(x)), layout, f, front, runs, self.key)  # noqa: E731
        self.leaves = [spread(x, f) for x, f in zip(arrays.leaves, layout.flags, strict=True)]
        self.steps = [spread(x, flags.get(name, ())) for name, x in zip(names, arrays.steps, strict=True)]
        self.valid = None if arrays.valid is None else spread(arrays.valid, layout.valid_flags)
        every = [(s, x) for s, x in zip([*self.leaves, *self.steps], [*arrays.leaves, *arrays.steps], strict=True)]
        if self.valid is not None:
            every.append((self.valid, arrays.valid))
        counts = {s.count(np.shape(_words(x))) for s, x in every} or {1}
        if len(counts) != 1:
            raise _errors.MismatchError(
                f"the arrays, steps and `valid` of {self.key!r} have different numbers of events: {sorted(counts)}."
            )
        self.events = counts.pop()
        self.rows = self.events * int(np.prod(runs))

        description = _structure.describe(arrays.value, repr(self.key))
        self.structure = json.dumps(description)
        self.columns = tuple(
            _column("value", self.key, x, s, json.dumps(tree_path), self.key)
            for x, s, tree_path in zip(arrays.leaves, self.leaves, _structure.tree_paths(description), strict=True)
        )
        self.step_columns = tuple(
            _column("step", name, x, s, "[]", self.key)
            for name, x, s in zip(names, arrays.steps, self.steps, strict=True)
        )
        self.valid_column = None
        if self.valid is not None and self.valid.rest_shape(np.shape(arrays.valid)):
            self.valid_column = _column("valid", "valid", arrays.valid, self.valid, "[]", self.key)
        self.shared = (self.step_columns, self.valid_column, self.valid is None, self.events)
        self.static = (self.key, self.structure, self.columns, self.step_columns, self.valid_column)

    def kept(self, arrays: _Gathered) -> tuple[Array | None, bytes | None]:
        """Return the rows to store (None: all), and the column `valid` of their lanes if they have some."""
        if self.valid is None:
            return None, None
        valid = self.valid(arrays.valid)
        any_lane = valid.reshape(len(valid), -1).any(1) if valid.ndim > 1 else valid
        kept = None if any_lane.all() else np.flatnonzero(any_lane)
        if self.valid_column is None:
            return kept, None
        return kept, (valid if kept is None else valid[kept]).tobytes()


def _words(x: Any) -> Array:
    return x.data if type(x) is KeyData else x


def _column(role: str, name: str, x: Any, spread: _Spread, tree_path: str, key: str) -> Column:
    words = 0
    if type(x) is KeyData:
        words = x.data.shape[-1]
        dtype = x.dtype
    else:
        dtype = _dtypes.name_of(x.dtype, repr(key) if role == "value" else f"the step {name!r} of {key!r}")
    shape = spread.rest_shape(np.shape(_words(x)))
    shape = shape[:-1] if words else shape
    column = Column(role, name, dtype, shape, tuple(spread.inner), tree_path, words)
    if column.items > 2**31 - 1 or len(shape) > 60:
        raise _errors.LogTypeError(f"{key!r} is too large to be stored: one event has the shape {shape}.")
    return column
