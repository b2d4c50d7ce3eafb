"""`lox.reraise`: the exception of a callback, raised from a compiled program.

XLA passes on only the text of an exception, after the stack of the program's threads, in an error of JAX. A number in
that text identifies the exception itself.
"""

import contextlib
from collections.abc import Iterator

import jax

from lox import _compat
from lox._engine import _emit


@contextlib.contextmanager
def reraise() -> Iterator[None]:
    """Raise the exception of a callback unchanged, even from a compiled program.

    >>> import jax, lox
    >>> @jax.jit
    ... @lox.watch
    ... def f(x):
    ...     lox.log({"log x": jax.numpy.log(x)})
    ...     return x
    >>> lox.config.sink = "off"
    >>> try:
    ...     with lox.reraise():
    ...         jax.block_until_ready(f(-1.0))
    ... except lox.NonFiniteError as error:
    ...     print(error)
    'log x' is NaN.
      logged at ...
    >>> lox.config.sink = "console"

    Without it, JAX raises a `jax.errors.JaxRuntimeError`, whose text ends with that of the exception. It is a
    `ValueError`, as for other callbacks of JAX's, if C++ has called the program and the CPU has run it at once. Outside
    of jit it is not needed: `lox.tap(f)` and `lox.watch(f)` raise the exception themselves.

    Wait for results inside the `with` statement: that is where JAX raises the error.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as report:
        error = _emit.error_behind(report)
        if error is None:
            raise
        _compat.forget_failed_effects(type(error).__name__)
        raise error from None
