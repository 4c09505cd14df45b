"""Ranks layers, and finds the shortest passing prefix: nested sets leave little to overfit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

SKIPPED = 32
"""Layers that may be passed over for cheaper ones behind them."""

FREE = 1e-3
"""Below this share of all layers' cost, layers cost the same: nothing that a clock would show."""


def by_worth(
    ranking: Sequence[str],
    strength: Mapping[str, float],
    cost: Mapping[str, float],
    first: Collection[str] = (),
) -> list[str]:
    """``ranking`` by the ``strength`` that a layer's ``cost`` buys, the layers ``first`` before.

    Layers of unknown strength count as the weakest of those known. Of equal layers the one that
    was first stays so.
    """
    floor = FREE * sum(cost.values()) or 1.0
    known = [value for value in strength.values() if 0.0 < value < math.inf]
    least = min(known, default=1.0)

    def worth(name: str) -> tuple[bool, float]:
        return name not in first, -strength.get(name, least) / max(cost.get(name, 0.0), floor)

    return sorted(ranking, key=worth)


def affordable(ranking: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """The first layers of ``ranking`` that fit together, and those behind that fit beside them.

    After :data:`SKIPPED` layers that do not fit the rest is not looked at.
    """
    kept, rest = list[str](), list(ranking)
    for _ in range(SKIPPED):
        count = longest(len(rest), partial(_fits_beside, kept, rest, fits))
        kept += rest[:count]
        rest = rest[count + 1 :]
        if not rest:
            break
    return kept


def _fits_beside(
    kept: Sequence[str], rest: Sequence[str], fits: Callable[[Sequence[str]], bool], length: int
) -> bool:
    return fits([*kept, *rest[:length]])


def longest(length: int, fits: Callable[[int], bool]) -> int:
    """The most of ``length`` ranked layers that fit, as if more never fit where fewer do not.

    It is 0 where not even one fits.
    """
    return bisect_left(range(1, length + 1), True, key=lambda count: not fits(count))


def shortest_prefix(
    length: int, passes: Callable[[int], bool], *, first: int = 0, guess: int = 0
) -> int | None:
    """The fewest of ``length`` ranked layers, at least ``first``, that pass pinned.

    Gallops in doubling steps, then bisects, as if more pins never hurt. Where they do, the answer
    passes and its predecessor was found to fail. None where no length passes.
    """
    low, high, step = first - 1, min(length, max(first, guess)), 1  # low fails or is below first
    while not passes(high):
        if high >= length:
            return None
        low, high, step = high, min(length, high + step), 2 * step
    if low < first:  # the guess passes
        while high - step > low and passes(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > max(1, high // 1000):  # a thousandth saves half of the evaluations
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high


def longer(strength: Sequence[float], length: int, share: float, more: int = 1) -> int:
    """The next length to try after the first ``length`` of the ranking have failed."""
    # Twice as many at most, and half of what is left, since grown() is an estimate: one input that
    # is nearly a tie would ask for every layer.
    half = length + math.ceil((len(strength) - length) / 2)
    enough = min(grown(strength, length, share), 2 * length, half)
    return min(len(strength), max(math.ceil(1.1 * length), length + more, enough))


def grown(strength: Sequence[float], length: int, share: float) -> int:
    """The length that leaves ``share`` of the error that the first ``length`` leave.

    It is ``length`` itself where the ``strength`` of the rest is unknown.
    """
    # The errors of the unpinned rest are taken to be independent, and add up by squares.
    left = np.cumsum(np.asarray(strength, np.float64)[::-1])[::-1]
    if length >= left.size or not math.isfinite(left[length]) or not share > 0.0:
        return length
    return max(length, int(np.count_nonzero(left > share * share * left[length])))
