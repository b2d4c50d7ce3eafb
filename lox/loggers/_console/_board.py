"""The numbers that the console shows: the last values of every key, their history, and their rate."""

import collections
import math
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lox import _compat
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox.loggers._files._rows import leaves
from lox.loggers._run import Run
from lox.store._prng_keys import words_only

_POINTS = 64  # of a history; beyond, neighbours are averaged
_WINDOW = 10.0  # seconds over which the rate is measured


class History:
    """A series of any length in a few points: when there are too many, pairs of them are averaged."""

    def __init__(self) -> None:
        self.stride = 1
        self._points = np.zeros(0)
        self._rest = np.zeros(0)

    def add(self, values: np.ndarray) -> None:
        """Add values at the end."""
        rest = np.concatenate([self._rest, values])
        whole = len(rest) // self.stride * self.stride
        self._points = np.concatenate([self._points, rest[:whole].reshape(-1, self.stride).mean(1)])
        self._rest = rest[whole:]
        while len(self._points) > _POINTS:
            even = len(self._points) // 2 * 2
            pairs = self._points[:even].reshape(-1, 2).mean(1)
            self._rest = np.concatenate([np.repeat(self._points[even:], self.stride), self._rest])
            self._points = pairs
            self.stride *= 2

    @property
    def points(self) -> list[float]:
        """The series, including the unfinished last point."""
        tail = [float(self._rest.mean())] if len(self._rest) else []
        return [*self._points.tolist(), *tail]


class Track:
    """What is known of one key."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}  # by run
        self.history = History()
        self.events = 0
        self.shape: tuple[int, ...] = ()
        self.is_integer = False


class KeyView(NamedTuple):
    """What is shown of a key; the statistics are over runs with a finite value."""

    key: str
    mean: float
    std: float
    low: float
    high: float
    runs: int
    bad: int  # runs with NaN or infinity
    events: int
    history: tuple[float, ...]
    shape: tuple[int, ...]
    is_integer: bool


class BoardView(NamedTuple):
    """What is shown at one moment."""

    runs: tuple[str, ...]
    resumed: tuple[str, ...]  # the steps at which some of them are
    keys: tuple[KeyView, ...]
    steps: tuple[tuple[str, float], ...]
    progress: tuple[tuple[str, float, float, float], ...]  # step, done, total, where the runs began
    events: int
    rate: float
    elapsed: float
    compiling: float | None  # for how many seconds, if the program is being compiled
    running: float  # the time without what was spent compiling


class Board:
    """Follows the events of all runs of a logger. One thread writes, another reads."""

    def __init__(self, totals: Mapping[str, float] | None = None, now: float | None = None):
        self._totals = dict(totals or {})
        self._started = time.monotonic() if now is None else now
        self._runs: dict[int, str] = {}
        self._resumed: list[tuple[str, float]] = []  # the steps at which runs are resumed
        self._tracks: dict[str, Track] = {}
        self._steps: dict[str, dict[int, float]] = {}
        self._events = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._caller: int | None = None  # the thread that runs the program
        self._compiling_since: float | None = None
        self._compiled = 0.0  # seconds spent so far
        self._lock = threading.Lock()

    def add_run(self, run: Run) -> None:
        """Add a run to those shown."""
        with self._lock:
            self._runs[run.id] = run.name
            if run.resumed is not None:
                self._resumed.append(run.resumed)

    @property
    def events(self) -> int:
        """How many events there were."""
        return self._events

    def follow(self, thread: int | None) -> None:
        """Say from now on whether JAX is compiling something on this thread."""
        with self._lock:
            self._caller = thread

    @property
    def is_compiling(self) -> bool:
        """Whether JAX is compiling something for the program."""
        return self._caller is not None and _compat.is_compiling(self._caller)

    def _look(self, now: float) -> float:
        """Note whether something is being compiled, and return for how long it has been."""
        since = now if self._compiling_since is None else self._compiling_since
        if self.is_compiling:
            self._compiling_since = since
        else:
            self._compiled += now - since
            self._compiling_since = None
        return now - since

    def update(self, runs: list[Run], bundles: list[Bundle], now: float | None = None) -> None:
        """Take events of several runs: `(run, event, ...)`."""
        with self._lock:
            before, now = self._events, time.monotonic() if now is None else now
            if self._compiling_since is not None:  # where there is no display, nobody else looks
                self._look(now)
            ids = [run.id for run in runs]
            for key, bundle, values in leaves([*map(words_only, bundles)]):
                valid = self._update_key(ids, key, _in_numbers(values), bundle.valid and bundle.valid.tree)
                for name, x in bundle.steps.items():
                    steps = x.tree.astype(np.float64).reshape(*valid.shape, -1).max(2)
                    # How far a run is does not go back, though a summary may be logged after the steps it is about.
                    keep = _keep_most if name in self._totals else _keep_last
                    keep(self._steps.setdefault(name, {}), ids, steps, valid)
            self._recent.append((now, self._events - before))
            while self._recent and self._recent[0][0] < now - _WINDOW:
                self._recent.popleft()

    def _update_key(self, ids: list[int], key: str, values: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
        """Update a key, and return which events of each run are valid, that is in at least one lane inside the run."""
        track = self._tracks.setdefault(key, Track())
        track.is_integer = values.dtype.kind in "iu"
        track.shape = values.shape[2:]
        numbers = np.abs(values) if values.dtype.kind == "c" else values
        numbers = numbers.astype(np.float64)
        if valid is not None:
            numbers = np.where(valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim)), numbers, np.nan)
            valid = valid.reshape(*valid.shape[:2], -1).any(2)
        numbers = numbers.reshape(*numbers.shape[:2], -1)
        # An array is shown by its mean, without invalid lanes.
        numbers = numbers.mean(2) if valid is None else _mean(numbers, ~np.isnan(numbers), 2)
        valid = np.ones(numbers.shape, bool) if valid is None else valid
        _keep_last(track.last, ids, numbers, valid)
        track.history.add(_mean(numbers, valid, 0)[valid.any(0)])
        track.events += int(valid.sum())
        self._events += int(valid.sum())
        return valid

    def view(self, now: float | None = None) -> BoardView:
        """Return what to show now."""
        with self._lock:
            now = time.monotonic() if now is None else now
            compiling = self._look(now)
            recent = [(t, n) for t, n in self._recent if t >= now - _WINDOW]
            span = now - max(self._started, now - _WINDOW)
            steps = {name: float(np.mean(list(last.values()))) for name, last in self._steps.items() if last}
            progress = [
                # Steps count from 0: after step 9, 10 are done.
                (name, min(steps[name] + 1, total) if name in steps else 0.0, total, self._first(name))
                for name, total in self._totals.items()
            ]
            return BoardView(
                runs=tuple(self._runs.values()),
                resumed=tuple(dict.fromkeys(f"{name} {number}" for name, number in self._resumed)),
                keys=tuple(_view(key, track) for key, track in self._tracks.items() if track.last),
                steps=tuple(steps.items()),
                progress=tuple(progress),
                events=self._events,
                rate=sum(n for _, n in recent) / span if span > 0.05 else 0.0,
                elapsed=now - self._started,
                compiling=None if self._compiling_since is None else compiling,
                running=now - self._started - self._compiled - (self._compiling_since is not None) * compiling,
            )

    def _first(self, name: str) -> float:
        """Return the step at which the runs began, as a mean; those that are not resumed, at 0."""
        return sum(number for step, number in self._resumed if step == name) / max(len(self._runs), 1)


def _keep_most(most: dict[int, float], ids: list[int], x: np.ndarray, valid: np.ndarray) -> None:
    """Remember the largest valid number of each run, of numbers `(lane, event)`."""
    for number, events, is_valid in zip(ids, x, valid, strict=True):
        if is_valid.any():
            most[number] = max(most.get(number, -math.inf), float(events[is_valid].max()))


def _keep_last(last: dict[int, float], ids: list[int], x: np.ndarray, valid: np.ndarray) -> None:
    """Remember the last valid number of each run, of numbers `(lane, event)`."""
    for number, events, is_valid in zip(ids, x, valid, strict=True):
        if is_valid.any():
            last[number] = float(events[is_valid][-1])


def _mean(x: np.ndarray, valid: np.ndarray, axis: int) -> np.ndarray:
    return np.where(valid, x, 0.0).sum(axis) / np.maximum(valid.sum(axis), 1)


def _in_numbers(values: Any) -> np.ndarray:
    """Show a histogram by its mean, a picture by its brightness."""
    if isinstance(values, Histogram):
        return np.asarray(values.mean)
    return values.pixels if isinstance(values, Image) else values


def _view(key: str, track: Track) -> KeyView:
    last = np.asarray(list(track.last.values()))
    finite = last[np.isfinite(last)]
    shown = finite if len(finite) else last[:1]
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are nearly infinite
        mean, std = float(shown.mean()), float(shown.std()) if len(finite) else math.nan
    return KeyView(
        key,
        mean=mean,
        std=std,
        low=float(shown.min()),
        high=float(shown.max()),
        runs=len(last),
        bad=len(last) - len(finite),
        events=track.events,
        history=tuple(track.history.points),
        shape=track.shape,
        is_integer=track.is_integer,
    )
