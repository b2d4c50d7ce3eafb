"""`repair`: removes what a crash has left at the ends of files."""

import os
import shutil
from pathlib import Path

from lox import _errors
from lox._data import _sites
from lox.store import _group
from lox.store._reader import Reader


def repair(path: str | os.PathLike[str], *, force: bool = False) -> dict[str, int]:
    """Cut off what a crash has left at the ends of files, so that every Arrow reader can read them.

    What lox loads stays the same. Runs that are still being written are left alone. Bytes that are damaged, not just
    incomplete, are kept in a file next to the original, which ends in `.damaged`.

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
        # A writer that died before its first write has left an empty file.
        broken = [s for s in group.segments.values() if s.leftover or s.schema is None]
        if broken and not force and group.is_alive():
            _sites.warn(
                f"{str(group.folder)!r} was left alone: its writer seems to be alive. "
                "Close it first, or use `force=True` if it is dead."
            )
            continue
        for segment in broken:
            repaired[str(segment.file)] = segment.leftover
            _cut(segment.file, segment.end, segment.damage is not None, segment.schema is None)
    return repaired


def _cut(file: Path, end: int, damaged: bool, empty: bool) -> None:
    try:
        if damaged:
            with open(file, "rb") as segment, open(f"{file}.damaged", "xb") as rest:
                segment.seek(end)
                shutil.copyfileobj(segment, rest)
        if empty:
            file.unlink()  # without a schema, there is nothing to read
        else:
            os.truncate(file, end)
    except OSError as error:
        raise _errors.cannot_write(file, error, _group.WAY_OUT) from error
