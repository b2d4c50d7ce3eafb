"""`CsvLogger`: a table per run."""

import csv
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lox import _errors
from lox._data._bundle import Bundle
from lox.loggers._files._plain import FileLogger, RunFile
from lox.loggers._files._rows import Column, json_text, json_texts, number_texts
from lox.loggers._run import Run


class CsvLogger(FileLogger):
    """Writes one file per run, `42.csv`: a row per event, a column per step and key.

    >>> import jax, lox, tempfile
    >>> with lox.loggers.CsvLogger(tempfile.mkdtemp()) as logger:
    ...     state = logger.init(jax.random.key(42))
    ...     logger.log(state, {"loss": 0.5}, step=0)
    ...     logger.log(state, {"loss": 0.25, "accuracy": 0.75}, step=1)
    >>> print((logger.path / "42.csv").read_text(), end="")
    step,loss,accuracy
    0,0.5,
    1,0.25,0.75

    A cell is empty if the event does not have that key. NaN is `nan`. An array is a JSON list in one cell; a pytree has
    a column per leaf, such as `stats['mean']`. A `lox.Histogram` is a JSON object of its bins, mean and spread, a
    `lox.Image` the name of a PNG file in `42.media/`. If a key and a step have the same name, the one that comes second
    is called `step [key]` or `step [step]`.

    A spreadsheet would run a key such as `=1+1` as a formula. So a key, or other text, that begins with `=`, `+`, `-`,
    `@`, a tab, a line break or an apostrophe has an apostrophe in front: `'=1+1`. Numbers stay as they are. To get the
    key, remove an apostrophe at the beginning of the name.

    A new key needs a new column and so a new header: a new file is written next to the old one and replaces it when it
    is complete. Any program can read the table at any time, and a crash leaves either the old file or the new one. This
    costs a copy of the file per set of new keys; with thousands of keys that come one by one, use `JsonlLogger`.
    Existing files are left alone: the run is then called `42.1`. The config given to `init` is in `42.csv.config.json`.

    `resume` goes on with the file. Rows of the first attempt have an empty cell in the column `attempt`, those of
    further ones 1, 2, ...: sorted by it, the last row of each step is the newest. `42.csv.attempts.json` has, for each,
    the first step that was computed again, and the config that `resume` got. A key of that name is `attempt [key]`.

    Args:
        path: The folder; it is created with the first run.
    """

    suffix = ".csv"

    def columns(self, file: pathlib.Path) -> Iterable[str]:
        """Return the names of the columns."""
        with open(file, newline="", encoding="utf-8") as table:
            return [name.removeprefix("'") for name in next(csv.reader(table), [])]

    def add(self, run: Run, bundles: list[Bundle]) -> None:
        """Add one row per event."""
        run_file: RunFile = run.resource
        tables = [
            (count, {_errors.encodable(name): _cells(column) for name, column in table.items()})
            for count, table in self.tables(run, bundles, split=True)
        ]
        new = list(dict.fromkeys(name for _, table in tables for name in table if name not in run_file.columns))
        if new:
            self._widen(run, new)
        rows = (
            row
            for count, table in tables
            for row in zip(*[table.get(name) or [""] * count for name in run_file.columns], strict=True)
        )
        self.append(run, "".join(map(_row, rows)))

    def _widen(self, run: Run, new: list[str]) -> None:
        run_file: RunFile = run.resource
        self.open_files.append(run_file.file, b"")  # which cuts off what a failed write may have left
        self.open_files.release(run_file.file)
        columns, wider = [*run_file.columns, *new], run_file.file.with_name(f".{run_file.file.name}.new")
        try:
            with self.open_files.writing(run_file.file):
                with open(run_file.file, "rb") as old, open(wider, "wb") as table:
                    table.write(_row(map(_name, columns)).encode(errors="backslashreplace"))
                    for row in itertools.islice(_rows(old), 1, None):  # all but the old names
                        table.write(row[:-1] + b"," * len(new) + b"\n")
                    table.flush()
                    os.fsync(table.fileno())
                os.replace(wider, run_file.file)
        except BaseException:
            wider.unlink(missing_ok=True)
            raise
        run_file.columns = columns


# --- cells, as they are in the file ---

# With one of these in front, a spreadsheet takes text for a formula. The last one tells that one was added.
_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20'")
_SPECIAL = re.compile(r'[,"\r\n]')


def _name(column: str) -> str:
    return _quoted(f"'{column}" if column.startswith(_FORMULA) else column)


def _cells(column: Column) -> list[str]:
    if not isinstance(column, np.ndarray):
        return list(map(_cell, column))
    return number_texts(column, _cell) if column.ndim == 1 else list(map(_quoted, json_texts(column)))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return _quoted(json_text(value))
    # Text is a complex number, or the name of a picture.
    return str(value) if not isinstance(value, str) or _is_number(value) else _name(value)


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True


def _quoted(text: str) -> str:
    # By hand, because Python before 3.13 does not quote a carriage return, at which others begin a new row.
    return '"' + text.replace('"', '""') + '"' if _SPECIAL.search(text) else text


def _row(cells: Iterable[str]) -> str:
    return (",".join(cells) or '""') + "\n"  # a single empty cell must not be an empty line


def _rows(table: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the rows of a table, given its lines: a line break inside quotes does not end a row."""
    row = b""
    for line in table:
        row += line
        if row.count(b'"') % 2 == 0:
            yield row
            row = b""
