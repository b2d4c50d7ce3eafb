"""Events of several runs, from how they leave the device to how loggers take them.

Packets arrive with the lanes that transformations gave them. In a `Batch`, the outermost lane of every bundle is the
run; lanes inside a run follow. Packets of the same form are joined first, which makes a busy queue cheap to write.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from lox._data._bundle import Bundle, runs_outermost
from lox._data._lanes import Laned, is_laned
from lox._data._logdict import logdict
from lox._engine._emit import Packet
from lox._record import struct

Rename = Callable[[np.ndarray], np.ndarray]


@struct
class Job:
    """A packet in the queue of a logger."""

    packet: Packet
    rename: Rename | None = None  # from the runs of an outer logger to those of this one

    @property
    def size(self) -> int:
        """The size of the events in bytes."""
        return sum([x.nbytes for x in self.packet.arrays[: len(self.packet.unpacker.leads)]])

    def ids(self) -> np.ndarray:
        """The runs of the packet, as this logger numbers them; -1 stands for none."""
        ids = self.packet.route().reshape(-1)
        return ids if self.rename is None else self.rename(ids)


@dataclasses.dataclass
class Batch:
    """Events of `ids`: arrays `(event, run, *lanes, *item)`, without the run where it makes no difference."""

    ids: np.ndarray
    bundles: list[Bundle]

    def select(self, runs: np.ndarray) -> "Batch":
        """Keep these runs only."""
        pick = lambda x: Laned(x.tree[:, runs], x.flags) if x.flags[0] else x  # noqa: E731
        return Batch(self.ids[runs], jax.tree.map(pick, self.bundles, is_leaf=is_laned))

    def by_run(self) -> list["Batch"]:
        """Split such that no run comes twice: several lanes of a run become lanes inside it."""
        lanes: dict[int, list[int]] = {}
        for index, number in enumerate(self.ids.tolist()):
            lanes.setdefault(number, []).append(index)
        if len(lanes) == len(self.ids):
            return [self]
        return [self.select(np.asarray(indices))._inside_one_run() for indices in lanes.values()]

    def _inside_one_run(self) -> "Batch":
        if len(self.ids) == 1:
            return self
        inside = lambda x: Laned(x.tree, (False, *x.flags))  # noqa: E731
        return Batch(self.ids[:1], jax.tree.map(inside, self.bundles, is_leaf=is_laned))

    def run(self, index: int) -> list[Bundle]:
        """The events of one run."""
        pick = lambda x: Laned(x.tree[:, index] if x.flags[0] else x.tree, x.flags[1:])  # noqa: E731
        bundles = [b.occurred() for b in jax.tree.map(pick, self.bundles, is_leaf=is_laned)]
        return [bundle for bundle in bundles if bundle is not None]

    def run_first(self) -> list[Bundle]:
        """The events with the run as the first axis of every array, and the events as the second."""

        def front(x: Laned) -> Laned:
            tree = np.moveaxis(x.tree, 1, 0) if x.flags[0] else x.tree[None]
            return Laned(np.broadcast_to(tree, (len(self.ids), *tree.shape[1:])), x.flags[1:])

        bundles = jax.tree.map(front, self.bundles, is_leaf=is_laned)
        return [
            dataclasses.replace(b, valid=None) if b.valid is not None and b.valid.tree.all() else b for b in bundles
        ]

    @classmethod
    def of(cls, logs: logdict) -> "Batch":
        """The events of logs in which the run is the first axis of every array."""
        bundles = logs.to_bundles()
        return cls(np.arange(bundles[0].values[0].tree.shape[1] if bundles else 0), bundles)

    @classmethod
    def of_run(cls, logs: logdict) -> "Batch":
        """The events of the logs of one run."""
        return cls(np.zeros(1, int), logs.to_bundles(lead=(False,)))


def logs_of(bundles: Iterable[Bundle], outer: int) -> logdict:
    """The events as methods of loggers take them; `outer` axes precede the events."""
    logs = logdict()
    for bundle in bundles:
        logs._set_bundle(bundle, outer)
    return logs


def batches(jobs: Iterable[Job]) -> Iterator[Callable[[], Batch]]:
    """Functions that make the batches, in order. Neighbours of the same form are joined."""
    for _, group in itertools.groupby(jobs, key=_form):
        yield functools.partial(_batch, list(group))


def _form(job: Job) -> Any:
    """What packets must have in common to be joined: everything but their values and numbers of events."""
    packet = job.packet
    shapes = [(x.shape[lead:], x.dtype) for x, lead in zip(packet.arrays, packet.unpacker.leads, strict=False)]
    return packet.unpacker, packet.route().tobytes(), job.rename, shapes


def _batch(jobs: list[Job]) -> Batch:
    packet = jobs[0].packet
    bundles, route, _ = packet.content()
    assert route is not None
    if len(jobs) > 1:
        leads, arrays = packet.unpacker.leads, list(packet.arrays)
        for n, (lead, *parts) in enumerate(zip(leads, *[job.packet.arrays for job in jobs], strict=False)):
            arrays[n] = np.concatenate(parts) if lead else np.stack(parts)
        joined = packet.unpacker.form.content(arrays).bundles
        bundles = [dataclasses.replace(bundle, single=False) for bundle in joined]
    batch = Batch(jobs[0].ids(), [runs_outermost(bundle.expanded(), route) for bundle in bundles])
    if (batch.ids >= 0).all():
        return batch
    # A lane that did not reach `init` has no event either.
    return batch.select((batch.ids >= 0) | _with_events(batch))


def _with_events(batch: Batch) -> np.ndarray:
    """Which runs have an event."""
    some = np.zeros(len(batch.ids), bool)
    for bundle in batch.bundles:
        if bundle.valid is None:
            some |= bundle.count() > 0
        else:
            valid = bundle.valid.tree
            some |= valid.any((0, *range(2, valid.ndim))) if bundle.valid.flags[0] else valid.any()
    return some
