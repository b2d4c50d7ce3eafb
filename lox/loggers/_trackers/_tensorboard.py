"""`TensorBoardLogger`: event files for TensorBoard, without TensorBoard."""

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lox import _errors
from lox._data._histogram import Histogram
from lox._engine import _emit
from lox._engine._emit import Packet
from lox._engine._primitive import as_step
from lox.loggers._batch import Batch
from lox.loggers._files._plain import OpenFiles, create_for, folder
from lox.loggers._files._rows import strict_json
from lox.loggers._run import LoggerState, Run
from lox.loggers._trackers import _bands, _hparams, _tfevents
from lox.loggers._trackers._curves import Curve, CurveLogger
from lox.loggers._trackers._series import MOST_ELEMENTS, raise_problems
from lox.store.names import Taken

_files = itertools.count()
_shared = itertools.count(-1, -1)  # numbers that no run has
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

    Numbers are scalars, which TensorBoard keeps in single precision; `lox.Histogram` and `lox.Image` are shown as such.
    Arrays of up to 64 elements are as many scalars, `xs/0`, `xs/1`, pytrees one per leaf, `stats/mean`. An existing
    folder is left alone: the run is then called `42.1`.

    The config of a run is a text, and its hyper-parameters in the HParams tab, beside the last values of its scalars:
    numbers, strings and booleans as such, `optimizer.lr` for a dict inside, and anything else as text. There, a run has
    succeeded, or failed if an exception has left the `with` block; one that is running or was killed is neither.

    An event in TensorBoard has one step, an integer. It is the step called `step`, or else the event's first step, or
    else one more than the last. Other steps of an event are written as scalars of their own.

    `resume` adds a file to the folder of the run, which makes TensorBoard hide all events from that step on in the
    files before. That is TensorBoard's step, so `resume` must get the one that this logger uses. Events without a step
    are counted from there on. The config that `resume` got is a text at that step, and the HParams tab has the newest
    values, which a TensorBoard that is running already shows when it is started again. TensorBoard's data server, which
    is there for large folders, hides events of a curve only when the curve goes on.

    With `aggregate`, there is one folder for all runs, `all`. The tab "Custom Scalars" then shows the means with a band
    around them. Its config has the names of the runs, what they have in common, and lists of what differs. `resume`
    begins another such folder, `all.1`, whose config says what it `resumes`.

    Writing needs no other package: the files are encoded here, hundreds of times faster than by TensorBoard's own
    writer. To look at them, `pip install 'lox-jax[tensorboard]'`.

    Args:
        path: The folder of all runs; it is created with the first one.
        step: The name of the step to use as TensorBoard's.
        arrays: How to show plain arrays: as "elements" or as a "histogram".
        max_elements: The size of the largest array whose elements become scalars.
        aggregate: Whether to make one TensorBoard run for all runs. Of events that the lanes of a `vmap` log together,
            it has the mean over lanes under their name, the standard deviation as `.../std`, and the 95% confidence
            interval of the mean as `.../ci95_low` and `.../ci95_high`.
    """

    # A text, and what the tabs read; TensorBoard shows one kind of thing per name.
    reserved_names = ("config", _tfevents.CHARTS, *_hparams.TAGS)

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: str = "step",
        arrays: str = "elements",
        max_elements: int = MOST_ELEMENTS,
        aggregate: bool = False,
    ):
        super().__init__(step, arrays, max_elements)
        self.path, self.aggregate = folder(path), aggregate
        self._names = Taken()
        self._open_files = OpenFiles()
        self._sessions: set[int] = set()  # runs that the HParams tab shows
        self._shared: _Shared | None = None

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
            lanes = [(int(number), int(at)) for number, at in filter(None, packet.by_lane())]
            written = set()  # lanes that share a folder have one text
            for number, at in lanes if self._pipeline.writes_all else ():
                if self._pipeline.is_usable(number):
                    with self._pipeline.isolated(f"writing the text {key!r}"):
                        run = self._target(self._pipeline.runs[number])
                        if (run.id, at) not in written:
                            self._open_files.append(run.resource, _tfevents.text(key, at, text, time.time()))
                        written.add((run.id, at))

        _emit.ask(write, [run, as_step("step", step)])

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str] | None:
        if self.aggregate:
            return None  # means over the lanes of then and of now are not of one kind: another folder begins
        files = self.path.glob(f"*/{_PREFIX}*")
        return sorted({file.parent.name for file in files}), repr(str(self.path))

    def open(self, run: Run) -> None:
        """Create the folder; if the name is taken, 42 becomes 42.1. A run that is resumed has another file there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.aggregate:
            return self._join(run)
        super().open(run)
        first = None if run.resumed is None else self._step_of(*run.resumed)
        if first is None:
            self._make_folder(run)
        self._begin_file(run, first)

    def _make_folder(self, run: Run) -> None:
        # `mkdir` fails if the folder exists, so that two processes never share one.
        create_for(run, self._names, lambda name: (self.path / name).mkdir())

    def _begin_file(self, run: Run, resumed: int | None = None, again: bool = False) -> None:
        """Begin a file, with the config. Another one of the same folder says what has changed in it."""
        folder, now = self.path / run.name, time.time()
        before = sorted(folder.glob(f"{_PREFIX}*"))
        # TensorBoard reads files in the order of their names, whatever the clock says.
        stamps = [re.match(r"\d+", file.name.removeprefix(_PREFIX)) for file in before]
        stamp = max([int(now), *(int(match[0]) + 1 for match in stamps if match)])
        new = folder / f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        content = [_tfevents.header(now)] + ([] if resumed is None else [_tfevents.session_start(resumed, now)])
        hparams: _hparams.Values = {}
        for file in before if not again else ():  # the config that `resume` got has only what is new
            hparams |= _hparams.read(file) or {}
        if hparams := hparams | _hparams.encode(run.config):
            content.append(_hparams.start(hparams, now))
            self._sessions.add(run.id)
        if run.config:
            config = json.dumps(strict_json(run.config), indent=2)
            content.append(_tfevents.text("config", resumed or 0, f"```json\n{config}\n```", now))
        self._open_files.create(new, run.name)
        self._open_files.append(new, b"".join(content))
        run.resource = new
        for file in before:  # only now, so that at no moment there is nothing
            with self._open_files.writing(file):
                _hparams.retract(file)

    def _step_of(self, name: str, number: Any) -> int:
        """Return the step of TensorBoard's from which on events are computed again."""
        if name != self._curves.step:
            raise _errors.OptionError(
                f"TensorBoardLogger cannot resume at {name}={number}: TensorBoard knows only the step "
                f"{self._curves.step!r}, and hides what is computed again by it. Give `resume` that step, or make the "
                f"logger with `step={name!r}` from the start."
            )
        return int(number)

    def _join(self, run: Run) -> None:
        """Add a run to those that share a folder; the file waits for the configs of the others."""
        shared, config = self._shared, {**run.config}
        if shared is None:
            shared = self._shared = _Shared()
            self._make_folder(shared.run)
        if run.resumed is not None:
            step, number = run.resumed
            config["resumes"] = {"run": run.name, "at": {step: number}}
            if step == self._curves.step:
                shared.first = min(int(number), int(number) if shared.first is None else shared.first)
                self._curves.count_from(shared.run.id, shared.first)
        run.name = shared.names.take(run.name)
        shared.members.add(run.id)
        shared.configs[run.name] = strict_json(_hparams.dotted(config))

    def _target(self, run: Run) -> Run:
        """Return the run that events of this one go to, with a file."""
        if self._shared is None:
            return run
        if self._shared.run.resource is None:
            self._begin_shared_file(self._shared)
        return self._shared.run

    def _begin_shared_file(self, shared: "_Shared") -> None:
        shared.run.config, shared.known = _bands.common_config(shared.configs), len(shared.configs)
        if shared.run.resource is not None:
            self._open_files.finish(shared.run.resource)
        self._begin_file(shared.run, again=True)

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Write events of all runs, or their statistics."""
        if self._shared is None:
            return super()._write_batch(runs, batch)
        target = self._target(runs[0])
        curves, problems = self._curves.of_all(target.id, batch.run_first())
        self.send_lanes([target], curves)
        self._show_bands(self._shared, curves)
        raise_problems(problems)

    def _show_bands(self, shared: "_Shared", curves: list[Curve]) -> None:
        """Tell TensorBoard about bands that it has not had before."""
        there = {curve.name for curve in curves if curve.valid is None or curve.valid.any()}
        new: dict[str, tuple[str, str, str]] = {}
        for (name, part), low in self._curves.statistics.items():
            high = self._curves.statistics.get((name, "ci95_high"), "")
            if part == "ci95_low" and name not in shared.bands and {low, high} <= there:
                new[name] = name, low, high
        if new:
            shared.bands |= new
            shared.layouts += 1  # a step of its own, because only the last one counts
            charts = _tfevents.margin_charts(shared.bands.values(), shared.layouts, time.time())
            self._open_files.append(shared.run.resource, charts)

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
        """Close the file; one that runs share, with the last of them."""
        shared = self._shared
        if shared is not None:
            shared.members.discard(run.id)
            shared.failure = shared.failure or run.failure
            if shared.members:
                return
            self._shared = None
            if shared.run.resource is None or shared.known < len(shared.configs):
                self._begin_shared_file(shared)
            shared.run.failure, run = shared.failure, shared.run
        super().finish(run)
        try:
            if run.id in self._sessions:
                self._open_files.append(run.resource, _hparams.end(run.failure is not None, time.time()))
        finally:
            self._sessions.discard(run.id)
            self._open_files.finish(run.resource)


class _Shared:
    """The folder of all runs of a logger, and what is known of them."""

    def __init__(self) -> None:
        self.run = Run(next(_shared), np.zeros(2, np.uint32), {}, name="all")
        self.names = Taken()  # of the runs
        self.members: set[int] = set()  # those that are open
        self.configs: dict[str, Mapping[str, Any]] = {}
        self.known = 0  # how many of them the file has
        self.first: int | None = None  # the step at which the first of them is resumed
        self.failure: BaseException | None = None
        self.bands: dict[str, tuple[str, str, str]] = {}  # the names of each mean and its bounds
        self.layouts = 0  # how many times TensorBoard was told about them


def _encoded(curve: Curve, wall: float) -> list[bytes]:
    if not len(curve.steps):
        return []
    if isinstance(curve.value, np.ndarray):
        return [_tfevents.scalars(curve.name, curve.steps, curve.value, wall).tobytes()]
    encode = _tfevents.histogram if isinstance(curve.value, Histogram) else _tfevents.image
    return [encode(curve.name, step, value, wall) for step, value in curve.events()]
