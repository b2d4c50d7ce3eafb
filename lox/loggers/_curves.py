"""Logs as curves: numbers over integer steps, which is what trackers keep.

A pytree has a curve per leaf, `stats/mean`, and a small array one per element, `xs/0`. The tracker's step is the
event's step of a given name; the other steps of an event become curves themselves, so that nothing is lost.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from lox import _errors
from lox._logdict import logdict
from lox.loggers._base import Logger
from lox.loggers._rows import Labels
from lox.loggers._run import Run


class Points(NamedTuple):
    """Some points of a curve, in the order of their events."""

    name: str
    steps: np.ndarray  # int64
    values: np.ndarray  # float64, or integers


class CurveLogger(Logger):
    """Base class of loggers of trackers: a subclass implements `send`.

    Args:
        step: The name of the step that is the tracker's.
        max_elements: The size of the largest array whose elements are logged one by one.
    """

    def __init__(self, step: str, max_elements: int):
        if not isinstance(step, str):
            raise _errors.LogTypeError(f"`step` is {step!r}; it must be the name of a step, such as 'step'.")
        if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 1:
            raise _errors.OptionError(f"`max_elements` is {max_elements!r}; it must be a positive integer.")
        self._step, self._max_elements = step, max_elements
        self._curves: dict[int, Curves] = {}
        self._names: set[str] = set()

    def send(self, run: Run, points: list[Points]) -> None:
        """Hand points to the client."""
        raise NotImplementedError

    def write(self, run: Run, logs: logdict) -> None:
        """Send what are numbers; complain about the rest."""
        curves = self._curves.get(run.id)
        if curves is None:
            curves = self._curves[run.id] = Curves(self._step, self._max_elements)
        points, too_large = curves.points(logs)
        self.send(run, points)
        if too_large:
            name, size = next(iter(too_large.items()))
            raise _errors.LogTypeError(
                f"{type(self).__name__} did not write {_errors.listing(too_large)}: {name!r} has {size} elements per "
                f"event, and a tracker keeps single numbers. Log its mean or another statistic, or let the elements be "
                f"curves of their own: {type(self).__name__}(..., max_elements={size})."
            )

    def _take_name(self, run: Run, taken: set[str]) -> None:
        """Give the run a name that no other one has: 42 becomes 42.1."""
        name, attempt = run.name, 0
        while run.name in self._names or run.name in taken:
            attempt += 1
            run.name = f"{name}.{attempt}"
        self._names.add(run.name)


class Curves:
    """The curves of one run; it counts the events that have no step."""

    def __init__(self, step: str, max_elements: int):
        self._step, self._max_elements = step, max_elements
        self._labels = Labels()
        self._counts: dict[str, int] = {}

    def points(self, logs: logdict) -> tuple[list[Points], dict[str, int]]:
        """The points of these events, and the sizes of arrays that are too large."""
        found: dict[Any, Points] = {}
        too_large: dict[str, int] = {}
        for key in logs:
            steps = {name: np.asarray(of[key]) for name, of in logs.steps.items() if key in of}
            valid = logs.valid.get(key)
            for path, leaf in jax.tree_util.tree_leaves_with_path(logs[key]):
                label = self._labels.of("leaf" if path else "key", key + "".join("/" + _text(part) for part in path))
                for part, x in _parts(np.asarray(leaf)):
                    name = self._labels.of("part", label + part) if part else label
                    size = int(np.prod(x.shape[1:], dtype=np.int64))
                    if size > self._max_elements:
                        too_large[name] = size
                        continue
                    axis, at = self._axis(steps, x)
                    if at is None:
                        at = self._counted(name, len(x))
                    for n, points in enumerate(self._elements(name, "element", x, at, valid)):
                        found[label, name, n] = points
                    for other in steps.keys() - {axis}:
                        y = _real(steps[other])
                        if y.ndim < at.ndim:
                            y = np.broadcast_to(y.reshape(y.shape + (1,) * (at.ndim - y.ndim)), at.shape)
                        # Keys that are logged together have the same steps: one curve for all of them.
                        same = (other, y.tobytes(), at.tobytes(), None if valid is None else valid.tobytes())
                        curve = self._labels.of("step", other)
                        for n, points in enumerate(self._elements(curve, "step element", y, at, valid)):
                            found.setdefault((*same, n), points)
        return [points for points in found.values() if len(points.steps)], too_large

    def _axis(self, steps: dict[str, np.ndarray], x: np.ndarray) -> tuple[str | None, np.ndarray | None]:
        """Which step is the tracker's: the one of that name, or the first; none if it is no integer."""
        name = self._step if self._step in steps else next(iter(steps), None)
        if name is None or steps[name].shape != x.shape[: steps[name].ndim]:
            return None, None
        whole = _integers(steps[name])
        return (None, None) if whole is None else (name, whole)

    def _counted(self, name: str, events: int) -> np.ndarray:
        start = self._counts.get(name, 0)
        self._counts[name] = start + events
        return np.arange(start, start + events)

    def _elements(self, name: str, kind: str, x: np.ndarray, at: np.ndarray, valid: np.ndarray | None) -> list[Points]:
        points = []
        for index in np.ndindex(x.shape[1:]):
            keep = None if valid is None else _of_element(valid, index)
            steps, values = _of_element(at, index), x[(slice(None), *index)]
            if keep is not None and not keep.all():
                steps, values = steps[keep], values[keep]
            label = self._labels.of(kind, "/".join(map(str, (name, *index)))) if index else name
            points.append(Points(label, steps, values))
        return points


def _of_element(x: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """The part of a step or of a mask that belongs to an element; it has the first of the value's axes, or fewer."""
    x = x[(slice(None), *index[: x.ndim - 1])]
    return x if x.ndim == 1 else x.any(tuple(range(1, x.ndim)))


def _text(part: Any) -> str:
    """One step of the path to a leaf."""
    return next((str(getattr(part, name)) for name in ("key", "name", "idx") if hasattr(part, name)), str(part))


def _parts(x: Any) -> list[tuple[str, np.ndarray]]:
    """A complex number is two curves."""
    return [("/real", _real(x.real)), ("/imag", _real(x.imag))] if x.dtype.kind == "c" else [("", _real(x))]


def _real(x: np.ndarray) -> np.ndarray:
    """Floats in double precision, which has room for all others; booleans as 0 and 1."""
    if x.dtype.kind == "b":
        return x.astype(np.int64)
    return x if x.dtype.kind in "iu" else x.astype(np.float64)


def _integers(x: np.ndarray) -> np.ndarray | None:
    """The same numbers as 64-bit integers, if they are."""
    if x.dtype == np.int64:
        return x
    with np.errstate(invalid="ignore"):  # NaN
        whole = x.astype(np.int64)
    return whole if (whole == x).all() and (x.dtype.kind != "u" or (whole >= 0).all()) else None


def flat(config: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The entries of nested dicts, with their paths."""
    if isinstance(config, dict) and config:
        return [entry for key, value in config.items() for entry in flat(value, (*path, str(key)))]
    return [(path, config)] if path else []
