"""One execution of `lox.log`: its static part, its arrays, and its conversion to and from operands of a primitive."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from lox._data import _arrays, _reduce
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Flags, Laned
from lox._record import record

PyTreeDef = Any


@record
class Meta:
    """The static part of an event: everything but its arrays.

    `log_p` has an operand for every leaf of every key, then one for every step, then the weight and `valid` if there
    are any; `flags` has the lanes of each.
    """

    keys: tuple[str, ...]
    treedefs: tuple[PyTreeDef, ...]
    reductions: tuple[_reduce.Reduction | None, ...]
    steps: tuple[str, ...]
    tags: frozenset[str]
    weighted: bool
    has_valid: bool
    explicit: bool
    seen: bool  # by a tap or spool that let it flow on, so that the default sink ignores it
    site: str
    flags: tuple[Flags, ...]

    @functools.cached_property
    def as_seen(self) -> "Meta":
        """The same of an event that was seen."""
        return self if self.seen else dataclasses.replace(self, seen=True)


@record
class Event:
    """One execution of `lox.log`, as handlers see it."""

    values: dict[str, list[Laned]]
    treedefs: dict[str, PyTreeDef]
    reductions: dict[str, _reduce.Reduction | None]
    steps: dict[str, Laned]
    weight: Laned | None
    valid: Laned | None
    tags: frozenset[str]
    explicit: bool
    seen: bool
    site: str
    scope: str = ""  # the names of the scopes around it, as a prefix
    own: bool = False  # whether nobody else has its arrays
    meta: Meta | None = None  # its static part, if it is as it was logged

    @classmethod
    def from_operands(cls, meta: Meta, operands: Iterable[Any], scope: str = "", own: bool = False) -> "Event":
        """Make an event of the operands of `log_p`."""
        laned = [Laned(_arrays.as_array(x), f) for x, f in zip(operands, meta.flags, strict=True)]
        values, start = {}, 0
        for key, treedef in zip(meta.keys, meta.treedefs, strict=True):
            end = start + treedef.num_leaves
            values[key], start = laned[start:end], end
        rest = iter(laned[start:])
        return cls(
            values=values,
            treedefs=dict(zip(meta.keys, meta.treedefs, strict=True)),
            reductions=dict(zip(meta.keys, meta.reductions, strict=True)),
            steps={s: next(rest) for s in meta.steps},
            weight=next(rest) if meta.weighted else None,
            valid=next(rest) if meta.has_valid else None,
            tags=meta.tags,
            explicit=meta.explicit,
            seen=meta.seen,
            site=meta.site,
            scope=scope,
            own=own,
            meta=meta,
        )

    def to_operands(self, seen: bool = False) -> tuple[list[Any], Meta]:
        """The inverse of `from_operands`; the event may be `seen` from now on."""
        laned = [x for leaves in self.values.values() for x in leaves] + list(self.steps.values())
        laned += [x for x in (self.weight, self.valid) if x is not None]
        if self.meta is not None:
            return [x.tree for x in laned], self.meta.as_seen if seen else self.meta
        meta = Meta(
            keys=tuple(self.values),
            treedefs=tuple(self.treedefs[k] for k in self.values),
            reductions=tuple(self.reductions[k] for k in self.values),
            steps=tuple(self.steps),
            tags=self.tags,
            weighted=self.weight is not None,
            has_valid=self.valid is not None,
            explicit=self.explicit,
            seen=seen or self.seen,
            site=self.site,
            flags=tuple(x.flags for x in laned),
        )
        return [x.tree for x in laned], meta

    def replace(self, **changes: Any) -> "Event":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes, meta=None)

    def only(self, keys: Iterable[str]) -> "Event":
        """The part of the event that concerns these keys."""
        return self.replace(values={k: self.values[k] for k in self.values if k in set(keys)})

    def only_if(self, condition: Any) -> "Event":
        """The same event under a further condition."""
        if self.valid is not None:
            return self.replace(valid=Laned(self.valid.tree & condition, self.valid.flags))
        return self.replace(valid=Laned(condition, (False,) * len(next(iter(self.values.values()))[0].flags)))

    def owned(self) -> "Event":
        """The same event with copies of its arrays, which the program cannot donate."""
        if self.own or _arrays.is_staging():
            return self
        operands, meta = self.to_operands()
        return Event.from_operands(meta, _arrays.owned(operands), self.scope, own=True)

    def prefixed(self, prefix: str) -> "Event":
        """The same event with a prefix in front of its keys."""
        if not prefix:
            return self
        renamed = lambda by_key: {prefix + k: v for k, v in by_key.items()}  # noqa: E731
        return self.replace(
            values=renamed(self.values), treedefs=renamed(self.treedefs), reductions=renamed(self.reductions)
        )

    def in_scope(self) -> "Event":
        """The same event with the keys that users see, scopes included.

        Not for an event that is bound again in place, where the scopes are still around it.
        """
        return self.prefixed(self.scope).replace(scope="") if self.scope else self

    def bundle(self, keys: Iterable[str]) -> Bundle:
        """What the event contributes to some of its keys."""
        keys = tuple(keys)
        return Bundle(
            values=[_strong(x) for key in keys for x in self.values[key]],
            steps={name: _strong(x) for name, x in self.steps.items()},
            valid=self.valid,
            keys=keys,
            treedefs=tuple(self.treedefs[key] for key in keys),
            single=True,
            site=Site(self.site),
        )


def _strong(x: Laned) -> Laned:
    tree = _arrays.strong(x.tree)
    return x if tree is x.tree else Laned(tree, x.flags)
