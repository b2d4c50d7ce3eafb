"""`MLflowLogger`: logs to MLflow."""

import collections
import itertools
import json
import os
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox.loggers._files._rows import strict_json
from lox.loggers._run import Run
from lox.loggers._trackers._clients import client, flat, pillow
from lox.loggers._trackers._curves import Curve, CurveLogger, json_lines
from lox.loggers._trackers._escape import INFINITE, MARK, escape, unescape
from lox.loggers._trackers._series import MOST_ELEMENTS, raise_problems
from lox.store.names import Taken

# The client's limits for one call, and for names and values.
_METRICS, _PARAMS, _NAME, _VALUE = 1000, 100, 250, 6000
_FILE_NAME = 140  # of 255, because MLflow adds the step, the time and an identifier
_BAD = r"^/\w.\- " + (":" if os.name != "nt" else "")


class MLflowLogger(CurveLogger):
    """Logs to MLflow, one run per PRNG key.

    >>> import jax, lox
    >>> with lox.loggers.MLflowLogger("ppo") as logger:  # then: mlflow ui --backend-store-uri sqlite:///mlflow.db
    ...     state = logger.init(jax.random.key(42), config={"lr": 0.1})
    ...     logger.log(state, {"loss": 0.5}, step=0)

    `init`, `log`, `spool` and `tap` work under `jit` and `vmap`, with one run per lane.

    Values are double precision. MLflow's step is the step called `step`, or else the event's first step, or else one
    more than the last; other steps are metrics of their own. Arrays of up to 64 elements have one metric per element,
    `xs/0`, `xs/1`, pytrees one per leaf, `stats/mean`. MLflow's history has the events in order: where steps do not
    increase, timestamps do, by a millisecond, because MLflow sorts by them and drops events of the same step, value and
    time.

    A `lox.Image` is an image of MLflow's. MLflow has no histograms: mean and standard deviation of a `lox.Histogram`
    are metrics, and its bins are artifacts, `histograms/NAME/*.jsonl`, with one line per event. The experiment decides
    where artifacts are: with SQLite, in `mlruns` in the working directory, unless it was created otherwise.

    MLflow has no infinities, and would store 1.8e308. An infinity is written as NaN, and its sign, 1 or -1, to another
    metric at the same step, `loss_xinf_`.

    Names that MLflow refuses, such as `a[0]`, are escaped, `a_x5b_0_x5d_`; `MLflowLogger.key_of` returns the key. The
    config given to `init` becomes the run's parameters.

    `resume` goes on with the newest run of that name. Nothing in MLflow can be hidden, so tags say what is computed
    again: a point of a metric is replaced by attempt 1 if its timestamp is before `lox.attempt.1.time` and its step is
    `lox.attempt.1.step` or later; `lox.attempt` is the number of the last attempt, `lox.resumed_step` its first step.
    Parameters cannot change: the tag `lox.attempt.1.config.lr` has the new value. Bins of histograms are then in
    `histograms/NAME/attempt1-*.jsonl`.

    Args:
        experiment: The name of the experiment; it is created if there is none.
        tracking_uri: Where to log: a database or a server. By default the one set by `mlflow.set_tracking_uri` or the
            environment variable `MLFLOW_TRACKING_URI`, or else `sqlite:///mlflow.db`.
        tags: Tags of all runs.
        step: The name of the step to use as MLflow's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become metrics.
    """

    key_of = staticmethod(unescape)  # the key that a metric belongs to

    def __init__(
        self,
        experiment: str = "lox",
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        step: str = "step",
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
    ):
        super().__init__(step, arrays, max_elements)
        if not isinstance(experiment, str) or not experiment:
            raise _errors.LogTypeError(f"`experiment` is {experiment!r}; it must be the name of an experiment.")
        mlflow = client("mlflow", "mlflow", "MLflowLogger")
        client("sqlalchemy", "mlflow", "MLflowLogger")
        self._entities = client("mlflow.entities", "mlflow", "MLflowLogger")
        if tracking_uri is None:
            tracking_uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else "sqlite:///mlflow.db"
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._make_client = lambda: mlflow.MlflowClient(tracking_uri)
        self._client: Any = None  # made with the first run, because it creates the database
        self._experiment_id = ""
        self._names = Taken()
        self._to_resume: dict[str, Any] = {}  # MLflow's runs, by name

    def open(self, run: Run) -> None:
        """Create an MLflow run."""
        super().open(run)
        params = _params(run.config)
        if run.resumed is not None:
            return self._reopen(run, params)
        self._names.names |= self._runs_like(run.name).keys()
        run.name = self._names.take(run.name)
        created = self._client.create_run(self._experiment_id, run_name=run.name, tags=dict(self._tags))
        run.resource = _MLflowRun(created.info.run_id)
        self._log_params(run, params)

    def _runs_like(self, name: str) -> dict[str, Any]:
        """Return MLflow's runs whose names begin like this one, oldest first."""
        if self._client is None:
            self._client = self._make_client()
            self._experiment_id = self._find_experiment()
        like = f"attributes.run_name LIKE '{name}%'"
        order = ["attributes.start_time ASC"]
        same = self._client.search_runs([self._experiment_id], like, max_results=50000, order_by=order)
        return {other.info.run_name: other for other in same}

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str]:
        # By the first words, because the rest may have changed with the config.
        found: dict[str, Any] = {}
        for start in {name.split(" ")[0] for name in wanted}:
            found |= self._runs_like(start)
        self._to_resume |= found
        return found or self._runs_like(""), f"experiment {self.experiment!r} of {self.tracking_uri!r}"

    def _reopen(self, run: Run, params: dict[str, str]) -> None:
        """Go on with an MLflow run. Its parameters cannot change: tags have the new values."""
        assert run.resumed is not None
        before = self._to_resume[run.name]
        attempt = int(before.data.tags.get("lox.attempt", 0)) + 1
        run.resource = _MLflowRun(before.info.run_id, attempt)
        step, number = run.resumed
        prefix = f"lox.attempt.{attempt}"
        tags = {"lox.attempt": attempt, "lox.resumed_step": f"{step}={number}", f"{prefix}.step": f"{step}={number}"}
        tags[f"{prefix}.time"] = int(time.time() * 1000)
        known = before.data.params
        tags |= {f"{prefix}.config.{name}": x for name, x in params.items() if known.get(name, x) != x}
        for chunk in _chunks([self._entities.RunTag(k, str(v)) for k, v in tags.items()], _PARAMS):
            self._client.log_batch(run.resource.id, tags=chunk)
        self._log_params(run, {name: x for name, x in params.items() if name not in known})
        self._client.update_run(run.resource.id, status="RUNNING")

    def _log_params(self, run: Run, params: dict[str, str]) -> None:
        for chunk in _chunks(list(params.items()), _PARAMS):
            self._client.log_batch(run.resource.id, params=[self._entities.Param(*param) for param in chunk])

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return self._client.create_experiment(self.experiment)
            except Exception:
                experiment = self._client.get_experiment_by_name(self.experiment)  # another process was faster
                if experiment is None:
                    raise
        return experiment.experiment_id

    def send(self, run: Run, curves: list[Curve]) -> None:
        """Log the curves in as few calls as the client's limits allow."""
        problems: list[Exception] = []
        metrics: list[Any] = []
        numbers = [part for curve in curves for part in self._shown(run, curve, problems)]
        for curve in numbers:
            name, steps, values = metric_name(curve.name), curve.steps, curve.numbers()
            if len(name) > _NAME - len(INFINITE):
                problems.append(_too_long(curve.name, _NAME))
                continue
            times = run.resource.times(name, steps)
            infinite = np.isinf(values)
            if infinite.any():
                signs = np.sign(values[infinite])
                metrics += self._metrics(name + INFINITE, signs, times[infinite], steps[infinite])
                values = np.where(infinite, np.nan, values)
            metrics += self._metrics(name, values, times, steps)
        for chunk in _chunks(metrics, _METRICS):
            self._client.log_batch(run.resource.id, metrics=chunk)
        raise_problems(problems)

    def _shown(self, run: Run, curve: Curve, problems: list[Exception]) -> list[Curve]:
        """Write histograms and pictures as artifacts; return what can be shown in numbers."""
        if isinstance(curve.value, np.ndarray):
            return [curve]
        is_histogram = isinstance(curve.value, Histogram)
        name = file_name(curve.name, "" if is_histogram else "/")
        if len(name) > _FILE_NAME:
            problems.append(_too_long(curve.name, _FILE_NAME))
            return []
        if is_histogram:
            file = f"histograms/{name}/{run.resource.prefix}{next(run.resource.files[name]):06d}.jsonl"
            self._client.log_text(run.resource.id, json_lines(curve), file)
            return self._in_numbers(curve)
        for step, image in curve.events():
            self._client.log_image(run.resource.id, pillow(image), key=name, step=step)
        return []

    def _metrics(self, name: str, values: np.ndarray, times: np.ndarray, steps: np.ndarray) -> list[Any]:
        numbers = values.astype(np.float64).tolist()
        rows = zip(numbers, times.tolist(), steps.tolist(), strict=True)
        return [self._entities.Metric(name, *row) for row in rows]

    def finish(self, run: Run) -> None:
        """Mark the run as finished."""
        super().finish(run)
        interrupted = isinstance(run.failure, KeyboardInterrupt)
        status = "FINISHED" if run.failure is None else "KILLED" if interrupted else "FAILED"
        self._client.set_terminated(run.resource.id, status)


class _MLflowRun:
    def __init__(self, id: str, attempt: int = 0):
        self.id = id
        self.prefix = f"attempt{attempt}-" if attempt else ""  # of files, so that none replaces an earlier one
        self._last: dict[str, tuple[int, int]] = {}  # time and step of each metric
        self.files = collections.defaultdict[str, Iterator[int]](itertools.count)  # of each histogram

    def times(self, name: str, steps: np.ndarray) -> np.ndarray:
        """Return timestamps in milliseconds that keep the events of a metric in order and apart."""
        now = int(time.time() * 1000)
        last_time, last_step = self._last.get(name, (0, 0))
        start = max(now, last_time)
        if start > last_time:  # a new millisecond: any step will do
            last_step = int(steps[0]) - 1
        before = np.concatenate([[last_step], steps[:-1]])
        times = start + np.cumsum(steps <= before)
        self._last[name] = int(times[-1]), int(steps[-1])
        return times


def metric_name(key: str) -> str:
    """Return MLflow's name of a key."""
    name = escape(key, _BAD)
    # Names may become files, and must not lead elsewhere.
    if posixpath.normpath(name) != name or name == "." or name.startswith(("..", "/")):
        name = escape(key, r"^\w\- ")
    return name


def file_name(key: str, allowed: str = "") -> str:
    """Return a file name for a key: valid on all systems, and never another folder."""
    name = escape(key, r"^a-zA-Z0-9_\-. " + allowed)
    return escape(key, r"^a-zA-Z0-9_\- " + allowed) if not name.strip(".") else name


def _too_long(key: str, most: int) -> _errors.LogTypeError:
    return _errors.LogTypeError(
        f"MLflowLogger did not write {key!r}: MLflow's names have at most {most} characters, including escapes. "
        "Give it a shorter key."
    )


def _params(config: Mapping[str, Any]) -> dict[str, str]:
    params: dict[str, str] = {}
    for scope, value in flat(config):
        name = metric_name(".".join(scope))
        while name in params:  # {"a.b": 1, "a": {"b": 2}}
            name += MARK
        text = _errors.encodable(value) if isinstance(value, str) else json.dumps(strict_json(value))
        if len(text) > _VALUE or len(name) > _NAME:
            raise _errors.LogTypeError(
                f"`init` got config {'.'.join(scope)!r} with {len(text)} characters: MLflow's parameters have at most "
                f"{_VALUE}, and their names {_NAME}. Leave it out, or give a summary of it."
            )
        params[name] = text
    return params


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
