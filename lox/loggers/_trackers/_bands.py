"""Many lanes as one curve: their mean, its spread and its confidence interval."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lox._data import _statistics
from lox._data._histogram import Histogram
from lox.loggers._trackers._series import Series


def over_lanes(one: Series, part_name: Callable[[str, str], str]) -> Iterator[Series]:
    """Yield the statistics of a series `(lane, event)` as series `(event,)`.

    Statistics are over events with the same index in their lanes and the same steps. Histograms are added up; of
    pictures, the first is kept.
    """
    for part in _same_steps(one):
        valid = _valid(part)
        count = valid.sum(0)
        kept = count > 0
        steps = {name: _first(x, valid)[kept] for name, x in part.steps.items()}
        if not kept.any():
            continue
        if isinstance(part.value, Histogram):

            def total(x: np.ndarray, valid: np.ndarray = valid, kept: np.ndarray = kept) -> np.ndarray:
                return np.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0).sum(0)[kept]

            yield Series(part.name, jax.tree.map(total, part.value), steps, None)
            continue
        if not isinstance(part.value, np.ndarray):
            first = jax.tree.map(lambda x, v=valid, k=kept: _first(x, v)[k], part.value)
            yield Series(part.name, first, steps, None)
            continue
        x = np.where(valid, part.value.astype(np.float64), 0.0)[:, kept]
        n = count[kept]
        mean = x.sum(0) / n
        deviation = np.where(valid[:, kept], x - mean, 0.0)
        std = np.sqrt(np.square(deviation).sum(0) / np.maximum(n - 1, 1))
        margin = _statistics.margin95(n, std)
        several = None if (n > 1).all() else n > 1  # one lane alone has no spread
        yield Series(part.name, mean, steps, None)
        for name, values in (("std", std), ("ci95_low", mean - margin), ("ci95_high", mean + margin)):
            yield Series(part_name(part.name, name), values, steps, several)


def common_config(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the config of several runs as one: their names, what they have in common, and lists of what differs.

    >>> common_config({"1": {"lr": 0.1, "depth": 3}, "2": {"lr": 0.2, "depth": 3}})
    {'runs': ['1', '2'], 'lr': [0.1, 0.2], 'depth': 3}
    """
    common: dict[str, Any] = {"runs": list(configs)}
    for name in dict.fromkeys(name for config in configs.values() for name in config):
        values = [config.get(name) for config in configs.values()]
        common[name] = values[0] if all(value == values[0] for value in values) else values
    return common


def _valid(one: Series) -> np.ndarray:
    return np.ones(jax.tree.leaves(one.value)[0].shape[:2], bool) if one.valid is None else one.valid


def _first(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Take each event from the first lane that has it."""
    return x[valid.argmax(0), np.arange(x.shape[1])]


def _same_steps(one: Series) -> Iterator[Series]:
    """Split a series so that all lanes have the same steps at the same index; usually there is nothing to split."""
    left = _valid(one)
    while left.any():
        alike = left
        for x in one.steps.values():
            first = _first(x, left)
            alike = alike & ((x == first) | ((x != x) & (first != first)))
        yield one if alike.all() else Series(one.name, one.value, one.steps, alike)
        left = left & ~alike
