"""A live display in a notebook: an output of the cell, updated in place.

`rich`'s own one needs ipywidgets, and warns where they are missing. What is used here is in every IPython: an output
with a name, which a message from any thread may replace. It stays in the notebook as it was last.
"""

import io
import threading
import uuid
from collections.abc import Callable
from typing import Any

_EVERY = 0.25  # seconds
_HEIGHT = 40  # lines, of all parts together
_STYLE = (
    "white-space:pre;overflow-x:auto;line-height:normal;"
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace"
)


class Notebook:
    """Shows pictures of `rich` in the output of a cell.

    Args:
        console: The console that would draw them, for its width.
        pictures: Returns what to show now, given the number of lines.
    """

    def __init__(self, console: Any, pictures: Callable[[int], list[Any]]):
        self._width, self._pictures = console.size.width, pictures
        self._kept: list[Any] = []  # the last pictures of parts that have ended
        self._shown: dict[str, str] | None = None
        self._name = uuid.uuid4().hex
        self._sending = threading.Lock()  # an older picture must not replace a newer one
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lox-notebook", daemon=True)

    def start(self) -> None:
        """Add an output to the cell, and update it from now on."""
        self.refresh()
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY):
            self.refresh()

    def remove(self, part: Any, keep: bool) -> None:
        """Show a part no longer, or with `keep` as it is now."""
        if keep:
            self._kept.append(part.picture(self._width, 10_000))
            self.refresh()

    def stop(self) -> None:
        """Leave the output as it is."""
        self._ended.set()
        self.refresh()

    def refresh(self) -> None:
        """Send what is new."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        with self._sending:
            content = _as_html([*self._kept, *self._pictures(_HEIGHT)], self._width)
            if content != self._shown:
                display(content, raw=True, display_id=self._name, update=self._shown is not None)
            self._shown = content


def _as_html(pictures: list[Any], width: int) -> dict[str, str]:
    from rich.console import Console

    if not pictures:
        return {"text/plain": "", "text/html": ""}
    console = Console(record=True, file=io.StringIO(), width=width, force_jupyter=False, color_system="truecolor")
    for picture in pictures:
        console.print(picture)
    html = console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>', clear=False)
    return {"text/plain": console.export_text(), "text/html": html}
