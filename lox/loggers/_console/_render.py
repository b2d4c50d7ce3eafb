"""Turns the console's numbers into text, without a terminal.

`table` makes the live display, `line` its replacement where there is no terminal. `rich` is imported when something is
drawn, not with lox.
"""

import itertools
import math
from typing import Any

from lox import _errors
from lox.loggers._console._board import BoardView, KeyView

_BLOCKS = "▁▂▃▄▅▆▇█"
_TREND = 20  # columns


def number(x: float, is_integer: bool = False) -> str:
    """Format with four digits, or an integer with separated thousands."""
    if not math.isfinite(x):
        return str(x)
    if is_integer and x == round(x) and abs(x) < 1e15:
        return f"{int(x):,}"
    return f"{x:.4g}"


def sparkline(values: tuple[float, ...] | list[float], width: int = _TREND) -> str:
    """Draw a curve in one line of text, with a dot for NaN."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        parts = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(part) / len(part) for part in parts]
    finite = [x for x in values if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(x: float) -> str:
        if not math.isfinite(x):
            return "·"
        if high == low:
            return _BLOCKS[3]
        return _BLOCKS[min(int((x - low) / (high - low) * len(_BLOCKS)), len(_BLOCKS) - 1)]

    return "".join(map(block, values))


def duration(seconds: float) -> str:
    """Format as `1:02:03` or `2:03`."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rate(per_second: float, unit: str = "") -> str:
    """Format as `1.2k/s`."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.1f}{prefix}{unit}/s"
    return f"{per_second:.0f}{unit}/s" if per_second >= 10 else f"{per_second:.1f}{unit}/s"


def remaining(done: float, total: float, elapsed: float, first: float = 0.0) -> str:
    """Estimate the time left from the speed so far, which is that since the first step."""
    if done >= total:
        return "done"
    new = done - first
    return f"eta {duration(elapsed * (total - done) / new)}" if new > 0 and elapsed > 0 else "eta -:--"


def title(view: BoardView) -> str:
    """Name the run, or count the runs."""
    resumed = f", resumed at {_short(view.resumed[0])}" if len(view.resumed) == 1 else ", resumed" * bool(view.resumed)
    if len(view.runs) == 1:
        return f"run {_short(view.runs[0])}{resumed}"
    return f"{len(view.runs)} runs{resumed}" if view.runs else "no runs"


def _short(name: str, width: int = 40) -> str:
    name = _errors.printable(name)
    return name if len(name) <= width else name[: width // 2] + "…" + name[-(width // 2 - 1) :]


def sections(keys: tuple[KeyView, ...]) -> dict[str, list[KeyView]]:
    """Group keys by the part before their last slash; those without a slash come first."""
    groups: dict[str, list[KeyView]] = {"": []}
    for view in keys:
        groups.setdefault(view.key.rpartition("/")[0], []).append(view)
    return {name: views for name, views in groups.items() if views}


def line(view: BoardView, many: int = 8) -> str:
    """Format everything in one line."""
    parts = [f"{duration(view.elapsed)} {title(view)}"]
    progress = {name: rest for name, *rest in view.progress}
    for name, value in view.steps:
        text = f"{_short(name)} {number(value, True)}"
        if name in progress:
            done, total, first = progress[name]
            text += f"/{number(total, True)} ({done / total:.0%}, {remaining(done, total, view.elapsed, first)})"
        parts.append(text)
    for key in view.keys[:many]:
        spread = f" ± {number(key.std)}" if key.runs > 1 and math.isfinite(key.mean) else ""
        spread += f" ({key.bad} of {key.runs} not finite)" if key.bad and key.runs > 1 else ""
        parts.append(f"{_short(key.key)} {number(key.mean, key.is_integer)}{spread}")
    if len(view.keys) > many:
        parts.append(f"and {len(view.keys) - many} more")
    return " | ".join(parts)


def bar(done: float, total: float, width: int) -> Any:
    """Draw a progress bar with characters that every font has."""
    from rich.text import Text

    share = min(max(done / total, 0.0), 1.0) if total > 0 else 1.0
    full = int(share * width)
    half = int((share * width - full) * 2)
    style = "green" if share >= 1 else "cyan"
    text = Text("━" * full, style=style)
    text.append("╸" * half, style=style)
    text.append("━" * (width - full - half), style="bright_black")
    return text


def bar_row(name: str, done: float, total: float | None, elapsed: float, width: int, first: float = 0.0) -> Any:
    """Draw a bar with its name, share, count, speed and the time left."""
    from rich.text import Text

    speed = rate(max(done - first, 0.0) / elapsed, "it") if elapsed > 0 else ""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{_short(name, 20)} ", style="bold")
    if total is None:
        text.append(f"{number(done, True)}  {speed}  {duration(elapsed)}", style="default")
        return text
    count = f"{number(done, True)}/{number(total, True)}"
    tail = f" {done / total if total else 1.0:4.0%}  {count}  {speed}  {remaining(done, total, elapsed, first)}"
    text.append_text(bar(done, total, max(10, min(40, width - len(text) - len(tail)))))
    text.append(tail[:5], style="bold")
    text.append(tail[5:], style="bright_black")
    return text


def table(view: BoardView, width: int = 100, height: int | None = None) -> Any:
    """Draw the live display: keys in sections, bars below; keys that do not fit are counted."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    grid, hidden = _grid(view, width, height)
    head = Text(no_wrap=True, overflow="ellipsis")
    for name, value in view.steps:
        head.append(f"{_short(name, 20)} ", style="bright_black")
        head.append(f"{number(value, True)}   ", style="bold")
    parts: list[Any] = [head] if view.steps else []
    parts += [grid] if view.keys else [Text("waiting for events", style="bright_black italic")]
    if hidden:
        parts.append(Text(f"and {hidden} more keys", style="bright_black italic"))
    if view.progress:
        parts.append(Text())
    parts += [bar_row(name, done, total, view.elapsed, width - 4, first) for name, done, total, first in view.progress]
    speed = f"{view.events:,} events  {rate(view.rate)}  {duration(view.elapsed)}"
    return Panel(
        Group(*parts),
        title=Text(title(view), style="bold"),
        title_align="left",
        subtitle=Text(speed, style="bright_black"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(0, 1),
        width=min(width, 100),
    )


def _grid(view: BoardView, width: int, height: int | None) -> tuple[Any, int]:
    from rich.table import Table
    from rich.text import Text

    several = any(key.runs > 1 for key in view.keys)
    grid = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="bright_black", show_edge=False)
    grid.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column("mean" if several else "last", justify="right", no_wrap=True)
    if several:
        grid.add_column("± std", justify="left", no_wrap=True)
        if width >= 80:
            grid.add_column("min", justify="right", no_wrap=True)
            grid.add_column("max", justify="right", no_wrap=True)
    grid.add_column("trend", no_wrap=True, min_width=_TREND if width >= 60 else 8)
    room = math.inf if height is None else max(3, height - 5 - 2 * bool(view.progress) - len(view.progress))
    hidden = 0
    for name, keys in sections(view.keys).items():
        if room < 1 + bool(name):
            hidden += len(keys)
            continue
        if name:
            grid.add_row(Text(_short(name), style="bold magenta"))
            room -= 1
        for key in keys:
            if room < 1:
                hidden += 1
                continue
            room -= 1
            grid.add_row(*_cells(key, bool(name), several, width))
    return grid, hidden


def _cells(key: KeyView, indented: bool, several: bool, width: int) -> list[Any]:
    from rich.text import Text

    label = Text("  " * indented + _short(key.key.rpartition("/")[2] if indented else key.key))
    if key.shape:
        label.append(f" [{'×'.join(map(str, key.shape))}]", style="bright_black")
    if key.bad and key.runs > 1:
        label.append(f" {key.bad} of {key.runs} not finite", style="red")
    good = math.isfinite(key.mean)
    cells = [label, Text(number(key.mean, key.is_integer), style="bold" if good else "bold red")]
    if several:
        cells.append(Text(f"± {number(key.std)}" if key.runs > 1 and good else "", style="bright_black"))
        if width >= 80:
            cells += [Text(number(x, key.is_integer), style="default") for x in (key.low, key.high)]
    cells.append(Text(sparkline(key.history, _TREND if width >= 60 else 8), style="red" if key.bad else "cyan"))
    return cells
