"""What runs are called.

A run is named after the words of its PRNG key, and no two keys share a name: `jax.random.key(42)` is `42`. Further
attempts with the same key are `42.1`, `42.2`, ... Names are for people and for messages; the store never uses them as
paths, but loggers of plain files do, so they have no character that would be special there.
"""

import urllib.parse
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

DEFAULT_IMPL = "threefry2x32"
UNNAMED = "run"  # the base name of runs without a key

# Raw keys (`jax.random.PRNGKey`) do not say what made them, but their length does.
_IMPL_OF_LENGTH = {2: DEFAULT_IMPL, 4: "rbg"}


def is_raw(data: Any) -> bool:
    """Whether an array of words has the shape of old-style keys."""
    return np.ndim(data) > 0 and np.shape(data)[-1] in _IMPL_OF_LENGTH


def impl_of_raw(data: Any) -> str:
    """The implementation of an old-style key, an array of words."""
    if not is_raw(data):
        raise ValueError(f"a PRNG key has 2 or 4 words, not {np.shape(data)[-1] if np.ndim(data) else 0}.")
    return _IMPL_OF_LENGTH[np.shape(data)[-1]]


def base_name(key_data: Any, impl: str | None = None) -> str:
    """The name of the first run with this key, given as its words.

    >>> from lox.store import names
    >>> names.base_name([0, 42])
    '42'
    >>> names.base_name([0, 42, 0, 42], "rbg")
    'rbg-42'
    >>> names.base_name([1, 2, 3, 4], "rbg")
    'rbg-x00000001000000020000000300000004'
    """
    words = [int(w) for w in np.asarray(key_data, np.uint32).ravel()]
    # Implementations can be registered under any name: quoted, none becomes a path and no two become the same.
    impl = urllib.parse.quote(impl or impl_of_raw(words), safe="")
    if len(words) == 2 and impl == DEFAULT_IMPL:
        return str(_number(words))
    if len(words) == 4 and words[:2] == words[2:]:  # what seeding from a number gives
        return f"{impl}-{_number(words[:2])}"
    return f"{impl}-x{''.join(f'{w:08x}' for w in words)}"


def base_names(key_data: Any, impl: str | None = None) -> list[str]:
    """`base_name` for every key of an array of them."""
    data = np.asarray(key_data, np.uint32)
    return [base_name(words, impl) for words in data.reshape(-1, data.shape[-1])]


def attempt(base: str, taken: Collection[str]) -> str:
    """The first free one of `base`, `base.1`, `base.2`, ..."""
    if base not in taken:
        return base
    number = 1
    while f"{base}.{number}" in taken:
        number += 1
    return f"{base}.{number}"


def _number(words: Sequence[int]) -> int:
    return words[0] << 32 | words[1]
