"""Reductions: how the events of one key become one value.

A reduction is three functions. `init` makes the state from a value of zeros, `update` adds an event, `finish` makes the
result. They see one leaf of one lane, so a custom reduction need not know about vmap. The state is in the carry of the
loop that the events come from: memory does not grow with the number of events.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays, _lanes
from lox._data._lanes import Laned


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """A way to combine events.

    >>> import jax, jax.numpy as jnp, lox
    >>> rms = lox.Reduction(
    ...     init=lambda x: (x, 0),
    ...     update=lambda state, x: (state[0] + x**2, state[1] + 1),
    ...     finish=lambda state: jnp.sqrt(state[0] / state[1]),
    ... )
    >>> def f(xs):
    ...     return jax.lax.scan(lambda c, x: (lox.log({"x": x}), (c, c))[1], 0, xs)
    >>> _, logs = lox.spool(f, reduce=rms)(jnp.array([3.0, 4.0]))
    >>> print(logs)
    {'x': 3.535534}

    Attributes:
        init: From zeros of the value's shape and dtype to the state before any event.
        update: From a state and a value to the next state. Shapes and dtypes of the state must not change.
        finish: From the state to the result.
        name: For messages.
        weighted: Whether `update` also takes the event's weight, as its third argument.
        counted: Whether `finish` also takes the number of events, as its second argument.
    """

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    finish: Callable[..., Any]
    name: str = "a reduction of your own"
    weighted: bool = False
    counted: bool = False

    def __eq__(self, other: object) -> bool:
        """Whether both do the same, as far as can be known: one made anew for every call is the same again."""
        return self is other or (isinstance(other, Reduction) and self._meaning == other._meaning)

    def __hash__(self) -> int:
        return hash(self._meaning)

    @functools.cached_property
    def _meaning(self) -> Any:
        functions = self.init, self.update, self.finish
        return *map(_meaning, functions), self.name, self.weighted, self.counted


def _meaning(fun: Any) -> Any:
    """A key that functions with the same code and the same surroundings share; the function if something may change."""
    try:
        meaning = _meanings[fun]
    except KeyError:
        fixed = _fixed(fun, ())
        meaning = _meanings[fun] = None if fixed is fun else fixed  # or it would keep itself alive
    except TypeError:  # it cannot be a key there, and may change
        meaning = None
    return fun if meaning is None else meaning


_meanings: Any = weakref.WeakKeyDictionary()


def _fixed(value: Any, around: tuple[Any, ...]) -> Any:
    """A key of what a function refers to that no other value has; None if it may change, or refers to `around`."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.dtype):
        return type(value), repr(value)  # 0.0 equals -0.0, and NaN nothing
    if isinstance(value, _compat.PjitFunction):
        return value  # JAX does not look again either
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType | types.FunctionType):
        name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        if name and name.split(".")[0] in _CONSTANT:
            return value
    if isinstance(value, tuple):
        parts, code = value, None
    elif isinstance(value, types.FunctionType) and value not in around:
        code, known = value.__code__, value.__globals__
        parts = (value.__defaults__, *(value.__kwdefaults__ or {}).items())
        parts += tuple(known[name] for name in _names_in(code) if name in known)
        try:
            parts += tuple(cell.cell_contents for cell in value.__closure__ or ())
        except ValueError:  # it is not defined yet
            return None
    else:
        return None
    keys = tuple(_fixed(part, (*around, value)) for part in parts)
    return None if None in keys else (code, keys)


_CONSTANT = ("builtins", "jax", "jaxlib", "lox", "math", "numpy", "operator")  # modules that nobody changes


def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function, and those defined in it, look up as globals or attributes."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _floating(x: Any) -> Any:
    """The dtype of the mean: integers become floats as in `jnp.mean`."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.dtype
    return np.dtype(np.float64 if x.dtype.itemsize == 8 else np.float32)


# Sums are compensated: the low-order bits that an addition loses are kept separately and added at the end. A plain
# running mean of 100,000 float32 values is off by 1e-5; this one is exact to the last bit or two. Every operation here
# is compiled for every key, so there are as few as possible.
def _add(total: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    high, low = total
    new = high + x
    part = new - high
    lost = low + ((high - (new - part)) + (x - part))
    # Infinity minus itself is NaN: then there is nothing to compensate.
    lost = jnp.where(_finite(new), lost, jnp.zeros((), lost.dtype))  # not `full_like`, which needs a mesh
    # The lost bits return to the sum as soon as they are large enough, or their own sum would lose bits.
    high = new + lost
    return high, lost - (high - new)


def _total(total: tuple[Any, Any]) -> Any:
    high, low = total
    return jax.lax.select(_finite(high), high + low, high)


def _finite(x: Any) -> Any:
    return jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else jax.lax.is_finite(x)


def _sum_init(x: Any) -> Any:
    return _mean_init(x) if jnp.issubdtype(x.dtype, jnp.inexact) else (x.astype(_sum_dtype(x.dtype)),)


def _sum_dtype(dtype: Any) -> Any:
    """The dtype of `jnp.sum`: integers are summed in at least 32 bits, in x64 mode in at least 64."""
    bits = 64 if jax.config.jax_enable_x64 else 32  # type: ignore[attr-defined]
    if dtype.kind != "b" and jnp.iinfo(dtype).bits >= bits:
        return dtype
    return np.dtype(f"uint{bits}" if jnp.issubdtype(dtype, jnp.unsignedinteger) else f"int{bits}")


def _sum_update(state: Any, x: Any) -> Any:
    if len(state) == 1:
        return (state[0] + x.astype(state[0].dtype),)
    return (*_add(state[:2], x.astype(state[0].dtype)), state[2])


def _sum_finish(state: Any) -> Any:
    return state[0] if len(state) == 1 else _total(state[:2]).astype(state[2].dtype)


def promoted(reduction: Reduction, state: Any, fresh: Any) -> Any:
    """Cast a state to the dtypes of `fresh`, the state without events of another dtype; None if they do not match."""
    if reduction is _REDUCTIONS["sum"] and len(state) < len(fresh):  # from integers to floats
        (total,), (zero, _, model) = state, fresh
        high = total.astype(jnp.real(zero).dtype)
        low = (total - high.astype(total.dtype)).astype(high.dtype)
        return high.astype(zero.dtype), low.astype(zero.dtype), model
    if jax.tree.structure(state) != jax.tree.structure(fresh):
        return None
    return jax.tree.map(lambda x, y: x.astype(y.dtype), state, fresh)


def _mean_init(x: Any) -> Any:
    model = x.astype(_floating(x))
    zero = model.astype(_arrays.wide_float(model.dtype))
    return zero, zero, model


def _mean_finish(state: Any, count: Any) -> Any:
    return _over(_total(state[:2]), count).astype(state[2].dtype)


def _weighted_init(x: Any) -> Any:
    zero, _, model = _mean_init(x)
    weight = jnp.zeros((), jnp.real(zero).dtype)
    return (zero, zero), (weight, weight), model


def _weighted_update(state: Any, x: Any, weight: Any) -> Any:
    total, weights, model = state
    w = weight.astype(weights[0].dtype)
    dtype = total[0].dtype
    return _add(total, x.astype(dtype) * w.astype(dtype)), _add(weights, w), model


def _over(total: Any, count: Any) -> Any:
    """Divide; no events give NaN, unless NaNs are being debugged."""
    if _compat.debugged()[0]:
        count = jnp.where(count == 0, jnp.ones_like(count), count)
    return total / count.astype(total.dtype)


def _weighted_finish(state: Any) -> Any:
    total, weights, model = state
    total = _total(total)
    return _over(total, _total(weights)).astype(model.dtype)


def with_weights(state: Any, count: Any) -> Any:
    """Make the state of a weighted mean from that of a plain mean of `count` events."""
    high, low, model = state
    weight = jnp.asarray(count, jnp.real(high).dtype)
    return (high, low), (weight, jnp.zeros_like(weight)), model


# Welford's recurrence. The low-order bits of the mean are kept separately, so that deviations are exact even where the
# mean is much larger than the spread; a mean rounded to float32 would cost half of the digits.
def _var_init(x: Any) -> Any:
    zero, _, model = _mean_init(x)
    square = jnp.real(zero)
    return (zero, zero), (square, square), jnp.zeros((), jnp.int32), model


def _var_update(state: Any, x: Any) -> Any:
    mean, squares, n, model = state
    x, n = x.astype(mean[0].dtype), n + 1
    before = (x - mean[0]) - mean[1]
    mean = _add(mean, before / n.astype(x.dtype))
    after = (x - mean[0]) - mean[1]
    return mean, _add(squares, jnp.real(before * jnp.conj(after))), n, model


def _var_finish(state: Any) -> Any:
    _, squares, n, model = state
    return _over(_total(squares), n).astype(jnp.real(model).dtype)


def _extreme(name: str, choose: Any, start: Any) -> Reduction:
    return Reduction(lambda x: jnp.full_like(x, start(x.dtype)), choose, lambda x: x, name)


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -_highest(dtype) if _is_signed(dtype) else jnp.finfo(dtype).min
    return False if dtype.kind == "b" else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):  # ordered by the real part, then by the imaginary part
        largest = jnp.finfo(dtype).max if _compat.debugged()[1] else np.inf
        return complex(largest, largest)
    if jnp.issubdtype(dtype, jnp.inexact):
        if _compat.debugged()[1]:
            return jnp.finfo(dtype).max
        infinity = np.asarray(np.inf).astype(dtype)  # NaN or the largest number if the dtype has no infinity
        return np.inf if infinity.astype(np.float32) == np.inf else jnp.finfo(dtype).max
    return True if dtype.kind == "b" else jnp.iinfo(dtype).max


def _is_signed(dtype: Any) -> bool:
    return bool(np.asarray(-1).astype(dtype) < np.asarray(1).astype(dtype))  # float8_e8m0fnu is not


_REDUCTIONS = {
    "mean": Reduction(_mean_init, _sum_update, _mean_finish, "mean", counted=True),
    "sum": Reduction(_sum_init, _sum_update, _sum_finish, "sum"),
    "min": _extreme("min", jnp.minimum, _highest),
    "max": _extreme("max", jnp.maximum, _lowest),
    "first": Reduction(
        lambda x: (x, jnp.zeros((), bool)),
        lambda state, x: (jnp.where(state[1], state[0], x), jnp.ones((), bool)),
        lambda state: state[0],
        "first",
    ),
    "last": Reduction(lambda x: x, lambda state, x: x, lambda state: state, "last"),
    "count": Reduction(lambda x: jnp.zeros((), jnp.int32), lambda state, x: state + 1, lambda state: state, "count"),
    "std": Reduction(_var_init, _var_update, lambda state: jnp.sqrt(_var_finish(state)), "std"),
    "var": Reduction(_var_init, _var_update, _var_finish, "var"),
    "append": Reduction(lambda x: x, lambda state, x: x, lambda state: state, "append"),
}
_REDUCTIONS["replace"] = _REDUCTIONS["last"]
COUNT = _REDUCTIONS["count"]
MEAN = _REDUCTIONS["mean"]
WEIGHTED_MEAN = Reduction(_weighted_init, _weighted_update, _weighted_finish, "mean", weighted=True)


def is_own(reduction: Reduction) -> bool:
    """Whether a reduction is one of lox, and not one of a user."""
    return reduction is WEIGHTED_MEAN or reduction is _REDUCTIONS.get(reduction.name)


def resolve(how: Any, key: str) -> Reduction | None:
    """The reduction for a key, from an option that is a name, a `Reduction`, a mapping to either, or None."""
    if isinstance(how, Mapping):
        how = how.get(key)
    if how is None or isinstance(how, Reduction):
        return how
    if isinstance(how, str) and how in _REDUCTIONS:
        return _REDUCTIONS[how]
    raise _errors.OptionError(
        f"there is no reduction {how!r} (for {key!r}). "
        f"Choose {_errors.listing(sorted(_REDUCTIONS))}, or give a `lox.Reduction`."
    )


def over_events(reduction: Reduction, x: Laned, valid: Laned | None, axis: int) -> Any:
    """Reduce the events along `axis`, without those that did not happen.

    They are all in memory, so no loop is needed; the results are those of the streaming reductions up to rounding.
    """
    with jax.numpy_dtype_promotion("standard"):
        over = lambda data: _over_events(reduction, Laned(data, x.flags), valid, axis, _arrays.missing_value)  # noqa: E731
        by_words = reduction.name in ("first", "last") and _arrays.is_prng_key(x.tree.dtype)
        return _compat.map_words(over, x.tree) if by_words else over(x.tree)


def last_event(x: Laned, valid: Laned | None, axis: int) -> Any:
    """The step of the last event that happened."""
    return _over_events(_REDUCTIONS["last"], x, valid, axis, _arrays.missing_step)


def _over_events(reduction: Reduction, x: Laned, valid: Laned | None, axis: int, missing: Callable[[Any], Any]) -> Any:
    xp = _arrays.numpy_for(x.tree)
    if reduction is COUNT:
        if valid is None:
            return xp.asarray(x.tree.shape[axis], np.int32)
        return valid.tree.sum(axis).astype(np.int32)
    if valid is not None:
        lanes = _lanes.union(_lanes.lanes_of(x, axis + 1), _lanes.lanes_of(valid, axis + 1))
        assert lanes is not None  # both come from one series
        x, valid = _lanes.widen(x, lanes, axis + 1), _lanes.widen(valid, lanes, axis + 1)
        counted = xp.broadcast_to(_lanes.expand_to(valid, lanes.flags, x.tree.ndim, axis + 1), x.tree.shape)
    else:
        counted = _compat.sharded_like(xp.ones(x.tree.shape, bool), x.tree)
    over = _OVER.get(reduction.name) if reduction is _REDUCTIONS.get(reduction.name) else None
    empty = not x.tree.shape[axis]
    if over and empty:  # NumPy has no minimum of an empty array, but one empty slot gives the same result
        x = x.map(lambda x: xp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype))
        counted = xp.zeros(x.tree.shape, bool)
    result = over(xp, x.tree, counted, counted.sum(axis), axis) if over else _by_loop(reduction, x, valid, axis)
    if valid is None and not empty:
        return result
    any_valid = valid.tree.any(axis) if valid is not None else xp.zeros((), bool)
    any_valid = any_valid.reshape(any_valid.shape + (1,) * (result.ndim - any_valid.ndim))
    return xp.where(any_valid, result, missing(result.dtype)).astype(result.dtype)


def _only(xp: Any, x: Any, valid: Any, otherwise: Any) -> Any:
    return xp.where(valid, x, xp.asarray(otherwise, x.dtype))


def _over_sum(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        dtype, wide = x.dtype, _arrays.wide_float(x.dtype)
    else:
        dtype = wide = np.dtype(_sum_dtype(x.dtype))
    return _only(xp, x, valid, 0).astype(wide).sum(axis, dtype=wide).astype(dtype)


def _over_mean(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    dtype = _floating(x)
    wide = _arrays.wide_float(dtype)
    total = _only(xp, x, valid, 0).astype(wide).sum(axis, dtype=wide)
    return (total / xp.maximum(count, 1)).astype(dtype)


def _over_var(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    dtype = _floating(x)
    x = x.astype(_arrays.wide_float(dtype))
    center = xp.expand_dims(_over_mean(xp, x, valid, count, axis), axis)
    deviations, count = _only(xp, x - center, valid, 0), xp.maximum(count, 1)
    squares = (xp.abs(deviations) ** 2).sum(axis) / count
    # The mean has been rounded, which matters if it is much larger than the spread: subtract the mean deviation too.
    off = deviations.sum(axis) / count
    return (squares - xp.abs(off) ** 2).astype(np.zeros(0, dtype).real.dtype)


def _over_std(xp: Any, *args: Any) -> Any:
    return xp.sqrt(_over_var(xp, *args))


def _over_min(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    return _comparable(_only(xp, x, valid, _highest(x.dtype))).min(axis).astype(x.dtype)


def _over_max(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    return _comparable(_only(xp, x, valid, _lowest(x.dtype))).max(axis).astype(x.dtype)


def _comparable(x: Any) -> Any:
    """Cast small floats to 32 bits: jnp starts from infinity, which becomes NaN in dtypes that have none."""
    return x.astype(_arrays.wide_float(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _over_first(xp: Any, x: Any, valid: Any, count: Any, axis: int) -> Any:
    index = xp.expand_dims(valid.argmax(axis), axis)
    return xp.take_along_axis(x, index, axis).squeeze(axis)


def _over_last(xp: Any, x: Any, valid: Any, *args: Any) -> Any:
    axis = args[1]
    return _over_first(xp, xp.flip(x, axis), xp.flip(valid, axis), *args)


def _by_loop(reduction: Reduction, x: Laned, valid: Laned | None, axis: int) -> Any:
    """Apply a custom reduction, which sees single items: lanes and outer axes are mapped over."""
    lead = axis + x.ndim
    values = jnp.moveaxis(x.tree, axis, 0)
    events, outer, item = values.shape[0], values.shape[1 : 1 + lead], values.shape[1 + lead :]
    flags = jnp.ones((events, *outer), bool) if valid is None else jnp.moveaxis(valid.tree, axis, 0)

    def step(state: Any, event: Any) -> Any:
        value, keep = event
        new = reduction.update(state, value, *[jnp.ones((), jnp.float32)] * reduction.weighted)
        return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state), None

    def one_lane(values: Any, valid: Any) -> Any:
        state, _ = jax.lax.scan(step, initial(reduction, item, values.dtype), (values, valid))
        return reduction.finish(state, *[valid.sum()] * reduction.counted)

    mapped = jax.vmap(one_lane, in_axes=1)
    result = mapped(values.reshape(events, -1, *item), flags.reshape(events, -1))
    return result.reshape(*outer, *result.shape[1:])


def initial(reduction: Reduction, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """The state before any event, for values of this shape, dtype and explicit sharding."""
    state = reduction.init(_arrays.zeros(shape, dtype, sharding))
    return jax.tree.map(lambda x: _arrays.strong(jnp.asarray(x)), state)


_OVER = {
    "sum": _over_sum,
    "mean": _over_mean,
    "var": _over_var,
    "std": _over_std,
    "min": _over_min,
    "max": _over_max,
    "first": _over_first,
    "last": _over_last,
}
