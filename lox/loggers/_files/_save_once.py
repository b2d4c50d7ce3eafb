"""`lox.save`: logs to disk at once, without a logger."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _compat
from lox._data import _arrays, _lanes
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox._engine import _host_calls
from lox._engine._primitive import as_array
from lox.loggers._run import ConfigPlan
from lox.store._catalog import check_mode
from lox.store._keys import KeyData, impl_name, words_of
from lox.store._writer import Writer


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

    Works under `jit`, where it writes whenever the program gets there, and under `vmap`: every lane with a key of its
    own is a run; what lanes have to say of one run is written one lane after the other.

    Dicts, lists, tuples, histograms and images come back as such; other pytrees come back as dicts of their fields.
    Events that did not happen are left out.

    Args:
        logs: What `spool` returned, or any mapping. A key without an event axis is one event.
        path: The directory; it is made if need be.
        key: The PRNG key of the run. An array of keys makes every lane of the logs a run of its own.
        mode: What to do if there is such a run: `"append"` adds to the newest, `"new"` makes another, `"overwrite"`
            replaces it, `"error"` refuses. Short, as for files: `"a"`, `"w"` and `"x"`.
        config: Hyper-parameters, kept as JSON with the run.

    Raises:
        StoreError: The directory cannot be written to.
        RunExistsError: The run exists and `mode` is `"error"`.
    """
    mode = check_mode(mode)
    logs = logs if isinstance(logs, logdict) else logdict(logs)
    if not _compat.is_evaluating():
        return _save_when_run(logs, path, key, mode, config)
    host = _on_host(logs)
    data, impl = (None, None) if key is None else words_of(key)
    with Writer(path) as writer:
        _write(writer, [(data, host, config)], impl, mode)


def _write(writer: Writer, lanes: list[tuple[Any, logdict, Any]], impl: str | None, mode: str) -> None:
    """Write logs, for each lane those of a key or of several; if lanes have a key in common, one after the other."""
    opened: dict[Any, Any] = {}
    for data, host, config in lanes:
        which = None if data is None else (data.shape, data.tobytes())
        if which not in opened:
            if data is None or data.ndim == 1:
                opened[which] = writer.open_run(None, data, impl, config, mode)
            else:
                configs = None if config is None else [config] * int(np.prod(data.shape[:-1]))
                opened[which] = writer.open_runs(None, data, impl, configs, mode).reshape(data.shape[:-1])
        writer.append(opened[which], host)


def _save_when_run(logs: logdict, path: str | os.PathLike[str], key: Any, mode: str, config: Any) -> None:
    leaves, treedef = jax.tree.flatten(logs)
    impls = [impl_name(x) if _is_key(x) else None for x in leaves]
    words = [jax.random.key_data(x) if _is_key(x) else as_array(x, "these logs") for x in leaves]
    data = [] if key is None else [jax.random.key_data(key) if _is_key(key) else key]
    impl = impl_name(key) if data and _is_key(key) else None
    plan, arrays = ConfigPlan.of(config)

    def write(where: Laned, operands: list[Laned], lanes: tuple[int, ...], eager: bool) -> list[Any]:
        del eager
        found = []
        for index in np.ndindex(lanes):
            if _lanes.pick(where, index):
                rest = iter([_lanes.pick(x, index) for x in operands])
                values = [KeyData(x, of) if of else x for of, x in zip(impls, rest, strict=False)]
                own = next(rest) if data else None
                of_run = None if config is None else plan.rebuild(list(rest))
                found.append((own, _on_host(jax.tree.unflatten(treedef, values)), of_run))
        if found:
            with Writer(path) as writer:
                _write(writer, found, impl, mode)
        return []

    _host_calls.call(write, [*words, *data, *arrays])


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and not isinstance(x, KeyData) and _arrays.is_prng_key(x.dtype)


def _on_host(logs: logdict) -> logdict:
    """NumPy arrays, without the slots in which nothing happened."""

    def to_numpy(x: Any) -> Any:
        if _is_key(x):
            return KeyData(jax.random.key_data(x), impl_name(x))
        return x if isinstance(x, KeyData) else np.asarray(x)

    return jax.tree.map(to_numpy, logs.compact())
