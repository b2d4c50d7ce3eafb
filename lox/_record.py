"""Classes that only hold values, and are made and filled as fast as possible."""

import dataclasses
import operator
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a dataclass that is compared by value, and never changed: type checkers refuse to.

    Not `dataclass(frozen=True)`, which compiles six methods of each class when lox is imported, where one does, and
    sets every field by a call, for every event of every program that is traced.
    """
    made: Any = struct(cls)
    names = [field.name for field in dataclasses.fields(made)]
    values = operator.attrgetter(*names) if names else lambda self: ()

    def is_equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    made.__eq__ = is_equal
    if "__hash__" not in vars(cls):
        made.__hash__ = lambda self: hash(values(self))
    return made


@dataclass_transform(eq_default=False)
def struct(cls: type[T]) -> type[T]:
    """Make a class a dataclass whose fields may be changed, and that is equal to nothing but itself."""
    made: Any = dataclasses.dataclass(repr=False, eq=False)(cls)
    made.__repr__ = _repr
    return made


def _repr(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
    return f"{type(self).__qualname__}({values})"
