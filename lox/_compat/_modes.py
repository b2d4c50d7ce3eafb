"""Modes of JAX: guards, debugging, disabled jit."""

import contextlib
import importlib
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax._src import core as _core

from lox._compat._traces import checks, eval_trace


def own_transfers() -> Any:
    """Allow transfers of Python and NumPy numbers in computations of lox outside of compiled programs.

    A user's transfer guard is meant for the transfers of the user's program.
    """
    for guard in _guards:
        if guard.value not in _ALLOWED:
            return jax.transfer_guard("allow")
    return _NO_CONTEXT


def debugged() -> tuple[bool, bool]:
    """Whether NaNs and infinities are being debugged, in which case lox must not introduce any.

    JAX's caches do not depend on these settings, so lox's must.
    """
    return _nans.value, _infs.value


def as_wide_as(arrays: Iterable[Any]) -> Any:
    """Let JAX compute with 64 bits if one of these arrays has as many: they may come from a context that has ended."""
    if jax.config.jax_enable_x64 or not has_64_bits(arrays):  # pyright: ignore[reportAttributeAccessIssue]
        return _NO_CONTEXT
    return _home_of_x64.enable_x64(True)


def has_64_bits(arrays: Iterable[Any]) -> bool:
    """Whether one of these arrays has numbers of 64 bits."""
    return any([getattr(x, "dtype", None) in _WIDE for x in arrays])


def is_checking_calls() -> bool:
    """Whether JAX checks every call of a jitted function, for NaNs or for PRNG keys that are used twice."""
    return checks.value


def is_usual() -> bool:
    """Whether operations run immediately, outside of all transformations, and JAX checks nothing."""
    return _core.trace_ctx.trace is eval_trace and not checks.value


# What these contexts set can be read from them in half the time that `jax.config` takes.
_nans: Any = jax.debug_nans
_infs: Any = jax.debug_infs
_guards: Any = jax.transfer_guard_host_to_device, jax.transfer_guard_device_to_host, jax.transfer_guard_device_to_device
_NO_CONTEXT = contextlib.nullcontext()
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
_home_of_x64: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")  # up to 0.7
_ALLOWED = (None, "allow")
_LOOPS = {inspect.unwrap(loop).__code__ for loop in (jax.lax.scan, jax.lax.while_loop, jax.lax.fori_loop)}


def in_python_loop(outermost: Any) -> bool:
    """Whether this is called from a loop that JAX runs in Python, inside the function whose code is `outermost`.

    Under `disable_jit` there are no primitives for loops: only the stack shows them.
    """
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    inside = itertools.takewhile(lambda frame: frame.f_code is not outermost, stack(sys._getframe(1)))
    return any(frame.f_code in _LOOPS for frame in inside)


def is_run_step_by_step() -> bool:
    """Whether the user wants to see every operation, or that of a NaN."""
    return jax.config.jax_disable_jit or _nans.value or _infs.value  # pyright: ignore[reportAttributeAccessIssue]


def is_looking_for_leaks() -> bool:
    """Whether JAX checks that nothing holds a tracer when its trace has ended (`jax.checking_leaks`)."""
    return jax.config.jax_check_tracer_leaks  # pyright: ignore[reportAttributeAccessIssue]


# What runs while a function is traced, lowered and compiled, and not while the program runs.
_COMPILING = {"jax._src.interpreters.partial_eval", "jax._src.interpreters.mlir", "jax._src.compiler"}


def is_compiling(thread: int) -> bool:
    """Whether JAX is tracing or compiling something on a thread, also if another one asks.

    It must not be asked from another one while JAX looks for tracers that have leaked: for a moment, it holds frames.
    """
    return any(frame.f_globals.get("__name__") in _COMPILING for frame in stack(sys._current_frames().get(thread)))


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
