"""The names of runs.

A run is named after the words of its PRNG key, and no two PRNG keys share a name: `jax.random.key(42)` is `42`. Further
attempts with the same PRNG key are `42.1`, `42.2`, ... Names are for people and for messages. The store does not name
files after them, but loggers of plain files do, so they have no special characters.
"""

import itertools
import urllib.parse
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

DEFAULT_IMPL = "threefry2x32"
UNNAMED = "run"  # the base name of runs without a PRNG key

# Raw PRNG keys (`jax.random.PRNGKey`) do not have their implementation, but their length tells it.
_IMPL_OF_LENGTH = {2: DEFAULT_IMPL, 4: "rbg"}


def is_raw(data: Any) -> bool:
    """Tell whether an array of words has the shape of raw PRNG keys."""
    return np.ndim(data) > 0 and np.shape(data)[-1] in _IMPL_OF_LENGTH


def impl_of_raw(data: Any) -> str:
    """Return the implementation of a raw PRNG key, an array of words."""
    if not is_raw(data):
        raise ValueError(f"a PRNG key has 2 or 4 words, not {np.shape(data)[-1] if np.ndim(data) else 0}.")
    return _IMPL_OF_LENGTH[np.shape(data)[-1]]


def base_name(key_data: Any, impl: str | None = None) -> str:
    """Return the name of the first run with this PRNG key, given as its words.

    >>> from lox.store import names
    >>> names.base_name([0, 42])
    '42'
    >>> names.base_name([0, 42, 0, 42], "rbg")
    'rbg-42'
    >>> names.base_name([1, 2, 3, 4], "rbg")
    'rbg-x00000001000000020000000300000004'
    """
    words = [int(w) for w in np.asarray(key_data, np.uint32).ravel()]
    # Implementations can be registered under any name, so they are quoted: no slashes, and no two become the same.
    impl = urllib.parse.quote(impl or impl_of_raw(words), safe="")
    if len(words) == 2 and impl == DEFAULT_IMPL:
        return str(_number(words))
    if len(words) == 4 and words[:2] == words[2:]:  # made from a seed
        return f"{impl}-{_number(words[:2])}"
    return f"{impl}-x{''.join(f'{w:08x}' for w in words)}"


def base_names(key_data: Any, impl: str | None = None) -> list[str]:
    """Return the `base_name` of every PRNG key of an array."""
    data = np.asarray(key_data, np.uint32)
    return [base_name(words, impl) for words in data.reshape(-1, data.shape[-1])]


def attempt(base: str, taken: Collection[str]) -> str:
    """Return the first free name of `base`, `base.1`, `base.2`, ..."""
    numbered = (f"{base}.{number}" for number in itertools.count(1))
    return base if base not in taken else next(name for name in numbered if name not in taken)


def _number(words: Sequence[int]) -> int:
    return words[0] << 32 | words[1]
