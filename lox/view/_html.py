"""Charts in one file that needs nothing else: the charts of the dashboard with their numbers, for a mail or a notebook.

Numbers are JSON in the page, and names are shown as text only. A policy in the page allows the scripts and styles that
lox put there, by their hashes, and nothing else: not even a name that a browser takes for a script would run.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lox import _errors
from lox.view import _bands, _panels, _pixels
from lox.view._pixels import Grid

if TYPE_CHECKING:
    from lox.view._plot import Chart, Drawn, Style

_STATIC = Path(__file__).parent / "static"
_BINS = 1600  # along an axis: as many as a wide screen has pixels
_LANE_BINS = 800


def to_html(charts: "Sequence[Chart]", style: "Style", title: str | None = None) -> str:
    """Return a page with these charts, as text."""
    names = list(dict.fromkeys(drawn.group for chart in charts for drawn in chart.groups))
    panels = [_panel(chart, style, names) for chart in charts]
    # `<` ends no string in JSON, but may end a script in HTML.
    data = json.dumps({"panels": panels}, allow_nan=False).replace("<", "\\u003c")
    styles = "\n".join((_STATIC / name).read_text("utf-8") for name in ("uplot/uPlot.min.css", "app.css"))
    script = "\n".join((_STATIC / name).read_text("utf-8") for name in ("uplot/uPlot.iife.min.js", "chart.js"))
    if "</script" in script or "</style" in styles:
        raise AssertionError("lox's own files would end their element")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    heading = "" if title is None else f'<header id="top"><h1>{html.escape(title)}</h1></header>'
    return _errors.encodable(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title or "lox")}</title>
<style>{styles}</style>
<script>{script}</script>
</head>
<body class="alone">
{heading}
<main id="panels"></main>
<script id="lox-panels" type="application/json">{data}</script>
<noscript>These charts need JavaScript.</noscript>
</body>
</html>
"""
    )


def in_frame(page: str, charts: "Sequence[Chart]", title: str | None = None) -> str:
    """Return a frame for notebooks that shows a page, apart from everything around it."""
    # A page in a sandbox cannot tell its height: this is that of two columns of charts, with legends and notes.
    height = 30 + (50 if title is not None else 0)
    for first in range(0, len(charts), 2):
        height += max(map(_height, charts[first : first + 2]))
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{min(900, height)}px;border:none"></iframe>'
    )


def _height(chart: "Chart") -> int:
    """Return about how many pixels high a chart is, and the gap below it."""
    marks = [mark for drawn in chart.groups for mark in _panels.marks(drawn.curve)[1].values()]
    return 335 + min(18 * len(chart.groups), 100) + 16 * sum(n > 0 for n in marks)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _panel(chart: "Chart", style: "Style", names: list[str]) -> dict[str, Any]:
    shown = [_on_axis(drawn.band.x, style) for drawn in chart.groups]
    ends = [end for x in shown if len(x) for end in (float(x[0]), float(x[-1]))]
    first, last = min(ends, default=0.0), max(ends, default=0.0)
    grid = Grid.of(first, last, _BINS, style.log_x)
    coarse = Grid.of(first, last, _LANE_BINS, style.log_x)
    return {
        "key": chart.name,
        "name": chart.name,
        "kind": "number",
        "x": chart.step,
        "smooth": style.smooth,
        "log_x": style.log_x,
        "log_y": style.log_y,
        "groups": [_group(drawn, style, grid, coarse, names.index(drawn.group)) for drawn in chart.groups],
    }


def _on_axis(x: np.ndarray, style: "Style") -> np.ndarray:
    return x[x > 0] if style.log_x else x


def _group(drawn: "Drawn", style: "Style", grid: Grid, coarse: Grid, color: int) -> dict[str, Any]:
    band, curve = drawn.band, drawn.curve
    start = len(band.x) - len(_on_axis(band.x, style))
    part = _bands.Band(
        band.x[start:], band.center[start:], band.low[start:], band.high[start:], band.n[start:], band.lost[start:],
        band.method,
    )  # fmt: skip
    reduced = _pixels.reduced(part, grid)
    marks, marked = _panels.marks(curve)
    name = drawn.group or (f"{len(curve.lanes)} lanes" if len(curve.lanes) > 1 else "value")
    group: dict[str, Any] = {
        "name": name,
        "color": color,
        "n": [int(band.n.min(initial=len(curve.lanes))), int(band.n.max(initial=0))],
        "lost": int(band.lost.max(initial=0)),
        "method": band.method,
        "per_bin": reduced.most,
        "x": _panels.numbers(reduced.x),
        "center": _panels.numbers(reduced.center),
        "low": _panels.numbers(reduced.low),
        "high": _panels.numbers(reduced.high),
        "at": reduced.n.tolist(),
        "marks": marks,
        "marked": marked,
    }
    if reduced.most > 2:
        group |= {"low_there": _panels.numbers(reduced.low_there), "high_there": _panels.numbers(reduced.high_there)}
    if style.lanes and len(curve.lanes) > 1:
        values = _bands.smooth(curve.values, style.smooth) if style.smooth else curve.values
        x, values, most = _pixels.reduced_lanes(curve.x[start:], values[:, start:], coarse)
        rows = [_panels.numbers(row) for row in values]
        group["single"] = {"names": list(curve.lanes), "x": _panels.numbers(x), "values": rows, "per_bin": most}
    return group
