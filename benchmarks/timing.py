"""Compare functions on a machine that is never quiet: take turns, keep the best of each."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass
class Table:
    """What does not fit into lines of two numbers and their ratio: cells of text under headings, and notes."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)  # in JSON only, where nothing has to be short

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[n]) for line in lines if n < len(line)) for n in range(len(self.columns))]
        text = ["  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=False)).rstrip() for line in lines]
        return "\n".join([f"\n{self.title}", *text, *self.notes])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def take_turns(
    functions: Sequence[Callable[[], Any]],
    *,
    number: int = 1,
    seconds: float = 4.0,
    between: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Time functions in turns for a while, and return the seconds of the best turn of each.

    Noise only adds time, so the best turn is the one disturbed least. A turn calls the function
    `number` times. `between` is called after each turn, and is not timed. What runs in one thread
    may be timed by `time.process_time`, which does not count the time of other programs.

    Each turn starts at another depth of the stack. Python keeps frames in chunks of 16 KiB, and
    a call that needs another chunk has it from the system and gives it back at once: where that
    happens inside of a loop, tracing takes up to half as long again, at that depth only.
    """

    def timed(function: Callable[[], Any]) -> float:
        start = clock()
        for _ in range(number):
            function()
        return clock() - start

    for function in functions:
        function()  # compiles
    best = [float("inf")] * len(functions)
    turns = list(enumerate(functions))
    gc.collect()
    gc.disable()
    try:
        deadline, done = time.perf_counter() + seconds, 0
        while done < 5 or time.perf_counter() < deadline:
            for n, function in turns:
                best[n] = min(best[n], _deeper(8 * (5 * done % 13), timed, function))
                between()
            turns.reverse()  # whoever comes second finds warmer caches
            done += 1
    finally:
        gc.enable()
    return best


def _deeper(frames: int, call: Callable[..., float], *args: Any) -> float:
    """Call with that many more frames on the stack."""
    return _deeper(frames - 1, call, *args) if frames else call(*args)


def compare(
    name: str,
    lox: Callable[[], Any],
    reference: Callable[[], Any],
    *,
    unit: str = "ms",
    goal: float | None = None,
    number: int = 1,
    count: int = 1,
    **options: Any,
) -> Row:
    """Time both in turns. With `count` events per call, the result is the time of one event."""
    scale = SCALES[unit] / (number * count)
    best = take_turns([lox, reference], number=number, **options)
    return Row(name, unit, *(scale * seconds for seconds in best), goal=goal)
