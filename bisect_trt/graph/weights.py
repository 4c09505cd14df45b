"""Constants that do not survive the target format: named before anything runs, because the cause is then known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from bisect_trt.graph.layers import list_layers
from bisect_trt.graph.rewrite import float_constants
from bisect_trt.numerics import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.precision import Precision


@dataclass(frozen=True)
class Finding:
    """Something a reviewer should know: ``kind`` for machines, ``layer`` or tensor it is about, one sentence."""

    kind: str
    where: str
    message: str


def weight_findings(model: onnx.ModelProto, precision: Precision) -> list[Finding]:
    """A finding for each constant read by a layer that overflows, or partly vanishes, in FP16 or BF16."""
    if not precision.is_storage:
        return []
    readers: dict[str, str] = {}
    for layer in list_layers(model):
        for name in layer.inputs:
            readers.setdefault(name, layer.name)
    findings = []
    for name, array in float_constants(model.graph).items():
        if name not in readers or array.size == 0:
            continue
        size = np.abs(array)
        largest = float(size.max())
        if largest > LARGEST[precision]:
            what = "a mask or weight" if largest >= 1e30 else "a weight"
            findings.append(
                Finding(
                    "weight-overflow",
                    readers[name],
                    f"constant {name!r} of layer {readers[name]!r} holds {largest:.3g}: {what} beyond "
                    f"{precision}'s {LARGEST[precision]:.6g} becomes infinite",
                )
            )
        vanishing = int(np.count_nonzero((size > 0) & (size < SMALLEST_SUBNORMAL[precision] / 2)))
        if vanishing:
            findings.append(
                Finding(
                    "weight-underflow",
                    readers[name],
                    f"constant {name!r} of layer {readers[name]!r}: {vanishing} of {array.size} values are below half of "
                    f"{precision}'s smallest number, {SMALLEST_SUBNORMAL[precision]:.3g}, and become zero",
                )
            )
    return findings
