"""`ConsoleLogger`: shows runs on the console while they are going on."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from lox import _compat, _errors
from lox.loggers._batch import Batch
from lox.loggers._console import _render
from lox.loggers._console._board import Board
from lox.loggers._console._screen import screen_of
from lox.loggers._logger import Logger
from lox.loggers._run import Run

_PATIENCE = 0.25  # seconds


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

    The display begins when the program is traced, and says that it is being compiled; a program that is only traced
    leaves nothing. Keys are grouped by the part before their last slash. What the program prints meanwhile appears
    above the table. When the logger is closed, also by an exception or Ctrl-C, the last table stays and the terminal is
    restored. In a notebook, the table is an output of the cell that is updated in place. If the output goes to a file
    or a pipe, there is a line now and then instead, as above. Arrays and histograms are shown by their mean, pictures
    by their brightness. A run that is resumed says at which step.

    Where there is little room, the trend goes first, then the range; long keys lose their beginning, and no number is
    ever cut.

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
        self._open: set[int] = set()  # runs that have not ended
        self._announced = False  # whether the display began before any run or event
        self._lock = threading.Lock()  # of the steps from no display to one, and back

    def picture(self, width: int, height: int) -> Any:
        """Return the table, for `rich` to print."""
        assert self._board is not None
        return _render.table(self._board.view(), width, height)

    def line(self) -> str:
        """Return the same in one line."""
        assert self._board is not None
        return _render.line(self._board.view())

    def _entered(self) -> None:
        """Show from the moment on that a program is traced that it is being compiled; its first event may be far."""
        board, thread = self._board, None if _compat.is_looking_for_leaks() else threading.get_ident()
        if board is not None:
            board.follow(thread)
        if _compat.is_evaluating() or self._announced or (board is not None and board.events) or thread is None:
            return
        # A tap inside of `vmap` is not evaluated either, but nothing is compiled there.
        if _compat.is_compiling(thread) and self._pipeline.writes_all:
            with self._lock:
                self._announced = True
                self._board = self._board or Board(self._totals)
                self._board.follow(thread)
                screen_of(self._console).announce(self)
                if not self._open:  # they begin with the program, which may never run
                    threading.Thread(target=self._wait_for_runs, name="lox-console", daemon=True).start()

    def _wait_for_runs(self) -> None:
        """Take the display away again if nothing is being compiled any more and no run has begun."""
        quiet = 0
        while quiet < 2:
            time.sleep(_PATIENCE)
            board = self._board
            if board is None or self._open:
                return
            quiet = 0 if board.is_compiling else quiet + 1
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            if self._announced and not self._open:
                self._end(keep=False)

    def _end(self, keep: bool) -> None:
        """End the display; the next run begins another one."""
        screen_of(self._console).remove(self, keep)
        self._board, self._announced = None, False

    def open(self, run: Run) -> None:
        """Show a run."""
        with self._lock:
            self._board = self._board or Board(self._totals)
            self._board.add_run(run)
            self._open.add(run.id)
            screen_of(self._console).show(self)

    def _write_batch(self, runs: list[Run], batch: Batch) -> None:
        """Show events of several runs."""
        assert self._board is not None
        self._board.update(runs, batch.run_first())
        screen_of(self._console).changed(self)

    def commit(self) -> None:
        """Take away what was shown of a program that has not run: all computations have ended."""
        self._give_up()

    def finish(self, run: Run) -> None:
        """Stop with the last run, and leave the last state on the screen."""
        with self._lock:
            self._open.discard(run.id)
            if not self._open:
                self._end(keep=True)
