"""Traces, primitives, and whether anything is being traced."""

import concurrent.futures
import contextlib
import sys
from typing import Any

import jax.core
from jax._src import core as _core
from jax.extend import core as jex_core

Var = jex_core.Var
Literal = jex_core.Literal
jaxpr_as_fun = jex_core.jaxpr_as_fun
Trace = jax.core.Trace
Tracer = jax.core.Tracer
jit_p = jex_core.primitives.jit_p
PjitFunction = type(jax.jit(lambda: None))
# `set_current_trace` and `take_current_trace` are in jax.extend.core since 0.10. Up to 0.9 they were in jax.core, where
# accessing them warns since 0.8.2.
_trace_home: Any = jex_core if hasattr(jex_core, "set_current_trace") else _core
set_current_trace = _trace_home.set_current_trace
take_current_trace = _trace_home.take_current_trace


class Primitive(jex_core.Primitive):
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


def current_trace() -> Any:
    """The trace that interprets operations right now."""
    with take_current_trace() as trace:
        return trace


def _find_eval_trace() -> Any:
    # A new thread starts without transformations, even if lox is being imported inside one.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(current_trace).result()


def _find_staging_trace() -> type:
    types: list[type] = []
    jax.make_jaxpr(lambda: types.append(type(current_trace())))()
    return types[0]


eval_trace = _find_eval_trace()
StagingTrace = _find_staging_trace()  # what jit and make_jaxpr trace with


def is_evaluating() -> bool:
    """Whether operations run immediately, outside of all transformations."""
    return _core.trace_ctx.trace is eval_trace  # asked in every call; `current_trace` takes a microsecond


def stand_for(trace: Any, parent: Any) -> None:
    """Let a trace that makes no values of its own pass for the surrounding one.

    JAX's caches use a weak reference to the current trace as part of their keys, so every call of a transformed
    function would add to the cache of each jitted function it calls; and libraries compare traces to tell whether an
    object was made at the current level. No log can bypass the trace: JAX's C++ cache does not answer for functions
    with effects.
    """
    trace._weakref, trace.stands_for = parent._weakref, parent


def underneath(trace: Any) -> Any:
    """The trace that this one stands for, or itself."""
    while (parent := getattr(trace, "stands_for", None)) is not None:
        trace = parent
    return trace


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
