"""Events as trackers show them: numbers, histograms and pictures, each under a name of its own.

A tracker plots numbers over steps. So a small array becomes one curve per element, `xs/0`, `xs/1`, and a pytree one
per leaf, `stats/mean`; a `lox.Histogram` and a `lox.Image` stay what they are. A large array is an error, because
nobody wants it turned into something unasked.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _axes, _histogram
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox._data._lanes import Flags, Laned
from lox.loggers._files._rows import Labels, is_shown_whole
from lox.store._prng_keys import words_only

MOST_ELEMENTS = 64
CHOICES = ("elements", "histogram")


@dataclasses.dataclass(frozen=True)
class Series:
    """Events under one name. All arrays begin with the axes of the logs: `(event,)` or `(lane, event)`."""

    name: str
    value: np.ndarray | Histogram | Image  # one number, one histogram or one picture per event
    steps: dict[str, np.ndarray]
    valid: np.ndarray | None  # None: all events are valid

    def at(self, index: Any) -> "Series":
        """Select events."""
        steps = {name: x[index] for name, x in self.steps.items()}
        valid = None if self.valid is None else self.valid[index]
        return Series(self.name, jax.tree.map(lambda x: x[index], self.value), steps, valid)


class Splitter:
    """Makes series of events, with the same names throughout a logger's life.

    Args:
        owner: The logger's name, for messages.
        arrays: How to show arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become curves.
        taken: Names that no series may have.
    """

    def __init__(self, owner: str, arrays: str, max_elements: int = MOST_ELEMENTS, taken: tuple[str, ...] = ()):
        if arrays not in CHOICES:
            raise _errors.OptionError(f"`arrays` is {arrays!r}; choose {_errors.listing(CHOICES)}.")
        if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 1:
            raise _errors.OptionError(f"`max_elements` is {max_elements!r}; it must be a positive integer.")
        self._owner, self._arrays, self._max_elements = owner, arrays, max_elements
        self._labels = Labels(taken)

    def step_name(self, name: str) -> str:
        """Name a step, so that no series has the same name."""
        return self._labels.of("step", name)

    def part_name(self, name: str, part: str) -> str:
        """Name a part of a series that is shown in parts."""
        return self._labels.of(f"of {name}", f"{name}/{part}")

    def split(self, bundles: Iterable[Bundle], lead: int) -> tuple[list[Series], list[Exception]]:
        """Return the series of events with `lead` leading axes, and errors about the rest, to be raised afterwards."""
        series: list[Series] = []
        errors: list[Exception] = []
        for bundle in map(words_only, bundles):
            for key in bundle.keys:
                try:
                    series += self._series(bundle, key, lead)
                except _errors.LogTypeError as error:
                    errors.append(error)
        return series, errors

    def _series(self, bundle: Bundle, key: str, lead: int) -> Iterator[Series]:
        flags = iter([x.flags for x in bundle.leaves(key)])
        for tree_path, value in jax.tree_util.tree_leaves_with_path(bundle.value(key), is_leaf=is_shown_whole):
            value_flags = [next(flags) for _ in jax.tree.leaves(value)]
            node = _Node(bundle, key, tree_path, value, value_flags[0], lead, self._labels)
            if isinstance(value, Histogram):
                yield from node.histograms()
            elif isinstance(value, Image):
                yield from node.pictures()
            else:
                yield from self._numbers(node, node.value)

    def _numbers(self, node: "_Node", x: np.ndarray) -> Iterator[Series]:
        shape = x.shape[node.lead :]
        size = math.prod(shape)
        few = size <= self._max_elements
        if not size:
            raise _errors.LogTypeError(
                f"{self._owner} cannot show {node.key!r}: it is an array of {x.dtype} with shape {shape}, which has no "
                "elements. Do not log it, or log its shape."
            )
        if few and x.dtype.kind == "c":
            yield from node.elements(np.real(x), "/real")
            yield from node.elements(np.imag(x), "/imag")
        elif few and (self._arrays == "elements" or not shape):
            yield from node.elements(x)
        elif self._arrays == "histogram" and x.dtype.kind != "c":
            node.value = _host_histogram(x, node.lead, node.depth)
            yield from node.histograms()
        else:
            raise _errors.LogTypeError(
                f"{self._owner} cannot show {node.key!r}: it is an array of {x.dtype} with shape {shape}, and only "
                f"arrays of up to {self._max_elements} elements are shown, as one series each.\n"
                "Log `lox.Histogram(x)` or `lox.Image(x)` under that name, or a number such as `x.mean()`;\n"
                f"or make the logger with `arrays='histogram'`, or with `max_elements={size}`."
            )


class _Node:
    """One leaf of one key, with its steps and `valid`, to be made into series.

    The value has an axis for each lane inside the run that the value or a step depends on.
    """

    def __init__(self, bundle: Bundle, key: str, tree_path: Any, value: Any, flags: Flags, lead: int, labels: Labels):
        self.key, self.lead = key, lead
        self._front = ["run", _axes.EVENT][-lead:]
        self._tree_path, self._labels = tree_path, labels
        self._steps, self._valid = bundle.steps, bundle.valid
        self._stepped = sorted({n for x in self._steps.values() for n in _axes.lanes(x.flags)})  # the lanes of steps
        self._lanes = sorted({*_axes.lanes(flags), *self._stepped})
        self.depth = len(self._lanes)
        self.value: Any = jax.tree.map(lambda x: self._broadcast(x, _axes.lanes(flags)), value)

    def _broadcast(self, x: np.ndarray, present: list[int]) -> np.ndarray:
        """Repeat a value along the lanes that only steps have."""
        sizes: dict[Any, int] = {}
        for step in self._steps.values():
            sizes |= _axes.sizes(step.tree, [*self._front, *_axes.lanes(step.flags)])
        return _axes.align(x, [*self._front, *present], [*self._front, *self._lanes], sizes)

    def elements(self, x: np.ndarray, suffix: str = "") -> Iterator[Series]:
        """Yield a curve for every element."""
        shape = x.shape[self.lead :]
        for index in np.ndindex(shape):
            yield self._one("", index, suffix, x[(Ellipsis, *index)], shape[: self.depth])

    def pictures(self) -> Iterator[Series]:
        """Yield a curve of pictures for every lane."""
        lanes = self.value.pixels.shape[self.lead : -3]
        for index in np.ndindex(lanes):
            # Some reductions make means of pictures, which must become bytes again.
            pixels = self.value.pixels[(slice(None),) * self.lead + index]
            pixels = np.clip(np.round(pixels), 0, 255).astype(np.uint8)
            yield self._one("image", index, "", Image.tree_unflatten(None, [pixels]), lanes)

    def histograms(self) -> Iterator[Series]:
        """Yield one histogram for all valid lanes, or one for each if lanes have steps of their own."""
        lanes = self.value.counts.shape[self.lead : -1]
        if self._stepped:
            for index in np.ndindex(lanes):
                one = jax.tree.map(lambda x, i=index: x[(slice(None),) * self.lead + i], self.value)
                yield self._one("histogram", index, "", one, lanes)
            return
        inner = tuple(range(self.lead, self.lead + len(lanes)))
        valid = None if self._valid is None or not lanes else self._with_lanes(self._valid, lanes)

        def merge(x: np.ndarray) -> np.ndarray:
            if valid is not None:
                x = np.where(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x, 0)
            return x.sum(inner) if inner else x

        steps = {name: x.tree for name, x in self._steps.items()}
        merged = valid.any(inner) if valid is not None else None if self._valid is None else self._valid.tree
        yield Series(self._name("histogram", (), ""), jax.tree.map(merge, self.value), steps, merged)

    def _one(self, kind: str, index: tuple[int, ...], suffix: str, value: Any, lanes: tuple[int, ...]) -> Series:
        at = (Ellipsis, *index[: self.depth])
        steps = {name: self._with_lanes(step, lanes)[at] for name, step in self._steps.items()}
        valid = None if self._valid is None else self._with_lanes(self._valid, lanes)[at]
        return Series(self._name(kind, index, suffix), value, steps, valid)

    def _name(self, kind: str, index: tuple[int, ...], suffix: str) -> str:
        """Name a series after its place in the value; a note is added if the name is taken."""
        if self._tree_path or index or suffix:
            place = self.key + "".join("/" + _text(part) for part in self._tree_path) + "".join(f"/{i}" for i in index)
            inside = jax.tree_util.keystr(self._tree_path) + "".join(f"[{i}]" for i in index) + suffix
            return self._labels.of(f"{kind} in {self.key}{inside}".strip(), place + suffix)
        return self._labels.of(kind or "key", self.key)

    def _with_lanes(self, laned: Laned, lanes: tuple[int, ...]) -> np.ndarray:
        """Give a step or `valid` the lanes of the value: repeat along those it lacks, reduce those the value lacks."""
        x, present = laned.tree, _axes.lanes(laned.flags)
        extra = tuple(self.lead + axis for axis, n in enumerate(present) if n not in self._lanes)
        if extra:
            x = x.any(extra)  # this is `valid`: all lanes of steps are lanes of the value
            present = [n for n in present if n in self._lanes]
        sizes = dict(zip(self._lanes, lanes, strict=True))
        return _axes.align(x, [*self._front, *present], [*self._front, *self._lanes], sizes)


def missing_steps(steps: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tell where an event lacks a step that other events of its name have, which is NaN or -1 there.

    If an event has no other step, -1 is a step, such as that of an evaluation before the training.
    """
    missing = {
        name: np.isnan(x.astype(np.float64)) if x.dtype.kind not in "iub" else x == -1 for name, x in steps.items()
    }
    absent = dict(missing)  # as it is now: what is found of one step must not decide about the next
    for name, x in steps.items():
        if x.dtype.kind in "iub" and missing[name].any():
            others = [~absent[other] for other in steps if other != name]
            missing[name] = missing[name] & np.any(others, 0) if others else np.zeros_like(missing[name])
    return missing


def raise_problems(errors: list[Exception]) -> None:
    """Raise the errors that `Splitter.split` returned, now that the rest is written."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise _errors.LogTypeError("\n".join(str(error) for error in errors))


def _text(part: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def _host_histogram(values: np.ndarray, lead: int, depth: int, bins: int = 64) -> Histogram:
    """Make histograms of arrays on the host, over the range of all their values."""
    lead += depth
    x = values.astype(np.float64).reshape(*values.shape[:lead], -1)
    finite = np.isfinite(x)
    low, high = (float(x[finite].min()), float(x[finite].max())) if finite.any() else (0.0, 1.0)
    if not np.float32(low) < np.float32(high):
        low, high = low - 0.5 * max(1.0, abs(low)), high + 0.5 * max(1.0, abs(high))
    edges = np.linspace(low, high, bins + 1)
    counts = np.zeros((*x.shape[:lead], bins))
    for index in np.ndindex(x.shape[:lead]):
        counts[index] = np.histogram(x[index][finite[index]], edges)[0]
    x = np.where(finite, x, 0.0)
    return _histogram.with_edges(edges, [counts, (~finite).sum(-1), x.sum(-1), np.square(x).sum(-1)])
