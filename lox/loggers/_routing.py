"""`tap` for loggers: every event leaves with the number of the run it belongs to.

The number is an array like any other, threaded through the program in the state of the handler: under `vmap` it has
the lanes of the logger's state, so one host call with the events of all lanes brings along where each of them goes. It
leaves as a step of the event, and is never part of the events that flow on to outer transformations.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from lox._engine import Run
from lox._event import Event
from lox._lanes import Laned
from lox._series import Series
from lox._tap import Stream

ROUTE = "\0run"  # a step that no user's step is called


@dataclasses.dataclass(frozen=True)
class RoutedStream(Stream):
    """Streams events together with the number of their run, `state["run"]`."""

    waits: ClassVar[bool] = False  # for the callback only queues the event: computations may stay asynchronous

    def leaving(self, run: Run, event: Event) -> Event:
        """With its run."""
        route = _route(run, [x for leaves in event.values.values() for x in leaves], ())
        return event.replace(steps={**event.steps, ROUTE: route})

    def series_leaving(self, run: Run, series: Series) -> Series:
        """All with their run."""
        route = _route(run, series.values, () if series.single else (series.count(),))
        return dataclasses.replace(series, steps={**series.steps, ROUTE: route})


def _route(run: Run, values: list[Laned], shape: tuple[int, ...]) -> Laned:
    depth = max((len(x.flags) for x in values), default=0)  # vmaps inside the function, which do not concern the run
    number: Any = run.state["run"]
    return Laned(jnp.broadcast_to(number, shape) if shape else number, (False,) * depth)
