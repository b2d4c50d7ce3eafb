"""Reads FlatBuffers from untrusted files.

Every position is checked before it is read, so that a damaged file raises an exception and never crashes. Not a parser
in C: nanoarrow 0.9 crashes the process on some schemas with a flipped bit.
"""

import struct
from typing import Any


class DamagedError(Exception):
    """These bytes are not what they should be. Users never see this exception."""


class _Budget:
    """How much may be read from a buffer in all.

    In a sound buffer, nothing overlaps. In a hostile one, a thousand elements may be the same vector of a thousand
    elements, and so on.
    """

    __slots__ = ("left",)

    def __init__(self, left: int):
        self.left = left

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise DamagedError("the message contains more than fits into it")


class Table:
    """A table inside a buffer, whose fields have numbers."""

    __slots__ = ("budget", "buffer", "position", "vtable", "vtable_size")

    def __init__(self, buffer: bytes, position: int, budget: _Budget):
        self.buffer, self.position, self.budget = buffer, position, budget
        self.vtable = position - read(buffer, "<i", position)
        self.vtable_size = read(buffer, "<H", self.vtable)

    @classmethod
    def root(cls, buffer: bytes) -> "Table":
        """Return the outermost table."""
        return cls(buffer, read(buffer, "<I", 0), _Budget(len(buffer)))

    def _field(self, number: int) -> int:
        """Return the position of a field, 0 if it is absent."""
        slot = 4 + 2 * number
        if slot + 2 > self.vtable_size:
            return 0
        offset = read(self.buffer, "<H", self.vtable + slot)
        return self.position + offset if offset else 0

    def scalar(self, number: int, code: str, default: Any) -> Any:
        """Read a number."""
        position = self._field(number)
        return read(self.buffer, "<" + code, position) if position else default

    def _target(self, number: int) -> int:
        position = self._field(number)
        return position + read(self.buffer, "<I", position) if position else 0

    def table(self, number: int) -> "Table | None":
        """Read a table."""
        target = self._target(number)
        return Table(self.buffer, target, self.budget) if target else None

    def string(self, number: int) -> str:
        """Read a string, empty if absent."""
        target = self._target(number)
        if not target:
            return ""
        size = read(self.buffer, "<I", target)
        self.budget.take(size)
        text = self.buffer[target + 4 : target + 4 + size]
        if len(text) != size:
            raise DamagedError("a string ends outside its message")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise DamagedError("a string is not UTF-8") from error

    def tables(self, number: int) -> "list[Table]":
        """Read a vector of tables."""
        target = self._target(number)
        if not target:
            return []
        size = read(self.buffer, "<I", target)
        self.budget.take(4 * size)
        starts = range(target + 4, target + 4 + 4 * size, 4)
        return [Table(self.buffer, start + read(self.buffer, "<I", start), self.budget) for start in starts]


def read(buffer: bytes, code: str, position: int) -> Any:
    """Read a number; `struct` checks the end of the buffer, but counts a negative position from there."""
    if position < 0:
        raise DamagedError("an offset points outside its message")
    try:
        return struct.unpack_from(code, buffer, position)[0]
    except struct.error as error:
        raise DamagedError("an offset points outside its message") from error
