"""`JsonlLogger`: a JSON object per event."""

import itertools
import json
import pathlib
from collections.abc import Iterable

from lox._data._bundle import Bundle
from lox.loggers._files._plain import FileLogger
from lox.loggers._files._rows import Column, json_texts, strict_json
from lox.loggers._run import Run


class JsonlLogger(FileLogger):
    """Writes one file per run, `42.jsonl`, with one line per event: its steps, then its values.

    >>> import jax, lox, tempfile
    >>> with lox.loggers.JsonlLogger(tempfile.mkdtemp()) as logger:
    ...     state = logger.init(jax.random.key(42))
    ...     logger.log(state, {"loss": 0.5, "xs": [1, 2]}, step=0)
    >>> print((logger.path / "42.jsonl").read_text(), end="")
    {"step": 0, "loss": 0.5, "xs": [1, 2]}

    Arrays are lists, pytrees objects. Every line is valid JSON: NaN and infinities are the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`. Keys may come and go. If a key and a step have the same name, the one that comes
    second is called `"step [step]"` or `"step [key]"`. Files are only appended to, and existing ones are left alone:
    the run is then called `42.1`. A `lox.Histogram` is an object of its bins, mean and spread, a `lox.Image` the name
    of a PNG file in `42.media/`. The config given to `init` is in `42.jsonl.config.json`.

    `resume` goes on with the file. Lines of the first attempt have no `"attempt"`, those of further ones have 1, 2, ...
    `42.jsonl.attempts.json` has, for each, the first step that was computed again, and the config that `resume` got. A
    key of that name is `"attempt [key]"`.

    Args:
        path: The folder; it is created with the first run.
    """

    suffix = ".jsonl"

    def columns(self, file: pathlib.Path) -> Iterable[str]:
        """Return the names that say their kind."""
        with open(file, "rb") as lines:
            return {name for line in lines if b' [key]"' in line or b' [step]"' in line for name in json.loads(line)}

    def add(self, run: Run, bundles: list[Bundle]) -> None:
        """Add one line per event."""
        self.append(run, "".join(_lines(table) for _, table in self.tables(run, bundles)))


def _lines(table: dict[str, Column]) -> str:
    """Return an object for each row, column by column: what is between two values is the same in every row."""
    names = [json.dumps(name) for name in strict_json(dict.fromkeys(table))]
    parts: list[Iterable[str]] = []
    for name, column in zip(names, table.values(), strict=True):
        parts += [itertools.repeat(f"{', ' if parts else '{'}{name}: "), json_texts(column)]
    return "".join(map("".join, zip(*parts, itertools.repeat("}\n"), strict=False)))
