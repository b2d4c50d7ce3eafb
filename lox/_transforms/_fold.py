"""A reduction in the carry of loops."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lox import _errors
from lox._data import _arrays, _lanes, _reduce
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned, Lanes
from lox._engine._event import Event
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
    meta_fields=["reduction", "treedef", "items", "key", "site", "interval"],
)
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

    @classmethod
    def empty(cls, reduction: _reduce.Reduction, key: str, event: Event, interval: int) -> "Fold":
        """The state before the first event, for events like `event`."""
        items = items_of(event.bundle([key]))
        states = [Laned(_reduce.initial(reduction, *item)) for item in items]
        count = Laned(jnp.zeros((), jnp.int32))
        return cls(states, count, {}, reduction, event.treedefs[key], items, key, Site(event.site), interval)

    def only(self, keys: Iterable[str]) -> "Fold":
        """The part that concerns these keys: all of it, since every key is reduced by itself."""
        del keys
        return self

    def fitting(self, event: Event) -> "Fold":
        """Note the line that the lanes come from; raise if those of an event do not fit."""
        parts = parts_of(event.bundle([self.key]), event.weight)
        site = site_of_lanes(self.key, self.parts(), self.site, parts, event.site)
        return dataclasses.replace(self, site=site)

    def parts(self) -> Parts:
        """All arrays that have lanes."""
        return [(x, 0) for x in [*self.states, self.count, *self.steps.values()]]

    def take(self, event: Event) -> "Fold":
        """Add an event."""
        key = self.key
        if event.weight is not None and self.reduction is _reduce.MEAN:
            return self._weighted().take(event)
        old = self._promoted(check_items((key,), [self.treedef], self.items, str(self.site), event.bundle([key])))
        valid = event.valid
        if self.interval > 1:
            lanes = union(key, self.count, valid)
            due = _lanes.widen(self.count, lanes).tree % self.interval == 0
            valid = Laned(due if valid is None else due & _lanes.widen(valid, lanes).tree, lanes.flags)
        states = []
        for state, value, (_, dtype, _) in zip(old.states, event.values[key], old.items, strict=True):
            weight = (event.weight or Laned(jnp.ones((), jnp.float32))) if self.reduction.weighted else None
            lanes = union(key, state, value, valid, weight)
            args = [_lanes.widen(x, lanes).tree for x in (state, Laned(_arrays.cast(value.tree, dtype), value.flags))]
            if weight is not None:
                args.append(_lanes.widen(weight, lanes).tree)
            new = _by_lane(self.reduction.update, lanes)(*args)
            if valid is not None:
                new = _choose(_lanes.widen(valid, lanes), new, args[0])
            new = Laned(jax.tree.map(_same_type, new, args[0]), lanes.flags)
            states.append(_lanes.widen(new, lanes))  # leaves that do not depend on the value have lost their sharding
        steps = _take_steps(key, self.steps, event, valid)
        return dataclasses.replace(old, states=states, count=counted(key, self.count, event.valid), steps=steps)

    def _weighted(self) -> "Fold":
        """Turn a plain mean into a weighted one, which is needed from the first event with a weight on."""
        states, taken = [], self._taken()
        for state in self.states:
            lanes = union(self.key, state, taken)
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
            lanes = union(self.key, state, self.count)
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
        site_of_lanes(self.key, self.parts(), self.site, struct.parts(), str(struct.site))
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
        return dataclasses.replace(old, states=states, steps=steps, count=count, site=struct.site)

    @classmethod
    def from_struct(cls, struct: "Fold") -> "Fold":
        """The empty state with the type of `struct`."""
        states = [Laned(_reduce.initial(struct.reduction, *item)) for item in struct.items]
        empty = dataclasses.replace(struct, states=states, count=Laned(jnp.zeros((), jnp.int32)), steps={})
        return empty.conform(struct)

    def finish(self, certain: bool) -> Bundle:
        """The result, as a single event."""
        values, taken = [], self._taken()
        for state in self.states:
            args = [state, taken] if self.reduction.counted else [state]
            lanes = union(self.key, *args)
            args = [_lanes.widen(x, lanes).tree for x in args]
            values.append(Laned(_by_lane(self.reduction.finish, lanes)(*args), lanes.flags))
        treedef, valid = self.treedef, None
        if self.reduction is _reduce.COUNT:  # one integer per key
            values, treedef = [taken], jax.tree.structure(0)
        if not certain:
            valid = self.count.map(lambda n: n > 0)
        return Bundle(values, self.steps, valid, (self.key,), (treedef,), True, self.site).even()


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
