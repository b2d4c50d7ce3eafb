"""`lox ls`: a line per run, with what differs in the configs."""

import datetime
from collections.abc import Sequence
from typing import Any

from lox._command import _print
from lox.loggers._console import _render
from lox.store._table import Run, _history, flat_config

_STYLES = {"running": "green", "failed": "red", "killed": "red", "finished": ""}


def as_dict(run: Run) -> dict[str, Any]:
    """Return what is known of a run for JSON; times are in UTC."""
    time = lambda t: None if t is None else t.astimezone(datetime.UTC).isoformat()  # noqa: E731
    return {
        "name": run.name,
        "state": run.state,
        "events": run.events,
        "config": run.config,
        "attempts": run.attempts,
        "opened": time(run.opened),
        "first": time(run.first),
        "last": time(run.last),
        "key_data": run.key_data and list(run.key_data),
        "key_impl": run.key_impl,
    }


def print_runs(runs: Sequence[Run]) -> None:
    """Print a table of runs; what all of their configs have in common is one line below it."""
    configs = [flat_config(run.config) for run in runs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    changed = {name for run in runs for _, changes in run.config_changes for name in changes}
    same = {
        name: configs[0][name]
        for name in names
        if len(runs) > 1 and name not in changed and all(name in c and c[name] == configs[0][name] for c in configs)
    }
    columns = [name for name in names if name not in same]
    attempts = ["attempts"] if any(run.attempts > 1 for run in runs) else []
    titles = ["run", *columns, *attempts, "events", "began", "duration", "state"]
    rows = []
    for run, config in zip(runs, configs, strict=True):
        values = [_history(run, name, config) if name in changed else _cell(config, name) for name in columns]
        tries = [str(run.attempts)] * len(attempts)
        rest = [f"{run.events:,}", _print.local_time(run.opened), _duration(run), (run.state, _STYLES[run.state])]
        rows.append([run.name, *values, *tries, *rest])
    _print.rows(titles, rows, ["attempts", "events", "duration"])
    if same:
        _print.line()
        _print.line(f"all {len(runs)} runs have {_print.settings(same)}")


def _cell(config: dict[str, Any], name: str) -> str:
    return _print.value(config[name]) if name in config else ""


def _duration(run: Run) -> str:
    if run.first is None or run.last is None:
        return ""
    return _render.duration((run.last - run.first).total_seconds())
