"""Many lanes as one curve with a band: what is shown of seeds.

Statistics at a point are over the lanes that have a finite number exactly there. How many those are is part of the
result, and so is how many are NaN or infinite and left out.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from lox import _errors
from lox._data import _statistics
from lox.view._curves import Curve

DRAWS = 2000  # of a bootstrap
_AT_ONCE = 1 << 12  # points, so that draws fit into the cache


@dataclasses.dataclass(frozen=True)
class Band:
    """A curve with a band around it. All arrays are `(point,)`.

    Attributes:
        x: The points.
        center: The mean, the median or the interquartile mean.
        low: The lower edge of the band; NaN where there are too few lanes for one.
        high: The upper edge.
        n: How many lanes the statistics are over.
        lost: How many lanes have NaN or an infinity there, and are left out.
        method: In words: what the center and the band are.
    """

    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray
    lost: np.ndarray
    method: str


def band(curve: Curve, kind: str = "ci95") -> Band:
    """Return center and band of a curve with lanes. The kinds are those of `KINDS`."""
    statistics, method = KINDS[check_kind(kind)]
    finite = np.isfinite(curve.values) & curve.there
    values = curve.values if finite.all() else np.where(finite, curve.values, np.nan)
    n = finite.sum(0)
    center, low, high = statistics(values, n)
    fewest, most = int(n.min(initial=len(curve.lanes))), int(n.max(initial=0))
    lanes = f"{fewest} to {most} lanes" if fewest < most else f"{most} lane{'s' * (most != 1)}"
    return Band(curve.x, center, low, high, n, (curve.there & ~finite).sum(0), f"{method}, {lanes}")


def check_kind(kind: str) -> str:
    """Return the kind of a band, or raise an error that lists them."""
    if kind not in KINDS:
        choices = _errors.listing(KINDS)
        raise _errors.OptionError(f"`band` is {kind!r}; choose one of {choices}.{_errors.nearest(str(kind), KINDS)}")
    return kind


def smoothed(one: Band, weight: float) -> Band:
    """Smooth center and band alike, by an exponential moving mean over points that makes up for its start."""
    if not 0 <= weight < 1:
        raise _errors.OptionError(f"`smooth` is {weight!r}; it must be from 0, which smooths nothing, to below 1.")
    if not weight:
        return one
    low, center, high = (smooth(x, weight) for x in (one.low, one.center, one.high))
    return dataclasses.replace(one, low=low, center=center, high=high, method=f"{one.method}, smoothed by {weight:g}")


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Smooth along the last axis; what is not finite stays as it is, and does not count."""
    out = np.array(values, np.float64)
    if not out.size:
        return out
    rows = out.reshape(-1, out.shape[-1])
    finite = np.isfinite(rows)
    if finite.all():
        rows[:] = _moving_mean(rows, weight)
        return out
    for row, good in zip(rows, finite, strict=True):
        row[good] = _moving_mean(row[None, good], weight)[0]
    return out


def _moving_mean(rows: np.ndarray, weight: float, block: int = 64) -> np.ndarray:
    """Return the exponential moving means of finite rows; by blocks, as a loop over all points takes a second."""
    out = np.empty_like(rows)
    powers = weight ** np.arange(block + 1)
    ages = np.subtract.outer(np.arange(block), np.arange(block))
    kernel = np.where(ages >= 0, (1 - weight) * weight ** np.maximum(ages, 0), 0.0)
    total = np.zeros(len(rows))
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]
        count = part.shape[1]
        sums = part @ kernel[:count, :count].T + total[:, None] * powers[1 : count + 1]
        total = sums[:, -1]
        out[:, start : start + count] = sums / (1 - weight ** np.arange(start + 1, start + count + 1))
    return out


Edges = tuple[np.ndarray, np.ndarray, np.ndarray]


def _ci95(values: np.ndarray, n: np.ndarray) -> Edges:
    _, mean, std = _statistics.mean_and_std(values, n)
    margin = _statistics.margin95(n, std)
    return mean, mean - margin, mean + margin


def _std(values: np.ndarray, n: np.ndarray) -> Edges:
    _, mean, std = _statistics.mean_and_std(values, n)
    return mean, mean - std, mean + std


def _quartiles(values: np.ndarray, n: np.ndarray) -> Edges:
    low, high = (np.where(n > 1, _statistics.quantile(values, q), np.nan) for q in (0.25, 0.75))
    return _statistics.quantile(values, 0.5), low, high


def _minmax(values: np.ndarray, n: np.ndarray) -> Edges:
    _, mean, _ = _statistics.mean_and_std(values, n)
    low, high = np.fmin.reduce(values, 0), np.fmax.reduce(values, 0)
    return mean, np.where(n > 1, low, np.nan), np.where(n > 1, high, np.nan)


def _iqm(values: np.ndarray, n: np.ndarray) -> Edges:
    """Draw the ranks of samples, not the samples: then one set of draws does for all points with as many lanes."""
    ordered = np.sort(values, axis=0)
    low, high = np.full(n.shape, np.nan), np.full(n.shape, np.nan)
    for size in sorted({int(size) for size in n if size > 1}):
        weights = trimmed_weights(size)
        for points in _in_parts(np.flatnonzero(n == size)):
            found = ordered[:size, points].T @ weights.T
            low[points], high[points] = np.quantile(found, (0.025, 0.975), axis=1)
    return _statistics.interquartile_mean(values), low, high


def trimmed_weights(size: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return the weights `(draw, rank)` with which samples, in order, enter the interquartile mean of each draw."""
    ranks = np.sort(_statistics.draw(size, draws, np.random.default_rng(seed)), axis=0)
    cut = size // 4
    weights = np.zeros((draws, size))
    np.add.at(weights, (np.arange(draws), ranks[cut : size - cut]), 1 / (size - 2 * cut))
    return weights


def _in_parts(points: np.ndarray) -> Iterator[np.ndarray]:
    return (points[start : start + _AT_ONCE] for start in range(0, len(points), _AT_ONCE))


KINDS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Edges], str]] = {
    "ci95": (_ci95, "mean, 95% confidence interval of the mean (Student's t)"),
    "std": (_std, "mean ± standard deviation"),
    "quantiles": (_quartiles, "median, quartiles"),
    "iqm": (_iqm, f"interquartile mean, 95% confidence interval (percentile bootstrap, {DRAWS} draws)"),
    "minmax": (_minmax, "mean, minimum to maximum"),
}
