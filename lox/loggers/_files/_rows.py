"""Events as rows of plain values, for CSV and JSON.

A row is one event: its steps, and the values of all keys with the same steps and the same number of events. So keys
that are logged together are in one row.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _errors
from lox._data._bundle import Bundle
from lox._data._histogram import Histogram
from lox._data._image import Image
from lox.store._prng_keys import words_only

Row = tuple[dict[str, Any], dict[str, Any]]  # steps, values
Column = np.ndarray | list[Any]  # a value for each row; an array where all of them happened
Table = tuple[int, dict[str, Column], dict[str, Column]]  # the number of rows, steps, values
Picture = Callable[[np.ndarray], Any]


def is_shown_whole(value: Any) -> bool:
    """Tell whether this pytree is shown as one thing, not as several arrays."""
    return isinstance(value, Histogram | Image)


def rows(bundles: Iterable[Bundle], picture: Picture, split: bool) -> Iterator[Row]:
    """Yield the rows of the events of a run, as `tables` has them."""
    for count, *columns in tables(bundles, picture, split):
        steps, values = ({name: as_list(column) for name, column in part.items()} for part in columns)
        for event in range(count):
            yield {name: x[event] for name, x in steps.items()}, {key: x[event] for key, x in values.items()}


def tables(bundles: Iterable[Bundle], picture: Picture, split: bool) -> Iterator[Table]:
    """Yield the columns of rows that have the same ones, from the events of a run.

    A histogram becomes a dict of its bins, mean and spread; `picture` turns pixels into what stands for a picture. With
    `split`, every leaf of a pytree is a value of its own.
    """
    groups: dict[Any, list[Bundle]] = {}
    for bundle in map(words_only, bundles):
        same = tuple((name, x.tree.shape, str(x.tree.dtype), x.tree.tobytes()) for name, x in bundle.steps.items())
        groups.setdefault((bundle.count(), tuple(sorted(same))), []).append(bundle)
    for (count, _), group in groups.items():
        steps: dict[str, Column] = {name: np.asarray(x.tree) for name, x in group[0].steps.items()}
        columns = {
            name: _column(value, bundle.valid and bundle.valid.tree, count, picture)
            for name, bundle, value in (leaves(group) if split else wholes(group))
        }
        if count:
            yield count, steps, columns


def as_list(column: Column) -> list[Any]:
    """Return the plain value in each row."""
    return plain(column) if isinstance(column, np.ndarray) else column


def wholes(bundles: Sequence[Bundle]) -> Iterator[tuple[str, Bundle, Any]]:
    """Yield every key with its bundle and value."""
    return ((key, bundle, bundle.value(key)) for bundle in bundles for key in bundle.keys)


def leaves(bundles: Sequence[Bundle]) -> Iterator[tuple[str, Bundle, Any]]:
    """Yield every leaf of every value with a name of its own: `stats['mean']`. Histograms and pictures are leaves."""
    keys = {key for bundle in bundles for key in bundle.keys}
    taken: set[str] = set()
    for key, bundle, value in wholes(bundles):
        for tree_path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_shown_whole):
            name = key + jax.tree_util.keystr(tree_path)
            while name in taken or (tree_path and name in keys):  # another key looks like this leaf
                name += " [leaf]"
            taken.add(name)
            yield name, bundle, leaf


def _column(value: Any, valid: np.ndarray | None, count: int, picture: Picture) -> Column:
    """Return a value in each row."""
    if isinstance(value, np.ndarray):
        return value if valid is None or valid.all() else plain(value, valid)

    def at_event(x: Any, event: int) -> Any:
        lanes_valid = None if valid is None else valid[event]
        if is_shown_whole(x):
            return _whole(jax.tree.map(lambda a: a[event], x), lanes_valid, picture)
        return plain(x[event], lanes_valid)

    return [jax.tree.map(lambda x, n=n: at_event(x, n), value, is_leaf=is_shown_whole) for n in range(count)]


def _whole(x: Any, valid: np.ndarray | None, picture: Picture) -> Any:
    lanes = x.counts.shape[:-1] if isinstance(x, Histogram) else x.pixels.shape[:-3]
    if lanes:
        parts = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(lanes[0])]
        valids = valid if valid is not None and valid.ndim else [valid] * lanes[0]
        return [_whole(part, v, picture) for part, v in zip(parts, valids, strict=True)]
    if valid is not None and not valid.any():
        return None
    return bins(x) if isinstance(x, Histogram) else picture(x.pixels)


def bins(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram as plain values, without the empty bins at the ends."""
    filled = np.flatnonzero(histogram.counts)
    first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, 0)
    return {
        "edges": plain(histogram.edges[first : last + 1]),
        "counts": plain(histogram.counts[first:last]),
        "nonfinite": plain(histogram.nonfinite),
        "mean": float(histogram.mean),
        "std": float(histogram.std),
    }


def plain(x: np.ndarray, valid: np.ndarray | None = None) -> Any:
    """Convert an array to lists of Python numbers, with None where there is no event.

    Floats stay short: float32(0.1) becomes 0.1, which reads back as the same float32.
    """
    x = np.asarray(x)
    if valid is not None and valid.ndim:
        return [plain(item, v) for item, v in zip(x, valid, strict=True)]
    if valid is not None and not valid:
        return None
    small = x.dtype.kind == "V" and jnp.issubdtype(x.dtype, np.integer)  # such as int4, which is not NumPy's
    if small or x.dtype.kind in "biu" or x.dtype == np.float64:
        return x.tolist()
    if x.ndim > 1:
        return [plain(item) for item in x]
    if x.ndim:
        return [_number(value) for value in x]
    return _number(x[()])


def _number(value: Any) -> Any:
    if isinstance(value, np.complexfloating):
        return str(complex(value))
    try:
        return float(str(value))  # works for small dtypes that are not NumPy's too
    except ValueError:
        return int(value)


def strict_json(value: Any) -> Any:
    """Replace what JSON lacks: NaN and infinities become strings that parsers of floats know, half characters codes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        names = [_errors.encodable(str(k)) for k in value]
        if len({*names}) < len(names):
            names = list(map(ascii, value))  # which are never the same
        return dict(zip(names, map(strict_json, value.values()), strict=True))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return strict_json(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return strict_json(plain(np.asarray(value)))
    if isinstance(value, str):
        return _errors.encodable(value)
    if value is None or isinstance(value, int | float):
        return value
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return _errors.encodable(repr(value))
    return {jax.tree_util.keystr(tree_path): strict_json(leaf) for tree_path, leaf in leaves}


# --- text, of whole columns: most are numbers, which need no look at each of them ---


def json_text(value: Any) -> str:
    """Return strict JSON."""
    return json.dumps(strict_json(value), allow_nan=False)


def json_texts(column: Column) -> list[str]:
    """Return the value in each row as strict JSON."""
    if not isinstance(column, np.ndarray) or not column.size:
        return list(map(json_text, as_list(column)))
    texts = number_texts(column.reshape(-1), json_text)
    for size in reversed(column.shape[1:]):
        texts = [f"[{', '.join(texts[n : n + size])}]" for n in range(0, len(texts), size)]
    return texts


def number_texts(numbers: np.ndarray, text: Callable[[Any], str]) -> list[str]:
    """Return each number of a one-dimensional array as Python writes it, or by `text` what is not a finite one."""
    if numbers.dtype.kind in "iu":
        return list(map(str, numbers.tolist()))
    if numbers.dtype not in (np.float32, np.float64):
        return list(map(text, plain(numbers)))
    others = ~np.isfinite(numbers)
    if numbers.dtype == np.float32:
        # NumPy writes it in as few digits as `plain` has, and as Python does, but 0.0001 and 1e6 with an exponent.
        size = np.abs(numbers)
        others |= (size == np.float32(1e-4)) | (size >= 1e6)
    texts = list(map(str, numbers if numbers.dtype == np.float32 else numbers.tolist()))
    for n in np.flatnonzero(others):
        texts[n] = text(plain(numbers[n]))
    return texts


class Labels:
    """Unique names for the columns of one file, where a step and a key may have the same name."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._labels: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set(taken)

    def of(self, kind: str, name: str) -> str:
        """Return the column of a step or of a key; if its name is taken, the kind is added."""
        label = self._labels.get((kind, name))
        if label is None:
            label = name
            while _errors.encodable(label) in self._taken:  # what two names have in common in a file
                label = f"{label} [{kind}]"
            self._labels[kind, name] = label
            self._taken.add(_errors.encodable(label))
        return label

    def recall(self, columns: Iterable[str]) -> None:
        """Take over the names that another process gave: where there is `x [key]`, `x` is a step."""
        for column in columns:
            for kind in ("step", "key"):
                name = column.removesuffix(f" [{kind}]")
                if name != column:
                    self._labels[kind, name] = column
                    self._taken.add(column)
