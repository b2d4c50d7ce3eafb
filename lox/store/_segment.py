"""Segments: Arrow IPC streams, each in a file of its own that one process writes once.

A record batch is one `write`. Readers stop at the first incomplete batch and resume there later, which is all that
following a file and surviving a kill take. Files are never mapped into memory: if somebody truncated a mapped file, the
process would be killed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lox import _errors
from lox.store import _schema
from lox.store._flatbuffers import DamagedError
from lox.store._record_batch import BLOCK, Batches, checksums
from lox.store._schema import Column, Schema

Array = np.ndarray[Any, Any]

WAY_OUT = "Free some space or make the directory writable, then flush again: what was not written is kept in memory."


class SegmentWriter:
    """Appends record batches to a new file. A failed write closes it: go on in another one."""

    def __init__(self, file: Path, batches: Batches):
        self.file, self.batches = file, batches
        self.size = 0  # up to the end of the last complete batch
        self._preamble = _schema.encode(batches.schema, _place(file))  # empty once it is written
        try:
            # O_EXCL: never write to a file of another process.
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise _errors.cannot_write(file, error, WAY_OUT) from error

    def write_schema(self) -> None:
        """Write the schema, if no batch has done so."""
        if self._preamble:
            self._write(self._preamble)
            self._preamble = b""

    def write_batch(self, rows: int, columns: Sequence[Any]) -> None:
        """Append rows, given the bytes of each column."""
        layout = self.batches.layout(rows)
        parts: list[Any] = [self._preamble, layout.header, checksums(columns), layout.tail]
        for data, size in zip(columns, layout.sizes, strict=True):
            parts += [data, bytes(-size % 8)]
        self._write(b"".join(parts))
        self._preamble = b""

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                written = os.write(self._file, rest)
                if written == 0:
                    raise OSError(errno.EIO, "nothing could be written")
                rest = rest[written:]
        except OSError as error:
            # Without the torn batch every tool can read the file. If this fails too, readers skip it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
                if not self.size:  # or retries on a full disk would leave many empty files
                    self.abandon()
                    self.file.unlink()
            self.abandon()
            raise _errors.cannot_write(self.file, error, WAY_OUT) from error
        self.size += len(data)

    def close(self) -> None:
        """End the stream."""
        if self._file >= 0:
            self.write_schema()
            self._write(_schema.END_OF_STREAM)
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def closed(self) -> bool:
        """Whether nothing can be appended any more."""
        return self._file < 0


def _place(file: Path) -> str:
    """Say which segment of which group a file is."""
    return f"{file.parent.name}/{file.name}"


class DamagedRowsError(_errors.StoreError):
    """Rows that do not have the checksum that they were written with, or bytes that are no batch."""

    def __init__(
        self, segment: "SegmentReader", batch: int, column: Column | None = None, rows: tuple[int, int] = (0, 0)
    ):
        self.segment, self.batch = segment, batch
        before = sum(segment.rows[:batch])
        if column is None:
            start, stop = segment.gaps[batch]
            keys = _errors.listing([key.name for key in segment.schema.keys] if segment.schema else [])
            text = f"the {stop - start} bytes after row {before}, which had events of {keys}, are not what lox writes."
        else:
            what = {"step": "the step ", "value": ""}.get(column.role, "the column ") + repr(column.name)
            which = f"rows {before + rows[0]} to {before + rows[1] - 1}"
            text = f"{what} in {which} does not have the checksum that it was written with."
        super().__init__(f"{str(segment.file)!r} is damaged: {text}")


class SegmentReader:
    """Knows where the record batches of a file are; `scan` looks for new ones."""

    def __init__(self, file: Path):
        self.file = file
        self.bad: dict[int, DamagedRowsError] = {}  # batches to leave out
        self.schema: Schema | None = None
        self.offsets: list[int] = []  # of batches
        self.rows: list[int] = []
        self.gaps: dict[
            int, tuple[int, int]
        ] = {}  # batches without rows, for bytes between two others that are damaged
        self.end = 0  # of the last complete message
        self.ended = False
        self.leftover = 0  # bytes after it
        self.damage: str | None = None  # what is wrong with them, unless they are just an incomplete batch
        self._batches: Batches | None = None
        self._checksums: list[bytes] = []  # of each batch
        self._ranges: Array = np.empty((0, 2), np.int32)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file, unbuffered."""
        try:
            with open_file(self.file) as file:
                yield file
        except FileNotFoundError as error:
            missing = _errors.RunNotFoundError(
                f"{str(self.file)!r} is gone: the run was overwritten while it was being read. Load it again."
            )
            missing.errno, missing.filename = error.errno, str(self.file)
            raise missing from error
        except _errors.StoreError:
            raise
        except OSError as error:
            raise _errors.cannot_read(self.file, error) from error

    def scan(self) -> None:
        """Find the batches that were added since the last scan."""
        if self.ended or self.damage is not None:
            return
        with self.open() as file:
            size = os.fstat(file.fileno()).st_size
            try:
                self._scan(file, size)
            except DamagedError as error:
                self.damage = str(error)
            self.leftover = max(0, size - self.end)

    def _scan(self, file: BinaryIO, size: int) -> None:
        if self.schema is None:
            prefix = _read_up_to(file, 0, 8)
            if len(prefix) < 8:
                if prefix[:4] != _schema.CONTINUATION[: len(prefix[:4])]:
                    raise DamagedError("no Arrow message begins here")
                return
            length = _schema.message_size(prefix)
            if 8 + length > size:
                return
            message = bytearray(length)
            _read_into(file, 8, message)
            self.schema = _schema.decode(bytes(message), _place(self.file))
            self._batches = Batches(self.schema)
            self.end = 8 + length
        assert self._batches is not None
        layouts, prefix_size = self._batches, self._batches.prefix_size
        usual = prefix_size + 8 * len(layouts.columns)  # if no column is large
        while self.end < size:
            header = _read_up_to(file, self.end, usual)
            if header[:8] == _schema.END_OF_STREAM:
                self.end += 8
                self.ended = True
                if self.end < size:
                    raise DamagedError("there is something after the end of the stream")
                return
            try:
                if header[:4] != _schema.CONTINUATION[: len(header)]:
                    raise DamagedError("no batch begins here")
                rows = layouts.rows_of(header[:prefix_size], size - self.end)
            except DamagedError:
                self._skip_to_next_batch(file, size)
                continue
            if rows < 0:
                return
            layout = layouts.layout(rows)
            stop = prefix_size + 8 * layout.blocks[-1]
            header = header if stop <= len(header) else _read_up_to(file, self.end, stop)
            self._checksums.append(header[prefix_size:stop])
            self.offsets.append(self.end)
            self.rows.append(rows)
            self.end += layout.header_size + layout.body

    def _skip_to_next_batch(self, file: BinaryIO, size: int) -> None:
        """Make a gap of what is damaged, up to the next batch; raise an error if there is none."""
        assert self._batches is not None
        start, step = self.end, 1 << 20
        for begin in range(start + 8, size, step):
            data = _read_up_to(file, begin, step + self._batches.prefix_size)
            place = data.find(_schema.CONTINUATION)
            while 0 <= place < step:
                try:
                    found = place % 8 == 0 and self._batches.rows_of(
                        data[place : place + self._batches.prefix_size], size - begin - place
                    )
                except DamagedError:
                    found = -1
                if found is not False and found >= 0:
                    self.gaps[len(self.offsets)] = start, begin + place
                    self._checksums.append(b"")
                    self.offsets.append(start)
                    self.rows.append(0)
                    self.end = begin + place
                    return
                place = data.find(_schema.CONTINUATION, place + 1)
        raise DamagedError("no batch begins here")

    def _check_gaps(self, start: int) -> None:
        for batch in self.gaps:
            if batch >= start and batch not in self.bad:
                raise DamagedRowsError(self, batch)

    def batches_with(self, run: int, start: int = 0) -> list[tuple[int, int, int]]:
        """Return the batches from `start` on that have rows of a run, and these rows. Rows are sorted by run."""
        parts = []
        assert self.schema is not None
        self._check_gaps(start)
        more = self.schema.runs - 1  # of a row, after the first
        with self.open() as file:
            self._extend_ranges(file)
            candidates = np.flatnonzero((self._ranges[start:, 0] <= run) & (self._ranges[start:, 1] >= run)) + start
            for batch in candidates.tolist():
                if batch in self.bad:
                    continue
                rows = self.rows[batch]
                if self._ranges[batch, 0] + more == self._ranges[batch, 1]:
                    parts.append((batch, 0, rows))
                    continue
                runs = self._raw(file, 0, batch, 0, rows)
                first, last = np.searchsorted(runs, run - more, "left"), np.searchsorted(runs, run, "right")
                if last > first:
                    parts.append((batch, int(first), int(last)))
        return parts

    def _extend_ranges(self, file: BinaryIO) -> None:
        """Look up the first and the last run of each new batch."""
        known = len(self._ranges)
        if known == len(self.rows):
            return
        assert self.schema is not None
        new = np.empty((len(self.rows) - known, 2), np.int32)
        for i in range(known, len(self.rows)):
            rows = self.rows[i]
            if not rows or i in self.bad:
                new[i - known] = (1, 0)
                continue
            new[i - known, 0] = self._raw(file, 0, i, 0, 1)[0]
            new[i - known, 1] = self._raw(file, 0, i, rows - 1, rows)[0] + self.schema.runs - 1
        self._ranges = np.concatenate([self._ranges, new])

    def runs_in(self, batch: int) -> list[int]:
        """Return the runs that have rows in a batch."""
        assert self.schema is not None
        with self.open() as file:
            firsts = np.unique(self._raw(file, 0, batch, 0, self.rows[batch])).tolist()
        return [first + n for first in firsts for n in range(self.schema.runs)]

    def verify(self) -> None:
        """Compare all checksums; damaged batches become `bad`."""
        assert self._batches is not None
        with self.open() as file:
            for batch, rows in enumerate(self.rows):
                try:
                    if batch in self.gaps:
                        raise DamagedRowsError(self, batch)
                    for number in range(len(self._batches.columns)):
                        self._raw(file, number, batch, 0, rows)
                except DamagedRowsError as damage:
                    self.bad[batch] = damage

    def extent(self, batch: int) -> tuple[int, int]:
        """Return where a batch begins and ends in the file."""
        after = self.offsets[batch + 1] if batch + 1 < len(self.offsets) else self.end - 8 * self.ended
        return self.offsets[batch], after

    def all_batches(self, start: int = 0) -> list[tuple[int, int, int]]:
        """Return all batches from `start` on, with all their rows."""
        self._check_gaps(start)
        return [(i, 0, self.rows[i]) for i in range(start, len(self.rows)) if i not in self.bad]

    def read(self, columns: Sequence[Column], parts: Sequence[tuple[int, int, int]]) -> list[Array]:
        """Read these columns of these rows of batches, as one array each."""
        assert self._batches is not None
        total = sum(stop - start for _, start, stop in parts)
        numbers = self._batches.schema.numbers
        arrays: list[Array] = []
        with self.open() as file:
            for column in columns:
                codec, items = column.codec, column.items
                raw = np.empty(total * items, codec.arrow)
                position = 0
                for batch, start, stop in parts:
                    end = position + (stop - start) * items
                    self._raw(file, numbers[column], batch, start, stop, raw[position:end])
                    position = end
                arrays.append(codec.decode(raw).reshape(total, *column.memory_shape))
        return arrays

    def stored(self, batch: int, start: int, stop: int) -> list[Array]:
        """Read rows of a batch as they are stored: Arrow's values of each column, with an axis of rows in front."""
        assert self._batches is not None
        with self.open() as file:
            raw = [self._raw(file, number, batch, start, stop) for number in range(len(self._batches.columns))]
        return [x.reshape(stop - start, items) for x, items in zip(raw, self._batches.items, strict=True)]

    def _raw(self, file: BinaryIO, number: int, batch: int, start: int, stop: int, out: Array | None = None) -> Array:
        """Read Arrow's values of some rows of a column."""
        assert self._batches is not None
        items, dtype = self._batches.items[number], self._batches.arrow[number]
        if out is None:
            out = np.empty((stop - start) * items, dtype)
        if not out.size:
            return out
        if dtype == np.bool_:
            first, last = start * items, stop * items
            packed = np.empty((last + 7) // 8 - first // 8, np.uint8)
            self._read_checked(file, number, batch, first // 8, packed)
            bits = np.unpackbits(packed, bitorder="little")
            out[:] = bits[first % 8 : first % 8 + last - first]
        else:
            self._read_checked(file, number, batch, start * items * dtype.itemsize, out)
        return out

    def _read_checked(self, file: BinaryIO, number: int, batch: int, start: int, out: Array) -> None:
        """Fill `out` with the bytes of a column from `start` on, and verify the blocks that they are in."""
        assert self._batches is not None
        layout = self._batches.layout(self.rows[batch])
        offset = self.offsets[batch] + layout.header_size + layout.offsets[number]
        if not self._batches.schema.checked:
            return _read_into(file, offset + start, out)
        stop, size = start + out.nbytes, layout.sizes[number]
        first, last = start // BLOCK, -(-stop // BLOCK)
        begin, end = first * BLOCK, min(last * BLOCK, size)
        data = out if (begin, end) == (start, stop) else np.empty(end - begin, np.uint8)
        _read_into(file, offset + begin, data)
        view = memoryview(data).cast("B")
        of_column = layout.blocks[number]
        if checksums([view]) != self._checksums[batch][8 * (of_column + first) : 8 * (of_column + last)]:
            row_size = max(1, size // max(1, self.rows[batch]))
            rows = begin // row_size, min(self.rows[batch], -(-end // row_size))
            raise DamagedRowsError(self, batch, self._batches.columns[number], rows)
        if data is not out:
            memoryview(out).cast("B")[:] = view[start - begin : stop - begin]


def open_file(file: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file, unbuffered. Anything else, such as a link, a pipe or a device, is an error: lox makes none of them.

    A link may lead to a file that is not lox's, a pipe would never end, and a device has no size.
    """
    safely = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(file, flags | safely)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file:
            return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)  # type: ignore[return-value]
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    raise _errors.StoreError(
        f"{str(file)!r} is not a file but a link, a pipe or a device, which lox did not make there."
    )


def _read_up_to(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            break
        data += more
    return data


def _read_into(file: BinaryIO, offset: int, out: Array | bytearray) -> None:
    file.seek(offset)
    rest = memoryview(out).cast("B")
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            error = _errors.StoreError(f"{file.name!r} became shorter while it was being read. Load it again.")
            error.filename = file.name
            raise error
        rest = rest[count:]
