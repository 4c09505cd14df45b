"""The scale that everything is judged on: multiples of the tolerance, at most 1 passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NOTHING_ALLOWED = 1e9
"""The score of a finite error where none is allowed; infinity is kept for values that are not
finite.
"""

MOST = 9.99e8
"""No other finite score is larger."""


def times(score: float) -> str:
    """A score in words."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "NaN, infinite values or another shape"
    if score >= _NOTHING_ALLOWED:
        return "a miss where none is allowed"
    # A miss by a hair must not read as "1 times".
    near = abs(score - 1.0) < 5e-3
    return f"{score:.6g} times the tolerance" if near else f"{score:.3g} times the tolerance"


_BLOCK = 1 << 14
"""Elements at a time: what is computed of them stays in the cache."""


def elementwise(
    reference: NDArray[Any], candidate: NDArray[Any], absolute: float, relative: float
) -> float:
    """The score of the element that is worst off.

    Args:
        reference: any shape and numeric dtype; where it is not finite nothing is asked.
        candidate: of the same shape.
        absolute: by how much each element may be off, in the tensor's units.
        relative: and by what part of the reference's beside that.
    """
    ref, got = np.asarray(reference).ravel(), np.asarray(candidate).ravel()
    worst = 0.0
    for start in range(0, ref.size, _BLOCK):
        exact = ref[start : start + _BLOCK].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            allowed = absolute + relative * np.abs(exact)
            error = np.abs(got[start : start + _BLOCK].astype(np.float64) - exact)
            used = error / allowed
        # 0 over 0 where nothing is allowed and nothing is wrong; not where the reference is not.
        used[(error == 0.0) | ~np.isfinite(exact)] = 0.0
        if bool((used == np.inf).any()):
            return _NOTHING_ALLOWED
        worst = max(worst, float(used.max()))
    return min(worst, MOST)


def fraction(value: float, limit: float) -> float:
    """The score of a ``value`` of which ``limit`` is allowed, both in the metric's unit."""
    if value <= 0.0:
        return 0.0
    return min(value / limit, MOST) if limit > 0.0 else _NOTHING_ALLOWED
