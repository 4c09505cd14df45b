"""How far rows that ought to be equal lie apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowsApart:
    """``apart`` is the largest difference between two rows, in the array's units, infinite where
    not all of them are finite; ``rows`` are the numbers of those that are not, or else of those
    farthest from the median of all.
    """

    apart: float
    rows: tuple[int, ...]


def rows_apart(array: NDArray[Any]) -> RowsApart:
    """The rows of ``array`` (first axis, one row at least; any float dtype) held against each
    other: element by element, equal infinities and NaN in all of them being no difference.
    """
    values = array.astype(np.float64).reshape(len(array), -1)
    missing = np.isnan(values)
    equal = (values == values[:1]) | (missing & missing[:1])
    values = values[:, ~equal.all(axis=0)]
    if values.size == 0:
        return RowsApart(0.0, ())
    broken = np.asarray(~np.isfinite(values).all(axis=1))
    if broken.any():
        return RowsApart(math.inf, _numbers(broken))
    distances = np.abs(values - np.median(values, axis=0)).max(axis=1)
    farthest = distances >= distances.max() * (1.0 - 1e-9)
    return RowsApart(float(np.ptp(values, axis=0).max()), _numbers(farthest))


def _numbers(chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(chosen))
