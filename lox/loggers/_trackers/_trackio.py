"""`TrackioLogger`: runs of Trackio."""

import collections
import contextvars
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram, few_bins
from lox.loggers._files._rows import strict_json
from lox.loggers._run import Names, Run
from lox.loggers._trackers._clients import client
from lox.loggers._trackers._curves import Curve, CurveLogger
from lox.loggers._trackers._entries import MOST_ELEMENTS
from lox.loggers._trackers._escape import escape, unescape
from lox.loggers._trackers._media import pillow

# Columns of Trackio's own.
_RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")
_BAD = "\ud800-\udfff"  # halves of letters, which are no text to JSON: Trackio would leave them out
_BINS = 512  # as many as Trackio itself would make


# By project. Trackio itself knows a run only when it has a row.
_names: collections.defaultdict[str, Names] = collections.defaultdict(Names)


class TrackioLogger(CurveLogger):
    """Logs to Trackio, one run per key, all of them live at once.

    ```python
    with lox.loggers.TrackioLogger("ppo") as logger:  # then: trackio show --project ppo
        states = jax.vmap(logger.init)(jax.random.split(key, 8))
        jax.vmap(lambda state, key: logger.tap(train, state, buffer=100)(key))(states, keys)
    ```

    Keys that are logged together are one row of Trackio's. Its step is the one called `step`, or else the first one
    that the event has, or else the one after the last; other steps are values in the same row. `lox.Histogram` and
    `lox.Image` are shown as such. Arrays of up to 64 elements are as many values, `xs/0`, `xs/1`, pytrees one per leaf,
    `stats/mean`. Floats are double precision, NaN and infinities are kept, and so are integers of 64 bits.

    Trackio keeps some names for itself, such as `time`: they are escaped, `time_x_`, and `TrackioLogger.key_of` gives
    the key. Where the data goes is Trackio's choice, and its environment variables': `TRACKIO_DIR`, `TRACKIO_SPACE_ID`.
    Its own thread sends rows to a Space or a server, and warns if it cannot; on this machine, `flush` waits for them.

    Args:
        project: The name of the project.
        step: The name of the step that is Trackio's.
        arrays: What becomes of plain arrays: "elements", or "histogram".
        max_elements: The size of the largest array whose elements become values.
        **kwargs: What `trackio.init` takes, such as `group` or `space_id`. Metrics of the hardware are logged with the
            first run only, because they are those of the process.
    """

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
                    f"TrackioLogger got {name!r}, which is of a single run. A run has the name of its key; give a "
                    "config to `init(key, config)`."
                )
        self.project = project
        self._client = client("trackio", "trackio", "TrackioLogger")
        self._storage = client("trackio.sqlite_storage", "trackio", "TrackioLogger").SQLiteStorage
        self._variables = client("trackio.context_vars", "trackio", "TrackioLogger")
        self._kwargs = kwargs
        self._names = _names[project]
        self._context: contextvars.Context | None = None

    @staticmethod
    def key_of(name: str) -> str:
        """The key that a value in a row belongs to."""
        return unescape(name)

    def open(self, run: Run) -> None:
        """Create a run of Trackio's, without ending the one before."""
        self._names.take(run, set(self._storage.get_runs(self.project)))
        options = dict(self._kwargs)
        config = {str(key): x for key, x in run.config.items()}
        if own := {key: config.pop(key) for key in list(config) if key.startswith("_")}:
            config["private"] = {**config.get("private", {}), **own}  # where Trackio does not take them for its own
        if self._context is None:
            context = contextvars.Context()
        else:
            # `trackio.init` ends the run of its context, and rows of it get lost: so each has a context of its own. But
            # the project stays known, or it would be announced again for every run.
            context = self._context.copy()
            context.run(self._variables.current_run.set, None)
            options = {"auto_log_cpu": False, "auto_log_gpu": False, **options}
        created = context.run(
            self._client.init, project=self.project, name=run.name, config=strict_json(config), **options
        )
        run.resource = created
        self._context = self._context or context

    def send(self, run: Run, curves: list[Curve]) -> None:
        """A row per event, for all curves that have the same steps."""
        rows: dict[Any, dict[str, list[Any]]] = {}
        for curve in curves:
            name = row_name(curve.name)
            again = 0  # the same name at the same steps: a row has room for one
            while name in rows.setdefault((curve.steps.tobytes(), again), {}):
                again += 1
            rows[curve.steps.tobytes(), again][name] = self._cells(run, curve)
        for (steps, _), columns in rows.items():
            for step, *cells in zip(np.frombuffer(steps, np.int64).tolist(), *columns.values(), strict=True):
                run.resource.log(dict(zip(columns, cells, strict=True)), step=step)

    def _cells(self, run: Run, curve: Curve) -> list[Any]:
        if isinstance(curve.value, np.ndarray):
            return curve.numbers().tolist()
        if isinstance(curve.value, Histogram):
            return [self._client.Histogram(np_histogram=few_bins(value, _BINS)) for _, value in curve.events()]
        images = [(step, self._client.Image(pillow(value))) for step, value in curve.events()]
        for step, image in images:
            # Now: of what `log` cannot save, it warns only, and as Python shows the same warning once, not every time.
            image._save(self.project, run.resource.name, step)
        return [image for _, image in images]

    def commit(self) -> None:
        """Have the rows written that wait for Trackio's thread, which has no public way to be asked."""
        for run in list(self._pipeline.runs.values()):
            if run.resource is not None and run.resource._is_local:
                with run.resource._client_lock:
                    run.resource._flush_queues_inline()

    def finish(self, run: Run) -> None:
        """Write what is left."""
        super().finish(run)
        run.resource.finish()


def row_name(key: str) -> str:
    """What Trackio calls it."""
    if key.startswith("__"):
        return "_x5f_" + escape(key[1:], _BAD)
    return escape(key, _BAD, mark=key in _RESERVED)
