"""`tap` and `watch` for loggers: every event leaves with the number of its run.

The number is an array in the state of the handler. Under `vmap` it has the lanes of the logger's state, so one host
call brings the events of all lanes together with their runs. It is never part of the events that flow on to outer
transformations.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from lox._data._bundle import Bundle
from lox._data._lanes import Laned
from lox._engine._emit import Content, Packet, packet_of
from lox._engine._handler import Frame
from lox._errors import NonFiniteError
from lox._record import record
from lox._transforms._report import Report
from lox._transforms._stream import Stream
from lox._transforms._watch import Watch
from lox.loggers._pipeline import Pipeline
from lox.store._prng_keys import as_words


@record
class RoutedStream(Stream):
    """Streams events together with the number of their run, `state["run"]`."""

    waits: ClassVar[bool] = False  # the callback only queues the event, so computations may stay asynchronous

    def route(self, frame: Frame) -> Laned:
        """The number of the run."""
        return Laned(frame.state["run"])

    def leaving(self, bundle: Bundle) -> Bundle:
        """Turn PRNG keys into their words."""
        return as_words(bundle)


@record
class RoutedWatch(Watch):
    """Sends what it has recorded together with the number of the run, `state["run"]`."""

    def route(self, frame: Frame) -> Laned:
        """The number of the run."""
        return Laned(frame.state["run"])

    def leaving(self, bundle: Bundle) -> Bundle:
        """Turn PRNG keys into their words."""
        return as_words(bundle)


class RoutedReport(Report):
    """Writes the recorded events to their runs before it describes the failed one to the callback."""

    def __init__(self, callback: Callable[[NonFiniteError], Any], last: int | None, pipeline: Pipeline, prefix: str):
        super().__init__(callback, last)
        self._pipeline, self._prefix = pipeline, prefix

    def record(self, packet: Packet, events: list[Bundle]) -> None:
        """Hand the events to the logger."""
        recorded = packet_of(Content([b.prefixed(self._prefix) for b in events], packet.content().route, {}))
        recorded.of_several_processes = packet.of_several_processes
        self._pipeline.receive(recorded)
