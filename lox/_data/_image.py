"""`lox.Image`: an array that loggers show as a picture, and its form in files."""

import struct
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lox import _compat, _errors

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by the number of channels


@jax.tree_util.register_pytree_with_keys_class
class Image:
    """A picture, to be logged instead of the array.

    >>> import jax, jax.numpy as jnp, lox
    >>> def render(x):
    ...     lox.log({"frame": lox.Image(jnp.full((32, 48, 3), x))})
    ...     return x
    >>> _, logs = lox.spool(jax.jit(render))(0.5)
    >>> print(logs["frame"].pixels.shape, logs["frame"].pixels.dtype)
    (32, 48, 3) uint8

    It is a pytree and works under `jit`, `vmap` and `scan`. Floats become bytes on the device, which takes a quarter of
    the transfer.

    Args:
        pixels: `(height, width)`, or `(height, width, channels)` with 1 channel (gray), 3 (RGB) or 4 (RGBA): bytes
            from 0 to 255, booleans, or floats from 0 to 1; floats beyond that are clipped, NaN is black.

    Attributes:
        pixels: Bytes, `(height, width, channels)`.
    """

    pixels: Any

    def __init__(self, pixels: Any):
        x = pixels if isinstance(pixels, jax.Array) else np.asarray(pixels)
        if x.ndim == 2:
            x = x[..., None]
        if x.ndim != 3 or x.shape[-1] not in _COLOUR_TYPES or 0 in x.shape:
            raise _errors.LogTypeError(
                f"`lox.Image` got an array of shape {np.shape(pixels)}: it takes (height, width) or "
                "(height, width, channels) with 1, 3 or 4 channels. Log several pictures under a key each."
            )
        if x.dtype == bool:
            x = x.astype(np.uint8) * np.uint8(255)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            x = jax.lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32)
            x = jnp.round(jnp.clip(jnp.nan_to_num(x), 0.0, 1.0) * jnp.float32(255)).astype(jnp.uint8)
        elif x.dtype != np.uint8:
            raise _errors.LogTypeError(
                f"`lox.Image` got an array of {x.dtype}: give it bytes (`x.astype(jnp.uint8)`), booleans, or floats "
                "from 0 to 1."
            )
        self.pixels = x

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """The pixels are the only child."""
        return [(jax.tree_util.GetAttrKey("pixels"), self.pixels)], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Image":
        """The inverse of `tree_flatten_with_keys`."""
        del aux
        self = object.__new__(cls)
        (self.pixels,) = children
        return self

    def __repr__(self) -> str:
        if isinstance(self.pixels, _compat.Tracer) or not hasattr(self.pixels, "shape"):
            return "Image(...)"
        *lead, height, width, channels = self.pixels.shape
        several = f", {tuple(lead)} of them" if lead else ""
        return f"Image({height}×{width}, {channels} channel{'s' * (channels > 1)}{several})"


def png(pixels: np.ndarray) -> bytes:
    """Encode bytes `(height, width, channels)` as a PNG file."""
    height, width, channels = pixels.shape
    lines = np.ascontiguousarray(pixels, np.uint8).reshape(height, width * channels)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1)  # a line begins with its filter
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
