"""The error table of the layers: the network gone through once a sample, journalled as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.core.cores import thread_count
from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.memory import LARGE
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import evenly
from bisect_trt.numerics.block_sums import MANY
from bisect_trt.numerics.blocks import all_finite
from bisect_trt.numerics.channel_peaks import channel_peaks, quartiles
from bisect_trt.numerics.tensor_error import TensorError, mean_of, tensor_error, worst_of
from bisect_trt.probe.journal import Row
from bisect_trt.runners.emulator.node_by_node import LayerValues
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case

MOST_TRACED = 2
"""Each costs two inferences node by node: the table is made from so many inputs at most."""

_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("max_abs", "mean_abs", "rmse", "cosine", "snr_db"), math.nan),
    "finite": False,
    **dict.fromkeys(("introduced_max_abs", "introduced_snr_db", "ref_min", "ref_max"), math.nan),
    "introduced_finite": True,
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


def trace_layers(case: Case, bench: Bench) -> pd.DataFrame:
    """A row for each lowered layer in network order: the worst and mean accumulated errors over the
    samples (two of them at most), the introduced errors (prefix ``introduced_``) and the
    reference's range; ``underflows`` where values that are not finite come from small ones that
    became zero; how the reference's largest magnitudes spread over channels (``channel_peak_*``).

    Recalled from the journal where it is there.
    """
    precision = case.settings.precision
    how = "kernels" if bench.rtx_sums else ""
    digests = [sample.digest for sample in evenly(case.samples, MOST_TRACED)]
    key = bench.prober.key("layers", precision.value, how, *digests)
    found = bench.journal.recall(key)
    rows: dict[str, dict[str, Any]]
    if found is not None:
        rows = found[0]
    else:
        with ThreadPoolExecutor(min(2, thread_count())) as pool:
            rows = _traced(case, bench, pool)
        bench.journal.record([Row(key, "layers", rows)])
    records = [
        {"layer": x.name, "op": x.op, "scope": x.scope, **_UNKNOWN, **rows.get(x.name, {})}
        for x in case.layers
    ]
    return pd.DataFrame(records)


def _traced(case: Case, bench: Bench, pool: Executor) -> dict[str, dict[str, Any]]:
    plan = PrecisionPlan(case.settings.precision)
    samples = evenly(case.samples, MOST_TRACED)
    accumulated: dict[str, list[list[TensorError]]] = {}
    introduced: dict[str, list[list[TensorError]]] = {}
    underflows: dict[str, bool] = {}
    peaks: dict[str, NDArray[np.float64]] = {}
    ops = {layer.name: layer.op for layer in case.layers}
    expected = len(samples) * len(case.layers)
    for number, sample in enumerate(samples):
        traced = bench.emulator.trace(sample, plan, rtx_sums=bench.rtx_sums)
        done = number * len(case.layers)
        for values in _until_failure(traced):
            errors = _errors(pool, values)
            for table, error in zip((accumulated, introduced), errors, strict=True):
                table.setdefault(values.layer, [[] for _ in samples])[number].append(error)
            found = channel_peaks(values.reference, _channel_axis(ops, values))
            seen = peaks.setdefault(values.layer, found)
            if seen.shape == found.shape:
                np.maximum(seen, found, out=seen)
            if not all_finite(values.introduced):
                before = underflows.get(values.layer, True)
                underflows[values.layer] = before and values.in_range
            done += 1
            bench.observer.progress(done, expected, values.layer)
            del values  # large, and the next layer's are made meanwhile
    return {
        name: _row(accumulated[name], introduced[name])
        | {"underflows": underflows.get(name, False)}
        | vars(quartiles(peaks[name]))
        for name in accumulated
    }


def _errors(pool: Executor, values: LayerValues) -> list[TensorError]:
    """The accumulated and the introduced error, at the same time where that is worth it and memory
    allows it.
    """
    candidates = (values.accumulated, values.introduced)
    together = values.reference.size >= MANY and values.reference.nbytes < LARGE
    return list(
        (pool.map if together else map)(partial(tensor_error, values.reference), candidates)
    )


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
