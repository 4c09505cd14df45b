"""The error table of the layers: the network gone through once a sample, cached as a whole."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import LARGE, thread_count
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
from bisect_trt.model.layers import Layer
from bisect_trt.runners.node_by_node import LayerValues
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_WAITING, _HELD, _HELD_BY_CORE, _HELD_BY_ONE = 32, 32 << 20, 4 << 20, 96 << 20
"""Layers, and bytes of their values, that are compared while the network goes on: ONNX Runtime's
arena never gives back what it held at once."""

_SMALL = 1 << 17
"""Bytes of a layer's values."""

_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("max_abs", "mean_abs", "rmse", "cosine", "snr_db"), math.nan),
    "finite": False,
    **dict.fromkeys(("introduced_max_abs", "introduced_snr_db", "ref_min", "ref_max"), math.nan),
    "introduced_finite": True,
    "overflows": False,
    "underflows": False,
}
"""Of a layer behind one that cannot be computed."""

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

_SHOWN = ("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db")


def trace_layers(problem: Problem, context: Context, samples: Sequence[Sample]) -> pd.DataFrame:
    """A row for each reduced layer in network order: the worst and mean accumulated errors over the
    samples, the introduced errors (prefix ``introduced_``) and the
    reference's range; ``underflows`` where values that are not finite come from small ones that
    became zero; how the reference's largest magnitudes spread over channels (``channel_peak_*``).

    Recalled from the cache where it is there.
    """
    precision = problem.settings.precision
    digests = [sample.digest for sample in samples]
    key = context.evaluator.key("layer columns", precision.value, "", *digests)
    found = context.cache.recall(key)
    columns: dict[str, list[Any]]
    if found is not None:
        columns = found[0]
    else:
        with ThreadPoolExecutor(thread_count()) as pool:
            columns = _traced(problem, context, samples, pool).columns(problem.layers)
        context.cache.record([Row(key, "layers", columns)])
    layers = problem.layers
    told = {"op": [x.op for x in layers], "scope": [x.scope for x in layers]}
    table = pd.DataFrame({"layer": [x.name for x in layers], **told, **columns})
    return table


def _traced(
    problem: Problem, context: Context, samples: Sequence[Sample], pool: Executor
) -> _Found:
    plan = PrecisionPlan(problem.settings.precision, problem.source_fp32)
    found = _Found(len(samples))
    ops = {layer.name: layer.op for layer in problem.layers}
    expected = len(samples) * len(problem.layers)
    for number, sample in enumerate(samples):
        traced = context.emulator.trace(sample, plan)
        done = number * len(problem.layers)
        waiting: deque[_Measured] = deque()
        for values in _until_failure(traced):
            waiting.append(_Measured(pool, values, _channel_axis(ops, values)))
            last = values.layer
            del values  # large, and the next layer's are made meanwhile
            while _too_many(waiting):
                found.add(number, waiting.popleft())
            done += 1
            context.observer.progress(min(done, expected), expected, last)
        for layer in waiting:
            found.add(number, layer)
    return found


def _too_many(waiting: Collection[_Measured]) -> bool:
    several = min(_HELD, _HELD_BY_CORE * thread_count())
    most = several if len(waiting) > 1 else _HELD_BY_ONE
    return len(waiting) > _WAITING or sum(layer.held for layer in waiting) > most


class _Measured:
    """A layer's errors while they are computed; ``held`` bytes of its values are in memory until
    then.
    """

    def __init__(self, pool: Executor, values: LayerValues, axis: int) -> None:
        self.layer, self.in_range = values.layer, values.in_range
        self.held = 3 * values.reference.nbytes
        histories = (values.accumulated, values.introduced)
        # Of values that large no two are gone through at a time: that would double what is held.
        # Of small ones a thread costs more than it spares.
        worth = _SMALL <= values.reference.nbytes < LARGE
        submit: Callable[..., Future[Any] | _Done] = pool.submit if worth else _at_once
        self.errors = [submit(tensor_error, values.reference, h) for h in histories]
        self.peaks = submit(channel_peaks, values.reference, axis)
        self.finite = submit(all_finite, values.introduced)


@dataclass(frozen=True)
class _Done:
    """What a future would give, without its lock: there are four of each of thousands of layers."""

    found: Any

    def result(self) -> Any:
        return self.found


def _at_once(work: Callable[..., Any], *arguments: Any) -> _Done:
    return _Done(work(*arguments))


class _Found:
    """What became of each layer over the samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._accumulated: dict[str, list[list[TensorError]]] = {}
        self._introduced: dict[str, list[list[TensorError]]] = {}
        self._overflows, self._underflows = set[str](), set[str]()
        # Many channels of thousands of layers are large: they are float32's, and let go early.
        self._peaks: dict[str, NDArray[np.float32]] = {}
        # Without their names, which are the same of all.
        self._rows: dict[str, tuple[Any, ...]] = {}
        self._names: tuple[str, ...] = ()
        self._current = (-1, "")

    def add(self, number: int, layer: _Measured) -> None:
        """One more tensor of a layer, of the sample with that number; waits for its errors."""
        before, self._current = self._current, (number, layer.layer)
        if before[0] == self._samples - 1 and before != self._current:
            self._end(before[1])  # no more tensors will come of it
        for table, error in zip((self._accumulated, self._introduced), layer.errors, strict=True):
            rows = table.setdefault(layer.layer, [[] for _ in range(self._samples)])
            rows[number].append(error.result())
        found = layer.peaks.result()
        seen = self._peaks.setdefault(layer.layer, found)
        if seen.shape == found.shape:
            np.maximum(seen, found, out=seen)
        if not layer.finite.result():
            (self._underflows if layer.in_range else self._overflows).add(layer.layer)

    def _end(self, layer: str) -> None:
        """Turn what there is of ``layer`` into its row."""
        row = (
            _row(self._accumulated.pop(layer), self._introduced.pop(layer))
            | {"overflows": layer in self._overflows, "underflows": layer in self._underflows}
            | vars(quartiles(self._peaks.pop(layer)))
        )
        self._names, self._rows[layer] = tuple(row), tuple(row.values())

    def columns(self, layers: Sequence[Layer]) -> dict[str, list[Any]]:
        """The numbers of each of ``layers``, by what they are; nothing is added any more. The rows
        are let go on the way.
        """
        for name in list(self._accumulated):
            self._end(name)
        unknown = dict.fromkeys((*_UNKNOWN, *self._names), math.nan) | _UNKNOWN
        columns: dict[str, list[Any]] = {name: [] for name in unknown}
        for layer in layers:
            row = dict(zip(self._names, self._rows.pop(layer.name, ()), strict=False))
            for what, value in (unknown | row).items():
                columns[what].append(value)
        return columns


def _channel_axis(ops: dict[str, str], values: LayerValues) -> int:
    """Images have their channels second, sequences last."""
    images = values.reference.ndim > 3 or ops.get(values.layer) in _CHANNELS_SECOND
    return 1 if images else -1


def _until_failure(rows: Iterator[LayerValues]) -> Iterator[LayerValues]:
    """The rows up to a layer that cannot be computed with rounded inputs; what follows has no
    errors to show.
    """
    try:
        yield from rows
    except RunnerFailedError:
        return


def _row(
    accumulated: list[list[TensorError]], introduced: list[list[TensorError]]
) -> dict[str, Any]:
    """The numbers of one layer: worst over its tensors, then worst and mean over the samples."""
    worst, mean = (f([worst_of(e) for e in accumulated if e]) for f in (worst_of, mean_of))
    own = worst_of([worst_of(e) for e in introduced if e])
    row: dict[str, Any] = {name: getattr(worst, name) for name in _SHOWN}
    row |= {"finite": worst.finite, "nonfinite": worst.nonfinite, "elements": worst.elements}
    row |= {
        f"introduced_{name}": getattr(own, name)
        for name in ("max_abs", "rmse", "rel_range", "snr_db")
    }
    row |= {"introduced_finite": own.finite, "ref_min": worst.ref_min, "ref_max": worst.ref_max}
    row |= {
        f"mean_over_samples_{name}": getattr(mean, name) for name in ("max_abs", "rmse", "cosine")
    }
    return row
