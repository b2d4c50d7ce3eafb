"""Traces, primitives, and whether anything is being traced."""

import contextlib
import sys
from typing import Any

import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import named_sharding as _named_sharding
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters.batching import BatchTrace

from lox._compat import _extend

Var = _extend.Var
Literal = _extend.Literal
jaxpr_as_fun = _extend.jaxpr_as_fun
Trace = jax.core.Trace
Tracer = jax.core.Tracer
PjitFunction = type(jax.jit(lambda: None))
set_current_trace = _extend.set_current_trace
take_current_trace = _extend.take_current_trace


class Primitive(_extend.Primitive):
    """A primitive of lox.

    `jax.experimental.jet` is slow to import, so its table of rules is filled only once somebody else imported it.
    """

    jet_rule: Any = None

    def bind(self, *args: Any, **params: Any) -> Any:
        """Bind as JAX does, after registering the rule for `jet`."""
        jet = sys.modules.get("jax.experimental.jet")
        if jet is not None:
            jet.jet_rules.setdefault(self, self.jet_rule)
        return super().bind(*args, **params)


tracing: Any = _core.trace_ctx  # of this thread: `tracing.trace` interprets operations right now


def current_trace() -> Any:
    """The trace that interprets operations right now."""
    return tracing.trace  # `take_current_trace` takes a microsecond


# Not found by tracing a small program, which would take a tenth of `import lox`.
eval_trace: Any = _core.eval_trace  # outside of all transformations
StagingTrace: Any = _partial_eval.DynamicJaxprTrace  # what jit and make_jaxpr trace with
StagingTracer: Any = _partial_eval.DynamicJaxprTracer  # its values
DebugEffect: Any = type(_debugging.debug_effect)  # of `jax.debug.callback`
UNSPECIFIED: Any = _named_sharding.UNSPECIFIED  # the sharding if a jit has none


def is_evaluating() -> bool:
    """Whether operations run immediately, outside of all transformations."""
    return _core.trace_ctx.trace is eval_trace


def stand_for(trace: Any, parent: Any) -> None:
    """Let a trace that makes no values of its own pass for the surrounding one.

    JAX's caches use a weak reference to the current trace as part of their keys, so every call of a transformed
    function would add to the cache of each jitted function it calls; and libraries compare traces to tell whether an
    object was made at the current level. No log can bypass the trace, since `running` it changes the key by which JAX's
    C++ dispatch finds programs.
    """
    trace._weakref, trace.stands_for = parent._weakref, parent


def make_jit_key(name: str) -> Any:
    """A value for each thread that is part of the key by which JAX's C++ dispatch finds programs, and of no other."""
    kind: Any = _config.config_ext.Config
    try:
        return kind(name, None, include_in_jit_key=True, include_in_trace_context=False)
    except TypeError:  # 0.7, where the keys of all other caches are listed elsewhere
        return kind(None, include_in_jit_key=True)


_dispatch_context = make_jit_key("lox_dispatch_context")
# Whether JAX checks every call of a jitted function, for NaNs, infinities or PRNG keys that are used twice: part of the
# key of C++ dispatch too.
checks: Any = make_jit_key("lox_checks")
OUTSIDE = None  # the dispatch context if no trace of lox is around
INSIDE = "inside of lox"  # the one in which no program that logs is dispatched by C++


def dispatch_context() -> Any:
    """What C++ dispatch is told of the traces of lox around it: it finds only programs that were made in the same."""
    return _dispatch_context.value


class running:
    """`with running(trace):` makes a trace of lox the current one, in a dispatch context."""

    __slots__ = ("before", "context", "trace")

    def __init__(self, trace: Any, context: Any = INSIDE):
        self.trace, self.context = set_current_trace(trace), context

    def __enter__(self) -> None:
        self.before = _dispatch_context.swap_local(self.context)
        self.trace.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.trace.__exit__(*exception)
        _dispatch_context.set_local(self.before)


def underneath(trace: Any) -> Any:
    """The trace that this one stands for, or itself."""
    while (parent := getattr(trace, "stands_for", None)) is not None:
        trace = parent
    return trace


def is_evaluating_underneath() -> bool:
    """Whether operations run immediately, and all that is around are transformations of lox."""
    return underneath(_core.trace_ctx.trace) is eval_trace


def is_mapped_only(trace: Any) -> bool:
    """Whether operations run immediately, if need be for all lanes of `vmap`, and nothing is differentiated."""
    while type(trace := underneath(trace)) is BatchTrace:
        trace = trace.parent_trace
    return trace is eval_trace


@contextlib.contextmanager
def given_up_by(error: type[Exception]) -> Any:
    """Allow tracing to be abandoned by raising this error, in order to trace again in another way.

    JAX clears a trace on completion; an abandoned one would keep alive what it closes over, tracers included.
    """
    trace = current_trace()
    try:
        yield
    except error:
        trace.invalidate()
        raise
