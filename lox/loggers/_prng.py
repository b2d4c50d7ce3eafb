"""PRNG keys among the values of events.

A PRNG key travels to the host as its words, which do not tell its implementation. A node of the value's pytree does,
so code that handles the arrays of an event need not know.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from lox._data._logdict import logdict
from lox.store._prng_keys import KeyData, impl_name, is_prng_key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PRNGKeyWords:
    """PRNG keys as their words, the last axis of an array, and the name of their implementation."""

    words: Any
    impl: str = dataclasses.field(metadata=dict(static=True))


def with_words(leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
    """Replace PRNG keys by `PRNGKeyWords`: the number and order of leaves stay the same."""
    if not any(map(is_prng_key, leaves)):
        return leaves, treedef
    nodes = [PRNGKeyWords(jax.random.key_data(x), impl_name(x)) if is_prng_key(x) else x for x in leaves]
    return jax.tree.flatten(jax.tree.unflatten(treedef, nodes))


def words_only(logs: logdict) -> logdict:
    """Replace PRNG keys by plain arrays of their words, for loggers that have no use for them."""
    if all(type(value) is np.ndarray for value in logs.values()):
        return logs
    bare = {key: jax.tree.map(_words, value, is_leaf=_is_node) for key, value in logs.items()}
    return logs._replace(bare)


def with_key_data(logs: logdict) -> logdict:
    """Replace PRNG keys by `KeyData`, which hides the axis of the words, for loggers that store them."""
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
    return type(x) is PRNGKeyWords


def _words(x: Any) -> Any:
    return x.words if _is_node(x) else x
