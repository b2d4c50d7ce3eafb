"""The rules for functions with derivative rules of their own: their logs are those of the primal."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lox import _compat
from lox._engine._handler import Drop, Frame, Grown, Handler, MarkSeen, types_of
from lox._engine._interpret import Transformed, once, rule, transformed
from lox._engine._rules import logged_keys, run_once, silenced
from lox._engine._trace import RuleTrace, run_function


@rule("custom_jvp_call", "custom_vjp_call", count=once, runs=lambda params: [params["call_jaxpr"]])
def _custom_call(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    assert frame.place is not None  # these are traced before they are rebuilt
    jaxpr, eqn, call_jaxpr = frame.place.jaxpr, frame.place.eqn, params["call_jaxpr"]
    if not _compat.has_logs(call_jaxpr):
        with _compat.take_current_trace() as parent:
            around = functools.partial(silenced, frame.handler)
            with _compat.running(RuleTrace(parent, around)):
                return _compat.eval_equation(jaxpr, eqn, args)

    # Constants that the function closes over stay closed over: its rule does not cover them, and JAX raises if they
    # are differentiated.
    n_consts = eqn.params["num_consts"]
    consts, args = args[:n_consts], args[n_consts:]

    def original(*xs: Any) -> list[Any]:
        return _compat.eval_equation(jaxpr, eqn, [*consts, *xs])

    wrap = _with_jvp_of if eqn.primitive.name == "custom_jvp_call" else _with_vjp_of
    return _with_rule_of(frame, original, call_jaxpr, consts, args, wrap)


def _with_rule_of(frame: Frame, original: Any, jaxpr: Any, consts: list[Any], args: list[Any], wrap: Any) -> list[Any]:
    """Run `jaxpr` for values and logs, but differentiate it like `original`.

    Only the state of keys that are logged inside takes part: the rule does not know logs, so any state that passes
    through is constant to differentiation.
    """

    def attempt(state: Any) -> list[Any]:
        inside, rejoin = frame.handler.split_state(state, logged_keys(frame, jaxpr))
        try:
            body = transformed(frame, jaxpr, inside)
        except Grown as grown:
            raise Grown(frame, types_of(rejoin(grown.struct))) from None
        leaves = jax.tree.leaves(inside)
        evaluate = _compat.jaxpr_as_fun(body.jaxpr)

        def fun(*xs: Any) -> Any:
            return evaluate(*xs[: len(leaves)], *consts, *xs[len(leaves) :])

        wrapped = wrap(frame.handler, fun, original, body.outs, len(leaves))
        outs, inside, piece = body.unpack(wrapped(*leaves, *args))
        frame.absorb(rejoin(inside), piece, body.keys)
        return outs

    return frame.settle(attempt)


def _extra(fun: Any, args: Any, n_outs: int) -> list[Any]:
    """What the transformed function returns beside its results.

    Its rule runs too, and outer transformations take the rule's events: those that the function lets flow on must not
    be added to them.
    """
    return run_function(Drop(), fun, tuple(map(lax.stop_gradient, args)), {})[0][n_outs:]


def _split(original: Any, args: Any, moving: list[bool]) -> tuple[Any, list[Any]]:
    """`original` as a function of the differentiated arguments only, so that its rule sees which they are."""

    def of_moving(*xs: Any) -> list[Any]:
        rest = iter(xs)
        return original(*[next(rest) if m else a for a, m in zip(args, moving, strict=True)])

    return of_moving, [a for a, m in zip(args, moving, strict=True) if m]


def _with_vjp_of(handler: Handler, fun: Any, original: Any, n_outs: int, n_state: int) -> Any:
    call = jax.custom_vjp(fun)

    def forward(*primals: Any) -> Any:
        args = [p.value for p in primals]
        moving = [p.perturbed for p in primals[n_state:]]
        of_moving, xs = _split(original, args[n_state:], moving)
        outs, pullback = silenced(handler, lambda *xs: jax.vjp(of_moving, *xs), *xs)
        # Only the structure of residuals is static: an empty tuple marks a differentiated argument.
        marks = [() if m else None for m in moving]
        return [*outs, *_extra(fun, args, n_outs)], (pullback, marks)

    def backward(residuals: Any, cotangents: Any) -> Any:
        pullback, marks = residuals
        cts = [_compat.instantiated(ct) for ct in cotangents[:n_outs]]
        grads = iter(silenced(handler, lambda pull, cts: pull(cts), pullback, cts))
        return (*[None] * n_state, *[next(grads) if mark is not None else None for mark in marks])

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _with_jvp_of(handler: Handler, fun: Any, original: Any, n_outs: int, n_state: int) -> Any:
    call = jax.custom_jvp(fun)

    def rule(primals: Any, tangents: Any) -> Any:
        moving = [not _compat.is_symbolic_zero(t) for t in tangents[n_state:]]
        of_moving, xs = _split(original, primals[n_state:], moving)
        ts = [t for t, m in zip(tangents[n_state:], moving, strict=True) if m]
        if ts:
            differentiate = lambda p, t: jax.jvp(of_moving, p, t)  # noqa: E731
            outs, tangents_out = silenced(handler, differentiate, tuple(xs), tuple(ts))
        else:
            outs = silenced(handler, original, *primals[n_state:])
            tangents_out = list(map(_no_tangent, outs))
        extra = _extra(fun, primals, n_outs)
        return [*outs, *extra], [*tangents_out, *map(_no_tangent, extra)]

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _no_tangent(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


@rule("custom_linear_solve", count=once, runs=lambda params: [params["jaxprs"].solve])
def _linear_solve(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    if frame.handler.in_place:
        stripped = type(jaxprs)(*[j and transformed(frame, j, frame.state).jaxpr for j in jaxprs])
        return primitive.bind(*args, **dict(params, jaxprs=stripped))
    start = lengths.matvec + lengths.vecmat
    consts, b = args[start : start + lengths.solve], args[sum(lengths) :]
    n_rest = len(args) - len(consts) - len(b)

    # The jaxpr of the solver takes its constants and the right-hand side; the rest only serves differentiation.
    rest = [*args[:start], *args[start + lengths.solve : sum(lengths)]]

    def original(*xs: Any) -> list[Any]:
        others, consts, b = xs[:n_rest], xs[n_rest : n_rest + lengths.solve], xs[n_rest + lengths.solve :]
        return primitive.bind(*others[:start], *consts, *others[start:], *b, **params)

    solve = _compat.make_jaxpr(
        lambda *xs: _compat.jaxpr_as_fun(jaxprs.solve)(*xs[n_rest:]), types_of([*rest, *consts, *b])
    )
    return _with_rule_of(frame, original, solve, [], [*rest, *consts, *b], _with_jvp_of)


@rule("call_hi_primitive")
def _high(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    """Primitives of JAX's newer kind: custom_root since 0.11.2, remat and custom derivatives behind flags in 0.12."""
    prim = params["_prim"]
    if type(prim).__name__ == "RematTraced":

        def call(body: Transformed, leaves: list[Any]) -> Any:
            jaxpr, consts = _compat.without_consts(body.jaxpr)
            return _compat.widen_high_remat(prim, jaxpr, len(consts) + len(leaves))(*consts, *leaves, *args)

        return run_once(frame, prim.jaxpr, call, may_grow=False)

    def expand(*xs: Any) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, xs)))

    original = functools.partial(primitive.bind, **params)
    jaxpr = _compat.make_jaxpr(expand, types_of(args))
    wrap = _with_jvp_of if type(prim).__name__ == "CustomJVPTraced" else _with_vjp_of
    return _with_rule_of(frame, original, jaxpr, [], args, wrap)


@rule(_compat.LOG_GRAD_NAME)
def _log_grad(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    """Treat it as a derivative rule: it logs when the function is differentiated from outside."""
    handler, meta = frame.handler.for_rules(), params["meta"]
    if not handler.wants(meta, frame.eqn_scope):
        return args[: meta.treedefs[0].num_leaves]
    seen = meta.seen or isinstance(handler, MarkSeen)
    return primitive.bind(*args, meta=dataclasses.replace(meta, seen=seen))
