"""What TensorBoard's HParams tab reads: the hyper-parameters of a run, and how it ended.

Both are events whose content is in their metadata, of which TensorBoard takes the first in a run and looks past any
other. So when a run is resumed, what its files said before is marked as past, in place: then the newest one counts. No
`Experiment` is written: without one, TensorBoard lists all hyper-parameters and all scalars of all runs, and with
several it takes any.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import IO, Any

from lox.loggers._files._rows import Labels, strict_json
from lox.loggers._trackers import _tfevents
from lox.loggers._trackers._clients import flat
from lox.loggers._trackers._tfevents import double, field, fields, integer

_START, _END = "_hparams_/session_start_info", "_hparams_/session_end_info"
_PAST = {tag: tag.replace("_info", "_past") for tag in (_START, _END)}  # of the same length
TAGS = (_START, _END, *_PAST.values(), "_hparams_/experiment")
_MOST_RECORDS = 4  # among which the start of a session is, in a file
_LARGEST = 2**53  # TensorBoard has double precision, which cannot tell larger integers apart
_LONGEST = 200  # characters of a text that stands for something else

Values = dict[str, bytes]  # encoded


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without dicts inside.

    >>> dotted({"optimizer": {"lr": 0.1}, "seed": 7})
    {'optimizer.lr': 0.1, 'seed': 7}
    """
    labels = Labels()
    return {labels.of("/".join(scope), ".".join(scope)): value for scope, value in flat(dict(config))}


def encode(config: Mapping[str, Any]) -> Values:
    """Encode numbers, strings and booleans as such, under dotted names, and anything else as text."""
    return {name: _value(value) for name, value in dotted(config).items()}


def _value(x: Any) -> bytes:
    if isinstance(x, bool):
        return integer(4, x)
    if isinstance(x, int | float) and math.isfinite(x) and (isinstance(x, float) or abs(x) <= _LARGEST):
        return double(2, x)
    if not isinstance(x, str):
        plain = strict_json(x)
        x = plain if isinstance(plain, str) else json.dumps(plain)
        x = x if len(x) <= _LONGEST else x[: _LONGEST - 1] + "…"
    return field(3, x.encode(errors="backslashreplace"))


def start(values: Values, wall: float) -> bytes:
    """Encode the hyper-parameters of a run that begins."""
    entries = [field(1, field(1, k.encode(errors="backslashreplace")) + field(2, x)) for k, x in values.items()]
    return _event(_START, field(3, b"".join(entries) + double(5, wall)), wall)


def end(failed: bool, wall: float) -> bytes:
    """Encode how a run has ended."""
    return _event(_END, field(4, integer(1, 2 if failed else 1) + double(2, wall)), wall)


def _event(tag: str, content: bytes, wall: float) -> bytes:
    metadata = field(1, field(1, b"hparams") + field(2, content)) + integer(4, 2)
    nothing = integer(1, 1) + field(2, field(2, integer(1, 0)))  # a vector of no floats
    return _tfevents.event(tag, 0, wall, field(9, metadata) + field(8, nothing))


def read(file: pathlib.Path) -> Values | None:
    """Return the hyper-parameters in a file, if it has some that are not marked as past."""
    with file.open("rb") as opened:
        found = _find_start(opened)
    if found is None:
        return None
    content = _at(found[1], 5, 1, 9, 1, 2, 3)
    entries = [dict(fields(entry)) for number, entry in fields(content) if number == 1]
    return {entry.get(1, b"").decode(): entry.get(2, b"") for entry in entries}


def retract(file: pathlib.Path) -> None:
    """Mark what a file says about its session as past."""
    size = len(end(False, 0.0))
    with file.open("r+b") as opened:
        if found := _find_start(opened):
            _mark(opened, *found, _START)
        last = opened.seek(0, 2) - size
        if last > 0:
            opened.seek(last)
            event = _tfevents.read_record(opened)
            if event is not None and _tag(event) == _END:
                _mark(opened, last, event, _END)


def _find_start(file: IO[bytes]) -> tuple[int, bytes] | None:
    """Find where the start of a session is, and the event."""
    for _ in range(_MOST_RECORDS):
        place = file.tell()
        event = _tfevents.read_record(file)
        if event is None:
            return None
        if _tag(event) == _START:
            return place, event
    return None


def _mark(file: IO[bytes], place: int, event: bytes, tag: str) -> None:
    file.seek(place)
    file.write(_tfevents.record(event.replace(tag.encode(), _PAST[tag].encode(), 1)))


def _tag(event: bytes) -> str:
    return _at(event, 5, 1, 1).decode(errors="replace")


def _at(message: bytes, *path: int) -> bytes:
    """Return the field at a path of numbers, or nothing."""
    for number in path:
        message = next((content for n, content in fields(message) if n == number), b"")
    return message
