"""`TensorBoardLogger`: event files for TensorBoard, without TensorBoard."""

import collections
import functools
import itertools
import json
import os
import pathlib
import socket
import time
from typing import Any, BinaryIO

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox._data._lanes import Laned
from lox._engine import _host_calls
from lox._engine._primitive import as_step
from lox.loggers._files._plain import folder, put_on_disk
from lox.loggers._files._rows import strict_json
from lox.loggers._run import LoggerState, Run
from lox.loggers._trackers import _tfevents
from lox.loggers._trackers._curves import Curve, CurveLogger
from lox.loggers._trackers._entries import MOST_ELEMENTS

_MANY = 64  # files open at once: there may be more runs than the system allows open files
_files = itertools.count()


class _RunFolder:
    """The event file of one run."""

    def __init__(self, folder: pathlib.Path):
        self.file = folder / (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        )


class TensorBoardLogger(CurveLogger):
    """Writes a folder per run for TensorBoard: `tensorboard --logdir PATH`.

    >>> import jax, lox, tempfile
    >>> with lox.loggers.TensorBoardLogger(tempfile.mkdtemp()) as logger:
    ...     state = logger.init(jax.random.key(42), config={"lr": 0.1})
    ...     logger.log(state, {"loss": 0.5}, step=0)
    ...     logger.log_text(state, "notes", "*first* try")
    >>> [path.parent.name for path in logger.path.glob("*/events.out.tfevents.*")]
    ['42']

    Numbers are scalars, which TensorBoard keeps in single precision; `lox.Histogram` and `lox.Image` are shown as such;
    the config of a run is a text. Arrays of up to 64 elements are as many scalars, `xs/0`, `xs/1`, pytrees one per
    leaf, `stats/mean`. An existing folder is left alone: the run is then called `42.1`.

    An event in TensorBoard has one step, an integer. It is the one called `step`, or else the first one that the event
    has, or else the one after the last. Other steps of an event are written as scalars of their own.

    Nothing needs to be installed to write: the files are encoded here, hundreds of times faster than by TensorBoard's
    own writer. To look at them, `pip install 'lox-jax[tensorboard]'`.

    Args:
        path: The folder of all runs; it is created with the first one.
        step: The name of the step that counts.
        arrays: What becomes of plain arrays: "elements", or "histogram".
        max_elements: The size of the largest array whose elements become scalars.
    """

    reserved_names = ("config",)  # the text; in TensorBoard a name stands for one kind of thing

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: str = "step",
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
    ):
        super().__init__(step, arrays, max_elements)
        self.path = folder(path)
        self._open_files: collections.OrderedDict[pathlib.Path, BinaryIO] = collections.OrderedDict()

    def log_text(self, state: LoggerState, key: str, text: str, step: Any = 0) -> None:
        """Write a text, which TensorBoard shows as Markdown. Works under `jit` and `vmap` too.

        Args:
            state: The run.
            key: What it is called.
            text: Known when the program is traced, as all strings are.
            step: A number.
        """
        if not isinstance(key, str) or not isinstance(text, str):
            raise _errors.LogTypeError(f"`log_text` got {key!r} and {text!r}: both must be strings.")
        run = self._run_of(state, "log_text")
        _host_calls.call(functools.partial(self._receive_text, key, text), [run, as_step("step", step)])

    def _receive_text(self, key: str, text: str, where: Laned, operands: list[Laned], lanes: Any, eager: bool) -> Any:
        del eager
        numbers, steps, happened = [_host_calls.of_all_lanes(x, lanes) for x in (*operands, where)]
        for number, step in zip(numbers[happened].tolist(), steps[happened].tolist(), strict=True):
            with self._pipeline.isolated(f"writing the text {key!r}"):
                self._append(self._pipeline.runs[number], _tfevents.text(key, int(step), text, time.time()))
        return []

    def open(self, run: Run) -> None:
        """Create the folder; if the name is taken, 42 becomes 42.1."""
        name, attempt = run.name, 0
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                (self.path / run.name).mkdir()  # fails if it exists, so that two processes never share one
                break
            except FileExistsError:
                attempt += 1
                run.name = f"{name}.{attempt}"
        run.resource = _RunFolder(self.path / run.name)
        self._append(run, _tfevents.header(time.time()))
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            self._append(run, _tfevents.text("config", 0, f"```json\n{config}\n```", time.time()))

    def send_lanes(self, runs: list[Run], curves: list[Curve]) -> None:
        """Encode the events of all runs at once."""
        wall, chunks = time.time(), [[] for _ in runs]
        for curve in curves:
            if curve.valid is None and isinstance(curve.value, np.ndarray):
                # All runs have as many events: one array of bytes for all of them.
                rows = _tfevents.scalars(curve.name, curve.steps.reshape(-1), curve.value.reshape(-1), wall)
                for lane, part in enumerate(rows.reshape(len(runs), -1)):
                    chunks[lane].append(part.tobytes())
                continue
            for lane, chunk in enumerate(chunks):
                chunk += _encoded(curve.of_run(lane), wall)
        for run, chunk in zip(runs, chunks, strict=True):
            if chunk:
                names = _errors.listing([curve.name for curve in curves])
                with self._pipeline.isolated(f"writing {names} of run {run.name!r}"):
                    self._append(run, b"".join(chunk))

    def _append(self, run: Run, data: bytes) -> None:
        path = run.resource.file
        file = self._open_files.pop(path, None)
        if file is None:
            file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._open_files[path] = file
        while len(self._open_files) > _MANY:
            self._open_files.popitem(last=False)[1].close()
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def commit(self) -> None:
        """Ask the system to put everything on disk."""
        for file in self._open_files.values():
            put_on_disk(file)

    def finish(self, run: Run) -> None:
        """Close the file."""
        super().finish(run)
        file = self._open_files.pop(run.resource.file, None)
        if file is not None:
            file.close()


def _encoded(curve: Curve, wall: float) -> list[bytes]:
    if not len(curve.steps):
        return []
    if isinstance(curve.value, np.ndarray):
        return [_tfevents.scalars(curve.name, curve.steps, curve.value, wall).tobytes()]
    return [_media(curve.name, step, value, wall) for step, value in curve.events()]


def _media(name: str, step: int, value: Any, wall: float) -> bytes:
    if isinstance(value, Histogram):
        return _tfevents.histogram(name, step, value, wall)
    return _tfevents.image(name, step, value.pixels, wall)
