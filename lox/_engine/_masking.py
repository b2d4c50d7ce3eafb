"""Events under a condition, for branches and loops that run in lanes which have no part in them.

Equinox's loops, on which Diffrax and Optimistix are built, need it before anything is batched. Their condition asks
whether any lane goes on, so that under `vmap` it stays a single boolean and the lanes that have finished keep their
values by a select in the body. To JAX they run on, and so would their events. What a lane would decide if it were alone
can be had from the same condition, and that is what its events are masked with.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from lox import _compat
from lox._data._lanes import Laned
from lox._engine import _emit
from lox._engine._event import Event
from lox._engine._interpret import Drop, Frame, Handler, interpret
from lox._engine._primitive import bind

# By name, since Equinox need not be installed. `unvmap_any` is whether any lane does; `nonbatchable` is the identity,
# and an error if lanes differ. Only one behind the other is the condition of a loop that keeps the values of finished
# lanes: alone, `unvmap_any` says nothing of what becomes of the others.
_ANY_LANE, _ALIKE = "unvmap_any", "nonbatchable"


class Remask(Handler):
    """Puts every event under a condition, which is threaded through the program as the state."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Remask

    def __hash__(self) -> int:
        return hash(Remask)

    sees_calls = True
    masks_lanes = False  # of loops further inside: that comes when the result is interpreted

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again."""
        bind(event.masked(frame.state.tree))

    def call(self, frame: Frame, primitive: Any, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind it again."""
        return _emit.MASKABLE[primitive](frame.state.tree, *args, **params)


class Silence(Drop):
    """Removes every log, and every call of the host that a tap or a logger has made of one."""

    sees_calls = True

    def call(self, frame: Frame, primitive: Any, params: dict[str, Any], args: Any) -> list[Any]:
        """Nothing happens, and the token stays as it is."""
        return (
            [args[0]] if primitive is _emit.emit_p else _emit.MASKABLE[primitive](jnp.zeros((), bool), *args, **params)
        )


class Rebind(Drop):
    """Leaves every event as it is; only in Equinox's loops it is put under the condition that its lane goes on."""

    masks_lanes = True
    sees_calls = True

    def wants(self, meta: Any, path: str) -> bool:
        """All of them."""
        return True

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again."""
        bind(event)

    def call(self, frame: Frame, primitive: Any, params: dict[str, Any], args: Any) -> list[Any]:
        """Bind it again."""
        return primitive.bind(*args, **params)


def masked_call(jaxpr: Any, mask: Any, args: Any) -> list[Any]:
    """Evaluate a jaxpr, its events under a condition."""
    return interpret(Frame(Remask(), Laned(mask)), jaxpr, args)


def masked_branches(branches: Any, index: Any) -> Any:
    """Branches that take their index too, and log only if they are the chosen one."""
    types = [_compat.scalar_type(jnp.int32, index), *_compat.in_avals(branches[0])]

    def masked(number: int, branch: Any) -> Any:
        def fun(index: Any, *xs: Any) -> list[Any]:
            return masked_call(branch, index == number, xs)

        return _compat.make_jaxpr(fun, types)

    return tuple(masked(number, branch) for number, branch in enumerate(branches))


def _is_of_any_lane(jaxpr: Any, var: Any) -> bool:
    """Whether a variable is what an Equinox loop asks to see if any of its lanes goes on."""
    defined = {v: eqn for eqn in jaxpr.eqns if len(eqn.outvars) == 1 for v in eqn.outvars}

    seen = set()

    def behind(var: Any, alike: bool) -> bool:
        eqn = defined.get(var) if isinstance(var, _compat.Var) else None
        if eqn is None or (var, alike) in seen or _compat.sub_jaxprs(eqn.params):
            return False
        seen.add((var, alike))
        if eqn.primitive.name == _ANY_LANE:
            return alike and not _compat.shape_of(eqn.invars[0])  # else an inner vmap has seen to it
        alike = alike or eqn.primitive.name == _ALIKE
        return any(behind(v, alike) for v in eqn.invars)

    return behind(var, False)


def own_condition(jaxpr: Any, var: Any) -> Callable[..., Any] | None:
    """What a lane would have for `var` if it were alone, as a function of the jaxpr's arguments.

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
        if eqn.primitive.name in (_ANY_LANE, _ALIKE) and not _compat.shape_of(invars[0]):
            names[eqn.outvars[0]] = invars[0]
        else:
            eqns.append(eqn.replace(invars=invars))
    # It is evaluated a second time: only what it needs, and without a word.
    needed, slice = {alone(var)}, []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, _compat.Var))
            slice.insert(0, eqn)
    mine = _compat.with_equations(jaxpr, slice, [alone(var)])
    return lambda *args: interpret(Frame(Silence(), ()), mine, args)[0]


def masked_loop(params: dict[str, Any], *operands: Sequence[Any]) -> tuple[Any, ...]:
    """A while loop whose finished lanes do not log, with what belongs to its operands put in order.

    It is the same loop unless it is one of Equinox's that logs.
    """
    cond_jaxpr, body_jaxpr, n = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    reports = _compat.has_logs(body_jaxpr) or _compat.calls_host(body_jaxpr)
    going_on = own_condition(cond_jaxpr, _compat.split_jaxpr(cond_jaxpr)[0].outvars[0]) if reports else None
    if going_on is None:
        return params, *operands

    def body(*xs: Any) -> list[Any]:
        running = going_on(*xs[:n], *xs[n + params["body_nconsts"] :])
        return masked_call(body_jaxpr, running, xs[n:])

    types = [*_compat.in_avals(cond_jaxpr)[:n], *_compat.in_avals(body_jaxpr)]
    masked = dict(params, body_nconsts=n + params["body_nconsts"], body_jaxpr=_compat.make_jaxpr(body, types))
    return masked, *[[*each[:n], *each] for each in operands]


def mentions_any_lane(jaxpr: Any) -> bool:
    """Whether an Equinox loop may be somewhere inside."""
    found = _mentions.get(jaxpr)
    if found is None:
        found = _mentions[jaxpr] = any(
            eqn.primitive.name == _ANY_LANE or any(map(mentions_any_lane, _compat.sub_jaxprs(eqn.params)))
            for eqn in _compat.split_jaxpr(jaxpr)[0].eqns
        )
    return found


_mentions: Any = weakref.WeakKeyDictionary()
