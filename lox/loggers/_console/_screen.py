"""The terminal, shared by everything in lox that draws on it.

Each console has one live display with all parts one below the other; `rich` puts what the program prints above it.
Without a terminal, or if the program has a live display of its own, parts print plain lines at a slow rate instead.
Drawing happens on `rich`'s own thread or where an event is handled, never in JAX.
"""

import math
import threading
import time
from typing import Any, Protocol

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
            live, self._live = self._live, None
            if live is not None:
                live.stop()
            self._parts.remove(part)
            if keep and live is not None:
                self._console.print(part.picture(self._console.size.width, 10_000))
            elif keep:
                self._print_line(part)
            self._printed.pop(id(part), None)
            if live is not None:
                self._start()

    def _print_line(self, part: Part) -> None:
        text = part.line()
        if text != self._printed[id(part)][1]:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
        self._printed[id(part)] = time.monotonic(), text

    def _start(self) -> None:
        console = self._console
        interactive = (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter
        if self._live is not None or not self._parts or not interactive:
            return
        from rich.errors import LiveError
        from rich.live import Live

        live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=_PER_SECOND,
            transient=True,
            vertical_overflow="crop",
        )
        try:
            live.start()
        except LiveError:  # the program has a live display of its own: print lines above it
            return
        self._live = live

    def _picture(self) -> Any:
        from rich.console import Group

        # Without the lock, which is held by whoever stops the display and waits for this thread.
        size = self._console.size
        parts = list(self._parts)
        return Group(*[part.picture(size.width, size.height // max(len(parts), 1)) for part in parts])


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
