"""A few thousand output elements that stand for all: signed errors in units of the tolerance.

The search adds and subtracts such vectors to predict what a set of pins would do. Only real probes,
on all elements, decide; so a sample that misses an element costs a probe, never correctness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.requirements import Requirements

Arrays = Mapping[str, NDArray[Any]]

_MEAN_LIKE = frozenset({"mean_abs", "median_abs", "rmse", "cosine", "snr_db", "psnr_db"})
MEAN_NORM, _PEAK_NORM = 2.0, 8.0
"""Between the 2-norm, which ignores a single bad pixel, and the maximum, which sees nothing else
(measured on PP-OCRv4: norms 4, 8, 16 and beams of 1, 4 and 8; 8 with a beam of 4 found the smallest
sets in the fewest probes)."""


def prediction_order(requirements: Requirements) -> float:
    """The norm by which predicted errors are ranked: means look at all elements, peaks at few."""
    mean_like = all(item.metric in _MEAN_LIKE for item in requirements.items)
    return MEAN_NORM if mean_like else _PEAK_NORM


class ErrorSample:
    """Elements of one sample's outputs: half where ``candidate`` errs most, half at random
    (seeded).

    Args:
        requirements: say what an error is measured in, and which outputs count.
        reference: arrays by output name.
        candidate: the same outputs with everything lowered.
        limit: about how many elements to choose over all outputs.
    """

    def __init__(
        self, requirements: Requirements, reference: Arrays, candidate: Arrays, limit: int = 4096
    ) -> None:
        self._picks: list[
            tuple[str, NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]
        ] = []
        random = np.random.default_rng(0)
        share = max(1, limit // max(1, len(reference)))
        for name, array in reference.items():
            tolerance = _tolerance(requirements, name, array)
            if tolerance is None or array.size == 0:
                continue
            ref = array.astype(np.float64).ravel()
            used = np.zeros(ref.size)
            if candidate[name].shape == array.shape:
                with np.errstate(invalid="ignore", over="ignore"):
                    error = np.abs(candidate[name].astype(np.float64).ravel() - ref)
                    used = np.nan_to_num(error / tolerance, nan=0.0)
            half = min(share // 2 + 1, ref.size)
            worst = np.argpartition(-used, half - 1)[:half]
            chosen = random.choice(ref.size, half, replace=False)
            index = np.unique(np.concatenate([worst, chosen]))
            self._picks.append((name, index, ref[index], tolerance[index]))

    @property
    def size(self) -> int:
        """The number of elements over all outputs."""
        return sum(pick[1].size for pick in self._picks)

    def errors(self, outputs: Arrays) -> NDArray[np.float32]:
        """The signed errors of ``outputs`` at the chosen elements, in tolerances, shape (size,)."""
        parts = []
        for name, index, reference, tolerance in self._picks:
            if outputs[name].size <= index[-1]:  # its shape changed: no error can be told
                parts.append(np.full(index.size, np.nan, np.float32))
                continue
            values = outputs[name].ravel()[index].astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                parts.append(((values - reference) / tolerance).astype(np.float32))
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _tolerance(
    requirements: Requirements, name: str, array: NDArray[Any]
) -> NDArray[np.float64] | None:
    """The tolerance of each element of an output, None if no requirement looks at it."""
    ref = array.astype(np.float64).ravel()
    finite = ref[np.isfinite(ref)]
    spread = float(np.ptp(finite)) if finite.size else 1.0
    scale = float(np.sqrt(np.mean(finite * finite))) if finite.size else 1.0
    tightest: NDArray[np.float64] | None = None
    for item in requirements.items:
        if item.output not in (None, name):
            continue
        if item.metric == "atol":
            tolerance = item.limit + item.relative * np.abs(np.where(np.isfinite(ref), ref, 0.0))
        elif item.metric == "rel_range":
            tolerance = np.full(ref.size, item.limit * (spread or 1.0))
        elif item.metric in ("max_abs", "mean_abs", "median_abs", "rmse"):
            tolerance = np.full(ref.size, item.limit)
        elif item.metric == "cosine":
            tolerance = np.full(ref.size, scale * np.sqrt(2.0 * max(1.0 - item.limit, 0.0)))
        elif item.metric in ("snr_db", "psnr_db"):
            signal = scale if item.metric == "snr_db" else spread
            tolerance = np.full(
                ref.size, signal * 10.0 ** float(np.clip(-item.limit / 20.0, -30.0, 30.0))
            )
        else:
            tolerance = np.full(ref.size, scale or 1.0)
        tolerance = np.maximum(tolerance, 1e-30)
        tightest = tolerance if tightest is None else np.minimum(tightest, tolerance)
    return tightest
