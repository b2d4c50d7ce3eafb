"""PRNG keys among the values of events.

To the host a key travels as its words, and what made it would be forgotten. So it travels as a node of the value's
pytree that knows: whatever handles the arrays of an event need not.
"""

from typing import Any

import jax
import numpy as np

from lox._data import _arrays
from lox._data._logdict import logdict
from lox.store._keys import KeyData, impl_name


@jax.tree_util.register_pytree_node_class
class KeyWords:
    """The words of PRNG keys, which are the last axis of an array, and what made the keys."""

    __slots__ = ("impl", "words")

    def __init__(self, words: Any, impl: str):
        self.words, self.impl = words, impl

    def tree_flatten(self) -> tuple[Any, str]:
        """As a pytree, the implementation is structure."""
        return (self.words,), self.impl

    @classmethod
    def tree_unflatten(cls, impl: str, children: Any) -> "KeyWords":
        """The inverse of `tree_flatten`."""
        return cls(children[0], impl)


def is_key(x: Any) -> bool:
    """Whether this is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and _arrays.is_prng_key(x.dtype)


def with_words(leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of a value with `KeyWords` in place of keys: as many leaves, in the same order."""
    if not any(map(is_key, leaves)):
        return leaves, treedef
    nodes = [KeyWords(jax.random.key_data(x), impl_name(x)) if is_key(x) else x for x in leaves]
    return jax.tree.flatten(jax.tree.unflatten(treedef, nodes))


def words_only(logs: logdict) -> logdict:
    """For loggers that have no use for keys: their words, as arrays."""
    if all(type(value) is np.ndarray for value in logs.values()):
        return logs
    bare = {key: jax.tree.map(_words, value, is_leaf=_is_node) for key, value in logs.items()}
    return logs._replace(bare)


def with_key_data(logs: logdict) -> logdict:
    """For loggers that keep keys: `KeyData`, an array of keys without the axis of the words."""
    if all(type(value) is np.ndarray for value in logs.values()):
        return logs
    values, layouts = {}, dict(logs._layouts)
    for key, value in logs.items():
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_node)
        values[key] = jax.tree.unflatten(treedef, [KeyData(x.words, x.impl) if _is_node(x) else x for x in leaves])
        ndims = [n - _is_node(x) for n, x in zip(layouts[key].ndims, leaves, strict=True)]
        layouts[key] = layouts[key]._replace(ndims=tuple(ndims))
    return logs._replace(values, layouts=layouts)


def _is_node(x: Any) -> bool:
    return type(x) is KeyWords


def _words(x: Any) -> Any:
    return x.words if _is_node(x) else x
