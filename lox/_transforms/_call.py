"""Shared by `spool`, `tap`, `nolog` and `keep`: options, and calling jitted functions at the speed of jit."""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from lox import _compat, _errors
from lox._data import _reduce
from lox._engine import _emit

# The parameters and the result of a transformed function.
P = ParamSpec("P")
R = TypeVar("R")
Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

Transform = Callable[..., Any]  # (options, function, arguments, keyword arguments, *given)


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


_NAMES = ("__name__", "__qualname__")


Attributes = list[tuple[str, Any]]  # what a wrapper has of the function: its name, its documentation, ...


def wraps(fun: Any) -> Callable[[Wrapper], Wrapper]:
    """As `functools.wraps`, for every callable: what some objects have as `__name__` is not a string."""
    attributes = _attributes_of(fun)  # now: it may not be a function
    return lambda wrapper: named(wrapper, fun, attributes)


def named(wrapper: Any, fun: Any, attributes: Attributes | None) -> Any:
    """Name a wrapper as the function, whose attributes may be known."""
    for name, value in _attributes_of(fun) if attributes is None else attributes:
        setattr(wrapper, name, value)
    wrapper.__dict__.update(getattr(fun, "__dict__", {}))
    wrapper.__wrapped__ = fun
    return wrapper


def _attributes_of(fun: Any) -> Attributes:
    if not callable(fun):
        raise _errors.LogTypeError(
            f"lox transforms functions, and got {type(fun).__name__}: write `lox.spool(f)(x)`, not `lox.spool(f(x))`."
        )
    pairs = [(name, getattr(fun, name, None)) for name in functools.WRAPPER_ASSIGNMENTS]
    return [(n, x) for n, x in pairs if x is not None and (isinstance(x, str) or n not in _NAMES)]


# How jitted functions are called, which may be transformed anew in every call: by options. None refers to the function.
_calls: Any = weakref.WeakKeyDictionary()


def remembered(make: Callable[..., R]) -> Callable[..., R]:
    """Remember what is made of options, which are the same again if a function is transformed anew in every call.

    Not if there are reductions of the user's, which may hold arrays, nor if one of them cannot be a key.
    """
    known = functools.lru_cache(256, typed=True)(make)

    def remember(*options: Any) -> R:
        for option in options:
            if type(option) not in _PLAIN:
                return make(*options)
        return known(*options)

    return remember


_PLAIN = frozenset([type(None), str, int, bool])


def prefix_option(given: Any) -> str:
    """Check that a prefix is a string."""
    if not isinstance(given, str):
        raise _errors.LogTypeError(f"`prefix` is {given!r}; it must be a string.")
    return given


_MANY = 64  # options with which one jitted function is called


class Call:
    """How a transformed function is called: `call(args, kwargs, *given)`."""

    attributes: Attributes | None = None  # of the function, if they are known
    usual: Any = None  # a faster way if `_compat.is_usual()` and nothing is given: `usual(*args, **kwargs)`

    def __init__(self, fun: Any, options: Any, transform: Transform):
        self._fun, self._options, self._transform = fun, options, transform

    def __call__(self, args: Any, kwargs: Any, *given: Any) -> Any:
        """Call it."""
        return self._transform(self._options, self._fun, args, kwargs, *given)


def calling(fun: Callable[..., Any], options: Any, transform: Transform, alone: Transform | None = None) -> Call:
    """How to call `transform(options, fun, args, kwargs, *given)`: as `call(args, kwargs, *given)`.

    If `fun` is jitted, or a method or partial of a jitted function, the call is compiled as a whole, and has the speed
    of jit from the second time on. It has the static and donated arguments of `fun`. `alone` is another way to
    transform it then, which may raise `NotAlone` when it is compiled.
    """
    if isinstance(fun, _compat.PjitFunction):
        return _calling_jitted(fun, options, transform, alone)
    jitted, before, keywords = _behind(fun)
    if not isinstance(jitted, _compat.PjitFunction):
        return Call(fun, options, transform)
    return _Bound(_calling_jitted(jitted, options, transform, alone), before, keywords)


_PLACEHOLDER = getattr(functools, "Placeholder", object())  # since Python 3.14


def _behind(fun: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that methods and partials call, and the arguments that they add."""
    before, keywords = (), {}
    while type(fun) in (types.MethodType, functools.partial):
        if type(fun) is types.MethodType:
            fun, before = fun.__func__, (fun.__self__, *before)
        elif any(x is _PLACEHOLDER for x in fun.args):
            break
        else:
            fun, before, keywords = fun.func, (*fun.args, *before), {**fun.keywords, **keywords}
    return fun, before, keywords


def _calling_jitted(jitted: Any, options: Any, transform: Transform, alone: Transform | None) -> "OneProgram":
    calls = _calls.get(jitted)
    if calls is None:
        calls = _calls[jitted] = {}
    call = calls.get(options)
    if call is None:
        if len(calls) >= _MANY:
            calls.pop(next(iter(calls)))  # a new reduction for every call would fill it
        call = calls[options] = OneProgram(weakref.ref(jitted), options, transform, alone)
    return call


class OneProgram(Call):
    """A call of a jitted function, to which `fun` is a weak reference, that is compiled as a whole."""

    def __init__(self, fun: Any, options: Any, transform: Transform, alone: Transform | None):
        super().__init__(fun, options, transform)
        self.attributes, self._alone = _attributes_of(fun()), alone
        self._is_movable = _compat.options_of_jit(fun()) is not None
        self._programs: dict[Any, Any] = {}

    def __call__(self, args: Any, kwargs: Any, *given: Any) -> Any:
        """Call the program, or outside of it."""
        try:
            if self.usual is not None and _compat.is_usual():
                return self.usual(*given, *args, **kwargs)
            if not (self._is_movable and _compat.is_evaluating()):
                return self._transform(self._options, self._fun(), args, kwargs, *given)
            return self._program(len(given))(*given, *args, **kwargs)
        except _emit.NotAlone:
            self._alone = self.usual = None
            self._programs.clear()
        return self(args, kwargs, *given)

    def _program(self, given: int) -> Any:
        program = self._programs.get(debugged := _compat.debugged())
        if program is None:
            # C++ does not look for NaNs in the results of programs that call the host.
            way = self._transform if self._alone is None or any(debugged) else self._alone
            program = self._programs[debugged] = _program(self._fun, functools.partial(way, self._options), given)
            self.usual = self._programs.get((False, False))
        return program


class _Bound(Call):
    """A call of a method or a partial, with the arguments that it adds."""

    def __init__(self, call: OneProgram, before: tuple[Any, ...], keywords: dict[str, Any]):
        self._inner, self._added = call, (before, keywords)
        self._program: Any = None
        self._usual: Any = None

    def __call__(self, args: Any, kwargs: Any, *given: Any) -> Any:
        """Call it with these arguments too."""
        before, keywords = self._added
        return self._inner((*before, *args), {**keywords, **kwargs}, *given)

    @property
    def usual(self) -> Any:
        """The program with these arguments."""
        if (program := self._inner.usual) is not self._program:
            before, keywords = self._added
            self._usual = program and functools.partial(program, *before, **keywords)
            self._program = program
        return self._usual


def _program(fun: Any, transform: Transform, given: int) -> Any:
    # JAX compares the names of arguments, which are the user's, with these.
    def transformed(*_lox_args: Any, **_lox_kwargs: Any) -> Any:
        return transform(fun(), _lox_args[given:], _lox_kwargs, *_lox_args[:given])

    # For profiles, where programs go by the names of their functions.
    transformed.__name__ = transformed.__qualname__ = getattr(fun(), "__name__", "transformed")
    options: Any = _compat.options_of_jit(fun(), shift=given)
    return jax.jit(transformed, **options)
