"""Copies of an input that are moved too little to matter, so that every rounding falls anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays, flat, slices

Random = np.random.Generator

PERTURB = 1e-3
"""How far a copy is moved, in deviations of the input: the most that leaves what the layers do
as it was (benchmarks/results/perturbations.md)."""

_MAX_DEVIATIONS = 0.1
"""Deviations that a copy is moved at most, however coarse a rounding step is."""

_STEP_SHARE = 0.125
"""Of a rounding step: it perturbs roundings where the mean is far from 0 as much as a thousandth of
the deviation does elsewhere."""


def perturbed(
    arrays: Arrays,
    random: Random,
    amount: float = PERTURB,
    *,
    step: float = 0.0,
    discrete: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """Each float input plus noise of ``amount`` of its deviation; masks and ids as they are.

    Where its mean is far from 0 the noise is a part of a rounding ``step``. What is nowhere
    negative stays so, and its zeros are zeros: counts, images of black, what a ReLU gave.
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

    def change(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        return block * (1.0 + amount * numbers)

    moved = {n: with_noise(a, random, change) for n, a in arrays.items() if _is_looked_up(a)}
    return {**arrays, **moved}


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
    of_step = min(_STEP_SHARE * step * math.hypot(mean, spread), _MAX_DEVIATIONS * spread)
    scale = max(amount * spread, of_step)
    # What is nowhere negative may be a logarithm's or a root's: a copy of it stays so.
    signless = bool(array.min() >= 0.0)
    zeros_stay = zeros_stay or signless

    def change(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        found = block + numbers * scale * (block != 0.0) if zeros_stay else block + numbers * scale
        return np.abs(found) if signless else found

    return with_noise(array, random, change)


def with_noise(
    array: NDArray[Any],
    random: Random,
    change: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
) -> NDArray[Any]:
    """What ``change`` makes of each block of ``array`` and of random numbers of deviation 1."""
    found = np.empty(array.shape, array.dtype)
    source, target = flat(array), flat(found)
    for part in slices(source.size):
        block = source[part]
        target[part] = change(block, random.standard_normal(block.shape))
    return found


def moments(array: NDArray[Any]) -> tuple[float, float]:
    """The mean and the standard deviation of ``array``'s values."""
    wide = np.promote_types(array.dtype, np.float32)  # sums of float16 leave its range
    return float(array.mean(dtype=wide)), float(array.std(dtype=wide))


def moving(arrays: Arrays, discrete: Collection[str] = ()) -> frozenset[str]:
    """The names of the float inputs that vary and are no masks and ids.

    What has two values is a mask, or a size, where something else varies: noise would change what
    is attended to, and not how that is rounded. Alone it is the input itself (a line drawing).
    Whole numbers are ids where the model makes them integers (``discrete``).
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
        return math.isfinite(moments(array)[1])


def has_two_values(array: NDArray[Any]) -> bool:
    """Whether an array that varies has two different values and no more."""
    values = flat(array)
    # A few values from everywhere mostly tell: it is asked about for every copy.
    if np.unique(values[:: max(1, values.size // 64)]).size > 2:
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
