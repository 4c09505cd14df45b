"""The shortest passing prefix of a ranking: the sets are nested, so there is little to overfit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

_EXACT_LAYERS = 1000
"""A set of fewer than twice as many layers is found exactly."""


def shortest_prefix(
    length: int, passes: Callable[[int], bool], *, first: int = 0, guess: int = 0
) -> int | None:
    """The fewest of ``length`` ranked layers that pass pinned, ``first`` at least.

    Gallops in doubling steps, then bisects, as if more pins never hurt; where they do, the answer
    is a prefix that passes and whose predecessor was seen to fail. Of thousands of layers it is
    found to a thousandth: what is left costs as many questions again.
    """
    low, high, step = first - 1, min(length, max(first, guess)), 1  # low fails or is not asked for
    while not passes(high):
        if high >= length:
            return None
        low, high, step = high, min(length, high + step), 2 * step
    if low < first:  # the first that was asked for passes
        while high - step > low and passes(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > max(1, high // _EXACT_LAYERS):
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high


def longer(strength: Sequence[float], length: int, share: float, more: int = 1) -> int:
    """How many of the ranking to go on with after the first ``length`` were refused.

    As :func:`grown` says, but twice as many at most: what layers leave together is a guess.
    """
    enough = min(grown(strength, length, share), 2 * length)
    return min(len(strength), max(math.ceil(1.1 * length), length + more, enough))


def grown(strength: Sequence[float], length: int, share: float) -> int:
    """How many of the ranking leave ``share`` of what its first ``length`` leave.

    What the rest do is taken to add up by squares, as if independent; ``length`` where that cannot
    be told.
    """
    left = np.cumsum(np.asarray(strength, np.float64)[::-1])[::-1]
    if length >= left.size or not math.isfinite(left[length]) or not share > 0.0:
        return length
    return max(length, int(np.count_nonzero(left > share * share * left[length])))
