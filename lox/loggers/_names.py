"""The name of a run: its PRNG key, readable and with nothing lost."""

import numpy as np


def run_name(words: np.ndarray) -> str:
    """The words of a key as text: `jax.random.key(42)` is `42`, a key that was split is `2465931498-3679230171`.

    Two words, the first of them zero, are the usual key made from a small seed: the zero goes without saying. Any
    other key has all its words, so that two keys never share a name. Digits and dashes only: it is safe in a path.
    """
    numbers = [str(int(word)) for word in np.asarray(words).reshape(-1)]
    if len(numbers) == 2 and numbers[0] == "0":
        return numbers[1]
    return "-".join(numbers) if len(numbers) > 1 else f"w{numbers[0]}"
