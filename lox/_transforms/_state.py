"""What one key keeps in the carry of loops: a reduction's accumulator, or a buffer with room for a number of events.

Both start empty, take events in one at a time and give their result at the end. When lox meets a loop it does not yet
know what the body will log; `conform` turns the state before the loop into the type that the body leaves behind.
"""

import dataclasses
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
    """`x` with exactly the type of `like`: a loop's carry must not change type, varying axes and sharding included."""
    aval = _compat.aval_of(like)
    if _arrays.is_prng_key(aval.dtype):
        return _compat.with_varying_axes_of(jnp.broadcast_to(x, aval.shape), aval)
    x = jnp.broadcast_to(jnp.asarray(x).astype(aval.dtype), aval.shape)
    if jax.typeof(x) == aval:
        return x
    zeros = _compat.zeros_of(aval)
    return x | zeros if aval.dtype == bool else x + zeros


def _conform(x: Laned, target: Laned) -> Laned:
    """The same array for more lanes, with exactly the type of `target`."""
    return Laned(typed_like(_lanes.widen(x, _lanes.lanes_of(target)).tree, target.tree), target.flags)


def _varying_like(new: Any, old: Any) -> Any:
    """`new` in the place of `old`: the type of a state only ever grows, or tracing it would never come to an end."""
    return _compat.with_varying_axes_of(new, _compat.aval_of(old))


def _counted(key: str, count: Laned, mask: Laned | None) -> Laned:
    """One more, where the event happened."""
    lanes = _union(key, count, mask)
    one = jnp.ones((), jnp.int32) if mask is None else _lanes.widen(mask, lanes).tree.astype(jnp.int32)
    return Laned(_lanes.widen(count, lanes).tree + one, lanes.flags)


def _union(key: str, *laned: Laned | None) -> Lanes:
    lanes = _lanes.union(*[_lanes.lanes_of(x) for x in laned if x is not None])
    if lanes is None:
        raise _errors.MismatchError(f"{key!r} is logged under different vmaps, which do not fit together.")
    return lanes


Parts = list[tuple[Laned, int]]  # arrays, each with so many axes before its lanes


def _site_of_lanes(key: str, held: Parts, site: Site, new: Parts, new_site: str) -> Site:
    """Which line the lanes come from; error if those of an event do not fit what is held."""
    mine, other = (_lanes.union(*[_lanes.lanes_of(x, lead) for x, lead in parts]) for parts in (held, new))
    assert mine is not None and other is not None  # each is of one piece
    both = _lanes.union(mine, other)
    if both is None:
        raise _errors.different_lanes(key, mine, str(site), other, new_site)
    return site if both == mine else Site(new_site)


def _parts_of(key: str, event: Event) -> Parts:
    found = [*event.values[key], *event.steps.values(), event.mask, event.weight]
    return [(x, 0) for x in found if x is not None]


def _check_items(key: str, treedef: Any, items: tuple[Item, ...], site: str, event: Event) -> tuple[Item, ...]:
    """The items of state and event together: same structure and shapes, the dtypes promoted."""
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


def _take_steps(key: str, old: dict[str, Laned], event: Event, happened: Laned | None) -> dict[str, Laned]:
    """The steps of the last event."""
    new = {}
    for name in dict.fromkeys([*old, *event.steps]):
        step = event.steps.get(name)
        dtype = _arrays.promote(*[x.tree.dtype for x in (old.get(name), step) if x is not None])
        step = Laned(_arrays.missing_step(dtype)) if step is None else step
        before = old.get(name) or Laned(_arrays.missing_step(dtype))
        lanes = _union(key, before, step, happened)
        step, before = (_lanes.widen(Laned(jnp.asarray(x.tree, dtype), x.flags), lanes) for x in (step, before))
        if happened is not None:
            keep = _lanes.widen(happened, lanes)
            step = Laned(jnp.where(keep.tree, step.tree, before.tree), lanes.flags)
        new[name] = Laned(_varying_like(step.tree, before.tree), lanes.flags)
    return new


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Fold:
    """A reduction under way."""

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
        """The state before the first event, for events like this one."""
        items = _items_of(key, event)
        states = [Laned(_reduce.initial(reduction, *item)) for item in items]
        count = Laned(jnp.zeros((), jnp.int32))
        return cls(states, count, {}, reduction, event.treedefs[key], items, key, Site(event.site), interval)

    def fitting(self, event: Event) -> "Fold":
        """The same state, which knows where its lanes come from; error if an event has others."""
        site = _site_of_lanes(self.key, self.parts(), self.site, _parts_of(self.key, event), event.site)
        return dataclasses.replace(self, site=site)

    def parts(self) -> Parts:
        """All that has lanes."""
        return [(x, 0) for x in [*self.states, self.count, *self.steps.values()]]

    def take(self, event: Event) -> "Fold":
        """One event more."""
        key = self.key
        if event.weight is not None and self.reduction is _reduce.MEAN:
            return self._weighted().take(event)
        old = self._promoted(_check_items(key, self.treedef, self.items, str(self.site), event))
        happened = event.mask
        if self.interval > 1:
            lanes = _union(key, self.count, happened)
            due = _lanes.widen(self.count, lanes).tree % self.interval == 0
            happened = Laned(due if happened is None else due & _lanes.widen(happened, lanes).tree, lanes.flags)
        states = []
        for state, value, (_, dtype, _) in zip(old.states, event.values[key], old.items, strict=True):
            weight = (event.weight or Laned(jnp.ones((), jnp.float32))) if self.reduction.weighted else None
            lanes = _union(key, state, value, happened, weight)
            args = [_lanes.widen(x, lanes).tree for x in (state, Laned(_arrays.cast(value.tree, dtype), value.flags))]
            if weight is not None:
                args.append(_lanes.widen(weight, lanes).tree)
            update = self.reduction.update
            for _ in range(sum(map(bool, lanes.flags))):
                update = jax.vmap(update)
            new = update(*args)
            if happened is not None:
                new = _choose(_lanes.widen(happened, lanes), new, args[0])
            new = Laned(jax.tree.map(_same_type, new, args[0]), lanes.flags)
            states.append(_lanes.widen(new, lanes))  # what does not depend on the value has lost its sharding
        steps = _take_steps(key, self.steps, event, happened)
        return dataclasses.replace(old, states=states, count=_counted(key, self.count, event.mask), steps=steps)

    def _weighted(self) -> "Fold":
        """A plain mean as a weighted one: only the first event with a weight tells that it has to be."""
        convert = _reduce.with_weights
        states, taken = [], self._taken()
        for state in self.states:
            lanes = _union(self.key, state, taken)
            mapped = convert
            for _ in range(sum(map(bool, lanes.flags))):
                mapped = jax.vmap(mapped)
            new = mapped(_lanes.widen(state, lanes).tree, _lanes.widen(taken, lanes).tree)
            states.append(Laned(new, lanes.flags))
        return dataclasses.replace(self, states=states, reduction=_reduce.WEIGHTED_MEAN)

    def _taken(self) -> Laned:
        """How many events went into the reduction."""
        every = self.interval
        return self.count if every == 1 else self.count.map(lambda n: (n + every - 1) // every)

    def restarted(self, where: Any = None) -> "Fold":
        """The state before any event, of the same type; with `where`, only if that is true."""
        fresh = Fold.from_struct(self)  # not its type: outside of jit, only arrays know the devices of their mesh
        # What is left of an interval goes on: a negative count says how many events are still to be passed over.
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
            some = _lanes.widen(self.count.map(lambda n: n > 0), lanes)
            cast = _reduce.promoted(self.reduction, state.tree, fresh.tree)
            if cast is None:
                was, now = (", ".join(dict.fromkeys(str(dtype) for _, dtype, _ in of)) for of in (self.items, items))
                raise _errors.MismatchError(
                    f"{self.key!r} is logged as {was} and as {now}, for which the state of its reduction is not the "
                    f"same tree.\n  logged at {self.site}\nLog values of one dtype."
                )
            states.append(Laned(_choose(some, cast, fresh.tree), lanes.flags))
        return dataclasses.replace(self, states=states, items=items)

    def conform(self, struct: "Fold") -> "Fold":
        """The same state with the type of `struct`, which is a later state of the same key."""
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
        """The empty state of the type of `struct`."""
        states = [Laned(_reduce.initial(struct.reduction, *item)) for item in struct.items]
        empty = dataclasses.replace(struct, states=states, count=Laned(jnp.zeros((), jnp.int32)), steps={})
        return empty.conform(struct)

    def finish(self, certain: bool) -> Series:
        """The result, as a series of a single event."""
        values, taken = [], self._taken()
        for state in self.states:
            finish, args = self.reduction.finish, [state, taken] if self.reduction.counted else [state]
            lanes = _union(self.key, *args)
            args = [_lanes.widen(x, lanes) for x in args]
            for _ in range(args[0].ndim):
                finish = jax.vmap(finish)
            values.append(Laned(finish(*[x.tree for x in args]), args[0].flags))
        treedef, valid = self.treedef, None
        if self.reduction is _reduce.COUNT:  # one integer per key
            values, treedef = [taken], jax.tree.structure(0)
        if not certain:
            valid = self.count.map(lambda n: n > 0)
        return Series(values, self.steps, valid, treedef, True, self.key, self.site).even()


def _choose(mask: Laned, new: Any, old: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        return jnp.where(mask.tree.reshape(mask.tree.shape + (1,) * (a.ndim - mask.tree.ndim)), a, b)

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
    """Room for `capacity` events, and one more row that takes what does not fit."""

    rows: Series  # valid: per lane, None as long as no event was masked by lane
    count: Laned  # has lanes only outside of a shard_map whose devices log different numbers of events
    seen: Laned  # how many events there were, in each lane for itself: what `interval` counts
    capacity: int
    items: tuple[Item, ...]
    interval: int  # every k-th event is stored
    most: int | None = None  # the number of events there can be, if room for all of them can be made

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        return (self.rows, self.count, self.seen), (self.capacity, self.items, self.interval, self.most)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Buffer":
        """The inverse of `tree_flatten`."""
        return cls(*children, *aux)

    @classmethod
    def empty(cls, capacity: int, key: str, event: Event, interval: int) -> "Buffer":
        """Room for events like this one."""
        items = _items_of(key, event)
        values = [x.map(lambda a: _empty_rows(capacity + 1, a)) for x in event.values[key]]
        rows = Series(values, {}, None, event.treedefs[key], False, key, Site(event.site))
        zero = Laned(jnp.zeros((), jnp.int32))
        return cls(rows, zero, zero, capacity, items, interval)

    def fitting(self, event: Event) -> "Buffer":
        """The same state, which knows where its lanes come from; error if an event has others."""
        rows = self.rows
        site = _site_of_lanes(rows.key, self.parts(), rows.site, _parts_of(rows.key, event), event.site)
        return dataclasses.replace(self, rows=dataclasses.replace(rows, site=site))

    def parts(self) -> Parts:
        """All that has lanes."""
        found = [*self.rows.values, *self.rows.steps.values(), self.rows.valid]
        return [*[(x, 1) for x in found if x is not None], (self.seen, 0)]

    def take(self, event: Event) -> "Buffer":
        """One event more."""
        if self.count.flags:
            return self._take_on_devices(event.series(self.rows.key))
        rows, key, size, original = self.rows, self.rows.key, self.capacity + 1, event
        items = _check_items(key, rows.treedef, self.items, str(rows.site), event)
        seen = self.seen
        if self.interval > 1:
            lanes = _union(key, seen, event.mask)
            number = _lanes.widen(seen, lanes).tree
            happened = jnp.ones((), bool) if event.mask is None else _lanes.widen(event.mask, lanes).tree
            seen = Laned(number + happened.astype(jnp.int32), lanes.flags)
            event = event.replace(mask=Laned(happened & (number % self.interval == 0), lanes.flags))
            if self.most is not None and lanes.flags:
                # Lanes that count for themselves may each keep another event.
                lane_count = int(np.prod([n for n, f in zip(lanes.sizes, lanes.flags, strict=True) if f]))
                needed = min(self.most, lane_count * -(-self.most // self.interval))
                if needed > self.capacity:
                    return self.with_capacity(needed).take(original)
        count, slot = self.count.tree, jnp.minimum(self.count.tree, self.capacity)
        happened = None if event.mask is None else jnp.any(event.mask.tree)
        if happened is not None:
            slot = jnp.where(happened, slot, self.capacity)
        lane_mask = event.mask if event.mask is not None and event.mask.ndim else None

        def put(buffer: Laned | None, x: Laned, dtype: Any, fill: Any) -> Laned:
            x = Laned(_arrays.cast(x.tree[None], dtype), x.flags)
            if buffer is None:
                buffer = x.map(lambda a: _empty_rows(size, a[0], fill))
            lanes = _lanes.union(_lanes.lanes_of(buffer, 1), _lanes.lanes_of(x, 1))
            if lanes is None:
                raise _errors.MismatchError(f"{key!r} is logged under different vmaps, which do not fit together.")
            buffer, x = _lanes.widen(buffer, lanes, 1), _lanes.widen(x, lanes, 1)
            target = _arrays.cast(buffer.tree, dtype)
            row = _compat.on_mesh_of([target], x.tree[0])
            return Laned(jax.lax.dynamic_update_index_in_dim(target, row, slot, 0), lanes.flags)

        values = [
            put(buffer, x, dtype, 0)
            for buffer, x, (_, dtype, _) in zip(rows.values, event.values[key], items, strict=True)
        ]
        steps = {}
        for name in dict.fromkeys([*rows.steps, *event.steps]):
            present = [x.tree.dtype for x in (rows.steps.get(name), event.steps.get(name)) if x is not None]
            dtype = _arrays.promote(*present)
            missing = _arrays.missing_step(dtype)
            step = event.steps.get(name) or Laned(jnp.asarray(missing))
            steps[name] = put(rows.steps.get(name), step, dtype, missing)
        valid = rows.valid
        if valid is not None or lane_mask is not None:
            valid = put(valid, lane_mask or Laned(jnp.ones((), bool)), np.dtype(bool), True)
        rows = dataclasses.replace(rows, values=values, steps=steps, valid=valid)
        one = 1 if happened is None else happened.astype(jnp.int32)
        return dataclasses.replace(self, rows=rows, count=Laned(count + one, self.count.flags), seen=seen, items=items)

    def take_series(self, series: Series) -> "Buffer":
        """Events that were collected before it was known that the key needs a buffer."""
        if self.count.flags:
            return self._take_on_devices(series)
        rows = series.expanded()

        def take_row(buffer: Buffer, row: Series) -> Buffer:
            return buffer.take(Event.from_series(row))

        # The first row settles the type of the buffer; the others can then go through a loop.
        buffer = take_row(self, _row(rows, 0)) if rows.count() else self
        if rows.count() > 1:
            rest = dataclasses.replace(jax.tree.map(lambda x: _arrays.slice_rows(x, 1), rows), single=True)
            buffer, _ = jax.lax.scan(lambda b, row: (take_row(b, row), None), buffer, rest)
        return buffer

    def _take_on_devices(self, series: Series) -> "Buffer":
        """Events that come from outside of the shard_map whose devices have each filled another number of rows."""
        lanes = _lanes.lanes_of(self.count)
        devices, *_ = lanes.flags

        def enter(x: Laned, lead: int) -> Laned:
            own = _lanes.lanes_of(x, lead)
            if own.sizes[:1] not in ((), (0,), lanes.sizes[:1]):
                raise _errors.different_lanes(series.key, lanes, str(self.rows.site), own, str(series.site))
            shardings = (*(lanes.shardings[:1] or (None,)), *(own.shardings[1:] or (None,) * len(own.flags[1:])))
            wanted = Lanes((devices, *own.flags[1:]), (*lanes.sizes[:1], *own.sizes[1:]), shardings)
            x = _lanes.widen(x, wanted, lead)
            return Laned(jnp.moveaxis(x.tree, lead, 0) if devices else x.tree, x.flags[1:])

        def leave(x: Laned, lead: int) -> Laned:
            return Laned(jnp.moveaxis(x.tree, 0, lead) if devices else x.tree, (devices, *x.flags))

        take = Buffer.take_series if not devices else jax.vmap(Buffer.take_series)
        return _lanes.map_laned(leave, take(_lanes.map_laned(enter, self), _lanes.map_laned(enter, series)))

    def with_capacity(self, capacity: int) -> "Buffer":
        """The same events in a larger buffer."""
        more = capacity - self.capacity
        pad = lambda x: _arrays.concatenate([x, _empty_rows(more, x[0])]) if more else x  # noqa: E731
        return dataclasses.replace(self, rows=jax.tree.map(pad, self.rows), capacity=capacity)

    def conform(self, struct: "Buffer") -> "Buffer":
        """The same state with the type of `struct`, which is a later state of the same key."""
        _site_of_lanes(self.rows.key, self.parts(), self.rows.site, struct.parts(), str(struct.rows.site))
        if struct.capacity != self.capacity:
            return self.with_capacity(struct.capacity).conform(struct)

        def fit(x: Laned | None, target: Laned, fill: Any) -> Laned:
            if x is None:
                x = Laned(jnp.full((self.capacity + 1, *target.item_shape(1)), fill, target.tree.dtype))
            x = _lanes.widen(x, _lanes.lanes_of(target, 1), 1)
            return Laned(typed_like(x.tree, target.tree), target.flags)

        rows, model = self.rows, struct.rows
        values = [fit(x, target, 0) for x, target in zip(rows.values, model.values, strict=True)]
        steps = {n: fit(rows.steps.get(n), t, _arrays.missing_step(t.tree.dtype)) for n, t in model.steps.items()}
        valid = None if model.valid is None else fit(rows.valid, model.valid, True)
        rows = dataclasses.replace(rows, values=values, steps=steps, valid=valid, site=model.site)
        count, seen = _conform(self.count, struct.count), _conform(self.seen, struct.seen)
        return dataclasses.replace(self, rows=rows, count=count, seen=seen, items=struct.items)

    @classmethod
    def from_struct(cls, struct: "Buffer") -> "Buffer":
        """The empty state of the type of `struct`."""
        size = struct.capacity + 1
        values = [
            Laned(_arrays.zeros((size, *shape), dtype, _compat.with_leading_axes(sharding, 1)))
            for shape, dtype, sharding in struct.items
        ]
        rows = dataclasses.replace(struct.rows, values=values, steps={}, valid=None)
        zero = Laned(jnp.zeros((), jnp.int32))
        return dataclasses.replace(struct, rows=rows, count=zero, seen=zero).conform(struct)

    def finish(self, certain: bool) -> Series:
        """The events, in slots of which the first `count` are filled."""
        del certain
        rows = self.full()
        slots = jnp.arange(self.capacity, dtype=jnp.int32).reshape((-1,) + (1,) * self.count.ndim)
        filled = Laned(slots < self.count.tree, self.count.flags)
        if rows.valid is not None:
            lanes = _lanes.union(_lanes.lanes_of(filled, 1), _lanes.lanes_of(rows.valid, 1))
            assert lanes is not None  # both belong to one buffer
            both = _lanes.widen(filled, lanes, 1).tree & _lanes.widen(rows.valid, lanes, 1).tree
            filled = Laned(both, lanes.flags)
        return dataclasses.replace(rows, valid=filled).even()

    def full(self) -> Series:
        """The events, if it is known that there are as many as there is room for."""
        return jax.tree.map(lambda x: _arrays.slice_rows(x, 0, self.capacity), self.rows).even()

    def dropped(self) -> Any:
        """How many events did not fit."""
        return jnp.maximum(self.count.tree - self.capacity, 0)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Tick:
    """How many events of a key there were, in each lane for itself."""

    count: Laned = dataclasses.field(default_factory=lambda: Laned(jnp.zeros((), jnp.int32)))
    site: Site = dataclasses.field(default_factory=Site)  # where the lanes come from

    def tree_flatten(self) -> tuple[Any, Any]:
        """One array."""
        return (self.count,), self.site

    @classmethod
    def tree_unflatten(cls, site: Site, children: Any) -> "Tick":
        """The inverse of `tree_flatten`."""
        return cls(children[0], site)

    def take(self, key: str, event: Event) -> "Tick":
        """One event more."""
        mask = [] if event.mask is None else [(event.mask, 0)]
        site = _site_of_lanes(key, [(self.count, 0)], self.site, mask, event.site)
        return Tick(_counted(key, self.count, event.mask), site)

    def conform(self, struct: "Tick") -> "Tick":
        """The same state with the type of `struct`, which is a later state of the same key."""
        return Tick(_conform(self.count, struct.count), struct.site)

    @classmethod
    def from_struct(cls, struct: "Tick") -> "Tick":
        """The empty state of the type of `struct`."""
        return cls().conform(struct)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Room:
    """Where a buffer will be, once the first event has shown what it has to hold."""

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
        """For every k-th of at most `count` events; `known` is the number of the first, if it is known beforehand."""
        if known is None:
            return cls(seen, -(-count // interval), interval, count)
        kept = (known + count + interval - 1) // interval - (known + interval - 1) // interval
        return cls(seen, kept, interval, count)

    def buffer(self, key: str, event: Event) -> Buffer:
        """Room for events like this one."""
        empty = Buffer.empty(self.capacity, key, event, self.interval)
        return dataclasses.replace(empty, seen=self.seen, most=self.most)

    def conform(self, struct: Any) -> Any:
        """The same state with the type of `struct`, which is a later state of the same key."""
        if isinstance(struct, Fold):
            return Fold.from_struct(struct)
        if isinstance(struct, Buffer):
            return dataclasses.replace(Buffer.from_struct(struct), seen=_conform(self.seen, struct.seen))
        return dataclasses.replace(self, seen=_conform(self.seen, struct.seen))


def _empty_rows(count: int, like: Any, fill: Any = 0) -> Any:
    """Rows for values like this one, sharded as it is."""
    sharding = _compat.with_leading_axes(_compat.explicit_sharding(_compat.aval_of(like)), 1)
    if sharding is not None or _arrays.is_prng_key(like.dtype):
        rows = _arrays.zeros((count, *like.shape), like.dtype, sharding)
        return rows if not fill else rows + jnp.asarray(fill, like.dtype)
    return jnp.broadcast_to(jnp.full_like(like, fill)[None], (count, *like.shape))


def _row(series: Series, index: int) -> Series:
    return dataclasses.replace(
        jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), series), single=True
    )
