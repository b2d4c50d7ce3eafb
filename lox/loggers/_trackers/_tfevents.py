"""TensorBoard's event files, encoded with NumPy.

A file is a sequence of records: a length, its checksum, a serialised `Event`, its checksum. Events of one curve differ
only in step and value, so thousands of them are one array of bytes with one row each. The checksum, CRC-32C, is linear:
a row's checksum is that of a common row, xor what each differing byte contributes at its place.
"""

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import IO, Any

import numpy as np

from lox._data._histogram import Histogram
from lox._data._image import Image, png

CHARTS = "custom_scalars__config__"  # the tag of which charts there are

# --- CRC-32C --------------------------------------------------------------------------------------

_POLYNOMIAL = 0x82F63B78


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _byte_table()
_INTEGERS = _TABLE.tolist()
_AFTER = [_TABLE]  # what a byte contributes to the checksum, by the number of bytes that follow


def _contributions(following: int) -> np.ndarray:
    while len(_AFTER) <= following:
        _AFTER.append(_one_zero_byte(_AFTER[-1]))
    return _AFTER[following]


def _one_zero_byte(register: np.ndarray) -> np.ndarray:
    return _TABLE[register & 0xFF] ^ (register >> np.uint32(8))


_SHORT, _COLUMNS = 512, 64


def crc32c(data: bytes) -> int:
    """Return the checksum of some bytes."""
    if len(data) < _SHORT:
        register = 0xFFFFFFFF
        for byte in data:
            register = _INTEGERS[(register ^ byte) & 0xFF] ^ register >> 8
        return register ^ 0xFFFFFFFF
    # A picture is too long for a loop in Python: cut it into rows, do all rows at once, then join pairs.
    count = 1 << (-(-len(data) // _COLUMNS) - 1).bit_length()
    padded = np.zeros(count * _COLUMNS, np.uint8)  # zeros in front change nothing while the register is zero
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[-len(data) : 4 - len(data)] ^= 0xFF  # the same as a register that begins with all ones
    registers = np.zeros(count, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(count, _COLUMNS).T):
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> np.uint32(8))
    shift = _zero_bytes(_COLUMNS)
    while len(registers) > 1:
        registers = _shifted(registers[::2], shift) ^ registers[1::2]
        shift = _shifted(shift, shift)
    return int(registers[0]) ^ 0xFFFFFFFF


@lru_cache
def _zero_bytes(count: int) -> np.ndarray:
    """Return what `count` zero bytes (a power of two) do to a register: a table for each of its four bytes."""
    tables = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    tables = _one_zero_byte(tables)
    while count > 1:
        tables, count = _shifted(tables, tables), count // 2
    return tables


def _shifted(registers: np.ndarray, tables: np.ndarray) -> np.ndarray:
    first, second, third, fourth = (registers >> np.uint32(n) & 0xFF for n in (0, 8, 16, 24))
    return tables[0][first] ^ tables[1][second] ^ tables[2][third] ^ tables[3][fourth]


def _masked(crc: Any) -> Any:
    """Mask a checksum, or an array of them, as the format does, so that files inside files do not confuse readers."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- Protocol buffers -----------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes, a string or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def integer(number: int, value: int) -> bytes:
    """Encode a field of an integer, a boolean or an enumeration."""
    return _varint(number << 3) + _varint(value)


def double(number: int, value: float) -> bytes:
    """Encode a field of a number."""
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _doubles(number: int, values: np.ndarray) -> bytes:
    return field(number, np.asarray(values, "<f8").tobytes())


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of an encoded message: integers, and anything else as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte, at, shift = message[at], at + 1, shift + 7
            number |= (byte & 0x7F) << shift - 7
            if byte < 0x80:
                return number

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield number, message[at : at + size]
        at += size


def record(event: bytes) -> bytes:
    """Frame a serialised event with its length and checksums."""
    return _head(len(event)) + event + struct.pack("<I", _masked(crc32c(event)))


@lru_cache
def _head(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + struct.pack("<I", _masked(crc32c(size)))


def read_record(file: IO[bytes]) -> bytes | None:
    """Read one record and return its event; None at the end, or where a crash has left something else."""
    head = file.read(12)
    if len(head) < 12 or head != _head(length := struct.unpack_from("<Q", head)[0]):
        return None
    rest = file.read(length + 4)
    whole = len(rest) == length + 4 and struct.unpack("<I", rest[-4:])[0] == _masked(crc32c(rest[:-4]))
    return rest[:-4] if whole else None


def header(wall: float) -> bytes:
    """Return the first record of a file."""
    return record(double(1, wall) + field(3, b"brain.Event:2"))


def session_start(step: int, wall: float) -> bytes:
    """Encode that what follows replaces all events from this step on."""
    return record(double(1, wall) + integer(2, step) + field(7, integer(1, 1)))


def event(tag: str, step: int, wall: float, content: bytes) -> bytes:
    """Frame an event of one tag: its content is the rest of a `Summary.Value`."""
    value = field(1, tag.encode(errors="backslashreplace")) + content
    return record(double(1, wall) + integer(2, step) + field(5, field(1, value)))


# --- the contents of events -----------------------------------------------------------------------


def scalars(tag: str, steps: np.ndarray, values: np.ndarray, wall: float) -> np.ndarray:
    """Encode single numbers as records of equal length, one per row."""
    if len(steps) == 1:  # a shortcut for events that are written one by one
        with np.errstate(over="ignore"):  # beyond single precision is infinity
            number = b"\x15" + values[:1].astype("<f4").tobytes()
        return np.frombuffer(event(tag, int(steps[0]), wall, number), np.uint8)[None]
    steps = np.asarray(steps, np.int64).view(np.uint64)
    # Steps are padded to equal width with bytes that only say that another one follows.
    width = max(1, -(-int(steps.max(initial=np.uint64(0))).bit_length() // 7))
    label = field(1, tag.encode(errors="backslashreplace")) + b"\x15"  # then the value, four bytes
    value = b"\x0a" + _varint(len(label) + 4) + label
    before, middle = double(1, wall) + b"\x10", b"\x2a" + _varint(len(value) + 4) + value
    message = before + bytes(width) + middle + bytes(4)
    rows = np.empty((len(steps), 12 + len(message) + 4), np.uint8)
    rows[:, :-4] = np.frombuffer(_head(len(message)) + message, np.uint8)
    crc = np.full(len(steps), crc32c(message), np.uint32)

    def put(place: int, column: np.ndarray) -> None:
        rows[:, 12 + place] = column
        np.bitwise_xor(crc, _contributions(len(message) - 1 - place)[column], out=crc)

    for n in range(width):
        more = np.uint8(0x80 if n < width - 1 else 0)
        put(len(before) + n, (steps >> np.uint64(7 * n)).astype(np.uint8) & np.uint8(0x7F) | more)
    for n, column in enumerate(np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4).T):
        put(len(message) - 4 + n, column)
    rows[:, -4:] = _masked(crc).astype("<u4").view(np.uint8).reshape(-1, 4)
    return rows


def histogram(tag: str, step: int, values: Histogram, wall: float) -> bytes:
    """Encode one histogram, without the empty bins at both ends."""
    counts, edges = np.asarray(values.counts, np.float64), values.edges.astype(np.float64)
    filled = np.flatnonzero(counts)
    first, last = (filled[0], filled[-1]) if len(filled) else (0, 0)
    used = slice(first, last + 1)
    proto = double(1, edges[first]) + double(2, edges[last + 1])  # bounds of the values
    proto += double(3, counts.sum()) + double(4, float(values.sum)) + double(5, float(values.sum_squares))
    proto += _doubles(6, edges[first + 1 : last + 2]) + _doubles(7, counts[used])
    return event(tag, step, wall, field(5, proto))


def image(tag: str, step: int, values: Image, wall: float) -> bytes:
    """Encode one picture."""
    height, width, channels = values.pixels.shape
    proto = integer(1, height) + integer(2, width) + integer(3, channels) + field(4, png(values.pixels))
    return event(tag, step, wall, field(4, proto))


def text(tag: str, step: int, content: str, wall: float) -> bytes:
    """Encode a text, which TensorBoard shows as Markdown."""
    tensor = integer(1, 7) + field(2, field(2, integer(1, 1)))  # a vector of one string
    tensor += field(8, content.encode(errors="backslashreplace"))
    metadata = field(1, field(1, b"text")) + integer(4, 2)
    return event(tag, step, wall, field(9, metadata) + field(8, tensor))


def margin_charts(charts: Iterable[tuple[str, str, str]], step: int, wall: float) -> bytes:
    """Encode which curves TensorBoard's "custom scalars" show with a band around them: value, low and high."""
    categories: dict[str, bytes] = {}
    for tags in charts:
        value, low, high = (tag.encode(errors="backslashreplace") for tag in tags)
        series = field(1, value) + field(2, low) + field(3, high)
        category = tags[0].partition("/")[0]
        chart = field(2, field(1, value) + field(3, field(1, series)))
        categories[category] = categories.get(category, b"") + chart
    layout = [field(2, field(1, name.encode(errors="backslashreplace")) + x) for name, x in categories.items()]
    tensor = integer(1, 7) + field(2, b"") + field(8, b"".join(layout))  # a single string
    metadata = field(1, field(1, b"custom_scalars")) + integer(4, 2)
    return event(CHARTS, step, wall, field(9, metadata) + field(8, tensor))
