"""Axes with names, and the one place that aligns arrays by them.

The leading axes of an array have names; what follows is the item. A name is EVENT, the number of a vmap around the log
(outermost first), or whatever else sorts the axes of one caller. Which lanes an array has is said by flags, one for
every vmap around it (see `_lanes`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lox._data._arrays import numpy_for

Axes = Sequence[Any]
EVENT = "event"


def lanes(flags: Iterable[Any]) -> list[int]:
    """Return the names of the lanes that an array with these flags has."""
    return [n for n, flag in enumerate(flags) if flag]


def sizes(x: Any, axes: Axes) -> dict[Any, int]:
    """Return the size of each named axis."""
    return dict(zip(axes, x.shape, strict=False))


def align(x: Any, axes: Axes, wanted: Axes, size: Mapping[Any, int] | None = None) -> Any:
    """Give an array with the leading axes `axes` the leading axes `wanted` instead, in that order.

    It is repeated along axes that it lacks and whose size is given; others that it lacks have size one.
    """
    order = [axes.index(axis) for axis in wanted if axis in axes]
    if len(order) != len(axes):
        raise ValueError(f"an array with axes {[*axes]} cannot have only {[*wanted]}")
    if order != sorted(order):
        x = x.transpose([*order, *range(len(axes), x.ndim)])
    if len(order) == len(wanted):
        return x
    x = x[tuple(slice(None) if axis in axes else None for axis in wanted)]
    size = size or {}
    shape = tuple(size.get(axis, n) if axis not in axes else n for axis, n in zip(wanted, x.shape, strict=False))
    if shape == x.shape[: len(shape)]:
        return x
    return numpy_for(x).broadcast_to(x, (*shape, *x.shape[len(shape) :]))
