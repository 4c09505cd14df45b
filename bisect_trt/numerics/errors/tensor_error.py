"""How far one tensor is from its reference, in the numbers people use.

Where the reference itself is not finite (a mask of -inf), an equal value is no error; anything else
there, and any new NaN or infinity, counts as non-finite and leaves the finite statistics to the
remaining elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.errors.block_sums import (
    BlockSums,
    applies_to,
    block_sums,
    dot,
    value_range,
)
from bisect_trt.numerics.errors.medians import median

NAN = float("nan")
SHAPE_CHANGED = -1

_INDEFINITE_BYTES = 4
"""Bytes of the integers that a float is cast to at once."""


@dataclass(frozen=True)
class TensorError:
    """The errors of one tensor on one sample, or the worst over several.

    ``max_abs``, ``mean_abs``, ``median_abs``, ``rmse`` are in the tensor's units; ``rel_range`` is
    ``max_abs`` over the reference's range; ``cosine`` is in [-1, 1]; ``snr_db`` is 10 log10(sum
    ref^2 / sum err^2), inf for no error; ``psnr_db`` is 20 log10(reference's range / rmse),
    likewise; ``ref_min`` and ``ref_max`` are of all that is finite in the reference, whatever
    became of it; ``nonfinite`` counts elements that are NaN or infinite without the reference being
    equal there (``SHAPE_CHANGED`` if the shapes differ, as outputs whose shape depends on values
    may); ``ref_nonfinite`` those of the reference itself, which the other numbers leave out.
    """

    max_abs: float
    mean_abs: float
    median_abs: float
    rmse: float
    rel_range: float
    cosine: float
    snr_db: float
    psnr_db: float
    nonfinite: int
    elements: int
    ref_min: float
    ref_max: float
    ref_nonfinite: int = 0

    @property
    def finite(self) -> bool:
        """True if nothing became NaN or infinite."""
        return self.nonfinite == 0

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name, with ``finite`` among them."""
        return {**asdict(self), "finite": self.finite}


def tensor_error(reference: NDArray[Any], candidate: NDArray[Any]) -> TensorError:
    """Compare two arrays; any numeric or boolean dtype, computed in float64. Another shape is an
    error without numbers.
    """
    if reference.shape != candidate.shape:
        return TensorError(
            NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, SHAPE_CHANGED, reference.size, NAN, NAN
        )
    lost = _lost(reference, candidate)
    if lost:
        return _of_nothing(lost, reference.size, NAN, NAN, 0)
    if applies_to(reference, candidate):
        return _of_sums(block_sums(reference, candidate), reference.size)
    ref, got = _as_float64(reference).ravel(), _as_float64(candidate).ravel()
    finite = np.isfinite(ref)
    ref_nonfinite = ref.size - int(np.count_nonzero(finite))
    low, high = value_range(ref if ref_nonfinite == 0 else ref[finite])
    usable = finite & np.isfinite(got)
    if usable.all():
        nonfinite = 0
    else:
        same = (ref == got) | (np.isnan(ref) & np.isnan(got))
        nonfinite = int(np.count_nonzero(~usable & ~same))
        ref, got = ref[usable], got[usable]
    if ref.size == 0:
        return _of_nothing(nonfinite, reference.size, low, high, ref_nonfinite)
    error = np.abs(got - ref)
    worst = float(error.max())
    spread = (high - low) or max(abs(high), abs(low))
    rmse = float(np.sqrt(np.mean(error * error)))
    return TensorError(
        max_abs=worst,
        mean_abs=float(error.mean()),
        median_abs=median(error),
        rmse=rmse,
        rel_range=_ratio(worst, spread),
        cosine=_cosine(ref, got) if worst > 0.0 else 1.0,
        snr_db=_snr_db(ref, error),
        psnr_db=_decibels(spread, rmse),
        nonfinite=nonfinite,
        elements=reference.size,
        ref_min=low,
        ref_max=high,
        ref_nonfinite=ref_nonfinite,
    )


def _lost(reference: NDArray[Any], candidate: NDArray[Any]) -> int:
    """How many integers were made of NaN or an infinity, where the reference's were not: a cast on
    x86 gives the smallest of their type then.
    """
    if candidate.dtype.kind != "i" or candidate.itemsize < _INDEFINITE_BYTES:
        return 0
    smallest = np.iinfo(candidate.dtype).min
    return int(np.count_nonzero((candidate == smallest) & (reference != smallest)))


def _of_nothing(
    nonfinite: int, elements: int, low: float, high: float, ref_nonfinite: int
) -> TensorError:
    """No element of either tensor is finite in both."""
    value, decibels, cosine = (NAN, NAN, NAN) if nonfinite else (0.0, float("inf"), 1.0)
    return TensorError(
        value,
        value,
        value,
        value,
        value,
        cosine,
        decibels,
        decibels,
        nonfinite,
        elements,
        low if low <= high else NAN,
        high if low <= high else NAN,
        ref_nonfinite,
    )


def _of_sums(sums: BlockSums, elements: int) -> TensorError:
    count = sums.errors.size
    if not count:
        return _of_nothing(sums.nonfinite, elements, sums.low, sums.high, sums.ref_nonfinite)
    spread = (sums.high - sums.low) or max(abs(sums.high), abs(sums.low))
    rmse = float(np.sqrt(sums.squares / count))
    norms = float(np.sqrt(sums.reference)) * float(np.sqrt(sums.candidate))
    # The products of equal values are a last bit off, and one may be zero everywhere.
    exact = sums.worst == 0.0
    cosine = 1.0 if exact else 0.0
    if norms and not exact:
        cosine = float(np.clip(sums.product / norms, -1.0, 1.0))
    return TensorError(
        max_abs=sums.worst,
        mean_abs=sums.error / count,
        median_abs=median(sums.errors),
        rmse=rmse,
        rel_range=_ratio(sums.worst, spread),
        cosine=cosine,
        snr_db=_decibels(float(np.sqrt(sums.reference)), float(np.sqrt(sums.squares))),
        psnr_db=_decibels(spread, rmse),
        nonfinite=sums.nonfinite,
        elements=elements,
        ref_min=sums.low,
        ref_max=sums.high,
        ref_nonfinite=sums.ref_nonfinite,
    )


_LARGER_IS_BETTER = frozenset({"cosine", "snr_db", "psnr_db"})


def worst_of(errors: Sequence[TensorError]) -> TensorError:
    """The worst of each number over several samples; counts add up, the range covers all."""
    return _combine(errors, np.nanmax, np.nanmin)


def mean_of(errors: Sequence[TensorError]) -> TensorError:
    """The mean of each number over several samples; counts add up, the range covers all."""
    return _combine(errors, np.nanmean, np.nanmean)


def _combine(errors: Sequence[TensorError], up: Any, down: Any) -> TensorError:
    if len(errors) == 1:
        return errors[0]
    values: dict[str, Any] = {}
    for item in fields(TensorError):
        column = np.asarray([getattr(e, item.name) for e in errors], np.float64)
        if item.name in ("nonfinite", "elements", "ref_nonfinite"):
            values[item.name] = SHAPE_CHANGED if column.min() < 0 else int(column.sum())
        elif np.isnan(column).all():
            values[item.name] = NAN
        elif item.name in ("ref_min", "ref_max"):
            values[item.name] = float(
                np.nanmin(column) if item.name == "ref_min" else np.nanmax(column)
            )
        else:
            values[item.name] = float((down if item.name in _LARGER_IS_BETTER else up)(column))
    return TensorError(**values)


def _as_float64(array: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(array).astype(np.float64)


def _ratio(value: float, over: float) -> float:
    if value == 0.0:
        return 0.0
    return value / over if over > 0.0 else float("inf")


_SAFE = 1e100
"""Squares of larger values, or of the reciprocals, may leave float64."""


def _cosine(ref: NDArray[np.float64], got: NDArray[np.float64]) -> float:
    ref_scale, got_scale = _peak(ref), _peak(got)
    if ref_scale == 0.0 or got_scale == 0.0:
        return 1.0 if ref_scale == got_scale else 0.0
    if not all(1.0 / _SAFE < scale < _SAFE for scale in (ref_scale, got_scale)):
        ref, got = ref / ref_scale, got / got_scale
    return float(np.clip(dot(ref, got) / (_norm(ref) * _norm(got)), -1.0, 1.0))


def _norm(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(dot(values, values)))


def _peak(values: NDArray[np.float64]) -> float:
    return max(float(values.max()), -float(values.min()))


def _snr_db(ref: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    return _decibels(_norm(ref), _norm(error))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return float("inf")
    return 20.0 * float(np.log10(signal / noise)) if signal > 0.0 else float("-inf")
