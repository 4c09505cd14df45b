"""The scale of each output, its RMS over all inputs, to which errors are relative.

An output that mixes scales, such as boxes in pixels beside scores, is judged group by group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import TensorError, decibels

SCALE_RATIO = 100.0
"""Entries whose sorted RMS values differ by this factor are of two scales."""

MIN_VALUES_PER_INPUT = 16
"""Fewer values of an entry give no RMS on a single input."""

SILENT_SHARE = 1e-3
"""The least RMS of an input over that of all inputs, so that silence allows some error."""


@dataclass(frozen=True)
class Scale:
    """The RMS of each group of entries along ``axis``, over all inputs.

    ``axis`` is None, and there is one group, where the output is judged as a whole.
    """

    axis: int | None
    groups: tuple[tuple[int, ...], ...]
    rms: tuple[float, ...]

    def snr_db(self, reference: NDArray[Any], candidate: NDArray[Any], error: TensorError) -> float:
        """The worst group's signal to noise ratio in dB; infinite without error."""
        if self.axis is None or not self._fits(reference):
            signal = error.rmse * 10.0 ** (error.snr_db / 20.0) if error.rmse > 0.0 else 0.0
            return decibels(max(signal, SILENT_SHARE * self.rms[0]), error.rmse)
        found = math.inf
        for entries, rms in zip(self.groups, self.rms, strict=True):
            ref = np.take(reference, entries, self.axis).astype(np.float64)
            off = np.take(candidate, entries, self.axis).astype(np.float64)
            usable = np.isfinite(ref)
            ref, off = ref[usable], off[usable]
            if ref.size:
                noise = math.sqrt(float(np.mean((off - ref) ** 2)))
                signal = math.sqrt(float(np.mean(ref**2)))
                least = rms if ref.size < MIN_VALUES_PER_INPUT else SILENT_SHARE * rms
                found = min(found, decibels(max(signal, least), noise))
        return found

    def of_places(
        self, reference: NDArray[Any], places: NDArray[np.int64], rms: float
    ) -> NDArray[np.float64]:
        """The scale of each element, shape (places,)."""
        if self.axis is None or not self._fits(reference):
            return np.full(places.size, max(rms, SILENT_SHARE * self.rms[0]))
        along = np.empty(reference.shape[self.axis])
        for entries, of_group in zip(self.groups, self.rms, strict=True):
            along[list(entries)] = of_group
        return along[np.unravel_index(places, reference.shape)[self.axis]]

    def _fits(self, reference: NDArray[Any]) -> bool:
        entries = sum(map(len, self.groups))
        return self.axis is not None and reference.shape[self.axis : self.axis + 1] == (entries,)

    def as_json(self) -> dict[str, Any]:
        """The scale as plan.json and run.json have it."""
        return {"axis": self.axis, "groups": [list(g) for g in self.groups], "rms": list(self.rms)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Scale:
        """Read what :meth:`as_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no scale.
        """
        axis = data["axis"]
        groups = tuple(tuple(int(i) for i in group) for group in data["groups"])
        rms = tuple(float(value) for value in data["rms"])
        if not groups or len(groups) != len(rms):
            raise ValueError("a scale needs an RMS for each group")
        if not all(math.isfinite(value) and value >= 0.0 for value in rms):
            raise ValueError("an RMS is a number, and not negative")
        entries = sorted(entry for group in groups for entry in group)
        if axis is not None and (axis < 1 or entries != list(range(len(entries)))):
            raise ValueError("each entry of an axis is in one group")
        return Scale(None if axis is None else int(axis), groups, rms)


class _Sums:
    """Sums over all inputs for each entry along one axis.

    ``count``: values of an entry; ``fewest``: the least of them on one input.
    """

    def __init__(self, entries: int) -> None:
        self.squares = np.zeros(entries)
        self.count = 0.0
        self.fewest = math.inf
        self.low = np.full(entries, np.inf)
        self.high = np.full(entries, -np.inf)

    def add(self, values: NDArray[np.float64], axis: int) -> None:
        """Add one input's output."""
        others = tuple(a for a in range(values.ndim) if a != axis)
        each = values.size / values.shape[axis]
        self.squares += np.sum(values * values, axis=others)
        self.count += each
        self.fewest = min(self.fewest, each)
        self.low = np.minimum(self.low, values.min(axis=others))
        self.high = np.maximum(self.high, values.max(axis=others))

    def rms_of(self, entries: Sequence[int]) -> float:
        """The RMS of several entries together."""
        squares = float(self.squares[list(entries)].sum())
        return math.sqrt(squares / max(self.count * len(entries), 1.0))


def measure_scales(
    references: Iterable[Arrays], static: Mapping[str, Sequence[bool]]
) -> dict[str, Scale]:
    """The scale of each float output over all inputs.

    An output is split into groups along the axis with the widest gap between the entries' RMS. A
    gap is a factor of :data:`SCALE_RATIO`, or of 10 beside probabilities: entries within [0, 1].
    """
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    sums: dict[str, dict[int, _Sums]] = {}
    for outputs in references:
        for name, array in outputs.items():
            if array.dtype.kind != "f":
                continue
            finite = np.isfinite(array)
            values = np.where(finite, array, 0).astype(np.float64)
            squares[name] = squares.get(name, 0.0) + float(np.sum(values * values))
            counts[name] = counts.get(name, 0) + int(np.count_nonzero(finite))
            axes = _axes_to_split(array, static.get(name, ()))
            by_axis = sums.setdefault(name, {axis: _Sums(array.shape[axis]) for axis in axes})
            for axis in list(by_axis):
                # An axis whose length differs between the inputs is not split.
                if axis in axes and array.shape[axis] == by_axis[axis].squares.size:
                    by_axis[axis].add(values, axis)
                else:
                    del by_axis[axis]
    scales = {}
    for name, total in squares.items():
        rms = math.sqrt(total / max(counts[name], 1))
        scales[name] = _split(sums[name], rms) or Scale(None, ((),), (rms,))
    return scales


def _axes_to_split(array: NDArray[Any], static: Sequence[bool]) -> list[int]:
    """The static axes of 2 to 1,000 entries, without the batch."""
    if len(static) != array.ndim or not array.size:
        return []
    entries = array.shape
    return [a for a in range(1, array.ndim) if static[a] and 2 <= entries[a] <= 1000]


def _split(sums: Mapping[int, _Sums], whole_rms: float) -> Scale | None:
    """The groups along the axis with the widest gap; None if no gap is wide enough."""
    best, best_gap = None, 0.0
    for axis, axis_sums in sums.items():
        groups, gap = _grouped(axis_sums)
        if len(groups) > 1 and gap > best_gap:
            # Below 1e-5 of the whole, FP32's rounding of the larger values decides.
            rms = tuple(max(axis_sums.rms_of(g), 1e-5 * whole_rms) for g in groups)
            best, best_gap = Scale(axis, tuple(tuple(sorted(g)) for g in groups), rms), gap
    return best


def _grouped(sums: _Sums) -> tuple[list[list[int]], float]:
    """The entries by scale, the smallest first, and the widest gap between two of them."""
    rms = np.sqrt(sums.squares / max(sums.count, 1.0))
    order = [int(i) for i in np.argsort(rms, kind="stable")]
    # Probabilities are of one scale: a class that never occurs is no group of its own.
    likely = (sums.low >= 0.0) & (sums.high <= 1.0)
    large = sums.fewest >= MIN_VALUES_PER_INPUT
    groups, widest = [[order[0]]], 0.0
    for before, entry in pairwise(order):
        # An entry that is zero throughout belongs to the smallest group.
        ratio = rms[entry] / rms[before] if rms[before] > 0.0 else 0.0
        if large and ratio >= SCALE_RATIO and not (likely[before] and likely[entry]):
            groups.append([])
            widest = max(widest, float(ratio))
        groups[-1].append(entry)
    probabilities = [i for i in order if likely[i]]
    if not probabilities or likely.all() or sums.count < 8:  # fewer are in [0, 1] by chance
        return groups, widest
    gap = float(rms[~likely].min()) / max(sums.rms_of(probabilities), 1e-300)
    # Features that never reach 0.01 are nearly dead, and no probabilities.
    if gap >= 10.0 and sums.high[likely].max() >= 0.01:
        others = [[i for i in group if not likely[i]] for group in groups]
        return [probabilities, *filter(None, others)], max(widest, gap)
    return groups, widest
