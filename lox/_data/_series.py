"""The events of one key.

A `Series` is what a part of a program (a function body, a loop, a branch) contributes to one key. Parts compose: one
after another (`concatenate`), repeated by a loop (`unroll`), or as alternatives (`common_shape` and `conform`).

A single event has no event axis until it becomes one of several, so an ordinary `log` outside loops costs neither an
axis nor a copy. All functions take NumPy arrays too, and then never touch JAX, as callbacks require.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._arrays import missing_step, numpy_for, promote, slice_events, zeros
from lox._data._lanes import Laned, Lanes


class Site(str):
    """A source line for messages; all are equal, so that it never makes two structures differ."""

    __slots__ = ()
    __eq__ = lambda self, other: isinstance(other, Site)  # noqa: E731
    __hash__ = lambda self: 0  # noqa: E731


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Series:
    """Events of one key: arrays `(event, *lanes, *item)`, or `(*lanes, *item)` if `single`.

    `valid`, `(event, *lanes)`, says which events happened; None means all.
    """

    values: list[Laned]
    steps: dict[str, Laned]
    valid: Laned | None
    treedef: Any
    single: bool
    key: str
    site: Site

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        return (self.values, self.steps, self.valid), (self.treedef, self.single, self.key, self.site)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Series":
        """The inverse of `tree_flatten`."""
        return cls(*children, *aux)

    @property
    def lead(self) -> int:
        """How many axes precede the lanes."""
        return 0 if self.single else 1

    def count(self, axis: int = 0) -> int:
        """How many slots the event axis has."""
        if self.single:
            return 1
        return (self.valid.tree if self.valid is not None else self.values[0].tree).shape[axis]

    def even(self) -> "Series":
        """The same series with flags for the same vmaps and devices in all arrays."""
        depth = max(map(len, _flags(self)))
        return jax.tree.map(lambda x: Laned(x.tree, _lanes.with_depth(x.flags, depth)), self, is_leaf=_lanes.is_laned)

    def expanded(self, axis: int = 0) -> "Series":
        """The same series with an event axis."""
        if not self.single:
            return self
        return dataclasses.replace(jax.tree.map(lambda x: numpy_for(x).expand_dims(x, axis), self), single=False)


def check_fit(first: Series, other: Series, lead: int | None = None) -> None:
    """Raise if the events of one key do not fit together; `lead` is the number of axes before the lanes, if given."""
    leads = (first.lead, other.lead) if lead is None else (lead, lead)
    sites = str(first.site), str(other.site)
    if first.treedef != other.treedef:
        raise _errors.mismatch(first.key, "structure", _tree(first), sites[0], _tree(other), sites[1])
    pairs = list(zip(first.values, other.values, strict=True))
    for a, b in pairs:
        shapes = a.item_shape(leads[0]), b.item_shape(leads[1])
        if shapes[0] != shapes[1]:
            raise _errors.mismatch(first.key, "shape", f"shape {shapes[0]}", sites[0], f"shape {shapes[1]}", sites[1])
    pairs += [(first.steps[name], other.steps[name]) for name in first.steps if name in other.steps]
    if first.valid is not None and other.valid is not None:
        pairs.append((first.valid, other.valid))
    for a, b in pairs:
        lanes = _lanes.lanes_of(a, leads[0]), _lanes.lanes_of(b, leads[1])
        if _lanes.union(*lanes) is None:
            raise _errors.different_lanes(first.key, lanes[0], sites[0], lanes[1], sites[1])


def check_fit_all(models: dict[Any, Series], series: Series, lead: int | None = None) -> None:
    """Raise if events do not fit earlier ones; `models` has one of these for every kind of lanes."""
    for model in models.values():
        check_fit(model, series, lead)
    # All kinds are kept: a series without lanes or names fits others that do not fit each other.
    models.setdefault(tuple(_flags(series)), series)


def _flags(series: Series) -> list[_lanes.Flags]:
    return [x.flags for x in jax.tree.leaves(series, is_leaf=_lanes.is_laned)]


def _lanes_known(series: Series) -> int:
    return sum(bool(f) + isinstance(f, _lanes.Vmap) for flags in _flags(series) for f in flags)


def _tree(series: Series) -> str:
    return str(series.treedef).removeprefix("PyTreeDef(").removesuffix(")")


def _wide(parts: list[Laned], lead: int, key: str) -> tuple[list[Laned], Any]:
    """Give all parts the same lanes and dtype."""
    lanes = _lanes.union(*[_lanes.lanes_of(p, lead) for p in parts])
    if lanes is None:
        raise _errors.MismatchError(f"the steps of {key!r} were logged under different vmaps.")
    dtype = promote(*[p.tree.dtype for p in parts])
    return [_cast(_lanes.widen(p, lanes, lead), dtype) for p in parts], lanes


def _cast(x: Laned, dtype: Any) -> Laned:
    return x if x.tree.dtype == dtype else Laned(x.tree.astype(dtype), x.flags)


def concatenate(parts: list[Series], axis: int = 0) -> Series:
    """Join series of one key, in order. `axis` is the event axis."""
    if len(parts) == 1:
        return parts[0]
    lead = axis + 1
    parts = [p.expanded(axis) for p in parts]
    models: dict[Any, Series] = {}
    for part in parts:
        check_fit_all(models, part, lead)
    xp = numpy_for([p.values for p in parts])
    if xp is jnp:
        parts = [parts[0], *[_compat.beside(jax.tree.leaves(parts[0]), p) for p in parts[1:]]]

    def join(laned: list[Laned]) -> Laned:
        laned, lanes = _wide(laned, lead, parts[0].key)
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


def unroll(series: Series, reverse: bool) -> Series:
    """The series of a whole loop, from that of its body with an additional leading axis."""

    def flat(x: Any) -> Any:
        if reverse:
            x = jnp.flip(x, 0)
        if series.single:
            return x
        if 0 in x.shape[:2]:  # JAX cannot reshape an empty array that is sharded
            return x[0] if x.shape[0] else _compat.zeros_of(_compat.without_axis(_compat.aval_of(x), 1))
        return x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))

    return dataclasses.replace(jax.tree.map(flat, series), single=False)


def every(series: Series, interval: int, seen: int | Laned) -> tuple[Series, int | Laned]:
    """Keep events 0, k, 2k, ..., counted separately in each lane; also returns the number of the next event.

    `seen` is the number of the first event. Numbers that are known while tracing are plain integers.
    """
    if series.valid is None and isinstance(seen, int):
        if series.single and not seen % interval:
            return series, seen + 1
        series = series.expanded()
        return jax.tree.map(lambda x: slice_events(x, -seen % interval, step=interval), series), seen + series.count()
    series = series.expanded()
    valid = Laned(jnp.ones(series.count(), bool)) if series.valid is None else series.valid
    first = Laned(jnp.asarray(seen, jnp.int32)) if isinstance(seen, int) else _compat.beside([valid.tree], seen)
    before, after = _lanes.lanes_of(first), _lanes.lanes_of(valid, 1)
    lanes = _lanes.union(after, before)
    if lanes is None:
        raise _errors.different_lanes(series.key, before, "an earlier line", after, str(series.site))
    valid, first = _lanes.widen(valid, lanes, 1), _lanes.widen(first, lanes)
    number = first.tree + jnp.cumsum(valid.tree, 0, dtype=jnp.int32) - 1
    due = Laned(valid.tree & (number % interval == 0), lanes.flags)
    upcoming = Laned(first.tree + valid.tree.sum(0, dtype=jnp.int32), lanes.flags)
    return dataclasses.replace(series, valid=due), upcoming


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the series of alternative branches have in common once they are padded."""

    model: Series  # for keys, structure and messages; its arrays may be abstract
    count: int
    single: bool
    values: list[tuple[Any, Lanes, tuple[int, ...]]]  # dtype, lanes, item shape
    steps: dict[str, tuple[Any, Lanes]]
    valid: Lanes | None


def common_shape(branches: list[Series | None]) -> Shape:
    """The shape that fits what every branch logs under one key; None is a branch that does not log it."""
    present = [b for b in branches if b is not None]
    model, models = present[0], {}
    for series in present:
        check_fit_all(models, series)
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


def conform(series: Series | None, shape: Shape) -> Series:
    """Pad a branch's series to the shape that all branches share."""
    count = series.count() if series is not None else 0
    lead = () if shape.single else (shape.count,)
    if series is not None and not shape.single:
        series = series.expanded()

    def fitted(x: Laned | None, dtype: Any, lanes: Lanes, item: tuple[int, ...], fill: Any) -> Laned:
        if x is None:
            return Laned(_full((*lead, *lanes.present(), *item), fill, dtype), lanes.flags)
        x = _cast(_lanes.widen(x, lanes, len(lead)), dtype)
        if lead and x.tree.shape[0] < shape.count:
            rest = _full((shape.count - x.tree.shape[0], *x.tree.shape[1:]), fill, dtype)
            x = Laned(_arrays.concatenate([x.tree, rest]), x.flags)
        return x

    values = [
        fitted(series.values[i] if series is not None else None, dtype, lanes, item, None)
        for i, (dtype, lanes, item) in enumerate(shape.values)
    ]
    steps = {
        name: fitted(series.steps.get(name) if series is not None else None, dtype, lanes, (), missing_step(dtype))
        for name, (dtype, lanes) in shape.steps.items()
    }
    valid = None
    if shape.valid is not None:
        valid = fitted(
            Laned(jnp.ones(count, bool)) if series is None or series.valid is None else series.valid,
            np.dtype(bool),
            shape.valid,
            (),
            False,
        )
    return dataclasses.replace(shape.model, values=values, steps=steps, valid=valid, single=shape.single)


def _full(shape: tuple[int, ...], fill: Any, dtype: Any) -> Any:
    return zeros(shape, dtype) if fill is None else jnp.full(shape, fill, dtype)
