"""Jaxprs: their parts, what in them logs, and evaluating them."""

import dataclasses
import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.core
import numpy as np
from jax.interpreters import partial_eval as pe

from lox._compat import _extend
from lox._compat._effects import emit_effect, log_effect
from lox._compat._extend import ClosedJaxpr, Jaxpr, jit_p
from lox._compat._traces import (
    Literal,
    PjitFunction,
    Primitive,
    StagingTrace,
    StagingTracer,
    Tracer,
    Var,
    current_trace,
)

MERGED_JAXPR = Jaxpr is ClosedJaxpr  # since 0.11 one class, constants attached


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def split_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The open jaxpr and its constants."""
    if MERGED_JAXPR:
        return jaxpr, list(jaxpr.consts)
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def in_avals(jaxpr: Any) -> list[Any]:
    """The types of a jaxpr's arguments."""
    return [v.aval for v in split_jaxpr(jaxpr)[0].invars]


def out_avals(jaxpr: Any) -> list[Any]:
    """The types of a jaxpr's results."""
    return [v.aval for v in split_jaxpr(jaxpr)[0].outvars]


def is_high(jaxpr: Any) -> bool:
    """Whether JAX still has to lower a jaxpr to one of ordinary types, which it cannot inside of other primitives."""
    return getattr(split_jaxpr(jaxpr)[0], "is_high", False)  # since 0.7


def without_consts(closed: Any) -> tuple[Any, list[Any]]:
    """A jaxpr that takes its constants as leading arguments, as remat needs it, and those constants."""
    if MERGED_JAXPR and jax.__version_info__[:3] == (0, 11, 0):  # constants cannot be taken off one by one
        return closed.replace(constvars=[], invars=[*closed.constvars, *closed.invars]), list(closed.consts)
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
    return jaxpr.with_consts(list(consts)) if MERGED_JAXPR else ClosedJaxpr(jaxpr, list(consts))


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Every jaxpr among an equation's parameters."""
    jaxprs = []
    for value in params.values():
        if value is None:
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                jaxprs.append(item)
            elif isinstance(item, jax.tree_util.PyTreeDef):
                jaxprs.extend(_jaxprs_in_treedef(item))
            elif type(item).__module__.startswith("jax") and hasattr(item, "expand"):
                jaxprs.extend(sub_jaxprs(vars(item)))  # 0.11.2: custom_root as a "high" primitive
    return jaxprs


def _jaxprs_in_treedef(treedef: Any) -> list[Any]:
    # Equinox passes whole pytrees to its own primitives: arrays as operands, and the rest, jaxprs included, as the
    # static data of one tree structure.
    jaxprs: list[Any] = []
    pending, depth = [treedef], 0
    while pending and depth < 20:
        depth += 1
        nodes, pending = pending, []
        for node in nodes:
            if is_jaxpr(node):
                jaxprs.append(node)
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
    return jaxprs


def literal_value(literal: Any) -> Any:
    """The value of a literal as an array; it may be a plain Python number."""
    value = literal.val
    return value if isinstance(value, jax.Array) else np.asarray(value, literal.aval.dtype)


def make_jaxpr(fun: Any, avals: Any) -> Any:
    """`jax.make_jaxpr` on flat arguments of the given types, weak types and varying axes included."""
    return jax.make_jaxpr(fun)(*avals)


class LogMark(NamedTuple):
    """What a compiled program, or a Python function that a primitive holds, logs."""

    keys: tuple[str, ...]
    site: str
    is_silent: bool = False  # nothing was compiled that would send it anywhere


def _find_abstract_evaluation() -> Any:
    probe = Primitive("lox_probe")
    probe.def_abstract_eval(lambda: None)
    return probe.abstract_eval.__code__  # type: ignore[attr-defined]


# The code that runs the abstract evaluation of every primitive that claims to have no effects.
WITHOUT_EFFECTS = _find_abstract_evaluation()
# For each primitive, the Python functions in its parameters that were seen to log (kept alive), and what they log.
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
    return next((mark for logging, mark in known if functions == set(map(id, logging))), None)


def _functions_in(params: dict[str, Any]) -> list[Any]:
    functions, pending = [], list(params.values())
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType | types.MethodType | PjitFunction):
            functions.append(value)
    return functions


LOG_NAME = "lox_log"
LOG_GRAD_NAME = "lox_log_grad"
_JAX_HOME = os.path.dirname(jax.__file__)
_seen: Any = weakref.WeakKeyDictionary()


def _concerns(jaxpr: Any) -> tuple[bool, bool]:
    # Some primitives do not pass on the effects of their sub-jaxprs (custom_vmap_call on 0.7, xla_metadata_call,
    # custom_partitioning, pallas_call), so effects alone would miss logs: look inside, once.
    concerns = _seen.get(jaxpr)
    if concerns is None:
        of_eqns = [_eqn_concerns(eqn.primitive, eqn.params, eqn.effects) for eqn in split_jaxpr(jaxpr)[0].eqns]
        concerns = _seen[jaxpr] = any(logs for logs, _ in of_eqns), any(rules for _, rules in of_eqns)
    return concerns


def _eqn_concerns(primitive: Any, params: dict[str, Any], effects: Any) -> tuple[bool, bool]:
    if not params or primitive.name == LOG_NAME:  # most equations, and all logs, contain nothing
        return primitive.name == LOG_NAME or log_effect in effects, False
    logs = log_effect in effects or hidden_log(primitive, params) is not None
    logs = logs or log_effect in getattr(params.get("exported"), "unordered_effects", ())  # of `jax.export`
    # The derivative rules of JAX's own functions (relu, logsumexp, ...) never log: no need to wrap them.
    rules = primitive.name in ("custom_jvp_call", "custom_vjp_call") and not is_jax_own(params.get("call_jaxpr"))
    rules = rules or primitive.name in (LOG_GRAD_NAME, "remat_opt")
    # A jit has one jaxpr, and is asked in every call.
    for jaxpr in (params["jaxpr"],) if primitive is jit_p else sub_jaxprs(params):
        sub_logs, sub_rules = _concerns(jaxpr)
        logs, rules = logs or sub_logs, rules or sub_rules
    return logs, rules


def is_jax_own(fun: Any) -> bool:
    """Whether a function, or what was traced from one, is part of JAX."""
    fun = split_jaxpr(fun)[0] if is_jaxpr(fun) else fun
    return _JAX_HOME in (getattr(getattr(fun, "debug_info", None), "func_src_info", "") or "")


@functools.cache
def is_jax_own_primitive(primitive: Any) -> bool:
    """Whether a primitive is JAX's, or lox's: by the modules of what evaluates it, in numbers and in types.

    Both, because others may evaluate theirs as JAX does, by `apply_primitive`, or not at all.
    """
    return all(_package_of(fun) in ("jax", "lox") for fun in (primitive.impl, primitive.abstract_eval))


def _package_of(fun: Any) -> str:
    while True:
        fun = inspect.unwrap(fun)
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif getattr(fun, "__code__", None) is WITHOUT_EFFECTS:  # which holds the function that was given
            fun = fun.__closure__[0].cell_contents
        else:
            return fun.__module__.split(".")[0]


def has_logs(jaxpr: Any) -> bool:
    """Whether running the jaxpr may log."""
    return _concerns(jaxpr)[0]


def calls_host(jaxpr: Any) -> bool:
    """Whether running the jaxpr may hand something to the host."""
    return emit_effect in jaxpr.effects


def reports(jaxpr: Any) -> bool:
    """Whether running the jaxpr may log or hand something to the host."""
    return has_logs(jaxpr) or calls_host(jaxpr)


def eqn_has_logs(primitive: Any, params: dict[str, Any], effects: Any = ()) -> bool:
    """Whether an equation with these parameters, and effects where known, contains logs."""
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
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    if not effects and _can_stage(jaxpr, needed, env):
        return _stage_equations(eqns, env)
    outs = [v for eqn in eqns for v in eqn.outvars if type(v).__name__ != "DropVar"]
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


def stage_logs(jaxpr: Any, logs: list[Any], env: dict[Any, Any], params: Callable[[Any], Any]) -> bool:
    """Add equations of logs to the program that is traced, as they are but for their parameters; whether it could.

    Values that were weak may not be any more: what is logged is not, and no result depends on it.
    """
    if not _can_stage(jaxpr, {v: None for log in logs for v in log.invars if isinstance(v, Var)}, env, strong=True):
        return False
    _stage_equations(logs, env, params)
    return True


def _can_stage(jaxpr: Any, needed: Iterable[Any], env: dict[Any, Any], strong: bool = False) -> bool:
    """Whether equations that need these variables can be added to the program that is traced.

    With `strong`, also if values are not weak that were.
    """
    trace = current_trace()
    staging = isinstance(trace, StagingTrace) and not trace.requires_low and not is_high(jaxpr)
    return staging and all(_is_of_type(env[v], v.aval, strong) for v in needed)


def _is_of_type(x: Any, aval: Any, strong: bool) -> bool:
    if not isinstance(x, Tracer):
        return False  # a constant, with which JAX may evaluate equations
    known = jax.typeof(x)
    return known == aval or (strong and getattr(aval, "weak_type", False) and known == aval.update(weak_type=False))


def _stage_equations(eqns: list[Any], env: dict[Any, Any], params: Callable[[Any], Any] | None = None) -> None:
    """Add equations whose operands are of the types they had to the program that is traced, as they are.

    JAX does so with those of an inlined jit: evaluating them takes several times as long, only to find the types of
    their results again. (Its own function for that would replace their source lines by the current one.)
    """
    trace, around = current_trace(), _extend.current_name_stack()
    for eqn in eqns:
        info = eqn.source_info.replace(name_stack=around + eqn.source_info.name_stack)
        args = [
            StagingTracer(trace, v.aval, v, info) if isinstance(v, Literal) else trace.to_jaxpr_tracer(env[v], info)
            for v in eqn.invars
        ]
        types = [v.aval for v in eqn.outvars]
        changed = eqn.params if params is None else params(eqn)
        outs = trace.emit_eqn(args, types, eqn.primitive, changed, eqn.effects, info, eqn.ctx)
        env.update(zip(eqn.outvars, outs, strict=True))


def with_equations(jaxpr: Any, eqns: list[Any], outvars: list[Any]) -> Any:
    """A jaxpr with the same arguments but other equations and results."""
    opened, consts = split_jaxpr(jaxpr)
    names = _unknown_names(jaxpr, len(opened.invars), len(outvars))
    replaced = opened.replace(eqns=eqns, outvars=outvars, debug_info=names)
    return replaced if MERGED_JAXPR else ClosedJaxpr(replaced, consts)


def _unknown_names(jaxpr: Any, n_in: int, n_out: int) -> Any:
    info = split_jaxpr(jaxpr)[0].debug_info
    if hasattr(info, "with_unknown_names"):  # since 0.7.1
        return info.with_unknown_names()
    return info._replace(arg_names=("",) * n_in, result_paths=("",) * n_out)


def without_dead_code(closed: Any, avals: list[Any]) -> Any:
    """A jaxpr that computes and holds only what its results need, without constants or operands that nothing reads."""
    jaxpr, consts = without_consts(closed)
    live, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    consts_used, args_used = used[: len(consts)], used[len(consts) :]
    kept = [x for x, u in zip(consts, consts_used, strict=True) if u]

    def fun(*args: Any) -> list[Any]:
        return jax.core.eval_jaxpr(live, [], *kept, *[x for x, u in zip(args, args_used, strict=True) if u])

    return make_jaxpr(fun, avals)


def without_unused(closed: Any, count: int) -> tuple[Any, list[bool]]:
    """A jaxpr without the unread ones among its first `count` arguments, and a flag for each whether it is read."""
    jaxpr, consts = split_jaxpr(closed)
    others = [True] * (len(jaxpr.invars) - count)
    smaller, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), [*[False] * count, *others])
    return closed if all(used) else close_jaxpr(smaller, consts), used[:count]


def passed_on(jaxprs: list[Any]) -> list[int | None]:
    """For each result, the index of the argument that it is in all of these jaxprs; None if it is not the same one."""
    by_jaxpr = []
    for jaxpr in (split_jaxpr(jaxpr)[0] for jaxpr in jaxprs):
        index = {v: n for n, v in enumerate(jaxpr.invars)}
        by_jaxpr.append([None if isinstance(v, Literal) else index.get(v) for v in jaxpr.outvars])
    return [indices[0] if len({*indices}) == 1 else None for indices in zip(*by_jaxpr, strict=True)]


def eval_equation(jaxpr: Any, eqn: Any, args: list[Any]) -> list[Any]:
    """Evaluate one equation with other arguments."""
    ins = [Var(jax.typeof(x)) for x in args]
    outs = [Var(v.aval) for v in eqn.outvars]
    env = dict(zip(ins, args, strict=True))
    # The caller has already entered the equation's context, which must not be entered twice.
    info = eqn.source_info.replace(name_stack=_extend.new_name_stack())
    eval_equations(jaxpr, [eqn.replace(invars=ins, outvars=outs, source_info=info)], env)
    return [env[v] for v in outs]


class equation_context:
    """Restore the source location, name stack and configuration of an equation that is traced again."""

    __slots__ = ("config", "source")  # no generator: one is entered for every log

    def __init__(self, eqn: Any):
        info = eqn.source_info
        stack = _extend.current_name_stack() + info.name_stack
        self.source, self.config = _extend.user_context(info.traceback, name_stack=stack), eqn.ctx.manager

    def __enter__(self) -> None:
        self.source.__enter__()
        self.config.__enter__()

    def __exit__(self, *exception: Any) -> None:
        try:
            self.config.__exit__(*exception)
        finally:
            self.source.__exit__(*exception)


SCOPE = "lox:"  # marks the named scopes of JAX that `lox.scope` has opened


def scopes_in(name_stack: Any) -> str:
    """The names of lox's scopes in a name stack, outermost first, as a prefix of keys."""
    if not name_stack.stack:
        return ""
    names = [getattr(entry, "name", "") for entry in name_stack.stack]
    return "".join(f"{name.removeprefix(SCOPE)}/" for name in names if name.startswith(SCOPE))


def open_scopes() -> str:
    """The same for the scopes that are open right now; tracing the body of a primitive starts with none."""
    return scopes_in(_extend.current_name_stack())


def operands_of(params: dict[str, Any], args: Any) -> list[Any]:
    """All arrays that an equation reads: its arguments, and those that its jaxprs close over."""
    return [*args, *[x for jaxpr in sub_jaxprs(params) for x in split_jaxpr(jaxpr)[1]]]
