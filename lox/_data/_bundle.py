"""Events that were logged together.

What one `lox.log` yields stays together: the values of its keys, and once for all of them the steps and which events
happened. A `Bundle` is what a part of a program (a function body, a loop, a branch) contributes to some keys. Parts
compose: one after another (`concatenate`), repeated by a loop (`unroll`), or as alternatives (`common_shape` and
`conform`). Keys that another part logs without the others are split off (`together`).

A single event has no event axis until it becomes one of several, so an ordinary `log` outside loops costs neither an
axis nor a copy. All functions take NumPy arrays too, and then never touch JAX, as callbacks require.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _axes, _lanes
from lox._data._arrays import missing_step, numpy_for, promote, slice_events, zeros
from lox._data._axes import EVENT
from lox._data._lanes import Laned, Lanes
from lox._record import record, struct

Keys = tuple[str, ...]


class Site(str):
    """A source line for messages; all are equal, so that it never makes two structures differ."""

    __slots__ = ()
    __eq__ = lambda self, other: isinstance(other, Site)  # noqa: E731
    __hash__ = lambda self: 0  # noqa: E731


@jax.tree_util.register_pytree_node_class
@struct
class Bundle:
    """Events of some keys: arrays `(event, *lanes, *item)`, or `(*lanes, *item)` if `single`.

    `values` has the leaves of all keys, one key after the other. `valid`, `(event, *lanes)`, says which events
    happened; None means all.
    """

    values: list[Laned]
    steps: dict[str, Laned]
    valid: Laned | None
    keys: Keys
    treedefs: tuple[Any, ...]
    single: bool
    site: Site

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure, and so is the order of steps, which a dict would lose."""
        structure = (tuple(self.steps), self.keys, self.treedefs, self.single, self.site)
        return (self.values, [*self.steps.values()], self.valid), structure

    @classmethod
    def tree_unflatten(cls, structure: Any, children: Any) -> "Bundle":
        """The inverse of `tree_flatten`."""
        values, steps, valid = children
        return cls(values, dict(zip(structure[0], steps, strict=True)), valid, *structure[1:])

    @property
    def lead(self) -> int:
        """How many axes precede the lanes."""
        return 0 if self.single else 1

    def count(self, axis: int = 0) -> int:
        """How many slots the event axis has."""
        if self.single:
            return 1
        arrays = [self.valid, *self.values, *self.steps.values()]
        return next((x.tree.shape[axis] for x in arrays if x is not None), 1)  # a value without arrays is one event

    def leaves(self, key: str) -> list[Laned]:
        """The values of one key."""
        n = self.keys.index(key)
        start = sum(treedef.num_leaves for treedef in self.treedefs[:n])
        return self.values[start : start + self.treedefs[n].num_leaves]

    def treedef(self, key: str) -> Any:
        """The structure of one key."""
        return self.treedefs[self.keys.index(key)]

    def value(self, key: str) -> Any:
        """The values of one key as users see them."""
        return jax.tree.unflatten(self.treedef(key), [x.tree for x in self.leaves(key)])

    def only(self, keys: Sequence[str]) -> "Bundle":
        """The part that concerns these keys, in this order."""
        keys = tuple(keys)
        if keys == self.keys:
            return self
        values, treedefs = [x for key in keys for x in self.leaves(key)], tuple(map(self.treedef, keys))
        return dataclasses.replace(self, values=values, keys=keys, treedefs=treedefs)

    def prefixed(self, prefix: str) -> "Bundle":
        """The same events with a prefix in front of their keys."""
        return dataclasses.replace(self, keys=tuple(prefix + key for key in self.keys)) if prefix else self

    def only_if(self, condition: Any) -> "Bundle":
        """The same events under a further condition, which is one for all events and lanes."""
        if self.valid is not None:
            return dataclasses.replace(self, valid=self.valid.map(lambda valid: valid & condition))
        valid = condition if self.single else jnp.ones(self.count(), bool) & condition
        return dataclasses.replace(self, valid=Laned(valid, (False,) * max(map(len, _flags(self)))))

    def only_where(self, condition: Laned) -> "Bundle":
        """The same event in those lanes where the condition holds."""
        valid = self.valid or Laned(jnp.ones((), bool))
        lanes = _lanes.union(_lanes.lanes_of(valid), _lanes.lanes_of(condition))
        assert lanes is not None  # they were compared before
        both = _lanes.widen(valid, lanes).tree & _lanes.widen(condition, lanes).tree
        return dataclasses.replace(self, valid=Laned(both, lanes.flags))

    def occurred(self) -> "Bundle | None":
        """The events that happened in any lane, if they are NumPy arrays; None if there are none."""
        if self.valid is None:
            return self if self.count() else None
        valid = self.valid.tree
        any_lane = valid.any(tuple(range(self.lead, valid.ndim)))
        if not any_lane.any():
            return None
        bundle = self if any_lane.all() else jax.tree.map(lambda x: x[any_lane], self)
        return dataclasses.replace(bundle, valid=None) if valid[any_lane].all() else bundle

    def even(self) -> "Bundle":
        """The same events with flags for the same vmaps and devices in all arrays."""
        depths = {len(flags) for flags in _flags(self)}
        if len(depths) <= 1:
            return self
        depth = max(depths)
        return jax.tree.map(lambda x: Laned(x.tree, _lanes.with_depth(x.flags, depth)), self, is_leaf=_lanes.is_laned)

    def expanded(self, axis: int = 0) -> "Bundle":
        """The same events with an event axis."""
        if not self.single:
            return self
        return dataclasses.replace(jax.tree.map(lambda x: numpy_for(x).expand_dims(x, axis), self), single=False)


def any_valid(bundles: Iterable[Bundle]) -> Any:
    """Whether any event happened in any lane."""
    valids = {id(v and v.tree): v for v in [bundle.valid for bundle in bundles]}.values()
    return functools.reduce(operator.or_, [jnp.ones((), bool) if v is None else jnp.any(v.tree) for v in valids])


def together(bundles: Iterable[tuple[int, Bundle]]) -> list[Keys]:
    """The keys of all bundles in as few groups as possible, such that no bundle has only a part of a group.

    Bundles are numbered, or belong to numbered branches, in each of which a key is in one bundle at most.
    """
    where: dict[str, list[Any]] = {}
    for n, bundle in bundles:
        for key in bundle.keys:
            where.setdefault(key, []).append((n, bundle.keys))
    groups: dict[Any, list[str]] = {}
    for key, places in where.items():
        groups.setdefault(tuple(places), []).append(key)
    return [tuple(keys) for keys in groups.values()]


def part(bundles: Iterable[Bundle], keys: Keys) -> Bundle | None:
    """The events of these keys, which are all in one bundle or in none."""
    return next((bundle.only(keys) for bundle in bundles if keys[0] in bundle.keys), None)


def without(bundles: Iterable[Bundle], keys: Container[str]) -> list[Bundle]:
    """The events of all other keys."""
    rest = [(bundle, [key for key in bundle.keys if key not in keys]) for bundle in bundles]
    return [bundle.only(others) for bundle, others in rest if others]


def gather(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Join bundles, in order, such that every key is in one of them."""
    if len(bundles) == 1:
        return [*bundles]
    having: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        for key in bundle.keys:
            having.setdefault(key, []).append(bundle)
    if len(having) == sum(len(bundle.keys) for bundle in bundles):
        return [*bundles]
    groups = together(enumerate(bundles))
    return [concatenate([bundle.only(keys) for bundle in having[keys[0]]]) for keys in groups]


def check_fit(first: Bundle, other: Bundle, key: str, lead: int | None = None) -> None:
    """Raise if the events of a key do not fit together; `lead` is the number of axes before the lanes, if given."""
    leads = (first.lead, other.lead) if lead is None else (lead, lead)
    sites = str(first.site), str(other.site)
    if first.treedef(key) != other.treedef(key):
        raise _errors.mismatch(key, "structure", _tree(first, key), sites[0], _tree(other, key), sites[1])
    pairs = list(zip(first.leaves(key), other.leaves(key), strict=True))
    for a, b in pairs:
        shapes = a.item_shape(leads[0]), b.item_shape(leads[1])
        if shapes[0] != shapes[1]:
            raise _errors.mismatch(key, "shape", f"shape {shapes[0]}", sites[0], f"shape {shapes[1]}", sites[1])
    pairs += [(first.steps[name], other.steps[name]) for name in first.steps if name in other.steps]
    if first.valid is not None and other.valid is not None:
        pairs.append((first.valid, other.valid))
    for a, b in pairs:
        lanes = _lanes.lanes_of(a, leads[0]), _lanes.lanes_of(b, leads[1])
        if _lanes.union(*lanes) is None:
            raise _errors.different_lanes(key, lanes[0], sites[0], lanes[1], sites[1])


Models = dict[str, dict[Any, Bundle]]  # for every key, one bundle for every kind of lanes


def check_fit_all(models: Models, bundle: Bundle, lead: int | None = None) -> None:
    """Raise if events do not fit earlier ones."""
    kind = tuple(_flags(bundle))
    for key in bundle.keys:
        earlier = models.setdefault(key, {})
        for model in earlier.values():
            check_fit(model, bundle, key, lead)
        # All kinds are kept: events without lanes or names fit others that do not fit each other.
        earlier.setdefault(kind, bundle)


def _flags(bundle: Bundle) -> list[_lanes.Flags]:
    shared = [*bundle.steps.values()] if bundle.valid is None else [*bundle.steps.values(), bundle.valid]
    return [x.flags for x in (*bundle.values, *shared)]


def _lanes_known(bundle: Bundle) -> int:
    return sum(bool(f) + isinstance(f, _lanes.Vmap) for flags in _flags(bundle) for f in flags)


def _tree(bundle: Bundle, key: str) -> str:
    return str(bundle.treedef(key)).removeprefix("PyTreeDef(").removesuffix(")")


def _wide(parts: list[Laned], lead: int, key: str) -> tuple[list[Laned], Any]:
    """Give all parts the same lanes and dtype."""
    lanes = _lanes.union(*[_lanes.lanes_of(p, lead) for p in parts])
    if lanes is None:
        raise _errors.MismatchError(f"the steps of {key!r} were logged under different vmaps.")
    dtype = promote(*[p.tree.dtype for p in parts])
    return [_cast(_lanes.widen(p, lanes, lead), dtype) for p in parts], lanes


def _cast(x: Laned, dtype: Any) -> Laned:
    return x if x.tree.dtype == dtype else Laned(x.tree.astype(dtype), x.flags)


def concatenate(parts: list[Bundle], axis: int = 0) -> Bundle:
    """Join events of the same keys, in order. `axis` is the event axis."""
    if len(parts) == 1:
        return parts[0]
    lead = axis + 1
    parts = [p.expanded(axis) for p in parts]
    models: Models = {}
    for bundle in parts:
        check_fit_all(models, bundle, lead)
    xp = numpy_for([p.values for p in parts])
    others = jax.tree.leaves(parts[0])

    def join(laned: list[Laned]) -> Laned:
        if xp is jnp:  # each key where its first event is: those of one log may be on different devices
            first, *rest = laned
            laned = [first, *_compat.beside(lambda: [first.tree, *others], rest)]
        laned, lanes = _wide(laned, lead, parts[0].keys[0])
        arrays = [x.tree for x in laned]
        return Laned(_arrays.concatenate(arrays, axis) if xp is jnp else np.concatenate(arrays, axis), lanes.flags)

    steps: dict[str, Laned] = {}
    for name in dict.fromkeys(n for p in parts for n in p.steps):
        present = [p.steps[name] for p in parts if name in p.steps]
        dtype = promote(*[x.tree.dtype for x in present])
        outer = present[0].tree.shape[:axis]
        steps[name] = join(
            [p.steps[name] if name in p.steps else _no_step(xp, (*outer, p.count(axis)), dtype) for p in parts]
        )
    valid = None
    if any(p.valid is not None for p in parts):
        outer = next(p.valid for p in parts if p.valid is not None).tree.shape[:axis]
        valid = join([p.valid or Laned(xp.ones((*outer, p.count(axis)), bool)) for p in parts])
    values = [join(list(leaves)) for leaves in zip(*[p.values for p in parts], strict=True)]
    site = max(parts, key=_lanes_known).site  # the line to name if later events have other lanes
    return dataclasses.replace(parts[0], values=values, steps=steps, valid=valid, site=site)


def _no_step(xp: Any, shape: tuple[int, ...], dtype: Any) -> Laned:
    return Laned(xp.full(shape, missing_step(dtype), dtype))


def unroll(bundle: Bundle, reverse: bool) -> Bundle:
    """The events of a whole loop, from that of its body with an additional leading axis."""
    if bundle.single and not reverse:
        return dataclasses.replace(bundle, single=False)

    def flat(x: Any) -> Any:
        if reverse:
            x = jnp.flip(x, 0)
        if bundle.single:
            return x
        if 0 in x.shape[:2]:  # JAX cannot reshape an empty array that is sharded
            return x[0] if x.shape[0] else _compat.zeros_of(_compat.without_axis(_compat.aval_of(x), 1))
        return x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))

    return dataclasses.replace(jax.tree.map(flat, bundle), single=False)


def runs_outermost(bundle: Bundle, route: Laned) -> Bundle:
    """Make the lanes of runs, which may be several, the outermost lane."""
    run_axes, sizes = _axes.lanes(route.flags), dict(zip(_axes.lanes(route.flags), route.tree.shape, strict=True))
    depth = max([len(route.flags), *map(len, _flags(bundle))])

    def sort(x: Laned) -> Laned:
        flags = _lanes.with_depth(x.flags, depth)
        axes = [EVENT, *_axes.lanes(flags)]
        inner = tuple(flag for n, flag in enumerate(flags) if n not in run_axes)
        if not any(axis in axes for axis in run_axes):
            return Laned(x.tree, (False, *inner))
        wanted = [EVENT, *run_axes, *[axis for axis in axes[1:] if axis not in run_axes]]
        tree = _axes.align(x.tree, axes, wanted, sizes)
        shape = (len(tree), math.prod(route.tree.shape), *tree.shape[1 + len(run_axes) :])
        return Laned(tree.reshape(shape), (True, *inner))

    return jax.tree.map(sort, bundle, is_leaf=_lanes.is_laned)


def every(bundle: Bundle, interval: int, seen: int | Laned) -> tuple[Bundle, int | Laned]:
    """Keep events 0, k, 2k, ..., counted separately in each lane; also returns the number of the next event.

    `seen` is the number of the first event. Numbers that are known while tracing are plain integers.
    """
    if bundle.valid is None and isinstance(seen, int):
        if bundle.single and not seen % interval:
            return bundle, seen + 1
        bundle = bundle.expanded()
        return jax.tree.map(lambda x: slice_events(x, -seen % interval, step=interval), bundle), seen + bundle.count()
    bundle = bundle.expanded()
    valid = Laned(jnp.ones(bundle.count(), bool)) if bundle.valid is None else bundle.valid
    first = Laned(jnp.asarray(seen, jnp.int32)) if isinstance(seen, int) else _compat.beside(lambda: [valid.tree], seen)
    before, after = _lanes.lanes_of(first), _lanes.lanes_of(valid, 1)
    lanes = _lanes.union(after, before)
    if lanes is None:
        raise _errors.different_lanes(bundle.keys[0], before, "an earlier line", after, str(bundle.site))
    valid, first = _lanes.widen(valid, lanes, 1), _lanes.widen(first, lanes)
    number = first.tree + jnp.cumsum(valid.tree, 0, dtype=jnp.int32) - 1
    due = Laned(valid.tree & (number % interval == 0), lanes.flags)
    upcoming = Laned(first.tree + valid.tree.sum(0, dtype=jnp.int32), lanes.flags)
    return dataclasses.replace(bundle, valid=due), upcoming


@record
class Shape:
    """What the events of alternative branches have in common once they are padded."""

    model: Bundle  # for keys, structure and messages; its arrays may be abstract
    count: int
    single: bool
    values: list[tuple[Any, Lanes, tuple[int, ...]]]  # dtype, lanes, item shape
    steps: dict[str, tuple[Any, Lanes]]
    valid: Lanes | None


def common_shape(branches: list[Bundle | None]) -> Shape:
    """The shape that fits what every branch logs under the same keys; None is a branch that does not log them."""
    present = [b for b in branches if b is not None]
    model, models = present[0], {}
    for bundle in present:
        check_fit_all(models, bundle)
    counts = {b.count() for b in present}
    single = all(b.single for b in present)
    ragged = len(present) < len(branches) or len(counts) > 1 or any(b.valid is not None for b in present)

    def joint(parts: list[tuple[Laned, int]]) -> tuple[Any, Lanes]:
        lanes = _lanes.union(*[_lanes.lanes_of(x, lead) for x, lead in parts])
        assert lanes is not None  # checked by check_fit
        return promote(*[x.tree.dtype for x, _ in parts]), lanes

    values = []
    for leaves in zip(*[b.values for b in present], strict=True):
        dtype, lanes = joint([(x, b.lead) for x, b in zip(leaves, present, strict=True)])
        values.append((dtype, lanes, leaves[0].item_shape(model.lead)))
    steps = {
        name: joint([(b.steps[name], b.lead) for b in present if name in b.steps])
        for name in dict.fromkeys(n for b in present for n in b.steps)
    }
    valids = [(b.valid, b.lead) for b in present if b.valid is not None]
    valid = joint(valids)[1] if valids else Lanes((), ())
    return Shape(model, max(counts), single and not ragged, values, steps, valid if ragged else None)


def conform(bundle: Bundle | None, shape: Shape) -> Bundle:
    """Pad a branch's events to the shape that all branches share."""
    count = bundle.count() if bundle is not None else 0
    lead = () if shape.single else (shape.count,)
    if bundle is not None and not shape.single:
        bundle = bundle.expanded()

    def fitted(x: Laned | None, dtype: Any, lanes: Lanes, item: tuple[int, ...], fill: Any) -> Laned:
        if x is None:
            return Laned(_full((*lead, *lanes.present(), *item), fill, dtype), lanes.flags)
        x = _cast(_lanes.widen(x, lanes, len(lead)), dtype)
        if lead and x.tree.shape[0] < shape.count:
            rest = _full((shape.count - x.tree.shape[0], *x.tree.shape[1:]), fill, dtype)
            x = Laned(_arrays.concatenate([x.tree, rest]), x.flags)
        return x

    values = [
        fitted(bundle.values[i] if bundle is not None else None, dtype, lanes, item, None)
        for i, (dtype, lanes, item) in enumerate(shape.values)
    ]
    steps = {
        name: fitted(bundle.steps.get(name) if bundle is not None else None, dtype, lanes, (), missing_step(dtype))
        for name, (dtype, lanes) in shape.steps.items()
    }
    valid = None
    if shape.valid is not None:
        valid = fitted(
            Laned(jnp.ones(count, bool)) if bundle is None or bundle.valid is None else bundle.valid,
            np.dtype(bool),
            shape.valid,
            (),
            False,
        )
    return dataclasses.replace(shape.model, values=values, steps=steps, valid=valid, single=shape.single)


def _full(shape: tuple[int, ...], fill: Any, dtype: Any) -> Any:
    return zeros(shape, dtype) if fill is None else jnp.full(shape, fill, dtype)
