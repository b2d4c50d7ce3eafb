"""`Reader` reads the runs of a directory and follows new events; `load` and `runs` use one just once."""

import datetime
import fnmatch
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lox import _errors
from lox._data import _sites
from lox._data._logdict import logdict
from lox._engine import _selection
from lox.store import _from_rows, _index, _open, _shards
from lox.store._catalog import Catalog, Record
from lox.store._from_rows import Chunks, Parts, Select
from lox.store._group import Entry, Group
from lox.store._prng_keys import words_of
from lox.store._schema import RUN, WALL, Schema
from lox.store._segment import DamagedRowsError, SegmentReader
from lox.store._table import Activity, Run, RunTable, Where, flat_config
from lox.store.names import base_names

_FEW = 1 / 64  # of the runs of a group are read one by one


class Runs(Mapping[str, logdict]):
    """Runs by name; each is loaded when it is accessed.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> for seed in (0, 1):
    ...     lox.save({"loss": np.float32(seed)}, directory, key=jax.random.key(seed))
    >>> runs = lox.load(directory)
    >>> runs
    <2 runs: '0' and '1'>
    >>> print(runs["1"], runs.stack())
    {'loss': [1.0]} {'loss': [[0.0], [1.0]]}
    """

    def __init__(self, reader: "Reader", names: Sequence[str], argnames: tuple[str, ...] | None):
        self._reader, self._names, self._argnames = reader, dict.fromkeys(names), argnames
        self._select = _selector(argnames)

    def __getitem__(self, name: str) -> logdict:
        if name not in self._names:
            raise KeyError(name)
        self._reader._prepare([name], self._argnames)
        return self._reader._logs(name, self._select)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def table(self) -> RunTable:
        """The runs without their events: configs, times, states."""
        return RunTable([self._reader._info(self._reader._catalog.records[name]) for name in self._names])

    @property
    def logged(self) -> list[str]:
        """The keys that any of the runs has logged; no event is read for it."""
        keys = self._reader.keys(self._names)
        return keys if self._argnames is None else [key for key in keys if self._select(key)]

    def only(self, argnames: str | Iterable[str] | None = None, names: Iterable[str] | None = None) -> "Runs":
        """Return the same runs, or some of them, with only some keys."""
        chosen = self._argnames if argnames is None else _selection.names("argnames", argnames)
        return Runs(self._reader, list(self._names if names is None else names), chosen)

    # Loads all runs at once: one by one, each would read every file.

    def items(self) -> Any:
        """Return names and logs, all loaded."""
        by_run = self._loaded()
        typed = self._reader._typed
        return {name: _from_rows.to_logdict(chunks, typed) for name, chunks in by_run.items()}.items()

    def values(self) -> Any:
        """Return the logs, all loaded."""
        return dict(self.items()).values()

    @property
    def configs(self) -> dict[str, list[Any]]:
        """The hyper-parameters of all runs, in order: a list for each name, `configs["lr"]`; None if a run has none."""
        flat = [flat_config(self._reader._info(self._reader._catalog.records[name]).config) for name in self._names]
        return {key: [config.get(key) for config in flat] for key in dict.fromkeys(k for f in flat for k in f)}

    def stack(self) -> logdict:
        """Stack all runs in one logdict with a lane axis in front, as `vmap(spool(f))` returns them.

        Where some runs have more events than others, `logs.valid` says which events are real.
        """
        return self._stack()

    def _stack(self, wide: bool = False) -> logdict:
        return _from_rows.stack(list(self._loaded().values()), self._reader._typed, wide)

    def _loaded(self) -> dict[str, Chunks]:
        self._reader._prepare(list(self._names), self._argnames)
        return self._reader._chunks_of_all(list(self._names), self._select)

    def __repr__(self) -> str:
        names = [repr(name) for name in self._names]
        if len(names) > 8:
            names = [*names[:4], "...", *names[-2:]]
        listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
        return f"<{len(self)} runs: {listed}>"


class _Polled(NamedTuple):
    """What was polled of a segment: so many batches, which are all rows up to a time."""

    batches: int
    wall: float


class KeyInfo(NamedTuple):
    """What is known of a key: its steps, its structure as JSON, and the number of rows that have it."""

    steps: tuple[str, ...]
    structure: str
    rows: int


class Cursor:
    """How far the events of a directory were polled: `reader.poll(argnames, since=cursor)`.

    >>> import tempfile, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> lox.save({"loss": np.float32(1), "accuracy": np.float32(0.5)}, directory)
    >>> reader, losses, accuracies = lox.store.Reader(directory), lox.store.Cursor(), lox.store.Cursor()
    >>> print(*reader.poll("loss", since=losses).values())
    {'loss': [1.0]}
    >>> reader.poll("loss", since=losses)
    {}
    >>> print(*reader.poll("accuracy", since=accuracies).values())
    {'accuracy': [0.5]}

    A reader has one of its own. With others, several keys are followed independently of each other by one reader, which
    looks through the directory once for all of them.
    """

    def __init__(self) -> None:
        self._polled: dict[tuple[str, str], _Polled] = {}  # by group and file
        self._incomplete: dict[Any, dict[int, Chunks]] = {}  # by attempt and process: parts of events

    def _of(self, segment: SegmentReader) -> _Polled:
        return self._polled.get((segment.file.parent.name, segment.file.name), _Polled(0, -math.inf))


class Reader:
    """The runs of a directory, while they are being written by this or other processes.

    >>> import tempfile, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> writer, reader = lox.store.Writer(directory), lox.store.Reader(directory)
    >>> run = writer.open_run("a")
    >>> writer.append(run, {"loss": np.float32(1)})
    >>> writer.flush()
    >>> print(reader.poll()["a"])
    {'loss': [1.0]}
    >>> reader.poll()
    {}
    >>> writer.close()

    It remembers what it has read: `poll` reads only new events, and loading a second run does not search the files
    again. It keeps no file open. A directory that does not exist yet has no runs. Rows that do not have the checksum
    that they were written with are an error, or are left out with a warning if `damaged="skip"`.
    """

    def __init__(self, path: str | os.PathLike[str], damaged: str = "error"):
        if damaged not in ("error", "skip"):
            raise _errors.OptionError(f"`damaged` is {damaged!r}; choose 'error' or 'skip'.")
        self.path = Path(path).absolute()
        self._skips, self._wall, self._attempts = damaged == "skip", False, "newest"
        self._typed = True  # whether PRNG keys are JAX's, which start a backend, and not their words
        self._catalog = Catalog(self.path)
        self._cursor = Cursor()
        self._activity: dict[str, dict[int, Activity]] = {}  # by group
        self._counted: dict[str, dict[SegmentReader, int]] = {}  # by group: batches that are in its activity
        self._fates: dict[str, str] = {}  # of groups
        self._warned: set[str] = set()
        self._scanned: set[str] = set()  # groups, for loading

    # --- runs ---

    def refresh(self) -> None:
        """Look for new runs and events."""
        self._catalog.refresh()
        self._whole(list(self._catalog.records), lambda: [group.scan() for group in self._catalog.groups.values()])
        for group in self._catalog.groups.values():
            if group.id in self._activity and self._is_out_of_date(group):
                try:
                    self._count(group)
                except _errors.RunNotFoundError:  # overwritten or merged meanwhile: whoever asks finds it elsewhere
                    del self._activity[group.id], self._counted[group.id], self._fates[group.id]

    def _is_out_of_date(self, group: Group) -> bool:
        """Tell whether what is known of the events and the end of a group may be old."""
        counted = self._counted[group.id]
        grown = any(counted.get(segment, 0) != len(segment.rows) for segment in group.segments.values())
        return grown or self._fates[group.id] == "running"

    def runs(self) -> RunTable:
        """Return the runs found so far, oldest first."""
        return RunTable([self._info(record) for record in self._catalog.records.values()])

    def _info(self, record: Record) -> Run:
        last, first = record.entries[-1], record.entries[0]
        opened = datetime.datetime.fromtimestamp(first.opened, datetime.UTC)
        config, changes = record.history()
        looks = (self._look_at, self._comparison)
        return Run(record.name, last.key_data, last.key_impl, config, opened, len(record.attempts()), changes, *looks)

    def _look_at(self, name: str) -> tuple[Activity, str]:
        """Return how many events a run has and when, and its state."""
        return self._whole([name], lambda: self._looked_at(name))

    def _looked_at(self, name: str) -> tuple[Activity, str]:
        attempts = self._catalog.records[name].attempts()
        by_attempt = [[self._activity_in(self._catalog.groups[e.group]).get(e.number) for e in a] for a in attempts]
        by_attempt = [[part for part in parts if part is not None] for parts in by_attempt]
        found = [part for parts in by_attempt for part in parts]
        split = sum(len(frozenset[int]().union(*[part.split for part in parts])) for parts in by_attempt)
        whole = Activity(
            sum(part.events for part in found) + split,
            min((part.first for part in found), default=math.nan),
            max((part.last for part in found), default=math.nan),
        )
        last = [(self._catalog.groups[e.group], e.number) for e in attempts[-1]]
        states = {group.state(number, self._fates[group.id]) for group, number in last}
        return whole, next(state for state in ("running", "failed", "killed", "finished") if state in states)

    def _activity_in(self, group: Group) -> dict[int, Activity]:
        if group.id not in self._activity:
            group.scan()
            self._count(group)
        return self._activity[group.id]

    def _count(self, group: Group) -> None:
        """Count the events of a group that are new since it was counted."""
        before, counted = self._activity.get(group.id, {}), self._counted.get(group.id, {})
        ends = {segment: len(segment.rows) for segment in group.segments.values()}
        self._activity[group.id] = self._intact(_from_rows.activity, group, before, counted)
        self._counted[group.id], self._fates[group.id] = ends, group.fate()

    def load(
        self,
        name: str,
        argnames: str | Iterable[str] | None = None,
        wall: bool | None = None,
        attempts: str | None = None,
    ) -> logdict:
        """Return the events of a run found so far; every key has an event axis.

        Arguments are those of `lox.load`. With `attempts="replaced"`, it returns what later attempts have computed
        again, and `lox.load` leaves out.
        """
        if name not in self._catalog.records:
            raise self._no_run(name)
        before = self._wall, self._attempts
        self._wall, self._attempts = before[0] if wall is None else wall, attempts or before[1]
        try:
            return self._logs(name, _selector(argnames))
        finally:
            self._wall, self._attempts = before

    def identity(self, name: str) -> tuple[Any, ...]:
        """Return what tells the attempts at a run apart from those at others that had its name; empty without a run."""
        record = self._catalog.records.get(name)
        return () if record is None else tuple((entry.opened, entry.part) for entry in record.entries)

    def has_attempts(self, name: str) -> bool:
        """Tell whether there was more than one attempt at a run."""
        return len(self._catalog.records[name].attempts()) > 1

    def resumed(self, name: str) -> bool:
        """Tell whether a later attempt at a run may have replaced events of an earlier one."""
        return any(entry.resumed is not None for entry in self._catalog.records[name].entries)

    def logged(self) -> dict[str, "KeyInfo"]:
        """Return what is known of the keys found so far without reading their events."""
        segments = [segment for group in self._catalog.groups.values() for segment in group.segments.values()]
        rows: dict[Schema, int] = {}  # runs of one program share it
        for segment in segments:
            if segment.schema is not None:
                rows[segment.schema] = rows.get(segment.schema, 0) + sum(segment.rows)
        found: dict[str, KeyInfo] = {}
        for schema, count in rows.items():
            steps = tuple(step.name for step in schema.steps)
            for key in schema.keys:
                old = found.get(key.name, KeyInfo((), key.structure, 0))
                known = tuple(dict.fromkeys([*old.steps, *steps])) if old.steps != steps else steps
                found[key.name] = KeyInfo(known, old.structure, old.rows + count)
        return found

    def keys(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the keys of the runs found so far, or of those with these names, without reading any event."""
        names = list(self._catalog.records if names is None else names)
        self._whole(names, lambda: [group.scan() for group in self._groups_of(names)])
        return self._known_keys(names)

    def skipped(self) -> dict[str, int]:
        """Return the files that end with bytes that cannot be read, or not yet, and the number of these bytes."""
        segments = [s for group in self._catalog.groups.values() for s in group.segments.values()]
        return {str(segment.file): segment.leftover for segment in segments if segment.leftover}

    def poll(
        self,
        argnames: str | Iterable[str] | None = None,
        since: Cursor | None = None,
        wall: bool = False,
        refresh: bool = True,
    ) -> dict[str, logdict]:
        """Return the events since the last poll, for each run that has some.

        The first poll returns everything. Events of one key come in order, unless its shape, dtype or steps change
        between two polls: then some events logged before the last poll may come with the next one. New events of a key
        that do not fit into one array are kept apart, as by `lox.load`.

        Args:
            argnames: Only these keys, names or globs. Events of others count as polled.
            since: From where on, and what is moved to where this poll ends; by default the reader's own cursor.
            wall: Whether to add the time of each event, as by `lox.load`.
            refresh: Whether to look for new events, or to return those found by the last `refresh`.
        """
        if refresh:
            self.refresh()
        cursor = self._cursor if since is None else since
        select = _selector(argnames)
        by_entry: dict[tuple[str, int], Chunks] = {}
        polled: dict[tuple[str, str], _Polled] = {}
        for group, wanted in self._by_group(self._catalog.records.values()).items():
            if all(cursor._of(segment).batches == len(segment.rows) for segment in group.segments.values()):
                continue
            try:
                by_run, ends = self._intact(self._new_in, group, select, cursor, wall)
            except _errors.RunNotFoundError:
                continue  # overwritten or merged meanwhile: the next poll finds it elsewhere
            by_entry |= {(group.id, number): by_run[number] for number in wanted if number in by_run}
            polled |= ends
        logs, incomplete = {}, {}
        for name, record in self._catalog.records.items():
            new: Chunks = {}
            for attempt in record.attempts():
                found = [by_entry.get((e.group, e.number), {}) for e in attempt]
                if attempt[0].part is None:
                    _merge(new, found[0])
                    continue
                parts = _shards.by_process(attempt, found)
                for process, before in cursor._incomplete.get(attempt[0].attempt, {}).items():
                    parts[process] = _shards.joined(before, parts.get(process, {}))
                whole, _, incomplete[attempt[0].attempt] = _shards.merge(parts)
                _merge(new, whole)
            with_events = {key: [c for c in chunks if c.events.count()] for key, chunks in new.items()}
            with_events = {key: chunks for key, chunks in with_events.items() if chunks}
            if with_events:
                logs[name] = _from_rows.to_logdict(with_events, self._typed)
        cursor._polled.update(polled)  # only now, so that one may poll again after an error
        cursor._incomplete.update(incomplete)
        return logs

    def _new_in(
        self, group: Group, select: Select, cursor: Cursor, wall_step: bool
    ) -> tuple[dict[int, Chunks], dict[tuple[str, str], _Polled]]:
        """Return the events of a group since the last poll, and up to where that is."""
        new = {segment: self._new_parts(group, segment, cursor) for segment in group.segments.values()}
        ends = {}
        for segment, parts in new.items():
            batches, wall = cursor._of(segment)
            if parts:
                wall = max(wall, float(segment.read([WALL], parts)[0].max(initial=-math.inf)))
            ends[group.id, segment.file.name] = _Polled(max(batches, len(segment.rows)), wall)
        return _from_rows.of_all_runs(group, select, new.__getitem__, wall_step or self._wall), ends

    def _new_parts(self, group: Group, segment: SegmentReader, cursor: Cursor) -> Parts:
        """Return the rows since the last poll.

        What was polled of a group before it was merged into this one is known by its time: of each segment, batches
        come in order of time, and all rows of one time are in one batch.
        """
        batches = cursor._of(segment).batches
        parts = segment.all_batches(batches)
        known = [
            (source, cursor._polled[source.group, old])
            for source in group.sources
            if not batches
            for old, name in source.segments.items()
            if name == segment.file.name and (source.group, old) in cursor._polled
        ]
        if not known or not parts:
            return parts
        until = np.full(max(source.first + source.runs for source in group.sources), -math.inf)
        for source, polled in known:
            numbers = slice(source.first, source.first + source.runs)
            until[numbers] = np.maximum(until[numbers], polled.wall)
        new = []
        for batch, _, rows in parts:
            runs, wall = segment.read([RUN, WALL], [(batch, 0, rows)])
            edges = np.flatnonzero(np.diff(np.r_[False, wall > until[runs], False]))
            new += [(batch, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        return new

    # --- for load ---

    def _whole(self, names: Sequence[str], read: Callable[[], Any]) -> Any:
        """Return `read()`; again if the groups of these runs were merged into others or overwritten meanwhile."""
        while True:
            groups = self._groups_of(names)
            try:
                result = read()
            except _errors.RunNotFoundError:
                if all(group.is_there() for group in groups) or not self._find_again(names, groups):
                    raise
                continue
            if all(group.is_there() for group in groups) or not self._find_again(names, groups):
                return result

    def _groups_of(self, names: Sequence[str]) -> list[Group]:
        missing = next((name for name in names if name not in self._catalog.records), None)
        if missing is not None:
            raise self._no_run(missing)
        return list(self._by_group([self._catalog.records[name] for name in names]))

    def _find_again(self, names: Sequence[str], groups: list[Group]) -> bool:
        """Look for runs in other groups than these; return whether they are in others."""
        self._catalog.refresh()
        found = self._groups_of(names)
        for group in found:
            group.scan()
        return found != groups

    def _by_group(self, records: Iterable[Record]) -> dict[Group, dict[int, str]]:
        """Return the groups of these runs, oldest first, with the numbers and names of the runs in them."""
        by_group: dict[str, dict[int, str]] = {}
        for record in records:
            for entry in record.entries:
                by_group.setdefault(entry.group, {})[entry.number] = record.name
        return {self._catalog.groups[id_]: by_group[id_] for id_ in sorted(by_group)}

    def _logs(self, name: str, select: Select) -> logdict:
        chunks = self._whole([name], lambda: self._chunks_of(self._catalog.records[name], select))
        return _from_rows.to_logdict(chunks, self._typed)

    def _chunks_of(self, record: Record, select: Select) -> Chunks:
        """Return the events of a run; of each step, those of the newest attempt that computed it."""
        chunks: Chunks = {}
        attempts = record.attempts()
        for number, entries in enumerate(attempts):
            parts = []
            for entry in entries:
                part = self._read(entry, select, timed=any(e.resumed or e.part for e in record.entries))
                gone: Chunks = {}
                for later, *_ in attempts[number + 1 :] if self._attempts != "all" else ():
                    if self._attempts == "replaced":
                        for key, replaced in self._without_replaced(part, entry, later, replaced=True).items():
                            gone.setdefault(key, []).extend(replaced)
                    part = self._without_replaced(part, entry, later)
                parts.append(gone if self._attempts == "replaced" else part)
            part = self._together(record.name, entries, parts)
            _merge(chunks, part if self._attempts == "newest" else _from_rows.with_step(part, "attempt", number))
        return chunks

    def _together(self, name: str, entries: list[Entry], parts: list[Chunks]) -> Chunks:
        """Put together what the processes of an attempt have written; warn of those that are missing or behind."""
        if entries[0].part is None:
            return parts[0]
        whole, behind, _ = _shards.merge(_shards.by_process(entries, parts))
        for text in _shards.check_processes(entries, name, behind):
            self._warn_once(text)
        return whole

    def _read(self, entry: Entry, select: Select, timed: bool) -> Chunks:
        group = self._catalog.groups[entry.group]
        return self._intact(_from_rows.of_run, group, entry.number, select, self._wall, timed)

    def _without_replaced(self, chunks: Chunks, entry: Entry, later: Entry, replaced: bool = False) -> Chunks:
        if later.resumed is None:
            return {} if replaced else chunks
        group = self._catalog.groups[entry.group]
        since = self._intact(_from_rows.replaced_since, group, entry.number, *later.resumed)
        return _from_rows.kept(chunks, *later.resumed, since, replaced)

    def _comparison(self, name: str) -> str | None:
        """Compare what attempts of a run have computed again with what they replace, bit by bit."""
        return self._whole([name], lambda: self._compared(name))

    def _compared(self, name: str) -> str | None:
        entries = self._catalog.records[name].entries
        if not any(entry.resumed for entry in entries):
            return None
        everything = lambda key: True  # noqa: E731
        for entry in entries:
            self._catalog.groups[entry.group].scan()
        attempts = self._catalog.records[name].attempts()
        read = lambda entry: _shards.without_numbers(self._read(entry, everything, timed=True))  # noqa: E731
        parts = [list(map(read, entries)) for entries in attempts]
        found: list[tuple[Any, str]] = []
        compared = False
        for n, (later, *_) in enumerate(attempts):
            if later.resumed is None:
                continue
            step = later.resumed[0]
            of_process = {_process(entry): part for entry, part in zip(attempts[n], parts[n], strict=True)}
            for m in range(n):
                for entry, old in zip(attempts[m], parts[m], strict=True):
                    old = self._without_replaced(old, entry, later, replaced=True)
                    for between, *_ in attempts[m + 1 : n]:
                        old = self._without_replaced(old, entry, between)
                    new = of_process.get(_process(entry), {})
                    for key in old.keys() & new.keys():
                        both, at = _from_rows.first_difference(old[key], new[key], step)
                        compared |= both
                        if at is not None:
                            found.append((at, f"differs from {step}={at} on ({key!r})"))
        same = "resumed exactly" if compared else "resumed, no step computed twice"
        return min(found)[1] if found else same

    def _chunks_of_all(self, names: list[str], select: Select) -> dict[str, Chunks]:
        return self._whole(names, lambda: self._all_chunks(names, select))

    def _all_chunks(self, names: list[str], select: Select) -> dict[str, Chunks]:
        records = [self._catalog.records[name] for name in names]
        if self._attempts == "all" or any(entry.resumed for record in records for entry in record.entries):
            return {record.name: self._chunks_of(record, select) for record in records}
        chunks: dict[str, Chunks] = {name: {} for name in names}
        by_entry: dict[tuple[str, int], Chunks] = {}
        for group, wanted in self._by_group(records).items():
            if len(wanted) == 1 or len(wanted) <= _FEW * len(group.entries):
                timed = any(entry.part is not None for entry in group.entries)
                for number in wanted:
                    args = group, number, select, self._wall, timed
                    by_entry[group.id, number] = self._intact(_from_rows.of_run, *args)
            else:
                for number, run_chunks in self._intact(_from_rows.of_all_runs, group, select, None, self._wall).items():
                    by_entry[group.id, number] = run_chunks
        for record in records:
            for entries in record.attempts():
                parts = [by_entry.get((entry.group, entry.number), {}) for entry in entries]
                _merge(chunks[record.name], self._together(record.name, entries, parts))
        return chunks

    def _intact(self, read: Callable[..., Any], *args: Any) -> Any:
        """Call `read(*args)`, again without damaged rows if they are to be skipped."""
        while True:
            try:
                return read(*args)
            except DamagedRowsError as damage:
                text = str(damage) + self._runs_behind(damage)
                if not self._skips:
                    raise _errors.StoreError(
                        f'{text}\n`lox.load(..., damaged="skip")` loads everything else; '
                        f"lox.store.repair({str(self.path)!r}) takes it out."
                    ) from None
                segment, batch = damage.segment, damage.batch
                segment.bad[batch] = damage
                if text not in self._warned:
                    self._warned.add(text)
                    rows = "What was there" if batch in segment.gaps else f"{segment.rows[batch]} rows"
                    _sites.warn(f"{text}\n{rows} {'was' if batch in segment.gaps else 'were'} left out.")

    def _runs_behind(self, damage: DamagedRowsError) -> str:
        try:
            numbers = damage.segment.runs_in(damage.batch)
        except DamagedRowsError:
            return ""  # which runs it concerns is what was damaged
        group = damage.segment.file.parent.name
        of_group = {e.number: r.name for r in self._catalog.records.values() for e in r.entries if e.group == group}
        named = [of_group[number] for number in numbers if number in of_group]
        return f"\nIt has events of {_errors.listing(named[:8])}." if named else ""

    def _no_run(self, name: str) -> _errors.RunNotFoundError:
        records = self._catalog.records
        which = "runs" if len(records) <= 8 else "newest"
        return _errors.RunNotFoundError(
            f"there is no run {name!r} in {str(self.path)!r}. The {which} are {_errors.listing(list(records)[-8:])}."
        )

    def _open_for_loading(
        self, may_be_empty: bool = False, bases: list[str] | None = None, name: str | None = None
    ) -> None:
        """Look for new runs, or those with some bases or a name; raise an error if the directory cannot be read."""
        _open.flush(self.path)
        if not self.path.exists():
            raise _errors.RunNotFoundError(
                f"there is no directory {str(self.path)!r}. Check the path; loggers and `lox.save` make it."
            )
        if not self.path.is_dir():
            raise _errors.StoreError(f"{str(self.path)!r} is a file: give the directory that lox wrote to.")
        if bases is not None or name is not None:
            self._catalog.look_up(bases or (), () if name is None else [name])
            found = [self._catalog.attempts.get(base) for base in bases or ()]
            if all(found) and (name is None or name in self._catalog.records):
                return
        self._catalog.refresh()
        if not self._catalog.groups and not may_be_empty:
            raise _errors.RunNotFoundError(
                f"the directory {str(self.path)!r} has no runs: lox has written nothing to it. Check the path."
            )

    def _chosen(self, where: Where | None) -> list[str]:
        """Return the names of the runs found so far whose config has these values; at least one, or it is an error."""
        if not self._catalog.records:
            raise _errors.RunNotFoundError(f"the directory {str(self.path)!r} has no runs yet.")
        if where is None:
            return list(self._catalog.records)
        chosen = [run.name for run in self.runs().where(where)]
        if not chosen:
            raise _errors.RunNotFoundError(
                f"no run in {str(self.path)!r} has {where!r} in its config. `lox.runs(path)` shows what they have."
            )
        return chosen

    def _prepare(self, names: Sequence[str], argnames: tuple[str, ...] | None) -> None:
        """Scan the files of these runs, and warn of damage and of names of keys that none of them has."""
        self._warn_of(self._whole(names, lambda: self._scan(self._groups_of(names))))
        self._check_names(names, argnames)

    def _scan(self, groups: Iterable[Group]) -> list[str]:
        problems: dict[Path, str] = {}
        for group in groups:
            if group.id in self._scanned:
                continue
            self._scanned.add(group.id)
            group.scan()
            problems |= group.damage()
            for segment in group.segments.values():
                if segment.leftover and not (segment.damage is None and group.is_alive()):
                    what = segment.damage or "the last batch is incomplete"
                    problems[segment.file] = f"{str(segment.file)!r}: {segment.leftover} bytes at its end ({what})"
        return list(problems.values())

    def _warn_of(self, problems: Iterable[str]) -> None:
        problems = [p for p in problems if p not in self._warned]
        self._warned.update(problems)
        if problems:
            _sites.warn(
                f"{len(problems)} damaged files were skipped in part:\n  "
                + "\n  ".join(problems)
                + f"\nEverything intact was loaded. lox.store.repair({str(self.path)!r}) removes the rest."
            )

    def _known_keys(self, names: Iterable[str]) -> list[str]:
        by_group = self._by_group([self._catalog.records[name] for name in names])
        runs = [(group, number) for group, numbers in by_group.items() for number in numbers]
        segments = dict.fromkeys(segment for group, number in runs for segment in group.segments_of(number)[0])
        return list(dict.fromkeys(key.name for segment in segments if segment.schema for key in segment.schema.keys))

    def _check_names(self, names: Sequence[str], argnames: tuple[str, ...] | None) -> None:
        """Warn of names that match no key in the files of these runs."""
        if argnames is not None:
            text = _selection.unmatched("argnames", argnames, self._known_keys(names))
            if text:
                self._warn_once(text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _sites.warn(text)


def _process(entry: Entry) -> int:
    return 0 if entry.part is None else entry.part.process


def _merge(into: Chunks, chunks: Chunks) -> None:
    for key, parts in sorted(chunks.items(), key=lambda item: item[1][0].order):
        into.setdefault(key, []).extend(_from_rows.in_order(kind) for kind in _from_rows.apart(parts))


def _selector(argnames: str | Iterable[str] | None) -> Select:
    """Return a predicate for the keys to load: names or globs, as for `spool`; None is all."""
    if argnames is None:
        return lambda key: True
    patterns = _selection.names("argnames", argnames)
    # Cached, as a thousand runs have the same keys.
    return functools.cache(lambda key: any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns))


def _warn_of_choice(several: list[list[str]]) -> None:
    if several:
        more = f", and so have {len(several) - 1} others" if len(several) > 1 else ""
        _sites.warn(
            f"a PRNG key has {len(several[0])} runs, {_errors.listing(several[0][:8])}{more}: the newest is loaded. "
            f'To choose, give the name, {several[0][0]!r}, or values of the config: `where={{"lr": 0.1}}`.'
        )


# --- what users need ---


def load(
    path: str | os.PathLike[str],
    key: Any = None,
    argnames: str | Iterable[str] | None = None,
    damaged: str = "error",
    where: Where | None = None,
    wall: bool = False,
    attempts: str = "newest",
) -> Any:
    """Read logs from a directory that a `SaveLogger` or `lox.save` wrote to.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory, prng_key = tempfile.mkdtemp(), jax.random.key(42)
    >>> for i in range(3):
    ...     lox.save(lox.logdict({"loss": np.float32(i)}, steps={"step": {"loss": i}}), directory, prng_key)
    >>> logs = lox.load(directory, prng_key)
    >>> print(logs, logs.step)
    {'loss': [0.0, 1.0, 2.0]} {'loss': [0, 1, 2]}

    Args:
        path: The directory.
        key: The PRNG key of a run, whose newest attempt is loaded. An array of PRNG keys loads several runs, with a
            lane axis in front. The name of a run, such as `"42.1"`, is accepted too.
        argnames: Load only these keys of the logs; globs such as `"train/*"` are allowed. Other keys are not read.
        damaged: What to do about rows that do not have the checksum that they were written with: `"error"` raises a
            `StoreError` that names them, `"skip"` leaves them out, with a warning.
        where: Load only runs with these values in their config: a dict, `{"lr": 0.1}`; or a function of a
            `lox.store.Run`.
        wall: Whether to add the time of each event, in seconds since 1970, as a step called `wall`.
        attempts: Of a run that was resumed, `"newest"` gives each step as it was computed last; `"all"` gives
            everything, with the number of the attempt as a step called `attempt`.

    Returns:
        A `logdict` of NumPy arrays in which every key has an event axis. Without `key`, if the directory has several
        runs: a mapping from their names to such logdicts, each loaded when it is accessed; its `stack()` makes one
        logdict with a lane axis of them. Events of a key that do not fit into one array, for instance of one line under
        a `vmap` of 4 and one of 6, are kept apart as `"h@4"` and `"h@6"`, with a warning; `argnames="h"` selects all of
        them.

    Raises:
        RunNotFoundError: The directory or the run does not exist.
        StoreError: The directory cannot be read.
    """
    argnames = None if argnames is None else _selection.names("argnames", argnames)
    reader = Reader(path, damaged)
    if attempts not in ("newest", "all"):
        raise _errors.OptionError(f"`attempts` is {attempts!r}; choose 'newest' or 'all'.")
    reader._wall, reader._attempts = wall, attempts
    name, bases = (key if isinstance(key, str) else None), None
    single = name is not None
    if key is not None and name is None:
        data, impl = words_of(key)
        bases, single = base_names(data, impl), data.ndim == 1
        if len(set(bases)) < len(bases):
            raise _errors.OptionError("`key` has the same PRNG key twice.")
    if where is None:
        reader._open_for_loading(bases=bases, name=name)
    else:
        reader._open_for_loading()
    records = dict.fromkeys(reader._chosen(where))
    if bases is not None:
        by_base = {base: [n for n in reader._catalog.attempts.get(base, []) if n in records] for base in bases}
        for base, found in by_base.items():
            if not found:
                raise reader._no_run(base)
        chosen = [found[-1] for found in by_base.values()]
        _warn_of_choice([found for found in by_base.values() if len(found) > 1])
    elif name is not None:
        if name not in records:
            raise reader._no_run(name)
        chosen = [name]
    else:
        chosen, single = list(records), len(records) == 1
        if len(reader._catalog.groups) <= _index.FEW:  # else when they are accessed
            reader._prepare(chosen, argnames)
    chosen_runs = Runs(reader, chosen, argnames)
    if single:
        return chosen_runs[chosen[0]]
    return chosen_runs if key is None else chosen_runs.stack()


def runs_in(path: str | os.PathLike[str], where: Where | None = None, wall: bool = False) -> Runs:
    """Return the runs of a directory as `load` does, but as a mapping even if there is only one."""
    reader = Reader(path)
    reader._wall = wall
    reader._open_for_loading()
    return Runs(reader, reader._chosen(where), None)


def runs(path: str | os.PathLike[str], where: Where | None = None) -> RunTable:
    """List the runs in a directory, oldest first, without their events.

    The result is a sequence of `lox.store.Run` that prints as a table: names, hyper-parameters, attempts, numbers of
    events, times, states.

    >>> import tempfile, jax, lox
    >>> directory = tempfile.mkdtemp()
    >>> lox.save({"x": 1}, directory, jax.random.key(42), mode="new")
    >>> lox.save({"x": 2}, directory, jax.random.key(42), mode="new")
    >>> [run.name for run in lox.runs(directory)]
    ['42', '42.1']

    Args:
        path: The directory.
        where: List only runs with these values in their config: a dict, `{"lr": 0.1}`; or a function of a run.
    """
    reader = Reader(path)
    reader._open_for_loading(may_be_empty=True)
    damage = lambda: [text for group in reader._catalog.groups.values() for text in group.damage().values()]  # noqa: E731
    reader._warn_of(reader._whole(list(reader._catalog.records), damage))
    return reader.runs() if where is None else reader.runs().where(where)
