"""The name of a run: its PRNG key, readable and with nothing lost."""

import numpy as np

_DEFAULT = "threefry2x32"
_BY_LENGTH = {2: _DEFAULT, 4: "rbg"}  # what made a key of the old style, which does not say


def run_name(words: np.ndarray, impl: str | None = None) -> str:
    """The words of a key as text: `jax.random.key(42)` is `42`.

    >>> import numpy as np
    >>> from lox.loggers._names import run_name
    >>> run_name(np.array([0, 42])), run_name(np.array([1, 2]))
    ('42', '4294967298')
    >>> run_name(np.array([0, 42, 0, 42]), "rbg"), run_name(np.array([1, 2, 3, 4]), "rbg")
    ('rbg-42', 'rbg-x00000001000000020000000300000004')

    No two keys share a name. Letters, digits and dashes only: it is safe in a path.
    """
    numbers = [int(word) for word in np.asarray(words, np.uint32).reshape(-1)]
    impl = "".join(c if c.isalnum() else "_" for c in impl or _BY_LENGTH.get(len(numbers), f"key{len(numbers)}"))
    if len(numbers) == 2 and impl == _DEFAULT:
        return str(numbers[0] << 32 | numbers[1])
    if len(numbers) == 4 and numbers[:2] == numbers[2:]:  # what seeding with a number gives
        return f"{impl}-{numbers[0] << 32 | numbers[1]}"
    return f"{impl}-x{''.join(f'{n:08x}' for n in numbers)}"
