"""Events on several devices: one for all of them, or one from each that says which it is.

Inside shard_map every device logs. Where all of them get to an event together, its small values are gathered there, and
one device sends them with a device axis, as `spool` returns them. Where they do not, or where gathering would cost too
much, each device sends its own, with its place in the mesh as steps.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lox import _compat, _errors
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._lanes import Laned, is_laned

LARGEST = 64  # the most elements of a value that are gathered from all devices to be sent

Axes = frozenset[Any]


def is_large(value: Laned, lead: int) -> bool:
    """Whether a value, without events and lanes, has too many elements to gather them from all devices."""
    return math.prod(value.item_shape(lead)) > LARGEST


def gathered_shape(treedef: Any, leaves: Sequence[Laned], lead: int = 0) -> tuple[int, ...] | None:
    """The shape of a value that is too large to gather its parts from all devices at every event; None if it is not.

    `leaves` has its operands. Histograms are exempt: they are what to log instead.
    """
    places = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    for n in jax.tree.leaves(places, is_leaf=lambda x: isinstance(x, Histogram)):
        if not isinstance(n, Histogram) and is_large(leaves[n], lead) and not leaves[n].tree.whole:
            return leaves[n].item_shape(lead)
    return None


def why_not(key: str, site: str, shape: tuple[int, ...]) -> str:
    """Say why a value of this shape is not sent."""
    return _errors.gathered(key, site, shape, LARGEST)


def in_short(bundle: Bundle) -> Bundle:
    """The same events with one element of each large value, the first that is not finite, and its place as a step.

    By reductions only: nothing is gathered.
    """
    values, steps = list(bundle.values), dict(bundle.steps)
    for n, value in enumerate(bundle.values):
        if is_large(value, bundle.lead):
            lead = bundle.lead + value.ndim
            element, place = _compat.unsharded(functools.partial(_first_bad, lead=lead), value.tree)
            values[n] = Laned(element, value.flags)
            steps[PLACE.format(n)] = Laned(place, value.flags)
    return dataclasses.replace(bundle, values=values, steps=steps)


PLACE = "place of {}"  # the step with the place of an element in a value, by the number of that


def _first_bad(x: Any, lead: int) -> tuple[Any, Any]:
    """The first element that is not finite, or the last one, and its place."""
    axes, shape = tuple(range(lead, x.ndim)), x.shape[lead:]
    number = sum(lax.broadcasted_iota(np.int32, x.shape, n) * math.prod(x.shape[n + 1 :]) for n in axes)
    bad = ~jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros(x.shape, bool)
    first = jnp.min(jnp.where(bad, number, math.prod(shape) - 1), axes)
    here = number == jnp.expand_dims(first, axes)
    place = jnp.stack([first // math.prod(x.shape[n + 1 :]) % x.shape[n] for n in axes], -1)
    return jnp.sum(jnp.where(here, x, jnp.zeros_like(x)), axes, dtype=x.dtype), place


class Operand(NamedTuple):
    """An operand of a primitive that is being lowered."""

    value: Any
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.aval.shape

    @property
    def whole(self) -> bool:
        """Whether every device is known to have all of it."""
        return _compat.is_whole(self.value, self.aval)


def arranged(bundles: Iterable[Bundle], devices: tuple[tuple[Any, ...], ...], alike: Axes) -> list[tuple[Axes, Bundle]]:
    """Events as devices send them, each with the axes along which only the first device does.

    Args:
        bundles: The events of one device.
        devices: The mesh axes of each surrounding shard_map, outermost first.
        alike: The axes along which devices get here together, and differ only in values whose types say so.
    """
    if not devices:
        return [(frozenset(), bundle) for bundle in bundles]
    every = frozenset(name for level in devices for name in level)
    parts: list[tuple[Axes, Bundle]] = []
    for bundle in bundles:
        groups: dict[tuple[bool, Axes], list[str]] = {}
        for key in bundle.keys:
            small = not any(is_large(x, bundle.lead) for x in bundle.leaves(key))
            varying = _compat.varying_over(jax.tree.leaves([bundle.leaves(key), bundle.steps, bundle.valid]))
            together = every <= alike and (small or not varying)
            groups.setdefault((together, every if together else alike - varying), []).append(key)
        for (together, first), keys in groups.items():
            part = bundle.only(keys)
            parts.append((first, _gathered(part, devices) if together else _numbered(part, every - first)))
    return parts


def _gathered(bundle: Bundle, devices: tuple[tuple[Any, ...], ...]) -> Bundle:
    """The events of all devices, with an axis for those of each shard_map as the outermost lane."""

    def gather(laned: Laned) -> Laned:
        varying, tree, flags = _compat.varying_over(jax.tree.leaves(laned.tree)), laned.tree, laned.flags
        for level in devices[::-1]:
            names = tuple(name for name in level if name in varying)
            if names:
                tree = _all_gather(tree, names, bundle.lead)
            flags = (names, *flags)
        return Laned(tree, flags)

    return jax.tree.map(gather, bundle, is_leaf=is_laned).even()


def _all_gather(x: Any, names: tuple[Any, ...], axis: int) -> Any:
    if _compat.is_prng_key(x.dtype):
        return _compat.map_words(lambda words: _all_gather(words, names, axis), x)
    return lax.all_gather(x, names, axis=axis)


def _numbered(bundle: Bundle, axes: Axes) -> Bundle:
    """The events of one device, with its place along these axes as steps, unless there are steps of these names."""
    places = {name: Laned(_repeated(lax.axis_index(name), bundle)) for name in sorted(axes) if name not in bundle.steps}
    return dataclasses.replace(bundle, steps={**bundle.steps, **places}) if places else bundle


def _repeated(place: Any, bundle: Bundle) -> Any:
    return place if bundle.single else lax.broadcast(place, (bundle.count(),))


def are_valid_together(bundles: Iterable[Bundle]) -> bool:
    """Whether events happen on all devices or on none."""
    valid = [bundle.valid for bundle in bundles if bundle.valid is not None]
    return not _compat.varying_over(jax.tree.leaves(valid))
