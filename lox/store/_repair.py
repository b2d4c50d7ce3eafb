"""`repair`: takes out of files what a crash or a bad disk has left there."""

import os
import shutil
from pathlib import Path

from lox import _errors
from lox._data import _sites
from lox.store import _group
from lox.store._group import WAY_OUT
from lox.store._reader import Reader
from lox.store._segment import open_file

_LARGEST_COPY = 1 << 30  # bytes; a sparse file of any size must not fill the disk


def repair(path: str | os.PathLike[str], *, force: bool = False) -> dict[str, int]:
    """Cut off what a crash has left at the ends of files, and take out rows without the right checksum.

    Afterwards every Arrow reader can read the files. What lox can load stays the same. Runs that are still being
    written are left alone. Bytes that are damaged, not just incomplete, are kept in a file next to the original, which
    ends in `.damaged`.

    >>> import tempfile, lox
    >>> directory = tempfile.mkdtemp()
    >>> lox.save({"x": 1}, directory)
    >>> lox.store.repair(directory)
    {}

    Args:
        path: The directory.
        force: Whether to repair even runs whose writer seems to be alive.

    Returns:
        The number of bytes that were cut off, by file.
    """
    reader = Reader(path)
    reader._open_for_loading()
    repaired: dict[str, int] = {}
    for group in reader._catalog.groups.values():
        group.scan()
        for segment in group.segments.values():
            if segment.schema is not None:
                segment.verify()
        # A writer that died before its first write has left an empty file.
        broken = [s for s in group.segments.values() if s.leftover or s.bad or s.schema is None]
        if broken and not force and group.is_alive():
            _sites.warn(
                f"{str(group.folder)!r} was left alone: its writer seems to be alive. "
                "Close it first, or use `force=True` if it is dead."
            )
            continue
        for segment in broken:
            extents = [segment.extent(batch) for batch in segment.bad]
            repaired[str(segment.file)] = segment.leftover + sum(stop - start for start, stop in extents)
            _cut(segment.file, segment.end, segment.damage is not None, segment.schema is None)
            if extents:
                _take_out(segment.file, extents)
        if broken:
            _group.accept_sizes(group.folder)
    return repaired


def _take_out(file: Path, extents: list[tuple[int, int]]) -> None:
    """Move parts of a file to another one; at any moment, one of them has each part."""
    try:
        with open_file(file) as whole:
            data, start = whole.read(), 0
        with open(f"{file}.damaged", "ab") as rest:
            rest.write(b"".join(data[start:stop] for start, stop in extents))
            os.fsync(rest.fileno())
        repaired = Path(f"{file}.repaired")
        with open(repaired, "wb") as whole:
            for begin, stop in extents:
                whole.write(data[start:begin])
                start = stop
            whole.write(data[start:])
            os.fsync(whole.fileno())
        repaired.replace(file)
    except OSError as error:
        raise _errors.cannot_write(file, error, WAY_OUT) from error


def _cut(file: Path, end: int, damaged: bool, empty: bool) -> None:
    size = file.lstat().st_size - end
    if damaged and size > _LARGEST_COPY:
        raise _errors.StoreError(
            f"{str(file)!r} has {size} bytes that lox cannot read, more than it would copy to keep them. "
            "Remove the file, or what is behind its last batch."
        )
    try:
        if damaged:
            with open_file(file) as segment, open(f"{file}.damaged", "ab") as rest:
                segment.seek(end)
                shutil.copyfileobj(segment, rest)
        if empty:
            file.unlink()  # without a schema, there is nothing to read
        else:
            with open_file(file, os.O_RDWR) as segment:
                segment.truncate(end)
    except OSError as error:
        raise _errors.cannot_write(file, error, WAY_OUT) from error
