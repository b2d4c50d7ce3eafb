"""From the device to the host.

`emit_p` hands one event to a host function. It takes a token and returns it: events that shall arrive in order pass
the token from one to the next, an ordinary data dependency that works under every transformation. (JAX's own ordered
effects do not: they fail under vmap, grad and on several devices.) All lanes of a vmap travel in one call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from lox import _arrays, _compat
from lox._event import Event, Meta
from lox._logdict import logdict

Deliver = Callable[[logdict], None]

emit_p = _compat.Primitive("lox_emit")
emit_p.multiple_results = True


def new_token() -> Any:
    """The token of the first event."""
    return jnp.zeros((), jnp.int32)


def emit(deliver: Deliver, event: Event, token: Any = None) -> Any:
    """Hand an event to `deliver` on the host; returns the token for the next one."""
    operands, meta = event.replace(weight=None).to_operands()
    operands = [jax.random.key_data(x) if _arrays.is_prng_key(x.dtype) else x for x in operands]
    token = new_token() if token is None else token
    return emit_p.bind(token, *operands, deliver=deliver, meta=meta)[0]


@emit_p.def_effectful_abstract_eval
def _abstract_eval(token: Any, *avals: Any, deliver: Deliver, meta: Meta) -> Any:
    del avals, deliver, meta
    return [token], {_compat.emit_effect}


def _call_host(token: Any, *operands: Any, deliver: Deliver, meta: Meta) -> tuple[Any]:
    # The buffers belong to the runtime and are reused after the call: what the callback gets, it may keep.
    event = Event.from_operands(meta, [np.array(x) for x in operands])
    if event.mask is not None and not event.mask.flags:
        event = event.replace(mask=None) if event.mask.tree else None
    if event is not None and (event.mask is None or event.mask.tree.any()):
        deliver(event.as_logdict())
    return (token,)


@emit_p.def_impl
def _impl(token: Any, *operands: Any, deliver: Deliver, meta: Meta) -> list[Any]:
    _call_host(token, *[np.asarray(x) for x in operands], deliver=deliver, meta=meta)
    return [token]


def _lower(ctx: Any, *operands: Any, deliver: Deliver, meta: Meta) -> Any:
    def callback(token: Any, *arrays: Any) -> tuple[Any]:
        return _call_host(token, *arrays, deliver=deliver, meta=meta)

    return _compat.lower_callback(ctx, callback, *operands)


mlir.register_lowering(emit_p, _lower)


def _batch(axis_data: Any, operands: Any, dims: Any, *, deliver: Deliver, meta: Meta) -> Any:
    del axis_data
    token = operands[0] if dims[0] is None else jnp.max(operands[0], dims[0])
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands[1:], dims[1:], strict=True)]
    flags = tuple((d is not None, *f) for d, f in zip(dims[1:], meta.flags, strict=True))
    meta = dataclasses.replace(meta, flags=flags)
    return emit_p.bind(token, *moved, deliver=deliver, meta=meta), [None]


batching.fancy_primitive_batchers[emit_p] = _batch


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    del tangents
    outs = emit_p.bind(*primals, **params)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


ad.primitive_jvps[emit_p] = _jvp
_compat.keep_in_loop(emit_p)
_compat.run_in_forward_pass(emit_p)
