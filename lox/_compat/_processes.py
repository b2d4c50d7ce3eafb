"""Several processes of one program: `jax.distributed`."""

import functools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed as _distributed

from lox._compat._traces import Tracer

_SESSION = "lox/session"
_PATIENCE = 60_000  # milliseconds to wait for the coordinator


class Process(NamedTuple):
    """Which process of how many this is; the session is a text that all of them have, and no other program."""

    number: int
    processes: int
    session: str | None


def this_process() -> Process:
    """Ask JAX. Nothing is computed or waited for, and no backend is started."""
    state = _distributed.global_state
    if state.client is None or (state.num_processes or 1) == 1:
        return Process(0, 1, None)
    assert state.num_processes is not None
    return Process(state.process_id, state.num_processes, _session(state.client))


@functools.cache
def _session(client: Any) -> str:
    try:
        client.key_value_set(_SESSION, secrets.token_hex(8))  # the first process to come decides
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    return client.blocking_key_value_get(_SESSION, _PATIENCE)


def is_global(x: Any) -> bool:
    """Tell whether an array has parts in other processes."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


def is_on_several_devices(tree: Any) -> bool:
    """Tell whether any array of a tree is."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    return any(len(x.sharding.device_set) > 1 for x in arrays)


def are_on_one_device(arrays: Sequence[Any]) -> bool:
    """Tell whether all of these are concrete arrays, in the same memory of one device, and none of them on a mesh."""
    first = same = kind = None
    for x in arrays:
        if type(x) is not kind and not is_concrete(kind := type(x)):
            return False
        sharding = x.sharding
        if first is None:
            first = same = sharding
            if not isinstance(first, jax.sharding.SingleDeviceSharding):
                return False
        # Results of programs share their shardings, which take longer to compare than to tell apart.
        elif sharding is not first and sharding is not same:
            if sharding != first:
                return False
            same = sharding
    return first is not None


@functools.lru_cache(256)
def is_concrete(kind: type) -> bool:
    """Tell whether this is the type of arrays of JAX's that have values. It takes long to ask of every array."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def is_split(x: Any) -> bool:
    """Tell whether an array is spread over several processes, such that not each of them has all of it.

    All processes agree about it, also those that have nothing of it.
    """
    if not is_global(x):
        return False
    where = _processes_of(x)
    return len(where) > 1 and not (x.is_fully_replicated and len(where) == this_process().processes)


def is_elsewhere(x: Any) -> bool:
    """Tell whether an array is on devices of one other process, which does not know that this one has no part of it."""
    return is_global(x) and len(_processes_of(x)) == 1


def _processes_of(x: Any) -> set[int]:
    return {device.process_index for device in x.sharding.device_set}


def own_copy(x: Any) -> Any:
    """Return an array that every process has as one that does not reach beyond this process."""
    return np.asarray(x.addressable_data(0)) if is_global(x) else x


def own_parts(x: Any, alone: int | None = None) -> list[tuple[tuple[tuple[int, int], ...], np.ndarray]]:
    """Return parts of an array that this process has, and where each of them begins and ends along all axes.

    With `alone`, each part is returned in one process only: what all have, in the process with that number.
    """
    if not is_split(x):
        here = alone is None or this_process().number == alone
        return [(tuple((0, size) for size in np.shape(x)), np.asarray(own_copy(x)))] if here else []
    parts = {}
    for shard in x.addressable_shards:
        if shard.replica_id == 0 or alone is None:
            parts[tuple(s.indices(n)[:2] for s, n in zip(shard.index, x.shape, strict=True))] = shard
    return [(bounds, np.asarray(shard.data)) for bounds, shard in parts.items()]
