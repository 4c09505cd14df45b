"""ONNX nodes by the arithmetic of TensorRT for RTX: which forms were measured, and their
attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bisect_trt.runners.emulator.rtx.arithmetic import (
    BLOCK,
    FEW,
    TERMS,
    Array,
    batch_normalization,
    convolution,
    half,
    hard_sigmoid,
    matrix_product,
    softmax,
)


def run_operator(node: onnx.NodeProto, inputs: Sequence[Array], opset: int = 13) -> Array | None:
    """The output of an FP16 layer as the engine computes it.

    Args:
        node: one of ``OPERATORS``.
        inputs: float32 arrays rounded to FP16, in the node's order, absent ones left out.
        opset: the version of ONNX's own operators in the model.

    Returns:
        Float32 values rounded to FP16; None for a form that is not reproduced.
    """
    if any(a.size == 0 for a in inputs) or len(node.output) > 1:
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Softmax":
        attributes.setdefault("axis", 1 if opset < 13 else -1)
    # Overflow is a finding, and NumPy's business to tell nobody.
    with np.errstate(over="ignore", invalid="ignore"):
        return OPERATORS[node.op_type](attributes, inputs)


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
    measured = places == (1, 1) or channels <= FEW or (channels >= BLOCK and channels % TERMS == 0)
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


OPERATORS: dict[str, Callable[[Mapping[str, Any], Sequence[Array]], Array | None]] = {
    "BatchNormalization": _batch_normalization,
    "Conv": _conv,
    "Gemm": _gemm,
    "HardSigmoid": _hard_sigmoid,
    "MatMul": _matmul,
    "Softmax": _softmax,
}
"""The measured operators."""
