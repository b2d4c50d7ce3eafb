"""`lox.Histogram`: the distribution of values, counted on the device.

The bins are fixed and part of the structure, so histograms of different events, lanes and devices have the same bins.
Everything in them is a sum, and adding two gives the histogram of all their values: `reduce="sum"` merges them in the
carry of a loop, and only a few hundred numbers are transferred, however large the arrays are.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays

_PER_DECADE, _DECADES = 8, (-8, 8)


class Edges:
    """The edges of bins, comparable and hashable: structure, not data."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: Any):
        # In the precision of the values, or values on an edge could be counted in the wrong bin.
        self.values = np.asarray(values, np.float32)
        self.values.flags.writeable = False
        self._hash = hash(self.values.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edges) and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{len(self.values) - 1} bins from {self.values[0]:g} to {self.values[-1]:g}"


def _all_magnitudes() -> Edges:
    first, last = _DECADES
    positive = 10.0 ** (np.arange(first * _PER_DECADE, last * _PER_DECADE + 1) / _PER_DECADE)
    return Edges([*-positive[::-1], *positive])


_DEFAULT = _all_magnitudes()


@jax.tree_util.register_pytree_with_keys_class
class Histogram:
    """A histogram of an array, to be logged instead of the array.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(x):
    ...     def step(x, _):
    ...         lox.log({"x": lox.Histogram(x, bins=4, range=(0.0, 1.0))})
    ...         return x / 2, None
    ...
    ...     return jax.lax.scan(step, x, None, 2)[0]
    >>> _, logs = lox.spool(f)(jnp.array([0.1, 0.6, 0.9]))
    >>> print(logs["x"].counts)
    [[1. 0. 1. 1.]
     [1. 2. 0. 0.]]
    >>> _, logs = lox.spool(f, reduce="sum")(jnp.array([0.1, 0.6, 0.9]))  # in the carry: one histogram of all events
    >>> print(logs["x"].counts, logs["x"].edges)
    [2. 2. 1. 1.] [0.   0.25 0.5  0.75 1.  ]

    It is a pytree and works under `jit`, `vmap` and `scan`. Without `bins` and `range` the bins are narrow near zero
    and wide far away, eight per decade from 1e-8 to 1e8 on both sides, which suits weights and gradients of any size.
    Bins are closed on the left, the last one on both sides. Values outside are counted in the outermost bins.

    Args:
        values: An array of real numbers, or a pytree of them whose values are counted together.
        bins: How many bins of equal width between the ends of `range`, or a sequence of increasing edges.
        range: The ends of the bins: numbers that are known when the program is traced.

    Attributes:
        counts: How many values are in each bin; a float, exact up to 2**24 and then rounded, never wrapped.
        nonfinite: How many are NaN or infinite. They are in no bin and no sum.
        sum: The sum of the values.
        sum_squares: The sum of their squares.
        edges: The edges of the bins: one more than there are bins.
    """

    counts: Any
    nonfinite: Any
    sum: Any
    sum_squares: Any

    def __init__(
        self, values: Any, bins: int | Sequence[float] | None = None, range: tuple[float, float] | None = None
    ):
        self._edges = _edges(bins, range)
        leaves = [_numbers(x) for x in jax.tree.leaves(values)]
        if not leaves:
            raise _errors.LogTypeError(f"`lox.Histogram` got {values!r}, which holds no array.")
        parts = [_count(x, self._edges) for x in leaves]
        self.counts, self.nonfinite, self.sum, self.sum_squares = [
            functools.reduce(operator.add, field) for field in zip(*parts, strict=True)
        ]

    @property
    def edges(self) -> np.ndarray:
        """The edges of the bins: one more than there are bins."""
        return self._edges.values

    @property
    def mean(self) -> Any:
        """The mean of the values; NaN if there are none. Needs concrete arrays, so it fails under `jit`."""
        return self._per_value(self.sum)[()]

    @property
    def std(self) -> Any:
        """The standard deviation of the values. Needs concrete arrays, so it fails under `jit`."""
        return np.sqrt(np.maximum(self._per_value(self.sum_squares) - np.square(self.mean), 0))[()]

    def _per_value(self, total: Any) -> np.ndarray:
        total, n = np.asarray(total, np.float64), np.asarray(self.counts, np.float64).sum(-1)
        return np.divide(total, n, out=np.full(np.shape(n), np.nan), where=n > 0)

    def __add__(self, other: "Histogram") -> "Histogram":
        if not isinstance(other, Histogram):
            return NotImplemented
        if self._edges != other._edges:
            raise _errors.MismatchError(
                f"histograms with {self._edges} and with {other._edges} cannot be added: give both the same bins."
            )
        return jax.tree.map(lambda a, b: a + b, self, other)

    def tree_flatten_with_keys(self) -> tuple[Any, Edges]:
        """As a pytree, edges are structure."""
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in FIELDS], self._edges

    @classmethod
    def tree_unflatten(cls, edges: Edges, children: Any) -> "Histogram":
        """The inverse of `tree_flatten_with_keys`."""
        self = object.__new__(cls)
        self._edges = edges
        for name, child in zip(FIELDS, children, strict=True):
            setattr(self, name, child)
        return self

    def __repr__(self) -> str:
        known = all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in jax.tree.leaves(self))
        if not known or any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(self)):
            return f"Histogram({self._edges})"
        n = np.asarray(self.counts, np.float64).sum(-1)
        mean, std = (np.array2string(np.asarray(x), precision=4, separator=", ") for x in (self.mean, self.std))
        return f"Histogram(n={n.astype(np.int64).tolist()}, mean={mean}, std={std})"


FIELDS = ("counts", "nonfinite", "sum", "sum_squares")


def with_edges(edges: Any, fields: Sequence[Any]) -> Histogram:
    """Make a histogram of its edges and its arrays, which are in the order of `FIELDS`."""
    return Histogram.tree_unflatten(Edges(edges), fields)


def _edges(bins: Any, ends: Any) -> Edges:
    if bins is None and ends is None:
        return _DEFAULT
    if bins is None or isinstance(bins, int | np.integer):
        bins = 64 if bins is None else int(bins)
        if ends is None:
            raise _errors.OptionError(
                f"`lox.Histogram` got `bins={bins}` without `range`. Bins cannot follow the values, or histograms of "
                "two events could not be added: give the ends too, `range=(-1.0, 1.0)`, or neither."
            )
        low, high = _known(ends, "range")
        if bins < 1 or not low < high:
            raise _errors.OptionError(
                f"`lox.Histogram` got `bins={bins}` and `range={ends!r}`: it takes at least one bin, and two "
                "increasing finite numbers."
            )
        return Edges(np.linspace(low, high, bins + 1))
    if ends is not None:
        raise _errors.OptionError("`lox.Histogram` got the edges of the bins and `range` too: leave one of them out.")
    edges = _known(bins, "bins")
    if len(edges) < 2 or any(not a < b for a, b in itertools.pairwise(edges)):
        raise _errors.OptionError(f"`lox.Histogram` got `bins={bins!r}`: edges are two or more increasing numbers.")
    return Edges(edges)


def _known(numbers: Any, what: str) -> list[float]:
    if any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(numbers)):
        raise _errors.OptionError(
            f"`lox.Histogram` got `{what}` as a traced array: bins are part of the program's structure. "
            "Give it numbers that are known when the program is traced."
        )
    try:
        values = np.asarray(numbers, np.float32)
    except (TypeError, ValueError) as error:
        raise _errors.OptionError(f"`lox.Histogram` got `{what}={numbers!r}`, which are not numbers.") from error
    if values.ndim != 1 or not np.isfinite(values).all() or (what == "range" and len(values) != 2):
        many = "two" if what == "range" else "a list of"
        raise _errors.OptionError(f"`lox.Histogram` got `{what}={numbers!r}`: give it {many} finite numbers.")
    return values.tolist()


def _numbers(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if _arrays.is_prng_key(x.dtype) or not (x.dtype == bool or jnp.issubdtype(x.dtype, np.number)):
        raise _errors.LogTypeError(f"`lox.Histogram` got an array of {x.dtype}: it counts real numbers.")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise _errors.LogTypeError(f"`lox.Histogram` got an array of {x.dtype}: take `abs`, or the real part.")
    return jax.lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32)


def _count(x: Any, edges: Edges) -> tuple[Any, Any, Any, Any]:
    return _compat.unsharded(lambda x: _count_all(x, edges), x)


# As one program outside of jit, instead of many. In the shape that the values have: to flatten them, XLA would have to
# gather them if they are sharded.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _count_all(x: Any, edges: Edges) -> tuple[Any, Any, Any, Any]:
    bins = len(edges.values) - 1
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x, jnp.zeros_like(x))
    index = jnp.searchsorted(jnp.asarray(edges.values), x, side="right").astype(jnp.int32) - 1
    # Counted as integers: adding ones to a float stops at 2**24.
    counts = jnp.zeros(bins, jnp.int32).at[jnp.clip(index, 0, bins - 1)].add(finite.astype(jnp.int32))
    nonfinite = jnp.sum(~finite, dtype=jnp.int32)
    return counts.astype(jnp.float32), nonfinite.astype(jnp.float32), jnp.sum(x), jnp.sum(x * x)


def few_bins(histogram: Histogram, most: int) -> tuple[list[float], list[float]]:
    """Counts and edges without the empty bins at the ends, merged into at most `most` bins."""
    counts, edges = np.asarray(histogram.counts, np.float64), histogram.edges.astype(np.float64)
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, 1)
    counts, edges = counts[first:last], edges[first : last + 1]
    width = -(-len(counts) // most)  # how many neighbours are merged
    if width > 1:
        starts = np.arange(0, len(counts), width)
        counts, edges = np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])
    return counts.tolist(), edges.tolist()
