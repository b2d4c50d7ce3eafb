"""`lox.load`, `lox.runs` and `lox.store.repair`: what users need to read a directory."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lox import _errors
from lox._data import _sites
from lox._engine import _selection
from lox.store import names
from lox.store._group import WAY_OUT
from lox.store._prng_keys import words_of
from lox.store._reader import Reader, Run, Runs, selector


def load(path: str | os.PathLike[str], key: Any = None, argnames: str | Iterable[str] | None = None) -> Any:
    """Read logs from a directory that a `SaveLogger` or `lox.save` wrote to.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory, prng_key = tempfile.mkdtemp(), jax.random.key(42)
    >>> for i in range(3):
    ...     lox.save(lox.logdict({"loss": np.float32(i)}, steps={"step": {"loss": i}}), directory, prng_key)
    >>> logs = lox.load(directory, prng_key)
    >>> print(logs, logs.step)
    {'loss': [0.0, 1.0, 2.0]} {'loss': [0, 1, 2]}

    Args:
        path: The directory.
        key: The PRNG key of a run, whose newest attempt is loaded. An array of PRNG keys loads several runs, with a
            lane axis in front. The name of a run, such as `"42.1"`, is accepted too.
        argnames: Load only these keys of the logs; globs such as `"train/*"` are allowed. Other keys are not read.

    Returns:
        A `logdict` of NumPy arrays in which every key has an event axis. Without `key`, if the directory has several
        runs: a mapping from their names to such logdicts, each loaded when it is accessed; its `stack()` makes one
        logdict with a lane axis of them. Events of a key that do not fit into one array, for instance of one line under
        a `vmap` of 4 and one of 6, are kept apart as `"h@4"` and `"h@6"`, with a warning; `argnames="h"` selects all of
        them.

    Raises:
        RunNotFoundError: The directory or the run does not exist.
        StoreError: The directory cannot be read.
    """
    argnames = None if argnames is None else _selection.names("argnames", argnames)
    select = selector(argnames)
    reader = Reader(path)
    reader._open_for_loading()
    records = reader._catalog.records
    if not records:
        raise _errors.RunNotFoundError(f"the directory {str(reader.path)!r} has no runs yet.")
    if key is None:
        chosen, single = list(records), len(records) == 1
    elif isinstance(key, str):
        if key not in records:
            raise reader._no_run(key)
        chosen, single = [key], True
    else:
        data, impl = words_of(key)
        chosen, single = [], data.ndim == 1
        for base in names.base_names(data, impl):
            newest = reader._catalog.newest(base)
            if newest is None:
                raise reader._no_run(base)
            chosen.append(newest.name)
    reader._scan_for([records[name] for name in chosen])
    reader._check_names([records[name] for name in chosen], argnames)
    if single:
        return reader._logs(chosen[0], select)
    if len(set(chosen)) < len(chosen):
        raise _errors.OptionError("`key` has the same PRNG key twice.")
    chosen_runs = Runs(reader, chosen, select)
    return chosen_runs if key is None else chosen_runs.stack()


def runs(path: str | os.PathLike[str]) -> list[Run]:
    """List the runs in a directory, oldest first, without their events.

    >>> import tempfile, jax, lox
    >>> directory = tempfile.mkdtemp()
    >>> lox.save({"x": 1}, directory, jax.random.key(42), mode="new")
    >>> lox.save({"x": 2}, directory, jax.random.key(42), mode="new")
    >>> [run.name for run in lox.runs(directory)]
    ['42', '42.1']
    """
    reader = Reader(path)
    reader._open_for_loading()
    return reader.runs()


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
        raise _errors.cannot_write(file, error, WAY_OUT) from error
