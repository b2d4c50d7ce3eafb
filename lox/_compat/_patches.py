"""Everything that lox changes in JAX, and in Flax. No other file does.

| what                                              | why, and what breaks without it                               |
|---------------------------------------------------|---------------------------------------------------------------|
| `sharding_impls.core`                             | `set_mesh` inside a transformed function would be refused     |
| `RuntimeTokenSet.get_token_input`                 | a program whose host call failed would fail all later ones    |
| `pjit._get_fastpath_data`                         | C++ would call a program that logs past the trace: lost events|
| the hooks of `debug_nans`, `_infs`, `_key_reuse`  | C++ would take over events of calls that JAX repeats          |
| `jax.stages.Compiled.__call__`                    | an executable that logs would lose its events                 |
| the staging rule of `jit`                         | so would a jit in a primitive that hides its effect           |
| `process_custom_vjp_call` of JVP and linearize    | what a backward rule computes again would log again           |
| the batching rules of `cond`, `while` and `scan`  | lanes would log branches and iterations they did not take     |
| the partial evaluation rules of all primitives    | loop-invariant logs would leave their loop: one event, not n  |
| the remat rule of `while`                         | the backward pass would log the loop again                    |
| partial evaluation of `closed_call` (to 0.10)     | logs in loops under remat would be lost                       |
| `mlir.lower_jaxpr_to_fun`                         | ordered host calls beside offloaded values would not compile  |
| `partial_eval.trace_to_jaxpr_dynamic`, for Flax   | the probe of Linen's `nn.scan` would log                      |

`tests/test_canary.py` has the same table, and tells which of them is broken by a new version of JAX.
"""

import copy
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src import pjit, sharding_impls
from jax._src.dispatch import runtime_tokens as _runtime_tokens
from jax._src.interpreters import ad as internal_ad
from jax._src.interpreters import mlir as internal_mlir
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax.control_flow import loops
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from lox._compat import _extend
from lox._compat._effects import emit_effect, log_effect, order_effect
from lox._compat._jaxprs import LogMark, first_log, is_jax_own, out_avals
from lox._compat._modes import own_transfers, stack
from lox._compat._parameters import wrap_rule
from lox._compat._traces import (
    OUTSIDE,
    Tracer,
    Var,
    checks,
    dispatch_context,
    set_current_trace,
    underneath,
)
from lox._compat._types import zeros_of


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


def _with_fresh_tokens(get_token_input: Any) -> Any:
    """How JAX finds the first token of a program, such that the programs of lox do not depend on each other.

    JAX also passes the token from one program to the next, which would wait for the one before, and fail if that one
    has failed; but programs come in order anyway. And it makes a token from an array of NumPy's, which guards take for
    a transfer of the user's: the program may run long after lox has returned, so that there is no other place to say
    that it is none. It is empty and never written to, so one is enough for all programs.
    """
    fresh: dict[Any, Any] = {}  # for these devices

    @functools.wraps(get_token_input)
    def get(self: Any, effect: Any, devices: Any) -> Any:
        if effect is not order_effect:
            return get_token_input(self, effect, devices)
        self.current_tokens.pop(effect, None)
        token = fresh.get(tuple(devices))
        if token is None:
            with own_transfers():
                token = fresh[tuple(devices)] = get_token_input(self, effect, devices)
        return token

    return get


type(_runtime_tokens).get_token_input = _with_fresh_tokens(type(_runtime_tokens).get_token_input)


def _marks_of(executable: Any) -> list[LogMark]:
    kept = getattr(getattr(executable, "unsafe_call", None), "keepalive", None)
    return [x for x in kept or () if isinstance(x, LogMark)]


class Program:
    """A program that has just run, with which C++ may answer further calls of the function that it was run for.

    The results of that function come first. If it logs, the arrays that follow are handed to `receive`, in every call.
    """

    receive: Any = None

    def __init__(self, executable: Any, rest: Any, outs: Sequence[Any]):
        self.executable, self.rest = executable, rest
        self.outs = [weakref.ref(x) for x in outs]

    def has_returned(self, outs: Sequence[Any]) -> bool:
        """Whether these are its results: while it ran, a callback may have run others."""
        known = [out() for out in self.outs]
        return bool(outs) and len(outs) == len(known) and all(map(operator.is_, outs, known))

    def data(self, original: Any, out_tree: Any, args: Sequence[Any], outs: Sequence[Any]) -> Any:
        """What C++ needs to call it for a function with these arguments and results. None if it is not its program."""
        arrays = [out() for out in self.outs[len(outs) :]]
        if not self.has_returned([*outs, *arrays]) or any(isinstance(x, Tracer) for x in args):
            return None
        if self.receive is None:
            return None if arrays else original(self.executable, out_tree, args, outs, *self.rest)
        results = slice(len(outs))
        receiver = _Receiver(out_tree, results, slice(len(outs), None), self.receive)
        return receiver.data(original, self.executable, args, (*outs, *arrays), *self.rest)


class _Receiver:
    """Who gets some of the arrays that a program returns whenever C++ calls it."""

    is_ready = False

    def __init__(self, out_tree: Any, results: slice, rest: slice, receive: Any):
        self.unflatten, self.results, self.rest, self.receive = out_tree.unflatten, results, rest, receive

    def data(self, original: Any, executable: Any, args: Any, outs: Sequence[Any], *rest: Any) -> Any:
        """What C++ needs to call the program, which has just returned these arrays."""
        leaves, tree = jax.tree.flatten(_WithMore(tuple(outs), self))
        data = original(executable, tree, args, leaves, *rest)  # which unflattens it too
        self.is_ready = True
        return data


@jax.tree_util.register_pytree_node_class
class _WithMore:
    """The results of a function, and arrays that are not its results: those of its events, or a token.

    C++ makes one of what a program has returned, by which these are handed over, and gets the results.
    """

    def __init__(self, arrays: tuple[Any, ...], receiver: _Receiver):
        self.arrays, self.receiver = arrays, receiver

    def tree_flatten(self) -> Any:
        return self.arrays, self.receiver

    @classmethod
    def tree_unflatten(cls, receiver: _Receiver, arrays: Any) -> Any:
        if not receiver.is_ready:
            return cls(arrays, receiver)
        receiver.receive(arrays[receiver.rest])  # first: the user's classes may raise
        return receiver.unflatten(arrays[receiver.results])


class _Noting(threading.local):
    into: Any = None


_noting = _Noting()


class noting_programs:
    """`with noting_programs() as programs:` notes what JAX runs on this thread for the first time in this context."""

    def __enter__(self) -> "noting_programs":
        self.before, self.last, _noting.into = _noting.into, None, self
        return self

    def __exit__(self, *exception: object) -> None:
        _noting.into = self.before

    def that_returned(self, outs: Sequence[Any]) -> Program | None:
        """The program whose results these arrays are, if C++ may call it."""
        return self.last if self.last is not None and self.last.has_returned(outs) else None


def _may_be_taken_over(executable: Any, outs: Sequence[Any]) -> bool:
    """Whether C++ may call a program where a trace of lox is the current one.

    Callbacks may run on this thread, and log: then that trace must not be the current one, as if they ran on another.
    """
    return not executable.unsafe_call.has_host_callbacks and all(type(x).__weakrefoffset__ for x in outs)


def _without_effects(executable: Any) -> Any:
    call = copy.copy(executable.unsafe_call)
    call.has_unordered_effects, call.ordered_effects = False, []
    executable = copy.copy(executable)
    executable._unsafe_call = call
    return executable


def _with_token(original: Any, executable: Any, out_tree: Any, args: Any, outs: Any, effects: Any, *rest: Any) -> Any:
    """What C++ needs to call a program that calls the host in order, and has just run. None if C++ cannot call it.

    JAX passes tokens from Python. But every program of lox begins with the same one, which C++ takes for a constant of
    the program; and the one that comes back is kept where JAX keeps what `jax.effects_barrier` waits for.
    """
    call, token = executable.unsafe_call, _runtime_tokens.current_tokens.get(order_effect)
    if call.ordered_effects != [order_effect] or not {*effects} <= {log_effect, emit_effect, order_effect}:
        return None
    # A program with one device in this process may have others elsewhere.
    if token is None or len(call._local_devices) > 1 or jax.process_count() > 1 or call.mut is not None:
        return None
    (device,), returned = call._local_devices, token._buf
    first = _runtime_tokens.get_token_input(order_effect, call._local_devices)._buf
    _runtime_tokens.set_token_result(order_effect, token)
    receiver = _Receiver(out_tree, slice(1, None), slice(1), functools.partial(_keep_token, device, type(token)))
    data = receiver.data(original, _without_effects(executable), args, (returned, *outs), effects, *rest)
    return data and data._replace(
        in_shardings=[first.sharding, *data.in_shardings],
        out_shardings=[returned.sharding, *data.out_shardings],
        kept_var_bitvec=[True, *data.kept_var_bitvec],
        in_device_local_layouts=[None, *data.in_device_local_layouts],
        const_args=[first, *data.const_args],
    )


def _keep_token(device: Any, kind: type, arrays: Sequence[Any]) -> None:
    # As JAX does: by device, since programs on two of them may end in any order, and by effect, where no program of
    # others replaces it, with the error if it has failed. All that JAX does with either is to wait until it is ready.
    _runtime_tokens.output_runtime_tokens[device] = arrays[0]
    _runtime_tokens.current_tokens[order_effect] = kind(arrays[0])


_HAS_CONSTANTS = "const_args" in pxla.MeshExecutableFastpathData._fields  # since 0.8


def watch_dispatch(check: Any) -> None:
    """Keep programs that log out of the cache of JAX's C++ dispatch, and `check(mark, frame)` each of their calls.

    JAX leaves out programs with effects, but asks their jaxpr, which does not know of those that a primitive hides.
    Those whose logs go nowhere need not be left out, since no trace of lox is passed by: see `dispatch_context`. And a
    function that was handed to such a trace may be dispatched by C++ if the trace offers a `Program` for it.
    """
    original = pjit._get_fastpath_data

    @functools.wraps(original)
    def _get_fastpath_data(executable: Any, out_tree: Any, args: Any, outs: Any, effects: Any, *rest: Any) -> Any:
        if executable is None:
            trace = _core.trace_ctx.trace
            program = getattr(trace, "offer", None)
            if program is None:
                return original(executable, out_tree, args, outs, effects, *rest)
            trace.offer = None
            return program.data(original, out_tree, args, outs)
        marks, is_outside = _marks_of(executable), dispatch_context() is OUTSIDE
        if is_outside and {*effects} <= {log_effect} and marks and all(mark.is_silent for mark in marks):
            return original(_without_effects(executable), out_tree, args, outs, effects, *rest)
        if marks:
            check(marks[0], sys._getframe())
        if is_outside and order_effect in effects and _HAS_CONSTANTS:
            return _with_token(original, executable, out_tree, args, outs, effects, *rest)
        if marks:
            return None
        data = original(executable, out_tree, args, outs, effects, *rest)
        if data is not None and _noting.into is not None and _may_be_taken_over(executable, outs):
            _noting.into.last = Program(executable, (effects, *rest), outs)
        return data

    pjit._get_fastpath_data = _get_fastpath_data


def _tell_cpp_of_checks() -> None:
    """Let C++ dispatch look elsewhere while JAX checks calls.

    It looks for NaNs after results are made, that is after events were handed over, and then calls the function again;
    and up to 0.7 it does not look for keys that are used twice if it knows a function already.
    """
    unset = _config.config_ext.unset
    states: Any = jax.debug_nans, jax.debug_infs, jax.debug_key_reuse

    def follow(state: Any) -> None:
        on_this_thread, everywhere = state._update_thread_local_hook, state._update_global_hook

        def update_this_thread(value: Any) -> None:
            if on_this_thread is not None:
                on_this_thread(value)
            is_set = any(s.get_local() is not unset for s in states)
            checks.set_local(any(s.value for s in states) if is_set else unset)

        def update_everywhere(value: Any) -> None:
            if everywhere is not None:
                everywhere(value)
            checks.set_global(any(s.get_global() for s in states))

        state._add_hooks(update_everywhere, update_this_thread)

    for state in states:
        follow(state)


_tell_cpp_of_checks()


def watch_executables(check: Any) -> None:
    """`check(mark)` whenever the result of `jit(f).lower(...).compile()` is called and contains logs."""
    original = jax.stages.Compiled.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if marks := _marks_of(self._executable):
            check(marks[0])
        return original(self, *args, **kwargs)

    jax.stages.Compiled.__call__ = __call__


def watch_staging(check: Any) -> None:
    """`check(mark, frame)` whenever a jit that logs becomes part of a program: it may be traced already."""
    rules = partial_eval.custom_staging_rules
    jit_p = _extend.jit_p
    original = rules[jit_p]

    def staging_rule(trace: Any, *args: Any, **params: Any) -> Any:
        if log_effect in params["jaxpr"].effects:
            check(first_log(jit_p, params), sys._getframe())
        return original(trace, *args, **params)

    rules[jit_p] = staging_rule


def wrap_vjp_rules(wrap: Any) -> None:
    """Differentiate every `custom_vjp` of the user's by the rules `wrap(fwd, bwd, count_residuals)`.

    These two methods are the one place where both rules are at hand, whether the function is called at once, from a jit
    or from a jaxpr; a jaxpr has the forward rule as a thunk, and the backward rule is called when it is transposed.
    """
    for trace in (internal_ad.JVPTrace, internal_ad.LinearizeTrace):
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


def batch_by(primitive: Any, rule: Any) -> None:
    """Batch a primitive of JAX's by `rule(original, axis_data, args, dims, **params)`."""
    rules = batching.fancy_primitive_batchers
    rules[primitive] = functools.partial(rule, rules[primitive])


def evaluate_partially_by(rule: Any) -> None:
    """Evaluate JAX's primitives partially by `rule(primitive, original, trace, *tracers, **params)`."""
    for primitive, original in list(pe.custom_partial_eval_rules.items()):
        if not primitive.name.startswith("lox"):
            pe.custom_partial_eval_rules[primitive] = functools.partial(rule, primitive, original)


def rematerialize_by(primitive: Any, rule: Any) -> None:
    """Split an equation of this primitive under remat by `rule(original, saveable, unks_in, inst_in, eqn)`."""
    rules = pe.partial_eval_jaxpr_custom_rules
    rules[primitive] = functools.partial(rule, rules[primitive])


# When JAX differentiates a scan it evaluates once, outside, whatever does not change from one iteration to the next
# (jax#16637). For a log that would turn n events into one. The hoisting is a partial evaluation like any other; only
# the function that asks for it tells them apart.
_HOISTERS = {loops._scan_known_hoisting.__code__, loops._scan_partial_eval_custom.__code__}


def is_hoisting() -> bool:
    """Whether JAX is about to move loop-invariant equations out of their loop."""
    return any(frame.f_code in _HOISTERS for frame in stack(sys._getframe(2)))


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
    rules = getattr(partial_eval, "call_partial_eval_rules", None)
    if rules is not None:

        def rule(trace: Any, primitive: Any, fun: Any, tracers: Any, params: Any) -> Any:
            del primitive, params
            with set_current_trace(trace):
                return fun.call_wrapped(*tracers)

        rules[_extend.closed_call_p] = rule


def silence_flax_probe(silenced: Any) -> None:
    """Run the probe of Flax's `nn.scan` by `silenced(body, *args)`.

    Linen traces the body of a scan once more, to find out what does not depend on the loop, and evaluates what is left
    of it. A log in there would be an event too many, or Flax would take it for a result that depends on the loop. It
    finds the tracing function under JAX's public name, which JAX itself does not use.
    """
    trace = pe.trace_to_jaxpr_dynamic

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
    try:  # since 0.11, a new remat behind a flag has another table
        from jax._src.interpreters import remat
    except ImportError:
        return
    if hasattr(remat, "rules"):
        residuals = () if jax.__version_info__ < (0, 12) else ((),)  # since 0.12, a rule returns residuals too
        remat.rules[primitive] = lambda trace, *args, **params: (
            primitive.bind(*args, **params),
            *residuals,
            lambda *args: [] if stand_in is None else [args[len(residuals)]],
        )


def report_primals(primitive: Any, stand_in: Any = None) -> None:
    """Let a primitive of lox have its effect exactly once, where the program computes its primal values.

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


def stage_as_it_is(primitive: Any, effect: Any) -> None:
    """Stage a primitive of lox that has this effect and no results: JAX would look for their types, at every log."""

    def rule(trace: Any, source_info: Any, *tracers: Any, **params: Any) -> Any:
        return trace.emit_eqn(list(tracers), [], primitive, params, {effect}, source_info)

    partial_eval.custom_staging_rules[primitive] = rule


def allow_order_with_offloading() -> None:
    """Let programs with ordered effects have results whose memory space is known.

    JAX counts the tokens among the results of a program, but not in the list of memory spaces that it compares with
    them, so that lowering fails. A checkpoint policy that offloads is enough to have such a list.
    """
    lower = internal_mlir.lower_jaxpr_to_fun

    @functools.wraps(lower)
    def lower_jaxpr_to_fun(ctx: Any, name: Any, jaxpr: Any, effects: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = kwargs.get("propagated_out_mem_kinds")
        if kinds is not None and len(kinds) == len(out_avals(jaxpr)):
            kwargs["propagated_out_mem_kinds"] = (*[None] * len(effects), *kinds)
        return lower(ctx, name, jaxpr, effects, *args, **kwargs)

    internal_mlir.lower_jaxpr_to_fun = lower_jaxpr_to_fun
