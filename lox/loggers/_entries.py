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

from lox import _errors, _histogram
from lox._histogram import Histogram
from lox._image import Image
from lox._lanes import Flags
from lox._logdict import logdict
from lox.loggers._rows import Labels

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
    """

    def __init__(self, owner: str, arrays: str, taken: tuple[str, ...] = ()):
        if arrays not in CHOICES:
            raise _errors.OptionError(f"`arrays` is {arrays!r}; choose {_errors.listing(CHOICES)}.")
        self._owner, self._arrays = owner, arrays
        self._labels = Labels(taken)

    def step_name(self, name: str) -> str:
        """What a step is called among the names of entries."""
        return self._labels.of("step", name)

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
        layout = logs._layout(key)
        leaf_flags = iter(layout.flags)
        nodes = jax.tree_util.tree_leaves_with_path(logs[key], is_leaf=lambda x: isinstance(x, Histogram | Image))
        valid_flags = layout.valid_flags if key in logs.valid else ()
        step_flags = dict(layout.step_flags)
        for path, node in nodes:
            flags = [next(leaf_flags) for _ in jax.tree.leaves(node)][0]
            name = key + "".join("/" + _text(part) for part in path)
            source = f"in {key}" if path else "key"

            def spread(x: np.ndarray, of: Flags, lanes: tuple[int, ...], flags: Flags = flags) -> np.ndarray:
                return _spread(x, of, flags, lanes, lead)

            def entry(
                value: Any,
                index: tuple[int, ...],
                lanes: tuple[int, ...],
                suffix: str = "",
                name: str = name,
                source: str = source,
                spread: Any = spread,
            ) -> Entry:
                at = (Ellipsis, *index)
                steps = {
                    step: spread(of[key], step_flags.get(step, ()), lanes)[at]
                    for step, of in logs.steps.items()
                    if key in of
                }
                valid = spread(logs.valid[key], valid_flags, lanes)[at] if key in logs.valid else None
                label = f"in {key}" if suffix else source
                return Entry(self._labels.of(label, name + suffix), value, steps, valid)

            if isinstance(node, Histogram):
                valid = logs.valid.get(key)
                yield self._merged(node, entry, None if valid is None else spread, valid, valid_flags, lead)
            elif isinstance(node, Image):
                lanes = node.pixels.shape[lead:-3]
                for index in np.ndindex(lanes):
                    picture = jax.tree.map(lambda x, i=index: x[(slice(None),) * lead + i], node)
                    yield entry(picture, index, lanes, _suffix(index))
            else:
                yield from self._numbers(key, np.asarray(node), entry, sum(map(bool, flags)), lead)

    def _numbers(self, key: str, x: np.ndarray, entry: Any, depth: int, lead: int) -> Iterator[Entry]:
        shape = x.shape[lead:]
        if x.dtype.kind == "c":
            for part, suffix in ((x.real, "/real"), (x.imag, "/imag")):
                if math.prod(shape) > MOST_ELEMENTS:
                    break
                for index in np.ndindex(shape):
                    yield entry(part[(Ellipsis, *index)], index[:depth], shape[:depth], _suffix(index) + suffix)
            else:
                return
        elif math.prod(shape) <= MOST_ELEMENTS and (self._arrays == "elements" or not shape):
            for index in np.ndindex(shape):
                yield entry(x[(Ellipsis, *index)], index[:depth], shape[:depth], _suffix(index))
            return
        elif self._arrays == "histogram":
            item = x.reshape(*x.shape[:lead], *shape[:depth], -1)
            for index in np.ndindex(shape[:depth]):
                values = item[(slice(None),) * lead + index]
                yield entry(_host_histogram(values, lead), index, shape[:depth], _suffix(index))
            return
        raise _errors.LogTypeError(
            f"{self._owner} cannot show {key!r}: it is an array of {x.dtype} with shape {shape}, and only arrays of up "
            f"to {MOST_ELEMENTS} elements are shown, as one series each.\n"
            f"Log `lox.Histogram(x)` or `lox.Image(x)` under that name, or a number such as `x.mean()`;\n"
            f"or make the logger with `arrays='histogram'`."
        )

    def _merged(self, node: Histogram, entry: Any, spread: Any, valid: Any, valid_flags: Flags, lead: int) -> Entry:
        """One histogram per event, of all lanes inside the run in which it happened."""
        lanes = node.counts.shape[lead:-1]
        inner = tuple(range(lead, lead + len(lanes)))
        mask = None if valid is None or not lanes else spread(valid, valid_flags, lanes)

        def merge(x: np.ndarray) -> np.ndarray:
            if mask is not None:
                x = np.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)
            return x.sum(inner) if inner else x

        merged = jax.tree.map(merge, node)
        # The steps of the first lane: they are those of all, unless the program gave each lane its own.
        made = entry(merged, (0,) * len(lanes), lanes)
        if mask is not None:
            made = dataclasses.replace(made, valid=mask.any(inner))
        return made


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


def _suffix(index: tuple[int, ...]) -> str:
    return "".join(f"/{i}" for i in index)


def _spread(x: np.ndarray, of: Flags, flags: Flags, lanes: tuple[int, ...], lead: int) -> np.ndarray:
    """A step or a mask with the lanes of a value: repeated along those it lacks, any of those the value lacks."""
    present = [n for n, flag in enumerate(of) if flag]
    wanted = [n for n, flag in enumerate(flags) if flag]
    gone = tuple(lead + axis for axis, n in enumerate(present) if n not in wanted)
    if gone:
        x = x.any(gone) if x.dtype == bool else x.max(gone)
        present = [n for n in present if n in wanted]
    x = x[(slice(None),) * lead + tuple(slice(None) if n in present else None for n in wanted)]
    return np.broadcast_to(x, (*x.shape[:lead], *lanes))


def _host_histogram(values: np.ndarray, lead: int, bins: int = 64) -> Histogram:
    """Histograms of arrays that are on the host already, over the range of all their values."""
    x = values.astype(np.float64)
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
