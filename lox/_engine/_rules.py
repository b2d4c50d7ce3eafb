"""One rule for every primitive that can contain logs.

A rule rebuilds the primitive such that its logs reach the frame; `@rule` registers all else that is known about it. A
primitive that logs but has no rule is an error, since a guess at the meaning of its jaxpr could be silently wrong (the
jaxpr of `reduce` looks just like that of a call).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from lox import _compat
from lox._data._arrays import strong
from lox._data._bundle import Bundle
from lox._data._lanes import Laned, map_laned
from lox._engine import _masking
from lox._engine._handler import Drop, Frame, Grown, Handler, Place, Retrace, Tally, rebuilding, types_of
from lox._engine._interpret import Inside, Transformed, foresee, interpret, once, rule, tally, transformed, wants_any
from lox._engine._primitive import log_p
from lox._engine._trace import run_function


def run_once(
    frame: Frame, jaxpr: Any, call: Callable[[Transformed, list[Any]], Any], may_grow: bool = True
) -> list[Any]:
    """Run a transformed jaxpr by `call(body, leaves of the state)`; if it `may_grow`, its state may change type."""

    def attempt(state: Any) -> list[Any]:
        body = transformed(frame, jaxpr, state, once=may_grow)
        outs, state, piece = body.unpack(call(body, jax.tree.leaves(state)))
        frame.absorb(state, piece, body.keys)
        return outs

    return frame.settle(attempt)


@rule("jit", "pjit", count=once)
def _jit(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    def call(body: Transformed, leaves: list[Any]) -> Any:
        return primitive.bind(*leaves, *args, **_compat.widen_jit(params, body.jaxpr, len(leaves), body.extra))

    return run_once(frame, params["jaxpr"], call)


@rule("remat2", "checkpoint", count=once)
def _remat(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    def call(body: Transformed, leaves: list[Any]) -> Any:
        jaxpr, consts = _compat.without_consts(body.jaxpr)
        widened = _compat.widen_remat(params, jaxpr, len(consts) + len(leaves))
        return primitive.bind(*consts, *leaves, *args, **widened)

    return run_once(frame, params["jaxpr"], call)


@rule(
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "xla_metadata_call",
    "scheduling_group",
    "custom_partitioning",
    "compute_on",
    count=once,
)
def _inline(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    (jaxpr,) = _compat.sub_jaxprs(params)
    return interpret(frame, jaxpr, args)


@rule("composite", count=once)
def _composite(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    if frame.handler.in_place:
        name = next(name for name, value in params.items() if _compat.is_jaxpr(value))  # renamed in 0.12
        return primitive.bind(*args, **{**params, name: transformed(frame, params[name], frame.state).jaxpr})
    # The name stands for a function without logs, so the body, which does the same, replaces it.
    return _inline(frame, primitive, params, args)


@rule("custom_vmap_call", count=once)
def _custom_vmap(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    if not frame.handler.in_place:
        # Under an outer vmap the function is mapped like any other: its own rule does not know the logs.
        return _inline(frame, primitive, params, args)

    def rule(*xs: Any, **kwargs: Any) -> Any:
        return run_function(frame.handler, params["rule"], xs, kwargs, whole=False)[0]

    return primitive.bind(*args, **dict(params, call=transformed(frame, params["call"], frame.state).jaxpr, rule=rule))


@rule("remat_opt", count=once)
def _remat_opt(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    """The forward rule of a custom_vjp with `optimize_remat`, which JAX replaces by the function itself if it can."""
    if not frame.handler.in_place:
        # The events are those of the rule, even if JAX would replace it.
        return _inline(frame, primitive, params, args)
    inside = frame.block(())

    def without_logs() -> tuple[Any, list[Any]]:
        inside.eqn_scope = inside.scope
        original = _compat.close_jaxpr(*params["fun_jaxpr_thunk"]())
        return _compat.split_jaxpr(transformed(inside, original, ()).jaxpr)

    jaxpr, consts = _compat.without_consts(transformed(frame, params["fwd_jaxpr"], frame.state).jaxpr)
    changed = dict(
        fwd_jaxpr=_compat.close_jaxpr(jaxpr),
        num_consts=len(consts) + params["num_consts"],
        fun_jaxpr_thunk=functools.cache(without_logs),
    )
    return primitive.bind(*consts, *args, **dict(params, **changed))


# --- loops ---------------------------------------------------------------------------------------


def _count_iterations(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    n = params["length"]
    # Also without iterations, a body with a loop of unknown length is not one whose events can be stacked.
    return {k: Tally(t.count if t.count == math.inf else t.count * n, t.exact, True) for k, t in inside[0].items()}


@rule("scan", count=_count_iterations)
def _scan(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    n_consts, n_carry = _compat.scan_split(params)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
    options, jaxpr = _compat.scan_options(params), params["jaxpr"]
    length = options["length"]
    weak = [_compat.is_weak(aval) for aval in _compat.out_avals(jaxpr)]
    # What is logged is not weak. Instead of many values, the carry that they come from is converted, and back.
    pays = 0 < 2 * sum(weak) <= _weak_operands(jaxpr)
    through_strong = pays and not any(weak[n_carry:]) and not frame.handler.in_place

    def iterate(frame: Frame, init: list[Any], xs: list[Any], length: int) -> list[Any]:
        def step(inner: Frame, c: list[Any], x: list[Any]) -> list[Any]:
            if not through_strong:
                return interpret(inner, jaxpr, [*consts, *c, *x])
            outs = interpret(inner, jaxpr, [*consts, *map(strong, c), *x])
            return [_compat.with_strength(x, w) if w else x for x, w in zip(outs, weak, strict=True)]

        foresee(frame, [jaxpr])
        return _loop(frame, step, init, xs, {**options, "length": length})

    blocks = frame.handler.split(frame, [jaxpr], length)
    if blocks is None:
        return iterate(frame, init, xs, length)

    def block(frame: Frame, init: list[Any], xs: list[Any], length: int, room_for: int | None = None) -> list[Any]:
        return blocks.run(frame, True, lambda inner: iterate(inner, init, xs, length), room_for)

    def part(frame: Frame, init: list[Any], xs: list[Any], length: int) -> list[Any]:
        """Run so few iterations that all their events fit."""
        blocks.flush(frame, room_for=length)
        return block(frame, init, xs, length, room_for=0)

    count, rest = divmod(length, blocks.iterations)
    if not count or length == blocks.iterations:
        return part(frame, init, xs, length)
    blocks.flush(frame)

    def step(inner: Frame, c: list[Any], x: list[Any]) -> list[Any]:
        return block(inner, c, x, blocks.iterations)

    # The remaining iterations run last: at the end of `xs`, or at its beginning if the loop is reversed.
    cut = rest if options["reverse"] else length - rest
    parts = [[x[:cut] for x in xs], [x[cut:] for x in xs]]
    main, left = parts[::-1] if options["reverse"] else parts
    main = [x.reshape(count, blocks.iterations, *x.shape[1:]) for x in main]
    outs = _loop(frame, step, init, main, {**options, "length": count, "unroll": 1})
    carry, ys = outs[:n_carry], [y.reshape(length - rest, *y.shape[2:]) for y in outs[n_carry:]]
    if rest:
        outs = part(frame, carry, left, rest)
        carry, halves = outs[:n_carry], zip(ys, outs[n_carry:], strict=True)
        ys = [jnp.concatenate(pair[::-1] if options["reverse"] else pair) for pair in halves]
    return [*carry, *ys]


def _weak_operands(jaxpr: Any) -> int:
    """How many operands of the logs in a jaxpr, but not further inside, are weak."""
    logs = [eqn for eqn in _compat.split_jaxpr(jaxpr)[0].eqns if eqn.primitive is log_p]
    return sum(_compat.is_weak(v.aval) for log in logs for v in log.invars)


def _loop(frame: Frame, step: Callable[..., list[Any]], init: list[Any], xs: list[Any], options: Any) -> list[Any]:
    """Scan with `step(frame, carry, x)`."""
    n_carry = len(init)

    def attempt(state: Any) -> list[Any]:
        state = _compat.on_mesh_of([*init, *xs], state)
        keys: dict[str, bool] = {}
        box: list[Any] = []

        def body(carry: Any, x: Any) -> Any:
            state, c = carry
            inner = frame.block(state)
            with _compat.given_up_by(Retrace):
                outs = step(inner, c, x)
                frame.require_type(inner, state)
            keys.update(inner.keys)
            # Events have steps and values in common, which are stacked once.
            leaves, tree = jax.tree.flatten(inner.piece())
            distinct = {id(x): x for x in leaves}
            number = {known: n for n, known in enumerate(distinct)}
            box[:] = [tree, [number[id(x)] for x in leaves]]
            return (inner.state, outs[:n_carry]), (outs[n_carry:], [*distinct.values()])

        (state, carry), (ys, distinct) = lax.scan(body, (state, init), xs, **options)
        piece = jax.tree.unflatten(box[0], [distinct[n] for n in box[1]])
        if not options["length"]:
            keys = dict.fromkeys(keys, False)
        frame.absorb(state, frame.handler.unroll(piece, options["reverse"]), keys)
        return [*carry, *ys]

    return frame.settle(attempt)


@rule("while")
def _while(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    if not any(wants_any(frame.handler, params[name], frame.eqn_scope) for name in ("cond_jaxpr", "body_jaxpr")):
        if not frame.handler.in_place:
            frame = Frame(Drop(), (), scope=frame.eqn_scope)
        return _same_while(frame, primitive, params, args)
    if frame.handler.masks_lanes:
        params, args = _masking.masked_loop(params, args)
    if frame.handler.in_place:
        return _same_while(frame, primitive, params, args)
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    decision = _compat.out_avals(cond_jaxpr)[0]
    cond_logs = _compat.has_logs(cond_jaxpr)
    # A loop with a batched condition runs as long as any lane does; the others keep their values. `_batching.py` has
    # masked the events of finished lanes, and left no log in such a condition.
    batched = bool(decision.shape)
    evaluate = _compat.jaxpr_as_fun(cond_jaxpr)

    def test(inner: Frame, c: list[Any]) -> Any:
        (pred,) = interpret(inner, cond_jaxpr, [*cond_consts, *c])
        return jnp.any(pred) if batched else pred

    def step(inner: Frame, c: list[Any], pred: Any) -> tuple[list[Any], Any]:
        new = interpret(inner, body_jaxpr, [*body_consts, *c])
        c = _where(evaluate(*cond_consts, *c)[0], new, c) if batched else new
        return c, test(inner, c) if cond_logs else None

    def iterate(frame: Frame, step: Any, c: list[Any], pred: Any, limit: int | None = None) -> tuple[list[Any], Any]:
        """Loop while the condition holds, up to `limit` times. The result of a condition that logs is carried."""

        def attempt(state: Any) -> tuple[list[Any], Any]:
            state = _compat.on_mesh_of(args, state)
            keys: dict[str, bool] = {}

            def go_on(carry: Any) -> Any:
                state, c, pred, n = carry
                pred = pred if cond_logs else test(frame.block(state), c)
                return pred if limit is None else pred & (n < limit)

            def body(carry: Any) -> Any:
                state, c, pred, n = carry
                inner = frame.block(state, unbounded=True, decision=decision)
                with _compat.given_up_by(Retrace):
                    c, pred = step(inner, c, pred)
                    frame.require_type(inner, state)
                keys.update(dict.fromkeys(inner.keys, False))
                return inner.state, c, pred, None if n is None else n + 1

            n = None if limit is None else jnp.zeros((), jnp.int32)
            state, carry, pred_out, _ = lax.while_loop(go_on, body, (state, c, pred, n))
            frame.absorb(_decided(frame, decision, [cond_jaxpr, body_jaxpr], state), (), keys)
            return carry, pred_out

        return frame.settle(attempt)

    foresee(frame, [cond_jaxpr, body_jaxpr])
    pred = None
    if cond_logs:
        # The first evaluation. The others come after every iteration, where their events belong.
        first = frame.block(frame.state, unbounded=True)
        pred = test(first, init)
        frame.absorb(first.state, (), first.keys)
    blocks = frame.handler.split(frame, [cond_jaxpr, body_jaxpr])
    if blocks is None:
        return iterate(frame, step, init, pred)[0]

    def block(frame: Frame, c: list[Any], pred: Any) -> tuple[list[Any], Any]:
        return blocks.run(frame, False, lambda inner: iterate(inner, step, c, pred, blocks.iterations))

    blocks.flush(frame)
    return iterate(frame, block, init, pred)[0]


def _same_while(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    """The same loop with transformed jaxprs, without constants that only removed logs needed."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    changed, consts = {}, []
    for name, count in (("cond", n_cond), ("body", n_body)):
        jaxpr, used = _compat.without_unused(transformed(frame, params[f"{name}_jaxpr"], ()).jaxpr, count)
        kept = [x for x, u in zip(args[:count], used, strict=True) if u]
        changed[f"{name}_jaxpr"], changed[f"{name}_nconsts"] = jaxpr, len(kept)
        consts, args = [*consts, *kept], args[count:]
    if _compat.out_avals(changed["cond_jaxpr"])[0].shape:  # `lax.while_loop` does not take a batched condition
        return primitive.bind(*consts, *args, **dict(params, **changed))
    test, step = (_compat.jaxpr_as_fun(changed[f"{name}_jaxpr"]) for name in ("cond", "body"))
    count = changed["cond_nconsts"]
    # By the public function, which finds new loop invariants.
    return lax.while_loop(lambda c: test(*consts[:count], *c)[0], lambda c: step(*consts[count:], *c), list(args))


def _where(lanes: Any, new: list[Any], old: list[Any]) -> list[Any]:
    return [
        jnp.where(lanes.reshape(lanes.shape + (1,) * (a.ndim - lanes.ndim)), a, b)
        for a, b in zip(new, old, strict=True)
    ]


def _varying_like(decision: Any, tree: Any) -> Any:
    """Let results vary over the devices of a shard_map that decide separately, even if no operand varies."""
    axes = _compat.varying_axes(decision)
    return map_laned(lambda x, _: x.map(lambda a: _compat.vary_over(a, axes)), tree) if axes else tree


def _decided(frame: Frame, decision: Any, jaxprs: Sequence[Any], state: Any) -> Any:
    """`_varying_like` for the part of the state that belongs to the logs of these jaxprs."""
    inside, rejoin = frame.handler.split_state(state, set().union(*[logged_keys(frame, jaxpr) for jaxpr in jaxprs]))
    return rejoin(_varying_like(decision, inside))


# --- branches ------------------------------------------------------------------------------------


def _masked_cond(params: dict[str, Any], args: list[Any], place: Place) -> tuple[dict[str, Any], list[Any]]:
    """A cond that takes a branch for all lanes of an Equinox loop together, but logs only in lanes that still run.

    The surrounding jaxpr shows where its index comes from.
    """
    lane_index = _masking.lane_condition(place.jaxpr, place.eqn.invars[0])
    if lane_index is None:
        return params, args
    branches = _masking.masked_branches(params["branches"], args[0])
    return dict(params, branches=branches), [args[0], lane_index(*place.args), *args[1:]]


def _count_branches(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    alike, merged = len(inside) == len(params["branches"]), {}
    for key in dict.fromkeys(key for tallies in inside for key in tallies):
        tallies = [t.get(key, Tally()) for t in inside]
        exact = alike and all(t.exact and t.count == tallies[0].count for t in tallies)
        merged[key] = Tally(max(t.count for t in tallies), exact, any(t.looped for t in tallies))
    return merged


@rule("cond", count=_count_branches)
def _cond(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    if frame.handler.masks_lanes and frame.place is not None:
        params, args = _masked_cond(params, args, frame.place)
    index, *operands = args
    foresee(frame, params["branches"])

    def attempt(state: Any) -> list[Any]:
        state = _compat.on_mesh_of(args, state)
        bodies = [transformed(frame, branch, state, decision=_compat.aval_of(index)) for branch in params["branches"]]
        jaxprs, first = [b.jaxpr for b in bodies], bodies[0]
        leaves, types = jax.tree.leaves(state), _compat.in_avals(first.jaxpr)
        treedef = None
        unify = frame.handler.unify([b.piece for b in bodies])
        if unify is not None:
            box: list[Any] = []

            def padded(body: Transformed, fit: Any) -> Callable[..., list[Any]]:
                def branch(*xs: Any) -> list[Any]:
                    outs, state, piece = body.unpack(_compat.jaxpr_as_fun(body.jaxpr)(*xs))
                    flat, tree = jax.tree.flatten(fit(piece))
                    box.append(tree)
                    return [*outs, *jax.tree.leaves(state), *flat]

                return branch

            jaxprs = [_compat.make_jaxpr(padded(b, fit), types) for b, fit in zip(bodies, unify, strict=True)]
            treedef = box[0]
        jaxprs = _compat.with_common_types(jaxprs, types)
        flat = primitive.bind(index, *leaves, *operands, **dict(params, branches=tuple(jaxprs)))
        outs, state, piece = first.unpack(flat, treedef)
        keys = {k: all(b.keys.get(k, False) for b in bodies) for b in bodies for k in b.keys}
        decision = jax.typeof(index)
        piece = _varying_like(decision, _compat.on_mesh_of(args, piece))
        frame.absorb(_decided(frame, decision, params["branches"], state), piece, keys)
        if not frame.handler.in_place:
            return outs
        # As JAX does for branches without logs: a result that all branches just pass on does not need the cond.
        passed = _compat.passed_on(jaxprs)
        return [out if n is None else operands[n] for out, n in zip(outs, passed, strict=True)]

    return frame.settle(attempt)


def silenced(handler: Handler, fun: Callable[..., Any], *args: Any) -> Any:
    """Call a derivative rule without its events: only the primal of a function has events."""
    return run_function(handler.for_rules(), fun, args, {}, whole=False)[0]


def logged_keys(frame: Frame, jaxpr: Any) -> set[str]:
    return set(tally(jaxpr, frame.eqn_scope, lambda meta, scope: [scope + key for key in meta.keys]))


# --- several devices -----------------------------------------------------------------------------


@rule("shard_map", count=once)
def _shard_map(frame: Frame, primitive: Any, params: dict[str, Any], args: list[Any]) -> list[Any]:
    """Give values that vary over devices a device axis, as the outermost lane, when they leave the shard_map."""
    jaxpr, mesh, check = params["jaxpr"], params["mesh"], params["check_vma"]
    manual = _compat.manual_axes(params)
    sharded = functools.partial(jax.shard_map, mesh=mesh, axis_names=manual, check_vma=check)

    def varying(laned: Laned) -> tuple[str, ...]:
        axes = [_compat.varying_axes(_compat.aval_of(x)) if check else manual for x in jax.tree.leaves(laned.tree)]
        return tuple(a for a in mesh.axis_names if a in manual and a in frozenset().union(*axes))

    def leave(laned: Laned, lead: int) -> Laned:
        names = varying(laned)
        tree = jax.tree.map(lambda x: jnp.expand_dims(x, lead), laned.tree) if names else laned.tree
        return Laned(tree, (names, *laned.flags))

    def enter(laned: Laned, lead: int) -> Laned:
        names, *flags = laned.flags
        tree = jax.tree.map(lambda x: jnp.squeeze(x, lead), laned.tree) if names else laned.tree
        return Laned(tree, tuple(flags))

    def spec(laned: Laned, lead: int) -> Laned:
        names = laned.flags[0]
        return laned.map(lambda _: PartitionSpec(*[None] * lead, names) if names else PartitionSpec())

    def everywhere(_: Any) -> PartitionSpec:
        return PartitionSpec()

    def outside(laned: Laned, lead: int) -> Laned:
        """The type of a value outside of the shard_map."""
        names, size = varying(laned), int(np.prod([mesh.shape[n] for n in varying(laned)]))

        def aval(a: Any) -> Any:
            axes = [*_compat.explicit_axes(a)] or [None] * len(a.shape)
            shape = a.shape
            if names:
                explicit = _compat.explicit_over(mesh, names)
                shape = (*shape[:lead], size, *shape[lead:])
                axes.insert(lead, explicit and explicit.names)
            return _compat.array_type(shape, a.dtype, _compat.abstract_sharding(mesh, axes))

        return Laned(jax.tree.map(aval, laned.tree), (names, *laned.flags))

    def sharded_on_entry(laned: Laned, lead: int) -> Laned:
        """Shard a value as the devices take it."""
        names = laned.flags[0]
        sharding = _compat.explicit_over(mesh, names) if names else None
        return laned if sharding is None else laned.map(lambda x: _compat.shard_axes(x, {lead: sharding}))

    def attempt(state: Any) -> list[Any]:
        inside, rejoin = frame.handler.split_state(state, logged_keys(frame, jaxpr))
        inside = map_laned(sharded_on_entry, map_laned(_with_device_flag, inside))
        box: dict[str, Any] = {}

        def body(given: Any, *xs: Any) -> Any:
            given = map_laned(enter, given)
            inner = frame.block(given)
            # Unless JAX checks what varies, types do not show it, not even for the axes of outer shard_maps.
            inner.alike = inner.alike | manual if check else frozenset()
            inner.devices = (*frame.devices, tuple(a for a in mesh.axis_names if a in manual))
            with _compat.given_up_by(Retrace):
                outs = interpret(inner, jaxpr, xs)
                try:
                    frame.require_type(inner, given)
                except Grown as grown:
                    raise Grown(frame, types_of(rejoin(map_laned(outside, grown.struct)))) from None
            state, piece = map_laned(leave, (inner.state, inner.piece()))
            left = state, jax.tree.map(Bundle.even, piece, is_leaf=lambda x: isinstance(x, Bundle))
            box.update(keys=inner.keys, specs=map_laned(spec, left, everywhere))
            return outs, left

        in_specs = (map_laned(spec, inside, everywhere), *params["in_specs"])
        outs_specs = list(params["out_specs"])
        # Only tracing the body shows which results vary.
        probe = sharded(lambda *xs: body(*xs)[0], in_specs=in_specs, out_specs=outs_specs)
        jax.eval_shape(probe, inside, *args)
        with rebuilding():
            rebuilt = sharded(body, in_specs=in_specs, out_specs=(outs_specs, box["specs"]))
            outs, (inside, piece) = rebuilt(inside, *args)
        frame.absorb(rejoin(inside), piece, box["keys"])
        return outs

    return frame.settle(attempt)


def _with_device_flag(laned: Laned, lead: int) -> Laned:
    del lead
    if laned.flags and isinstance(laned.flags[0], tuple):
        return laned
    return Laned(laned.tree, ((), *laned.flags))
