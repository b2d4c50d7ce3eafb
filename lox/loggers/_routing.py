"""`tap` for loggers: every event leaves with the number of its run.

The number is an array in the state of the handler. Under `vmap` it has the lanes of the logger's state, so one host
call brings the events of all lanes together with their runs. It is never part of the events that flow on to outer
transformations.
"""

import dataclasses
from typing import ClassVar

from lox._data._bundle import Bundle
from lox._data._lanes import Laned
from lox._engine._handler import Frame
from lox._transforms._stream import Stream
from lox.store._prng_keys import as_words


@dataclasses.dataclass(frozen=True)
class RoutedStream(Stream):
    """Streams events together with the number of their run, `state["run"]`."""

    waits: ClassVar[bool] = False  # the callback only queues the event, so computations may stay asynchronous

    def route(self, frame: Frame) -> Laned:
        """The number of the run."""
        return Laned(frame.state["run"])

    def leaving(self, bundle: Bundle) -> Bundle:
        """Turn PRNG keys into their words."""
        return as_words(bundle)
