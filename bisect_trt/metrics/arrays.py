"""Goes through large arrays in blocks, to bound memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

BLOCK = 1 << 20
"""Elements of a block: 8 MB in float64."""


def slices(size: int, block: int = BLOCK) -> Iterator[slice]:
    """The ranges of at most ``block`` elements that cover ``size`` elements."""
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))


def all_finite(array: NDArray[Any]) -> bool:
    """Whether no value of ``array`` is NaN or infinite."""
    values = flat(array)
    return all(bool(np.isfinite(values[part]).all()) for part in slices(values.size))


def largest_finite(array: NDArray[Any]) -> float:
    """The largest finite magnitude in ``array``; 0 if there is none."""
    values, largest = flat(array), 0.0
    for part in slices(values.size):
        size = np.abs(values[part])
        largest = max(largest, float(size[np.isfinite(size)].max(initial=0.0)))
    return largest


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """``array`` in one dimension, in C order, copied only if not contiguous."""
    return np.asarray(array).reshape(-1)
