"""The state of a run in a program. `jax.export` must know it as soon as lox is imported; loggers come later."""

from typing import Any, NamedTuple


class LoggerState(NamedTuple):
    """The state that `Logger.init` returns: arrays only, so that it can be an argument, a carry, a lane of a `vmap`.

    Attributes:
        run: The number of the run in this process.
        key: The words of the run's PRNG key.
    """

    run: Any
    key: Any
