"""From the device to the host.

`emit_p` hands one event to a host function. It takes a token and returns it: events that shall arrive in order pass
the token from one to the next, an ordinary data dependency that works under every transformation. (JAX's own ordered
effects do not: they fail under vmap, grad and on several devices.) All lanes of a vmap travel in one call.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from lox import _arrays, _compat
from lox._event import Event, Meta
from lox._logdict import Layout, logdict

Deliver = Callable[[logdict, bool], None]  # the second argument: whether events come in order

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


# One event at a time, as a callback expects: several devices may call at once.
_delivering = threading.RLock()


class HostCall:
    """Turns the operands of one `emit_p` into a logdict and delivers it.

    What does not change from event to event is worked out once: a callback costs a few microseconds, and making an
    `Event` first would cost more than that.
    """

    def __init__(self, deliver: Deliver, meta: Meta, ndims: list[int]):
        self.deliver, self.meta = deliver, meta
        steps = meta.steps
        first_step = sum(t.num_leaves for t in meta.treedefs)
        self.step_index = {name: first_step + n for n, name in enumerate(steps)}
        mask_flags = meta.flags[-1] if meta.masked else ()
        self.lane_mask = any(mask_flags)
        self.slices: list[tuple[str, Any, slice]] = []
        self.layouts: dict[str, Layout] = {}
        start = 0
        for key, treedef in zip(meta.keys, meta.treedefs, strict=True):
            stop = start + treedef.num_leaves
            self.slices.append((key, treedef, slice(start, stop)))
            self.layouts[key] = Layout(
                False,
                meta.flags[start:stop],
                tuple(ndims[start:stop]),
                tuple((name, meta.flags[n]) for name, n in sorted(self.step_index.items())),
                mask_flags if self.lane_mask else (),
            )
            start = stop
        self.single = jax.tree.structure(0)

    def __call__(self, token: Any, *operands: Any) -> tuple[Any]:
        """Called by the runtime, whose buffers are reused after the call: what the callback gets, it may keep."""
        if self.meta.masked and not operands[-1].any():
            return (token,)
        arrays = [np.array(x) for x in operands]
        logs = logdict()
        for key, treedef, part in self.slices:
            leaves = arrays[part]
            logs[key] = leaves[0] if treedef == self.single else jax.tree.unflatten(treedef, leaves)
        for name, n in self.step_index.items():
            logs.steps[name] = dict.fromkeys(self.meta.keys, arrays[n])
        if self.lane_mask:
            logs.valid = dict.fromkeys(self.meta.keys, arrays[-1])
        logs._layouts = dict(self.layouts)
        with _delivering:
            self.deliver(logs, token >= 0)
        return (token,)


@emit_p.def_impl
def _impl(token: Any, *operands: Any, deliver: Deliver, meta: Meta) -> list[Any]:
    arrays = [np.asarray(x) for x in operands]
    HostCall(deliver, meta, [x.ndim for x in arrays])(token, *arrays)
    return [token]


def _lower(ctx: Any, *operands: Any, deliver: Deliver, meta: Meta) -> Any:
    call = HostCall(deliver, meta, [len(a.shape) for a in ctx.avals_in[1:]])
    return _compat.lower_callback(ctx, call, *operands)


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
