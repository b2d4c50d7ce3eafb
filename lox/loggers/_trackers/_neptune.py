"""`NeptuneLogger`: logs to Neptune."""

import itertools
import json
import os
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox._data._image import png
from lox.loggers._files._rows import strict_json
from lox.loggers._run import Run
from lox.loggers._trackers._clients import client, flat
from lox.loggers._trackers._curves import Curve, CurveLogger, json_lines
from lox.loggers._trackers._escape import MARK, NONFINITE, SURROGATES, escape, unescape
from lox.loggers._trackers._series import MOST_ELEMENTS, raise_problems
from lox.store.names import Taken

# All runs of a process would capture the same output and the same hardware.
_DEFAULTS = dict(capture_stdout=False, capture_stderr=False, capture_hardware_metrics=False, source_files=[])
_LARGEST_INT = 2**31 - 1  # of the service's integers
_LONGEST_NAME = 150
_LARGEST_PICTURE = 32 * 2**20  # in bytes; the client drops larger ones


class NeptuneLogger(CurveLogger):
    """Logs to Neptune, one run per PRNG key.

    Neptune's hosted service ended in March 2026. What remains is the client's offline mode, which writes JSON to
    `.neptune/offline`, and your own servers. So the mode is "offline" unless `mode` or the environment variable
    `NEPTUNE_MODE` is set.

    >>> import jax, lox
    >>> with lox.loggers.NeptuneLogger(project="me/ppo") as logger:
    ...     state = logger.init(jax.random.key(42), config={"lr": 0.1})
    ...     logger.log(state, {"loss": 0.5}, step=0)
    [neptune] [info ] Neptune initialized. Open in the app: offline/...

    `init`, `log`, `spool` and `tap` work under `jit` and `vmap`, with one run per lane.

    A key is a series, and each `/` in it makes a namespace. Values are double precision. Neptune's step is the step
    called `step`, or else the event's first step, or else one more than the last; other steps are series of their own.
    Arrays of up to 64 elements have one series per element, `xs/0`, `xs/1`, pytrees one per leaf, `stats/mean`.

    A `lox.Image` is a series of images. Neptune has no histograms: mean and standard deviation of a `lox.Histogram` are
    series, `NAME/mean`, and its bins are files, `NAME/bins/...`, with one line of JSON per event.

    Neptune skips NaN and infinities: they go to a series of strings with the same steps, `loss_xnonfinite_`. Names that
    Neptune cannot have are escaped, and `NeptuneLogger.key_of` returns the key: next to a series `a`, a series `a/b` is
    called `a_x2f_b`. The config given to `init` is in the namespace `config`.

    `resume` begins another run: the client can go on with one only by the identifier that a server gave it, and offline
    there is none. Its fields `resumes/run`, `resumes/step` and `resumes/number` say which run it goes on with, and the
    first step that is computed again.

    Args:
        step: The name of the step to use as Neptune's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become series.
        **kwargs: Arguments of `neptune.init_run`. Capturing output, hardware and source files is off by default.
    """

    key_of = staticmethod(unescape)  # the key that a series belongs to

    def __init__(
        self, *, step: str = "step", arrays: str = "elements", max_elements: int = MOST_ELEMENTS, **kwargs: Any
    ):
        super().__init__(step, arrays, max_elements)
        self._client = client("neptune", "neptune", self._pipeline.name)
        self._names = Taken()
        self._kwargs = kwargs

    def open(self, run: Run) -> None:
        """Begin a Neptune run."""
        super().open(run)
        given = self._options_of(run)
        before = run.name
        if run.resumed is not None:
            self._names.names.add(before)
        run.name = self._names.take(before)
        options = {**_DEFAULTS, "name": run.name, **given}
        if options.get("mode") is None and not os.environ.get("NEPTUNE_MODE"):
            options["mode"] = "offline"
        run.resource = _NeptuneRun(self._client.init_run(**options))
        if run.resumed is not None:
            resumes = dict(zip(("run", "step", "number"), (before, *run.resumed), strict=True))
            for field, value in resumes.items():
                run.resource.client[run.resource.fields.of("resumes", f"resumes/{field}")] = value
        for scope, value in flat(run.config):
            run.resource.client[run.resource.fields.of("config", "config/" + "/".join(scope))] = _plain(value)

    def _options_of(self, run: Run) -> dict[str, Any]:
        """Return the arguments of `neptune.init_run`, for a run that begins."""
        del run
        return self._kwargs

    def send(self, run: Run, curves: list[Curve]) -> None:
        """Make one call per series."""
        problems: list[Exception] = []
        for curve in curves:
            try:
                for numbers in self._shown(run, curve):
                    self._send_numbers(run, numbers)
            except _errors.LogTypeError as problem:
                problems.append(problem)
        raise_problems(problems)

    def _send_numbers(self, run: Run, curve: Curve) -> None:
        field, steps, values = run.resource.fields.of("key", curve.name), curve.steps, curve.numbers()
        finite = np.isfinite(values)
        if not finite.all():
            texts = [str(x) for x in values[~finite].tolist()]
            run.resource.client[field + NONFINITE].extend(texts, steps=steps[~finite].tolist())
            steps, values = steps[finite], values[finite]
        if len(steps):
            run.resource.client[field].extend(values.astype(np.float64).tolist(), steps=steps.tolist())

    def _shown(self, run: Run, curve: Curve) -> list[Curve]:
        """Write histograms and pictures as files; return what can be shown in numbers."""
        if isinstance(curve.value, np.ndarray):
            return [curve]
        client, fields = run.resource.client, run.resource.fields
        if len(escape(curve.name, SURROGATES).encode()) > _LONGEST_NAME:
            raise _errors.LogTypeError(
                f"{self._pipeline.name} did not write {curve.name!r}: Neptune stores it in files, whose names have at "
                f"most {_LONGEST_NAME} bytes. Give it a shorter key."
            )
        if isinstance(curve.value, Histogram):
            number = next(run.resource.files)
            field = fields.of("bins", f"{self._curves.part_name(curve.name, 'bins')}/{number:06d}")
            client[field].upload(self._client.types.File.from_content(json_lines(curve), extension="jsonl"))
            return self._in_numbers(curve)
        pictures = [png(image.pixels) for _, image in curve.events()]
        if any(len(picture) > _LARGEST_PICTURE for picture in pictures):
            raise _errors.LogTypeError(
                f"{self._pipeline.name} did not write {curve.name!r}: Neptune takes pictures of up to 32 MB. "
                "Log smaller ones."
            )
        files = [self._client.types.File.from_content(picture, extension="png") for picture in pictures]
        client[fields.of("key", curve.name)].extend(files, steps=curve.steps.tolist())
        return []

    def commit(self) -> None:
        """Make the client write to disk; it sends in the background, until the run is finished."""
        for run in list(self._pipeline.runs.values()):
            if isinstance(run.resource, _NeptuneRun):
                run.resource.client.wait(disk_only=True)

    def finish(self, run: Run) -> None:
        """Stop the run, which sends the rest if there is a server."""
        super().finish(run)
        if run.failure is not None:
            run.resource.client["sys/failed"] = True
        run.resource.client.stop()


class _NeptuneRun:
    def __init__(self, client: Any):
        self.client, self.fields = client, _Fields()
        self.files = itertools.count()  # of histograms


_RESERVED = ("sys", "monitoring", "source_code")  # namespaces that the client writes to itself


class _Fields:
    """Unique names of fields, none of which is a namespace of others."""

    def __init__(self) -> None:
        self._fields: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()
        self._namespaces = {*_RESERVED}

    def of(self, kind: str, name: str) -> str:
        if (kind, name) not in self._fields:
            self._fields[kind, name] = self._new(name)
        return self._fields[kind, name]

    def _new(self, name: str) -> str:
        bad = SURROGATES if name and all(name.split("/")) else "/" + SURROGATES
        field = escape(name, bad)
        if field.split("/")[0] in _RESERVED or self._taken & set(_namespaces(field)):
            bad = "/" + SURROGATES
            field = escape(name, bad)
        mark = 0
        while field in self._taken or field in self._namespaces:
            mark += 1
            field = escape(name, bad, mark=True) + MARK * (mark - 1)
        self._taken.add(field)
        self._namespaces.update(_namespaces(field))
        return field


def _namespaces(field: str) -> list[str]:
    parts = field.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _plain(value: Any) -> Any:
    """Convert a value that a field cannot hold to text."""
    if isinstance(value, str):
        return _errors.encodable(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= _LARGEST_INT):
        return value
    if isinstance(value, float) and np.isfinite(value):
        return value
    return json.dumps(strict_json(value))
