"""The last events of one log line, in the carry of loops.

A ring belongs to a line that logs values of one type, not to a key: lines need not fit together, and nothing is
converted on the device. Every slot has the number of its event in the order of the program, 0 if it is empty; the host
joins the rings of a key by these numbers.

On a GPU, an iteration of a small loop takes as long as it takes to start its kernels, and every array that it changes
is one more. So a ring with room for what comes after a failure, which is never read in the loop, has all numbers of an
event in one row of 32-bit words, whatever their dtypes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lox import _compat
from lox._data import _lanes
from lox._data._bundle import Bundle, Keys
from lox._data._lanes import Laned
from lox._record import struct
from lox._transforms._state import conform, union

ORDER = "order of events"  # the step with the number of an event
FAILS = "whether it fails"  # the step that says so, in a ring with room for the events after it


class Line(NamedTuple):
    """A line that logs values of one type."""

    keys: Keys
    watched: Keys
    site: str
    types: Any
    devices: tuple[tuple[Any, ...], ...]  # the mesh axes of every shard_map around it
    room: int  # how many events its ring has room for, besides those to keep

    @classmethod
    def of(cls, event: Bundle, watched: Keys, devices: tuple[tuple[Any, ...], ...], room: int) -> "Line":
        """The line that this event is from."""
        leaves, treedef = jax.tree.flatten(event)
        # What varies over devices is not part of it: that may change while a loop is traced.
        types = [(x.shape, x.dtype, _compat.explicit_axes(_compat.aval_of(x))) for x in leaves]
        return cls(event.keys, watched, str(event.site), (treedef, tuple(types)), devices, room)

    def capacity(self, last: int | None) -> int:
        """The number of slots of its ring."""
        if not self.room:
            return last or 1
        # One more for an event that does not happen, and then a power of two, so that slots follow each other even
        # when the count of events overflows.
        return 1 << ((last or 0) + self.room).bit_length()


class Layout(NamedTuple):
    """Which arrays of an event are kept together: in a row, one word for each."""

    structure: Any  # of the event
    dtypes: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]  # the arrays in each row; one that is alone is kept as it is

    @classmethod
    def of(cls, event: Bundle, in_rows: bool) -> "Layout":
        """The layout for events like this one, with or without rows."""
        arrays, structure = jax.tree.flatten(event, is_leaf=_lanes.is_laned)
        groups: dict[Any, list[int]] = {}
        for place, x in enumerate(arrays):
            aval = _compat.aval_of(x.tree)
            # What is the same on all devices stays so, apart from what is not.
            kind = x.flags, aval.shape, _compat.explicit_axes(aval), _compat.varying_axes(aval)
            is_word = in_rows and not x.item_shape() and _word_of(aval.dtype) is not None
            groups.setdefault(kind if is_word else place, []).append(place)
        return cls(structure, tuple(x.tree.dtype for x in arrays), tuple(map(tuple, groups.values())))

    def pack(self, event: Bundle) -> "Rows":
        """The arrays to keep of an event."""
        arrays = jax.tree.leaves(event, is_leaf=_lanes.is_laned)
        return Rows([_joined([arrays[place] for place in group]) for group in self.groups])

    def unpack(self, rows: "Rows") -> Bundle:
        """The events of all slots."""
        arrays: dict[int, Laned] = {}
        for group, row in zip(self.groups, rows.arrays, strict=True):
            for n, place in enumerate(group):
                word = functools.partial(_from_words, n=n, dtype=self.dtypes[place])
                arrays[place] = row if len(group) == 1 else row.map(word)
        events = jax.tree.unflatten(self.structure, [arrays[place] for place in range(len(arrays))])
        return dataclasses.replace(events, single=False)


def _word_of(dtype: Any) -> Any:
    """The unsigned integers with as many bits, if a word has as many; else None."""
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        bits = 8 if _is_bool(dtype) else 0
    return {8: np.uint8, 16: np.uint16, 32: np.uint32}.get(bits)


def _is_bool(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _to_word(x: Any) -> Any:
    bits = x if _is_bool(x.dtype) else lax.bitcast_convert_type(x, _word_of(x.dtype))
    return jnp.expand_dims(bits.astype(jnp.uint32), -1)


def _from_words(words: Any, n: int, dtype: Any) -> Any:
    word = lax.index_in_dim(words, n, -1, keepdims=False)
    return word != 0 if _is_bool(dtype) else lax.bitcast_convert_type(word.astype(_word_of(dtype)), dtype)


def _joined(numbers: list[Laned]) -> Laned:
    """The row of these numbers, all of the same lanes; what is alone stays as it is."""
    first, *others = numbers
    if not others:
        return first
    trees = [x.tree for x in numbers]
    words = [_to_word(_compat.on_mesh_of(trees, x)) for x in trees]  # only some of them may have a mesh so far
    return Laned(jnp.concatenate(words, -1), first.flags)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=[])
@struct
class Rows:
    """The arrays of all slots, `(slot, *lanes, ...)`, or of one event."""

    arrays: list[Laned]

    lead: ClassVar[int] = 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "count"], meta_fields=["layout", "capacity"])
@struct
class Ring:
    """The last events of a line; where events happen in some lanes only, those of each lane."""

    rows: Rows
    count: Laned  # how many events there were
    layout: Layout
    capacity: int

    @classmethod
    def empty(cls, event: Bundle, line: Line, last: int | None) -> "Ring":
        """A ring for events like this one."""
        valid, by_lane = _happens(event)
        event, capacity = _in_lanes(event, by_lane), line.capacity(last)
        layout = Layout.of(event, in_rows=line.room > 0)
        slots = lambda x: lax.broadcast(_compat.zeros_of(_compat.aval_of(x)), (capacity,))  # noqa: E731
        rows = jax.tree.map(slots, layout.pack(event))
        count = jnp.zeros(() if by_lane is None else valid.shape, jnp.int32)
        return cls(rows, Laned(count, by_lane.flags if by_lane else ()), layout, capacity)

    def take(self, event: Bundle, running: Any = None) -> "Ring":
        """Add an event, if the program is still `running` without a failure.

        If that is not given, the ring has room for what comes after a failure. Then an event that does not happen is
        in the slot of the next one until that comes, but has no number: so nobody has to look at what was there.
        """
        valid, by_lane = _happens(event)
        where = valid if running is None else valid & running
        if running is None and by_lane is None:
            if event.valid is not None:
                order = event.steps[ORDER].map(lambda number: jnp.where(valid, number, 0))
                event = dataclasses.replace(event, steps={**event.steps, ORDER: order})
            where = None
        count, is_power = self.count.tree, self.capacity & (self.capacity - 1) == 0
        slot = count & (self.capacity - 1) if is_power else count % self.capacity
        # With the flags of the event: a state that was in a shard_map has one more, for an axis that is not there.
        new = self.layout.pack(_in_lanes(event, by_lane))
        put = functools.partial(_put, slot, where, by_lane)
        rows = Rows([put(a, b) for a, b in zip(self.rows.arrays, new.arrays, strict=True)])
        # Counted even after a failure: else `vmap` would give every lane a slot of its own, and each event a scatter.
        count = Laned(count + valid.astype(jnp.int32), by_lane.flags if by_lane else ())
        return dataclasses.replace(self, rows=rows, count=count)

    def events(self) -> Bundle:
        """The events of all slots, empty ones included."""
        return self.layout.unpack(self.rows)

    def recorded(self, selected: Callable[[Any], Any]) -> Bundle:
        """The events, of which those are valid whose number is `selected`; all others have none."""
        events = self.events()
        valid = events.steps[ORDER].map(selected)
        order = valid.map(lambda kept: jnp.where(kept, events.steps[ORDER].tree, 0))
        steps = {name: x for name, x in events.steps.items() if name != FAILS}
        return dataclasses.replace(events, steps={**steps, ORDER: order}, valid=valid)

    def conform(self, struct: "Ring") -> "Ring":
        """Give it the type of `struct`, a later state."""
        arrays, targets = (jax.tree.leaves(ring, is_leaf=_lanes.is_laned) for ring in (self, struct))
        leads = [*[1] * (len(arrays) - 1), 0]  # the rows, and the count
        conformed = [conform(*both) for both in zip(arrays, targets, leads, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(struct, is_leaf=_lanes.is_laned), conformed)

    @classmethod
    def from_struct(cls, struct: "Ring") -> "Ring":
        """The empty ring with the type of `struct`."""
        return jax.tree.map(_compat.zeros_of, struct)


def _happens(event: Bundle) -> tuple[Any, Laned | None]:
    """Whether the event happens, and the same with its lanes if that depends on the lane."""
    if event.valid is None:
        return jnp.ones((), bool), None
    return event.valid.tree, event.valid if event.valid.ndim else None


def _in_lanes(event: Bundle, by_lane: Laned | None) -> Bundle:
    """The arrays of an event, in all lanes if it depends on the lane whether it happens."""
    event = dataclasses.replace(event, valid=None)
    if by_lane is None:
        return event
    return jax.tree.map(lambda x: _lanes.widen(x, union("", x, by_lane)), event, is_leaf=_lanes.is_laned)


def _put(slot: Any, where: Any, by_lane: Laned | None, slots: Laned, x: Laned) -> Laned:
    """Put a value into a slot, or into a slot of each lane; only by selections, which cost no branch."""
    if by_lane is None:
        # All on one mesh, which only some of them may have so far.
        everything = [x.tree, slots.tree, *([] if where is None else [where])]
        new, whole = (_compat.on_mesh_of(everything, a) for a in everything[:2])
        if where is not None:
            where = _compat.on_mesh_of(everything, where)
            new = lax.select(where, new, lax.dynamic_index_in_dim(whole, slot, keepdims=False))
        new = _compat.on_mesh_of([whole], new)
        return Laned(lax.dynamic_update_index_in_dim(whole, new, slot, 0), x.flags)
    numbers = jnp.arange(slots.tree.shape[0], dtype=jnp.int32).reshape((-1,) + (1,) * slot.ndim)
    here = Laned((numbers == slot[None]) & where[None], by_lane.flags)
    mask = _lanes.expand_to(here, x.flags, slots.tree.ndim, lead=1)
    return Laned(jnp.where(mask, jnp.expand_dims(x.tree, 0), slots.tree), x.flags)
