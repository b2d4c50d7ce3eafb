"""Arrays that are spread over several processes: what this process writes of them.

Every part of an array is written by one process, from its own devices, and nothing is gathered. Events and runs may be
spread too: then a process writes only those that it has.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _axes, _lanes
from lox._data._axes import EVENT
from lox._data._bundle import Bundle
from lox._data._lanes import Laned
from lox._engine._emit import Content
from lox.store._prng_keys import PRNGKeyWords
from lox.store._structure import Shards

Bounds = tuple[int, int]  # where a part begins and ends


@dataclasses.dataclass
class Cell:
    """Some events of some runs: what this process has of them."""

    events: list[Bundle]  # whose values are `Shards`
    route: Laned
    numbers: np.ndarray | None  # of the events, in the call that brings them; None for a single event


class _Part(NamedTuple):
    """A part of an array: which rows of it, by axis, and where in each row."""

    rows: tuple[Bounds, ...]
    bounds: tuple[Bounds, ...]
    array: np.ndarray


def count(content: Content) -> int:
    """Return how many numbers the events need: all processes say the same."""
    return max((bundle.count() for bundle in content.bundles), default=0)


def cells(content: Content, owner: int) -> tuple[list[Bundle], list[Cell]]:
    """Return events that all processes have, and what this one has of the others; `owner` has what all have."""
    whole: list[Bundle] = []
    mine: dict[Any, Cell] = {}
    assert content.route is not None
    runs = _axes.lanes(content.route.flags)
    for bundle in content.bundles:
        lanes = {n for x in jax.tree.leaves(bundle, is_leaf=_lanes.is_laned) for n in _axes.lanes(x.flags)}
        if not any(_compat.is_split(x) for x in jax.tree.leaves(bundle)) and not lanes <= {*runs}:
            whole.append(jax.tree.map(_compat.own_copy, bundle))  # with lanes inside of runs, which others have too
            continue
        for box, cell in _cells(bundle, content.route, owner):
            # What was logged together stays together.
            mine.setdefault((bundle.single, box), Cell([], cell.route, cell.numbers)).events += cell.events
    return whole, [*mine.values()]


def _cells(bundle: Bundle, route: Laned, owner: int) -> Iterable[tuple[Any, Cell]]:
    """Divide events such that of each division, this process has the same parts of all rows."""
    lead = [] if bundle.single else [EVENT]
    depth = max(len(x.flags) for x in (route, *bundle.values, *bundle.steps.values()))
    rows = [*lead, *_axes.lanes(route.flags)]
    sizes = dict(zip(_axes.lanes(route.flags), route.tree.shape, strict=True)) | dict.fromkeys(lead, bundle.count())

    def axes_of(x: Laned) -> list[Any]:
        return [*lead, *_axes.lanes(_lanes.with_depth(x.flags, depth))]

    def of_rows(x: Laned, box: Sequence[Bounds]) -> Laned:
        axes = axes_of(x)
        if any(axis not in rows for axis in axes):
            raise _errors.in_other_processes(bundle.keys, x.tree.shape)  # lanes inside of runs have their own events
        return Laned(_own_part(x.tree, [box[rows.index(a)] for a in axes]), _lanes.with_depth(x.flags, depth))

    values = {key: _Value(bundle, key, axes_of, rows, sizes, owner) for key in bundle.keys}
    boxes = [part.rows for value in values.values() for of_array in value.parts for part in of_array]
    flags = tuple(n in rows for n in range(depth))
    for box in _boxes(boxes, [sizes[axis] for axis in rows]):
        shards = {key: value.within(box, flags) for key, value in values.items()}
        shards = {key: value for key, value in shards.items() if any(value.blocks)}
        if not shards:
            continue  # other processes have all of it
        leaves, treedefs = zip(*[jax.tree.flatten(x, is_leaf=_lanes.is_laned) for x in shards.values()], strict=True)
        steps = {name: of_rows(x, box) for name, x in bundle.steps.items()}
        valid = None if bundle.valid is None else of_rows(bundle.valid, box)
        values_here = [x for of_key in leaves for x in of_key]
        events = Bundle(values_here, steps, valid, tuple(shards), treedefs, bundle.single, bundle.site)
        runs = Laned(_own_part(route.tree, [box[rows.index(axis)] for axis in _axes.lanes(route.flags)]), route.flags)
        yield box, Cell([events], runs, np.arange(*box[0]) if lead else None)


class _Value:
    """What this process has to write of the value of a key."""

    def __init__(self, bundle: Bundle, key: str, axes_of: Any, rows: list[Any], sizes: dict[Any, int], owner: int):
        value = jax.tree.unflatten(bundle.treedef(key), bundle.leaves(key))
        self._nodes, self._treedef = jax.tree.flatten(value, is_leaf=_is_node)
        arrays = [node.words if isinstance(node, PRNGKeyWords) else node for node in self._nodes]
        self._shapes = tuple(_shape(x.tree, axes_of(x), rows) for x in arrays)
        self.parts = [_parts(x.tree, axes_of(x), rows, sizes, owner) for x in arrays]

    def within(self, box: Sequence[Bounds], flags: tuple[bool, ...]) -> Shards:
        """Return the parts of these rows."""
        blocks, index = [], []
        for node, parts in zip(self._nodes, self.parts, strict=True):
            here = [(part, inside) for part in parts if (inside := _within(box, part.rows)) is not None]
            laned = [Laned(part.array[inside], flags) for part, inside in here]
            words = isinstance(node, PRNGKeyWords)
            blocks.append([PRNGKeyWords(x, node.impl) for x in laned] if words else laned)
            index.append(tuple(part.bounds for part, _ in here))
        return Shards(blocks, self._treedef, self._shapes, tuple(index))


def _is_node(x: Any) -> bool:
    return isinstance(x, PRNGKeyWords | Laned)


def _shape(x: Any, axes: Sequence[Any], rows: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of a row of the whole array."""
    return tuple(size for n, size in enumerate(np.shape(x)) if n >= len(axes) or axes[n] not in rows)


def _parts(x: Any, axes: list[Any], rows: list[Any], sizes: dict[Any, int], owner: int) -> list[_Part]:
    """Return the parts of an array that this process has to write, with the axes of rows in front."""
    named = [*axes, *[None] * (np.ndim(x) - len(axes))]
    present = [axis for axis in rows if axis in axes]
    order = [*[named.index(axis) for axis in present], *[n for n, axis in enumerate(named) if axis not in present]]
    parts = []
    for bounds, array in _compat.own_parts(x, alone=owner):
        of_axis = dict(zip(axes, bounds, strict=False))
        whole = [of_axis.get(axis, (0, sizes[axis])) for axis in rows]
        counts = [stop - start for start, stop in whole]
        item = [array.shape[n] for n in order[len(present) :]]
        spread = [count if axis in present else 1 for axis, count in zip(rows, counts, strict=True)]
        # What is the same for all rows is repeated.
        array = np.broadcast_to(array.transpose(order).reshape((*spread, *item)), (*counts, *item))
        parts.append(_Part(tuple(whole), tuple(bounds[n] for n in order[len(present) :]), array))
    return parts


def _boxes(found: Iterable[tuple[Bounds, ...]], sizes: Sequence[int]) -> list[tuple[Bounds, ...]]:
    """Divide all rows such that each box is inside or outside of each that was found."""
    edges = [{0, size} for size in sizes]
    for box in found:
        for of_axis, bounds in zip(edges, box, strict=True):
            of_axis.update(bounds)
    return [*itertools.product(*[itertools.pairwise(sorted(of_axis)) for of_axis in edges])]


def _within(box: Sequence[Bounds], rows: Sequence[Bounds]) -> tuple[slice, ...] | None:
    """Return where a box is in these rows, if it is in them."""
    if not all(a <= c and d <= b for (c, d), (a, b) in zip(box, rows, strict=True)):
        return None
    return tuple(slice(c - a, d - a) for (c, d), (a, _) in zip(box, rows, strict=True))


def _own_part(x: Any, box: Sequence[Bounds]) -> np.ndarray:
    """Return a part of an array, from this process."""
    for bounds, array in _compat.own_parts(x):
        if (inside := _within(box, bounds)) is not None:
            return array[inside]
    raise _errors.LogTypeError(
        f"the steps or the state of the logger, of shape {x.shape}, are spread over the processes in another way than "
        "the values that are logged with them. Make them the same everywhere, for instance by `jax.device_get` before."
    )


def numbered(cell: Cell, first: int, call: int, step: str) -> Content:
    """Return the content of a packet, with the numbers of the events as a step.

    A number is that of the event, from `first` on, and of the call that brings it: what processes log at different
    lines is never put together.
    """
    count = np.zeros((), np.int64) if cell.numbers is None else cell.numbers.astype(np.int64)
    numbers = Laned((count + first << 32) + call, (False,) * len(cell.route.flags))
    events = [dataclasses.replace(bundle, steps={**bundle.steps, step: numbers}) for bundle in cell.events]
    return Content(events, cell.route, {})
