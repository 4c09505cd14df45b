"""The error table of the layers, from one pass through the network for each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import thread_count
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.metrics.arrays import all_finite
from bisect_trt.metrics.errors import (
    TensorError,
    channel_peaks,
    mean_of,
    quartiles,
    tensor_error,
    worst_of,
)
from bisect_trt.runners.concurrency import HEADROOM_BYTES, side_by_side
from bisect_trt.runners.node_by_node import LayerValues
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("max_abs", "mean_abs", "rmse", "cosine", "snr_db"), math.nan),
    "finite": False,
    **dict.fromkeys(("introduced_max_abs", "introduced_snr_db", "ref_min", "ref_max"), math.nan),
    "introduced_finite": True,
    "overflows": False,
    "underflows": False,
}
"""The row of a layer after one that cannot be computed."""

_CHANNELS_SECOND = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "BatchNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "MaxPool",
        "AveragePool",
    }
)
"""Operators whose channels are their second axis whatever the rank."""

_ACCUMULATED = (
    *("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db"),
    *("finite", "nonfinite", "elements"),
)
_INTRODUCED = ("max_abs", "rmse", "rel_range", "snr_db")
_MEAN = ("max_abs", "rmse", "cosine")


def trace_layers(problem: Problem, context: Context, samples: Sequence[Sample]) -> pd.DataFrame:
    """A row for each layer in network order: its errors, and the range of its values in FP32.

    ``underflows`` marks layers whose infinities come from small values that became zero.
    """
    precision = problem.settings.precision
    digests = [sample.digest for sample in samples]
    key = context.evaluator.key("layer columns", precision.value, *digests)
    cached = context.cache.recall(key)
    columns: dict[str, list[Any]]
    if cached is not None:
        columns = cached[0]
    else:
        columns = _traced(problem, context, samples)
        context.cache.record([Row(key, "layers", columns)])
    layers = problem.layers
    names = {"layer": [x.name for x in layers], "op": [x.op for x in layers]}
    return pd.DataFrame({**names, "scope": [x.scope for x in layers], **columns})


def _traced(problem: Problem, context: Context, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The columns of numbers, each in the order of the layers."""
    plan = PrecisionPlan(problem.settings.precision, problem.source_fp32)
    found = {layer.name: _LayerErrors(len(samples)) for layer in problem.layers}
    ops = {layer.name: layer.op for layer in problem.layers}
    threads = thread_count(problem.settings.threads)
    expected = len(samples) * len(problem.layers)

    def measured(values: LayerValues) -> tuple[str, _Errors]:
        return values.layer, _Errors.of(values, ops[values.layer])

    def at_once(values: LayerValues) -> int:
        # Three executions' values, and about as much to compare them.
        return max(1, min(threads, HEADROOM_BYTES // max(1, 6 * values.reference.nbytes)))

    for number, sample in enumerate(samples):
        done = number * len(problem.layers)
        # Errors are computed beside the next layers, which leave cores idle.
        values_of_layers = _as_far_as_it_runs(context.emulator.trace(sample, plan))
        for layer, errors in side_by_side(measured, values_of_layers, at_once):
            found[layer].add(number, errors)
            done += 1
            context.observer.progress(min(done, expected), expected, layer)
    rows = [layer.row() for layer in found.values()]
    # A layer that could not be computed has no row of its own.
    names = dict.fromkeys((*_UNKNOWN, *(name for row in rows for name in row)))
    return {name: [row.get(name, _UNKNOWN.get(name, math.nan)) for row in rows] for name in names}


def _as_far_as_it_runs(trace: Iterator[LayerValues]) -> Iterator[LayerValues]:
    """``trace`` up to a layer that cannot be computed with rounded inputs."""
    with suppress(RunnerFailedError):
        yield from trace


@dataclass(frozen=True)
class _Errors:
    """The errors of one tensor of a layer on one sample; ``peaks`` are by channel.

    ``in_range``: what the layer reads and gives fits the range; None where its own values are
    finite.
    """

    accumulated: TensorError
    introduced: TensorError
    peaks: NDArray[np.float32]
    in_range: bool | None

    @classmethod
    def of(cls, values: LayerValues, op: str) -> _Errors:
        """Measure the ``values`` of a layer of operator ``op``."""
        reference = values.reference
        # Images have their channels second, sequences last.
        images = reference.ndim > 3 or op in _CHANNELS_SECOND
        return cls(
            tensor_error(reference, values.accumulated),
            tensor_error(reference, values.introduced),
            channel_peaks(reference, 1 if images else -1),
            None if all_finite(values.introduced) else values.in_range,
        )


class _LayerErrors:
    """The errors of a layer over the samples."""

    def __init__(self, samples: int) -> None:
        self._accumulated: list[list[TensorError]] = [[] for _ in range(samples)]
        self._introduced: list[list[TensorError]] = [[] for _ in range(samples)]
        self._overflows = self._underflows = False
        self._peaks: NDArray[np.float32] | None = None

    def add(self, number: int, errors: _Errors) -> None:
        """Add one more tensor of the layer, of the sample with that number."""
        self._accumulated[number].append(errors.accumulated)
        self._introduced[number].append(errors.introduced)
        peaks = errors.peaks
        # Inputs of other sizes may have other numbers of channels.
        if self._peaks is None:
            self._peaks = peaks
        elif self._peaks.shape == peaks.shape:
            self._peaks = np.maximum(self._peaks, peaks)
        # Infinite from inputs in range: a small value became zero, and something divides by it.
        if errors.in_range is not None:
            self._underflows |= errors.in_range
            self._overflows |= not errors.in_range

    def row(self) -> dict[str, Any]:
        """The errors, worst over the layer's tensors, then worst and mean over the samples."""
        if self._peaks is None:
            return {}
        worst, mean = (
            f([worst_of(e) for e in self._accumulated if e]) for f in (worst_of, mean_of)
        )
        own = worst_of([worst_of(e) for e in self._introduced if e])
        row: dict[str, Any] = {name: getattr(worst, name) for name in _ACCUMULATED}
        row |= {f"introduced_{name}": getattr(own, name) for name in _INTRODUCED}
        row |= {"introduced_finite": own.finite, "ref_min": worst.ref_min, "ref_max": worst.ref_max}
        row |= {f"mean_over_samples_{name}": getattr(mean, name) for name in _MEAN}
        row |= {"overflows": self._overflows, "underflows": self._underflows}
        return row | vars(quartiles(self._peaks))
