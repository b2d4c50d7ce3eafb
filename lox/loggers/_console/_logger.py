"""`ConsoleLogger`: shows runs on the console while they are going on."""

from collections.abc import Mapping
from typing import Any

from lox import _errors
from lox.loggers._batch import Batch
from lox.loggers._console import _render
from lox.loggers._console._board import Board
from lox.loggers._console._screen import screen_of
from lox.loggers._logger import Logger
from lox.loggers._run import Run


class ConsoleLogger(Logger):
    """Shows a live table of all keys: last value and trend; for several runs, mean, spread and range of last values.

    >>> import jax, jax.numpy as jnp, lox
    >>> def train(x):
    ...     def step(x, i):
    ...         lox.log({"train/x": x}, step=i)
    ...         return x / 2, None
    ...
    ...     return jax.lax.scan(step, x, jnp.arange(10))[0]
    >>> with lox.loggers.ConsoleLogger(progress={"step": 10}) as logger:  # doctest: +SKIP
    ...     y = logger.tap(train, logger.init(jax.random.key(42)))(8.0)
    0:00 run 42 | step 0/10 (10%, eta 0:00) | train/x 8
    0:00 run 42 | step 9/10 (100%, done) | train/x 0.01562

    Keys are grouped by the part before their last slash. What the program prints meanwhile appears above the table.
    When the logger is closed, also by an exception or Ctrl-C, the last table stays and the terminal is restored. If the
    output goes to a file or a pipe, there is a line now and then instead, as above. Arrays and histograms are shown by
    their mean, pictures by their brightness. A run that is resumed says at which step.

    Args:
        progress: Totals of steps, such as `{"step": 10_000}`: each gets a progress bar with the time left.
        every: Seconds between lines, if the output is not a terminal.
        console: The `rich.console.Console` to draw on, instead of the standard output.
    """

    patient = False

    def __init__(self, progress: Mapping[str, float] | None = None, every: float = 10.0, console: Any = None):
        if progress is not None and not isinstance(progress, Mapping):
            raise _errors.OptionError(
                f"`progress` is {progress!r}; it must be a dict of steps and their totals, such as {{'step': 10_000}}."
            )
        for name, total in (progress or {}).items():
            if not isinstance(total, int | float) or isinstance(total, bool) or not total > 0:
                raise _errors.OptionError(
                    f"`progress[{name!r}]` is {total!r}; it must be the total, a positive number."
                )
        self.every = every
        self._totals = dict(progress or {})
        self._console = console
        self._board: Board | None = None

    def picture(self, width: int, height: int) -> Any:
        """Return the table, for `rich` to print."""
        assert self._board is not None
        return _render.table(self._board.view(), width, height)

    def line(self) -> str:
        """Return the same in one line."""
        assert self._board is not None
        return _render.line(self._board.view())

    def open(self, run: Run) -> None:
        """Show a run."""
        if self._board is None:
            self._board = Board(self._totals)
        self._board.add_run(run)
        screen_of(self._console).show(self)

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Show events of several runs."""
        assert self._board is not None
        self._board.update(runs, batch.run_first())
        screen_of(self._console).changed(self)

    def finish(self, run: Run) -> None:
        """Stop, and leave the last state on the screen."""
        del run
        screen_of(self._console).remove(self)
