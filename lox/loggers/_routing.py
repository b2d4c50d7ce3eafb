"""`tap` for loggers: every event carries the number of the run it belongs to.

The number is an array like any other: under `vmap` it has the lanes of the logger's state, so one host call with the
events of all lanes brings along where each of them goes. It travels as a step, hence through `interval`, `reduce` and
`buffer` too, and is taken off again before the event flows on to outer transformations.
"""

import dataclasses
from typing import Any, ClassVar

from lox._engine import Run
from lox._event import Event
from lox._lanes import Laned
from lox._tap import Stream

ROUTE = "\0run"  # a step that no user's step is called


@dataclasses.dataclass(frozen=True)
class RoutedStream(Stream):
    """Streams events together with the number of their run, which is part of the state."""

    waits: ClassVar[bool] = False  # for the callback only queues the event: computations may stay asynchronous

    def initial_state(self, *given: Any) -> dict[str, Any]:
        """The number of the run is threaded through the program."""
        (number,) = given
        return {**super().initial_state(), "run": number}

    def event(self, run: Run, event: Event) -> None:
        """Send the event with its run."""
        depth = max((len(x.flags) for leaves in event.values.values() for x in leaves), default=0)
        route = Laned(run.state["run"], (False,) * depth)  # the vmaps inside the function do not concern the run
        super().event(run, event.replace(steps={**event.steps, ROUTE: route}))

    def pass_on(self, event: Event) -> None:
        """Without the run, which is nobody else's business."""
        super().pass_on(event.replace(steps={name: x for name, x in event.steps.items() if name != ROUTE}))
