"""The columns of a segment, and the Arrow schema message at its beginning that describes them.

What lox needs to know is in the metadata of the fields, so keys are data; the names of columns are for people. Columns
are `run`, `wall` (seconds since 1970), one for each step, `valid` if some lanes lack events, and one for each array of
each key. No column has a variable length or nulls.

A row has one event of one run; or, if runs with neighbouring numbers log together, of up to 64 of them, of which `run`
is the first. What differs between them is a list with an item per run, what does not is stored once.
"""

import dataclasses
import functools
import hashlib
import io
import json
import math
import struct
import zlib
from typing import Any, NamedTuple

from lox.store import _dtypes, _structure
from lox.store._flatbuffers import DamagedError, Table

FORMAT = "lox-arrow/2"
FORMAT_1 = "lox-arrow/1"  # without checksums, and with one run per row

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\0\0\0\0"
MAX_RUNS = 64  # in a row: enough to store once what they share, and few enough to read one of them quickly
_MAX_ITEMS = 2**31 - 1  # of a fixed-size list
_MAX_NDIM = 60
_MAX_SCHEMA = 64 << 20

# Arrow's numbers for the types in use.
_SCHEMA_HEADER = 1
_NULL, _INT, _FLOAT, _BOOL, _FIXED_SIZE_LIST = 1, 2, 3, 6, 16
_FLOAT_PRECISION = {1: "float32", 2: "float64"}

Flags = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """One column. `shape` is that of an event of one run, lanes included; `lanes` are their flags (`lox._data`)."""

    role: str  # "run", "wall", "step", "valid" or "value"
    name: str  # the step's name or the key
    dtype: str
    shape: tuple[int, ...] = ()
    lanes: Flags = ()
    tree_path: str = "[]"  # keys and indices that lead to the array in the value, as JSON
    words: int = 0
    runs: int = 0  # how many runs an item is for; 0 if it is the same for all runs of the row

    @property
    def codec(self) -> _dtypes.Codec:
        """How items are stored."""
        return _dtypes.step_codec(self.dtype) if self.role == "step" else _dtypes.codec(self.dtype, self.words)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of an item in memory, in which PRNG keys are words."""
        return (*([self.runs] if self.runs else []), *self.shape, *([self.words] if self.words else []))

    @property
    def items(self) -> int:
        """How many Arrow values one row has."""
        return (self.runs or 1) * math.prod(self.shape) * (self.codec.extra or 1)

    @property
    def is_list(self) -> bool:
        """Whether Arrow sees a list; a scalar of a plain dtype is a number."""
        return bool(self.shape) or bool(self.codec.extra) or bool(self.runs)


class Key(NamedTuple):
    """A key of the logs: its columns, the structure of its values as JSON, and its place in the order of keys."""

    name: str
    structure: str
    columns: tuple[Column, ...]
    order: int


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: hashing all of it costs more than an append may
class Schema:
    """The columns of a segment. All keys of a segment share their steps and `valid`."""

    steps: tuple[Column, ...]
    valid: Column | None
    keys: tuple[Key, ...]
    runs: int = 1  # of a row
    checked: bool = True  # whether batches have checksums

    @property
    def columns(self) -> list[Column]:
        """All columns in the order of the file."""
        valid = [self.valid] if self.valid else []
        return [RUN, WALL, *self.steps, *valid, *[c for key in self.keys for c in key.columns]]

    @functools.cached_property
    def numbers(self) -> dict[Column, int]:
        """The place of each column in the file."""
        return {column: number for number, column in enumerate(self.columns)}


RUN = Column("run", "run", "int32")
WALL = Column("wall", "wall", "float64")


# --- writing, through nanoarrow ---


def _arrow_type(column: Column) -> Any:
    import nanoarrow

    if column.items == 0:
        return nanoarrow.null()  # there are no values to store
    name = column.codec.arrow.name
    item = getattr(nanoarrow, "bool_" if name == "bool" else name)(nullable=False)
    if not column.is_list:
        return item
    return nanoarrow.fixed_size_list(item, column.items, nullable=False)


def encode(schema: Schema, place: str) -> bytes:
    """Return the message with which a segment begins; `place` is its group and name."""
    import nanoarrow
    from nanoarrow.c_array_stream import CArrayStream
    from nanoarrow.ipc import StreamWriter

    fields = []
    taken: set[str] = set()
    for column in schema.columns:
        metadata = {
            "role": column.role,
            "key" if column.role == "value" else "name": json.dumps(column.name),
            "path": column.tree_path,
            "dtype": column.dtype,
            "shape": json.dumps(column.shape),
            "lanes": json.dumps(column.lanes),
        }
        metadata |= {name: str(n) for name, n in (("words", column.words), ("runs", column.runs)) if n}
        name = _title(column, taken)
        fields.append(nanoarrow.Schema(_arrow_type(column), name=name, metadata=metadata))
    keys = json.dumps([[key.name, key.structure, key.order] for key in schema.keys])
    about = {"format": FORMAT, "keys": keys, "runs": str(schema.runs), "place": place, "crc": checksum(schema, place)}
    whole = nanoarrow.Schema(nanoarrow.Type.STRUCT, fields=fields, metadata=about, nullable=False)
    out = io.BytesIO()
    writer = StreamWriter.from_writable(out)
    writer.write_stream(CArrayStream.from_c_arrays([], nanoarrow.c_schema(whole), move=False))
    writer.release()
    return out.getvalue()


def checksum(schema: Schema, place: str) -> str:
    """Return the checksum of everything that lox needs to know of a segment."""
    return _checksum(_described(schema), place)


def _described(schema: Schema) -> str:
    """Return all but the place of a segment, as JSON."""
    keys = [(key.name, key.structure, key.order) for key in schema.keys]
    columns = [list(dataclasses.asdict(column).values()) for column in schema.columns]
    return json.dumps([schema.runs, keys, columns])


def _checksum(described: str, place: str) -> str:
    return f"{zlib.crc32(f'[{json.dumps(place)}, {described[1:]}'.encode()):08x}"


def _title(column: Column, taken: set[str]) -> str:
    """Return a unique name of a column for other tools, without characters that they cannot handle."""
    title = column.name
    if column.role == "value":
        title = "/".join([title, *map(str, json.loads(column.tree_path))])
    # A name ends at a zero byte, and lone surrogates are invalid Unicode; the metadata have the key as it is.
    title = title.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()[:200]
    number, unique = 1, title
    while unique in taken:
        number += 1
        unique = f"{title}#{number}"
    taken.add(unique)
    return unique


# --- reading ---


def message_size(prefix: bytes) -> int:
    """Return the size of the metadata of a message, given its first 8 bytes."""
    if len(prefix) < 8 or prefix[:4] != CONTINUATION:
        raise DamagedError("no Arrow message begins here")
    (size,) = struct.unpack("<i", prefix[4:8])
    if size < 0 or size % 8 or size > _MAX_SCHEMA:
        raise DamagedError("no Arrow message has this length")
    return size


def decode(metadata: bytes, place: str) -> Schema:
    """Read the schema from the metadata of the first message of the segment at `place`."""
    message = Table.root(metadata)
    header = message.table(2)
    if message.scalar(1, "B", 0) != _SCHEMA_HEADER or header is None or message.scalar(3, "q", 0) != 0:
        raise DamagedError("the segment does not begin with a schema")
    about = _metadata(header, 2)
    checked = about.get("format") == FORMAT
    if not checked and about.get("format") != FORMAT_1:
        raise DamagedError(f"the segment is of format {about.get('format')!r}, not {FORMAT!r}")
    # A thousand runs of one program have the same schema but for its place, and to decode a large one takes 10 ms. The
    # checksum, which is verified for each, covers all that is taken from another.
    unique = [text.encode() for name in ("crc", "place") if (text := about.get(name))] if checked else []
    form = hashlib.sha256(functools.reduce(lambda left, text: left.replace(text, b"\0"), unique, metadata)).digest()
    known = _decoded.get(form)
    if known is None:
        try:
            columns = [_column(field) for field in header.tables(1)]
            keys = json.loads(about["keys"])
            schema = _assemble(columns, keys, int(about["runs"]) if checked else 1, checked)
        except (KeyError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise DamagedError(f"the schema makes no sense ({error})") from error
        known = schema, _described(schema) if checked else ""
    schema, described = known
    if checked and about.get("crc") != _checksum(described, about.get("place", "")):
        raise DamagedError("the schema does not have the checksum that it was written with")
    if checked and about["place"] != place:
        raise DamagedError(f"it was written as {about['place']!r}")
    if len(_decoded) >= _MOST_DECODED:
        _decoded.clear()
    _decoded[form] = known
    return schema


_decoded: dict[bytes, tuple[Schema, str]] = {}  # by a hash of the message without what is unique in it
_MOST_DECODED = 256


def _metadata(table: Table, number: int) -> dict[str, str]:
    return {entry.string(0): entry.string(1) for entry in table.tables(number)}


def _column(field: Table) -> Column:
    about = _metadata(field, 6)
    role = about["role"]
    shape = json.loads(about["shape"])
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM or not all(type(n) is int and n >= 0 for n in shape):
        raise DamagedError(f"{shape!r} is not a shape")
    if math.prod(n or 1 for n in shape) > _MAX_ITEMS:
        raise DamagedError(f"{shape!r} is too large a shape")
    name = json.loads(about["key" if role == "value" else "name"])
    if not isinstance(name, str):
        raise DamagedError(f"{name!r} is not a name")
    words = int(about.get("words", 0))
    if not 0 <= words <= 64 or bool(words) != about["dtype"].startswith("key<"):
        raise DamagedError(f"a PRNG key has {words} words")
    runs, flags = int(about.get("runs", 0)), _flags(json.loads(about["lanes"]))
    if not 0 <= runs <= MAX_RUNS:
        raise DamagedError(f"a row has {runs} runs")
    column = Column(role, name, about["dtype"], tuple(shape), flags, about["path"], words, runs)
    if _stored_type(field) != _expected_type(column):
        raise DamagedError(f"the column {name!r} is not stored as its dtype {column.dtype} says")
    return column


def _flags(flags: Any) -> Flags:
    if not isinstance(flags, list) or len(flags) > _MAX_NDIM:
        raise DamagedError("the lanes are not flags")
    for flag in flags:
        named = isinstance(flag, list) and all(isinstance(axis, str) for axis in flag)
        if not isinstance(flag, bool) and not named:
            raise DamagedError("the lanes are not flags")
    return tuple(tuple(flag) if isinstance(flag, list) else flag for flag in flags)


def _expected_type(column: Column) -> Any:
    if column.items == 0:
        return "null"
    item = column.codec.arrow.name
    return (item, column.items) if column.is_list else item


def _stored_type(field: Table) -> Any:
    kind, about = field.scalar(2, "B", 0), field.table(3)
    if kind == _NULL:
        return "null"
    if kind == _BOOL:
        return "bool"
    if about is None:
        raise DamagedError("a column has no type")
    if kind == _INT:
        sign = "" if about.scalar(1, "?", False) else "u"
        return f"{sign}int{about.scalar(0, 'i', 0)}"
    if kind == _FLOAT:
        return _FLOAT_PRECISION.get(about.scalar(0, "h", 0))
    if kind == _FIXED_SIZE_LIST:
        children = field.tables(5)
        if len(children) == 1 and children[0].scalar(2, "B", 0) != _FIXED_SIZE_LIST:
            return _stored_type(children[0]), about.scalar(0, "i", 0)
    raise DamagedError("a column has a type that lox does not write")


def _assemble(columns: list[Column], keys: Any, runs: int, checked: bool) -> Schema:
    """Make the schema of these columns; anything inconsistent is damage."""
    if columns[:2] != [RUN, WALL]:
        raise DamagedError("the first columns are not those of lox")
    rest = columns[2:]
    if not 1 <= runs <= MAX_RUNS or any(c.runs not in (0, runs if runs > 1 else 0) for c in rest):
        raise DamagedError("the columns are not all for the same runs")
    steps = tuple(c for c in rest if c.role == "step")
    valid = [c for c in rest if c.role == "valid"]
    leaves = [c for c in rest if c.role == "value"]
    if rest != [*steps, *valid, *leaves] or len(valid) > 1 or any(c.dtype != "bool" for c in valid):
        raise DamagedError("the columns are not in order")
    if len({c.name for c in steps}) != len(steps):
        raise DamagedError("two steps have one name")
    schema_keys, start = [], 0
    for key, structure, order in keys:
        stop = start + _structure.count(json.loads(structure))
        part = tuple(leaves[start:stop])
        if (
            not isinstance(key, str)
            or type(order) is not int
            or len(part) != stop - start
            or any(c.name != key for c in part)
        ):
            raise DamagedError("the columns do not fit the keys")
        schema_keys.append(Key(key, structure, part, order))
        start = stop
    if start != len(leaves) or len({key.name for key in schema_keys}) != len(schema_keys):
        raise DamagedError("the columns do not fit the keys")
    return Schema(steps, valid[0] if valid else None, tuple(schema_keys), runs, checked)
