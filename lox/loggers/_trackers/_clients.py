"""The clients of trackers, imported when needed because they are large and slow to import."""

import importlib
from typing import Any


def client(module: str, extra: str, user: str) -> Any:
    """Import a client that `user` needs.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{user}` needs `{module}`, which cannot be imported ({error}): pip install 'lox-jax[{extra}]'"
        ) from error
