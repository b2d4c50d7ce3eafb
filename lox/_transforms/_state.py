"""The state of keys in the carry of loops: the accumulator of a reduction, or a buffer for a number of events.

Both start empty, take one event at a time and give their result at the end. Before lox has traced a loop it does not
know what the body logs; `conform` gives the state before the loop the type that the body returns. Keys share a state as
long as they are logged together; when they are not, it is split.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._bundle import Bundle, Keys, Site
from lox._data._lanes import Laned, Lanes

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


def conform(x: Laned, target: Laned, lead: int = 0) -> Laned:
    """Widen an array to the lanes of `target`, which come after `lead` axes, with exactly its type."""
    wide = _lanes.widen(x, _lanes.lanes_of(target, lead), lead)
    return Laned(typed_like(wide.tree, target.tree), target.flags)


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


def split(state: dict[Keys, Any], keys: Iterable[str]) -> tuple[dict[Keys, Any], dict[Keys, Any], Keys]:
    """Split a state: what concerns these keys, everything else, and the keys that have no state yet."""
    held: dict[Keys, set[str]] = {}
    new = []
    owners = {key: owner for owner in state for key in owner}
    for key in keys:
        owner = owners.get(key)
        if owner is None:
            new.append(key)
        else:
            held.setdefault(owner, set()).add(key)
    inside, outside = {}, {owner: part for owner, part in state.items() if owner not in held}
    for owner, theirs in held.items():
        mine = tuple(key for key in owner if key in theirs)  # in the order of the state, or it would never settle
        inside[mine] = state[owner].only(mine)
        if others := tuple(key for key in owner if key not in theirs):
            outside[others] = state[owner].only(others)
    return inside, outside, tuple(new)


def holder(state: Iterable[Keys], key: str) -> Keys | None:
    """The keys that share the state of this one."""
    return next((keys for keys in state if key in keys), None)


Parts = list[tuple[Laned, int]]  # arrays, each with the number of axes before its lanes


def site_of_lanes(key: str, old: Parts, site: Site, new: Parts, new_site: str) -> Site:
    """The line that the lanes come from; raise if those of `old` and `new` do not fit together."""
    before, after = (_lanes.union(*[_lanes.lanes_of(x, lead) for x, lead in parts]) for parts in (old, new))
    assert before is not None and after is not None  # each belongs to one state or event
    both = _lanes.union(before, after)
    if both is None:
        raise _errors.different_lanes(key, before, str(site), after, new_site)
    return site if both == before else Site(new_site)


def parts_of(bundle: Bundle, *more: Laned | None) -> Parts:
    laned = [*bundle.values, *bundle.steps.values(), bundle.valid]
    return [*[(x, bundle.lead) for x in laned if x is not None], *[(x, 0) for x in more if x is not None]]


def check_items(keys: Keys, treedefs: Any, items: tuple[Item, ...], site: str, event: Bundle) -> tuple[Item, ...]:
    """The items of state and event together: the same structure and shapes, with promoted dtypes."""
    names = []
    for key, before, now in zip(keys, treedefs, event.treedefs, strict=True):
        if before != now:
            raise _errors.mismatch(key, "structure", before, site, now, str(event.site))
        names += [key] * now.num_leaves
    joined = []
    for key, (shape, dtype, sharding), x in zip(names, items, event.values, strict=True):
        if x.item_shape() != shape:
            raise _errors.mismatch(key, "shape", f"shape {shape}", site, f"shape {x.item_shape()}", str(event.site))
        joined.append((shape, _arrays.promote(dtype, x.tree.dtype), sharding))
    return tuple(joined)


def items_of(event: Bundle) -> tuple[Item, ...]:
    return tuple(
        (x.item_shape(), x.tree.dtype, _compat.explicit_sharding(_compat.aval_of(x.tree), x.ndim)) for x in event.values
    )
