"""The last events of one log line, in the carry of loops.

A ring belongs to a line that logs values of one type, not to a key: lines need not fit together, and nothing is
converted on the device. Every slot has the number of its event in the order of the program, 0 if it is empty; the host
joins the rings of a key by these numbers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lox import _compat
from lox._data import _lanes
from lox._data._bundle import Bundle, Keys
from lox._data._lanes import Laned
from lox._transforms._state import conform, union

ORDER = "order of events"  # the step with the number of an event


class Line(NamedTuple):
    """A line that logs values of one type."""

    keys: Keys
    watched: Keys
    site: str
    types: Any
    devices: tuple[tuple[Any, ...], ...]  # the mesh axes of every shard_map around it

    @classmethod
    def of(cls, event: Bundle, watched: Keys, devices: tuple[tuple[Any, ...], ...]) -> "Line":
        """The line that this event is from."""
        leaves, treedef = jax.tree.flatten(event)
        # What varies over devices is not part of it: that may change while a loop is traced.
        types = [(x.shape, x.dtype, _compat.explicit_axes(_compat.aval_of(x))) for x in leaves]
        return cls(event.keys, watched, str(event.site), (treedef, tuple(types)), devices)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["events", "count"], meta_fields=["capacity"])
@dataclasses.dataclass
class Ring:
    """The last events of a line; where events happen in some lanes only, those of each lane."""

    events: Bundle
    count: Laned  # how many events there were
    capacity: int

    @classmethod
    def empty(cls, event: Bundle, capacity: int) -> "Ring":
        """A ring for events like this one."""
        valid, by_lane = _happens(event)

        def slots(x: Laned) -> Laned:
            x = x if by_lane is None else _lanes.widen(x, union(event.keys[0], x, by_lane))
            return x.map(lambda a: lax.broadcast(_compat.zeros_of(_compat.aval_of(a)), (capacity,)))

        events = jax.tree.map(slots, dataclasses.replace(event, valid=None), is_leaf=_lanes.is_laned)
        count = jnp.zeros(() if by_lane is None else valid.shape, jnp.int32)
        return cls(dataclasses.replace(events, single=False), Laned(count, by_lane.flags if by_lane else ()), capacity)

    def take(self, event: Bundle, running: Any) -> "Ring":
        """Add an event, if the program is still `running` without a failure."""
        valid, by_lane = _happens(event)
        count = self.count.tree
        slot = count % self.capacity if self.capacity > 1 else jnp.zeros_like(count)
        put = functools.partial(_put, slot, valid & running, by_lane)
        # With the flags of the event: a state that was in a shard_map has one more, for an axis that is not there.
        arrays = dataclasses.replace(event, valid=None)
        old, new = (jax.tree.leaves(bundle, is_leaf=_lanes.is_laned) for bundle in (self.events, arrays))
        laned = [put(a, b) for a, b in zip(old, new, strict=True)]
        events = jax.tree.unflatten(jax.tree.structure(arrays, is_leaf=_lanes.is_laned), laned)
        # Counted even after a failure: else `vmap` would give every lane a slot of its own, and each event a scatter.
        count = Laned(count + valid.astype(jnp.int32), by_lane.flags if by_lane else ())
        return dataclasses.replace(self, events=dataclasses.replace(events, single=False), count=count)

    def recorded(self) -> Bundle:
        """The events, of which those in empty slots are not valid."""
        return dataclasses.replace(self.events, valid=self.events.steps[ORDER].map(lambda order: order != 0))

    def conform(self, struct: "Ring") -> "Ring":
        """Give it the type of `struct`, a later state."""
        arrays, targets = (jax.tree.leaves(ring, is_leaf=_lanes.is_laned) for ring in (self, struct))
        leads = [*[1] * (len(arrays) - 1), 0]  # the events, and the count
        conformed = [conform(*both) for both in zip(arrays, targets, leads, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(struct, is_leaf=_lanes.is_laned), conformed)

    @classmethod
    def from_struct(cls, struct: "Ring") -> "Ring":
        """The empty ring with the type of `struct`."""
        return jax.tree.map(_compat.zeros_of, struct)


def _happens(event: Bundle) -> tuple[Any, Laned | None]:
    """Whether the event happens, and the same with its lanes if that depends on the lane."""
    if event.valid is None:
        return jnp.ones((), bool), None
    return event.valid.tree, event.valid if event.valid.ndim else None


def _put(slot: Any, where: Any, by_lane: Laned | None, slots: Laned, x: Laned) -> Laned:
    """Put a value into a slot, or into a slot of each lane; only by selections, which cost no branch."""
    if by_lane is None:
        # All on one mesh, which only some of them may have so far.
        everything = [x.tree, slots.tree, where]
        item, whole, where = (_compat.on_mesh_of(everything, a) for a in everything)
        new = lax.select(where, item, lax.dynamic_index_in_dim(whole, slot, keepdims=False))
        new = _compat.on_mesh_of([whole], new)
        return Laned(lax.dynamic_update_index_in_dim(whole, new, slot, 0), x.flags)
    x = _lanes.widen(x, union("", x, by_lane))
    numbers = jnp.arange(slots.tree.shape[0], dtype=jnp.int32).reshape((-1,) + (1,) * slot.ndim)
    here = Laned((numbers == slot[None]) & where[None], by_lane.flags)
    mask = _lanes.expand_to(here, x.flags, slots.tree.ndim, lead=1)
    return Laned(jnp.where(mask, jnp.expand_dims(x.tree, 0), slots.tree), x.flags)
