"""The rows of an export: an event of one leaf of one key, in one lane."""

import base64
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lox._command import _choose, _print
from lox._command._leaves import Leaf, leaves
from lox._data._histogram import Histogram
from lox._data._image import png
from lox.loggers._files import _rows
from lox.loggers._files._rows import plain
from lox.store._reader import Reader
from lox.store._table import Run, flat_config

_FIXED = ("run", "key", "dtype", "lane", "event", "wall", "value")


@dataclasses.dataclass
class Rows:
    """The events of one leaf of one run: a column for each of its properties, all with as many rows."""

    run: str
    leaf: Leaf
    lanes: list[str]
    events: np.ndarray
    steps: dict[str, tuple[np.ndarray, np.ndarray]]  # with which of them are missing
    wall: np.ndarray | None
    at: tuple[np.ndarray, np.ndarray]  # their places in the leaf
    config: dict[str, Any]

    def __len__(self) -> int:
        return len(self.events)

    def plain(self) -> list[Any]:
        """Return the values as numbers, lists, dicts for histograms, and addresses for pictures."""
        leaf = self.leaf
        if leaf.kind in ("histogram", "image"):
            to_plain = _bins if leaf.kind == "histogram" else _address
            return [to_plain(leaf.value(lane, event)) for lane, event in zip(*self.at, strict=True)]
        return plain(leaf.values[self.at])


def _bins(histogram: Histogram) -> dict[str, Any]:
    sums = {"sum": float(histogram.sum), "sum_squares": float(histogram.sum_squares)}
    return {**_rows.bins(histogram), **sums}


def _address(picture: Any) -> str:
    """Return a picture as text that a browser shows."""
    return "data:image/png;base64," + base64.b64encode(png(pixels(picture))).decode()


def pixels(picture: Any) -> np.ndarray:
    """Return the bytes of a picture: some reductions make means of them."""
    return np.clip(np.round(picture.pixels), 0, 255).astype(np.uint8)


class Table:
    """The columns of an export, which are known before the events are read."""

    def __init__(self, reader: Reader, runs: Sequence[Run], patterns: Sequence[str], with_config: bool):
        self.reader, self.patterns = reader, patterns
        self.names = [run.name for run in runs]
        self.keys = _choose.keys(reader, self.names, patterns)
        steps = _choose.steps(reader, self.names)
        self.has_wall = "wall" not in steps
        if not self.has_wall:
            _print.warning("these logs have a step called 'wall', which takes the place of the time of each event.")
        reader._wall = self.has_wall
        configs = {run.name: flat_config(run.config) for run in runs} if with_config else {}
        self.configs = {name: {f"config.{key}": x for key, x in config.items()} for name, config in configs.items()}
        self.config_columns = list(dict.fromkeys(key for config in self.configs.values() for key in config))
        taken = {*_FIXED, *self.config_columns} - ({"wall"} if not self.has_wall else set())
        self.step_columns: dict[str, str] = {}
        for step in steps:
            column = step
            while column in taken:
                column = f"step_{column}"
            self.step_columns[step] = column
            taken.add(column)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        wall = ["wall"] if self.has_wall else []
        return ["run", "key", "dtype", "lane", "event", *self.step_columns.values(), *wall, *self.config_columns]

    def rows(self) -> Iterator[Rows]:
        """Yield the events of every leaf of every run."""
        for name, logs in _choose.logs(self.reader, self.names, self.patterns):
            for leaf in leaves(logs):
                lane_numbers, event_numbers = np.nonzero(leaf.valid)
                at = lane_numbers, event_numbers
                numbers = (np.cumsum(leaf.valid, 1) - 1)[at]
                lanes = [leaf.lane(n) for n in range(len(leaf.valid))]
                missing = leaf.missing()
                steps = {step: (x[at], missing[step][at]) for step, x in leaf.steps.items() if step != "wall"}
                wall = leaf.steps["wall"][at] if "wall" in leaf.steps else None
                if not self.has_wall and wall is not None:
                    steps["wall"], wall = (wall, missing["wall"][at]), None
                config = self.configs.get(name, {})
                yield Rows(name, leaf, [lanes[n] for n in at[0].tolist()], numbers, steps, wall, at, config)
