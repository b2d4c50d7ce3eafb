"""Logs as curves: the values of many lanes over common points.

A curve has a name as trackers show it: a key, `xs/0` for an element of an array, `stats/mean` for a leaf of a pytree.
Its lanes are the runs of a directory, or the outermost lanes of a logdict; further lanes inside have curves of their
own. Nothing is interpolated: a point is where some lane has an event, and `there` tells which lanes do.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _sites
from lox._data._bundle import Bundle
from lox._data._dataframe import plain_dtype
from lox._data._lanes import Laned, is_laned
from lox._data._logdict import logdict
from lox._engine import _selection
from lox.loggers._batch import Batch
from lox.loggers._trackers._series import Series, Splitter, missing_steps
from lox.store import Runs
from lox.store._prng_keys import as_words

EVENT, STEP, WALL = "event", "step", "wall"
_NOT_AXES = (WALL, "attempt")  # steps that `load` adds, which are the axis only if asked for


@dataclasses.dataclass(frozen=True)
class Curve:
    """The values of one name in several lanes.

    Attributes:
        name: As trackers show it.
        lanes: A name for each lane.
        x: The points, in order, `(point,)`. A number comes twice if a lane has two events there.
        values: `(lane, point)`, in double precision; NaN where a lane has no event.
        there: `(lane, point)`, whether the lane has an event.
        step: What `x` is: the name of a step, `"event"` for its number, or `"wall"` for seconds since the run began.
    """

    name: str
    lanes: tuple[str, ...]
    x: np.ndarray
    values: np.ndarray
    there: np.ndarray
    step: str

    def of_lanes(self, lanes: Sequence[int]) -> "Curve | None":
        """Return the curve of some lanes, without points that none of them has; None if there is no other."""
        there = self.there[list(lanes)]
        points = there.any(0)
        if not points.any():
            return None
        names = tuple(self.lanes[n] for n in lanes)
        return Curve(self.name, names, self.x[points], self.values[list(lanes)][:, points], there[:, points], self.step)


def curves(
    logs: Mapping[str, Any],
    key: str | Iterable[str] | None = None,
    x: str | None = None,
    began: Sequence[float] | None = None,
) -> list[Curve]:
    """Return the curves of all numbers in a logdict, in runs that were loaded, or in a mapping from names to logdicts.

    Args:
        logs: The logs.
        key: Which keys; names or globs.
        x: The step to use; by default `step`, or else the first that a key has, or else the number of the event.
        began: When each lane began, in seconds since 1970, for `x="wall"`; by default with its first event.
    """
    names, series = series_of(logs, key)
    if x == WALL and began is None and series:
        began = _first_times(series, len(names))
    made: list[Curve] = []
    for one in series:
        if isinstance(one.value, np.ndarray) and (step := axis_of(one, x)) is not None:
            curve = _curve(one, names, step, began)
            if curve is not None:
                made.append(curve)
    numbers = [one for one in series if isinstance(one.value, np.ndarray)]
    if numbers and not made and x is not None and not any(axis_of(one, x) for one in numbers):
        known = dict.fromkeys(name for one in numbers for name in one.steps)
        choices = _errors.listing([*known, EVENT])
        hint = " Times are loaded by `lox.load(path, wall=True)`." if x == WALL else _errors.nearest(x, known)
        raise _errors.StepError(f"nothing was logged with the step {x!r}. Choose one of {choices}.{hint}", name=x)
    return made


def series_of(logs: Mapping[str, Any], key: str | Iterable[str] | None = None) -> tuple[tuple[str, ...], list[Series]]:
    """Return the names of the lanes, and all that can be shown: arrays `(lane, event)`.

    Arrays that are too large for a curve per element are left out, with a warning.
    """
    if isinstance(logs, Runs):
        names, logs = tuple(logs), (logs if key is None else logs.only(key))._stack(wide=True)
    elif isinstance(logs, logdict):
        names = None
        logs = logs if key is None else _chosen(logs, key)
    else:
        return _of_several(logs, key)
    with _compat.own_transfers():
        batch = _batch(logs)
    series, problems = Splitter("A plot", "elements").split(batch.run_first(), lead=2)
    for problem in problems:
        _sites.warn(str(problem).partition("\n")[0])
    return (tuple(map(str, range(len(batch.ids)))) if names is None else names), series


def _of_several(logs: Mapping[str, Any], key: str | Iterable[str] | None) -> tuple[tuple[str, ...], list[Series]]:
    """Return the series of logs by name, each as a lane, or as several if they have lanes themselves."""
    found = {name: series_of(one if isinstance(one, logdict) else logdict(one), key) for name, one in logs.items()}
    names: list[str] = []
    by_name: dict[str, list[tuple[int, Series]]] = {}
    for name, (lanes, series) in found.items():
        for one in series:
            by_name.setdefault(one.name, []).append((len(names), one))
        names += [name] if len(lanes) == 1 else [f"{name}/{lane}" for lane in lanes]
    return tuple(names), [_stacked(parts, len(names)) for parts in by_name.values() if _alike(parts)]


def _alike(parts: list[tuple[int, Series]]) -> bool:
    return all(isinstance(one.value, np.ndarray) for _, one in parts)  # pictures are not compared


def _stacked(parts: list[tuple[int, Series]], lanes: int) -> Series:
    """Put lanes of different logs into one series."""
    most = max(jax.tree.leaves(one.value)[0].shape[1] for _, one in parts)
    steps = dict.fromkeys(name for _, one in parts for name in one.steps)

    def place(arrays: list[tuple[int, np.ndarray]], missing: Any) -> np.ndarray:
        out = np.full((lanes, most), missing, np.result_type(*[plain_dtype(x) for _, x in arrays]))
        for first, x in arrays:
            out[first : first + x.shape[0], : x.shape[1]] = plain_dtype(x)
        return out

    values = place([(first, one.value) for first, one in parts if isinstance(one.value, np.ndarray)], 0)
    valid = place([(first, _valid(one)) for first, one in parts], False)
    by_step = {}
    for name in steps:
        arrays = [(first, one.steps[name]) for first, one in parts if name in one.steps]
        by_step[name] = place(arrays, np.nan if any(x.dtype.kind not in "iub" for _, x in arrays) else -1)
    return Series(parts[0][1].name, values, by_step, valid)


def _valid(one: Series) -> np.ndarray:
    return np.ones(jax.tree.leaves(one.value)[0].shape[:2], bool) if one.valid is None else one.valid


def _chosen(logs: logdict, key: str | Iterable[str]) -> logdict:
    patterns = _selection.names("key", key)
    chosen = logs.filter(patterns)
    if not chosen:
        raise _errors.KeyNotFoundError(
            _selection.unmatched("argnames", patterns, logs).replace("`argnames`", "`key`", 1)
        )
    return chosen


def _batch(logs: logdict) -> Batch:
    """Make the outermost lanes that any array has the runs of a batch."""
    for key in logs:
        for x in jax.tree.leaves(logs[key]):
            if isinstance(x, _compat.Tracer):
                raise _errors.LogTypeError(
                    "these logs are being traced: return them from the jitted function first, and plot them outside."
                )
            if _compat.is_split(x):
                raise _errors.in_other_processes([key], x.shape)
    # PRNG keys are shown as trackers show them: by their words.
    bundles = [_on_host(bundle).expanded().even() for bundle in logs.to_bundles(as_words)]
    everything = [x for bundle in bundles for x in _arrays_of(bundle)]
    depth = min((x.flags.index(flag) for x in everything for flag in x.flags if flag), default=0)
    outermost = [Laned(x.tree, x.flags[depth:] or (False,)) for x in everything]
    lanes = next((x.tree.shape[1] for x in outermost if x.flags[0]), 1)
    rest = iter(outermost)
    return Batch(np.arange(lanes), [jax.tree.map(lambda x: next(rest), b, is_leaf=is_laned) for b in bundles])


def _arrays_of(bundle: Bundle) -> list[Laned]:
    return jax.tree.leaves(bundle, is_leaf=is_laned)


def _on_host(bundle: Bundle) -> Bundle:
    return jax.tree.map(lambda x: np.asarray(_compat.own_copy(x)), bundle)


# --- the axis ---


def axis_of(one: Series, x: str | None) -> str | None:
    """Return the step that a series is drawn over; None if it does not have it."""
    if x is not None:
        return x if x == EVENT or x in one.steps else None
    names = [name for name in one.steps if name not in _NOT_AXES]
    return STEP if STEP in names else names[0] if names else EVENT


def _first_times(series: Iterable[Series], lanes: int) -> list[float]:
    """Return when each lane has its first event."""
    first = np.full(lanes, np.inf)
    for one in series:
        if WALL in one.steps:
            first = np.minimum(first, np.where(_valid(one), one.steps[WALL], np.inf).min(1, initial=np.inf))
    return first.tolist()


def _curve(one: Series, lanes: tuple[str, ...], step: str, began: Sequence[float] | None) -> Curve | None:
    assert isinstance(one.value, np.ndarray)
    valid, values = _valid(one), one.value.astype(np.float64)
    # Over time, lanes are aligned by their step: it is the same event that they have at different times.
    align = axis_of(one, None) if step == WALL else step
    if align == EVENT or align is None:
        at = np.where(valid, np.cumsum(valid, 1) - 1, -1)
    else:
        at = plain_dtype(one.steps[align])
        without = missing_steps({name: x for name, x in one.steps.items() if name not in _NOT_AXES})[align] & valid
        if without.any():
            _sites.warn(f"{int(without.sum())} events of {one.name!r} have no {align!r}, and are left out.")
            valid = valid & ~without
    if not valid.any():
        return None
    x, values, there, place = _on_points(at, values, valid)
    if step == WALL:
        since = one.steps[WALL] - np.asarray(began)[:, None]
        times = np.zeros(there.shape)
        times[place[0], place[1]] = since[valid]
        x = np.where(there, times, 0.0).sum(0) / there.sum(0)
        order = np.argsort(x, kind="stable")
        x, values, there = x[order], values[:, order], there[:, order]
    return Curve(one.name, lanes, x, values, there, step)


def _on_points(
    at: np.ndarray, values: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Put the events of all lanes on common points; also return the lane and the point of every valid event."""
    lanes, events = valid.shape
    if valid.all() and (at == at[:1]).all() and (at[0, 1:] > at[0, :-1]).all():  # differences of uint wrap
        place = np.divmod(np.arange(lanes * events), events)
        return at[0], values, valid, place
    lane, _ = np.nonzero(valid)
    x = at[valid]
    # The nth event of a lane at the same number is another point: two logs of one step are not one.
    order = np.lexsort((x, lane))  # stable, so events of one step stay in order
    sorted_x, sorted_lane = x[order], lane[order]
    new = np.r_[True, (np.diff(sorted_x) != 0) | (np.diff(sorted_lane) != 0)] if len(x) else np.zeros(0, bool)
    starts = np.flatnonzero(new)
    nth = np.empty(len(x), int)
    nth[order] = np.arange(len(x)) - np.repeat(starts, np.diff(np.r_[starts, len(x)]))
    order = np.lexsort((nth, x))
    fresh = np.r_[True, (np.diff(x[order]) != 0) | (np.diff(nth[order]) != 0)]
    point = np.empty(len(x), int)
    point[order] = np.cumsum(fresh) - 1
    count = int(fresh.sum())
    out, there = np.full((lanes, count), np.nan), np.zeros((lanes, count), bool)
    out[lane, point], there[lane, point] = values[valid], True
    return x[order][fresh], out, there, (lane, point)
