"""Operators that TensorRT's parser writes as several FP16 layers, where the emulator has one with
FP32 inside: what leaves FP16's range between them is seen by an engine alone.

What is made of each was read from the network that TensorRT for RTX 1.6.1.120 parses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from bisect_trt.core.finding import WRITTEN_OUT, Finding
from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.layers import Layer
from bisect_trt.numerics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_LOG_LARGEST = math.log(LARGEST[Precision.FP16])
_LOG_SMALLEST = math.log(SMALLEST_SUBNORMAL[Precision.FP16] / 2.0)
"""Below it an exponential is rounded to zero."""

_LARGEST_SQUARED = math.sqrt(LARGEST[Precision.FP16])


def holding_stepped(case: Case, bench: Bench, layers: pd.DataFrame) -> Case | None:
    """``case`` with the layers held in FP32 of which a step between leaves FP16's range on the
    given inputs; None where there is none. Of one that must stay reduced it is said.

    Args:
        case: the model and its inputs.
        bench: hears of it.
        layers: the table of layers, with the range of the reference.
    """
    if case.settings.precision is not Precision.FP16:
        return None
    held = set[str]()
    for layer, why in _stepped(case, layers):
        steps = f"TensorRT computes {layer.name} ({layer.op}) in several FP16 steps: {why}"
        if layer.name in case.held_low:
            said = f"{steps}; --lower keeps it there, so let an engine judge"
            bench.note(Finding(WRITTEN_OUT, layer.name, said, True))
            continue
        held.add(layer.name)
        bench.note(Finding("held", layer.name, f"{steps}; it is kept in FP32"))
    if not held:
        return None
    return replace(case, held_pins=case.held_pins | held, unfit=case.unfit | held)


def _stepped(case: Case, layers: pd.DataFrame) -> Iterator[tuple[Layer, str]]:
    low = dict(zip(layers["layer"], layers["ref_min"], strict=True))
    high = dict(zip(layers["layer"], layers["ref_max"], strict=True))
    made_by = {tensor: layer.name for layer in case.layers for tensor in layer.outputs}
    for layer in case.layers:
        if layer.name in case.held_pins or layer.name not in low:
            continue
        why = ""
        if layer.op == "LogSoftmax" and low[layer.name] < _LOG_SMALLEST:
            why = f"a probability becomes 0, and its logarithm, {low[layer.name]:.4g} here, -inf"
        elif layer.op in ("ReduceLogSumExp", "ReduceLogSum") and high[layer.name] > _LOG_LARGEST:
            why = f"the sum, of which {high[layer.name]:.4g} is the logarithm, becomes infinite"
        elif layer.op == "LpNormalization":
            largest = _largest_read(case, layer, made_by, low, high)
            if largest > _LARGEST_SQUARED:
                why = f"the square of {largest:.4g} becomes infinite"
        if why:
            yield layer, why


def _largest_read(
    case: Case,
    layer: Layer,
    made_by: Mapping[str, str],
    low: Mapping[str, float],
    high: Mapping[str, float],
) -> float:
    """The largest magnitude of what ``layer`` reads, 0 where nobody knows."""
    tensor = layer.inputs[0]
    maker = made_by.get(tensor)
    if maker is not None and maker in low:
        return max(abs(low[maker]), abs(high[maker]))
    given = case.samples[0].arrays.get(tensor)
    return float(np.max(np.abs(given), initial=0.0)) if given is not None else 0.0
