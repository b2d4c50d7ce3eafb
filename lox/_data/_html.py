"""Logs as a table for notebooks: a row per key, with a curve.

Text has the colour of the page; curves have a colour that is visible on light and dark pages. Everything that comes
from the user is escaped.
"""

import base64
import html
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _dataframe
from lox._data._histogram import Histogram, few_bins
from lox._data._image import Image, png

if TYPE_CHECKING:
    from lox._data._dataframe import Column
    from lox._data._logdict import logdict

_WIDTH, _HEIGHT, _POINTS = 160, 28, 80
_COLOUR = "#3b82f6"
_ROWS = 50  # keys shown

_CELL = "padding:2px 10px;text-align:{};border:none;white-space:nowrap;vertical-align:middle"


def to_html(logs: "logdict") -> str:
    """See `logdict._repr_html_`."""
    if any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(logs)):
        return f"<pre>{html.escape(repr(logs))}</pre>"
    columns, media = list(_dataframe.columns(logs)), _media_in(logs)
    columns = [column for column in columns if media.get(column.name, column) is not None]
    rows = [_media_row(c, *media[c.name]) if c.name in media else _row(c) for c in columns[:_ROWS]]
    more = f"<caption style='caption-side:bottom'>and {len(columns) - _ROWS} more</caption>"
    names = ("key", "events", "type", "last", "range", "")
    header = "".join(f"<th style='{_CELL.format('left')};opacity:.6'>{name}</th>" for name in names)
    return _errors.encodable(
        "<table style='border-collapse:collapse;font-size:90%;border:none'>"
        + (more if len(columns) > _ROWS else "")
        + f"<thead><tr>{header}</tr></thead>"
        + "".join(rows)
        + "</table>"
    )


def _row(column: "Column") -> str:
    shape = column.values.shape[column.valid.ndim :]
    kind = f"{column.values.dtype}" + (f"[{', '.join(map(str, shape))}]" if shape else "")
    numbers = _numbers(column)
    numbers = np.where(column.valid.reshape(numbers.shape), numbers, np.nan)
    finite = numbers[np.isfinite(numbers)]
    ends = list(dict.fromkeys([_text(finite.min()), _text(finite.max())])) if len(finite) else []
    return _cells(column, column.name, kind, _last(numbers, column.valid), " … ".join(ends), curve(numbers))


def _cells(column: "Column", name: str, kind: str, last: str, ends: str, picture: str) -> str:
    lanes = column.valid.shape[:-1]
    if lanes:
        kind += f" × {' × '.join(map(str, lanes))} lanes"
    cells = [
        f"<td style='{_CELL.format('left')};font-family:monospace;font-weight:bold'>{html.escape(name)}</td>",
        f"<td style='{_CELL.format('right')}'>{_count(column)}</td>",
        f"<td style='{_CELL.format('left')};opacity:.6'>{html.escape(kind)}</td>",
        f"<td style='{_CELL.format('right')};font-family:monospace'>{last}</td>",
        f"<td style='{_CELL.format('right')};opacity:.6'>{ends}</td>",
        f"<td style='{_CELL.format('left')}'>{picture}</td>",
    ]
    return f"<tr style='background:none'>{''.join(cells)}</tr>"


# --- pictures and histograms ---

_PICTURES = 4  # how many lanes are shown
_PIXELS = 256  # along the longer side; larger pictures are thinned out
_BINS = 40


def _media_in(logs: "logdict") -> "dict[str, Any]":
    """For the leaf that shows a picture or histogram, its name and the object; None for its other leaves."""
    is_media = lambda x: isinstance(x, Histogram | Image)  # noqa: E731
    media: dict[str, Any] = {}
    for key in logs:
        for tree_path, node in jax.tree_util.tree_leaves_with_path(logs[key], is_leaf=is_media):
            if is_media(node):
                name = key + jax.tree_util.keystr(tree_path)
                leaves = jax.tree_util.tree_leaves_with_path(node)
                media.update({name + jax.tree_util.keystr(leaf_path): None for leaf_path, _ in leaves})
                media[f"{name}.{'pixels' if isinstance(node, Image) else 'counts'}"] = name, node
    return media


def _media_row(column: "Column", name: str, node: "Histogram | Image") -> str:
    """A row that shows the last event of each lane."""
    valid = column.valid.reshape(_by_lane(column))
    values = column.values.reshape(*valid.shape, *column.values.shape[column.valid.ndim :])
    last = _last_of_each(values, valid)
    if isinstance(node, Image):
        height, width, _ = values.shape[2:]
        pictures = "".join(map(_picture, last[:_PICTURES])) + (" …" if len(last) > _PICTURES else "")
        return _cells(column, name, f"image {height}×{width}", "", "", pictures)
    counts = np.sum(last, axis=0) if last else np.zeros(values.shape[2:])
    counted, edges = few_bins(Histogram.tree_unflatten(node._edges, (counts, 0, 0, 0)), counts.size)
    ends = f"{_text(edges[0])} … {_text(edges[-1])}" if counts.any() else ""
    return _cells(column, name, f"histogram of {counts.sum():,.0f}", "", ends, bars(counted, edges))


def _picture(pixels: np.ndarray) -> str:
    step = -(-max(pixels.shape[:2]) // _PIXELS)
    data = base64.b64encode(png(pixels[::step, ::step])).decode()
    return (
        f"<img src='data:image/png;base64,{data}' style='max-height:96px;min-height:28px;margin:1px;display:inline;"
        "image-rendering:pixelated' alt='picture'>"
    )


def bars(counts: list[float], edges: list[float]) -> str:
    """An SVG of a histogram, redrawn in bins of equal width."""
    if not any(counts):
        return ""
    even = np.linspace(edges[0], edges[-1], _BINS + 1)
    heights = np.diff(np.interp(even, edges, np.cumsum([0, *counts])))
    heights *= (_HEIGHT - 2) / heights.max()
    width = _WIDTH / _BINS
    shapes = [
        f"<rect x='{n * width:.1f}' y='{_HEIGHT - height:.1f}' width='{width - 0.5:.1f}' height='{height:.1f}' "
        f"fill='{_COLOUR}'/>"
        for n, height in enumerate(heights)
    ]
    return _svg("histogram", "".join(shapes))


def _numbers(column: "Column") -> np.ndarray:
    """Numbers `(lane, event)`: the mean of arrays, the magnitude of complex numbers."""
    values = column.values
    values = np.abs(values) if values.dtype.kind == "c" else values
    lead = column.valid.shape
    with np.errstate(all="ignore"):
        numbers = values.astype(np.float64).reshape(*lead, math.prod(values.shape[len(lead) :]))
        numbers = numbers.mean(-1) if numbers.shape[-1] else np.full(lead, np.nan)
    return numbers.reshape(_by_lane(column))


def _by_lane(column: "Column") -> tuple[int, int]:
    *lanes, events = column.valid.shape
    return math.prod(lanes), events


def _count(column: "Column") -> str:
    counts = column.valid.sum(-1).reshape(-1)
    ends = dict.fromkeys([int(counts.min()), int(counts.max())]) if len(counts) else [0]
    return " – ".join(f"{n:,}" for n in ends)


def _last(numbers: np.ndarray, valid: np.ndarray) -> str:
    last = _last_of_each(numbers, valid.reshape(numbers.shape))
    if not last:
        return "–"
    if len(last) == 1:
        return _text(last[0])
    with np.errstate(all="ignore"):
        return f"{_text(np.mean(last))} ± {_text(np.std(last))}"


def _last_of_each(lanes: np.ndarray, valid: np.ndarray) -> list[Any]:
    return [values[np.flatnonzero(v)[-1]] for values, v in zip(lanes, valid, strict=True) if v.any()]


def _text(x: Any) -> str:
    return html.escape(f"{float(x):.4g}")


def curve(numbers: np.ndarray) -> str:
    """An SVG of numbers `(lane, event)`: their mean as a line, their range as a shade behind it."""
    with np.errstate(all="ignore"):
        present = np.isfinite(numbers)
        count = present.sum(0)
        mean = np.where(count > 0, np.where(present, numbers, 0).sum(0) / np.maximum(count, 1), np.nan)
    low = np.where(present, numbers, np.inf).min(0, initial=np.inf)
    high = np.where(present, numbers, -np.inf).max(0, initial=-np.inf)
    pick = np.flatnonzero(count > 0)
    if len(pick) < 2:
        return ""
    if len(pick) > _POINTS:
        pick = pick[np.linspace(0, len(pick) - 1, _POINTS).round().astype(int)]
    bottom, top = float(low[pick].min()), float(high[pick].max())
    xs = [1 + (_WIDTH - 2) * i / (len(pick) - 1) for i in range(len(pick))]

    def height(y: float) -> float:
        share = 0.5 if top == bottom or not math.isfinite(top - bottom) else (y - bottom) / (top - bottom)
        return _HEIGHT - 2 - (_HEIGHT - 4) * share

    def points(ys: Any, xs: Any) -> str:
        return " ".join(f"{x:.1f},{height(float(y)):.1f}" for x, y in zip(xs, ys, strict=True))

    shade = ""
    if len(numbers) > 1:
        outline = points(high[pick], xs) + " " + points(low[pick][::-1], xs[::-1])
        shade = f"<polygon points='{outline}' fill='{_COLOUR}' fill-opacity='.2'/>"
    line = f"<polyline points='{points(mean[pick], xs)}' fill='none' stroke='{_COLOUR}' stroke-width='1.5'/>"
    return _svg("curve", shade + line)


def _svg(label: str, shapes: str) -> str:
    size = f"width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}'"
    return f"<svg {size} style='display:block' role='img' aria-label='{label}'>{shapes}</svg>"
