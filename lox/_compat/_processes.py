"""Several processes of one program: `jax.distributed`."""

import functools
import secrets
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


def own_copy(x: Any) -> np.ndarray | None:
    """Return the value of an array that every process has; None if this one has only a part of it."""
    return np.asarray(x.addressable_data(0)) if x.is_fully_replicated else None
