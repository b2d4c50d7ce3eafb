"""`lox.watch`: the first NaN or infinity.

A flag travels with the program and says whether one has been found. As long as it has not, every event is checked on
the device; the host is called once, for the first that fails.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _errors
from lox._data import _arrays, _lanes
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox._engine import _emit, _interpret
from lox._engine._event import Event, Meta
from lox._engine._interpret import Frame, Handler
from lox._engine._primitive import bind
from lox._engine._select import Names, Selection
from lox._errors import NonFiniteError
from lox._transforms import _call
from lox._transforms._call import P, R
from lox._transforms._state import typed_like
from lox._transforms._tap import HostFunction, finished, one_for


@dataclasses.dataclass(frozen=True)
class Report:
    """Describes the event and hands it on; on the host."""

    deliver: Callable[[Any], Any]
    site: str

    def __call__(self, logs: logdict, token: int = 0) -> None:
        """Take the event."""
        del token
        lane = _first_lane(logs)
        for key in logs:
            layout = logs._layout(key)
            leaves, _ = jax.tree_util.tree_flatten_with_path(logs[key])
            for (path, leaf), flags in zip(leaves, layout.flags, strict=True):
                value = leaf[_index(flags, lane)]
                if jnp.issubdtype(value.dtype, np.inexact) and not np.isfinite(value.astype(_wide(value.dtype))).all():
                    flags_of = dict(layout.step_flags)
                    steps = {
                        name: of[key][_index(flags_of.get(name, ()), lane)].item()
                        for name, of in logs.steps.items()
                        if key in of
                    }
                    where = jax.tree_util.keystr(path)
                    self.deliver(NonFiniteError(key, where, value, steps, lane, self.site))
                    return


def _first_lane(logs: logdict) -> tuple[int, ...]:
    """The first lane in which something is wrong, outermost vmap first; there may be no lanes at all."""
    valid = next(iter(logs.valid.values()), None)
    if valid is None:
        return ()
    flags = logs._layout(next(iter(logs))).valid_flags
    found = iter(np.argwhere(valid)[0])
    return tuple(int(next(found)) if flag else 0 for flag in flags)


def _index(flags: Any, lane: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i, flag in zip(lane, flags, strict=False) if flag)


def _wide(dtype: Any) -> Any:
    return np.complex128 if jnp.issubdtype(dtype, np.complexfloating) else np.float64


@dataclasses.dataclass(frozen=True)
class Watch(Handler):
    """Checks events until one fails. The state is the token, and whether one has failed."""

    selection: Selection
    deliver: Callable[[Any], Any]

    @property
    def names(self) -> Names | None:
        """The selection."""
        return Names.of(self.selection)

    def wants(self, meta: Meta, path: str) -> bool:
        """All of them: they flow on."""
        return True

    def initial_state(self) -> dict[str, Any]:
        """Nothing has failed yet."""
        return {"token": _emit.new_token(), "failed": Laned(jnp.zeros((), bool))}

    def event(self, frame: Frame, event: Event) -> None:
        """Check the selected keys, and let the event flow on as it is."""
        named = event.in_scope()
        selected = self.selection.keys(named)
        bad = [_not_finite(x) for key in selected for x in named.values[key] if _can_fail(x.tree.dtype)]
        if bad:
            mask = [] if event.mask is None else [event.mask]
            lanes = _lanes.union(*map(_lanes.lanes_of, [*bad, *mask]))
            assert lanes is not None  # all of one event
            fails = functools.reduce(jnp.logical_or, [_lanes.widen(x, lanes).tree for x in bad])
            for x in mask:
                fails &= _lanes.widen(x, lanes).tree
            failed = jnp.any(frame.state["failed"].tree)
            named = named.only(selected).replace(mask=Laned(fails & ~failed, lanes.flags))

            def report(_: Any, token: Any) -> Any:
                return _emit.emit(Report(self.deliver, event.site), named, token, conditional=True)

            token = _emit.once(report, {"": [named.values, named.steps, named.mask]}, frame.alike, frame.state["token"])
            frame.state = {"token": token, "failed": Laned(failed | jnp.any(fails))}
        bind(event)

    def allows(self, frame: Frame, struct: Any) -> bool:
        """The flag may come to vary over devices."""
        return True

    def extend(self, frame: Frame, struct: Any) -> None:
        """Give the flag its type: inside shard_map it may vary over devices."""
        target = struct["failed"]
        failed = Laned(typed_like(jnp.any(frame.state["failed"].tree), target.tree), target.flags)
        frame.state = {**frame.state, "failed": failed}

    def for_rules(self) -> Handler:
        """Only events of the primal are checked."""
        return Untouched()


class Untouched(_interpret.MarkSeen):
    """Lets every log flow on as it is."""

    def event(self, frame: Frame, event: Event) -> None:
        """Bind it again."""
        bind(event)


def _can_fail(dtype: Any) -> bool:
    return not _arrays.is_prng_key(dtype) and jnp.issubdtype(dtype, jnp.inexact)


def _not_finite(x: Laned) -> Laned:
    finite = jnp.isfinite(x.tree)
    return Laned(~finite.all(tuple(range(x.ndim, finite.ndim))), x.flags)


def watch(
    fun: Callable[P, R],
    callback: Callable[[NonFiniteError], Any] | None = None,
    argnames: str | Iterable[str] | None = None,
    tags: str | Iterable[str] | None = None,
) -> Callable[P, R]:
    """Stop a function at the first logged value that is NaN or infinite.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(x):
    ...     def step(x, i):
    ...         x = x * x
    ...         lox.log({"x": x}, step=i)
    ...         return x, None
    ...
    ...     return jax.lax.scan(step, x, jnp.arange(100))
    >>> try:
    ...     lox.spool(lox.watch(f))(9.0)
    ... except lox.NonFiniteError as error:
    ...     print(error)
    'x' is inf at step=5.
      logged at ...

    All that is added to the program is a check of each value on the device; the host is called only when one fails.
    The logs flow on as if nothing were around: to a `spool` or `tap` outside, or else to the console.

    Args:
        fun: Any function of JAX arrays, jitted or not.
        callback: Called on the host with the error, once in a call of the function, which then goes on. By default the
            error is raised. It must not call JAX.
        argnames: Watch these keys only; globs such as `"train/*"` are allowed.
        tags: Watch logs with one of these tags only.

    Returns:
        A function with the signature and result of `fun`.

    Raises:
        NonFiniteError: At the call: which key, at which steps, in which lane, logged where.
    """
    if callback is not None and not callable(callback):
        raise _errors.LogTypeError(f"`callback` is {callback!r}; it must be a function of an error.")
    deliver = one_for(_raise if callback is None else callback, HostFunction)
    handler = Watch(Selection.of(argnames, tags), deliver)

    def transform(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        out, frame = _interpret.run_function(handler, fun, args, kwargs)
        return out, frame.state["token"]

    @functools.wraps(fun)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        return finished(lambda: _call.call(fun, handler, transform, args, kwargs))

    return watched


def _raise(error: NonFiniteError) -> None:
    raise error
