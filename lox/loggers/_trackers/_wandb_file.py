"""Whether W&B can write the file of an offline run.

W&B's own process writes it, and tells nobody what the system refuses. From then on it drops every record, even if there
is room again. What can be noticed: there is no room now; the process has complained in its log, if that had room; the
last record, which says that the run has ended, is missing.
"""

import contextlib
import re
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lox import _errors
from lox.loggers._files._plain import is_missing
from lox.loggers._trackers import _clients

_BLOCK = 32768  # of the file; no part of a record goes beyond one
_COMPLAINT = re.compile(rb'failed to (?:save record|flush)[^"\n]*')
_LATE = 60.0  # seconds that W&B may take to write the end of a run
_WAY_OUT = "W&B drops what follows, and says nothing. Free some space, and begin another run with `init`."


def check(run: Any) -> None:
    """Raise an error if W&B cannot write the file of this run, or could not at some time before."""
    if not run.offline:
        return
    file = Path(run.settings.sync_file)
    if is_missing(file):
        raise _errors.lost_file(file, [run.name])
    try:
        with tempfile.TemporaryFile(dir=file.parent, buffering=0) as another:
            another.write(bytes(_BLOCK))
    except OSError as error:
        raise _errors.cannot_write(file, error, _WAY_OUT) from error
    with contextlib.suppress(FileNotFoundError):
        if complaint := _COMPLAINT.search(Path(run.settings.log_internal).read_bytes()):
            raise _incomplete(file, complaint[0].decode(errors="replace"))


def check_finished(run: Any) -> None:
    """Raise an error if the file of this run, which has ended, is not complete."""
    check(run)
    deadline = time.monotonic() + _LATE
    while run.offline and not _has_end(Path(run.settings.sync_file)):
        if time.monotonic() > deadline:
            raise _incomplete(Path(run.settings.sync_file), "the end of the run is missing")
        time.sleep(0.01)


def _incomplete(file: Path, why: str) -> _errors.StoreError:
    error = _errors.StoreError(f"W&B did not write all of {str(file)!r}: {why}.\n{_WAY_OUT}")
    error.filename = str(file)
    return error


def _has_end(file: Path) -> bool:
    record = _clients.client("wandb.proto.wandb_internal_pb2", "wandb", "WandbLogger").Record()
    size = file.stat().st_size
    start = max(0, (size - 1) // _BLOCK - 1) * _BLOCK  # the last record is short: two blocks have all of it
    with open(file, "rb") as opened:
        opened.seek(start)
        *_, last = b"", *_records(opened.read(), 0 if start else 7)
    damaged = _clients.client("google.protobuf.message", "wandb", "WandbLogger").DecodeError
    with contextlib.suppress(damaged):
        record.ParseFromString(last)
    return record.WhichOneof("record_type") == "exit"


def _records(data: bytes, at: int) -> Iterator[bytes]:
    """Yield whole records from the beginning of a block on: the format is that of LevelDB's logs."""
    parts = b""
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        length, kind = struct.unpack_from("<HB", data, at + 4) if left >= 7 else (0, 0)
        if not kind:  # the rest of the block is empty
            at += left
            continue
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4) and at <= len(data):
            yield parts
