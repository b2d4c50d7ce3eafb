"""Values of which each process of a program has a part, and how `lox.load` puts them together."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _arrays, _sites
from lox._data._bundle import Bundle
from lox._data._lanes import Laned
from lox.store._from_rows import Chunk, Chunks
from lox.store._schema import WALL
from lox.store._structure import EVENT_NUMBER, Shards

_Processes = dict[int, Chunks]


def are_shards(chunk: Chunk) -> bool:
    """Tell whether these are parts of events."""
    return isinstance(shards_of(chunk), Shards)


def shards_of(chunk: Chunk) -> Any:
    """Return the value of a chunk."""
    return jax.tree.unflatten(chunk.events.treedefs[0], [x.tree for x in chunk.events.values])


@dataclasses.dataclass
class Behind:
    """Events of a key of which parts are missing: how many, and how many each process has written."""

    key: str
    missing: int
    events: int
    written: dict[int, int]

    def text(self, processes: int) -> str:
        """Say which processes are missing or behind."""
        most = max(self.written.values())
        behind = [f"process {n} has written {count}" for n, count in self.written.items() if count < most]
        nothing = [n for n in range(processes) if n not in self.written]
        if nothing:
            behind.append(
                f"{_processes(nothing)} nothing" if behind else f"{_processes(nothing)} written nothing of it"
            )
        who = ", ".join(behind) or "processes have logged different events"
        return f"{self.missing} of {self.events} events of {self.key!r} are incomplete and left out: {who}."


def _processes(numbers: list[int]) -> str:
    return f"process {numbers[0]} has" if len(numbers) == 1 else f"processes {', '.join(map(str, numbers))} have"


def by_process(entries: Iterable[Any], parts: Iterable[Chunks]) -> _Processes:
    """Return what each process has written."""
    found: _Processes = {}
    for entry, chunks in zip(entries, parts, strict=True):
        process = entry.part.process
        found[process] = joined(found.get(process, {}), chunks)
    return found


def joined(before: Chunks, after: Chunks) -> Chunks:
    """Return the chunks of both."""
    return {key: [*before.get(key, ()), *after.get(key, ())] for key in {**before, **after}}


def merge(of_processes: _Processes) -> tuple[Chunks, list[Behind], _Processes]:
    """Put the parts of one attempt together.

    Also returns what is missing, and the parts of events that are not complete, for another time.
    """
    of_processes = dict(sorted(of_processes.items()))  # the first one knows the order of keys
    whole: Chunks = {}
    behind: list[Behind] = []
    rest: _Processes = {}
    for key in dict.fromkeys(key for chunks in of_processes.values() for key in chunks):
        kinds: dict[Any, list[tuple[int, Chunk]]] = {}
        for process, chunks in of_processes.items():
            for chunk in chunks.get(key, ()):
                shards = shards_of(chunk)
                if not isinstance(shards, Shards):
                    whole.setdefault(key, []).append(chunk)
                elif chunk.events.count():
                    impls = frozenset(filter(None, chunk.impls))
                    kind = shards.treedef, shards.shapes, tuple(sorted(chunk.events.steps)), impls
                    kinds.setdefault(kind, []).append((process, chunk))
        for (treedef, shapes, *_), parts in kinds.items():
            chunk, complete, numbers = _assemble(treedef, shapes, parts)
            if complete.any():
                whole.setdefault(key, []).append(chunk)
            if len(numbers) > complete.sum():
                incomplete = numbers[~complete]
                written = {}
                for process, part in parts:
                    mine = np.isin(_numbers(part), incomplete)
                    written[process] = written.get(process, 0) + part.events.count()
                    if mine.any():
                        rest.setdefault(process, {}).setdefault(key, []).append(_only(part, mine))
                behind.append(Behind(key, len(incomplete), len(numbers), written))
    return whole, behind, rest


def without_numbers(chunks: Chunks) -> Chunks:
    """Return the same parts without the numbers of their events, which every attempt counts from zero."""

    def without(chunk: Chunk) -> Chunk:
        steps = {name: x for name, x in chunk.events.steps.items() if name != EVENT_NUMBER}
        return dataclasses.replace(chunk, events=dataclasses.replace(chunk.events, steps=steps), kind=None)

    return {key: [without(chunk) if are_shards(chunk) else chunk for chunk in parts] for key, parts in chunks.items()}


def _numbers(chunk: Chunk) -> np.ndarray:
    return chunk.events.steps[EVENT_NUMBER].tree


def _only(chunk: Chunk, rows: np.ndarray) -> Chunk:
    wall = None if chunk.wall is None else chunk.wall[rows]
    return dataclasses.replace(chunk, wall=wall, events=jax.tree.map(lambda x: x[rows], chunk.events))


def _assemble(treedef: Any, shapes: Any, parts: list[tuple[int, Chunk]]) -> tuple[Chunk, np.ndarray, np.ndarray]:
    """Return the complete events, which those are, and the numbers of all."""
    first = parts[0][1]
    numbers = np.unique(np.concatenate([_numbers(chunk) for _, chunk in parts]))
    values = [_Array(len(numbers), shape) for shape in shapes]
    steps = {name: _Array(len(numbers), ()) for name in first.events.steps if name != EVENT_NUMBER}
    wall = np.full(len(numbers), np.nan)
    for _, chunk in parts:
        rows = np.searchsorted(numbers, _numbers(chunk))
        shards, impls = shards_of(chunk), iter(chunk.impls)
        for value, blocks, index in zip(values, shards.blocks, shards.index, strict=True):
            for block, bounds in zip(blocks, index, strict=True):
                if block.shape[1:] != tuple(stop - start for start, stop in bounds):
                    text = f"{first.events.site}: a part of {first.events.keys[0]!r} has the wrong shape."
                    raise _errors.StoreError(text)
                value.put(rows, bounds, block)
                value.impl = next(impls)
        for name, step in steps.items():
            step.put(rows, (), chunk.events.steps[name].tree, compare=name != WALL.name)
        if chunk.wall is not None:
            wall[rows] = np.where(np.isnan(wall[rows]), chunk.wall, wall[rows])  # of the first process
    differ = np.any([step.differ for step in steps.values()], 0) if steps else np.zeros(len(numbers), bool)
    if differ.any():
        _sites.warn(
            f"processes have logged {first.events.keys[0]!r} with different steps, so that it is not known which parts "
            f"belong together: {differ.sum()} events are left out."
        )
    complete = np.all([x.count == math.prod(x.shape) for x in values], 0) & ~differ
    order = np.flatnonzero(complete)[np.lexsort((numbers[complete], _in_time(numbers, wall)[complete]))]
    events = Bundle(
        [Laned(x.whole()[order]) for x in values],
        {name: Laned(x.whole()[order]) for name, x in steps.items()},
        *(None, first.events.keys, (treedef,), False, first.events.site),
    )
    times = None if first.wall is None else wall[order]
    chunk = Chunk(times, events, tuple(x.impl for x in values), first.order)
    return chunk, complete[~differ], numbers[~differ]


def _in_time(numbers: np.ndarray, wall: np.ndarray) -> np.ndarray:
    """Return times to put events in order: those of one call are in order of their numbers, whatever clocks say.

    The numbers of different calls say nothing about their order.
    """
    wall = wall.copy()
    for call in np.unique(numbers & _CALL):
        mine = np.flatnonzero(numbers & _CALL == call)  # in order: numbers are sorted
        wall[mine] = np.maximum.accumulate(wall[mine])
    return wall


_CALL = (1 << 32) - 1  # the bits of a number that stand for the call


class _Array:
    """An array of events that is put together from parts."""

    def __init__(self, events: int, shape: tuple[int, ...]):
        self.shape = shape
        self.impl: str | None = None
        self.count = np.zeros(events, int)  # how many elements of each event there are
        self.differ = np.zeros(events, bool)  # whether parts that should be the same are not
        self._array: np.ndarray | None = None

    def put(self, rows: np.ndarray, bounds: Any, part: np.ndarray, compare: bool = False) -> None:
        """Put a part of these events in its place."""
        if self._array is None:
            self._array = np.zeros((len(self.count), *self.shape), part.dtype)
        elif part.dtype != self._array.dtype:
            self._array = self._array.astype(_arrays.promote(part.dtype, self._array.dtype))
        if compare:
            old, again = self._array[rows], self.count[rows] > 0
            self.differ[rows] |= again & (old != part) & ((old == old) | (part == part))
        self._array[(rows, *[slice(*bound) for bound in bounds])] = part
        self.count[rows] += math.prod(stop - start for start, stop in bounds)

    def whole(self) -> np.ndarray:
        """Return what there is, zero where nothing is."""
        return np.zeros((len(self.count), *self.shape)) if self._array is None else self._array


def check_processes(entries: Iterable[Any], name: str, behind: Iterable[Behind]) -> list[str]:
    """Describe which processes of an attempt at a run are missing or behind."""
    parts = [entry.part for entry in entries if entry.part is not None]
    if not parts:
        return []
    processes = parts[0].processes
    texts = [f"run {name!r}: {late.text(processes)}" for late in behind]
    missing = sorted({*range(processes)} - {part.process for part in parts})
    if missing and not texts:
        texts.append(
            f"run {name!r}: {_processes(missing)} written nothing here, of {processes}: what only they had is missing."
        )
    return texts
