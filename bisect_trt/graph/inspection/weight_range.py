"""Constants that do not survive the target format: named before anything runs, because the cause is
then known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.finding import VANISHING, Finding
from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph, as_graph
from bisect_trt.graph.tensors.mapped_files import let_go
from bisect_trt.numerics.blocks import flat, slices
from bisect_trt.numerics.rounding import LARGEST, SMALLEST_SUBNORMAL


def weight_findings(model: onnx.ModelProto | Graph, precision: Precision) -> list[Finding]:
    """A finding for each constant read by a layer that overflows, or partly vanishes, in FP16 or
    BF16.
    """
    if not precision.is_storage:
        return []
    graph = as_graph(model)
    readers: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.inputs:
            readers.setdefault(name, []).append(layer.name)
    findings = []
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        for kind, problem in _problems(array, precision) if array.size else ():
            for reader in readers[name]:
                findings.append(
                    Finding(kind, reader, f"constant {name!r} of layer {reader!r} {problem}")
                )
    return findings


def _problems(array: NDArray[np.float32], precision: Precision) -> Iterator[tuple[str, str]]:
    """(kind, what is wrong) for what ``array`` loses in ``precision``."""
    largest, vanishing = 0.0, 0
    values = flat(array)
    for part in slices(values.size, 1 << 16):
        size = np.abs(values[part])
        # What is infinite (a mask, the bound of a maximum) is so in any precision.
        finite = values[part][np.isfinite(size)]
        ends = (float(finite.min(initial=0.0)), float(finite.max(initial=0.0)))
        largest = max(largest, *ends, key=abs)
        lost = (size > 0) & (size < SMALLEST_SUBNORMAL[precision] / 2)
        vanishing += int(np.count_nonzero(lost))
    let_go(array)
    if abs(largest) > LARGEST[precision]:
        what = "a mask or weight" if abs(largest) >= 1e30 else "a weight"
        yield (
            "weight-overflow",
            f"holds {largest:.3g}: {what} beyond {precision}'s {LARGEST[precision]:.6g} becomes "
            "infinite",
        )
    if vanishing:
        yield (
            VANISHING,
            f"holds {vanishing} of {array.size} values below half of {precision}'s smallest "
            "number, "
            f"{SMALLEST_SUBNORMAL[precision]:.3g}, which become zero",
        )
