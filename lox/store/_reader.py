"""`Reader`: all runs of a directory, and what is new in them."""

import dataclasses
import datetime
import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lox import _errors
from lox._data import _sites
from lox._data._logdict import logdict
from lox._engine import _select
from lox.store import _events, _open
from lox.store._catalog import Catalog, Record
from lox.store._events import Chunk, Chunks, Select
from lox.store._group import Group
from lox.store._segment import SegmentReader


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run without loading it.

    Attributes:
        name: Unique in its directory: the words of the key, and the number of the attempt if it is not the first.
        key_data: The words of its PRNG key; None if it has none.
        key_impl: The name of the key's implementation.
        config: Its hyper-parameters.
        opened: When it was begun.
    """

    name: str
    key_data: tuple[int, ...] | None
    key_impl: str | None
    config: Any
    opened: datetime.datetime

    @property
    def key(self) -> Any:
        """The PRNG key, or None."""
        if self.key_data is None:
            return None
        return jax.random.wrap_key_data(jnp.asarray(self.key_data, jnp.uint32), impl=self.key_impl)


class Runs(Mapping[str, logdict]):
    """Runs by name; each is loaded when it is asked for.

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

    def __init__(self, reader: "Reader", names: Sequence[str], select: Select):
        self._reader, self._names, self._select = reader, dict.fromkeys(names), select

    def __getitem__(self, name: str) -> logdict:
        if name not in self._names:
            raise KeyError(name)
        return self._reader._logs(name, self._select)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    # Going through all runs one by one would go through every file once for each.

    def items(self) -> Any:
        """Names and logs, all loaded."""
        chunks = self._reader._chunks_of_all(list(self._names), self._select)
        return {name: _events.to_logdict(of) for name, of in chunks.items()}.items()

    def values(self) -> Any:
        """The logs, all loaded."""
        return dict(self.items()).values()

    def stack(self) -> logdict:
        """All runs in one logdict with a lane axis in front, as `vmap(spool(f))` gives them.

        Where some runs have more events than others, `logs.valid` says which events are real.
        """
        return _events.stack(list(self._reader._chunks_of_all(list(self._names), self._select).values()))

    def __repr__(self) -> str:
        names = [repr(name) for name in self._names]
        if len(names) > 8:
            names = [*names[:4], "...", *names[-2:]]
        listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
        return f"<{len(self)} runs: {listed}>"


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

    It remembers where it has been: `poll` reads only what is new, and loading a second run does not search the files
    again. It holds no file open. A directory that does not exist yet has no runs.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).absolute()
        self._catalog = Catalog(self.path)
        self._polled: dict[SegmentReader, int] = {}
        self._warned: set[str] = set()

    # --- runs ---

    def refresh(self) -> None:
        """Look for new runs and events."""
        self._catalog.refresh()
        for group in self._catalog.groups.values():
            group.scan()

    def runs(self) -> list[Run]:
        """The runs found so far, oldest first."""
        return [_info(record) for record in self._catalog.records.values()]

    def load(self, name: str, argnames: str | Iterable[str] | None = None) -> logdict:
        """The events of a run found so far; every key has an event axis."""
        if name not in self._catalog.records:
            raise self._no_run(name)
        return self._logs(name, selector(argnames))

    def skipped(self) -> dict[str, int]:
        """Files with bytes at their end that cannot be read, or not yet, and how many these are."""
        segments = [s for group in self._catalog.groups.values() for s in group.segments.values()]
        return {str(segment.path): segment.leftover for segment in segments if segment.leftover}

    def poll(self, argnames: str | Iterable[str] | None = None) -> dict[str, logdict]:
        """What is new since the last poll: for each run with new events, these.

        The first poll returns everything. Events of one key come in order, unless its shape, dtype or steps change
        between two polls: then some that were logged before the last poll may come with the next one. New events of a
        key that do not fit into one array are kept apart, as by `lox.load`.
        """
        self.refresh()
        select = selector(argnames)
        found: dict[str, dict[str, list[Chunk]]] = {}
        polled: dict[SegmentReader, int] = {}
        for group, wanted in self._by_group(self._catalog.records.values()).items():
            ends = {segment: len(segment.rows) for segment in group.segments.values()}
            if all(self._polled.get(segment, 0) == end for segment, end in ends.items()):
                continue
            try:
                news = _events.of_all_runs(group, select, self._polled)
            except _errors.RunNotFoundError:
                continue  # overwritten at this moment
            for number, chunks in news.items():
                if number in wanted:
                    _merge(found.setdefault(wanted[number], {}), chunks)
            polled.update(ends)
        logs = {}
        for name in self._catalog.records:
            happened = {key: [c for c in of if c.series.count()] for key, of in found.get(name, {}).items()}
            happened = {key: of for key, of in happened.items() if of}
            if happened:
                logs[name] = _events.to_logdict(happened)
        self._polled.update(polled)  # not before: after an error one may poll again
        return logs

    # --- for load ---

    def _by_group(self, records: Iterable[Record]) -> dict[Group, dict[int, str]]:
        """For each group with a piece of these runs: the numbers and names of the runs, groups oldest first."""
        found: dict[str, dict[int, str]] = {}
        for record in records:
            for entry in record.entries:
                found.setdefault(entry.group, {})[entry.number] = record.name
        return {self._catalog.groups[id_]: found[id_] for id_ in sorted(found)}

    def _logs(self, name: str, select: Select) -> logdict:
        chunks: dict[str, list[Chunk]] = {}
        for entry in self._catalog.records[name].entries:
            group = self._catalog.groups[entry.group]
            _merge(chunks, _events.of_run(group, entry.number, select))
        return _events.to_logdict(chunks)

    def _chunks_of_all(self, names: list[str], select: Select) -> dict[str, Chunks]:
        records = [self._catalog.records[name] for name in names]
        chunks: dict[str, dict[str, list[Chunk]]] = {name: {} for name in names}
        pieces: dict[tuple[str, int], Chunks] = {}
        for group, wanted in self._by_group(records).items():
            if len(wanted) == 1:
                (number,) = wanted
                pieces[group.id, number] = _events.of_run(group, number, select)
            else:
                for number, of in _events.of_all_runs(group, select).items():
                    pieces[group.id, number] = of
        for record in records:
            for entry in record.entries:
                _merge(chunks[record.name], pieces.get((entry.group, entry.number), {}))
        return chunks

    def _no_run(self, name: str) -> _errors.RunNotFoundError:
        records = self._catalog.records
        known = list(records)[-8:]
        there = (
            f"The runs are {_errors.listing(known)}."
            if len(records) <= 8
            else f"The newest are {_errors.listing(known)}."
        )
        return _errors.RunNotFoundError(f"there is no run {name!r} in {str(self.path)!r}. {there}")

    def _open_for_loading(self, flush: bool = True) -> None:
        """Refresh; what keeps the directory from being read is an error, what is skipped is warned about."""
        if flush:
            _open.flush(self.path)
        if not self.path.exists():
            raise _errors.RunNotFoundError(
                f"there is no directory {str(self.path)!r}. Check the path; loggers and `lox.save` make it."
            )
        if not self.path.is_dir():
            raise _errors.StoreError(f"{str(self.path)!r} is a file: give the directory that lox wrote to.")
        self._catalog.refresh()
        if not self._catalog.groups:
            raise _errors.RunNotFoundError(
                f"the directory {str(self.path)!r} has no runs: lox has written nothing to it. Check the path."
            )

    def _scan_for(self, records: Iterable[Record]) -> None:
        """Read the files that these runs are in, and tell of damage."""
        problems = []
        for group in self._by_group(records):
            group.meta()  # an error if this is not ours to read
            group.scan()
            problems += group.problems
            for segment in group.segments.values():
                if segment.leftover and not (segment.damage is None and group.is_alive()):
                    what = segment.damage or "the last batch is incomplete"
                    problems.append(f"{str(segment.path)!r}: {segment.leftover} bytes at its end ({what})")
        problems = [p for p in problems if p not in self._warned]
        self._warned.update(problems)
        if problems:
            _sites.warn(
                f"{len(problems)} damaged files, of which a part was skipped:\n  "
                + "\n  ".join(problems)
                + f"\nAll that is whole was loaded. lox.store.repair({str(self.path)!r}) removes the rest."
            )

    def _check_names(self, records: Iterable[Record], argnames: Any) -> None:
        """Tell of names of keys that none of the files with these runs has."""
        if argnames is not None:
            segments = [segment for group in self._by_group(records) for segment in group.segments.values()]
            known = dict.fromkeys(key.name for segment in segments if segment.schema for key in segment.schema.keys)
            if text := _select.unmatched("argnames", _select.names("argnames", argnames), known):
                _sites.warn(text)


def _info(record: Record) -> Run:
    last = record.entries[-1]
    opened = datetime.datetime.fromtimestamp(record.entries[0].opened, datetime.UTC)
    config = next((e.config for e in reversed(record.entries) if e.config is not None), None)
    return Run(record.name, last.key_data, last.key_impl, config, opened)


def _merge(into: dict[str, list[Chunk]], chunks: Chunks) -> None:
    for key, of in sorted(chunks.items(), key=lambda item: item[1][0].order):
        into.setdefault(key, []).extend(_events.in_order(kind) for kind in _events.apart(of))


def selector(argnames: str | Iterable[str] | None) -> Select:
    """Which keys to load: as for `spool`, names or globs; None is all."""
    if argnames is None:
        return lambda key: True
    patterns = _select.names("argnames", argnames)
    return lambda key: any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
