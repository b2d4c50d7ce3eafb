"""`save`."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _arrays
from lox._logdict import logdict
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
