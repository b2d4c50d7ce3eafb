"""Help for testing code that logs."""

import contextlib
from collections.abc import Iterator

import jax

from lox import _errors
from lox._data._logdict import logdict
from lox._engine import _sink


@contextlib.contextmanager
def capture() -> Iterator[list[logdict]]:
    """Collect the events that would have gone to the default sink.

    >>> import jax, lox, lox.testing
    >>> @jax.jit
    ... def f(x):
    ...     lox.log({"x": x})
    ...     return x + 1
    >>> with lox.testing.capture() as logs:
    ...     y = f(1)
    >>> print(logs[0])
    {'x': 1}

    Functions compiled earlier are captured too. Under jit, XLA may reorder events that do not depend on each other; use
    `lox.tap` or `lox.spool` where the order matters.

    Yields:
        A list with one logdict per event, complete once the block is left.
    """
    if _sink.is_compiled_out():
        raise _errors.LoxError(
            "`lox.testing.capture` cannot see compiled functions while the environment has LOX_SINK=off: unset it."
        )
    events: list[logdict] = []
    jax.effects_barrier()  # events logged earlier belong to the previous sink
    previous = _sink.config.sink
    _sink.config.sink = events.append
    try:
        yield events
        jax.effects_barrier()
    finally:
        _sink.config.sink = previous
