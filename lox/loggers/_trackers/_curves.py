"""Curves over one integer step, as most trackers plot them.

An event has as many steps as the program gave it. One becomes the tracker's step; the others become curves themselves,
so that nothing is lost. An event without a step, or with one that is not an integer, gets one more than the last.
"""

import collections
import dataclasses
import json
from typing import Any, ClassVar

import jax
import numpy as np

from lox import _errors
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox.loggers._batch import Batch
from lox.loggers._files._rows import bins, strict_json
from lox.loggers._logger import Logger
from lox.loggers._run import Run
from lox.loggers._trackers import _bands
from lox.loggers._trackers._series import MOST_ELEMENTS, Series, Splitter, missing_steps, raise_problems

Value = np.ndarray | Histogram | Image  # a number, a histogram or a picture per event


@dataclasses.dataclass(frozen=True)
class Curve:
    """Events under one name. All arrays begin with `(run, event)`; those of a single run with `(event,)`."""

    name: str
    steps: np.ndarray  # int64
    value: Value
    valid: np.ndarray | None = None  # None: all events are valid

    def of_run(self, lane: int) -> "Curve":
        """Return the events of one run."""
        valid = slice(None) if self.valid is None else self.valid[lane]
        return Curve(self.name, self.steps[lane][valid], jax.tree.map(lambda x: x[lane][valid], self.value))

    def numbers(self) -> np.ndarray:
        """Return values that are numbers, as integers or in double precision, which has room for all floats."""
        assert isinstance(self.value, np.ndarray)
        kind = self.value.dtype.kind
        return self.value if kind in "iu" else self.value.astype(np.int64 if kind == "b" else np.float64)

    def events(self) -> list[tuple[int, Any]]:
        """Return step and value of each event, for values that are not numbers."""
        return [(step, jax.tree.map(lambda x, n=n: x[n], self.value)) for n, step in enumerate(self.steps.tolist())]


class CurveLogger(Logger):
    """Base class of loggers for such trackers. A subclass implements `send`.

    Attributes:
        reserved_names: Names that no curve may have.

    Args:
        step: The name of the step to use as the tracker's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become curves.
    """

    reserved_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, step: str = "step", arrays: str = "elements", max_elements: int = MOST_ELEMENTS):
        if not isinstance(step, str):
            raise _errors.LogTypeError(f"`step` is {step!r}; it must be the name of a step, such as 'step'.")
        self._curves = _Curves(step, Splitter(self._pipeline.name, arrays, max_elements, self.reserved_names))

    def send(self, run: Run, curves: list[Curve]) -> None:
        """Hand the events of one run to the client."""
        raise NotImplementedError

    def send_lanes(self, runs: list[Run], curves: list[Curve]) -> None:
        """Hand over the events of several runs. By default, this calls `send` for each."""
        for lane, run in enumerate(runs):
            run_curves = [curve for curve in (curve.of_run(lane) for curve in curves) if len(curve.steps)]
            names = _errors.listing([curve.name for curve in run_curves])
            with self._pipeline.isolated(f"writing {names} of run {run.name!r}"):
                self.send(run, run_curves)

    def _in_numbers(self, curve: Curve) -> list[Curve]:
        """Return means and standard deviations of histograms, for trackers that have none."""
        histogram = curve.value
        assert isinstance(histogram, Histogram)
        parts = {"mean": np.asarray(histogram.mean), "std": np.asarray(histogram.std)}
        return [Curve(self._curves.part_name(curve.name, part), curve.steps, x) for part, x in parts.items()]

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Send what can be plotted, then raise errors about the rest."""
        curves, problems = self._curves.of([run.id for run in runs], batch.run_first())
        self.send_lanes(runs, curves)
        raise_problems(problems)

    def open(self, run: Run) -> None:
        """Count events without a step from the one at which the run is resumed on."""
        if run.resumed is not None and run.resumed[0] == self._curves.step:
            self._curves.count_from(run.id, int(run.resumed[1]))

    def finish(self, run: Run) -> None:
        """Forget the run."""
        self._curves.forget(run.id)


class _Curves:
    """Makes curves of events, and remembers the last step of each curve of each run."""

    def __init__(self, step: str, splitter: Splitter):
        self.step, self._splitter = step, splitter
        self._first: dict[int, int] = {}  # steps of resumed runs
        self._last: collections.defaultdict[int, dict[str, int]] = collections.defaultdict(dict)
        # Curves that once had a step that was not an integer: from then on, their events are counted.
        self._counted: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
        # The last points of the curves of other steps.
        self._points: collections.defaultdict[int, dict[str, Any]] = collections.defaultdict(dict)
        self.statistics: dict[tuple[str, str], str] = {}  # the names that statistics of curves have

    def count_from(self, run: int, first: int) -> None:
        """Give the first event without a step this one."""
        self._first[run] = first

    def forget(self, run: int) -> None:
        """Forget a run that has ended."""
        for memory in (self._first, self._last, self._counted, self._points):
            memory.pop(run, None)

    def part_name(self, name: str, part: str) -> str:
        """Name a part of a curve."""
        return self._splitter.part_name(name, part)

    def _statistic_name(self, name: str, part: str) -> str:
        self.statistics[name, part] = self.part_name(name, part)
        return self.statistics[name, part]

    def of(self, runs: list[int], bundles: list[Bundle]) -> tuple[list[Curve], list[Exception]]:
        """Return the curves of these runs, and errors about what cannot be plotted, to be raised afterwards."""
        series, problems = self._splitter.split(bundles, lead=2)
        return self._curves(runs, series), problems

    def of_all(self, run: int, bundles: list[Bundle]) -> tuple[list[Curve], list[Exception]]:
        """Return the statistics over all runs of the bundles, as curves of one run."""
        series, problems = self._splitter.split(bundles, lead=2)
        parts = [part for one in series for part in _bands.over_lanes(one, self._statistic_name)]
        return self._curves([run], [part.at(None) for part in parts]), problems

    def _curves(self, runs: list[int], series: list[Series]) -> list[Curve]:
        curves: list[Curve] = []
        others: dict[Any, Curve] = {}
        for one in series:
            missing = missing_steps(one.steps)
            axis = self.step if self.step in one.steps else next(iter(one.steps), None)
            steps, counted = self._steps(runs, one, axis, missing)
            curves.append(Curve(one.name, steps, one.value, one.valid))
            for name, x in one.steps.items():
                written = counted if name == axis else ~missing[name]
                if not written.any():
                    continue
                valid = one.valid if written.all() else written if one.valid is None else written & one.valid
                other = Curve(self._splitter.step_name(name), steps, x, valid)
                # Keys that are logged together have the same steps: one curve for all of them.
                same = (other.name, *((a.dtype, a.tobytes()) for a in (x, steps)), _bytes_of(valid))
                others.setdefault(same, other)
        new = [self._new_points(runs, other) for other in others.values()]
        return [*curves, *[other for other in new if other is not None]]

    def _new_points(self, runs: list[int], other: Curve) -> Curve | None:
        """Drop points that were sent before: keys that are logged one after the other may have the same steps."""
        if other.steps.shape[1] != 1:
            return other
        valid = np.ones(len(runs), bool) if other.valid is None else other.valid[:, 0]
        new = valid.copy()
        for lane in np.flatnonzero(valid).tolist():
            point = other.steps[lane, 0].item(), other.numbers()[lane, 0].item()
            points = self._points[runs[lane]]
            new[lane] = points.get(other.name) != point
            points[other.name] = point
        return other if new.all() else dataclasses.replace(other, valid=new[:, None]) if new.any() else None

    def _steps(
        self, runs: list[int], one: Series, axis: str | None, missing: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tracker's steps, and which of them are counted although the event has a step on the axis."""
        lanes, events = jax.tree.leaves(one.value)[0].shape[:2]
        nowhere = np.zeros((lanes, events), bool)
        if not lanes or not events:
            return np.zeros((lanes, events), np.int64), nowhere
        valid = ~nowhere if one.valid is None else one.valid
        last = np.array([self._last[run].get(one.name, self._first.get(run, 0) - 1) for run in runs], np.int64)[:, None]
        x, known = (nowhere, nowhere) if axis is None else (one.steps[axis], valid & ~missing[axis])
        counted = known & self._are_counted(runs, one.name, x, known)
        known = known & ~counted
        if known.all():
            steps, end = x.astype(np.int64), np.full((lanes, 1), events - 1)
        else:
            x = np.where(known, x, 0).astype(np.int64)
            # From the last known step on, events are counted.
            at = np.maximum.accumulate(np.where(known, np.arange(events), -1), axis=1)
            count = valid.cumsum(1)
            start, since = (np.take_along_axis(a, np.maximum(at, 0), 1) for a in (x, count))
            steps = np.where(at < 0, last + count, start + count - since)
            end = np.where(valid.any(1), events - 1 - valid[:, ::-1].argmax(1), -1)[:, None]
        ends = np.where(end < 0, last, np.take_along_axis(steps, np.maximum(end, 0), 1))
        for run, step in zip(runs, ends[:, 0].tolist(), strict=True):
            self._last[run][one.name] = step
        return steps, counted

    def _are_counted(self, runs: list[int], name: str, x: np.ndarray, known: np.ndarray) -> np.ndarray:
        before = np.array([name in self._counted[run] for run in runs])[:, None]
        counted = before | np.logical_or.accumulate(known & ~_are_integers(x), axis=1)
        for run, now in zip(runs, counted[:, -1].tolist(), strict=True):
            if now:
                self._counted[run].add(name)
        return counted


def _bytes_of(valid: np.ndarray | None) -> bytes | None:
    return None if valid is None else valid.tobytes()


def _are_integers(x: np.ndarray) -> np.ndarray:
    """Tell which of these numbers are integers of 64 bits."""
    if x.dtype.kind in "bi":
        return np.ones(x.shape, bool)
    with np.errstate(invalid="ignore"):  # NaN and infinities
        whole = x.astype(np.int64)
    return (whole == x) & (whole >= 0) if x.dtype.kind == "u" else whole == x


def json_lines(curve: Curve) -> str:
    """Format histograms as text: one per line, with its step and all its data."""
    lines = [{"step": step, **strict_json(bins(histogram))} for step, histogram in curve.events()]
    return "".join(json.dumps(line) + "\n" for line in lines)
