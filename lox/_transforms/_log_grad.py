"""`lox.log_grad`: the gradient that arrives at a value.

Its primitive is the identity, and linear. Its transpose logs: reverse-mode differentiation transposes the linear part
of a program, and so passes every cotangent through the transpose.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors
from lox._data._lanes import Flags, Laned, flag_of
from lox._data._reduce import resolve
from lox._data._sites import call_site
from lox._engine import _selection
from lox._engine._event import Event
from lox._engine._primitive import as_step, bind

log_grad_p = _compat.Primitive(_compat.LOG_GRAD_NAME)
log_grad_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Label:
    """The static part of the event, before there is a cotangent.

    The operands of the primitive are the arrays, one for every leaf of `treedef`, and the steps; `flags` has the lanes
    of each.
    """

    keys: tuple[str]
    treedef: Any
    steps: tuple[str, ...]
    reduction: Any
    tags: frozenset[str]
    explicit: bool
    seen: bool
    site: str
    flags: tuple[Flags, ...]

    def of(self, operands: Any) -> Any:
        """The arrays among the operands."""
        return operands[: self.treedef.num_leaves]


log_grad_p.def_abstract_eval(lambda *avals, event: list(event.of(avals)))
log_grad_p.def_impl(lambda *operands, event: list(event.of(operands)))
mlir.register_lowering(log_grad_p, lambda ctx, *operands, event: list(event.of(operands)))


def _batch(axis_data: Any, operands: Any, dims: Any, *, event: Label) -> Any:
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    lane = flag_of(axis_data)
    flags = tuple((d is not None and lane, *f) for d, f in zip(dims, event.flags, strict=True))
    outs = log_grad_p.bind(*moved, event=dataclasses.replace(event, flags=flags))
    return outs, [None if d is None else 0 for d in event.of(dims)]


batching.fancy_primitive_batchers[log_grad_p] = _batch


def _jvp(primals: Any, tangents: Any, *, event: Label) -> Any:
    outs = log_grad_p.bind(*primals, event=event)
    if all(type(t) is ad.Zero for t in event.of(tangents)):
        return outs, list(event.of(tangents))
    smooth = map(ad.instantiate_zeros, event.of(tangents))
    return outs, log_grad_p.bind(*smooth, *primals[event.treedef.num_leaves :], event=event)


def _transpose(cotangents: Any, *operands: Any, event: Label) -> list[Any]:
    grads = [ad.instantiate_zeros(ct) for ct in cotangents]
    (key,) = event.keys
    laned = [Laned(x, f) for x, f in zip([*grads, *operands[len(grads) :]], event.flags, strict=True)]
    bind(
        Event(
            values={key: laned[: len(grads)]},
            treedefs={key: event.treedef},
            reductions={key: event.reduction},
            steps=dict(zip(event.steps, laned[len(grads) :], strict=True)),
            weight=None,
            valid=None,
            tags=event.tags,
            explicit=event.explicit,
            seen=event.seen,
            site=event.site,
        )
    )
    return [*grads, *[None] * len(event.steps)]


ad.primitive_jvps[log_grad_p] = _jvp
ad.primitive_transposes[log_grad_p] = _transpose
log_grad_p.jet_rule = lambda primals, series, event: (log_grad_p.bind(*primals, event=event), event.of(series))


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
    arrays = [jnp.asarray(v) for v, s in zip(leaves, smooth, strict=True) if s]
    arrays += [as_step(step, number) for step, number in steps.items()]
    event = Label(
        (name,),
        jax.tree.structure(grads),
        tuple(steps),
        resolve(reduce, name),
        frozenset(_selection.names("tags", tags)),
        explicit,
        seen=False,
        site=call_site(),
        flags=((),) * len(arrays),
    )
    outs = iter(log_grad_p.bind(*arrays, event=event))
    return jax.tree.unflatten(treedef, [next(outs) if s else v for v, s in zip(leaves, smooth, strict=True)])
