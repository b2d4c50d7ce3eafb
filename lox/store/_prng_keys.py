"""PRNG keys on the host."""

from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays
from lox.store import names


class KeyData:
    """PRNG keys on the host: their words and the name of their implementation.

    Code in callbacks must not touch JAX, and typed PRNG keys are JAX arrays. This replaces them as a leaf of a value.
    """

    __slots__ = ("data", "impl")

    def __init__(self, data: Any, impl: str):
        self.data, self.impl = np.asarray(data, np.uint32), str(impl)

    @property
    def dtype(self) -> str:
        """The name of the dtype of such PRNG keys, as JAX writes it."""
        return f"key<{self.impl}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of PRNG keys, without the axis of the words."""
        return self.data.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of axes, without the axis of the words."""
        return self.data.ndim - 1

    def __repr__(self) -> str:
        return f"KeyData({self.data!r}, {self.impl!r})"


def is_prng_key(x: Any) -> bool:
    """Tell whether this is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and not isinstance(x, KeyData) and _arrays.is_prng_key(x.dtype)


def words_of(prng_key: Any) -> tuple[np.ndarray[Any, Any], str]:
    """Return the words and the implementation of PRNG keys, typed or raw."""
    if isinstance(prng_key, KeyData):
        return prng_key.data, prng_key.impl
    if is_prng_key(prng_key):
        return np.asarray(jax.random.key_data(prng_key)), impl_name(prng_key)
    data = np.asarray(prng_key)
    if data.dtype != np.uint32 or not names.is_raw(data):
        raise _errors.LogTypeError(
            f"`key` is {prng_key!r}: give the run's PRNG key, such as `jax.random.key(42)`, or its name as a string."
        )
    return data, names.impl_of_raw(data)


def impl_name(prng_key: Any) -> str:
    """Return the name of the implementation of a typed PRNG key."""
    return _compat.prng_impl(prng_key.dtype)
