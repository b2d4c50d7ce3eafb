"""`TrackioLogger`: logs to Trackio."""

import collections
import contextvars
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram, few_bins
from lox.loggers._files._rows import strict_json
from lox.loggers._run import Run
from lox.loggers._trackers._clients import client, pillow
from lox.loggers._trackers._curves import Curve, CurveLogger
from lox.loggers._trackers._escape import SURROGATES, escape, unescape
from lox.loggers._trackers._series import MOST_ELEMENTS
from lox.store._table import differences, merged
from lox.store.names import Taken

# Trackio's own columns, and ours.
_ATTEMPT, _ATTEMPTS = "attempt", "lox.attempts"  # of rows after a `resume`; in the config, all of them
_RESERVED = ("project", "run", "timestamp", "step", "time", "metrics", _ATTEMPT)
_BINS = 512  # as many as Trackio itself makes


# By project, because Trackio does not know a run before its first row.
_names: collections.defaultdict[str, Taken] = collections.defaultdict(Taken)


class TrackioLogger(CurveLogger):
    """Logs to Trackio, one run per PRNG key, all of them live at once.

    >>> import jax, lox
    >>> with lox.loggers.TrackioLogger("ppo") as logger:  # then: trackio show --project ppo
    ...     state = logger.init(jax.random.key(42), config={"lr": 0.1})
    ...     logger.log(state, {"loss": 0.5}, step=0)
    * Trackio project initialized: ppo
    ...

    `init`, `log`, `spool` and `tap` work under `jit` and `vmap`, with one run per lane.

    Keys that are logged together are in one row. Its step is the step called `step`, or else the event's first step, or
    else one more than the last; other steps are values in the same row. `lox.Histogram` and `lox.Image` are shown as
    such. Arrays of up to 64 elements have one value per element, `xs/0`, `xs/1`, pytrees one per leaf, `stats/mean`.
    Floats are double precision; NaN, infinities and integers of 64 bits are kept.

    `resume` goes on with a run on this machine. Rows of further attempts have a value `attempt`: 1, 2, ... The config
    is the newest, and its list `lox.attempts` has, for each, the first step that was computed again, and the values
    before and after of what has changed.

    Trackio reserves some names, such as `time`, and `attempt` is ours: they are escaped, `time_x_`, and
    `TrackioLogger.key_of` returns the key. Trackio and its environment variables, `TRACKIO_DIR` and `TRACKIO_SPACE_ID`,
    decide where the data goes. Its own thread sends rows to a Space or a server, and warns if it cannot; on this
    machine, `flush` waits for them, and raises an error if they could not be written.

    Args:
        project: The name of the project.
        step: The name of the step to use as Trackio's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become values.
        **kwargs: Arguments of `trackio.init`, such as `group` or `space_id`. Hardware metrics are logged with the first
            run only, because they are those of the process.
    """

    key_of = staticmethod(unescape)  # the key that a value in a row belongs to

    def __init__(
        self,
        project: str,
        *,
        step: str = "step",
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
        **kwargs: Any,
    ):
        super().__init__(step, arrays, max_elements)
        if not isinstance(project, str) or not project:
            raise _errors.LogTypeError(f"`project` is {project!r}; it must be the name of a project.")
        for name in ("name", "config"):
            if name in kwargs:
                raise _errors.OptionError(
                    f"TrackioLogger got {name!r}, which belongs to a single run. A run is named after its PRNG key; "
                    "give a config to `init(key, config)`."
                )
        self.project = project
        self._client = client("trackio", "trackio", "TrackioLogger")
        self._storage = client("trackio.sqlite_storage", "trackio", "TrackioLogger").SQLiteStorage
        self._variables = client("trackio.context_vars", "trackio", "TrackioLogger")
        self._kwargs = kwargs
        self._names = _names[project]
        self._context: contextvars.Context | None = None
        self._attempts: dict[int, int] = {}  # the numbers of attempts that go on with a run

    def open(self, run: Run) -> None:
        """Create a Trackio run, or go on with one, without ending the previous one."""
        super().open(run)
        options = dict(self._kwargs)
        config = {str(key): x for key, x in run.config.items()}
        if private := {key: config.pop(key) for key in list(config) if key.startswith("_")}:
            config["private"] = {**config.get("private", {}), **private}  # Trackio reserves the underscore
        if run.resumed is None:
            self._names.names |= set(self._storage.get_runs(self.project))
            run.name = self._names.take(run.name)
        else:
            options["resume"] = "must"
            config = self._resumed_config(run, strict_json(config))
            self._attempts[run.id] = len(config[_ATTEMPTS])
        if self._context is None:
            context = contextvars.Context()
        else:
            # `trackio.init` ends the run of its context and loses rows, so each run has a context of its own. It is a
            # copy that still has the project, or the project would be announced again for every run.
            context = self._context.copy()
            context.run(self._variables.current_run.set, None)
            options = {"auto_log_cpu": False, "auto_log_gpu": False, **options}
        run.resource = context.run(
            self._client.init, project=self.project, name=run.name, config=strict_json(config), **options
        )
        self._context = self._context or context
        if run.resource._is_local:
            # Trackio would warn of the first rows that it cannot write, and drop others without a word.
            run.resource._warn_once = functools.partial(self._refused, run)

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str]:
        return self._storage.get_runs(self.project), f"project {self.project!r}"

    def _resumed_config(self, run: Run, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a run that is resumed, with what each attempt has changed: Trackio keeps only one."""
        before = self._storage.get_run_config(self.project, run.name) or {}
        before = {key: x for key, x in before.items() if not key.startswith("_")}  # without Trackio's own
        attempts = before.pop(_ATTEMPTS, [])
        after = merged(before, config)
        changes = {name: list(values) for name, values in differences(before, after).items()}
        assert run.resumed is not None
        step, number = run.resumed
        this = {_ATTEMPT: len(attempts) + 1, "resumed": {step: number}, "changes": changes}
        return {**after, _ATTEMPTS: [*attempts, this]}

    def _refused(self, run: Run, kind: str, message: str) -> None:
        del kind
        self._pipeline.errors.add(_errors.LoxError(message), f"writing run {run.name!r}")

    def send(self, run: Run, curves: list[Curve]) -> None:
        """Add one row per event, for all curves with the same steps."""
        attempt = {_ATTEMPT: self._attempts[run.id]} if run.id in self._attempts else {}
        rows: dict[Any, dict[str, list[Any]]] = {}
        for curve in curves:
            name = row_name(curve.name)
            again = 0  # a row has room for a name only once
            while name in rows.setdefault((curve.steps.tobytes(), again), {}):
                again += 1
            rows[curve.steps.tobytes(), again][name] = self._cells(run, curve)
        for (steps, _), columns in rows.items():
            for step, *cells in zip(np.frombuffer(steps, np.int64).tolist(), *columns.values(), strict=True):
                row = dict(zip(columns, cells, strict=True)) | attempt
                run.resource.log(row, step=step)

    def _cells(self, run: Run, curve: Curve) -> list[Any]:
        if isinstance(curve.value, np.ndarray):
            return curve.numbers().tolist()
        if isinstance(curve.value, Histogram):
            return [self._client.Histogram(np_histogram=few_bins(value, _BINS)) for _, value in curve.events()]
        images = [(step, self._client.Image(pillow(value))) for step, value in curve.events()]
        for step, image in images:
            # Now, because `log` would only warn of what it cannot save, and Python shows the same warning once.
            image._save(self.project, run.resource.name, step)
        return [image for _, image in images]

    def commit(self) -> None:
        """Write the rows that wait for Trackio's thread, for which Trackio has no public function."""
        for run in list(self._pipeline.runs.values()):
            if run.resource is not None and run.resource._is_local:
                with run.resource._client_lock:
                    run.resource._flush_queues_inline()

    def finish(self, run: Run) -> None:
        """Write the rest and end the run."""
        super().finish(run)
        self._attempts.pop(run.id, None)
        run.resource.finish()


def row_name(key: str) -> str:
    """Return Trackio's name of a key."""
    if key.startswith("__"):
        return "_x5f_" + escape(key[1:], SURROGATES)
    return escape(key, SURROGATES, mark=key in _RESERVED)
