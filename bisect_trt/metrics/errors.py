"""Errors between two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays, flat, slices

SHAPE_CHANGED = -1
"""The ``nonfinite`` of a tensor with another shape than the reference."""

LARGER_IS_BETTER = frozenset({"cosine", "snr_db", "psnr_db"})


@dataclass(frozen=True)
class TensorError:
    """The errors of one tensor on one sample, or the worst over several.

    ``max_abs``, ``mean_abs``, ``median_abs``, ``rmse``: in the tensor's unit.
    ``rel_range``: ``max_abs`` over the reference's range.
    ``cosine``: the cosine similarity, in [-1, 1].
    ``snr_db``: 10 log10(sum ref^2 / sum err^2); infinite without error.
    ``psnr_db``: 20 log10(reference's range / rmse); infinite without error.
    ``nonfinite``: elements that are NaN or infinite, and not equal to the reference;
    :data:`SHAPE_CHANGED` if the shapes differ.
    ``elements``: all of the tensor.
    ``ref_min``, ``ref_max``: the range of the reference's finite values.
    ``ref_nonfinite``: NaN and infinities of the reference; other numbers leave them out.
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
        """Whether nothing became NaN or infinite."""
        return self.nonfinite == 0

    def as_dict(self) -> dict[str, Any]:
        """The fields and ``finite`` by name."""
        return {**asdict(self), "finite": self.finite}


@dataclass
class _Sums:
    """Sums over the elements that are finite in both tensors, block by block.

    ``low`` and ``high`` are the range of the reference's finite elements.
    """

    errors: NDArray[Any]
    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    worst: float = 0.0
    error: float = 0.0
    squares: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    nonfinite: int = 0
    ref_nonfinite: int = 0

    def add(self, ref: NDArray[np.float64], got: NDArray[np.float64]) -> None:
        """Add a block; overwrites ``got``."""
        ref_finite, squares = ref, (_dot(ref, ref), _dot(got, got))
        # NaN and infinities show in the sums, so that most blocks need no masks.
        if not math.isfinite(sum(squares)):
            finite = np.isfinite(ref)
            usable = finite & np.isfinite(got)
            same = (ref == got) | (np.isnan(ref) & np.isnan(got))
            self.nonfinite += int(np.count_nonzero(~usable & ~same))
            self.ref_nonfinite += int(np.count_nonzero(~finite))
            ref_finite, ref, got = ref[finite], ref[usable], got[usable]
            squares = (_dot(ref, ref), _dot(got, got))
        self.low = min(self.low, float(ref_finite.min(initial=math.inf)))
        self.high = max(self.high, float(ref_finite.max(initial=-math.inf)))
        self.reference += squares[0]
        self.candidate += squares[1]
        self.product += _dot(ref, got)
        got -= ref
        error = np.abs(got, out=got)
        self.worst = max(self.worst, float(error.max(initial=0.0)))
        self.error += float(error.sum())
        self.squares += _dot(error, error)
        # An error may be twice the largest number of its type.
        largest = np.finfo(self.errors.dtype).max
        self.errors[self.count : self.count + error.size] = np.minimum(error, largest)
        self.count += error.size


def tensor_error(reference: NDArray[Any], candidate: NDArray[Any]) -> TensorError:
    """The errors of ``candidate``, computed in float64; without numbers if the shapes differ."""
    size = reference.size
    if reference.shape != candidate.shape:
        return _without_numbers(SHAPE_CHANGED, size)
    lost = _lost_integers(reference, candidate)
    if lost:
        return _without_numbers(lost, size)
    # Errors are kept in float32 for the median, unless the type is wider: to save memory.
    sums = _Sums(np.empty(size, np.promote_types(reference.dtype, np.float32)))
    exact, given = flat(reference), flat(candidate)
    for part in slices(size, 1 << 16):  # fits the processor's cache
        sums.add(exact[part].astype(np.float64), given[part].astype(np.float64))
    low, high = (sums.low, sums.high) if sums.low <= sums.high else (math.nan, math.nan)
    if not sums.count and sums.nonfinite:
        return _without_numbers(sums.nonfinite, size, low, high, sums.ref_nonfinite)
    spread = (high - low) or max(abs(high), abs(low))
    rmse = math.sqrt(sums.squares / max(sums.count, 1))
    norms = math.sqrt(sums.reference) * math.sqrt(sums.candidate)
    # The quotient of equal tensors is a last bit off 1, and that of zeros is undefined.
    cosine = 1.0 if sums.worst == 0.0 else 0.0
    if norms and sums.worst > 0.0:
        cosine = float(np.clip(sums.product / norms, -1.0, 1.0))
    return TensorError(
        max_abs=sums.worst,
        mean_abs=sums.error / max(sums.count, 1),
        median_abs=median(sums.errors[: sums.count]),
        rmse=rmse,
        rel_range=_ratio(sums.worst, spread),
        cosine=cosine,
        snr_db=decibels(math.sqrt(sums.reference), math.sqrt(sums.squares)),
        psnr_db=decibels(spread, rmse),
        nonfinite=sums.nonfinite,
        elements=size,
        ref_min=low,
        ref_max=high,
        ref_nonfinite=sums.ref_nonfinite,
    )


def _without_numbers(
    nonfinite: int,
    elements: int,
    low: float = math.nan,
    high: float = math.nan,
    ref_nonfinite: int = 0,
) -> TensorError:
    return TensorError(
        max_abs=math.nan,
        mean_abs=math.nan,
        median_abs=math.nan,
        rmse=math.nan,
        rel_range=math.nan,
        cosine=math.nan,
        snr_db=math.nan,
        psnr_db=math.nan,
        nonfinite=nonfinite,
        elements=elements,
        ref_min=low,
        ref_max=high,
        ref_nonfinite=ref_nonfinite,
    )


def _lost_integers(reference: NDArray[Any], candidate: NDArray[Any]) -> int:
    """The number of integers that were cast from NaN or an infinity."""
    # A cast on x86 to 32 bits or more gives the type's smallest integer then.
    if candidate.dtype.kind != "i" or candidate.itemsize < 4:
        return 0
    smallest = np.iinfo(candidate.dtype).min
    return int(np.count_nonzero((candidate == smallest) & (reference != smallest)))


def _dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    # Not np.dot: waking BLAS's threads costs more than they save on a block.
    return float(np.einsum("i,i->", one, other))


def _ratio(value: float, over: float) -> float:
    if value == 0.0:
        return 0.0
    return value / over if over > 0.0 else math.inf


def decibels(signal: float, noise: float) -> float:
    """20 log10(signal / noise); infinite without noise, -infinite without signal."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise
    return 20.0 * math.log10(ratio) if ratio > 0.0 else -math.inf


def median(errors: NDArray[Any]) -> float:
    """The median of non-negative values; reorders ``errors``."""
    # Zeros are only counted: a partition is slow where many values are equal.
    zeros = errors.size - int(np.count_nonzero(errors))
    place = errors.size // 2 - zeros
    if place < 0 or not errors.size:
        return 0.0
    rest = errors[errors > 0.0] if zeros else errors
    rest.partition(place)
    upper = float(rest[place])
    return upper if errors.size % 2 else (float(rest[:place].max(initial=0.0)) + upper) / 2.0


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
    for name in (item.name for item in fields(TensorError)):
        column = np.asarray([getattr(e, name) for e in errors], np.float64)
        if name in ("nonfinite", "elements", "ref_nonfinite"):
            values[name] = SHAPE_CHANGED if column.min() < 0 else int(column.sum())
        elif np.isnan(column).all():
            values[name] = math.nan
        elif name in ("ref_min", "ref_max"):
            values[name] = float((np.nanmin if name == "ref_min" else np.nanmax)(column))
        else:
            values[name] = float((down if name in LARGER_IS_BETTER else up)(column))
    return TensorError(**values)


@dataclass(frozen=True)
class ChannelPeaks:
    """The quartiles of the channels' largest magnitudes, and the channel with the largest.

    They are in the tensor's unit; NaN and -1 without channels.
    """

    channels: int = 0
    channel_peak_min: float = math.nan
    channel_peak_p25: float = math.nan
    channel_peak_p50: float = math.nan
    channel_peak_p75: float = math.nan
    channel_peak_max: float = math.nan
    worst_channel: int = -1


def channel_peaks(array: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """The largest finite magnitude of each channel along ``axis``; empty for less than two axes."""
    if array.ndim < 2 or not array.size:
        return np.empty(0, np.float32)
    others = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
    sizes = np.abs(array)
    peaks = sizes.max(axis=others)
    if not np.isfinite(peaks).all():
        peaks = np.where(np.isfinite(sizes), sizes, 0.0).max(axis=others)
    return np.asarray(peaks, np.float32)


def quartiles(peaks: NDArray[np.float32]) -> ChannelPeaks:
    """The quartiles of what :func:`channel_peaks` gives."""
    if not peaks.size:
        return ChannelPeaks()
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    low, first, middle, third, high = np.quantile(peaks.astype(np.float64), shares).tolist()
    return ChannelPeaks(peaks.size, low, first, middle, third, high, int(peaks.argmax()))


def farthest_apart(exact: Arrays, answers: Sequence[Arrays]) -> tuple[str, float]:
    """The output that differs most between ``answers``, and the difference over its range."""
    spreads = {
        name: _spread(reference, [answer[name] for answer in answers])
        for name, reference in exact.items()
    }
    name = max(spreads, key=spreads.__getitem__, default="")
    return (name, spreads[name]) if name and spreads[name] > 0.0 else ("", 0.0)


def _spread(reference: NDArray[Any], answers: Sequence[NDArray[Any]]) -> float:
    """The largest distance between two ``answers`` at one element, over the reference's range."""
    first = answers[0]
    if any(other.shape != first.shape for other in answers):
        return math.inf
    # Strings are equal or not; bfloat16 has NumPy's kind V and two bytes.
    if first.dtype.kind not in "fiub" and first.dtype.itemsize != 2:
        return 0.0 if all(np.array_equal(first, other) for other in answers) else math.inf
    least = most = first.astype(np.float64)
    missing = np.isnan(least)
    for other in answers[1:]:
        values = other.astype(np.float64)
        if bool(np.any(np.isnan(values) != missing)):
            return math.inf
        least, most = np.minimum(least, values), np.maximum(most, values)
    with np.errstate(invalid="ignore"):
        gap = float(np.where((least == most) | missing, 0.0, most - least).max(initial=0.0))
    values = reference[np.isfinite(reference)] if reference.dtype.kind == "f" else reference
    span = float(np.ptp(values.astype(np.float64))) if values.size else 0.0
    return gap / span if span > 0.0 else gap
