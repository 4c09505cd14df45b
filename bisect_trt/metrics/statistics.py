"""Exact binomial bounds and prediction limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from bisect_trt.base.outcomes import CONFIDENCE


def lower_bound(passed: int, tested: int, confidence: float = CONFIDENCE) -> float:
    """The exact lower bound on the share of all copies that pass (Clopper and Pearson).

    59 of 59 bound it by 0.95 at 95 %.
    """
    if passed == 0 or tested == 0:
        return 0.0
    # The probability to pass k or more rises with the share: bisection finds the bound. It is
    # summed from logarithms, as binomial coefficients leave float64.
    counts = np.arange(passed, tested + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, tested + 1)))])
    ways = logs[tested] - logs[counts] - logs[tested - counts]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        terms = ways + counts * np.log(middle) + (tested - counts) * np.log1p(-middle)
        if float(np.exp(terms).sum()) > 1.0 - confidence:
            high = middle
        else:
            low = middle
    return low


def copies_needed(share: float, confidence: float = CONFIDENCE, misses: int = 0) -> int:
    """The fewest copies that prove ``share`` if ``misses`` of them fail."""
    if not 0.0 < share < 1.0:
        return 1
    low, high = misses, misses + 1  # low is too few
    while lower_bound(high - misses, high, confidence) < share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if lower_bound(middle - misses, middle, confidence) < share:
            low = middle
        else:
            high = middle
    return high


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution."""
    # Abramowitz and Stegun, 26.7.3 and 26.7.4, inverted by bisection.
    low, high = 0.0, math.pi / 2.0  # the angle whose tangent is t over the root of the freedom
    for _ in range(60):
        middle = (low + high) / 2.0
        if (1.0 + _within(middle, freedom)) / 2.0 < share:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability between the t of ``angle`` and its negative."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range((freedom - odd) // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    total *= math.sin(angle)
    return 2.0 / math.pi * (angle + total) if odd else total


def limit_of_inputs(scores: Sequence[float], inputs: int, share: float) -> float:
    """The score that ``share`` of further inputs stay below, from the logarithms of ``scores``.

    It is their mean plus ``t * s * sqrt(1 + 1/n)`` (Hahn and Meeker, Statistical Intervals, section
    4.8). ``n`` is the number of inputs, since copies of an input are not independent.
    """
    worst = max(scores)
    if inputs < 2 or math.isinf(worst):
        return math.inf
    if not worst > 0.0:
        return worst
    # Small scores count alike: inputs with next to no error would widen the spread.
    logs = np.log(np.maximum(np.asarray(scores, np.float64), 0.1 * worst))
    if len(logs) < 2:
        return math.inf
    spread = float(logs.std(ddof=1)) * math.sqrt(1.0 + 1.0 / inputs)
    return math.exp(float(logs.mean()) + t_quantile(max(share, 0.5), inputs - 1) * spread)


def limit_of_sets(
    score: Callable[[Sequence[int]], float], inputs: int, pool: int, share: float
) -> float:
    """The score that ``share`` of further sets of ``inputs`` inputs stay below, by the bootstrap.

    Two sets drawn from the ``pool`` given inputs show how scores vary (Efron and Tibshirani, An
    Introduction to the Bootstrap, chapter 8): in proportion, or as a difference if one may be 0.
    """
    random = np.random.default_rng(0)
    pairs = random.integers(pool, size=(400, 2, inputs))
    scores = np.asarray([[score(one), score(other)] for one, other in pairs.tolist()])
    given = score(range(inputs))
    if not np.isfinite(scores).all() or not math.isfinite(given):
        return math.inf
    # Half of the risk is left for the variation that resampling underrates.
    place = math.ceil((1.0 + share) / 2.0 * len(pairs)) - 1
    if given > 0.0 and scores.min() > 0.0:
        return given * float(np.sort(scores[:, 0] / scores[:, 1])[place])
    return given + float(np.sort(scores[:, 0] - scores[:, 1])[place])
