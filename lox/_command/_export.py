"""`lox export`: all events in one file or folder that other programs read.

In CSV, JSON lines and Parquet a row is one event of one leaf of one key, in one lane (`_rows`). A writer for
each format takes them, run by run: a directory may be larger than memory. What is written gets its name when
it is complete.
"""

import contextlib
import errno
import functools
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from lox import _errors
from lox._command import _print
from lox._command._rows import Rows, Table
from lox.loggers._files import _csv
from lox.loggers._files._rows import plain, strict_json
from lox.store._reader import Reader
from lox.store._table import Run

FORMATS = ("csv", "jsonl", "parquet", "tensorboard")
_WAY_OUT = "Nothing is left of it. Free some space, or choose another place with -o."


def format_of(to: str | None, out: str) -> str:
    """Return the format: what is asked for, or what the name of the file says."""
    suffix = Path(out).suffix.removeprefix(".")
    found = to or {"ndjson": "jsonl", "pq": "parquet"}.get(suffix, suffix)
    if found not in FORMATS:
        what = f"--to {to!r}" if to else f"-o {out!r} does not say the format"
        raise _errors.OptionError(f"{what}: choose --to {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    return found


# --- what is not there yet ---


@contextlib.contextmanager
def written(out: Path, force: bool, is_folder: bool = False) -> Iterator[Path]:
    """Give a place to write to, which gets its name at the end; nothing is left of it if something fails."""
    check_free(out, force, is_folder)
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            if is_folder:
                part.mkdir()
            yield part
            if is_folder and force and out.exists():
                shutil.rmtree(out)
            # Another process may have made it meanwhile: a link, unlike a new name, never replaces a file.
            if is_folder or force:
                os.replace(part, out)
            else:
                _link(part, out)
        except FileExistsError:
            raise _exists(out) from None
        except OSError as error:
            if isinstance(error, _errors.LoxError | BrokenPipeError):
                raise
            raise _errors.cannot_write(out, error, _WAY_OUT) from error
    finally:
        if is_folder:
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _link(part: Path, out: Path) -> None:
    try:
        os.link(part, out)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if out.exists():
            raise FileExistsError(errno.EEXIST, "exists") from None
        os.replace(part, out)


def check_free(out: Path, force: bool, is_folder: bool) -> None:
    """Refuse to overwrite, before anything is read; and to delete a folder that is not an export, even with --force."""
    if not out.absolute().parent.is_dir():
        raise _errors.StoreError(f"there is no directory {str(out.absolute().parent)!r} to write {out.name!r} to.")
    if not os.path.lexists(out):
        return
    if not force:
        raise _exists(out)
    if out.is_dir() and not is_folder:
        raise _errors.StoreError(f"{str(out)!r} is a directory: choose the name of a file with -o.")
    if is_folder and not (out.is_dir() and all(map(_is_exported_run, out.iterdir()))):
        raise _errors.StoreError(
            f"{str(out)!r} is not an export: it has something else than folders with TensorBoard's files. --force "
            "would delete it. Choose another place with -o, or remove it yourself."
        )


def _is_exported_run(folder: Path) -> bool:
    return folder.is_dir() and all(file.name.startswith("events.out.tfevents.") for file in folder.iterdir())


def _exists(out: Path) -> _errors.StoreError:
    return _errors.StoreError(f"{str(out)!r} exists. Choose another name with -o, or replace it with --force.")


# --- text ---


def _texts(x: np.ndarray) -> list[str]:
    """Return numbers as short texts that read back as the same numbers, of the same dtype."""
    return list(map(str, plain(x)))


def _csv_rows(table: Table, rows: Rows) -> Iterator[str]:
    name = lambda text: _csv._name(_errors.encodable(text))  # noqa: E731
    count = len(rows)
    columns: list[list[str]] = [rows.lanes, _texts(rows.events)]
    for step in table.step_columns:
        x, missing = rows.steps.get(step, (np.zeros(count), np.ones(count, bool)))
        columns.append(["" if m else text for text, m in zip(_texts(x), missing.tolist(), strict=True)])
    if table.has_wall:
        columns.append([""] * count if rows.wall is None else _texts(rows.wall))
    config = [_csv._cell(rows.config.get(column)) for column in table.config_columns]
    columns += [[cell] * count for cell in config]
    values = rows.plain()
    scalar = not rows.leaf.shape and rows.leaf.kind not in ("histogram", "image") and rows.leaf.values.dtype.kind != "c"
    columns.append(list(map(str, values)) if scalar else [_csv._cell(x) for x in values])
    first = f"{name(rows.run)},{name(rows.leaf.name)},{rows.leaf.kind},"
    return (f"{first}{','.join(cells)}\n" for cells in zip(*columns, strict=True))


def _json_rows(table: Table, rows: Rows) -> Iterator[str]:
    count = len(rows)
    member = lambda name, text: f"{json.dumps(_errors.encodable(name))}: {text}"  # noqa: E731
    first = ", ".join(
        member(name, _json(x)) for name, x in (("run", rows.run), ("key", rows.leaf.name), ("dtype", rows.leaf.kind))
    )
    config = "".join(f", {member(name, _json(x))}" for name, x in rows.config.items())
    columns = [[f', "lane": "{lane}"' if lane else "" for lane in rows.lanes]]
    columns.append([f', "event": {event}' for event in rows.events.tolist()])
    for step, (x, missing) in rows.steps.items():
        start = f", {member(table.step_columns[step], '')}"
        texts = zip(map(_json, plain(x)), missing.tolist(), strict=True)
        columns.append(["" if absent else start + text for text, absent in texts])
    columns.append([""] * count if rows.wall is None else [f', "wall": {x!r}' for x in rows.wall.tolist()])
    values = map(_json, rows.plain())
    return (
        f'{{{first}{"".join(cells)}{config}, "value": {value}}}\n'
        for *cells, value in zip(*columns, values, strict=True)
    )


def _json(x: Any) -> str:
    """Return a value as JSON; what most are is done first, because there are millions."""
    if type(x) is int or (type(x) is float and math.isfinite(x)):
        return repr(x)
    return json.dumps(strict_json(x), allow_nan=False)


def write_text(table: Table, to: str, out: IO[bytes]) -> int:
    """Write CSV or JSON lines; return the number of rows."""
    count = 0
    if to == "csv":
        out.write(_csv._row(map(_csv._name, map(_errors.encodable, [*table.columns, "value"]))).encode())
    for rows in table.rows():
        lines = _csv_rows(table, rows) if to == "csv" else _json_rows(table, rows)
        out.write("".join(lines).encode())
        count += len(rows)
    return count


# --- all formats ---


def export(
    reader: Reader, runs: Sequence[Run], patterns: Sequence[str], to: str, out: str, force: bool, with_config: bool
) -> str:
    """Write the events of these runs; return what was written, in words."""
    if to == "tensorboard":
        from lox._command import _export_tensorboard

        if with_config:
            _print.warning("--config changes nothing here: TensorBoard gets the config of every run.")
        write: Callable[[Path], str] = functools.partial(_export_tensorboard.write, reader, runs, patterns)
        return _to_file(out, force, write, is_folder=True)
    table = Table(reader, runs, patterns, with_config)
    if out == "-":
        if to == "parquet":
            raise _errors.OptionError("Parquet cannot be written to a pipe: name a file with -o.")
        return f"{write_text(table, to, sys.stdout.buffer):,} rows"

    def write_rows(file: Path) -> str:
        if to == "parquet":
            from lox._command import _export_parquet

            return f"{_export_parquet.write(table, file):,} rows"
        with open(file, "wb") as opened:
            count = write_text(table, to, opened)
            opened.flush()
            os.fsync(opened.fileno())
        return f"{count:,} rows"

    return _to_file(out, force, write_rows)


def _to_file(out: str, force: bool, write: Callable[[Path], str], is_folder: bool = False) -> str:
    if out == "-":
        raise _errors.OptionError("TensorBoard's files are a folder for each run: name a folder with -o.")
    with written(Path(out), force, is_folder) as part:
        return write(part)
