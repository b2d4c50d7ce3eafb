"""The runs of a directory, from the entries of all its groups.

There is no lock, so the order of the entries decides: if two runs get the same name at the same moment, the later one
gets the next number, whenever it is read. The entry of a run hides the runs that it overwrites at once, whatever then
happens to their files. A group that was merged from others (`lox.store.compact`) hides those in the same way.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lox import _errors
from lox.store import _group, names
from lox.store._group import Entry, Group

MODES = ("new", "append", "overwrite", "error")
_LIKE_OPEN = {"a": "append", "w": "overwrite", "x": "error"}  # the modes of `open`


class Record(NamedTuple):
    """A run, with its entries in order."""

    name: str
    base: str
    entries: list[Entry]


class Catalog:
    """The runs of a directory; `refresh` looks for new ones."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.groups: dict[str, Group] = {}
        self.replaced: list[Group] = []  # by those that they were merged into
        self.records: dict[str, Record] = {}

    def refresh(self) -> None:
        """Read what is new in the directory."""
        known = self.groups | {group.id: group for group in self.replaced}
        groups, ids = {}, None
        # A list that is made while groups are merged may have neither the old ones nor the new one: only two lists that
        # are the same can be trusted.
        while ids != (ids := _group.groups_in(self.folder)):
            for id_ in [id_ for id_ in ids if id_ not in groups]:
                groups[id_] = known.get(id_) or Group(self.folder / id_)
                groups[id_].read_runs()
        replaced = {source.group for id_ in ids for source in groups[id_].sources}
        self.groups = {id_: groups[id_] for id_ in ids if id_ not in replaced}
        self.replaced = [groups[id_] for id_ in ids if id_ in replaced]
        self.records = resolve(entries_of(self.groups.values()))

    def next_order(self) -> int:
        """Return the place of an entry that is written now, after all others."""
        return 1 + max((entry.order for group in self.groups.values() for entry in group.entries), default=0)

    def dead_groups(self) -> list[Group]:
        """Return the groups whose runs are all overwritten."""
        living = {entry.group for record in self.records.values() for entry in record.entries}
        return [group for group in self.groups.values() if group.entries and group.id not in living]

    def newest(self, base: str) -> Record | None:
        """Return the last attempt of a run."""
        return next((record for record in reversed(self.records.values()) if record.base == base), None)


def entries_of(groups: Iterable[Group]) -> list[Entry]:
    """Return the entries of these groups. If two of them were merged from the same one, it counts once."""
    entries: list[Entry] = []
    merged: set[str] = set()
    for group in groups:
        twice = [range(s.first, s.first + s.runs) for s in group.sources if s.group in merged]
        merged.update(source.group for source in group.sources)
        entries += [entry for entry in group.entries if not any(entry.number in numbers for numbers in twice)]
    return entries


def resolve(entries: list[Entry]) -> dict[str, Record]:
    """Return the runs that these entries make, in the order in which they were begun."""
    records: dict[str, Record] = {}
    bases: dict[str, list[str]] = {}
    taken = names.Taken()
    for entry in sorted(entries, key=lambda e: (e.order, e.opened, e.group, e.number)):
        attempts = bases.setdefault(entry.base, [])
        if entry.mode == "overwrite":
            for name in attempts:
                del records[name]
                taken.names.discard(name)
            attempts.clear()
        if entry.mode in ("append", "resume") and entry.name in attempts:
            records[entry.name].entries.append(entry)
            continue
        name = taken.take(entry.name if entry.name not in taken.names else entry.title)
        records[name] = Record(name, entry.base, [entry])
        attempts.append(name)
    return records


def check_mode(mode: str) -> str:
    """Return the full name of a mode, or raise an error that lists them."""
    mode = _LIKE_OPEN.get(mode, mode)
    if mode not in MODES:
        raise _errors.OptionError(f"`mode` is {mode!r}; choose one of {_errors.listing(MODES)}.")
    return mode


def choose_resumed(catalog: Catalog, bases: list[str], wanted: list[str]) -> list[tuple[str, str]]:
    """Choose the runs to resume: the newest that have these PRNG keys, and these names if there are several."""
    by_base: dict[str, list[Record]] = {}
    for record in catalog.records.values():
        by_base.setdefault(record.base, []).append(record)
    chosen: list[str] = []
    for base, title in zip(bases, wanted, strict=True):
        found = by_base.get(base, [])
        titles = {record.entries[0].title for record in found}
        if len(titles) > 1:
            found = [record for record in found if record.entries[0].title == title]
        found = [record for record in found if record.name not in chosen]
        if not found:
            there = _errors.listing([record.name for record in by_base.get(base, [])])
            why = (
                f"its PRNG key has the runs {there}: give `resume` the config or the name"
                if titles
                else "it has no run"
            )
            raise _errors.RunNotFoundError(f"cannot resume {title!r} in {str(catalog.folder)!r}: {why}.")
        chosen.append(found[-1].name)
    return [(name, "resume") for name in chosen]


def choose_names(catalog: Catalog, bases: list[str], wanted: list[str], mode: str) -> list[tuple[str, str]]:
    """Choose the names and modes of runs that are opened now.

    Runs that are opened together are different runs, even if they have the same PRNG key.
    """
    taken = names.Taken(catalog.records)
    newest = {record.base: record.name for record in catalog.records.values()}
    chosen: set[str] = set()
    result = []
    if mode == "overwrite":
        taken.names -= {record.name for record in catalog.records.values() if record.base in {*bases}}
    for base, name in zip(bases, wanted, strict=True):
        if mode == "error" and base in newest:
            raise _errors.RunExistsError(
                f"the run {newest[base]!r} is already in {str(catalog.folder)!r}.\n"
                'Use another PRNG key or directory, or one of mode="new", "append" and "overwrite".'
            )
        run_mode = "new" if base in chosen else mode
        name = newest[base] if run_mode == "append" and base in newest else taken.take(name)
        chosen.add(base)
        newest[base] = name
        result.append((name, run_mode))
    return result
