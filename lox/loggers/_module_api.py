"""Runs that programs begin and end one by one, for modules like `lox.wandb`.

One logger, made at the first use, serves all runs of the process. Each run brings its own options next to its config.
A run may end while others go on, once its last event is written.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lox import _compat, _errors
from lox._engine._emit import END
from lox.loggers._logger import Logger, send
from lox.loggers._pipeline import Pipeline
from lox.loggers._run import LoggerState, Run, check_config

CONFIG, OPTIONS = "config", "options"


class SingleRunsPipeline(Pipeline):
    """A pipeline that can end single runs."""

    def __init__(self, logger: Logger, name: str):
        super().__init__(logger, name=name)
        self._ended: dict[int, str] = {}

    def unknown(self, number: int) -> _errors.LoxError:
        """Return the error for a run that is not one of this logger's, or no longer is."""
        if number in self._ended:
            return _errors.LoxError(f"run {self._ended[number]!r} is finished: `init` begins a new one.")
        return super().unknown(number)

    def _finish(self, numbers: list[int]) -> None:
        for number in numbers:
            if number < 0:  # of a lane that did not reach `init`
                continue
            run = self.runs.pop(number, None)
            if run is None:
                self.errors.add(self.unknown(number), "finishing a run")
                continue
            self._ended[number] = run.name
            if number not in self.broken:
                with self.isolated(f"finishing run {run.name!r}"):
                    self.logger.finish(run)


class SingleRunsLogger(Logger):
    """To be mixed into a tracker's logger, to make one for all runs, each with its own options."""

    module: ClassVar[str]  # its name, for messages

    def _make_pipeline(self) -> Pipeline:
        return SingleRunsPipeline(self, self.module)

    def _options_of(self, run: Run) -> dict[str, Any]:
        """Return the options given to `init`, and leave the run its config."""
        options = {name: box.value for name, box in run.config[OPTIONS].items()}
        run.config = run.config[CONFIG]
        return options


class SingleRuns:
    """The functions of such a module.

    Args:
        make: Makes the logger, at the first use.
    """

    def __init__(self, make: Callable[[], Logger]):
        self._make = make
        self._logger: Logger | None = None
        self._making = threading.Lock()

    def logger(self) -> Logger:
        """Return the logger of all runs; make one if there is none, or if it is closed or another process's."""
        with self._making:
            logger = self._logger
            if logger is None or logger._pipeline.closed or not logger._pipeline.is_of_this_process:
                self._logger = logger = self._make()
            return logger

    def init(self, key: Any, options: Mapping[str, Any], config: Mapping[str, Any] | None) -> LoggerState:
        """Begin a run."""
        check_config(config)
        boxed = {name: Box(value) for name, value in options.items()}
        return self.logger().init(key, config={CONFIG: dict(config or {}), OPTIONS: boxed})

    def log(self, run: LoggerState, logs: Mapping[str, Any], prefix: str = "", **steps: Any) -> None:
        """Log values, or logs that `lox.spool` returned.

        Args:
            run: What `init` returned.
            logs: A dict of values, which is one event, or a `logdict`.
            prefix: Put in front of every key.
            **steps: Steps of these events: one number for all, or one for each event.
        """
        self.logger().log(run, logs, prefix, **steps)

    def flush(self) -> None:
        """Wait until everything is handed to the tracker's client, and raise its errors."""
        self.logger().flush()

    def finish(self, run: LoggerState) -> None:
        """End a run, once everything logged before is written. Runs that are still open end when Python exits.

        Outside of `jit`, this waits until that is done and raises its errors.

        Args:
            run: What `init` returned.
        """
        logger = self.logger()
        send(logger._pipeline.delivery, logger._run_of(run, "finish"), [], signal=END)
        if _compat.is_evaluating():
            logger.flush()


class Box:
    """An option of a client, which JAX takes as one leaf even if it is a pytree of arrays."""

    def __init__(self, value: Any):
        self.value = value
