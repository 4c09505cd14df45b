"""The scale that everything is judged on: multiples of the tolerance, at most 1 passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOTHING_ALLOWED = 1e9
"""The score of a finite error where none is allowed; infinity is kept for values that are not
finite.
"""

MOST = 9.99e8
"""No other finite score is larger: it stands for all beyond it."""


_NOT_FINITE = "NaN or infinite values"
_NO_SCORE = {"non-finite": _NOT_FINITE, "fail": "an output of another shape"}
"""Why there is no number, by the evaluation's verdict; any other means that nothing came out."""


def brief(score: float) -> str:
    """A score where there is no room for a sentence."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "no number"
    if score >= NOTHING_ALLOWED:
        return "none allowed"
    return f"{'> ' if score >= MOST else ''}{score:.3g} \u00d7"


def times(score: float, outcome: str = "") -> str:
    """A score in words.

    Args:
        score: in tolerances.
        outcome: the value of the evaluation's verdict, which says why a score is infinite.
    """
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return _NO_SCORE.get(outcome, "no outputs: the run breaks" if outcome else _NOT_FINITE)
    if score >= NOTHING_ALLOWED:
        return "a miss where none is allowed"
    if score >= MOST:
        return f"more than {MOST:.3g} times the tolerance"
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
    # The same memory for each block: fresh pages for each cost more than the rest.
    room = np.empty((2, min(ref.size, _BLOCK)))
    for start in range(0, ref.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, ref.size))
        allowed, used = room[:, : block.stop - start]
        np.copyto(allowed, ref[block], casting="unsafe")
        np.copyto(used, got[block], casting="unsafe")
        with np.errstate(divide="ignore", invalid="ignore"):
            used -= allowed
            np.abs(used, out=used)
            np.abs(allowed, out=allowed)
            allowed *= relative
            allowed += absolute
            used /= allowed
        # 0 over 0 where nothing is allowed and nothing is wrong; or the reference is not finite.
        most = float(used.max())
        if not math.isfinite(most):
            finite = np.isfinite(ref[block].astype(np.float64))
            most = float(np.where(finite & ~np.isnan(used), used, 0.0).max())
            if math.isinf(most):
                return NOTHING_ALLOWED
        worst = max(worst, most)
    return min(worst, MOST)


def fraction(value: float, limit: float) -> float:
    """The score of a ``value`` of which ``limit`` is allowed, both in the metric's unit."""
    if value <= 0.0:
        return 0.0
    return min(value / limit, MOST) if limit > 0.0 else NOTHING_ALLOWED


def beyond(excess: float, limit: float) -> float:
    """The score of a value that lies ``excess`` beyond its limit, on a scale that nobody knows: 1
    at the limit, and further by the parts of the limit that it lies beyond, or within.

    Args:
        excess: in the metric's unit, negative where the limit is kept.
        limit: of any sign; where it is 0 the metric's unit stands for it.
    """
    score = 1.0 + excess / (abs(limit) or 1.0)
    # What misses by a last bit must not round to 1.
    least = math.nextafter(1.0, 2.0) if excess > 0.0 else 0.0
    return min(max(score, least), MOST)
