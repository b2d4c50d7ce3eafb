"""What a chart is drawn from, as JSON: one panel per key, the same in the dashboard and in a file of its own."""

import dataclasses
import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from lox import _errors
from lox.view import _bands, _pixels
from lox.view._curves import EVENT, WALL, Curve
from lox.view._groups import Group
from lox.view._live import Key, Live, Track, View
from lox.view._pixels import Grid

NONE = "none"  # a band that is not drawn
_MOST_NUMBERS = 400_000  # of single lanes in one answer: with more, bins are wider
_MOST_BINS = 4096
_MOST_MARKS = 200  # that are sent; how many there are is said


@dataclasses.dataclass(frozen=True)
class Options:
    """What the page asks for.

    Attributes:
        name: Which curve of the key.
        x: The axis; None is the default of the curve.
        band: The kind of band, or "none".
        smooth: The weight of the exponential moving mean.
        bins: How many bins there is room for.
        range: The part of the axis to draw; None is everything.
        log: Whether the axis is logarithmic.
        lanes: Whether single lanes are drawn.
        since: What the last answer said as `token`.
    """

    name: str | None = None
    x: str | None = None
    band: str = "ci95"
    smooth: float = 0.0
    bins: int = 800
    range: tuple[float, float] | None = None
    log: bool = False
    lanes: bool = False
    since: str = ""


def numbers(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON, which has no NaN and no infinities."""
    finite = np.isfinite(values)
    if finite.all():
        return values.tolist()
    out = values.astype(object)
    out[~finite] = None
    return out.tolist()


def choose(read: Key, name: str | None) -> Track:
    """Return the track to draw: by its name, or else the first."""
    if name is not None and name in read.tracks:
        return read.tracks[name]
    if not read.tracks:
        raise _errors.KeyNotFoundError(read.problem or f"nothing of {read.name!r} can be shown.")
    return next(iter(read.tracks.values()))


def panel(live: Live, key: str, groups: Sequence[Group], options: Options) -> dict[str, Any]:
    """Return all that is drawn of a key, or what of it has changed since an earlier answer."""
    with live.locked():
        read = live.tracks(key)
        track = choose(read, options.name)
        steps = track.steps()
        # The axis of all charts may be one that this key does not have.
        x = options.x if options.x in (*steps, EVENT, WALL) else track.default_step()
        align = track.default_step() if x == WALL else x
        head = {
            "key": key,
            "name": track.name,
            "kind": track.kind,
            "names": [{"name": other.name, "kind": other.kind} for other in read.tracks.values()],
            "x": x,
            "steps": [*steps, EVENT, WALL],
            "problem": read.problem,
        }
        if track.kind != "number":
            return {**head, "runs": [run for group in groups for run in group.runs if run in track.lanes]}
        shown = [(n, group) for n, group in enumerate(groups) if any(run in track.lanes for run in group.runs)]
        views = [(n, group, live.view(track, group.runs, align)) for n, group in shown]
        curves = [_Drawing(live, group, n, view, x, options) for n, group, view in views if view.points]
        return {**head, **_draw(curves, options, key, x)}


class _Drawing:
    """The curve of a group with its band, smoothed if asked for."""

    def __init__(self, live: Live, group: Group, number: int, view: View, x: str, options: Options):
        self.group, self.number, self.view, self.options = group, number, view, options
        self.live, self.by_time = live, x == WALL
        self.kind = options.band if options.band != NONE else "std"
        band = view.band(self.kind)
        self.order: np.ndarray | None = None
        if self.by_time:
            seconds = view.mean_seconds(live.began())
            self.order = np.argsort(seconds, kind="stable")
            band = dataclasses.replace(
                band, x=seconds[self.order], **{f: getattr(band, f)[self.order] for f in _ARRAYS}
            )  # fmt: skip
        self.exact = band
        self.band = _bands.smoothed(band, options.smooth) if options.smooth else band

    def ends(self) -> tuple[float, float]:
        """Return the first and the last point that are drawn."""
        x = self.band.x[self.band.x > 0] if self.options.log else self.band.x
        return (float(x[0]), float(x[-1])) if len(x) else (math.nan, math.nan)

    def part(self, first: float) -> slice:
        """Return the points from one on that are on the chart, and one more on either side of it."""
        x, options = self.band.x, self.options
        start = int(np.searchsorted(x, first, "left"))
        stop = len(x)
        if options.log:
            start = max(start, int(np.searchsorted(x, 0.0, "right")))
        if options.range is not None:
            low, high = np.searchsorted(x, options.range[0], "left"), np.searchsorted(x, options.range[1], "right")
            start, stop = max(start, int(low) - 1), min(stop, int(high) + 1)
        return slice(start, max(start, stop))

    def json(self, grid: Grid, first: float) -> dict[str, Any]:
        part = self.part(first)
        band = dataclasses.replace(self.band, **{f: getattr(self.band, f)[part] for f in ("x", *_ARRAYS)})
        drawn = _pixels.reduced(band, grid, begins=part.start == self.part(-math.inf).start)
        n, lost = self.exact.n, self.exact.lost
        low, high = int(n.min()), int(n.max())
        runs = self.view.runs
        out: dict[str, Any] = {
            "name": self.group.name,
            "color": self.number,
            "lanes": len(runs),
            "n": [low, high],
            "lost": int(lost.max()),
            "method": self.exact.method,
            "same": first == math.inf,
            "from": first if math.isfinite(first) else None,
            "points": self.view.points,
            "per_bin": drawn.most,
            "x": numbers(drawn.x),
            "center": numbers(drawn.center),
            "at": drawn.n.tolist(),
        }
        if self.options.band != NONE:
            out |= {"low": numbers(drawn.low), "high": numbers(drawn.high)}
            if drawn.most > 2:
                out |= {"low_there": numbers(drawn.low_there), "high_there": numbers(drawn.high_there)}
        out["marks"], out["marked"] = self._marks()
        if self.options.lanes:
            out["single"] = self._lanes(part, grid)
            out["replaced"] = self._replaced(first)
        return out

    def _lanes(self, part: slice, grid: Grid) -> dict[str, Any]:
        values = self.view.curve().values
        values = values if self.order is None else values[:, self.order]
        if self.options.smooth:
            values = _bands.smooth(values, self.options.smooth)
        x, values, most = _pixels.reduced_lanes(self.band.x[part], values[:, part], grid)
        return {"names": list(self.view.runs), "x": numbers(x), "values": [numbers(v) for v in values], "per_bin": most}

    def _replaced(self, first: float) -> list[dict[str, Any]]:
        """Return what later attempts have computed again; it enters no statistics."""
        found = []
        for run in self.view.runs:
            for attempt, lane in self.view.track.replaced.get(run, {}).items():
                at = lane.at(self.view.step)
                x = lane.steps[WALL].array() - self.live.began().get(run, 0.0) if self.by_time else at
                order = np.argsort(x, kind="stable")
                order = order[np.isfinite(x[order])]
                grid = Grid.of(float(x[order[0]]), float(x[order[-1]]), self.options.bins) if len(order) else Grid(0)
                places, values, _ = _pixels.reduced_lanes(x[order], lane.numbers.array()[None, order], grid)
                found.append({"name": f"{run}, attempt {attempt}", "x": numbers(places), "values": numbers(values[0])})
        return found

    def _marks(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        seconds = self.view.mean_seconds(self.live.began()) if self.by_time else None
        running = {run for run in self.view.runs if self.live.infos[run].state == "running"}
        return marks(self.view.curve(), seconds, running)


def marks(
    curve: Curve, x: np.ndarray | None = None, running: Container[str] = ()
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return where lanes ended before others, unless they are running, or turned NaN: their last finite points.

    There may be more of them than are returned, so also how many there are.
    """
    found: list[dict[str, Any]] = []
    counts = {"nan": 0, "stopped": 0}
    if not curve.there.any():
        return found, counts
    x = curve.x if x is None else x
    finite, has = np.isfinite(curve.values), curve.there.any(1)
    last = np.where(has, curve.there.shape[1] - 1 - np.argmax(curve.there[:, ::-1], 1), -1)
    ended_well = finite[np.arange(len(finite)), last]
    for lane in np.flatnonzero(has & (~ended_well | (last < last.max()))).tolist():
        why, name = "nan" if not ended_well[lane] else "stopped", curve.lanes[lane]
        if why == "stopped" and name in running:
            continue  # it is only behind
        counts[why] += 1
        before = np.flatnonzero(finite[lane, : last[lane] + 1])
        if len(found) < _MOST_MARKS:
            value = float(curve.values[lane, before[-1]]) if len(before) else None
            at = before[-1] if len(before) else last[lane]
            found.append({"name": name, "why": why, "x": float(x[at]), "y": value})
    return found, counts


_ARRAYS = ("center", "low", "high", "n", "lost")


def _draw(curves: list[_Drawing], options: Options, key: str, x: str) -> dict[str, Any]:
    ends = [end for curve in curves for end in curve.ends() if not math.isnan(end)]
    first, last = options.range or (min(ends, default=0.0), max(ends, default=0.0))
    first = max(first, min((end for end in ends if end > 0), default=1.0)) if options.log else first
    bins = min(options.bins, _MOST_BINS)
    if options.lanes:
        lanes = sum(len(curve.view.runs) for curve in curves)
        bins = max(32, min(bins, _MOST_NUMBERS // (2 * max(1, lanes))))
    grid = Grid.of(first, last, bins, options.log)
    # The same only if a page may put what it gets behind what it has.
    same = repr(
        (grid, [(c.group.name, c.view.runs, c.view.serial) for c in curves], dataclasses.replace(options, since=""))
    )
    digest = hashlib.sha256(f"{key}\0{x}\0{same}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    token = f"{digest}:{'.'.join(str(curve.view.version) for curve in curves)}"
    starts = _since(curves, options.since, digest, grid)
    return {
        "token": token,
        "grow": starts is not None,
        "band": options.band,
        "method": _bands.KINDS[curves[0].kind][1] if curves and options.band != NONE else "mean",
        "smooth": options.smooth,
        "groups": [c.json(grid, start) for c, start in zip(curves, starts or [-math.inf] * len(curves), strict=True)],
    }


def _since(curves: list[_Drawing], since: str, digest: str, grid: Grid) -> list[float] | None:
    """Return from where on each curve has changed, if the page has the rest of it."""
    before, _, versions = since.partition(":")
    if before != digest or any(curve.by_time for curve in curves):
        return None  # over time, all points move
    starts = []
    for curve, version in zip(curves, versions.split(".") if versions else [], strict=True):
        changed = curve.view.changed_since(int(version))
        if changed == -math.inf:
            return None
        starts.append(changed if changed == math.inf else grid.start_of(changed))
    return starts


def at(live: Live, key: str, groups: Sequence[Group], options: Options, point: float) -> dict[str, Any]:
    """Return the exact statistics of every group at the point nearest to a number."""
    with live.locked():
        track = choose(live.tracks(key), options.name)
        x = options.x if options.x in (*track.steps(), EVENT) else track.default_step()
        found = []
        for group in groups:
            view = live.view(track, group.runs, x)
            if not view.points:
                continue
            band = view.band(options.band if options.band != NONE else "std")
            n = int(np.argmin(np.abs(band.x - point)))
            values = {f: numbers(getattr(band, f)[n : n + 1].astype(np.float64))[0] for f in ("x", *_ARRAYS)}
            found.append({"name": group.name, **values})
        return {"key": key, "name": track.name, "x": x, "groups": found}


def histogram(live: Live, key: str, groups: Sequence[Group], options: Options, group: str) -> dict[str, Any]:
    """Return the histograms of the runs of a group, or else of the first, added up at each step, over steps."""
    with live.locked():
        track = choose(live.tracks(key), options.name)
        x = options.x if options.x in (*track.steps(), EVENT) else track.default_step()
        own = {g.name: [run for run in g.runs if run in track.lanes] for g in groups}
        own = {name: runs for name, runs in own.items() if runs}
        group = group if group in own else next(iter(own), "")
        runs = own.get(group, [])
        sums: dict[float, np.ndarray] = {}
        edges: np.ndarray = np.empty(0)
        lanes: dict[float, int] = {}
        left_out = 0
        for run in runs:
            lane = track.lanes[run]
            for place, (counts, bins) in zip(lane.at(x).tolist(), lane.things, strict=True):
                edges = edges if len(edges) else bins
                if math.isnan(place) or not np.array_equal(bins, edges):
                    left_out += 1
                    continue
                sums[place] = sums[place] + counts if place in sums else counts.astype(np.float64)
                lanes[place] = lanes.get(place, 0) + 1
        places = sorted(sums)
        counts = np.array([sums[place] for place in places]) if places else np.zeros((0, 0))
        grid = Grid.of(places[0], places[-1], min(options.bins, 400)) if places else Grid(0)
        starts = _pixels.starts_of_bins(grid.bins(np.array(places)))
        merged = np.add.reduceat(counts, starts, axis=0) if len(places) else counts
        filled = np.flatnonzero(merged.any(0)) if len(places) else np.zeros(0, int)
        low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, merged.shape[1] if len(places) else 0)
        return {
            "key": key,
            "name": track.name,
            "x": x,
            "group": group,
            "groups": list(own),
            "n": max(lanes.values(), default=0),
            "left_out": left_out,
            "places": [places[i] for i in starts],
            "edges": numbers(edges[low : high + 1].astype(np.float64)),
            "counts": [numbers(row) for row in merged[:, low:high]],
        }


def pictures(live: Live, key: str, options: Options) -> dict[str, Any]:
    """Return which pictures there are: the runs that have some, and their steps."""
    with live.locked():
        track = choose(live.tracks(key), options.name)
        x = options.x if options.x in (*track.steps(), EVENT) else track.default_step()
        runs = [{"name": run, "places": numbers(lane.at(x))} for run, lane in track.lanes.items()]
        return {"key": key, "name": track.name, "x": x, "runs": runs}


def picture(live: Live, key: str, options: Options, run: str, event: int) -> np.ndarray:
    """Return the pixels of one picture."""
    with live.locked():
        track = choose(live.tracks(key), options.name)
        lane = track.lanes.get(run)
        if track.kind != "image" or lane is None or not 0 <= event < lane.size:
            raise _errors.KeyNotFoundError(f"{key!r} has no picture {event} in the run {run!r}.")
        return lane.things[event][0]


def pairs(config: Mapping[str, Any]) -> list[list[Any]]:
    """Return a flat config for JSON, as pairs, because a name may mean something to JavaScript: `__proto__`."""
    return [[name, _plain(value)] for name, value in config.items()]


def _plain(value: Any) -> Any:
    """Replace numbers that JSON does not have by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return {name: _plain(x) for name, x in value.items()} if isinstance(value, dict) else value


def numbers_or_none(value: float) -> float | None:
    """Return a number for JSON."""
    return value if math.isfinite(value) else None
