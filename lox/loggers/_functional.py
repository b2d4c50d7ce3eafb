"""`init`, `log` and `finish` as plain functions, for the modules of trackers.

One logger stands behind all runs of a module. Each run brings its own settings, which travel with its config; it can be
ended by itself, in the program too.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from lox import _errors
from lox._lanes import Laned
from lox.loggers import _host
from lox.loggers._base import Logger
from lox.loggers._errors import raise_all
from lox.loggers._pipeline import Pipeline
from lox.loggers._run import LoggerState, Run


class SeparateRuns(Logger):
    """A logger whose runs have settings of their own and end one by one. A subclass implements `begin`."""

    def _make_pipeline(self) -> Pipeline:
        self._ending = _SeparatePipeline(self)
        return self._ending

    def begin(self, run: Run, settings: dict[str, Any]) -> None:
        """Prepare for a new run with these settings."""
        raise NotImplementedError

    def open(self, run: Run) -> None:
        """Take the settings out of the config."""
        settings, run.config = run.config["settings"], run.config["config"]
        self.begin(run, settings)

    def init_with(self, key: Any, config: Mapping[str, Any] | None, settings: dict[str, Any]) -> LoggerState:
        """Begin a run."""
        if config is not None and not isinstance(config, Mapping):
            raise _errors.LogTypeError(f"`config` is {config!r}; it must be a dict of hyper-parameters.")
        return self.init(key, {"config": config or {}, "settings": settings})

    def finish_run(self, state: LoggerState) -> None:
        """End a run when the program gets here, after its events so far are written."""
        _host.call(self._ending.end, [self._run_of(state, "finish")])


class _SeparatePipeline(Pipeline):
    def __init__(self, logger: Logger):
        super().__init__(logger)
        self._ended: dict[int, str] = {}

    def end(self, where: Laned, operands: list[Laned], lanes: Any, eager: bool) -> Any:
        """End the runs of all lanes that get here; if the user waits for it, errors so far are theirs."""
        (numbers,) = operands
        errors = []
        if eager:
            errors = self.settle()
        else:
            self._drain()  # events may still be queued; a program must not wait for JAX itself
        for index in np.ndindex(lanes):
            run = self.runs.pop(int(_of(numbers, index)), None) if _of(where, index) else None
            if run is None:
                continue
            self._ended[run.id] = run.name
            if run.id not in self.broken:
                with self.isolated(f"finishing run {run.name!r}", quietly=eager):
                    self.logger.finish(run)
        if eager:
            raise_all(self.name, errors + self.errors.take())
        return []

    def unknown(self, number: int) -> _errors.LoxError:
        """A run that has ended is not like one that never was."""
        if number not in self._ended:
            return super().unknown(number)
        return _errors.LoxError(f"run {self._ended[number]!r} is finished: `init` begins a new one.")


def _of(x: Laned, index: tuple[int, ...]) -> Any:
    return x.tree[tuple(i for i, flag in zip(index, x.flags, strict=True) if flag)]


T = TypeVar("T", bound=SeparateRuns)


class Shared(Generic[T]):
    """The logger behind a module's functions, made when it is first needed: that takes the client."""

    def __init__(self, make: Callable[[], T]):
        self._make = functools.cache(make)

    def __call__(self) -> T:
        """The logger."""
        return self._make()
