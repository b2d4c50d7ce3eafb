"""`SaveLogger`: saves runs, for `lox.load`."""

import datetime
import math
import os
import re
import time
from typing import Any

import numpy as np

from lox import _compat, _errors
from lox.loggers._batch import Batch
from lox.loggers._files._plain import folder, is_missing
from lox.loggers._logger import Logger
from lox.loggers._run import Run
from lox.store import _catalog, _group, _open
from lox.store._writer import MOST_WAITING, Writer

_EVERY = 0.1  # seconds that events may wait to be written together
_RETRY = 1.0  # seconds before trying again to write what the system has refused


class SaveLogger(Logger):
    """Saves runs in a directory, from which `lox.load` reads them: all values, steps and dtypes, bit by bit.

    >>> import jax, jax.numpy as jnp, lox, tempfile
    >>> def train(lr):
    ...     def step(w, i):
    ...         lox.log({"loss": (w - 3.0) ** 2}, step=i)
    ...         return w - lr * (w - 3.0), None
    ...
    ...     return jax.lax.scan(step, 0.0, jnp.arange(3))[0]
    >>> directory = tempfile.mkdtemp()
    >>> prng_keys, lrs = jax.vmap(jax.random.key)(jnp.array([7, 8])), jnp.array([0.5, 1.0])
    >>> with lox.SaveLogger(directory) as logger:
    ...     states = jax.vmap(lambda prng_key, lr: logger.init(prng_key, {"lr": lr}))(prng_keys, lrs)  # a run per lane
    ...     w = jax.jit(jax.vmap(lambda state, lr: logger.tap(train, state)(lr)))(states, lrs)
    >>> for run in lox.runs(directory):
    ...     print(run.name, run.config, lox.load(directory, run.name))
    7 lr=0.5 {'lr': 0.5} {'loss': [9.0, 2.25, 0.5625]}
    8 lr=1 {'lr': 1.0} {'loss': [9.0, 0.0, 0.0]}

    Files are only appended to. A program that is killed loses at most the last tenth of a second, and nothing that was
    flushed. Meanwhile other processes can read what is there, and write to the same directory. Events of all lanes are
    written together, after a tenth of a second or 64 KiB. `lox.load` and `lox.runs` in the same process see everything
    that was logged before. The format is that of `lox.store`: Arrow, which pyarrow, polars and DuckDB read too.

    If the disk is full, there is a warning and the program goes on. Up to 256 MB of events wait in memory until they
    can be written; if they still cannot, `flush` and `close` raise the error.

    Args:
        path: The directory; the first run creates it. Several loggers may share one.
        mode: What to do if the PRNG key already has a run there: `"new"` makes another run, `42.1`; `"append"` goes on
            with the newest; `"overwrite"` replaces it, and deletes nothing that lox did not write; `"error"` raises a
            `lox.RunExistsError`. In short, as for files: `"a"`, `"w"` and `"x"`.
        rotate: For object stores and network mounts, where every append uploads a file again: files are written once,
            when so much is collected, `"16 MB"`, or it is so old, `"10 min"`; or a tuple of both. Until then, events
            wait in memory: a program that is killed loses them, but nothing that was flushed.
    """

    _keeps_prng_keys = True
    _joins_processes = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "new",
        rotate: str | int | datetime.timedelta | tuple[str | int | datetime.timedelta, ...] | None = None,
    ):
        self.path = folder(path)
        self.mode = _catalog.check_mode(mode)
        self._options, self._every = ({}, _EVERY) if rotate is None else _rotation(rotate)
        self._writer: Writer | None = None
        self._unfinished: set[int] = set()
        self._ended: dict[str | None, list[int]] = {}  # runs that ended, by why they failed, to be noted
        self._due = 0.0  # when to hand waiting events to the system
        self._refused = False  # whether the user has been warned that the system refuses

    def open(self, run: Run) -> None:
        """Begin one run."""
        self.open_lanes([run])

    def open_lanes(self, runs: list[Run]) -> None:
        """Begin runs; the first one creates the directory."""
        if self._writer is None:
            number, processes, session = _compat.this_process()
            if self.process == "all":
                session = None  # a run for each
            self._writer = Writer(self.path, process=number, processes=processes, session=session, **self._options)
            self._writer._warn = self._pipeline.errors.warn
            # After the writer has registered itself, so that readers and the exit wait for the logger first.
            _open.register(self.path, self._pipeline.catch_up, self.close)
        words, configs = np.stack([run.key for run in runs]), [run.config or None for run in runs]
        try:
            resumed = [run.resumed for run in runs if run.resumed is not None] or None
            names = [run.name for run in runs]
            alone = runs[0].alone
            numbers = self._writer.open_runs(names, words, runs[0].impl, configs, self.mode, resumed, alone)
        finally:
            if not self._unfinished and not self._writer.run_names:
                self._close_writer()
        for run, number in zip(runs, numbers.tolist(), strict=True):
            run.resource, run.name = number, self._writer.run_names[number]
            self._unfinished.add(run.id)

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Add events of many runs, as one table."""
        assert self._writer is not None
        if self._options and not self._writer.waiting:
            self._due = time.monotonic() + self._every
        try:
            self._writer.append_bundles(np.asarray([run.resource for run in runs], np.int32), batch.bundles)
            if time.monotonic() >= self._due:
                self._hand_over()
        except _errors.StoreError as error:
            self._keep_for_later(error)

    def pause(self) -> float | None:
        """Hand waiting events to the system, so that others can read them."""
        if self._writer is None or not self._writer.waiting:
            return None
        early = self._due - time.monotonic() if self._options else 0.0
        if early > 0:
            return None if math.isinf(early) else early
        try:
            self._hand_over()
        except _errors.StoreError as error:
            self._keep_for_later(error)
            return _RETRY
        return None

    def _hand_over(self) -> None:
        assert self._writer is not None
        self._writer.flush()
        self._due, self._refused = time.monotonic() + self._every, False

    def _keep_for_later(self, error: _errors.StoreError) -> None:
        """Warn once: the writer keeps what the system refuses, so nothing is lost unless `flush` or `close` fails."""
        if error.errno is None:
            raise error  # not from the system
        self._due = time.monotonic() + _RETRY
        if not self._refused:
            self._refused = True
            self._pipeline.errors.warn(f"{self._pipeline.name}: {error}")

    def commit(self) -> None:
        """Wait until everything is on the disk, and make sure that it is still there."""
        if self._writer is not None:
            self._note_ends()
            self._writer.flush(fsync=True)
            self._refused = False
            if lost := self._lost_file():
                raise lost

    def _lost_file(self) -> _errors.StoreError | None:
        """Return the error if somebody has removed what this logger has written."""
        assert self._writer is not None
        files = [self._writer.group / _group.RUNS, *(segment.file for segment in self._writer._open_segments())]
        lost = list(filter(is_missing, files))
        return _errors.lost_file(lost[0], self._writer.run_names) if lost and self._writer.run_names else None

    def _note_ends(self) -> None:
        """Write down which runs have ended, and why."""
        assert self._writer is not None
        while self._ended:
            failure, runs = self._ended.popitem()
            self._writer.end_runs(runs, failure)

    def finish(self, run: Run) -> None:
        """End a run; the last one closes the files."""
        failure = None if run.failure is None else f"{type(run.failure).__name__}: {run.failure}"
        self._ended.setdefault(failure, []).append(run.resource)
        self._unfinished.discard(run.id)
        if not self._unfinished:
            self._close_writer()

    def _close_writer(self) -> None:
        if self._writer is None:
            return
        lost, writer = self._lost_file(), self._writer
        self._ended.pop(None, None)  # that the writer is closed says so
        try:
            self._note_ends()
        finally:
            self._writer = None
            _open.unregister(self._pipeline.catch_up)
            try:
                writer.close()
            finally:
                if lost:
                    raise lost


_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "hour": 3600, "hours": 3600, "d": 86400}


def _rotation(rotate: Any) -> tuple[dict[str, Any], float]:
    """Return the options of the writer, and the seconds that events may wait."""
    size, seconds = MOST_WAITING, math.inf
    for limit in rotate if isinstance(rotate, tuple) else (rotate,):
        match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]+)\s*", limit) if isinstance(limit, str) else None
        unit = match[2].lower() if match else ""
        if isinstance(limit, datetime.timedelta):
            seconds = limit.total_seconds()
        elif isinstance(limit, int) and not isinstance(limit, bool):
            size = limit
        elif match and unit in _BYTES:
            size = int(float(match[1]) * _BYTES[unit])
        elif match and unit in _SECONDS:
            seconds = float(match[1]) * _SECONDS[unit]
        else:
            raise _errors.OptionError(
                f'`rotate` is {rotate!r}; give it a size, "16 MB", an age, "10 min", or a tuple of both.'
            )
    if not (0 < size <= MOST_WAITING and seconds > 0):
        raise _errors.OptionError(f"`rotate` is {rotate!r}; sizes are up to {MOST_WAITING >> 20} MiB, ages positive.")
    return dict(buffer_bytes=size, write_once=True), seconds
