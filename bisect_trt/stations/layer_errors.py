"""The error table of the layers: one walk over the network a sample, journalled as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.layers import Layer
from bisect_trt.numerics.tensor_error import TensorError, mean_of, tensor_error, worst_of
from bisect_trt.probe.journal import RunFolder
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulator.runner import EmulatedRunner, LayerValues

_SHOWN = ("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db")


def trace_layers(
    runner: EmulatedRunner,
    samples: Sequence[Sample],
    plan: PrecisionPlan,
    layers: Sequence[Layer],
    folder: RunFolder,
    key: str,
    observer: Observer,
    kernels: bool = False,
) -> pd.DataFrame:
    """A row for each lowered layer in network order: the worst and mean accumulated errors over the
    samples, the introduced errors (prefix ``introduced_``) and the reference's range. Recalled from
    the journal under ``key``. ``kernels`` asks for the sums of TensorRT for RTX.
    """
    found = folder.recall(key)
    if found is None:
        accumulated: dict[str, list[list[TensorError]]] = {}
        introduced: dict[str, list[list[TensorError]]] = {}
        for number, sample in enumerate(samples):
            for count, values in enumerate(
                _until_failure(runner.trace(sample, plan, kernels=kernels))
            ):
                for table, candidate in (
                    (accumulated, values.accumulated),
                    (introduced, values.introduced),
                ):
                    per_sample = table.setdefault(values.layer, [[] for _ in samples])
                    per_sample[number].append(tensor_error(values.reference, candidate))
                observer.progress(
                    number * len(layers) + count + 1, len(samples) * len(layers), values.layer
                )
        rows: dict[str, dict[str, Any]] = {
            name: _row(accumulated[name], introduced[name]) for name in accumulated
        }
        folder.record(key, "layers", rows)
    else:
        rows = found[0]
    by_name = {layer.name: layer for layer in layers}
    records = [
        {"layer": name, "op": by_name[name].op, "scope": by_name[name].scope, **row}
        for name, row in rows.items()
        if name in by_name
    ]
    return pd.DataFrame(records)


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
    row: dict[str, Any] = {name: asdict(worst)[name] for name in _SHOWN}
    row |= {"finite": worst.finite, "nonfinite": worst.nonfinite, "elements": worst.elements}
    row |= {
        f"introduced_{name}": asdict(own)[name]
        for name in ("max_abs", "rmse", "rel_range", "snr_db")
    }
    row |= {"introduced_finite": own.finite, "ref_min": worst.ref_min, "ref_max": worst.ref_max}
    row |= {
        f"mean_over_samples_{name}": asdict(mean)[name] for name in ("max_abs", "rmse", "cosine")
    }
    return row


def suspicion_of(table: pd.DataFrame, alone: Mapping[str, float] | None = None) -> dict[str, float]:
    """How suspicious each layer is: by what it does alone where that was measured, else by the
    error it introduces.

    Non-finite values come first; the scale only orders.
    """
    suspicion = {}
    for row in table.to_dict(orient="records"):
        value = -float(row["introduced_snr_db"]) if row["introduced_finite"] else 1e6
        measured = alone.get(str(row["layer"])) if alone else None
        if measured is not None:
            value = 1e9 if math.isinf(measured) else 1e3 + 20.0 * math.log10(max(measured, 1e-9))
        suspicion[str(row["layer"])] = -1e9 if math.isnan(value) or value == -math.inf else value
    return suspicion
