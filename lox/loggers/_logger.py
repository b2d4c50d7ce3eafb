"""`lox.Logger`: runs, and how events get to them.

Programs call a logger's `init`, `log`, `spool` and `tap`; its host methods, such as `write`, do the writing. In
between, the events of all lanes leave the device in one call with the numbers of their runs, a callback queues them,
and one thread per logger sorts them by run and calls the host methods. What those raise never reaches the program.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data._bundle import Bundle
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox._engine import _emit
from lox._engine._emit import END, Deliver
from lox._engine._primitive import as_step
from lox._transforms import _call
from lox._transforms._call import P, R
from lox._transforms._spool import spool as _spool
from lox._transforms._tap import streaming
from lox._transforms._watch import watcher
from lox.loggers._batch import Batch
from lox.loggers._errors import raise_all
from lox.loggers._pipeline import Pipeline
from lox.loggers._routing import RoutedReport, RoutedStream, RoutedWatch
from lox.loggers._run import ConfigTree, LoggerState, Run, prng_key_words
from lox.loggers._values import as_bundles, packet_now
from lox.store import names
from lox.store._prng_keys import as_words


class Logger:
    """Base class of all loggers: one run per PRNG key, under any transformation.

    A subclass implements `write`, and may implement `open`, `finish`, `commit`, `pause`, `open_lanes` and
    `write_lanes`. These are called on the host, one at a time, and must not call JAX.

    >>> import jax, jax.numpy as jnp, lox
    >>> class PrintLogger(lox.Logger):
    ...     def write(self, run, logs):
    ...         print(run.name, logs)
    >>> def train(x):
    ...     lox.log({"x": x})
    ...     return 2 * x
    >>> with PrintLogger() as logger:
    ...     states = jax.vmap(logger.init)(jax.vmap(jax.random.key)(jnp.array([7, 8])))
    ...     y = jax.vmap(lambda state, x: logger.spool(train, state)(x))(states, jnp.arange(2.0))
    7 {'x': [0.0]}
    8 {'x': [1.0]}

    Close a logger, or use it in a `with` block: that writes what is still queued and raises what went wrong. A logger
    that is still open is closed when Python exits.

    Attributes:
        queue_size: The number of host calls whose events may wait to be written; beyond it, the program waits.
        queue_bytes: The total size of these events in bytes; beyond it, the program waits.
        process: Which process of a program with several (`jax.distributed`) writes: 0, the first, or `"all"`.
    """

    queue_size: int = 1024
    queue_bytes: int = 64 << 20
    process: int | str = 0
    _joins_processes: bool = False  # whether all processes write to one run, each what it alone has
    _keeps_prng_keys: bool = False  # in the logs it writes; other loggers get arrays of words
    _pipeline: Pipeline
    _last_run: tuple[Any, int] = None, -1  # the array that was looked at last, and its number

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the logger usable even if a subclass's `__init__` does not call this one's."""
        del args, kwargs
        self = super().__new__(cls)
        self._pipeline = self._make_pipeline()
        return self

    def _make_pipeline(self) -> Pipeline:
        return Pipeline(self, opens_lanes=type(self).open_lanes is not Logger.open_lanes)

    # --- what a subclass implements ---

    def write(self, run: Run, logs: logdict) -> None:
        """Write events of one run.

        Args:
            run: The run, with its `name`, `key`, `config` and the `resource` that `open` may have set.
            logs: The events of this run in order, with `steps`: read-only NumPy arrays, all with an event axis. If the
                program maps over something inside the run, these lanes come after the event axis, and `logs.valid`
                may say which of them had the event. PRNG keys are arrays of their words.
        """
        if type(self)._write_batch is Logger._write_batch:
            raise NotImplementedError(f"{type(self).__name__} does not implement `write`.")
        self._write_batch([run], Batch.of_run(logs))

    def write_lanes(self, runs: list[Run], logs: logdict) -> None:
        """Write events of several runs at once: every array has a lane axis, one lane per run, before the event axis.

        By default, this calls `write` for each run. `logs.valid`, of shape `(lane, event, ...)`, has the keys that not
        every lane logged.
        """
        self._write_batch(runs, Batch.of(logs))

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Write events of several runs. Loggers that have no use for a logdict implement this."""
        self._pipeline.write_logs(runs, batch)

    def open(self, run: Run) -> None:
        """Prepare for a run. Errors reach the caller of `init` or `resume`, unless that is a compiled program.

        If `run.resumed` is not None, the run goes on after a checkpoint: this is the name and the number of the first
        step that is computed again.
        """

    def open_lanes(self, runs: list[Run]) -> None:
        """Prepare for all runs that one `init` begins, one per lane. By default, this calls `open` for each."""
        for run in runs:
            self.open(run)

    def _resumable(self, wanted: list[str]) -> tuple[Iterable[str], str] | None:
        """Return the names of the runs that can be resumed, at least those like the wanted ones, and where they are.

        `resume` then gives a run the name that it has there, before `open`. None: the logger does that itself, or
        begins another run.
        """
        del wanted
        return None

    def finish(self, run: Run) -> None:
        """End a run, because it or the logger is being closed."""

    def commit(self) -> None:
        """Make everything written so far durable; the last thing that `flush` does."""

    def pause(self) -> float | None:
        """Write what `write` has held back: no event has come for a moment.

        Returns the seconds after which to call it again if no event has come until then, or None.
        """

    def _entered(self) -> None:
        """Take note that a program uses the logger: it is being traced, or runs outside of `jit`."""

    # --- for programs ---

    def init(self, key: Any, config: Mapping[str, Any] | None = None, name: str | None = None) -> LoggerState:
        """Begin a run.

        Works wherever JAX does: under `vmap` every lane is a run of its own, and so is every iteration of a loop. Using
        the same PRNG key again begins another run.

        Args:
            key: The PRNG key of the run, which identifies it.
            config: Hyper-parameters: a dict of numbers, strings, arrays and dicts. Under `vmap`, arrays may differ
                between lanes.
            name: The name of the run, a template over the config as for `str.format`: `"lr={lr:g} seed={seed}"`.
                There are `{key}`, the seed of the PRNG key, and `{lane}` too. By default, `jax.random.key(42)` is
                `42`, and lanes are told apart by their seed, or their number if they have none, and by what differs
                between their configs: `7 lr=0.1`. If a name is taken, it gets a number: `42.1`. What a file name
                cannot have, such as `/`, becomes `_`.

        Returns:
            A pytree of arrays, for `log`, `spool` and `tap`.
        """
        self._pipeline.require_open("init")
        return self._begin(*prng_key_words(key), config, name)

    def resume(
        self,
        state: Any,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        **step: Any,
    ) -> LoggerState:
        """Go on with a run after a checkpoint: `logger.resume(key, step=1000)`.

        Call `flush` before you write a checkpoint, so that the log is never behind it. Steps from this one on are
        computed again. What the run already has of them stays on disk, but is hidden: the newest computation of a step
        counts. `lox.runs` says whether it was the same, bit by bit. So it is for `SaveLogger`; other loggers do what
        their format or tracker can, which their documentation says, and end the run first if it is still open.

        Works under `vmap`, where every lane goes on with its own run, and with its own step if that differs. At step 0,
        a run that does not exist is begun: a program that has no checkpoint yet needs no `init`.

        Args:
            state: The PRNG key of the run, or the state that `init` has returned in the process before.
            config: Hyper-parameters that have changed; the others stay as they were. If several runs have the same PRNG
                key, as in a sweep over learning rates, those that tell them apart.
            name: As for `init`, if several runs have the same PRNG key, or if `init` got one: loggers other than
                `SaveLogger` find runs by their names.
            **step: The first step that is computed again, by the name that it is logged with.

        Returns:
            The state, as from `init`.

        Raises:
            RunNotFoundError: There is no such run, or there are several.
        """
        self._pipeline.require_open("resume")
        if len(step) != 1:
            raise _errors.OptionError(
                f"`resume` got {len(step)} steps: give it one, the first that is computed again: `step=1000`."
            )
        ((step_name, number),) = step.items()
        words, impl = (state.key, None) if isinstance(state, LoggerState) else prng_key_words(state)
        return self._begin(words, impl, config, name, step_name, as_step(step_name, number))

    def _begin(
        self, words: Any, impl: str | None, config: Any, name: str | None, step: str | None = None, number: Any = None
    ) -> LoggerState:
        self._entered()
        tree, arrays = ConfigTree.of(config)
        if name is not None:  # errors now, and not when the program runs
            names.render(name, tree.rebuild([np.ones(x.shape, x.dtype) for x in arrays]), "", 0)
        begin = functools.partial(self._pipeline.begin, tree, impl, name, step)
        numbers = [] if step is None else [number]
        (run,) = _emit.ask(begin, [words, *numbers, *arrays], [np.int32])
        return LoggerState(run, words)

    def log(self, state: LoggerState, logs: Mapping[str, Any], prefix: str = "", **steps: Any) -> None:
        """Write values, or logs that `lox.spool` returned.

        Args:
            state: The run.
            logs: A dict of values, which is one event, or a `logdict`.
            prefix: Put in front of every key.
            **steps: Steps of these events: one number for all, or one for each event.
        """
        prefix = _call.prefix_option(prefix)
        with _compat.own_transfers():
            number = self._number_of(state, "log")
            self._entered()
            packet = None
            if number is not None and _compat.is_evaluating():
                packet = packet_now(logs, steps, prefix, np.int32(number))
        if packet is not None:
            return _emit.deliver_now(self._pipeline.delivery, packet)
        run, bundles = self._run_of(state, "log"), as_bundles(logs, steps)
        if bundles:
            bundles = [bundle.prefixed(prefix) for bundle in bundles]
            send(self._pipeline.delivery, run, bundles, dropped=getattr(logs, "dropped", {}))

    def spool(
        self,
        fun: Callable[P, R],
        state: LoggerState,
        argnames: str | Iterable[str] | None = None,
        tags: str | Iterable[str] | None = None,
        keep_logs: bool = False,
        interval: int | None = None,
        reduce: Any = None,
        prefix: str = "",
        capacity: int | Mapping[str, int] | None = None,
        unify: bool = True,
    ) -> Callable[P, R]:
        """Collect a function's logs and write them to the run of `state` when it returns: one host call.

        The options are those of `lox.spool`. Returns a function with the signature and the result of `fun`.
        """
        run = self._run_of(state, "spool")
        options: dict[str, Any] = dict(argnames=_names(argnames), tags=_names(tags), keep_logs=keep_logs)
        options |= dict(interval=interval, reduce=reduce, prefix=prefix, capacity=capacity, unify=unify)
        _spool(fun, **options)  # raises errors about options now and not at the call
        hashable = _hashable(options)

        @_call.wraps(fun)
        def spooled(*args: P.args, **kwargs: P.kwargs) -> R:
            self._pipeline.require_open("spool")
            self._entered()
            if _compat.is_evaluating() and _compat.is_on_several_devices((args, kwargs)):
                # From here, each process takes its own parts; a host call inside of the program would gather them.
                out, logs = _spool(fun, **options)(*args, **kwargs)
                if logs:
                    send(self._pipeline.delivery, run, logs.to_bundles(), dropped=logs.dropped)
                return out
            connection = self._pipeline.connection()
            deliver = connection.deliver

            def transform(key: Any, fun: Callable[..., Any], args: Any, kwargs: Any, run: Any, given: Any) -> Any:
                del key
                out, logs = _spool(fun, **options)(*args, **kwargs)
                if logs:
                    send(deliver, run, logs.to_bundles(), dropped=logs.dropped, **given)
                return out

            call = _call.calling(fun, ("spool", deliver, hashable), transform)
            return call(args, kwargs, run, connection.given)

        return spooled

    def tap(
        self,
        fun: Callable[P, R],
        state: LoggerState,
        argnames: str | Iterable[str] | None = None,
        tags: str | Iterable[str] | None = None,
        prefix: str = "",
        interval: int | None = None,
        reduce: Any = None,
        buffer: int | None = None,
    ) -> Callable[P, R]:
        """Write a function's logs to the run of `state` while it runs.

        The options are those of `lox.tap`. Returns a function with the signature and the result of `fun`.
        """
        run = self._run_of(state, "tap")
        stream = streaming(RoutedStream, argnames, tags, prefix, interval, reduce, buffer)

        @_call.wraps(fun)
        def tapped(*args: P.args, **kwargs: P.kwargs) -> R:
            self._pipeline.require_open("tap")
            self._entered()
            return stream(fun, args, kwargs, self._pipeline.connection(), run=run)

        return tapped

    def watch(
        self,
        fun: Callable[P, R],
        state: LoggerState,
        callback: Callable[[_errors.NonFiniteError], Any] | None = None,
        argnames: str | Iterable[str] | None = None,
        tags: str | Iterable[str] | None = None,
        last: int | None = None,
        prefix: str = "",
    ) -> Callable[P, R]:
        """Stop a function at the first value that is NaN or infinite, and write what it logged before to the run.

        `error.logs` is written to the run of `state`, with `prefix` in front of every key, before the error is raised.
        The other options are those of `lox.watch`. Returns a function with the signature and the result of `fun`.
        """
        run = self._run_of(state, "watch")
        prefix = _call.prefix_option(prefix)
        watching = watcher(RoutedWatch, RoutedReport, callback, argnames, tags, last, self._pipeline, prefix)

        @_call.wraps(fun)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            self._pipeline.require_open("watch")
            self._entered()
            return watching(fun, args, kwargs, run=run)

        return watched

    # --- at the end ---

    def flush(self) -> None:
        """Wait until everything logged so far is written.

        This waits for the computations that this thread has started.

        Raises:
            Exception: What host methods have raised since the last time; several errors come as an `ExceptionGroup`.
        """
        raise_all(self._pipeline.name, self._pipeline.settle())

    def close(self, state: LoggerState | None = None) -> None:
        """Write what is queued and end all runs, or those of one state. Closing again does nothing.

        Args:
            state: The run to end, or the runs if `init` was under `vmap`; the others go on. Under `jit`, a run ends
                when the program gets here.

        Raises:
            Exception: As for `flush`.
        """
        if state is None:
            return raise_all(self._pipeline.name, self._pipeline.shut())
        self._require_state(state, "close")
        waiting = _compat.is_evaluating()
        errors = self._pipeline.settle() if waiting else []  # of computations under way, which may still log
        send(self._pipeline.delivery, jnp.asarray(state.run, jnp.int32), [], signal=END)
        raise_all(self._pipeline.name, [*errors, *(self._pipeline.settle() if waiting else [])])

    def __enter__(self) -> Self:
        self._pipeline.require_open("with")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        errors = self._pipeline.shut(error)
        if error is None:
            return raise_all(self._pipeline.name, errors)
        for late in errors:  # they must not get lost, but the error being raised comes first
            error.add_note(f"{self._pipeline.name} had an error too: {type(late).__name__}: {late}")

    # --- between program and host ---

    def _run_of(self, state: Any, what: str) -> Any:
        """Return the number of the run as an array, checked as far as possible while tracing."""
        with _compat.own_transfers():
            self._number_of(state, what)
        return jnp.asarray(state.run, jnp.int32)

    def _number_of(self, state: Any, what: str) -> int | None:
        """Return the number of the run, if it is known while tracing."""
        self._require_state(state, what)
        known, number = self._last_run
        if known is state.run:  # a loop in Python logs to the same run again and again
            return self._usable(number)
        if np.ndim(state.run):
            raise _errors.LogTypeError(
                f"`{what}` got the states of {' × '.join(map(str, np.shape(state.run)))} runs: it takes one. "
                f"For one run per lane, map over the state: `jax.vmap(lambda state, ...: logger.{what}(...))`."
            )
        if isinstance(state.run, _compat.Tracer):
            return None
        number = int(np.asarray(_compat.own_copy(state.run)))
        if _compat.is_concrete(type(state.run)):  # others may change
            self._last_run = state.run, number
        return self._usable(number)

    def _usable(self, number: int) -> int:
        if number in self._pipeline.ended:
            raise self._pipeline.over(number)
        if not self._pipeline.knows(number):
            raise self._pipeline.unknown(number)
        return number

    def _require_state(self, state: Any, what: str) -> None:
        self._pipeline.require_open(what)
        if not isinstance(state, LoggerState):
            raise _errors.LogTypeError(
                f"`{what}` got {state!r} for the logger's state: give it what `init(key)` returned."
            )


def send(
    deliver: Deliver, run: Any, bundles: Iterable[Bundle], dropped: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Send events to the pipeline of a logger."""
    # `lox.spool` has already warned about events that were dropped, if it could.
    unknown = {key: count for key, count in (dropped or {}).items() if isinstance(count, _compat.Tracer)}
    with _compat.own_transfers():
        _emit.emit(deliver, map(as_words, bundles), route=Laned(run), dropped=unknown, **options)


def _names(option: Any) -> Any:
    return tuple(option) if isinstance(option, Iterable) and not isinstance(option, str) else option


def _hashable(option: Any) -> Any:
    if isinstance(option, Mapping):
        return tuple((key, _hashable(value)) for key, value in option.items())
    return tuple(map(_hashable, option)) if isinstance(option, list | tuple) else option
