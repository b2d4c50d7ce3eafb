"""`tap` for loggers: every event leaves with the number of its run.

The number is an array in the state of the handler. Under `vmap` it has the lanes of the logger's state, so one host
call brings the events of all lanes together with their runs. It leaves as a step of the event, and is never part of
the events that flow on to outer transformations.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from lox._data._lanes import Laned
from lox._data._series import Series
from lox._engine._event import Event
from lox._engine._handler import Frame
from lox._transforms._stream import Stream
from lox.loggers._prng import with_words

ROUTE = "\0run"  # a name that no user gives to a step


@dataclasses.dataclass(frozen=True)
class RoutedStream(Stream):
    """Streams events together with the number of their run, `state["run"]`."""

    waits: ClassVar[bool] = False  # the callback only queues the event, so computations may stay asynchronous

    def leaving(self, frame: Frame, event: Event) -> Event:
        """Add the run to an event, and turn PRNG keys into their words."""
        route = _route(frame, [x for leaves in event.values.values() for x in leaves], ())
        values, treedefs = {}, {}
        for key, leaves in event.values.items():
            values[key], treedefs[key] = _with_words(leaves, event.treedefs[key])
        return event.replace(values=values, treedefs=treedefs, steps={**event.steps, ROUTE: route})

    def series_leaving(self, frame: Frame, series: Series) -> Series:
        """Add the run to every event, and turn PRNG keys into their words."""
        route = _route(frame, series.values, () if series.single else (series.count(),))
        values, treedef = _with_words(series.values, series.treedef)
        return dataclasses.replace(series, values=values, treedef=treedef, steps={**series.steps, ROUTE: route})


def _with_words(values: list[Laned], treedef: Any) -> tuple[list[Laned], Any]:
    arrays, treedef = with_words([x.tree for x in values], treedef)
    return [Laned(array, x.flags) for array, x in zip(arrays, values, strict=True)], treedef


def _route(frame: Frame, values: list[Laned], shape: tuple[int, ...]) -> Laned:
    depth = max((len(x.flags) for x in values), default=0)  # vmaps inside the function, all of one run
    number: Any = frame.state["run"]
    return Laned(jnp.broadcast_to(number, shape) if shape else number, (False,) * depth)
