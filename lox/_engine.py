"""The interpreter: run a function and hand every log in it to a handler.

Two things can contain a log. A Python function is run under a `jax.core.Trace` of our own: operations without logs go
straight on to the trace around, so values stay as concrete as they were and Python's control flow keeps working. A
jaxpr (the body of a jit, a loop, a branch) is interpreted equation by equation; the primitive that owns it is then
rebuilt by its rule in `_rules.py`. Neither mutates what it reads.

What becomes of an event is up to the handler, through two channels. `Run.state` is threaded through the program: it
enters every block and comes out changed, in the carry of loops (reductions, buffers, the order of callbacks).
`Run.pieces` is what a block has collected: it only comes out, stacked by loops (the events that `spool` returns).
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lox import _compat, _errors
from lox._event import Event, Meta
from lox._primitive import bind, log_p


class Handler:
    """Decides what becomes of events. Immutable and hashable: handlers are keys of caches."""

    def wants(self, meta: Meta) -> bool:
        """Whether anything can become of an event; if not, what is computed only for it is not computed at all."""
        del meta
        return True

    def initial_state(self) -> Any:
        """What is threaded through the program."""
        return ()

    def event(self, run: "Run", event: Event) -> None:
        """Take one event: change `run.state`, or add to `run.pieces`."""
        raise NotImplementedError

    def gather(self, pieces: list[Any]) -> Any:
        """One piece that stands for several, in order."""
        del pieces
        return ()

    def unroll(self, piece: Any, reverse: bool) -> Any:
        """The piece of a whole loop, from that of its body with one more leading axis."""
        del reverse
        return piece

    def unify(self, pieces: list[Any]) -> list[Callable[[Any], Any]] | None:
        """For alternative branches: how to make their pieces alike, or None if they are."""
        del pieces
        return None

    def extend(self, run: "Run", struct: Any) -> None:
        """Give `run.state` the type `struct`, which the body of a loop leaves behind."""
        raise NotImplementedError

    @property
    def in_place(self) -> bool:
        """Whether events never change the arguments or results of a block, so that primitives stay as they are."""
        return False

    def split_state(self, state: Any, keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """The part of the state that concerns these keys, and how to put the rest back."""
        del keys
        return state, lambda part: part

    def for_rules(self) -> "Handler":
        """What becomes of logs inside derivative rules, when the transformed function is differentiated.

        The events of a function are those of its primal, so rules must not add to them.
        """
        return self


class Grown(Exception):
    """Control flow: a block left the state with another type than it found, and must be traced again."""

    def __init__(self, owner: "Run", struct: Any):
        super().__init__(owner, struct)
        self.owner, self.struct = owner, struct


class Run:
    """One block under way: its state, what it has collected, and the keys it logs.

    `keys` has them in order of first appearance, and whether an event is certain to happen.
    `unbounded` says that the block repeats an unknown number of times, so that nothing can be stacked.
    """

    def __init__(self, handler: Handler, state: Any, unbounded: bool = False):
        self.handler, self.state, self.unbounded = handler, state, unbounded
        self.pieces: list[Any] = []
        self.keys: dict[str, bool] = {}

    def block(self, state: Any, unbounded: bool = False) -> "Run":
        """A run for a block inside this one."""
        return Run(self.handler, state, self.unbounded or unbounded)

    def piece(self) -> Any:
        """Everything collected so far."""
        return self.handler.gather(self.pieces)

    def absorb(self, state: Any, piece: Any, keys: dict[str, bool]) -> None:
        """Take over what a block inside has left."""
        self.state = state
        if jax.tree.leaves(piece):
            self.pieces.append(piece)
        for key, certain in keys.items():
            self.note(key, certain)

    def note(self, key: str, certain: bool) -> None:
        """Remember that the key is logged."""
        self.keys[key] = self.keys.get(key, False) or certain

    def require_type(self, inner: "Run", state: Any) -> None:
        """Check that a block has left the state as it found it; if not, it has to be traced again."""
        if _signature(inner.state) != _signature(state):
            raise Grown(self, types_of(inner.state))

    def settle(self, attempt: Callable[[Any], Any]) -> Any:
        """Trace a block until the type of its state no longer changes."""
        while True:
            try:
                return attempt(self.state)
            except Grown as grown:
                if grown.owner is not self:
                    raise
                self.handler.extend(self, grown.struct)


def types_of(tree: Any) -> Any:
    """The same tree with types for arrays."""
    return jax.tree.map(_compat.aval_of, tree)


def _signature(state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    avals = [_compat.aval_of(x) for x in leaves]
    return treedef, tuple((a.shape, a.dtype, _compat.varying_axes(a)) for a in avals)


# --- Python functions ----------------------------------------------------------------------------


class LogTrace(_compat.Trace):  # type: ignore[misc]
    """Hands logs to a run and everything else to the trace around."""

    def __init__(self, parent: Any, run: Run):
        super().__init__()
        self.parent, self.run = parent, run
        self.requires_low = parent.requires_low
        _compat.stand_for(self, parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with _compat.set_current_trace(self.parent):
            if primitive is log_p:
                self.run.handler.event(self.run, Event.from_operands(params["meta"], tracers))
                return []
            if self.parent is _compat.eval_trace:
                # Nothing outside differentiates, so derivative rules are of no concern.
                if not _compat.eqn_has_logs(primitive, params):
                    return primitive.bind(*tracers, **params)
                return run_compiled(self.run, primitive, params, tracers)
            if not _compat.eqn_concerns(primitive, params):
                return primitive.bind(*tracers, **params)
            return apply_rule(self.run, primitive, params, tracers)

    # Primitives that carry Python functions. They are traced first, so that only jaxprs need rules.

    def _staged(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        box: list[Any] = []

        def stage(*args: Any) -> Any:
            with _compat.take_current_trace() as trace:
                flat, rebuild = _compat.flat_results(
                    getattr(trace, method)(primitive, *functions, args, *rest, **params)
                )
            box.append(rebuild)
            return flat

        with _compat.set_current_trace(self.parent):
            types = types_of(list(tracers))
            jaxpr = _compat.make_jaxpr(stage, types)
            if self.parent is _compat.eval_trace and _compat.has_logs(jaxpr):
                outs = self.run.settle(lambda state: _run_jitted(self.run, lambda: jaxpr, state, tracers, {}))
            else:
                outs = interpret(self.run, jaxpr, tracers)
        if len(functions) > 1:
            _compat.forget_trees(functions[0], functions[1])
        return box[0](outs)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        if self.parent is _compat.eval_trace:  # nothing outside differentiates: only the function itself matters
            with _compat.set_current_trace(self):
                return fun.call_wrapped(*tracers)
        return self._staged("process_custom_jvp_call", primitive, (fun, jvp), tracers, **params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, *args: Any, **params: Any
    ) -> Any:
        if self.parent is _compat.eval_trace:
            with _compat.set_current_trace(self):
                return fun.call_wrapped(*tracers)
        return self._staged("process_custom_vjp_call", primitive, (fun, fwd, bwd), tracers, *args, **params)

    def process_custom_transpose(self, primitive: Any, call: Any, tracers: Any, **params: Any) -> Any:
        if self.parent is _compat.eval_trace:
            with _compat.set_current_trace(self):
                return call.call_wrapped(*tracers)
        return self._staged("process_custom_transpose", primitive, (call,), tracers, **params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        return self._staged("process_shard_map", primitive, (fun,), tracers, **params)

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self._staged("process_call", primitive, (fun,), tracers, params)

    def process_map(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self._staged("process_map", primitive, (fun,), tracers, params)

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self.parent.cur_qdd(x)


def run_staged(handler: Handler, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `fun`, traced first: then even constants that only served dropped logs leave no trace.

    Only while tracing for jit, where it asks no more of `fun` than jit itself; elsewhere it is `run_function`.
    """
    if not isinstance(_compat.current_trace(), _compat.StagingTrace):
        return run_function(handler, fun, args, kwargs)[0]
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [n for n, x in enumerate(leaves) if isinstance(x, _compat.Tracer)]
    box: list[Any] = []

    def flat(*tracers: Any) -> list[Any]:
        mine = list(leaves)
        for n, x in zip(traced, tracers, strict=True):
            mine[n] = x
        args, kwargs = jax.tree.unflatten(treedef, mine)
        out, tree = jax.tree.flatten(fun(*args, **kwargs))
        box.append(tree)
        return out

    given = [leaves[n] for n in traced]
    jaxpr = _compat.make_jaxpr(lambda *xs: run_function(handler, flat, xs, {})[0], types_of(given))
    jaxpr = _compat.without_dead_code(jaxpr, types_of(given))
    return jax.tree.unflatten(box[0], _compat.jaxpr_as_fun(jaxpr)(*given))


def run_function(
    handler: Handler, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Run]:
    """Call `fun`, its logs handed to `handler`."""
    run = Run(handler, handler.initial_state())
    with _compat.take_current_trace() as parent, _compat.set_current_trace(LogTrace(parent, run)):
        out = fun(*args, **kwargs)
    return out, run


class _Found(Exception):
    """Control flow: a primitive was about to be bound."""


class _Probe(_compat.Trace):  # type: ignore[misc]
    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        raise _Found(primitive, tracers, params)


def first_bind(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """The first primitive that a jitted function binds when it is called, which is the jit; nothing is run."""
    try:
        with _compat.take_current_trace(), _compat.set_current_trace(_Probe()):
            fun(*args, **kwargs)
    except _Found as found:
        return found.args  # type: ignore[return-value]
    return None


# --- jaxprs --------------------------------------------------------------------------------------


def interpret(run: Run, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr in the current trace, its logs handed to `run`."""
    opened, consts = _compat.split_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip([*opened.constvars, *opened.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return _compat.literal_value(var) if isinstance(var, _compat.Literal) else env[var]

    pending: list[Any] = []
    for eqn in _live_equations(run.handler, opened):
        if eqn.primitive is not log_p and not _compat.eqn_concerns(eqn.primitive, eqn.params):
            pending.append(eqn)
            continue
        if pending:
            _compat.eval_equations(jaxpr, pending, env)
            pending = []
        values = [read(v) for v in eqn.invars]
        with _compat.equation_context(eqn):
            if eqn.primitive is log_p:
                run.handler.event(run, Event.from_operands(eqn.params["meta"], values))
                continue
            if _compat.is_custom_call(eqn.primitive):
                outs = _rules().custom_call(run, jaxpr, eqn, values)
            else:
                outs = apply_rule(run, eqn.primitive, eqn.params, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    if pending:
        _compat.eval_equations(jaxpr, pending, env)
    return [read(v) for v in opened.outvars]


def _live_equations(handler: Handler, jaxpr: Any) -> list[Any]:
    """The equations that the results, or an event that the handler wants, depend on."""
    needed = {v for v in jaxpr.outvars if isinstance(v, _compat.Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not _has_use(handler, eqn):
            continue
        needed.update(v for v in eqn.invars if isinstance(v, _compat.Var))
        live.append(eqn)
    return live[::-1]


def _has_use(handler: Handler, eqn: Any) -> bool:
    """Whether an equation matters though nothing needs its results."""
    if eqn.primitive is log_p:
        return handler.wants(eqn.params["meta"])
    if any(effect is not _compat.log_effect for effect in eqn.effects):
        return True
    return any(_wants_any(handler, jaxpr) for jaxpr in _compat.sub_jaxprs(eqn.params))


def _wants_any(handler: Handler, jaxpr: Any) -> bool:
    return _compat.has_logs(jaxpr) and any(_has_use(handler, eqn) for eqn in _compat.split_jaxpr(jaxpr)[0].eqns)


def apply_rule(run: Run, primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Rebuild one primitive that contains logs."""
    rule = _rules().RULES.get(primitive.name)
    if rule is None:
        if not _compat.eqn_has_logs(primitive, params):  # but derivative rules, which there is no way to reach
            return primitive.bind(*args, **params)
        keys, site = first_log(params)
        raise _errors.opaque_primitive(primitive.name, keys, site)
    return rule(run, primitive, params, list(args))


@functools.cache
def _rules() -> Any:
    from lox import _rules  # the rules build on the engine

    return _rules


def first_log(params: dict[str, Any]) -> tuple[list[str], str]:
    """Keys and source line of the first log inside an equation, for messages."""
    for jaxpr in _compat.sub_jaxprs(params):
        for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
            if eqn.primitive is log_p:
                return list(eqn.params["meta"].keys), eqn.params["meta"].site
            if _compat.eqn_has_logs(eqn.primitive, eqn.params):
                return first_log(eqn.params)
    return [], "an unknown line"


def logged_keys(jaxpr: Any) -> set[str]:
    """The keys that a jaxpr logs."""
    keys: set[str] = set()
    for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive is log_p:
            keys.update(eqn.params["meta"].keys)
        else:
            for sub in _compat.sub_jaxprs(eqn.params):
                keys |= logged_keys(sub)
    return keys


def without_unwanted(jaxprs: Sequence[Any]) -> Sequence[Any]:
    """The same jaxprs without their logs, if the trace around is about to drop every one of them."""
    trace = _compat.current_trace()
    if isinstance(trace, LogTrace) and trace.run.handler.in_place:
        handler = trace.run.handler
        if not any(_wants_any(handler, jaxpr) for jaxpr in jaxprs):
            return [transformed(Run(handler, ()), jaxpr, ()).jaxpr for jaxpr in jaxprs]
    return jaxprs


class Transformed:
    """A jaxpr whose logs have become arguments and results: `(*state, *args) -> (*outs, *state, *piece)`."""

    keys: dict[str, bool]
    struct: Any
    piece: Any

    def __init__(self, handler: Handler, jaxpr: Any, state: Any, unbounded: bool):
        leaves, state_tree = jax.tree.flatten(state)
        self.outs = len(_compat.out_avals(jaxpr))

        def flat(*args: Any) -> list[Any]:
            run = Run(handler, jax.tree.unflatten(state_tree, args[: len(leaves)]), unbounded)
            outs = interpret(run, jaxpr, args[len(leaves) :])
            state_out, piece = jax.tree.leaves(run.state), run.piece()
            self.keys = run.keys
            self.struct, self.piece = types_of(run.state), types_of(piece)
            return [*outs, *state_out, *jax.tree.leaves(piece)]

        types = [*types_of(leaves), *_compat.in_avals(jaxpr)]
        self.jaxpr = _compat.make_jaxpr(flat, types)
        if handler.in_place:
            self.jaxpr = _compat.without_dead_code(self.jaxpr, types)
        self.grown = _signature(self.struct) != _signature(types_of(state))
        self.extra = len(jax.tree.leaves(self.struct)) + len(jax.tree.leaves(self.piece))

    def unpack(self, flat: Sequence[Any]) -> tuple[list[Any], Any, Any]:
        """Results, state and piece."""
        count = len(jax.tree.leaves(self.struct))
        outs, state, piece = flat[: self.outs], flat[self.outs : self.outs + count], flat[self.outs + count :]
        return (
            list(outs),
            jax.tree.unflatten(jax.tree.structure(self.struct), state),
            jax.tree.unflatten(jax.tree.structure(self.piece), piece),
        )


_transformed: Any = weakref.WeakKeyDictionary()


def transformed(run: Run, jaxpr: Any, state: Any) -> Transformed:
    """The transformed jaxpr, made once: XLA recognises a program by the identity of its jaxpr."""
    cache = _transformed.setdefault(jaxpr, {})
    key = (run.handler, run.unbounded, _signature(state))
    if key not in cache:
        cache[key] = Transformed(run.handler, jaxpr, state, run.unbounded)
    found = cache[key]
    if found.grown:
        raise Grown(run, found.struct)
    return found


_compiled: Any = weakref.WeakKeyDictionary()


def run_compiled(run: Run, primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Rebuild and run a primitive at once, such that the next time nothing is traced or compiled again."""
    if primitive.name == "jit":
        return apply_rule(run, primitive, params, args)  # compiles by itself, with its own options
    anchor, *others = _compat.sub_jaxprs(params)
    # The key must not keep the anchor alive, hence identities.
    identity = tuple((name, _identity(value)) for name, value in sorted(params.items()))
    types = types_of(list(args))

    cache = _compiled.setdefault(anchor, {}).setdefault((primitive, identity, tuple(types)), {})
    cache["alive"] = others  # as long as their identities are in a key

    def alone() -> Any:
        return _compat.make_jaxpr(lambda *xs: primitive.bind(*xs, **params), types)

    return run.settle(lambda state: _run_jitted(run, alone, state, args, cache))


def _run_jitted(
    run: Run, jaxpr: Callable[[], Any], state: Any, args: Sequence[Any], cache: dict[Any, Any]
) -> list[Any]:
    """Run a jaxpr at once, transformed and compiled."""
    key = (run.handler, run.unbounded, _signature(state))
    if key not in cache:
        rebuilt = Transformed(run.handler, jaxpr(), state, run.unbounded)
        cache[key] = rebuilt, jax.jit(_compat.jaxpr_as_fun(rebuilt.jaxpr))
    rebuilt, compiled = cache[key]
    if rebuilt.grown:
        raise Grown(run, rebuilt.struct)
    outs, state, piece = rebuilt.unpack(compiled(*jax.tree.leaves(state), *args))
    run.absorb(state, piece, rebuilt.keys)
    return outs


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


class RuleTrace(LogTrace):
    """Wraps the derivative rules of the functions that pass through."""

    def __init__(self, parent: Any, around: Callable[..., Any]):
        super().__init__(parent, Run(Drop(), ()))
        self.around = around

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        jvp = _compat.wrap_rule(jvp, self.around)
        return self.parent.process_custom_jvp_call(primitive, fun, jvp, tracers, **params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, *args: Any, **params: Any
    ) -> Any:
        fwd, bwd = _compat.wrap_rule(fwd, self.around), _compat.wrap_rule(bwd, self.around)
        return self.parent.process_custom_vjp_call(primitive, fun, fwd, bwd, tracers, *args, **params)


class Drop(Handler):
    """Removes every log."""

    def wants(self, meta: Meta) -> bool:
        """None at all."""
        return False

    @property
    def in_place(self) -> bool:
        """Nothing is added to what a block takes and gives."""
        return True

    def event(self, run: Run, event: Event) -> None:
        """Nothing becomes of it."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class MarkSeen(Drop):
    """Lets every log flow on, but no longer to the default sink."""

    def wants(self, meta: Meta) -> bool:
        """All of them."""
        return True

    def event(self, run: Run, event: Event) -> None:
        """Bind it again."""
        bind(event.replace(seen=True))
