"""The curves of a directory that grows.

One reader looks for new events. Of a key, nothing is read until somebody asks for it, and from then on only what is
new: every key has a cursor, every run's events are arrays that grow, and a view of a group (its lanes on common points,
and the band over them) is computed anew only from the first point on that has changed.
"""

import dataclasses
import glob
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lox import _errors
from lox._data._dataframe import plain_dtype
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox._data._logdict import logdict
from lox.loggers._batch import Batch
from lox.loggers._trackers._series import Series, Splitter, missing_steps
from lox.store import Cursor, Reader, Run
from lox.view import _bands, _filter, _groups
from lox.view._bands import Band
from lox.view._curves import EVENT, STEP, WALL, Curve

_REMEMBERED = 256  # changes of a view; who is further behind gets everything
_VIEWS = 256  # that are kept
_MOST_NUMBERS = 1 << 27  # that are kept of all keys: 1 GB, and about as much again in views
_serials = itertools.count()
_MESSAGES = 50  # about problems that are kept


class Growing:
    """A one-dimensional array that grows in amortised constant time."""

    def __init__(self) -> None:
        self._data, self.size = np.empty(0), 0

    def extend(self, values: np.ndarray) -> None:
        """Append numbers."""
        need = self.size + len(values)
        if need > len(self._data):
            data = np.empty(max(need, 2 * self.size) if self.size else need)
            data[: self.size] = self._data[: self.size]
            self._data = data
        self._data[self.size : need] = values
        self.size = need

    def array(self) -> np.ndarray:
        """Return all numbers, without a copy."""
        return self._data[: self.size]


class Lane:
    """The events of one run under one name: numbers, or things such as pictures, with their steps."""

    def __init__(self) -> None:
        self.numbers = Growing()
        self.things: list[Any] = []
        self.steps: dict[str, Growing] = {WALL: Growing()}
        self.size = 0

    def extend(self, values: Any, count: int, steps: Mapping[str, np.ndarray]) -> None:
        """Append events."""
        if isinstance(values, list):
            self.things += values
        else:
            self.numbers.extend(values)
        for name in steps:
            if name not in self.steps:
                self.steps[name] = Growing()
                self.steps[name].extend(np.full(self.size, np.nan))
        for name, known in self.steps.items():
            known.extend(steps[name] if name in steps else np.full(count, np.nan))
        self.size += count

    def at(self, step: str) -> np.ndarray:
        """Return where the events are: their step, or their numbers."""
        if step == EVENT:
            return np.arange(self.size, dtype=np.float64)
        return self.steps[step].array() if step in self.steps else np.full(self.size, np.nan)


class Track:
    """What was logged under one name, in all runs."""

    def __init__(self, name: str, kind: str):
        self.name, self.kind = name, kind  # "number", "histogram" or "image"
        self.lanes: dict[str, Lane] = {}
        self.replaced: dict[str, dict[int, Lane]] = {}  # by run and attempt: what later attempts have computed again

    def steps(self) -> list[str]:
        """Return the names of all steps, that to use by default first."""
        names = dict.fromkeys(name for lane in self.lanes.values() for name in lane.steps if name != WALL)
        return [STEP, *(name for name in names if name != STEP)] if STEP in names else list(names)

    def default_step(self) -> str:
        """Return what the axis is unless somebody chooses."""
        return next(iter(self.steps()), EVENT)


class View:
    """The lanes of some runs on common points, and bands over them, as of the last `update`."""

    def __init__(self, track: Track, runs: Sequence[str], step: str):
        self.track, self.runs, self.step = track, tuple(runs), step
        self.version, self.points, self.serial = 0, 0, next(_serials)
        self._seen: dict[str, tuple[Lane, int]] = {}
        self._x, self._values, self._times = np.empty(0), np.empty((len(runs), 0)), np.empty((len(runs), 0))
        self._there = np.empty((len(runs), 0), bool)
        self._changes: list[tuple[int, float]] = []  # versions, and from which point on they differ from those before
        self._bands: dict[str, list[np.ndarray]] = {}

    @property
    def x(self) -> np.ndarray:
        """The points."""
        return self._x[: self.points]

    def curve(self, start: int = 0) -> Curve:
        """Return all lanes from a point on, without copies."""
        part = slice(start, self.points)
        return Curve(
            self.track.name, self.runs, self._x[part], self._values[:, part], self._there[:, part], self.step
        )  # fmt: skip

    def mean_seconds(self, began: Mapping[str, float]) -> np.ndarray:
        """Return the mean time of each point since the runs began."""
        there = self._there[:, : self.points]
        since = self._times[:, : self.points] - np.array([[began.get(run, 0.0)] for run in self.runs])
        return np.where(there, since, 0.0).sum(0) / there.sum(0)

    def update(self) -> None:
        """Take in what the lanes have got since the last update."""
        lanes = [(n, self.track.lanes[run]) for n, run in enumerate(self.runs) if run in self.track.lanes]
        replaced = any(run in self._seen and self.track.lanes.get(run) is not self._seen[run][0] for run in self.runs)
        known = {} if replaced else {run: size for run, (_, size) in self._seen.items()}
        first = math.inf
        for n, lane in lanes:
            new = lane.at(self.step)[known.get(self.runs[n], 0) :]
            if len(new):
                first = min(first, float(np.fmin.reduce(new)))
        if first == math.inf and not replaced:
            return  # what is NaN here has no place
        changed = -math.inf if replaced or not self.points else first
        # The last point is drawn because it is the last: it too changes when another one is.
        drawn = min(changed, float(self.x[-1])) if self.points else changed
        keep = int(np.searchsorted(self.x, changed, "left"))
        self._put(keep, *_points([(n, *_from(lane, self.step, changed)) for n, lane in lanes], len(self.runs)))
        self._seen = {self.runs[n]: (lane, lane.size) for n, lane in lanes}
        self._bands = {kind: [a[:keep] for a in arrays] for kind, arrays in self._bands.items()}
        self.version += 1
        self._changes.append((self.version, drawn))
        del self._changes[:-_REMEMBERED]

    def _put(self, keep: int, x: np.ndarray, values: np.ndarray, there: np.ndarray, times: np.ndarray) -> None:
        """Replace all points from one on."""
        self.points = keep + len(x)
        if self.points > len(self._x):
            room = max(self.points, 2 * keep)
            lanes = len(self.runs)
            for name, shape in [("_x", (room,)), *((n, (lanes, room)) for n in ("_values", "_there", "_times"))]:
                old = getattr(self, name)
                new = np.empty(shape, old.dtype)
                new[..., :keep] = old[..., :keep]
                setattr(self, name, new)
        part = slice(keep, self.points)
        self._x[part], self._values[:, part], self._there[:, part], self._times[:, part] = x, values, there, times

    def changed_since(self, version: int) -> float:
        """Return the first point that may differ from what it was in a version; infinity if there is none."""
        if version > self.version or version < self.version - len(self._changes):
            return -math.inf
        return min((x for v, x in self._changes if v > version), default=math.inf)

    def band(self, kind: str) -> Band:
        """Return the band over all lanes; only new points are computed."""
        known = self._bands.get(kind, [np.empty(0)] * 5)
        start = len(known[0])
        if start < self.points or kind not in self._bands:
            new = _bands.band(self.curve(start), kind)
            parts = [new.center, new.low, new.high, new.n, new.lost]
            known = [np.concatenate([a, b]) if start else b for a, b in zip(known, parts, strict=True)]
            self._bands[kind] = known
        center, low, high, n, lost = known
        return Band(self.x, center, low, high, n, lost, _bands.KINDS[kind][1])


def _from(lane: Lane, step: str, first: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where events from a point on are, their values and times."""
    at = lane.at(step)
    chosen = slice(None) if first == -math.inf and not np.isnan(at).any() else at >= first
    return at[chosen], lane.numbers.array()[chosen], lane.steps[WALL].array()[chosen]


def _points(
    parts: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray]], lanes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Put the events of all lanes on common points, as `_curves.curves` does: `x`, values, `there` and times.

    The nth event of a lane at one number is another point: two logs of one step are not one.
    """
    parts = [part for part in parts if len(part[1])]
    if not parts:
        return np.empty(0), np.empty((lanes, 0)), np.empty((lanes, 0), bool), np.empty((lanes, 0))
    first = parts[0][1]
    if (np.diff(first) > 0).all() and all(np.array_equal(part[1], first) for part in parts[1:]):
        x, rows, columns = first, [n for n, *_ in parts], slice(None)
        shape = lanes, len(x)
        put: list[tuple[Any, Any]] = [(rows, columns)]
        data = [(np.stack([v for _, _, v, _ in parts]), np.stack([t for *_, t in parts]))]
    else:
        lane = np.repeat([n for n, *_ in parts], [len(at) for _, at, *_ in parts])
        at, values, times = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
        order = np.lexsort((at, lane))  # stable, so events of one step stay in order
        new = np.r_[True, (np.diff(at[order]) != 0) | (np.diff(lane[order]) != 0)]
        starts = np.flatnonzero(new)
        nth = np.empty(len(at), int)
        nth[order] = np.arange(len(at)) - np.repeat(starts, np.diff(np.r_[starts, len(at)]))
        order = np.lexsort((nth, at))
        fresh = np.r_[True, (np.diff(at[order]) != 0) | (np.diff(nth[order]) != 0)]
        point = np.empty(len(at), int)
        point[order] = np.cumsum(fresh) - 1
        x, shape = at[order][fresh], (lanes, int(fresh.sum()))
        put, data = [(lane, point)], [(values, times)]
    out, there, when = np.full(shape, np.nan), np.zeros(shape, bool), np.full(shape, np.nan)
    for (row, column), (values, times) in zip(put, data, strict=True):
        out[row, column], there[row, column], when[row, column] = values, True, times
    return x, out, there, when


class Key:
    """The tracks of one key, and how far it was read."""

    def __init__(self, name: str):
        self.name = name
        self.tracks: dict[str, Track] = {}
        self.problem = ""
        self._cursor = Cursor()
        self._splitter = Splitter("The page", "elements")
        self._identities: dict[str, Any] = {}  # of runs: their attempts
        self._forms: dict[str, Any] = {}  # of runs: what their arrays are like, or None if they are not all alike

    def size(self) -> int:
        """Return how many numbers are kept, about."""
        return sum(lane.size * (1 + len(lane.steps)) for t in self.tracks.values() for lane in t.lanes.values())

    def follow(self, reader: Reader) -> None:
        """Read what is new since the last time, as of the last refresh of the reader."""
        pattern = glob.escape(self.name)
        now = {name: reader.identity(name) for name in self._identities}
        if any(now[name][: len(known)] != known for name, known in self._identities.items()):
            # Gone, overwritten, or some attempts are gone: then what was read may have another name now.
            for name in now:
                self._forget(name)
            self._cursor = Cursor()
        news = reader.poll(pattern, since=self._cursor, wall=True, refresh=False)
        for name, known in self._identities.items():
            if now[name] != known and reader.resumed(name):
                news.setdefault(name, logdict())
        for name, logs in news.items():
            self._identities[name] = reader.identity(name)
            if not reader.has_attempts(name) and self._is_alike(name, logs) and self._is_later(name, logs):
                self._add(name, logs)
                continue
            # What a later attempt has computed again replaces events that were read before; and what comes late, or
            # does not fit into one array with the rest, has another place or another name in the whole.
            whole = reader.load(name, pattern, wall=True)
            self._forget(name)
            self._identities[name] = reader.identity(name)
            self._is_alike(name, whole)
            self._add(name, whole)
            if reader.resumed(name):
                self._add_replaced(name, reader.load(name, pattern, wall=True, attempts="replaced"))
        self.tracks = {name: track for name, track in self.tracks.items() if track.lanes or track.replaced}

    def _is_alike(self, run: str, logs: logdict) -> bool:
        """Tell whether all events of a run fit into one array, as far as it is known: else they have several names."""
        form = [
            (
                bundle.treedefs,
                [(x.flags, np.shape(x.tree)[1:]) for x in bundle.values],
                [x.flags for x in bundle.steps.values() if any(x.flags)],
            )
            for bundle in logs.to_bundles()
        ]
        alike = len(form) == 1 and self._forms.get(run, form) == form
        self._forms[run] = form if alike else None
        return alike

    def _is_later(self, run: str, logs: logdict) -> bool:
        """Tell whether events come after all that are known of a run."""
        first = min((x.min(initial=math.inf) for x in logs.steps.get(WALL, {}).values()), default=math.inf)
        lanes = [track.lanes[run].steps[WALL].array() for track in self.tracks.values() if run in track.lanes]
        return all(first > at.max(initial=-math.inf) for at in lanes)

    def _forget(self, run: str) -> None:
        for track in self.tracks.values():
            track.lanes.pop(run, None)
            track.replaced.pop(run, None)
        self._identities.pop(run, None)
        self._forms.pop(run, None)

    def _add(self, run: str, logs: logdict) -> None:
        for one, steps in self._series(logs):
            self._track(one).lanes.setdefault(run, Lane()).extend(_values(one), _count(one), steps)

    def _add_replaced(self, run: str, logs: logdict) -> None:
        for one, steps in self._series(logs):
            for attempt in np.unique(steps["attempt"]).tolist() if isinstance(one.value, np.ndarray) else ():
                chosen = steps["attempt"] == attempt
                lane = self._track(one).replaced.setdefault(run, {}).setdefault(int(attempt), Lane())
                of_attempt = {name: x[chosen] for name, x in steps.items() if name != "attempt"}
                lane.extend(_values(one)[chosen], int(chosen.sum()), of_attempt)

    def _track(self, one: Series) -> Track:
        kind = (
            "histogram" if isinstance(one.value, Histogram) else "image" if isinstance(one.value, Image) else "number"
        )
        return self.tracks.setdefault(one.name, Track(one.name, kind))

    def _series(self, logs: logdict) -> Iterator[tuple[Series, dict[str, np.ndarray]]]:
        """Yield all that can be shown of one run, with its steps as floats; NaN where an event has none."""
        series = [_plain(logs, key) for key in logs]
        if None in series:
            split, problems = self._splitter.split(Batch.of_run(logs).run_first(), lead=2)
            self.problem = str(problems[0]) if problems else self.problem
            series = [one.at(0) if one.valid is None else one.at((0, one.valid[0])) for one in split]
        for one in series:
            assert one is not None
            own = {name: plain_dtype(x) for name, x in one.steps.items()}
            missing = missing_steps({name: x for name, x in own.items() if name not in (WALL, "attempt")})
            steps = {
                name: np.where(missing[name], np.nan, x) if name in missing and missing[name].any() else x
                for name, x in own.items()
            }
            floats = {name: x.astype(np.float64) for name, x in steps.items()}
            yield one, {name: np.where(np.isinf(x), np.nan, x) for name, x in floats.items()}  # which has no place


def _plain(logs: logdict, key: str) -> Series | None:
    """Return the events of a key that are plain numbers, as most are; None for others, which take ten times as long."""
    steps = {name: np.asarray(by_key[key]) for name, by_key in logs.steps.items() if key in by_key}
    value = logs[key]
    is_plain = type(value) is np.ndarray and value.dtype.kind in "fiub" and key not in logs._valid
    if not is_plain or any(np.ndim(x) != 1 for x in (value, *steps.values())):
        return None
    return Series(key, value, steps, None)


def _values(one: Series) -> Any:
    if isinstance(one.value, np.ndarray):
        return one.value.astype(np.float64)
    fields = ("counts",) if isinstance(one.value, Histogram) else ("pixels",)
    edges = one.value.edges if isinstance(one.value, Histogram) else None
    return [(np.asarray(x), edges) for x in getattr(one.value, fields[0])]


def _count(one: Series) -> int:
    return len(next(iter(one.steps.values())))


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What the page shows of a run."""

    run: Run
    events: int
    state: str
    last: float
    version: int


class Live:
    """The runs and curves of a directory, for a server: all methods may be called from any thread.

    Args:
        directory: What a `SaveLogger` or `lox.save` wrote to, or will.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.reader = Reader(directory, damaged="skip")
        self.reader._typed = False  # typed PRNG keys are JAX arrays, which would start a backend
        self.version = 0  # of runs, keys and problems
        self.problems: list[str] = []
        self.infos: dict[str, RunInfo] = {}
        self.keys: dict[str, Any] = {}
        self.removals = 0  # how often runs have disappeared
        self.turns = 0  # how often something happened to runs other than that they grew
        self._fates: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._read: dict[str, Key] = {}
        self._views: dict[Any, View] = {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one thread in, and keep warnings for the page."""
        with self._lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                for text in [str(w.message) for w in caught if issubclass(w.category, _errors.LoxWarning)]:
                    if text not in self.problems and len(self.problems) < _MESSAGES:
                        self.problems.append(text)
                        self.version += 1

    def refresh(self) -> dict[str, Any]:
        """Look for new runs and events; return the version of the table of runs, and what changes with each key."""
        with self._alone():
            self.reader.refresh()
            before = self.infos
            infos: dict[str, RunInfo] = {}
            changed = False
            for run in self.reader.runs():
                old = before.get(run.name)
                # Not by their number: an attempt may be removed, and another one be there instead, with another config.
                same = old is not None and self._fates[run.name][0] == self.reader.identity(run.name)
                if old is not None and same and old.state != "running":
                    infos[run.name] = old
                    continue
                last = run.last
                info = RunInfo(run, run.events, run.state, last.timestamp() if last else math.nan, self.version + 1)
                if old is not None and same and (old.events, old.state) == (info.events, info.state):
                    info = old
                changed = changed or info is not old
                infos[run.name] = info
            self.removals += not before.keys() <= infos.keys()
            self.infos = infos  # only now: with an error before, it is what it was
            # Of runs that were overwritten, resumed, removed, or have ended, every key may look different.
            fates = {name: (self.reader.identity(name), info.state) for name, info in infos.items()}
            if any(fates.get(name) != fate for name, fate in self._fates.items()):
                self.turns += 1
            self._fates = fates
            keys = self.reader.logged()
            shape = lambda found: {name: (key.steps, key.structure) for name, key in found.items()}  # noqa: E731
            if changed or before.keys() != self.infos.keys() or shape(keys) != shape(self.keys):
                self.version += 1
            self.keys = keys
            return {"version": self.version, "keys": {name: (self.turns, key.rows) for name, key in keys.items()}}

    def groups(self, by: Sequence[str] | None, where: str) -> list[_groups.Group]:
        """Return the groups of the runs that a filter chooses."""
        with self._alone():
            chosen = _filter.parse(where)
            runs = [info.run for info in self.infos.values() if chosen(info.run)]
            if by is not None:
                known = {name for run in runs for name in _groups.flat_config(run.config)}
                by = [name for name in by if name in known]
            return _groups.groups(runs, by or None)

    def tracks(self, key: str) -> Key:
        """Return what was logged under a key, read up to the last refresh."""
        with self._alone():
            if key not in self.keys:
                raise _errors.KeyNotFoundError(f"there is no key {key!r} in {str(self.reader.path)!r}.")
            read = self._read.pop(key, None) or Key(key)
            self._read[key] = read  # the last one now
            read.follow(self.reader)
            self._forget_old()
            return read

    def _forget_old(self) -> None:
        """Forget the keys that were asked for least recently, if all do not fit; they are read again when needed."""
        sizes = {name: read.size() for name, read in self._read.items()}
        for name in list(self._read)[:-1]:
            if sum(sizes.values()) <= _MOST_NUMBERS:
                break
            del sizes[name]
            tracks = set(self._read.pop(name).tracks.values())
            self._views = {place: view for place, view in self._views.items() if place[0] not in tracks}

    def view(self, track: Track, runs: Sequence[str], step: str) -> View:
        """Return the lanes of some runs on common points, up to date with the track."""
        with self._alone():
            place = track, tuple(runs), step
            view = self._views.pop(place, None) or View(track, runs, step)
            self._views[place] = view  # the last one now
            while len(self._views) > _VIEWS:
                del self._views[next(iter(self._views))]
            view.update()
            return view

    def began(self) -> dict[str, float]:
        """Return when each run began, in seconds since 1970."""
        return {name: info.run.opened.timestamp() for name, info in self.infos.items()}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let nothing change meanwhile."""
        with self._alone():
            yield


def kind_of(structure: str) -> str:
    """Tell what a key holds by the structure in its schema: "histogram", "image" or "number"."""
    described = json.loads(structure)
    described = described["shards"][0] if isinstance(described, dict) and "shards" in described else described
    for kind in ("histogram", "image"):
        if isinstance(described, dict) and kind in described:
            return kind
    return "number"
