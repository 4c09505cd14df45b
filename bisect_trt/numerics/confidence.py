"""How sure k passes of n make us of the share that passes (Clopper and Pearson, Biometrika
1934).
"""

from __future__ import annotations

import numpy as np

from bisect_trt.core.holds import CONFIDENCE


def lower_bound(passed: int, tested: int, confidence: float = CONFIDENCE) -> float:
    """The share of all draws that pass, at least, one-sided.

    With independent draws the true share is below the bound in at most ``1 - confidence`` of such
    tests, whatever it is: 22 of 22 bound it by 0.87 at 95 %, 59 of 59 by 0.95.

    Args:
        passed: how many passed.
        tested: of how many, 0 for none.
        confidence: between 0 and 1.

    Returns:
        A share in [0, 1]; 0 where nothing was tested.
    """
    if passed == 0 or tested == 0:
        return 0.0
    # The logs of the ways to pass k or more: the tail is summed over them, and rises with the
    # share, so that bisection finds the bound to the last bit that matters.
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


def draws_needed(share: float, confidence: float = CONFIDENCE, misses: int = 0) -> int:
    """The fewest draws that bound the share by ``share`` if at most ``misses`` of them fail.

    Args:
        share: below 1; from 1 on, or at 0, there is no such number, and 1 is given.
        confidence: between 0 and 1.
        misses: how many may fail.
    """
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
