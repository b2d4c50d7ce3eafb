"""Curves for the pixels of a chart: fewer points, of which none is wrong and no extreme is lost.

Points fall into bins on a grid that does not move: bins are a power of two wide and begin at multiples of it, so that a
curve that grows changes its last bins only, until all bins double. Of a bin with many points, two of the curve itself
stay, where its center is smallest and largest, and the band there is as wide as anywhere in the bin.
"""

import dataclasses
import math

import numpy as np

from lox.view._bands import Band


@dataclasses.dataclass(frozen=True)
class Grid:
    """Bins along x, `2**exponent` wide; on a logarithmic axis, along its logarithm to base 2."""

    exponent: int
    log: bool = False

    @classmethod
    def of(cls, first: float, last: float, bins: int, log: bool = False) -> "Grid":
        """Return the finest grid with at most so many bins (and one more) between two points."""
        if log:
            first, last = (math.log2(first), math.log2(last)) if 0 < first < last else (0.0, 0.0)
        half = last / 2 - first / 2  # which is never infinite
        # One point is in one bin of any width; in bins of 1, its number is finite.
        return cls(math.ceil(math.log2(half / bins) + 1) if half > 0 else 0, log)

    def bins(self, x: np.ndarray) -> np.ndarray:
        """Return the number of the bin of each point."""
        return np.floor(np.ldexp(np.log2(x) if self.log else x.astype(np.float64), -self.exponent))

    def start_of(self, x: float) -> float:
        """Return where the bin begins that a point is in."""
        start = math.ldexp(float(self.bins(np.array([x]))[0]), self.exponent)
        return min(x, 2.0**start) if self.log else start


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What is drawn of a band. All arrays are `(point,)`, and all but `low` and `high` have points of the band itself.

    `low` and `high` are the smallest and the largest of a bin; `low_there` and `high_there` those at the point.
    """

    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_there: np.ndarray
    high_there: np.ndarray
    n: np.ndarray
    most: int  # points in one bin


def starts_of_bins(bins: np.ndarray) -> np.ndarray:
    """Return where new bins begin in sorted numbers of bins."""
    return np.flatnonzero(np.r_[True, bins[1:] != bins[:-1]]) if len(bins) else np.zeros(0, int)


def reduced(band: Band, grid: Grid, begins: bool = True) -> Drawn:
    """Reduce a band to at most two points per bin. What is drawn of a bin depends on its own points alone.

    Beside them stays the last point, which is where a curve is now, and the first if the curve `begins` here.
    """
    starts = starts_of_bins(grid.bins(band.x))
    sizes = np.diff(np.r_[starts, len(band.x)])
    most = int(sizes.max(initial=0))
    if most <= 2:
        return Drawn(band.x, band.center, band.low, band.high, band.low, band.high, band.n, most)
    # What is not finite is no extreme. A bin without any finite number keeps its first and its last point.
    finite, ends = np.isfinite(band.center), starts + sizes - 1
    smallest = _places(np.where(finite, band.center, np.inf), starts, sizes, np.minimum)
    largest = _places(np.where(finite, band.center, -np.inf), starts, sizes, np.maximum)
    whole = (sizes <= 2) | ~np.logical_or.reduceat(finite, starts)
    first = np.where(whole, starts, np.minimum(smallest, largest))
    second = np.where(whole, ends, np.maximum(smallest, largest))
    keep = np.unique(np.r_[first, second, [0] * begins, len(band.x) - 1].astype(int))
    which = np.searchsorted(starts, keep, "right") - 1
    merged = (sizes > 2)[which]
    low = np.where(merged, np.fmin.reduceat(band.low, starts)[which], band.low[keep])
    high = np.where(merged, np.fmax.reduceat(band.high, starts)[which], band.high[keep])
    return Drawn(band.x[keep], band.center[keep], low, high, band.low[keep], band.high[keep], band.n[keep], most)


def _places(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray, extreme: np.ufunc) -> np.ndarray:
    """Return where in `values` the first extreme of each bin is."""
    hits = np.flatnonzero(values == np.repeat(extreme.reduceat(values, starts), sizes))
    return hits[np.searchsorted(hits, starts)]


def reduced_lanes(x: np.ndarray, values: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray, int]:
    """Reduce lanes `(lane, point)` to two points per bin, the smallest and the largest value of each lane in it.

    They are drawn at the first and the last point of the bin, in the order in which the lane has them.
    """
    starts = starts_of_bins(grid.bins(x))
    sizes = np.diff(np.r_[starts, len(x)])
    most = int(sizes.max(initial=0))
    if most <= 2:
        return x, values, most
    values = np.where(np.isfinite(values), values, np.nan)  # what is not finite is no extreme
    low, high = np.fmin.reduceat(values, starts, axis=1), np.fmax.reduceat(values, starts, axis=1)
    ends = starts + sizes - 1
    falling = values[:, starts] > values[:, ends]
    out = np.empty((len(values), 2 * len(starts)))
    whole = sizes <= 2
    out[:, 0::2] = np.where(whole, values[:, starts], np.where(falling, high, low))
    out[:, 1::2] = np.where(whole, values[:, ends], np.where(falling, low, high))
    places = np.stack([starts, ends], 1).reshape(-1)
    keep = np.r_[True, places[1:] != places[:-1]]
    return x[places[keep]], out[:, keep], most
