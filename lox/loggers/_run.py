"""A run: on the device a few numbers, on the host an object."""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from lox import _errors
from lox.loggers._files._rows import plain
from lox.loggers._prng import is_key
from lox.store import names
from lox.store._keys import impl_name


class LoggerState(NamedTuple):
    """What `Logger.init` returns: arrays only, so that it can be an argument, a carry, a lane of a `vmap`.

    Attributes:
        run: The number of the run in this process.
        key: The words of the PRNG key that the run was made with.
    """

    run: Any
    key: Any


class Run:
    """One run of a logger, as its host methods see it.

    Attributes:
        id: Its number, unique in this process.
        key: The words of its PRNG key.
        impl: What made the key, such as "threefry2x32"; None for keys of the old style, which do not say.
        name: The key's words as text; a logger that finds the name taken may change it.
        config: What `init` was given, with NumPy arrays and Python numbers.
        resource: Whatever the logger keeps for the run: a file, a client's object.
        failure: The exception that ended the logger's `with` block, if one did.
    """

    def __init__(self, id: int, key: np.ndarray, config: Mapping[str, Any], impl: str | None = None):
        self.id, self.key, self.config, self.impl = id, key, config, impl
        self.name = names.base_name(key, impl)
        self.resource: Any = None
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<run {self.name!r}>"


class Names:
    """The names of a logger's runs."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, run: Run, others: Container[str] = ()) -> None:
        """Give the run a name that no other one has, nor is one of `others`: 42 becomes 42.1."""
        name, attempt = run.name, 0
        while run.name in self._taken or run.name in others:
            attempt += 1
            run.name = f"{name}.{attempt}"
        self._taken.add(run.name)


def key_words(key: Any) -> tuple[Any, str | None]:
    """The words of one PRNG key, typed or not, and what made it."""
    impl = None
    if is_key(key):
        words, impl = jax.random.key_data(key), impl_name(key)
    elif hasattr(key, "dtype") and key.dtype == np.uint32 and names.is_raw(key):
        words = key
    else:
        raise _errors.LogTypeError(
            f"`init` got {key!r} for the run's key: give it a PRNG key such as `jax.random.key(0)`."
        )
    if words.ndim != 1:
        raise _errors.LogTypeError(
            f"`init` got keys of shape {words.shape[:-1]}: it takes one. "
            "For one run per key, write `jax.vmap(logger.init)(keys)`."
        )
    return words, impl


@dataclasses.dataclass(frozen=True, eq=False)
class ConfigPlan:
    """How to put a config together again: its arrays travel through the program, the rest stays in Python."""

    treedef: Any
    static: tuple[Any, ...]  # one entry per leaf, `_ARRAY` where the leaf is an array

    @classmethod
    def of(cls, config: Any) -> tuple["ConfigPlan", list[Any]]:
        """The plan, and the arrays."""
        if config is not None and not isinstance(config, Mapping):
            raise _errors.LogTypeError(f"`config` is {config!r}; it must be a dict of hyper-parameters.")
        # A None is a value here ("no clipping"), not an empty tree.
        try:
            leaves, treedef = jax.tree.flatten(config or {}, is_leaf=lambda x: x is None)
        except (TypeError, ValueError) as error:
            raise _errors.LogTypeError(
                f"`config` is {config!r}, which is no tree to JAX: are all keys of its dicts strings?"
            ) from error
        # NumPy's stay in Python too: as operands of a program, numbers of 64 bits would become others.
        is_array = [isinstance(x, jax.Array) for x in leaves]
        static = tuple(_ARRAY if array else x for x, array in zip(leaves, is_array, strict=True))
        arrays = [_words_if_key(x) for x, array in zip(leaves, is_array, strict=True) if array]
        return cls(treedef, static), arrays

    def rebuild(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        """The config of one run; single numbers become Python's."""
        rest = iter(arrays)
        return jax.tree.unflatten(self.treedef, [_single(next(rest) if x is _ARRAY else x) for x in self.static])


_ARRAY = object()


def _single(x: Any) -> Any:
    """Python's number for an array of one; a float as short as it was, 0.1 and not 0.10000000149011612."""
    if not isinstance(x, np.ndarray | np.generic) or np.ndim(x):
        return x
    return plain(np.asarray(x)) if x.dtype.kind != "c" else x.item()


def _words_if_key(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x
