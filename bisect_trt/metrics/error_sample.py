"""A few thousand output elements that stand for all: signed errors in units of the tolerance.

The search adds and subtracts such vectors to predict what a set of pins would do. Only real
evaluations, on all elements, decide; so a sample that misses an element costs an evaluation, never
correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import BLOCK, Arrays, flat, slices
from bisect_trt.metrics.decisions import EQUAL
from bisect_trt.metrics.requirements import Requirement, Requirements

Tolerance = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""Of elements, by the reference's values there and their places in the flat output."""

_HALF = 0.5
"""Integers that differ by less are the same."""

_MEAN_LIKE = frozenset({"mean_abs", "median_abs", "rmse", "cosine", "snr_db", "psnr_db"})
MEAN_NORM, _PEAK_NORM = 2.0, 8.0
"""Between the 2-norm, which ignores a single bad pixel, and the maximum, which sees nothing else
(measured on PP-OCRv4: norms 4, 8, 16 and beams of 1, 4 and 8; 8 with a beam of 4 found the smallest
sets in the fewest evaluations)."""


def prediction_order(requirements: Requirements) -> float:
    """The norm by which predicted errors are ranked: means look at all elements, peaks at few."""
    mean_like = all(item.metric in _MEAN_LIKE for item in requirements.items)
    return MEAN_NORM if mean_like else _PEAK_NORM


class ErrorSample:
    """Elements of one sample's outputs: half where ``candidate`` errs most, half at random
    (seeded).
    """

    def __init__(
        self, requirements: Requirements, reference: Arrays, candidate: Arrays, limit: int = 4096
    ) -> None:
        self._picks: list[
            tuple[
                str,
                tuple[int, ...],
                NDArray[np.int64],
                NDArray[np.float64],
                NDArray[np.float64],
            ]
        ] = []
        random = np.random.default_rng(0)
        share = max(1, limit // max(1, len(reference)))
        for name, array in reference.items():
            tolerance = _tolerance(requirements, name, array)
            if tolerance is None or array.size == 0:
                continue
            half = min(share // 2 + 1, array.size)
            worst = _worst(array, candidate[name], tolerance, half)
            chosen = random.choice(array.size, half, replace=False)
            index = np.unique(np.concatenate([worst, chosen]))
            ref = flat(array)[index].astype(np.float64)
            self._picks.append((name, array.shape, index, ref, tolerance(ref, index)))

    @property
    def size(self) -> int:
        """The number of elements over all outputs."""
        return sum(pick[2].size for pick in self._picks)

    def errors(self, outputs: Arrays) -> NDArray[np.float32]:
        """The signed errors of ``outputs`` at the chosen elements, in tolerances, shape (size,)."""
        parts = []
        for name, shape, index, reference, tolerance in self._picks:
            if outputs[name].shape != shape:  # no error can be told
                parts.append(np.full(index.size, np.nan, np.float32))
                continue
            values = outputs[name].ravel()[index].astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                parts.append(((values - reference) / tolerance).astype(np.float32))
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _worst(
    reference: NDArray[Any], candidate: NDArray[Any], tolerance: Tolerance, count: int
) -> NDArray[np.int64]:
    """The places where ``candidate`` uses most of the tolerance, ``count`` of them; the first ones
    where the shapes differ.
    """
    exact, given = flat(reference), flat(candidate)
    best, most = np.zeros(0, np.int64), np.zeros(0)
    for part in slices(exact.size, max(BLOCK, 4 * count)):
        ref = exact[part].astype(np.float64)
        used = np.zeros(ref.size)
        if reference.shape == candidate.shape:
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(given[part].astype(np.float64) - ref)
                places = np.arange(part.start, part.stop)
                used = np.nan_to_num(error / tolerance(ref, places), nan=0.0)
        used = np.concatenate([most, used])
        places = np.concatenate([best, np.arange(part.start, part.stop)])
        kept = np.argpartition(-used, min(count, used.size) - 1)[:count]
        best, most = places[kept], used[kept]
    return best


def _tolerance(requirements: Requirements, name: str, array: NDArray[Any]) -> Tolerance | None:
    """The tolerance of elements of an output; None if no requirement looks at it."""
    items = [i for i in requirements.items if i.is_on(name, array.dtype.kind)]
    if not items:
        return None
    spread, scale = _spread_and_scale(array)
    over_inputs = requirements.scales.get(name)
    seen = {item: _seen(item, array.shape) for item in items if item.part}

    def of(ref: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
        tightest = np.full(ref.size, np.inf)
        for item in items:
            if item.metric == "atol":
                allowed = item.limit + item.relative * np.abs(np.where(np.isfinite(ref), ref, 0.0))
            elif item.by_scale and over_inputs is not None:
                rms = over_inputs.of_places(array, places, scale)
                allowed = rms * _same_everywhere(item, 1.0, 1.0)
            else:
                allowed = np.full(ref.size, _same_everywhere(item, spread, scale))
            if item in seen:
                allowed = np.where(seen[item][places], allowed, np.inf)
            tightest = np.minimum(tightest, np.maximum(allowed, 1e-30))
        return tightest

    return of


def _seen(item: Requirement, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which elements of the flat output are in the slice that ``item`` looks at."""
    found = np.zeros(shape, bool)
    found[item.slices] = True
    return found.ravel()


def _same_everywhere(item: Requirement, spread: float, scale: float) -> float:
    """The tolerance that a condition on a whole output leaves each of its elements."""
    if item.metric == "rel_range":
        return item.limit * (spread or 1.0)
    if item.metric in ("max_abs", "mean_abs", "median_abs", "rmse"):
        return item.limit
    if item.metric == EQUAL:
        return _HALF
    if item.metric == "cosine":
        return scale * math.sqrt(2.0 * max(1.0 - item.limit, 0.0))
    if item.metric in ("snr_db", "psnr_db"):
        signal = scale if item.metric == "snr_db" else spread
        return signal * math.pow(10.0, min(max(-item.limit / 20.0, -30.0), 30.0))
    return scale or 1.0


def _spread_and_scale(array: NDArray[Any]) -> tuple[float, float]:
    """The range and the root of the mean square of the finite values; 1 where there is none."""
    values = flat(array)
    low, high, squares, count = math.inf, -math.inf, 0.0, 0
    for part in slices(values.size):
        block = values[part].astype(np.float64)
        finite = block[np.isfinite(block)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            squares, count = squares + float(np.sum(finite * finite)), count + finite.size
    return (high - low, math.sqrt(squares / count)) if count else (1.0, 1.0)
