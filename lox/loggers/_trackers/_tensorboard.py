"""`TensorBoardLogger`: event files for TensorBoard, without TensorBoard."""

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox._engine import _emit
from lox._engine._emit import Packet
from lox._engine._primitive import as_step
from lox.loggers._files._plain import OpenFiles, create_for, folder
from lox.loggers._files._rows import strict_json
from lox.loggers._run import LoggerState, Run
from lox.loggers._trackers import _tfevents
from lox.loggers._trackers._curves import Curve, CurveLogger
from lox.loggers._trackers._series import MOST_ELEMENTS
from lox.store.names import Taken

_files = itertools.count()
_PREFIX = "events.out.tfevents."


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

    An event in TensorBoard has one step, an integer. It is the step called `step`, or else the event's first step, or
    else one more than the last. Other steps of an event are written as scalars of their own.

    `resume` adds a file to the folder of the run, which makes TensorBoard hide all events from that step on in the
    files before. That is TensorBoard's step, so `resume` must get the one that this logger uses. Events without a step
    are counted from there on. The config that `resume` got is a text at that step. TensorBoard's data server, which is
    there for large folders, hides events of a curve only when the curve goes on.

    Writing needs no other package: the files are encoded here, hundreds of times faster than by TensorBoard's own
    writer. To look at them, `pip install 'lox-jax[tensorboard]'`.

    Args:
        path: The folder of all runs; it is created with the first one.
        step: The name of the step to use as TensorBoard's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become scalars.
    """

    reserved_names = ("config",)  # a text; TensorBoard shows one kind of thing per name

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: str = "step",
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
    ):
        super().__init__(step, arrays, max_elements)
        self.path = folder(path)
        self._names = Taken()
        self._open_files = OpenFiles()

    def log_text(self, state: LoggerState, key: str, text: str, step: Any = 0) -> None:
        """Write a text, which TensorBoard shows as Markdown. Works under `jit` and `vmap` too.

        Args:
            state: The run.
            key: The name of the text.
            text: The text, which is known while tracing, like all strings.
            step: The step, a number.
        """
        if not isinstance(key, str) or not isinstance(text, str):
            raise _errors.LogTypeError(f"`log_text` got {key!r} and {text!r}: both must be strings.")
        run = self._run_of(state, "log_text")

        def write(packet: Packet, token: int) -> None:
            del token
            for number, at in filter(None, packet.by_lane()):
                if self._pipeline.writes_all and self._pipeline.is_usable(int(number)):
                    with self._pipeline.isolated(f"writing the text {key!r}"):
                        file = self._pipeline.runs[int(number)].resource
                        self._open_files.append(file, _tfevents.text(key, int(at), text, time.time()))

        _emit.ask(write, [run, as_step("step", step)])

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str]:
        files = self.path.glob(f"*/{_PREFIX}*")
        return sorted({file.parent.name for file in files}), repr(str(self.path))

    def open(self, run: Run) -> None:
        """Create the folder; if the name is taken, 42 becomes 42.1. A run that is resumed has another file there."""
        super().open(run)
        first = 0 if run.resumed is None else self._step_of(*run.resumed)
        self.path.mkdir(parents=True, exist_ok=True)
        if run.resumed is None:
            # `mkdir` fails if the folder exists, so that two processes never share one.
            create_for(run, self._names, lambda name: (self.path / name).mkdir())
        folder, now = self.path / run.name, time.time()
        # TensorBoard reads files in the order of their names, whatever the clock says.
        stamps = [re.match(r"\d+", file.name.removeprefix(_PREFIX)) for file in folder.glob(f"{_PREFIX}*")]
        stamp = max([int(now), *(int(match[0]) + 1 for match in stamps if match)])
        run.resource = folder / f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._open_files.create(run.resource, run.name)
        self._open_files.append(run.resource, _tfevents.header(now))
        if run.resumed is not None:
            self._open_files.append(run.resource, _tfevents.session_start(first, now))
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            self._open_files.append(run.resource, _tfevents.text("config", first, f"```json\n{config}\n```", now))

    def _step_of(self, name: str, number: Any) -> int:
        """Return the step of TensorBoard's from which on events are computed again."""
        if name != self._curves.step:
            raise _errors.OptionError(
                f"TensorBoardLogger cannot resume at {name}={number}: TensorBoard knows only the step "
                f"{self._curves.step!r}, and hides what is computed again by it. Give `resume` that step, or make the "
                f"logger with `step={name!r}` from the start."
            )
        return int(number)

    def send_lanes(self, runs: list[Run], curves: list[Curve]) -> None:
        """Encode the events of all runs at once."""
        wall, chunks = time.time(), [[] for _ in runs]
        for curve in curves:
            if curve.valid is None and isinstance(curve.value, np.ndarray):
                # All runs have the same number of events, so one array of bytes does for all.
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
                    self._open_files.append(run.resource, b"".join(chunk))

    def commit(self) -> None:
        """Ask the system to put everything on disk, and make sure that it is there."""
        self._open_files.commit()

    def finish(self, run: Run) -> None:
        """Close the file."""
        super().finish(run)
        self._open_files.finish(run.resource)


def _encoded(curve: Curve, wall: float) -> list[bytes]:
    if not len(curve.steps):
        return []
    if isinstance(curve.value, np.ndarray):
        return [_tfevents.scalars(curve.name, curve.steps, curve.value, wall).tobytes()]
    encode = _tfevents.histogram if isinstance(curve.value, Histogram) else _tfevents.image
    return [encode(curve.name, step, value, wall) for step, value in curve.events()]
