"""`lox.log_grad`: the gradient that arrives at a value.

The primitive behind it is the identity, and linear. What makes it log is its transpose: reverse-mode differentiation
transposes the linear part of a program, and so meets every cotangent on its way back.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors, _select
from lox._event import Event
from lox._lanes import Laned
from lox._primitive import bind, call_site
from lox._reduce import resolve

log_grad_p = _compat.Primitive(_compat.LOG_GRAD_NAME)
log_grad_p.multiple_results = True
log_grad_p.def_abstract_eval(lambda *avals, event: list(avals))
log_grad_p.def_impl(lambda *xs, event: list(xs))
mlir.register_lowering(log_grad_p, lambda ctx, *xs, event: list(xs))
batching.primitive_batchers[log_grad_p] = lambda xs, dims, event: (log_grad_p.bind(*xs, event=event), dims)


@dataclasses.dataclass(frozen=True)
class Label:
    """What will be known of the event before there is a cotangent."""

    keys: tuple[str]
    treedef: Any
    reduction: Any
    tags: frozenset[str]
    explicit: bool
    seen: bool
    site: str


def _transpose(cotangents: Any, *xs: Any, event: Label) -> list[Any]:
    del xs
    grads = [ad.instantiate_zeros(ct) for ct in cotangents]
    (key,) = event.keys
    bind(
        Event(
            values={key: [Laned(g) for g in grads]},
            treedefs={key: event.treedef},
            reductions={key: event.reduction},
            steps={},
            weight=None,
            mask=None,
            tags=event.tags,
            explicit=event.explicit,
            seen=event.seen,
            site=event.site,
        )
    )
    return grads


ad.deflinear2(log_grad_p, _transpose)


def log_grad(
    name: str,
    x: Any,
    *,
    tags: str | Iterable[str] = (),
    reduce: Any = None,
    explicit: bool = False,
) -> Any:
    """Return `x` unchanged, and log the gradient that arrives at it in the backward pass.

    >>> import jax, lox
    >>> def f(x):
    ...     y = lox.log_grad("dy", x**2)
    ...     return 3 * y
    >>> grad, logs = lox.spool(jax.grad(f))(2.0)
    >>> print(grad, logs)
    12.0 {'dy': 3.0}

    Without a backward pass nothing is logged.

    Args:
        name: The key.
        x: An array or a pytree of them. Only floating-point arrays have gradients; the others are passed on.
        tags: Labels by which `spool`, `tap`, `nolog` and `keep` can select.
        reduce: How `spool` shall combine the events, as for `lox.log`.
        explicit: Appear only when asked for by name or tag.

    Returns:
        `x`.
    """
    if not isinstance(name, str):
        raise _errors.LogTypeError(f"`lox.log_grad` got the name {name!r}: names are strings.")
    leaves, treedef = jax.tree.flatten(x)
    smooth = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    if not any(smooth):
        raise _errors.LogTypeError(f"`lox.log_grad` cannot log {name!r}: {x!r} holds no floating-point array.")
    # The others are no part of the value: a None in a pytree is nothing.
    grads = jax.tree.unflatten(treedef, [0.0 if s else None for s in smooth])
    event = Label(
        (name,),
        jax.tree.structure(grads),
        resolve(reduce, name),
        frozenset(_select.names("tags", tags)),
        explicit,
        seen=False,
        site=call_site(),
    )
    outs = iter(log_grad_p.bind(*[jnp.asarray(v) for v, s in zip(leaves, smooth, strict=True) if s], event=event))
    return jax.tree.unflatten(treedef, [next(outs) if s else v for v, s in zip(leaves, smooth, strict=True)])
