"""`CsvLogger`: a table per run."""

import csv
import io
import json
import os
from typing import Any

from lox._data._bundle import Bundle
from lox.loggers._files._plain import FileLogger, RunFile
from lox.loggers._files._rows import strict_json
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

    A new key needs a new column and so a new header: a new file is written next to the old one and replaces it when it
    is complete. Any program can read the table at any time, and a crash leaves either the old file or the new one. This
    costs a copy of the file per set of new keys; with thousands of keys that come one by one, use `JsonlLogger`.
    Existing files are left alone: the run is then called `42.1`. The config given to `init` is in `42.csv.config.json`.

    Args:
        path: The folder; it is created with the first run.
    """

    suffix = ".csv"

    def add(self, run: Run, bundles: list[Bundle]) -> None:
        """Add one row per event."""
        run_file: RunFile = run.resource
        table = [{column: _cell(x) for column, x in row.items()} for row in self.rows(run, bundles, split=True)]
        new = list(dict.fromkeys(column for row in table for column in row if column not in run_file.columns))
        if new:
            self._widen(run, [*run_file.columns, *new])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([row.get(c, "") for c in run_file.columns] for row in table)
        self.append(run, text.getvalue())

    def _widen(self, run: Run, columns: list[str]) -> None:
        run_file: RunFile = run.resource
        self.open_files.release(run_file.file)
        wider = run_file.file.with_name(f".{run_file.file.name}.new")
        options: dict[str, Any] = dict(encoding="utf-8", errors="backslashreplace", newline="")
        try:
            with open(run_file.file, **options) as old, open(wider, "w", **options) as new:
                writer = csv.writer(new, lineterminator="\n")
                writer.writerow(columns)
                rows_before = csv.reader(old)
                next(rows_before, None)
                writer.writerows(row + [""] * (len(columns) - len(row)) for row in rows_before)
                new.flush()
                os.fsync(new.fileno())
            os.replace(wider, run_file.file)
        except BaseException:
            wider.unlink(missing_ok=True)
            raise
        run_file.columns = columns


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(strict_json(value)) if isinstance(value, list | dict) else value
