"""Compare two functions on a machine that is never quiet: take turns, keep the best of each."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass
class Row:
    """One line of the table. `ratio` is lox's number over the reference's."""

    name: str
    unit: str
    lox: float
    reference: float
    goal: float | None = None  # the ratio not to exceed
    equal: bool | None = None  # whether they are the same, where they must be

    @property
    def ratio(self) -> float:
        return self.lox / self.reference

    @property
    def ok(self) -> bool | None:
        return self.equal if self.goal is None else self.ratio <= self.goal

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "ok": self.ok}


def compare(
    name: str,
    lox: Callable[[], Any],
    reference: Callable[[], Any],
    *,
    unit: str = "ms",
    goal: float | None = None,
    number: int = 1,
    count: int = 1,
    seconds: float = 4.0,
    between: Callable[[], Any] = lambda: None,
) -> Row:
    """Time both in turns for a while, and keep the best turn of each.

    Noise only adds time, so the best turn is the one disturbed least. A turn calls the function
    `number` times; with `count` events per call, the result is the time of one event. `between` is
    called after each turn, and is not timed.
    """
    best = {lox: float("inf"), reference: float("inf")}
    for function in best:
        function()  # compiles
    turns = [lox, reference]
    gc.collect()
    gc.disable()
    try:
        deadline, done = time.perf_counter() + seconds, 0
        while done < 5 or time.perf_counter() < deadline:
            for function in turns:
                start = time.perf_counter()
                for _ in range(number):
                    function()
                best[function] = min(best[function], time.perf_counter() - start)
                between()
            turns.reverse()  # whoever comes second finds warmer caches
            done += 1
    finally:
        gc.enable()
    scale = SCALES[unit] / (number * count)
    return Row(name, unit, best[lox] * scale, best[reference] * scale, goal)
