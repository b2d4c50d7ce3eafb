"""How each dtype is stored, without losing a bit.

Arrow tools know few of JAX's dtypes. The others are widened to a dtype that every tool reads as the same number
(bfloat16 and float8 to float32, int4 to int8, complex numbers to a last axis of two), and the original is noted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lox import _errors

Array = np.ndarray[Any, Any]

_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
# By name, because older releases of ml_dtypes have fewer.
_SMALL = (
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)


class Codec(NamedTuple):
    """A dtype: its `name`, its form in memory and in Arrow, and the axis that an item has in Arrow in addition."""

    name: str
    memory: np.dtype[Any]
    arrow: np.dtype[Any]
    extra: int  # the length of the additional last axis, 0 if there is none
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]

    @property
    def stored_as_is(self) -> bool:
        """Whether the bytes in Arrow are those in memory."""
        return self.memory == self.arrow and self.memory != np.bool_

    @property
    def impl(self) -> str | None:
        """The implementation, for PRNG keys."""
        return self.name[4:-1] if self.name.startswith("key<") else None


@functools.cache
def codec(name: str, words: int = 0) -> Codec:
    """Return the codec of a dtype, by its stored name; a PRNG key has so many `words`."""
    same = lambda x: x  # noqa: E731
    if name in _PLAIN:
        dtype = np.dtype(name)
        return Codec(name, dtype, dtype, 0, same, same)
    if name.startswith("key<") and name.endswith(">"):
        word = np.dtype(np.uint32)
        return Codec(name, word, word, words, same, same)
    if name in ("complex64", "complex128"):
        dtype = np.dtype(name)
        part = np.dtype(f"float{dtype.itemsize * 4}")
        return Codec(name, dtype, part, 2, lambda x: x.view(part), lambda x: x.view(dtype))
    if name == "float16":
        return Codec(name, np.dtype(np.float16), np.dtype(np.float32), 0, _widened, _narrowed)
    if name == "bfloat16":
        return Codec(name, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), 0, _encode_bfloat, _decode_bfloat)
    if name in _SMALL and hasattr(ml_dtypes, name):
        dtype = np.dtype(getattr(ml_dtypes, name))
        if "int" in name:
            wide = np.dtype(np.uint8 if name.startswith("u") else np.int8)
            return Codec(name, dtype, wide, 0, lambda x: x.astype(wide), lambda x: x.astype(dtype))
        table = _small_floats(dtype)
        order = np.argsort(table)
        return Codec(
            name,
            dtype,
            np.dtype(np.float32),
            0,
            lambda x: table[x.view(np.uint8)].view(np.float32),
            lambda x: _lookup(table, order, x.view(np.uint32)).view(dtype),
        )
    raise KeyError(name)


@functools.cache
def step_codec(name: str) -> Codec:
    """Return the codec of steps, which are stored in 64 bits so that tools can compare them."""
    real = codec(name)
    if real.arrow.kind not in "biuf" or real.extra:
        raise KeyError(name)
    wide = np.dtype("float64" if real.arrow.kind == "f" else "uint64" if name == "uint64" else "int64")
    if real.arrow == np.float32:
        encode = lambda x: _widened(real.encode(x))  # noqa: E731
        decode = lambda x: real.decode(_narrowed(x))  # noqa: E731
    else:
        encode = lambda x: x.astype(wide)  # noqa: E731
        decode = lambda x: x.astype(real.memory)  # noqa: E731
    return Codec(name, real.memory, wide, 0, encode, decode)


def name_of(dtype: np.dtype[Any], what: str) -> str:
    """Return the name under which a dtype is stored, or raise an error about `what`."""
    try:
        return codec(dtype.name).name
    except KeyError:
        raise _errors.LogTypeError(
            f"{what} has dtype {dtype}, which lox cannot store: log numbers, booleans or PRNG keys."
        ) from None


# --- conversions that keep different NaNs apart, unlike those of the hardware ---


_MANTISSA = {16: 10, 32: 23, 64: 52}  # bits of the mantissa, by bits of the float


def _parts(bits: int) -> tuple[Any, Any, int, int, int]:
    """Return the type of floats of so many bits, the type of their bits, and the bits of sign, infinity, mantissa."""
    sign, mantissa = 1 << (bits - 1), (1 << _MANTISSA[bits]) - 1
    return np.dtype(f"f{bits // 8}"), np.dtype(f"u{bits // 8}"), sign, sign - 1 - mantissa, mantissa


def _widened(x: Array) -> Array:
    """Convert to floats of twice the bits."""
    n = 8 * x.dtype.itemsize
    _, narrow, sign, infinity, mantissa = _parts(n)
    wide, wide_bits, _, wide_infinity, _ = _parts(2 * n)
    bits = x.view(narrow).astype(wide_bits)
    nan = (bits & (sign - 1)) > infinity
    with np.errstate(invalid="ignore"):  # of NaNs, which follow
        out = x.astype(wide)
    if nan.any():
        shift = _MANTISSA[2 * n] - _MANTISSA[n]
        rebuilt = (bits & sign) << n | wide_infinity | (bits & mantissa) << shift
        out.view(wide_bits)[nan] = rebuilt[nan]
    return out


def _narrowed(x: Array) -> Array:
    """Undo `_widened`."""
    n = 4 * x.dtype.itemsize
    _, wide_bits, sign, infinity, _ = _parts(2 * n)
    narrow, narrow_bits, narrow_sign, narrow_infinity, mantissa = _parts(n)
    bits = x.view(wide_bits)
    nan = (bits & (sign - 1)) > infinity
    with np.errstate(invalid="ignore", over="ignore"):  # overflows are only in a file that lox did not write
        out = x.astype(narrow)
    if nan.any():
        shift = _MANTISSA[2 * n] - _MANTISSA[n]
        rebuilt = ((bits >> n) & narrow_sign | narrow_infinity | (bits >> shift) & mantissa).astype(narrow_bits)
        out.view(narrow_bits)[nan] = rebuilt[nan]
    return out


def _encode_bfloat(x: Array) -> Array:
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _decode_bfloat(x: Array) -> Array:
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def _small_floats(dtype: np.dtype[Any]) -> Array:
    """Return the bits of a float32 for each of the 256 bytes; NaNs carry the byte in their payload."""
    byte = np.arange(256, dtype=np.uint8)
    # Types of fewer than 8 bits ignore the upper bits, but each byte needs a float32 of its own to come back.
    wide = byte.view(dtype).astype(np.float32)
    bits = wide.view(np.uint32).copy()
    _, first = np.unique(bits, return_index=True)
    as_nan = np.isnan(wide)
    as_nan[np.setdiff1d(byte, first)] = True
    bits[as_nan] = 0x7FC00000 | byte[as_nan].astype(np.uint32)
    return bits


def _lookup(table: Array, order: Array, bits: Array) -> Array:
    return order[np.minimum(np.searchsorted(table, bits, sorter=order), 255)].astype(np.uint8)
