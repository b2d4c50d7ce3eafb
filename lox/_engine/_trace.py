"""Python functions, run under a trace of our own that hands their logs to a frame.

Operations without logs go on to the surrounding trace, so values stay as concrete as they were and Python's control
flow keeps working. What contains logs is rebuilt by `_interpret`.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from lox import _compat, _errors
from lox._engine import _hidden
from lox._engine._handler import Drop, Frame, Handler, Ran, Tally, inside, receive, types_of
from lox._engine._interpret import (
    BLOCK,
    Equation,
    apply_rule,
    in_jit,
    interpret,
    run_compiled,
    run_jitted,
    take_now,
    tally,
    tally_of,
    transformed,
    wants_any,
)
from lox._engine._primitive import log_p


@contextlib.contextmanager
def _announced(frame: Frame, find: Callable[[], dict[str, Tally]]) -> Iterator[None]:
    """Tell the handler how many events are about to come at the outermost level, and when they have."""
    with _compat.own_transfers():
        frame.handler.before(frame, find())
    completed = False
    try:
        yield
        completed = True
    finally:
        with _compat.own_transfers():
            frame.handler.after(frame, completed)


_UNANNOUNCED = contextlib.nullcontext()

# Primitives that JAX evaluates equation by equation outside of all transformations. Compiling them would require more.
_EVALUATED = frozenset(["remat2", "checkpoint", "remat_opt", "custom_vmap_call"])
# Those whose rebuilt form is a new program every time: JAX knows a program by the identity of its jaxprs.
_REBUILT = frozenset(["scan", "while", "cond"])
# The errors of tracing where Python needs a value.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# The methods of traces for functions with custom derivative rules.
_WITH_RULES = ("process_custom_jvp_call", "process_custom_vjp_call")


def _with_functions(method: str, count: int) -> Any:
    """The method of a trace for a primitive with that many Python functions, which come before its tracers."""

    def process(self: "PassingTrace", primitive: Any, *args: Any, **params: Any) -> Any:
        return self.process_functions(method, primitive, args[:count], *args[count:], **params)

    return process


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

    process_custom_jvp_call = _with_functions("process_custom_jvp_call", 2)
    process_custom_vjp_call = _with_functions("process_custom_vjp_call", 3)
    process_custom_transpose = _with_functions("process_custom_transpose", 1)
    process_shard_map = _with_functions("process_shard_map", 1)
    process_call = _with_functions("process_call", 1)
    process_map = _with_functions("process_map", 1)

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self.parent.cur_qdd(x)


class LogTrace(PassingTrace):
    """Hands logs to a frame and everything else to the surrounding trace."""

    def __init__(self, parent: Any, frame: Frame):
        super().__init__(parent)
        self.frame = frame
        self.offer: _compat.Program | None = None  # for the jit that was bound last
        _compat.stand_for(self, parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        self.offer = None
        with _compat.set_current_trace(self.parent):
            if primitive is log_p:
                self.frame.list_logs(primitive, params)
                if self.frame.handler.in_place and not self.frame.handler.wants(params["meta"], self.frame.here()):
                    return []
                self._place_state(lambda: tracers)
                if self.parent is _compat.eval_trace:
                    take_now(self.frame, params, tracers)
                else:
                    self.frame.take(params["meta"], tracers)
                    self.frame.complete()
                return []
            # If nothing outside differentiates, derivative rules do not matter.
            evaluating = self.parent is _compat.eval_trace
            concerns = _compat.eqn_has_logs if evaluating else _compat.eqn_concerns
            if not concerns(primitive, params):
                if primitive is not _compat.jit_p and self.frame.logged is None:
                    return _hidden.pass_on(primitive, tracers, params)
                has_rules = _compat.eqn_has_rules(primitive, params)
                self.frame.has_rules |= has_rules
                # A frame that has names to check must see that there are rules, and others are in the same context.
                if has_rules and _compat.dispatch_context() is _compat.INSIDE:
                    return _hidden.pass_on(primitive, tracers, params)
                return self._offering(primitive, lambda: _hidden.pass_on(primitive, tracers, params), Ran())
            if evaluating and primitive.name in _EVALUATED:
                with _compat.set_current_trace(self):
                    return primitive.impl(*tracers, **params)
            if not evaluating and primitive.name in _REBUILT and _compat.is_mapped_only(self):
                # Outside of jit, inside of `vmap` or of another transformation of lox: what the handler puts into the
                # carry, and the host calls between blocks, belong into one program with the loop, made only once.
                with _compat.set_current_trace(self):
                    return in_jit(Equation(primitive, params))(*tracers)
            frame, handler = self.frame, self.frame.handler
            frame.list_logs(primitive, params)
            find = lambda: tally_of(primitive, params, frame.here(), handler.counts)  # noqa: E731
            with _announced(frame, find) if handler.foresees else _UNANNOUNCED:
                self._place_state(lambda: _compat.operands_of(params, tracers))
                if not evaluating:
                    return apply_rule(frame, primitive, params, tracers)
                run = lambda: run_compiled(frame, primitive, params, tracers)  # noqa: E731
                return run() if _compat.dispatch_context() is _compat.INSIDE else self._offering(primitive, run)

    def _offering(self, primitive: Any, run: Callable[[], Any], ran: Ran | None = None) -> Any:
        """Run a jit, and offer its program to C++ for further calls, if running it was all there was to do.

        Unless it is known what has `ran`, the frame is told.
        """
        if primitive is not _compat.jit_p or _compat.is_checking_calls():
            return run()
        if self.parent is not _compat.eval_trace:
            outs = run()
            self.offer = getattr(self.parent, "offer", None)  # a trace of lox that has passed it on too
            return outs
        self.frame.ran = ran
        with _compat.noting_programs() as programs:
            outs = run()
        if (ran := self.frame.ran) is not None:
            self.offer = programs.that_returned([*outs, *ran.arrays])
            if self.offer is not None and ran.source is not None:
                self.offer.receive = functools.partial(receive, ran.source)
        return outs

    def _place_state(self, operands: Callable[[], Sequence[Any]]) -> None:
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
            if inside.rebuilding or not eager:
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
            frame.list_logs(BLOCK, {"jaxpr": jaxpr})
            find = lambda: tally(jaxpr, frame.eqn_scope, handler.counts)  # noqa: E731
            with _announced(frame, find) if handler.foresees else _UNANNOUNCED:
                if self.parent is _compat.eval_trace and _compat.has_logs(jaxpr):
                    outs = frame.settle(lambda state: run_jitted(frame, lambda: jaxpr, state, tracers, {}))
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
        with _compat.take_current_trace() as shards, _compat.running(ShardTrace(shards, around)):
            return fun(*args)

    fun = _compat.wrap_rule(fun, on_shards)
    if isinstance(parent, LogTrace):
        return run_on_shards(parent.parent, parent, primitive, fun, tracers, params)
    with _compat.set_current_trace(parent):
        return parent.process_shard_map(primitive, fun, tracers, **params)


def _is_static(tree: Any) -> bool:
    return not any(isinstance(x, _compat.Tracer) for x in jax.tree.leaves(tree))


def run_staged(
    handler: Handler,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    evaluate: Callable[[Any], Callable[..., Any]] = _compat.jaxpr_as_fun,
) -> Any:
    """Trace `fun` before it is run, so that even constants that only served dropped logs disappear.

    Only while tracing for jit, where it requires no more of `fun` than jit does; elsewhere it is `run_function`.
    `evaluate` says how the jaxpr is run.
    """
    if not isinstance(_compat.current_trace(), _compat.StagingTrace):
        return run_function(handler, fun, args, kwargs)[0]
    # What holds no tracer stays the same object: static arguments may be compared by identity.
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_static)
    traced = [n for n, x in enumerate(leaves) if isinstance(x, _compat.Tracer)]
    box: list[Any] = []

    def flat(*tracers: Any) -> list[Any]:
        replaced = list(leaves)
        for n, x in zip(traced, tracers, strict=True):
            replaced[n] = x
        args, kwargs = jax.tree.unflatten(treedef, replaced)
        out, tree = jax.tree.flatten(fun(*args, **kwargs))
        computed = [n for n, x in enumerate(out) if isinstance(x, _compat.Tracer)]
        # All else is returned as it is: it may be a function or a string, and a number stays one.
        box.append((tree, computed, [None if n in computed else x for n, x in enumerate(out)]))
        return [out[n] for n in computed]

    given = [leaves[n] for n in traced]
    jaxpr = _compat.make_jaxpr(lambda *xs: run_function(handler, flat, xs, {})[0], types_of(given))
    jaxpr = _compat.without_dead_code(jaxpr, types_of(given))
    tree, computed, out = box[0]
    for n, x in zip(computed, evaluate(jaxpr)(*given), strict=True):
        out[n] = x
    return jax.tree.unflatten(tree, out)


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
    state = handler.initial_state()
    frame = Frame(handler, {**state, **given} if given else state)
    names = handler.names if whole else None
    frame.logged = None if names is None else {}
    parent, context = _compat.current_trace(), _compat.INSIDE
    if parent is _compat.eval_trace:
        context = handler.dispatch_context
    else:
        frame.devices = _compat.manual_axes_here()
    outer, _hidden.around.frame = _hidden.around.frame, frame
    try:
        with _compat.running(LogTrace(parent, frame), context):
            out = fun(*args, **kwargs)
    finally:
        _hidden.around.frame = outer
    if isinstance(out, _LATER):
        raise _errors.runs_later(fun, type(out).__name__)
    if names is not None and frame.logged is not None:
        names.check(frame.logged, frame.has_rules)
    return out, frame


# The results of functions whose body has not run yet: their logs would go elsewhere.
_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def without_unwanted(jaxprs: Sequence[Any]) -> Sequence[Any]:
    """The same jaxprs without their logs, if the surrounding trace is about to drop all of them."""
    trace = _compat.current_trace()
    if isinstance(trace, LogTrace) and trace.frame.handler.in_place:
        handler = trace.frame.handler
        trace.frame.list_logs(BLOCK, {"jaxprs": list(jaxprs)})
        scope = trace.frame.here()
        if not any(wants_any(handler, jaxpr, scope) for jaxpr in jaxprs):
            return [transformed(Frame(handler, (), scope=scope), jaxpr, ()).jaxpr for jaxpr in jaxprs]
    return jaxprs


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
