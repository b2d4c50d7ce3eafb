"""Backward rules that run a function again: its events happened in the forward pass, and do not happen twice.

The backward rule of a `custom_vjp` may compute what the forward rule has computed already: Equinox's checkpointed loop
(Diffrax's default) runs its steps again from the checkpoints, OTT's fixed-point loop every iteration. To JAX that is a
program like any other, and its logs would be further events. But a rule may also log something of its own.

A log in the backward rule repeats one of the forward rule if both hold:

* It is the same log: the same source line with the same keys.
* Nothing of it depends on the cotangents, neither its values nor whether it happens. A recomputation knows nothing of
  them; what only the backward pass knows cannot be a repetition, even if one helper function logs both.

Where that cannot be told, it counts.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lox import _compat
from lox._engine import _emit
from lox._engine._event import Event, Meta
from lox._engine._interpret import RULES, Drop, Frame, PassingTrace, apply_rule, executed_jaxprs
from lox._engine._primitive import bind, log_p

Identity = Any


def _identity(primitive: Any, params: dict[str, Any]) -> Identity | None:
    """What two executions of one log have in common; None if the primitive is no log, nor a host call made of one."""
    if primitive is log_p:
        return _identity_of(params["meta"])
    return (params["deliver"], params["packet"].origin()) if primitive is _emit.emit_p else None


def _identity_of(meta: Meta) -> Identity:
    return meta.site, meta.keys


# --- what the forward rule logs ------------------------------------------------------------------


def _identities(primitive: Any, params: dict[str, Any]) -> Iterable[Identity]:
    """Those of everything that running an equation logs."""
    own = _identity(primitive, params)
    if own is not None:
        yield own
    for jaxpr in executed_jaxprs(primitive, params):
        if _compat.reports(jaxpr):
            for eqn in _compat.split_jaxpr(jaxpr)[0].eqns:
                yield from _identities(eqn.primitive, eqn.params)


class _Passing(PassingTrace):
    """Hands everything to the trace around, and so do the functions that pass through when they are run."""

    def inside(self, parent: Any) -> "_Passing":
        """The same for a function that is run under another trace."""
        raise NotImplementedError

    def _wrapped(self, fun: Any) -> Any:
        def passing(fun: Any, *args: Any) -> Any:
            with _compat.take_current_trace() as parent, _compat.set_current_trace(self.inside(parent)):
                return fun(*args)

        return _compat.wrap_rule(fun, passing)

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        return getattr(self.parent, method)(primitive, *map(self._wrapped, functions), tracers, *rest, **params)


class _Forward(_Passing):
    """Notes what is logged."""

    def __init__(self, parent: Any, noted: set[Identity]):
        super().__init__(parent)
        self.noted = noted
        _compat.stand_for(self, parent)

    def inside(self, parent: Any) -> "_Forward":
        return _Forward(parent, self.noted)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        self.noted.update(_identities(primitive, params))
        with _compat.set_current_trace(self.parent):
            return primitive.bind(*tracers, **params)


# --- what the backward rule repeats --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unrepeated(Drop):
    """Removes some logs, and leaves the others as they are."""

    repeated: frozenset[Identity]

    sees_calls = True

    def wants(self, meta: Meta, path: str) -> bool:
        """Those that stay."""
        return _identity_of(meta) not in self.repeated

    def event(self, frame: Frame, event: Event) -> None:
        """Bind again what stays."""
        if (event.site, tuple(event.values)) not in self.repeated:
            bind(event)

    def call(self, frame: Frame, primitive: Any, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind again what stays."""
        return list(args[:1]) if _identity(primitive, params) in self.repeated else primitive.bind(*args, **params)


class _Dependence:
    """What depends on some of the inputs of an equation, down into its jaxprs."""

    def __init__(self) -> None:
        self.logs: dict[Identity, bool] = {}  # whether any execution of a log depends on them
        self.opaque = False  # there are logs that cannot be reached
        self._known: dict[Any, list[bool]] = {}

    def jaxpr(self, jaxpr: Any, ins: Sequence[bool], certain: bool) -> list[bool]:
        """Which results do; if it is not `certain` that the jaxpr runs, all its logs do."""
        key = (id(jaxpr), tuple(ins), certain)
        if key not in self._known:
            opened, _ = _compat.split_jaxpr(jaxpr)
            env = dict(zip(opened.invars, ins, strict=True))
            of = lambda v: isinstance(v, _compat.Var) and env.get(v, False)  # noqa: E731
            for eqn in opened.eqns:
                outs = self.equation(eqn.primitive, eqn.params, list(map(of, eqn.invars)), certain)
                env.update(zip(eqn.outvars, outs or [any(map(of, eqn.invars))] * len(eqn.outvars), strict=True))
            self._known[key] = list(map(of, opened.outvars))
        return self._known[key]

    def equation(self, primitive: Any, params: dict[str, Any], ins: list[bool], certain: bool) -> list[bool] | None:
        """Which results do; None if all of them do as soon as any input does."""
        identity = _identity(primitive, params)
        if identity is not None:
            operands = ins if primitive is log_p else ins[1:]  # but for the token
            self.logs[identity] = self.logs.get(identity, False) or any(operands) or not certain
            return None if primitive is log_p else ins[:1]
        jaxprs = executed_jaxprs(primitive, params)
        if primitive.name == "cond":
            outs = [self.jaxpr(j, ins[1:], certain and not ins[0]) for j in jaxprs]
            return [ins[0] or any(o) for o in zip(*outs, strict=True)]
        if primitive.name == "while":
            return self._while(params, ins, certain)
        if primitive.name == "scan":
            return self._scan(params, ins, certain)
        if len(jaxprs) == 1 and primitive.name in RULES and len(_compat.in_avals(jaxprs[0])) == len(ins):
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
    """Leaves out what repeats one of the logs that were noted.

    Values are known by their identity, so that they stay what they are to the rule; those that depend on cotangents are
    kept, lest another takes their place. The trace stands for itself: JAX's cache of compiled functions must not answer
    past it, or their results would not be known.
    """

    def __init__(self, parent: Any, noted: set[Identity], depending: dict[int, Any]):
        super().__init__(parent)
        self.noted, self.depending = noted, depending

    def inside(self, parent: Any) -> "_Backward":
        return _Backward(parent, self.noted, self.depending)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        found = _Dependence()
        ins = [id(x) in self.depending for x in tracers]
        depends = found.equation(primitive, params, ins, certain=True)
        repeated = frozenset(i for i, depends in found.logs.items() if i in self.noted and not depends)
        with _compat.set_current_trace(self.parent):
            if repeated and _identity(primitive, params) is not None:
                return [] if primitive is log_p else [tracers[0]]
            if repeated and not found.opaque:
                outs = apply_rule(Frame(Unrepeated(repeated), ()), primitive, params, tracers)
            else:
                outs = primitive.bind(*tracers, **params)
        results = outs if primitive.multiple_results else [outs]
        self.mark(results, depends if depends is not None else [any(ins)] * len(results))
        return outs

    def process_functions(
        self, method: str, primitive: Any, functions: tuple[Any, ...], tracers: Any, *rest: Any, **params: Any
    ) -> Any:
        """Hand a primitive that carries Python functions to the trace around.

        It may run them on other values, of which nothing is known: if any of its own depends on cotangents, all inside
        counts.
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
    """The rules of a `custom_vjp`, such that the second repeats no log of the first."""
    noted: set[Identity] = set()

    def forward(rule: Any, *args: Any) -> Any:
        with _compat.take_current_trace() as parent, _compat.set_current_trace(_Forward(parent, noted)):
            return rule(*args)

    def backward(rule: Any, *args: Any) -> Any:
        if not noted:
            return rule(*args)
        with _compat.take_current_trace() as parent:
            trace = _Backward(parent, noted, {})
            cotangents = args[count_residuals() :]
            trace.mark(cotangents, [True] * len(cotangents))
            with _compat.set_current_trace(trace):
                return rule(*args)

    return _compat.wrap_rule(fwd, forward), _compat.wrap_rule(bwd, backward)


def install() -> None:
    """Put the rule in place."""
    _compat.wrap_vjp_rules(_once)
