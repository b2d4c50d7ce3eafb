"""Reading FlatBuffers from files that anybody may have written.

Every position is checked before it is read, so that a damaged file is an exception and never a crash. A parser in C
is no choice here: nanoarrow 0.9 crashes the process on some schemas with a flipped bit.
"""

import struct
from typing import Any


class DamagedError(Exception):
    """These bytes are not what they should be. Never reaches users as such."""


class Table:
    """A table inside a buffer: fields are found by number."""

    __slots__ = ("buffer", "position", "vtable", "vtable_size")

    def __init__(self, buffer: bytes, position: int):
        self.buffer, self.position = buffer, position
        self.vtable = position - read(buffer, "<i", position)
        self.vtable_size = read(buffer, "<H", self.vtable)

    @classmethod
    def root(cls, buffer: bytes) -> "Table":
        """The outermost table."""
        return cls(buffer, read(buffer, "<I", 0))

    def _field(self, number: int) -> int:
        """Where a field is; 0 if it is absent."""
        slot = 4 + 2 * number
        if slot + 2 > self.vtable_size:
            return 0
        offset = read(self.buffer, "<H", self.vtable + slot)
        return self.position + offset if offset else 0

    def scalar(self, number: int, code: str, default: Any) -> Any:
        """A number."""
        position = self._field(number)
        return read(self.buffer, "<" + code, position) if position else default

    def _target(self, number: int) -> int:
        position = self._field(number)
        return position + read(self.buffer, "<I", position) if position else 0

    def table(self, number: int) -> "Table | None":
        """A table."""
        target = self._target(number)
        return Table(self.buffer, target) if target else None

    def string(self, number: int) -> str:
        """A string; empty if absent."""
        target = self._target(number)
        if not target:
            return ""
        size = read(self.buffer, "<I", target)
        text = self.buffer[target + 4 : target + 4 + size]
        if len(text) != size:
            raise DamagedError("a string ends outside its message")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise DamagedError("a string is not UTF-8") from error

    def tables(self, number: int) -> "list[Table]":
        """A vector of tables."""
        target = self._target(number)
        if not target:
            return []
        size = read(self.buffer, "<I", target)
        if target + 4 + 4 * size > len(self.buffer):
            raise DamagedError("a vector ends outside its message")
        starts = range(target + 4, target + 4 + 4 * size, 4)
        return [Table(self.buffer, start + read(self.buffer, "<I", start)) for start in starts]


def read(buffer: bytes, code: str, position: int) -> Any:
    """One number; `struct` checks the end of the buffer, but takes a negative position to count from there."""
    if position < 0:
        raise DamagedError("an offset points outside its message")
    try:
        return struct.unpack_from(code, buffer, position)[0]
    except struct.error as error:
        raise DamagedError("an offset points outside its message") from error
