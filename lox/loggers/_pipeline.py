"""The host half of a logger: which runs there are, the queue of their events, and what went wrong.

Everything here runs outside of JAX: in callbacks, on the writer's thread, or where the user waits.
"""

import atexit
import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lox import _errors
from lox._data import _lanes
from lox._data._lanes import Laned
from lox._data._logdict import logdict, warn_of_dropped
from lox.loggers import _batch
from lox.loggers._batch import Batch, CallJob, EndJob, Job, TapJob
from lox.loggers._errors import ErrorLog, raise_all
from lox.loggers._prng import words_only
from lox.loggers._queue import Writer
from lox.loggers._run import ConfigPlan, Run

if TYPE_CHECKING:
    from lox.loggers._logger import Logger

_numbers = itertools.count()  # of runs, in this process: no two loggers share one


class Pipeline:
    """Takes events to the host methods of its logger."""

    def __init__(self, logger: "Logger", opens_lanes: bool = False, name: str | None = None):
        self.logger = logger
        self.name = name or type(logger).__name__  # for messages
        self._opens_lanes = opens_lanes  # all runs of an `init` at once
        self.runs: dict[int, Run] = {}
        self.broken: set[int] = set()  # runs that could not be opened
        self.ended: set[int] = set()  # runs that were closed before the others
        self.errors = ErrorLog(self.name)
        self.closed = False
        self._lock = threading.RLock()  # held while host methods run
        self._registering = threading.Lock()
        self._writer: Writer | None = None
        self._targets: dict[Any, Any] = {}

    # --- for programs ---

    def require_open(self, what: str) -> None:
        """Complain if the logger cannot be used any more."""
        if self.closed:
            raise _errors.LoxError(f"`{what}`: this {self.name} is closed. Make a new one.")
        if not self.is_of_this_process:
            raise _errors.LoxError(
                f"`{what}`: this {self.name} belongs to the process that this one was forked from. Make a new one here."
            )

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process, and not the one it was forked from, uses the logger."""
        return self._writer is None or self._writer.is_of_this_process

    def unknown(self, number: int) -> _errors.LoxError:
        """For a run that is not one of this logger's."""
        return _errors.LoxError(
            f"{self.name} has no run number {number}: its state was made by another logger or in another process. "
            "Call `init` of this one."
        )

    def over(self, number: int) -> _errors.LoxError:
        """For a run that was closed."""
        return _errors.LoxError(f"run {self.runs[number].name!r} is closed. Begin another with `init`.")

    def target(self, plan: _batch.Plan) -> Any:
        """Who receives events of this form: always the same object, so that JAX's caches find it again."""
        return self._targets.setdefault(plan, functools.partial(self.receive, plan))

    # --- in callbacks ---

    def begin(
        self, plan: ConfigPlan, impl: str | None, where: Laned, operands: list[Laned], lanes: Any, eager: bool
    ) -> Any:
        """Open a run for every lane that gets here; returns their numbers, -1 for the others."""
        if self.closed or not self.is_of_this_process:  # better no result than one whose every event is lost
            raise _errors.LoxError(
                f"`init`: this {self.name} is closed, but a compiled function still uses it. JAX keeps what it has "
                "compiled with the objects that it saw then: make the function anew for a new logger, or give it the "
                "state of `init` as an argument."
            )
        (words, *arrays), numbers, runs = operands, [], []
        for index in np.ndindex(lanes):
            if not _lanes.pick(where, index):
                numbers.append(-1)
                continue
            config = plan.rebuild([_lanes.pick(x, index) for x in arrays])
            run = self.new_run(np.asarray(_lanes.pick(words, index)), config, impl)
            numbers.append(run.id)
            runs.append(run)
        self.open(runs, eager)
        return [np.asarray(numbers, np.int32)]

    def new_run(self, words: np.ndarray, config: dict[str, Any], impl: str | None) -> Run:
        """A run that nobody has opened yet."""
        return Run(next(_numbers), words, config, impl)

    def open(self, runs: list[Run], eager: bool) -> None:
        """Open runs. If the user waits for it, errors are theirs; a compiled program must not see them."""
        self._register()
        for together in [runs] if self._opens_lanes and runs else [[run] for run in runs]:
            numbers = {run.id: run for run in together}
            if eager:
                with self._lock:
                    self.logger.open_lanes(together)
                    self.runs.update(numbers)
                continue
            self.runs.update(numbers)  # even if it fails: the program is under way, its events have to go somewhere
            self.broken.update(numbers)
            with self.isolated(f"opening {_run_names(together)}"):
                self.logger.open_lanes(together)
                self.broken.difference_update(numbers)
        # A client that ends its own runs at exit has asked for that while it opened the first one. Who asks last is
        # called first, and events that are still queued then have to be written before.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def _register(self) -> Writer:
        writer = self._writer
        if writer is None:
            with self._registering:
                if self._writer is None:
                    room = self.logger.queue_size, self.logger.queue_bytes
                    self._writer = Writer(self._process, self._pause, *room, f"lox-{self.name}")
                    _open_pipelines[id(self)] = self
                writer = self._writer
        return writer

    def receive_tap(self, logs: logdict) -> None:
        """Events that `tap` delivers."""
        self.enqueue(TapJob(logs))

    def receive(self, plan: _batch.Plan, where: Laned, operands: list[Laned], lanes: Any, eager: bool) -> Any:
        """Events that `spool` collected, or that were given to `log`."""
        del lanes, eager
        if where.tree.any():
            ids, *arrays = operands
            self.enqueue(CallJob(plan, ids, where, arrays))
        return []

    def end(self, where: Laned, operands: list[Laned], lanes: Any, eager: bool) -> Any:
        """End runs once all that was queued for them is written; -1 is none."""
        del eager
        (ids,) = operands
        index = tuple(slice(None) if flag else None for flag in ids.flags)
        item = ids.tree.shape[sum(map(bool, ids.flags)) :]  # a state may be that of several runs
        numbers = np.broadcast_to(ids.tree[index], (*lanes, *item)).reshape(math.prod(lanes), -1)
        happened = np.broadcast_to(where.tree[tuple(slice(None) if f else None for f in where.flags)], lanes)
        self.enqueue(EndJob(tuple(dict.fromkeys(numbers[happened.reshape(-1)].reshape(-1).tolist()))))
        return []

    def enqueue(self, job: Job) -> None:
        """Queue events for the writer's thread, which is to sort them too: the program waits for this one."""
        if self.closed or not self.is_of_this_process:
            self.errors.add(_errors.LoxError("events came after the logger was closed: they are lost"), "taking events")
            return
        self._register().put(job, job.size)

    # --- on the writer's thread ---

    @contextlib.contextmanager
    def isolated(self, doing: str, quietly: bool = False) -> Iterator[None]:
        """Call host methods: one at a time, and what they raise goes no further."""
        try:
            with self._lock:
                yield
        except BaseException as error:  # not only Exception: a client that calls sys.exit must not end the thread
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self.errors.add(error, doing, quietly)

    def _process(self, jobs: list[Job]) -> None:
        try:
            self._sort_and_write(jobs)
        except BaseException as error:  # nothing may get lost without a word, not by a mistake of ours either
            self.errors.add(error, f"handling {len(jobs)} batches of events")

    def _pause(self) -> None:
        if not self.closed:
            with self.isolated("writing what was held back"):
                self.logger.pause()

    def _sort_and_write(self, jobs: list[Job]) -> None:
        for ends, some in itertools.groupby(jobs, key=lambda job: isinstance(job, EndJob)):
            if ends:
                self._finish([number for job in some if isinstance(job, EndJob) for number in job.numbers()])
            else:
                self._write_all(list(some))

    def _finish(self, numbers: list[int]) -> None:
        for number in dict.fromkeys(numbers):
            if number not in self.runs:
                if number >= 0:  # there are none in lanes that did not get to `init`
                    self.errors.add(self.unknown(number), "closing a run")
            elif number not in self.broken | self.ended:
                self.ended.add(number)
                run = self.runs[number]
                with self.isolated(f"finishing run {run.name!r}"):
                    self.logger.finish(run)

    def _write_all(self, jobs: list[Any]) -> None:
        batches: list[Batch] = []
        for make in _batch.sort(jobs):
            with self.isolated("sorting events"):
                made = make()
                batches += made
                for batch in made:
                    warn_of_dropped(batch.logs, self.errors.warn)
        for batch in _batch.joined(batches):
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        usable = np.asarray([self._is_usable(number) for number in batch.ids.tolist()], bool)
        if not usable.all():
            batch = batch.select(usable)
        for part in batch.by_run() if len(batch.ids) and batch.logs else ():
            self._write(part)

    def _is_usable(self, number: int) -> bool:
        if number not in self.runs:
            self.errors.add(self.unknown(number), "writing")
        elif number in self.broken:
            name = self.runs[number].name
            error = _errors.LoxError(f"run {name!r} could not be opened, so its events are not written")
            self.errors.add(error, f"writing to run {name!r}")
        elif number in self.ended:
            self.errors.add(self.over(number), "writing")
        else:
            return True
        return False

    def _write(self, batch: Batch) -> None:
        runs = [self.runs[number] for number in batch.ids.tolist()]
        logs = batch.logs if self.logger._takes_prng_keys else words_only(batch.logs)
        with self.isolated(f"writing {_errors.listing(logs)}"):
            self.logger.write_lanes(runs, logs)

    # --- at the end ---

    def catch_up(self) -> None:
        """Wait until everything is with the logger; errors are kept for `settle`."""
        if self.is_of_this_process and not self.closed:
            for error in effects():
                self.errors.add(error, "waiting for computations")
            self._drain()

    def settle(self) -> list[Exception]:
        """Wait until everything is written; returns the errors."""
        return [*self._commit(), *self.errors.take()]

    def _commit(self) -> list[Exception]:
        errors = effects() if self.is_of_this_process else []  # JAX does not survive a fork
        self._drain()
        if not self.closed and self.is_of_this_process:
            with self.isolated("committing", quietly=True):
                self.logger.commit()
        return errors

    def shut(self, failure: BaseException | None = None) -> list[Exception]:
        """End all runs; returns the errors. `failure` is what ended the program, if it failed."""
        if self.closed:
            return self.errors.take()  # of events that came too late
        errors = self._commit()
        self.closed = True
        _open_pipelines.pop(id(self), None)
        if self.is_of_this_process:
            self._drain()  # what came meanwhile, from other threads
            if self._writer is not None:
                self._writer.stop()
            for run in [run for run in self.runs.values() if run.id not in self.broken | self.ended]:
                run.failure = failure
                with self.isolated(f"finishing run {run.name!r}", quietly=True):
                    self.logger.finish(run)
        return [*errors, *self.errors.take()]

    def _drain(self) -> None:
        if self._writer is not None and self._writer.is_of_this_process:
            self._writer.drain()


def _run_names(runs: list[Run]) -> str:
    return f"run {runs[0].name!r}" if len(runs) == 1 else f"{len(runs)} runs, the first of them {runs[0].name!r},"


def effects() -> list[Exception]:
    """Wait for the callbacks of the computations under way."""
    try:
        jax.effects_barrier()
    except Exception as error:  # of a computation, which has nothing to do with the logger; it must still be closed
        return [error]
    return []


_open_pipelines: dict[int, Pipeline] = {}


def _close_all() -> None:
    """Whoever forgets to close a logger still gets its events, and its errors."""
    errors = [error for pipeline in list(_open_pipelines.values()) for error in pipeline.shut()]
    raise_all("lox, closing the loggers that were still open,", errors)
