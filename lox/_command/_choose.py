"""The runs and keys that a command is about, and their logs, a few at a time."""

import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lox import _errors
from lox._data._logdict import logdict
from lox._engine import _selection
from lox.store import _from_rows, _group
from lox.store._catalog import Record
from lox.store._reader import Reader, Runs
from lox.store._segment import SegmentReader
from lox.store._structure import EVENT_NUMBER
from lox.store._table import Run
from lox.view import _filter

_AT_ONCE = 1 << 27  # bytes of files whose runs are loaded together


def opened(path: Path, damaged: str = "skip") -> Reader:
    """Return a reader that knows the runs of a directory, of which there must be some."""
    reader = Reader(path, damaged)
    reader._typed = False  # typed PRNG keys are JAX arrays: no command may start a backend for them
    try:
        reader._open_for_loading()
    except _errors.RunNotFoundError as error:
        raise _errors.RunNotFoundError(f"{error}{_elsewhere(path)}") from None
    if not reader._catalog.records:
        raise _errors.RunNotFoundError(f"the directory {str(path)!r} has no runs yet.")
    damage = lambda: [text for group in reader._catalog.groups.values() for text in group.damage().values()]  # noqa: E731
    reader._warn_of(reader._whole(list(reader._catalog.records), damage))
    return reader


def _elsewhere(path: Path) -> str:
    """Name a directory with runs, if it is right above or below this one, or beside it with a similar name."""
    parent = path.absolute().parent
    try:
        if not path.is_dir():
            beside = [entry.name for entry in parent.iterdir() if entry.is_dir() and _group.groups_in(entry)]
            return _errors.nearest(path.name, beside)
        nearby = [parent, *sorted(entry for entry in path.iterdir() if entry.is_dir())]
        found = [folder for folder in nearby if _group.groups_in(folder)]
    except OSError:  # a folder that may not be read, or is not there, is no suggestion
        return ""
    return f" {str(found[0])!r} has some." if found else ""


def runs(reader: Reader, names: Sequence[str] = (), where: Sequence[str] = ()) -> list[Run]:
    """Return the runs with these names, or that match these globs, whose config meets the conditions."""
    found = list(reader.runs())
    if names:
        chosen = {name for wanted in names for name in _named(reader, wanted)}
        found = [run for run in found if run.name in chosen]
    return _filter.select(found, where, str(reader.path)) if where else found


def _named(reader: Reader, wanted: str) -> list[str]:
    there = list(reader._catalog.records)
    matching = [wanted] if wanted in there else [name for name in there if fnmatch.fnmatchcase(name, wanted)]
    if not matching:  # "lane3 lr=0.1" is long to type
        matching = [name for name in there if name.startswith(f"{wanted} ")]
    if not matching:
        raise _errors.RunNotFoundError(f"{reader._no_run(wanted)}{_errors.nearest(wanted, there)}")
    return matching


def loadable(reader: Reader, chosen: Sequence[Run], x: str | None = None) -> Runs:
    """Return these runs as `lox.load` gives them; with the times of events if they are the x axis."""
    reader._wall = x == "wall"
    return Runs(reader, [run.name for run in chosen], None)


def segments(reader: Reader, names: Sequence[str]) -> list[SegmentReader]:
    """Return the files with events of these runs."""
    groups = reader._groups_of(names)
    for group in groups:
        group.scan()
    return [s for group in groups for s in group.segments.values() if s.schema is not None]


def keys(reader: Reader, names: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """Return the keys of these runs that match; an error if there are none."""
    there = reader.keys(names)
    if not patterns:
        return there
    wanted = [key for key in there if _selection.matches(key, patterns)]
    if not wanted:
        hint = _errors.nearest(patterns[0], there)
        if any(key.startswith(f"{patterns[0]}/") for key in there):
            hint = f" Did you mean '{patterns[0]}/*'?"
        known = f"The keys are {_errors.listing(there[:20])}." if there else "Nothing was logged."
        raise _errors.KeyNotFoundError(f"no key matches {_errors.listing(patterns)}. {known}{hint}")
    text = _selection.unmatched("argnames", tuple(patterns), there)
    if text:
        reader._warn_once(text.replace("`argnames`", "--key", 1))
    return wanted


def steps(reader: Reader, names: Sequence[str]) -> list[str]:
    """Return the names of the steps of these runs."""
    found = [step.name for s in segments(reader, names) if s.schema for step in s.schema.steps]
    return [name for name in dict.fromkeys(found) if name != EVENT_NUMBER]


def logs(reader: Reader, names: Sequence[str], patterns: Sequence[str] = ()) -> Iterator[tuple[str, logdict]]:
    """Yield the logs of runs, in order, without having all of them in memory.

    Runs that were written to the same small files are loaded together. Of large files, only one key at a time is read:
    then a run comes several times, with a key each.
    """
    for block, large in _blocks(reader, names):
        reader._prepare(block, None)
        wanted = keys(reader, block)
        parts = [[key] for key in wanted] if large else [wanted]
        for part in parts:
            chosen = [key for key in part if not patterns or _selection.matches(key, patterns)]
            if not chosen and large:
                continue
            chunks = reader._chunks_of_all(block, _exactly(chosen))
            for name in block:
                yield name, _from_rows.to_logdict(chunks.pop(name), typed=False)


def _exactly(chosen: Iterable[str]) -> _from_rows.Select:
    return frozenset(chosen).__contains__


def _blocks(reader: Reader, names: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield neighbouring runs with the same files, and whether the files are large."""
    records = [reader._catalog.records[name] for name in names]
    for groups, block in itertools.groupby(records, _groups):
        size = sum(sum(_group.sizes(reader.path / id_).values()) for id_ in groups)
        yield [record.name for record in block], size > _AT_ONCE


def _groups(record: Record) -> tuple[str, ...]:
    return tuple(sorted({entry.group for entry in record.entries}))
