"""What the clients of trackers need: they are imported late, and take pictures and parameters in forms of their own."""

import importlib
from typing import Any

from lox._data._image import Image


def client(module: str, extra: str, user: str) -> Any:
    """Import a client that `user` needs; only now, because clients are large and slow to import.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{user}` needs `{module}`, which cannot be imported ({error}): pip install 'lox-jax[{extra}]'"
        ) from error


def pillow(image: Image) -> Any:
    """Convert to a Pillow image: some clients would drop axes of length one from an array."""
    import PIL.Image

    PIL.Image.init()  # clients do not guard this against several threads
    return PIL.Image.fromarray(image.pixels[..., 0] if image.pixels.shape[-1] == 1 else image.pixels)


def flat(config: Any, scope: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Flatten the nested dicts of a config; return each value with the names that lead to it."""
    if isinstance(config, dict) and config:
        return [item for name, value in config.items() for item in flat(value, (*scope, str(name)))]
    return [(scope, config)] if scope else []
