"""Logs as trackers show them: single numbers, histograms and pictures, each under a name of its own.

A tracker plots numbers over steps. So an array of a few elements becomes as many series, `xs/0`, `xs/1`; a pytree a
series per leaf, `stats/mean`; a `lox.Histogram` and a `lox.Image` stay what they are. A large array is none of these,
and nobody wants it turned into something unasked.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data import _histogram
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox._data._lanes import Flags
from lox._data._logdict import logdict
from lox.loggers._files._rows import Labels, is_shown_whole

MOST_ELEMENTS = 64
CHOICES = ("elements", "histogram")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Events under one name. All arrays begin with the axes of the logs: `(event,)` or `(lane, event)`."""

    name: str
    value: np.ndarray | Histogram | Image  # one number, one histogram or one picture per event
    steps: dict[str, np.ndarray]
    valid: np.ndarray | None  # where the event happened; None: everywhere

    def at(self, index: Any) -> "Entry":
        """A part of the events."""
        steps = {name: x[index] for name, x in self.steps.items()}
        valid = None if self.valid is None else self.valid[index]
        return Entry(self.name, jax.tree.map(lambda x: x[index], self.value), steps, valid)


class Sorter:
    """Makes entries of logs, with the same names throughout a logger's life.

    Args:
        owner: The logger's name, for messages.
        arrays: What becomes of arrays: "elements" or "histogram".
        max_elements: The size of the largest array whose elements become series.
        taken: Names that are not to be given.
    """

    def __init__(self, owner: str, arrays: str, max_elements: int = MOST_ELEMENTS, taken: tuple[str, ...] = ()):
        if arrays not in CHOICES:
            raise _errors.OptionError(f"`arrays` is {arrays!r}; choose {_errors.listing(CHOICES)}.")
        if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 1:
            raise _errors.OptionError(f"`max_elements` is {max_elements!r}; it must be a positive integer.")
        self._owner, self._arrays, self._max_elements = owner, arrays, max_elements
        self._labels = Labels(taken)

    def step_name(self, name: str) -> str:
        """What a step is called among the names of entries."""
        return self._labels.of("step", name)

    def part_name(self, name: str, part: str) -> str:
        """What a part of an entry is called, if it is shown in parts."""
        return self._labels.of(f"of {name}", f"{name}/{part}")

    def sort(self, logs: logdict, lead: int) -> tuple[list[Entry], list[Exception]]:
        """The entries of logs with `lead` leading axes; and what cannot be one, as errors to be raised afterwards."""
        entries: list[Entry] = []
        errors: list[Exception] = []
        for key in logs:
            try:
                entries += self._entries(logs, key, lead)
            except _errors.LogTypeError as error:
                errors.append(error)
        return entries, errors

    def _entries(self, logs: logdict, key: str, lead: int) -> Iterator[Entry]:
        flags = iter(logs._layout(key).flags)
        for path, value in jax.tree_util.tree_leaves_with_path(logs[key], is_leaf=is_shown_whole):
            own_flags = [next(flags) for _ in jax.tree.leaves(value)]
            node = _Node(logs, key, path, value, own_flags[0], lead, self._labels)
            if isinstance(value, Histogram):
                yield from node.histograms()
            elif isinstance(value, Image):
                yield from node.pictures()
            else:
                yield from self._numbers(node, node.value)

    def _numbers(self, node: "_Node", x: np.ndarray) -> Iterator[Entry]:
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
    """One leaf of one key: what it becomes, with its steps and its mask.

    Lanes inside the run, of which the value has an axis each, are those in which the value or a step differs.
    """

    def __init__(self, logs: logdict, key: str, path: Any, value: Any, flags: Flags, lead: int, labels: Labels):
        self.key, self.lead = key, lead
        layout = logs._layout(key)
        step_flags = dict(layout.step_flags)
        self._path, self._labels = path, labels
        self._steps = {name: (of[key], step_flags.get(name, ())) for name, of in logs.steps.items() if key in of}
        self._valid = (logs.valid[key], layout.valid_flags) if key in logs.valid else None
        self._stepped = sorted({n for _, f in self._steps.values() for n in _numbers_of(f)})  # lanes that steps have
        self._lanes = sorted({*_numbers_of(flags), *self._stepped})
        self.depth = len(self._lanes)
        self.value: Any = jax.tree.map(lambda x: self._broadcast(x, _numbers_of(flags)), value)

    def _broadcast(self, x: np.ndarray, present: list[int]) -> np.ndarray:
        """A value that is the same in lanes which have steps of their own."""
        if present == self._lanes:
            return x
        sizes = {
            n: step.shape[self.lead + axis]
            for step, flags in self._steps.values()
            for axis, n in enumerate(_numbers_of(flags))
        }
        sizes |= {n: x.shape[self.lead + axis] for axis, n in enumerate(present)}
        rest = x.shape[self.lead + len(present) :]
        x = x[(slice(None),) * self.lead + tuple(slice(None) if n in present else None for n in self._lanes)]
        return np.broadcast_to(x, (*x.shape[: self.lead], *[sizes[n] for n in self._lanes], *rest))

    def elements(self, x: np.ndarray, suffix: str = "") -> Iterator[Entry]:
        """A series for every element."""
        shape = x.shape[self.lead :]
        for index in np.ndindex(shape):
            yield self._entry("", index, suffix, x[(Ellipsis, *index)], shape[: self.depth])

    def pictures(self) -> Iterator[Entry]:
        """A picture for every lane."""
        lanes = self.value.pixels.shape[self.lead : -3]
        for index in np.ndindex(lanes):
            # A mean of pictures, which some reductions make, is one too once it is bytes.
            pixels = self.value.pixels[(slice(None),) * self.lead + index]
            pixels = np.clip(np.round(pixels), 0, 255).astype(np.uint8)
            yield self._entry("image", index, "", Image.tree_unflatten(None, [pixels]), lanes)

    def histograms(self) -> Iterator[Entry]:
        """One for all lanes in which the event happened; one for each if they have steps of their own."""
        lanes = self.value.counts.shape[self.lead : -1]
        if self._stepped:
            for index in np.ndindex(lanes):
                one = jax.tree.map(lambda x, i=index: x[(slice(None),) * self.lead + i], self.value)
                yield self._entry("histogram", index, "", one, lanes)
            return
        inner = tuple(range(self.lead, self.lead + len(lanes)))
        mask = None if self._valid is None or not lanes else self._with_lanes(*self._valid, lanes)

        def merge(x: np.ndarray) -> np.ndarray:
            if mask is not None:
                x = np.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)
            return x.sum(inner) if inner else x

        steps = {name: x for name, (x, _) in self._steps.items()}
        valid = mask.any(inner) if mask is not None else None if self._valid is None else self._valid[0]
        yield Entry(self._name("histogram", (), ""), jax.tree.map(merge, self.value), steps, valid)

    def _entry(self, kind: str, index: tuple[int, ...], suffix: str, value: Any, lanes: tuple[int, ...]) -> Entry:
        at = (Ellipsis, *index[: self.depth])
        steps = {name: self._with_lanes(*step, lanes)[at] for name, step in self._steps.items()}
        valid = None if self._valid is None else self._with_lanes(*self._valid, lanes)[at]
        return Entry(self._name(kind, index, suffix), value, steps, valid)

    def _name(self, kind: str, index: tuple[int, ...], suffix: str) -> str:
        """The place of a series as a name; if another place or another kind of thing has it, with a note of it."""
        if self._path or index or suffix:
            place = self.key + "".join("/" + _text(part) for part in self._path) + "".join(f"/{i}" for i in index)
            inside = jax.tree_util.keystr(self._path) + "".join(f"[{i}]" for i in index) + suffix
            return self._labels.of(f"{kind} in {self.key}{inside}".strip(), place + suffix)
        return self._labels.of(kind or "key", self.key)

    def _with_lanes(self, x: np.ndarray, flags: Flags, lanes: tuple[int, ...]) -> np.ndarray:
        """A step or a mask with the lanes of the value: repeated along those it lacks, any of those the value lacks."""
        present = _numbers_of(flags)
        gone = tuple(self.lead + axis for axis, n in enumerate(present) if n not in self._lanes)
        if gone:
            x = x.any(gone)  # a mask: lanes of steps are lanes of the value
            present = [n for n in present if n in self._lanes]
        x = x[(slice(None),) * self.lead + tuple(slice(None) if n in present else None for n in self._lanes)]
        return np.broadcast_to(x, (*x.shape[: self.lead], *lanes))


def _numbers_of(flags: Flags) -> list[int]:
    return [n for n, flag in enumerate(flags) if flag]


def missing_steps(steps: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where an event does not have a step that others under its name have: NaN stands there, or -1.

    A -1 is missing only if the event has another step. Alone it may well be one, of an evaluation before the training.
    """
    gone = {name: np.isnan(x.astype(np.float64)) if x.dtype.kind not in "iub" else x == -1 for name, x in steps.items()}
    for name, x in steps.items():
        if x.dtype.kind in "iub" and gone[name].any():
            others = [~gone[other] for other in steps if other != name]
            gone[name] = gone[name] & np.any(others, 0) if others else np.zeros_like(gone[name])
    return gone


def raise_problems(errors: list[Exception]) -> None:
    """Raise what `Sorter.sort` has found, now that the rest is written."""
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
    """Histograms of arrays that are on the host already, over the range of all their values."""
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
