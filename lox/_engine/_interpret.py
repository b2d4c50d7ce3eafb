"""The interpreter: run a function and hand every log in it to a handler.

Two things can contain a log. A Python function is run under our own `jax.core.Trace`: operations without logs go on to
the surrounding trace, so values stay as concrete as they were and Python's control flow keeps working. A jaxpr (the
body of a jit, a loop, a branch) is interpreted equation by equation, and the primitive that owns it is rebuilt by its
rule in `_rules.py`. Neither mutates what it reads.

The handler decides what becomes of an event, through two channels. `Frame.state` is threaded through the program: it
enters every block (such a function or jaxpr) and comes out changed, in the carry of loops (reductions, buffers, the
order of callbacks). `Frame.pieces` is what a block has collected: it only comes out, stacked by loops (the events that
`spool` returns).
"""

import contextlib
import dataclasses
import math
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from lox import _compat, _errors
from lox._engine import _emit, _hidden
from lox._engine._event import Event, Meta
from lox._engine._primitive import bind, log_p
from lox._engine._select import Logged, Names


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many events of one key there will be, as far as is known without running anything."""

    count: float = 0  # at most; infinite if unknown
    exact: bool = True  # whether there are exactly as many, in every lane
    looped: bool = False  # whether some of them are in a loop

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.count + other.count, self.exact and other.exact, self.looped or other.looped)


class Handler:
    """Decides what becomes of events. Immutable and hashable: handlers are keys of caches."""

    def wants(self, meta: Meta, scope: str) -> bool:
        """Whether the handler may use an event; if not, computations that serve only the event are removed."""
        del meta, scope
        return True

    def initial_state(self) -> Any:
        """The state that is threaded through the program."""
        return ()

    def event(self, frame: "Frame", event: Event) -> None:
        """Take one event: change `frame.state`, or add to `frame.pieces`."""
        raise NotImplementedError

    def check(self, frame: "Frame", piece: Any) -> None:
        """Raise if this cannot be gathered with what was collected before."""
        del frame, piece

    def gather(self, pieces: list[Any]) -> Any:
        """Join pieces, in order."""
        del pieces
        return ()

    def unroll(self, piece: Any, reverse: bool) -> Any:
        """The piece of a whole loop, from that of its body with an additional leading axis."""
        del reverse
        return piece

    def unify(self, pieces: list[Any]) -> list[Callable[[Any], Any]] | None:
        """For each of several branches, a function that makes its piece like the others; None if they are alike."""
        del pieces
        return None

    def allows(self, frame: "Frame", struct: Any) -> bool:
        """Whether a block that runs once may change the type of the state to `struct`."""
        del frame, struct
        return False

    def extend(self, frame: "Frame", struct: Any) -> None:
        """Give `frame.state` the type `struct`, which the body of a loop returns."""
        raise NotImplementedError

    def before(self, frame: "Frame", find: Callable[[], dict[str, Tally]]) -> None:
        """Called at the outermost level before something with logs runs; `find()` says how many."""
        del frame, find

    def after(self, frame: "Frame", completed: bool) -> None:
        """Called when it has run or failed."""
        del frame, completed

    def counts(self, meta: Meta, scope: str) -> list[str]:
        """The keys of a log that a tally counts."""
        raise NotImplementedError

    def split(self, frame: "Frame", jaxprs: Iterable[Any]) -> "Blocks | None":
        """How to split a loop whose iterations run these jaxprs; None if it is not split."""
        del frame, jaxprs
        return None

    @property
    def names(self) -> Names | None:
        """The names that must be logged, or else there is a warning."""
        return None

    sees_calls: ClassVar[bool] = False  # whether host calls are handed to it too
    masks_lanes: ClassVar[bool] = True  # whether events in Equinox's loops count only while their lane continues

    def call(self, frame: "Frame", primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
        """Take a host call that can be masked."""
        raise NotImplementedError

    @property
    def in_place(self) -> bool:
        """Whether events never change the arguments or results of a block, so that primitives stay as they are."""
        return False

    def split_state(self, state: Any, keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """The part of the state that concerns these keys, and a function that puts the rest back."""
        del keys
        return state, lambda part: part

    def for_rules(self) -> "Handler":
        """The handler for logs in derivative rules, when the transformed function is differentiated.

        The events of a function are those of its primal, so rules must not add to them.
        """
        return self


class Blocks(Protocol):
    """A loop split into blocks of iterations; the handler acts after each block."""

    @property
    def iterations(self) -> int:
        """The number of iterations of a block."""
        ...

    def run(self, frame: "Frame", bounded: bool, execute: Callable[["Frame"], Any], room_for: int | None = None) -> Any:
        """Run one block by `execute(frame)`, then `flush`; unless `bounded`, it may have fewer iterations."""
        ...

    def flush(self, frame: "Frame", room_for: int | None = None) -> None:
        """Emit everything that was kept, or only what leaves no room for that many iterations."""
        ...


class Retrace(Exception):
    """Control flow: abandon the current tracing."""


class Grown(Retrace):
    """Control flow: a block changed the type of the state, and must be traced again."""

    def __init__(self, owner: "Frame", struct: Any):
        super().__init__(owner, struct)
        self.owner, self.struct = owner, struct


_NO_AXES: frozenset[Any] = frozenset()


class Frame:
    """The execution of one block: its state, what it has collected, and the keys it logs.

    `keys` are in order of first appearance, each with whether it is certain to have an event.
    `unbounded` says that the block repeats an unknown number of times, so that nothing can be stacked.
    `scope` has the scopes around the block, and `eqn_scope` those around the current equation, as prefixes of keys.
    `alike` are the mesh axes along which all devices run the block and differ only in values whose types say so.
    """

    def __init__(
        self, handler: Handler, state: Any, unbounded: bool = False, scope: str = "", alike: frozenset[Any] = _NO_AXES
    ):
        self.handler, self.state, self.unbounded, self.scope, self.alike = handler, state, unbounded, scope, alike
        self.pieces: list[Any] = []
        self.keys: dict[str, bool] = {}
        self.notes: dict[str, Any] = {}  # what the handler remembers about each key at the outermost level
        self.models: dict[str, Any] = {}  # earlier events of each key, which later ones must fit
        self.eqn_scope = scope
        self.logged: Logged | None = None  # all logs, selected or not, if there are names to check
        self.has_rules = False  # whether there are derivative rules, which may log too
        self._scopes = len(_compat.open_scopes())

    def here(self) -> str:
        """The scopes that are open now, as a prefix of keys."""
        return self.scope + "".join(f"{name}/" for name in _compat.open_scopes()[self._scopes :])

    def in_python_loop(self) -> bool:
        """Whether an event comes from a loop that JAX runs in Python, because jit is disabled."""
        return _compat.in_python_loop(run_function.__code__)

    def block(self, state: Any, unbounded: bool = False, decision: Any = None) -> "Frame":
        """A frame for a block inside this one, which runs depending on a value of the type `decision`."""
        return Frame(self.handler, state, self.unbounded or unbounded, self.eqn_scope, self.alike_after(decision))

    def alike_after(self, decision: Any) -> frozenset[Any]:
        """The mesh axes along which all devices still run the same, if a value of that type decides."""
        return self.alike if decision is None else self.alike - _compat.varying_axes(decision)

    def take(self, meta: Meta, operands: Any) -> None:
        """Hand an event to the handler."""
        with _compat.own_transfers():
            self.handler.event(self, Event.from_operands(meta, operands, self.here()))

    def list_logs(self, primitive: Any, params: dict[str, Any]) -> None:
        """Remember what is logged here, if there are names to check."""
        if self.logged is not None:
            scope = self.here()
            self.logged.update({(scope + key, tags): None for key, tags in logged_by(primitive, params)})
            self.has_rules |= _compat.eqn_has_rules(primitive, params)

    def piece(self) -> Any:
        """Everything that was collected so far."""
        return self.handler.gather(self.pieces)

    def collect(self, piece: Any) -> None:
        """Add to what was collected."""
        self.handler.check(self, piece)
        self.pieces.append(piece)

    def absorb(self, state: Any, piece: Any, keys: dict[str, bool]) -> None:
        """Take over the state, the piece and the keys of an inner block."""
        if _inside.may_fail and _compat.is_evaluating():
            jax.block_until_ready((state, piece))
        self.state = state
        if jax.tree.leaves(piece):
            self.collect(piece)
        for key, certain in keys.items():
            self.note(key, certain)

    def note(self, key: str, certain: bool) -> None:
        """Remember that the key is logged."""
        self.keys[key] = self.keys.get(key, False) or certain

    def require_type(self, inner: "Frame", state: Any) -> None:
        """Raise `Grown` if an inner block has changed the type of the state."""
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
                before = _signature(self.state)
                with _compat.own_transfers():
                    self.handler.extend(self, grown.struct)
                if _signature(self.state) == before:  # it would never settle
                    raise _errors.unsettled(self.keys or self.state) from None


def types_of(tree: Any) -> Any:
    """The same tree with the types of its arrays."""
    return jax.tree.map(_compat.aval_of, tree)


def _signature(state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    avals = [_compat.aval_of(x) for x in leaves]
    return treedef, tuple((a.shape, a.dtype, _compat.varying_axes(a), _compat.explicit_axes(a)) for a in avals)


# --- Python functions ----------------------------------------------------------------------------


class _Inside(threading.local):
    may_fail = False
    rebuilding = False


_inside = _Inside()


@contextlib.contextmanager
def rebuilding() -> Iterator[None]:
    """Mark that a shard_map is bound whose body is a jaxpr, in which no Python code could need values."""
    before, _inside.rebuilding = _inside.rebuilding, True
    try:
        yield
    finally:
        _inside.rebuilding = before


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
    """Mark that a function with callbacks that may raise runs inside other transformations.

    The function that those transform may catch the exception. On a GPU a program fails after it was dispatched, when
    they would already have taken over its failed results: so they wait for results before they take them over.
    """
    before, _inside.may_fail = _inside.may_fail, True
    try:
        yield
    finally:
        _inside.may_fail = before


@contextlib.contextmanager
def _announced(frame: Frame, find: Callable[[], dict[str, Tally]]) -> Iterator[None]:
    """Tell the handler what is about to run at the outermost level, and when it has run."""
    with _compat.own_transfers():
        frame.handler.before(frame, find)
    completed = False
    try:
        yield
        completed = True
    finally:
        with _compat.own_transfers():
            frame.handler.after(frame, completed)


# Primitives that JAX evaluates equation by equation outside of all transformations. Compiling them would require more.
_EVALUATED = frozenset(["remat2", "checkpoint", "remat_opt", "custom_vmap_call"])


# The errors of tracing where Python needs a value.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# The methods of traces for functions with custom derivative rules.
_WITH_RULES = ("process_custom_jvp_call", "process_custom_vjp_call")


class PassingTrace(_compat.Trace):  # type: ignore[misc]
    """A trace that makes no values of its own: it passes everything on to the surrounding trace, `parent`."""

    def __init__(self, parent: Any):
        super().__init__()
        self.parent, self.requires_low = parent, parent.requires_low

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        """Process a primitive with Python functions, for which traces have a separate `method`."""
        raise NotImplementedError(method)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self.process_functions("process_custom_jvp_call", primitive, (fun, jvp), tracers, **params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, *args: Any, **params: Any
    ) -> Any:
        return self.process_functions("process_custom_vjp_call", primitive, (fun, fwd, bwd), tracers, *args, **params)

    def process_custom_transpose(self, primitive: Any, call: Any, tracers: Any, **params: Any) -> Any:
        return self.process_functions("process_custom_transpose", primitive, (call,), tracers, **params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        return self.process_functions("process_shard_map", primitive, (fun,), tracers, **params)

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self.process_functions("process_call", primitive, (fun,), tracers, params)

    def process_map(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self.process_functions("process_map", primitive, (fun,), tracers, params)

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self.parent.cur_qdd(x)


class LogTrace(PassingTrace):
    """Hands logs to a frame and everything else to the surrounding trace."""

    def __init__(self, parent: Any, frame: Frame):
        super().__init__(parent)
        self.frame = frame
        _compat.stand_for(self, parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with _compat.set_current_trace(self.parent):
            if primitive is log_p:
                self.frame.list_logs(primitive, params)
                self._place_state(tracers)
                self.frame.take(params["meta"], tracers)
                return []
            # If nothing outside differentiates, derivative rules do not matter.
            evaluating = self.parent is _compat.eval_trace
            concerns = _compat.eqn_has_logs if evaluating else _compat.eqn_concerns
            if not concerns(primitive, params):
                if self.frame.logged is not None:
                    self.frame.has_rules |= _compat.eqn_has_rules(primitive, params)
                return _hidden.pass_on(primitive, tracers, params)
            if evaluating and primitive.name in _EVALUATED:
                with _compat.set_current_trace(self):
                    return primitive.impl(*tracers, **params)
            frame, handler = self.frame, self.frame.handler
            frame.list_logs(primitive, params)
            with _announced(frame, lambda: tally_of(primitive, params, frame.here(), handler.counts)):
                self._place_state(_compat.operands_of(params, tracers))
                return (run_compiled if evaluating else apply_rule)(frame, primitive, params, tracers)

    def _place_state(self, operands: Sequence[Any]) -> None:
        """Move the state to the devices of the operands: a function may run programs on different devices."""
        if self.frame.state and _compat.underneath(self) is _compat.eval_trace:
            self.frame.state = _compat.beside(operands, self.frame.state)

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        if method in _WITH_RULES:
            self.frame.has_rules |= not _compat.is_jax_own(functions[0])
        if method.startswith("process_custom_") and self.parent is _compat.eval_trace:
            # Nothing outside differentiates, so only the function itself matters.
            with _compat.set_current_trace(self):
                return functions[0].call_wrapped(*tracers)
        try:
            return self._staged(method, primitive, functions, tracers, *rest, **params)
        except (*_NEEDS_VALUES, _errors.SpoolError):  # a traced `fori_loop` with a dynamic bound is a `while_loop`
            eager = method == "process_shard_map" and _compat.underneath(self) is _compat.eval_trace
            if _inside.rebuilding or not eager:
                raise
        # The body needs values, so it is run as JAX runs it: one operation after the other on all devices.
        _compat.forget_results(functions[0])
        return run_on_shards(self.parent, self, primitive, functions[0], tracers, params)

    def _staged(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        """Trace the functions first, so that only jaxprs need rules."""
        box: list[Any] = []

        def stage(*args: Any) -> Any:
            with _compat.take_current_trace() as trace:
                flat, rebuild = _compat.flat_results(
                    getattr(trace, method)(primitive, *functions, args, *rest, **params)
                )
            box.append(rebuild)
            return flat

        with _compat.set_current_trace(self.parent):
            self.frame.eqn_scope = self.frame.here()
            types = types_of(list(tracers))
            jaxpr = _compat.make_jaxpr(stage, types)
            frame, handler = self.frame, self.frame.handler
            frame.list_logs(_BLOCK, {"jaxpr": jaxpr})
            with _announced(frame, lambda: tally(jaxpr, frame.eqn_scope, handler.counts)):
                if self.parent is _compat.eval_trace and _compat.has_logs(jaxpr):
                    outs = frame.settle(lambda state: _run_jitted(frame, lambda: jaxpr, state, tracers, {}))
                else:
                    outs = interpret(frame, jaxpr, tracers)
        if len(functions) > 1:
            _compat.forget_trees(functions[0], functions[1])
        return box[0](outs)


class ShardTrace(PassingTrace):
    """Inside a shard_map outside of jit: hands primitives that log to the trace around the shard_map.

    The others go on to the parent, so that values which are the same on all devices stay concrete.
    """

    def __init__(self, parent: Any, around: LogTrace):
        super().__init__(parent)
        self.around = around
        _compat.stand_for(self, parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        if primitive is log_p or _compat.eqn_has_logs(primitive, params):
            return _compat.bind_on_shards(_compat.underneath(self), self.around, primitive, params, tracers)
        with _compat.set_current_trace(self.parent):
            return primitive.bind(*tracers, **params)

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        if method == "process_shard_map":
            return run_on_shards(self.parent, self.around, primitive, functions[0], tracers, params)
        if not method.startswith("process_custom_"):
            raise NotImplementedError(method)
        with _compat.set_current_trace(self):
            return functions[0].call_wrapped(*tracers)


def run_on_shards(parent: Any, around: LogTrace, primitive: Any, fun: Any, tracers: Any, params: Any) -> Any:
    """Run a shard_map outside of jit, and hand primitives in it that log to the trace `around` it."""

    def on_shards(fun: Callable[..., Any], *args: Any) -> Any:
        with _compat.take_current_trace() as shards, _compat.set_current_trace(ShardTrace(shards, around)):
            return fun(*args)

    fun = _compat.wrap_rule(fun, on_shards)
    if isinstance(parent, LogTrace):
        return run_on_shards(parent.parent, parent, primitive, fun, tracers, params)
    with _compat.set_current_trace(parent):
        return parent.process_shard_map(primitive, fun, tracers, **params)


def run_staged(handler: Handler, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Trace `fun` before it is run, so that even constants that only served dropped logs disappear.

    Only while tracing for jit, where it requires no more of `fun` than jit does; elsewhere it is `run_function`.
    """
    if not isinstance(_compat.current_trace(), _compat.StagingTrace):
        return run_function(handler, fun, args, kwargs)[0]
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [n for n, x in enumerate(leaves) if isinstance(x, _compat.Tracer)]
    box: list[Any] = []

    def flat(*tracers: Any) -> list[Any]:
        replaced = list(leaves)
        for n, x in zip(traced, tracers, strict=True):
            replaced[n] = x
        args, kwargs = jax.tree.unflatten(treedef, replaced)
        out, tree = jax.tree.flatten(fun(*args, **kwargs))
        box.append(tree)
        return out

    given = [leaves[n] for n in traced]
    jaxpr = _compat.make_jaxpr(lambda *xs: run_function(handler, flat, xs, {})[0], types_of(given))
    jaxpr = _compat.without_dead_code(jaxpr, types_of(given))
    return jax.tree.unflatten(box[0], _compat.jaxpr_as_fun(jaxpr)(*given))


def run_function(
    handler: Handler,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: Any = None,
    whole: bool = True,
) -> tuple[Any, Frame]:
    """Call `fun` and hand its logs to `handler`, which starts with its initial state and what is `given`.

    Unless it is the `whole` transformed function, it need not log what was selected by name.
    """
    with _compat.own_transfers():
        frame = Frame(handler, {**handler.initial_state(), **given} if given else handler.initial_state())
    names = handler.names if whole else None
    frame.logged = None if names is None else {}
    current = _compat.take_current_trace()
    with _hidden.transforming(), current as parent, _compat.set_current_trace(LogTrace(parent, frame)):
        out = fun(*args, **kwargs)
    if isinstance(out, _LATER):
        raise _errors.runs_later(fun, type(out).__name__)
    if names is not None and frame.logged is not None:
        names.check(frame.logged, frame.has_rules)
    return out, frame


# The results of functions whose body has not run yet: their logs would go elsewhere.
_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class _Bound(Exception):
    """Control flow: a primitive was about to be bound."""


class _Probe(_compat.Trace):  # type: ignore[misc]
    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        raise _Bound(primitive, tracers, params)


def first_bind(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """The first primitive that a jitted function binds when it is called, which is the jit; nothing runs."""
    try:
        with _compat.take_current_trace(), _compat.set_current_trace(_Probe()):
            fun(*args, **kwargs)
    except _Bound as bound:
        return bound.args  # type: ignore[return-value]
    return None


# --- jaxprs --------------------------------------------------------------------------------------


def interpret(frame: Frame, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr in the current trace, and hand its logs to `frame`."""
    opened, consts = _compat.split_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip([*opened.constvars, *opened.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return _compat.literal_value(var) if isinstance(var, _compat.Literal) else env[var]

    pending: list[Any] = []
    for eqn in _live_equations(frame.handler, opened, frame.here()):
        called = frame.handler.sees_calls and _compat.emit_effect in eqn.effects
        concerned = eqn.primitive is log_p or _compat.eqn_concerns(eqn.primitive, eqn.params, eqn.effects)
        if not (concerned or called):
            pending.append(eqn)
            continue
        if pending:
            _compat.eval_equations(jaxpr, pending, env)
            pending = []
        values = [read(v) for v in eqn.invars]
        with _compat.equation_context(eqn):
            if eqn.primitive is log_p:
                frame.take(eqn.params["meta"], values)
                continue
            if called and eqn.primitive in _emit.MASKABLE:
                outs = frame.handler.call(frame, eqn.primitive, eqn.params, values)
            else:
                outs = apply_rule(frame, eqn.primitive, eqn.params, values, eqn.effects, Place(jaxpr, eqn, args))
        env.update(zip(eqn.outvars, outs, strict=True))
    if pending:
        _compat.eval_equations(jaxpr, pending, env)
    return [read(v) for v in opened.outvars]


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


def scope_of(eqn: Any, scope: str) -> str:
    """The scopes around an equation whose jaxpr is in `scope`."""
    return scope + "".join(f"{name}/" for name in _compat.scope_names(eqn.source_info.name_stack))


def wants_any(handler: Handler, jaxpr: Any, scope: str) -> bool:
    """Whether the handler may use an event in the jaxpr."""
    return _compat.has_logs(jaxpr) and any(_has_use(handler, eqn, scope) for eqn in _compat.split_jaxpr(jaxpr)[0].eqns)


class Place(NamedTuple):
    """An equation in its context: its jaxpr, the equation itself, and the arguments of the jaxpr."""

    jaxpr: Any
    eqn: Any
    args: Sequence[Any]


Inside = list[dict[str, Tally]]  # the tallies of each jaxpr that an equation runs and that logs


def unknown(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    """The tally if the number of events is unknown."""
    del params
    return dict.fromkeys([key for tallies in inside for key in tallies], Tally(math.inf, False, True))


def once(params: dict[str, Any], inside: Inside) -> dict[str, Tally]:
    """The tally of the only jaxpr, which runs once."""
    return inside[0] if len(inside) == 1 else unknown(params, inside)


@dataclasses.dataclass(frozen=True)
class Rule:
    """All that lox knows about a primitive that can contain logs."""

    rebuild: Callable[..., list[Any]]  # (frame, primitive, params, args), and `place=` if it looks around
    count: Callable[[dict[str, Any], Inside], dict[str, Tally]]
    runs: Callable[[dict[str, Any]], list[Any]]  # its jaxprs that run when it runs
    looks_around: bool


RULES: dict[str, Rule] = {}


def rule(
    *names: str,
    count: Callable[[dict[str, Any], Inside], dict[str, Tally]] = unknown,
    runs: Callable[[dict[str, Any]], list[Any]] = _compat.sub_jaxprs,
    looks_around: bool = False,
) -> Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]:
    """Register how to rebuild the primitives of these names such that their logs reach the frame.

    `count` derives the number of events from those of the jaxprs. `runs` leaves out jaxprs that serve only
    differentiation. A rule that `looks_around` also gets its `place`, if it has one.
    """

    def register(rebuild: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        RULES.update(dict.fromkeys(names, Rule(rebuild, count, runs, looks_around)))
        return rebuild

    return register


def executed_jaxprs(primitive: Any, params: dict[str, Any]) -> list[Any]:
    """The jaxprs of an equation that run when it runs."""
    known = RULES.get(primitive.name)
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
    frame.eqn_scope = frame.here()
    known = RULES.get(primitive.name)
    if known is None:
        if not _compat.eqn_has_logs(primitive, params, effects):  # only derivative rules, which cannot be reached
            return primitive.bind(*args, **params)
        mark = _compat.first_log(primitive, params)
        raise _errors.opaque_primitive(primitive.name, mark.keys, mark.site)
    extra = {"place": place} if known.looks_around else {}
    return known.rebuild(frame, primitive, params, list(args), **extra)


def without_unwanted(jaxprs: Sequence[Any]) -> Sequence[Any]:
    """The same jaxprs without their logs, if the surrounding trace is about to drop all of them."""
    trace = _compat.current_trace()
    if isinstance(trace, LogTrace) and trace.frame.handler.in_place:
        handler = trace.frame.handler
        trace.frame.list_logs(_BLOCK, {"jaxprs": list(jaxprs)})
        scope = trace.frame.here()
        if not any(wants_any(handler, jaxpr, scope) for jaxpr in jaxprs):
            return [transformed(Frame(handler, (), scope=scope), jaxpr, ()).jaxpr for jaxpr in jaxprs]
    return jaxprs


_BLOCK = _compat.Primitive("lox_block")  # stands for anything that runs jaxprs
_logged: Any = weakref.WeakKeyDictionary()


def _logged_in(jaxpr: Any) -> Logged:
    """Keys and tags of all logs in a jaxpr, whether they ever run or not."""
    logged = _logged.get(jaxpr)
    if logged is None:
        logged = _logged[jaxpr] = {}
        for eqn in _compat.split_jaxpr(jaxpr)[0].eqns if _compat.has_logs(jaxpr) else ():
            logged.update({(scope_of(eqn, "") + key, tags): None for key, tags in logged_by(eqn.primitive, eqn.params)})
    return logged


def logged_by(primitive: Any, params: dict[str, Any]) -> Logged:
    """Keys and tags of all logs in an equation, whether they ever run or not."""
    if primitive is log_p:
        return dict.fromkeys((key, params["meta"].tags) for key in params["meta"].keys)
    return {log: None for jaxpr in _compat.sub_jaxprs(params) for log in _logged_in(jaxpr)}


def tally(jaxpr: Any, scope: str, select: Callable[[Meta, str], Iterable[str]]) -> dict[str, Tally]:
    """Count the events of each key in a jaxpr that is in `scope`; `select` gives the keys of a log that count."""
    total: dict[str, Tally] = {}
    if _compat.has_logs(jaxpr):
        for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
            for key, of_eqn in tally_of(eqn.primitive, eqn.params, scope_of(eqn, scope), select).items():
                total[key] = total.get(key, Tally()) + of_eqn
    return total


def tally_of(
    primitive: Any, params: dict[str, Any], scope: str, select: Callable[[Meta, str], Iterable[str]]
) -> dict[str, Tally]:
    """Count the events of each key in an equation."""
    if primitive is log_p:
        return dict.fromkeys(select(params["meta"], scope), Tally(1, not params["meta"].has_valid))
    inside = [tally(j, scope, select) for j in executed_jaxprs(primitive, params) if _compat.has_logs(j)]
    known = RULES.get(primitive.name)
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
            frame = Frame(handler, jax.tree.unflatten(state_tree, args[: len(leaves)]), *block)
            with _compat.given_up_by(Retrace):
                outs = interpret(frame, jaxpr, args[len(leaves) :])
            state_out, piece = jax.tree.leaves(frame.state), frame.piece()
            self.keys = frame.keys
            self.struct, self.piece = types_of(frame.state), types_of(piece)
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


def transformed(frame: Frame, jaxpr: Any, state: Any, once: bool = False, decision: Any = None) -> Transformed:
    """The transformed jaxpr, made only once: JAX recognises a program by the identity of its jaxpr.

    If it runs `once`, it may change the type of the state. If a value decides whether it runs, `decision` is the type
    of that value.
    """
    cache = _transformed.setdefault(jaxpr, {})
    block = (frame.unbounded, frame.eqn_scope, frame.alike_after(decision))
    cache_key = (frame.handler, block, _signature(state), _compat.debugged())
    if cache_key not in cache:
        cache[cache_key] = Transformed(frame.handler, jaxpr, state, *block)
    rebuilt = cache[cache_key]
    if rebuilt.grown and not (once and frame.handler.allows(frame, rebuilt.struct)):
        raise Grown(frame, rebuilt.struct)
    return rebuilt


_compiled: Any = weakref.WeakKeyDictionary()


def run_compiled(frame: Frame, primitive: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Rebuild and run a primitive outside of jit, such that nothing is traced or compiled again the next time."""
    if primitive.name == "jit" or primitive.name not in RULES:
        return apply_rule(frame, primitive, params, args)  # a jit compiles with its own options; the others raise
    frame.eqn_scope = frame.here()
    anchor, *others = _compat.sub_jaxprs(params)
    # By identity, since the key must not keep the anchor alive.
    identity = tuple((name, _identity(value)) for name, value in sorted(params.items()))
    types = types_of(list(args))

    cache = _compiled.setdefault(anchor, {}).setdefault((primitive, identity, tuple(types)), {})
    cache["alive"] = others  # their identities are in the key

    def alone() -> Any:
        return _compat.make_jaxpr(lambda *xs: primitive.bind(*xs, **params), types)

    return frame.settle(lambda state: _run_jitted(frame, alone, state, args, cache))


def _run_jitted(
    frame: Frame, jaxpr: Callable[[], Any], state: Any, args: Sequence[Any], cache: dict[Any, Any]
) -> list[Any]:
    """Transform, compile and run a jaxpr."""
    cache_key = (frame.handler, frame.unbounded, frame.eqn_scope, _signature(state), _compat.debugged())
    if cache_key not in cache:
        rebuilt = Transformed(frame.handler, jaxpr(), state, frame.unbounded, frame.eqn_scope)
        cache[cache_key] = rebuilt, jax.jit(_compat.jaxpr_as_fun(rebuilt.jaxpr))
    rebuilt, compiled = cache[cache_key]
    if rebuilt.grown and not frame.handler.allows(frame, rebuilt.struct):
        raise Grown(frame, rebuilt.struct)
    outs, state, piece = rebuilt.unpack(compiled(*jax.tree.leaves(state), *args))
    frame.absorb(state, piece, rebuilt.keys)
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
    """Wraps the derivative rules of functions that pass through it."""

    def __init__(self, parent: Any, around: Callable[..., Any]):
        super().__init__(parent, Frame(Drop(), ()))
        self.around = around

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        if method not in _WITH_RULES:
            return super().process_functions(method, primitive, functions, tracers, *rest, **params)
        fun, *rules = functions
        rules = [_compat.wrap_rule(rule, self.around) for rule in rules]
        return getattr(self.parent, method)(primitive, fun, *rules, tracers, *rest, **params)


class Drop(Handler):
    """Removes every log."""

    masks_lanes = False

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want no log."""
        return False

    @property
    def in_place(self) -> bool:
        """Blocks keep their arguments and results."""
        return True

    def event(self, frame: Frame, event: Event) -> None:
        """Drop it."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class MarkSeen(Drop):
    """Lets every log flow on, but no longer to the default sink."""

    def wants(self, meta: Meta, scope: str) -> bool:
        """Keep all logs."""
        return True

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again, marked."""
        bind(event.replace(seen=True))
