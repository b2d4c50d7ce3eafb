"""Handlers, which decide what becomes of events, and the frame in which they do so.

There are two channels. `Frame.state` is threaded through the program: it enters every block (a Python function, or a
jaxpr) and comes out changed, in the carry of loops (reductions, buffers, the order of callbacks). `Frame.pieces` is
what a block has collected: it only comes out, stacked by loops (the events that `spool` returns).
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from lox import _compat, _errors
from lox._data import _arrays
from lox._engine import _hidden
from lox._engine._event import Event, Meta
from lox._engine._primitive import bind, log_p
from lox._engine._selection import Logged, Names
from lox._record import record


@record
class Tally:
    """How many events of one key there will be, as far as is known without running anything."""

    count: float = 0  # at most; infinite if unknown
    exact: bool = True  # whether there are exactly as many, in every lane
    looped: bool = False  # whether some of them are in a loop

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.count + other.count, self.exact and other.exact, self.looped or other.looped)


class Handler:
    """Decides what becomes of events. Immutable and hashable: handlers are keys of caches.

    All of a class without fields are equal; those with fields are frozen dataclasses.
    """

    in_place: ClassVar[bool] = False  # whether events never change the arguments or results of a block
    collects: bool = False  # whether all that comes of an event, as long as there is no state, is a piece
    sees_calls: ClassVar[bool] = False  # whether host calls are handed to it too
    masks_lanes: ClassVar[bool] = True  # whether events in Equinox's loops count only while their lane continues

    @property
    def foresees(self) -> bool:
        """Whether it has to know how many events come: whether it has the methods `before` and `after`."""
        return False

    @property
    def passes_on(self) -> bool:
        """Whether every log flows on, marked as seen, before anything else; `frame.passed_on` says that it has."""
        return False

    @property
    def only_collects(self) -> bool:
        """Whether at most a piece comes of programs that log, so that C++ may call them and hand it over."""
        return False

    @functools.cached_property
    def dispatch_context(self) -> Any:
        """In which C++ dispatches programs: one of its own, if it knows what comes of those that log."""
        return _context_of(self) if self.only_collects else _compat.INSIDE

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def wants(self, meta: Meta, scope: str) -> bool:
        """Whether the handler may use an event; if not, computations that serve only the event are removed."""
        return True

    def initial_state(self) -> Any:
        """The state that is threaded through the program."""
        return ()

    def event(self, frame: "Frame", event: Event) -> None:
        """Take one event: change `frame.state`, add to `frame.pieces`, or let it wait in `frame.waiting`."""
        raise NotImplementedError

    def reduces(self, meta: Meta, scope: str) -> bool:
        """Whether events of a log change the state, and nothing is sent to the host."""
        return False

    @functools.cached_property
    def programs(self) -> dict[Any, Any]:
        """Those that take events outside of other programs. They are here because they refer to the handler."""
        return {}

    def grows(self, frame: "Frame", logs: Iterable[tuple[Meta, str]]) -> bool:
        """Whether logs, each with its scope, have keys that the state will have, but does not have yet."""
        return False

    def expect(self, frame: "Frame", event: Event) -> None:
        """Take as much of an event as the type of the state depends on."""

    def complete(self, frame: "Frame") -> None:
        """Take what waits, before anything else needs the state."""

    def check(self, frame: "Frame", piece: Any) -> None:
        """Raise if this cannot be gathered with what was collected before."""

    def gather(self, pieces: list[Any]) -> Any:
        """Join pieces, in order."""
        return ()

    def unroll(self, piece: Any, reverse: bool) -> Any:
        """The piece of a whole loop, from that of its body with an additional leading axis."""
        return piece

    def unify(self, pieces: list[Any]) -> list[Callable[[Any], Any]] | None:
        """For each of several branches, a function that makes its piece like the others; None if they are alike."""
        return None

    def allows(self, frame: "Frame", struct: Any) -> bool:
        """Whether a block that runs once may change the type of the state to `struct`."""
        return False

    def extend(self, frame: "Frame", struct: Any) -> None:
        """Give `frame.state` the type `struct`, which the body of a loop returns."""
        raise NotImplementedError

    def leave(self, frame: "Frame", before: Any) -> None:
        """Called at the end of a block inside of the function, which began with the state `before`."""

    def before(self, frame: "Frame", tallies: dict[str, Tally]) -> None:
        """Called at the outermost level before something with logs runs, with how many of each key."""
        raise NotImplementedError

    def after(self, frame: "Frame", completed: bool) -> None:
        """Called when it has run or failed."""
        raise NotImplementedError

    def counts(self, meta: Meta, scope: str) -> list[str]:
        """The keys of a log that a tally counts."""
        raise NotImplementedError

    def split(self, frame: "Frame", jaxprs: Sequence[Any], length: int | None = None) -> "Blocks | None":
        """How to split a loop whose iterations run these jaxprs; None if it is not split."""
        return None

    @property
    def names(self) -> Names | None:
        """The names that must be logged, or else there is a warning."""
        return None

    def call(self, frame: "Frame", params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
        """Take a host call, with the parameters and operands of `emit_p`."""
        raise NotImplementedError

    def split_state(self, state: Any, keys: set[str]) -> tuple[Any, Callable[[Any], Any]]:
        """The part of the state that concerns these keys, and a function that puts the rest back."""
        return state, lambda part: part

    def for_rules(self) -> "Handler":
        """The handler for logs in derivative rules, when the transformed function is differentiated.

        The events of a function are those of its primal, so rules must not add to them.
        """
        return self


@functools.lru_cache(256)
def _context_of(handler: Handler) -> Any:
    return object()  # which is compared in every call of every jitted function


class Blocks(Protocol):
    """A loop split into blocks of iterations; the handler acts after each block."""

    @property
    def iterations(self) -> int:
        """The number of iterations of a block."""
        ...

    def run(self, frame: "Frame", bounded: bool, execute: Callable[["Frame"], Any], room_for: int | None = None) -> Any:
        """Run one block by `execute(frame)`, then `flush`; unless `bounded`, it may have fewer iterations."""
        ...

    def flush(self, frame: "Frame", room_for: int | None = None) -> None:
        """Emit everything that was kept, or only what leaves no room for that many iterations."""
        ...


class Retrace(Exception):
    """Control flow: abandon the current tracing."""


class Grown(Retrace):
    """Control flow: a block changed the type of the state, and must be traced again."""

    def __init__(self, owner: "Frame", struct: Any):
        super().__init__(owner, struct)
        self.owner, self.struct = owner, struct


class Place(NamedTuple):
    """An equation in its context: its jaxpr, the equation itself, and the arguments of the jaxpr."""

    jaxpr: Any
    eqn: Any
    args: Sequence[Any]


_MANY = 256  # scopes in which one program is called


class ProgramSource:
    """What pieces have in common that come from one program, called in one scope."""

    def __init__(self, types: Any, keys: dict[str, bool], scope: str):
        self.types, self.structure = types, jax.tree.structure(types)
        self.keys = keys  # each with whether it is certain to have an event
        self.scope = scope
        self._in_scope: dict[str, ProgramSource] = {scope: self}

    def in_scope(self, scope: str) -> "ProgramSource":
        """The same if the program is called in another scope."""
        known = self._in_scope.get(scope)
        if known is None:
            assert all(key.startswith(self.scope) for key in self.keys)
            rename = lambda key: scope + key.removeprefix(self.scope)  # noqa: E731
            types = [dataclasses.replace(bundle, keys=tuple(map(rename, bundle.keys))) for bundle in self.types]
            keys = {rename(key): certain for key, certain in self.keys.items()}
            known = ProgramSource(types, keys, scope)
            known._in_scope = self._in_scope
            if len(self._in_scope) >= _MANY:
                self._in_scope.clear()  # a scope for every step would fill it
            self._in_scope[scope] = known
        return known


class Ran(NamedTuple):
    """What has come of a jit beside its results, without a change of the state: the events, if it has any."""

    source: ProgramSource | None = None
    arrays: Sequence[Any] = ()


class EventSource(NamedTuple):
    """What pieces have in common that come from log calls outside of programs."""

    keys: tuple[str, ...]
    structure: Any
    arrays: tuple[Any, ...]  # their shapes and dtypes


@jax.tree_util.register_pytree_node_class
class Packed:
    """A piece as a compiled program returns it: a list of arrays, which become bundles when somebody needs them.

    All pieces of one `source` have the same keys and types.
    """

    def __init__(self, structure: Any, arrays: Sequence[Any], source: Any):
        self.structure, self.arrays, self.source = structure, arrays, source
        self._bundles: Any = None

    @classmethod
    def of(cls, piece: Any, keys: tuple[str, ...]) -> "Packed":
        """Pack a piece that no program has returned. Its source is whatever gives pieces of the same type."""
        arrays, structure = jax.tree.flatten(piece)
        return cls(structure, arrays, EventSource(keys, structure, tuple([(x.shape, x.dtype) for x in arrays])))

    def __iter__(self) -> Iterator[Any]:
        if self._bundles is None:
            self._bundles = jax.tree.unflatten(self.structure, self.arrays)
        return iter(self._bundles)

    def tree_flatten(self) -> tuple[Any, Any]:
        """The arrays are children."""
        return self.arrays, (self.structure, self.source)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Any) -> "Packed":
        """The inverse of `tree_flatten`."""
        return cls(aux[0], arrays, aux[1])


_NO_AXES: frozenset[Any] = frozenset()


class Frame:
    """The execution of one block: its state, what it has collected, and the keys it logs.

    `keys` are in order of first appearance, each with whether it is certain to have an event.
    `unbounded` says that the block repeats an unknown number of times, so that nothing can be stacked.
    `scope` has the scopes around the block, and `eqn_scope` those around the current equation, as prefixes of keys.
    `alike` are the mesh axes along which all devices run the block and differ only in values whose types say so.
    `devices` has the mesh axes of every shard_map around the block, outermost first.
    """

    def __init__(
        self,
        handler: Handler,
        state: Any,
        unbounded: bool = False,
        scope: str = "",
        alike: frozenset[Any] = _NO_AXES,
        devices: tuple[tuple[Any, ...], ...] = (),
    ):
        self.handler, self.state, self.unbounded, self.scope = handler, state, unbounded, scope
        self.alike, self.devices = alike, devices
        self.pieces: list[Any] = []
        self.waiting: dict[str, Any] = {}  # for each key, an event that is taken together with others
        self.keys: dict[str, bool] = {}
        self.notes: dict[str, Any] = {}  # what the handler remembers about each key at the outermost level
        self._sources: set[Any] = set()  # what has been checked
        self.ran: Ran | None = None  # of the last jit, if that is all that has come of it
        self.times: dict[Any, int] = {}  # how often each log was taken outside of programs, if it changes the state
        self._forms: dict[Any, Any] = {}  # of events outside of programs that became pieces, and how they did
        self.models: dict[str, Any] = {}  # earlier events of each key, which later ones must fit
        self.passed_on = False  # whether the logs that are taken have been bound again
        self.fresh = False  # whether it is an iteration in which no other block has changed the state yet
        self.eqn_scope = scope
        self.place: Place | None = None  # of the current equation, if it is in a jaxpr
        self.logged: Logged | None = None  # all logs, selected or not, if there are names to check
        self.has_rules = False  # whether there are derivative rules, which may log too
        self._outer = len(_compat.open_scopes())

    def here(self) -> str:
        """The scopes that are open now, as a prefix of keys."""
        return self.scope + _compat.open_scopes()[self._outer :]

    def block(self, state: Any, unbounded: bool = False, decision: Any = None) -> "Frame":
        """A frame for a block inside this one, which runs depending on a value of the type `decision`."""
        where = self.eqn_scope, self.alike_after(decision), self.devices
        inner = Frame(self.handler, state, self.unbounded or unbounded, *where)
        inner.fresh = True
        return inner

    def alike_after(self, decision: Any) -> frozenset[Any]:
        """The mesh axes along which all devices still run the same, if a value of that type decides."""
        return self.alike if decision is None else self.alike - _compat.varying_axes(decision)

    def take(self, meta: Meta, operands: Any) -> None:
        """Hand an event to the handler; `complete` must follow."""
        with _compat.own_transfers():
            self.handler.event(self, Event.from_operands(meta, operands, self.here()))

    def take_now(self, meta: Meta, operands: Sequence[Any]) -> None:
        """Hand an event outside of programs to the handler, which may keep its arrays.

        A loop in Python logs the same again and again: what has come of one event comes of all that are alike.
        """
        scope = self.here()
        with _compat.own_transfers():
            if not (self.handler.collects and self.handler.wants(meta, scope)):
                self.handler.event(self, Event.from_operands(meta, operands, scope))
                return
            arrays = _arrays.owned([*operands])
            form = meta, scope, tuple([(x.shape, x.dtype) for x in arrays])
            known = None if self.state else self._forms.get(form)
            if known is not None:
                places, structure, source = known
                self.pieces.append(Packed(structure, [arrays[n] for n in places], source))
                return
            before, place = len(self.pieces), {id(x): n for n, x in enumerate(arrays)}
            self.handler.event(self, Event.from_operands(meta, arrays, scope, own=True))
            is_all = not (self.state or self.waiting) and len(self.pieces) == before + 1
            if is_all and type(piece := self.pieces[-1]) is Packed and all(id(x) in place for x in piece.arrays):
                self._forms[form] = [place[id(x)] for x in piece.arrays], piece.structure, piece.source

    def complete(self) -> None:
        """Let the handler take the events that wait."""
        if self.waiting:
            with _compat.own_transfers():
                self.handler.complete(self)

    def list_logs(self, primitive: Any, params: dict[str, Any]) -> None:
        """Remember what is logged here, if there are names to check."""
        if self.logged is not None:
            scope = self.here()
            self.logged.update({(scope + key, tags): None for key, tags in logged_by(primitive, params)})
            self.has_rules |= _compat.eqn_has_rules(primitive, params)

    def piece(self) -> Any:
        """Everything that was collected so far."""
        return self.handler.gather(self.pieces)

    def collect(self, piece: Any, source: Any = None) -> None:
        """Add to what was collected. All pieces of one `source` have the same types."""
        if source is None or source not in self._sources:
            self.handler.check(self, source.types if type(source) is ProgramSource else piece)
            self._sources.add(source)
        self.pieces.append(piece)

    def absorb(self, state: Any, piece: Any, keys: dict[str, bool], source: Any = None) -> None:
        """Take over the state, the piece and the keys of an inner block."""
        if inside.may_fail and _compat.is_evaluating():
            jax.block_until_ready((state, piece))
        self.state, self.fresh = state, False
        if source is not None and source in self._sources:
            self.pieces.append(piece)
            return
        if type(piece) is Packed or jax.tree.leaves(piece):
            self.collect(piece, source)
        for key, certain in keys.items():
            self.note(key, certain)

    def note(self, key: str, certain: bool) -> None:
        """Remember that the key is logged."""
        self.keys[key] = self.keys.get(key, False) or certain

    def require_type(self, inner: "Frame", state: Any) -> None:
        """Let an inner block end; raise `Grown` if it has changed the type of the state."""
        self.handler.leave(inner, state)
        if signature(inner.state) != signature(state):
            raise Grown(self, types_of(inner.state))

    def settle(self, attempt: Callable[[Any], Any]) -> Any:
        """Trace a block until the type of its state no longer changes."""
        before: list[Any] = []
        while True:
            try:
                return attempt(self.state)
            except Grown as grown:
                if grown.owner is not self:
                    raise
                before.append(signature(self.state))
                with _compat.own_transfers():
                    self.handler.extend(self, grown.struct)
                if signature(self.state) in before:  # it would never settle
                    raise _errors.unsettled(self.keys or self.state) from None


def types_of(tree: Any) -> Any:
    """The same tree with the types of its arrays."""
    return jax.tree.map(_compat.aval_of, tree)


def signature(state: Any) -> Any:
    if not state:
        return ()  # asked in every call
    leaves, treedef = jax.tree.flatten(state)
    avals = [_compat.aval_of(x) for x in leaves]
    return treedef, tuple((a.shape, a.dtype, _compat.varying_axes(a), _compat.explicit_axes(a)) for a in avals)


class _Inside(threading.local):
    may_fail = False
    rebuilding = False


inside = _Inside()


def receive(source: ProgramSource, arrays: Sequence[Any]) -> None:
    """Take the events of a program that C++ has called."""
    frame = _hidden.around.frame
    if (here := frame.here()) != source.scope:
        source = source.in_scope(here)
    frame.absorb(frame.state, Packed(source.structure, arrays, source), source.keys, source)


@contextlib.contextmanager
def _marked(name: str) -> Iterator[None]:
    before = getattr(inside, name)
    setattr(inside, name, True)
    try:
        yield
    finally:
        setattr(inside, name, before)


def rebuilding() -> AbstractContextManager[None]:
    """Mark that a shard_map is bound whose body is a jaxpr, in which no Python code could need values."""
    return _marked("rebuilding")


def failing_at_once() -> AbstractContextManager[None]:
    """Mark that a function with callbacks that may raise runs inside other transformations.

    The function that those transform may catch the exception. On a GPU a program fails after it was dispatched, when
    they would already have taken over its failed results: so they wait for results before they take them over.
    """
    return _marked("may_fail")


def scope_of(eqn: Any, scope: str) -> str:
    """The scopes around an equation whose jaxpr is in `scope`."""
    return scope + _compat.scopes_in(eqn.source_info.name_stack)


_logged: Any = weakref.WeakKeyDictionary()


def _logged_in(jaxpr: Any) -> Logged:
    """Keys and tags of all logs in a jaxpr, whether they ever run or not."""
    logged = _logged.get(jaxpr)
    if logged is None:
        logged = _logged[jaxpr] = {}
        for eqn in _compat.split_jaxpr(jaxpr)[0].eqns if _compat.has_logs(jaxpr) else ():
            logged.update({(scope_of(eqn, "") + key, tags): None for key, tags in logged_by(eqn.primitive, eqn.params)})
    return logged


def logged_by(primitive: Any, params: dict[str, Any]) -> Logged:
    """Keys and tags of all logs in an equation, whether they ever run or not."""
    if primitive is log_p:
        return dict.fromkeys((key, params["meta"].tags) for key in params["meta"].keys)
    return {log: None for jaxpr in _compat.sub_jaxprs(params) for log in _logged_in(jaxpr)}


class Drop(Handler):
    """Removes every log."""

    in_place = True
    masks_lanes = False

    @property
    def only_collects(self) -> bool:
        """Nothing comes of programs, unless the user must be told which names there were."""
        return self.names is None

    def wants(self, meta: Meta, scope: str) -> bool:
        """Want no log."""
        return False

    def event(self, frame: Frame, event: Event) -> None:
        """Drop it."""


class Keep(Drop):
    """Lets every log flow on unchanged."""

    def wants(self, meta: Meta, scope: str) -> bool:
        """Keep all logs."""
        return True

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again."""
        bind(event)


class MarkSeen(Keep):
    """Lets every log flow on, but no longer to the default sink."""

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again, marked."""
        bind(event, seen=True)
