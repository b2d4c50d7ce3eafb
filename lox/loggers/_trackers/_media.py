"""Pictures for the clients of trackers."""

from typing import Any

from lox._data._image import Image


def pillow(image: Image) -> Any:
    """Convert to a Pillow image: some clients would drop axes of length one from an array."""
    import PIL.Image

    PIL.Image.init()  # clients do not guard this against several threads
    return PIL.Image.fromarray(image.pixels[..., 0] if image.pixels.shape[-1] == 1 else image.pixels)
