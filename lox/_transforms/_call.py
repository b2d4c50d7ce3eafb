"""Shared by `spool`, `tap`, `nolog` and `keep`: options, and calling jitted functions at the speed of jit."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _reduce
from lox._engine import _trace

# The parameters and the result of a transformed function.
P = ParamSpec("P")
R = TypeVar("R")
Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

Transform = Callable[..., Any]  # (function, arguments, keyword arguments, *given)


def reduce_option(reduce: Any) -> Any:
    """A hashable form of the option: a reduction for all keys, or pairs of key and reduction."""
    if isinstance(reduce, Mapping):
        return tuple((key, _reduce.resolve(how, key)) for key, how in reduce.items())
    return _reduce.resolve(reduce, "all keys")


def count_option(name: str, given: Any) -> Any:
    """A hashable form of an option that is a positive number, or pairs of key and number."""
    if isinstance(given, Mapping):
        return tuple((key, count_option(f"{name}[{key!r}]", n)) for key, n in given.items())
    if given is None or (isinstance(given, int | np.integer) and not isinstance(given, bool) and given > 0):
        return given
    raise _errors.OptionError(f"`{name}` is {given!r}; it must be a positive integer.")


def wraps(fun: Any) -> Callable[[Wrapper], Wrapper]:
    """As `functools.wraps`, for every callable: what some objects have as `__name__` is not a string."""
    if not callable(fun):
        raise _errors.LogTypeError(
            f"lox transforms functions, and got {type(fun).__name__}: write `lox.spool(f)(x)`, not `lox.spool(f(x))`."
        )
    is_text = {name: isinstance(getattr(fun, name, None), str) for name in ("__name__", "__qualname__")}
    names = [name for name in functools.WRAPPER_ASSIGNMENTS if is_text.get(name, True)]

    def decorate(wrapper: Wrapper) -> Wrapper:
        functools.update_wrapper(wrapper, fun, names)
        return wrapper

    return decorate


def prefix_option(given: Any) -> str:
    """Check that a prefix is a string."""
    if not isinstance(given, str):
        raise _errors.LogTypeError(f"`prefix` is {given!r}; it must be a string.")
    return given


# How to call each jitted function transformed: with another jitted function if a call of the original is a single jit
# with all arguments traced, else False. Weak, so the values must not refer to the key.
_fast: Any = weakref.WeakKeyDictionary()
_MANY = 64


def call(fun: Callable[..., Any], options: Any, transform: Transform, args: Any, kwargs: Any, *given: Any) -> Any:
    """Call `transform(fun, args, kwargs, *given)`; if `fun` is jitted, at the speed of jit from the second time on."""
    if not isinstance(fun, _compat.PjitFunction) or not _compat.is_evaluating():
        return transform(fun, args, kwargs, *given)
    treedef = jax.tree.structure((args, kwargs))
    known = _fast.get(fun)
    if known is None:
        known = _fast[fun] = {}
    cache_key = (options, treedef, _compat.debugged())
    fast = known.get(cache_key)
    if fast is None:
        if len(known) >= _MANY:
            known.pop(next(iter(known)))  # a new callback for every call would fill it
        leaves = jax.tree.leaves((args, kwargs))
        one_jit = _is_one_jit(_trace.first_bind(fun, args, kwargs), leaves)
        known[cache_key] = fast = _jitted(weakref.ref(fun), transform) if one_jit else False
    return fast(given, *args, **kwargs) if fast else transform(fun, args, kwargs, *given)


def _jitted(fun: Any, transform: Transform) -> Any:
    def transformed(given: Any, /, *args: Any, **kwargs: Any) -> Any:
        return transform(fun(), args, kwargs, *given)

    return jax.jit(transformed)


def _is_one_jit(bound: Any, leaves: list[Any]) -> bool:
    """Whether the call is a single plain jit of exactly these arguments, none of them static or donated."""
    if bound is None:
        return False
    primitive, operands, params = bound
    return (
        primitive.name == "jit"
        and len(operands) == len(leaves)
        and all(a is b or _is_number(b) for a, b in zip(operands, leaves, strict=True))
        and _compat.is_plain_jit(params)
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float | complex | np.ndarray | np.generic)
