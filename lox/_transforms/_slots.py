"""A buffer in the carry of loops, with room for a number of events."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._lanes import Laned, Lanes
from lox._data._series import Series, Site
from lox._engine._event import Event
from lox._transforms._fold import Fold
from lox._transforms._state import (
    Item,
    Parts,
    check_items,
    conform,
    counted,
    items_of,
    parts_of,
    site_of_lanes,
    typed_like,
    union,
)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Buffer:
    """Room for `capacity` events, and one more slot for those that do not fit."""

    series: Series  # its `valid` is by lane, and None until an event depends on the lane
    count: Laned  # has lanes only outside of a shard_map whose devices log different numbers of events
    seen: Laned  # how many events there were, counted separately in each lane, for `interval`
    capacity: int
    items: tuple[Item, ...]
    interval: int  # every k-th event is stored
    most: int | None = None  # the maximal number of events, if the buffer may grow to hold all of them

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        return (self.series, self.count, self.seen), (self.capacity, self.items, self.interval, self.most)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Buffer":
        """The inverse of `tree_flatten`."""
        return cls(*children, *aux)

    @classmethod
    def empty(cls, capacity: int, key: str, event: Event, interval: int) -> "Buffer":
        """Room for events like `event`."""
        items = items_of(key, event)
        values = [x.map(lambda a: _empty_slots(capacity + 1, a)) for x in event.values[key]]
        series = Series(values, {}, None, event.treedefs[key], False, key, Site(event.site))
        zero = Laned(jnp.zeros((), jnp.int32))
        return cls(series, zero, zero, capacity, items, interval)

    def fitting(self, event: Event) -> "Buffer":
        """Note the line that the lanes come from; raise if those of an event do not fit."""
        series = self.series
        site = site_of_lanes(series.key, self.parts(), series.site, parts_of(series.key, event), event.site)
        return dataclasses.replace(self, series=dataclasses.replace(series, site=site))

    def parts(self) -> Parts:
        """All arrays that have lanes."""
        laned = [*self.series.values, *self.series.steps.values(), self.series.valid]
        return [*[(x, 1) for x in laned if x is not None], (self.seen, 0)]

    def take(self, event: Event) -> "Buffer":
        """Add an event."""
        if self.count.flags:
            return self._take_on_devices(event.series(self.series.key))
        series, key, size, original = self.series, self.series.key, self.capacity + 1, event
        items = check_items(key, series.treedef, self.items, str(series.site), event)
        seen = self.seen
        if self.interval > 1:
            lanes = union(key, seen, event.valid)
            number = _lanes.widen(seen, lanes).tree
            valid = jnp.ones((), bool) if event.valid is None else _lanes.widen(event.valid, lanes).tree
            seen = Laned(number + valid.astype(jnp.int32), lanes.flags)
            event = event.replace(valid=Laned(valid & (number % self.interval == 0), lanes.flags))
            if self.most is not None and lanes.flags:
                # Lanes count separately, so each may keep a different event.
                needed = min(self.most, math.prod(lanes.present()) * -(-self.most // self.interval))
                if needed > self.capacity:
                    return self.with_capacity(needed).take(original)
        count, slot = self.count.tree, jnp.minimum(self.count.tree, self.capacity)
        any_valid = None if event.valid is None else jnp.any(event.valid.tree)
        if any_valid is not None:
            slot = jnp.where(any_valid, slot, self.capacity)
        by_lane = event.valid if event.valid is not None and event.valid.ndim else None

        def put(buffer: Laned | None, x: Laned, dtype: Any, fill: Any) -> Laned:
            x = Laned(_arrays.cast(x.tree[None], dtype), x.flags)
            if buffer is None:
                buffer = x.map(lambda a: _empty_slots(size, a[0], fill))
            lanes = _lanes.union(_lanes.lanes_of(buffer, 1), _lanes.lanes_of(x, 1))
            if lanes is None:
                raise _errors.MismatchError(f"{key!r} is logged under different vmaps, which do not fit together.")
            buffer, x = _lanes.widen(buffer, lanes, 1), _lanes.widen(x, lanes, 1)
            target = _arrays.cast(buffer.tree, dtype)
            item = _compat.on_mesh_of([target], x.tree[0])
            return Laned(jax.lax.dynamic_update_index_in_dim(target, item, slot, 0), lanes.flags)

        values = [
            put(buffer, x, dtype, 0)
            for buffer, x, (_, dtype, _) in zip(series.values, event.values[key], items, strict=True)
        ]
        steps = {}
        for name in dict.fromkeys([*series.steps, *event.steps]):
            present = [x.tree.dtype for x in (series.steps.get(name), event.steps.get(name)) if x is not None]
            dtype = _arrays.promote(*present)
            missing = _arrays.missing_step(dtype)
            step = event.steps.get(name) or Laned(jnp.asarray(missing))
            steps[name] = put(series.steps.get(name), step, dtype, missing)
        valid = series.valid
        if valid is not None or by_lane is not None:
            valid = put(valid, by_lane or Laned(jnp.ones((), bool)), np.dtype(bool), True)
        series = dataclasses.replace(series, values=values, steps=steps, valid=valid)
        count = Laned(count + (1 if any_valid is None else any_valid.astype(jnp.int32)), self.count.flags)
        return dataclasses.replace(self, series=series, count=count, seen=seen, items=items)

    def take_series(self, series: Series) -> "Buffer":
        """Add events that were collected before it was known that the key needs a buffer."""
        if self.count.flags:
            return self._take_on_devices(series)
        series = series.expanded()

        def take(buffer: Buffer, event: Series) -> Buffer:
            return buffer.take(Event.from_series(event))

        # The first event settles the type of the buffer; a loop can then take the others.
        buffer = take(self, _event(series, 0)) if series.count() else self
        if series.count() > 1:
            rest = dataclasses.replace(jax.tree.map(lambda x: _arrays.slice_events(x, 1), series), single=True)
            buffer, _ = jax.lax.scan(lambda b, event: (take(b, event), None), buffer, rest)
        return buffer

    def _take_on_devices(self, series: Series) -> "Buffer":
        """Add events from outside of a shard_map whose devices have filled different numbers of slots."""
        lanes = _lanes.lanes_of(self.count)
        devices, *_ = lanes.flags

        def enter(x: Laned, lead: int) -> Laned:
            old = _lanes.lanes_of(x, lead)
            if old.sizes[:1] not in ((), (0,), lanes.sizes[:1]):
                raise _errors.different_lanes(series.key, lanes, str(self.series.site), old, str(series.site))
            shardings = (*(lanes.shardings[:1] or (None,)), *(old.shardings[1:] or (None,) * len(old.flags[1:])))
            wanted = Lanes((devices, *old.flags[1:]), (*lanes.sizes[:1], *old.sizes[1:]), shardings)
            x = _lanes.widen(x, wanted, lead)
            return Laned(jnp.moveaxis(x.tree, lead, 0) if devices else x.tree, x.flags[1:])

        def leave(x: Laned, lead: int) -> Laned:
            return Laned(jnp.moveaxis(x.tree, 0, lead) if devices else x.tree, (devices, *x.flags))

        take = Buffer.take_series if not devices else jax.vmap(Buffer.take_series)
        return _lanes.map_laned(leave, take(_lanes.map_laned(enter, self), _lanes.map_laned(enter, series)))

    def with_capacity(self, capacity: int) -> "Buffer":
        """The same events in a larger buffer."""
        more = capacity - self.capacity
        pad = lambda x: _arrays.concatenate([x, _empty_slots(more, x[0])]) if more else x  # noqa: E731
        return dataclasses.replace(self, series=jax.tree.map(pad, self.series), capacity=capacity)

    def conform(self, struct: "Buffer") -> "Buffer":
        """Give the state the type of `struct`, a later state of the same key."""
        site_of_lanes(self.series.key, self.parts(), self.series.site, struct.parts(), str(struct.series.site))
        if struct.capacity != self.capacity:
            return self.with_capacity(struct.capacity).conform(struct)

        def fit(x: Laned | None, target: Laned, fill: Any) -> Laned:
            if x is None:
                x = Laned(jnp.full((self.capacity + 1, *target.item_shape(1)), fill, target.tree.dtype))
            x = _lanes.widen(x, _lanes.lanes_of(target, 1), 1)
            return Laned(typed_like(x.tree, target.tree), target.flags)

        series, model = self.series, struct.series
        values = [fit(x, target, 0) for x, target in zip(series.values, model.values, strict=True)]
        steps = {n: fit(series.steps.get(n), t, _arrays.missing_step(t.tree.dtype)) for n, t in model.steps.items()}
        valid = None if model.valid is None else fit(series.valid, model.valid, True)
        series = dataclasses.replace(series, values=values, steps=steps, valid=valid, site=model.site)
        count, seen = conform(self.count, struct.count), conform(self.seen, struct.seen)
        return dataclasses.replace(self, series=series, count=count, seen=seen, items=struct.items)

    @classmethod
    def from_struct(cls, struct: "Buffer") -> "Buffer":
        """The empty state with the type of `struct`."""
        size = struct.capacity + 1
        values = [
            Laned(_arrays.zeros((size, *shape), dtype, _compat.with_leading_axes(sharding, 1)))
            for shape, dtype, sharding in struct.items
        ]
        series = dataclasses.replace(struct.series, values=values, steps={}, valid=None)
        zero = Laned(jnp.zeros((), jnp.int32))
        return dataclasses.replace(struct, series=series, count=zero, seen=zero).conform(struct)

    def finish(self, certain: bool) -> Series:
        """The events; only the first `count` slots are filled."""
        del certain
        series = self.full()
        slots = jnp.arange(self.capacity, dtype=jnp.int32).reshape((-1,) + (1,) * self.count.ndim)
        filled = Laned(slots < self.count.tree, self.count.flags)
        if series.valid is not None:
            lanes = _lanes.union(_lanes.lanes_of(filled, 1), _lanes.lanes_of(series.valid, 1))
            assert lanes is not None  # both belong to one buffer
            both = _lanes.widen(filled, lanes, 1).tree & _lanes.widen(series.valid, lanes, 1).tree
            filled = Laned(both, lanes.flags)
        return dataclasses.replace(series, valid=filled).even()

    def full(self) -> Series:
        """The events, if it is known that they fill the buffer."""
        return jax.tree.map(lambda x: _arrays.slice_events(x, 0, self.capacity), self.series).even()

    def dropped(self) -> Any:
        """How many events did not fit."""
        return jnp.maximum(self.count.tree - self.capacity, 0)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Tick:
    """How many events of a key there were, counted separately in each lane."""

    count: Laned = dataclasses.field(default_factory=lambda: Laned(jnp.zeros((), jnp.int32)))
    site: Site = dataclasses.field(default_factory=Site)  # where the lanes come from

    def tree_flatten(self) -> tuple[Any, Any]:
        """The count is the only child."""
        return (self.count,), self.site

    @classmethod
    def tree_unflatten(cls, site: Site, children: Any) -> "Tick":
        """The inverse of `tree_flatten`."""
        return cls(children[0], site)

    def take(self, key: str, event: Event) -> "Tick":
        """Add an event."""
        valid = [] if event.valid is None else [(event.valid, 0)]
        site = site_of_lanes(key, [(self.count, 0)], self.site, valid, event.site)
        return Tick(counted(key, self.count, event.valid), site)

    def conform(self, struct: "Tick") -> "Tick":
        """Give the state the type of `struct`, a later state of the same key."""
        return Tick(conform(self.count, struct.count), struct.site)

    @classmethod
    def from_struct(cls, struct: "Tick") -> "Tick":
        """The empty state with the type of `struct`."""
        return cls().conform(struct)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Room:
    """Stands for a buffer until the first event shows what it has to hold."""

    seen: Laned  # how many events there were before
    capacity: int
    interval: int
    most: int

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        return (self.seen,), (self.capacity, self.interval, self.most)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Room":
        """The inverse of `tree_flatten`."""
        return cls(*children, *aux)

    @classmethod
    def within(cls, count: int, interval: int, seen: Laned, known: int | None) -> "Room":
        """Room for every k-th of at most `count` events; `known` is the number of the first, if it is known."""
        if known is None:
            return cls(seen, -(-count // interval), interval, count)
        kept = (known + count + interval - 1) // interval - (known + interval - 1) // interval
        return cls(seen, kept, interval, count)

    def buffer(self, key: str, event: Event) -> Buffer:
        """The buffer, for events like `event`."""
        empty = Buffer.empty(self.capacity, key, event, self.interval)
        return dataclasses.replace(empty, seen=self.seen, most=self.most)

    def conform(self, struct: Any) -> Any:
        """Give the state the type of `struct`, a later state of the same key."""
        if isinstance(struct, Fold):
            return Fold.from_struct(struct)
        if isinstance(struct, Buffer):
            return dataclasses.replace(Buffer.from_struct(struct), seen=conform(self.seen, struct.seen))
        return dataclasses.replace(self, seen=conform(self.seen, struct.seen))


def _empty_slots(count: int, like: Any, fill: Any = 0) -> Any:
    """Slots for values like this one, sharded in the same way."""
    sharding = _compat.with_leading_axes(_compat.explicit_sharding(_compat.aval_of(like)), 1)
    if sharding is not None or _arrays.is_prng_key(like.dtype):
        slots = _arrays.zeros((count, *like.shape), like.dtype, sharding)
        return slots if not fill else slots + jnp.asarray(fill, like.dtype)
    return jnp.broadcast_to(jnp.full_like(like, fill)[None], (count, *like.shape))


def _event(series: Series, index: int) -> Series:
    return dataclasses.replace(
        jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), series), single=True
    )
