"""What an output's errors are held against: its RMS over all inputs, group by group where one
tensor mixes scales, such as boxes in pixels beside scores.
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
from bisect_trt.metrics.errors import TensorError

APART = 100.0
"""Ratio of RMS values from which on neighbouring entries are of two scales."""

MAX_ENTRIES = 1000
MIN_VALUES = 16
"""An entry with fewer values per input has no RMS to speak of on that input."""

POSSIBLE = 0.01
"""What some probability reaches: beside it, a feature that is nearly dead is none."""

SEEN = 8
"""Values of an entry over all inputs that show it to be a probability: one may be by chance."""

BESIDE = 10.0
"""Ratio of RMS values from which on entries beside probabilities are of another scale."""

SILENT = 1e-3
"""Share of the RMS over all inputs that an input's own RMS counts as at least: a blank page or
silence asks for no error below what other inputs allow."""

NEGLIGIBLE = 1e-5
"""Share of the whole output's RMS that a group's counts as at least: below, FP32's own rounding of
the larger values decides."""


@dataclass(frozen=True)
class Scale:
    """``rms`` of each of ``groups`` over all inputs. Groups are entries along ``axis``; it is None
    and there is one group where the output is judged as a whole.
    """

    axis: int | None
    groups: tuple[tuple[int, ...], ...]
    rms: tuple[float, ...]

    def snr_db(self, reference: NDArray[Any], candidate: NDArray[Any], error: TensorError) -> float:
        """The worst group's signal to noise ratio in dB, infinite where nothing is off."""
        if self.axis is None or not self._fits(reference):
            signal = error.rmse * 10.0 ** (error.snr_db / 20.0) if error.rmse > 0.0 else 0.0
            return _decibels(signal, error.rmse, self.rms[0])
        found = math.inf
        for entries, rms in zip(self.groups, self.rms, strict=True):
            ref = np.take(reference, entries, self.axis).astype(np.float64)
            off = np.take(candidate, entries, self.axis).astype(np.float64)
            usable = np.isfinite(ref)
            ref, off = ref[usable], off[usable]
            if ref.size:
                noise = math.sqrt(float(np.mean((off - ref) ** 2)))
                signal = math.sqrt(float(np.mean(ref**2)))
                signal = max(signal, rms) if ref.size < MIN_VALUES else signal
                found = min(found, _decibels(signal, noise, rms))
        return found

    def of_places(
        self, reference: NDArray[Any], places: NDArray[np.int64], rms: float
    ) -> NDArray[np.float64]:
        """What each element is held against, shape (places,)."""
        if self.axis is None or not self._fits(reference):
            return np.full(places.size, max(rms, SILENT * self.rms[0]))
        along = np.empty(reference.shape[self.axis])
        for entries, of_group in zip(self.groups, self.rms, strict=True):
            along[list(entries)] = of_group
        return along[np.unravel_index(places, reference.shape)[self.axis]]

    def _fits(self, reference: NDArray[Any]) -> bool:
        entries = sum(map(len, self.groups))
        axis = self.axis
        return axis is not None and axis < reference.ndim and reference.shape[axis] == entries

    def as_json(self) -> dict[str, Any]:
        """For plan.json and run.json."""
        return {"axis": self.axis, "groups": [list(g) for g in self.groups], "rms": list(self.rms)}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Scale:
        """What :meth:`as_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        axis = told["axis"]
        groups = tuple(tuple(int(i) for i in group) for group in told["groups"])
        rms = tuple(float(value) for value in told["rms"])
        if not groups or len(groups) != len(rms):
            raise ValueError("a scale needs an RMS for each group")
        if not all(math.isfinite(value) and value >= 0.0 for value in rms):
            raise ValueError("an RMS is a number, and not negative")
        entries = sorted(entry for group in groups for entry in group)
        if axis is not None and (axis < 1 or entries != list(range(len(entries)))):
            raise ValueError("each entry of an axis is in one group")
        return Scale(None if axis is None else int(axis), groups, rms)


def _decibels(signal: float, noise: float, over_inputs: float) -> float:
    signal = max(signal, SILENT * over_inputs)
    if noise == 0.0:
        return math.inf
    return 20.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


@dataclass
class _Sums:
    """What is added up of the entries along one axis."""

    squares: NDArray[np.float64]
    count: NDArray[np.float64]
    fewest: float
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def rms(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.sqrt(self.squares / np.maximum(self.count, 1.0))
        return found

    def rms_of(self, entries: Sequence[int]) -> float:
        """Of several entries together."""
        chosen = list(entries)
        count = max(float(self.count[chosen].sum()), 1.0)
        return math.sqrt(float(self.squares[chosen].sum()) / count)


def measure_scales(
    references: Iterable[Arrays], static: Mapping[str, Sequence[bool]]
) -> dict[str, Scale]:
    """The scale of each float output over all inputs.

    The axis with the widest gap between entries' RMS values is split, where a gap is a hundredfold.
    Entries that all lie in [0, 1] are probabilities, hence of one scale, and a class that never
    occurs is none of its own; where all other entries are ten times as large, they are a group.
    The batch (axis 0) is never split, nor an axis that is not static, nor one with more than 1,000
    entries. Entries of fewer than 16 values per input are split from probabilities alone, and these
    are known by eight values over all inputs. Those that are zero throughout belong to the smallest
    group.
    """
    whole: dict[str, tuple[float, int]] = {}
    sums: dict[str, dict[int, _Sums]] = {}
    for outputs in references:
        for name, array in outputs.items():
            if array.dtype.kind != "f":
                continue
            values = np.where(np.isfinite(array), array, 0).astype(np.float64)
            squares, count = whole.get(name, (0.0, 0))
            usable = int(np.count_nonzero(np.isfinite(array)))
            whole[name] = (squares + float(np.sum(values * values)), count + usable)
            fixed = static.get(name, ())
            axes = [
                axis
                for axis in range(1, array.ndim)
                if len(fixed) == array.ndim and fixed[axis] and _may_be_split(array, axis)
            ]
            known = sums.setdefault(name, {axis: _nothing(array.shape[axis]) for axis in axes})
            for axis in list(known):
                if axis in axes and array.shape[axis] == known[axis].squares.size:
                    _add(known[axis], values, axis)
                else:
                    del known[axis]
    found = {}
    for name, (squares, count) in whole.items():
        rms = math.sqrt(squares / max(count, 1))
        found[name] = _split(sums[name], rms) or Scale(None, ((),), (rms,))
    return found


def _may_be_split(array: NDArray[Any], axis: int) -> bool:
    entries = array.shape[axis]
    return bool(2 <= entries <= MAX_ENTRIES and array.size >= entries)


def _nothing(entries: int) -> _Sums:
    return _Sums(
        np.zeros(entries),
        np.zeros(entries),
        math.inf,
        np.full(entries, np.inf),
        np.full(entries, -np.inf),
    )


def _add(sums: _Sums, values: NDArray[np.float64], axis: int) -> None:
    others = tuple(a for a in range(values.ndim) if a != axis)
    sums.squares += np.sum(values * values, axis=others)
    each = values.size / values.shape[axis]
    sums.count += each
    sums.fewest = min(sums.fewest, each)
    sums.low = np.minimum(sums.low, values.min(axis=others))
    sums.high = np.maximum(sums.high, values.max(axis=others))


def _split(sums: Mapping[int, _Sums], whole: float) -> Scale | None:
    """The groups along the axis with the widest gap; None where no gap is wide enough."""
    best: tuple[float, Scale] | None = None
    for axis, its in sums.items():
        groups, widest = _grouped(its)
        if len(groups) == 1 or (best is not None and widest <= best[0]):
            continue
        held_to = [max(its.rms_of(g), NEGLIGIBLE * whole) for g in groups]
        best = (widest, Scale(axis, tuple(tuple(sorted(g)) for g in groups), tuple(held_to)))
    return best[1] if best is not None else None


def _grouped(its: _Sums) -> tuple[list[list[int]], float]:
    """Entries by scale, the smallest first, and the widest gap between two of them."""
    rms = its.rms
    order = [int(i) for i in np.argsort(rms, kind="stable")]
    likely = (its.low >= 0.0) & (its.high <= 1.0)
    groups, widest = [[order[0]]], 0.0
    for before, entry in pairwise(order):
        ratio = rms[entry] / rms[before] if rms[before] > 0.0 else 0.0
        if ratio >= APART and its.fewest >= MIN_VALUES and not (likely[before] and likely[entry]):
            groups.append([])
            widest = max(widest, float(ratio))
        groups[-1].append(entry)
    chances = [i for i in order if likely[i]]
    gap = float(rms[~likely].min(initial=np.inf)) / max(its.rms_of(chances), 1e-300)
    some = bool((its.high[likely] >= POSSIBLE).any()) and its.count.min() >= SEEN
    if some and not likely.all() and gap >= BESIDE:
        others = [[i for i in group if not likely[i]] for group in groups]
        groups, widest = [chances, *filter(None, others)], max(widest, gap)
    return groups, widest
