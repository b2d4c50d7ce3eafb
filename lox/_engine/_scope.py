"""`lox.scope`: names for parts of a program, in front of the keys that are logged there."""

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
