"""A buffer in the carry of loops, with room for a number of events."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned, Lanes
from lox._record import struct
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["events", "count", "seen"],
    meta_fields=["capacity", "items", "interval", "most"],
)
@struct
class Buffer:
    """Room for `capacity` events, and one more slot for those that do not fit."""

    events: Bundle  # its `valid` is by lane, and None until an event depends on the lane
    count: Laned  # has lanes only outside of a shard_map whose devices log different numbers of events
    seen: Laned  # how many events there were, counted separately in each lane, for `interval`
    capacity: int
    items: tuple[Item, ...]
    interval: int  # every k-th event is stored
    most: int | None = None  # the maximal number of events, if the buffer may grow to hold all of them

    @classmethod
    def empty(cls, capacity: int, event: Bundle, interval: int) -> "Buffer":
        """Room for events like `event`."""
        values = [x.map(lambda a: _empty_slots(capacity + 1, a)) for x in event.values]
        events = dataclasses.replace(event, values=values, steps={}, valid=None, single=False)
        zero = Laned(jnp.zeros((), jnp.int32))
        return cls(events, zero, zero, capacity, items_of(event), interval)

    def only(self, keys: Iterable[str]) -> "Buffer":
        """The part that concerns these keys."""
        events = self.events.only(tuple(keys))
        item = {id(x): item for x, item in zip(self.events.values, self.items, strict=True)}
        return dataclasses.replace(self, events=events, items=tuple(item[id(x)] for x in events.values))

    def fitting(self, event: Bundle) -> "Buffer":
        """Note the line that the lanes come from; raise if those of an event do not fit."""
        events = self.events
        site = site_of_lanes(events.keys[0], self.parts(), events.site, parts_of(event), str(event.site))
        return dataclasses.replace(self, events=dataclasses.replace(events, site=site))

    def parts(self) -> Parts:
        """All arrays that have lanes."""
        return parts_of(self.events, self.seen)

    def take(self, event: Bundle) -> "Buffer":
        """Add an event."""
        if self.count.flags:
            return self._take_on_devices(event)
        events, key, size, original = self.events, self.events.keys[0], self.capacity + 1, event
        items = check_items(events.keys, events.treedefs, self.items, str(events.site), event)
        seen = self.seen
        if self.interval > 1:
            lanes = union(key, seen, event.valid)
            number = _lanes.widen(seen, lanes).tree
            valid = jnp.ones((), bool) if event.valid is None else _lanes.widen(event.valid, lanes).tree
            seen = Laned(number + valid.astype(jnp.int32), lanes.flags)
            event = dataclasses.replace(event, valid=Laned(valid & (number % self.interval == 0), lanes.flags))
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
            for buffer, x, (_, dtype, _) in zip(events.values, event.values, items, strict=True)
        ]
        steps = {}
        for name in dict.fromkeys([*events.steps, *event.steps]):
            present = [x.tree.dtype for x in (events.steps.get(name), event.steps.get(name)) if x is not None]
            dtype = _arrays.promote(*present)
            missing = _arrays.missing_step(dtype)
            step = event.steps.get(name) or Laned(jnp.asarray(missing))
            steps[name] = put(events.steps.get(name), step, dtype, missing)
        valid = events.valid
        if valid is not None or by_lane is not None:
            valid = put(valid, by_lane or Laned(jnp.ones((), bool)), np.dtype(bool), True)
        events = dataclasses.replace(events, values=values, steps=steps, valid=valid)
        count = Laned(count + (1 if any_valid is None else any_valid.astype(jnp.int32)), self.count.flags)
        return dataclasses.replace(self, events=events, count=count, seen=seen, items=items)

    def take_all(self, events: Bundle) -> "Buffer":
        """Add events that were collected before it was known that their keys need a buffer."""
        if self.count.flags:
            return self._take_on_devices(events)
        events = events.expanded()
        # The first event settles the type of the buffer; a loop can then take the others.
        buffer = self.take(_event(events, 0)) if events.count() else self
        if events.count() > 1:
            rest = dataclasses.replace(jax.tree.map(lambda x: _arrays.slice_events(x, 1), events), single=True)
            buffer, _ = jax.lax.scan(lambda b, event: (b.take(event), None), buffer, rest)
        return buffer

    def _take_on_devices(self, events: Bundle) -> "Buffer":
        """Add events from outside of a shard_map whose devices have filled different numbers of slots."""
        lanes = _lanes.lanes_of(self.count)
        devices, *_ = lanes.flags

        def enter(x: Laned, lead: int) -> Laned:
            old = _lanes.lanes_of(x, lead)
            if old.sizes[:1] not in ((), (0,), lanes.sizes[:1]):
                raise _errors.different_lanes(events.keys[0], lanes, str(self.events.site), old, str(events.site))
            shardings = (*(lanes.shardings[:1] or (None,)), *(old.shardings[1:] or (None,) * len(old.flags[1:])))
            wanted = Lanes((devices, *old.flags[1:]), (*lanes.sizes[:1], *old.sizes[1:]), shardings)
            x = _lanes.widen(x, wanted, lead)
            return Laned(jnp.moveaxis(x.tree, lead, 0) if devices else x.tree, x.flags[1:])

        def leave(x: Laned, lead: int) -> Laned:
            return Laned(jnp.moveaxis(x.tree, 0, lead) if devices else x.tree, (devices, *x.flags))

        take = Buffer.take_all if not devices else jax.vmap(Buffer.take_all)
        return _lanes.map_laned(leave, take(_lanes.map_laned(enter, self), _lanes.map_laned(enter, events)))

    def with_capacity(self, capacity: int) -> "Buffer":
        """The same events in a larger buffer."""
        more = capacity - self.capacity
        pad = lambda x: _arrays.concatenate([x, _empty_slots(more, x[0])]) if more else x  # noqa: E731
        return dataclasses.replace(self, events=jax.tree.map(pad, self.events), capacity=capacity)

    def conform(self, struct: "Buffer") -> "Buffer":
        """Give the state the type of `struct`, a later state of the same keys."""
        site_of_lanes(self.events.keys[0], self.parts(), self.events.site, struct.parts(), str(struct.events.site))
        if struct.capacity != self.capacity:
            return self.with_capacity(struct.capacity).conform(struct)

        def fit(x: Laned | None, target: Laned, fill: Any) -> Laned:
            if x is None:
                x = Laned(jnp.full((self.capacity + 1, *target.item_shape(1)), fill, target.tree.dtype))
            x = _lanes.widen(x, _lanes.lanes_of(target, 1), 1)
            return Laned(typed_like(x.tree, target.tree), target.flags)

        events, model = self.events, struct.events
        values = [fit(x, target, 0) for x, target in zip(events.values, model.values, strict=True)]
        steps = {n: fit(events.steps.get(n), t, _arrays.missing_step(t.tree.dtype)) for n, t in model.steps.items()}
        valid = None if model.valid is None else fit(events.valid, model.valid, True)
        events = dataclasses.replace(events, values=values, steps=steps, valid=valid, site=model.site)
        count, seen = conform(self.count, struct.count), conform(self.seen, struct.seen)
        return dataclasses.replace(self, events=events, count=count, seen=seen, items=struct.items)

    @classmethod
    def from_struct(cls, struct: "Buffer") -> "Buffer":
        """The empty state with the type of `struct`."""
        size = struct.capacity + 1
        values = [
            Laned(_arrays.zeros((size, *shape), dtype, _compat.with_leading_axes(sharding, 1)))
            for shape, dtype, sharding in struct.items
        ]
        events = dataclasses.replace(struct.events, values=values, steps={}, valid=None)
        zero = Laned(jnp.zeros((), jnp.int32))
        return dataclasses.replace(struct, events=events, count=zero, seen=zero).conform(struct)

    def finish(self, certain: bool) -> Bundle:
        """The events; only the first `count` slots are filled."""
        del certain
        events = self.full()
        slots = jnp.arange(self.capacity, dtype=jnp.int32).reshape((-1,) + (1,) * self.count.ndim)
        filled = Laned(slots < self.count.tree, self.count.flags)
        if events.valid is not None:
            lanes = _lanes.union(_lanes.lanes_of(filled, 1), _lanes.lanes_of(events.valid, 1))
            assert lanes is not None  # both belong to one buffer
            both = _lanes.widen(filled, lanes, 1).tree & _lanes.widen(events.valid, lanes, 1).tree
            filled = Laned(both, lanes.flags)
        return dataclasses.replace(events, valid=filled).even()

    def full(self) -> Bundle:
        """The events, if it is known that they fill the buffer."""
        return jax.tree.map(lambda x: _arrays.slice_events(x, 0, self.capacity), self.events).even()

    def dropped(self) -> Any:
        """How many events did not fit."""
        return jnp.maximum(self.count.tree - self.capacity, 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["count"], meta_fields=["site"])
@struct
class Tick:
    """How many events there were, counted separately in each lane."""

    count: Laned = dataclasses.field(default_factory=lambda: Laned(jnp.zeros((), jnp.int32)))
    site: Site = dataclasses.field(default_factory=Site)  # where the lanes come from

    def only(self, keys: Iterable[str]) -> "Tick":
        """The part that concerns these keys: all of it."""
        del keys
        return self

    def take(self, event: Bundle) -> "Tick":
        """Add an event."""
        key, valid = event.keys[0], [] if event.valid is None else [(event.valid, 0)]
        site = site_of_lanes(key, [(self.count, 0)], self.site, valid, str(event.site))
        return Tick(counted(key, self.count, event.valid), site)

    def conform(self, struct: "Tick") -> "Tick":
        """Give the state the type of `struct`, a later state of the same keys."""
        return Tick(conform(self.count, struct.count), struct.site)

    @classmethod
    def from_struct(cls, struct: "Tick") -> "Tick":
        """The empty state with the type of `struct`."""
        return cls().conform(struct)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["seen"], meta_fields=["capacity", "interval", "most"])
@struct
class Room:
    """Stands for a buffer until the first event shows what it has to hold."""

    seen: Laned  # how many events there were before
    capacity: int
    interval: int
    most: int

    @classmethod
    def within(cls, count: int, interval: int, seen: Laned, known: int | None = None) -> "Room":
        """Room for every k-th of at most `count` events; `known` is the number of the first, if it is known."""
        if known is None:
            return cls(seen, -(-count // interval), interval, count)
        kept = (known + count + interval - 1) // interval - (known + interval - 1) // interval
        return cls(seen, kept, interval, count)

    def only(self, keys: Iterable[str]) -> "Room":
        """The part that concerns these keys: all of it."""
        del keys
        return self

    def fitting(self, event: Bundle) -> Buffer:
        """The buffer, for events like `event`."""
        empty = Buffer.empty(self.capacity, event, self.interval)
        return dataclasses.replace(empty, seen=self.seen, most=self.most)

    def conform(self, struct: Any) -> Any:
        """Give the state the type of `struct`, a later state of the same keys."""
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


def _event(events: Bundle, index: int) -> Bundle:
    return dataclasses.replace(
        jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), events), single=True
    )
