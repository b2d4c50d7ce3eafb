"""Small functions on arrays that several modules share."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat

is_prng_key = _compat.is_prng_key


def numpy_for(*trees: Any) -> Any:
    """NumPy if all arrays are NumPy arrays, so that host code never starts a JAX computation; else jax.numpy."""
    if all(isinstance(x, np.ndarray | np.generic | int | float | complex) for x in jax.tree.leaves(trees)):
        return np
    return jnp


def as_array(x: Any) -> Any:
    """Make an array of a Python number, which JAX passes to primitives unchanged."""
    return jnp.asarray(x) if isinstance(x, int | float | complex) and not isinstance(x, np.generic) else x


def concrete(x: Any) -> Any:
    """An array of JAX's that is in this process, or one of NumPy's like what JAX would make of a number or an array.

    None for everything else, and for integers that do not fit: `lox.log` has the messages. Making an array on a device
    takes longer than all that lox does with a number.
    """
    kind = type(x)
    if kind in _NUMBERS:
        dtype = _NUMBERS[kind][jax.config.jax_enable_x64]  # type: ignore[attr-defined]
        if kind is int and not -(1 << 8 * dtype.itemsize - 1) <= x < 1 << 8 * dtype.itemsize - 1:
            return None
        return np.array(x, dtype)
    if kind is np.ndarray or isinstance(x, np.generic):  # not of a subclass, which may mean something else
        dtype = _canonical(x.dtype, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        if dtype is None:
            return None
        copy = np.array(x, dtype)
        return None if dtype != x.dtype and dtype.kind in "iu" and (copy != x).any() else copy
    # By the type first, because to ask the array takes longer; but it may be one in disguise.
    is_array = _compat.is_concrete(kind) or (isinstance(x, jax.Array) and not isinstance(x, _compat.Tracer))
    return x if is_array and isinstance(x.dtype, np.dtype) and x.is_fully_addressable else None


def concrete_leaves(data: Any, concrete: Any) -> tuple[list[Any], list[Any]] | None:
    """The structures of the values of a dict, and the leaves of all of them, by `concrete`; None if that is None."""
    treedefs, leaves = [], []
    for key, value in data.items():
        array = concrete(value)  # most values are arrays or numbers
        if array is not None:
            treedefs.append(LEAF)
            leaves.append(array)
        else:
            inside, treedef = jax.tree.flatten(value)
            arrays = [concrete(x) for x in inside]
            if not arrays or any([x is None for x in arrays]):
                return None
            treedefs.append(treedef)
            leaves += arrays
        if type(key) is not str:
            return None
    return (treedefs, leaves) if leaves else None


LEAF = jax.tree.structure(0)  # of a value that is one array

# For Python's numbers, the dtypes of JAX without and with 64 bits.
_NUMBERS = {
    bool: (np.dtype(bool), np.dtype(bool)),
    int: (np.dtype(np.int32), np.dtype(np.int64)),
    float: (np.dtype(np.float32), np.dtype(np.float64)),
    complex: (np.dtype(np.complex64), np.dtype(np.complex128)),
}


@functools.lru_cache(256)
def _canonical(dtype: Any, x64: bool) -> Any:
    """The dtype of an array that JAX makes of one with this dtype, with or without 64 bits; None if it cannot."""
    del x64  # which JAX knows
    known = (dtype.kind in "biuf" and dtype.itemsize <= 8) or (dtype.kind == "c" and dtype.itemsize <= 16)
    return jax.dtypes.canonicalize_dtype(dtype) if known else None


def missing_value(dtype: Any) -> Any:
    """The value of an empty slot: NaN for floats, else 0; always 0 while NaNs are being debugged."""
    return _nan_or(0, dtype)


def missing_step(dtype: Any) -> Any:
    """The value for a step that an event does not have: NaN for floats, else -1."""
    return _nan_or(-1, dtype)


def _nan_or(number: int, dtype: Any) -> Any:
    nan = jnp.issubdtype(dtype, jnp.inexact) and not _compat.debugged()[0]
    return np.asarray(np.nan if nan else number).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """`jnp.zeros`, also for PRNG keys and explicit sharding."""
    if is_prng_key(dtype) or sharding is not None:
        return _compat.zeros_of(_compat.array_type(shape, dtype, sharding))
    return jnp.zeros(shape, dtype)


def promote(*dtypes: Any) -> Any:
    """The dtype that holds them all."""
    first, *rest = dtypes
    with jax.numpy_dtype_promotion("standard"):  # lox promises to promote events, even in strict mode
        for dtype in rest:
            if dtype != first:
                first = jax.dtypes.canonicalize_dtype(jnp.promote_types(first, dtype))  # int64 only in x64 mode
    return first


def wide_float(dtype: Any) -> Any:
    """The dtype in which floats are summed: at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def concatenate(arrays: list[Any], axis: int = 0) -> Any:
    """`jnp.concatenate` on one mesh: JAX cannot batch it over an explicit axis if some of the arrays have no mesh."""
    return jnp.concatenate(_compat.on_mesh_of(arrays, arrays), axis)


def slice_events(x: Any, start: int, stop: int | None = None, step: int = 1) -> Any:
    """`x[start:stop:step]` of a JAX array. Not by indexing: in JAX 0.7 that is a gather, which fails for PRNG keys."""
    size = x.shape[0]
    return jax.lax.slice_in_dim(x, min(start, size), size if stop is None else stop, step)


def take(x: Any, indices: Any, axis: int) -> Any:
    """`x.take(indices, axis)`, also for PRNG keys."""
    if is_prng_key(x.dtype):
        return _compat.map_words(lambda words: words.take(indices, axis), x)
    return x.take(indices, axis)


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`, which PRNG keys do not have."""
    return x if x.dtype == dtype else x.astype(dtype)


def is_staging() -> bool:
    """Whether a program is traced that runs later."""
    return isinstance(_compat.current_trace(), _compat.StagingTrace)


@jax.jit
def _copies(arrays: list[Any]) -> list[Any]:
    return [strong(jnp.copy(x)) for x in arrays]


def owned(arrays: list[Any]) -> list[Any]:
    """Copy concrete arrays, as the program may donate them later.

    lox would not notice: a jitted function without logs that has run before bypasses every trace. If all can be on one
    device, they are after that: events are joined there.
    """
    traced = [isinstance(x, _compat.Tracer) for x in arrays]
    if all(traced) or is_staging():
        return arrays
    with jax.debug_nans(False) if jax.config.jax_debug_nans else contextlib.nullcontext():  # type: ignore[attr-defined]
        on_devices = [x for x in arrays if isinstance(x, jax.Array)]
        if not on_devices or _compat.are_on_one_device(on_devices):
            return _copies(arrays)
        return [_copies([x])[0] if isinstance(x, jax.Array) and not is_traced else x
                for x, is_traced in zip(arrays, traced, strict=True)]  # fmt: skip


def strong(x: Any) -> Any:
    """Remove the weak type: `lox.log({"x": 1.0})` logs a float32, whatever it is later combined with."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    return _compat.with_strength(x, weak=False)
