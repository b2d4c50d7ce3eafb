"""Record batches: the rows of a segment, as messages.

No column has a variable length or nulls, so the number of rows determines the header but for the checksums in it.
Writing it is one `struct.pack`. Reading accepts exactly those bytes, so a hostile file can lie about nothing but the
number of rows.

Every block of 64 KiB of every column has a checksum. They are in the metadata of the message, which other tools ignore:
one string of 8 hexadecimal digits for each block. Reading some rows of one column verifies the blocks that it touches,
and nothing else has to be read. A checksum is the CRC-32 of the block, in which every whole page of 4 KiB is replaced
by the sum of its 64-bit words: CRC-32 by itself would take longer than reading.
"""

import binascii
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lox.store._flatbuffers import DamagedError
from lox.store._schema import CONTINUATION, Schema

BLOCK = 1 << 16  # bytes that one checksum is for
_PAGE = 1 << 12


class BatchLayout(NamedTuple):
    """A record batch of so many rows: the header, and each column's offset and size in the body."""

    header: bytes  # up to the checksums
    tail: bytes  # of the header, after them
    offsets: list[int]
    sizes: list[int]
    body: int  # its length
    blocks: list[int]  # for each column, the number of the first of its checksums; in the end, how many there are

    @property
    def header_size(self) -> int:
        """The length of the header, checksums included."""
        return len(self.header) + 8 * self.blocks[-1] + len(self.tail)


class Batches:
    """The layouts of record batches of one schema."""

    def __init__(self, schema: Schema):
        self.schema = schema
        self.columns = schema.columns
        nodes = sum(1 + (c.is_list and c.items > 0) for c in self.columns)
        buffers = sum(0 if c.items == 0 else 2 + c.is_list for c in self.columns)
        self._nodes, self._buffers = nodes, buffers
        # Two tables, each after its vtable, then two vectors of structs, with 8-byte numbers aligned. Then one pair of
        # strings: a vector with one table, its vtable, the table, a string, and the length of another.
        vectors = f"{2 * nodes}q4xI{2 * buffers}q"
        checked = f"<4siI7H6xihBxqII5H6xiIqII{vectors}II4HiIII4sI"
        self._header = struct.Struct(checked if schema.checked else f"<4siI6HihBxqI5H2xiIqII{vectors}")
        self._body_at, self._rows_at = (40, 80) if schema.checked else (32, 64)
        self.prefix_size = self._header.size  # of headers, whatever the number of rows
        self._layouts: dict[int, BatchLayout] = {}
        self._rows = struct.Struct("<q")
        self.items = [c.items for c in self.columns]
        self.codecs = [c.codec for c in self.columns]
        self.stored_as_is = [codec.stored_as_is for codec in self.codecs]
        self.arrow = [codec.arrow for codec in self.codecs]
        self._spec = [
            (c.items, 1 if c.codec.arrow == np.bool_ else 8 * c.codec.arrow.itemsize, c.is_list) for c in self.columns
        ]
        self.row_bits = sum(items * bits for items, bits, _ in self._spec)

    def layout(self, rows: int) -> BatchLayout:
        """Return the layout of so many rows."""
        if rows not in self._layouts:
            if len(self._layouts) > 1000:
                self._layouts.clear()
            self._layouts[rows] = self._layout(rows)
        return self._layouts[rows]

    def _layout(self, rows: int) -> BatchLayout:
        nodes: list[int] = []
        buffers: list[int] = []
        offsets, sizes, end = [], [], 0
        for items, bits, is_list in self._spec:
            size = (rows * items * bits + 7) // 8
            offsets.append(end)
            sizes.append(size)
            nodes += [rows, rows if items == 0 else 0]
            if items:
                buffers += [end, 0]
                if is_list:
                    nodes += [rows * items, 0]
                    buffers += [end, 0]
                buffers += [end, size]
            end += size + (-size) % 8
        if not self.schema.checked:
            header = self._without_checksums(rows, end, nodes, buffers)
            return BatchLayout(header, b"", offsets, sizes, end, [0] * (len(sizes) + 1))
        blocks = [0, *itertools.accumulate(-(-size // BLOCK) for size in sizes)]
        text = 8 * blocks[-1]
        tail = bytes(8 - (self.prefix_size + text) % 8)  # a string ends with a zero
        # Offsets count from the start of the metadata. Message has its vtable at 4 and its table at 24, RecordBatch at
        # 48 and 64; nodes begin at 84, followed by buffers, and then by the pair of strings.
        strings = 96 + 16 * self._nodes + 8 * len(buffers)
        header = self._header.pack(
            *(CONTINUATION, self.prefix_size - 8 + text + len(tail), 24),
            *(14, 24, 4, 6, 16, 8, 20, 24 - 4, 4, 3, end, 64 - 40, strings - 44),
            *(10, 20, 8, 4, 16, 64 - 48, 84 - 68, rows, 92 + 16 * self._nodes - 80, self._nodes),
            *nodes,
            self._buffers,
            *buffers,
            *(1, 16 - 4, 8, 12, 4, 8, 16 - 8, 28 - 20, 36 - 24, 3, b"crc", text),
        )
        return BatchLayout(header, tail, offsets, sizes, end, blocks)

    def _without_checksums(self, rows: int, end: int, nodes: list[int], buffers: list[int]) -> bytes:
        """The header in format 1: Message at 4 and 16, RecordBatch at 36 and 48, nodes from 68 on."""
        return self._header.pack(
            *(CONTINUATION, self.prefix_size - 8, 16),
            *(12, 20, 4, 6, 16, 8, 12, 4, 3, end, 48 - 32),
            *(10, 20, 8, 4, 16, 12, 68 - 52, rows, 76 + 16 * self._nodes - 64, self._nodes),
            *nodes,
            self._buffers,
            *buffers,
        )

    def rows_of(self, prefix: bytes, room: int) -> int:
        """Return the number of rows of the batch that begins so; -1 if it does not fit into `room` bytes."""
        if len(prefix) < self.prefix_size:
            return -1
        (rows,) = self._rows.unpack_from(prefix, self._rows_at)
        if rows < 0:
            raise DamagedError("a batch has a negative length")
        if rows * self.row_bits > 8 * room:
            # Too long for the file: torn, if it is a batch. A header for that many rows may not exist.
            # Everything before but the lengths of header and body is the same for all of them.
            constant = (slice(8, self._body_at), slice(self._body_at + 8, self._rows_at))
            if any(prefix[part] != self.layout(0).header[part] for part in constant):
                raise DamagedError("no batch begins here")
            return -1
        layout = self.layout(rows)
        if prefix != layout.header:
            raise DamagedError("no batch begins here")
        return rows if layout.header_size + layout.body <= room else -1


def checksums(columns: Sequence[Any]) -> bytes:
    """Return the checksums of all blocks of these columns, given as bytes."""
    numbers: list[int] = []
    for data in columns:
        if len(data) >= _PAGE:
            numbers += _of_pages(memoryview(data))
        elif data:
            numbers.append(zlib.crc32(data))
    return binascii.hexlify(struct.pack(f">{len(numbers)}I", *numbers))


def _of_pages(data: memoryview) -> list[int]:
    whole = len(data) - len(data) % _PAGE
    words = np.frombuffer(data[:whole], "<u8").reshape(-1, _PAGE // 8)
    sums = memoryview(np.add.reduce(words, axis=1).astype("<u8", copy=False)).cast("B")
    step = 8 * BLOCK // _PAGE
    numbers = [zlib.crc32(sums[n : n + step]) for n in range(0, len(sums), step)]
    if whole % BLOCK:
        numbers[-1] = zlib.crc32(data[whole:], numbers[-1])
    elif whole < len(data):
        numbers.append(zlib.crc32(data[whole:]))
    return numbers
