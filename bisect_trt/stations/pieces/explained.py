"""How far a piece's outputs may be off before rounding no longer explains it.

The piece is emulated at the precision in question, and ``FACTOR`` times its error is allowed. For
FP32 the emulated model shows another order of sums only. So BF16's error is allowed too, over 2^16:
its range is the same and its unit so many times as large, so that to first order its error is too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import BisectError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.errors.tensor_error import tensor_error
from bisect_trt.runners.emulator.whole_model import WholeModelRunner

FACTOR = 10.0
"""Engines sum in other orders, and some in FP16, which no rounding of inputs and outputs shows."""

_ULPS = 32 * 2.0**-23
"""Of the largest value: sums of thousands of terms in FP32, one after the other, are off by so
much where the terms cancel."""

_BF16_TO_FP32 = 2.0**-16

_FLIPPED = 1e-2
"""Of integers and truth values, the share that may be others: close decisions fall either way."""


@dataclass(frozen=True)
class Allowance:
    """What rounding explains, by output: ``most`` is the largest error of floats, in their own
    units, or the share of the others that may differ; ``breaks`` are outputs in which rounding
    alone makes NaN or infinities.
    """

    most: Mapping[str, float]
    breaks: frozenset[str]

    def used(self, expected: Arrays, found: Arrays) -> float:
        """The error of ``found`` in multiples of what is allowed, the worst output's; infinite for
        another shape, and for NaN or infinities that rounding does not explain.
        """
        return max((self._used(n, expected[n], found[n]) for n in self.most), default=0.0)

    def _used(self, name: str, expected: NDArray[Any], found: NDArray[Any]) -> float:
        size, broken = _error(expected, found)
        if broken and name not in self.breaks:
            return float("inf")
        if size == 0.0:
            return 0.0
        return size / self.most[name] if self.most[name] > 0.0 else float("inf")


def what_rounding_explains(
    model: onnx.ModelProto, sample: Sample, expected: Arrays, precision: Precision
) -> Allowance:
    """The allowance of an FP32 model that runs at ``precision``, on one sample.

    Args:
        model: of the piece.
        sample: its inputs.
        expected: its outputs in FP32.
        precision: what its layers run in; TF32 for an engine whose FP32 is.
    """
    roundings = [(precision, 1.0)]
    if precision is Precision.FP32:
        roundings.append((Precision.BF16, _BF16_TO_FP32))
    most = {name: _least(array) for name, array in expected.items()}
    breaks = set[str]()
    runner = WholeModelRunner(Graph(model))
    for emulated, scale in roundings:
        try:
            found = next(iter(runner.outputs(PrecisionPlan(emulated), [sample])))
        except BisectError:  # an opset that cannot be raised, a rounded index out of range
            continue
        for name, array in expected.items():
            size, broken = _error(array, found[name])
            most[name] = max(most[name], FACTOR * scale * size)
            if broken and emulated is precision:
                breaks.add(name)
    return Allowance(most, frozenset(breaks))


def _error(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, bool]:
    """How large the error is, and whether it is more than a matter of size."""
    if expected.shape != found.shape:
        return 0.0, True
    if expected.dtype.kind != "f":
        return (float(np.mean(expected != found)) if expected.size else 0.0), False
    error = tensor_error(expected, found)
    return (error.max_abs if np.isfinite(error.max_abs) else 0.0), not error.finite


def _least(expected: NDArray[Any]) -> float:
    """What is allowed whatever the emulation says."""
    if expected.dtype.kind != "f":
        return _FLIPPED
    finite = np.abs(expected[np.isfinite(expected)])
    return FACTOR * _ULPS * float(finite.max()) if finite.size else 0.0
