"""One number for many inputs: the worst, the mean, or what a share of them keeps to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_EXACT = 200.0
"""Decibels that an exact output counts as: more than float32 resolves."""

WORST, MEAN, MEDIAN = "worst", "mean", "median"
_PERCENTILE = re.compile(r"^p(\d{1,3}(?:\.\d+)?)$")


def is_aggregate(text: str) -> bool:
    """Whether ``text`` is ``worst``, ``mean``, ``median`` or a percentile such as ``p95``."""
    found = _PERCENTILE.match(text)
    return text in (WORST, MEAN, MEDIAN) or (found is not None and 0.0 < float(found[1]) <= 100.0)


def aggregate(kind: str, values: Sequence[float], *, at_least: bool) -> float:
    """One number for ``values``, one an input.

    Args:
        kind: one that :func:`is_aggregate` knows. ``pN`` is what N % of the inputs keep to: the
            smallest of them that so many do not exceed (order statistic, no interpolation).
        values: one an input, in the metric's unit; NaN, where one could not be told, counts as
            worse than any number.
        at_least: whether larger is better.

    Returns:
        The number, NaN where it hangs on one that could not be told.
    """
    worse = -math.inf if at_least else math.inf
    known = np.asarray([worse if math.isnan(v) else v for v in values], np.float64)
    found = _of_known(kind, known, worse, at_least=at_least)
    return math.nan if found == worse and any(map(math.isnan, values)) else found


def _of_known(kind: str, known: NDArray[np.float64], worse: float, *, at_least: bool) -> float:
    """Of values of which the ``worse`` infinity stands for what could not be told."""
    if kind in (MEAN, MEDIAN):
        # Decibels of an exact output are infinite: they must not hide what the others have.
        exact = known == -worse
        if exact.any():
            best = known[~exact].max() if at_least and not exact.all() else _EXACT
            known = np.where(exact, max(best, _EXACT) if at_least else known, known)
        with np.errstate(invalid="ignore"):
            found = float(known.mean() if kind == MEAN else np.median(known))
        return worse if math.isnan(found) else found  # between infinities
    ordered = np.sort(known)[::-1] if at_least else np.sort(known)
    percentile = _PERCENTILE.match(kind)
    share = float(percentile[1]) / 100.0 if percentile is not None else 1.0
    return float(ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1])
