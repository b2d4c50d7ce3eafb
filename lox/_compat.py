"""Everything lox knows about JAX's versions and internals, and the only place that knows it.

Each helper gives one answer for every supported JAX (0.7 and later). Where versions differ, the branch says since
when, so that it can go once the older version is no longer supported.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.linear_util as lu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config, sharding_impls
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src.dispatch import runtime_tokens as _runtime_tokens
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.mesh import use_abstract_mesh  # in jax.sharding since 0.8
from jax._src.shard_map import eager_rules as _eager_rules
from jax._src.sharding_impls import (
    SdyArray,  # pyright: ignore[reportPrivateImportUsage]
    SdyArrayList,  # pyright: ignore[reportPrivateImportUsage]
    SPMDAxisContext,
)
from jax.experimental import io_callback
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe

Var = jex_core.Var
Literal = jex_core.Literal
jaxpr_as_fun = jex_core.jaxpr_as_fun
Trace = jax.core.Trace
Tracer = jax.core.Tracer
PjitFunction = type(jax.jit(lambda: None))

# `set_current_trace` and `take_current_trace` are in jax.extend.core since 0.10. Up to 0.9 they were in jax.core, where
# touching them warns from 0.8.2 on: before there was a new place.
_trace_home: Any = jex_core if hasattr(jex_core, "set_current_trace") else _core
set_current_trace = _trace_home.set_current_trace
take_current_trace = _trace_home.take_current_trace


class Primitive(jex_core.Primitive):
    """A primitive of lox's own.

    `jax.experimental.jet` is heavy, so it is not imported for the sake of its table of rules: who uses it has.
    """

    jet_rule: Any = None

    def bind(self, *args: Any, **params: Any) -> Any:
        """As JAX's."""
        jet = sys.modules.get("jax.experimental.jet")
        if jet is not None:
            jet.jet_rules.setdefault(self, self.jet_rule)
        return super().bind(*args, **params)


def current_trace() -> Any:
    """The trace that interprets operations right now."""
    with take_current_trace() as trace:
        return trace


def _find_eval_trace() -> Any:
    # A new thread starts with no transformation around, even if lox is being imported inside one.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(current_trace).result()


def _find_staging_trace() -> type:
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(current_trace())))()
    return found[0]


eval_trace = _find_eval_trace()
StagingTrace = _find_staging_trace()  # what jit and make_jaxpr trace with


def is_evaluating() -> bool:
    """Whether operations run at once, with no transformation around."""
    return _core.trace_ctx.trace is eval_trace  # every call asks, and the public way takes a microsecond


def stand_for(trace: Any, parent: Any) -> None:
    """Let a trace that makes no values of its own pass for the one around it.

    JAX keys its caches with a weak reference to the current trace, so that every call of a transformed function would
    leave an entry in the cache of each jitted function it calls; and libraries compare it to tell whether they are at
    the level where an object was made. Functions that log have an effect, for which JAX's C++ cache never answers:
    nothing can pass the trace by.
    """
    trace._weakref, trace.stands_for = parent._weakref, parent


def underneath(trace: Any) -> Any:
    """The trace that this one stands for, if it does."""
    while (parent := getattr(trace, "stands_for", None)) is not None:
        trace = parent
    return trace


class _CoreForMeshes:
    """`jax._src.core` as `set_mesh`, `use_mesh` and `get_mesh` see it.

    They may only be used where no transformation is around, and ask whether the current trace is the outermost. One
    that stands for it is not; but then nothing is being traced. Others that ask must know better: jit runs a function
    past the trace if there is none.
    """

    def __init__(self, core: Any):
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def trace_state_clean(self) -> bool:
        """Whether nothing is being traced."""
        with set_current_trace(underneath(_core.trace_ctx.trace)):
            return self._core.trace_state_clean()


sharding_impls.core = _CoreForMeshes(sharding_impls.core)  # pyright: ignore[reportPrivateImportUsage]


# --- shard_map outside of jit --------------------------------------------------------------------

# There JAX runs the body one primitive at a time, each as a jitted shard_map of its own on arrays with a leading axis
# for the devices. It goes past all traces with them, but not with a primitive that has a rule of its own for this.
_on_shards_p = Primitive("lox_on_shards")
_on_shards_p.multiple_results = True


def bind_on_shards(shards: Any, around: Any, primitive: Any, params: dict[str, Any], args: Any) -> Any:
    """Bind a primitive inside the shard_map that `shards` is the trace of, such that the trace `around` it sees it."""
    mesh, check = shards.mesh, shards.check

    def axes(aval: Any) -> tuple[Any, ...]:
        varying = varying_axes(aval) if check else shards.manual_axes
        return tuple(name for name in mesh.axis_names if name in varying)

    types = [aval_of(x) for x in args]
    out_types = primitive.abstract_eval(*types, **params)[0]
    one = not primitive.multiple_results
    call = _OnShards(
        primitive,
        tuple(params.items()),
        mesh,
        frozenset(shards.manual_axes),
        check,
        tuple(map(axes, types)),
        tuple(map(axes, [out_types] if one else out_types)),
    )
    with set_current_trace(shards):
        outs = _on_shards_p.bind(*args, call=call, around=around)
    return outs[0] if one else outs


@dataclasses.dataclass(frozen=True)
class _OnShards:
    """A primitive on arrays with a leading axis for the devices; equal to others, so that jit knows it again."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    mesh: Any
    manual_axes: frozenset[Any]
    check: bool
    in_axes: tuple[tuple[Any, ...], ...]
    out_axes: tuple[tuple[Any, ...], ...]

    def __call__(self, *args: Any) -> Any:
        def body(*args: Any) -> list[Any]:
            outs = self.primitive.bind(*[lax.squeeze(x, [0]) for x in args], **dict(self.params))
            return [lax.expand_dims(x, [0]) for x in (outs if self.primitive.multiple_results else [outs])]

        specs = [[jax.sharding.PartitionSpec(names) for names in axes] for axes in (self.in_axes, self.out_axes)]
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(specs[0]),
            out_specs=specs[1],
            axis_names=self.manual_axes,
            check_vma=self.check,
        )(*args)


@_on_shards_p.def_effectful_abstract_eval
def _abstract_eval_on_shards(*avals: Any, call: _OnShards, around: Any) -> Any:
    del around
    outs, effects = call.primitive.abstract_eval(*avals, **dict(call.params))
    return outs if call.primitive.multiple_results else [outs], effects


def _run_on_shards(mesh: Any, *args: Any, call: _OnShards, around: Any) -> Any:
    with set_current_trace(around), jax.disable_jit(False), use_abstract_mesh(mesh.abstract_mesh), _on_devices_of(mesh):
        return jax.jit(call)(*args)


def _on_devices_of(mesh: Any) -> Any:
    use = getattr(sharding_impls, "_internal_use_concrete_mesh", None)  # up to 0.7 jit finds them in its arguments
    return contextlib.nullcontext() if use is None else use(mesh)


_eager_rules[_on_shards_p] = _run_on_shards


@contextlib.contextmanager
def given_up_by(error: type[Exception]) -> Any:
    """What is traced here may be given up, by raising this error, to be traced anew in another way.

    JAX clears a trace that is complete; one that never is would keep alive what it closes over, tracers included.
    """
    trace = current_trace()
    try:
        yield
    except error:
        trace.invalidate()
        raise


# --- modes ---------------------------------------------------------------------------------------


def own_transfers() -> Any:
    """A context for what lox computes on its own, outside of compiled programs, from Python's and NumPy's numbers.

    Who guards against implicit transfers is after those of the program.
    """
    if all(guard.value in (None, "allow") for guard in _TRANSFER_GUARDS):
        return _NO_CONTEXT
    return jax.transfer_guard("allow")


def debugged() -> tuple[bool, bool]:
    """Whether NaNs and infinities are being debugged: what lox traces then contains none of its own.

    JAX's caches do not know of it, so that lox's must.
    """
    return config.debug_nans.value, config.debug_infs.value


_NO_CONTEXT = contextlib.nullcontext()
_TRANSFER_GUARDS = (
    config.transfer_guard_host_to_device,
    config.transfer_guard_device_to_host,
    config.transfer_guard_device_to_device,
)


# --- effects -------------------------------------------------------------------------------------

# JAX keeps several sets of effect types (lowerable, allowed in control flow, in custom derivatives, in remat, kept by
# partial evaluation), all tested with isinstance. Subclassing the debug effect joins them all; an effect outside the
# last one gives zero events under grad(scan).
_DebugEffect: Any = type(next(iter(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects)))


class LogEffect(_DebugEffect):
    """Marks an equation that logs, or contains one that does. There is one only: `jax.export` makes it of its class."""

    _one: Any = None
    __str__ = lambda self: "Log"  # noqa: E731

    def __new__(cls) -> Any:
        cls._one = cls._one or super().__new__(cls)
        return cls._one


class EmitEffect(_DebugEffect):
    """Marks an equation that hands values to the host."""

    __str__ = lambda self: "Emit"  # noqa: E731


class OrderEffect(_DebugEffect):
    """Marks an equation that calls the host in program order, with respect to all others that do.

    JAX passes a token from one to the next, through loops, branches and calls. What its own ordered effects cannot do,
    under `vmap` and on several devices, are checks for their kinds.
    """

    __str__ = lambda self: "Order"  # noqa: E731


log_effect = LogEffect()
emit_effect = EmitEffect()
order_effect = OrderEffect()
host_call_effects = {emit_effect, order_effect}
_effects.lowerable_effects.add_type(LogEffect)  # by its own name, under which `jax.export` finds it again
_effects.ordered_effects.add_type(OrderEffect)
_effects.shardable_ordered_effects.add_type(OrderEffect)


def _with_fresh_tokens(get_token_input: Any) -> Any:
    """How JAX finds the first token of a program, such that the programs of lox do not depend on each other.

    JAX also passes the token from one program to the next, which would wait for the one before, and fail if that one
    has failed; but programs come in order anyway. And it makes a token from an array of NumPy's, which guards take for
    a transfer of the user's: the program may run long after lox has returned, so that there is no other place to say
    that it is none.
    """

    @functools.wraps(get_token_input)
    def get(self: Any, effect: Any, devices: Any) -> Any:
        if effect is not order_effect:
            return get_token_input(self, effect, devices)
        self.current_tokens.pop(effect, None)
        with own_transfers():
            return get_token_input(self, effect, devices)

    return get


type(_runtime_tokens).get_token_input = _with_fresh_tokens(type(_runtime_tokens).get_token_input)

# --- jaxprs --------------------------------------------------------------------------------------

_ClosedJaxpr: Any = jex_core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
MERGED_JAXPR = jex_core.Jaxpr is _ClosedJaxpr  # since 0.11 one class, constants attached
Jaxpr = jex_core.Jaxpr


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return isinstance(x, jex_core.Jaxpr | _ClosedJaxpr)


def split_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The open jaxpr and its constants."""
    if MERGED_JAXPR:
        return jaxpr, list(jaxpr.consts)
    if isinstance(jaxpr, _ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def in_avals(jaxpr: Any) -> list[Any]:
    """The types of a jaxpr's arguments."""
    return [v.aval for v in split_jaxpr(jaxpr)[0].invars]


def out_avals(jaxpr: Any) -> list[Any]:
    """The types of a jaxpr's results."""
    return [v.aval for v in split_jaxpr(jaxpr)[0].outvars]


def shape_of(var: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return var.aval.shape


def without_consts(closed: Any) -> tuple[Any, list[Any]]:
    """A jaxpr that takes its constants as leading arguments, and those constants (what remat wants)."""
    if MERGED_JAXPR:
        return closed.with_consts([]), list(closed.consts)
    jaxpr = closed.jaxpr
    opened = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=_unknown_names(jaxpr, len(closed.consts) + len(jaxpr.invars), len(jaxpr.outvars)),
    )
    return opened, list(closed.consts)


def close_jaxpr(jaxpr: Any, consts: Any = ()) -> Any:
    """The open jaxpr with these constants."""
    return jaxpr.with_consts(list(consts)) if MERGED_JAXPR else _ClosedJaxpr(jaxpr, list(consts))


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Every jaxpr among an equation's parameters."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                found.append(item)
            elif isinstance(item, jax.tree_util.PyTreeDef):
                found.extend(_jaxprs_in_treedef(item))
            elif type(item).__module__.startswith("jax") and hasattr(item, "expand"):
                found.extend(sub_jaxprs(vars(item)))  # 0.11.2: custom_root as a "high" primitive
    return found


def _jaxprs_in_treedef(treedef: Any) -> list[Any]:
    # Equinox passes whole pytrees to primitives of its own: arrays as operands, and the rest, jaxprs included, as the
    # static data of one tree structure.
    found: list[Any] = []
    pending, depth = [treedef], 0
    while pending and depth < 20:
        depth += 1
        nodes, pending = pending, []
        for node in nodes:
            if is_jaxpr(node):
                found.append(node)
            elif isinstance(node, jax.tree_util.PyTreeDef):
                data = node.node_data()
                pending += [*node.children(), *([data[1]] if data else [])]
            elif isinstance(node, tuple | list):
                pending += node
            elif isinstance(node, dict):
                pending += node.values()
            elif dataclasses.is_dataclass(node) and not isinstance(node, type):
                pending += vars(node).values() if hasattr(node, "__dict__") else []
            elif isinstance(node, functools.partial):
                pending += [*node.args, *node.keywords.values()]
    return found


def is_symbolic_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def instantiated(x: Any) -> Any:
    """A cotangent as an array."""
    return zeros_of(x.aval) if is_symbolic_zero(x) else x


def literal_value(literal: Any) -> Any:
    """A literal as an array: its value may be a plain Python number."""
    value = literal.val
    return value if isinstance(value, jax.Array) else np.asarray(value, literal.aval.dtype)


def make_jaxpr(fun: Any, avals: Any) -> Any:
    """`jax.make_jaxpr` on flat arguments of the given types, weak types and varying axes included."""
    return jax.make_jaxpr(fun)(*avals)


# --- programs that log, and what hides it --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LogMark:
    """Says what a compiled program logs, or a Python function that a primitive holds."""

    keys: tuple[str, ...]
    site: str


def is_exporting(ctx: Any) -> bool:
    """Whether the program that is being lowered shall be written to a file."""
    return ctx.module_context.lowering_parameters.for_export


def mark_program(ctx: Any, mark: LogMark) -> None:
    """Mark the program that is being lowered. JAX carries along whatever shall live as long as the executable."""
    if not is_exporting(ctx):  # only what can be written to a file may be exported
        ctx.module_context.add_keepalive(mark)


def _mark_of(executable: Any) -> LogMark | None:
    kept = getattr(getattr(executable, "unsafe_call", None), "keepalive", None)
    return next((x for x in kept or () if isinstance(x, LogMark)), None)


def watch_dispatch(check: Any) -> None:
    """Keep programs that log out of the cache of JAX's C++ dispatch, and `check(mark, frame)` each of their calls.

    JAX leaves out programs with effects, but asks their jaxpr, which does not know of those that a primitive hides.
    """
    from jax._src import pjit

    original = pjit._get_fastpath_data

    @functools.wraps(original)
    def _get_fastpath_data(executable: Any, *args: Any, **kwargs: Any) -> Any:
        mark = _mark_of(executable)
        if mark is None:
            return original(executable, *args, **kwargs)
        check(mark, sys._getframe())
        return None

    pjit._get_fastpath_data = _get_fastpath_data


def watch_executables(check: Any) -> None:
    """`check(mark)` whenever the result of `jit(f).lower(...).compile()` is called and contains logs."""
    original = jax.stages.Compiled.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = _mark_of(self._executable)
        if mark is not None:
            check(mark)
        return original(self, *args, **kwargs)

    jax.stages.Compiled.__call__ = __call__


def watch_staging(check: Any) -> None:
    """`check(mark, frame)` whenever a jit that logs becomes part of a program: it may be traced already."""
    from jax._src.interpreters import partial_eval

    rules = partial_eval.custom_staging_rules
    jit_p = jex_core.primitives.jit_p
    original = rules[jit_p]

    def staging_rule(trace: Any, *args: Any, **params: Any) -> Any:
        if log_effect in params["jaxpr"].effects:
            check(first_log(jit_p, params), sys._getframe())
        return original(trace, *args, **params)

    rules[jit_p] = staging_rule


def _find_abstract_evaluation() -> Any:
    probe = Primitive("lox_probe")
    probe.def_abstract_eval(lambda: None)
    return probe.abstract_eval.__code__  # type: ignore[attr-defined]


# What runs the abstract evaluation of every primitive that claims to have no effects.
WITHOUT_EFFECTS = _find_abstract_evaluation()

# Primitives that hold Python functions which were seen to log: the functions, kept alive, and what they log.
_hidden: dict[Any, list[tuple[list[Any], LogMark]]] = {}


def note_hidden(primitive: Any, params: dict[str, Any], mark: LogMark) -> None:
    """Remember that an equation with these parameters calls a Python function that logs."""
    if hidden_log(primitive, params) is None:
        _hidden.setdefault(primitive, []).append((_functions_in(params), mark))


def hidden_log(primitive: Any, params: dict[str, Any]) -> LogMark | None:
    """What the Python functions that an equation holds are known to log."""
    known = _hidden.get(primitive)
    if known is None:
        return None
    functions = set(map(id, _functions_in(params)))
    return next((mark for held, mark in known if functions == set(map(id, held))), None)


def _functions_in(params: dict[str, Any]) -> list[Any]:
    found, pending = [], list(params.values())
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType | types.MethodType | PjitFunction):
            found.append(value)
    return found


LOG_NAME = "lox_log"
LOG_GRAD_NAME = "lox_log_grad"
_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
_JAX_HOME = os.path.dirname(jax.__file__)
_seen: Any = weakref.WeakKeyDictionary()


def is_custom_call(primitive: Any) -> bool:
    """Whether the primitive carries a derivative rule of the user's."""
    return primitive.name in _CUSTOM_CALLS


def _concerns(jaxpr: Any) -> tuple[bool, bool]:
    # Some primitives do not pass on the effects of their sub-jaxprs (custom_vmap_call on 0.7, xla_metadata_call,
    # custom_partitioning, pallas_call), so effects alone would miss logs: look inside, once.
    found = _seen.get(jaxpr)
    if found is None:
        logs = rules = False
        for eqn in split_jaxpr(jaxpr)[0].eqns:
            eqn_logs, eqn_rules = _eqn_concerns(eqn.primitive, eqn.params, eqn.effects)
            logs, rules = logs or eqn_logs, rules or eqn_rules
        found = _seen[jaxpr] = (logs, rules)
    return found


def _eqn_concerns(primitive: Any, params: dict[str, Any], effects: Any) -> tuple[bool, bool]:
    logs = log_effect in effects or hidden_log(primitive, params) is not None
    logs = logs or log_effect in getattr(params.get("exported"), "unordered_effects", ())  # of `jax.export`
    rules = is_custom_call(primitive) and not _is_jax_own(params.get("call_jaxpr"))
    rules = rules or primitive.name in (LOG_GRAD_NAME, "remat_opt")
    for jaxpr in sub_jaxprs(params):
        sub_logs, sub_rules = _concerns(jaxpr)
        logs, rules = logs or sub_logs, rules or sub_rules
    return logs, rules


def _is_jax_own(call_jaxpr: Any) -> bool:
    # The derivative rules of JAX's own functions (relu, logsumexp, ...) never log: no need to wrap them.
    return call_jaxpr is not None and is_jax_own(split_jaxpr(call_jaxpr)[0])


def is_jax_own(fun: Any) -> bool:
    """Whether a function, or what was traced from one, is part of JAX."""
    return _JAX_HOME in (getattr(getattr(fun, "debug_info", None), "func_src_info", "") or "")


def has_logs(jaxpr: Any) -> bool:
    """Whether running the jaxpr may log."""
    return _concerns(jaxpr)[0]


def calls_host(jaxpr: Any) -> bool:
    """Whether running the jaxpr may hand something to the host."""
    return emit_effect in jaxpr.effects


def reports(jaxpr: Any) -> bool:
    """Whether running the jaxpr may do either."""
    return has_logs(jaxpr) or calls_host(jaxpr)


def eqn_has_logs(primitive: Any, params: dict[str, Any], effects: Any = ()) -> bool:
    """Whether an equation with these parameters, and effects if they are known, contains logs."""
    return _eqn_concerns(primitive, params, effects)[0]


def eqn_concerns(primitive: Any, params: dict[str, Any], effects: Any = ()) -> bool:
    """Whether an equation contains logs, or derivative rules that might log."""
    return any(_eqn_concerns(primitive, params, effects))


def eqn_has_rules(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an equation contains derivative rules that might log."""
    return _eqn_concerns(primitive, params, ())[1]


def first_log(primitive: Any, params: dict[str, Any]) -> LogMark:
    """Keys and source line of the first log inside an equation, for messages."""
    if primitive.name == LOG_NAME:
        return LogMark(params["meta"].keys, params["meta"].site)
    hidden = hidden_log(primitive, params)
    if hidden is not None:
        return hidden
    for jaxpr in sub_jaxprs(params):
        for eqn in split_jaxpr(jaxpr)[0].eqns:
            if eqn_has_logs(eqn.primitive, eqn.params, eqn.effects):
                return first_log(eqn.primitive, eqn.params)
    return LogMark((), "an unknown line")


def eval_equations(jaxpr: Any, eqns: list[Any], env: dict[Any, Any]) -> None:
    """Evaluate a stretch of equations in the current trace, reading from and writing to `env`."""
    defined: set[Any] = set()
    needed: dict[Any, None] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if isinstance(var, Var) and var not in defined:
                needed.setdefault(var)
        defined.update(eqn.outvars)
    outs = [v for eqn in eqns for v in eqn.outvars if type(v).__name__ != "DropVar"]
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    stretch = split_jaxpr(jaxpr)[0].replace(
        constvars=[],
        invars=list(needed),
        outvars=outs,
        eqns=list(eqns),
        effects=effects,
        **({"consts": []} if MERGED_JAXPR else {}),
        debug_info=_unknown_names(jaxpr, len(needed), len(outs)),
    )
    values = jax.core.eval_jaxpr(stretch, [], *[env[v] for v in needed])
    env.update(zip(outs, values, strict=True))


def with_equations(jaxpr: Any, eqns: list[Any], outvars: list[Any]) -> Any:
    """A jaxpr of the same arguments with other equations and results."""
    opened, consts = split_jaxpr(jaxpr)
    names = _unknown_names(jaxpr, len(opened.invars), len(outvars))
    replaced = opened.replace(eqns=eqns, outvars=outvars, debug_info=names)
    return replaced if MERGED_JAXPR else _ClosedJaxpr(replaced, consts)


def _unknown_names(jaxpr: Any, n_in: int, n_out: int) -> Any:
    info = split_jaxpr(jaxpr)[0].debug_info
    if hasattr(info, "with_unknown_names"):  # since 0.7.1
        return info.with_unknown_names()
    return info._replace(arg_names=("",) * n_in, result_paths=("",) * n_out)


def without_dead_code(closed: Any, avals: list[Any]) -> Any:
    """A jaxpr that computes and holds only what its results need: no constants or operands that nothing reads."""
    jaxpr, consts = without_consts(closed)
    live, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    consts_used, args_used = used[: len(consts)], used[len(consts) :]
    kept = [x for x, u in zip(consts, consts_used, strict=True) if u]

    def fun(*args: Any) -> list[Any]:
        return jax.core.eval_jaxpr(live, [], *kept, *[x for x, u in zip(args, args_used, strict=True) if u])

    return make_jaxpr(fun, avals)


def without_unused(closed: Any, count: int) -> tuple[Any, list[bool]]:
    """A jaxpr without those of its first `count` arguments that nothing reads, and which are read."""
    jaxpr, consts = split_jaxpr(closed)
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    read.update(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
    used = [v in read for v in jaxpr.invars[:count]]
    if all(used):
        return closed, used
    kept = [v for v, u in zip(jaxpr.invars, [*used, *[True] * (len(jaxpr.invars) - count)], strict=True) if u]
    smaller = jaxpr.replace(invars=kept, debug_info=_unknown_names(jaxpr, len(kept), len(jaxpr.outvars)))
    return close_jaxpr(smaller, consts), used


def passed_on(jaxprs: list[Any]) -> list[int | None]:
    """By result, which argument it is in all of these jaxprs; None if it is another in some of them."""
    found = []
    for jaxpr in (split_jaxpr(jaxpr)[0] for jaxpr in jaxprs):
        places = {v: n for n, v in enumerate(jaxpr.invars)}
        found.append([None if isinstance(v, Literal) else places.get(v) for v in jaxpr.outvars])
    return [places[0] if len({*places}) == 1 else None for places in zip(*found, strict=True)]


def eval_equation(jaxpr: Any, eqn: Any, args: list[Any]) -> list[Any]:
    """Evaluate one equation on other arguments than its own."""
    ins = [Var(jax.typeof(x)) for x in args]
    outs = [Var(v.aval) for v in eqn.outvars]
    env = dict(zip(ins, args, strict=True))
    # Whoever evaluates a single equation has entered its context already: not twice.
    info = eqn.source_info.replace(name_stack=source_info_util.new_name_stack())
    eval_equations(jaxpr, [eqn.replace(invars=ins, outvars=outs, source_info=info)], env)
    return [env[v] for v in outs]


@contextlib.contextmanager
def equation_context(eqn: Any) -> Any:
    """Source location, name stack and configuration of the equation being re-traced."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


SCOPE = "lox:"  # marks those of JAX's named scopes that `lox.scope` has opened


def scope_names(name_stack: Any) -> list[str]:
    """The names of lox's scopes in a name stack, outermost first."""
    names = [getattr(entry, "name", "") for entry in name_stack.stack]
    return [name.removeprefix(SCOPE) for name in names if name.startswith(SCOPE)]


def open_scopes() -> list[str]:
    """The names of lox's scopes that are open right now; tracing the body of a primitive starts with none."""
    return scope_names(source_info_util.current_name_stack())


# --- types of values -----------------------------------------------------------------------------


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a value varies inside shard_map."""
    if hasattr(aval, "mat"):  # since 0.10
        return frozenset(aval.mat.varying)
    return frozenset(getattr(aval, "vma", ()))


def varying_over(values: Any) -> frozenset[Any]:
    """The mesh axes over which any of these values varies."""
    return frozenset().union(*[varying_axes(aval_of(x)) for x in values])


def is_first(axes: Iterable[Any]) -> Any:
    """Inside shard_map: whether a device is the first along all of these axes."""
    return sum(lax.axis_index(name) for name in sorted(axes)) == 0


def is_without_order() -> bool:
    """Whether host calls made here cannot be ordered: not where some axes of the mesh are manual and others are not.

    The XLA of JAX 0.8 to 0.10 ends the process when the token that keeps the order enters there.
    """
    kinds = set(_axis_types().values())
    return jax.sharding.AxisType.Manual in kinds and len(kinds) > 1


def axes_without_host_calls() -> list[str]:
    """The explicit axes of a mesh because of which nothing can be sent to the host from here."""
    return _explicit_beside_manual() if jax.__version_info__ < (0, 11) else []  # XLA could not lower it before


def _explicit_beside_manual() -> list[str]:
    types = _axis_types()
    manual = jax.sharding.AxisType.Manual in types.values()
    return [n for n, kind in types.items() if manual and kind == jax.sharding.AxisType.Explicit]


def _axis_types() -> dict[str, Any]:
    """The kind of each axis of the mesh that is around."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def array_type(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """The type of arrays of this shape, dtype and explicit sharding."""
    return jax.core.ShapedArray(shape, dtype, sharding=sharding)


def without_axis(aval: Any, axis: int) -> Any:
    """The type of arrays with one axis less."""
    shape, axes = list(aval.shape), list(aval.sharding.spec)
    del shape[axis], axes[axis : axis + 1]
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*axes))
    return aval.update(shape=tuple(shape), sharding=sharding)


def scalar_type(dtype: Any, like: Any) -> Any:
    """The type of a scalar that is on the devices of a value and varies over them as that does."""
    aval = aval_of(like)
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def explicit_sharding(aval: Any, lead: int = 0) -> Any:
    """How an array is sharded, as far as its type says so and without its leading axes; None if it does not."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    types = set(sharding.mesh.axis_types)
    if jax.sharding.AxisType.Explicit not in types or jax.sharding.AxisType.Manual in types:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[lead:]))


def with_leading_axes(sharding: Any, count: int) -> Any:
    """The same sharding for arrays with that many more axes in front."""
    if sharding is None:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*[None] * count, *sharding.spec))


def explicit_axes(aval: Any) -> tuple[Any, ...]:
    """By axis of an array the mesh axes over which its type says that it is sharded; nothing if there are none."""
    sharding = getattr(aval, "sharding", None)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec if any(axis is not None for axis in spec) else ()


def abstract_sharding(mesh: Any, axes: list[Any]) -> Any:
    """The sharding of an array's type, by axis of the array; None if no axis is sharded."""
    if not any(axes):
        return None
    mesh = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def unreduced_axes(x: Any) -> list[str]:
    """The mesh axes over which a value is still to be summed."""
    if not isinstance(x, jax.Array):
        return []
    sharding = getattr(aval_of(x), "sharding", None)
    return sorted(getattr(getattr(sharding, "spec", None), "unreduced", ()))  # since 0.7


class AxisSharding(NamedTuple):
    """The mesh axes over which one axis of an array is explicitly sharded."""

    mesh: Any
    names: Any


def explicit_over(mesh: Any, names: Any) -> AxisSharding | None:
    """How an axis is sharded over these mesh axes, as far as types tell."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    told = tuple(n for n in names if types[n] == jax.sharding.AxisType.Explicit)
    return AxisSharding(mesh, told[0] if len(told) == 1 else told) if told else None


def vmap_names(axis_data: Any) -> tuple[Any, Any]:
    """`axis_name` and `spmd_axis_name` of the vmap that calls a batching rule; None for what was not given."""
    spmd = axis_data.spmd_name
    if isinstance(spmd, tuple) and len(spmd) == 1:  # JAX makes a tuple of every name
        (spmd,) = spmd
    return None if axis_data.name is _core.no_axis_name else axis_data.name, spmd


def axis_shardings(x: Any) -> list[AxisSharding | None]:
    """How each axis of an array is sharded, as far as its type tells; an empty list if it tells nothing."""
    if not isinstance(x, jax.Array | jax.core.ShapedArray):
        return []
    spec = explicit_axes(aval_of(x))
    if not spec:
        return []
    # Outside of jit a sharding takes devices, which only arrays know.
    sharding: Any = (aval_of(x) if isinstance(x, Tracer) else x).sharding
    return [None if names is None else AxisSharding(sharding.mesh, names) for names in spec]


def shard_axes(x: Any, shardings: dict[int, AxisSharding]) -> Any:
    """`x` with these of its axes sharded so, and the others as they are."""
    axes = [*explicit_axes(aval_of(x))] or [None] * x.ndim
    if all(axes[axis] == sharding.names for axis, sharding in shardings.items()):
        return x
    mesh = next(iter(shardings.values())).mesh
    for axis, sharding in shardings.items():
        axes[axis] = sharding.names
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return _reshard(x, sharding)


def _reshard(x: Any, sharding: Any) -> Any:
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        if isinstance(x, Tracer):
            sharding = jax.sharding.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
        else:
            return jax.device_put(x, sharding)  # 0.7 reshards only what is on the devices already
    elif is_evaluating() and not isinstance(x, Tracer):
        return x  # types do not know the devices; JAX moves what is not committed to any
    return jax.sharding.reshard(x, sharding)


def sharded_like(x: Any, other: Any) -> Any:
    """`x`, of the same shape as another array, with its axes explicitly sharded as those."""
    found = {axis: sharding for axis, sharding in enumerate(axis_shardings(other)) if sharding is not None}
    return shard_axes(x, found) if found else x


def gathered(x: Any, axis: int) -> Any:
    """`x`, not sharded along an axis: JAX does not pick a single index of one that is."""
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return x if sharding is None else shard_axes(x, {axis: AxisSharding(sharding.mesh, None)})


def on_mesh_of(args: Any, tree: Any) -> Any:
    """`tree`, whose arrays know the mesh that the types of some arguments tell of.

    A scalar made inside jit knows no mesh, and then JAX cannot batch a loop or a branch that takes it over an axis that
    is explicitly sharded.
    """
    meshes = (getattr(getattr(aval_of(x), "sharding", None), "mesh", None) for x in args)
    explicit = (m for m in meshes if m is not None and jax.sharding.AxisType.Explicit in m.axis_types)
    mesh = next(explicit, None)
    if mesh is None:
        return tree
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    staged = isinstance(current_trace(), StagingTrace)

    def on_mesh(x: Any) -> Any:
        knows = not (staged or isinstance(x, Tracer)) or not aval_of(x).sharding.mesh.empty
        return x if knows else jax.sharding.reshard(x, sharding)

    return jax.tree.map(on_mesh, tree)


def zeros_along(x: Any, axis: int) -> Any:
    """As many zeros as `x` has along an axis, sharded as that is."""
    zeros = np.zeros(x.shape[axis], np.int32)
    shardings = axis_shardings(x)
    sharding = shardings[axis] if shardings else None
    return jnp.asarray(zeros) if sharding is None else shard_axes(jnp.asarray(zeros), {0: sharding})


def beside(others: Any, tree: Any) -> Any:
    """`tree`, with its arrays moved such that an operation, or a program, can take them together with others.

    What is not committed to devices JAX moves by itself. If none of the others is, they go wherever JAX likes; to be
    committed would tie them, and what comes of them, to a place.
    """
    leaves = jax.tree.leaves(tree)
    if not any(_is_committed(x) for x in leaves):
        return tree
    place = next((x.sharding for x in others if _is_committed(x)), None)
    with own_transfers():
        return jax.tree.map(lambda x: _moved(x, place) if _is_committed(x) else x, tree)


def _is_committed(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed


def _moved(x: Any, place: Any) -> Any:
    if place is None:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(_moved(jax.random.key_data(x), None), impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(x))
    if x.sharding.device_set == place.device_set:
        return x
    mesh = getattr(place, "mesh", None)
    return jax.device_put(x, place if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def operands_of(params: dict[str, Any], args: Any) -> list[Any]:
    """All arrays that running an equation takes: its arguments, and what its jaxprs have closed over."""
    return [*args, *[x for jaxpr in sub_jaxprs(params) for x in split_jaxpr(jaxpr)[1]]]


def aval_of(x: Any) -> Any:
    """The type of a value; types are their own."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def is_prng_key(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def map_words(fun: Any, keys: Any) -> Any:
    """What `fun` makes of the words of PRNG keys, as keys."""
    return jax.random.wrap_key_data(fun(jax.random.key_data(keys)), impl=keys.dtype._impl.name)


def zeros_of(aval: Any) -> Any:
    """Zeros of exactly this type: sharding and varying axes included, which `jnp.zeros` would lose.

    Of PRNG keys those whose words are zero; what JAX takes for their zeros are no keys.
    """
    if is_prng_key(aval.dtype):
        words = jax.numpy.zeros((*aval.shape, *aval.dtype._impl.key_shape), np.uint32)
        return with_varying_axes_of(jax.random.wrap_key_data(words, impl=aval.dtype._impl.name), aval)
    sharding = explicit_sharding(aval)
    if sharding is not None and jax.sharding.get_abstract_mesh().empty:
        # An array knows its mesh, but making a new one takes a mesh around. Outside of jit it takes the devices too,
        # which the type does not know; there an array on one device will do.
        if is_evaluating():
            return ad.zeros_like_aval(jax.core.ShapedArray(aval.shape, aval.dtype))
        with use_abstract_mesh(sharding.mesh):
            return ad.zeros_like_aval(aval)
    return ad.zeros_like_aval(aval)


def with_varying_axes_of(x: Any, aval: Any) -> Any:
    """`x`, made to vary over the mesh axes over which `aval` varies."""
    return vary_over(x, varying_axes(aval))


def vary_over(x: Any, axes: frozenset[Any]) -> Any:
    """`x`, made to vary over these mesh axes too."""
    missing = tuple(axes - varying_axes(jax.typeof(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):  # since 0.8
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]


# --- parameters whose layout changed -------------------------------------------------------------


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries a scan has."""
    if "num_consts" in params:  # up to 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `lax.scan` that reproduce the scan."""
    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    if "_split_transpose" in params:  # up to 0.9
        options["_split_transpose"] = params["_split_transpose"]
    return options


UNSPECIFIED = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params["out_shardings"][0]


def widen_jit(params: dict[str, Any], jaxpr: Any, extra_in: int, extra_out: int) -> dict[str, Any]:
    """A jit's parameters for `jaxpr`, which has that many more leading arguments and trailing results."""
    return dict(
        params,
        jaxpr=jaxpr,
        in_shardings=(*[UNSPECIFIED] * extra_in, *params["in_shardings"]),
        in_layouts=(*[None] * extra_in, *params["in_layouts"]),
        donated_invars=(*[False] * extra_in, *params["donated_invars"]),
        out_shardings=(*params["out_shardings"], *[UNSPECIFIED] * extra_out),
        out_layouts=(*params["out_layouts"], *[None] * extra_out),
    )


def widen_remat(params: dict[str, Any], jaxpr: Any, extra_in: int) -> dict[str, Any]:
    """A remat's parameters for `jaxpr`, which has that many more leading arguments."""
    return dict(params, jaxpr=jaxpr, prevent_cse=_widen_prevent_cse(params["prevent_cse"], extra_in))


def widen_high_remat(prim: Any, jaxpr: Any, extra_in: int) -> Any:
    """The same for the remat that 0.12 has behind a flag."""
    return type(prim)(jaxpr, prim.policy, _widen_prevent_cse(prim.prevent_cse, extra_in))


def _widen_prevent_cse(prevent_cse: Any, extra_in: int) -> Any:
    return prevent_cse if isinstance(prevent_cse, bool) else (False,) * extra_in + tuple(prevent_cse)


def with_common_types(jaxprs: list[Any], avals: list[Any]) -> list[Any]:
    """Branches whose results vary over the same mesh axes, which cond insists on."""
    varying = [[varying_axes(a) for a in out_avals(j)] for j in jaxprs]
    if all(v == varying[0] for v in varying[1:]):
        return jaxprs
    joint = [frozenset().union(*axes) for axes in zip(*varying, strict=True)]

    def widened(jaxpr: Any) -> Any:
        def fun(*args: Any) -> list[Any]:
            return [vary_over(x, axes) for x, axes in zip(jaxpr_as_fun(jaxpr)(*args), joint, strict=True)]

        return make_jaxpr(fun, avals)

    return [widened(j) for j in jaxprs]


def is_plain_jit(params: dict[str, Any]) -> bool:
    """Whether a jit has no donation, sharding, layout or compiler option that an enclosing jit would lose."""
    return (
        not any(params["donated_invars"])
        and all(s is UNSPECIFIED for s in (*params["in_shardings"], *params["out_shardings"]))
        and all(x is None for x in (*params["in_layouts"], *params["out_layouts"]))
        and not params["compiler_options_kvs"]
        and not params["keep_unused"]
    )


def manual_axes(params: dict[str, Any]) -> Any:
    """The mesh axes that a shard_map makes manual."""
    return params.get("newly_manual_axes", params.get("manual_axes"))  # since 0.10 / up to 0.9


@lu.transformation2
def _around(fun: Any, around: Any, *args: Any, **kwargs: Any) -> Any:
    return around(functools.partial(fun, **kwargs), *args)


def wrap_rule(rule: Any, around: Any) -> Any:
    """A derivative rule that is run by `around(rule, *args)`."""
    return _around(rule, around) if isinstance(rule, lu.WrappedFun) else functools.partial(around, rule)


def wrap_vjp_rules(wrap: Any) -> None:
    """Differentiate every `custom_vjp` of the user's by the rules `wrap(fwd, bwd, count_residuals)`.

    These two methods are the one place where both rules are at hand, whether the function is called at once, from a jit
    or from a jaxpr; a jaxpr has the forward rule as a thunk, and the backward rule is called when it is transposed.
    """
    from jax._src.interpreters import ad

    for trace in (ad.JVPTrace, ad.LinearizeTrace):
        trace.process_custom_vjp_call = _with_wrapped_rules(trace.process_custom_vjp_call, wrap)


def _with_wrapped_rules(process: Any, wrap: Any) -> Any:
    @functools.wraps(process)
    def process_custom_vjp_call(
        self: Any, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, out_trees: Any, symbolic_zeros: Any
    ) -> Any:
        if not is_jax_own(fun):
            fwd, bwd = wrap(fwd, bwd, lambda: out_trees()[1].num_leaves)
        return process(self, primitive, fun, fwd, bwd, tracers, out_trees=out_trees, symbolic_zeros=symbolic_zeros)

    return process_custom_vjp_call


def flat_results(results: Any) -> tuple[list[Any], Any]:
    """What a trace returns for a primitive as a list, and how to give it back its form."""
    if hasattr(results, "unflatten") and hasattr(results, "update"):  # since 0.11 shard_map's are a FlatTree
        return list(results.vals), results.update
    return list(results), lambda flat: flat


def forget_trees(fun: Any, rule: Any) -> None:
    """Let a function be as if it had never run, if its derivative rule has.

    JAX runs one of the two, and learns the structure of the result from the one that has run; it objects to both. lox
    does run both: one for the logs, one for the derivative.
    """
    if all(_is_filled(store) for store in rule.stores if store is not None):
        forget_results(fun)


def forget_results(fun: Any) -> None:
    """Let a function be called again: JAX notes the structure of its results, and objects to a second one."""
    for store in getattr(fun, "stores", ()):
        if store is not None:
            store.reset()


def _is_filled(store: Any) -> bool:
    try:
        store.val  # noqa: B018  one of the two classes of stores has no other way to tell
    except lu.StoreException:
        return False
    return True


# --- keeping loop-invariant logs in their loop ---------------------------------------------------

# When JAX differentiates a scan it evaluates once, outside, whatever does not change from one iteration to the next
# (jax#16637). For a log that would turn n events into one. The hoisting is a partial evaluation like any other; only
# the function that asks for it tells them apart.
_HOISTERS = frozenset({"_scan_known_hoisting", "_scan_partial_eval_custom"})


def is_hoisting() -> bool:
    """Whether JAX is about to move loop-invariant equations out of their loop."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _HOISTERS:
            return True
        frame = frame.f_back
    return False


def keep_in_loop(primitive: Any) -> None:
    """Never move this primitive's equations out of a loop."""

    def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
        if is_hoisting():
            tracers = tuple(trace.instantiate_const(t) for t in tracers)
        return trace.default_process_primitive(primitive, tracers, params)

    pe.custom_partial_eval_rules[primitive] = rule


def inline_calls() -> None:
    """Partially evaluate `closed_call` by evaluating its body in place.

    Up to 0.10 JAX drops the part of a call that is left for later if nothing but an effect is in it, and it makes such
    calls itself when it differentiates loops under remat.
    """
    from jax._src.interpreters import partial_eval

    rules = getattr(partial_eval, "call_partial_eval_rules", None)
    if rules is not None:

        def rule(trace: Any, primitive: Any, fun: Any, tracers: Any, params: Any) -> Any:
            del primitive, params
            with set_current_trace(trace):
                return fun.call_wrapped(*tracers)

        rules[jex_core.primitives.closed_call_p] = rule


def silence_flax_probe(silenced: Any) -> None:
    """Run the probe of Flax's `nn.scan` by `silenced(body, *args)`.

    Linen traces the body of a scan once more, to find out what does not depend on the loop, and evaluates what is left
    of it. A log in there would be an event too many, or Flax would take it for a result that depends on the loop. It
    finds the tracing function under JAX's public name, which JAX itself does not use.
    """
    trace = getattr(pe, "trace_to_jaxpr_dynamic", None)
    if trace is None:
        return

    @functools.wraps(trace)
    def trace_to_jaxpr_dynamic(fun: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(fun, "debug_info", None), "traced_for", "") == "flax scan":
            fun = wrap_rule(fun, silenced)
        return trace(fun, *args, **kwargs)

    pe.trace_to_jaxpr_dynamic = trace_to_jaxpr_dynamic  # pyright: ignore[reportAttributeAccessIssue]


def run_in_forward_pass(primitive: Any, stand_in: Any = None) -> None:
    """Under remat, run this primitive's equations with the forward pass and never again in the recomputation.

    If it has a result, which is its first operand, the primitive `stand_in` passes that on in the recomputation: what a
    while loop computes cannot be saved.
    """

    def rule(saveable: Any, unks_in: Any, inst_in: Any, eqn: Any) -> Any:
        del saveable
        outs = len(eqn.outvars)
        if stand_in is not None and not any(unks_in):
            passed = eqn.replace(
                primitive=stand_in, params={}, invars=eqn.invars[:1], effects=frozenset(), outvars=eqn.outvars
            )
            residuals = [v for v, inst in zip(eqn.invars[:1], inst_in, strict=False) if isinstance(v, Var) and not inst]
            return eqn, passed, [False] * outs, [True] * outs, residuals
        if any(unks_in):
            residuals = [v for v, inst in zip(eqn.invars, inst_in, strict=True) if not inst]
            return None, eqn, [True] * outs, [True] * outs, residuals
        return eqn, None, [False] * outs, [False] * outs, []

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule
    try:  # 0.12 has a new remat behind a flag, with a table of its own
        from jax._src.interpreters import remat
    except ImportError:
        return
    if hasattr(remat, "rules"):
        remat.rules[primitive] = lambda trace, *args, **params: (
            primitive.bind(*args, **params),
            (),
            lambda res, *args: [] if stand_in is None else [args[0]],
        )


def report_primals(primitive: Any, stand_in: Any = None) -> None:
    """Let a primitive that exists for its effect have it once, where the program computes its primal values.

    For `stand_in` see `run_in_forward_pass`.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        del tangents
        outs = primitive.bind(*primals, **params)
        return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]

    def jet(primals: Any, series: Any, **params: Any) -> Any:
        outs = primitive.bind(*primals, **params)
        return outs, [[zeros_of(jax.typeof(x))] * len(series[0]) for x in outs]

    ad.primitive_jvps[primitive] = jvp
    primitive.jet_rule = jet
    keep_in_loop(primitive)
    run_in_forward_pass(primitive, stand_in)


# --- device to host ------------------------------------------------------------------------------


def lower_callback(ctx: Any, callback: Any, *operands: Any) -> Any:
    """Emit a host call of `callback(token, *arrays)`, which returns the next token.

    This is twenty times cheaper than `jax.debug.callback`, and hands over NumPy arrays, where that one starts a
    computation inside the callback, which may wait forever for a thread that waits for the callback. On several devices
    the token passes by, and the callback is given -1 for it.
    """
    axis_context = ctx.module_context.axis_context
    if getattr(axis_context, "num_devices", None) == 1:
        return _call_in_order(ctx, callback, operands)

    def without_token(*arrays: Any) -> tuple[()]:
        callback(np.int32(-1), *arrays)
        return ()

    if isinstance(axis_context, SPMDAxisContext):
        # Inside shard_map: every device calls. If it leaves some mesh axes to the compiler, JAX has to gather first.
        rest = tuple(n for n in axis_context.mesh.axis_names if n not in axis_context.manual_axes)
        if rest:

            def call(*arrays: Any) -> list[Any]:
                jax.debug.callback(lambda *a: callback(np.int32(-1), *map(np.asarray, a)) and None, *arrays)
                return []

            def call_from_first(*arrays: Any) -> list[Any]:
                return lax.cond(is_first(rest), call, lambda *arrays: [], *arrays)

            def emit(token: Any, *arrays: Any) -> Any:
                if _explicit_beside_manual():
                    # JAX does not gather over axes that are in types.
                    arrays = tuple(_whole(x) for x in arrays)
                    specs = (jax.sharding.PartitionSpec(),) * len(arrays)
                    jax.shard_map(call_from_first, in_specs=specs, out_specs=[], axis_names=set(rest))(*arrays)
                else:
                    call(*arrays)
                return [token]

            return mlir.lower_fun(emit, multiple_results=True)(ctx, *operands)
        kind = "MANUAL"
    else:
        kind = "MAXIMAL"  # the whole array, on the first device
    inner = ctx.replace(avals_in=ctx.avals_in[1:], avals_out=[])
    _call_in_order(inner, without_token, operands[1:], kind)
    ctx.set_tokens_out(inner.tokens_out or ctx.tokens_in)
    return [operands[0]]


def lower_in_whole_bytes(ctx: Any, callback: Any, operands: Any) -> Any:
    """`lower_callback` of any dtype: numbers of less than 8 bits leave in wider ones.

    XLA packs several of them into a byte, and JAX 0.7 hands the bytes to NumPy, which does not.
    """
    dtypes = [a.dtype for a in ctx.avals_in]
    wide = [_in_whole_bytes(d) for d in dtypes]
    if wide == dtypes:
        return lower_callback(ctx, callback, *operands)

    def narrowing(*arrays: Any) -> Any:
        return callback(*[x.astype(d) for x, d in zip(arrays, dtypes, strict=True)])

    def widen(*xs: Any) -> list[Any]:
        return [x.astype(d) for x, d in zip(xs, wide, strict=True)]

    avals = [a.update(dtype=np.dtype(d)) for a, d in zip(ctx.avals_in, wide, strict=True)]
    widened = mlir.lower_fun(widen, multiple_results=True)(ctx.replace(avals_out=avals), *operands)
    inner = ctx.replace(avals_in=avals)
    outs = lower_callback(inner, narrowing, *[x for xs in widened for x in (xs if isinstance(xs, list) else [xs])])
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    return outs


def _in_whole_bytes(dtype: Any) -> Any:
    if is_prng_key(dtype) or dtype.kind == "b":
        return dtype
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):
        small = jax.numpy.iinfo(dtype).bits < 8
        unsigned = jax.numpy.issubdtype(dtype, jax.numpy.unsignedinteger)
        return np.dtype(np.uint8 if unsigned else np.int8) if small else dtype
    return np.dtype(np.float32) if jax.numpy.finfo(dtype).bits < 8 else dtype


_PYTHON_LOOPS = frozenset(["scan", "while_loop", "fori_loop"])
_LOOPS_HOME = os.path.join("lax", "control_flow", "loops.py")


def in_python_loop(outermost: Any) -> bool:
    """Whether this is called from a loop that JAX runs in Python, inside of the function whose code is `outermost`.

    Under `disable_jit` there are no primitives for loops: nothing but the stack knows of them.
    """
    if not config.disable_jit.value:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_name in _PYTHON_LOOPS and frame.f_code.co_filename.endswith(_LOOPS_HOME):
            return True
        frame = frame.f_back
    return False


def _whole(x: Any) -> Any:
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec()) if explicit_axes(aval_of(x)) else x


def _callback_sharding(kind: str) -> Any:
    if config.use_shardy_partitioner.value:
        whole = SdyArray(mesh_shape=(), dim_shardings=(), logical_device_ids=(0,))
        return SdyArrayList((whole,))
    sharding = xla_client.OpSharding()
    sharding.type = getattr(xla_client.OpSharding.Type, kind)
    if kind == "MAXIMAL":
        sharding.tile_assignment_dimensions = [1]
        sharding.tile_assignment_devices = [0]
    return sharding


def _standing_alone(ctx: Any, operands: Any) -> Any:
    """The operands of a host call, not to be fused with it.

    XLA for GPUs makes one kernel of a slice and the call that takes it, and then aborts the process over the token that
    keeps calls in order (JAX 0.11).
    """
    if set(ctx.module_context.platforms) == {"cpu"}:
        return operands
    fence = mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)
    return fence(ctx.replace(avals_out=ctx.avals_in, tokens_in=mlir.TokenSet()), *operands)


def _call_in_order(ctx: Any, callback: Any, operands: Any, kind: str | None = None) -> Any:
    """A host call that takes part in the order of others if its effects say so; with several devices, of a kind."""
    operands = _standing_alone(ctx, operands)
    in_order = order_effect in ctx.tokens_in.effects() and kind != "MANUAL"  # every device has an order of its own
    order = order_effect if in_order else None
    results, token, _ = mlir.emit_python_callback(
        ctx,
        callback,
        None if order is None else ctx.tokens_in.get(order),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        sharding=None if kind is None else _callback_sharding(kind),
    )
    if order is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({order: token})))
    return results


def allow_order_with_offloading() -> None:
    """Let programs with ordered effects have results whose memory space is known.

    JAX counts the tokens among the results of a program, but not in the list of memory spaces that it compares with
    them, so that lowering fails. A checkpoint policy that offloads is enough to have such a list.
    """
    from jax._src.interpreters import mlir as internal

    lower = internal.lower_jaxpr_to_fun

    @functools.wraps(lower)
    def lower_jaxpr_to_fun(ctx: Any, name: Any, jaxpr: Any, effects: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = kwargs.get("propagated_out_mem_kinds")
        if kinds is not None and len(kinds) == len(out_avals(jaxpr)):
            kwargs["propagated_out_mem_kinds"] = (*[None] * len(effects), *kinds)
        return lower(ctx, name, jaxpr, effects, *args, **kwargs)

    internal.lower_jaxpr_to_fun = lower_jaxpr_to_fun


def lower_host_call(ctx: Any, callback: Any, *operands: Any) -> Any:
    """Emit a host call of `callback(*arrays)`, which returns a tuple of arrays.

    XLA may reorder calls that do not depend on each other, side effects or not: so its effects must tell that it takes
    part in the order of others. Inside shard_map, where every device calls, there is no one order to keep.
    """
    axis_context = ctx.module_context.axis_context
    if getattr(axis_context, "num_devices", None) == 1:
        return _call_in_order(ctx, callback, operands)
    if isinstance(axis_context, SPMDAxisContext) or ctx.avals_out:
        # A token beside results has a sharding that XLA refuses, with JAX 0.7. But who needs them comes later anyway.
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]

        def call(*arrays: Any) -> Any:
            return io_callback(lambda *a: callback(*map(np.asarray, a)), shapes, *arrays)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return _call_in_order(ctx, callback, operands, "MAXIMAL")


def forget_failed_effects(text: str) -> None:
    """Let go of what failed with this text, once it has been reported.

    JAX keeps it, and would raise it again to everyone who waits for effects, up to the end of the process.
    """
    for tokens in (_runtime_tokens.current_tokens, _runtime_tokens.output_runtime_tokens):
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if text in str(error):
                    tokens.pop(key, None)  # to look for ours is to forget it
