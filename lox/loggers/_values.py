"""Converts what users give to `Logger.log` to logs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _arrays
from lox._data._bundle import Bundle, Site
from lox._data._lanes import Laned
from lox._data._logdict import logdict
from lox._engine._emit import Packet, packet_of_event
from lox._engine._primitive import as_array
from lox.store._prng_keys import is_prng_key


def as_bundles(data: Mapping[str, Any], steps: Mapping[str, Any]) -> list[Bundle]:
    """Convert a logdict or a dict, which is one event, to bundles with the given steps."""
    if not isinstance(data, Mapping):
        raise _errors.LogTypeError(f"`log` got {data!r}; give it a dict of values or a logdict.")
    bundles = data.to_bundles() if isinstance(data, logdict) else _one_event(data)
    for name, step in steps.items():
        step = _array(step, f"step {name!r}")
        bundles = [_with_step(bundle, name, step) for bundle in bundles]
    return bundles


def packet_now(data: Mapping[str, Any], steps: Mapping[str, Any], prefix: str, run: Any) -> Packet | None:
    """The packet of a dict of concrete numbers and arrays, for which neither XLA nor bundles are needed.

    None if it is anything else, or if there is something wrong with it, which `as_bundles` has the messages for.
    """
    if isinstance(data, logdict) or not isinstance(data, Mapping):
        return None
    concrete = _arrays.concrete_leaves(data, _concrete)
    numbers = {name: _concrete(step) for name, step in steps.items()}
    if concrete is None or not all([x is not None and not x.shape for x in numbers.values()]):
        return None
    treedefs, values = concrete
    keys = tuple([prefix + key for key in data]) if prefix else tuple(data)
    return packet_of_event(keys, tuple(treedefs), values, numbers, run)


_NUMPY = (np.ndarray, np.generic)  # to make a union of them takes longer than to ask


def _concrete(x: Any) -> Any:
    """The same array as `_array`, if it is whole and made of numbers."""
    if isinstance(x, _NUMPY):
        return x if x.dtype.kind in "biufcV" else None
    return _arrays.concrete(x)


def _one_event(data: Mapping[str, Any]) -> list[Bundle]:
    values, treedefs = [], []
    for key, value in data.items():
        if not isinstance(key, str):
            raise _errors.LogTypeError(f"`log` got the key {key!r}: keys are strings.")
        leaves, treedef = jax.tree.flatten(value)
        if not leaves:
            raise _errors.LogTypeError(f"`log` cannot log {key!r}: {value!r} holds no array.")
        arrays = [_array(x, f"the value of {key!r}") for x in leaves]
        for x in arrays:
            if not is_prng_key(x) and x.dtype.kind not in "biufcV":
                raise _errors.LogTypeError(f"`log` cannot log {key!r}: it is an array of {x.dtype}, not of numbers.")
        values += map(Laned, arrays)
        treedefs.append(treedef)
    return [Bundle(values, {}, None, tuple(data), tuple(treedefs), True, Site(""))] if values else []


def _array(x: Any, what: str) -> Any:
    """Keep NumPy arrays; give numbers the dtype that JAX would, but not on a device."""
    if isinstance(x, np.ndarray | np.generic):
        # An operand of a program has at most 32 bits, unless x64 is enabled.
        return x if _compat.is_evaluating() or x.dtype.itemsize < 8 or x.dtype.kind not in "iu" else as_array(x, what)
    if isinstance(x, bool | int | float | complex):
        try:
            return np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(type(x))))
        except OverflowError:
            pass  # `as_array` has a message for it
    return as_array(x, what)


def _with_step(bundle: Bundle, name: str, step: Any) -> Bundle:
    """Add a step: one number for all events, or one for each."""
    lead = () if bundle.single else (bundle.count(),)
    if step.ndim and step.shape != lead:
        events = bundle.count()
        raise _errors.LogTypeError(
            f"`log` got step {name!r} with shape {step.shape}, but {bundle.keys[0]!r} has {events} "
            f"event{'s' * (events != 1)}: give it one number, or one for each event."
        )
    depth = max(len(x.flags) for x in bundle.values)
    array = Laned(_arrays.numpy_for(step).broadcast_to(step, lead), (False,) * depth)
    return dataclasses.replace(bundle, steps={**bundle.steps, name: array})
