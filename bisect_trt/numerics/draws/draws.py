"""Copies of the given inputs with their roundings redrawn.

A copy is moved too little to change what the layers do, and enough to redraw which way each
rounding goes. Arrays are never changed in place, and keep their shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.draws.movable import has_two_values, moving, varies
from bisect_trt.numerics.draws.noise import moments, with_noise

_Arrays = dict[str, NDArray[Any]]
Random = np.random.Generator

REDRAW = 1e-3
"""How far a copy is moved, in deviations of the input: the most that leaves what the layers do
as it was (benchmarks/results/perturbations.md)."""

_MOST = 0.1
"""Deviations that a redrawn copy is moved at most."""

_OF_STEP = 0.125
"""Of a rounding step: as much redraws roundings as a thousandth of the deviation does that of
inputs whose mean is 0 (a cosine of 0.4 between the errors of a copy's activations and the input's
own; of temperatures in kelvin, in BF16, it was 1)."""


def redrawn(
    arrays: Arrays,
    random: Random,
    amount: float = REDRAW,
    *,
    step: float = 0.0,
    discrete: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """Each float input plus noise of ``amount`` of its deviation, or of the part of a rounding step
    that redraws it where its mean is far from 0; masks, ids and others as they are. What is nowhere
    negative stays so, and its zeros are zeros: counts, images of black, what a ReLU gave.

    Args:
        arrays: one sample's inputs by name, any shapes and dtypes.
        random: draws the noise.
        amount: in deviations of each input.
        step: of the precision whose roundings are redrawn, relative to a value.
        discrete: as for :func:`~bisect_trt.numerics.draws.movable.moving`.
    """
    names = moving(arrays, discrete)

    def moved(name: str, array: NDArray[Any]) -> NDArray[Any]:
        return noisy(array, random, amount, step, zeros_stay=name in discrete)

    return {n: moved(n, a) if n in names else a for n, a in arrays.items()}


def can_be_redrawn(arrays: Arrays, discrete: Collection[str] = ()) -> bool:
    """Whether there is a float input that varies: token ids, masks and constants cannot be moved.

    Args:
        arrays: one sample's inputs by name.
        discrete: as for :func:`~bisect_trt.numerics.draws.movable.moving`.
    """
    return bool(moving(arrays, discrete))


def redrawn_lookups(
    arrays: Arrays, random: Random, amount: float = REDRAW
) -> dict[str, NDArray[Any]]:
    """What integers look up, each value times 1 plus noise of ``amount``; others as they are.

    Of a deviation of the whole, as inputs are moved, large values would fall as before, and where
    small ones were zero a padding would be none.

    Args:
        arrays: float32 by name, any shapes.
        random: draws the noise.
        amount: in parts of each value.
    """
    return {n: _stretched(a, random, amount) if _is_looked_up(a) else a for n, a in arrays.items()}


def can_redraw_lookups(arrays: Arrays) -> bool:
    """Whether :func:`redrawn_lookups` would move something."""
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
    """``array`` plus noise, as :func:`redrawn` has it.

    Args:
        array: floats that vary.
        random: draws the noise.
        amount: in deviations of the array.
        step: of the precision whose roundings are redrawn, relative to a value.
        zeros_stay: what is exactly 0 stays so: padding, of what the model asks for equality.
    """
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
