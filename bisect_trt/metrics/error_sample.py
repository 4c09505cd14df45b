"""Signed errors, in tolerances, at a few thousand elements that stand for all outputs.

The search adds and subtracts such vectors to predict a plan's error. Plans are judged on all
elements, so a bad sample costs evaluations, never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import BLOCK, Arrays, flat, slices
from bisect_trt.metrics.decisions import EQUAL
from bisect_trt.metrics.requirements import Requirement, Requirements

Tolerance = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""Gives the tolerance of elements from their reference values and places in the flat output."""

_MEAN_LIKE = frozenset({"mean_abs", "median_abs", "rmse", "cosine", "snr_db", "psnr_db"})


def prediction_order(requirements: Requirements) -> float:
    """The order of the norm by which predicted errors are ranked."""
    mean_like = all(item.metric in _MEAN_LIKE for item in requirements.items)
    # The 2-norm ignores a single bad pixel, and the maximum all others.
    return 2.0 if mean_like else 8.0


@dataclass(frozen=True)
class _Chosen:
    """Chosen elements of one output: their places in it flattened, reference and tolerance.

    ``real``: whether the output holds floats.
    """

    name: str
    shape: tuple[int, ...]
    places: NDArray[np.int64]
    reference: NDArray[np.float64]
    tolerance: NDArray[np.float64]
    real: bool

    def errors(self, output: NDArray[Any]) -> NDArray[np.float32]:
        """The signed errors in tolerances; NaN for an output of another shape."""
        if output.shape != self.shape:
            return np.full(self.places.size, np.nan, np.float32)
        values = flat(output)[self.places].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return ((values - self.reference) / self.tolerance).astype(np.float32)


class ErrorSample:
    """Elements of a sample's outputs: half where ``candidate`` is worst, half at random.

    At most ``limit`` of all outputs; ``block`` elements are looked at together.
    """

    def __init__(
        self,
        requirements: Requirements,
        reference: Arrays,
        candidate: Arrays,
        limit: int = 4096,
        block: int = BLOCK,
    ) -> None:
        self._chosen: list[_Chosen] = []
        random = np.random.default_rng(0)
        share = max(1, limit // max(1, len(reference)))
        for name, array in reference.items():
            tolerance = _tolerance(requirements, name, array)
            if tolerance is None or array.size == 0:
                continue
            half = min(share // 2 + 1, array.size)
            worst = _worst_places(array, candidate[name], tolerance, half, block)
            places = np.unique(np.concatenate([worst, random.choice(array.size, half, False)]))
            ref = flat(array)[places].astype(np.float64)
            allowed, real = tolerance(ref, places), array.dtype.kind == "f"
            self._chosen.append(_Chosen(name, array.shape, places, ref, allowed, real))

    @property
    def size(self) -> int:
        """The number of elements of all outputs."""
        return sum(chosen.places.size for chosen in self._chosen)

    def weights(self, factors: NDArray[np.float64]) -> dict[str, NDArray[np.float32]]:
        """The weights of all output elements whose errors sum to those chosen times ``factors``.

        ``factors`` has shape (size,). Outputs of integers and truth values have none.
        """
        found, start = {}, 0
        for chosen in self._chosen:
            end = start + chosen.places.size
            weights = np.zeros(chosen.shape, np.float32)
            flat(weights)[chosen.places] = factors[start:end] / chosen.tolerance
            if chosen.real:
                found[chosen.name] = weights
            start = end
        return found

    def errors(self, outputs: Arrays) -> NDArray[np.float32]:
        """The signed errors of ``outputs`` in tolerances, shape (size,)."""
        parts = [chosen.errors(outputs[chosen.name]) for chosen in self._chosen]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _worst_places(
    reference: NDArray[Any],
    candidate: NDArray[Any],
    tolerance: Tolerance,
    count: int,
    block: int,
) -> NDArray[np.int64]:
    """The ``count`` places with the largest errors in tolerances; any if the shapes differ."""
    exact, given = flat(reference), flat(candidate)
    worst, largest = np.zeros(0, np.int64), np.zeros(0)
    for part in slices(exact.size, max(block, 4 * count)):
        ref, places = exact[part].astype(np.float64), np.arange(part.start, part.stop)
        used = np.zeros(ref.size)
        if reference.shape == candidate.shape:
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(given[part].astype(np.float64) - ref)
                used = np.nan_to_num(error / tolerance(ref, places), nan=0.0)
        # Only the worst of all blocks so far are kept.
        worst, largest = np.concatenate([worst, places]), np.concatenate([largest, used])
        kept = np.argpartition(-largest, min(count, largest.size) - 1)[:count]
        worst, largest = worst[kept], largest[kept]
    return worst


def _tolerance(requirements: Requirements, name: str, array: NDArray[Any]) -> Tolerance | None:
    """The tolerance of an output's elements; None if no requirement is on it."""
    items = [i for i in requirements.items if i.is_on(name, array.dtype.kind)]
    if not items:
        return None
    spread, rms = _spread_and_rms(array)
    scale = requirements.scales.get(name)
    sliced = {item: _in_slice(item, array.shape) for item in items if item.part}

    def of(ref: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
        tightest = np.full(ref.size, np.inf)
        for item in items:
            if item.metric == "atol":
                allowed = item.limit + item.relative * np.abs(np.where(np.isfinite(ref), ref, 0.0))
            elif item.by_scale and scale is not None:
                allowed = scale.of_places(array, places, rms) * _everywhere(item, 1.0, 1.0)
            else:
                allowed = np.full(ref.size, _everywhere(item, spread, rms))
            if item in sliced:
                allowed = np.where(sliced[item][places], allowed, np.inf)
            tightest = np.minimum(tightest, np.maximum(allowed, 1e-30))
        return tightest

    return of


def _in_slice(item: Requirement, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which elements of the flat output are in the slice of ``item``."""
    inside = np.zeros(shape, bool)
    inside[item.slices] = True
    return inside.ravel()


def _everywhere(item: Requirement, spread: float, rms: float) -> float:
    """The tolerance of each element under a condition on the whole output."""
    if item.metric == "rel_range":
        return item.limit * (spread or 1.0)
    if item.metric in ("max_abs", "mean_abs", "median_abs", "rmse"):
        return item.limit
    if item.metric == EQUAL:
        return 0.5  # integers that differ by less are equal
    if item.metric == "cosine":
        # An error of size e at right angles to a reference of size rms gives 1 - e^2 / (2 rms^2).
        return rms * math.sqrt(2.0 * max(1.0 - item.limit, 0.0))
    if item.metric in ("snr_db", "psnr_db"):
        signal = rms if item.metric == "snr_db" else spread
        # Clipped, as powers of extreme limits leave float64.
        return signal * math.pow(10.0, min(max(-item.limit / 20.0, -30.0), 30.0))
    return rms or 1.0


def _spread_and_rms(array: NDArray[Any]) -> tuple[float, float]:
    """The range and the RMS of the finite values; 1 if there are none."""
    values = flat(array)
    low, high, squares, count = math.inf, -math.inf, 0.0, 0
    for part in slices(values.size):
        block = values[part].astype(np.float64)
        finite = block[np.isfinite(block)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            squares, count = squares + float(np.sum(finite * finite)), count + finite.size
    return (high - low, math.sqrt(squares / count)) if count else (1.0, 1.0)
