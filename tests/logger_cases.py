"""The loggers under contract, and how to read back what each of them has written.

To put another logger under contract, add a `Case`: how to make it, and how to read what it has written, as a mapping
from the names of runs to keys to lists of events `(steps, value)` in order.
"""

import atexit
import contextlib
import csv
import dataclasses
import functools
import importlib.util
import io
import json
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import wandb_file

import lox
from lox.loggers import (
    ConsoleLogger,
    CsvLogger,
    JsonlLogger,
    MLflowLogger,
    MultiLogger,
    NeptuneLogger,
    SaveLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

Events = dict[str, dict[str, list[tuple[dict[str, Any], Any]]]]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Any], lox.Logger]  # in a folder
    read: Callable[[lox.Logger], Events] | None  # None: it writes nothing that can be read
    reads_arrays: bool = True
    reads_while_open: bool = True  # whether events can be read before the logger is closed
    stored: Callable[[Events], Events] = lambda events: events  # turns logged events into what the format stores

    def __repr__(self):
        return self.name


class Recorder(lox.Logger):
    """Keeps events in memory: a minimal logger, to test what the base class promises."""

    def __init__(self):
        self.runs, self.events, self.finished, self.writes = [], {}, [], 0

    def open(self, run):
        self.runs.append(run)
        if sum(r.key.tolist() == run.key.tolist() for r in self.runs) > 1:
            run.name += f".{sum(r.key.tolist() == run.key.tolist() for r in self.runs) - 1}"
        self.events[run.name] = {}

    def write(self, run, logs):
        self.writes += 1
        for key in logs:
            events = self.events[run.name].setdefault(key, [])
            leaves = jax.tree.leaves(logs[key])
            assert all(isinstance(x, np.ndarray) for x in leaves)
            for n in range(len(leaves[0])):
                steps = {name: values[key][n].item() for name, values in logs.steps.items() if key in values}
                events.append((steps, jax.tree.map(lambda x, n=n: x[n].tolist(), logs[key])))

    def finish(self, run):
        self.finished.append(run.name)


class LaneRecorder(Recorder):
    """The same, for all lanes at once."""

    def write_lanes(self, runs, logs):
        assert all(x.shape[0] == len(runs) for x in jax.tree.leaves((dict(logs), logs.steps, logs.valid)))
        for lane, run in enumerate(runs):
            for key in logs:
                valid = (
                    logs.valid[key][lane] if key in logs.valid else np.ones(len(jax.tree.leaves(logs[key])[0][0]), bool)
                )
                for n in np.flatnonzero(valid):
                    steps = {name: values[key][lane, n].item() for name, values in logs.steps.items() if key in values}
                    value = jax.tree.map(lambda x, at=(lane, n): x[at].tolist(), logs[key])
                    self.events[run.name].setdefault(key, []).append((steps, value))


def _read_csv(logger):
    events: Events = {}
    for path in logger.path.glob("*.csv"):
        run = events.setdefault(path.stem, {})
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                cells = {name: json.loads(cell.replace("nan", "NaN")) for name, cell in row.items() if cell}
                _add_row(run, cells)
    return events


def _read_jsonl(logger):
    events: Events = {}
    for path in logger.path.glob("*.jsonl"):
        run = events.setdefault(path.stem, {})
        for line in path.read_text().splitlines():
            _add_row(run, json.loads(line))
    return events


def _add_row(run, row):
    steps = {name: value for name, value in row.items() if name in ("step", "episode")}
    for key, value in row.items():
        if key not in steps:
            run.setdefault(key, []).append((steps, value))


def _read_saved(logger):
    runs = {run.name: lox.load(logger.path, run.name) for run in lox.runs(logger.path)}
    return {name: {key: _events_of(logs, key) for key in logs} for name, logs in runs.items()}


def _events_of(logs, key):
    steps = {name: values[key].tolist() for name, values in logs.steps.items() if key in values}
    return [({name: values[n] for name, values in steps.items()}, value) for n, value in enumerate(logs[key].tolist())]


def _one_step(events):
    """Give each event one step, as TensorBoard does: `step`, or else its number."""
    return {
        run: {key: [({"step": s.get("step", n)}, v) for n, (s, v) in enumerate(values)] for key, values in keys.items()}
        for run, keys in events.items()
    }


def _read_tensorboard(logger):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Events = {}
    for folder in logger.path.iterdir():
        actual = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        # Steps beyond the first are scalars of their own.
        keys = [key for key in actual.Tags()["scalars"] if key != "episode"]
        events[folder.name] = {key: [({"step": e.step}, e.value) for e in actual.Scalars(key)] for key in keys}
    return events


def _make_wandb(path):
    settings = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
    logger = WandbLogger(mode="offline", dir=str(path), project="contract", settings=settings)
    logger.path = path
    return logger


def _read_wandb(logger):
    return {name: file.events("step", "episode") for name, file in wandb_file.read_all(logger.path).items()}


def _quiet_console():
    from rich.console import Console

    return ConsoleLogger(console=Console(file=io.StringIO()))


# --- trackers: the real clients, offline ---

HAS_NEPTUNE, HAS_MLFLOW, HAS_TRACKIO, HAS_WANDB = (
    all(importlib.util.find_spec(name) for name in names)
    for names in (["neptune"], ["mlflow", "sqlalchemy", "alembic"], ["trackio"], ["wandb"])
)


def as_curves(events: Events) -> Events:
    """Give each event one step, as trackers do, or else count; other steps become curves of their own."""
    kept: Events = {}
    for run, keys in events.items():
        kept[run] = {}
        for key, values in keys.items():
            for number, (steps, value) in enumerate(values):
                at = {"step": steps.get("step", number)}
                kept[run].setdefault(key, []).append((at, value))
                for name in steps.keys() - {"step"}:
                    kept[run].setdefault(name, []).append((at, steps[name]))
    return kept


def make_neptune(path, **kwargs):
    os.environ["NEPTUNE_DATA_DIRECTORY"] = str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the client warns of what it imports
        logger = NeptuneLogger(**kwargs)
    logger.path = path
    return logger


def read_neptune(logger_or_path):
    """Return what the client would send to a server."""
    events: Events = {}
    path = getattr(logger_or_path, "path", logger_or_path)
    for file in sorted(path.glob("offline/*/data-1.log")):
        operations = [json.loads(line)["obj"] for line in file.read_text().splitlines()]
        (name,) = [o["value"] for o in operations if o["path"] == ["sys", "name"]]
        run = events.setdefault(name, {})
        for o in operations:
            if o["type"] in ("LogFloats", "LogStrings"):
                points = [({"step": point["step"]}, point["value"]) for point in o["values"]]
                run.setdefault("/".join(o["path"]), []).extend(points)
    return events


@functools.cache
def mlflow_uri():
    """One database for all tests, because making it takes seconds; in memory if possible, to avoid the disk."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    uri = f"sqlite:///{folder}/mlflow.db"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with contextlib.chdir(folder), warnings.catch_warnings():  # where artifacts go
        warnings.simplefilter("ignore")
        import mlflow

        mlflow.MlflowClient(uri).search_experiments()
    return uri


def make_mlflow(path, **kwargs):
    return MLflowLogger(f"{path}", mlflow_uri(), **kwargs)


def read_mlflow(logger):
    import mlflow

    client = mlflow.MlflowClient(logger.tracking_uri)
    events: Events = {}
    for run in client.search_runs([client.get_experiment_by_name(logger.experiment).experiment_id]):
        history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        events[run.info.run_name] = {
            key: [({"step": m.step}, m.value) for m in values] for key, values in history.items()
        }
    return events


TRACKIO = {"auto_log_cpu": False, "auto_log_gpu": False}


def make_trackio(path, **kwargs):
    os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp())  # read once, when it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrackioLogger(f"{uuid.uuid4()}", **TRACKIO, **kwargs)


def read_trackio(logger):
    from trackio.sqlite_storage import SQLiteStorage

    events: Events = {}
    for name in SQLiteStorage.get_runs(logger.project):
        run = events.setdefault(name, {})
        for row in SQLiteStorage.get_logs(logger.project, name):
            for key in row.keys() - {"step", "timestamp"}:
                run.setdefault(key, []).append(({"step": row["step"]}, row[key]))
    return events


def _runs_with_rows(events):
    return {run: keys for run, keys in as_curves(events).items() if keys}


CASES = [
    Case("recorder", lambda path: Recorder(), lambda logger: logger.events),
    Case("lane_recorder", lambda path: LaneRecorder(), lambda logger: logger.events),
    Case("csv", CsvLogger, _read_csv),
    Case("jsonl", JsonlLogger, _read_jsonl),
    Case("save", SaveLogger, _read_saved),
    Case(
        "multi",
        lambda path: MultiLogger(Recorder(), JsonlLogger(path)),
        lambda logger: _same([logger.loggers[0].events, _read_jsonl(logger.loggers[1])]),
    ),
]
if importlib.util.find_spec("tensorboard"):
    CASES.append(Case("tensorboard", TensorBoardLogger, _read_tensorboard, stored=_one_step))
if HAS_WANDB:
    CASES.append(Case("wandb", _make_wandb, _read_wandb, reads_while_open=False))
with contextlib.suppress(ImportError):
    import rich  # noqa: F401

    CASES.append(Case("console", lambda path: _quiet_console(), None))


if HAS_NEPTUNE:
    CASES.append(Case("neptune", make_neptune, read_neptune, stored=as_curves))
if HAS_MLFLOW:
    CASES.append(Case("mlflow", make_mlflow, read_mlflow, stored=as_curves))
if HAS_TRACKIO:
    CASES.append(Case("trackio", make_trackio, read_trackio, stored=_runs_with_rows))


def _same(actual):
    assert all(f == actual[0] for f in actual[1:])
    return actual[0]


def parts_of(logger):
    """Return the loggers that write: itself, or those inside."""
    return list(logger.loggers) if isinstance(logger, MultiLogger) else [logger]
