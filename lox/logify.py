"""The logify API: metrics that become part of the result, each with its own reduction.

>>> import jax, jax.numpy as jnp
>>> from lox import logify
>>> @jax.jit
... @logify.logify
... def f(x):
...     logify.log("x", x, reduction="mean")
...     logify.log("x", x + 1, reduction="mean")
...     logify.log("y", x**2)
...     return x
>>> out, logs = f(jnp.float32(1.0))
>>> logs.asdict()
{'x': {'mean': Array(1.5, dtype=float32)}, 'y': {'replace': Array(1., dtype=float32)}}

This is `lox.log` and `lox.spool` under other names, so it works under any order of transformations and inside control
flow. A name may be logged with several reductions, which are kept apart.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from lox import _errors
from lox._data._logdict import logdict
from lox._engine import _primitive
from lox._engine._selection import Selection

P = ParamSpec("P")
R = TypeVar("R")

REDUCTIONS = ("replace", "append", "mean", "sum")
_TAG = "lox.logify"


class _Key(str):
    """A name with its reduction, since one name may have several. Messages show the name only."""

    __slots__ = ()

    def __radd__(self, scope: str) -> "_Key":
        return _Key(str.__add__(scope, self))

    def __repr__(self) -> str:
        return repr(self.rsplit(":", 1)[0])


@jax.tree_util.register_pytree_node_class
class Logs:
    """The logs that `logify` returns, a pytree; `asdict()` gives `{name: {reduction: value}}`."""

    def __init__(self, logs: logdict):
        self._logs = logs

    def tree_flatten(self) -> tuple[Any, Any]:
        """Return the logs as the only child."""
        return (self._logs,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Logs":
        """Undo `tree_flatten`."""
        del aux
        return cls(children[0])

    def asdict(self) -> dict[str, dict[str, Any]]:
        """Return the values by name, then by reduction, in the order of logging."""
        result: dict[str, dict[str, Any]] = {}
        for key, value in self._logs.items():
            name, reduction = key.rsplit(":", 1)
            result.setdefault(name, {})[reduction] = value
        return result

    def __repr__(self) -> str:
        return repr(self.asdict())


def log(name: str, value: Any, reduction: str = "replace") -> None:
    """Log a value, for `logify` to return.

    Args:
        name: What to call it.
        value: An array, a number or a pytree of them.
        reduction: How to combine several values of one name: keep the last (`"replace"`), keep all (`"append"`),
            `"mean"` or `"sum"`.

    Raises:
        OptionError: The reduction does not exist.
    """
    if reduction not in REDUCTIONS:
        raise _errors.OptionError(f"there is no reduction {reduction!r}. Choose {_errors.listing(REDUCTIONS)}.")
    if not isinstance(name, str):
        raise _errors.LogTypeError(f"`logify.log` got the name {name!r}: names are strings.")
    _primitive.log({_Key(f"{name}:{reduction}"): value}, tags=_TAG, reduce=reduction, explicit=True)


def logify(fun: Callable[P, R]) -> Callable[P, tuple[R, Logs]]:
    """Make a function return what it logs with `logify.log`, next to its result.

    Args:
        fun: Any function of JAX arrays.

    Returns:
        A function with the signature of `fun` that returns `(result, logs)`.
    """
    from lox._transforms import _spool
    from lox._transforms._call import wraps

    selection = Selection(tags=frozenset([_TAG]), expected=False)  # there may be nothing to return
    spooled = _spool.collecting(fun, _spool.Collect(selection))

    @wraps(fun)
    def logified(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Logs]:
        out, logs = spooled(*args, **kwargs)
        return out, Logs(logs)

    return logified
