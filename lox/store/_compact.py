"""`compact` merges groups: thousands of small ones become a few large ones, and nothing else changes.

A new group is built under a name that no reader looks at. One rename gives it its own name, and from then on every
reader ignores the groups that it says it replaces, whatever happens to their files. So the runs are in the old groups
or in the new one, at any moment and for everyone, and whoever dies on the way leaves only files to delete.
"""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lox import _errors
from lox._data import _sites
from lox.store import _catalog, _group, _merged
from lox.store._catalog import Catalog
from lox.store._group import Entry, Group
from lox.store._merged import Files, Part, any_of, filled, span_of
from lox.store._reader import Reader
from lox.store._schema import RUN
from lox.store._segment import open_file
from lox.store._writer import _sync

_LOCK = ".lox/compact.lock"
_UNFINISHED = re.compile(r"\.compact-[0-9a-f]{8}")
_GROUP_BYTES = 1 << 30  # of old groups that are merged at once: while it lasts, they take as much room again
_GROUP_RUNS = 1024  # of a new group: to load one of them, all are listed
_MOST_RUNS = 1 << 28  # with room for numbers of 31 bits
_TRIES = 3  # when others delete groups that are being read


def compact(path: str | os.PathLike[str], *, min_groups: int = 2, force: bool = False) -> dict[str, tuple[int, int]]:
    """Merge the files of many runs into few, so that thousands of runs are listed and loaded quickly.

    Everything that `lox.load` and `lox.runs` say stays the same, bit by bit. Others may read and write at the same
    time, and the process may be killed at any moment: at worst, it leaves files that the next `compact` deletes.

    Runs that are still being written are left alone. So are groups that have become large already, and those with
    damage, with a warning. While groups are merged, up to 1 GB of the disk is used twice.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> for seed in range(3):
    ...     lox.save({"loss": np.float32(seed)}, directory, key=jax.random.key(seed))
    >>> done = lox.store.compact(directory)
    >>> done["groups"], done["files"]
    ((3, 1), (9, 3))
    >>> print(lox.load(directory).stack())
    {'loss': [[0.0], [1.0], [2.0]]}

    Args:
        path: The directory.
        min_groups: Do nothing if there are fewer groups to merge.
        force: Whether to merge even groups that were never closed and are from other machines, or were written to in
            the last minute. Whether their writers are dead cannot be told with certainty, and what a living one still
            writes would be lost.

    Returns:
        The numbers of `"groups"`, `"files"` and `"bytes"`, each before and after.

    Raises:
        RunNotFoundError: The directory does not exist.
        StoreError: Another `compact` is at work, or the directory cannot be written to. All runs are as they were.
    """
    if min_groups < 1:
        raise _errors.OptionError(f"`min_groups` is {min_groups}; it must be at least 1.")
    reader = Reader(path)
    reader._open_for_loading(may_be_empty=True)
    folder, catalog = reader.path, reader._catalog
    with _locked(folder):
        before = _census(folder)
        _remove_unfinished(folder)
        catalog.refresh()
        _delete_replaced(catalog)
        left: set[str] = set()  # groups that are not to be merged, or not again
        damaged: dict[Path, str] = {}
        tries = _TRIES
        while groups := _choose(catalog, left, damaged, min_groups, force):
            try:
                left |= _merge(catalog, groups)
            except _ChangedError:
                tries -= 1
                if not tries:
                    raise
            catalog.refresh()
        with catalog.locked():
            catalog.update_index(few=1)
        after = _census(folder)
    if damaged:
        listed = "\n  ".join(f"{str(group)!r}: {why}" for group, why in damaged.items())
        _sites.warn(
            f"{len(damaged)} groups are damaged and were left alone:\n  {listed}\n"
            f"lox.store.repair({str(folder)!r}) takes the damage out; then compact again."
        )
    return {name: (before[name], after[name]) for name in before}


class _ChangedError(_errors.StoreError):
    """A group was overwritten, repaired or removed while it was being merged."""


# --- one at a time ---


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others from merging groups. The file stays; the system unlocks that of a process that dies."""
    file = folder / _LOCK
    try:
        file.parent.mkdir(exist_ok=True)
        if file.parent.is_symlink():
            raise _errors.StoreError(f"{str(file.parent)!r} is a link, which lox did not make there.")
        opened = open_file(file, os.O_RDWR | os.O_CREAT)
    except _errors.StoreError:
        raise
    except OSError as error:
        raise _errors.cannot_write(file, error, _group.WAY_OUT) from error
    with opened:
        try:
            _lock(opened.fileno())
        except BlockingIOError as error:
            busy = _errors.StoreError(f"{str(folder)!r} is being compacted already. Wait until that is done.")
            raise busy from error
        except OSError as error:
            raise _errors.cannot_write(file, error, _group.WAY_OUT) from error
        yield


def _lock(descriptor: int) -> None:
    if os.name != "nt":
        import fcntl

        return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    import msvcrt

    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError(error.errno, error.strerror) from error


def _census(folder: Path) -> dict[str, int]:
    """Count the groups of a directory, and their files."""
    total = {"groups": 0, "files": 0, "bytes": 0}
    for id_ in _group.groups_in(folder):
        files = _group.files(folder / id_)
        total["groups"] += bool(files)  # what others keep in a directory is not a group
        total["files"] += len(files)
        total["bytes"] += sum(files.values())
    return total


# --- what others have left ---


def _remove_unfinished(folder: Path) -> None:
    """Remove what was being built by someone who has died or failed: nobody else is at work."""
    try:
        with os.scandir(folder) as found:
            names = [f.name for f in found if _UNFINISHED.fullmatch(f.name) and f.is_dir(follow_symlinks=False)]
        for name in names:
            for id_ in _group.groups_in(folder / name):
                Group(folder / name / id_).delete()
            if not os.listdir(folder / name):
                os.rmdir(folder / name)
    except _errors.StoreError:
        raise
    except OSError as error:
        raise _errors.cannot_write(folder, error, _group.WAY_OUT) from error


def _delete_replaced(catalog: Catalog) -> None:
    """Delete groups whose runs are all in another one, if nothing is wrong with that."""
    intact: dict[str, bool] = {}
    for old in catalog.replaced:
        for new in catalog.groups.values():
            if any(source.group == old.id for source in new.sources):
                if new.id not in intact:
                    intact[new.id] = _damage(new) is None
                if intact[new.id] and not old.is_alive():
                    _delete(old)
                break


def _delete(group: Group) -> None:
    """Delete a group that another one replaces. Its list of runs goes first, so that readers notice."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(group.folder / _group.RUNS)
    except OSError as error:
        raise _errors.cannot_write(group.folder, error, _group.WAY_OUT) from error
    group.delete()


# --- what to merge ---


def _choose(
    catalog: Catalog, left: set[str], damaged: dict[Path, str], min_groups: int, force: bool
) -> dict[Group, Files]:
    """Return the next groups to merge, oldest first; those that are not to be merged are added to `left`."""
    chosen: dict[Group, Files] = {}
    total = runs = 0
    for group in catalog.groups.values():
        if group.id in left:
            continue
        left.add(group.id)  # unless it is chosen
        try:
            files = _group.files(group.folder)  # before they are read: if they are others afterwards, it has changed
            weight = sum(files.values()) + 8 * files.get(_group.RUNS, 0)  # all of which is read at once
            is_large = 2 * weight > _GROUP_BYTES or 2 * len(group.entries) > _GROUP_RUNS
            if not files or is_large or not _is_over(group, force):
                continue
            if not group.entries and not group.damage():
                continue  # a writer that has not begun, or died before
        except _errors.StoreError as error:
            damaged[group.folder] = str(error).splitlines()[0]
            continue
        is_full = total + weight > _GROUP_BYTES or runs + len(group.entries) > _GROUP_RUNS
        if is_full and len(chosen) >= min_groups:
            left.remove(group.id)
            break
        why = _damage(group)
        if why is not None:
            damaged[group.folder] = why
        elif not list(group.folder.glob("*.damaged")):  # which `repair` has kept
            chosen[group] = files
            total, runs = total + weight, runs + len(group.entries)
    if len(chosen) < min_groups:
        return {}
    left -= {group.id for group in chosen}
    return chosen


def _is_over(group: Group, force: bool) -> bool:
    """Tell whether nobody can be writing to a group any more."""
    meta = group.meta()
    if meta is None or meta.get("status") == "closed":
        return True
    if force:
        return not group.is_alive()
    return group.is_over() and meta.get("host") == socket.gethostname()


def _damage(group: Group) -> str | None:
    """Read all of a group; say what is wrong with it, if anything is."""
    try:
        group.scan()
        for segment in group.segments.values():
            if segment.leftover:
                return f"{segment.file.name} has {segment.leftover} bytes at its end that cannot be read"
            if segment.schema is not None:
                segment.verify()
                for damage in segment.bad.values():
                    return str(damage)
        for problem in group.damage().values():
            return problem
        span = span_of(group)
        if span > _MOST_RUNS:
            return "it has a run with an impossible number"
        known = np.zeros(span, bool)
        known[[entry.number for entry in group.entries]] = True
        for segment, schema in filled(group):
            runs = segment.read([RUN], segment.all_batches())[0]
            if (runs < 0).any() or not any_of(known, runs, schema.runs).all():
                return f"{segment.file.name} has events of runs that are not in {_group.RUNS}"
    except _errors.StoreError as error:
        return str(error).splitlines()[0]
    return None


# --- merging ---


def _merge(catalog: Catalog, groups: dict[Group, Files]) -> set[str]:
    """Replace groups by a new one; return its id, or theirs if they cannot be merged."""
    folder = catalog.folder
    try:
        new = _group.create(folder / f".compact-{secrets.token_hex(4)}")
        parts = _plan(catalog, groups, new.name)
        if not parts:
            return {group.id for group in groups}
        if any(part.kept.any() for part in parts):
            _merged.write(new, parts)
            _check(catalog, new, parts)
        _sync_overwriting(catalog, parts)
        for part in parts:
            if part.files != _group.files(part.group.folder) or part.group.is_alive():
                raise _ChangedError(f"{str(part.group.folder)!r} has changed.")
        if any(part.kept.any() for part in parts):
            os.rename(new, folder / new.name)
            _sync(folder)
        for part in parts:
            _delete(part.group)
        return {new.name}
    except (_errors.RunNotFoundError, _ChangedError) as error:
        raise _ChangedError(f"{str(folder)!r} was changed by others while it was compacted. Try again.") from error
    except OSError as error:  # and errors of the store
        text = str(error).splitlines()[0]
        refused = _errors.StoreError(f"{str(folder)!r} was not compacted: {text}\nAll runs are as they were.")
        refused.errno, refused.filename = error.errno, error.filename
        raise refused from error
    finally:
        _remove_unfinished(folder)


def _plan(catalog: Catalog, groups: dict[Group, Files], id_: str) -> list[Part]:
    """Number the runs, without those that were overwritten, unless the names of others depend on them."""
    living = {(entry.group, entry.number) for record in catalog.records.values() for entry in record.entries}
    spans = {group: span_of(group) for group in groups}
    if sum(spans.values()) > _MOST_RUNS:
        return []
    for only_living in (True, False):
        parts: list[Part] = []
        first = 0
        for group, files in groups.items():
            kept = np.zeros(spans[group], bool)
            kept[[e.number for e in group.entries if not only_living or (e.group, e.number) in living]] = True
            parts.append(Part(group, first, kept, files))
            first += spans[group]
        entries = [entry for part in parts for entry in part.entries(id_)]
        if _picture(entries + _others(catalog, parts)) == _picture(catalog.entries()):
            return parts
    return []  # entries of the same moment, whose order depends on the ids of their groups


def _others(catalog: Catalog, parts: list[Part]) -> list[Entry]:
    """Return the entries of all groups that are not merged."""
    merged = {part.group.id for part in parts}
    return [entry for entry in catalog.entries() if entry.group not in merged]


def _picture(entries: list[Entry]) -> list[Any]:
    """Return everything about the runs of these entries but where they are, in a form that can be compared."""
    records = _catalog.resolve(entries).values()
    return [(r.name, r.base, [entry._replace(number=0).to_line() for entry in r.entries]) for r in records]


def _check(catalog: Catalog, folder: Path, parts: list[Part]) -> None:
    """Read the new group as others will; raise an error if anything is not as it was."""
    new = Group(folder)
    new.read_runs()
    damage = _damage(new)
    others = _others(catalog, parts)
    if damage is None and _picture(new.entries + others) != _picture(catalog.entries()):
        damage = "its runs are not the same"
    kept = sum(_merged.count(part) for part in parts)
    if damage is None and kept != sum(sum(segment.rows) for segment in new.segments.values()):
        damage = f"it does not have {kept} rows"
    if damage is not None:
        raise _errors.StoreError(f"what was written cannot be read back: {damage}")


def _sync_overwriting(catalog: Catalog, parts: list[Part]) -> None:
    """Wait until what overwrites runs is on the disk, before these runs are dropped."""
    for group in catalog.groups.values() if any(not part.kept.all() for part in parts) else ():
        if any(entry.mode == "overwrite" for entry in group.entries):
            for file in (group.folder / _group.RUNS, group.folder):
                _sync(file)
