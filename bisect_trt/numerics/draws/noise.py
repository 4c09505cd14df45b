"""Noise over arrays of any size: on all cores, and of cheaper numbers, of large ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.numerics.blocks import flat, slices

LARGE = 4 << 20
"""Elements from which on blocks are drawn beside each other, each by a generator of its own, and
uniformly, which takes a fifth of the time: a test draws hundreds of copies, and to redraw which way
a rounding falls any noise of that deviation will do."""

_UNIFORM = np.float32(math.sqrt(12.0))
"""Over the deviation of what is uniform between 0 and 1."""

Answer = TypeVar("Answer")


def with_noise(
    array: NDArray[Any],
    random: np.random.Generator,
    change: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
) -> NDArray[Any]:
    """What ``change`` makes of each block of ``array`` and as many random numbers of mean 0 and
    deviation 1.

    Args:
        array: floats of any shape; it is not written to.
        random: decides the numbers, whatever the number of threads.
        change: takes a block of values and one of numbers: normal ones in float64, or of a large
            array uniform ones in float32.

    Returns:
        A new array of the same shape and dtype.
    """
    found = np.empty(array.shape, array.dtype)
    source, target = flat(array), flat(found)
    if source.size <= LARGE:
        for part in slices(source.size):
            block = source[part]
            target[part] = change(block, random.standard_normal(block.shape))
        return found
    seed = int(random.integers(2**63))

    def fill(part: slice) -> None:
        block = source[part]
        numbers = np.random.default_rng([seed, part.start]).random(block.shape, np.float32)
        numbers -= np.float32(0.5)
        numbers *= _UNIFORM
        target[part] = change(block, numbers)

    _beside_each_other(fill, source.size)
    return found


def deviation(array: NDArray[Any]) -> float:
    """The standard deviation of ``array``'s values, as :func:`moments` has it."""
    return moments(array)[1]


def moments(array: NDArray[Any]) -> tuple[float, float]:
    """The mean and the standard deviation of ``array``'s values. NumPy's holds a copy of the array;
    of a large one it is summed up in float64, block by block. Sums of float16 leave its range: of
    60,000 values NumPy says that they deviate by infinity.

    Args:
        array: floats of any shape.
    """
    values = flat(array)
    if values.size <= LARGE:
        wide = np.promote_types(array.dtype, np.float32)
        return float(array.mean(dtype=wide)), float(array.std(dtype=wide))
    sums = _beside_each_other(lambda part: float(values[part].sum(dtype=np.float64)), values.size)
    mean = math.fsum(sums) / values.size

    def squares(part: slice) -> float:
        away = values[part].astype(np.float64) - mean
        return float(np.dot(away, away))

    squared = math.fsum(_beside_each_other(squares, values.size))
    return mean, math.sqrt(squared / values.size)


def _beside_each_other(work: Callable[[slice], Answer], size: int) -> list[Answer]:
    """The answer for each block of ``size`` elements, in order. The threads are the call's own: it
    may be made by one of a pool that must not wait for itself.
    """
    with ThreadPoolExecutor(thread_count()) as pool:
        return list(pool.map(work, slices(size)))
