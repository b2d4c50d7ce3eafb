"""The index of a directory with many groups: which of them have runs of a name or of a PRNG key.

It is a cache of groups that nobody writes to any more; groups that are not in it are read. Only their ids are taken
from it: all that is said about a run comes from the files of its group. Writers bring it up to date from time to time,
by replacing the file; without it, or if it is damaged, all groups are read.

DIR/.lox/index is a database of SQLite, behind a line with its checksum. It is used in memory, so that nothing depends
on SQLite's locks, which network file systems do not have.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from lox import _errors
from lox.store._group import Entry, Group
from lox.store._segment import open_file

FEW = 16  # groups; reading the files of so many is quick
_FILE = ".lox/index"
_FIRST_LINE = b"lox index 1, crc32 %08x\n"
_LARGEST = 4 << 30  # bytes

_TABLES = """
    CREATE TABLE state (ids TEXT, ambiguous INTEGER);
    INSERT INTO state VALUES ('', 0);
    CREATE TABLE runs (group_id TEXT, name TEXT, base TEXT, mode TEXT, place INTEGER);
    CREATE INDEX by_group ON runs (group_id);
    CREATE INDEX by_name ON runs (name);
    CREATE INDEX by_base ON runs (base);
    CREATE INDEX by_place ON runs (place);
"""


class Index:
    """What is known of finished groups."""

    def __init__(self, image: bytes | None = None):
        import sqlite3

        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if image is None:
            self._database.executescript(_TABLES)
        else:
            self._database.deserialize(image)
        ids, ambiguous = self._database.execute("SELECT ids, ambiguous FROM state").fetchone()
        self.ids: set[str] = set(ids.split())
        # Whether two runs got the same name at the same moment, so that only all groups tell their names.
        self.is_ambiguous = bool(ambiguous)

    def __del__(self) -> None:
        self._database.close()

    def groups_of(self, bases: Iterable[str], run_names: Iterable[str] = ()) -> set[str]:
        """Return the groups with runs that are identified by these bases, or by those of the runs of these names."""
        query = """
            SELECT DISTINCT group_id FROM runs WHERE base IN (
                SELECT value FROM json_each(?)
                UNION SELECT base FROM runs WHERE name IN (SELECT value FROM json_each(?))
            )
        """
        rows = self._database.execute(query, [json.dumps(list(bases)), json.dumps(list(run_names))])
        return {row[0] for row in rows}

    def runs_like(self, titles: Iterable[str]) -> list[tuple[str, str, str, int]]:
        """Return runs with these names, or of further attempts at them (`42`, `42.1`, `42 (2)`), if not overwritten.

        Of each: its group, name, base and place in the order of runs.
        """
        query = """
            WITH titles AS (SELECT value AS title FROM json_each(?)), found AS (
                SELECT runs.* FROM titles JOIN runs ON name = title
                UNION SELECT runs.* FROM titles JOIN runs ON name > title || '.' AND name < title || '/'
                UNION SELECT runs.* FROM titles JOIN runs ON name > title || ' (' AND name < title || ' )'
            )
            SELECT group_id, name, base, place FROM found WHERE mode != 'waiting' AND NOT EXISTS (
                SELECT 1 FROM runs WHERE base = found.base AND mode = 'overwrite' AND place > found.place
            )
        """
        return self._database.execute(query, [json.dumps(list(titles))]).fetchall()

    def last_order(self) -> int:
        """Return the largest number in the order of runs."""
        return self._database.execute("SELECT max(place) FROM runs").fetchone()[0] or 0

    def change(self, finished: Iterable[Group], gone: Iterable[str]) -> None:
        """Take in groups, and forget others."""
        finished, gone = list(finished), set(gone)
        self.ids = (self.ids | {group.id for group in finished}) - gone
        same_names = """
            SELECT EXISTS (
                SELECT 1 FROM runs WHERE mode IN ('new', 'error') GROUP BY name HAVING count(*) > 1
                UNION SELECT 1 FROM runs WHERE mode != 'waiting' GROUP BY name HAVING count(DISTINCT base) > 1
            )
        """
        rows = [(group.id, e.name, e.base, _mode(e), e.order) for group in finished for e in group.entries]
        with self._database:
            self._database.execute("BEGIN")
            self._database.executemany("DELETE FROM runs WHERE group_id = ?", [(id_,) for id_ in gone])
            self._database.executemany("INSERT INTO runs VALUES (?, ?, ?, ?, ?)", rows)
            self.is_ambiguous = bool(self._database.execute(same_names).fetchone()[0])
            self._database.execute("UPDATE state SET ids = ?, ambiguous = ?", [" ".join(self.ids), self.is_ambiguous])

    def save(self, folder: Path) -> None:
        """Replace the file, whole or not at all. It may fail: the file is a cache."""
        file = folder / _FILE
        temporary = file.with_name(f"index.{os.getpid()}.tmp")
        image = self._database.serialize()
        with contextlib.suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            if file.parent.is_symlink():
                return  # not lox's
            try:
                temporary.write_bytes(_FIRST_LINE % zlib.crc32(image) + image)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)


def _mode(entry: Entry) -> str:
    return "waiting" if entry.mode == "overwrite" and not entry.began else entry.mode


def usable() -> bool:
    """Tell whether Python has SQLite, which some builds do not."""
    try:
        import sqlite3
    except ImportError:
        return False
    return hasattr(sqlite3.Connection, "deserialize")


def load(folder: Path) -> Index | None:
    """Read the index of a directory; None if it has none, or none that can be used."""
    file = folder / _FILE
    if not usable() or file.parent.is_symlink():
        return None
    try:
        with open_file(file) as opened:
            if os.fstat(opened.fileno()).st_size > _LARGEST:
                return None
            data = opened.read()
    except (OSError, _errors.StoreError):
        return None
    first, _, image = data.partition(b"\n")
    if first + b"\n" != _FIRST_LINE % zlib.crc32(image):
        return None
    return Index(image)
