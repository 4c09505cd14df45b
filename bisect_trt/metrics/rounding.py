"""Rounds arrays to FP16, BF16 and TF32 as the hardware does: to nearest, overflow to infinity.

The emulated graph rounds with nodes of its own; the tests hold both to the same bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision

Float32Array = NDArray[np.float32]

TF32_SPLITTER = np.float32(2.0**13 + 1.0)
"""Veltkamp's constant that leaves 24 - 13 = 11 significant bits, TF32's 10 explicit ones (Dekker
1971, section 5)."""

STORAGE_DTYPE = {Precision.FP16: np.dtype(np.float16), Precision.BF16: np.dtype(ml_dtypes.bfloat16)}
INFINITE_FROM = {Precision.FP16: 65520.0}
"""Magnitudes from which on values round to infinity; BF16's are beyond FP32's own sums."""

LARGEST = {Precision.FP16: 65504.0, Precision.BF16: float(np.ldexp(255.0, 120))}
STEPS = {Precision.TF32: 2.0**-11, Precision.FP16: 2.0**-11, Precision.BF16: 2.0**-8}
"""The most that rounding moves a value, relative to it: half a unit of the last place."""

SMALLEST_SUBNORMAL = {Precision.FP16: 2.0**-24, Precision.BF16: 2.0**-133}


def to_storage(array: NDArray[np.generic], precision: Precision) -> NDArray[np.generic]:
    """``array`` (any float dtype) stored as FP16 or BF16; values out of range become infinities."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(STORAGE_DTYPE[precision])


def rounded(array: Float32Array, precision: Precision) -> Float32Array:
    """``array`` rounded to ``precision`` and held in float32, same shape.

    TF32 uses Veltkamp's splitting, three float32 operations; an infinity, or a value whose product
    with the splitter overflows, is kept as it is (the exponent range of TF32 is that of FP32).
    """
    if precision is Precision.FP32:
        return array
    if precision is not Precision.TF32:
        return to_storage(array, precision).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = array * TF32_SPLITTER
        high = scaled - (scaled - array)
    return np.where(np.isfinite(scaled), high, array).astype(np.float32)
