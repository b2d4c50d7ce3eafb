"""Small things about arrays that several modules need."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat

is_prng_key = _compat.is_prng_key


def numpy_for(*trees: Any) -> Any:
    """NumPy if all arrays are NumPy's, so that host code never starts a JAX computation; else jax.numpy."""
    if all(isinstance(x, np.ndarray | np.generic | int | float | complex) for x in jax.tree.leaves(trees)):
        return np
    return jnp


def as_array(x: Any) -> Any:
    """A Python number as an array: JAX passes them through primitives as they are."""
    return jnp.asarray(x) if isinstance(x, int | float | complex) and not isinstance(x, np.generic) else x


def missing_value(dtype: Any) -> Any:
    """What stands in a slot in which nothing happened: NaN if there is such a thing, else 0.

    Who debugs NaNs is after those of the program: then it is 0 too.
    """
    if jnp.issubdtype(dtype, jnp.inexact) and not _compat.debugged()[0]:
        return np.asarray(np.nan).astype(dtype)
    return np.zeros((), dtype)


def missing_step(dtype: Any) -> Any:
    """What stands for a step that an event does not have: NaN for floats, -1 for integers."""
    if jnp.issubdtype(dtype, jnp.inexact) and not _compat.debugged()[0]:
        return np.asarray(np.nan).astype(dtype)
    return np.asarray(-1).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """`jnp.zeros` that knows PRNG keys and explicit sharding too."""
    if is_prng_key(dtype) or sharding is not None:
        return _compat.zeros_of(_compat.array_type(shape, dtype, sharding))
    return jnp.zeros(shape, dtype)


def promote(*dtypes: Any) -> Any:
    """The dtype that holds them all."""
    first, *rest = dtypes
    with jax.numpy_dtype_promotion("standard"):  # that events of a key are promoted is our promise, not the user's slip
        for dtype in rest:
            if dtype != first:
                first = jax.dtypes.canonicalize_dtype(jnp.promote_types(first, dtype))  # int64 only in x64 mode
    return first


def wide_float(dtype: Any) -> Any:
    """At least float32: what floats of any width can be summed in."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def concatenate(arrays: list[Any], axis: int = 0) -> Any:
    """`jnp.concatenate`, which JAX cannot batch over an explicit axis if only some of the arrays know the mesh."""
    return jnp.concatenate(_compat.on_mesh_of(arrays, arrays), axis)


def slice_rows(x: Any, start: int, stop: int | None = None, step: int = 1) -> Any:
    """`x[start:stop:step]` of a JAX array; indexing is a gather to JAX 0.7, which does not know PRNG keys."""
    size = x.shape[0]
    return jax.lax.slice_in_dim(x, min(start, size), size if stop is None else stop, step)


def take(x: Any, indices: Any, axis: int) -> Any:
    """`x.take(indices, axis)`, of PRNG keys too."""
    if is_prng_key(x.dtype):
        return _compat.map_words(lambda words: words.take(indices, axis), x)
    return x.take(indices, axis)


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`, which PRNG keys do not have."""
    return x if x.dtype == dtype else x.astype(dtype)


@jax.jit
def _copy(x: Any) -> Any:
    return jnp.copy(x)


def owned(arrays: list[Any]) -> list[Any]:
    """The same arrays, those that exist already as copies: what is kept may be donated by the program later on.

    Nothing would tell: a jitted function without logs that has run before is called past every trace.
    """
    if all(isinstance(x, _compat.Tracer) for x in arrays) or isinstance(_compat.current_trace(), _compat.StagingTrace):
        return arrays
    with jax.debug_nans(False) if jax.config.jax_debug_nans else contextlib.nullcontext():  # type: ignore[attr-defined]
        return [_copy(x) if isinstance(x, jax.Array) and not isinstance(x, _compat.Tracer) else x for x in arrays]


def strong(x: Any) -> Any:
    """The array without weak type: `lox.log({"x": 1.0})` logs a float32, whatever it is later combined with."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    aval = jax.typeof(x)
    return jax.lax.convert_element_type(x, aval.dtype) if getattr(aval, "weak_type", False) else x
