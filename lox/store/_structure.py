"""The structure of a pytree as JSON, never as code.

Dicts, lists, tuples, None, `lox.Histogram` and `lox.Image` come back as they were. A namedtuple, a dataclass or any
other registered node comes back as a dict of its fields: to restore the class, a file would have to name code to call.
"""

import dataclasses
import itertools
import operator
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _histogram
from lox._data._histogram import Histogram
from lox._data._image import Image

EVENT_NUMBER = "lox:event"  # a step of events with shards: the same number in all processes


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Shards:
    """A value of which this process has some blocks: for each of its arrays the blocks, and where they begin and end.

    The shapes are those of the whole arrays.
    """

    blocks: list[list[Any]]
    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    index: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]  # for each array, block and axis

    def tree_flatten(self) -> tuple[Any, Any]:
        """The blocks are children."""
        return (self.blocks,), (self.treedef, self.shapes, self.index)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Shards":
        """The inverse of `tree_flatten`."""
        return cls(children[0], *static)


# A structure is one of: "*" (an array), None, {"dict": [[key, structure], ...]}, {"list": [...]}, {"tuple": [...]},
# and like a dict {"image": [["pixels", "*"]]} and {"histogram": [["edges", [number, ...]], ["counts", "*"], ...]}.
# Outermost, there may be {"shards": [structure, [[shape, [[[start, stop], ...], ...]], ...]]}, with blocks for arrays.
LEAF = "*"

_NAMED = ("dict", "histogram", "image")  # kinds whose children have names
_FIELDS = {"histogram": _histogram.FIELDS, "image": ("pixels",)}
_KEY_TYPES = (str, int, float, bool, type(None))


def describe(value: Any, what: str) -> Any:
    """Describe the structure of a value, in the order in which JAX flattens it."""
    if value is None:
        return None
    if isinstance(value, Shards):
        whole = jax.tree.unflatten(value.treedef, [0] * len(value.shapes))
        return {"shards": [describe(whole, what), [list(pair) for pair in zip(value.shapes, value.index, strict=True)]]}
    if isinstance(value, dict):
        # jax.tree.flatten sorts the keys of every dict but an OrderedDict.
        children = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)[0]
        return {"dict": [[_key(tree_path[0].key, what), describe(x, what)] for tree_path, x in children]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [describe(x, what) for x in value]}
    if jax.tree_util.all_leaves([value]):
        return LEAF
    children = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)[0]
    fields = [[_field(tree_path[0]), describe(x, what)] for tree_path, x in children]
    if isinstance(value, Histogram):
        return {"histogram": [["edges", value.edges.tolist()], *fields]}
    return {"image" if isinstance(value, Image) else "dict": fields}


def _key(key: Any, what: str) -> Any:
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, tuple):
        return {"tuple": [_key(k, what) for k in key]}
    if not isinstance(key, _KEY_TYPES):
        raise _errors.LogTypeError(
            f"{what} has a dict with the key {key!r}, which lox cannot store: use strings or numbers as keys."
        )
    return key


def _field(entry: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            field = getattr(entry, attribute)
            return field if isinstance(field, _KEY_TYPES) else str(field)
    return str(entry)


def tree_paths(structure: Any) -> list[list[Any]]:
    """Return the keys and indices that lead to each array, from the outside in."""
    if structure == LEAF:
        return [[]]
    if structure is None:
        return []
    if _is_shards(structure):
        whole, parts = structure["shards"]
        return [
            [*path, n] for path, (_, index) in zip(tree_paths(whole), parts, strict=True) for n in range(len(index))
        ]
    kind, children = _open(structure)
    pairs = children if kind in _NAMED else enumerate(children)
    return [[key, *tree_path] for key, child in pairs for tree_path in tree_paths(child)]


def count(structure: Any) -> int:
    """Count the arrays; raise a ValueError for an invalid structure."""
    numbers = itertools.count()
    _build_shards(structure, numbers) if _is_shards(structure) else _build(structure, numbers)
    return next(numbers)


def build(structure: Any, leaves: list[Any]) -> Any:
    """Build the value from its arrays; raise a ValueError for an invalid structure."""
    rest = iter(leaves)
    value = _build_shards(structure, rest) if _is_shards(structure) else _build(structure, rest)
    if next(rest, rest) is not rest:
        raise ValueError("more arrays than the structure has")
    return value


def _build(structure: Any, leaves: Any) -> Any:
    if structure == LEAF:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("fewer arrays than the structure has") from None
    if structure is None:
        return None
    kind, children = _open(structure)
    if kind == "histogram":
        return _histogram.with_edges(structure[kind][0][1], [_build(child, leaves) for _, child in children])
    if kind == "image":
        return Image.tree_unflatten(None, [_build(child, leaves) for _, child in children])
    if kind == "dict":
        return {_unkey(key): _build(child, leaves) for key, child in children}
    built = [_build(child, leaves) for child in children]
    return built if kind == "list" else tuple(built)


def _is_shards(structure: Any) -> bool:
    return isinstance(structure, dict) and structure.keys() == {"shards"}


def _build_shards(structure: Any, leaves: Any) -> Shards:
    try:
        whole, parts = structure["shards"]
        shapes = tuple(tuple(map(operator.index, shape)) for shape, _ in parts)
        index = tuple(
            tuple(tuple((operator.index(a), operator.index(b)) for a, b in bounds) for bounds in blocks)
            for _, blocks in parts
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{structure!r} is not a structure") from error
    for shape, blocks in zip(shapes, index, strict=True):
        for bounds in blocks:
            if len(bounds) != len(shape) or not all(0 <= a <= b <= n for (a, b), n in zip(bounds, shape, strict=True)):
                raise ValueError(f"{structure!r} is not a structure")
    order, treedef = jax.tree.flatten(build(whole, [*range(len(shapes))]))
    # Nodes that come back as dicts are flattened in another order.
    blocks = [[_build(LEAF, leaves) for _ in blocks] for blocks in index]
    return Shards([blocks[n] for n in order], treedef, tuple(shapes[n] for n in order), tuple(index[n] for n in order))


def _unkey(key: Any) -> Any:
    if isinstance(key, dict):
        kind, parts = _open(key)
        if kind == "tuple":
            return tuple(_unkey(k) for k in parts)
    if not isinstance(key, _KEY_TYPES):
        raise ValueError(f"{key!r} is not a key of a dict")
    return key


def _open(structure: Any) -> tuple[str, Any]:
    if not isinstance(structure, dict) or len(structure) != 1:
        raise ValueError(f"{structure!r} is not a structure")
    ((kind, children),) = structure.items()
    if kind not in (*_NAMED, "list", "tuple") or not isinstance(children, list):
        raise ValueError(f"{structure!r} is not a structure")
    if kind in _NAMED and not all(isinstance(pair, list) and len(pair) == 2 for pair in children):
        raise ValueError(f"{structure!r} is not a structure")
    if kind == "histogram":
        edges, *children = children or [None]
        if not _are_edges(edges):
            raise ValueError(f"{structure!r} is not a structure")
    fields = _FIELDS.get(kind)
    if fields is not None and children != [[field, LEAF] for field in fields]:
        raise ValueError(f"{structure!r} is not a structure")
    return kind, children


def _are_edges(pair: Any) -> bool:
    if not isinstance(pair, list) or pair[0] != "edges" or not isinstance(pair[1], list) or len(pair[1]) < 2:
        return False
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair[1])
