"""How TensorRT for RTX computes single layers in FP16, as far as it could be reproduced bit for
bit.

Seen on an H100 with version 1.6.1.120, layer by layer against the engine
(``benchmarks/arithmetic.py``): matrix products and convolutions keep their sums in FP16, rounded
after every 16 terms, as a tensor core's FP16 accumulator does, and a bias is added to the rounded
sum. Spatial convolutions sum blocks of 32 channels one after the other, place by place within a
block; few channels are padded to a power of two, so that a rounding covers several places. A
BatchNormalization's constants become one scale and one shift, each rounded. A HardSigmoid's slope
is rounded, and so are a Softmax's exponentials and their sum. Depthwise convolutions and means sum
in FP32, as the emulator does. Forms that were not reproduced are left to the emulator.

Arrays are float32 and hold FP16 values, as everywhere in the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.core.precision import Precision
from bisect_trt.graph.passes.emulated import rounding_model
from bisect_trt.runners.ort_sessions import piece_session

Array = NDArray[np.float32]

TERMS = 16
"""The products that one tensor-core instruction adds before its FP16 result is rounded."""

_BLOCK, _FEW = 32, 8
"""Channels that a spatial convolution sums one after the other, and up to how many it pads
instead.
"""


@cache
def _rounding() -> ort.InferenceSession:
    return piece_session(rounding_model(Precision.FP16).SerializeToString(), 1)


def half(values: Array) -> Array:
    """Rounded to FP16; by ONNX Runtime, whose casts are vectorised where NumPy's take ten times as
    long.
    """
    result: Array = _rounding().run(None, {"x": np.asarray(values, np.float32)})[0]
    return result


def matrix_product(a: Array, b: Array) -> Array:
    """``a @ b`` of shapes (..., m, k) and (..., k, n), the sums rounded to FP16 after every 16
    terms.
    """
    total = half(a[..., :TERMS] @ b[..., :TERMS, :])
    for start in range(TERMS, a.shape[-1], TERMS):
        total = half(total + a[..., start : start + TERMS] @ b[..., start : start + TERMS, :])
    return total


def convolution(
    x: Array,
    w: Array,
    bias: Array | None,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Array:
    """A 2-D convolution of ``x`` (n, c, h, w) by ``w`` (m, c, kh, kw); ``pads`` are top, left,
    bottom, right.
    """
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    rows, columns = (
        (padded.shape[2 + axis] - (w.shape[2 + axis] - 1) * dilations[axis] - 1) // strides[axis]
        + 1
        for axis in range(2)
    )

    def seen(channels: slice, i: int, j: int) -> Array:
        """What place (i, j) of the window meets, (n, c, rows * columns)."""
        top, left = i * dilations[0], j * dilations[1]
        bottom, right = top + (rows - 1) * strides[0] + 1, left + (columns - 1) * strides[1] + 1
        return padded[:, channels, top : bottom : strides[0], left : right : strides[1]].reshape(
            len(x), -1, rows * columns
        )

    total = np.zeros((len(x), len(w), rows * columns), np.float32)
    for together in _rounded_together(*w.shape[1:]):
        parts = [w[:, c, i, j] @ seen(c, i, j) for c, i, j in together]
        total = half(total + sum(parts[1:], start=parts[0]))
    if bias is not None:
        total = half(total + bias[:, None])
    return total.reshape(len(x), len(w), rows, columns)


def _rounded_together(
    channels: int, height: int, width: int
) -> Iterator[list[tuple[slice, int, int]]]:
    """The (channels, row, column) parts of a window, in the order in which the engine adds them, a
    list for each rounding.
    """
    places = list(np.ndindex(height, width))
    if channels <= _FEW and len(places) > 1:
        at_once = TERMS // max(2, 1 << (channels - 1).bit_length())
        for first in range(0, len(places), at_once):
            yield [(slice(None), i, j) for i, j in places[first : first + at_once]]
        return
    block = channels if len(places) == 1 else _BLOCK
    for start in range(0, channels, block):
        for i, j in places:
            for channel in range(start, min(start + block, channels), TERMS):
                yield [(slice(channel, channel + TERMS), i, j)]


def batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float
) -> Array:
    """``x`` (n, c, ...) times one rounded scale plus one rounded shift, each a channel's."""
    factor = half(scale / np.sqrt(variance + np.float32(epsilon)))
    shift = half(bias - mean * factor)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return half(x * factor.reshape(shape) + shift.reshape(shape))


def hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    """``alpha`` and ``beta`` rounded, then one rounding of the result."""
    slope, offset = half(np.asarray([alpha, beta], np.float32))
    return half(np.clip(x * slope + offset, 0.0, 1.0))


def softmax(x: Array, axis: int) -> Array:
    """The difference from the largest, its exponential and their sum each rounded, then the
    quotient.
    """
    powers = half(np.exp(half(x - x.max(axis=axis, keepdims=True))))
    return half(powers / half(powers.sum(axis=axis, keepdims=True)))


def run_kernel(node: onnx.NodeProto, inputs: Sequence[Array], opset: int = 13) -> Array | None:
    """The output of the FP16 layer ``node``, one of ``KERNELS``, as the engine computes it; None
    for a form not reproduced.

    ``inputs`` are rounded to FP16, in the node's order, absent ones left out.
    """
    if any(a.size == 0 for a in inputs) or len(node.output) > 1:
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Softmax":
        attributes.setdefault("axis", 1 if opset < 13 else -1)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # overflow is a finding, and NumPy's business to tell nobody
        return KERNELS[node.op_type](attributes, inputs)


def _conv(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    x, w = inputs[:2]
    if x.ndim == 3:  # a row of places
        flat = {
            name: (0, values[0], 0, values[1]) if name == "pads" else (1, *values)
            for name, values in _geometry(attributes, 1).items()
        }
        result = _conv({**attributes, **flat}, [x[:, :, None], w[:, :, None], *inputs[2:]])
        return None if result is None else result[:, :, 0]
    channels, places = w.shape[1], w.shape[2:]
    measured = (
        places == (1, 1) or channels <= _FEW or (channels >= _BLOCK and channels % TERMS == 0)
    )
    if (
        x.ndim != 4
        or not measured
        or attributes.get("group", 1) != 1
        or attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        return None
    return convolution(x, w, inputs[2] if len(inputs) > 2 else None, **_geometry(attributes, 2))


def _geometry(attributes: Mapping[str, Any], axes: int) -> dict[str, Sequence[int]]:
    defaults = {"strides": (1,) * axes, "pads": (0,) * 2 * axes, "dilations": (1,) * axes}
    return {name: tuple(attributes.get(name, default)) for name, default in defaults.items()}


def _matmul(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    a, b = inputs
    return matrix_product(a, b) if a.ndim > 1 and b.ndim > 1 else None


def _gemm(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return None
    a, b = (
        m.T if attributes.get(flag, 0) else m
        for m, flag in zip(inputs[:2], ("transA", "transB"), strict=True)
    )
    total = matrix_product(a, b)
    return half(total + inputs[2]) if len(inputs) > 2 else total


def _batch_normalization(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    x, scale, bias, mean, variance = inputs
    if x.ndim < 2 or scale.ndim != 1 or attributes.get("training_mode", 0):
        return None
    return batch_normalization(x, scale, bias, mean, variance, attributes.get("epsilon", 1e-5))


def _hard_sigmoid(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array:
    return hard_sigmoid(inputs[0], attributes.get("alpha", 0.2), attributes.get("beta", 0.5))


def _softmax(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    """Over the last axis, where every version of the operator means the same."""
    x = inputs[0]
    return softmax(x, -1) if attributes["axis"] in (-1, x.ndim - 1) else None


KERNELS: dict[str, Callable[[Mapping[str, Any], Sequence[Array]], Array | None]] = {
    "BatchNormalization": _batch_normalization,
    "Conv": _conv,
    "Gemm": _gemm,
    "HardSigmoid": _hard_sigmoid,
    "MatMul": _matmul,
    "Softmax": _softmax,
}
"""The measured operators."""
