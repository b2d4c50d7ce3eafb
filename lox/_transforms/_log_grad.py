"""`lox.log_grad`: the gradient that arrives at a value.

Its primitive takes the operands of an event, values and steps, and returns the values: it is the identity, and linear.
Its transpose logs: reverse-mode differentiation transposes the linear part of a program, and so passes every cotangent
through the transpose.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors
from lox._data._lanes import Laned
from lox._data._reduce import resolve
from lox._data._sites import call_site
from lox._engine import _selection
from lox._engine._event import Event, Meta
from lox._engine._primitive import as_step, batched, log_p

log_grad_p = _compat.Primitive(_compat.LOG_GRAD_NAME)
log_grad_p.multiple_results = True


def _values(meta: Meta, operands: Any) -> list[Any]:
    """The values of the event among its operands; the others are its steps."""
    return list(operands[: meta.treedefs[0].num_leaves])


log_grad_p.def_abstract_eval(lambda *avals, meta: _values(meta, avals))
log_grad_p.def_impl(lambda *operands, meta: _values(meta, operands))
mlir.register_lowering(log_grad_p, lambda ctx, *operands, meta: _values(meta, operands))


def _batch(axis_data: Any, operands: Any, dims: Any, *, meta: Meta) -> Any:
    moved, mapped = batched(axis_data, operands, dims, meta)
    return log_grad_p.bind(*moved, meta=mapped), [None if d is None else 0 for d in _values(meta, dims)]


batching.fancy_primitive_batchers[log_grad_p] = _batch


def _jvp(primals: Any, tangents: Any, *, meta: Meta) -> Any:
    outs, tangents = log_grad_p.bind(*primals, meta=meta), _values(meta, tangents)
    if all(type(t) is ad.Zero for t in tangents):
        return outs, tangents
    smooth = map(ad.instantiate_zeros, tangents)
    return outs, log_grad_p.bind(*smooth, *primals[len(tangents) :], meta=meta)


def _transpose(cotangents: Any, *operands: Any, meta: Meta) -> list[Any]:
    grads = [ad.instantiate_zeros(ct) for ct in cotangents]
    log_p.bind(*grads, *operands[len(grads) :], meta=meta)
    return [*grads, *[None] * len(meta.steps)]


ad.primitive_jvps[log_grad_p] = _jvp
ad.primitive_transposes[log_grad_p] = _transpose
log_grad_p.jet_rule = lambda primals, series, meta: (log_grad_p.bind(*primals, meta=meta), _values(meta, series))


def log_grad(
    name: str,
    x: Any,
    *,
    tags: str | Iterable[str] = (),
    reduce: Any = None,
    explicit: bool = False,
    **steps: Any,
) -> Any:
    """Return `x` unchanged, and log the gradient that arrives at it in the backward pass.

    >>> import jax, lox
    >>> def f(x):
    ...     y = lox.log_grad("dy", x**2)
    ...     return 3 * y
    >>> grad, logs = lox.spool(jax.grad(f))(2.0)
    >>> print(grad, logs)
    12.0 {'dy': 3.0}

    Without a backward pass nothing is logged. The backward pass runs from the end of a program to its beginning, so the
    event of the last iteration of a loop comes first. Steps tell which is which:

    >>> def g(x):
    ...     return jax.lax.fori_loop(0, 3, lambda i, x: lox.log_grad("dx", 2 * x, step=i), x)
    >>> _, logs = lox.spool(jax.grad(g))(1.0)
    >>> print(logs, logs.step)
    {'dx': [1.0, 2.0, 4.0]} {'dx': [2, 1, 0]}

    Args:
        name: The key.
        x: An array or a pytree of them. Only floating-point arrays have gradients; the others are passed on.
        tags: Labels by which `spool`, `tap`, `nolog` and `keep` can select.
        reduce: How `spool` combines the events, as for `lox.log`.
        explicit: Appear only when selected by name or tag.
        **steps: The position of the event in the run, as for `lox.log`.

    Returns:
        `x`.
    """
    if not isinstance(name, str):
        raise _errors.LogTypeError(f"`lox.log_grad` got the name {name!r}: names are strings.")
    leaves, treedef = jax.tree.flatten(x)
    smooth = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    if not any(smooth):
        raise _errors.LogTypeError(f"`lox.log_grad` cannot log {name!r}: {x!r} holds no floating-point array.")
    # The other arrays are not part of the value: None in a pytree has no leaves.
    grads = jax.tree.unflatten(treedef, [0.0 if s else None for s in smooth])
    event = Event(
        values={name: [Laned(jnp.asarray(v)) for v, s in zip(leaves, smooth, strict=True) if s]},
        treedefs={name: jax.tree.structure(grads)},
        reductions={name: resolve(reduce, name)},
        steps={step: Laned(as_step(step, number)) for step, number in steps.items()},
        weight=None,
        valid=None,
        tags=frozenset(_selection.names("tags", tags)),
        explicit=explicit,
        seen=False,
        site=call_site(),
    )
    operands, meta = event.to_operands()
    outs = iter(log_grad_p.bind(*operands, meta=meta))
    return jax.tree.unflatten(treedef, [next(outs) if s else v for v, s in zip(leaves, smooth, strict=True)])
