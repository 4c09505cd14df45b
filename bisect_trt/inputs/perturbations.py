"""Copies of an input that are moved too little to matter, so that every rounding falls anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.limits import thread_count
from bisect_trt.metrics.arrays import Arrays, flat, slices

LARGE_ARRAY = 4 << 20
"""Elements from which on blocks are drawn beside each other, each by a generator of its own, and
uniformly, which takes a fifth of the time: a test copies hundreds of copies, and to perturb which
way a rounding falls any noise of that deviation will do."""

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
    """
    found = np.empty(array.shape, array.dtype)
    source, target = flat(array), flat(found)
    if source.size <= LARGE_ARRAY:
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
    """
    values = flat(array)
    if values.size <= LARGE_ARRAY:
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


_GLANCE = 64


def moving(arrays: Arrays, discrete: Collection[str] = ()) -> frozenset[str]:
    """The names of the float inputs that vary and are no masks and ids.

    What has two values is a mask, or a size, where something else varies, be it ids: noise of a
    deviation's thousandth makes its zeros nonzero and moves -1e9 by half a million, and so changes
    what is attended to and not how that is rounded. Alone it is the input itself (a line drawing).
    Whole numbers are ids where the model makes them integers.
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
        return math.isfinite(deviation(array) if array.size <= LARGE_ARRAY else spread * spread)


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


_Arrays = dict[str, NDArray[Any]]
Random = np.random.Generator

PERTURB = 1e-3
"""How far a copy is moved, in deviations of the input: the most that leaves what the layers do
as it was (benchmarks/results/perturbations.md)."""

_MOST = 0.1
"""Deviations that a perturbed copy is moved at most."""

_OF_STEP = 0.125
"""Of a rounding step: as much perturbs roundings as a thousandth of the deviation does that of
inputs whose mean is 0 (a cosine of 0.4 between the errors of a copy's activations and the input's
own; of temperatures in kelvin, in BF16, it was 1)."""


def perturbed(
    arrays: Arrays,
    random: Random,
    amount: float = PERTURB,
    *,
    step: float = 0.0,
    discrete: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """Each float input plus noise of ``amount`` of its deviation, or of the part of a rounding step
    that perturbs it where its mean is far from 0; masks, ids and others as they are. What is
    nowhere negative stays so, and its zeros are zeros: counts, images of black, what a ReLU gave.
    """
    names = moving(arrays, discrete)

    def moved(name: str, array: NDArray[Any]) -> NDArray[Any]:
        return noisy(array, random, amount, step, zeros_stay=name in discrete)

    return {n: moved(n, a) if n in names else a for n, a in arrays.items()}


def can_be_perturbed(arrays: Arrays, discrete: Collection[str] = ()) -> bool:
    """Whether there is a float input that varies: token ids and masks cannot be moved."""
    return bool(moving(arrays, discrete))


def perturbed_lookups(
    arrays: Arrays, random: Random, amount: float = PERTURB
) -> dict[str, NDArray[Any]]:
    """What integers look up, each value times 1 plus noise of ``amount``; others as they are.

    Of a deviation of the whole, as inputs are moved, large values would fall as before, and where
    small ones were zero a padding would be none.
    """
    return {n: _stretched(a, random, amount) if _is_looked_up(a) else a for n, a in arrays.items()}


def can_perturb_lookups(arrays: Arrays) -> bool:
    """Whether :func:`perturbed_lookups` would move something."""
    return any(_is_looked_up(array) for array in arrays.values())


def _is_looked_up(array: NDArray[Any]) -> bool:
    """Values that vary; of two values it is a mask, which means something else once it is moved."""
    return varies(array) and not has_two_values(array)


def noisy(
    array: NDArray[Any],
    random: Random,
    amount: float,
    step: float = 0.0,
    *,
    zeros_stay: bool = False,
) -> NDArray[Any]:
    """``array`` plus noise, as :func:`perturbed` has it."""
    mean, spread = moments(array)
    scale = max(amount * spread, min(_OF_STEP * step * math.hypot(mean, spread), _MOST * spread))

    # What is nowhere negative may be a logarithm's or a root's: a copy of it stays so.
    signless = bool(array.min() >= 0.0)
    zeros_stay = zeros_stay or signless

    def change(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        found = block + numbers * scale * (block != 0.0) if zeros_stay else block + numbers * scale
        return np.abs(found) if signless else found

    return with_noise(array, random, change)


def _stretched(array: NDArray[Any], random: Random, amount: float) -> NDArray[Any]:
    return with_noise(array, random, lambda block, numbers: block * (1.0 + amount * numbers))
