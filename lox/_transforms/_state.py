"""The state of one key in the carry of loops: the accumulator of a reduction, or a buffer for a number of events.

Both start empty, take one event at a time and give their result at the end. Before lox has traced a loop it does not
know what the body logs; `conform` gives the state before the loop the type that the body returns.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._lanes import Laned, Lanes
from lox._data._series import Site
from lox._engine._event import Event

Item = tuple[tuple[int, ...], Any, Any]  # shape, dtype and explicit sharding of one leaf of the value


def typed_like(x: Any, like: Any) -> Any:
    """Give `x` exactly the type of `like`, varying axes and sharding included, as the carry of a loop requires."""
    aval = _compat.aval_of(like)
    if _arrays.is_prng_key(aval.dtype):
        return _compat.with_varying_axes_of(jnp.broadcast_to(x, aval.shape), aval)
    x = jnp.broadcast_to(jnp.asarray(x).astype(aval.dtype), aval.shape)
    if jax.typeof(x) == aval:
        return x
    zeros = _compat.zeros_of(aval)
    return x | zeros if aval.dtype == bool else x + zeros


def conform(x: Laned, target: Laned) -> Laned:
    """Widen an array to the lanes of `target`, with exactly its type."""
    return Laned(typed_like(_lanes.widen(x, _lanes.lanes_of(target)).tree, target.tree), target.flags)


def _varying_like(new: Any, old: Any) -> Any:
    """Let `new` vary as `old` did: the type of a state may only grow, or tracing would never end."""
    return _compat.with_varying_axes_of(new, _compat.aval_of(old))


def counted(key: str, count: Laned, valid: Laned | None) -> Laned:
    """Add one where the event is valid."""
    lanes = union(key, count, valid)
    one = jnp.ones((), jnp.int32) if valid is None else _lanes.widen(valid, lanes).tree.astype(jnp.int32)
    return Laned(_lanes.widen(count, lanes).tree + one, lanes.flags)


def union(key: str, *laned: Laned | None) -> Lanes:
    lanes = _lanes.union(*[_lanes.lanes_of(x) for x in laned if x is not None])
    if lanes is None:
        raise _errors.MismatchError(f"{key!r} is logged under different vmaps, which do not fit together.")
    return lanes


Parts = list[tuple[Laned, int]]  # arrays, each with the number of axes before its lanes


def site_of_lanes(key: str, old: Parts, site: Site, new: Parts, new_site: str) -> Site:
    """The line that the lanes come from; raise if those of `old` and `new` do not fit together."""
    before, after = (_lanes.union(*[_lanes.lanes_of(x, lead) for x, lead in parts]) for parts in (old, new))
    assert before is not None and after is not None  # each belongs to one state or event
    both = _lanes.union(before, after)
    if both is None:
        raise _errors.different_lanes(key, before, str(site), after, new_site)
    return site if both == before else Site(new_site)


def parts_of(key: str, event: Event) -> Parts:
    laned = [*event.values[key], *event.steps.values(), event.valid, event.weight]
    return [(x, 0) for x in laned if x is not None]


def check_items(key: str, treedef: Any, items: tuple[Item, ...], site: str, event: Event) -> tuple[Item, ...]:
    """The items of state and event together: the same structure and shapes, with promoted dtypes."""
    if event.treedefs[key] != treedef:
        raise _errors.mismatch(key, "structure", treedef, site, event.treedefs[key], event.site)
    joined = []
    for (shape, dtype, sharding), x in zip(items, event.values[key], strict=True):
        if x.item_shape() != shape:
            raise _errors.mismatch(key, "shape", f"shape {shape}", site, f"shape {x.item_shape()}", event.site)
        joined.append((shape, _arrays.promote(dtype, x.tree.dtype), sharding))
    return tuple(joined)


def items_of(key: str, event: Event) -> tuple[Item, ...]:
    return tuple(
        (x.item_shape(), x.tree.dtype, _compat.explicit_sharding(_compat.aval_of(x.tree), x.ndim))
        for x in event.values[key]
    )
