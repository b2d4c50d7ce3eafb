"""`lox.save`: writes logs to disk at once, without a logger."""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data._logdict import logdict
from lox._engine import _emit
from lox._engine._emit import Packet
from lox._engine._primitive import as_array
from lox.loggers._run import ConfigTree
from lox.store._catalog import check_mode
from lox.store._group import check_nesting
from lox.store._prng_keys import KeyData, impl_name, is_prng_key, words_of
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

    Works under `jit`, where it writes when the program gets there, and under `vmap`: every lane with a PRNG key of its
    own is a run; lanes that share a run are written one after the other.

    Dicts, lists, tuples, histograms and images come back as such; other pytrees come back as dicts of their fields.
    Invalid events are left out.

    If the program has several processes (`jax.distributed`), the first one writes: all of them have the same logs.

    Args:
        logs: What `spool` returned, or any mapping. A key without an event axis is one event.
        path: The directory; it is created if necessary.
        key: The PRNG key of the run. An array of PRNG keys makes every lane of the logs a run of its own. In a plain
            dict, the lanes are the leading axis of every array, and single numbers are in all runs.
        mode: What to do if the run exists: `"append"` adds to the newest, `"new"` makes another, `"overwrite"`
            replaces it, `"error"` refuses. In short, as for files: `"a"`, `"w"` and `"x"`.
        config: Hyper-parameters, stored as JSON with the run.

    Raises:
        MismatchError: There are not as many lanes as PRNG keys.
        StoreError: The directory cannot be written to.
        RunExistsError: The run exists and `mode` is `"error"`.
    """
    mode = check_mode(mode)
    check_nesting(config, fields=True)
    logs = logs if isinstance(logs, logdict) else logdict(logs)
    if lanes := _lanes_of(key):
        logs = _with_lanes(logs, lanes)
    if not _compat.is_evaluating():
        return _save_in_program(logs, path, key, mode, config)
    for name, value in logs.items():
        if split := [x for x in jax.tree.leaves(value) if _compat.is_split(x)]:
            raise _errors.in_other_processes([name], split[0].shape)
    if _compat.this_process().number:
        return
    host = _on_host(logs)
    words, impl = (None, None) if key is None else words_of(key)
    with Writer(path) as writer:
        _write(writer, [(words, host, config)], impl, mode)


def _lanes_of(key: Any) -> tuple[int, ...]:
    """The shape of an array of PRNG keys, typed or raw."""
    return np.shape(key) if is_prng_key(key) or isinstance(key, KeyData) else np.shape(key)[:-1]


def _with_lanes(logs: logdict, lanes: tuple[int, ...]) -> logdict:
    """Take the leading axes of values for lanes, if they were not logged: lox knows the lanes of those that were."""
    logs = logs.copy()
    for key in [key for key in logs if key not in logs._layouts]:
        layout = logs._layout(key)
        if layout.events:
            raise _errors.MismatchError(
                f"`lox.save` got PRNG keys of shape {lanes}, but {key!r} has events and does not say which axes are "
                f"lanes. Make such logs by `lox.logdict.from_arrays(..., lanes={len(lanes)})`."
            )
        shapes = [np.shape(x) for x in jax.tree.leaves(logs[key])]
        for shape in shapes:
            if shape and shape[: len(lanes)] != lanes:
                raise _errors.MismatchError(
                    f"`lox.save` got PRNG keys of shape {lanes}, but {key!r} has the shape {shape}: arrays must begin "
                    "with a lane for each PRNG key. To save the same for each: "
                    "`jax.vmap(lambda key: lox.save(logs, path, key))(keys)`."
                )
        logs._layouts[key] = layout._replace(flags=tuple((True,) * len(lanes) if shape else () for shape in shapes))
    return logs


def _write(writer: Writer, lanes: list[tuple[Any, logdict, Any]], impl: str | None, mode: str) -> None:
    """Write the logs of each lane, given the words of one PRNG key or several; lanes may share PRNG keys."""
    opened: dict[Any, Any] = {}
    for words, host, config in lanes:
        prng_key = None if words is None else (words.shape, words.tobytes())
        if prng_key not in opened:
            shape = () if words is None else words.shape[:-1]
            runs = writer.open_runs(None, words, impl, [config] * math.prod(shape), mode)
            opened[prng_key] = runs.reshape(shape)
        writer.append(opened[prng_key], host)


def _save_in_program(logs: logdict, path: str | os.PathLike[str], key: Any, mode: str, config: Any) -> None:
    leaves, treedef = jax.tree.flatten(logs)
    impls = [impl_name(x) if is_prng_key(x) else None for x in leaves]
    values = [jax.random.key_data(x) if is_prng_key(x) else as_array(x, "these logs") for x in leaves]
    words = [] if key is None else [jax.random.key_data(key) if is_prng_key(key) else key]
    key_impl = impl_name(key) if is_prng_key(key) else None
    tree, arrays = ConfigTree.of(config)

    def write(packet: Packet, token: int) -> None:
        del token
        lanes = []
        for given in packet.by_lane():
            if given is not None:
                rest = iter(given)
                lane = [KeyData(x, impl) if impl else x for impl, x in zip(impls, rest, strict=False)]
                lane_words = next(rest) if words else None
                lane_config = None if config is None else tree.rebuild(list(rest))
                lanes.append((lane_words, _on_host(jax.tree.unflatten(treedef, lane)), lane_config))
        if lanes:
            with Writer(path) as writer:
                _write(writer, lanes, key_impl, mode)

    _emit.ask(write, [*values, *words, *arrays])


def _on_host(logs: logdict) -> logdict:
    """Convert logs to NumPy arrays, without invalid events."""

    def to_numpy(x: Any) -> Any:
        if is_prng_key(x):
            return KeyData(jax.random.key_data(x), impl_name(x))
        return x if isinstance(x, KeyData) else np.asarray(x)

    return jax.tree.map(to_numpy, logs.compact())
