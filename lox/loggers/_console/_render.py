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
_LEAST_BAR, _LEAST_KEY = 6, 12


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


def title(view: BoardView, width: int | None = None) -> str:
    """Name the run, or count the runs."""
    resumed = f", resumed at {_end(view.resumed[0])}" if len(view.resumed) == 1 else ", resumed" * bool(view.resumed)
    if len(view.runs) == 1:
        return f"run {_short(view.runs[0], 40 if width is None else max(8, width - 4 - len(resumed)))}{resumed}"
    return f"{len(view.runs)} runs{resumed}" if view.runs else "no runs yet"


def _short(name: str, width: int = 40) -> str:
    """Cut a name in the middle."""
    name = _errors.printable(name)
    return name if _width(name) <= width else _cut(name, width // 2) + "…" + _end(name, width - width // 2)[1:]


def _end(name: str, width: int = 40) -> str:
    """Cut a key at its beginning: what tells keys apart is mostly at their end."""
    name = _errors.printable(name)
    return name if _width(name) <= width else "…" + _cut(name[::-1], width - 1)[::-1]


def _width(text: str) -> int:
    """How many columns a text takes: some characters take two, some none."""
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, width: int) -> str:
    text = text[: 4 * width]  # long texts would take long
    while _width(text) > width:
        text = text[:-1]
    return text


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
        text = f"{_end(name)} {number(value, True)}"
        if name in progress:
            done, total, first = progress[name]
            text += f"/{number(total, True)} ({done / total:.0%}, {remaining(done, total, view.running, first)})"
        parts.append(text)
    for key in view.keys[:many]:
        spread = f" ± {number(key.std)}" if key.runs > 1 and math.isfinite(key.mean) else ""
        spread += f" ({key.bad} of {key.runs} not finite)" if key.bad and key.runs > 1 else ""
        parts.append(f"{_end(key.key)} {number(key.mean, key.is_integer)}{spread}")
    if view.compiling is not None and not view.keys:
        parts.append("compiling ...")
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
    """Draw a bar with its name, share, count, speed and the time left; the bar and the speed go where room is short."""
    from rich.text import Text

    speed = rate(max(done - first, 0.0) / elapsed, "it") if elapsed > 0 else ""
    text = Text(no_wrap=True, overflow="ellipsis")
    if total is None:
        tail = f"{number(done, True)}  {speed}  {duration(elapsed)}"
        text.append(f"{_end(name, max(4, min(20, width - len(tail) - 1)))} ", style="bold")
        return text.append(tail, style="default")
    share = f" {done / total if total else 1.0:4.0%}"
    count, left = f"{number(done, True)}/{number(total, True)}", remaining(done, total, elapsed, first)
    label = _end(name, 20)
    tail = f"  {count}  {speed}  {left}"
    if _width(label) + 1 + len(share) + len(tail) + _LEAST_BAR > width:
        tail = f"  {count}  {left}" if 4 + len(share) + len(count) + len(left) + 5 <= width else f"  {left}"
    label = _end(name, max(4, min(20, width - 1 - len(share) - len(tail))))
    room = width - _width(label) - 1 - len(share) - len(tail)
    text.append(f"{label} ", style="bold")
    if room >= _LEAST_BAR:
        text.append_text(bar(done, total, min(40, room)))
    text.append(share if room >= _LEAST_BAR else share.strip(), style="bold")
    text.append(tail, style="bright_black")
    return text


def table(view: BoardView, width: int = 100, height: int | None = None) -> Any:
    """Draw the live display: keys in sections, bars below; keys that do not fit are counted."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inner = min(width, 100) - 4
    head = _head(view, inner)
    parts: list[Any] = [*head]
    if view.keys:
        room = math.inf if height is None else height - 4 - len(head) - 2 * bool(view.progress) - len(view.progress)
        rows, hidden = _rows(view, inner, max(3, room))
        parts += rows
        if hidden:
            parts.append(Text(f"and {hidden} more keys", style="bright_black italic"))
    else:
        parts += _waiting(view, inner)
    if view.progress:
        parts.append(Text())
    parts += [bar_row(name, done, total, view.running, inner, first) for name, done, total, first in view.progress]
    below = [f"compiling ... {duration(view.compiling)}"] if view.compiling is not None and view.keys else []
    below += [f"{view.events:,} events", rate(view.rate)] if view.events else []
    return Panel(
        Group(*parts),
        title=Text(title(view, inner - 2), style="bold"),
        title_align="left",
        subtitle=Text("  ".join([*below, duration(view.elapsed)]), style="bright_black"),
        subtitle_align="right",
        border_style="bright_black",
        padding=(0, 1),
        width=min(width, 100),
    )


def _head(view: BoardView, width: int) -> list[Any]:
    """Show the steps, in as many lines as they need."""
    from rich.text import Text

    lines: list[Any] = []
    for name, value in view.steps:
        step = number(value, True)
        label = _end(name, max(4, min(20, width - len(step) - 1)))
        if not lines or _width(lines[-1].plain) + _width(label) + 1 + len(step) > width:
            lines.append(Text(no_wrap=True))
        lines[-1].append(f"{label} ", style="bright_black").append(f"{step}", style="bold").append("   ")
    return lines


def _waiting(view: BoardView, width: int) -> list[Any]:
    """Say what is to come, before there is any event; and which runs there are."""
    from rich.text import Text

    if view.compiling is not None:
        parts = [Text(f"compiling ... {duration(view.compiling)}", style="bright_black italic")]
    else:
        parts = [Text("waiting for events", style="bright_black italic")]
    if len(view.runs) > 1:
        more = f", and {len(view.runs):,} more"
        shown: list[str] = []
        for name in [_short(name) for name in view.runs[:100]]:
            if sum(_width(x) + 2 for x in [*shown, name]) + len(more) > width:
                break
            shown.append(name)
        rest = len(view.runs) - len(shown)
        parts.append(Text(", ".join(shown) + (f", and {rest:,} more" if rest and shown else ""), style="bright_black"))
    return parts


def _rows(view: BoardView, width: int, room: float) -> tuple[list[Any], int]:
    """Draw a line for every key and every section; return them, and how many keys did not fit."""
    from rich.text import Text

    several = any(key.runs > 1 for key in view.keys)
    cells = {key.key: _numbers(key, several) for key in view.keys}
    groups = sections(view.keys)
    labels = {key.key: _label(key, bool(name)) for name, keys in groups.items() for key in keys}
    header = ["mean", "± std", "min", "max"] if several else ["last"]
    widths = [max(map(len, column)) for column in zip(header, *cells.values(), strict=True)]
    wanted = max(sum(map(_width, label)) for label in labels.values())
    used, trend, first = _layout(widths, min(wanted, max(24, width // 2)), width)

    def line(label: Any, numbers: list[str], styles: list[str], history: Any) -> Any:
        label.truncate(first, pad=True)
        for n, (cell, style) in enumerate(zip(numbers[:used], styles, strict=False)):
            cell = cell.ljust(widths[n]) if several and n == 1 else cell.rjust(widths[n])
            label.append("  ").append(cell, style=style)
        return label.append("  ").append_text(history) if trend else label

    top = line(Text(no_wrap=True), header, ["bright_black"] * 4, Text("trend", style="bright_black"))
    lines, hidden = [top], 0
    for name, keys in groups.items():
        if room < 1 + bool(name):
            hidden += len(keys)
            continue
        if name:
            lines.append(Text(_end(name, width), style="bold magenta", no_wrap=True))
            room -= 1
        for key in keys:
            if room < 1:
                hidden += 1
                continue
            room -= 1
            before, after, bad = labels[key.key]
            label = Text(no_wrap=True)
            indent = "  " * bool(name)
            label.append(indent + _end(before[len(indent) :], max(4, first - _width(indent + after + bad))))
            label.append(after, style="bright_black").append(bad, style="red")
            good = "bold" if math.isfinite(key.mean) else "bold red"
            history = Text(sparkline(key.history, max(trend, 1)), style="red" if key.bad else "cyan")
            lines.append(line(label, cells[key.key], [good, "bright_black", "default", "default"], history))
    return lines, hidden


def _layout(widths: list[int], wanted: int, width: int) -> tuple[int, int, int]:
    """Choose how many columns of numbers to show, and the widths of the trend and of the keys."""
    few = min(len(widths), 2)
    # Columns must not come and go with the digits of numbers, so these count as the longest ones of their kind.
    usual = [max(pair) for pair in zip(widths, (10, 11, 10, 10), strict=False)]

    def rest(widths: list[int], used: int, trend: int) -> int:
        return width - sum(w + 2 for w in widths[:used]) - (trend + 2 if trend else 0)

    for used, trend in itertools.product(sorted({len(widths), few}, reverse=True), (_TREND, 8)):
        if rest(usual, used, trend) >= wanted:
            return used, trend, rest(widths, used, trend)
    used = few if rest(usual, few, 0) >= _LEAST_KEY else 1
    return used, 0, max(rest(widths, used, 0), 4)


def _label(key: KeyView, indented: bool) -> tuple[str, str, str]:
    """Return a key, its shape, and how many runs have no number."""
    name = "  " + _errors.printable(key.key.rpartition("/")[2]) if indented else _errors.printable(key.key)
    shape = f" [{'×'.join(map(str, key.shape))}]" if key.shape else ""
    return name, shape, f" {key.bad} of {key.runs} not finite" if key.bad and key.runs > 1 else ""


def _numbers(key: KeyView, several: bool) -> list[str]:
    mean = number(key.mean, key.is_integer)
    if not several:
        return [mean]
    spread = f"± {number(key.std)}" if key.runs > 1 and math.isfinite(key.mean) else ""
    return [mean, spread, *(number(x, key.is_integer) for x in (key.low, key.high))]
