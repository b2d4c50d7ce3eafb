"""The state of one key in the carry of loops: the accumulator of a reduction, or a buffer for a number of events.

Both start empty, take one event at a time and give their result at the end. Before lox has traced a loop it does not
know what the body logs; `conform` gives the state before the loop the type that the body returns.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes, _reduce
from lox._data._lanes import Laned, Lanes
from lox._data._series import Series, Site
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


def _conform(x: Laned, target: Laned) -> Laned:
    """Widen an array to the lanes of `target`, with exactly its type."""
    return Laned(typed_like(_lanes.widen(x, _lanes.lanes_of(target)).tree, target.tree), target.flags)


def _varying_like(new: Any, old: Any) -> Any:
    """Let `new` vary as `old` did: the type of a state may only grow, or tracing would never end."""
    return _compat.with_varying_axes_of(new, _compat.aval_of(old))


def _counted(key: str, count: Laned, valid: Laned | None) -> Laned:
    """Add one where the event is valid."""
    lanes = _union(key, count, valid)
    one = jnp.ones((), jnp.int32) if valid is None else _lanes.widen(valid, lanes).tree.astype(jnp.int32)
    return Laned(_lanes.widen(count, lanes).tree + one, lanes.flags)


def _union(key: str, *laned: Laned | None) -> Lanes:
    lanes = _lanes.union(*[_lanes.lanes_of(x) for x in laned if x is not None])
    if lanes is None:
        raise _errors.MismatchError(f"{key!r} is logged under different vmaps, which do not fit together.")
    return lanes


Parts = list[tuple[Laned, int]]  # arrays, each with the number of axes before its lanes


def _site_of_lanes(key: str, old: Parts, site: Site, new: Parts, new_site: str) -> Site:
    """The line that the lanes come from; raise if those of `old` and `new` do not fit together."""
    before, after = (_lanes.union(*[_lanes.lanes_of(x, lead) for x, lead in parts]) for parts in (old, new))
    assert before is not None and after is not None  # each belongs to one state or event
    both = _lanes.union(before, after)
    if both is None:
        raise _errors.different_lanes(key, before, str(site), after, new_site)
    return site if both == before else Site(new_site)


def _parts_of(key: str, event: Event) -> Parts:
    laned = [*event.values[key], *event.steps.values(), event.valid, event.weight]
    return [(x, 0) for x in laned if x is not None]


def _check_items(key: str, treedef: Any, items: tuple[Item, ...], site: str, event: Event) -> tuple[Item, ...]:
    """The items of state and event together: the same structure and shapes, with promoted dtypes."""
    if event.treedefs[key] != treedef:
        raise _errors.mismatch(key, "structure", treedef, site, event.treedefs[key], event.site)
    joined = []
    for (shape, dtype, sharding), x in zip(items, event.values[key], strict=True):
        if x.item_shape() != shape:
            raise _errors.mismatch(key, "shape", f"shape {shape}", site, f"shape {x.item_shape()}", event.site)
        joined.append((shape, _arrays.promote(dtype, x.tree.dtype), sharding))
    return tuple(joined)


def _items_of(key: str, event: Event) -> tuple[Item, ...]:
    return tuple(
        (x.item_shape(), x.tree.dtype, _compat.explicit_sharding(_compat.aval_of(x.tree), x.ndim))
        for x in event.values[key]
    )


def _take_steps(key: str, old: dict[str, Laned], event: Event, valid: Laned | None) -> dict[str, Laned]:
    """The steps of the last event: those of `event` where it is valid, else the old ones."""
    new = {}
    for name in dict.fromkeys([*old, *event.steps]):
        step = event.steps.get(name)
        dtype = _arrays.promote(*[x.tree.dtype for x in (old.get(name), step) if x is not None])
        step = Laned(_arrays.missing_step(dtype)) if step is None else step
        before = old.get(name) or Laned(_arrays.missing_step(dtype))
        lanes = _union(key, before, step, valid)
        step, before = (_lanes.widen(Laned(jnp.asarray(x.tree, dtype), x.flags), lanes) for x in (step, before))
        if valid is not None:
            keep = _lanes.widen(valid, lanes)
            step = Laned(jnp.where(keep.tree, step.tree, before.tree), lanes.flags)
        new[name] = Laned(_varying_like(step.tree, before.tree), lanes.flags)
    return new


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Fold:
    """The state of a reduction."""

    states: list[Laned]  # one for each leaf of the value
    count: Laned
    steps: dict[str, Laned]
    reduction: _reduce.Reduction
    treedef: Any
    items: tuple[Item, ...]
    key: str
    site: Site
    interval: int  # every k-th event is taken

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        children = (self.states, self.count, self.steps)
        return children, (self.reduction, self.treedef, self.items, self.key, self.site, self.interval)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Fold":
        """The inverse of `tree_flatten`."""
        return cls(*children, *aux)

    @classmethod
    def empty(cls, reduction: _reduce.Reduction, key: str, event: Event, interval: int) -> "Fold":
        """The state before the first event, for events like `event`."""
        items = _items_of(key, event)
        states = [Laned(_reduce.initial(reduction, *item)) for item in items]
        count = Laned(jnp.zeros((), jnp.int32))
        return cls(states, count, {}, reduction, event.treedefs[key], items, key, Site(event.site), interval)

    def fitting(self, event: Event) -> "Fold":
        """Note the line that the lanes come from; raise if those of an event do not fit."""
        site = _site_of_lanes(self.key, self.parts(), self.site, _parts_of(self.key, event), event.site)
        return dataclasses.replace(self, site=site)

    def parts(self) -> Parts:
        """All arrays that have lanes."""
        return [(x, 0) for x in [*self.states, self.count, *self.steps.values()]]

    def take(self, event: Event) -> "Fold":
        """Add an event."""
        key = self.key
        if event.weight is not None and self.reduction is _reduce.MEAN:
            return self._weighted().take(event)
        old = self._promoted(_check_items(key, self.treedef, self.items, str(self.site), event))
        valid = event.valid
        if self.interval > 1:
            lanes = _union(key, self.count, valid)
            due = _lanes.widen(self.count, lanes).tree % self.interval == 0
            valid = Laned(due if valid is None else due & _lanes.widen(valid, lanes).tree, lanes.flags)
        states = []
        for state, value, (_, dtype, _) in zip(old.states, event.values[key], old.items, strict=True):
            weight = (event.weight or Laned(jnp.ones((), jnp.float32))) if self.reduction.weighted else None
            lanes = _union(key, state, value, valid, weight)
            args = [_lanes.widen(x, lanes).tree for x in (state, Laned(_arrays.cast(value.tree, dtype), value.flags))]
            if weight is not None:
                args.append(_lanes.widen(weight, lanes).tree)
            new = _by_lane(self.reduction.update, lanes)(*args)
            if valid is not None:
                new = _choose(_lanes.widen(valid, lanes), new, args[0])
            new = Laned(jax.tree.map(_same_type, new, args[0]), lanes.flags)
            states.append(_lanes.widen(new, lanes))  # leaves that do not depend on the value have lost their sharding
        steps = _take_steps(key, self.steps, event, valid)
        return dataclasses.replace(old, states=states, count=_counted(key, self.count, event.valid), steps=steps)

    def _weighted(self) -> "Fold":
        """Turn a plain mean into a weighted one, which is needed from the first event with a weight on."""
        states, taken = [], self._taken()
        for state in self.states:
            lanes = _union(self.key, state, taken)
            args = [_lanes.widen(x, lanes).tree for x in (state, taken)]
            states.append(Laned(_by_lane(_reduce.with_weights, lanes)(*args), lanes.flags))
        return dataclasses.replace(self, states=states, reduction=_reduce.WEIGHTED_MEAN)

    def _taken(self) -> Laned:
        """How many events went into the reduction."""
        every = self.interval
        return self.count if every == 1 else self.count.map(lambda n: (n + every - 1) // every)

    def restarted(self, where: Any = None) -> "Fold":
        """The state before any event, with the same type; if `where` is given, only where it is true."""
        fresh = Fold.from_struct(self)  # not from types: outside of jit, only arrays know the devices of their mesh
        # The interval continues: a negative count is the number of events that are still to be skipped.
        fresh = dataclasses.replace(fresh, count=self.count.map(lambda n: -(-n % self.interval)), steps=self.steps)
        return fresh if where is None else jax.tree.map(lambda new, old: jnp.where(where, new, old), fresh, self)

    def _promoted(self, items: tuple[Item, ...]) -> "Fold":
        if items == self.items:
            return self
        states = []
        for state, item in zip(self.states, items, strict=True):
            fresh = Laned(_reduce.initial(self.reduction, *item))
            lanes = _union(self.key, state, self.count)
            state, fresh = _lanes.widen(state, lanes), _lanes.widen(fresh, lanes)
            started = _lanes.widen(self.count.map(lambda n: n > 0), lanes)
            cast = _reduce.promoted(self.reduction, state.tree, fresh.tree)
            if cast is None:
                was, now = (", ".join(dict.fromkeys(str(dtype) for _, dtype, _ in x)) for x in (self.items, items))
                raise _errors.MismatchError(
                    f"{self.key!r} is logged as {was} and as {now}, for which the state of its reduction is not the "
                    f"same tree.\n  logged at {self.site}\nLog values of one dtype."
                )
            states.append(Laned(_choose(started, cast, fresh.tree), lanes.flags))
        return dataclasses.replace(self, states=states, items=items)

    def conform(self, struct: "Fold") -> "Fold":
        """Give the state the type of `struct`, a later state of the same key."""
        _site_of_lanes(self.key, self.parts(), self.site, struct.parts(), str(struct.site))
        if struct.reduction != self.reduction:
            return self._weighted().conform(struct)
        old = self._promoted(struct.items)
        states = []
        for state, target in zip(old.states, struct.states, strict=True):
            state = _lanes.widen(state, _lanes.lanes_of(target))
            states.append(Laned(jax.tree.map(typed_like, state.tree, target.tree), target.flags))
        steps = {}
        for name, target in struct.steps.items():
            step = self.steps.get(name) or Laned(jnp.asarray(_arrays.missing_step(target.tree.dtype)))
            steps[name] = _conform(step, target)
        count = _conform(self.count, struct.count)
        return dataclasses.replace(old, states=states, steps=steps, count=count, site=struct.site)

    @classmethod
    def from_struct(cls, struct: "Fold") -> "Fold":
        """The empty state with the type of `struct`."""
        states = [Laned(_reduce.initial(struct.reduction, *item)) for item in struct.items]
        empty = dataclasses.replace(struct, states=states, count=Laned(jnp.zeros((), jnp.int32)), steps={})
        return empty.conform(struct)

    def finish(self, certain: bool) -> Series:
        """The result, as a series of a single event."""
        values, taken = [], self._taken()
        for state in self.states:
            args = [state, taken] if self.reduction.counted else [state]
            lanes = _union(self.key, *args)
            args = [_lanes.widen(x, lanes).tree for x in args]
            values.append(Laned(_by_lane(self.reduction.finish, lanes)(*args), lanes.flags))
        treedef, valid = self.treedef, None
        if self.reduction is _reduce.COUNT:  # one integer per key
            values, treedef = [taken], jax.tree.structure(0)
        if not certain:
            valid = self.count.map(lambda n: n > 0)
        return Series(values, self.steps, valid, treedef, True, self.key, self.site).even()


def _by_lane(fun: Any, lanes: Lanes) -> Any:
    for _ in lanes.present():
        fun = jax.vmap(fun)
    return fun


def _choose(condition: Laned, new: Any, old: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        pred = condition.tree
        return jnp.where(pred.reshape(pred.shape + (1,) * (a.ndim - pred.ndim)), a, b)

    return jax.tree.map(choose, new, old)


def _same_type(new: Any, old: Any) -> Any:
    new = jnp.asarray(new)
    if new.dtype != old.dtype or new.shape != old.shape:
        raise _errors.OptionError(
            f"a reduction's `update` must not change its state's type: it was {old.dtype}{list(old.shape)} and became "
            f"{new.dtype}{list(new.shape)}."
        )
    return _varying_like(_arrays.strong(new), old)


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
        items = _items_of(key, event)
        values = [x.map(lambda a: _empty_slots(capacity + 1, a)) for x in event.values[key]]
        series = Series(values, {}, None, event.treedefs[key], False, key, Site(event.site))
        zero = Laned(jnp.zeros((), jnp.int32))
        return cls(series, zero, zero, capacity, items, interval)

    def fitting(self, event: Event) -> "Buffer":
        """Note the line that the lanes come from; raise if those of an event do not fit."""
        series = self.series
        site = _site_of_lanes(series.key, self.parts(), series.site, _parts_of(series.key, event), event.site)
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
        items = _check_items(key, series.treedef, self.items, str(series.site), event)
        seen = self.seen
        if self.interval > 1:
            lanes = _union(key, seen, event.valid)
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
        _site_of_lanes(self.series.key, self.parts(), self.series.site, struct.parts(), str(struct.series.site))
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
        count, seen = _conform(self.count, struct.count), _conform(self.seen, struct.seen)
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
        site = _site_of_lanes(key, [(self.count, 0)], self.site, valid, event.site)
        return Tick(_counted(key, self.count, event.valid), site)

    def conform(self, struct: "Tick") -> "Tick":
        """Give the state the type of `struct`, a later state of the same key."""
        return Tick(_conform(self.count, struct.count), struct.site)

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
            return dataclasses.replace(Buffer.from_struct(struct), seen=_conform(self.seen, struct.seen))
        return dataclasses.replace(self, seen=_conform(self.seen, struct.seen))


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
