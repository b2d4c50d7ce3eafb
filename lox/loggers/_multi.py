"""`MultiLogger`: several loggers as one."""

import dataclasses

import numpy as np

from lox import _errors
from lox._engine._emit import END
from lox.loggers._batch import Job, Rename
from lox.loggers._logger import Logger
from lox.loggers._pipeline import Pipeline
from lox.loggers._run import Run


class MultiLogger(Logger):
    """Writes every event to several loggers, from one host call.

    >>> import jax, lox, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with lox.loggers.MultiLogger(lox.loggers.CsvLogger(folder), lox.loggers.JsonlLogger(folder)) as logger:
    ...     state = logger.init(jax.random.key(0))
    ...     logger.log(state, {"loss": 0.5})

    Each has its own queue and thread, so that a slow one does not hold up the others until its queue is full. One that
    fails, even to open a run, or because it has no such run to `resume`, does not stop the others: `flush` and `close`
    raise its errors. Closing a MultiLogger closes them all.
    """

    def __init__(self, *loggers: Logger):
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise _errors.LogTypeError(f"`MultiLogger` takes loggers, not {logger!r}.")
        self.loggers = loggers

    def _make_pipeline(self) -> Pipeline:
        return _FanOut(self)

    def _entered(self) -> None:
        for logger in self.loggers:
            logger._entered()


class _FanOut(Pipeline):
    """Hands everything on at once to the pipelines of other loggers, without a queue of its own."""

    def __init__(self, logger: Logger):
        super().__init__(logger)
        self._inside: dict[int, list[int]] = {}  # for each run, its numbers in the other loggers
        self._renames: dict[tuple[int, Rename | None], Rename] = {}

    @property
    def _others(self) -> list[Pipeline]:
        assert isinstance(self.logger, MultiLogger)
        return [logger._pipeline for logger in self.logger.loggers]

    def require_open(self, what: str) -> None:
        """Raise an error if any logger is closed, because its events would be missing."""
        super().require_open(what)
        for other in self._others:
            other.require_open(what)

    def open(self, runs: list[Run], eager: bool) -> None:
        """Open a run of each logger for every run; any of them may fail."""
        del eager
        inside = [[self._copy(run, other) for run in runs] for other in self._others]
        for other, copies in zip(self._others, inside, strict=True):
            other.open(copies, eager=False)
        for number, run in enumerate(runs):
            self._inside[run.id] = [copies[number].id for copies in inside]
        self.add(runs)

    def _copy(self, run: Run, other: Pipeline) -> Run:
        copy = other.new_run(run.impl, run.key, dict(run.config), run.name)
        copy.resumed, copy.alone = run.resumed, run.alone
        return copy

    def take(self, job: Job) -> None:
        """Hand a job to every logger."""
        if (owner := self.owner(job)) is not self:
            return owner.take(job)
        if job.packet.signal == END:
            for number in job.ids().tolist():
                if number in self.runs:
                    self.forget(number)
        for number, other in enumerate(self._others):
            other.take(dataclasses.replace(job, rename=self._renaming(number, job.rename)))

    def _renaming(self, number: int, before: Rename | None) -> Rename:
        """Map runs of this logger to those of a logger inside; always the same function, so that events are joined."""

        def rename(ids: np.ndarray) -> np.ndarray:
            found = [self._inside.get(n) for n in (ids if before is None else before(ids)).tolist()]
            return np.asarray([-1 if inside is None else inside[number] for inside in found])

        return self._renames.setdefault((number, before), rename)

    def settle(self) -> list[Exception]:
        """Settle all loggers."""
        return [error for other in self._others for error in other.settle()] + self.errors.take()

    def shut(self, failure: BaseException | None = None) -> list[Exception]:
        """Shut all loggers."""
        self.closed = True
        return [error for other in self._others for error in other.shut(failure)] + self.errors.take()
