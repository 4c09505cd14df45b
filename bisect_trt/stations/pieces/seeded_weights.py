"""Large weights in place of which seeded ones may stand: a reproducer can then make them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, numpy_helper

from bisect_trt.graph.files.save import take_in
from bisect_trt.graph.tensors.tensor_values import array_of

_LARGE = 4096
"""Elements; smaller constants (scales, variances, shapes) mean something, and cost little."""


@dataclass(frozen=True)
class Seeded:
    """An initialiser drawn with NumPy's ``RandomState(seed)``, whose numbers never change: normal,
    of the mean and deviation of what it replaces; ``dtype`` is float32 or float16.
    """

    name: str
    seed: int
    size: int
    mean: float
    deviation: float
    dtype: str = "float32"

    def values(self) -> NDArray[Any]:
        """Of shape (``size``,)."""
        drawn = np.random.RandomState(self.seed).standard_normal(self.size)
        # By way of FP32, as a typed model's constants are converted.
        return (drawn * self.deviation + self.mean).astype(np.float32).astype(self.dtype)


def with_seeded_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` whose large FP32 initialisers are drawn, and how."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    for tensor in copy.graph.initializer:
        array = array_of(tensor) if tensor.data_type == TensorProto.FLOAT else None
        if array is None or array.size < _LARGE or not np.isfinite(array).all():
            continue
        seeded = Seeded(
            tensor.name, len(found), array.size, float(array.mean()), float(array.std())
        )
        values = seeded.values().reshape(array.shape)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        found.append(seeded)
    return copy, tuple(found)


def kept_apart(
    model: onnx.ModelProto, seeded: Sequence[Seeded], location: str
) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` that reads its seeded weights from a file, and those in the file's order.

    Args:
        model: with the weights inside, maybe as FP16 and under other names.
        seeded: how they were drawn.
        location: the file's name, beside the model.
    """
    by_content = {}
    for weights in seeded:
        for dtype in ("float32", "float16"):
            typed = replace(weights, dtype=dtype)
            by_content[typed.values().tobytes()] = typed
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    offset = 0
    for tensor in copy.graph.initializer:
        if tensor.raw_data not in by_content:
            take_in(tensor)  # a reproducer goes to another machine
            continue
        weights = by_content[tensor.raw_data]
        length = len(tensor.raw_data)
        external_data_helper.set_external_data(tensor, location, offset=offset, length=length)
        tensor.ClearField("raw_data")
        found.append(replace(weights, name=tensor.name))
        offset += length
    return copy, tuple(found)
