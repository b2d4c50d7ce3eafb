"""TensorBoard: a folder for each run, with the curves that `TensorBoardLogger` makes, at the times of the events."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from lox import _errors
from lox._command import _choose, _print
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._lanes import Laned, is_laned
from lox._data._logdict import logdict
from lox.loggers._files._rows import strict_json
from lox.loggers._trackers import _hparams, _tfevents
from lox.loggers._trackers._curves import Curve, _Curves
from lox.loggers._trackers._series import MOST_ELEMENTS, Splitter
from lox.store import names
from lox.store._reader import Reader
from lox.store._table import Run

_RESERVED = ("config", _tfevents.CHARTS, *_hparams.TAGS)  # as TensorBoardLogger has them
_FILE = "events.out.tfevents.{:010d}.lox"


class _RunFile:
    """The file of one run, and what is known of its curves."""

    def __init__(self, run: Run, folder: Path):
        self.name = run.name
        self.curves = _Curves("step", Splitter("TensorBoard", "elements", MOST_ELEMENTS, _RESERVED))
        self.seen: set[bytes] = set()  # curves of steps: keys that are logged together have the same
        self.folder = folder
        folder.mkdir()
        wall = run.opened.timestamp()
        self.file = folder / _FILE.format(int(wall))
        data = _tfevents.header(wall)
        self.hparams = _hparams.encode(run.config if isinstance(run.config, dict) else {})
        if self.hparams:
            data += _hparams.start(self.hparams, wall)
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            data += _tfevents.text("config", 0, f"```json\n{config}\n```", wall)
        self.file.write_bytes(data)

    def add(self, logs: logdict, has_wall: bool) -> tuple[int, list[str]]:
        """Append events; return how many points that were, and what cannot be shown."""
        count, problems = 0, []
        with open(self.file, "ab") as file:
            for bundle in logs.to_bundles():
                wall = bundle.steps.pop("wall").tree if has_wall else None
                if not bundle.count():
                    continue
                curves, errors = self.curves.of([0], [_one_run(bundle)])
                problems += [str(error).partition("\n")[0] for error in errors]
                for curve, times in self._new(curves, wall):
                    for data in _encoded(curve, times):
                        file.write(data)
                    count += len(curve.steps)
        return count, problems

    def end(self, run: Run) -> None:
        """Say how the run ended, if it has, and put everything on disk."""
        with open(self.file, "ab") as file:
            if self.hparams and run.state != "running":
                last = run.last or run.opened
                file.write(_hparams.end(run.state != "finished", last.timestamp()))
            file.flush()
            os.fsync(file.fileno())

    def _new(self, curves: list[Curve], wall: np.ndarray | None) -> Iterator[tuple[Curve, np.ndarray]]:
        for curve in curves:
            times = np.zeros(curve.steps.shape[1]) if wall is None else wall
            times = times if curve.valid is None else times[curve.valid[0]]
            one = curve.of_run(0)
            if isinstance(one.value, np.ndarray):
                points = hashlib.blake2b(repr(one.name).encode(), digest_size=16)
                for x in (one.steps, one.value, times):
                    points.update(np.ascontiguousarray(x).tobytes())
                if points.digest() in self.seen:
                    continue
                self.seen.add(points.digest())
            yield one, times


def _one_run(bundle: Bundle) -> Bundle:
    """Give all arrays an axis of runs in front."""
    return jax.tree.map(lambda x: Laned(x.tree[None], x.flags), bundle, is_leaf=is_laned)


def _encoded(curve: Curve, times: np.ndarray) -> list[bytes]:
    if not len(curve.steps):
        return []
    if isinstance(curve.value, np.ndarray):
        with np.errstate(over="ignore"):  # beyond single precision is infinity
            values = np.asarray(curve.value).astype(np.float32)
        return [_tfevents.scalars(curve.name, curve.steps, values, np.asarray(times, np.float64)).tobytes()]
    encode = _tfevents.histogram if isinstance(curve.value, Histogram) else _tfevents.image
    events = zip(curve.events(), times.tolist(), strict=True)
    return [encode(curve.name, step, value, wall) for (step, value), wall in events]


def write(reader: Reader, runs: Sequence[Run], patterns: Sequence[str], folder: Path) -> str:
    """Write all runs; return how much it was, in words."""
    chosen = [run.name for run in runs]
    _choose.keys(reader, chosen, patterns)
    reader._wall = has_wall = "wall" not in _choose.steps(reader, chosen)
    if not has_wall:
        _print.warning("these logs have a step called 'wall': the times of events are not exported.")
    files: dict[str, _RunFile] = {}
    taken, count = names.Taken(), 0
    problems: dict[str, list[str]] = {}
    for run in runs:
        # Names are safe already, unless somebody has changed the files by hand.
        files[run.name] = _RunFile(run, folder / taken.take(names.safe(run.name)))
    for name, logs in _choose.logs(reader, chosen, patterns):
        points, cannot = files[name].add(logs, has_wall)
        count += points
        for text in cannot:
            problems.setdefault(text, []).append(name)
    for text, of_runs in problems.items():
        some = _errors.listing(of_runs[:3]) + (f" and {len(of_runs) - 3} more" if len(of_runs) > 3 else "")
        _print.warning(f"left out of {some}: {text}")
    for run in runs:
        files[run.name].end(run)
    return f"{count:,} points of {len(files):,} runs"
