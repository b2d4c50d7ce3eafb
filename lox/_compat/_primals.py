"""How logs pass through differentiation: they belong to the primal computation."""

from typing import Any

import jax.core
from jax.interpreters import ad

from lox._compat._patches import keep_in_loop, run_in_forward_pass
from lox._compat._types import zeros_of


def report_primals(primitive: Any, stand_in: Any = None) -> None:
    """Let a primitive have its effect exactly once, where the program computes its primal values.

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
