"""What the console shows, as numbers: the last values of every key, their history, and how fast they come."""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from lox._data._histogram import Histogram
from lox._data._image import Image
from lox._data._logdict import logdict
from lox.loggers._files._rows import leaf_by_leaf
from lox.loggers._run import Run

_POINTS = 64  # of a history; then neighbours are averaged
_WINDOW = 10.0  # seconds over which the rate is measured


class History:
    """A series of any length in few points: when there are too many, each becomes the mean of two."""

    def __init__(self) -> None:
        self.stride = 1
        self._points = np.zeros(0)
        self._rest = np.zeros(0)

    def add(self, values: np.ndarray) -> None:
        """Append values."""
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
        """The series, the unfinished last point included."""
        tail = [float(self._rest.mean())] if len(self._rest) else []
        return [*self._points.tolist(), *tail]


class Track:
    """One key."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}  # by run
        self.history = History()
        self.events = 0
        self.shape: tuple[int, ...] = ()
        self.is_integer = False


@dataclasses.dataclass(frozen=True)
class KeyView:
    """What is shown of a key; the statistics are over runs, without those whose value is no number."""

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


@dataclasses.dataclass(frozen=True)
class BoardView:
    """What is shown, at one moment."""

    runs: tuple[str, ...]
    keys: tuple[KeyView, ...]
    steps: tuple[tuple[str, float], ...]
    progress: tuple[tuple[str, float, float], ...]  # step, done, total
    events: int
    rate: float
    elapsed: float


class Board:
    """Follows the events of all runs of a logger. Written by one thread, read by another."""

    def __init__(self, totals: Mapping[str, float] | None = None, now: float | None = None):
        self._totals = dict(totals or {})
        self._started = time.monotonic() if now is None else now
        self._runs: dict[int, str] = {}
        self._tracks: dict[str, Track] = {}
        self._steps: dict[str, dict[int, float]] = {}
        self._events = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._lock = threading.Lock()

    def add_run(self, run: Run) -> None:
        """Show a run."""
        with self._lock:
            self._runs[run.id] = run.name

    def update(self, runs: list[Run], logs: logdict, now: float | None = None) -> None:
        """Take events of several runs: `(lane, event, ...)`."""
        with self._lock:
            before, now = self._events, time.monotonic() if now is None else now
            ids = [run.id for run in runs]
            flat = leaf_by_leaf(logs)
            for key, values in flat.items():
                self._update_key(ids, key, _in_numbers(values), flat.valid.get(key))
                for name, of in flat.steps.items():
                    if key in of:
                        self._update_step(ids, name, of[key], flat.valid.get(key))
            self._recent.append((now, self._events - before))
            while self._recent and self._recent[0][0] < now - _WINDOW:
                self._recent.popleft()

    def _update_key(self, ids: list[int], key: str, values: np.ndarray, valid: np.ndarray | None) -> None:
        track = self._tracks.setdefault(key, Track())
        track.is_integer = values.dtype.kind in "iu"
        track.shape = values.shape[2:]
        numbers = np.abs(values) if values.dtype.kind == "c" else values
        numbers = numbers.astype(np.float64)
        if valid is not None:
            numbers = np.where(valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim)), numbers, np.nan)
            valid = valid.reshape(*valid.shape[:2], -1).any(2)
        happened = np.ones(numbers.shape[:2], bool) if valid is None else valid
        numbers = numbers.reshape(*numbers.shape[:2], -1)
        # An array is shown by its mean; if it is masked, by that of what happened.
        numbers = numbers.mean(2) if valid is None else _mean(numbers, ~np.isnan(numbers), 2)
        for lane, number in enumerate(ids):
            slots = np.flatnonzero(happened[lane])
            if len(slots):
                track.last[number] = float(numbers[lane, slots[-1]])
        some = happened.any(0)
        track.history.add(_mean(numbers, happened, 0)[some])
        track.events += int(happened.sum())
        self._events += int(happened.sum())

    def _update_step(self, ids: list[int], name: str, steps: np.ndarray, valid: np.ndarray | None) -> None:
        known = self._steps.setdefault(name, {})
        steps = steps.astype(np.float64).reshape(*steps.shape[:2], -1).max(2)
        for lane, number in enumerate(ids):
            happened = steps[lane]
            if valid is not None:
                happened = happened[valid[lane].reshape(len(happened), -1).any(1)]
            if len(happened):
                known[number] = float(happened[-1])

    def view(self, now: float | None = None) -> BoardView:
        """What there is to show now."""
        with self._lock:
            now = time.monotonic() if now is None else now
            recent = [(t, n) for t, n in self._recent if t >= now - _WINDOW]
            span = now - max(self._started, now - _WINDOW)
            steps = {name: float(np.mean(list(of.values()))) for name, of in self._steps.items() if of}
            progress = [
                # Steps count from 0: after step 9 of 10 all is done.
                (name, min(steps[name] + 1, total) if name in steps else 0.0, total)
                for name, total in self._totals.items()
            ]
            return BoardView(
                runs=tuple(self._runs.values()),
                keys=tuple(_view(key, track) for key, track in self._tracks.items() if track.last),
                steps=tuple(steps.items()),
                progress=tuple(progress),
                events=self._events,
                rate=sum(n for _, n in recent) / span if span > 0.05 else 0.0,
                elapsed=now - self._started,
            )


def _mean(x: np.ndarray, where: np.ndarray, axis: int) -> np.ndarray:
    count = where.sum(axis)
    return np.where(where, x, 0.0).sum(axis) / np.maximum(count, 1)


def _in_numbers(values: Any) -> np.ndarray:
    """Histograms are shown by the mean of what they count, pictures by their brightness."""
    if isinstance(values, Histogram):
        return np.asarray(values.mean)
    return values.pixels if isinstance(values, Image) else values


def _view(key: str, track: Track) -> KeyView:
    last = np.asarray(list(track.last.values()))
    finite = last[np.isfinite(last)]
    shown = finite if len(finite) else last[:1]
    return KeyView(
        key,
        mean=float(shown.mean()),
        std=float(shown.std()) if len(finite) else math.nan,
        low=float(shown.min()),
        high=float(shown.max()),
        runs=len(last),
        bad=len(last) - len(finite),
        events=track.events,
        history=tuple(track.history.points),
        shape=track.shape,
        is_integer=track.is_integer,
    )
