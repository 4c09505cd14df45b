"""How far the answers of several runs to one sample lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.arrays import Arrays


def farthest_apart(exact: Arrays, answers: Sequence[Arrays]) -> tuple[str, float]:
    """The output on which two of ``answers`` differ most, and by how much of the reference's range.

    Args:
        exact: the reference's outputs by name, any shapes and dtypes.
        answers: of the runs that differ.

    Returns:
        ("", 0) where none differs in value; infinite where a shape does, or one of two is not
        finite.
    """
    found = [
        (name, _spread(reference, [answer[name] for answer in answers]))
        for name, reference in exact.items()
    ]
    name, apart = max(found, key=lambda pair: pair[1], default=("", 0.0))
    return (name, apart) if apart > 0.0 else ("", 0.0)


def _spread(reference: NDArray[Any], found: Sequence[NDArray[Any]]) -> float:
    """The largest distance between two of ``found`` at one element, over the reference's range."""
    first = found[0]
    if any(other.shape != first.shape for other in found):
        return math.inf
    if first.dtype.kind not in "fiub" and first.dtype.itemsize != 2:  # texts
        return 0.0 if all(np.array_equal(first, other) for other in found) else math.inf
    least = most = first.astype(np.float64)
    unknown = np.isnan(least)
    for other in found[1:]:
        values = other.astype(np.float64)
        if bool(np.any(np.isnan(values) != unknown)):
            return math.inf
        least, most = np.minimum(least, values), np.maximum(most, values)
    with np.errstate(invalid="ignore"):
        same = (least == most) | unknown
        gap = float(np.abs(np.where(same, 0.0, most - least)).max(initial=0.0))
    if not math.isfinite(gap):
        return math.inf
    values = reference[np.isfinite(reference)] if reference.dtype.kind == "f" else reference
    span = float(np.ptp(values.astype(np.float64))) if values.size else 0.0
    return gap / span if span > 0.0 else gap
