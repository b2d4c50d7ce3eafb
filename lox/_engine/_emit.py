"""Events on their way from the device to the host.

`emit_p` hands a packet of events to a host function. It takes a token and returns it: packets that must arrive in order
pass the token from one to the next, an ordinary data dependency that works under every transformation. (JAX's own
ordered effects fail under vmap, under grad and on several devices.) All lanes of a vmap travel in one call.
"""

import dataclasses
import functools
import itertools
import operator
import re
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors
from lox._data import _arrays
from lox._data._lanes import Laned, is_laned, unnamed
from lox._data._logdict import Layout, logdict
from lox._data._series import Series
from lox._engine._event import Event, Meta

# Takes the events of one call, and the token: negative if events are unordered. May return another token.
Deliver = Callable[[logdict, int], int | None]

emit_p = _compat.Primitive("lox_emit")
emit_p.multiple_results = True


def new_token() -> Any:
    """The token of the first event."""
    with _compat.own_transfers():
        return jnp.zeros((), jnp.int32)


def emit(deliver: Deliver, event: Event, token: Any = None, conditional: bool = False) -> Any:
    """Hand an event to `deliver` on the host; returns the token for the next one.

    With `conditional` the device checks whether the event is valid, and calls the host only then.
    """
    for key, leaves in event.values.items():
        _check_reachable(key, event.site, leaves)
    operands, meta = event.replace(weight=None).to_operands()
    return _bind(deliver, OneEvent(meta), operands, token, conditional)


def emit_series(deliver: Deliver, series: Iterable[Series], token: Any, conditional: bool = False) -> Any:
    """Hand several events of each key to `deliver`, as one packet."""
    series = list(series)
    for x in series:
        _check_reachable(x.key, str(x.site), x.values)
    leaves, treedef = jax.tree.flatten([x.expanded() for x in series])
    return _bind(deliver, ManyEvents(treedef), leaves, token, conditional)


def once(emit: Callable[[list[str], Any], Any], parts: dict[str, Any], alike: frozenset[Any], token: Any) -> Any:
    """Emit each key once by `emit(keys, token)`; returns the next token. `parts` has all arrays of each key.

    A key that is the same on all devices along some mesh axes of a shard_map leaves from the first device, together
    with keys that vary. `alike` are the axes along which devices differ only in values whose types say so.
    """
    groups: dict[frozenset[Any], list[str]] = {}
    for key, part in parts.items():
        groups.setdefault(alike - _compat.varying_over(jax.tree.leaves(part)) if alike else alike, []).append(key)
    from_all = groups.pop(frozenset(), [])
    if from_all and len(groups) != 1:
        token, from_all = emit(from_all, token), []
    for axes, keys in groups.items():
        from_first = [key for key in parts if key in (*keys, *from_all)]
        token = jax.lax.cond(
            _compat.is_first(axes),
            functools.partial(emit, from_first),
            functools.partial(emit, from_all) if from_all else lambda token: token,
            token,
        )
    return token


def _check_reachable(key: str, site: str, leaves: list[Laned]) -> None:
    if axes := _compat.axes_without_host_calls():
        raise _errors.partly_explicit(key, site, axes)
    for x in leaves:
        if axes := _compat.unreduced_axes(x.tree):
            raise _errors.unreduced(key, site, axes)  # XLA would abort the process


def _bind(deliver: Deliver, packet: Any, operands: list[Any], token: Any, conditional: bool) -> Any:
    operands = [jax.random.key_data(x) if _arrays.is_prng_key(x.dtype) else x for x in operands]
    token = new_token() if token is None else token
    ordered = getattr(deliver, "ordered", False) and not _compat.is_without_order()
    params = dict(deliver=deliver, packet=packet, conditional=conditional, ordered=ordered)
    return emit_p.bind(token, *operands, **params)[0]


@emit_p.def_effectful_abstract_eval
def _abstract_eval(token: Any, *avals: Any, ordered: bool, **params: Any) -> Any:
    # Ordered with all other ordered host calls, or only with those that the token passes through.
    del avals, params
    return [token], _compat.host_call_effects if ordered else {_compat.emit_effect}


# --- packets -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OneEvent:
    """A packet with one event: the operands are those of `log_p`."""

    meta: Meta

    def origin(self) -> Any:
        """The log it comes from."""
        return self.meta.site, self.meta.keys

    def batched(self, operands: list[Any], dims: list[Any]) -> tuple[list[Any], "OneEvent"]:
        """The same with an additional outermost lane."""
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
        depth = max(map(len, self.meta.flags))
        flags = tuple((d is not None, *(f or (False,) * depth)) for d, f in zip(dims, self.meta.flags, strict=True))
        return moved, OneEvent(dataclasses.replace(self.meta, flags=flags))

    def only_if(self, operands: list[Any], condition: Any) -> tuple[list[Any], "OneEvent"]:
        """The same under a further condition."""
        event = Event.from_operands(self.meta, operands).only_if(condition)
        operands, meta = event.to_operands()
        return operands, OneEvent(meta)

    def any_valid(self, operands: list[Any]) -> Any:
        """Whether it is valid in any lane."""
        return jnp.any(operands[-1]) if self.meta.has_valid else jnp.ones((), bool)

    def reader(self, ndims: list[int]) -> Callable[..., logdict | None]:
        """A function that turns the arrays into logs, on the host."""
        return EventReader(self.meta, ndims)


@dataclasses.dataclass(frozen=True)
class ManyEvents:
    """A packet with several events of each key: the operands are the leaves of a list of series."""

    treedef: Any

    def origin(self) -> Any:
        """The logs they come from."""
        series = self._series([0] * self.treedef.num_leaves)
        return tuple((s.key, str(s.site)) for s in series)

    def batched(self, operands: list[Any], dims: list[Any]) -> tuple[list[Any], "ManyEvents"]:
        """The same with an additional outermost lane, which comes after the event axis."""
        moved = [x if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(operands, dims, strict=True)]
        mapped = iter([d is not None for d in dims])

        def add_lane(series: Series) -> Series:
            depth = max(len(x.flags) for x in jax.tree.leaves(series, is_leaf=is_laned))
            add = lambda x: Laned(x.tree, (next(mapped), *(x.flags or (False,) * depth)))  # noqa: E731
            return jax.tree.map(add, series, is_leaf=is_laned)

        leaves, treedef = jax.tree.flatten([add_lane(series) for series in self._series(moved)])
        return leaves, ManyEvents(treedef)

    def only_if(self, operands: list[Any], condition: Any) -> tuple[list[Any], "ManyEvents"]:
        """The same under a further condition."""
        series = []
        for s in self._series(operands):
            valid = s.valid or Laned(jnp.ones(s.count(), bool))
            series.append(dataclasses.replace(s, valid=valid.map(lambda v: v & condition)))
        leaves, treedef = jax.tree.flatten(series)
        return leaves, ManyEvents(treedef)

    def any_valid(self, operands: list[Any]) -> Any:
        """Whether any of them is valid in any lane."""
        valids = [s.valid for s in self._series(operands)]
        return functools.reduce(operator.or_, [jnp.ones((), bool) if v is None else jnp.any(v.tree) for v in valids])

    def reader(self, ndims: list[int]) -> Callable[..., logdict | None]:
        """A function that turns the arrays into logs, on the host."""
        del ndims
        return self._read

    def _read(self, *operands: Any) -> logdict | None:
        logs = logdict.from_series(self._series([np.array(x) for x in operands]))
        if logs.valid:
            logs = logs.without_empty_slots()
        empty = [k for k in logs if not jax.tree.leaves(logs[k])[0].shape[0]]
        return logs.filter(lambda k: k not in empty) or None if empty else logs

    def _series(self, operands: list[Any]) -> list[Series]:
        return jax.tree.unflatten(self.treedef, operands)


class EventReader:
    """Turns the operands of one event into a logdict.

    Everything static is computed once: a callback takes a few microseconds, and making an `Event` would take longer.
    """

    def __init__(self, meta: Meta, ndims: list[int]):
        self.meta = meta
        steps = meta.steps
        first_step = sum(t.num_leaves for t in meta.treedefs)
        self.step_index = {name: first_step + n for n, name in enumerate(steps)}
        flags = tuple(map(unnamed, meta.flags))
        valid_flags = flags[-1] if meta.has_valid else ()
        self.valid_by_lane = any(valid_flags)
        self.slices: list[tuple[str, Any, slice]] = []
        self.layouts: dict[str, Layout] = {}
        start = 0
        for key, treedef in zip(meta.keys, meta.treedefs, strict=True):
            stop = start + treedef.num_leaves
            self.slices.append((key, treedef, slice(start, stop)))
            self.layouts[key] = Layout(
                False,
                flags[start:stop],
                tuple(ndims[start:stop]),
                tuple((name, flags[n]) for name, n in sorted(self.step_index.items())),
                valid_flags if self.valid_by_lane else (),
                one_event=True,
            )
            start = stop
        self.single = jax.tree.structure(0)

    def __call__(self, *operands: Any) -> logdict | None:
        """The event, or None if it is not valid."""
        if self.meta.has_valid and not operands[-1].any():
            return None
        arrays = [np.array(x) for x in operands]
        logs = logdict()
        for key, treedef, part in self.slices:
            leaves = arrays[part]
            value = leaves[0] if treedef == self.single else jax.tree.unflatten(treedef, leaves)
            dict.__setitem__(logs, key, value)
        for name, n in self.step_index.items():
            logs.steps[name] = dict.fromkeys(self.meta.keys, arrays[n])
        if self.valid_by_lane:
            logs.valid = dict.fromkeys(self.meta.keys, arrays[-1])
        logs._layouts = dict(self.layouts)
        return logs


# --- the call ------------------------------------------------------------------------------------

# Several devices may call at once, but a callback expects one event at a time.
_delivering = threading.RLock()


class CallbackError(Exception):
    """Stands for the exception of a callback on its way through XLA, which passes on only the text.

    A number in the text identifies the exception: one callback may fail in several programs at once, and one program
    may have several callbacks.
    """

    def __init__(self, error: BaseException):
        number = next(_numbers)
        text = "".join(traceback.format_exception_only(error)).strip()
        super().__init__(f"{text} (callback error {number} of lox)")
        if len(_raised) >= _KEPT:
            _raised.pop(next(iter(_raised)), None)
        _raised[number] = error


_numbers = itertools.count()
_raised: dict[int, BaseException] = {}
_KEPT = 64  # limited, as nobody may ever wait for the program


def error_behind(raised: Exception) -> BaseException | None:
    """The exception of a callback, if that is why a program failed."""
    if isinstance(raised, jax.errors.JaxRuntimeError):
        for number in re.findall(r"\(callback error (\d+) of lox\)", str(raised)):
            if int(number) in _raised:
                return _raised.pop(int(number))
    return None


def _host_call(deliver: Deliver, packet: Any, ndims: list[int]) -> Callable[..., tuple[Any]]:
    read = packet.reader(ndims)

    def call(token: Any, *operands: Any) -> tuple[Any]:
        # The reader copies, as the runtime reuses its buffers after the call and the callback may keep its arrays.
        logs = read(*operands)
        if logs is None:
            return (token,)
        with _delivering:
            new = deliver(logs, int(token))
        return (token if new is None else np.int32(new),)

    return call


@emit_p.def_impl
def _impl(token: Any, *operands: Any, deliver: Deliver, packet: Any, **params: Any) -> list[Any]:
    del params
    with _compat.own_transfers():
        # The token first: once it is there, earlier packets have arrived, and no computation is running that the
        # conversions could deadlock with.
        order = np.asarray(token)
        arrays = [np.asarray(_arrays.as_array(x)) for x in operands]
    (new,) = _host_call(deliver, packet, [x.ndim for x in arrays])(order, *arrays)
    with _compat.own_transfers():
        return [token if new is order else jnp.asarray(new)]


def _lower(ctx: Any, *operands: Any, deliver: Deliver, packet: Any, conditional: bool, ordered: bool) -> Any:
    if conditional:
        params = dict(deliver=deliver, packet=packet, ordered=ordered)
        return mlir.lower_fun(_emit_if_valid, multiple_results=True)(ctx, *operands, **params)
    call = _host_call(deliver, packet, [len(a.shape) for a in ctx.avals_in[1:]])

    def numbered(*arrays: Any) -> tuple[Any]:
        try:
            return call(*arrays)
        except BaseException as error:
            raise CallbackError(error) from error

    return _compat.lower_in_whole_bytes(ctx, numbered, operands)


def _emit_if_valid(token: Any, *operands: Any, **params: Any) -> list[Any]:
    # Only at lowering: vmap would turn an earlier cond into a select, and make the call unconditional.
    emit = lambda token: emit_p.bind(token, *operands, conditional=False, **params)  # noqa: E731
    return jax.lax.cond(params["packet"].any_valid(list(operands)), emit, lambda token: [token], token)


mlir.register_lowering(emit_p, _lower)


def _batch(axis_data: Any, operands: Any, dims: Any, *, packet: Any, **params: Any) -> Any:
    del axis_data
    token = operands[0] if dims[0] is None else jnp.max(operands[0], dims[0])
    moved, packet = packet.batched(list(operands[1:]), list(dims[1:]))
    return emit_p.bind(token, *moved, packet=packet, **params), [None]


batching.fancy_primitive_batchers[emit_p] = _batch


def _masked(condition: Any, token: Any, *operands: Any, packet: Any, **params: Any) -> list[Any]:
    moved, packet = packet.only_if(list(operands), condition)
    return emit_p.bind(token, *moved, packet=packet, **params)


# How to bind each primitive that calls the host such that it counts only where a condition holds: JAX runs a branch for
# all lanes if they disagree about it.
MASKABLE: dict[Any, Callable[..., list[Any]]] = {emit_p: _masked}

# The identity, for tokens.
pass_p = _compat.Primitive("lox_pass")
pass_p.multiple_results = True
pass_p.def_impl(lambda token: [token])
pass_p.def_abstract_eval(lambda token: [token])
mlir.register_lowering(pass_p, lambda ctx, token: [token])
batching.primitive_batchers[pass_p] = lambda operands, dims: (pass_p.bind(*operands), dims)
ad.deflinear2(pass_p, lambda cotangents, token: cotangents)
pass_p.jet_rule = lambda primals, series: (primals, series)
_compat.report_primals(emit_p, pass_p)
_compat.allow_order_with_offloading()
