"""`NeptuneLogger`: runs of Neptune."""

import itertools
import json
import os
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox._data._png import png
from lox.loggers._files._rows import strict_json
from lox.loggers._run import Names, Run
from lox.loggers._trackers._clients import client
from lox.loggers._trackers._config import flat
from lox.loggers._trackers._curves import Curve, CurveLogger, json_lines
from lox.loggers._trackers._entries import MOST_ELEMENTS, raise_problems
from lox.loggers._trackers._escape import MARK, NONFINITE, escape, unescape

# There are many runs in one process, and each would capture the same output and the same hardware.
_DEFAULTS = dict(capture_stdout=False, capture_stderr=False, capture_hardware_metrics=False, source_files=[])
_LARGEST_INT = 2**31 - 1  # of the service's integers
_LONGEST_NAME = 150
_LARGEST_PICTURE = 32 * 2**20  # in bytes; of a larger one, the client keeps nothing


class NeptuneLogger(CurveLogger):
    """Logs to Neptune, one run per key.

    The hosted service of Neptune ended in March 2026. What is left is the client's offline mode, which writes JSON to
    `.neptune/offline`, and servers of one's own. So the mode is "offline" unless `mode` or the environment's
    `NEPTUNE_MODE` says otherwise.

    ```python
    with lox.loggers.NeptuneLogger(project="me/ppo") as logger:
        states = jax.vmap(logger.init)(jax.random.split(key, 8))
        jax.vmap(lambda state, key: logger.tap(train, state, buffer=100)(key))(states, keys)
    ```

    A key is a series, `/` in it a namespace. Values are double precision. Neptune's step is the one called `step`, or
    else the first one that the event has, or else the one after the last; other steps are series of their own. Arrays
    of up to 64 elements are as many series, `xs/0`, `xs/1`, pytrees one per leaf, `stats/mean`.

    A `lox.Image` is a series of images. Neptune has no histograms: of a `lox.Histogram`, mean and standard deviation
    are series, `NAME/mean`, and the bins are files, `NAME/bins/...`, with a line of JSON for each event.

    Neptune skips NaN and infinities: they are written to a series of strings beside, `loss_xnonfinite_`, at their
    steps. Names that Neptune cannot have are escaped so that `NeptuneLogger.key_of` finds the key: a series `a/b`
    beside a series `a` is called `a_x2f_b`. What `init` got as config is in the namespace `config`.

    Args:
        step: The name of the step that is Neptune's.
        arrays: What becomes of plain arrays: "elements", or "histogram".
        max_elements: The size of the largest array whose elements become series.
        **kwargs: What `neptune.init_run` takes. Capturing of output, hardware and source files is off by default.
    """

    def __init__(
        self, *, step: str = "step", arrays: str = "elements", max_elements: int = MOST_ELEMENTS, **kwargs: Any
    ):
        super().__init__(step, arrays, max_elements)
        self._client = client("neptune", "neptune", self._pipeline.name)
        self._names = Names()
        self._kwargs = kwargs

    @staticmethod
    def key_of(name: str) -> str:
        """The key that a series belongs to."""
        return unescape(name)

    def open(self, run: Run) -> None:
        """Begin a run of Neptune's."""
        self._begin(run, self._kwargs)

    def _begin(self, run: Run, kwargs: dict[str, Any]) -> None:
        self._names.take(run)
        options = {**_DEFAULTS, "name": run.name, **kwargs}
        if options.get("mode") is None and not os.environ.get("NEPTUNE_MODE"):
            options["mode"] = "offline"
        run.resource = _NeptuneRun(self._client.init_run(**options))
        paths = run.resource.paths
        for path, value in flat(run.config):
            run.resource.client[paths.of("config", "config/" + "/".join(path))] = _plain(value)

    def send(self, run: Run, curves: list[Curve]) -> None:
        """A call per series."""
        problems: list[Exception] = []
        for curve in curves:
            try:
                for numbers in self._shown(run, curve):
                    self._send_numbers(run, numbers)
            except _errors.LogTypeError as problem:
                problems.append(problem)
        raise_problems(problems)

    def _send_numbers(self, run: Run, curve: Curve) -> None:
        path, steps, values = run.resource.paths.of("key", curve.name), curve.steps, curve.numbers()
        finite = np.isfinite(values)
        if not finite.all():
            strange = ~finite
            texts = [str(x) for x in values[strange].tolist()]
            run.resource.client[path + NONFINITE].extend(texts, steps=steps[strange].tolist())
            steps, values = steps[finite], values[finite]
        if len(steps):
            run.resource.client[path].extend(values.astype(np.float64).tolist(), steps=steps.tolist())

    def _shown(self, run: Run, curve: Curve) -> list[Curve]:
        """Histograms and pictures become files; returns what there is in numbers."""
        if isinstance(curve.value, np.ndarray):
            return [curve]
        client, paths = run.resource.client, run.resource.paths
        if len(curve.name.encode()) > _LONGEST_NAME:
            raise _errors.LogTypeError(
                f"{self._pipeline.name} did not write {curve.name!r}: Neptune puts it in files, whose names have at "
                f"most {_LONGEST_NAME} bytes. Give it a shorter key."
            )
        if isinstance(curve.value, Histogram):
            number = next(run.resource.files)
            path = paths.of("bins", f"{self._curves.part_name(curve.name, 'bins')}/{number:06d}")
            client[path].upload(self._client.types.File.from_content(json_lines(curve), extension="jsonl"))
            return self._in_numbers(curve)
        pictures = [png(image.pixels) for _, image in curve.events()]
        if any(len(picture) > _LARGEST_PICTURE for picture in pictures):
            raise _errors.LogTypeError(
                f"{self._pipeline.name} did not write {curve.name!r}: Neptune takes pictures of up to 32 MB. "
                "Log smaller ones."
            )
        files = [self._client.types.File.from_content(picture, extension="png") for picture in pictures]
        client[paths.of("key", curve.name)].extend(files, steps=curve.steps.tolist())
        return []

    def commit(self) -> None:
        """Make the client write to disk; it sends on its own time, until the run is finished."""
        for run in list(self._pipeline.runs.values()):
            if isinstance(run.resource, _NeptuneRun):
                run.resource.client.wait(disk_only=True)

    def finish(self, run: Run) -> None:
        """Stop the run, which sends what is left if there is a server."""
        super().finish(run)
        if run.failure is not None:
            run.resource.client["sys/failed"] = True
        run.resource.client.stop()


class _NeptuneRun:
    def __init__(self, client: Any):
        self.client, self.paths = client, _Paths()
        self.files = itertools.count()  # of histograms


class _Paths:
    """Names of series: a name must not be a namespace of others too."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], str] = {}
        self._series: set[str] = set()
        # What the client writes on its own account.
        self._namespaces = {"sys", "monitoring", "source_code"}

    def of(self, kind: str, name: str) -> str:
        path = self._paths.get((kind, name))
        if path is None:
            path = self._paths[kind, name] = self._new(name)
        return path

    def _new(self, name: str) -> str:
        bad = "" if name and all(name.split("/")) else "/"
        path = escape(name, bad)
        if path.split("/")[0] in ("sys", "monitoring", "source_code") or self._series & set(_above(path)):
            bad, path = "/", escape(name, "/")
        mark = 0
        while path in self._series or path in self._namespaces:
            mark += 1
            path = escape(name, bad, mark=True) + MARK * (mark - 1)
        self._series.add(path)
        self._namespaces.update(_above(path))
        return path


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _plain(value: Any) -> Any:
    """What a field can hold; everything else as text."""
    if isinstance(value, bool | str) or (isinstance(value, int) and abs(value) <= _LARGEST_INT):
        return value
    if isinstance(value, float) and np.isfinite(value):
        return value
    return json.dumps(strict_json(value))
