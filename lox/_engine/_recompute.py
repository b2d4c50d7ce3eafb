"""Backward rules that run a function again, whose events happened in the forward pass and must not be repeated.

The backward rule of a `custom_vjp` may recompute the forward rule: Equinox's checkpointed loop (Diffrax's default) runs
its steps again from the checkpoints, OTT's fixed-point loop every iteration. To JAX that is a program like any other,
and its logs would be further events. But a backward rule may also have logs of its own.

A log in the backward rule repeats one of the forward rule if both are true:

* It is the same log: the same source line with the same keys.
* It does not depend on the cotangents, neither in its values nor in whether it happens. A recomputation has no
  cotangents, so a log that depends on them is not a repetition, even if one helper function makes both logs.

If that cannot be decided, the log counts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lox import _compat
from lox._engine import _emit
from lox._engine._event import Event, Meta
from lox._engine._handler import Drop, Frame
from lox._engine._interpret import apply_rule, executed_jaxprs, rule_of
from lox._engine._primitive import bind, log_p
from lox._engine._trace import PassingTrace
from lox._record import record

Identity = Any


def _identity(primitive: Any, params: dict[str, Any]) -> Identity | None:
    """What two executions of one log have in common; None if the primitive is neither a log nor its host call."""
    if primitive is log_p:
        return _identity_of(params["meta"])
    origin = params["form"].origin if primitive is _emit.emit_p else None
    return None if origin is None else (params["deliver"], origin)


def _identity_of(meta: Meta) -> Identity:
    return meta.site, meta.keys


# --- what the forward rule logs ------------------------------------------------------------------


def _identities(primitive: Any, params: dict[str, Any]) -> Iterable[Identity]:
    """The identities of all logs that an equation executes."""
    identity = _identity(primitive, params)
    if identity is not None:
        yield identity
    for jaxpr in executed_jaxprs(primitive, params):
        if _compat.reports(jaxpr):
            for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
                yield from _identities(eqn.primitive, eqn.params)


class _Passing(PassingTrace):
    """Passes everything on to the surrounding trace, also from inside the functions of primitives."""

    def __init__(self, parent: Any, *shared: Any):
        super().__init__(parent)
        self.shared = shared  # with the traces of functions inside

    def _wrapped(self, fun: Any) -> Any:
        def passing(fun: Any, *args: Any) -> Any:
            with _compat.take_current_trace() as parent, _compat.running(type(self)(parent, *self.shared)):
                return fun(*args)

        return _compat.wrap_rule(fun, passing)

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        return getattr(self.parent, method)(primitive, *map(self._wrapped, functions), tracers, *rest, **params)


class _Forward(_Passing):
    """Notes the identities of all logs."""

    def __init__(self, parent: Any, noted: set[Identity]):
        super().__init__(parent, noted)
        self.noted = noted
        _compat.stand_for(self, parent)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        self.noted.update(_identities(primitive, params))
        with _compat.set_current_trace(self.parent):
            return primitive.bind(*tracers, **params)


# --- what the backward rule repeats --------------------------------------------------------------


@record
class Unrepeated(Drop):
    """Removes some logs, and leaves the others as they are."""

    repeated: frozenset[Identity]

    sees_calls = True

    def wants(self, meta: Meta, scope: str) -> bool:
        """Keep logs that are not repeated."""
        return _identity_of(meta) not in self.repeated

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again if it stays."""
        if (event.site, tuple(event.values)) not in self.repeated:
            bind(event)

    def call(self, frame: Frame, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind it again if it stays."""
        repeated = _identity(_emit.emit_p, params) in self.repeated
        return list(args[:1]) if repeated else _emit.emit_p.bind(*args, **params)


class _Dependence:
    """Follows which values and logs depend on the marked inputs of an equation, into its jaxprs."""

    def __init__(self) -> None:
        self.logs: dict[Identity, bool] = {}  # whether any execution of a log depends on marked inputs
        self.opaque = False  # whether there are logs that cannot be reached
        self._known: dict[Any, list[bool]] = {}

    def jaxpr(self, jaxpr: Any, ins: Sequence[bool], certain: bool) -> list[bool]:
        """Which results depend on marked inputs; if it is not `certain` that the jaxpr runs, all its logs do."""
        call = (id(jaxpr), tuple(ins), certain)
        if call not in self._known:
            opened, _ = _compat.split_jaxpr(jaxpr)
            env = dict(zip(opened.invars, ins, strict=True))
            depends = lambda v: isinstance(v, _compat.Var) and env.get(v, False)  # noqa: E731
            for eqn in opened.eqns:
                eqn_ins = list(map(depends, eqn.invars))
                outs = self.equation(eqn.primitive, eqn.params, eqn_ins, certain)
                env.update(zip(eqn.outvars, outs or [any(eqn_ins)] * len(eqn.outvars), strict=True))
            self._known[call] = list(map(depends, opened.outvars))
        return self._known[call]

    def equation(self, primitive: Any, params: dict[str, Any], ins: list[bool], certain: bool) -> list[bool] | None:
        """Which results depend on marked inputs; None if each result depends on every input."""
        identity = _identity(primitive, params)
        if identity is not None:
            operands = ins if primitive is log_p else ins[1:]  # without the token
            self.logs[identity] = self.logs.get(identity, False) or any(operands) or not certain
            return None if primitive is log_p else ins[:1]
        jaxprs = executed_jaxprs(primitive, params)
        if rule_of(primitive) is None:
            pass
        elif primitive.name == "cond":
            outs = [self.jaxpr(j, ins[1:], certain and not ins[0]) for j in jaxprs]
            return [ins[0] or any(o) for o in zip(*outs, strict=True)]
        elif primitive.name == "while":
            return self._while(params, ins, certain)
        elif primitive.name == "scan":
            return self._scan(params, ins, certain)
        elif len(jaxprs) == 1 and len(_compat.in_avals(jaxprs[0])) == len(ins):
            return self.jaxpr(jaxprs[0], ins, certain)
        self.opaque = self.opaque or any(map(_compat.reports, jaxprs))
        return None

    def _while(self, params: dict[str, Any], ins: list[bool], certain: bool) -> list[bool]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = ins[:n_cond], ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
        while True:
            (goes_on,) = self.jaxpr(params["cond_jaxpr"], [*cond_consts, *carry], certain)
            outs = self.jaxpr(params["body_jaxpr"], [*body_consts, *carry], certain and not goes_on)
            joint = [goes_on or a or b for a, b in zip(carry, outs, strict=True)]
            if joint == carry:
                return carry
            carry = joint

    def _scan(self, params: dict[str, Any], ins: list[bool], certain: bool) -> list[bool]:
        n_consts, n_carry = _compat.scan_split(params)
        consts, carry, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
        while True:
            outs = self.jaxpr(params["jaxpr"], [*consts, *carry, *xs], certain)
            joint = [a or b for a, b in zip(carry, outs[:n_carry], strict=True)]
            if joint == carry:
                return [*carry, *outs[n_carry:]]
            carry = joint


class _Backward(_Passing):
    """Leaves out logs that repeat one of those noted.

    Values are recognised by `id`, so that the rule sees them unchanged; those that depend on cotangents are kept alive,
    so that no other gets their `id`. The trace does not stand for its parent: JAX's cache of compiled functions must
    not bypass it, or their results would not be marked.
    """

    def __init__(self, parent: Any, noted: set[Identity], depending: dict[int, Any]):
        super().__init__(parent, noted, depending)
        self.noted, self.depending = noted, depending

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        dependence = _Dependence()
        ins = [id(x) in self.depending for x in tracers]
        depends = dependence.equation(primitive, params, ins, certain=True)
        repeated = frozenset(i for i, depends in dependence.logs.items() if i in self.noted and not depends)
        with _compat.set_current_trace(self.parent):
            if repeated and _identity(primitive, params) is not None:
                return [] if primitive is log_p else [tracers[0]]
            if repeated and not dependence.opaque:
                outs = apply_rule(Frame(Unrepeated(repeated), ()), primitive, params, tracers)
            else:
                outs = primitive.bind(*tracers, **params)
        results = outs if primitive.multiple_results else [outs]
        self.mark(results, depends if depends is not None else [any(ins)] * len(results))
        return outs

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        """Pass a primitive with Python functions on to the surrounding trace.

        It may run them on values that are not marked: if any of its operands depends on cotangents, all logs inside
        count.
        """
        if not any(id(x) in self.depending for x in tracers):
            return super().process_functions(method, primitive, functions, tracers, *rest, **params)
        outs = getattr(self.parent, method)(primitive, *functions, tracers, *rest, **params)
        results, _ = _compat.flat_results(outs)
        self.mark(results, [True] * len(results))
        return outs

    def mark(self, values: Iterable[Any], depends: Iterable[bool]) -> None:
        """Remember which values depend on cotangents."""
        marked = [x for x, d in zip(values, depends, strict=True) if d and isinstance(x, jax.Array)]
        self.depending.update({id(x): x for x in marked})


def _once(fwd: Any, bwd: Any, count_residuals: Callable[[], int]) -> tuple[Any, Any]:
    """The rules of a `custom_vjp`, changed such that the backward rule repeats no log of the forward rule."""
    noted: set[Identity] = set()

    def forward(rule: Any, *args: Any) -> Any:
        with _compat.take_current_trace() as parent, _compat.running(_Forward(parent, noted)):
            return rule(*args)

    def backward(rule: Any, *args: Any) -> Any:
        if not noted:
            return rule(*args)
        with _compat.take_current_trace() as parent:
            trace = _Backward(parent, noted, {})
            cotangents = args[count_residuals() :]
            trace.mark(cotangents, [True] * len(cotangents))
            with _compat.running(trace):
                return rule(*args)

    return _compat.wrap_rule(fwd, forward), _compat.wrap_rule(bwd, backward)


def install() -> None:
    """Wrap the rules of every `custom_vjp`."""
    _compat.wrap_vjp_rules(_once)
