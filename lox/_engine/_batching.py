"""vmap of branches and of while loops that log.

When lanes disagree, JAX runs both branches of a `cond` for all lanes, and a `while` until the last lane is done. It
selects the values, but logs would also fire in lanes that never took the branch or had already finished. The rules here
replace JAX's where something logs.

* `cond`: the events of the branches become results, which JAX selects like any others; the merged events are logged
  after the branches. If all branches log the same, all lanes are valid; otherwise `valid` depends on the lane.
* `while`: the body evaluates the condition to see which lanes are still running, and masks every log with it.

Host calls that a `tap` or a logger inside the vmap has made are treated in the same way.
"""

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lox import _compat
from lox._data import _arrays
from lox._data._bundle import Site
from lox._engine import _masking
from lox._engine._event import Event, Meta
from lox._engine._handler import Frame, Handler, Retrace, types_of
from lox._engine._interpret import Transformed, transformed
from lox._engine._primitive import bind
from lox._engine._trace import without_unwanted
from lox._record import struct

# --- recording events to log them later ----------------------------------------------------------


_STRUCTURE: Any = {"static": True}  # not arrays


@jax.tree_util.register_dataclass
@struct
class Slot:
    """A recorded event."""

    operands: list[Any]
    meta: Meta = dataclasses.field(metadata=_STRUCTURE)

    @classmethod
    def of(cls, event: Event) -> "Slot":
        """Record an event. Slots are compared without the lines that logged them."""
        operands, meta = event.to_operands()
        return cls(operands, dataclasses.replace(meta, site=Site(meta.site)))

    def only_if(self, condition: Any) -> "Slot":
        """The same event under a further condition."""
        return Slot.of(Event.from_operands(self.meta, self.operands).only_if(condition))


@jax.tree_util.register_dataclass
@struct
class Repeat:
    """The recorded events of a loop: every array inside has an additional leading axis."""

    body: list[Any]
    length: int = dataclasses.field(metadata=_STRUCTURE)
    reverse: bool = dataclasses.field(metadata=_STRUCTURE)

    def only_if(self, condition: Any) -> "Repeat":
        """The same events under a further condition."""
        body = jax.vmap(lambda body: [x.only_if(condition) for x in body])(self.body)
        return Repeat(body, self.length, self.reverse)


class _Unbounded(Retrace):
    """Control flow: the events of a loop of unknown length cannot be recorded."""


class Record(Handler):
    """Collects events in the order of execution."""

    def event(self, frame: Frame, event: Event) -> None:
        """Record it."""
        if frame.unbounded:
            raise _Unbounded
        frame.pieces.append([Slot.of(event.in_scope())])

    def gather(self, pieces: list[Any]) -> list[Any]:
        """Join the lists."""
        return [slot for piece in pieces for slot in piece]

    def unroll(self, piece: list[Any], reverse: bool) -> list[Any]:
        """Make a loop of them."""
        leaves = jax.tree.leaves(piece)
        return [Repeat(piece, leaves[0].shape[0], reverse)] if leaves else []

    def unify(self, pieces: list[Any]) -> Any:
        """Align the events of the branches."""
        return _align(pieces)


def replay(slots: list[Any]) -> None:
    """Log recorded events."""
    for slot in slots:
        if isinstance(slot, Slot):
            bind(Event.from_operands(slot.meta, slot.operands))
        else:
            lax.scan(lambda _, body: (replay(body), None), None, slot.body, reverse=slot.reverse)


def _signature(slot: Any) -> Any:
    leaves, treedef = jax.tree.flatten(slot)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def _align(branches: list[list[Any]]) -> list[Any] | None:
    """For each branch, a function that gives its events the common form; None if all have it already."""
    signatures = [[_signature(slot) for slot in slots] for slots in branches]
    if all(s == signatures[0] for s in signatures[1:]):
        return None
    # The merged sequence: a model of each slot, and its place in each branch that has it.
    merged: list[tuple[Any, dict[int, int]]] = []
    for number, slots in enumerate(branches):
        before = [_signature(model) for model, _ in merged]
        matches = difflib.SequenceMatcher(None, before, signatures[number], autojunk=False).get_matching_blocks()
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
                slot = slot.only_if(jnp.asarray(number in places))
            fitted.append(slot)
        return fitted

    return [functools.partial(fit, number) for number in range(len(branches))]


# --- the rules -----------------------------------------------------------------------------------


def _vmap(axis_data: Any, fun: Any, args: Any, dims: Any, like: Any) -> Any:
    """Map `fun(*args)` over the axis that is being batched, even if no argument has it.

    `like` is an array that has the axis, and the axis: the new lanes are sharded like it.
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
    """A batching rule that compiles its operations into one program."""

    def compiled(args: Any, dims: Any, **params: Any) -> Any:
        box: list[Any] = []

        def batch(*args: Any) -> Any:
            outs, out_dims = rule(args, dims, **params)
            box.append(out_dims)
            return outs

        return jax.jit(batch)(*args), box[0]

    return compiled


def _depending_on(index: Any, x: Any) -> Any:
    """Make `x` depend on the index of a branch, which is not negative, without changing its value."""
    if _arrays.is_prng_key(x.dtype):
        return lax.select(index >= 0, x, x)
    # Not a sum, which turns -0.0 into 0.0.
    return x | (index < 0) if x.dtype == bool else x - (index * 0).astype(x.dtype)


def _lacks_mesh(x: Any, dim: Any) -> bool:
    """Whether an operand is the same for all lanes and has no mesh, so that JAX cannot copy it to each lane."""
    return dim is None and _compat.aval_of(x).sharding.mesh.empty


def _select_branch(axis_data: Any, args: Any, dims: Any, *, branches: Any) -> Any:
    """Batch like JAX's rule for lanes that disagree, but do not copy an operand without a mesh to each lane.

    Over an explicitly sharded axis that rule fails for such an operand. Often it is the number of an iteration that the
    branch only logs: without the log, JAX would not have failed.
    """

    def lane(index: Any, *xs: Any) -> list[Any]:
        def results(number: int, branch: Any) -> list[Any]:
            # As in JAX: a branch that was not taken gets no gradient.
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
    if dims[0] is not None and axis_data.explicit_mesh_axis is not None and any(map(_lacks_mesh, args, dims)):
        rule = functools.partial(_select_branch, axis_data)
    branches = tuple(without_unwanted(branches))
    calls = any(map(_compat.calls_host, branches))
    if dims[0] is None or not (calls or any(map(_compat.has_logs, branches))):
        return rule(args, dims, branches=branches)
    types = _compat.in_avals(branches[0])
    try:
        if calls:  # of a tap or a logger inside the vmap, which cannot wait until the branches are merged
            raise _Unbounded
        bodies = [Transformed(Record(), branch, (), False, "") for branch in branches]
    except _Unbounded:
        return rule((args[0], *args), (dims[0], *dims), branches=_masking.masked_branches(branches, args[0]))
    fits = _align([b.piece for b in bodies]) or [lambda slots: slots] * len(bodies)
    box: list[Any] = []

    def recorded(body: Transformed, fit: Any) -> Any:
        def branch(index: Any, *xs: Any) -> list[Any]:
            outs, _, slots = body.unpack(_compat.jaxpr_as_fun(body.jaxpr)(*xs))
            flat, tree = jax.tree.flatten(fit(slots))
            box.append(tree)
            if axis_data.explicit_mesh_axis is not None:
                # JAX does not shard values that do not depend on the lane, and then cannot select them.
                flat = [_depending_on(index, x) for x in flat]
            return [*outs, *flat]

        return _compat.make_jaxpr(branch, [_compat.scalar_type(jnp.int32, args[0]), *types])

    silent = tuple(map(recorded, bodies, fits))
    if jax.sharding.get_abstract_mesh().empty and any(_compat.explicit_sharding(_compat.aval_of(x)) for x in args):
        # Outside of jit, JAX does not know the devices of the zeros that a branch makes for a missing event.
        rule = _compiled(rule)
    outs, out_dims = rule((args[0], *args), (dims[0], *dims), branches=silent)
    count = bodies[0].outs
    log = lambda *flat: replay(jax.tree.unflatten(box[0], flat))  # noqa: E731
    _vmap(axis_data, log, outs[count:], out_dims[count:], (args[0], dims[0]))
    return outs[:count], out_dims[:count]


def _while_rule(original: Any, axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
    rule = functools.partial(original, axis_data)
    cond_jaxpr, body_jaxpr = without_unwanted([params["cond_jaxpr"], params["body_jaxpr"]])
    loop = dict(params, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr)
    masked = bool(_compat.out_avals(cond_jaxpr)[0].shape)  # by an inner vmap
    if masked or not any(map(_compat.reports, (cond_jaxpr, body_jaxpr))):
        return rule(args, dims, **loop)
    masked_loop, masked_args, masked_dims = _masking.masked_loop(loop, args, dims)
    if masked_loop is not loop:  # one of Equinox's, which runs for all lanes together
        return rule(masked_args, masked_dims, **masked_loop)
    trial = _compat.make_jaxpr(lambda *xs: rule(xs, dims, **loop)[0], types_of(list(args)))
    batched = next(eqn for eqn in trial.eqns if eqn.primitive is lax.while_p)
    if not _compat.out_avals(batched.params["cond_jaxpr"])[0].shape:
        return rule(args, dims, **loop)  # all lanes make the same number of iterations

    # Finished lanes keep their values, so the condition still tells which they are. In the body only logs use it:
    # without them it would be the original loop.
    n_cond, n_consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, cond_reports = args[:n_cond], _compat.reports(cond_jaxpr)
    silent = transformed(Frame(_masking.Silence(), ()), cond_jaxpr, ()).jaxpr if cond_reports else cond_jaxpr

    def body(*xs: Any) -> list[Any]:
        cond_consts, body_consts, carry = xs[:n_cond], xs[n_cond:n_consts], xs[n_consts:]
        (running,) = _compat.jaxpr_as_fun(silent)(*cond_consts, *carry)
        carry = _masking.masked_call(body_jaxpr, running, [*body_consts, *carry])
        if cond_reports:
            _masking.masked_call(cond_jaxpr, running, [*cond_consts, *carry])
        return carry

    if cond_reports:  # the first evaluation
        given, given_dims = (*cond_consts, *args[n_consts:]), (*dims[:n_cond], *dims[n_consts:])
        like = next((x, d) for x, d in zip(args, dims, strict=True) if d is not None)
        _vmap(axis_data, _compat.jaxpr_as_fun(cond_jaxpr), given, given_dims, like)
    return rule(
        (*cond_consts, *args),
        (*dims[:n_cond], *dims),
        cond_nconsts=n_cond,
        cond_jaxpr=silent,
        body_nconsts=n_consts,
        body_jaxpr=_compat.make_jaxpr(body, [*_compat.in_avals(cond_jaxpr)[:n_cond], *_compat.in_avals(body_jaxpr)]),
    )


def _scan_rule(original: Any, axis_data: Any, args: Any, dims: Any, *, jaxpr: Any, **params: Any) -> Any:
    (jaxpr,) = without_unwanted([jaxpr])
    if _compat.reports(jaxpr) and _masking.mentions_any_lane(jaxpr):
        jaxpr = transformed(Frame(_masking.Rebind(), ()), jaxpr, ()).jaxpr
    return original(axis_data, args, dims, jaxpr=jaxpr, **params)


def install() -> None:
    """Replace JAX's rules."""
    _compat.batch_by(lax.scan_p, _scan_rule)
    _compat.batch_by(lax.cond_p, _cond_rule)
    _compat.batch_by(lax.while_p, _while_rule)
