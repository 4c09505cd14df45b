"""How far two tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays, flat, slices


def farthest_apart(exact: Arrays, answers: Sequence[Arrays]) -> tuple[str, float]:
    """The output on which two of ``answers`` differ most, and by how much of the reference's range."""
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


MANY = 1 << 16
"""Elements from which on tensors are walked over."""

_BLOCK = 1 << 16
"""Elements of a block: what fits the processor's cache takes half the time of all at once (tried:
1 << 14 to 1 << 20)."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class BlockSums:
    """Sums in float64 over the elements that are finite in both tensors; ``low`` and ``high`` are
    of those that are finite in the reference.

    ``errors`` are the absolute errors of those, float32 and in no order; ``nonfinite`` counts
    elements that are not finite without the reference being equal there.
    """

    errors: NDArray[np.float32]
    low: float = np.inf
    high: float = -np.inf
    worst: float = 0.0
    error: float = 0.0
    squares: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    nonfinite: int = 0
    ref_nonfinite: int = 0


def applies_to(reference: NDArray[Any], candidate: NDArray[Any]) -> bool:
    """Whether the two are large, and of types whose squares float64 and errors float32 holds."""
    exact = any(a.dtype.kind in "iu" and a.itemsize > 2 for a in (reference, candidate))
    small = max(reference.itemsize, candidate.itemsize) <= 4
    return reference.size >= MANY and small and not exact


def value_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """The smallest and the largest of ``values``; inf and -inf where there is none."""
    return (float(values.min()), float(values.max())) if values.size else (np.inf, -np.inf)


def dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The sum of products of two arrays of one dimension."""
    # einsum, not np.dot: BLAS wakes its threads, which costs more than they save here.
    return float(np.einsum("i,i->", one, other))


def block_sums(reference: NDArray[Any], candidate: NDArray[Any]) -> BlockSums:
    """The sums over two tensors of one shape, of any numeric or boolean types up to 32 bits."""
    sums = BlockSums(np.empty(reference.size, np.float32))
    exact, given, used = flat(reference), flat(candidate), 0
    # The same memory for each block: fresh pages for each cost more than the sums.
    room = np.empty((2, min(exact.size, _BLOCK)))
    for part in slices(exact.size, _BLOCK):
        ref, got = room[:, : part.stop - part.start]
        np.copyto(ref, exact[part], casting="unsafe")
        np.copyto(got, given[part], casting="unsafe")
        reference_square, candidate_square = dot(ref, ref), dot(got, got)
        low, high = value_range(ref)
        if not np.isfinite(reference_square + candidate_square):  # squares of 32 bits fit
            finite = np.isfinite(ref)
            sums.ref_nonfinite += ref.size - int(np.count_nonzero(finite))
            low, high = value_range(ref[finite])
            usable = finite & np.isfinite(got)
            same = (ref == got) | (np.isnan(ref) & np.isnan(got))
            sums.nonfinite += int(np.count_nonzero(~usable & ~same))
            ref, got = ref[usable], got[usable]
            reference_square, candidate_square = dot(ref, ref), dot(got, got)
        sums.low, sums.high = min(sums.low, low), max(sums.high, high)
        if not ref.size:
            continue
        sums.reference += reference_square
        sums.candidate += candidate_square
        sums.product += dot(ref, got)
        got -= ref
        error = np.abs(got, out=got)
        largest = float(error.max())
        fits = largest <= _LARGEST
        sums.errors[used : used + ref.size] = error if fits else np.minimum(error, _LARGEST)
        used += ref.size
        sums.worst = max(sums.worst, largest)
        sums.error += float(error.sum())
        sums.squares += dot(error, error)
    sums.errors = sums.errors[:used]
    return sums


@dataclass(frozen=True)
class ChannelPeaks:
    """The quartiles of the channels' largest magnitudes, in the tensor's units, and the channel
    with the largest of all; NaN and -1 where there are no channels.
    """

    channels: int = 0
    channel_peak_min: float = math.nan
    channel_peak_p25: float = math.nan
    channel_peak_p50: float = math.nan
    channel_peak_p75: float = math.nan
    channel_peak_max: float = math.nan
    worst_channel: int = -1


def channel_peaks(array: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """The largest magnitude of each channel along ``axis``, (channels,) float32, in the tensor's
    units; values that are not finite are left out. Empty for a tensor of less than two axes, or
    without elements.
    """
    if array.ndim < 2 or not array.size:
        return np.empty(0, np.float32)
    others = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
    sizes = np.abs(array)
    peaks = sizes.max(axis=others)
    if not np.isfinite(peaks).all():
        peaks = np.where(np.isfinite(sizes), sizes, 0.0).max(axis=others)
    return np.asarray(peaks, np.float32)


def quartiles(peaks: NDArray[np.float32]) -> ChannelPeaks:
    """What :func:`channel_peaks` gave, (channels,), in five numbers."""
    if not peaks.size:
        return ChannelPeaks()
    ordered = np.sort(peaks).tolist()
    low, first, middle, third, high = (_quantile(ordered, q) for q in (0.0, 0.25, 0.5, 0.75, 1.0))
    return ChannelPeaks(peaks.size, low, first, middle, third, high, int(peaks.argmax()))


def _quantile(ordered: list[float], share: float) -> float:
    """As NumPy's, linear between neighbours, in a tenth of its time: its cost is that of a call."""
    place = share * (len(ordered) - 1)
    below = int(place)
    one, other = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    part = place - below
    return other - (other - one) * (1.0 - part) if part >= 0.5 else one + (other - one) * part


_FEW, _SAMPLED = 1 << 15, 1 << 12
_ASIDE = 20
"""The bracket holds the sample's middle tenth: its ends are six standard deviations of a random
sample's median away."""


def median(values: NDArray[Any]) -> float:
    """As ``np.median``; puts ``values`` into another order.

    Of many, a sample's middle brackets it, what lies below is counted, and only what lies between
    is partitioned, as in Floyd and Rivest, "Expected time bounds for selection" (1975): a third of
    the time of partitioning all, and a fiftieth where many values are equal, as errors that are
    zero. Where the sample deceives, all are partitioned.
    """
    half, odd = values.size // 2, values.size % 2 == 1
    if values.size >= _FEW:
        # An odd stride: an even one meets the same columns of an image in every row.
        sample = np.sort(values[:: values.size // _SAMPLED | 1])
        middle, aside = sample.size // 2, sample.size // _ASIDE
        low, high = sample[middle - aside], sample[middle + aside]
        up_to_low, up_to_high = values <= low, values <= high
        place = half - int(np.count_nonzero(up_to_low))
        if place < 0 and int(np.count_nonzero(values < low)) < half:
            return float(low)
        if place >= 0 and half < int(np.count_nonzero(up_to_high)):
            # What is equal to the lower end is left out: partitions are slow where much is.
            up_to_high ^= up_to_low
            return _middle(values[up_to_high], place, odd, float(low))
    return _middle(values, half, odd)


def _middle(values: NDArray[Any], place: int, odd: bool, before: float = math.nan) -> float:
    """The value at ``place`` were they sorted, or its mean with the one before; that is ``before``
    where none is.
    """
    # np.median sorts out two places at once, which takes ten times as long.
    values.partition(place)
    if odd:
        return float(values[place])
    last = float(values[:place].max()) if place else before
    return (last + float(values[place])) / 2.0


@dataclass(frozen=True)
class RowsApart:
    """``apart`` is the largest difference between two rows, in the array's units, infinite where
    not all of them are finite; ``rows`` are the numbers of those that are not, or else of those
    farthest from the median of all.
    """

    apart: float
    rows: tuple[int, ...]


def rows_apart(array: NDArray[Any]) -> RowsApart:
    """The rows of ``array`` (first axis, one row at least; any float dtype) held against each
    other: element by element, equal infinities and NaN in all of them being no difference.
    """
    values = array.astype(np.float64).reshape(len(array), -1)
    missing = np.isnan(values)
    equal = (values == values[:1]) | (missing & missing[:1])
    values = values[:, ~equal.all(axis=0)]
    if values.size == 0:
        return RowsApart(0.0, ())
    broken = np.asarray(~np.isfinite(values).all(axis=1))
    if broken.any():
        return RowsApart(math.inf, _numbers(broken))
    distances = np.abs(values - np.median(values, axis=0)).max(axis=1)
    farthest = distances >= distances.max() * (1.0 - 1e-9)
    return RowsApart(float(np.ptp(values, axis=0).max()), _numbers(farthest))


def _numbers(chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(chosen))


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
