"""How far the answers of several runs to one sample lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.arrays import Arrays


def farthest_apart(exact: Arrays, answers: Sequence[Arrays]) -> tuple[str, float]:
    """The output on which ``answers`` differ most, and by how much of the reference's range.

    Args:
        exact: the reference's outputs by name, any shapes and dtypes.
        answers: the first is what the others are held against.

    Returns:
        ("", 0) where none differs in value; infinite where a shape does, or one of two is not
        finite.
    """
    pairs = [
        (name, _distance(reference, answers[0][name], other[name]))
        for other in answers[1:]
        for name, reference in exact.items()
    ]
    name, apart = max(pairs, key=lambda pair: pair[1], default=("", 0.0))
    return (name, apart) if apart > 0.0 else ("", 0.0)


def _distance(reference: NDArray[Any], one: NDArray[Any], other: NDArray[Any]) -> float:
    if one.shape != other.shape:
        return math.inf
    if one.dtype.kind not in "fiub" and one.dtype.itemsize != 2:  # texts
        return 0.0 if bool(np.array_equal(one, other)) else math.inf
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = float(np.abs(np.where(same, 0.0, a - b)).max(initial=0.0))
    if not math.isfinite(gap):
        return math.inf
    values = reference[np.isfinite(reference)] if reference.dtype.kind == "f" else reference
    span = float(np.ptp(values.astype(np.float64))) if values.size else 0.0
    return gap / span if span > 0.0 else gap
