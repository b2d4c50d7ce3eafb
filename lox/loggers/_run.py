"""Runs: a few numbers on the device, an object on the host."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lox import _errors
from lox._data._logger_state import LoggerState as LoggerState
from lox.loggers._files._rows import plain
from lox.store import names
from lox.store._group import check_nesting
from lox.store._prng_keys import impl_name, is_prng_key


class Run:
    """One run of a logger, as its host methods see it.

    Attributes:
        id: Its number, unique in this process.
        key: The words of its PRNG key.
        impl: The implementation of the PRNG key, such as "threefry2x32"; None for an old-style key, which has none.
        name: What tells it apart from others; a logger may change it if the name is taken.
        config: The config given to `init`, with NumPy arrays and Python numbers.
        resource: What the logger keeps for the run: a file, a client's object.
        failure: The exception that ended the logger's `with` block, if one did.
        resumed: For a run that goes on after a checkpoint, the name and number of the first step that is computed
            again; None for a new one.
    """

    def __init__(
        self, id: int, key: np.ndarray, config: Mapping[str, Any], impl: str | None = None, name: str | None = None
    ):
        self.id, self.key, self.config, self.impl = id, key, config, impl
        self.name = name or names.of_runs([key], impl)[0]
        self.resource: Any = None
        self.failure: BaseException | None = None
        self.resumed: tuple[str, Any] | None = None
        self.alone = False  # whether other processes of the program have not begun it

    def __repr__(self) -> str:
        return f"<run {self.name!r}>"


def prng_key_words(prng_key: Any) -> tuple[Any, str | None]:
    """Return the words of one PRNG key, typed or not, and its implementation if known."""
    impl = None
    if is_prng_key(prng_key):
        words, impl = jax.random.key_data(prng_key), impl_name(prng_key)
    elif hasattr(prng_key, "dtype") and prng_key.dtype == np.uint32 and names.is_raw(prng_key):
        words = prng_key
    else:
        raise _errors.LogTypeError(
            f"`init` got {prng_key!r} for the run's key: give it a PRNG key such as `jax.random.key(0)`."
        )
    if words.ndim != 1:
        raise _errors.LogTypeError(
            f"`init` got keys of shape {words.shape[:-1]}: it takes one. "
            "For one run per key, write `jax.vmap(logger.init)(keys)`."
        )
    return words, impl


def check_config(config: Any) -> None:
    """Raise an error if this is not the config of a run."""
    if config is not None and not isinstance(config, Mapping):
        raise _errors.LogTypeError(f"`config` is {config!r}; it must be a dict of hyper-parameters.")
    check_nesting(config)


@dataclasses.dataclass(frozen=True, eq=False)
class ConfigTree:
    """Puts a config together again: its arrays travel through the program, the rest stays in Python."""

    treedef: Any
    static: tuple[Any, ...]  # the leaves, with `_ARRAY` in place of arrays
    model: Any = None  # the config, for the order of its keys, which JAX sorts

    @classmethod
    def of(cls, config: Any) -> tuple["ConfigTree", list[Any]]:
        """Return the tree, and the arrays."""
        check_config(config)
        # Here None is a value ("no clipping"), not an empty tree.
        try:
            leaves, treedef = jax.tree.flatten(config or {}, is_leaf=lambda x: x is None)
        except (TypeError, ValueError) as error:
            raise _errors.LogTypeError(
                f"`config` is {config!r}, which JAX cannot flatten: are all keys of its dicts strings?"
            ) from error
        # NumPy arrays stay in Python too: a program would cut numbers of 64 bits.
        static = tuple(_ARRAY if isinstance(x, jax.Array) else x for x in leaves)
        arrays = [jax.random.key_data(x) if is_prng_key(x) else x for x in leaves if isinstance(x, jax.Array)]
        return cls(treedef, static, _keys(config)), arrays

    def rebuild(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        """Return the config of one run, with Python numbers in place of single ones."""
        rest = iter(arrays)
        leaves = [_single(next(rest) if x is _ARRAY else x) for x in self.static]
        return _in_order(jax.tree.unflatten(self.treedef, leaves), self.model)


_ARRAY = object()


def _keys(config: Any) -> Any:
    """Return the keys of dicts inside of dicts."""
    return {key: _keys(value) for key, value in config.items()} if type(config) is dict else None


def _in_order(config: Any, model: Any) -> Any:
    return {key: _in_order(config[key], inside) for key, inside in model.items()} if model is not None else config


def _single(x: Any) -> Any:
    """Convert an array of one number to Python; a float32 stays short, 0.1 and not 0.10000000149011612."""
    if not isinstance(x, np.ndarray | np.generic) or np.ndim(x):
        return x
    return plain(np.asarray(x)) if x.dtype.kind != "c" else x.item()
