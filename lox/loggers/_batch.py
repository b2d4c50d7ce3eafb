"""Events of several runs, from how they leave the device to how loggers take them.

Arrays arrive with the axes that transformations gave them. In a `Batch`, all arrays of all keys are
`(lane, event, *item)`, where a lane is a run; lanes inside a run come after the event axis. Batches of the same form
are joined, which makes a busy queue cheap to write.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lox import _compat
from lox._data import _axes, _lanes
from lox._data._axes import EVENT, Axes
from lox._data._lanes import Flags, Laned
from lox._data._logdict import Layout, logdict
from lox.loggers._prng import with_words
from lox.loggers._routing import ROUTE


@dataclasses.dataclass
class Batch:
    """Events of `ids`, one run per lane."""

    ids: np.ndarray
    logs: logdict

    @property
    def form(self) -> Any:
        """What two batches must have in common to be joined."""
        logs = self.logs
        forms: list[Any] = [self.ids.tobytes()]
        for key in logs:
            arrays = [*jax.tree.leaves(logs[key]), *(by_key[key] for by_key in logs.steps.values() if key in by_key)]
            forms += [key, jax.tree.structure(logs[key]), logs._layouts[key], key in logs.valid]
            forms += [(x.shape[2:], x.dtype) for x in arrays]
        return forms

    def with_ids(self, ids: np.ndarray) -> "Batch":
        """Give the same events to other runs."""
        return dataclasses.replace(self, ids=ids)

    def select(self, lanes: np.ndarray) -> "Batch":
        """Keep these lanes only."""
        logs = self.logs
        picked = logs._replace(
            {key: jax.tree.map(lambda x: x[lanes], logs[key]) for key in logs},
            steps={name: {k: x[lanes] for k, x in by_key.items()} for name, by_key in logs.steps.items()},
            valid={k: x[lanes] for k, x in logs.valid.items()},
            dropped={},
        )
        return Batch(self.ids[lanes], picked)

    def by_run(self) -> list["Batch"]:
        """Split into batches with one lane per run: several lanes of a run become lanes inside it."""
        lanes: dict[int, list[int]] = {}
        for index, number in enumerate(self.ids.tolist()):
            lanes.setdefault(number, []).append(index)
        if len(lanes) == len(self.ids):
            return [self]
        return [self.select(np.asarray(indices))._inside_one_run() for indices in lanes.values()]

    def _inside_one_run(self) -> "Batch":
        if len(self.ids) == 1:
            return self
        inside = lambda x: np.moveaxis(x, 0, 1)[None]  # noqa: E731
        logs = self.logs
        deeper = {
            key: layout._replace(
                flags=tuple((True, *f) for f in layout.flags),
                ndims=tuple(n + 1 for n in layout.ndims),
                step_flags=tuple((name, (True, *f)) for name, f in layout.step_flags),
                valid_flags=(True, *layout.valid_flags) if key in logs.valid else (),
            )
            for key, layout in logs._layouts.items()
        }
        changed = logs._replace(
            {key: jax.tree.map(inside, logs[key]) for key in logs},
            steps={name: {k: inside(x) for k, x in by_key.items()} for name, by_key in logs.steps.items()},
            valid={k: inside(x) for k, x in logs.valid.items()},
            layouts=deeper,
        )
        return Batch(self.ids[:1], changed)

    def lane(self, index: int) -> logdict:
        """Return the events of one lane, without the keys that have none."""
        logs, lane = self.logs, logdict()
        for key in logs:
            leaves, treedef = jax.tree.flatten(logs[key])
            keep: Any = slice(None)
            valid = logs.valid[key][index] if key in logs.valid else None
            if valid is not None:
                any_lane = valid.any(tuple(range(1, valid.ndim)))
                if not any_lane.any():
                    continue
                keep = slice(None) if any_lane.all() else any_lane
                if not valid[keep].all():  # lanes inside the run may lack the event, which only `valid` can tell
                    lane.valid[key] = valid[keep]
            elif not leaves[0].shape[1]:
                continue
            lane[key] = jax.tree.unflatten(treedef, [x[index][keep] for x in leaves])
            for name, by_key in logs.steps.items():
                if key in by_key:
                    lane.steps.setdefault(name, {})[key] = by_key[key][index][keep]
            lane._layouts[key] = logs._layouts[key]
        return lane


def joined(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Join neighbouring batches of the same form, which keeps the order of events."""
    group: list[Batch] = []
    form: Any = None
    for batch in batches:
        if group and batch.form != form:
            yield _concatenate(group)
            group = []
        if not group:
            form = batch.form
        group.append(batch)
    if group:
        yield _concatenate(group)


def _concatenate(group: list[Batch]) -> Batch:
    if len(group) == 1:
        return group[0]
    first = group[0].logs

    def join(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays), axis=1)

    logs = first._replace(
        {key: jax.tree.map(lambda *xs: join(xs), *[b.logs[key] for b in group]) for key in first},
        steps={
            name: {key: join(b.logs.steps[name][key] for b in group) for key in by_key}
            for name, by_key in first.steps.items()
        },
        valid={key: join(b.logs.valid[key] for b in group) for key in first.valid},
        dropped={},
    )
    return Batch(group[0].ids, logs)


class _Sorter:
    """Brings the axes of a key's arrays into order: `(lane, event, *lanes inside the run, *item)`."""

    def __init__(self, run_axes: Axes, run_sizes: tuple[int, ...], inner_axes: Axes):
        self.run_axes, self.run_sizes, self.inner_axes = run_axes, run_sizes, inner_axes

    def sort(self, x: Any, axes: Axes) -> Laned:
        wanted = [*self.run_axes, EVENT, *[a for a in self.inner_axes if a in axes]]
        x = _axes.align(np.asarray(x), axes, wanted, dict(zip(self.run_axes, self.run_sizes, strict=True)))
        x = x.reshape((math.prod(self.run_sizes), *x.shape[len(self.run_sizes) :]))
        return Laned(x, tuple(a in axes for a in self.inner_axes))


def _set(
    logs: logdict, key: str, treedef: Any, values: list[Laned], steps: dict[str, Laned], valid: Laned | None
) -> None:
    logs[key] = jax.tree.unflatten(treedef, [x.tree for x in values])
    events = values[0].tree.shape[:2]
    for name, x in steps.items():
        if x.tree.shape[1] != events[1]:  # one step for all events
            x = Laned(np.broadcast_to(x.tree, (*events, *x.tree.shape[2:])), x.flags)
        logs.steps.setdefault(name, {})[key] = x.tree
    if valid is not None and not valid.tree.all():
        logs.valid[key] = valid.tree
    logs._layouts[key] = Layout(
        True,
        tuple(x.flags for x in values),
        tuple(x.tree.ndim - 1 for x in values),
        tuple((name, x.flags) for name, x in sorted(steps.items())),
        valid.flags if valid is not None and key in logs.valid else (),
    )


# --- jobs: what callbacks queue for the writer's thread -------------------------------------------

Rename = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class TapJob:
    """One event or several, as `tap` delivered them."""

    logs: logdict
    rename: Rename | None = None  # from the runs of an outer logger to those of this one

    @property
    def size(self) -> int:
        """The size of the values in bytes."""
        # Avoids pytrees if possible, because the program is waiting.
        return sum(x.nbytes if type(x) is np.ndarray else _size(x) for x in self.logs.values())

    @property
    def form(self) -> Any:
        """What is equal for single events of one line of a program and the same runs."""
        logs = self.logs
        layouts = [logs._layouts[key] for key in logs]
        if any(layout.events for layout in layouts):
            return self
        route = logs.steps[ROUTE][next(iter(logs))]
        return (
            tuple(logs),
            tuple(map(id, layouts)),
            tuple(logs.steps),
            tuple(logs.valid),
            route.tobytes(),
            self.rename,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class CallJob:
    """Logs that `spool` or `log` sent."""

    plan: "Plan"
    ids: Laned
    valid: Laned
    arrays: list[Laned]
    rename: Rename | None = None

    @property
    def size(self) -> int:
        """The size of all arrays in bytes."""
        return _size(self.arrays)

    @property
    def form(self) -> Any:
        """Unique, because calls are joined only as batches."""
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class EndJob:
    """The end of these runs: no more events follow."""

    ids: tuple[int, ...]
    rename: Rename | None = None
    size = 0

    def numbers(self) -> list[int]:
        """Return the runs, as this logger numbers them."""
        return list(self.ids) if self.rename is None else self.rename(np.asarray(self.ids, np.int32)).tolist()


Job = TapJob | CallJob | EndJob


def _size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def sort(jobs: list[TapJob | CallJob]) -> Iterator[Callable[[], list[Batch]]]:
    """Yield functions that make the batches, in order. Events of the same form are joined first, which is cheaper."""
    for _, group in itertools.groupby(jobs, key=lambda job: job.form):
        yield functools.partial(_sort_alike, list(group))


def _sort_alike(jobs: list[Any]) -> list[Batch]:
    first = jobs[0]
    if isinstance(first, CallJob):
        batches = [first.plan.batch(first.ids, first.valid, first.arrays)]
    else:
        batches = from_tap(first.logs if len(jobs) == 1 else _stacked([job.logs for job in jobs]))
    return batches if first.rename is None else [b.with_ids(first.rename(b.ids)) for b in batches]


def _stacked(events: list[logdict]) -> logdict:
    first = events[0]
    logs = first._replace(
        {key: jax.tree.map(lambda *xs: np.stack(xs), *[e[key] for e in events]) for key in first},
        # The keys of an event share their steps and `valid`, so most of the work is done once.
        steps={name: _shared(by_key, [e.steps[name] for e in events]) for name, by_key in first.steps.items()},
        valid=_shared(first.valid, [e.valid for e in events]),
    )
    for key, layout in first._layouts.items():
        logs._layouts[key] = layout._replace(events=True, ndims=tuple(n + 1 for n in layout.ndims))
    return logs


def _shared(first: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    stacked: dict[int, np.ndarray] = {}
    for key, x in first.items():
        if id(x) not in stacked:
            stacked[id(x)] = np.stack([event[key] for event in events])
    return {key: stacked[id(x)] for key, x in first.items()}


# --- from tap ------------------------------------------------------------------------------------


def from_tap(logs: logdict) -> list[Batch]:
    """Make batches of what `tap` delivered, where lanes of runs and lanes inside them are mixed."""
    batches: list[Batch] = []
    for key in logs:
        layout = logs._layouts[key]
        flags = dict(layout.step_flags)
        route, run_flags = np.asarray(logs.steps[ROUTE][key]), flags[ROUTE]
        if layout.events:
            # All events of a lane have the same run, or -1 where the lane has no event.
            route = route.max(0) if len(route) else np.full(route.shape[1:], -1, np.int32)
        run_axes = _axes.lanes(run_flags)
        depth = max([len(run_flags), *(len(f) for f in layout.flags)])
        sorter = _Sorter(run_axes, route.shape, [n for n in range(depth) if n not in run_axes])

        def axes(flags: Flags, events: bool = layout.events) -> Axes:
            return [EVENT] * events + _axes.lanes(flags)

        leaves, treedef = jax.tree.flatten(logs[key])
        values = [sorter.sort(x, axes(f)) for x, f in zip(leaves, layout.flags, strict=True)]
        steps = {
            name: sorter.sort(by_key[key], axes(flags[name]))
            for name, by_key in logs.steps.items()
            if key in by_key and name != ROUTE
        }
        valid = sorter.sort(logs.valid[key], axes(layout.valid_flags)) if key in logs.valid else None
        ids = route.reshape(-1)
        # Keys that were logged together share their runs, unless some lanes never logged a buffered key.
        batch = next((b for b in batches if np.array_equal(b.ids, ids)), None)
        if batch is None:
            batch = Batch(ids, logdict())
            batches.append(batch)
        _set(batch.logs, key, treedef, values, steps, valid)
    return [b if (b.ids >= 0).all() else b.select(b.ids >= 0) for b in batches]


# --- from spool and log --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _KeyPlan:
    """The axes of one key's arrays, as far as the program knows them: axes added by `vmap` come in front."""

    key: str
    treedef: Any
    outer: int
    events: bool
    flags: tuple[Flags, ...]
    steps: tuple[tuple[str, Flags, bool], ...]  # name, lanes, whether it has the event axis
    valid: Flags | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Makes a batch of the operands of one host call."""

    keys: tuple[_KeyPlan, ...]
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, logs: logdict) -> tuple["Plan", list[Any]]:
        """Return the plan for these logs, and their arrays."""
        plans, arrays = [], []
        for key in logs:
            layout = logs._layout(key)
            leaves, treedef = with_words(*jax.tree.flatten(logs[key]))
            flags = dict(layout.step_flags)
            outer = logs._outer(key)
            steps = tuple(
                (name, flags.get(name, ()), layout.events and np.ndim(by_key[key]) > outer)
                for name, by_key in logs.steps.items()
                if key in by_key
            )
            valid = layout.valid_flags if key in logs.valid else None
            plans.append(_KeyPlan(key, treedef, outer, layout.events, layout.flags, steps, valid))
            arrays += leaves
            arrays += [logs.steps[name][key] for name, _, _ in steps]
            arrays += [logs.valid[key]] if valid is not None else []
        # `lox.spool` has already warned about logs that are concrete.
        dropped = {key: n for key, n in logs.dropped.items() if isinstance(n, _compat.Tracer)}
        return cls(tuple(plans), tuple(dropped)), [*arrays, *dropped.values()]

    def batch(self, ids: Laned, lanes_valid: Laned, operands: list[Laned]) -> Batch:
        """Put the arrays together again on the host; `lanes_valid` tells which lanes made the call."""
        logs = logdict()
        depth = len(ids.flags)
        run_axes = _axes.lanes(ids.flags)
        rest = iter(operands)
        for plan in self.keys:
            inside = max([len(f) for f in plan.flags])
            # Lanes are numbered from the outermost in: vmaps around the call, around the logs, inside the logs.
            inner = [n for n in range(depth + plan.outer + inside) if n not in run_axes]
            sorter = _Sorter(run_axes, ids.tree.shape, inner)

            def sort(x: Laned, flags: Flags, events: bool, outer: int = plan.outer, sorter: _Sorter = sorter) -> Laned:
                front = [*_axes.lanes(x.flags), *range(depth, depth + outer)]
                lanes = [depth + outer + n for n in _axes.lanes(flags)]
                return sorter.sort(x.tree, [*front, *[EVENT] * events, *lanes])

            values = [sort(next(rest), f, plan.events) for f in plan.flags]
            steps = {name: sort(next(rest), f, events) for name, f, events in plan.steps}
            valid = sort(next(rest), plan.valid, plan.events) if plan.valid is not None else None
            if not lanes_valid.tree.all():
                shape = (*ids.tree.shape, values[0].tree.shape[1])
                valid = _both(valid, sorter.sort(lanes_valid.tree, _axes.lanes(lanes_valid.flags)), shape)
            _set(logs, plan.key, plan.treedef, values, steps, valid)
        logs.dropped = {key: next(rest).tree for key in self.dropped}
        batch = Batch(ids.tree.reshape(-1), logs)
        if lanes_valid.tree.all():
            return batch
        around = [n for n in range(depth) if n not in run_axes]
        valid = _Sorter(run_axes, ids.tree.shape, around).sort(lanes_valid.tree, _axes.lanes(lanes_valid.flags)).tree
        # A lane without a run never reached `init`, so it has no event either.
        return batch.select((batch.ids >= 0) | valid.any(tuple(range(1, valid.ndim))))


def _both(valid: Laned | None, lanes_valid: Laned, shape: tuple[int, ...]) -> Laned:
    """Combine `valid` of the events with that of the lanes, which has no event axis."""
    if valid is None:
        valid = Laned(np.ones((math.prod(shape[:-1]), shape[-1]), bool), (False,) * len(lanes_valid.flags))
    flags = tuple(a or b for a, b in zip(valid.flags, lanes_valid.flags, strict=True))
    ndim = 2 + sum(map(bool, flags))
    a, b = (_lanes.expand_to(x, flags, ndim, lead=2) for x in (valid, lanes_valid))
    return Laned(a & b, flags)
