"""The interpreter of jaxprs, and the table of rules.

A jaxpr (the body of a jit, a loop, a branch) is interpreted equation by equation, and a primitive that contains logs is
rebuilt by its rule. Nothing that is read is mutated.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from lox import _compat, _errors
from lox._engine import _emit
from lox._engine._event import Event, Meta
from lox._engine._handler import (
    Frame,
    Grown,
    Handler,
    Packed,
    Place,
    ProgramSource,
    Ran,
    Retrace,
    Tally,
    scope_of,
    signature,
    types_of,
)
from lox._engine._primitive import log_p
from lox._record import record


def interpret(frame: Frame, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr in the current trace, and hand its logs to `frame`."""
    opened, consts = _compat.split_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip([*opened.constvars, *opened.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return _compat.literal_value(var) if isinstance(var, _compat.Literal) else env[var]

    for plain, logs, eqn in _stretches(frame.handler, opened, frame.here()):
        if plain:
            _compat.eval_equations(jaxpr, plain, env)
        frame.passed_on = bool(logs) and frame.handler.passes_on and _compat.stage_logs(jaxpr, logs, env, _as_seen)
        try:
            for log in logs:
                with _compat.equation_context(log):
                    frame.take(log.params["meta"], [read(v) for v in log.invars])
        finally:
            frame.passed_on = False  # also if the user catches what was raised
        frame.complete()
        if eqn is None:
            continue
        values = [read(v) for v in eqn.invars]
        with _compat.equation_context(eqn):
            if eqn.primitive is _emit.emit_p and frame.handler.sees_calls:
                outs = frame.handler.call(frame, eqn.params, values)
            else:
                outs = apply_rule(frame, eqn.primitive, eqn.params, values, eqn.effects, Place(jaxpr, eqn, args))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in opened.outvars]


def _as_seen(log: Any) -> dict[str, Any]:
    return {"meta": log.params["meta"].as_seen}


def _stretches(handler: Handler, jaxpr: Any, scope: str) -> Iterator[tuple[list[Any], list[Any], Any]]:
    """The live equations: some without logs; the logs between them, which nothing depends on; one with logs, or None.

    They are in order, except that logs come after all other equations of their stretch, so that they can be taken
    together. What an equation with effects does may be seen outside, so logs before it are in a stretch before it.
    """
    plain: list[Any] = []
    logs: list[Any] = []
    for eqn in _live_equations(handler, jaxpr, scope):
        called = handler.sees_calls and _compat.emit_effect in eqn.effects
        if eqn.primitive is log_p:
            logs.append(eqn)
        elif called or _compat.eqn_concerns(eqn.primitive, eqn.params, eqn.effects):
            yield plain, logs, eqn
            plain, logs = [], []
        else:
            if eqn.effects and logs:
                yield plain, logs, None
                plain, logs = [], []
            plain.append(eqn)
    yield plain, logs, None


def foresee(frame: Frame, jaxprs: Sequence[Any]) -> None:
    """Give the state the type that reductions in these jaxprs will give it.

    A loop or a branch would else be traced just to find that out. What is not foreseen is found out that way.
    """
    handler = frame.handler
    logs = [(meta, frame.eqn_scope + scope) for jaxpr in jaxprs for meta, scope in metas_in(jaxpr)]
    if not handler.grows(frame, logs):
        return
    number: dict[Any, int] = {}  # of each operand
    types: list[Any] = []

    def operand(var: Any, is_value: bool) -> int:
        # Values matter only by their type. Steps, weights and validity must also be known to be the same ones.
        known = number.setdefault(var.aval if is_value else id(var), len(types))
        if known == len(types):
            types.append(var.aval)
        return known

    def event(log: Any, scope: str) -> tuple[Meta, str, list[int]]:
        meta = log.params["meta"]
        values = sum(treedef.num_leaves for treedef in meta.treedefs)
        return meta, scope, [operand(var, n < values) for n, var in enumerate(log.invars)]

    runs = [[event(*log) for log in run] for jaxpr in jaxprs for run in _runs(handler, jaxpr, frame.eqn_scope)]
    leaves, state_tree = jax.tree.flatten(frame.state)
    box: list[Any] = []

    def flat(*args: Any) -> list[Any]:
        inner = frame.block(jax.tree.unflatten(state_tree, args[: len(leaves)]))
        operands = args[len(leaves) :]
        for run in runs:
            for meta, scope, numbers in run:
                handler.expect(inner, Event.from_operands(meta, [operands[n] for n in numbers], scope))
            inner.complete()
        box.append(types_of(inner.state))
        return []

    _compat.make_jaxpr(flat, [*types_of(leaves), *types])
    with _compat.own_transfers():
        handler.extend(frame, box[0])


def _runs(handler: Handler, jaxpr: Any, scope: str) -> Iterator[list[tuple[Any, str]]]:
    """The logs that are taken together, each with the scopes around it, in the order in which they are traced."""
    for _, logs, eqn in _stretches(handler, _compat.split_jaxpr(jaxpr)[0], scope):
        yield [(log, scope_of(log, scope)) for log in logs]
        # Events that leave a shard_map are not of the type that they have inside.
        if eqn is not None and eqn.primitive.name != "shard_map":
            for inner in executed_jaxprs(eqn.primitive, eqn.params):
                if _compat.has_logs(inner):
                    yield from _runs(handler, inner, scope_of(eqn, scope))


_metas: Any = weakref.WeakKeyDictionary()


def metas_in(jaxpr: Any) -> dict[tuple[Meta, str], None]:
    """The logs in a jaxpr, each with the scopes around it."""
    metas = _metas.get(jaxpr)
    if metas is None:
        metas = _metas[jaxpr] = {}
        for eqn in _compat.split_jaxpr(jaxpr)[0].eqns if _compat.has_logs(jaxpr) else ():
            here = scope_of(eqn, "")
            if eqn.primitive is log_p:
                metas[eqn.params["meta"], here] = None
                continue
            for inner in executed_jaxprs(eqn.primitive, eqn.params):
                metas.update({(meta, here + scope): None for meta, scope in metas_in(inner)})
    return metas


def _live_equations(handler: Handler, jaxpr: Any, scope: str) -> list[Any]:
    """The equations on which the results or an event that the handler wants depend."""
    needed = {v for v in jaxpr.outvars if isinstance(v, _compat.Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not _has_use(handler, eqn, scope):
            continue
        needed.update(v for v in eqn.invars if isinstance(v, _compat.Var))
        live.append(eqn)
    return live[::-1]


def _has_use(handler: Handler, eqn: Any, scope: str) -> bool:
    """Whether an equation matters even if nothing needs its results."""
    scope = scope_of(eqn, scope)
    if eqn.primitive is log_p:
        return handler.wants(eqn.params["meta"], scope)
    if any(effect is not _compat.log_effect for effect in eqn.effects):
        return True
    return any(wants_any(handler, jaxpr, scope) for jaxpr in _compat.sub_jaxprs(eqn.params))


def wants_any(handler: Handler, jaxpr: Any, scope: str) -> bool:
    """Whether the handler may use an event in the jaxpr."""
    return _compat.has_logs(jaxpr) and any(_has_use(handler, eqn, scope) for eqn in _compat.split_jaxpr(jaxpr)[0].eqns)


Inside = list[dict[str, Tally]]  # the tallies of each jaxpr that an equation runs and that logs


def unknown(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    """The tally if the number of events is unknown."""
    del params
    return dict.fromkeys([key for tallies in inside for key in tallies], Tally(math.inf, False, True))


def once(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    """The tally of the only jaxpr, which runs once."""
    return inside[0] if len(inside) == 1 else unknown(params, inside)


@record
class Rule:
    """All that lox knows about a primitive that can contain logs."""

    rebuild: Callable[[Frame, Any, dict[str, Any], list[Any]], list[Any]]  # (frame, primitive, params, args)
    count: Callable[[dict[str, Any], Inside], dict[str, Tally]]
    runs: Callable[[dict[str, Any]], list[Any]]  # its jaxprs that run when it runs


_RULES: dict[Any, Rule] = {}


def rule(
    *primitives: Any,
    count: Callable[[dict[str, Any], Inside], dict[str, Tally]] = unknown,
    runs: Callable[[dict[str, Any]], list[Any]] = _compat.sub_jaxprs,
) -> Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]:
    """Register how to rebuild these primitives such that their logs reach the frame.

    JAX's own are given by their names, because few of them are public; others as they are. `count` derives the number
    of events from those of the jaxprs: too many costs room, too few would lose events. `runs` leaves out jaxprs that
    serve only differentiation. `frame.place` says where the equation is.
    """

    def register(rebuild: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        _RULES.update(dict.fromkeys(primitives, Rule(rebuild, count, runs)))
        return rebuild

    return register


def rule_of(primitive: Any) -> Rule | None:
    """The rule for a primitive. One that is not JAX's may have the name of one that is, and mean something else."""
    known = _RULES.get(primitive)
    if known is None and _compat.is_jax_own_primitive(primitive):
        known = _RULES.get(primitive.name)
    return known


def executed_jaxprs(primitive: Any, params: dict[str, Any]) -> list[Any]:
    """The jaxprs of an equation that run when it runs."""
    known = rule_of(primitive)
    return _compat.sub_jaxprs(params) if known is None else known.runs(params)


def apply_rule(
    frame: Frame,
    primitive: Any,
    params: dict[str, Any],
    args: Sequence[Any],
    effects: Any = (),
    place: Place | None = None,
) -> list[Any]:
    """Rebuild one primitive that contains logs."""
    frame.eqn_scope, frame.place = frame.here(), place
    known = rule_of(primitive)
    if known is None:
        if not _compat.eqn_has_logs(primitive, params, effects):  # only derivative rules, which cannot be reached
            return primitive.bind(*args, **params)
        mark = _compat.first_log(primitive, params)
        raise _errors.opaque_primitive(primitive.name, mark.keys, mark.site)
    return known.rebuild(frame, primitive, params, list(args))


BLOCK = _compat.Primitive("lox_block")  # stands for anything that runs jaxprs


def tally(jaxpr: Any, scope: str, select: Callable[[Meta, str], Iterable[str]]) -> dict[str, Tally]:
    """Count the events of each key in a jaxpr that is in `scope`; `select` gives the keys of a log that count."""
    eqns = _compat.split_jaxpr(jaxpr)[0].eqns if _compat.has_logs(jaxpr) else []
    return add_tallies(tally_of(eqn.primitive, eqn.params, scope_of(eqn, scope), select) for eqn in eqns if eqn.params)


def add_tallies(tallies: Iterable[dict[str, Tally]]) -> dict[str, Tally]:
    """The events of each key in several parts of a program, all of which run."""
    total: dict[str, Tally] = {}
    for part in tallies:
        for key, count in part.items():
            total[key] = total[key] + count if key in total else count
    return total


def tally_of(
    primitive: Any, params: dict[str, Any], scope: str, select: Callable[[Meta, str], Iterable[str]]
) -> dict[str, Tally]:
    """Count the events of each key in an equation."""
    if primitive is log_p:
        return dict.fromkeys(select(params["meta"], scope), Tally(1, not params["meta"].has_valid))
    inside = [tally(j, scope, select) for j in executed_jaxprs(primitive, params) if _compat.has_logs(j)]
    known = rule_of(primitive)
    return (unknown if known is None else known.count)(params, inside) if inside else {}


class Transformed:
    """A jaxpr whose logs have become arguments and results: `(*state, *args) -> (*outs, *state, *piece)`."""

    keys: dict[str, bool]
    struct: Any
    piece: Any

    def __init__(self, handler: Handler, jaxpr: Any, state: Any, *block: Any):
        leaves, state_tree = jax.tree.flatten(state)
        self.outs = len(_compat.out_avals(jaxpr))

        def flat(*args: Any) -> list[Any]:
            before = jax.tree.unflatten(state_tree, args[: len(leaves)])
            frame = Frame(handler, before, *block)
            with _compat.given_up_by(Retrace):
                outs = interpret(frame, jaxpr, args[len(leaves) :])
                handler.leave(frame, before)
            state_out, piece = jax.tree.leaves(frame.state), frame.piece()
            self.keys = frame.keys
            self.struct, self.piece = types_of(frame.state), types_of(piece)
            return [*outs, *state_out, *jax.tree.leaves(piece)]

        types = [*types_of(leaves), *_compat.in_avals(jaxpr)]
        self.jaxpr = _compat.make_jaxpr(flat, types)
        if handler.in_place:
            self.jaxpr = _compat.without_dead_code(self.jaxpr, types)
        self.grown = signature(self.struct) != signature(types_of(state))
        self._state_tree, self._piece_tree = jax.tree.structure(self.struct), jax.tree.structure(self.piece)
        self._end = self.outs + self._state_tree.num_leaves  # of results and state
        self.source = ProgramSource(self.piece, self.keys, block[1] if len(block) > 1 else "")
        self.extra = self._state_tree.num_leaves + self._piece_tree.num_leaves

    def unpack(self, flat: Sequence[Any], piece_tree: Any = None) -> tuple[list[Any], Any, Any]:
        """Results, state and piece, which has the structure `piece_tree` if it was changed."""
        outs, state, piece = flat[: self.outs], flat[self.outs : self._end], flat[self._end :]
        piece_tree = self._piece_tree if piece_tree is None else piece_tree
        return list(outs), jax.tree.unflatten(self._state_tree, state), jax.tree.unflatten(piece_tree, piece)

    def unpack_later(self, flat: list[Any]) -> tuple[list[Any], Any, Any]:
        """`unpack` of what a program returns, which may be called often: the piece stays packed."""
        state = jax.tree.unflatten(self._state_tree, flat[self.outs : self._end]) if self.struct else self.struct
        piece = Packed(self._piece_tree, flat[self._end :], self.source) if len(flat) > self._end else ()
        return flat[: self.outs], state, piece


_transformed: Any = weakref.WeakKeyDictionary()


def transformed(frame: Frame, jaxpr: Any, state: Any, once: bool = False, decision: Any = None) -> Transformed:
    """The transformed jaxpr, made only once: JAX recognises a program by the identity of its jaxpr.

    If it runs `once`, it may change the type of the state. If a value decides whether it runs, `decision` is the type
    of that value.
    """
    cache = _transformed.setdefault(jaxpr, {})
    block = (frame.unbounded, frame.eqn_scope, frame.alike_after(decision), frame.devices)
    cache_key = (frame.handler, block, signature(state), _compat.debugged())
    if cache_key not in cache:
        cache[cache_key] = Transformed(frame.handler, jaxpr, state, *block)
    rebuilt = cache[cache_key]
    if rebuilt.grown and not (once and frame.handler.allows(frame, rebuilt.struct)):
        raise Grown(frame, rebuilt.struct)
    return rebuilt


_compiled: Any = weakref.WeakKeyDictionary()


def run_compiled(frame: Frame, primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Rebuild and run a primitive outside of jit, such that nothing is traced or compiled again the next time."""
    is_jit = primitive is _compat.jit_p
    if rule_of(primitive) is None or (is_jit and not _compat.is_plain_jit(params)):
        return apply_rule(frame, primitive, params, args)  # such a jit compiles with its own options; the others raise
    frame.eqn_scope = frame.here()
    if is_jit:
        jaxpr, donated = params["jaxpr"], params["donated_invars"]
        caches = _compiled.get(jaxpr)
        if caches is None:
            caches = _compiled[jaxpr] = {}
        cache = caches.setdefault(donated, {})
        return frame.settle(lambda state: run_jitted(frame, lambda: jaxpr, state, args, cache, donated, params["name"]))
    anchor, *others = _compat.sub_jaxprs(params)
    types = types_of(list(args))
    # By identity, since the key must not keep the anchor alive.
    cache = _compiled.setdefault(anchor, {}).setdefault((primitive, _identities(params), tuple(types)), {})
    cache["alive"] = others  # their identities are in the key

    def alone() -> Any:
        return _compat.make_jaxpr(lambda *xs: primitive.bind(*xs, **params), types)

    return frame.settle(lambda state: run_jitted(frame, alone, state, args, cache))


_OFTEN = 64  # events: compiling takes as long as some hundred of them
_MANY = 64  # programs for events of one handler, which many functions may share


def take_now(frame: Frame, params: dict[str, Any], operands: Sequence[Any]) -> None:
    """Take an event outside of programs; if it changes the state and comes often, by a program."""
    meta = params["meta"]
    run = _program_of(frame, meta, operands) if frame.handler.reduces(meta, frame.here()) else None
    if run is None:
        frame.take_now(meta, operands)
        frame.complete()
        return
    frame.eqn_scope = frame.here()
    jaxpr, cache = run
    with _compat.own_transfers():
        frame.settle(lambda state: run_jitted(frame, lambda: jaxpr, state, operands, cache, name="log"))


def _program_of(frame: Frame, meta: Meta, operands: Sequence[Any]) -> tuple[Any, dict[Any, Any]] | None:
    on_devices = [x for x in operands if isinstance(x, jax.Array)]
    if (on_devices and not _compat.are_on_one_device(on_devices)) or _compat.is_run_step_by_step():
        return None
    types = tuple(types_of(list(operands)))
    # The state, because its type changes with the first event of a key, and then no more.
    key = meta, types, signature(frame.state), jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    programs = frame.handler.programs
    if key not in programs:
        frame.times[key] = frame.times.get(key, 0) + 1
        if frame.times[key] <= _OFTEN:
            return None
        if len(programs) >= _MANY:
            programs.pop(next(iter(programs)))
        programs[key] = _compat.make_jaxpr(lambda *xs: log_p.bind(*xs, meta=meta), types), {}
    return programs[key]


def run_jitted(
    frame: Frame,
    jaxpr: Callable[[], Any],
    state: Any,
    args: Sequence[Any],
    cache: dict[Any, Any],
    donated: Sequence[bool] = (),
    name: str = "logged",
) -> list[Any]:
    """Transform, compile and run a jaxpr."""
    cache_key = (frame.handler, frame.unbounded, frame.eqn_scope, signature(state), _compat.debugged())
    known = cache.get(cache_key)
    if known is None:
        rebuilt = Transformed(frame.handler, jaxpr(), state, frame.unbounded, frame.eqn_scope)
        run = _compat.jaxpr_as_fun(rebuilt.jaxpr)
        first = len(jax.tree.leaves(state))

        def logged(*args: Any) -> Any:
            return run(*args)

        logged.__name__ = logged.__qualname__ = name  # for profiles
        compiled = jax.jit(logged, donate_argnums=[first + n for n, given_up in enumerate(donated) if given_up])
        known = cache[cache_key] = rebuilt, compiled
    rebuilt, compiled = known
    if rebuilt.grown and not frame.handler.allows(frame, rebuilt.struct):
        raise Grown(frame, rebuilt.struct)
    leaves = jax.tree.leaves(state) if state else ()
    outs, state, piece = rebuilt.unpack_later(compiled(*leaves, *args))
    frame.absorb(state, piece, rebuilt.keys, rebuilt.source)
    if not state:
        frame.ran = Ran(rebuilt.source, piece.arrays) if type(piece) is Packed else Ran()
    return outs


class Equation:
    """A primitive with its parameters, equal to others that have the same jaxprs."""

    def __init__(self, primitive: Any, params: dict[str, Any]):
        self.primitive, self.params = primitive, params
        self._key = primitive, _identities(params)  # the parameters are kept alive with it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(64)
def in_jit(eqn: Equation) -> Any:
    """The same equation in a jitted function, of which there is one. It is kept, as JAX keeps equations outside of jit.

    Not weakly: the program refers to the jaxprs by which it is found.
    """
    return jax.jit(functools.partial(eqn.primitive.bind, **eqn.params))


def _identities(params: dict[str, Any]) -> Any:
    return tuple((name, _identity(value)) for name, value in sorted(params.items()))


def _identity(value: Any) -> Any:
    if _compat.is_jaxpr(value):
        return id(value)
    if isinstance(value, tuple | list):
        return tuple(map(_identity, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
