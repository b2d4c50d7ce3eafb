"""Logs as a table for notebooks: a row per key, with a curve.

Text has the colours of the page and curves one that is seen on light and dark pages alike. Everything that comes from
the user is escaped.
"""

import html
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lox import _compat, _frame

if TYPE_CHECKING:
    from lox._frame import Column
    from lox._logdict import logdict

_WIDTH, _HEIGHT, _POINTS = 160, 28, 80
_COLOUR = "#3b82f6"
_ROWS = 50  # keys shown

_CELL = "padding:2px 10px;text-align:{};border:none;white-space:nowrap;vertical-align:middle"


def to_html(logs: "logdict") -> str:
    """See `logdict._repr_html_`."""
    if any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(logs)):
        return f"<pre>{html.escape(repr(logs))}</pre>"
    columns = list(_frame.columns(logs))
    rows = [_row(column) for column in columns[:_ROWS]]
    more = f"<caption style='caption-side:bottom'>and {len(columns) - _ROWS} more</caption>"
    return (
        "<table style='border-collapse:collapse;font-size:90%;border:none'>"
        + (more if len(columns) > _ROWS else "")
        + _header("key", "events", "type", "last", "range", "")
        + "".join(rows)
        + "</table>"
    )


def _header(*names: str) -> str:
    cells = "".join(f"<th style='{_CELL.format('left')};opacity:.6'>{name}</th>" for name in names)
    return f"<thead><tr>{cells}</tr></thead>"


def _row(column: "Column") -> str:
    shape = column.values.shape[column.valid.ndim :]
    kind = f"{column.values.dtype}" + (f"[{', '.join(map(str, shape))}]" if shape else "")
    lanes = column.valid.shape[:-1]
    if lanes:
        kind += f" × {' × '.join(map(str, lanes))} lanes"
    numbers = _numbers(column)
    happened = np.where(column.valid.reshape(numbers.shape), numbers, np.nan)
    finite = happened[np.isfinite(happened)]
    ends = list(dict.fromkeys([_text(finite.min()), _text(finite.max())])) if len(finite) else []
    cells = [
        f"<td style='{_CELL.format('left')};font-family:monospace;font-weight:bold'>{html.escape(column.name)}</td>",
        f"<td style='{_CELL.format('right')}'>{_count(column)}</td>",
        f"<td style='{_CELL.format('left')};opacity:.6'>{html.escape(kind)}</td>",
        f"<td style='{_CELL.format('right')};font-family:monospace'>{_last(happened, column.valid)}</td>",
        f"<td style='{_CELL.format('right')};opacity:.6'>{' … '.join(ends)}</td>",
        f"<td style='{_CELL.format('left')}'>{curve(happened)}</td>",
    ]
    return f"<tr style='background:none'>{''.join(cells)}</tr>"


def _numbers(column: "Column") -> np.ndarray:
    """`(lane, event)`; arrays by their mean, complex numbers by their magnitude."""
    values = column.values
    values = np.abs(values) if values.dtype.kind == "c" else values
    lead = column.valid.shape
    with np.errstate(all="ignore"):
        numbers = values.astype(np.float64).reshape(*lead, -1)
        numbers = numbers.mean(-1) if numbers.shape[-1] else np.full(lead, np.nan)
    return numbers.reshape(-1, lead[-1])


def _count(column: "Column") -> str:
    counts = column.valid.sum(-1).reshape(-1)
    if not len(counts) or counts.min() == counts.max():
        return f"{int(counts[0]):,}" if len(counts) else "0"
    return f"{int(counts.min()):,} – {int(counts.max()):,}"


def _last(numbers: np.ndarray, valid: np.ndarray) -> str:
    valid = valid.reshape(numbers.shape)
    last = [lane[np.flatnonzero(happened)[-1]] for lane, happened in zip(numbers, valid, strict=True) if happened.any()]
    if not last:
        return "–"
    if len(last) == 1:
        return _text(last[0])
    with np.errstate(all="ignore"):
        return f"{_text(np.mean(last))} ± {_text(np.std(last))}"


def _text(x: Any) -> str:
    return html.escape(f"{float(x):.4g}")


def curve(numbers: np.ndarray) -> str:
    """An SVG of `(lane, event)`: the mean as a line, and what all lanes do as a shade behind it."""
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
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}' style='display:block' role='img' "
        f"aria-label='curve'>{shade}{line}</svg>"
    )
