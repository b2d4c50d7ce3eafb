"""Record batches: the rows of a segment, as messages.

No column has a variable length or nulls, so the number of rows determines the whole header. Writing it is one
`struct.pack`. Reading accepts exactly those bytes, so a hostile file can lie about nothing but the number of rows.
"""

import struct
from typing import NamedTuple

import numpy as np

from lox.store._flatbuffers import DamagedError
from lox.store._schema import CONTINUATION, Schema


class BatchLayout(NamedTuple):
    """A record batch of so many rows: the header, and each column's offset and size in the body."""

    header: bytes
    offsets: list[int]
    sizes: list[int]
    body: int  # its length


class Batches:
    """The layouts of record batches of one schema."""

    def __init__(self, schema: Schema):
        self.schema = schema
        self.columns = schema.columns
        nodes = sum(1 + (c.is_list and c.items > 0) for c in self.columns)
        buffers = sum(0 if c.items == 0 else 2 + c.is_list for c in self.columns)
        # Two tables, each after its vtable, then two vectors of structs, with 8-byte numbers aligned.
        self._header = struct.Struct(f"<4siI6HihBxqI5H2xiIqII{2 * nodes}q4xI{2 * buffers}q")
        self.header_size = self._header.size
        self._nodes, self._buffers = nodes, buffers
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
        size = self.header_size - 8
        # Offsets count from the start of the metadata: Message has its vtable at 4 and its table at 16, RecordBatch at
        # 36 and 48; nodes begin at 68, followed by buffers.
        header = self._header.pack(
            *(CONTINUATION, size, 16),
            *(12, 20, 4, 6, 16, 8, 12, 4, 3, end, 48 - 32),
            *(10, 20, 8, 4, 16, 12, 68 - 52, rows, 76 + 16 * self._nodes - 64, self._nodes),
            *nodes,
            self._buffers,
            *buffers,
        )
        return BatchLayout(header, offsets, sizes, end)

    def rows_of(self, header: bytes, room: int) -> int:
        """Return the number of rows of the batch with this header; -1 if it does not fit into `room` bytes."""
        if len(header) < self.header_size:
            return -1
        (rows,) = self._rows.unpack_from(header, 8 + 56)
        if rows < 0:
            raise DamagedError("a batch has a negative length")
        if rows * self.row_bits > 8 * room:
            # Too long for the file: torn, if it is a batch. A header for that many rows may not exist.
            empty = self.layout(0).header
            if header[:64] != empty[:32] + header[32:40] + empty[40:64]:  # except for the length of the body
                raise DamagedError("no batch begins here")
            return -1
        layout = self.layout(rows)
        if header != layout.header:
            raise DamagedError("no batch begins here")
        return rows if self.header_size + layout.body <= room else -1
