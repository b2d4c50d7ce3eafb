"""Turns stored rows back into logs."""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _errors
from lox._data import _arrays, _bundle, _lanes, _sites
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox.store import _structure
from lox.store._group import Group
from lox.store._schema import RUN, WALL, Column, Schema
from lox.store._segment import SegmentReader
from lox.store._structure import EVENT_NUMBER
from lox.store._table import Activity

Array = np.ndarray[Any, Any]
Select = Callable[[str], bool]
Parts = Sequence[tuple[int, int, int]]
PartsOf = Callable[[SegmentReader], Parts]
Data = dict[Column, Array]  # of rows


@dataclasses.dataclass
class Chunk:
    """Events of one key and one run from one segment, with PRNG keys as words."""

    wall: Array | None
    events: Bundle
    impls: tuple[str | None, ...]
    order: int = 0
    kind: Any = None  # the same object for chunks that have the same dtypes, lanes and shapes


Chunks = dict[str, list[Chunk]]  # by key


def of_run(group: Group, run: int, select: Select, wall: bool = False, timed: bool = False) -> Chunks:
    """Read the events of one run of a group, with their times if `timed`, or even as a step if `wall`."""
    chunks: Chunks = {}
    segments, alone = group.segments_of(run)
    for segment, keys, with_wall in _segments(segments, select):
        parts = segment.batches_with(run)
        # A key without events is known to belong to a run only if that is the only one.
        if parts or alone:
            assert segment.schema is not None
            rows = _Rows(segment, parts, keys, with_wall or timed, segment.schema.runs > 1, wall)
            for first, data in rows.by_first():
                rows.add_to(chunks, data, run - first)
    return chunks


def of_all_runs(group: Group, select: Select, parts_of: PartsOf | None = None, wall: bool = False) -> dict[int, Chunks]:
    """Read the events of all runs of a group, by their number, each file once; only these parts of it if given."""
    timed = any(entry.part is not None for entry in group.entries)  # to put those of several processes in order
    if len(group.entries) == 1 and parts_of is None:  # nothing to sort
        run = group.entries[0].number
        return {run: of_run(group, run, select, wall, timed)}
    by_run: dict[int, Chunks] = {entry.number: {} for entry in group.entries}
    alone = _alone(group) if parts_of is None else {}
    for segment, keys, with_wall in _segments(group.segments.values(), select):
        parts = segment.all_batches() if parts_of is None else parts_of(segment)
        without = alone.get(segment, set())  # runs that may have keys without events here
        if not parts and not without:
            continue
        rows = _Rows(segment, parts, keys, with_wall or timed, True, wall)
        by_first = dict(rows.by_first())
        if rows.schema.runs == 1:
            none = {column: x[:0] for column, x in rows.data.items()}
            by_first |= {number: none for number in without - by_first.keys()}
        for first, data in by_first.items():
            for number in range(first, first + rows.schema.runs):
                if number in by_run:
                    rows.add_to(by_run[number], data, number - first)
    return by_run


def _alone(group: Group) -> dict[SegmentReader, set[int]]:
    """Return the runs to which all keys of a segment belong, even without events."""
    runs: dict[SegmentReader, set[int]] = {}
    for entry in group.entries if group.sources else ():
        segments, alone = group.segments_of(entry.number)
        for segment in segments if alone else ():
            runs.setdefault(segment, set()).add(entry.number)
    return runs


# --- attempts ---


def replaced_since(group: Group, run: int, step: str, number: Any) -> float:
    """Return the time of the first event of a run whose step has at least this number; infinity if there is none."""
    since = math.inf
    for segment in group.segments.values():
        column = next((c for c in segment.schema.steps if c.name == step), None) if segment.schema else None
        parts = [] if column is None else segment.batches_with(run)
        if not parts or column is None or segment.schema is None:
            continue
        rows = _Rows(segment, parts, [], True, segment.schema.runs > 1, False)
        for first, data in rows.by_first():
            for wall, steps in rows.times(data, run - first, column):
                late = _least(steps) >= number
                since = min(since, float(wall[late].min())) if late.any() else since
    return since


def kept(chunks: Chunks, step: str, number: Any, since: float, replaced: bool = False) -> Chunks:
    """Return the events that a later attempt from this step on leaves as they are, or those that it replaces.

    Events without that step are replaced if they came at or after the first that has it.
    """
    parts: Chunks = {}
    for key, of_key in chunks.items():
        for chunk in of_key:
            steps = chunk.events.steps.get(step)
            assert chunk.wall is not None
            stay = chunk.wall < since if steps is None else _least(steps.tree) < number
            stay = ~stay if replaced else stay
            if stay.all():
                parts.setdefault(key, []).append(chunk)
            elif stay.any():  # a key of which nothing is left is gone
                events = jax.tree.map(lambda x, stay=stay: x[stay], chunk.events)
                parts.setdefault(key, []).append(dataclasses.replace(chunk, wall=chunk.wall[stay], events=events))
    return parts


def with_step(chunks: Chunks, step: str, number: int) -> Chunks:
    """Return the same events with a further step, which is the same for all."""

    def add(chunk: Chunk) -> Chunk:
        count = np.full(chunk.events.count(), number, np.int32)
        events = dataclasses.replace(chunk.events, steps={**chunk.events.steps, step: Laned(count)})
        return dataclasses.replace(chunk, events=events, kind=None)

    return {key: list(map(add, of_key)) for key, of_key in chunks.items()}


def _least(steps: Array) -> Array:
    return steps.reshape(len(steps), -1).min(1) if steps.ndim > 1 else steps


def first_difference(old: list[Chunk], new: list[Chunk], step: str) -> tuple[bool, Any]:
    """Return whether events of a key were computed twice, and the first step at which they are not the same bits."""
    before, after = [join([in_order(kind)]) for kind in (old, new)]
    if step not in before.events.steps or step not in after.events.steps:
        return False, None  # they cannot be compared
    numbers = [_least(chunk.events.steps[step].tree) for chunk in (before, after)]
    orders = [np.argsort(x, kind="stable") for x in numbers]
    numbers = [x[order] for x, order in zip(numbers, orders, strict=True)]
    if not len(numbers[0]) or not len(numbers[1]):
        return False, None
    # Only steps that both have reached: an attempt may begin earlier, or may have ended earlier.
    first, last = max(x[0] for x in numbers), min(x[-1] for x in numbers)
    if first > last:
        return False, None
    spans = [slice(int(np.searchsorted(x, first)), int(np.searchsorted(x, last, "right"))) for x in numbers]
    orders = [order[span] for order, span in zip(orders, spans, strict=True)]
    numbers = [x[span] for x, span in zip(numbers, spans, strict=True)]
    counts = [len(x) for x in numbers]
    common = min(counts)
    same = numbers[0][:common] == numbers[1][:common]
    for a, b in zip(jax.tree.leaves(before.events), jax.tree.leaves(after.events), strict=False):
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            return True, numbers[0][0].item()
        x, y = [np.ascontiguousarray(z[order][:common]) for z, order in zip((a, b), orders, strict=True)]
        bits = [z.reshape(common, -1).view(np.uint8).reshape(common, -1) if z.size else None for z in (x, y)]
        if bits[0] is not None and bits[1] is not None:
            same &= (bits[0] == bits[1]).all(1)
    if not same.all():
        at = int(np.argmin(same))
        return True, min(numbers[0][at], numbers[1][at]).item()
    if counts[0] != counts[1]:
        longer = numbers[0] if counts[0] > counts[1] else numbers[1]
        return True, longer[common].item()
    return True, None


def activity(
    group: Group, before: Mapping[int, Activity] | None = None, counted: Mapping[SegmentReader, int] | None = None
) -> dict[int, Activity]:
    """Return how many events each run of a group has, and when, without reading what was logged.

    Only batches beyond those that were `counted` are read, whose events are in `before`.
    """
    found = dict(before or {})
    for segment in group.segments.values():
        parts = segment.all_batches((counted or {}).get(segment, 0)) if segment.schema is not None else []
        if segment.schema is None or not parts:
            continue
        schema = segment.schema
        numbered = [step for step in schema.steps if step.name == EVENT_NUMBER]
        columns = [RUN, WALL, *numbered, *([schema.valid] if schema.valid else [])]
        runs, wall, *valids = segment.read(columns, parts)
        event_numbers = valids.pop(0) if numbered else None
        for n in range(schema.runs):
            rows = np.ones(len(runs), bool)
            if schema.valid is not None:
                valid = valids[0][:, n] if schema.valid.runs else valids[0]
                rows = valid.reshape(len(runs), -1).any(1)
            numbers, inverse = np.unique(runs[rows] + n, return_inverse=True)
            counts = np.bincount(inverse, minlength=len(numbers))
            first, last = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
            np.minimum.at(first, inverse, wall[rows])
            np.maximum.at(last, inverse, wall[rows])
            for number, *new in zip(numbers.tolist(), counts.tolist(), first.tolist(), last.tolist(), strict=True):
                old = found.get(number, Activity(0, math.inf, -math.inf))
                times = min(old.first, new[1]), max(old.last, new[2])
                if event_numbers is None:
                    found[number] = Activity(old.events + new[0], *times, old.split)
                else:
                    mine = (event_numbers[:, n] if numbered[0].runs else event_numbers)[rows][runs[rows] + n == number]
                    found[number] = Activity(old.events, *times, old.split.union(mine.tolist()))
    return found


def _segments(segments: Iterable[SegmentReader], select: Select) -> Iterable[tuple[SegmentReader, list[str], bool]]:
    """Return the segments with selected keys, these keys, and whether times are needed to put events in order."""
    chosen = [(s, [key.name for key in s.schema.keys if select(key.name)]) for s in segments if s.schema]
    seen = collections.Counter(key for _, keys in chosen for key in keys)
    return [
        (segment, keys, segment.schema.runs > 1 or any(seen[key] > 1 for key in keys))
        for segment, keys in chosen
        if keys and segment.schema is not None
    ]


class _Rows:
    """Rows of a segment: the columns of some of its keys."""

    def __init__(
        self, segment: SegmentReader, parts: Parts, keys: list[str], with_wall: bool, with_runs: bool, wall_step: bool
    ):
        self.wall_step = wall_step
        assert segment.schema is not None
        schema: Schema = segment.schema
        self.schema = schema
        self.of_key = {key.name: key for key in schema.keys if key.name in keys}
        self.site = Site(f"{segment.file.parent.name}/{segment.file.name}")
        self.trees: dict[str, tuple[list[Column], Any, tuple[str | None, ...]]] = {}
        for key in self.of_key.values():
            # Nodes that come back as dicts are flattened in another order.
            order, treedef = jax.tree.flatten(_structure.build(json.loads(key.structure), [*range(len(key.columns))]))
            ordered = [key.columns[i] for i in order]
            self.trees[key.name] = (ordered, treedef, tuple(c.codec.impl for c in ordered))
        valid = [schema.valid] if schema.valid else []
        first = [RUN] * with_runs + [WALL] * (with_wall or wall_step)
        columns = [*first, *schema.steps, *valid, *[c for key in self.of_key.values() for c in key.columns]]
        self.data: Data = dict(zip(columns, segment.read(columns, parts), strict=True))
        self.kinds: dict[str, Any] = {}

    def by_first(self) -> list[tuple[int, Data]]:
        """Return the first run of each kind of row, and the data of such rows, with the axis of runs in front.

        If the runs were not read, because each row is for the same one, the first run does not matter.
        """
        if RUN not in self.data:
            return [(0, self.data)]
        runs = self.data[RUN]
        if (runs[1:] < runs[:-1]).any():
            order = np.argsort(runs, kind="stable")
            self.data = {column: x[order] for column, x in self.data.items()}
            runs = self.data[RUN]
        numbers, starts = np.unique(runs, return_index=True)
        parts = map(slice, starts, [*starts[1:], len(runs)])
        return [
            # Copied, because the events of a run are far apart in a file.
            (n, {c: np.moveaxis(x[part], 1, 0).copy() if c.runs else x[part] for c, x in self.data.items()})
            for n, part in zip(numbers.tolist(), parts, strict=True)
        ]

    def times(self, data: Data, lane: int, column: Column) -> Iterable[tuple[Array, Array]]:
        """Return the times of the events in these rows for one of their runs, and the values of a step."""
        valid = self.schema.valid
        kept: Any = slice(None)
        if valid is not None:
            happened = data[valid][lane] if valid.runs else data[valid]
            kept = happened.reshape(len(happened), -1).any(1)
        yield data[WALL][kept], (data[column][lane] if column.runs else data[column])[kept]

    def add_to(self, chunks: Chunks, data: Data, lane: int) -> None:
        """Add the events in these rows, for one of the runs that share them; it may have none of them."""
        column, valid, kept = self.schema.valid, None, slice(None)

        def pick(column: Column) -> Array:
            return (data[column][lane] if column.runs else data[column])[kept]

        if column is not None:
            happened = pick(column)
            some = happened.any(tuple(range(1, happened.ndim)))
            if len(some) and not some.any():
                return
            kept = slice(None) if some.all() else some
            valid = Laned(happened[kept], column.lanes) if column.shape else None
        steps = {c.name: Laned(pick(c), c.lanes) for c in self.schema.steps}
        wall = data[WALL][kept] if WALL in data else None
        if self.wall_step and wall is not None:
            if WALL.name in steps:
                raise _errors.OptionError("`wall=True`: these logs have a step called 'wall' of their own.")
            steps[WALL.name] = Laned(wall)
        for key, (ordered, treedef, impls) in self.trees.items():
            values = [Laned(pick(c), c.lanes) for c in ordered]
            events = Bundle(values, steps, valid, (key,), (treedef,), False, self.site)
            chunk = Chunk(wall, events, impls, self.of_key[key].order)
            if key not in self.kinds:
                self.kinds[key] = _form(chunk)
            chunk.kind = self.kinds[key]
            chunks.setdefault(key, []).append(chunk)


# --- putting chunks together ---


def in_order(chunks: list[Chunk]) -> Chunk:
    """Join the events of one key and one group in order of time, because segments overlap."""
    if len(chunks) == 1:
        return chunks[0]
    whole = join(chunks)
    assert whole.wall is not None
    if (whole.wall[1:] >= whole.wall[:-1]).all():
        return whole
    order = np.argsort(whole.wall, kind="stable")
    return Chunk(whole.wall[order], jax.tree.map(lambda x: x[order], whole.events), whole.impls, kind=whole.kind)


def join(chunks: list[Chunk]) -> Chunk:
    """Concatenate events that fit together."""
    if len(chunks) == 1:
        return chunks[0]
    kind = chunks[0].kind
    if kind is not None and all(chunk.kind is kind for chunk in chunks):  # nothing to check or to convert
        events = jax.tree.map(lambda *parts: np.concatenate(parts), *[chunk.events for chunk in chunks])
    else:
        events, kind = _bundle.concatenate([chunk.events for chunk in chunks]), None
    walls = [chunk.wall for chunk in chunks]
    wall = None if any(w is None for w in walls) else np.concatenate(walls)  # type: ignore[arg-type]
    return Chunk(wall, events, chunks[0].impls, kind=kind)


def apart(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Group the events of one key that fit into one array."""
    kinds: list[list[Chunk]] = []
    models: list[dict[Any, Chunk]] = []  # of each kind, one chunk of each form: a thousand runs are mostly alike
    for chunk in chunks:
        form = chunk.kind or _form(chunk)
        fitting = (n for n, m in enumerate(models) if form in m or all(_fit(chunk, model) for model in m.values()))
        n = next(fitting, len(kinds))
        if n == len(kinds):
            kinds.append([])
            models.append({})
        kinds[n].append(chunk)
        models[n].setdefault(form, chunk)
    return kinds


def _form(chunk: Chunk) -> Any:
    """Everything that decides what a chunk fits to."""
    events = chunk.events
    lanes = [x and _lanes.lanes_of(x, 1) for x in (*events.values, events.valid)]
    steps = [(name, _lanes.lanes_of(x, 1)) for name, x in sorted(events.steps.items())]
    return chunk.impls, events.treedefs, tuple(x.item_shape(1) for x in events.values), *lanes, *steps


def _fit(a: Chunk, b: Chunk) -> bool:
    x, y = a.events, b.events
    if a.impls != b.impls or x.treedefs != y.treedefs:
        return False
    if any(v.item_shape(1) != w.item_shape(1) for v, w in zip(x.values, y.values, strict=True)):
        return False
    pairs = [*zip(x.values, y.values, strict=True), (x.valid, y.valid)]
    pairs += [(x.steps[name], y.steps[name]) for name in x.steps if name in y.steps]
    return all(_lanes.union(*[_lanes.lanes_of(z, 1) for z in p if z is not None]) is not None for p in pairs)


def by_name(by_key: dict[str, list[Any]], chunk_of: Callable[[Any], Chunk] = lambda x: x) -> dict[str, list[Any]]:
    """Give events of a key that do not fit together keys of their own."""
    named: dict[str, list[Any]] = {}
    for key, items in by_key.items():
        kinds = apart([chunk_of(item) for item in items])
        if len(kinds) == 1:
            named[key] = items
            continue
        kind_of = {id(chunk): n for n, kind in enumerate(kinds) for chunk in kind}
        parts: list[list[Any]] = [[] for _ in kinds]
        for item in items:
            parts[kind_of[id(chunk_of(item))]].append(item)
        names = []
        for kind, part in zip(kinds, parts, strict=True):
            name = f"{key}@{_shape(kind)}"
            while name in named or name in by_key:
                name += "'"
            names.append(name)
            named[name] = part
        counts = [sum(chunk.events.count() for chunk in kind) for kind in kinds]
        listed = ", ".join(f"{n} in {name!r}" for n, name in zip(counts, names, strict=True))
        _sites.warn(
            f"the events of {key!r} do not fit into one array, and are kept apart: {listed}. Log them under keys of "
            'their own, for instance with `with lox.scope("eval"):` around one of them.'
        )
    return named


def _shape(kind: list[Chunk]) -> str:
    """Format the lanes and shape of these events, for their name."""
    shapes = []
    for impl, *leaves in zip(kind[0].impls, *[chunk.events.values for chunk in kind], strict=True):
        shape = max((x.tree.shape[1:] for x in leaves), key=len)
        shapes.append(shape if impl is None else shape[:-1])
    return ",".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def to_logdict(chunks: dict[str, list[Chunk]], typed: bool = True) -> logdict:
    """Return the logs of one run, in which every key has an event axis; PRNG keys as their words if not `typed`."""
    logs = logdict()
    for key, parts in by_name(chunks).items():
        whole = join(parts)
        logs._set_bundle(dataclasses.replace(_typed(whole) if typed else whole.events, keys=(key,)))
    return logs


def _typed(chunk: Chunk) -> Bundle:
    """Turn words into typed PRNG keys."""
    values = [
        x if impl is None else Laned(_wrap(x.tree, impl, chunk.events.keys[0]), x.flags)
        for x, impl in zip(chunk.events.values, chunk.impls, strict=True)
    ]
    return dataclasses.replace(chunk.events, values=values)


def _wrap(words: Array, impl: str, key: str) -> Any:
    try:
        return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)
    except (TypeError, ValueError) as error:
        raise _errors.StoreError(
            f"{key!r} holds PRNG keys of the implementation {impl!r}, which this JAX does not know ({error}).\n"
            "Register the implementation, or leave the key out with `argnames`."
        ) from error


def stack(runs: list[dict[str, list[Chunk]]], typed: bool = True, wide: bool = False) -> logdict:
    """Return the logs of many runs with a lane axis in front; `valid` tells where a run has fewer events.

    Numbers of different dtypes are promoted as JAX does, or with `wide` to double precision: then what a run has does
    not depend on the others.
    """
    by_key: dict[str, list[tuple[int, Chunk]]] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        by_key[key] = [(n, chunk) for n, run in enumerate(runs) for chunk in run.get(key, [])]
    logs = logdict()
    for key, parts in by_name(by_key, lambda part: part[1]).items():
        counts = np.zeros(len(runs), int)
        for n, chunk in parts:
            counts[n] += chunk.events.count()
        chunks = [chunk for _, chunk in parts]
        folded = _folded(join(_widened(chunks) if wide else chunks), counts)
        logs._set_bundle(dataclasses.replace(_typed(folded) if typed else folded.events, keys=(key,)), outer=1)
    return logs


def _widened(chunks: list[Chunk]) -> list[Chunk]:
    """Convert values and steps to double precision where chunks do not have the same dtype."""
    values = zip(*[chunk.events.values for chunk in chunks], strict=True)
    mixed = [len({x.tree.dtype for x in leaf}) > 1 for leaf in values]
    names = dict.fromkeys(name for chunk in chunks for name in chunk.events.steps)
    kinds = {name: {c.events.steps[name].tree.dtype.kind for c in chunks if name in c.events.steps} for name in names}
    if not any(mixed) and not any(len(kind) > 1 for kind in kinds.values()):
        return chunks
    double = lambda x: Laned(x.tree.astype(np.float64), x.flags) if x.tree.dtype.kind != "c" else x  # noqa: E731
    wide = []
    for chunk in chunks:
        of_leaves = [double(x) if m else x for x, m in zip(chunk.events.values, mixed, strict=True)]
        of_steps = {name: double(x) if len(kinds[name]) > 1 else x for name, x in chunk.events.steps.items()}
        events = dataclasses.replace(chunk.events, values=of_leaves, steps=of_steps)
        wide.append(dataclasses.replace(chunk, events=events, kind=None))
    return wide


def _folded(whole: Chunk, counts: Array) -> Chunk:
    """Reshape the events of runs, one after the other, to `(run, event, ...)`."""
    lanes, most = len(counts), int(counts.max(initial=0))
    events = whole.events
    if (counts == most).all():
        folded = jax.tree.map(lambda x: x.reshape(lanes, most, *x.shape[1:]), events)
        return Chunk(None, folded, whole.impls)
    exists = np.arange(most) < counts[:, None]

    def padded(x: Laned, missing: Any) -> Laned:
        out = np.full((lanes, most, *x.tree.shape[1:]), missing, x.tree.dtype)
        out[exists] = x.tree
        return Laned(out, x.flags)

    folded = dataclasses.replace(
        events,
        values=[
            padded(x, 0 if impl else _arrays.missing_value(x.tree.dtype))
            for x, impl in zip(events.values, whole.impls, strict=True)
        ],
        steps={name: padded(x, _arrays.missing_step(x.tree.dtype)) for name, x in events.steps.items()},
        valid=Laned(exists) if events.valid is None else padded(events.valid, False),
    )
    return Chunk(None, folded, whole.impls)
