"""Exact binomial bounds and prediction limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from bisect_trt.base.outcomes import CONFIDENCE


def lower_bound(passed: int, tested: int, confidence: float = CONFIDENCE) -> float:
    """The share of all copies that pass, at least: the exact one-sided bound (Clopper and Pearson).

    With independent copies the true share is below it in at most ``1 - confidence`` of such tests:
    22 of 22 bound it by 0.87 at 95 %, 59 of 59 by 0.95.
    """
    if passed == 0 or tested == 0:
        return 0.0
    # The tail is summed over the logs of the ways to pass k or more, and rises with the share, so
    # that bisection finds the bound.
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
    """The fewest copies that bound the share by ``share`` if at most ``misses`` of them fail."""
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
    """Student's t that ``share`` of the distribution lies below.

    It is summed as in Abramowitz and Stegun, 26.7.3 and 26.7.4, and bisected.
    """
    low, high = 0.0, math.pi / 2.0  # the angle whose tangent is t over the root of the freedom
    for _ in range(60):
        middle = (low + high) / 2.0
        if (1.0 + _within(middle, freedom)) / 2.0 < share:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The share between the t of ``angle`` and its negative."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range((freedom - odd) // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    total *= math.sin(angle)
    return 2.0 / math.pi * (angle + total) if odd else total


def limit_of_inputs(scores: Sequence[float], inputs: int, share: float) -> float:
    """What ``share`` of further inputs score at most, predicted from the logarithms of ``scores``.

    It is their mean and ``t * s * sqrt(1 + 1/n)`` (Hahn and Meeker, Statistical Intervals, section
    4.8). Copies of an input are no inputs of their own: ``n`` is the number of inputs.
    """
    worst = max(scores)
    if inputs < 2 or math.isinf(worst):
        return math.inf
    if not worst > 0.0:
        return worst
    # Small scores count alike: inputs on which nothing is at stake would widen the spread.
    logs = np.log(np.maximum(np.asarray(scores, np.float64), 0.1 * worst))
    if len(logs) < 2:
        return math.inf
    spread = float(logs.std(ddof=1)) * math.sqrt(1.0 + 1.0 / inputs)
    return math.exp(float(logs.mean()) + t_quantile(max(share, 0.5), inputs - 1) * spread)


_RESAMPLED_PAIRS = 400


def limit_of_sets(
    score: Callable[[Sequence[int]], float], inputs: int, pool: int, share: float
) -> float:
    """What ``share`` of further sets of as many inputs score at most, by the bootstrap.

    By how far two sets that are drawn from the given inputs lie apart (Efron and Tibshirani, An
    Introduction to the Bootstrap, chapter 8), in proportion, or where a set may score 0 as a
    difference. Half of what may be over is left for what resampling underrates.
    """
    random = np.random.default_rng(0)
    pairs = random.integers(pool, size=(_RESAMPLED_PAIRS, 2, inputs))
    scores = np.asarray([[score(one), score(other)] for one, other in pairs.tolist()])
    given = score(range(inputs))
    if not np.isfinite(scores).all() or not math.isfinite(given):
        return math.inf
    place = math.ceil((1.0 + share) / 2.0 * _RESAMPLED_PAIRS) - 1
    if given > 0.0 and scores.min() > 0.0:
        return given * float(np.sort(scores[:, 0] / scores[:, 1])[place])
    return given + float(np.sort(scores[:, 0] - scores[:, 1])[place])
