"""`load`, `runs`, `save` and `repair`."""

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lox import _arrays, _errors
from lox._logdict import logdict
from lox.store import _group, names
from lox.store._catalog import check_mode
from lox.store._group import Group
from lox.store._reader import Reader, Run, Runs, selector
from lox.store._rows import KeyData
from lox.store._writer import Writer


def words_of(key: Any) -> tuple[np.ndarray[Any, Any], str]:
    """The words and the implementation of PRNG keys, typed or raw."""
    if isinstance(key, KeyData):
        return key.data, key.impl
    if hasattr(key, "dtype") and _arrays.is_prng_key(key.dtype):
        return np.asarray(jax.random.key_data(key)), impl_name(key)
    data = np.asarray(key)
    if data.dtype != np.uint32 or data.ndim == 0 or data.shape[-1] not in (2, 4):
        raise _errors.LogTypeError(
            f"`key` is {key!r}: give the PRNG key of the run, such as `jax.random.key(42)`, or its name as a string."
        )
    return data, names.impl_of_raw(data)


def impl_name(key: Any) -> str:
    """The name of the implementation of a typed key."""
    impl = jax.random.key_impl(key)
    return impl if isinstance(impl, str) else key.dtype._impl.name


def load(path: str | os.PathLike[str], key: Any = None, argnames: str | Iterable[str] | None = None) -> Any:
    """Read logs from a directory that a `SaveLogger` or `lox.save` wrote to.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory, key = tempfile.mkdtemp(), jax.random.key(42)
    >>> for i in range(3):
    ...     lox.save(lox.logdict({"loss": np.float32(i)}, steps={"step": {"loss": i}}), directory, key)
    >>> logs = lox.load(directory, key)
    >>> print(logs, logs.step)
    {'loss': [0.0, 1.0, 2.0]} {'loss': [0, 1, 2]}

    Args:
        path: The directory.
        key: The PRNG key of a run, of which the newest attempt is loaded; or an array of keys: the runs come with a
            lane axis in front. The name of a run, such as `"42.1"`, will do too.
        argnames: Load these keys of the logs only; globs such as `"train/*"` are allowed. The others are not read.

    Returns:
        A `logdict` of NumPy arrays in which every key has an event axis. Without `key`, and if the directory has
        several runs: a mapping from their names to such logdicts, which are loaded when they are asked for; its
        `stack()` makes one logdict with a lane axis of them.

    Raises:
        RunNotFoundError: There is no such directory or run.
        StoreError: The directory cannot be read.
        MismatchError: The events of a key do not fit into one array.
    """
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
    reader._scan_for([records[name] for name in chosen], stacklevel=3)
    if single:
        return reader._logs(chosen[0], select)
    if len(set(chosen)) < len(chosen):
        raise _errors.OptionError("`key` has the same PRNG key twice.")
    found = Runs(reader, chosen, select)
    return found if key is None else found.stack()


def runs(path: str | os.PathLike[str]) -> list[Run]:
    """The runs in a directory, oldest first, without their events.

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


def save(
    logs: Mapping[str, Any], path: str | os.PathLike[str], key: Any = None, mode: str = "append", config: Any = None
) -> None:
    """Write logs to a directory, from which `lox.load` reads them.

    >>> import tempfile, jax, jax.numpy as jnp, lox
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     return x + 1.0
    >>> directory = tempfile.mkdtemp()
    >>> y, logs = lox.spool(f)(1.0)
    >>> lox.save(logs, directory)
    >>> print(lox.load(directory))
    {'x': [1.0]}

    Dicts, lists and tuples as values come back as such; other pytrees come back as dicts of their fields. Events that
    did not happen are left out.

    Args:
        logs: What `spool` returned, or any mapping. A key without an event axis is one event.
        path: The directory; it is made if need be.
        key: The PRNG key of the run. An array of keys makes every lane of the logs a run of its own.
        mode: What to do if there is such a run: `"append"` adds to the newest, `"new"` makes another, `"overwrite"`
            replaces it, `"error"` refuses.
        config: Hyper-parameters, kept as JSON with the run.

    Raises:
        StoreError: The directory cannot be written to.
        RunExistsError: The run exists and `mode` is `"error"`.
    """
    check_mode(mode)
    host = _on_host(logs if isinstance(logs, logdict) else logdict(logs))
    data, impl = (None, None) if key is None else words_of(key)
    with Writer(path) as writer:
        if data is None or data.ndim == 1:
            writer.append(writer.open_run(None, data, impl, config, mode), host)
        else:
            configs = None if config is None else [config] * int(np.prod(data.shape[:-1]))
            numbers = writer.open_runs(None, data, impl, configs, mode)
            writer.append(numbers.reshape(data.shape[:-1]), host)


def _on_host(logs: logdict) -> logdict:
    """NumPy arrays, without the slots in which nothing happened."""

    def to_numpy(x: Any) -> Any:
        if hasattr(x, "dtype") and _arrays.is_prng_key(x.dtype):
            return KeyData(jax.random.key_data(x), impl_name(x))
        return x if isinstance(x, KeyData) else np.asarray(x)

    return jax.tree.map(to_numpy, logs.compact())


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
            warnings.warn(
                f"{str(group.path)!r} was left alone: its writer seems to be alive. "
                "Close it first, or use `force=True` if it is dead.",
                _errors.LoxWarning,
                stacklevel=2,
            )
            continue
        for segment in broken:
            repaired[str(segment.path)] = segment.leftover
            _cut(group, segment.path, segment.end, segment.damage is not None, segment.schema is None)
    return repaired


def _cut(group: Group, path: Path, end: int, damaged: bool, empty: bool) -> None:
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
