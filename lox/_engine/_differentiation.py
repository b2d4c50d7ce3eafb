"""Partial evaluation of programs that log: every event once, in the forward pass.

To differentiate, JAX splits a program into a part that it runs now and a part for later. Three of its rules would move,
lose or repeat logs. The rules here replace them where something logs:

* A scan evaluates loop invariants once, outside of the loop. A primitive with logs has to stay inside.
* `jax.linearize` of a while loop runs the known part, and later the whole loop again for the rest. The second time
  must be silent.
* So must the loop that remat runs again in the backward pass.
"""

from types import SimpleNamespace
from typing import Any

from jax import lax

from lox import _compat
from lox._engine._handler import Drop, Frame
from lox._engine._interpret import transformed
from lox._engine._masking import Silence
from lox._engine._trace import run_function

_while_p = lax.while_p


def _reports(params: dict[str, Any]) -> bool:
    return any(map(_compat.reports, _compat.sub_jaxprs(params)))


def _silent(params: dict[str, Any]) -> dict[str, Any]:
    frame = Frame(Silence(), ())
    return dict(params, **{k: transformed(frame, params[k], ()).jaxpr for k in ("cond_jaxpr", "body_jaxpr")})


def _linearized_while(rule: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    later = [object() for _ in _compat.out_avals(params["body_jaxpr"])]  # placeholders for results that are staged out
    outs = list(rule(SimpleNamespace(default_process_primitive=lambda *_: later), *tracers, **params))
    if outs == later:  # nothing is known, so nothing has run yet
        return trace.default_process_primitive(_while_p, tracers, params)
    rest = trace.default_process_primitive(_while_p, tracers, _silent(params))
    return [rest[later.index(x)] if x in later else x for x in outs]


def _stay_in_place(primitive: Any, rule: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    if _reports(params):
        if _compat.is_hoisting():
            tracers = tuple(trace.instantiate_const(t) for t in tracers)
            return trace.default_process_primitive(primitive, tracers, params)
        if primitive is _while_p:
            return _linearized_while(rule, trace, *tracers, **params)
    return rule(trace, *tracers, **params)


def _while_under_remat(rule: Any, saveable: Any, unks_in: Any, inst_in: Any, eqn: Any) -> Any:
    known, staged, *rest = rule(saveable, unks_in, inst_in, eqn)
    if known is not None and staged is not None and _reports(eqn.params):
        effects = staged.effects - {_compat.log_effect, *_compat.host_call_effects}
        staged = staged.replace(params=_silent(staged.params), effects=effects)
    return known, staged, *rest


def install() -> None:
    """Replace JAX's rules."""
    _compat.evaluate_partially_by(_stay_in_place)
    _compat.rematerialize_by(_while_p, _while_under_remat)
    _compat.inline_calls()
    _compat.silence_flax_probe(lambda body, *args: run_function(Drop(), body, args, {})[0])
