"""`lox.plot`: curves of every key, mean and band over lanes, as a picture or as a page of its own."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lox import _errors
from lox._data._logdict import logdict
from lox._engine import _selection
from lox.store import Runs
from lox.store._reader import runs_in
from lox.store._table import Where
from lox.view import _bands, _groups
from lox.view._bands import Band
from lox.view._curves import WALL, Curve, curves

if TYPE_CHECKING:
    from lox.view._compare import Comparison

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; then the same with dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f00", "#666666")
_DASHES = ("-", "--", ":", "-.")
_BELOW = 1e-300  # the lower edge of a logarithmic axis, wherever that is
_FORMATS = (".html", ".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A group of lanes in a chart: its curve, and what is drawn of it."""

    group: str
    curve: Curve
    band: Band


@dataclasses.dataclass(frozen=True)
class Chart:
    """The curves of one name, one for each group of lanes."""

    name: str
    step: str
    groups: tuple[Drawn, ...]


@dataclasses.dataclass(frozen=True)
class Style:
    """How to draw charts: single lanes too, logarithmic axes, smoothing of single lanes."""

    lanes: bool = False
    log_x: bool = False
    log_y: bool = False
    smooth: float = 0.0


class Plot:
    """What `lox.plot` returns: notebooks show it, `save` writes it to a file.

    Attributes:
        charts: The charts, with the numbers that are drawn.
    """

    def __init__(self, charts: Sequence[Chart], style: Style, title: str | None):
        self.charts, self.style, self.title = tuple(charts), style, title

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot to a file: `.html` is a page of its own; `.png`, `.svg` and `.pdf` are made by matplotlib."""
        path = Path(path)
        _check_format(path)
        if path.suffix.lower() == ".html":
            path.write_text(self.to_html(), encoding="utf-8")
        else:
            _save_figure(self.figure(), path)
        return path

    def to_html(self) -> str:
        """Return a page that needs nothing else: the same charts as in the dashboard."""
        from lox.view import _html

        return _html.to_html(self.charts, self.style, self.title)

    def figure(self) -> Any:
        """Return a `matplotlib` figure."""
        return _figure(self.charts, self.style, self.title)

    def _repr_html_(self) -> str:
        """For notebooks: the page, in a frame."""
        from lox.view import _html

        return _html.in_frame(self.to_html(), self.charts, self.title)

    def __repr__(self) -> str:
        names = _errors.listing([_errors.printable(chart.name) for chart in self.charts[:8]])
        more = f" and {len(self.charts) - 8} more" if len(self.charts) > 8 else ""
        groups = {drawn.group for chart in self.charts for drawn in chart.groups}
        several = f" in {len(groups)} groups" if len(groups) > 1 else ""
        return f"<plot of {names}{more}{several}: .save('plot.html'), .save('plot.png')>"


def plot(
    logs: Any,
    key: str | Iterable[str] | None = None,
    *,
    x: str | None = None,
    band: str = "ci95",
    lanes: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    smooth: float = 0.0,
    by: str | Iterable[str] | None = None,
    where: Where | None = None,
    title: str | None = None,
    save: str | os.PathLike[str] | None = None,
) -> Plot:
    """Plot the curves of every key: mean and band over lanes.

    >>> import tempfile, jax, numpy as np, lox
    >>> directory = tempfile.mkdtemp()
    >>> for seed in range(4):
    ...     loss = lox.logdict.from_arrays({"train/loss": seed + np.ones(3)}, steps={"step": np.arange(3)})
    ...     lox.save(loss, directory, jax.random.key(seed))
    >>> plot = lox.plot(directory, "train/*")
    >>> plot
    <plot of 'train/loss': .save('plot.html'), .save('plot.png')>
    >>> plot.charts[0].groups[0].band.center
    array([2.5, 2.5, 2.5])

    The lanes of a logdict are one group. Runs are grouped by their config: the lanes of one `vmap` with equal configs
    belong together, and so do runs that were begun one by one with equal configs; a seed is not a difference. Of lanes
    inside a run, or inside the outermost lanes of a logdict, each has a curve of its own, `loss/0`.

    A mean is over the lanes that have an event exactly there: nothing is interpolated. What lanes log at different
    steps, such as the lengths of episodes, is better drawn over its number: `x="event"`, or a step `episode`. A lane is
    left out where it is NaN or infinite, and is marked there.

    Args:
        logs: A directory, what `lox.load` returns, a logdict, or a mapping from the name of a group to its logs.
        key: Which keys; names or globs.
        x: The axis: the name of a step, `"event"` for the number of the event, or `"wall"` for the time since the run
            began, in seconds. By default `step`, or else the first step of a key, or else the number of the event.
        band: `"ci95"`: mean and its 95% confidence interval; `"std"`: mean and standard deviation; `"quantiles"`:
            median and quartiles; `"iqm"`: interquartile mean and its 95% confidence interval, by bootstrap;
            `"minmax"`: mean, minimum and maximum.
        lanes: Whether to draw single lanes too, as thin lines.
        log_x: Whether `x` is logarithmic.
        log_y: Whether values are on a logarithmic axis.
        smooth: From 0 to below 1: the weight of what came before in an exponential moving mean. It is marked.
        by: Names in the config: runs with equal values are a group.
        where: Plot only runs with these values in their config, as for `lox.load`.
        title: A title over all charts.
        save: A file to write it to at once, as by `Plot.save`.
    """
    _bands.check_kind(band)
    if not isinstance(smooth, int | float) or isinstance(smooth, bool) or not 0 <= smooth < 1:
        raise _errors.OptionError(f"`smooth` is {smooth!r}; it must be from 0, which smooths nothing, to below 1.")
    if save is not None:
        _check_format(Path(save))
    charts = []
    for name, step, groups in _grouped(logs, key, x, by, where):
        drawn = [Drawn(group, curve, _bands.smoothed(_bands.band(curve, band), smooth)) for group, curve in groups]
        charts.append(Chart(name, step, tuple(drawn)))
    if not charts:
        raise _errors.LoxError("there is nothing to plot: no number was logged.")
    made = Plot(charts, Style(lanes, log_x, log_y, smooth), title)
    if save is not None:
        made.save(save)
    return made


_Grouped = list[tuple[str, str, list[tuple[str, Curve]]]]  # names, steps, and the curves by group


def _grouped(logs: Any, key: Any, x: str | None, by: Any, where: Where | None) -> _Grouped:
    if isinstance(logs, str | os.PathLike):
        runs = runs_in(logs, where, wall=x == WALL)
        return _of_runs(runs, key, x, by)
    if isinstance(logs, Runs):
        runs = logs if where is None else logs.only(names=[run.name for run in logs.table.where(where)])
        return _of_runs(runs, key, x, by)
    if not isinstance(logs, Mapping):
        raise _errors.OptionError(
            f"`lox.plot` got {type(logs).__name__}: give it a directory, what `lox.load` returns, or logs."
        )
    for option, given in (("by", by), ("where", where)):
        if given is not None:
            raise _errors.OptionError(f"`{option}` is for runs with a config, and these are logs without one.")
    if isinstance(logs, logdict) or not all(isinstance(one, Mapping) for one in logs.values()):
        logs = logs if isinstance(logs, logdict) else logdict(logs)
        return [(c.name, c.step, [("", c)]) for c in curves(logs, key, x)]
    together: dict[tuple[str, str], list[tuple[str, Curve]]] = {}
    for group, one in logs.items():
        for curve in curves(one if isinstance(one, Runs | logdict) else logdict(one), key, x):
            together.setdefault((curve.name, curve.step), []).append((str(group), curve))
    return [(name, step, groups) for (name, step), groups in together.items()]


def _of_runs(runs: Runs, key: Any, x: str | None, by: Any) -> _Grouped:
    if key is not None:
        patterns, known = _selection.names("key", key), runs.logged
        problem = _selection.unmatched("argnames", patterns, known)
        if problem and not any(_selection.matches(one, patterns) for one in known):
            raise _errors.KeyNotFoundError(problem.replace("`argnames`", "`key`", 1))
    table = runs.table
    began = [run.opened.timestamp() for run in table]
    groups = _groups.groups(table, by)
    place = {name: n for n, name in enumerate(runs)}
    made: _Grouped = []
    for curve in curves(runs, key, x, began if x == WALL else None):
        parts = [(group.name, curve.of_lanes([place[name] for name in group.runs])) for group in groups]
        made.append((curve.name, curve.step, [(name, part) for name, part in parts if part is not None]))
    return made


# --- pictures ---


class End(NamedTuple):
    """Where a lane ends before others, or turns NaN: its last finite point."""

    lane: str
    why: str
    x: float
    value: float


def ends_of_lanes(curve: Curve) -> list[End]:
    """Return where lanes end before others or turn NaN for good."""
    if len(curve.lanes) < 2 or not curve.there.any():
        return []
    finite = np.isfinite(curve.values) & curve.there
    last_point = int(np.flatnonzero(curve.there.any(0))[-1])
    marks = []
    for name, values, there, good in zip(curve.lanes, curve.values, curve.there, finite, strict=True):
        if not there.any():
            continue
        last = int(np.flatnonzero(there)[-1])
        at = np.flatnonzero(good)
        if len(at) and (not good[last] or last < last_point):
            marks.append(
                End(name, "NaN" if not good[last] else "stopped", float(curve.x[at[-1]]), float(values[at[-1]]))
            )
    return marks


def axis_label(step: str) -> str:
    """Return what stands at an axis."""
    return "seconds since the run began" if step == WALL else step


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib: pip install "lox-jax[plot]". An .html file needs nothing more.'
        ) from error
    return matplotlib


def _new_figure(width: float, height: float) -> Any:
    # Not by pyplot, which keeps every figure and chooses a display.
    figure = _matplotlib().figure.Figure(figsize=(width, height), layout="constrained", dpi=120)
    figure._repr_png_ = functools.partial(_png, figure)  # or a notebook shows no more than its size
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _figure(charts: Sequence[Chart], style: Style, title: str | None) -> Any:
    columns = min(len(charts), 3 if len(charts) > 4 else 2 if len(charts) > 1 else 1)
    rows = math.ceil(len(charts) / columns)
    figure = _new_figure(max(4.8 * columns, 6.4), 3.3 * rows + 0.7)
    groups = list(dict.fromkeys(drawn.group for chart in charts for drawn in chart.groups))
    for n, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, n + 1)
        for drawn in chart.groups:
            _draw(axes, drawn, groups.index(drawn.group), style)
        _label(axes, chart.name, axis_label(chart.step), style)
        if style.log_y:
            axes.set_ylim(*_limits(chart, style))
        if any(drawn.group for drawn in chart.groups):
            axes.legend(fontsize="small", frameon=False)
    everything = [drawn for chart in charts for drawn in chart.groups]
    notes = list(dict.fromkeys(_method(drawn.band) for drawn in everything))
    if style.log_y and any((drawn.curve.values <= 0).any() for drawn in everything):
        notes.append("what is not positive has no place on a logarithmic axis")
    whys = {end.why for drawn in everything for end in ends_of_lanes(drawn.curve)}
    notes += [text for why, text in (("NaN", "×: a lane turns NaN"), ("stopped", "|: a lane stops")) if why in whys]
    figure.supxlabel("; ".join(notes), fontsize="x-small", color="#666666")
    if title is not None:
        figure.suptitle(_plain(title))
    return figure


def _method(band: Band) -> str:
    """Return what is drawn, without how many lanes that is over, which the legend says."""
    return ", ".join(word for word in band.method.split(", ") if not word.endswith((" lane", " lanes")))


def _draw(axes: Any, drawn: Drawn, number: int, style: Style) -> None:
    colour, dashes = COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
    curve, band = drawn.curve, drawn.band
    # What a logarithmic axis cannot show is a gap; a band goes on to the lower edge.
    shown = (lambda x: np.where(x > 0, x, np.nan)) if style.log_y else lambda x: x
    if style.lanes and len(curve.lanes) > 1:
        values = _bands.smooth(curve.values, style.smooth) if style.smooth else curve.values
        for lane, there in zip(shown(values), curve.there, strict=True):
            axes.plot(curve.x[there], lane[there], color=colour, linewidth=0.5, alpha=0.45)
    fewest, most = int(band.n.min(initial=len(curve.lanes))), int(band.n.max(initial=0))
    n = f"n={most}" if fewest >= most else f"n={fewest}–{most}"
    few = len(band.x) < 2 or np.isfinite(band.center).sum() < 2
    line = {"color": colour, "linestyle": dashes, "linewidth": 1.5, "marker": "o" if few else None, "markersize": 3}
    axes.plot(band.x, shown(band.center), label=_plain(f"{drawn.group} ({n})" if drawn.group else n), **line)
    low = np.maximum(band.low, _BELOW) if style.log_y else band.low
    axes.fill_between(band.x, low, shown(band.high), color=colour, alpha=0.18, linewidth=0)
    for end in ends_of_lanes(curve):
        mark = "x" if end.why == "NaN" else "|"
        axes.plot([end.x], shown(np.array([end.value])), mark, color=colour, markersize=6, markeredgewidth=1.2)


def _limits(chart: Chart, style: Style) -> tuple[float, float]:
    """Return the ends of a logarithmic axis: of all that it can show but the lower edges of bands."""
    arrays = [x for drawn in chart.groups for x in (drawn.band.center, drawn.band.high)]
    arrays += [drawn.curve.values.ravel() for drawn in chart.groups if style.lanes]
    shown = [x[(x > 0) & np.isfinite(x)] for x in arrays]
    low = min((float(x.min()) for x in shown if len(x)), default=0.1)
    high = max((float(x.max()) for x in shown if len(x)), default=1.0)
    margin = max((high / low) ** 0.05, 1.1)
    return low / margin, high * margin


def _label(axes: Any, title: str, label: str, style: Style) -> None:
    axes.set_title(_plain(title), fontsize="medium")
    axes.set_xlabel(_plain(label), fontsize="small")
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if style.log_x:
        axes.set_xscale("log")
    if style.log_y:
        axes.set_yscale("log")


def _plain(text: str) -> str:
    """Escape what matplotlib would take for mathematics, and replace what fonts do not have."""
    return _errors.printable(_errors.encodable(text)).replace("$", r"\$")


def _check_format(path: Path) -> None:
    if path.suffix.lower() not in _FORMATS:
        raise _errors.OptionError(
            f"cannot plot to {str(path)!r}: its name must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}."
        )


def _save_figure(figure: Any, path: Path) -> None:
    matplotlib = _matplotlib()
    # Text stays text, and the same plot is the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lox"}):
        plain = {"Date": None} if path.suffix.lower() == ".svg" else {"CreationDate": None}
        figure.savefig(path, metadata=None if path.suffix.lower() == ".png" else plain)


# --- comparisons ---


def plot_comparison(found: "Comparison", path: str | os.PathLike[str] | None, title: str | None) -> Any:
    """Draw the intervals of the groups of a comparison, and their curves."""
    if path is not None and Path(path).suffix.lower() not in _FORMATS[1:]:
        raise _errors.OptionError(f"cannot draw a comparison to {str(path)!r}: choose .png, .svg or .pdf.")
    height = max(2.6, 0.45 * len(found.groups) + 1.4)
    figure = _new_figure(12, height + 0.6)
    grid = figure.add_gridspec(1, 4, width_ratios=[1, 1, 1, 1.9])
    names = [group.name for group in found.groups]
    first = None
    for column, statistic in enumerate(("mean", "median", "iqm")):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axes
        for row, group in enumerate(found.groups):
            one, colour = getattr(group, statistic), COLOURS[row % len(COLOURS)]
            axes.plot([one.low, one.high], [row, row], color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt")
            axes.plot([one.value], [row], "|", color=colour, markersize=14, markeredgewidth=2)
        _label(axes, {"iqm": "IQM"}.get(statistic, statistic), found.key, Style())
        axes.tick_params(labelleft=column == 0)
    assert first is not None
    labels = [
        f"{group.name} (n={group.n}{f', {len(group.lost)} lost' if group.lost else ''})" for group in found.groups
    ]
    first.set_yticks(range(len(names)), list(map(_plain, labels)))
    first.set_ylim(len(names) - 0.5, -0.5)
    axes = figure.add_subplot(grid[0, 3])
    for row, (name, band) in enumerate(found.efficiency.items()):
        colour = COLOURS[row % len(COLOURS)]
        axes.plot(band.x, band.center, color=colour, label=_plain(name), linewidth=1.5)
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    _label(axes, "IQM over steps", axis_label(next(iter(found.curves.values())).step), Style())
    figure.supxlabel(_plain("; ".join(found.methods)), fontsize="xx-small", color="#666666", wrap=True)
    figure.suptitle(_plain(title or f"{found.key}, {found.better} is better"))
    if path is not None:
        _save_figure(figure, Path(path))
    return figure
