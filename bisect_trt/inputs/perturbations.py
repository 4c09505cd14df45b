"""Perturbed inputs: copies moved too little to matter, so that their roundings differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays, flat, slices

Random = np.random.Generator

PERTURB = 1e-3
"""The noise in deviations of the input: the most that leaves the layers' errors as they are
(benchmarks/results/perturbations.md)."""


def perturbed(
    arrays: Arrays,
    random: Random,
    amount: float = PERTURB,
    *,
    step: float = 0.0,
    discrete: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """``arrays`` with noise of ``amount`` deviations on the floats; masks and ids are unchanged.

    ``step`` is the relative rounding step of the precision, ``discrete`` the inputs that the model
    casts to integers.
    """
    names = moving(arrays, discrete)

    def moved(name: str, array: NDArray[Any]) -> NDArray[Any]:
        return noisy(array, random, amount, step, zeros_stay=name in discrete)

    return {n: moved(n, a) if n in names else a for n, a in arrays.items()}


def can_be_perturbed(arrays: Arrays, discrete: Collection[str] = ()) -> bool:
    """Whether there is a float input to perturb; token ids and masks are none."""
    return bool(moving(arrays, discrete))


def perturbed_lookups(
    arrays: Arrays, random: Random, amount: float = PERTURB
) -> dict[str, NDArray[Any]]:
    """The looked up ``arrays``, each value times 1 plus noise of ``amount``."""
    # Noise relative to each value, unlike that of inputs: it moves large values enough, and keeps
    # the zeros of padding.

    def change(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        return block * (1.0 + amount * numbers)

    moved = {n: with_noise(a, random, change) for n, a in arrays.items() if _is_looked_up(a)}
    return {**arrays, **moved}


def can_perturb_lookups(arrays: Arrays) -> bool:
    """Whether :func:`perturbed_lookups` changes something."""
    return any(_is_looked_up(array) for array in arrays.values())


def _is_looked_up(array: NDArray[Any]) -> bool:
    """Whether the values vary and are no mask, which has two values."""
    return varies(array) and not has_two_values(array)


def noisy(
    array: NDArray[Any],
    random: Random,
    amount: float,
    step: float = 0.0,
    *,
    zeros_stay: bool = False,
) -> NDArray[Any]:
    """``array`` plus noise, see :func:`perturbed`; ``zeros_stay`` keeps zeros."""
    mean, spread = moments(array)
    # Where the mean is far from 0, an eighth of a rounding step changes the roundings as much as a
    # thousandth of the deviation does elsewhere.
    of_step = min(0.125 * step * math.hypot(mean, spread), 0.1 * spread)
    scale = max(amount * spread, of_step)
    # Non-negative inputs (counts, black images) stay so, as a logarithm or root may follow.
    signless = bool(array.min() >= 0.0)
    zeros_stay = zeros_stay or signless

    def change(block: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        moved = block + numbers * scale * (block != 0.0) if zeros_stay else block + numbers * scale
        return np.abs(moved) if signless else moved

    return with_noise(array, random, change)


def with_noise(
    array: NDArray[Any],
    random: Random,
    change: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
) -> NDArray[Any]:
    """``change`` applied to each block of ``array`` and normal random numbers."""
    result = np.empty(array.shape, array.dtype)
    source, target = flat(array), flat(result)
    for part in slices(source.size):
        block = source[part]
        target[part] = change(block, random.standard_normal(block.shape))
    return result


def moments(array: NDArray[Any]) -> tuple[float, float]:
    """The mean and the standard deviation."""
    wide = np.promote_types(array.dtype, np.float32)  # sums overflow float16
    return float(array.mean(dtype=wide)), float(array.std(dtype=wide))


def moving(arrays: Arrays, discrete: Collection[str] = ()) -> frozenset[str]:
    """The names of the float inputs that vary and are neither masks nor ids."""
    # Two values are a mask if another input varies: noise would change what is attended to. Alone
    # they are the input itself, such as a line drawing. Whole numbers that the model casts to
    # integers (``discrete``) are ids.
    varied = {name: array for name, array in arrays.items() if varies(array)}
    whole = {n for n, a in varied.items() if n in discrete and _is_whole(a)}
    two = {n for n, a in varied.items() if has_two_values(a)}
    something_else = len(varied) > len(two | whole) or any(map(is_ids, arrays.values()))
    kept = whole | two if something_else else whole | two.intersection(discrete)
    return frozenset(varied).difference(kept)


def varies(array: NDArray[Any]) -> bool:
    """Whether floats vary and are finite; a mask of -inf or of the lowest number does not."""
    if array.dtype.kind != "f" or array.size < 2:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        spread = np.ptp(array)
        if not spread > 0.0:
            return False
        if array.dtype == np.float16:  # whose squares overflow without being a mask
            return bool(spread < np.finfo(np.float16).max / 4.0)
        return math.isfinite(moments(array)[1])


def has_two_values(array: NDArray[Any]) -> bool:
    """Whether an array that varies has exactly two different values."""
    values = flat(array)
    # A few values usually decide, and every copy is checked.
    if np.unique(values[:: max(1, values.size // 64)]).size > 2:
        return False
    low, high = values.min(), values.max()
    blocks = (values[part] for part in slices(values.size))
    return all(bool(((block == low) | (block == high)).all()) for block in blocks)


def is_ids(array: NDArray[Any]) -> bool:
    """Whether these are integers that vary, at least four: fewer are sizes."""
    return array.dtype.kind in "iu" and array.size >= 4 and bool(np.ptp(array) > 0)


def _is_whole(array: NDArray[Any]) -> bool:
    values = flat(array)
    blocks = (values[part] for part in slices(values.size))
    return all(bool((block == np.rint(block)).all()) for block in blocks)
