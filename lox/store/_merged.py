"""A group that is merged from others: its runs, with new numbers, and their rows.

Rows are copied as they are stored. Those of one old segment stay together and in order, in one new segment, and the new
segments that a run has rows in are in the order of its old ones. So readers get the same pieces from both.
"""

import bisect
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lox.store import _group
from lox.store._group import End, Entry, Group, Source
from lox.store._record_batch import Batches
from lox.store._schema import RUN, Schema
from lox.store._segment import SegmentReader, SegmentWriter
from lox.store._writer import _sync

Array = np.ndarray[Any, Any]

_BATCH_BYTES = 4 << 20
_SEGMENT_BYTES = 256 << 20  # unless an old segment is larger

Files = dict[str, int]  # the names and sizes of the files of a group


class Part(NamedTuple):
    """A group to merge: what its runs have added to their numbers, and which of them are kept, by number."""

    group: Group
    first: int
    kept: Array
    files: Files

    def entries(self, id_: str) -> list[Entry]:
        """Return the entries that are kept, as those of another group."""
        kept = [entry for entry in self.group.entries if self.kept[entry.number]]
        return [entry._replace(group=id_, number=self.first + entry.number) for entry in kept]


def filled(group: Group) -> list[tuple[SegmentReader, Schema]]:
    """Return the segments that have a schema: a writer that died at once has left an empty file."""
    return [(segment, segment.schema) for segment in group.segments.values() if segment.schema is not None]


def span_of(group: Group) -> int:
    """Return a number that is larger than those of all runs, also of those that merely share rows with others."""
    span = 1 + max((entry.number for entry in group.entries), default=-1)
    for segment, schema in filled(group):
        runs = segment.read([RUN], segment.all_batches())[0]
        span = max(span, int(runs.max(initial=-schema.runs)) + schema.runs)
    return max([span, *[source.first + source.runs for source in group.sources]])


def any_of(runs: Array, firsts: Array, width: int) -> Array:
    """Tell which rows have any of these runs, given the first run of each row, and how many it has."""
    return np.any([runs[firsts + n] for n in range(width)], axis=0)


def count(part: Part) -> int:
    """Return how many rows are kept."""
    total = 0
    for segment, schema in filled(part.group):
        runs = segment.read([RUN], segment.all_batches())[0]
        total += int(np.count_nonzero(any_of(part.kept, runs, schema.runs)))
    return total


def write(new: Path, parts: list[Part]) -> None:
    """Write the files of a group, and wait until they are on the disk."""
    where = _write_segments(new, parts)
    lines = _source_lines(parts, where)
    lines += [entry.to_line() for part in parts for entry in part.entries(new.name)]
    lines += [line for part in parts for line in _end_lines(part)]
    with open(new / _group.RUNS, "xb") as file:
        file.write(b"".join(lines))
    _group.write_meta(new, time.time(), 0, "closed", None, _group.sizes(new))
    for name in _group.files(new):
        _sync(new / name)
    _sync(new)


def _source_lines(parts: list[Part], where: dict[SegmentReader, str]) -> list[bytes]:
    """Say which groups are replaced, and what of them is where."""
    sources: list[Source] = []
    for group, first, kept, _ in parts:
        runs = len(kept) if kept.any() else 0
        moved = {segment.file.name: where[segment] for segment, _ in filled(group)} if runs else {}
        meta = {name: x for name, x in (group.meta() or {}).items() if name not in ("created", "pid", "sizes")}
        merged, alone = bool(group.sources), len(group.entries) == 1
        sources.append(Source(group.id, first, runs, alone and not merged, merged, moved, meta))
        # Groups that were merged before are told too: a copy of them may turn up again, from a backup for instance, and
        # a reader may have polled them last.
        for old in group.sources:
            segments = {name: moved[now] for name, now in old.segments.items() if now in moved}
            runs_now = old.runs if runs else 0
            sources.append(old._replace(first=first + old.first, runs=runs_now, segments=segments))
    by_meta: dict[str, list[Source]] = {}
    for source in sources:
        by_meta.setdefault(json.dumps(source.meta), []).append(source)
    return [Source.to_line(alike) for alike in by_meta.values()]


def _end_lines(part: Part) -> list[bytes]:
    """Say how runs have ended. The new group is closed; what runs in one that was not have not said, was killed."""
    group = part.group
    closed = (group.meta() or {}).get("status") == "closed"
    killed = End(group.last_change(), None, killed=True)
    runs: dict[End, list[int]] = {}
    for number in np.flatnonzero(part.kept).tolist():
        end = group.ends.get(number) if closed else group.ends.get(number, killed)
        if end is not None:
            runs.setdefault(end, []).append(part.first + number)
    return [end.to_line(numbers) for end, numbers in runs.items()]


# --- rows ---


class _Table(NamedTuple):
    """Old segments of one schema, of different groups, whose rows go into one new segment."""

    schema: Schema
    segments: list[tuple[Part, SegmentReader]]


def _tables(parts: list[Part]) -> list[_Table]:
    """Sort segments by schema, such that those of each group stay in order."""
    tables: list[_Table] = []
    places: dict[Any, list[int]] = {}
    for part in parts:
        start = 0
        for segment, schema in filled(part.group) if part.kept.any() else ():
            same = places.setdefault((schema.steps, schema.valid, schema.keys, schema.runs), [])
            n = bisect.bisect_left(same, start)
            if n == len(same):
                same.append(len(tables))
                tables.append(_Table(dataclasses.replace(schema, checked=True), []))
            tables[same[n]].segments.append((part, segment))
            start = same[n] + 1
    return tables


def _write_segments(new: Path, parts: list[Part]) -> dict[SegmentReader, str]:
    """Copy all rows that are kept; return the names of the files that the rows of each segment are in."""
    where: dict[SegmentReader, str] = {}
    count = 0
    for table in _tables(parts):
        out: _Output | None = None
        try:
            for part, segment in table.segments:
                if out is not None and out.size + segment.end > _SEGMENT_BYTES:
                    out.close()
                    out = None
                if out is None:
                    out = _Output(new / f"p0000-{count:03d}.arrows", table.schema)
                    count += 1
                where[segment] = out.writer.file.name
                _copy(part, segment, out)
            if out is not None:
                out.close()
        finally:
            if out is not None:
                out.writer.abandon()
    return where


def _copy(part: Part, segment: SegmentReader, out: "_Output") -> None:
    step = max(1, _BATCH_BYTES * 8 // out.writer.batches.row_bits)
    for batch, _, rows in segment.all_batches():
        for start in range(0, rows, step):
            runs, *columns = segment.stored(batch, start, min(start + step, rows))
            kept = any_of(part.kept, runs[:, 0], out.writer.batches.schema.runs)
            out.add([(runs + np.int32(part.first))[kept], *[x[kept] for x in columns]])


class _Output:
    """A new segment, with the rows that wait for the next batch."""

    def __init__(self, file: Path, schema: Schema):
        self.writer = SegmentWriter(file, Batches(schema))
        self.waiting: list[list[Array]] = []
        self._bytes = 0

    @property
    def size(self) -> int:
        """The size of the file, waiting rows included."""
        return self.writer.size + self._bytes

    def add(self, columns: list[Array]) -> None:
        """Add rows, given Arrow's values of each column."""
        self.waiting.append(columns)
        self._bytes += sum(x.nbytes for x in columns)
        if self._bytes >= _BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        columns = [np.concatenate(parts) for parts in zip(*self.waiting, strict=True)]
        order = np.argsort(columns[0][:, 0], kind="stable")
        stored = [x[order].reshape(-1) for x in columns]
        as_bits = [np.packbits(x, bitorder="little") if x.dtype == np.bool_ else x for x in stored]
        if len(order):
            self.writer.write_batch(len(order), [x.tobytes() for x in as_bits])
        self.waiting, self._bytes = [], 0

    def close(self) -> None:
        """Write what is waiting, and end the file."""
        if self.waiting:
            self._write()
        self.writer.close()
