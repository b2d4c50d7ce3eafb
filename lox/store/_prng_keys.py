"""PRNG keys on the host, and on their way there.

A PRNG key travels to the host as its words, which do not tell its implementation. A node of the value's pytree does, so
code that handles the arrays of an event need not know.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays
from lox._data._bundle import Bundle
from lox._data._lanes import Laned, is_laned
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PRNGKeyWords:
    """PRNG keys as their words, the last axis of an array, and the name of their implementation."""

    words: Any
    impl: str = dataclasses.field(metadata=dict(static=True))


def as_words(bundle: Bundle) -> Bundle:
    """Replace PRNG keys by `PRNGKeyWords`: the number and order of leaves stay the same."""
    if not any(map(_has_prng_keys, bundle.values)):
        return bundle
    values, treedefs = [], []
    for key, treedef in zip(bundle.keys, bundle.treedefs, strict=True):
        nodes = [_node(x) if _has_prng_keys(x) else x for x in bundle.leaves(key)]
        leaves, treedef = jax.tree.flatten(jax.tree.unflatten(treedef, nodes), is_leaf=is_laned)
        values += leaves
        treedefs.append(treedef)
    return dataclasses.replace(bundle, values=values, treedefs=tuple(treedefs))


def _has_prng_keys(x: Laned) -> bool:
    return type(x.tree) is not np.ndarray and (type(x.tree) is KeyData or is_prng_key(x.tree))


def _node(x: Laned) -> PRNGKeyWords:
    if type(x.tree) is KeyData:
        return PRNGKeyWords(Laned(x.tree.data, x.flags), x.tree.impl)
    return PRNGKeyWords(Laned(jax.random.key_data(x.tree), x.flags), impl_name(x.tree))


def words_only(bundle: Bundle) -> Bundle:
    """Make PRNG keys plain arrays of their words, for loggers that have no use for them."""
    return dataclasses.replace(bundle, treedefs=tuple(map(_without_nodes, bundle.treedefs)))


@functools.lru_cache(1000)
def _without_nodes(treedef: Any) -> Any:
    is_node = lambda x: type(x) is PRNGKeyWords  # noqa: E731
    return jax.tree.structure(jax.tree.unflatten(treedef, [0] * treedef.num_leaves), is_leaf=is_node)


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
