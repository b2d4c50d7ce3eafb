"""`lox.log` and the primitive behind it.

`log_p` takes the values, steps, weight and validity of one event and returns nothing: it exists for its effect. The
surrounding transformation decides what the effect is; without one, lowering sends the event to the default sink.
"""

import dataclasses
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from lox import _compat, _errors
from lox._data import _arrays, _reduce
from lox._data._lanes import Laned, flag_of, with_lane
from lox._data._logdict import logdict
from lox._data._sites import call_site, warn
from lox._engine import _devices, _emit, _hidden, _selection, _sink
from lox._engine._event import Event, Meta

log_p = _compat.Primitive(_compat.LOG_NAME)
log_p.multiple_results = True


def bind(event: Event, seen: bool = False) -> None:
    """Execute an event in the current trace; if it was `seen` by a transformation, the default sink ignores it."""
    operands, meta = event.to_operands(seen)
    log_p.bind(*operands, meta=meta)


@log_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, meta: Meta) -> Any:
    del avals, meta
    return [], {_compat.log_effect}


@log_p.def_impl
def _impl(*operands: Any, meta: Meta) -> list[Any]:
    if not (meta.seen or meta.explicit):
        _to_sink(meta, operands, _compat.open_scopes())
    return []


def _to_sink(meta: Meta, operands: Any, scope: str, left_out: Container[str] = ()) -> None:
    kept = [key for key in meta.keys if key not in left_out]
    event = Event.from_operands(meta, operands, scope).only(kept).in_scope()
    if kept:
        _emit.emit(_sink.deliver, [event.bundle(event.values)])


def _lower(ctx: Any, *operands: Any, meta: Meta) -> Any:
    is_silent = meta.seen or meta.explicit or _sink.is_compiled_out()
    _compat.mark_program(ctx, _compat.LogMark(meta.keys, meta.site, is_silent))
    if is_silent:
        return []
    if _compat.is_exporting(ctx):
        raise _errors.exported(meta.keys, meta.site)
    scope = _compat.scopes_in(ctx.name_stack)
    left_out = _gathered(ctx, operands, meta) if _compat.is_gathered(ctx) else {}
    for key, shape in left_out.items():
        # Not an error: a library's log would break the programs of its users.
        warn(f"{_devices.why_not(scope + key, meta.site, shape)}\nUntil then it is left out of what is printed.")

    def to_sink(*operands: Any) -> list[Any]:
        _to_sink(meta, operands, scope, left_out)
        return []

    return mlir.lower_fun(to_sink, multiple_results=True)(ctx, *operands)


def _gathered(ctx: Any, operands: Any, meta: Meta) -> dict[str, tuple[int, ...]]:
    """The keys that are too large to gather their parts from all devices, and their shapes."""
    left_out, rest = {}, iter(map(Laned, map(_devices.Operand, operands, ctx.avals_in), meta.flags))
    for key, treedef in zip(meta.keys, meta.treedefs, strict=True):
        shape = _devices.gathered_shape(treedef, [next(rest) for _ in range(treedef.num_leaves)])
        if shape is not None:
            left_out[key] = shape
    return left_out


# Not cacheable: JAX would lower equal equations once and lose their name stacks.
mlir.register_lowering(log_p, _lower, cacheable=False)


def batched(axis_data: Any, operands: Any, dims: Any, meta: Meta) -> tuple[list[Any], Meta]:
    """The operands and static part of an event in another, outermost vmap."""
    flag = flag_of(axis_data)
    laned = [with_lane(x, dim, flags, flag) for x, dim, flags in zip(operands, dims, meta.flags, strict=True)]
    return [x.tree for x in laned], dataclasses.replace(meta, flags=tuple(x.flags for x in laned))


def _batch(axis_data: Any, operands: Any, dims: Any, *, meta: Meta) -> Any:
    moved, meta = batched(axis_data, operands, dims, meta)
    return log_p.bind(*moved, meta=meta), []


# The fancy table, because its rules are called even when no operand is batched: the event still has the lane.
batching.fancy_primitive_batchers[log_p] = _batch
ad.primitive_transposes[log_p] = lambda cts, *args, meta: [None] * len(args)
_compat.report_primals(log_p)
_compat.stage_as_it_is(log_p, _compat.log_effect)


def log(
    data: Mapping[str, Any],
    *,
    tags: str | Iterable[str] = (),
    reduce: Any = None,
    prefix: str = "",
    where: Any = None,
    weight: Any = None,
    explicit: bool = False,
    **steps: Any,
) -> logdict:
    """Log values from anywhere in a JAX program.

    Outside of lox's transformations the event is printed: `{'x': 3}`. `lox.spool` returns it beside the function's
    result, `lox.tap` hands it to a callback, `lox.nolog` removes it.

    >>> import jax, lox
    >>> @jax.jit
    ... def f(x):
    ...     lox.log({"x": x}, step=0)
    ...     return x * x
    >>> y, logs = lox.spool(f)(3)
    >>> print(logs, logs.step)
    {'x': 3} {'x': 0}

    Args:
        data: Names and values. A value is an array, a number or a pytree of them.
        tags: Labels by which `spool`, `tap`, `nolog` and `keep` can select.
        reduce: How `spool` and `tap` combine the events of these keys: the name of a reduction, a `lox.Reduction`, or a
            mapping from key to either.
        prefix: Put in front of every key.
        where: A boolean; the event counts only where it is true.
        weight: The event's weight in weighted means.
        explicit: Appear only when selected by name or tag.
        **steps: The position of the event in the run, such as `step=i`: numbers, read back as `logs.step`. A step with
            the name of a dict method, such as `update`, is read back as `logs.steps["update"]`.

    Returns:
        The event as a `logdict`.

    Raises:
        LogTypeError: A key is not a string, or a value holds no array; the message names the key. Also a TypeError.
    """
    if type(data) is not dict and not isinstance(data, Mapping):
        raise _errors.LogTypeError(
            f"`lox.log` takes a mapping from names to values, not {type(data).__name__}: `lox.log({{'loss': x}})`."
        )
    if not isinstance(prefix, str):
        raise _errors.LogTypeError(f"`prefix` is {prefix!r}; it must be a string.")
    if isinstance(data, logdict) and data.valid:
        options: dict[str, Any] = dict(tags=tags, reduce=reduce, prefix=prefix, weight=weight, explicit=explicit)
        return _log_again(data, where, options | steps)
    if tags:
        tags = _selection.names("tags", tags)
    if where is None and weight is None and reduce is None and not _hidden.is_transforming():
        logs = _log_now(data, steps, prefix, explicit) if _compat.is_evaluating() else None
        if logs is not None:
            return logs
    convert, convert_step = (_now, _step_now) if _compat.is_evaluating_underneath() else (as_array, as_step)
    names, treedefs, reductions, operands = [], [], [], []
    for key, value in data.items():
        if not isinstance(key, str):
            raise _errors.LogTypeError(f"`lox.log` got the key {key!r}: keys are strings, not {type(key).__name__}.")
        if isinstance(value, jax.Array):
            treedef = _arrays.LEAF
            operands.append(value)
        else:
            leaves, treedef = jax.tree.flatten(value)
            if not leaves:
                raise _errors.LogTypeError(f"`lox.log` cannot log {key!r}: {value!r} holds no array.")
            operands += [x if isinstance(x, jax.Array) else convert(x, f"the value of {key!r}") for x in leaves]
        names.append(prefix + key if prefix else key)
        treedefs.append(treedef)
        reductions.append(None if reduce is None else _reduce.resolve(reduce, key))
    if reduce is not None and isinstance(reduce, Mapping) and set(reduce) - set(data):
        raise _errors.OptionError(
            f"`reduce` names {_errors.listing(set(reduce) - set(data))}, "
            f"but `lox.log` was given {_errors.listing(data)}."
        )
    numbers = {name: convert_step(name, x) for name, x in steps.items()}
    logs = logdict.of_event(names, treedefs, operands, numbers)
    operands += numbers.values()
    operands += [] if weight is None else [_as_scalar(weight, "`weight`")]
    if where is not None:
        where = _as_scalar(where, "`where`", bool)
        logs.valid = dict.fromkeys(names, where)
        operands.append(where)
    if names:
        meta = Meta(
            keys=tuple(names),
            treedefs=tuple(treedefs),
            reductions=tuple(reductions),
            steps=tuple(numbers),
            tags=frozenset(tags),
            weighted=weight is not None,
            has_valid=where is not None,
            explicit=explicit,
            seen=False,
            site=call_site(),
            flags=((),) * len(operands),
        )
        _hidden.check_log(_compat.LogMark(meta.keys, meta.site), sys._getframe())
        log_p.bind(*operands, meta=meta)
    return logs


def _log_now(data: Mapping[str, Any], steps: dict[str, Any], prefix: str, explicit: bool) -> logdict | None:
    """Log an event of concrete arrays outside of programs, without passing through XLA.

    None if it is not such an event, or not one that can be logged, which the caller has the messages for.
    """
    concrete = _arrays.concrete_leaves(data, _arrays.concrete)
    numbers = {name: _arrays.concrete(step) for name, step in steps.items()}
    if concrete is None or not all([_is_step(x) for x in numbers.values()]):
        return None
    treedefs, values = concrete
    keys = [prefix + key for key in data] if prefix else [*data]
    scope = _compat.open_scopes()
    if not explicit and _sink.config.sink != "off":
        with _compat.own_transfers():
            names = tuple([scope + key for key in keys]) if scope else tuple(keys)
            packet = _emit.packet_of_event(names, tuple(treedefs), values, numbers)
        _emit.deliver_now(_sink.deliver, packet)
    return logdict.of_event(keys, treedefs, values, numbers)


def _is_step(x: Any) -> bool:
    """Whether it is a number of a dtype that holds -1, which stands for a missing step."""
    return x is not None and not x.shape and (x.dtype.kind in "ifc" or x.dtype.itemsize >= 4)


def _log_again(logs: logdict, where: Any, options: dict[str, Any]) -> logdict:
    """Log what `spool` has returned, without inventing events: a reduced key may have had none."""
    ragged = [key for key, valid in logs.valid.items() if valid.ndim]
    if ragged:
        raise _errors.LogTypeError(
            f"`lox.log` cannot log {_errors.listing(ragged)}, of which only some events happened, as one value: "
            "the others are padding.\n"
            'Either log what they come to:   lox.spool(f, reduce="mean")\n'
            "or leave them to the outside:   lox.spool(f, keep_logs=True)"
        )
    reduce = options.pop("reduce")

    def part(keys: Iterable[str], where: Any) -> logdict:
        how = {key: reduce[key] for key in keys if key in reduce} if isinstance(reduce, Mapping) else reduce
        return log({key: logs[key] for key in keys}, where=where, reduce=how, **options)

    again = part([key for key in logs if key not in logs.valid], where)
    for key, valid in logs.valid.items():
        again |= part([key], valid if where is None else jnp.logical_and(where, valid))
    return again


_WIDER = "Let JAX use 64 bits, `jax.config.update('jax_enable_x64', True)`, or log it as a float."


def as_array(x: Any, what: str) -> Any:
    """Convert to an array; the error names `what` if it cannot be done."""
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, str | bytes) or x is None:
        raise _errors.LogTypeError(f"`lox.log` cannot log {what}: {x!r} is not an array but {type(x).__name__}.")
    try:
        with _compat.own_transfers():
            array = jnp.asarray(x)
    except OverflowError as error:  # a Python integer
        kind = jax.dtypes.canonicalize_dtype(np.int64)
        raise _errors.LogTypeError(f"`lox.log` cannot log {what}: {x!r} does not fit into {kind}. {_WIDER}") from error
    except (TypeError, ValueError) as error:
        raise _errors.LogTypeError(
            f"`lox.log` cannot log {what}: {type(x).__name__} cannot be converted to an array ({error})."
        ) from error
    if isinstance(x, np.ndarray | np.generic) and not _keeps_integers(x, array.dtype):
        raise _errors.LogTypeError(
            f"`lox.log` cannot log {what}: {x.dtype} {x} does not fit into {array.dtype}. {_WIDER}"
        )
    return array


def _keeps_integers(x: Any, dtype: Any) -> bool:
    """Whether NumPy integers keep their values in the dtype to which JAX silently converts them."""
    return x.dtype.kind not in "iu" or x.dtype == dtype or np.array_equal(np.asarray(x).astype(dtype), x)


_OPTIONS = ("tags", "reduce", "prefix", "where", "weight", "explicit")


def as_step(name: str, x: Any) -> Any:
    """Convert to a number that can be a step."""
    if isinstance(x, _compat.StagingTracer) and isinstance(x.dtype, np.dtype) and _is_step(x):
        return x  # what most are, and each log has one
    try:
        step = _as_scalar(x, f"step {name!r}")
    except _errors.LogTypeError as error:
        hint = _errors.nearest(name, _OPTIONS)
        if name == "steps" and isinstance(x, Mapping):
            hint = f" Write `{', '.join(f'{k}={v!r}' for k, v in x.items())}`: every step is a separate argument."
        if not hint:
            raise
        raise _errors.LogTypeError(f"{error} Arguments that lox does not know are steps.{hint}") from error
    # The dtype must hold -1, which stands for a missing step.
    small = step.dtype.kind == "b" or (step.dtype.kind == "u" and step.dtype.itemsize < 4)
    return step.astype(jnp.int32) if small else step


def _now(x: Any, what: str) -> Any:
    """`as_array` where nothing is traced: what is not on a device yet stays on the host."""
    array = _arrays.concrete(x)
    return as_array(x, what) if array is None else array


def _step_now(name: str, x: Any) -> Any:
    """`as_step` where nothing is traced."""
    step = _arrays.concrete(x)
    return step if _is_step(step) else as_step(name, x)


def _as_scalar(x: Any, what: str, dtype: Any = None) -> Any:
    array = as_array(x, what)
    if array.shape:
        raise _errors.LogTypeError(
            f"`lox.log` got {what} with shape {array.shape}: it must be a single number per event. "
            "Log an array under its own key."
        )
    if dtype is not None and array.dtype != dtype:
        array = array.astype(dtype)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise _errors.LogTypeError(f"`lox.log` got {what} of type {array.dtype}: it must be a number.")
    return array
