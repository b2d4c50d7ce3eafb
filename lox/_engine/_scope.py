"""`lox.scope`: names for parts of a program, in front of the keys logged there; and such names for modules."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from lox import _compat, _errors


def scope(name: str) -> AbstractContextManager[Any]:
    """Put a name in front of all keys logged inside.

    >>> import jax, lox
    >>> @jax.jit
    ... def layer(x):
    ...     lox.log({"norm": x})
    ...     return 2 * x
    >>> def model(x):
    ...     with lox.scope("encoder"):
    ...         x = layer(x)
    ...     with lox.scope("decoder"):
    ...         return layer(x)
    >>> print(lox.spool(model)(3)[1])
    {'encoder/norm': 3, 'decoder/norm': 6}

    It is one of JAX's named scopes, which JAX records for every operation. A jitted function, compiled once, thus logs
    under every scope in which it is called. Only scopes inside the transformed function count: the result of `spool`
    does not depend on where it is called. Logs that no transformation takes are printed with the scopes inside the
    innermost jit or loop.

    Args:
        name: Any text without a line break. `"a/b"` is the same as `"b"` in a scope `"a"`.

    Returns:
        A context manager, which is also a decorator.
    """
    if not isinstance(name, str):
        raise _errors.LogTypeError(f"`lox.scope` got {name!r}: it must be a string.")
    if name != _errors.encodable(name):
        raise _errors.LogTypeError(f"`lox.scope` got {name!r}: the compiler of JAX does not take half a character.")
    return jax.named_scope(_compat.SCOPE + name)


# --- the modules of neural networks --------------------------------------------------------------

Path = tuple[str, ...]  # from the model to one of its modules

_entered: contextvars.ContextVar[Path] = contextvars.ContextVar("lox_module", default=())


@contextlib.contextmanager
def module_scope(path: Path) -> Iterator[None]:
    """A scope for a method of a module: what its path has more than that of the module that calls it.

    Nothing, if a module calls another method of its own. A module that is called by one that does not contain it has
    its whole path, below that of the caller.
    """
    outer = _entered.get()
    added = path[len(outer) :] if path[: len(outer)] == outer else path
    token = _entered.set(path)
    try:
        with scope("/".join(added)) if added else contextlib.nullcontext():
            yield
    finally:
        _entered.reset(token)


_NOT_METHODS = (staticmethod, classmethod, property, functools.cached_property, type)


@functools.cache
def scoped_class(cls: type, path: Path, base: type) -> type:
    """A subclass whose methods are in the scope of their module.

    A class and not an attribute of the object, because JAX keeps the classes of pytrees, and Flax those of its graphs:
    the path is there in every jit, scan or remat, and no cache confuses a module that has one with one that has not.

    Args:
        cls: The class of the module.
        path: The module's place in the model.
        base: The library's class of all modules, whose own methods are left alone.
    """

    def method(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
            with module_scope(path):
                return getattr(super(subclass, self), name)(*args, **kwargs)

        return scoped

    names = dict.fromkeys(name for c in cls.__mro__ if c not in base.__mro__ for name in vars(c))
    methods = {}
    for name in names:
        found = next(vars(c)[name] for c in cls.__mro__ if name in vars(c))
        is_method = callable(getattr(cls, name, None)) and not isinstance(found, _NOT_METHODS)
        if is_method and (name == "__call__" or not name.startswith("_")):
            methods[name] = method(name, getattr(cls, name))
    subclass = type(cls)(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})
    subclass.__qualname__ = cls.__qualname__
    subclass._lox_unscoped = cls
    return subclass


def unscoped_class(cls: type) -> type:
    """The class of which this one is a scoped form; itself, if it is none."""
    return vars(cls).get("_lox_unscoped", cls)
