"""`lox tail`: new events as lines, as they arrive."""

import datetime
import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lox import _errors
from lox._command import _choose, _print
from lox._data._logdict import logdict
from lox.loggers._files import _rows
from lox.store._reader import Reader, _Polled
from lox.store._schema import WALL
from lox.view import _filter

_WALL = "wall"


class Event:
    """What was logged together: the run, the time, steps and values by key."""

    def __init__(self, run: str, wall: float, steps: dict[str, Any], values: dict[str, Any]):
        self.run, self.wall, self.steps, self.values = run, wall, steps, values

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        wall = {} if math.isnan(self.wall) else {_WALL: self.wall}
        return {"run": self.run, **wall, "steps": self.steps, "values": self.values}

    def as_line(self, width: int) -> str:
        """Return one line, in which the name of the run has so many characters."""
        steps = " ".join(f"{name}={_print.short(x)}" for name, x in self.steps.items())
        values = "  ".join(f"{key} {_print.short(x)}" for key, x in self.values.items())
        return "  ".join(part for part in (f"{self.run:<{width}}", steps, values) if part)


def follow(
    reader: Reader,
    names: Sequence[str],
    where: Sequence[str],
    patterns: Sequence[str],
    backlog: int,
    interval: float,
    ends: Callable[[list[str]], bool],
) -> Iterator[list[Event]]:
    """Yield events whenever there are some: first the last ones that are there, then those that arrive.

    Args:
        reader: The directory.
        names: Names of runs, or globs.
        where: Conditions on their configs.
        patterns: Names of keys, or globs.
        backlog: How many events to begin with.
        interval: Seconds between two looks.
        ends: Told the names of the runs, whether to stop.
    """
    select = list(patterns) or None
    _go_to_the_end(reader, backlog)
    first = True
    while True:
        is_last = ends(_wanted(reader, names, where))  # before the look, so that nothing after it is missed
        logs = _poll(reader, select)
        wanted = set(_wanted(reader, names, where))
        logs = {name: of_run for name, of_run in logs.items() if name in wanted}
        if first:
            logs = _last(logs, backlog)
        events = [event for name, of_run in logs.items() for event in _events(name, of_run)]
        events.sort(key=lambda event: event.wall)
        if first:
            events = events[max(0, len(events) - backlog) :]
        first = False
        if events:
            yield events
        if is_last:
            return
        time.sleep(interval)


def _last(logs: dict[str, logdict], backlog: int) -> dict[str, logdict]:
    """Return what the last events must be among: of those runs that logged last, as many, the last of each key."""
    if not backlog:
        return {}
    walls = {name: [x[-1] for x in of_run.steps.get(_WALL, {}).values() if len(x)] for name, of_run in logs.items()}
    by_time = sorted(logs, key=lambda name: max(walls[name], default=0.0))  # stable, as the order of events is
    chosen = set(by_time[-backlog:])
    return {name: of_run.slice[-backlog:] for name, of_run in logs.items() if name in chosen}


def _poll(reader: Reader, select: list[str] | None) -> dict[str, logdict]:
    try:
        return reader.poll(select)
    except _errors.OptionError:  # the logs have a step called wall, which is as good
        if not reader._wall:
            raise
        reader._wall = False
        return reader.poll(select)


def _wanted(reader: Reader, names: Sequence[str], where: Sequence[str]) -> list[str]:
    """Return the runs to follow, of those known by now; new ones may match too."""
    records = reader._catalog.records
    if not names and not where:
        return list(records)
    conditions = [_filter.condition(text) for text in where]
    return [
        run.name
        for run in reader.runs()
        if (not names or run.name in names or any(fnmatch.fnmatchcase(run.name, name) for name in names))
        and all(condition.holds(run) for condition in conditions)
    ]


def _go_to_the_end(reader: Reader, backlog: int) -> None:
    """Take everything for seen but the last events: a directory of any size must not be read first."""
    for group in reader._catalog.groups.values():
        group.scan()
        for segment in group.segments.values():
            batches, rows = len(segment.rows), 0
            while batches and rows < backlog:
                batches -= 1
                rows += segment.rows[batches]
            # The time of the last batch tells what was seen, should the group be merged with others.
            before = [(batches - 1, 0, segment.rows[batches - 1])] if batches else []
            until = float(segment.read([WALL], before)[0].max()) if before else -math.inf
            reader._cursor._polled[group.id, segment.file.name] = _Polled(batches, until)


def _events(name: str, logs: logdict) -> Iterator[Event]:
    picture = lambda pixels: "image " + "×".join(map(str, np.shape(pixels)[:2]))  # noqa: E731
    for steps, values in _rows.rows(logs.to_bundles(), picture, split=True):
        wall = steps.pop(_WALL) if _WALL in steps else math.nan
        known = {step: x for step, x in steps.items() if not _is_missing(x, steps)}
        yield Event(name, wall, known, values)


def _is_missing(x: Any, steps: dict[str, Any]) -> bool:
    """Tell whether an event lacks a step that others of its key have: it is NaN, or -1 beside other steps."""
    return (isinstance(x, float) and math.isnan(x)) or (isinstance(x, int) and x == -1 and len(steps) > 1)


def all_over(reader: Reader, names: Iterable[str]) -> bool:
    """Tell whether nobody writes to these runs any more."""
    for name in names:
        for entry in reader._catalog.records[name].attempts()[-1]:
            group = reader._catalog.groups[entry.group]
            if group.state(entry.number, group.fate()) == "running":
                return False
    return True


def run(
    reader: Reader,
    names: Sequence[str],
    where: Sequence[str],
    patterns: Sequence[str],
    backlog: int,
    interval: float,
    stop: str,
    in_json: bool,
    times: bool,
) -> None:
    """Print events until somebody stops it, or as `stop` says: "never", "once" or "finished"."""
    chosen = [r.name for r in _choose.runs(reader, names, where)]
    _choose.keys(reader, chosen, patterns)
    reader._wall = "wall" not in _choose.steps(reader, chosen)
    ends = {"never": lambda _: False, "once": lambda _: True, "finished": lambda found: all_over(reader, found)}[stop]
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    names = [*(name for name in names if set(name) & set("*?[")), *chosen] if names else ()  # new runs may match globs
    for events in follow(reader, names, where, patterns, backlog, interval, ends):
        for event in events:
            if in_json:
                _print.as_json(event.as_dict(), lines=True)
                continue
            width = max(width, len(event.run))
            clock = f"{datetime.datetime.fromtimestamp(event.wall):%H:%M:%S}  " if times and event.wall > 0 else ""
            _print.plain_line(clock + event.as_line(width))
        _print.flush()
