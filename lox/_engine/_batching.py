"""vmap of branches and of while loops that log.

When lanes disagree, JAX runs both branches of a `cond` for all lanes, and a `while` until the last lane is done. Values
are then selected; logs would all fire, in lanes that never took the branch or had already finished. These rules stand
before JAX's own, and only where something logs.

* `cond`: the events of the branches become results, which JAX selects like any other; the merged events are then
  logged after it. Branches that log alike stay rectangular, the others get a mask for each lane.
* `while`: the body asks the condition which lanes are still running, and every log inside is masked with it.

The same holds for calls of the host, which a `tap` or a logger inside the vmap has put there.
"""

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from lox import _compat
from lox._data import _arrays
from lox._data._series import Site
from lox._engine import _masking
from lox._engine._event import Event, Meta
from lox._engine._interpret import Frame, Handler, Retrace, Transformed, transformed, types_of, without_unwanted
from lox._engine._primitive import bind

# --- recording events, to log them later ---------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Slot:
    """One event."""

    operands: list[Any]
    meta: Meta

    def tree_flatten(self) -> tuple[Any, Any]:
        """Where it was logged is no reason for two slots to differ."""
        return (self.operands,), dataclasses.replace(self.meta, site=Site(self.meta.site))

    @classmethod
    def tree_unflatten(cls, meta: Meta, children: Any) -> "Slot":
        """The inverse of `tree_flatten`."""
        return cls(children[0], meta)

    def masked(self, mask: Any) -> "Slot":
        """The same event, under a condition more."""
        operands, meta = Event.from_operands(self.meta, self.operands).masked(mask).to_operands()
        return Slot(operands, meta)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Repeat:
    """The events of a loop: every array below has one more leading axis."""

    body: list[Any]
    length: int
    reverse: bool

    def tree_flatten(self) -> tuple[Any, Any]:
        """Arrays are children; the rest is structure."""
        return (self.body,), (self.length, self.reverse)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Repeat":
        """The inverse of `tree_flatten`."""
        return cls(children[0], *aux)

    def masked(self, mask: Any) -> "Repeat":
        """The same events, under a condition more."""
        body = jax.vmap(lambda body: [x.masked(mask) for x in body])(self.body)
        return Repeat(body, self.length, self.reverse)


class _Unbounded(Retrace):
    """There is a loop of unknown length, whose events cannot be recorded."""


class Record(Handler):
    """Collects events in the order of execution."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Record

    def __hash__(self) -> int:
        return hash(Record)

    def event(self, frame: Frame, event: Event) -> None:
        """Keep it for later."""
        if frame.unbounded:
            raise _Unbounded
        frame.pieces.append([Slot(*event.in_scope().to_operands())])

    def gather(self, pieces: list[Any]) -> list[Any]:
        """One list."""
        return [slot for piece in pieces for slot in piece]

    def unroll(self, piece: list[Any], reverse: bool) -> list[Any]:
        """A loop of them."""
        leaves = jax.tree.leaves(piece)
        return [Repeat(piece, leaves[0].shape[0], reverse)] if leaves else []

    def unify(self, pieces: list[Any]) -> Any:
        """Align the events of the branches."""
        return _align(pieces)


def replay(slots: list[Any]) -> None:
    """Log what was recorded."""
    for slot in slots:
        if isinstance(slot, Slot):
            bind(Event.from_operands(slot.meta, slot.operands))
        else:
            lax.scan(lambda _, body: (replay(body), None), None, slot.body, reverse=slot.reverse)


def _signature(slot: Any) -> Any:
    leaves, treedef = jax.tree.flatten(slot)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def _align(branches: list[list[Any]]) -> list[Any] | None:
    """For each branch a function that gives its events the common form; None if they have it already."""
    signatures = [[_signature(slot) for slot in slots] for slots in branches]
    if all(s == signatures[0] for s in signatures[1:]):
        return None
    # The merged sequence: what each slot looks like, and the place it has in each branch.
    merged: list[tuple[Any, dict[int, int]]] = []
    for number, slots in enumerate(branches):
        theirs = [_signature(model) for model, _ in merged]
        matches = difflib.SequenceMatcher(None, theirs, signatures[number], autojunk=False).get_matching_blocks()
        result, i, j = [], 0, 0
        for match in matches:
            result += merged[i : match.a]
            result += [(slots[k], {number: k}) for k in range(j, match.b)]
            for k in range(match.size):
                model, places = merged[match.a + k]
                result.append((model, {**places, number: match.b + k}))
            i, j = match.a + match.size, match.b + match.size
        merged = result

    def fit(number: int, slots: list[Any]) -> list[Any]:
        fitted = []
        for model, places in merged:
            slot = slots[places[number]] if number in places else jax.tree.map(_compat.zeros_of, model)
            if len(places) < len(branches):
                slot = slot.masked(jnp.asarray(number in places))
            fitted.append(slot)
        return fitted

    return [functools.partial(fit, number) for number in range(len(branches))]


# --- the rules -----------------------------------------------------------------------------------


def _vmap(axis_data: Any, fun: Any, args: Any, dims: Any, like: Any) -> Any:
    """`fun(*args)` mapped over the axis that is being batched; it counts as mapped even if no argument is.

    `like` is an array that has the axis and its dimension: all that is mapped has to be sharded like it.
    """
    mapped = jax.vmap(
        lambda _, *args: fun(*args),
        in_axes=(0, *dims),
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )
    with _compat.own_transfers():
        lanes = _compat.zeros_along(*like)
    return mapped(lanes, *args)


def _compiled(rule: Any) -> Any:
    """A batching rule that makes one program of what it does."""

    def compiled(args: Any, dims: Any, **params: Any) -> Any:
        box: list[Any] = []

        def batch(*args: Any) -> Any:
            outs, out_dims = rule(args, dims, **params)
            box.append(out_dims)
            return outs

        return jax.jit(batch)(*args), box[0]

    return compiled


def _depending_on(index: Any, x: Any) -> Any:
    """`x`, such that JAX cannot know that it does not depend on the index of a branch, which is not negative."""
    if _arrays.is_prng_key(x.dtype):
        return lax.select(index >= 0, x, x)
    # Not a sum, which makes 0.0 of -0.0.
    return x | (index < 0) if x.dtype == bool else x - (index * 0).astype(x.dtype)


def _knows_no_mesh(x: Any, dim: Any) -> bool:
    """If it is the same for all lanes, and JAX could not give each of them its copy."""
    return dim is None and _compat.aval_of(x).sharding.mesh.empty


def _select_branch(axis_data: Any, args: Any, dims: Any, *, branches: Any) -> Any:
    """As JAX's own rule for lanes that disagree, but what knows no mesh is not given to each lane.

    Over an explicitly sharded axis that rule fails for such an operand. Often it is the number of an iteration and all
    that the branch does with it is to log it: without logs, JAX would not have met it.
    """

    def lane(index: Any, *xs: Any) -> list[Any]:
        def results(number: int, branch: Any) -> list[Any]:
            # As in JAX: no gradient goes where the branch was not taken.
            taken = [
                lax.select(index == number, x, lax.stop_gradient(x)) if gradient or dim is not None else x
                for x, dim, gradient in zip(xs, dims[1:], differentiable, strict=True)
            ]
            return [_depending_on(index, _arrays.as_array(out)) for out in _compat.jaxpr_as_fun(branch)(*taken)]

        differentiable = [jnp.issubdtype(x.dtype, jnp.inexact) for x in xs]
        xs = tuple(_depending_on(index, x) if d else x for x, d in zip(xs, differentiable, strict=True))
        cases = [results(number, branch) for number, branch in enumerate(branches)]
        return [lax.select_n(index, *outs) for outs in zip(*cases, strict=True)]

    outs = _vmap(axis_data, lane, args, dims, (args[0], dims[0]))
    return outs, [0] * len(outs)


def _cond_rule(original: Any, axis_data: Any, args: Any, dims: Any, *, branches: Any, **params: Any) -> Any:
    rule = functools.partial(original, axis_data, **params)
    if dims[0] is not None and axis_data.explicit_mesh_axis is not None and any(map(_knows_no_mesh, args, dims)):
        rule = functools.partial(_select_branch, axis_data)
    branches = tuple(without_unwanted(branches))
    calls = any(map(_compat.calls_host, branches))
    if dims[0] is None or not (calls or any(map(_compat.has_logs, branches))):
        return rule(args, dims, branches=branches)
    types = _compat.in_avals(branches[0])
    try:
        if calls:  # of a tap or a logger inside the vmap: they cannot be put off until the branches are merged
            raise _Unbounded
        entries = [Transformed(Record(), branch, (), False, "") for branch in branches]
    except _Unbounded:
        return rule((args[0], *args), (dims[0], *dims), branches=_masking.masked_branches(branches, args[0]))
    fits = _align([e.piece for e in entries]) or [lambda slots: slots] * len(entries)
    box: list[Any] = []

    def recorded(entry: Transformed, fit: Any) -> Any:
        def branch(index: Any, *xs: Any) -> list[Any]:
            outs, _, slots = entry.unpack(_compat.jaxpr_as_fun(entry.jaxpr)(*xs))
            flat, tree = jax.tree.flatten(fit(slots))
            box.append(tree)
            if axis_data.explicit_mesh_axis is not None:
                # JAX forgets to shard what does not depend on the lane, and cannot select it then.
                flat = [_depending_on(index, x) for x in flat]
            return [*outs, *flat]

        return _compat.make_jaxpr(branch, [_compat.scalar_type(jnp.int32, args[0]), *types])

    silent = tuple(recorded(e, fit) for e, fit in zip(entries, fits, strict=True))
    if jax.sharding.get_abstract_mesh().empty and any(_compat.explicit_sharding(_compat.aval_of(x)) for x in args):
        # Outside of jit, JAX does not know the devices of what a branch makes for want of an event.
        rule = _compiled(rule)
    outs, out_dims = rule((args[0], *args), (dims[0], *dims), branches=silent)
    count = entries[0].outs
    log = lambda *flat: replay(jax.tree.unflatten(box[0], flat))  # noqa: E731
    _vmap(axis_data, log, outs[count:], out_dims[count:], (args[0], dims[0]))
    return outs[:count], out_dims[:count]


def _while_rule(
    original: Any,
    axis_data: Any,
    args: Any,
    dims: Any,
    *,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
) -> Any:
    rule = functools.partial(original, axis_data)
    cond_jaxpr, body_jaxpr = without_unwanted([cond_jaxpr, body_jaxpr])
    counts = dict(cond_nconsts=cond_nconsts, body_nconsts=body_nconsts)
    plain = functools.partial(rule, args, dims, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **counts)
    masked = bool(_compat.out_avals(cond_jaxpr)[0].shape)  # by an inner vmap: then it knows its lanes already
    concerned = any(_compat.has_logs(jaxpr) or _compat.calls_host(jaxpr) for jaxpr in (cond_jaxpr, body_jaxpr))
    if masked or not concerned:
        return plain()
    loop = dict(cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **counts)
    own, own_args, own_dims = _masking.masked_loop(loop, args, dims)
    if own is not loop:  # goes on for all lanes alike, and finished ones keep their values
        return rule(own_args, own_dims, **own)
    trial = _compat.make_jaxpr(
        lambda *xs: rule(xs, dims, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **counts)[0], types_of(list(args))
    )
    loop = next(eqn for eqn in trial.eqns if eqn.primitive is primitives.while_p)
    if not _compat.out_avals(loop.params["cond_jaxpr"])[0].shape:
        return plain()  # all lanes make the same number of iterations

    # Lanes that have finished keep their values, so that the condition still tells which they are. In the body nothing
    # but logs asks it: without them it is the loop that it would have been.
    n_consts = cond_nconsts + body_nconsts
    cond_consts, cond_reports = args[:cond_nconsts], _compat.has_logs(cond_jaxpr) or _compat.calls_host(cond_jaxpr)
    silent = transformed(Frame(_masking.Silence(), ()), cond_jaxpr, ()).jaxpr if cond_reports else cond_jaxpr

    def body(*xs: Any) -> list[Any]:
        cond_consts, body_consts, carry = xs[:cond_nconsts], xs[cond_nconsts:n_consts], xs[n_consts:]
        (running,) = _compat.jaxpr_as_fun(silent)(*cond_consts, *carry)
        carry = _masking.masked_call(body_jaxpr, running, [*body_consts, *carry])
        if cond_reports:
            _masking.masked_call(cond_jaxpr, running, [*cond_consts, *carry])
        return carry

    if cond_reports:  # the first evaluation
        given, given_dims = (*cond_consts, *args[n_consts:]), (*dims[:cond_nconsts], *dims[n_consts:])
        like = next((x, d) for x, d in zip(args, dims, strict=True) if d is not None)
        _vmap(axis_data, _compat.jaxpr_as_fun(cond_jaxpr), given, given_dims, like)
    return rule(
        (*cond_consts, *args),
        (*dims[:cond_nconsts], *dims),
        cond_nconsts=cond_nconsts,
        cond_jaxpr=silent,
        body_nconsts=n_consts,
        body_jaxpr=_compat.make_jaxpr(
            body, [*_compat.in_avals(cond_jaxpr)[:cond_nconsts], *_compat.in_avals(body_jaxpr)]
        ),
    )


def _scan_rule(original: Any, axis_data: Any, args: Any, dims: Any, *, jaxpr: Any, **params: Any) -> Any:
    (jaxpr,) = without_unwanted([jaxpr])
    reports = _compat.has_logs(jaxpr) or _compat.calls_host(jaxpr)
    if reports and _masking.mentions_any_lane(jaxpr):
        jaxpr = transformed(Frame(_masking.Rebind(), ()), jaxpr, ()).jaxpr
    return original(axis_data, args, dims, jaxpr=jaxpr, **params)


def install() -> None:
    """Put the rules in place."""
    _compat.batch_by(primitives.scan_p, _scan_rule)
    _compat.batch_by(primitives.cond_p, _cond_rule)
    _compat.batch_by(primitives.while_p, _while_rule)
