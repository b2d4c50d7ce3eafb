"""PRNG keys as users give them, on the host."""

from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _arrays
from lox.store import _dtypes, names


class KeyData:
    """PRNG keys on the host: their words and the name of their implementation.

    Code in callbacks must not touch JAX, and typed keys are JAX arrays; this stands for them as a leaf of a value.
    """

    __slots__ = ("data", "impl")

    def __init__(self, data: Any, impl: str):
        self.data, self.impl = np.asarray(data, np.uint32), str(impl)

    @property
    def dtype(self) -> str:
        """The name of the dtype of such keys."""
        return _dtypes.key_name(self.impl)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of keys, without their words."""
        return self.data.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of axes, without that of the words."""
        return self.data.ndim - 1

    def __repr__(self) -> str:
        return f"KeyData({self.data!r}, {self.impl!r})"


def words_of(key: Any) -> tuple[np.ndarray[Any, Any], str]:
    """The words and the implementation of PRNG keys, typed or raw."""
    if isinstance(key, KeyData):
        return key.data, key.impl
    if hasattr(key, "dtype") and _arrays.is_prng_key(key.dtype):
        return np.asarray(jax.random.key_data(key)), impl_name(key)
    data = np.asarray(key)
    if data.dtype != np.uint32 or not names.is_raw(data):
        raise _errors.LogTypeError(
            f"`key` is {key!r}: give the PRNG key of the run, such as `jax.random.key(42)`, or its name as a string."
        )
    return data, names.impl_of_raw(data)


def impl_name(key: Any) -> str:
    """The name of the implementation of a typed key."""
    impl = jax.random.key_impl(key)
    return impl if isinstance(impl, str) else key.dtype._impl.name
