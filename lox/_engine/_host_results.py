"""Host calls that return values and know their lanes.

`host_p` calls a Python function with NumPy arrays. Under `vmap` there is still one call: the function gets the arrays
of all lanes and flags that say which have the lane axis, and returns one number per lane. A call is never dropped,
repeated or merged with another one, so that initialising two runs gives two runs.

Not `io_callback`, which calls once per lane under `vmap` and is twenty times slower; not `pure_callback`, whose calls
may be merged and dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from lox import _compat
from lox._data import _axes
from lox._data._lanes import Laned, with_lane
from lox._engine._emit import MASKABLE

# (in which lanes it is valid, operands, sizes of the lanes, whether the caller waits for it) -> an array of the lanes'
# shape for each result
Target = Callable[[Laned, list[Laned], tuple[int, ...], bool], Sequence[np.ndarray]]

host_p = _compat.Primitive("lox_host")
host_p.multiple_results = True


def call(target: Target, operands: Sequence[Any], results: Sequence[Any] = ()) -> list[Any]:
    """Call `target` on the host when the program gets here; `results` are the dtypes of the numbers it returns."""
    params = dict(target=target, flags=((),) * (1 + len(operands)), lanes=(), results=tuple(results))
    if _compat.is_evaluating():  # with NumPy arrays as they are: JAX would convert int64 to int32
        return _impl(np.True_, *operands, **params)
    return host_p.bind(np.True_, *operands, **params)


def of_all_lanes(x: Laned, lanes: tuple[int, ...]) -> np.ndarray:
    """One number per lane in a flat array, for a target that ignores how lanes nest."""
    every = range(len(lanes))
    return _axes.align(x.tree, _axes.lanes(x.flags), every, dict(zip(every, lanes, strict=True))).reshape(-1)


@host_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, target: Target, flags: Any, lanes: Any, results: Any) -> Any:
    del avals, target, flags
    return [_compat.array_type(lanes, np.dtype(dtype)) for dtype in results], _compat.host_call_effects


def _run(arrays: Any, eager: bool, target: Target, flags: Any, lanes: Any, results: Any) -> tuple[np.ndarray, ...]:
    # Copied, because the runtime reuses its buffers.
    valid, *operands = [Laned(np.array(x), f) for x, f in zip(arrays, flags, strict=True)]
    outs = target(valid, operands, lanes, eager)
    return tuple(np.asarray(x, dtype).reshape(lanes) for x, dtype in zip(outs, results, strict=True))


def _impl(*operands: Any, **params: Any) -> list[Any]:
    with _compat.own_transfers():
        return [jnp.asarray(x) for x in _run(operands, True, **params)]


host_p.def_impl(_impl)


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _compat.lower_host_call(ctx, lambda *arrays: _run(arrays, False, **params), *operands)


mlir.register_lowering(host_p, _lower)


def _batch(axis_data: Any, operands: Any, dims: Any, *, flags: Any, lanes: Any, results: Any, **params: Any) -> Any:
    laned = [with_lane(x, dim, f) for x, dim, f in zip(operands, dims, flags, strict=True)]
    flags = tuple(x.flags for x in laned)
    outs = host_p.bind(*[x.tree for x in laned], flags=flags, lanes=(axis_data.size, *lanes), results=results, **params)
    return outs, [0] * len(results)


batching.fancy_primitive_batchers[host_p] = _batch


def _masked(condition: Any, valid: Any, *operands: Any, **params: Any) -> list[Any]:
    return host_p.bind(valid & condition, *operands, **params)


MASKABLE[host_p] = _masked
_compat.report_primals(host_p)
