"""Rows waiting to be written."""

from typing import Any

import numpy as np

from lox.store._record_batch import Batches
from lox.store._schema import Schema
from lox.store._segment import SegmentWriter
from lox.store._to_rows import Piece


class Table:
    """Rows of one schema waiting to be written, and the segment that they go to."""

    def __init__(self, schema: Schema):
        self.batches = Batches(schema)
        self.segment: SegmentWriter | None = None
        self.started = False  # whether the schema is written, even without rows, because the keys exist
        self.columns: list[list[bytes]] = [[] for _ in self.batches.columns]
        self.rows = 0
        self.size = 0  # of the rows, in bytes

    def add(self, piece: Piece, wall: bytes) -> int:
        """Add rows; return their size in bytes."""
        if not piece.rows:
            return 0
        size = 0
        columns = [piece.runs, wall * piece.rows, *piece.columns]
        for waiting, data in zip(self.columns, columns, strict=True):
            waiting.append(data)
            size += len(data)
        self.rows += piece.rows
        self.size += size
        return size

    def batch(self) -> list[Any]:
        """Return the waiting rows as the columns of a record batch, sorted by run."""
        raw = [parts[0] if len(parts) == 1 else b"".join(parts) for parts in self.columns]
        # Keeps the joined bytes, so that trying again is cheaper if writing fails.
        self.columns = [[data] for data in raw]
        runs = np.frombuffer(raw[0], np.int32)
        order = None
        if (runs[1:] < runs[:-1]).any():
            order = np.argsort(runs, kind="stable")
        encoded = []
        for items, codec, data in zip(self.batches.items, self.batches.codecs, raw, strict=True):
            if not items:
                encoded.append(b"")
                continue
            if order is not None:
                data = np.frombuffer(data, np.dtype((np.void, len(data) // self.rows)))[order].tobytes()
            stored = codec.encode(np.frombuffer(data, codec.memory))
            if stored.dtype == np.bool_:
                stored = np.packbits(stored, bitorder="little")
            encoded.append(stored.data)
        return encoded

    def clear(self) -> None:
        """Forget the rows, which are on disk now."""
        self.columns = [[] for _ in self.batches.columns]
        self.rows = self.size = 0
