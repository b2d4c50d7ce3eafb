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
