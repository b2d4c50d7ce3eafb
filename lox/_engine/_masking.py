"""Events under a condition, for branches and loops that also run in lanes that did not take them.

Equinox's loops, on which Diffrax and Optimistix are built, need it before anything is batched. Their condition asks
whether any lane continues, so under `vmap` it stays a single boolean, and finished lanes keep their values by a select
in the body. To JAX these lanes keep running, and their events would continue too. What a lane would decide alone can be
derived from the same condition, and its events are masked with that.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from lox import _compat
from lox._data._lanes import Laned
from lox._engine import _emit
from lox._engine._event import Event
from lox._engine._handler import Drop, Frame, Handler, Keep
from lox._engine._interpret import interpret
from lox._engine._primitive import bind

# By name, since Equinox need not be installed. `unvmap_any` reduces a boolean over all lanes; `nonbatchable` is the
# identity, and an error if lanes differ. Only both together are the condition of a loop that keeps the values of
# finished lanes: `unvmap_any` alone says nothing about them.
_ANY_LANE, _ALIKE = "unvmap_any", "nonbatchable"


class Remask(Handler):
    """Puts every event under a condition, which is the state that is threaded through the program."""

    sees_calls = True
    masks_lanes = False  # inner loops are masked when the result is interpreted

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again, under the condition."""
        bind(event.only_if(frame.state.tree))

    def call(self, frame: Frame, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind it again, under the condition."""
        return _emit.masked(frame.state.tree, *args, **params)


class Silence(Drop):
    """Removes every log, and every host call that a tap or a logger has made of one."""

    sees_calls = True

    def call(self, frame: Frame, params: dict[str, Any], args: Any) -> list[Any]:
        """Remove the call and return the token unchanged; results that are needed come from a masked call."""
        return _emit.masked(jnp.zeros((), bool), *args, **params) if params["form"].results else [args[0]]


class Rebind(Keep):
    """Leaves every event as it is, except in Equinox's loops, where events of finished lanes are masked."""

    masks_lanes = True
    sees_calls = True

    def call(self, frame: Frame, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind it again."""
        return _emit.emit_p.bind(*args, **params)


def masked_call(jaxpr: Any, condition: Any, args: Any) -> list[Any]:
    """Evaluate a jaxpr with its events under a condition."""
    return interpret(Frame(Remask(), Laned(condition)), jaxpr, args)


def masked_branches(branches: Any, index: Any) -> Any:
    """Branches that also take the index, and log only if they are the chosen one."""
    types = [_compat.scalar_type(jnp.int32, index), *_compat.in_avals(branches[0])]

    def masked(number: int, branch: Any) -> Any:
        def fun(index: Any, *xs: Any) -> list[Any]:
            return masked_call(branch, index == number, xs)

        return _compat.make_jaxpr(fun, types)

    return tuple(masked(number, branch) for number, branch in enumerate(branches))


def _is_of_any_lane(jaxpr: Any, var: Any) -> bool:
    """Whether a variable tells an Equinox loop that any of its lanes continues."""
    defined = {v: eqn for eqn in jaxpr.eqns if len(eqn.outvars) == 1 for v in eqn.outvars}
    seen = set()

    def behind(var: Any, alike: bool) -> bool:
        eqn = defined.get(var) if isinstance(var, _compat.Var) else None
        if eqn is None or (var, alike) in seen or _compat.sub_jaxprs(eqn.params):
            return False
        seen.add((var, alike))
        if eqn.primitive.name == _ANY_LANE:
            return alike and not eqn.invars[0].aval.shape  # else an inner vmap has masked the lanes
        alike = alike or eqn.primitive.name == _ALIKE
        return any(behind(v, alike) for v in eqn.invars)

    return behind(var, False)


def lane_condition(jaxpr: Any, var: Any) -> Callable[..., Any] | None:
    """The value of `var` if a lane were alone, as a function of the jaxpr's arguments.

    None unless it is the condition of an Equinox loop.
    """
    opened, _ = _compat.split_jaxpr(jaxpr)
    if not _is_of_any_lane(opened, var):
        return None
    names: dict[Any, Any] = {}

    def alone(v: Any) -> Any:
        return v if isinstance(v, _compat.Literal) else names.get(v, v)

    eqns = []
    for eqn in opened.eqns:
        invars = [alone(v) for v in eqn.invars]
        if eqn.primitive.name in (_ANY_LANE, _ALIKE) and not invars[0].aval.shape:
            names[eqn.outvars[0]] = invars[0]
        else:
            eqns.append(eqn.replace(invars=invars))
    # It is evaluated a second time: only the equations it needs, and silently.
    needed, slice = {alone(var)}, []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, _compat.Var))
            slice.insert(0, eqn)
    condition = _compat.with_equations(jaxpr, slice, [alone(var)])
    return lambda *args: interpret(Frame(Silence(), ()), condition, args)[0]


def masked_loop(params: dict[str, Any], *operands: Sequence[Any]) -> tuple[Any, ...]:
    """The parameters of a while loop whose finished lanes do not log, and its `operands`, each reordered to match.

    Nothing changes unless it is one of Equinox's loops and logs.
    """
    cond_jaxpr, body_jaxpr, n = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    result = _compat.split_jaxpr(cond_jaxpr)[0].outvars[0]
    is_running = lane_condition(cond_jaxpr, result) if _compat.reports(body_jaxpr) else None
    if is_running is None:
        return params, *operands

    def body(*xs: Any) -> list[Any]:
        running = is_running(*xs[:n], *xs[n + params["body_nconsts"] :])
        return masked_call(body_jaxpr, running, xs[n:])

    types = [*_compat.in_avals(cond_jaxpr)[:n], *_compat.in_avals(body_jaxpr)]
    masked = dict(params, body_nconsts=n + params["body_nconsts"], body_jaxpr=_compat.make_jaxpr(body, types))
    return masked, *[[*each[:n], *each] for each in operands]


def mentions_any_lane(jaxpr: Any) -> bool:
    """Whether the jaxpr may contain an Equinox loop."""
    mentions = _mentions.get(jaxpr)
    if mentions is None:
        mentions = _mentions[jaxpr] = any(
            eqn.primitive.name == _ANY_LANE or any(map(mentions_any_lane, _compat.sub_jaxprs(eqn.params)))
            for eqn in _compat.split_jaxpr(jaxpr)[0].eqns
        )
    return mentions


_mentions: Any = weakref.WeakKeyDictionary()
