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
"""Veltkamp's constant for 24 - 13 = 11 significant bits, as TF32 has (Dekker 1971, section 5)."""

STORAGE_DTYPE = {Precision.FP16: np.dtype(np.float16), Precision.BF16: np.dtype(ml_dtypes.bfloat16)}

INFINITE_FROM = {Precision.FP16: 65520.0}
"""Magnitudes from which on values round to infinity; BF16's is as large as FP32's."""

LARGEST = {Precision.FP16: 65504.0, Precision.BF16: float(np.ldexp(255.0, 120))}
STEPS = {Precision.TF32: 2.0**-11, Precision.FP16: 2.0**-11, Precision.BF16: 2.0**-8}
"""The largest relative rounding error: half a unit in the last place."""

SMALLEST_SUBNORMAL = {Precision.FP16: 2.0**-24, Precision.BF16: 2.0**-133}


def to_storage(array: NDArray[np.generic], precision: Precision) -> NDArray[np.generic]:
    """``array``, of any float type, as FP16 or BF16; values out of range become infinite."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(STORAGE_DTYPE[precision])


def rounded(array: Float32Array, precision: Precision) -> Float32Array:
    """``array`` rounded to ``precision``, as float32."""
    if precision is Precision.FP32:
        return array
    if precision is not Precision.TF32:
        return to_storage(array, precision).astype(np.float32)
    # Veltkamp's splitting. Where the product overflows the value stays, as TF32 has FP32's range.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = array * TF32_SPLITTER
        high = scaled - (scaled - array)
    return np.where(np.isfinite(scaled), high, array).astype(np.float32)
