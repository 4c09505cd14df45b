"""Large weights in place of which seeded ones may stand: a reproducer can then make them itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, numpy_helper

from bisect_trt.graph.files.save import take_in, weights_size
from bisect_trt.graph.tensors.tensor_values import array_of, size_of

_LARGE = 4096
"""Elements; smaller constants (scales, variances, shapes) mean something, and cost little."""

_MOST, _BLOCK = 256 << 20, 1 << 20
"""Bytes that are drawn at most, and elements at a time."""


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
        random, found = np.random.RandomState(self.seed), np.empty(self.size, self.dtype)
        for first in range(0, self.size, _BLOCK):
            part = found[first : first + _BLOCK]
            drawn = random.standard_normal(part.size) * self.deviation + self.mean
            # By way of FP32, as a typed model's constants are converted.
            part[:] = drawn.astype(np.float32)
        return found


def worth_drawing(model: onnx.ModelProto, most_left: int) -> bool:
    """Whether what :func:`with_seeded_weights` leaves of the weights takes ``most_left`` bytes at
    most, and what it draws is no more than a script draws in seconds. Nothing is read.
    """
    drawn = sum(size_of(t) for t in model.graph.initializer if _is_large(t))
    return drawn <= _MOST and weights_size(model) - drawn <= most_left


def with_seeded_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` whose large FP32 initialisers are drawn, and how."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    for tensor in copy.graph.initializer:
        if not _is_large(tensor):
            continue
        array = array_of(tensor)
        if not np.isfinite(array).all():
            continue
        seeded = Seeded(
            tensor.name, len(found), array.size, float(array.mean()), float(array.std())
        )
        values = seeded.values().reshape(array.shape)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        found.append(seeded)
    return copy, tuple(found)


def _is_large(tensor: TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT and size_of(tensor) >= 4 * _LARGE


def kept_apart(
    model: onnx.ModelProto, seeded: Sequence[Seeded], location: str
) -> tuple[onnx.ModelProto, tuple[Seeded, ...]]:
    """A copy of ``model`` that reads its seeded weights from a file, and those in the file's order;
    ``model`` itself where there are none.

    Args:
        model: with the weights inside, maybe as FP16 and under other names.
        seeded: how they were drawn.
        location: the file's name, beside the model.
    """
    if not seeded:
        return model, ()
    by_content = {}
    for weights in seeded:
        for dtype in ("float32", "float16"):
            typed = replace(weights, dtype=dtype)
            by_content[_digest(typed.values().data)] = typed
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[Seeded] = []
    offset = 0
    for tensor in copy.graph.initializer:
        drawn = by_content.get(_digest(tensor.raw_data))
        if drawn is None:
            take_in(tensor)  # a reproducer goes to another machine
            continue
        length = size_of(tensor)
        external_data_helper.set_external_data(tensor, location, offset=offset, length=length)
        tensor.ClearField("raw_data")
        found.append(replace(drawn, name=tensor.name))
        offset += length
    return copy, tuple(found)


def _digest(values: memoryview | bytes) -> bytes:
    return hashlib.sha256(values).digest()
