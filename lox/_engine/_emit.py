"""Events on their way from the device to the host.

`emit_p` hands a packet of events to a host function. It takes a token and returns it: packets that must arrive in order
pass the token from one to the next, an ordinary data dependency that works under every transformation. (JAX's own
ordered effects fail under vmap, under grad and on several devices.) All lanes of a vmap travel in one call.

The token may be the number of who gets the packet, or of a buffer: the host function then looks it up, and the program
does not depend on it.

Not `io_callback`, which calls once per lane under `vmap` and is twenty times slower; not `pure_callback`, whose calls
may be merged and dropped.
"""

import dataclasses
import functools
import itertools
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors
from lox._data import _arrays, _bundle, _lanes
from lox._data._bundle import Bundle, Keys, Site
from lox._data._lanes import Laned, is_laned, pick, unnamed, with_lane
from lox._data._logdict import SINGLE, Layout, logdict
from lox._engine import _devices
from lox._record import record, struct

# Takes the packet of one call, and the token, inverted if events are unordered. May return another token, or what
# `ask` asks for.
Deliver = Callable[["Packet", int], Any]

emit_p = _compat.Primitive("lox_emit")
emit_p.multiple_results = True


def new_token() -> Any:
    """The token of the first event."""
    with _compat.own_transfers():
        return jnp.zeros((), jnp.int32)


def emit(
    deliver: Deliver,
    bundles: Iterable[Bundle],
    token: Any = None,
    route: Laned | None = None,
    signal: str | None = None,
    at_once: Iterable[str] = (),
    dropped: dict[str, Any] | None = None,
    conditional: bool = False,
    everywhere: bool = False,
    nested: bool = False,
) -> Any:
    """Hand events to `deliver` on the host, in one call; returns the token for the next one.

    Args:
        deliver: The host function.
        bundles: The events.
        token: The token of the last call.
        route: The numbers of the runs that the events belong to, with the lanes of the vmaps around the call.
        signal: What the call says beside its events.
        at_once: Keys whose events must not wait for others.
        dropped: How many events of each key did not fit.
        conditional: Whether the device checks if any event is valid, and calls the host only then.
        everywhere: Whether all devices call, and so all processes; the token that is returned waits for the calls.
        nested: Whether it is in a shard_map in a shard_map, where only the token keeps the order: the XLA of JAX 0.10
            aborts the process if that of all host calls enters there.
    """
    bundles = list(bundles)
    for bundle in bundles:
        _check_reachable(bundle)
    content = Content(bundles, route, {key: Laned(x) for key, x in (dropped or {}).items()})
    origin = tuple([(b.keys, str(b.site)) for b in bundles])
    operands, form = Form(None, signal, frozenset(at_once), origin).holding(content)
    operands = [jax.random.key_data(x) if _arrays.is_prng_key(x.dtype) else x for x in operands]
    ordered = getattr(deliver, "ordered", False) and not nested
    return _bind(token, operands, deliver, form, ordered, conditional=conditional, everywhere=everywhere)[0]


def ask(deliver: Deliver, values: Sequence[Any], results: Sequence[Any] = ()) -> list[Any]:
    """Hand values to `deliver` on the host, in one call for all lanes; returns what it answers.

    A call is never dropped, repeated or merged with another one, so that beginning two runs gives two runs.

    Args:
        deliver: The host function, which returns an array for each result with a number for every lane.
        values: Arrays, which `Packet.by_lane` gives back.
        results: The dtypes of the results.
    """
    bundle = Bundle([Laned(x) for x in values], {}, None, ("",), (jax.tree.structure([0] * len(values)),), True, Site())
    operands, treedef = jax.tree.flatten(Content([bundle], None, {}))
    form = Form(treedef, None, frozenset(), None, tuple(map(np.dtype, results)))
    return _bind(None, operands, deliver, form, True, conditional=False, everywhere=False)[1:]


def _bind(token: Any, operands: list[Any], deliver: Deliver, form: "Form", ordered: bool, **params: Any) -> Any:
    if _compat.is_evaluating():
        # Outside of programs NumPy arrays stay as they are: JAX would convert int64 to int32.
        return _impl(np.int32(0) if token is None else token, *operands, deliver=deliver, form=form)
    token = new_token() if token is None else token
    ordered = ordered and not _compat.is_without_order()
    return emit_p.bind(token, *operands, deliver=deliver, form=form, ordered=ordered, **params)


def once(emit: Callable[[list[str], Any], Any], parts: dict[str, Any], alike: frozenset[Any], token: Any) -> Any:
    """Emit each key once by `emit(keys, token)`; returns the next token. `parts` has all arrays of each key.

    A key that is the same on all devices along some mesh axes of a shard_map leaves from the first device, together
    with keys that vary. `alike` are the axes along which devices differ only in values whose types say so.
    """
    varying = {key: _compat.varying_over(jax.tree.leaves(part)) for key, part in parts.items()}
    return from_first(emit, {key: alike - axes for key, axes in varying.items()}, token)


def from_first(emit: Callable[[list[str], Any], Any], first: dict[str, frozenset[Any]], token: Any) -> Any:
    """Emit each key by `emit(keys, token)` from the first device along some mesh axes; returns the next token."""
    groups: dict[frozenset[Any], list[str]] = {}
    for key, axes in first.items():
        groups.setdefault(axes, []).append(key)
    from_all = groups.pop(frozenset(), [])
    if from_all and len(groups) != 1:
        token, from_all = emit(from_all, token), []
    for axes, keys in groups.items():
        both = [key for key in first if key in (*keys, *from_all)]
        token = jax.lax.cond(
            _compat.is_first(axes),
            functools.partial(emit, both),
            functools.partial(emit, from_all) if from_all else lambda token: token,
            token,
        )
    return token


def _check_reachable(bundle: Bundle) -> None:
    if axes := _compat.axes_without_host_calls():
        raise _errors.partly_explicit(bundle.keys[0], str(bundle.site), axes)
    for key in bundle.keys:
        for x in bundle.leaves(key):
            if axes := _compat.unreduced_axes(x.tree):
                raise _errors.unreduced(key, str(bundle.site), axes)  # XLA would abort the process


@emit_p.def_effectful_abstract_eval
def _abstract_eval(token: Any, *avals: Any, form: "Form", ordered: bool, **params: Any) -> Any:
    # Ordered with all other ordered host calls of lox, or only with those that the token passes through.
    del params
    results = [_compat.array_type(form.lanes(avals), dtype) for dtype in form.results]
    return [token, *results], _compat.host_call_effects if ordered else {_compat.emit_effect}


# --- packets -------------------------------------------------------------------------------------

BEGIN = "begin"  # signal: begin with an empty buffer, whose number becomes the token
FLUSH = "flush"  # signal: deliver what is buffered
END = "end"  # signal: end the runs of the route
RECORD = "record"  # signal: with `conditional`, only single events count; what else there is comes with them
RELEASE = "release"  # signal: the end of a program on several devices; with `everywhere`, whether any has failed


class Content(NamedTuple):
    """What a packet has: on the device, in the pytree of its operands, and on the host."""

    bundles: list[Bundle]
    route: Laned | None
    dropped: dict[str, Laned]


@record
class Form:
    """Everything about a packet but its arrays, which are the operands of `emit_p`."""

    treedef: Any  # of its content
    signal: str | None
    at_once: frozenset[str]
    origin: tuple[tuple[Keys, str], ...] | None  # keys and lines: in the structure, all lines are equal
    results: tuple[Any, ...] = ()  # dtypes
    # Which operand each array of the content is, if some are in it several times: many events have the same step.
    places: tuple[int, ...] | None = None

    def content(self, operands: Iterable[Any]) -> Content:
        """The content with these arrays."""
        if self.places is not None:
            operands = list(operands)
            operands = [operands[n] for n in self.places]
        return jax.tree.unflatten(self.treedef, operands)

    def holding(self, content: Content) -> tuple[list[Any], "Form"]:
        """The operands for this content, and the form that goes with them."""
        arrays, treedef = jax.tree.flatten(content)
        leads = [bundle.lead for bundle in content.bundles for _ in jax.tree.leaves(bundle)]
        known: dict[Any, int] = {}
        places, operands = [], []
        for x, lead in itertools.zip_longest(arrays, leads):
            place = known.setdefault((id(x), lead), len(operands))
            if place == len(operands):
                operands.append(x)
            places.append(place)
        shared = tuple(places) if len(operands) < len(arrays) else None
        return operands, dataclasses.replace(self, treedef=treedef, places=shared)

    def batched(self, operands: Iterable[Any], dims: Iterable[Any]) -> tuple[list[Any], "Form"]:
        """The same with an additional outermost lane, which comes after the event axis."""
        content = self.content(zip(operands, dims, strict=True))
        known: dict[Any, Laned] = {}  # so that what was one array stays one

        def add_lane(x: Laned, lead: int = 0, depth: int = 0) -> Laned:
            array, dim = x.tree
            flags = x.flags or (False,) * depth
            place = id(array), flags, lead
            if place not in known:
                known[place] = with_lane(array, dim, flags, lead=lead)
            return known[place]

        bundles = []
        for bundle in content.bundles:
            depth = max(len(x.flags) for x in jax.tree.leaves(bundle, is_leaf=is_laned))
            add = functools.partial(add_lane, lead=bundle.lead, depth=depth)
            bundles.append(jax.tree.map(add, bundle, is_leaf=is_laned))
        rest = jax.tree.map(add_lane, content[1:], is_leaf=is_laned)
        return self.holding(Content(bundles, *rest))

    def only_if(self, operands: Iterable[Any], condition: Any) -> tuple[list[Any], "Form"]:
        """The same under a further condition; a route without events leads nowhere where it does not hold."""
        bundles, route, dropped = self.content(operands)
        if not bundles and route is not None:
            route = route.map(lambda number: jnp.where(condition, number, -1))
        return self.holding(Content([bundle.only_if(condition) for bundle in bundles], route, dropped))

    def has_large(self, operands: Iterable[Any]) -> bool:
        """Whether any value has many elements."""
        return any(_devices.is_large(x, b.lead) for b in self.content(operands).bundles for x in b.values)

    def in_short(self, operands: Iterable[Any]) -> tuple[list[Any], "Form"]:
        """The same with an element of each value that has many."""
        bundles, route, dropped = self.content(operands)
        return self.holding(Content([_devices.in_short(bundle) for bundle in bundles], route, dropped))

    def lanes(self, operands: Iterable[Any]) -> tuple[int, ...]:
        """The sizes of all lanes of single events, outermost first."""
        laned = jax.tree.leaves(self.content(operands).bundles, is_leaf=is_laned)
        lanes = _lanes.union(*map(_lanes.lanes_of, laned))
        assert lanes is not None  # all belong to one call
        return lanes.present()

    def any_valid(self, operands: Iterable[Any]) -> Any:
        """Whether any event is valid in any lane."""
        bundles = self.content(operands).bundles
        return _bundle.any_valid(b for b in bundles if b.single or self.signal != RECORD)


class Packet:
    """What one call brings to the host: bundles of NumPy arrays, the route to their runs, and a signal."""

    __slots__ = ("arrays", "eager", "of_several_processes", "one_of_several", "unpacker")

    def __init__(
        self,
        unpacker: "Unpacker",
        arrays: list[np.ndarray],
        eager: bool = False,
        one_of_several: bool = False,
        of_several_processes: bool = False,
    ):
        self.unpacker, self.arrays = unpacker, arrays
        self.eager = eager  # whether a user waits for it
        self.one_of_several = one_of_several  # whether it is from a program on several devices
        self.of_several_processes = of_several_processes  # whether that runs in several processes

    @property
    def signal(self) -> str | None:
        """What it says beside its events."""
        return self.unpacker.form.signal

    @property
    def at_once(self) -> frozenset[str]:
        """The keys whose events must not wait for others."""
        return self.unpacker.form.at_once

    def content(self) -> Content:
        """The events, the route to their runs, and what was dropped."""
        return self.unpacker.form.content(self.arrays)

    def route(self) -> np.ndarray:
        """The numbers of the runs."""
        assert self.unpacker.route is not None
        return self.arrays[self.unpacker.route]

    def logs(self) -> logdict:
        """The events as users see them."""
        return self.unpacker.logs(self.arrays)

    def by_lane(self) -> Iterator[list[np.ndarray] | None]:
        """The values that `ask` was given, in each lane; None for a lane in which it was not called."""
        (bundle,) = self.content().bundles
        bundle = bundle.even()
        arrays = [*bundle.values, *([] if bundle.valid is None else [bundle.valid])]
        # A vmap on which none of them depends has no lanes here.
        has_lanes = [any(flags) for flags in zip(*(x.flags for x in arrays), strict=True)]
        for lane in np.ndindex(self.unpacker.form.lanes(self.arrays)):
            rest = iter(lane)
            index = tuple([next(rest) if flag else 0 for flag in has_lanes])
            valid = bundle.valid is None or pick(bundle.valid, index)
            yield [np.asarray(pick(x, index)) for x in bundle.values] if valid else None


class SplitPacket(Packet):
    """Events of which this process has only parts, as arrays of JAX."""

    __slots__ = ()

    def content(self) -> Content:
        """Raise, like everything that needs whole arrays; `split` returns what there is."""
        raise self.error()

    def logs(self) -> logdict:
        """Raise."""
        raise self.error()

    def split(self) -> Content:
        """The events, with arrays that reach beyond this process."""
        return super().content()

    def error(self) -> _errors.LogTypeError:
        """Say which keys are spread over several processes."""
        return _errors.in_other_processes(self._split_keys(), next(x.shape for x in self.arrays if _compat.is_split(x)))

    def whole(self) -> Packet | None:
        """The events of all other keys."""
        bundles, route, dropped = self.split()
        bundles = [bundle for bundle in _bundle.without(bundles, self._split_keys()) if not _is_split(bundle)]
        if not bundles or _is_split(route):
            return None
        return packet_of(jax.tree.map(_compat.own_copy, Content(bundles, route, dropped)))

    def _split_keys(self) -> list[str]:
        return [key for bundle in self.split().bundles for key in bundle.keys if _is_split(bundle.leaves(key))]


def _is_split(tree: Any) -> bool:
    return any(map(_compat.is_split, jax.tree.leaves(tree)))


def packet_of_event(
    keys: Keys, treedefs: tuple[Any, ...], values: list[Any], steps: dict[str, Any], run: Any = None
) -> Packet:
    """A packet with copies of the arrays of one event outside of programs; what it has is whole, and has no lanes."""
    arrays = [*values, *steps.values()] if run is None else [*values, *steps.values(), run]
    arrays = [np.array(x) for x in arrays]  # those of JAX may be donated, those of the user may change
    unpacker = _unpacker_of_event(keys, treedefs, tuple(steps), run is not None, tuple([x.ndim for x in arrays]))
    return Packet(unpacker, arrays, eager=True)


@functools.lru_cache(1024)
def _unpacker_of_event(
    keys: Keys, treedefs: tuple[Any, ...], steps: tuple[str, ...], routed: bool, ndims: tuple[int, ...]
) -> "Unpacker":
    values = [Laned(0) for treedef in treedefs for _ in range(treedef.num_leaves)]
    bundle = Bundle(values, {name: Laned(0) for name in steps}, None, keys, treedefs, True, Site())
    form = Form(jax.tree.structure(Content([bundle], Laned(0) if routed else None, {})), None, frozenset(), None)
    return unpacker_of(form, ndims)


def deliver_now(deliver: Deliver, packet: Packet) -> None:
    """Hand a packet over from outside of programs."""
    with _delivering:
        deliver(packet, 0)


def packet_of(content: Content) -> Packet:
    """A packet with copies of these arrays, as if it had come from a program."""
    arrays, treedef = jax.tree.flatten(content)
    arrays = [np.array(x) for x in arrays]  # those of JAX may be donated, those of the user may change
    form = Form(treedef, None, frozenset(), None)
    return Packet(unpacker_of(form, tuple([x.ndim for x in arrays])), arrays, eager=True)


@struct
class _Part:
    """Where the arrays of a bundle are among those of a packet."""

    keys: tuple[str, ...]
    values: list[tuple[str, Any, list[int]]]  # key, structure, leaves
    steps: dict[str, int]
    valid: int | None
    layouts: dict[str, Layout]


class Unpacker:
    """Turns the arrays of packets of one form into logs.

    Everything static is computed once: a callback takes a few microseconds, and making bundles would take longer.
    """

    def __init__(self, form: Form, ndims: tuple[int, ...]):
        self.form = form
        self.parts: list[_Part] = []
        bundles, route, dropped = form.content(range(len(ndims)))
        self.may_drop = bool(dropped)
        self.route = None if route is None else route.tree
        self.events = any(not bundle.single for bundle in bundles)
        for bundle in bundles:
            flags = [unnamed(x.flags) for x in bundle.values]
            steps = tuple((name, unnamed(x.flags)) for name, x in sorted(bundle.steps.items()))
            valid = () if bundle.valid is None or not any(bundle.valid.flags) else unnamed(bundle.valid.flags)
            part = _Part(bundle.keys, [], {name: x.tree for name, x in bundle.steps.items()}, None, {})
            part.valid = None if bundle.valid is None else bundle.valid.tree
            for key, treedef in zip(bundle.keys, bundle.treedefs, strict=True):
                leaves, flags = flags[: treedef.num_leaves], flags[treedef.num_leaves :]
                places = [x.tree for x in bundle.leaves(key)]
                part.values.append((key, treedef, places))
                depths = tuple([ndims[n] for n in places])
                part.layouts[key] = Layout(False, tuple(leaves), depths, steps, valid, one_event=True)
            self.parts.append(part)
        self.valids = [part.valid for part in self.parts]
        # For each array of a bundle, whether it has an event axis.
        leads = {n: bundle.lead for bundle in bundles for n in jax.tree.leaves(bundle)}
        self.leads = [leads[n] for n in sorted(leads)]
        self.may_be_empty = bool(self.parts) and None not in self.valids and not (form.signal or form.results)

    def is_empty(self, arrays: Any) -> bool:
        """Whether no event is valid."""
        return self.may_be_empty and not any([arrays[n].any() for n in self.valids])

    def logs(self, arrays: list[np.ndarray]) -> logdict:
        """The valid events, without an event axis if there is one of each key at most."""
        if self.events:
            bundles = [bundle.occurred() for bundle in self.form.content(arrays).bundles]
            return logdict.from_bundles(bundle for bundle in bundles if bundle is not None)
        logs = logdict._empty()
        for part in self.parts:
            if part.valid is not None and not arrays[part.valid].any():
                continue
            for key, treedef, leaves in part.values:
                parts = [arrays[n] for n in leaves]
                value = parts[0] if treedef == SINGLE else jax.tree.unflatten(treedef, parts)
                dict.__setitem__(logs, key, value)
                layout = logs._layouts[key] = part.layouts[key]
                if layout.valid_flags:
                    assert part.valid is not None
                    logs._valid[key] = arrays[part.valid]
            for name, n in part.steps.items():
                by_key = dict.fromkeys(part.keys, arrays[n])
                if name in logs.steps:
                    logs.steps[name].update(by_key)
                else:
                    logs.steps[name] = by_key
        return logs


unpacker_of = functools.lru_cache(4096)(Unpacker)


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
    if isinstance(raised, jax.errors.JaxRuntimeError | ValueError):  # the second from programs that C++ calls
        for number in re.findall(r"\(callback error (\d+) of lox\)", str(raised)):
            if int(number) in _raised:
                return _raised.pop(int(number))
    return None


def _host_call(
    deliver: Deliver, form: Form, ndims: Iterable[int], eager: bool = False, beyond: bool = False
) -> Callable[..., Any]:
    unpacker = unpacker_of(form, tuple(ndims))

    def call(token: Any, *operands: Any) -> tuple[Any, ...]:
        if unpacker.is_empty(operands):
            return (token,)
        # Copied, as the runtime reuses its buffers after the call and the callback may keep its arrays.
        number = int(token)
        packet = Packet(unpacker, [np.array(x) for x in operands], eager, number < 0, beyond)
        with _delivering:
            new = deliver(packet, number)
        if form.results:
            lanes = form.lanes(operands)
            return token, *[np.asarray(x, d).reshape(lanes) for x, d in zip(new, form.results, strict=True)]
        return (token if new is None else np.int32(new),)

    return call


@emit_p.def_impl
def _impl(token: Any, *operands: Any, deliver: Deliver, form: Form, **params: Any) -> list[Any]:
    del params
    with _compat.own_transfers():
        # The token first: once it is there, earlier packets have arrived, and no computation is running that the
        # conversions could deadlock with.
        order = np.asarray(_compat.own_copy(token))
        if (elsewhere := next(filter(_compat.is_elsewhere, operands), None)) is not None:
            raise _errors.elsewhere([key for keys, _ in form.origin or () for key in keys], elsewhere.shape)
        if _is_split(operands):
            if form.results:
                raise _errors.keys_in_other_processes()
            deliver(SplitPacket(unpacker_of(form, tuple(map(np.ndim, operands))), [*operands], eager=True), int(order))
            return [token]
        arrays = [np.asarray(_arrays.as_array(_compat.own_copy(x))) for x in operands]
    new, *results = _host_call(deliver, form, [x.ndim for x in arrays], eager=True)(order, *arrays)
    with _compat.own_transfers():
        return [token if new is order else jnp.asarray(new), *map(jnp.asarray, results)]


def _lower(
    ctx: Any, *operands: Any, deliver: Deliver, form: Form, conditional: bool, ordered: bool, everywhere: bool
) -> Any:
    if form.signal == RELEASE and _compat.is_on_one_device(ctx):
        ctx.set_tokens_out(ctx.tokens_in)
        return [operands[0]]
    if not everywhere and _compat.is_gathered(ctx):
        _check_not_gathered(ctx, form, operands[1:])
    params: dict[str, Any] = dict(deliver=deliver, form=form, ordered=ordered, everywhere=everywhere)
    if conditional:  # the condition first: else arrays would be gathered for calls that are not made
        return mlir.lower_fun(_emit_if_valid, multiple_results=True)(ctx, *operands, **params)
    if everywhere and _compat.is_gathered(ctx) and form.has_large(ctx.avals_in[1:]):
        return mlir.lower_fun(_emit_in_short, multiple_results=True)(ctx, *operands, **params)
    if everywhere and _compat.is_called_once(ctx):
        bind = lambda *xs: emit_p.bind(*xs, conditional=False, **params)  # noqa: E731
        return _compat.lower_on_all_devices(ctx, bind, operands)
    if form.signal == RELEASE and everywhere:
        operands = _compat.lower_agreement(ctx, *operands)
    ndims = [len(a.shape) for a in ctx.avals_in[1:]]
    call = _host_call(deliver, form, ndims, beyond=_compat.reaches_beyond(ctx))

    def numbered(*arrays: Any) -> tuple[Any, ...]:
        try:
            return call(*arrays)
        except BaseException as error:
            raise CallbackError(error) from error

    return _compat.lower_in_whole_bytes(ctx, numbered, operands, waits=everywhere, answers=form.signal == BEGIN)


def _check_not_gathered(ctx: Any, form: Form, operands: Sequence[Any]) -> None:
    bundles = form.content(map(_devices.Operand, operands, ctx.avals_in[1:])).bundles
    for bundle, (keys, site) in zip(bundles, form.origin or (), strict=False):
        for key in keys:
            shape = _devices.gathered_shape(bundle.treedef(key), bundle.leaves(key), bundle.lead)
            if shape is not None:
                raise _errors.LogTypeError(_devices.why_not(key, site, shape))


def _emit_if_valid(token: Any, *operands: Any, **params: Any) -> list[Any]:
    # Only at lowering: vmap would turn an earlier cond into a select, and make the call unconditional.
    emit = lambda token: emit_p.bind(token, *operands, conditional=False, **params)  # noqa: E731
    return jax.lax.cond(params["form"].any_valid(operands), emit, lambda token: [token], token)


def _emit_in_short(token: Any, *operands: Any, form: Form, **params: Any) -> list[Any]:
    short, form = form.in_short(operands)
    return emit_p.bind(token, *short, form=form, conditional=False, **params)


# Not cacheable: JAX would lower it to a function of its own, in which it is unknown where operands come from.
mlir.register_lowering(emit_p, _lower, cacheable=False)


def _batch(axis_data: Any, operands: Any, dims: Any, *, form: Form, **params: Any) -> Any:
    del axis_data
    token = operands[0] if dims[0] is None else jnp.max(operands[0], dims[0])
    moved, form = form.batched(operands[1:], dims[1:])
    # Called even if nothing is batched: then the answer is one for all lanes.
    is_batched = any(dim is not None for dim in dims[1:])
    return emit_p.bind(token, *moved, form=form, **params), [None, *[0 if is_batched else None] * len(form.results)]


batching.fancy_primitive_batchers[emit_p] = _batch


def masked(condition: Any, token: Any, *operands: Any, form: Form, **params: Any) -> list[Any]:
    """Bind it such that it counts only where a condition holds: JAX runs a branch for all lanes if they disagree."""
    moved, form = form.only_if(operands, condition)
    return emit_p.bind(token, *moved, form=form, **params)


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


# --- programs of lox's own ------------------------------------------------------------------------

alone_p = _compat.Primitive("lox_alone")
alone_p.multiple_results = True


class NotAlone(Exception):
    """Control flow: a program has more effects than its calls, or it runs on several devices."""


def alone(jaxpr: Any) -> Callable[..., Any]:
    """Run a jaxpr as the whole of a program, without telling JAX that it calls the host.

    JAX calls programs with effects from Python, which takes longer than all the rest. The effects are for those who
    wait for the calls; here the caller waits for the token. Nothing may be around that would look for effects.
    """
    if set(jaxpr.effects) - {_compat.emit_effect} or _compat.is_high(jaxpr):
        raise NotAlone
    return lambda *args: alone_p.bind(*args, jaxpr=jaxpr)


@alone_p.def_impl
def _alone_impl(*args: Any, jaxpr: Any) -> Any:
    return _compat.jaxpr_as_fun(jaxpr)(*args)  # where JAX looks for a NaN, one operation after the other


@alone_p.def_abstract_eval
def _alone_abstract_eval(*avals: Any, jaxpr: Any) -> Any:
    del avals
    return _compat.out_avals(jaxpr)


def _lower_alone(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    if not _compat.is_on_one_device(ctx):
        raise NotAlone  # there, the token does not wait for the calls
    return mlir.lower_fun(_compat.jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


mlir.register_lowering(alone_p, _lower_alone, cacheable=False)
