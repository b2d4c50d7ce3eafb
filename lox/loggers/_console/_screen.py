"""The terminal, shared by everything in lox that draws on it.

Each console has one live display with all parts one below the other; `rich` puts what the program prints above it. In a
notebook, it is an output of the cell that is updated in place (`_notebook.py`). Without either, or if the program has a
live display of its own, parts print plain lines at a slow rate instead. Drawing happens on a thread of its own or where
an event is handled, never in JAX.
"""

import atexit
import math
import threading
import time
from typing import Any, Protocol

from lox.loggers._console._notebook import Notebook

_PER_SECOND = 8


class Part(Protocol):
    """Something to show on a screen."""

    every: float  # seconds between plain lines
    patient: bool  # whether the first line can wait that long too

    def picture(self, width: int, height: int) -> Any:
        """Return something that `rich` can print, for a terminal."""
        ...

    def line(self) -> str:
        """Return a line, for a file or a pipe."""
        ...


class Screen:
    """Shows parts on one console."""

    def __init__(self, console: Any):
        self._console = console
        self._lock = threading.RLock()
        self._parts: list[Part] = []
        self._printed: dict[int, tuple[float, str]] = {}  # by part, when and what
        self._live: Any = None

    def show(self, part: Part) -> None:
        """Show a part from now on."""
        with self._lock:
            if part not in self._parts:
                self._parts.append(part)
                self._printed[id(part)] = (time.monotonic() if part.patient else -math.inf, "")
                self._start()

    def announce(self, part: Part) -> None:
        """Show a part that has nothing to say yet; its next line need not wait."""
        with self._lock:
            self.show(part)
            if self._live is not None:
                self._live.refresh()
            else:
                self._print_line(part)
                self._printed[id(part)] = -math.inf, self._printed[id(part)][1]

    def changed(self, part: Part) -> None:
        """Print a line for a part with something new, if one is due; a live display refreshes itself."""
        with self._lock:
            waiting = self._live is None and part in self._parts
            if waiting and time.monotonic() - self._printed[id(part)][0] >= part.every:
                self._print_line(part)

    def remove(self, part: Part, keep: bool = True) -> None:
        """Stop showing a part; with `keep`, its last state stays on the screen."""
        with self._lock:
            if part not in self._parts:
                return
            self._parts.remove(part)
            if isinstance(self._live, Notebook):
                self._live.remove(part, keep)
                if not self._parts:
                    self._stop()
            elif self._live is not None:
                self._stop()
                if keep:
                    self._console.print(part.picture(self._console.size.width, 10_000))
                self._start()
            elif keep:
                self._print_line(part)
            self._printed.pop(id(part), None)

    def restore(self) -> None:
        """Leave the terminal as it was, when Python exits: the display would take its cursor along."""
        with self._lock:
            if not isinstance(self._live, Notebook):
                self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _print_line(self, part: Part) -> None:
        text = part.line()
        if text != self._printed[id(part)][1]:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
        self._printed[id(part)] = time.monotonic(), text

    def _start(self) -> None:
        console = self._console
        if self._live is not None or not self._parts:
            return
        if console.is_jupyter:
            self._live = Notebook(self._console, self._pictures)
            self._live.start()
        elif console.is_terminal and not console.is_dumb_terminal:
            self._start_terminal()

    def _start_terminal(self) -> None:
        from rich.console import Group
        from rich.errors import LiveError
        from rich.live import Live

        live = Live(
            console=self._console,
            get_renderable=lambda: Group(*self._pictures(self._console.size.height)),
            refresh_per_second=_PER_SECOND,
            transient=True,
            vertical_overflow="crop",
        )
        try:
            live.start()
        except LiveError:  # the program has a live display of its own: print lines above it
            return
        self._live = live

    def _pictures(self, height: int) -> list[Any]:
        # Without the lock, which is held by whoever stops the display and waits for this thread.
        parts = list(self._parts)
        return [part.picture(self._console.size.width, height // max(len(parts), 1)) for part in parts]


_screens: dict[int, tuple[Any, Screen]] = {}
_lock = threading.Lock()


def screen_of(console: Any = None) -> Screen:
    """Return the screen of a console, by default the one that `rich` prints to."""
    if console is None:
        import rich

        console = rich.get_console()
    with _lock:
        if id(console) not in _screens:
            _screens[id(console)] = (console, Screen(console))
        return _screens[id(console)][1]


@atexit.register
def _restore() -> None:
    # Loggers that are still open are closed before, because they are registered later.
    for _, screen in list(_screens.values()):
        screen.restore()
