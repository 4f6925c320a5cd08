"""Values of parameters between data types; every step is exact or rounds to nearest even."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Bits16 = NDArray[np.uint16]

EXACT_IN_FLOAT32 = ("BF16", "F16", "F32")
"""Data types of which every value, infinities and NaN payloads too, is a float32."""

_FLOATS: Mapping[str, np.dtype[np.generic]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


def decode(raw: Bytes, dtype: str, out: Float32) -> None:
    """Fill ``out`` with the values whose bytes in ``dtype`` are ``raw``."""
    if dtype == "BF16":  # through the bits: a cast could quiet a NaN
        np.left_shift(raw.view("<u2"), 16, out=out.view("<u4"), dtype=np.uint32)
    else:
        out[...] = raw.view(_FLOATS[dtype])


def encode(values: Float32, dtype: str, out: Bytes) -> None:
    """Fill ``out`` with ``values`` rounded to ``dtype``."""
    if dtype == "BF16":
        round_to_bfloat16(values, out.view("<u2"))
        return
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is what rounding gives
        out.view(_FLOATS[dtype])[...] = values


def round_to_bfloat16(values: Float32, out: Bits16) -> None:
    """Fill ``out`` with the bits of ``values`` rounded to nearest even.

    A NaN keeps what fits of its payload, so that bfloat16 to float32 and back changes no bit.
    """
    bits = values.view("<u4")
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    np.copyto(out, rounded >> 16, casting="unsafe")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        high = (bits[nan] >> 16).astype(np.uint16)
        out[nan] = np.where(high & 0x7F, high, high | 0x40)  # never turn a NaN into infinity
