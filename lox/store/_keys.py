"""PRNG keys as users give them, on the host."""

from typing import Any

import jax
import numpy as np

from lox import _arrays, _errors
from lox.store import names
from lox.store._rows import KeyData


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
