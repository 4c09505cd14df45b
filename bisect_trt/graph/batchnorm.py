"""BatchNormalization's constants, made ready for reduced precision: only one factor and one shift of each channel are rounded.

Where the types are reduced, TensorRT's parser does not fold the four constants; it subtracts the mean, divides by a rounded
deviation, multiplies and adds, all in the reduced type (read from the network that TensorRT for RTX 1.6's parser makes). Each
rounded constant is a systematic error of its channel, which averaging later on does not remove. So the deviation goes into the
factor, in float64 (dividing by the square root of 1 - epsilon + epsilon is exact), and the mean is rounded beforehand, with what
that moves made good by the shift. Subtracting the mean stays: where it is large, a product before it would be rounded coarsely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.graph.lowering import is_standard
from bisect_trt.numerics import LARGEST, rounded
from bisect_trt.precision import Precision

_SMALLEST_NORMAL = 2.0**-14
_DEFAULT_EPSILON = 1e-5


def folded_constants(
    graph: onnx.GraphProto, constants: Mapping[str, NDArray[np.float32]], precision: Precision
) -> dict[str, NDArray[np.float32]]:
    """For the constants that one BatchNormalization of ``graph`` alone reads: what it reads when lowered to ``precision``.

    A node is left as it is if a new constant leaves FP16's range, or a factor loses bits below its smallest normal number.
    """
    if not precision.is_storage:
        return {}
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(output.name for output in graph.output)
    folded: dict[str, NDArray[np.float32]] = {}
    for node in graph.node:
        if node.op_type != "BatchNormalization" or not is_standard(node) or len(node.input) != 5 or len(node.output) != 1:
            continue
        names = list(node.input[1:])
        if all(name in constants and readers[name] == 1 for name in names):
            folded.update(_folded(node, names, [constants[name].astype(np.float64) for name in names], precision))
    return folded


def _folded(
    node: onnx.NodeProto, names: list[str], values: list[NDArray[np.float64]], precision: Precision
) -> dict[str, NDArray[np.float32]]:
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), _DEFAULT_EPSILON)
    scale, shift, mean, variance = values
    if not (scale.shape == shift.shape == mean.shape == variance.shape) or (variance + epsilon <= 0.0).any():
        return {}
    factor = scale / np.sqrt(variance + epsilon)
    near = rounded(mean.astype(np.float32), precision).astype(np.float64)
    moved = shift - (mean - near) * factor
    size = np.abs(factor)
    peak = max(float(np.abs(v).max(initial=0.0)) for v in (factor, near, moved))
    if not peak <= LARGEST[Precision.FP16] or (size[size > 0.0] < _SMALLEST_NORMAL).any():
        return {}
    new = (factor, moved, near, np.full_like(variance, 1.0 - epsilon))
    return {name: value.astype(np.float32) for name, value in zip(names, new, strict=True)}
