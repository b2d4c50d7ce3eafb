"""Statistics over lanes: means and their intervals, robust means, quantiles, bootstrap.

Samples are along the first axis. NumPy only; the tests compare with SciPy, arch and rliable.
"""

import functools
import math

import numpy as np

_Z95 = 1.9599639845400545  # 97.5% of the normal distribution lie below
_SERIES_FROM = 1000  # degrees of freedom; its error is below 1e-12 there


def mean_and_std(values: np.ndarray, counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of samples that are not NaN, their mean, and their standard deviation (with n - 1).

    Without samples, the mean is NaN; with one, the standard deviation is NaN.
    """
    there = ~np.isnan(values)
    n = there.sum(0) if counts is None else counts
    # Without a mask where there is nothing to mask: the sums are then NumPy's own, to the last bit.
    whole = bool(there.all())
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = values.mean(0) if whole and len(values) else np.where(there, values, 0.0).sum(0) / n
        deviation = values - mean if whole else np.where(there, values - mean, 0.0)
        std = np.sqrt(np.square(deviation).sum(0) / np.where(n > 1, n - 1, np.nan))
    return n, mean, std


def margin95(n: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the half width of the 95% confidence interval of a mean, by Student's t; NaN for fewer than two."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return t95(n) * std / np.sqrt(n)


def t95(n: np.ndarray) -> np.ndarray:
    """Return the half width of the 95% interval of a mean of `n` samples, in standard errors; NaN for one sample."""
    n = np.asarray(n)
    sizes, place = np.unique(n, return_inverse=True)
    return np.array([t_quantile(int(size) - 1) for size in sizes])[place].reshape(n.shape)


@functools.cache
def t_quantile(freedom: float) -> float:
    """Return within which 95% of Student's t lie, on both sides of zero; NaN without degrees of freedom."""
    if freedom <= 0:
        return math.nan
    z = _Z95
    if freedom > _SERIES_FROM:  # Cornish and Fisher's expansion
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + sum(term / freedom**n for n, term in enumerate(terms, 1))
    low, high = z, 2 * z
    while _t_beyond(high, freedom) > 0.05:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_beyond(middle, freedom) > 0.05 else (low, middle)
    return (low + high) / 2


def _t_beyond(t: float, freedom: float) -> float:
    """Return the probability that Student's t is not within -t and t: the regularized incomplete beta function."""
    a, b, x = freedom / 2, 0.5, freedom / (freedom + t * t)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return scale * _continued_fraction(a, b, x) / a
    return 1 - scale * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function from front to back, by Lentz's method."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 10_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + factor * d), 1 + factor / c
            result *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return result


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean without the lowest and the highest quarter of the samples, rounded down; NaN are left out."""
    ordered = np.sort(values, axis=0)  # NaN come last
    n = (~np.isnan(ordered)).sum(0)
    cut = n // 4
    rank = np.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
    kept = (rank >= cut) & (rank < n - cut)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(kept, ordered, 0.0).sum(0) / (n - 2 * cut)


def quantile(values: np.ndarray, q: float) -> np.ndarray:
    """Return a quantile of the samples that are not NaN, as `numpy.nanquantile`, which is slow, and warns."""
    ordered = np.sort(values, axis=0)
    n = (~np.isnan(ordered)).sum(0)
    place = q * np.maximum(n - 1, 0)
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, np.maximum(n - 1, 0))
    first = np.take_along_axis(ordered, below[None], 0)[0]
    second = np.take_along_axis(ordered, above[None], 0)[0]
    share = place - below
    # As NumPy interpolates, from the nearer end, so that both agree to the last bit.
    difference = second - first
    return np.where(share >= 0.5, second - difference * (1 - share), first + difference * share)


def draw(n: int, times: int, generator: np.random.Generator) -> np.ndarray:
    """Return the numbers of samples drawn with replacement, `(n, times)`."""
    return generator.integers(0, max(n, 1), (n, times))


def probability_greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the probability that a sample of `a` is greater than one of `b`, where ties count half."""
    larger = a[:, None] > b[None, :]
    ties = a[:, None] == b[None, :]
    return larger.mean((0, 1)) + 0.5 * ties.mean((0, 1))
