"""What the commands print: tables on stdout, errors and warnings on stderr, and nothing that acts on a terminal.

On a terminal a table has its width and colours. In a pipe it is plain, and as wide as it needs to be.
"""

import datetime
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from lox import _errors
from lox.loggers._console import _render
from lox.loggers._files._rows import strict_json

_PIPE = 1_000_000  # columns


def console() -> Any:
    """Return rich's console for stdout. It knows what a terminal is, and `NO_COLOR`."""
    from rich.console import Console

    screen = Console(highlight=False, markup=False, emoji=False)
    return screen if screen.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPE)


def line(text: str = "", style: str = "") -> None:
    """Print one line."""
    from rich.text import Text

    screen = console()
    with screen.capture() as captured:
        # A line that is longer than a terminal is wide goes on in the next one, as with any other command.
        screen.print(Text(clean(text), style=style), soft_wrap=True)
    sys.stdout.write(captured.get())


def plain_line(text: str) -> None:
    """Print one line without a style, which is faster."""
    sys.stdout.write(clean(text) + "\n")


def flush() -> None:
    """Let others see what was printed."""
    sys.stdout.flush()


def clean(text: str) -> str:
    """Replace what a terminal would act on, or cannot show, by characters that say so."""
    return _errors.printable(_errors.encodable(text))


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> Any:
    """Make a table; the columns called `right` are numbers. Cells are texts, or texts with a style."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for title in titles:
        number = title in right
        grid.add_column(
            Text(clean(title)), justify="right" if number else "left", no_wrap=number, overflow="fold", min_width=1
        )
    for row in rows:
        cells = [cell if isinstance(cell, tuple) else (cell, "") for cell in row]
        grid.add_row(*[Text(clean(text), style=style) for text, style in cells])
    return grid


def _fits(renderable: Any) -> bool:
    """Tell whether the screen is wide enough."""
    from rich.measure import Measurement

    screen = console()
    return Measurement.get(screen, screen.options.update(width=_PIPE), renderable).maximum <= screen.width


def rows(titles: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str], extra: Sequence[str] = ()) -> None:
    """Print a table; where it is too wide, without the `extra` columns, or else line by line: nothing is cut off."""
    for without in ((), extra):
        keep = [n for n, title in enumerate(titles) if title not in without]
        grid = table([titles[n] for n in keep], [[row[n] for n in keep] for row in rows], right)
        if _fits(grid):
            return _show(grid)
    for row in rows:
        texts = [cell[0] if isinstance(cell, tuple) else cell for cell in row]
        line(texts[0], "bold")
        told = [f"{title} {text}" for title, text in zip(titles[1:], texts[1:], strict=True) if text]
        for part in _in_lines(told, console().width - 4):
            line("    " + part)


def _in_lines(parts: Sequence[str], width: int) -> list[str]:
    """Put parts side by side, and into another line where there is no room: none is broken in the middle."""
    lines = [""]
    for n, part in enumerate(parts):
        part += "," if n + 1 < len(parts) else ""
        if lines[-1] and len(lines[-1]) + 1 + len(part) > width:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return lines


def _show(renderable: Any) -> None:
    """Print without blanks at the ends of lines."""
    screen = console()
    with screen.capture() as captured:
        screen.print(renderable)
    text = "".join(row.rstrip(" ") + "\n" for row in captured.get().splitlines())
    sys.stdout.write(_errors.encodable(text))


def as_json(value: Any, lines: bool = False) -> None:
    """Print JSON that every parser takes: NaN and infinities are strings, as in files of `JsonlLogger`."""
    text = json.dumps(strict_json(value), indent=None if lines else 2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write(_errors.encodable(text) + "\n")


# --- stderr ---


def note(text: str) -> None:
    """Say something that is not a result."""
    _to_stderr(text)


def error(problem: BaseException | str) -> None:
    """Say why a command was refused."""
    _to_stderr(f"error: {problem}")


def warning(text: str) -> None:
    """Warn, in one line."""
    _to_stderr("warning: " + " ".join(part.strip() for part in text.splitlines()))


def _to_stderr(text: str) -> None:
    sys.stdout.flush()  # in a terminal both end up in one place
    print("\n".join(clean(row) for row in text.split("\n")), file=sys.stderr, flush=True)


def show_warnings_in_lines() -> None:
    """Print what lox warns of as `warning: ...`, and every time: a reader warns of each thing once."""
    before = warnings.showwarning

    def shown(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
        if issubclass(category, _errors.LoxWarning):
            warning(str(message))
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = shown
    warnings.simplefilter("always", _errors.LoxWarning)


# --- cells ---


def local_time(time: datetime.datetime | None) -> str:
    """Format a time as the clock on the wall shows it."""
    return "" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def value(x: Any) -> str:
    """Format a value of a config."""
    if isinstance(x, float):
        return f"{x:g}"
    return x if isinstance(x, str) else json.dumps(strict_json(x), ensure_ascii=False)


def settings(config: dict[str, Any]) -> str:
    """Format a config: `lr=0.1, opt.name=adam`."""
    return ", ".join(f"{name}={value(x)}" for name, x in config.items())


def number(x: Any) -> str:
    """Format a number with four digits, or an integer with all of them."""
    return _render.number(x) if isinstance(x, float) else str(x)


def short(x: Any, most: int = 8) -> str:
    """Format what a row has for a key: small arrays whole, large ones by their size."""
    if isinstance(x, dict) and x.keys() == {"edges", "counts", "nonfinite", "mean", "std"}:
        return f"histogram(n={sum(x['counts']):g}, mean={number(x['mean'])}, std={number(x['std'])})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {short(item)}" for name, item in x.items()) + "}"
    if isinstance(x, list | tuple):
        shown = ", ".join(short(item, 4) for item in x[:most])
        return f"[{shown}{f', … {len(x) - most} more' if len(x) > most else ''}]"
    return "–" if x is None else number(x)
