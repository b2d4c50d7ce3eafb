"""The host half of a logger: its runs, the queue of their events, and its errors.

Everything here is called outside of JAX: in callbacks, on the writer's thread, or while the user waits.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _sites
from lox._data._bundle import Bundle
from lox._data._logdict import logdict, warn_of_dropped
from lox._engine._emit import END, Content, Packet, SplitPacket, packet_of
from lox._transforms._deliver import Connection, PacketDelivery, connect
from lox.loggers import _shards
from lox.loggers._batch import Batch, Job, Rename, batches, logs_of
from lox.loggers._errors import ErrorLog, raise_all
from lox.loggers._queue import Writer
from lox.loggers._run import ConfigTree, Run
from lox.store import names
from lox.store._prng_keys import words_only
from lox.store._structure import EVENT_NUMBER

if TYPE_CHECKING:
    from lox.loggers._logger import Logger

_numbers = itertools.count()  # of runs, unique in this process across loggers
_FIRST_ALONE = 1 << 30  # the numbers of runs that only one process of several has begun
_MOST_ALONE = 1 << 18  # in each process
_alone = itertools.count()


def _number_alone() -> int:
    """Number a run that only this process has begun: no other process has the same number for another one."""
    number = next(_alone)
    if number >= _MOST_ALONE:
        raise _errors.LoxError(
            f"one process has begun {_MOST_ALONE} runs inside of programs of several processes, which is the most. "
            "Begin them outside of `jit`."
        )
    return _FIRST_ALONE + _compat.this_process().number * _MOST_ALONE + number


class Pipeline:
    """Takes events to the host methods of its logger."""

    def __init__(self, logger: "Logger", opens_lanes: bool = False, name: str | None = None):
        self.logger = logger
        self.name = name or type(logger).__name__  # for messages
        self._opens_lanes = opens_lanes  # whether `open_lanes` takes all runs of an `init` at once
        self.runs: dict[int, Run] = {}
        self.broken: set[int] = set()  # runs that could not be opened
        self.ended: dict[int, str] = {}  # the names of runs that were closed before the logger, and forgotten
        self.errors = ErrorLog(self.name)
        self.closed = False
        self._lock = threading.RLock()  # held while host methods run
        self._registering = threading.Lock()
        self._writer: Writer | None = None
        self._counted: collections.Counter[int] = collections.Counter()  # events spread over processes, by call
        self.delivery = PacketDelivery(self.receive)
        self._connections: dict[Any, Connection] = {}

    # --- for programs ---

    def require_open(self, what: str) -> None:
        """Raise an error if the logger can no longer be used."""
        if self.closed:
            raise _errors.LoxError(f"`{what}`: this {self.name} is closed. Make a new one.")
        if not self.is_of_this_process:
            raise _errors.LoxError(
                f"`{what}`: this {self.name} belongs to the process that this one was forked from. Make a new one here."
            )

    @property
    def is_of_this_process(self) -> bool:
        """Whether the logger belongs to this process, not to the one it was forked from."""
        return self._writer is None or self._writer.is_of_this_process

    def connection(self) -> Connection:
        """How programs that begin now send packets here, as long as the logger exists."""
        place = _compat.is_evaluating(), jax.config.jax_default_device
        if place not in self._connections:
            self._connections[place] = connect(self.delivery)
        return self._connections[place]

    def knows(self, number: int) -> bool:
        """Whether this is a run of this logger, perhaps one that only another process has begun."""
        return number in self.runs or (number >= _FIRST_ALONE and _compat.this_process().processes > 1)

    def unknown(self, number: int) -> _errors.LoxError:
        """Return the error for a run that is not one of this logger's."""
        return _errors.LoxError(
            f"{self.name} has no run number {number}: its state was made by another logger or in another process. "
            "Call `init` of this one, and if there are several processes, outside of `jit`."
        )

    def over(self, number: int) -> _errors.LoxError:
        """Return the error for a run that was closed."""
        return _errors.LoxError(f"run {self.ended[number]!r} is closed. Begin another with `init`.")

    # --- in callbacks ---

    def begin(
        self, tree: ConfigTree, impl: str | None, template: str | None, step: str | None, packet: Packet, token: int
    ) -> Any:
        """Open a run for every lane in which it is called; return the numbers of the runs, -1 for the other lanes."""
        del token
        if self.closed or not self.is_of_this_process:  # better to fail now than to lose every event
            raise _errors.LoxError(
                f"`init`: this {self.name} is closed, but a compiled function still uses it. Compiled functions keep "
                "the logger that they were traced with: define the function again for a new logger, or pass it the "
                "state of `init` as an argument."
            )
        lanes = list(packet.by_lane())
        first = 1 if step is None else 2  # of the arrays of the config
        words = [given[0] for given in lanes if given is not None]
        configs = [tree.rebuild(given[first:]) for given in lanes if given is not None]
        run_names = names.of_runs(words, impl, configs, template) if words else []
        runs = list(map(functools.partial(self.new_run, impl), words, configs, run_names))
        if packet.of_several_processes:
            for run in runs:  # other processes were not called, or begin others
                run.id, run.alone = _number_alone(), True
        if step is not None:
            for run, given in zip(runs, filter(None, lanes), strict=True):
                run.resumed = step, given[1].item()
        self.open(runs, packet.eager)
        rest = iter(runs)
        return [[-1 if given is None else next(rest).id for given in lanes]]

    def new_run(self, impl: str | None, words: np.ndarray, config: dict[str, Any], name: str) -> Run:
        """Make a run that is not open yet."""
        return Run(next(_numbers), words, config, impl, name)

    @property
    def _is_idle(self) -> bool:
        """Whether another process of the program does all the writing."""
        return not (self.writes_all or self.logger._joins_processes)

    @property
    def writes_all(self) -> bool:
        """Whether this process writes even what all processes have."""
        return self.logger.process == "all" or _compat.this_process().number == self.logger.process

    def open(self, runs: list[Run], eager: bool) -> None:
        """Open runs. Errors reach a user who waits for it (`eager`), but never a compiled program."""
        self._register()
        if self._is_idle:
            self.add(runs)
            return
        found, missing = self._find([run for run in runs if run.resumed is not None])
        if missing and eager:
            raise next(iter(missing.values()))
        # Two attempts at once would write to the same place.
        busy = [run.id for run in list(self.runs.values()) if run.name in found]
        self._finish([number for number in busy if number not in self.broken])
        for together in [runs] if self._opens_lanes and runs else [[run] for run in runs]:
            numbers = [run.id for run in together]
            if eager:
                with self._lock:
                    self.logger.open_lanes(together)
                    self.add(together)
                continue
            self.add(together)  # even if opening fails: the program goes on and sends events
            self.broken.update(numbers)
            with self.isolated(f"opening {_run_names(together)}"):
                if error := next((missing[run.id] for run in together if run.id in missing), None):
                    raise error
                self.logger.open_lanes(together)
                self.broken.difference_update(numbers)
        # Queued events must be written before a client ends its runs at exit. It registers that when it opens its
        # first run, and atexit calls the last one registered first.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def add(self, runs: list[Run]) -> None:
        """Take note of runs of this logger."""
        self.runs.update({run.id: run for run in runs})
        _owners.update({run.id: self for run in runs})

    def _find(self, runs: list[Run]) -> tuple[set[str], dict[int, Exception]]:
        """Give runs that are resumed the names that the logger knows them by; return these, and errors about others."""
        if not runs:
            return set(), {}
        self._drain()  # what was logged to those that are still open
        wanted = [run.name for run in runs]
        with self._lock:
            try:
                there = self.logger._resumable(wanted)
            except Exception as error:  # raised by `open`, as for each of the runs
                return set(), {run.id: error for run in runs}
        if there is None:
            return set(), {}
        existing, place = [*there[0]], there[1]
        seeds = [names.of_runs([run.key], run.impl)[0] for run in runs]
        known = f"the last runs there are {_errors.listing(existing[-8:])}: give `resume` the config or the name"
        why = known if existing else "it has no such run"
        found, missing = set[str](), dict[int, Exception]()
        for run, name in zip(runs, names.to_resume(wanted, seeds, existing), strict=True):
            assert run.resumed is not None
            if name is None and run.resumed[1] <= 0:
                run.resumed = None  # a program without a checkpoint begins
            elif name is None:
                text = f"{self.name} cannot resume {run.name!r} in {place}: {why}."
                missing[run.id] = _errors.RunNotFoundError(text)
            else:
                run.name = name
                found.add(name)
        return found, missing

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

    def receive(self, packet: Packet) -> None:
        """Take a packet: events, or the end of runs."""
        self.take(Job(packet))

    def owner(self, job: Job) -> "Pipeline":
        """Return the logger whose runs these are: this one, or, if it is closed, perhaps another.

        A compiled function keeps the logger that it was traced with. If it is called with the state of another one, the
        events belong there.
        """
        if self.closed and not isinstance(job.packet, SplitPacket):
            owners = {id(p): p for n in job.ids().tolist() if n >= 0 for p in [_owners.get(n, self)]}
            if len(owners) == 1:
                return next(iter(owners.values()))
        return self

    def take(self, job: Job) -> None:
        """Queue a job, unless another process writes it."""
        packet = job.packet
        if (owner := self.owner(job)) is not self:
            owner.take(job)
        elif isinstance(packet, SplitPacket):
            self._take_parts(packet, job.rename)
        elif packet.signal is None and packet.of_several_processes and self._is_idle:
            self.errors.add(_errors.of_this_process(self.name), "taking events")
        elif packet.signal == END or self.writes_all or (packet.of_several_processes and not self._is_idle):
            self.enqueue(job)

    def _take_parts(self, packet: SplitPacket, rename: Rename | None) -> None:
        """Queue what this process has of arrays that are spread over several, while the caller waits."""
        if self._is_idle:
            return
        if not self.logger._joins_processes or self.logger.process == "all":
            self.errors.add(packet.error(), "taking events")
            if (whole := packet.whole()) is not None:
                self.take(Job(whole, rename))
            return
        content = packet.split()
        assert content.route is not None and isinstance(self.logger.process, int)
        # Counted first, whatever goes wrong here: every process counts the events of all, so that the parts of one
        # event have the same number everywhere.
        site = _sites.call_site()
        call = zlib.crc32(repr([site, [bundle.keys for bundle in content.bundles]]).encode())
        first = self._counted[call]
        self._counted[call] += _shards.count(content)
        known = [ids for _, ids in _compat.own_parts(content.route.tree)]
        if any((ids >= _FIRST_ALONE).any() for ids in known):
            raise _errors.LoxError(
                f"{packet.error()}\nTheir run was begun inside of `jit`, and is known to one process only: call `init` "
                "outside of it."
            )
        try:
            whole, cells = _shards.cells(content, self.logger.process)
        except _errors.LogTypeError as error:  # perhaps here only: others would wait for a process that ends
            self.errors.add(error, f"taking events at {site}")
            return
        if whole:
            self.take(Job(packet_of(Content(whole, content.route.map(_compat.own_copy), {})), rename))
        for cell in cells:
            self.enqueue(Job(packet_of(_shards.numbered(cell, first, call, EVENT_NUMBER)), rename))

    def enqueue(self, job: Job) -> None:
        """Queue a job for the writer's thread, which does the rest: the program waits for this method."""
        if self.closed or not self.is_of_this_process:
            self.errors.add(_errors.LoxError("events came after the logger was closed: they are lost"), "taking events")
            if self.is_of_this_process:  # the error is raised when Python exits, if nobody closes the logger again
                _open_pipelines[id(self)] = self
            return
        self._register().put(job, job.size)

    # --- on the writer's thread ---

    @contextlib.contextmanager
    def isolated(self, doing: str, quietly: bool = False) -> Iterator[None]:
        """Call host methods one at a time, and keep their errors from going any further."""
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
        except BaseException as error:  # no event may get lost silently, not even by a bug in lox
            self.errors.add(error, f"handling {len(jobs)} batches of events")

    def _pause(self) -> float | None:
        if not self.closed:
            with self.isolated("writing what was held back"):
                return self.logger.pause()
        return None

    def _sort_and_write(self, jobs: list[Job]) -> None:
        for ends, group in itertools.groupby(jobs, key=lambda job: job.packet.signal == END):
            if ends:
                self._finish([number for job in group for number in job.ids().tolist()])
            else:
                self._write_all(list(group))

    def _finish(self, numbers: list[int]) -> None:
        for number in dict.fromkeys(numbers):
            if number in self.broken or number in self.ended or number < 0:  # -1 in lanes that did not reach `init`
                continue
            if number not in self.runs:
                if not self.knows(number):
                    self.errors.add(self.unknown(number), "closing a run")
            else:
                run = self.forget(number)
                if not self._is_idle:
                    with self.isolated(f"finishing run {run.name!r}"):
                        self.logger.finish(run)

    def forget(self, number: int) -> Run:
        """Keep only the name of a run that ends, for messages: a tracker's client may hold much for each run."""
        self.ended[number] = self.runs[number].name  # first, as other threads look it up
        _owners.pop(number, None)
        return self.runs.pop(number)

    def _write_all(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.packet.unpacker.may_drop:
                warn_of_dropped({k: x.tree for k, x in job.packet.content().dropped.items()}, self.errors.warn)
        for make in batches(jobs):
            with self.isolated("sorting events"):
                self._take(make())

    def _take(self, batch: Batch) -> None:
        usable = np.asarray([self.is_usable(number) for number in batch.ids.tolist()], bool)
        if not usable.all():
            batch = batch.select(usable)
        for part in batch.by_run() if len(batch.ids) else ():
            runs = [self.runs[number] for number in part.ids.tolist()]
            with self.isolated(f"writing {_errors.listing(key for b in part.bundles for key in b.keys)}"):
                self._write(runs, part)

    def _write(self, runs: list[Run], batch: Batch) -> None:
        """Write events by what the most derived class implements: a subclass of any logger may want to see the logs."""
        logger = self.logger
        owners = [vars(logger), *map(vars, type(logger).__mro__)]
        names = ("_write_batch", "write_lanes", "write")
        batches, lanes, one = (next(n for n, owner in enumerate(owners) if name in owner) for name in names)
        if lanes < batches:
            logger.write_lanes(runs, self._logs(batch.run_first(), outer=1))
        elif one < batches:
            self.write_logs(runs, batch)
        else:
            logger._write_batch(runs, batch)

    def write_logs(self, runs: list[Run], batch: Batch) -> None:
        """Write each run by the logger's `write`."""
        self.write_each(runs, batch, lambda run, bundles: self.logger.write(run, self._logs(bundles)))

    def write_each(self, runs: list[Run], batch: Batch, write: Callable[[Run, list[Bundle]], None]) -> None:
        """Write each run by itself: one that fails does not stop the others."""
        for index, run in enumerate(runs):
            if bundles := batch.run(index):
                keys = _errors.listing(key for bundle in bundles for key in bundle.keys)
                with self.isolated(f"writing {keys} of run {run.name!r}"):
                    write(run, bundles)

    def _logs(self, bundles: list[Bundle], outer: int = 0) -> logdict:
        return logs_of(bundles if self.logger._keeps_prng_keys else map(words_only, bundles), outer)

    def is_usable(self, number: int) -> bool:
        """Whether events of a run can be written; if not, note why."""
        if number in self.ended:
            self.errors.add(self.over(number), "writing")
        elif number not in self.runs:
            self.errors.add(self.unknown(number), "writing")
        elif number in self.broken:
            name = self.runs[number].name
            error = _errors.LoxError(f"run {name!r} could not be opened, so its events are not written")
            self.errors.add(error, f"writing to run {name!r}")
        else:
            return True
        return False

    # --- at the end ---

    def catch_up(self) -> None:
        """Wait until every event has reached the host methods; keep errors for `settle`."""
        if self.is_of_this_process and not self.closed:
            for error in effects():
                self.errors.add(error, "waiting for computations")
            self._drain()

    def settle(self) -> list[Exception]:
        """Wait until everything is written; return the errors."""
        return [*self._commit(), *self.errors.take()]

    def _commit(self) -> list[Exception]:
        errors = effects() if self.is_of_this_process else []  # JAX does not survive a fork
        self._drain()
        if not self.closed and self.is_of_this_process:
            with self.isolated("committing", quietly=True):
                self.logger.commit()
        return errors

    def shut(self, failure: BaseException | None = None) -> list[Exception]:
        """End all runs and return the errors. `failure` is the exception that ended the program, if any."""
        _open_pipelines.pop(id(self), None)
        if self.closed:
            return self.errors.take()  # about events that came too late
        errors = self._commit()
        self.closed = True
        if self.is_of_this_process:
            self._drain()  # events that other threads have sent meanwhile
            if self._writer is not None:
                self._writer.stop()
            open_runs = [run for run in self.runs.values() if run.id not in self.broken]
            for run in [] if self._is_idle else open_runs:
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
    """Wait for the callbacks of the computations under way; return their error, if any."""
    try:
        jax.effects_barrier()
    except Exception as error:  # of a computation, not of the logger, which must still be closed
        return [error]
    return []


_open_pipelines: dict[int, Pipeline] = {}
_owners: Any = weakref.WeakValueDictionary()  # the pipeline of each run that has not ended, by its number


def _close_all() -> None:
    """Close the loggers that the user forgot to close: their events and errors must not get lost."""
    errors = [error for pipeline in list(_open_pipelines.values()) for error in pipeline.shut()]
    raise_all("lox, closing the loggers that were still open,", errors)
