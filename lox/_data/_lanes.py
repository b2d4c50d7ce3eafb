"""Arrays that know which of their leading axes are lanes.

A log inside `vmap` reaches lox with another leading axis, but only if the value depends on the lane. `flags` has one
flag for every vmap around the log, outermost first, that says whether the array has its axis: an array with flags
`(True, False)` has the shape `(outer, *item)`. Outside of a shard_map its devices count as another, outermost lane.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lox import _compat
from lox._data import _axes
from lox._record import record


@record
class Vmap:
    """The flag of a vmap with a name, which distinguishes it from others of the same size."""

    axis_name: Any
    spmd_axis_name: Any

    def __str__(self) -> str:
        names = {"axis_name": self.axis_name, "spmd_axis_name": self.spmd_axis_name}
        return ", ".join(f"{what}={name!r}" for what, name in names.items() if name is not None)


# A flag is a bool, the name of a vmap, or, for the devices of a shard_map, the names of the mesh axes over which the
# array varies.
Flag = bool | Vmap | tuple[str, ...]
Flags = tuple[Flag, ...]


def flag_of(axis_data: Any) -> bool | Vmap:
    """The flag of arrays that this vmap maps over."""
    names = _compat.vmap_names(axis_data)
    return Vmap(*names) if any(name is not None for name in names) else True


def unnamed(flags: Flags) -> Flags:
    """Flags without the names of vmaps, on which the structure of logs does not depend."""
    return tuple(True if isinstance(f, Vmap) else f for f in flags)


def _joined(a: Flag, b: Flag) -> Flag | None:
    """One flag for two axes of the same size; None if they come from different vmaps or different mesh axes."""
    if isinstance(a, tuple) and isinstance(b, tuple) and not {*a} & {*b}:
        return None
    if not (isinstance(a, Vmap) and isinstance(b, Vmap)):
        return a if isinstance(a, Vmap) and b is True else b
    pairs = [(a.axis_name, b.axis_name), (a.spmd_axis_name, b.spmd_axis_name)]
    if any(x is not None and y is not None and x != y for x, y in pairs):
        return None
    return Vmap(*[y if x is None else x for x, y in pairs])


@jax.tree_util.register_pytree_node_class
class Laned:
    """A pytree of arrays that all have the lanes given by `flags`, after `lead` axes that the owner knows about."""

    __slots__ = ("flags", "tree")

    def __init__(self, tree: Any, flags: Flags = ()):
        self.tree, self.flags = tree, flags

    def tree_flatten(self) -> tuple[Any, Any]:
        """The arrays are children; flags are structure."""
        return (self.tree,), self.flags

    @classmethod
    def tree_unflatten(cls, flags: Flags, children: Any) -> "Laned":
        """The inverse of `tree_flatten`."""
        return cls(children[0], flags)

    @property
    def ndim(self) -> int:
        """How many lane axes there are."""
        return sum(map(bool, self.flags))

    def map(self, fun: Any) -> "Laned":
        """Apply `fun` to the arrays, which must keep their lanes."""
        return Laned(jax.tree.map(fun, self.tree), self.flags)

    def item_shape(self, lead: int = 0) -> tuple[int, ...]:
        """The shape of a single array without leading axes and lanes."""
        return tuple(self.tree.shape[lead + self.ndim :])


def with_lane(x: Any, dim: int | None, flags: Flags, flag: Flag = True, lead: int = 0) -> Laned:
    """An array in another, outermost vmap, which maps over its axis `dim`, if over any."""
    return Laned(x if dim is None else jnp.moveaxis(x, dim, lead), (dim is not None and flag, *flags))


def is_laned(x: Any) -> bool:
    """Whether to stop here when mapping over the `Laned` of a tree."""
    return isinstance(x, Laned)


class Lanes(NamedTuple):
    """Flags together with the size of each lane axis (0 where the flag is off), and how it is explicitly sharded."""

    flags: Flags
    sizes: tuple[int, ...]
    shardings: tuple[Any, ...] = ()  # empty if no axis is sharded

    def present(self) -> tuple[int, ...]:
        """The sizes of the axes whose flag is on."""
        return tuple(size for flag, size in zip(self.flags, self.sizes, strict=True) if flag)

    def within(self, depth: int) -> "Lanes":
        """The same lanes with `depth` flags, if the only ones so far are those of devices."""
        more = [None] * (depth - len(self.flags)) if _only_devices(self.flags) else []
        shardings = (*self.shardings, *more) if self.shardings else ()
        return Lanes(with_depth(self.flags, depth), (*self.sizes, *[0] * len(more)), shardings) if more else self

    def __str__(self) -> str:
        sizes, names = self.present(), [str(flag) for flag in self.flags if isinstance(flag, Vmap)]
        names += [f"mesh axes {', '.join(flag)}" for flag in self.flags if flag and isinstance(flag, tuple)]
        text = f"{' × '.join(map(str, sizes))} lanes" if sizes else "no lanes"
        return f"{text} ({'; '.join(names)})" if names else text


def _only_devices(flags: Flags) -> bool:
    return bool(flags) and all(isinstance(flag, tuple) for flag in flags)


def with_depth(flags: Flags, depth: int) -> Flags:
    """Extend to `depth` flags, if there are none or only those of devices: such arrays are the same in all lanes."""
    return (*flags, *[False] * (depth - len(flags))) if not flags or _only_devices(flags) else flags


def lanes_of(laned: Laned, lead: int = 0) -> Lanes:
    """The lanes of an array, with sizes taken from its shape."""
    leaves = jax.tree.leaves(laned.tree)
    axes = iter(leaves[0].shape[lead:] if leaves else ())
    sizes = tuple(next(axes, 0) if f else 0 for f in laned.flags)
    shardings: list[Any] = [None] * laned.ndim
    for leaf in leaves if any(sizes) else ():  # some leaves of a state may be sharded when others are not yet
        of_leaf = _compat.axis_shardings(leaf)[lead:]
        shardings = [a or b for a, b in zip(shardings, of_leaf, strict=False)] if of_leaf else shardings
    if not any(shardings):
        return Lanes(laned.flags, sizes)
    rest = iter(shardings)
    return Lanes(laned.flags, sizes, tuple(next(rest) if f else None for f in laned.flags))


def union(*lanes: Lanes) -> Lanes | None:
    """Lanes wide enough for all; None if sizes, names or nesting depths cannot be reconciled."""
    depth = max((len(x.flags) for x in lanes), default=0)
    lanes = tuple(x.within(depth) for x in lanes)
    present = [x for x in lanes if x.flags]
    if len({len(x.flags) for x in present}) > 1 and len({x.present() for x in present}) == 1:
        # JAX sometimes batches twice, or skips an axis on which nothing depends: the lanes are the same.
        bare = [Lanes(tuple(f for f in x.flags if f), x.present()) for x in present]
        return None if union(*bare) is None else next(x for x in present if len(x.flags) == depth)
    flags: list[Any] = [False] * depth
    sizes = [0] * depth
    shardings: list[Any] = [None] * depth
    for x in lanes:
        if x.flags and len(x.flags) != depth:
            return None
        for i, (flag, size) in enumerate(zip(x.flags, x.sizes, strict=True)):
            if flag and flags[i]:
                flag = _joined(flags[i], flag)
                if flag is None or sizes[i] != size:
                    return None
            if flag or not flags[i]:
                flags[i], sizes[i] = flag or flags[i], size or sizes[i]
            if x.shardings:
                shardings[i] = shardings[i] or x.shardings[i]
    return Lanes(tuple(flags), tuple(sizes), tuple(shardings) if any(shardings) else ())


def widen(laned: Laned, lanes: Lanes, lead: int = 0) -> Laned:
    """Repeat arrays along the lanes they lack, and shard them along sharded lanes."""
    flags = with_depth(laned.flags, len(lanes.flags)) if _only_devices(laned.flags) else laned.flags
    have, wanted = [*map(bool, flags)], [*map(bool, lanes.flags)]
    if have == wanted or (len(have) != len(wanted) and sum(have) == sum(wanted)):
        return _sharded(Laned(laned.tree, lanes.flags), lanes, lead)
    have = have or [False] * len(wanted)

    front = [f"lead {n}" for n in range(lead)]
    axes = [*front, *_axes.lanes(have)], [*front, *_axes.lanes([a or b for a, b in zip(have, wanted, strict=True)])]
    sizes = dict(enumerate(lanes.sizes))
    arrays = jax.tree.map(lambda x: _axes.align(x, *axes, sizes), laned.tree)
    return _sharded(Laned(arrays, lanes.flags), lanes, lead)


def _sharded(laned: Laned, lanes: Lanes, lead: int) -> Laned:
    if not lanes.shardings:
        return laned
    present = [s for flag, s in zip(lanes.flags, lanes.shardings, strict=True) if flag]
    wanted = {lead + n: sharding for n, sharding in enumerate(present) if sharding is not None}
    return laned.map(lambda x: _compat.shard_axes(x, wanted))


def expand_to(laned: Laned, flags: Flags, ndim: int, lead: int = 0) -> Any:
    """Insert axes of size one into a single array, so that it broadcasts against lanes `flags` and `ndim` axes."""
    have = laned.flags or (False,) * len(flags)
    front = [f"lead {n}" for n in range(lead)]
    wanted = [a or b for a, b in zip(have, flags, strict=True)]
    x = _axes.align(laned.tree, [*front, *_axes.lanes(have)], [*front, *_axes.lanes(wanted)])
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def map_laned(fun: Callable[[Laned, int], Any], tree: Any, other: Callable[[Any], Any] = lambda x: x) -> Any:
    """Apply `fun(laned, lead)` to every `Laned` in a tree; in a series, `lead` counts the event axis.

    Other arrays are the same in all lanes: they stay, or become `other(array)`.
    """

    def visit(node: Any) -> Any:
        if isinstance(node, Laned):
            return fun(node, 0)
        if not hasattr(node, "lead"):
            return other(node)
        lead = node.lead
        return jax.tree.map(lambda x: fun(x, lead), node, is_leaf=is_laned)

    return jax.tree.map(visit, tree, is_leaf=lambda x: is_laned(x) or hasattr(x, "lead"))


def pick(x: Laned, index: tuple[int, ...]) -> Any:
    """One lane of an array."""
    return x.tree[tuple(i for i, flag in zip(index, x.flags, strict=True) if flag)]
