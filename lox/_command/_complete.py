"""Shell completion of names that are in the directory."""

import os
import shlex
from pathlib import Path

import typer

from lox import _errors
from lox._command import _choose
from lox.store._reader import Reader
from lox.store._table import flat_config


def _reader(context: typer.Context) -> Reader | None:
    """Return the directory on the command line; None if there is no such thing yet."""
    directory = context.params.get("directory") or _first_directory()
    if directory is None:
        return None
    try:
        return _choose.opened(Path(directory))
    except _errors.LoxError:  # a shell that waits for completions has no use for an error
        return None


def _first_directory() -> str | None:
    """Look for it in the words of the line: behind an option without its value, the parser has not got to it."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is not closed yet
        words = line.split()
    return next((word for word in words[2:] if os.path.isdir(word)), None)


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of runs."""
    reader = _reader(context)
    return [] if reader is None else [name for name in reader._catalog.records if name.startswith(incomplete)]


def keys(context: typer.Context, incomplete: str) -> list[str]:
    """Return keys."""
    reader = _reader(context)
    if reader is None:
        return []
    return [key for key in _choose.keys(reader, list(reader._catalog.records)) if key.startswith(incomplete)]


def steps(context: typer.Context, incomplete: str) -> list[str]:
    """Return what may be the x axis."""
    reader = _reader(context)
    found = [] if reader is None else _choose.steps(reader, list(reader._catalog.records))
    return [name for name in [*found, "event", "wall"] if name.startswith(incomplete)]


def names(context: typer.Context, incomplete: str) -> list[str]:
    """Return names in the configs."""
    reader = _reader(context)
    found = [name for run in (reader.runs() if reader else ()) for name in flat_config(run.config)]
    return [name for name in dict.fromkeys(found) if name.startswith(incomplete)]


def conditions(context: typer.Context, incomplete: str) -> list[str]:
    """Return the beginnings of conditions: `lr=`."""
    return [f"{name}=" for name in names(context, incomplete)]
