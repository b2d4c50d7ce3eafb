"""Pictures as the clients of trackers take them."""

from typing import Any

from lox._data._image import Image


def pillow(image: Image) -> Any:
    """A picture of Pillow's, which clients take; of plain arrays some of them would drop axes of length one."""
    import PIL.Image

    PIL.Image.init()  # of which clients take no care when several threads begin
    return PIL.Image.fromarray(image.pixels[..., 0] if image.pixels.shape[-1] == 1 else image.pixels)
