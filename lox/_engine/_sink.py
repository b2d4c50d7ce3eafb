"""The default sink, which takes the events that no transformation has claimed."""

import os
import sys
from collections.abc import Callable
from typing import Any

from lox import _errors
from lox._data import _format, _sites
from lox._data._logdict import logdict
from lox._engine._emit import Packet, SplitPacket

_CHOICES = ("console", "off")


class Config:
    """Settings of lox, at `lox.config`.

    >>> import lox
    >>> lox.config.sink = "off"  # ignore events that no spool or tap has claimed
    >>> lox.config.sink = "console"  # print them: the default
    >>> lox.config.sink = lambda logs: None  # or call your own function

    The sink is read when an event arrives, so it also applies to functions that are already compiled.
    """

    _sink: str | Callable[[logdict], Any] = "console"

    @property
    def sink(self) -> str | Callable[[logdict], Any]:
        """`"console"`, `"off"` or a function of a `logdict` of NumPy arrays."""
        return self._sink

    @sink.setter
    def sink(self, value: str | Callable[[logdict], Any]) -> None:
        if value not in _CHOICES and not callable(value):
            raise _errors.OptionError(f"`lox.config.sink` is {value!r}; choose 'console', 'off' or a function.")
        self._sink = value

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in dir(type(self)):
            raise _errors.OptionError(f"`lox.config` has no setting {name!r}; it has 'sink'.")
        super().__setattr__(name, value)


config = Config()
if os.environ.get("LOX_SINK"):
    config.sink = os.environ["LOX_SINK"]


def is_compiled_out() -> bool:
    """Whether the environment asks to leave calls to the default sink out of compiled programs."""
    return os.environ.get("LOX_SINK") == "off"


def deliver(packet: Packet, token: int = 0) -> None:
    """Send one event of NumPy values to the sink."""
    sink = config.sink
    if isinstance(packet, SplitPacket) and sink != "off":
        # Not an error: a library's log would break the programs of its users.
        _sites.warn(f"{packet.error()}\nUntil then it is left out of what is printed.")
        if (whole := packet.whole()) is not None:
            deliver(whole, token)
        return
    if callable(sink):
        sink(packet.logs())
    elif sink == "console":
        show(packet.logs())


def show(logs: logdict) -> None:
    """Print one event: `{'loss': 0.5} step=3`."""
    # Keys may have letters that the output cannot encode, which is no reason to end the program.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(_format.with_steps(logs).encode(encoding, "backslashreplace").decode(encoding))
