"""`logdict`: logs as users see them."""

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _bundle, _format, _lanes, _reduce, _sites
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Flags, Laned, unnamed


class Layout(NamedTuple):
    """Which axes the arrays of one key have.

    `ndims` is the number of axes of each leaf when it was logged, event axis and lanes included. Any further axes come
    from transformations of the whole logdict, such as `vmap(spool(f))`, and are in front.
    """

    events: bool
    flags: tuple[Flags, ...]
    ndims: tuple[int, ...]
    step_flags: tuple[tuple[str, Flags], ...] = ()
    valid_flags: Flags = ()
    one_event: bool = False  # one event, or none in some lanes: what `tap` delivers


def _deep(x: Any, flags: Flags, depth: int, lead: Flags) -> Laned:
    """An array with flags for `depth` vmaps, inside of those of `lead`."""
    x = x if type(x) is np.ndarray or not np.isscalar(x) else np.asarray(x)
    flags = flags if len(flags) == depth else _lanes.with_depth(flags, depth)
    return Laned(x, (*lead, *flags) if flags else lead)


class Structure:
    """The axes of all keys. The keys are in the order of logging, which does not make two structures differ."""

    __slots__ = ("is_sorted", "layouts")

    def __init__(self, layouts: dict[str, Layout]):
        self.layouts = layouts
        self.is_sorted = list(layouts) == sorted(layouts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.layouts == other.layouts

    def __hash__(self) -> int:
        return hash(frozenset(self.layouts.items()))

    def __repr__(self) -> str:
        return repr(self.layouts)


_new, _set, _update = dict.__new__, dict.__setitem__, dict.update


class logdict(dict[str, Any]):
    """A dict of logs that also knows their steps.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(xs):
    ...     def body(i, carry):
    ...         carry += xs[i]
    ...         lox.log({"carry": carry}, step=i)
    ...         return carry
    ...
    ...     return jax.lax.fori_loop(0, len(xs), body, 0)
    >>> y, logs = lox.spool(f)(jnp.arange(3))
    >>> print(logs, logs.step)
    {'carry': [0, 1, 3]} {'carry': [0, 1, 2]}
    >>> print(logs.reduce("mean"), logs.slice[1:], logs + logs)
    {'carry': 1.3333334} {'carry': [1, 3]} {'carry': [0, 1, 3, 0, 1, 3]}

    Attributes:
        steps: For each step name, the steps of each key. `logs.step` is short for `logs.steps["step"]`; a step that has
            the name of a method, such as `update` or `items`, needs the long form.
        valid: For each ragged key, a boolean for every slot: whether its event happened. Empty if no key is ragged;
            indexed with any other key, it gives all true.
        dropped: For each key with a capacity, how many events did not fit.
    """

    # Not in `__dict__`, which logs that a program has returned need not have until somebody looks at their steps.
    __slots__ = ("__dict__", "_unread")

    steps: dict[str, dict[str, Any]]
    dropped: dict[str, Any]
    _unread: "list[Any] | None"  # a recipe, and what it makes the attributes of
    _padded: "logdict | None" = None  # the logs to compact on first access
    _valid: dict[str, Any]
    _layouts: dict[str, Layout]

    def __init__(
        self,
        data: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        *,
        steps: Mapping[str, Mapping[str, Any]] | None = None,
        valid: Mapping[str, Any] | None = None,
        dropped: Mapping[str, Any] | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ):
        super().__init__(data)
        self.steps = {name: dict(by_key) for name, by_key in (steps or {}).items()}
        self._valid = dict(valid or {})
        self.dropped = dict(dropped or {})
        self._layouts = dict(layouts or {})

    # --- as a dict and a pytree ---

    def __getattr__(self, name: str) -> dict[str, Any]:
        if self._padded is not None:
            self._settle()
            return getattr(self, name)
        if name == "_unread":
            return None  # type: ignore[return-value]
        if self._read() or name in self.__dict__:  # another thread may just have read it
            return getattr(self, name)
        if name.startswith("_") or "steps" not in self.__dict__:
            raise AttributeError(name)
        if name in self.steps:
            return _Steps(self.steps[name])
        known = f"The steps are {_errors.listing(self.steps)}." if self.steps else "Nothing was logged with a step."
        hint = _errors.nearest(name, [*self.steps, *(n for n in dir(logdict) if n[0] != "_" and n != "steps")])
        if name in self:
            hint = f" {name!r} is a key: `logs[{name!r}]`."
        # With `name`, or Python would add its own suggestion.
        raise _errors.StepError(f"these logs have no step {name!r}. {known}{hint}", name=name)

    def _read(self) -> bool:
        """Make the attributes of logs that a program of lox's own has returned; whether there was something to do.

        Every call of a spooled function makes logs, and most of those who call it look at their values only.
        """
        arrays = self._unread
        if arrays is None:
            return False
        attributes = self.__dict__
        for name, value in arrays[0].read(arrays).items():
            # What the user has set stays, and what another thread has read, or this one while it collected garbage. Not
            # by a lock, for which that would have to wait for ever.
            attributes.setdefault(name, value)
        self._unread = None
        return True

    def __dir__(self) -> Iterable[str]:
        self._read()
        return super().__dir__()

    def __getstate__(self) -> dict[str, Any]:
        """For `pickle` and `copy`: the attributes, which are then there."""
        self._read()
        return self.__dict__

    @property
    def _may_be_ragged(self) -> bool:
        """Whether events of some keys may not have happened, or not have fitted."""
        arrays = self._unread
        return bool(self._valid or self.dropped) if arrays is None else arrays[0].is_ragged

    def __getitem__(self, key: str) -> Any:
        # Like the methods of `_settling`, but faster, as it is called all the time.
        if self._padded is not None:
            self._settle()
        return super().__getitem__(key)

    def __missing__(self, key: Any) -> Any:
        raise _no_key(key, self)

    @property
    def valid(self) -> dict[str, Any]:
        """For each key whose events did not all happen, which slots did."""
        return _Valid(self)

    @valid.setter
    def valid(self, valid: Mapping[str, Any]) -> None:
        self._read()
        self._valid = dict(valid)

    def _of_present(self, by_key: Mapping[str, Any]) -> dict[str, Any]:
        return {k: by_key[k] for k in self if k in by_key}

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Values, steps and validity are children; keys and axes are structure."""
        steps = {name: present for name in sorted(self.steps) if (present := self._of_present(self.steps[name]))}
        valid, dropped = self._of_present(self._valid), self._of_present(self.dropped)
        children = [("values", {k: self[k] for k in sorted(self)}), ("steps", steps)]
        if valid or dropped:
            children += [("valid", valid), ("dropped", dropped)]
        structure = Structure({k: self._layout(k) for k in self})
        return tuple((jax.tree_util.GetAttrKey(name), child) for name, child in children), structure

    def _layout(self, key: str) -> Layout:
        if key in self._layouts:
            return self._layouts[key]
        # A logdict made by the user: a value is one event, unless its steps or `valid` have an axis of events.
        leaves = jax.tree.leaves(self[key])
        steps = tuple((name, ()) for name, by_key in sorted(self.steps.items()) if key in by_key)
        events = any(np.ndim(self.steps[name][key]) for name, _ in steps) or np.ndim(self.valid.get(key, 0)) > 0
        return Layout(events, ((),) * len(leaves), tuple(np.ndim(x) for x in leaves), steps)

    def _outer(self, key: str) -> int:
        """How many axes precede those that were logged."""
        layout = self._layout(key)
        outer = {np.ndim(x) - n for x, n in zip(jax.tree.leaves(self[key]), layout.ndims, strict=True)} or {0}
        if len(outer) != 1 or min(outer) < 0:
            raise _errors.LoxError(
                f"the arrays of {key!r} have lost axes since they were logged, so they no longer hold its events."
            )
        return outer.pop()

    def copy(self) -> "logdict":
        """A shallow copy, steps included."""
        return self._replace({k: self[k] for k in self})

    def _replace(self, data: dict[str, Any], **changes: Any) -> "logdict":
        fields: dict[str, Any] = dict(steps=self.steps, valid=self.valid, dropped=self.dropped, layouts=self._layouts)
        new = logdict(data, **(fields | changes))
        new.steps = {n: present for n, by_key in new.steps.items() if (present := new._of_present(by_key))}
        new.valid, new.dropped = new._of_present(new.valid), new._of_present(new.dropped)
        new._layouts = new._of_present(new._layouts)
        return new

    def asdict(self) -> dict[str, Any]:
        """A plain dict of the values."""
        return dict(self)

    def __str__(self) -> str:
        return _format.compact(self)

    def _repr_html_(self) -> str:
        """For notebooks: a table of the keys, with their curves."""
        from lox._data import _html

        return _html.to_html(self)

    def to_dataframe(self, form: str = "long") -> Any:
        """Convert to a pandas `DataFrame`. It has only events that happened.

        >>> import jax, jax.numpy as jnp, lox
        >>> def f(xs):
        ...     def step(carry, x):
        ...         lox.log({"x": x, "double": 2 * x}, step=x)
        ...         return carry, None
        ...
        ...     return jax.lax.scan(step, 0, xs)[0]
        >>> _, logs = lox.spool(f)(jnp.arange(2))
        >>> print(logs.to_dataframe().to_string())
              key  event  step  value
        0       x      0     0      0
        1       x      1     1      1
        2  double      0     0      0
        3  double      1     1      2
        >>> print(logs.to_dataframe("wide").to_string())
           step  x  double
        0     0  0       0
        1     1  1       2

        The lanes of a `vmap` have a column `lane` (`lane_0`, `lane_1`, ..., outermost first, for several vmaps); values
        that do not depend on the lane are repeated for each. A pytree has a key per leaf, such as `stats['mean']`.
        Arrays are kept whole, as objects. A step that an event does not have is missing.

        Args:
            form: `"long"`: a row per event and key. `"wide"`: a row per lane and steps, with a column for every key;
                keys without steps are aligned by the number of the event.
        """
        from lox._data import _dataframe

        return _dataframe.to_dataframe(self, form)

    def plot(self, key: str | Iterable[str] | None = None, **options: Any) -> Any:
        """Plot the curves of every key, mean and band over lanes, as `lox.plot`, which has the options.

        >>> import numpy as np, lox
        >>> loss = np.random.default_rng(0).normal(size=(100, 8))
        >>> logs = lox.logdict.from_arrays({"loss": loss}, steps={"step": np.arange(100)}, lanes=1)
        >>> logs.plot(band="std", lanes=True)
        <plot of 'loss': .save('plot.html'), .save('plot.png')>
        """
        assert plotter is not None
        return plotter(self, key, **options)

    # --- choosing and renaming ---

    def filter(self, which: str | Iterable[str] | Callable[..., Any]) -> "logdict":
        """Select keys by names, by globs such as `"train/*"`, or by a function of the key, or of key and value."""
        if callable(which):
            with_value = _takes_two(which)
            return self._replace({k: v for k, v in self.items() if (which(k, v) if with_value else which(k))})
        patterns = [which] if isinstance(which, str) else list(which)
        return self._replace({k: v for k, v in self.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns)})

    def prefix(self, prefix: str) -> "logdict":
        """The same logs with `prefix` in front of every key."""

        def renamed(by_key: Mapping[str, Any]) -> dict[str, Any]:
            return {prefix + k: v for k, v in by_key.items()}

        return logdict(
            renamed(self),
            steps={name: renamed(by_key) for name, by_key in self.steps.items()},
            valid=renamed(self.valid),
            dropped=renamed(self.dropped),
            layouts=renamed(self._layouts),
        )

    # --- combining ---

    def __or__(self, other: Mapping[str, Any]) -> "logdict":  # type: ignore[override]
        """Merge two logdicts; where both have a key, that of `other` with its steps wins."""
        if not isinstance(other, Mapping):
            return NotImplemented
        other = other if isinstance(other, logdict) else logdict(other)
        rest = self._replace({k: v for k, v in self.items() if k not in other})
        names = dict.fromkeys([*rest.steps, *other.steps])
        return logdict(
            {**self, **other},
            steps={name: {**rest.steps.get(name, {}), **other.steps.get(name, {})} for name in names},
            valid={**rest.valid, **other.valid},
            dropped={**rest.dropped, **other.dropped},
            layouts={**rest._layouts, **other._layouts},
        )

    def __ror__(self, other: Mapping[str, Any]) -> "logdict":  # type: ignore[override]
        return logdict(other) | self

    def __ior__(self, other: Mapping[str, Any]) -> "logdict":  # type: ignore[override,misc]
        return self | other

    def __add__(self, other: "logdict") -> "logdict":
        """Append the events of `other` to those of `self`, key by key."""
        if not isinstance(other, Mapping):
            return NotImplemented
        other = other if isinstance(other, logdict) else logdict(other)
        both = self | other
        for key in self:
            if key in other:
                outer = self._outer(key)
                parts = [self._to_bundle(key), other._to_bundle(key)]
                both._set_bundle(_bundle.concatenate(parts, outer), outer)
        for key in self.dropped.keys() & other.dropped.keys():
            both.dropped[key] = self.dropped[key] + other.dropped[key]
        return both

    def __radd__(self, other: Any) -> "logdict":
        return self if other == 0 else logdict(other) + self  # so that sum() works

    def _to_bundle(self, key: str) -> Bundle:
        leaves, treedef = jax.tree.flatten(self[key])
        layout = self._layout(key)
        flags = dict(layout.step_flags)
        valid = self.valid.get(key)
        array = lambda x: np.asarray(x) if np.isscalar(x) else x  # noqa: E731
        return Bundle(
            values=[Laned(array(x), f) for x, f in zip(leaves, layout.flags, strict=True)],
            steps={
                name: Laned(array(by_key[key]), flags.get(name, ()))
                for name, by_key in self.steps.items()
                if key in by_key
            },
            valid=None if valid is None else Laned(valid, layout.valid_flags),
            keys=(key,),
            treedefs=(treedef,),
            single=not layout.events,
            site=Site("an unknown line"),
        )

    def to_bundles(self, prepare: Callable[[Bundle], Bundle] = lambda bundle: bundle, lead: Flags = ()) -> list[Bundle]:
        """The events of all keys, together as far as they share their steps; axes of outer vmaps are lanes.

        `prepare` is applied to the arrays as they are. `lead` are flags of lanes further out, which none of them has.
        """
        groups: dict[Any, tuple[list[str], list[Any], list[Laned]]] = {}
        layouts, shared = self._layouts, [*self.steps.values(), self._valid]
        for key, value in self.items():
            layout = layouts.get(key) or self._layout(key)
            if type(value) is np.ndarray:  # the most common case, which may be in a training loop
                treedef, outer, flags = SINGLE, value.ndim - layout.ndims[0], layout.flags[0]
                count, depth = value.shape[outer] if layout.events else 1, len(flags)
                leaves = [Laned(value, (*lead, *flags) if flags else lead)]
            else:
                leaves, treedef = jax.tree.flatten(value)
                outer, depth = self._outer(key), max([len(flags) for flags in layout.flags], default=0)
                count = leaves[0].shape[outer] if layout.events and leaves else 1
                leaves = [_deep(x, flags, depth, lead) for x, flags in zip(leaves, layout.flags, strict=True)]
            ids = [id(x.get(key)) for x in shared]
            form = (layout.events, outer, count, depth, layout.step_flags, layout.valid_flags, *ids)
            group = groups.get(form)
            if group is None:
                groups[form] = [key], [treedef], leaves
            else:
                group[0].append(key)
                group[1].append(treedef)
                group[2].extend(leaves)
        return [self._to_one_bundle(*group, form[1], form[3], prepare, lead) for form, group in groups.items()]

    def _to_one_bundle(
        self, keys: list[str], treedefs: list[Any], values: list[Laned], outer: int, depth: int, prepare: Any, lead: Any
    ) -> Bundle:
        first, layout = keys[0], self._layout(keys[0])
        flags, valid = dict(layout.step_flags), self._valid.get(first)
        steps = {n: _deep(x[first], flags.get(n, ()), depth, lead) for n, x in self.steps.items() if first in x}
        laned = None if valid is None else _deep(valid, layout.valid_flags, depth, lead)
        site = Site("an unknown line")
        bundle = prepare(Bundle(values, steps, laned, tuple(keys), tuple(treedefs), not layout.events, site))
        if not outer:
            return bundle

        def inside(x: Laned) -> Laned:
            tree = x.tree if bundle.single else _arrays.numpy_for(x.tree).moveaxis(x.tree, outer, 0)
            return Laned(tree, (*lead, *[True] * outer, *x.flags[len(lead) :]))

        return jax.tree.map(inside, bundle, is_leaf=_lanes.is_laned)

    def _set_bundle(self, bundle: Bundle, outer: int = 0, keys: Iterable[str] | None = None) -> None:
        """Take over the events of a bundle, or of some of its keys; `outer` axes of vmaps precede the events."""
        steps = tuple((name, unnamed(x.flags)) for name, x in sorted(bundle.steps.items()))
        valid = unnamed(bundle.valid.flags) if bundle.valid is not None else ()
        for key in bundle.keys if keys is None else keys:
            leaves = bundle.leaves(key)
            self[key] = bundle.value(key)
            for name, x in bundle.steps.items():
                self.steps.setdefault(name, {})[key] = x.tree
            if bundle.valid is not None:
                self.valid[key] = bundle.valid.tree
            flags, ndims = tuple(unnamed(x.flags) for x in leaves), tuple(np.ndim(x.tree) - outer for x in leaves)
            self._layouts[key] = Layout(not bundle.single, flags, ndims, steps, valid)

    @classmethod
    def from_arrays(
        cls,
        data: Mapping[str, Any],
        *,
        steps: Mapping[str, Any] | None = None,
        valid: Any = None,
        events: bool = True,
        lanes: int = 0,
    ) -> "logdict":
        """Make logs of arrays `(event, *lanes, *item)`, for `lox.save` and `lox.store.Writer`.

        >>> import numpy as np, lox
        >>> losses = np.array([[3.0, 4.0], [1.0, 2.0]])  # two events in two lanes
        >>> logs = lox.logdict.from_arrays({"loss": losses}, steps={"step": np.arange(2)}, lanes=1)
        >>> print(logs.lane(1), logs.lane(1).step)
        {'loss': [4.0, 2.0]} {'loss': [0, 1]}

        Args:
            data: For each key an array, or a pytree of arrays.
            steps: For each name of a step, an array `(event,)` or `(event, *lanes)` for all keys.
            valid: Which events happened, if not all did: booleans of the same shapes, for all keys.
            events: Whether there is an event axis; without, each array is one event.
            lanes: How many axes of lanes there are.
        """
        lead = int(events) + lanes
        shapes = {
            jax.tree_util.keystr((jax.tree_util.DictKey(key), *tree_path)): np.shape(x)
            for key, tree in data.items()
            for tree_path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        first = next(iter(shapes), "")
        for name, shape in shapes.items():
            if len(shape) < lead or shape[:lead] != shapes[first][:lead]:
                other = f", but {first} has {shapes[first]}." if name != first else "."
                raise _errors.MismatchError(
                    f"with events={events} and lanes={lanes}, all arrays must begin with the same {lead} axes: {name} "
                    f"has the shape {shape}{other}"
                )
        full = shapes[first][:lead] if shapes else ()

        def flags(what: str, x: Any) -> Flags:
            if np.shape(x) not in (full, full[: int(events)]):
                raise _errors.MismatchError(f"{what} has the shape {np.shape(x)} beside events of the shape {full}.")
            return (True,) * (np.ndim(x) - int(events))

        step_flags = tuple((name, flags(f"the step {name!r}", x)) for name, x in sorted((steps or {}).items()))
        valid_flags = flags("`valid`", valid) if valid is not None else ()
        logs = cls(
            data,
            steps={name: dict.fromkeys(data, x) for name, x in (steps or {}).items()},
            valid=dict.fromkeys(data, valid) if valid is not None else None,
        )
        for key, tree in data.items():
            ndims = tuple(np.ndim(x) for x in jax.tree.leaves(tree))
            logs._layouts[key] = Layout(events, ((True,) * lanes,) * len(ndims), ndims, step_flags, valid_flags)
        return logs

    @staticmethod
    def of_event(
        keys: Iterable[str], treedefs: Sequence[Any], values: Sequence[Any], steps: Mapping[str, Any]
    ) -> "logdict":
        """Make logs of one event without lanes; `values` has the leaves of all keys, one key after the other."""
        # A recipe, because few look at more of them than their values.
        form = tuple(keys), tuple([x.ndim for x in values]), tuple(steps)
        if all([treedef == SINGLE for treedef in treedefs]) and all([type(x) is str for x in (*form[0], *steps)]):
            recipe = _recipe_of_arrays(*form)
        else:
            # A cache would compare what the user's classes have beside arrays, which may not allow it, and would take
            # names that are equal for the same one: those of an Enum are printed in another way.
            recipe = _EventRecipe(treedefs, *form)
        return recipe.logs([recipe, *values, *steps.values()])

    @classmethod
    def _empty(cls) -> "logdict":
        """`logdict()`, for those who make one for every event."""
        logs = _new(cls)
        logs.__dict__ = {"steps": {}, "_valid": {}, "dropped": {}, "_layouts": {}}
        return logs

    @classmethod
    def from_bundles(
        cls, bundles: Iterable[Bundle], order: Iterable[str] | None = None, reduced: Container[str] = ()
    ) -> "logdict":
        """Make logs of collected events; empty slots are filled with NaN, 0 or -1.

        A key with events that may not have happened always has an event axis, unless it was reduced. Keys come in the
        given order, or else in that of the bundles.
        """
        finished: dict[str, Bundle] = {}
        for bundle in bundles:
            if bundle.valid is not None:
                bundle = _blank(bundle if bundle.keys[0] in reduced else bundle.expanded())
            finished |= dict.fromkeys(bundle.keys, bundle)
        logs = cls()
        for key in finished if order is None else order:
            if key in finished:
                logs._set_bundle(finished[key], keys=[key])
        return logs

    # --- along the event axis ---

    @property
    def slice(self) -> "_Slicer":
        """Slices of the events of each key. Keys with a single event stay as they are.

        >>> import numpy as np, lox
        >>> print(lox.logdict.from_arrays({"loss": np.arange(5)}).slice[1:4])
        {'loss': [1, 2, 3]}
        """
        return _Slicer(self)

    def _map_events(self, key: str, fun: Callable[[Any, int], Any], into: "logdict") -> None:
        """Apply `fun(array, axis)` to all arrays of a key that have the event axis."""
        axis = self._outer(key)
        into[key] = jax.tree.map(lambda x: fun(x, axis), self[key])
        for name, by_key in self.steps.items():
            if key in by_key:
                into.steps[name][key] = fun(by_key[key], axis)
        if key in self.valid:
            into.valid[key] = fun(self.valid[key], axis)

    def reduce(self, how: Any) -> "logdict":
        """Combine the events of each key into one: `"mean"`, `"last"`, ..., or a mapping from key to reduction.

        Empty slots do not count. Keys with a single event stay as they are.
        """
        if isinstance(how, Mapping) and set(how) - set(self):
            raise _errors.OptionError(
                f"`reduce` names {_errors.listing(set(how) - set(self))}; the keys are {_errors.listing(self)}."
            )
        new = self.copy()
        for key in self:
            reduction = _reduce.resolve(how, key)
            layout = self._layout(key)
            if reduction is None or reduction.name == "append" or not layout.events:
                continue
            axis, bundle = self._outer(key), self._to_bundle(key)
            valid = None if bundle.valid is None else bundle.valid.tree.any(axis)
            reduced = [_reduce.over_events(reduction, x, bundle.valid, axis) for x in bundle.values]
            new[key] = reduced[0] if reduction.name == "count" else jax.tree.unflatten(bundle.treedefs[0], reduced)
            for name, x in bundle.steps.items():
                new.steps[name][key] = _reduce.last_event(x, bundle.valid, axis)
            new.valid.pop(key, None)
            if valid is not None and not _all_true(valid):
                new.valid[key] = valid
            elif not bundle.count(axis):
                xp = _arrays.numpy_for(bundle.values)
                new.valid[key] = xp.zeros(bundle.values[0].tree.shape[:axis], bool)
            leaves = jax.tree.leaves(new[key])
            flags = layout.flags[:1] if reduction.name == "count" else layout.flags
            new._layouts[key] = layout._replace(
                events=False, flags=flags, ndims=tuple(np.ndim(x) - axis for x in leaves)
            )
        return new

    def event_counts(self) -> dict[str, int]:
        """The number of slots of each key; a key without an event axis has one."""
        counts = {}
        for key in self:
            axis = self._outer(key)
            counts[key] = jax.tree.leaves(self[key])[0].shape[axis] if self._layout(key).events else 1
        return counts

    def compact(self) -> "logdict":
        """Remove slots in which no event happened. Needs concrete arrays, unless no key is ragged.

        With lanes, a slot stays if its event happened in any lane, and `valid` says in which.
        """
        warn_of_dropped(self.dropped)
        return self.without_empty_slots()

    def without_empty_slots(self) -> "logdict":
        """`compact` without its warning."""
        new = self.copy()
        with _compat.own_transfers():
            for key in list(self.valid):
                if _compat.is_split(self.valid[key]):
                    continue  # no process knows which slots are empty
                valid = np.asarray(_compat.own_copy(self.valid[key]))
                layout = self._layout(key)
                if layout.events:
                    axis = self._outer(key)
                    keep = np.flatnonzero(valid.any(tuple(i for i in range(valid.ndim) if i != axis)))
                    if len(keep) < valid.shape[axis]:
                        self._map_events(key, lambda x, axis, keep=keep: _arrays.take(x, keep, axis), new)
                        valid = valid.take(keep, axis)
                if valid.all():
                    del new.valid[key]
        return new

    def compacted_when_looked_at(self) -> "logdict":
        """Compact on first access, as it has to wait for the values.

        The keys are there at once. Everything else begins with `_settle`: methods of dict by `_settling` below,
        attributes by `__getattr__`, because they are missing until then.
        """
        logs = logdict.__new__(logdict)
        dict.update(logs, self)
        logs.__dict__ = {"_padded": self, "_settling": threading.RLock()}
        return logs

    def _settle(self) -> None:
        """Compact now."""
        with self.__dict__.get("_settling", _settled):
            if self._padded is not None:
                # The first access may be under jit or vmap, which have no part in these values.
                with _compat.set_current_trace(_compat.eval_trace):
                    compacted = self._padded.without_empty_slots()
                dict.update(self, compacted)
                self.__dict__ = compacted.__dict__

    def lane(self, index: int | tuple[int, ...]) -> "logdict":
        """The logs of one lane, compacted, whether the `vmap` was inside `spool` or outside.

        Args:
            index: The number of the lane; for several vmaps one number for each of them, outermost first.

        Raises:
            OptionError: There is no such lane.
        """
        if isinstance(index, tuple):
            return functools.reduce(lambda logs, number: logs.lane(number), index, self)
        is_known = not isinstance(index, _compat.Tracer)
        if is_known and (isinstance(index, bool) or not hasattr(index, "__index__")):
            raise _errors.LogTypeError(f"`lane` got {index!r}: it takes the number of a lane, `logs.lane(0)`.")

        def check(count: int) -> None:  # JAX would take the last one
            if is_known and not -count <= operator.index(index) < count:
                raise _errors.OptionError(f"there is no lane {index}: there are {count}, from 0 to {count - 1}.")

        new = self.copy()
        has_lanes = False
        for key in self:
            outer, layout = self._outer(key), self._layout(key)
            # Flags count even if all are off: the key was under a vmap, though nothing of it depends on the lane.
            has_lanes = has_lanes or outer > 0 or any(layout.flags) or any(layout.valid_flags)

            def pick(x: Any, flags: Flags, outer: int = outer, events: bool = layout.events) -> Any:
                if outer:
                    check(x.shape[0])
                    return _compat.gathered(x, 0)[index]
                if not any(flags[:1]):
                    return x
                check(x.shape[events])
                return _compat.gathered(x, events)[(slice(None),) * events + (index,)]

            leaves, treedef = jax.tree.flatten(self[key])
            new[key] = jax.tree.unflatten(treedef, map(pick, leaves, layout.flags))
            for name, flags in layout.step_flags:
                new.steps[name][key] = pick(self.steps[name][key], flags)
            if key in self.valid:
                new.valid[key] = pick(self.valid[key], layout.valid_flags)
            if key in self.dropped:
                new.dropped[key] = (
                    _compat.gathered(self.dropped[key], 0)[index] if np.ndim(self.dropped[key]) else self.dropped[key]
                )
            if not outer:
                drop = lambda f: f[1:]  # noqa: E731
                new._layouts[key] = Layout(
                    layout.events,
                    tuple(map(drop, layout.flags)),
                    tuple(n - any(f[:1]) for n, f in zip(layout.ndims, layout.flags, strict=True)),
                    tuple((name, drop(f)) for name, f in layout.step_flags),
                    drop(layout.valid_flags),
                    layout.one_event,
                )
            if layout.one_event and key in new.valid and not np.any(np.asarray(_compat.own_copy(new.valid[key]))):
                del new[key]
        if not has_lanes:
            raise _errors.LoxError("these logs have no lanes: nothing was logged under `vmap`.")
        return new.compact()


def _in_order(by_key: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: by_key[key] for key in keys if key in by_key}


def _unflatten(structure: Structure, children: Any) -> logdict:
    """The inverse of `logdict.tree_flatten_with_keys`."""
    # Not by `__init__`, which would copy: every call of a spooled function comes through here. So its results share
    # their layouts, which nothing changes in place but what has made them.
    logs, values = _new(logdict), children[0]
    if structure.is_sorted:
        _update(logs, values)
    else:
        for key in structure.layouts:
            _set(logs, key, values[key])
    logs.__dict__ = _attributes(structure, children[1:])
    return logs


def _attributes(structure: Structure, rest: Sequence[Any]) -> dict[str, Any]:
    """The attributes of a logdict whose steps, and if there are any whose `valid` and `dropped`, are these."""
    steps, layouts = rest[0], structure.layouts
    if not structure.is_sorted:
        steps = {name: _in_order(by_key, layouts) for name, by_key in steps.items()}
    if len(rest) == 1:
        return {"steps": steps, "_valid": {}, "dropped": {}, "_layouts": layouts}
    return {"steps": steps, "_valid": rest[1], "dropped": rest[2], "_layouts": layouts}


jax.tree_util.register_pytree_with_keys(logdict, logdict.tree_flatten_with_keys, _unflatten)


@jax.tree_util.register_static
class Recipe:
    """How to make logs of the arrays that a program of lox's own returns, after the recipe: no array itself.

    There, a step that many keys share is one array. A logdict that the user's program returns has one for every key,
    since which of them are the same must not be part of its structure.
    """

    __slots__ = ("_end", "_numbers", "_only_key", "_rest", "_structure", "_treedefs", "is_ragged", "keys")

    def __init__(self, structure: Structure, values: list[Any], rest: Any, numbers: tuple[int, ...], is_ragged: bool):
        self.keys, self.is_ragged = tuple(structure.layouts), is_ragged
        self._structure, self._rest, self._numbers = structure, rest, numbers
        self._treedefs = None if all(treedef == SINGLE for treedef in values) else values
        self._only_key = self.keys[0] if values == [SINGLE] else None
        self._end = 1 + sum(treedef.num_leaves for treedef in values)

    @classmethod
    def of(cls, logs: logdict) -> list[Any]:
        """Take apart a logdict: a recipe, and arrays."""
        (_, *rest), structure = logs.tree_flatten_with_keys()
        arrays, values = [], []
        for key in structure.layouts:
            leaves, treedef = jax.tree.flatten(logs[key])
            arrays += leaves
            values.append(treedef)
        leaves, tree = jax.tree.flatten(tuple([child for _, child in rest]))
        different = {id(x): x for x in leaves}
        number = {known: n for n, known in enumerate(different, 1)}
        numbers = tuple([number[id(x)] for x in leaves])
        return [cls(structure, values, tree, numbers, len(rest) > 1), *arrays, *different.values()]

    def logs(self, arrays: list[Any]) -> logdict:
        """The logdict, in which keys share what they shared. Only values are there at once: see `logdict._read`."""
        logs = _new(logdict)
        # Values leave the list: those that the user removes must not stay alive.
        if (key := self._only_key) is not None:
            _set(logs, key, arrays.pop(1))  # in half the time
        else:
            values = arrays[1 : self._end]
            del arrays[1 : self._end]
            if self._treedefs is None:
                _update(logs, zip(self.keys, values))  # noqa: B905, which takes longer
            else:
                rest = iter(values)
                for key, treedef in zip(self.keys, self._treedefs, strict=True):
                    _set(logs, key, treedef.unflatten([next(rest) for _ in range(treedef.num_leaves)]))
        logs._unread = arrays
        return logs

    def read(self, arrays: list[Any]) -> dict[str, Any]:
        """The attributes of the logdict, of what is left of the list."""
        rest = self._rest.unflatten([arrays[n] for n in self._numbers])
        return _attributes(self._structure, rest)


class _EventRecipe(Recipe):
    """The same for one event without lanes, as it is logged: all its keys have the steps that follow the values."""

    __slots__ = ("_steps",)

    def __init__(self, treedefs: Sequence[Any], keys: tuple[str, ...], ndims: tuple[int, ...], steps: tuple[str, ...]):
        rest, layouts, step_flags = iter(ndims), {}, tuple([(name, ()) for name in sorted(steps)])
        for key, treedef in zip(keys, treedefs, strict=True):
            mine = tuple([next(rest) for _ in range(treedef.num_leaves)])
            layouts[key] = Layout(False, ((),) * len(mine), mine, step_flags)
        super().__init__(Structure(layouts), [*treedefs], None, (), is_ragged=False)
        self._steps = steps

    def read(self, arrays: list[Any]) -> dict[str, Any]:
        """The attributes of the logdict, of what is left of the list."""
        steps = {name: dict.fromkeys(self.keys, step) for name, step in zip(self._steps, arrays[1:], strict=True)}
        return _attributes(self._structure, [steps])


@functools.lru_cache(1024)
def _recipe_of_arrays(keys: tuple[str, ...], ndims: tuple[int, ...], steps: tuple[str, ...]) -> _EventRecipe:
    return _EventRecipe([SINGLE] * len(keys), keys, ndims, steps)


plotter: Callable[..., Any] | None = None  # `lox.plot`, which is storeys above

_settled = contextlib.nullcontext()  # if another thread was faster


def _settling(name: str) -> Any:
    method = getattr(dict, name)

    @functools.wraps(method)
    def settling(self: logdict, *args: Any, **kwargs: Any) -> Any:
        if self._padded is not None:
            self._settle()
        return method(self, *args, **kwargs)

    del settling.__wrapped__  # doctest in Python 3.12 would look for its source
    return settling


# `__iter__` needs no values, but overriding it makes `dict(logs)` and `{**logs}` use these methods too.
for _name in (
    *("__setitem__", "__delitem__", "__iter__", "__eq__", "__ne__", "__repr__", "__reduce_ex__"),
    *("clear", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(logdict, _name, _settling(_name))


SINGLE = _arrays.LEAF


def warn_of_dropped(counts: Mapping[str, Any], warn: Callable[[str], None] = _sites.warn) -> None:
    """Warn about events that did not fit."""
    for key, dropped in counts.items():
        with _compat.own_transfers():
            most = int(np.max(np.asarray(_compat.own_copy(dropped))))
        if most > 0:
            warn(
                f"{key!r} had more events than its capacity: {most} were dropped. "
                "Raise `capacity`, or use `reduce` or `tap`."
            )


def _no_key(key: Any, logs: logdict) -> _errors.KeyNotFoundError:
    hint = _errors.nearest(key, logs) if isinstance(key, str) else ""
    known = f"The keys are {_errors.listing(logs)}." if logs else "They are empty."
    return _errors.KeyNotFoundError(f"these logs have no key {key!r}. {known}{hint}")


def _takes_two(fun: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) == 2


@jax.tree_util.register_pytree_node_class
class _Valid(dict[str, Any]):
    """`valid` of ragged keys; for any other key, all true.

    A new one is made on every access and writes its changes to the logs. Kept, it would form a cycle with the logs,
    which would keep arrays on devices until Python collects garbage.
    """

    def __init__(self, logs: logdict):
        super().__init__(logs._valid)
        self._logs = logs

    def __missing__(self, key: str) -> Any:
        logs = self._logs
        if key not in logs:
            raise _no_key(key, logs)
        return np.ones(np.shape(jax.tree.leaves(logs[key])[0])[: logs._outer(key) + logs._layout(key).events], bool)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def tree_flatten(self) -> tuple[Any, None]:
        """A plain dict is the only child."""
        return (dict(self),), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> dict[str, Any]:
        """A plain dict: it no longer belongs to logs."""
        del aux
        return children[0]


def _writing_through(name: str) -> Callable[..., Any]:
    def method(self: _Valid, *args: Any, **kwargs: Any) -> Any:
        getattr(self._logs._valid, name)(*args, **kwargs)
        return getattr(dict, name)(self, *args, **kwargs)

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_Valid, _name, _writing_through(_name))


class _Steps(dict[str, Any]):
    """The steps of each key, printed as compactly as logs."""

    def __str__(self) -> str:
        return _format.compact(logdict(self))


class _Slicer:
    def __init__(self, logs: logdict):
        self._logs = logs

    def __getitem__(self, index: Any) -> logdict:
        if not isinstance(index, slice):
            raise _errors.LogTypeError(f"`logs.slice` takes a slice such as [a:b:c], not {index!r}.")
        new = self._logs.copy()
        for key in self._logs:
            if self._logs._layout(key).events:
                self._logs._map_events(key, lambda x, axis: x[(slice(None),) * axis + (index,)], new)
        return new


def _all_true(x: Any) -> bool:
    return not isinstance(x, _compat.Tracer) and not _compat.is_split(x) and bool(np.asarray(x).all())


def _blank(bundle: Bundle) -> Bundle:
    """Put the missing value into empty slots, whose values were computed for another lane."""
    assert bundle.valid is not None
    valid, flags, lead = bundle.valid, bundle.valid.flags, bundle.lead

    def blanked(x: Laned, missing: Callable[[Any], Any]) -> Laned:
        if _arrays.is_prng_key(x.tree.dtype):
            return x
        have = x.flags or (False,) * len(flags)
        # A value that is the same in all lanes is missing only where no lane has it.
        same = tuple(lead + sum(map(bool, flags[:i])) for i, f in enumerate(flags) if f and not have[i])
        kept = Laned(valid.tree.any(same), tuple(f and g for f, g in zip(flags, have, strict=True))) if same else valid
        kept = _lanes.expand_to(kept, have, x.tree.ndim, lead)
        return Laned(_arrays.numpy_for(x.tree).where(kept, x.tree, missing(x.tree.dtype)), x.flags)

    values = [blanked(x, _arrays.missing_value) for x in bundle.values]
    steps = {name: blanked(x, _arrays.missing_step) for name, x in bundle.steps.items()}
    return dataclasses.replace(bundle, values=values, steps=steps)
