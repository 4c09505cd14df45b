"""What pins cost in memory traffic: an estimate where no engine was built to be measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import evenly
from bisect_trt.stations.baselines.traced_inputs import MOST_TRACED
from bisect_trt.stations.case.case import Case


def relative_bytes(case: Case, table: pd.DataFrame, plan: PrecisionPlan) -> float:
    """The bytes that all layers read and write under ``plan``, in those of everything lowered: 1
    without pins, 2 with all of them. NaN where the precision changes no storage, or a layer's size
    is not known.

    Args:
        case: the layers and their constants.
        table: a row a layer, with the ``elements`` of its outputs over the traced samples.
        plan: whose pins read and write four bytes an element, the other layers two.
    """
    if not plan.base.is_storage or "elements" not in table:
        return math.nan
    sizes = _sizes(case, table)
    lowered = under = 0.0
    for layer in case.layers:
        count = sum(sizes.get(tensor, 0.0) for tensor in (*layer.inputs, *layer.outputs))
        lowered += 2.0 * count
        under += (4.0 if layer.name in plan.pinned else 2.0) * count
    return under / lowered if lowered else math.nan


def _sizes(case: Case, table: pd.DataFrame) -> Mapping[str, float]:
    """The elements of each tensor that a layer gives, or finds in the file or an input."""
    traced = evenly(case.samples, MOST_TRACED)
    sizes: dict[str, float] = {n: float(a.size) for n, a in case.graph.float_constants.items()}
    for name in traced[0].arrays:
        counted = [s.arrays[name] for s in traced]
        sizes[name] = sum(a.size for a in counted if a.dtype.kind == "f") / len(traced)
    elements = dict(zip(table["layer"], table["elements"], strict=True))
    for layer in case.layers:
        for tensor in layer.outputs:
            sizes[tensor] = float(elements[layer.name]) / len(traced) / len(layer.outputs)
    return sizes
