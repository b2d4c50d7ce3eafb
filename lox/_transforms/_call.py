"""What `spool`, `tap`, `nolog` and `keep` share: options, and calling jitted functions at the speed of jit."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _reduce
from lox._engine import _interpret

# The parameters and the result of a function that is transformed.
P = ParamSpec("P")
R = TypeVar("R")

Transform = Callable[..., Any]  # of a function, its arguments, its keyword arguments, and what else is given


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


def prefix_option(given: Any) -> str:
    """A prefix is a string."""
    if not isinstance(given, str):
        raise _errors.LogTypeError(f"`prefix` is {given!r}; it must be a string.")
    return given


# For every jitted function, what is known about calling it transformed: a jitted function if one call of the original
# is one jit with all arguments traced, False if it is not. Weak, and the values must not refer to the key.
_fast: Any = weakref.WeakKeyDictionary()
_MANY = 64


def call(fun: Callable[..., Any], key: Any, transform: Transform, args: Any, kwargs: Any, *given: Any) -> Any:
    """`transform(fun, args, kwargs, *given)`, from the second time on at the speed of jit if `fun` is jitted."""
    if not isinstance(fun, _compat.PjitFunction) or not _compat.is_evaluating():
        return transform(fun, args, kwargs, *given)
    treedef = jax.tree.structure((args, kwargs))
    known = _fast.get(fun)
    if known is None:
        known = _fast[fun] = {}
    how = (key, treedef, _compat.debugged())
    found = known.get(how)
    if found:
        return found(given, *args, **kwargs)
    if found is None:
        if len(known) >= _MANY:
            known.pop(next(iter(known)))  # a callback made anew for every call would fill it
        leaves = jax.tree.leaves((args, kwargs))
        fast = _is_one_jit(_interpret.first_bind(fun, args, kwargs), leaves)
        known[how] = found = _jitted(weakref.ref(fun), transform) if fast else False
    return found(given, *args, **kwargs) if found else transform(fun, args, kwargs, *given)


def _jitted(fun: Any, transform: Transform) -> Any:
    def transformed(given: Any, /, *args: Any, **kwargs: Any) -> Any:
        return transform(fun(), args, kwargs, *given)

    return jax.jit(transformed)


def _is_one_jit(bound: Any, leaves: list[Any]) -> bool:
    """Whether the call is one plain jit of exactly the arguments: none static, none donated, nothing around it."""
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
