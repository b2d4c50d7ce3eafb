"""The runs of a directory, from the entries of all its groups, or of those that matter.

Writers open runs under a lock, so that no two of them choose the same name. Where a file system has no locks, the order
of the entries decides: if two runs get the same name at the same moment, the later one gets the next number, whenever
it is read. The entry of a run that overwrites others hides them as soon as it has events, whatever then happens to
their files. A group that was merged from others (`lox.store.compact`) hides those in the same way.
"""

import contextlib
import os
import threading
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lox import _errors
from lox.store import _group, _index, names
from lox.store._group import Entry, Group, Part
from lox.store._index import Index
from lox.store._table import differences, has_values, merged

MODES = ("new", "append", "overwrite", "error")
_LIKE_OPEN = {"a": "append", "w": "overwrite", "x": "error"}  # the modes of `open`
_PATIENCE = 10.0  # seconds to wait for a lock; somebody who holds it longer is suspended


class Record(NamedTuple):
    """A run, with its entries in order."""

    name: str
    base: str
    entries: list[Entry]

    def attempts(self) -> list[list[Entry]]:
        """Return the entries of each attempt, one for each process that takes part."""
        attempts: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            attempts.setdefault(entry.attempt, []).append(entry)
        return list(attempts.values())

    def history(self) -> tuple[Any, list[tuple[int, dict[str, tuple[Any, Any]]]]]:
        """Return the config, and the number of each attempt that changed it, with the values before and after."""
        first, *later = (entries[0] for entries in self.attempts())
        config, changes = first.config, []
        for attempt, entry in enumerate(later, 1):
            if entry.config is not None:
                before, config = config, entry.config if entry.resumed is None else merged(config, entry.config)
                if different := differences(before, config):
                    changes.append((attempt, different))
        return config, changes


class Resolution:
    """The runs that entries make, in the order in which they were begun."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.attempts: dict[str, list[str]] = {}  # names, by base
        self.taken = names.Taken()
        self.shared: dict[Any, Record] = {}  # by attempt: those of several processes
        self.last: Any = ()  # where the last entry stands in the order

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries that come after all others."""
        for entry in sorted(entries, key=_place):
            self.last = _place(entry)
            shared = self.shared.get(entry.attempt)
            if shared is not None and self.records.get(shared.name) is shared:
                shared.entries.append(entry)
                continue
            attempts = self.attempts.setdefault(entry.base, [])
            if entry.mode == "overwrite":
                if not entry.began:
                    continue  # it has no event yet, and perhaps never will
                for name in attempts:
                    del self.records[name]
                    self.taken.names.discard(name)
                attempts.clear()
            if entry.mode in ("append", "resume") and entry.name in attempts:
                name = entry.name
                self.records[name].entries.append(entry)
            else:
                name = self.taken.take(entry.name if entry.name not in self.taken.names else entry.title)
                self.records[name] = Record(name, entry.base, [entry])
                attempts.append(name)
            if entry.part is not None:
                self.shared[entry.attempt] = self.records[name]


def _place(entry: Entry) -> Any:
    return entry.order, entry.opened, entry.group, entry.number


class Catalog:
    """The runs of a directory. `refresh` reads all groups, `look_up` only those that matter for some runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.groups: dict[str, Group] = {}
        self.replaced: list[Group] = []  # by those that they were merged into
        self._resolution = Resolution()
        self._resolved: dict[str, tuple[int, int]] = {}  # how many entries of each group, and how many began
        self._index: Index | None = None  # of the last look-up

    @property
    def records(self) -> dict[str, Record]:
        """The runs by name, oldest first."""
        return self._resolution.records

    @property
    def attempts(self) -> dict[str, list[str]]:
        """The names of runs by what identifies them."""
        return self._resolution.attempts

    def refresh(self) -> None:
        """Read what is new in the directory."""
        self._index = None
        self._read()

    def look_up(self, bases: Iterable[str] = (), run_names: Iterable[str] = ()) -> None:
        """Read what is new of the runs with these bases or names. What `records` says about others may be old."""
        index = _index.load(self.folder)
        if index is None or index.is_ambiguous:
            return self.refresh()
        run_names = set(run_names)
        if run_names:
            self._read(without=index.ids)
            bases = {*bases, *(entry.base for entry in self.entries() if entry.name in run_names)}
        wanted = index.groups_of(bases, run_names)
        self._read(without=index.ids - wanted)
        self._index = index

    def _read(self, without: Container[str] = ()) -> None:
        known = self.groups | {group.id: group for group in self.replaced}
        groups: dict[str, Group] = {}
        ids = None
        # A list that is made while groups are merged may have neither the old ones nor the new one: only two lists that
        # are the same can be trusted.
        while ids != (ids := _group.groups_in(self.folder, without)):
            for id_ in [id_ for id_ in ids if id_ not in groups]:
                groups[id_] = known.get(id_) or Group(self.folder / id_)
                groups[id_].read_runs()
        replaced = {source.group for id_ in ids for source in groups[id_].sources}
        self.groups = {id_: groups[id_] for id_ in ids if id_ not in replaced}
        self.replaced = [groups[id_] for id_ in ids if id_ in replaced]
        self._resolve()

    def _resolve(self) -> None:
        """Add what is new to the runs, if it comes last; else find out from all entries."""
        before, now = self._resolved, {id_: (len(group.entries), group.began) for id_, group in self.groups.items()}
        fresh = {id_ for id_, group in self.groups.items() if group.sources} - before.keys()
        same = (
            not fresh
            and before.keys() <= now.keys()
            and all(now[id_][1] == began for id_, (_, began) in before.items())
        )
        new = [e for id_, group in self.groups.items() for e in group.entries[before.get(id_, (0, 0))[0] :]]
        if not same or any(_place(entry) < self._resolution.last for entry in new):
            self._resolution = Resolution()
            new = self.entries()
        self._resolution.add(new)
        self._resolved = now

    def entries(self) -> list[Entry]:
        """Return the entries of all groups. If two groups were merged from the same one, it counts once."""
        entries: list[Entry] = []
        merged: set[str] = set()
        for group in self.groups.values():
            twice = [range(s.first, s.first + s.runs) for s in group.sources if s.group in merged]
            merged.update(source.group for source in group.sources)
            entries += [entry for entry in group.entries if not any(entry.number in numbers for numbers in twice)]
        return entries

    # --- for writers ---

    def locked(self) -> contextlib.AbstractContextManager[bool]:
        """Let nobody else begin runs in the directory; false if the file system cannot do so."""
        return _lock(self.folder)

    def update_index(self, few: int | None = None) -> None:
        """Take finished groups into the index if more than a `few` are not in it; under the lock."""
        few = _index.FEW if few is None else few
        index = self._index or _index.load(self.folder) or (Index() if _index.usable() else None)
        ids = _group.groups_in(self.folder)
        if index is None or sum(id_ not in index.ids for id_ in ids) <= few:
            return
        known = self.groups | {group.id: group for group in self.replaced}
        others = [known.get(id_) or Group(self.folder / id_) for id_ in ids if id_ not in index.ids]
        for group in others:
            group.read_runs()
        replaced = {source.group for group in others for source in group.sources}  # which are not in it: they are read
        finished = [group for group in others if group.id not in replaced and group.is_over()]
        if len(finished) > few:
            index.change(finished, index.ids.difference(ids) | (index.ids & replaced))
            index.save(self.folder)

    def written_to(self, group: str) -> None:
        """Note that a group which was taken for finished is not."""
        if self._index is not None and group in self._index.ids:
            self._index.change([], [group])
            self._index.save(self.folder)

    def next_order(self) -> int:
        """Return the place of an entry that is written now, after all others."""
        last = max((group.last_order for group in self.groups.values()), default=0)
        return 1 + max(last, self._index.last_order() if self._index else 0)

    def taken(self, titles: Iterable[str]) -> names.Taken:
        """Return the names that are taken, as far as they may be chosen for these titles."""
        return names.Taken(self._indexed_names(titles), self._resolution.taken.names)

    def _indexed_names(self, titles: Iterable[str]) -> Iterator[str]:
        """Return the names like these that runs in groups of the index have, which may be overwritten since."""
        if self._index is None:
            return
        overwritten = {e.base: e.order for e in sorted(self.entries(), key=_place) if e.mode == "overwrite" and e.began}
        for group, name, base, order in self._index.runs_like(titles):
            if overwritten.get(base, -1) < order and (self.folder / group).is_dir():
                yield name

    def shared(self, base: str, part: Part | None) -> Record | None:
        """Return the run that another process of the same program has begun, and that this one takes part in."""
        return None if part is None else self._resolution.shared.get((part.session, base, part.number))

    def is_past(self, base: str, part: Part | None) -> bool:
        """Tell whether other processes of the same program have already begun a later run with this base."""
        shared = self._resolution.shared
        return part is not None and any(s == part.session and b == base and n > part.number for s, b, n in shared)

    def dead_groups(self, bases: Iterable[str]) -> list[Group]:
        """Return the groups that had runs with these bases, and whose runs are all overwritten."""
        self.look_up(bases)
        bases = set(bases)
        concerned = [group.id for group in self.groups.values() if any(e.base in bases for e in group.entries)]
        if self._index is not None:
            self.look_up({entry.base for id_ in concerned for entry in self.groups[id_].entries})
        living = {entry.group for record in self.records.values() for entry in record.entries}
        waiting = {id_ for id_, group in self.groups.items() if any(_is_waiting(entry) for entry in group.entries)}
        return [self.groups[id_] for id_ in concerned if id_ in self.groups and id_ not in living | waiting]


def _is_waiting(entry: Entry) -> bool:
    """Tell whether a run will overwrite others as soon as it has an event."""
    return entry.mode == "overwrite" and not entry.began


def resolve(entries: Iterable[Entry]) -> dict[str, Record]:
    """Return the runs that these entries make."""
    resolution = Resolution()
    resolution.add(entries)
    return resolution.records


# --- the lock ---


_held = threading.local()  # the directories that a thread has locked


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a directory, if its file system can do so; the lock of a process that dies is free at once."""
    held: set[Path] = _held.__dict__.setdefault("folders", set())
    if folder in held:  # a writer was collected, and closed, under the lock
        yield True
        return
    descriptor = _locked(folder)
    if descriptor is None:
        yield False
        return
    held.add(folder)
    try:
        yield True
    finally:
        held.discard(folder)
        _unlock(descriptor)


def _locked(folder: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.002)
                continue
        except OSError:
            pass  # no locks here
        os.close(descriptor)
        return None


def _unlock(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has a copy of the descriptor
    os.close(descriptor)


# --- which runs a writer gets ---


def check_mode(mode: str) -> str:
    """Return the full name of a mode, or raise an error that lists them."""
    mode = _LIKE_OPEN.get(mode, mode)
    if mode not in MODES:
        raise _errors.OptionError(f"`mode` is {mode!r}; choose one of {_errors.listing(MODES)}.")
    return mode


def choose(
    catalog: Catalog,
    bases: Sequence[str],
    wanted: Sequence[str],
    mode: str,
    configs: Sequence[Any],
    resumed: Sequence[Any] | None,
    parts: Sequence[Part | None],
) -> list[tuple[str, str]]:
    """Choose the names and modes of runs that are opened now, unless other processes of the program have done so."""
    begun = [catalog.shared(base, part) for base, part in zip(bases, parts, strict=True)]
    rest = [n for n, record in enumerate(begun) if record is None]
    pick = lambda values: [values[n] for n in rest]  # noqa: E731
    if any(catalog.is_past(base, part) for base, part in zip(bases, parts, strict=True)):
        mode = "new" if mode == "overwrite" else mode  # it would overwrite what came after it
    if resumed is None:
        chosen = iter(_choose_names(catalog, pick(bases), pick(wanted), mode))
    else:
        chosen = iter(_choose_resumed(catalog, pick(bases), pick(wanted), pick(configs), pick(resumed)))
    return [next(chosen) if record is None else (record.name, "join") for record in begun]


def _choose_resumed(
    catalog: Catalog, bases: Sequence[str], wanted: Sequence[str], configs: Sequence[Any], steps: Sequence[Any]
) -> list[tuple[str, str]]:
    """Choose the runs to resume: the newest that have these PRNG keys, and these names or configs if there are several.

    A run that does not exist is begun if it is resumed at step 0, which is what a program without a checkpoint does.
    """
    taken = catalog.taken(wanted)
    chosen: dict[str, str] = {}
    lanes = list(zip(bases, wanted, configs, steps, strict=True))
    for base, title, config, (_, number) in reversed(lanes):  # of several with one name, the last lane gets the newest
        there = [catalog.records[name] for name in catalog.attempts.get(base, [])]
        found = [record for record in there if record.name not in chosen]
        if len(found) > 1:
            found = [record for record in found if record.entries[0].title == title] or found
        if _differ(found):
            found = [record for record in found if config and has_values(record.history()[0], config)]
        if _differ(found) or (there and not found):
            several = _errors.listing([record.name for record in there])
            raise _errors.RunNotFoundError(
                f"cannot resume {title!r} in {str(catalog.folder)!r}: its PRNG key has the runs {several}. "
                "Give `resume` the config or the name of one of them."
            )
        if found:
            chosen[found[-1].name] = "resume"
        elif number <= 0:
            chosen[taken.take(title)] = "new"
        else:
            raise _errors.RunNotFoundError(
                f"cannot resume {title!r} in {str(catalog.folder)!r}: there is no run with its PRNG key. "
                "Check the path and the PRNG key; `init` begins a run."
            )
    return list(chosen.items())[::-1]


def _differ(records: list[Record]) -> bool:
    """Tell whether runs have different configs."""
    return len({repr(record.history()[0]) for record in records}) > 1


def _choose_names(catalog: Catalog, bases: Sequence[str], wanted: Sequence[str], mode: str) -> list[tuple[str, str]]:
    """Choose the names and modes of runs that are opened now.

    Runs that are opened together are different runs, even if they have the same PRNG key.
    """
    taken = catalog.taken(wanted)
    newest = {base: catalog.attempts[base][-1] for base in bases if catalog.attempts.get(base)}
    chosen: set[str] = set()
    result = []
    if mode == "overwrite":
        taken.free(name for base in bases for name in catalog.attempts.get(base, []))
    for base, name in zip(bases, wanted, strict=True):
        if mode == "error" and base in newest:
            raise _errors.RunExistsError(
                f"the run {newest[base]!r} is already in {str(catalog.folder)!r}.\n"
                'Use another PRNG key or directory, or one of mode="new", "append" and "overwrite".'
            )
        run_mode = "new" if base in chosen or (mode == "overwrite" and base not in newest) else mode
        name = newest[base] if run_mode == "append" and base in newest else taken.take(name)
        chosen.add(base)
        newest[base] = name
        result.append((name, run_mode))
    return result
