"""Which inputs can be moved a little and mean the same: values, not masks and ids."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.blocks import flat, slices
from bisect_trt.numerics.draws.noise import LARGE, deviation

_GLANCE = 64


def moving(arrays: Arrays, discrete: Collection[str] = ()) -> frozenset[str]:
    """The names of the float inputs that vary and are no masks and ids.

    What has two values is a mask, or a size, where something else varies, be it ids: noise of a
    deviation's thousandth makes its zeros nonzero and moves -1e9 by half a million, and so changes
    what is attended to and not how that is rounded. Alone it is the input itself (a line drawing).
    Whole numbers are ids where the model makes them integers.

    Args:
        arrays: one sample's inputs by name, any shapes and dtypes.
        discrete: those that the model casts to integers or compares for equality.
    """
    varied = {name: array for name, array in arrays.items() if varies(array)}
    whole = {n for n, a in varied.items() if n in discrete and _is_whole(a)}
    two = {n for n, a in varied.items() if has_two_values(a)}
    something_else = len(varied) > len(two | whole) or any(map(is_ids, arrays.values()))
    kept = whole | two if something_else else whole | two.intersection(discrete)
    return frozenset(varied).difference(kept)


def varies(array: NDArray[Any]) -> bool:
    """Floats that vary and are finite: a mask of -inf, or of the lowest number, stays as it is."""
    if array.dtype.kind != "f" or array.size < 2:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        spread = np.ptp(array)
        if not spread > 0.0:
            return False
        if array.dtype == np.float16:  # whose squares leave its range where nothing is wrong
            return bool(spread < np.finfo(np.float16).max / 4.0)
        # Of a large array the square tells as well, for less: it is asked about for every draw.
        return math.isfinite(deviation(array) if array.size <= LARGE else spread * spread)


def has_two_values(array: NDArray[Any]) -> bool:
    """Whether an array that varies has two different values and no more."""
    values = flat(array)
    # A few values from everywhere mostly tell: it is asked about for every draw.
    if np.unique(values[:: max(1, values.size // _GLANCE)]).size > 2:
        return False
    low, high = values.min(), values.max()
    blocks = (values[part] for part in slices(values.size))
    return all(bool(((block == low) | (block == high)).all()) for block in blocks)


def is_ids(array: NDArray[Any]) -> bool:
    """Integers of some length: a scalar or a pair is a size, not a sequence."""
    return array.dtype.kind in "iu" and array.size >= 4 and bool(np.ptp(array) > 0)


def _is_whole(array: NDArray[Any]) -> bool:
    values = flat(array)
    blocks = (values[part] for part in slices(values.size))
    return all(bool((block == np.rint(block)).all()) for block in blocks)
