"""How sure k passes of n make us of the share that passes (Clopper and Pearson, Biometrika
1934).
"""

from __future__ import annotations

import math

import numpy as np


def lower_bound(passed: int, tested: int, confidence: float = 0.95) -> float:
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


def draws_needed(share: float, confidence: float = 0.95) -> int:
    """The fewest draws that bound the share by ``share`` if all of them pass."""
    if not 0.0 < share < 1.0:
        return 1
    # A hair less than the exact quotient, so that 0.95**59 = 0.0485 is not asked for twice.
    return math.ceil(math.log(1.0 - confidence) / math.log(share) - 1e-9)
