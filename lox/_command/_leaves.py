"""The logs of a run as leaves: numbers, arrays, histograms and pictures, each under a name, lane by lane."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from lox._data import _dataframe, _histogram, _html
from lox._data._dataframe import Column
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox._data._logdict import logdict
from lox.loggers._trackers._series import missing_steps


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of one key: arrays `(lane, event)`, of which `value` gives what was logged.

    Several vmaps inside of a run are one axis here; `lanes` are their sizes.
    """

    name: str
    kind: str  # "histogram", "image" or the dtype
    values: np.ndarray  # (lane, event, *item); the counts of histograms
    steps: dict[str, np.ndarray]
    valid: np.ndarray
    lanes: tuple[int, ...]
    histogram: Histogram | None = None  # all of them, with the same axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.values.shape[2:]

    def lane(self, number: int) -> str:
        """Name a lane by its index in each vmap: `0/2`; nothing if there is none."""
        return "/".join(str(n) for n in np.unravel_index(number, self.lanes)) if self.lanes else ""

    def value(self, lane: int, event: int) -> Any:
        """Return one value: an array, a histogram or a picture."""
        if self.histogram is not None:
            fields = [getattr(self.histogram, name)[lane, event] for name in _histogram.FIELDS]
            return _histogram.with_edges(self.histogram.edges, fields)
        x = self.values[lane, event]
        return Image.tree_unflatten(None, [x]) if self.kind == "image" else x

    def missing(self) -> dict[str, np.ndarray]:
        """Tell where an event lacks a step that others have."""
        return missing_steps(self.steps)


def leaves(logs: logdict) -> Iterator[Leaf]:
    """Yield the leaves of all keys, in the order of the keys; no two have the same name."""
    media, columns, taken = _html._media_in(logs), list(_dataframe.columns(logs)), set[str]()
    by_name = {column.name: column for column in columns}
    for column in columns:
        entry = media.get(column.name, column)
        if entry is None:
            continue  # another part of a histogram
        name, node = entry if isinstance(entry, tuple) else (column.name, None)
        while name in taken or (name != column.name and name in logs and logs[name] is not node):
            name += " [leaf]"  # another key looks like this leaf
        taken.add(name)
        histogram = None
        if isinstance(node, Histogram):
            stem = column.name.removesuffix(".counts")
            fields = [_flat(by_name[f"{stem}.{field}"]) for field in _histogram.FIELDS]
            histogram = _histogram.with_edges(node.edges, fields)
        kind = "histogram" if histogram is not None else "image" if node is not None else str(column.values.dtype)
        lead = _flat(column).shape[:2]
        yield Leaf(
            name,
            kind,
            _flat(column),
            {step: np.broadcast_to(x, column.valid.shape).reshape(lead) for step, x in column.steps.items()},
            column.valid.reshape(lead),
            column.valid.shape[:-1],
            histogram,
        )


def _flat(column: Column) -> np.ndarray:
    """Make one axis of all lanes."""
    lead = column.valid.shape
    lanes = int(np.prod(lead[:-1]))
    return column.values.reshape(lanes, lead[-1], *column.values.shape[len(lead) :])
