"""`record`: classes that only hold values, and are made and filled as fast as possible."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a dataclass that is compared by value, and never changed: type checkers refuse to.

    Not `dataclass(frozen=True)`, which compiles twice as many methods when lox is imported, and sets every field by a
    call, for every event of every program that is traced.
    """
    made: Any = dataclasses.dataclass(repr=False, unsafe_hash="__hash__" not in vars(cls))(cls)
    made.__repr__ = _repr
    return made


def _repr(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
    return f"{type(self).__qualname__}({values})"
