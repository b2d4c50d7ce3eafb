"""`repair`."""

import os
from pathlib import Path

from lox import _errors
from lox._data import _sites
from lox.store import _group
from lox.store._reader import Reader


def repair(path: str | os.PathLike[str], *, force: bool = False) -> dict[str, int]:
    """Cut off what a crash has left at the ends of files, so that every Arrow reader can read them.

    What lox loads is the same before and after. Runs that are still being written are left alone. Bytes that are
    damaged, and not merely incomplete, are kept in a file beside, which ends in `.damaged`.

    >>> import tempfile, lox
    >>> directory = tempfile.mkdtemp()
    >>> lox.save({"x": 1}, directory)
    >>> lox.store.repair(directory)
    {}

    Args:
        path: The directory.
        force: Repair runs too whose writer seems to be alive.

    Returns:
        For each file that was repaired, how many bytes were cut off.
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
                f"{str(group.path)!r} was left alone: its writer seems to be alive. "
                "Close it first, or use `force=True` if it is dead."
            )
            continue
        for segment in broken:
            repaired[str(segment.path)] = segment.leftover
            _cut(segment.path, segment.end, segment.damage is not None, segment.schema is None)
    return repaired


def _cut(path: Path, end: int, damaged: bool, empty: bool) -> None:
    try:
        if damaged:
            with open(path, "rb") as file, open(f"{path}.damaged", "xb") as kept:
                file.seek(end)
                while block := file.read(1 << 20):
                    kept.write(block)
        if empty:
            path.unlink()  # not even a schema: there is nothing to read
        else:
            os.truncate(path, end)
    except OSError as error:
        raise _errors.cannot_write(path, error, _group.WAY_OUT) from error
