"""A reduction in the carry of loops."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes, _reduce
from lox._data._bundle import Bundle, Keys, Site
from lox._data._lanes import Laned, Lanes
from lox._engine._event import Event
from lox._record import struct
from lox._transforms._state import (
    Item,
    Parts,
    _varying_like,
    check_items,
    conform,
    counted,
    items_of,
    parts_of,
    site_of_lanes,
    typed_like,
    union,
)

Events = dict[str, Event]  # one of each key


def _take_steps(key: str, old: dict[str, Laned], event: Event, valid: Laned | None) -> dict[str, Laned]:
    """The steps of the last event: those of `event` where it is valid, else the old ones."""
    new = {}
    for name in dict.fromkeys([*old, *event.steps]):
        step = event.steps.get(name)
        dtype = _arrays.promote(*[x.tree.dtype for x in (old.get(name), step) if x is not None])
        step = Laned(_arrays.missing_step(dtype)) if step is None else step
        before = old.get(name) or Laned(_arrays.missing_step(dtype))
        lanes = union(key, before, step, valid)
        step, before = (_lanes.widen(Laned(jnp.asarray(x.tree, dtype), x.flags), lanes) for x in (step, before))
        if valid is not None:
            keep = _lanes.widen(valid, lanes)
            step = Laned(jnp.where(keep.tree, step.tree, before.tree), lanes.flags)
        new[name] = Laned(_varying_like(step.tree, before.tree), lanes.flags)
    return new


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["states", "count", "steps"],
    meta_fields=["reduction", "treedef", "items", "keys", "sites", "interval"],
)
@struct
class Fold:
    """The state of a reduction, for one key or for several that are alike and always logged together.

    Those share its arrays, which have another axis for them, after the lanes: one operation then does for all keys, in
    the program that is traced, compiled and run. The steps and the number of events are theirs together.
    """

    states: list[Laned]  # one for each leaf of the value
    count: Laned
    steps: dict[str, Laned]
    reduction: _reduce.Reduction
    treedef: Any  # of the value of each key
    items: tuple[Item, ...]  # of the value of each key
    keys: Keys
    sites: tuple[Site, ...]  # one for each key
    interval: int  # every k-th event is taken
    # Whether an event was taken in this block. It is not part of the type of the state, and so forgotten where that
    # enters or leaves a block.
    chained: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def empty(cls, reduction: _reduce.Reduction, events: Events, interval: int) -> "Fold":
        """The state before the first events, for events like these."""
        key, event = next(iter(events.items()))
        items = items_of(event.bundle([key]))
        states = [_initial(reduction, item, len(events)) for item in items]
        sites = tuple(Site(event.site) for event in events.values())
        count = Laned(jnp.zeros((), jnp.int32))
        return cls(states, count, {}, reduction, event.treedefs[key], items, tuple(events), sites, interval)

    def only(self, keys: Iterable[str]) -> "Fold":
        """The part that concerns these keys."""
        keys = tuple(keys)
        if keys == self.keys:
            return self
        indices = [self.keys.index(key) for key in keys]
        states = [x.map(lambda a, axis=x.ndim: _of_keys(a, axis, indices)) for x in self.states]
        return dataclasses.replace(self, states=states, keys=keys, sites=tuple(self.sites[n] for n in indices))

    def fitting(self, events: Events) -> "Fold":
        """Note the lines that the lanes come from; raise if those of events do not fit."""
        key = self.keys[0]
        parts = parts_of(events[key].bundle([key]), events[key].weight)
        site = site_of_lanes(key, self.parts(), self.sites[0], parts, events[key].site)
        if site is self.sites[0]:
            return self
        return dataclasses.replace(self, sites=tuple(Site(events[key].site) for key in self.keys))

    def parts(self) -> Parts:
        """All arrays that have lanes."""
        return [(x, 0) for x in [*self.states, self.count, *self.steps.values()]]

    def take(self, events: Events, apart: bool = False) -> "Fold":
        """Add one event of each key; if `apart`, XLA must not fuse it with what was added before."""
        key = self.keys[0]
        event = events[key]  # the others have the same steps, weight and validity
        if event.weight is not None and self.reduction is _reduce.MEAN:
            return self._weighted().take(events, apart)
        old = self._promoted(check_items((key,), [self.treedef], self.items, str(self.sites[0]), event.bundle([key])))
        valid = event.valid
        if self.interval > 1:
            lanes = union(key, self.count, valid)
            due = _lanes.widen(self.count, lanes).tree % self.interval == 0
            valid = Laned(due if valid is None else due & _lanes.widen(valid, lanes).tree, lanes.flags)
        states = []
        for n, (state, (_, dtype, _)) in enumerate(zip(old.states, old.items, strict=True)):
            value = _beside([events[key].values[key][n] for key in self.keys])
            if apart:
                value = value.map(_compat.computed_apart)
            weight = (event.weight or Laned(jnp.ones((), jnp.float32))) if self.reduction.weighted else None
            lanes = union(key, state, value, valid, weight)
            args = [_lanes.widen(x, lanes).tree for x in (state, Laned(_arrays.cast(value.tree, dtype), value.flags))]
            if weight is not None:
                args.append(_lanes.widen(weight, lanes).tree)
            state = self._each(self.reduction.update, lanes, 2)(*args)
            if valid is not None:
                state = _choose(_lanes.widen(valid, lanes), state, args[0])
            state = Laned(jax.tree.map(_same_type, state, args[0]), lanes.flags)
            states.append(_lanes.widen(state, lanes))  # leaves that do not depend on the value have lost their sharding
        steps = _take_steps(key, self.steps, event, valid)
        count = counted(key, self.count, event.valid)
        new = dataclasses.replace(old, states=states, count=count, steps=steps)
        new.chained = True
        return new

    def _each(self, fun: Any, lanes: Lanes, by_key: int) -> Any:
        """Apply `fun` in each lane and for each key, which the first arguments know and the others have in common."""

        def mapped(*args: Any) -> Any:
            return jax.vmap(fun, [0] * by_key + [None] * (len(args) - by_key))(*args)

        return _by_lane(fun if len(self.keys) == 1 else mapped, lanes)

    def _weighted(self) -> "Fold":
        """Turn a plain mean into a weighted one, which is needed from the first event with a weight on."""
        states, taken = [], self._taken()
        for state in self.states:
            lanes = union(self.keys[0], state, taken)
            args = [_lanes.widen(x, lanes).tree for x in (state, taken)]
            states.append(Laned(self._each(_reduce.with_weights, lanes, 1)(*args), lanes.flags))
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
            fresh = _initial(self.reduction, item, len(self.keys))
            lanes = union(self.keys[0], state, self.count)
            state, fresh = _lanes.widen(state, lanes), _lanes.widen(fresh, lanes)
            started = _lanes.widen(self.count.map(lambda n: n > 0), lanes)
            cast = _reduce.promoted(self.reduction, state.tree, fresh.tree)
            if cast is None:
                was, now = (", ".join(dict.fromkeys(str(dtype) for _, dtype, _ in x)) for x in (self.items, items))
                raise _errors.MismatchError(
                    f"{self.keys[0]!r} is logged as {was} and as {now}, for which the state of its reduction is not "
                    f"the same tree.\n  logged at {self.sites[0]}\nLog values of one dtype."
                )
            states.append(Laned(_choose(started, cast, fresh.tree), lanes.flags))
        return dataclasses.replace(self, states=states, items=items)

    def conform(self, struct: "Fold") -> "Fold":
        """Give the state the type of `struct`, a later state of the same keys."""
        site_of_lanes(self.keys[0], self.parts(), self.sites[0], struct.parts(), str(struct.sites[0]))
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
            steps[name] = conform(step, target)
        count = conform(self.count, struct.count)
        return dataclasses.replace(old, states=states, steps=steps, count=count, sites=struct.sites)

    @classmethod
    def from_struct(cls, struct: "Fold") -> "Fold":
        """The empty state with the type of `struct`."""
        states = [_initial(struct.reduction, item, len(struct.keys)) for item in struct.items]
        empty = dataclasses.replace(struct, states=states, count=Laned(jnp.zeros((), jnp.int32)), steps={})
        return empty.conform(struct)

    def finish(self, certain: bool) -> list[Bundle]:
        """The result of each key, as a single event."""
        values, taken = [], self._taken()
        for state in self.states:
            args = [state, taken] if self.reduction.counted else [state]
            lanes = union(self.keys[0], *args)
            args = [_lanes.widen(x, lanes).tree for x in args]
            values.append(Laned(self._each(self.reduction.finish, lanes, 1)(*args), lanes.flags))
        treedef, valid = self.treedef, None
        if self.reduction is _reduce.COUNT:  # one integer per key
            by_key, treedef = [[taken]] * len(self.keys), jax.tree.structure(0)
        else:
            by_key = zip(*[_apart(x, len(self.keys)) for x in values], strict=True)
        if not certain:
            valid = self.count.map(lambda n: n > 0)
        return [
            Bundle([*values], self.steps, valid, (key,), (treedef,), True, site).even()
            for key, site, values in zip(self.keys, self.sites, by_key, strict=True)
        ]


def groups(waiting: dict[str, tuple[_reduce.Reduction, Event]]) -> list[tuple[_reduce.Reduction, Events]]:
    """The events of keys, in groups such that one state can take all of a group."""
    by_kind: dict[Any, tuple[_reduce.Reduction, Events]] = {}
    for key, (reduction, event) in waiting.items():
        by_kind.setdefault(_kind(key, reduction, event), (reduction, {}))[1][key] = event
    return [*by_kind.values()]


def _kind(key: str, reduction: _reduce.Reduction, event: Event) -> Any:
    """What events must have in common to share a state; the key itself if it cannot share one."""
    values, shared = event.values[key], [event.weight, event.valid, *event.steps.values()]
    types = [_compat.aval_of(x.tree) for x in [*values, *shared] if x is not None]
    # A reduction of the user's own need not be one that `vmap` leaves as it is, to the last bit.
    if not _reduce.is_own(reduction) or any(_compat.explicit_sharding(aval) is not None for aval in types):
        return key
    if any(_arrays.is_prng_key(aval.dtype) for aval in types):
        return key
    return (
        *(reduction, event.treedefs[key], tuple(event.steps)),
        # Steps, weights and validity must be the same arrays.
        tuple(None if x is None else (id(x.tree), x.flags) for x in shared),
        tuple((x.flags, x.tree.shape, x.tree.dtype) for x in values),
        tuple(_compat.varying_axes(aval) for aval in types),
    )


_SELECTED = 8  # how many values are put beside each other by selection
_SMALL = 64  # the most elements that such a value has


def _beside(values: list[Laned]) -> Laned:
    """The values of several keys, with an axis for the keys after the lanes."""
    if len(values) == 1:
        return values[0]
    axis, shape = values[0].ndim, values[0].tree.shape
    # XLA makes a kernel of everything that it concatenates, and compiles each for milliseconds. A selection is fused
    # with what computes the values, but it looks at all of them for each element.
    size = _SELECTED if math.prod(shape) <= _SMALL else 1

    @functools.cache
    def index(count: int) -> Any:
        return jax.lax.broadcasted_iota(np.int32, (*shape[:axis], count, *shape[axis:]), axis)

    arrays, kept = [], [n for n in range(len(shape) + 1) if n != axis]
    for start in range(0, len(values), size):
        chunk = values[start : start + size]
        wide = (*shape[:axis], len(chunk), *shape[axis:])
        distinct = {id(x.tree): x.tree for x in chunk}
        case = {known: jax.lax.broadcast_in_dim(x, wide, kept) for known, x in distinct.items()}
        cases = [case[id(x.tree)] for x in chunk]
        arrays.append(cases[0] if len(case) == 1 else jax.lax.select_n(index(len(cases)), *cases))
    return Laned(arrays[0] if len(arrays) == 1 else jax.lax.concatenate(arrays, axis), values[0].flags)


def _apart(x: Laned, count: int) -> list[Laned]:
    """The inverse of `_beside`."""
    if count == 1:
        return [x]
    whole = jax.lax.optimization_barrier(x.tree)  # or XLA would compute the whole again for each part
    parts = jax.lax.split(whole, [1] * count, axis=x.ndim)
    return [Laned(jax.lax.squeeze(part, [x.ndim]), x.flags) for part in parts]


def _of_keys(x: Any, axis: int, indices: list[int]) -> Any:
    """The part of a state, or of its type, for some of its keys."""
    if isinstance(x, jax.Array):
        if len(indices) == 1:
            return jax.lax.index_in_dim(x, indices[0], axis, keepdims=False)
        return jnp.take(x, np.asarray(indices), axis, mode="clip")
    if len(indices) == 1:
        return _compat.without_axis(x, axis)
    return x.update(shape=(*x.shape[:axis], len(indices), *x.shape[axis + 1 :]))


def _initial(reduction: _reduce.Reduction, item: Item, count: int) -> Laned:
    """The state before any event, for that many keys."""
    state = _reduce.initial(reduction, *item)
    return Laned(state if count == 1 else jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state))


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
