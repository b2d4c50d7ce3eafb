"""`lox show`: each key of a run, or of a group of runs, in one line."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lox._command import _choose, _print
from lox._command._leaves import Leaf, leaves
from lox.loggers._console import _render
from lox.store._reader import Reader
from lox.store._table import Run, flat_config

_POINTS = 64  # of a curve that are kept of each run


@dataclasses.dataclass(frozen=True)
class Summary:
    """What is shown of a key of one run."""

    name: str
    kind: str
    events: int
    last: float  # all four are NaN where the value is no number
    low: float
    high: float
    bad: int  # events that are NaN or infinite
    is_integer: bool
    curve: np.ndarray  # means of as many parts of the run, or every event if there are few


def of_leaf(leaf: Leaf) -> Summary:
    """Summarise the events of a key: of an array its mean counts, of lanes all together."""
    counts = leaf.valid.any(0)
    numbers = _numbers(leaf)[:, counts]
    valid = leaf.valid[:, counts]
    kind = leaf.kind if leaf.kind in ("histogram", "image") or not leaf.shape else f"{leaf.kind}{list(leaf.shape)}"
    is_picture = leaf.kind == "image"
    numbers = np.where(valid & (not is_picture), numbers, np.nan)
    finite = numbers[np.isfinite(numbers)]
    over_lanes = _means(numbers, 0)
    last = [lane[v][-1] for lane, v in zip(numbers, valid, strict=True) if v.any()]
    return Summary(
        leaf.name,
        kind,
        int(counts.sum()),
        float(np.mean(last)) if last else math.nan,
        float(finite.min()) if len(finite) else math.nan,
        float(finite.max()) if len(finite) else math.nan,
        0 if is_picture else int((valid & ~np.isfinite(numbers)).any(0).sum()),
        leaf.values.dtype.kind in "biu" and not leaf.shape and len(leaf.values) == 1,
        _parts(over_lanes),
    )


def _numbers(leaf: Leaf) -> np.ndarray:
    """Return numbers `(lane, event)`: means of arrays and histograms, magnitudes of complex numbers."""
    x = leaf.values
    if leaf.histogram is not None:
        return np.asarray(leaf.histogram.mean)
    x = np.abs(x) if x.dtype.kind == "c" else x
    with np.errstate(all="ignore"):
        return _means(x.astype(np.float64).reshape(*x.shape[:2], -1), 2) if leaf.shape else x.astype(np.float64)


def _means(x: np.ndarray, axis: int) -> np.ndarray:
    """Return means over what is finite; NaN if nothing is."""
    finite = np.isfinite(x)
    count = finite.sum(axis)
    with np.errstate(all="ignore"):
        return np.where(count > 0, np.where(finite, x, 0).sum(axis) / np.maximum(count, 1), np.nan)


def _parts(x: np.ndarray) -> np.ndarray:
    """Return the means of so many parts of a curve, as far as it has so many points."""
    starts = np.arange(min(_POINTS, len(x))) * len(x) // _POINTS if len(x) > _POINTS else np.arange(len(x))
    if not len(x):
        return x
    finite = np.isfinite(x)
    count = np.add.reduceat(finite.astype(np.float64), starts)
    total = np.add.reduceat(np.where(finite, x, 0.0), starts)
    return np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)


def summaries(reader: Reader, names: Sequence[str], patterns: Sequence[str]) -> dict[str, list[Summary]]:
    """Return the summaries of all keys of these runs."""
    found: dict[str, list[Summary]] = {name: [] for name in names}
    for name, logs in _choose.logs(reader, names, patterns):
        found[name] += map(of_leaf, leaves(logs))
    return found


# --- several runs ---


def trend(of_runs: Sequence[Summary], width: int) -> np.ndarray:
    """Return the mean over runs of the curves of a key, in so many parts of the longest run."""
    longest = max(s.events for s in of_runs)
    if not longest:
        return np.zeros(0)
    points = min(width, max(len(s.curve) for s in of_runs))
    at = (np.arange(points) + 0.5) * longest / points  # in events
    curves = np.full((len(of_runs), points), np.nan)
    for row, s in zip(curves, of_runs, strict=True):
        if len(s.curve):
            place = np.floor(at * len(s.curve) / s.events).astype(int)
            there = place < len(s.curve)  # a run that ended early counts no longer
            row[there] = s.curve[place[there]]
    return _means(curves, 0)


def as_dict(s: Summary) -> dict[str, Any]:
    """Return a summary for JSON."""
    integer = lambda x: int(x) if s.is_integer and math.isfinite(x) else x  # noqa: E731
    numbers = {"last": integer(s.last), "min": integer(s.low), "max": integer(s.high)}
    numbers = {} if s.kind == "image" else numbers
    return {"key": s.name, "type": s.kind, "events": s.events, **numbers, "nonfinite": s.bad}


def over_runs(of_runs: Sequence[Summary]) -> dict[str, Any]:
    """Return the summary of a key of several runs for JSON: mean and standard deviation of the last values."""
    last = np.array([s.last for s in of_runs])
    finite = last[np.isfinite(last)]
    ends = [[s.low for s in of_runs if not math.isnan(s.low)], [s.high for s in of_runs if not math.isnan(s.high)]]
    return {
        "key": of_runs[0].name,
        "runs": len(of_runs),
        "events": [min(s.events for s in of_runs), max(s.events for s in of_runs)],
        "last": float(finite.mean()) if len(finite) else math.nan,
        "std": float(finite.std(ddof=1)) if len(finite) > 1 else math.nan,
        "n": len(finite),
        "min": min(ends[0], default=math.nan),
        "max": max(ends[1], default=math.nan),
        "nonfinite": sum(s.bad > 0 for s in of_runs),
    }


# --- as text ---


def _row_of_run(s: Summary, width: int) -> list[Any]:
    if s.kind == "image":
        return [s.name, f"{s.events:,}", s.kind, "", "", ""]
    cells = [_text(x, s.is_integer) for x in (s.last, s.low, s.high)]
    bad = f" {s.bad:,} not finite" if s.bad else ""
    line = _render.sparkline(trend([s], width).tolist(), width)
    return [s.name, f"{s.events:,}", *cells, (line + bad, "red" if s.bad else "cyan")]


def _text(x: float, is_integer: bool = False) -> str:
    return "–" if math.isnan(x) else _render.number(x, is_integer)


def _row_of_group(of_runs: Sequence[Summary], width: int) -> list[Any]:
    whole = over_runs(of_runs)
    events = "–".join(f"{n:,}" for n in dict.fromkeys(whole["events"]))
    if of_runs[0].kind == "image":
        return [whole["key"], events, "image", "", "", ""]
    spread = f" ± {_text(whole['std'])}" if whole["n"] > 1 else ""
    bad = f" not finite in {whole['nonfinite']} of {whole['runs']}" if whole["nonfinite"] else ""
    line = _render.sparkline(trend(of_runs, width).tolist(), width)
    cells = [_text(whole["last"]) + spread, _text(whole["min"]), _text(whole["max"])]
    return [whole["key"], events, *cells, (line + bad, "red" if bad else "cyan")]


def _print_table(rows: Iterable[list[Any]], last: str) -> None:
    titles = ["key", "events", last, "min", "max", "trend"]
    _print.rows(titles, list(rows), titles[1:-1], extra=("min", "max"))


def print_run(run: Run, found: Sequence[Summary], width: int = 20) -> None:
    """Print what there is to say of one run."""
    _print.line(f"run {run.name}", "bold")
    times = f"began {_print.local_time(run.opened)}"
    if run.first is not None and run.last is not None:
        times += f", events over {_render.duration((run.last - run.first).total_seconds())}"
    attempts = f", {run.attempts} attempts" if run.attempts > 1 else ""
    resumed = f", {run.resumed}" if run.attempts > 1 and run.resumed else ""
    _print.line(f"{run.state}{resumed}{attempts}, {times}")
    if config := flat_config(run.config):
        _print.line(_print.settings(config))
    for attempt, changes in run.config_changes:
        parts = [f"{name} {_print.value(a)} → {_print.value(b)}" for name, (a, b) in changes.items()]
        _print.line(f"attempt {attempt} changed {', '.join(parts)}")
    _print.line()
    if found:
        _print_table([_row_of_run(s, width) for s in found], "last")
    else:
        _print.line(_nothing([run]))


def print_group(title: str, runs: Sequence[Run], found: dict[str, list[Summary]], width: int = 20) -> None:
    """Print the keys of several runs together."""
    _print.line(title, "bold")
    states = [run.state for run in runs]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    _print.line(f"{len(runs)} runs: {', '.join(counts)}")
    by_key = grouped([found[run.name] for run in runs])
    _print.line()
    if by_key:
        _print_table([_row_of_group(of_key, width) for of_key in by_key.values()], "last ± std over runs")
    else:
        _print.line(_nothing(runs))


def _nothing(runs: Sequence[Run]) -> str:
    return "no events yet" if any(run.state == "running" for run in runs) else "no events"


def grouped(of_runs: Sequence[Sequence[Summary]]) -> dict[str, list[Summary]]:
    """Return the summaries of each key over runs."""
    by_key: dict[str, list[Summary]] = {}
    for found in of_runs:
        for s in found:
            by_key.setdefault(s.name, []).append(s)
    return by_key
