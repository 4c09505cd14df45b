"""What single operators compute, in float64: ONNX's reference evaluator, and NumPy beside it.

NumPy stands where the evaluator of ONNX 1.23 is wrong, slow, or has no float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), BF16, np.dtype(np.float32), np.dtype(np.float64))


def array_of(tensor: onnx.TensorProto) -> Array:
    """The values of a stored tensor."""
    return numpy_helper.to_array(tensor)


@lru_cache(maxsize=2048)
def _evaluator(content: bytes, opset: int, inputs: int) -> ReferenceEvaluator:
    node = onnx.NodeProto.FromString(content)
    given = [onnx.ValueInfoProto(name=n) for n in dict.fromkeys(filter(None, node.input))]
    results = [onnx.ValueInfoProto(name=n) for n in node.output if n]
    graph = helper.make_graph([node], "one", given, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model)


def evaluated(node: onnx.NodeProto, inputs: Sequence[Array | None], opset: int) -> list[Array]:
    """The outputs by ONNX's reference evaluator, or by NumPy where that is wrong or slow."""
    own = _OWN.get(node.op_type)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if own is not None:
        found = own([a for a in inputs if a is not None], attributes, opset)
        return [found] if isinstance(found, np.ndarray | np.generic) else list(found)
    given = {n: a for n, a in zip(node.input, inputs, strict=True) if n}
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    for slot, name in enumerate(plain.output):
        plain.output[slot] = name or f"unread_{slot}"
    evaluator = _evaluator(plain.SerializeToString(), opset, len(given))
    takes_nearest = node.op_type == "Resize" and attributes.get("mode", b"nearest") == b"nearest"
    first = inputs[0] if takes_nearest else None
    if first is not None and not np.isfinite(first).all():
        # The evaluator multiplies what it does not take by zero, which makes NaN of infinity.
        given[node.input[0]] = np.arange(first.size, dtype=np.float64).reshape(first.shape)
        (places,) = evaluator.run(None, given)
        return [first.ravel()[np.rint(places).astype(np.int64)]]
    return [np.asarray(a) for a in evaluator.run(None, given)]


def _cast(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """Floats stay float64, of which the rounding comes later; integers are cut."""
    kind = attributes["to"]
    wanted = helper.tensor_dtype_to_np_dtype(kind)
    if wanted in FLOATS:
        return inputs[0].astype(np.float64)
    with np.errstate(all="ignore"):
        return inputs[0].astype(wanted)


def _reduced(kind: Callable[..., Array]) -> Callable[..., Array]:
    """A reduction over axes that are an attribute or an input."""

    def reduce(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
        axes = attributes.get("axes", inputs[1].tolist() if len(inputs) > 1 else None)
        if not axes and attributes.get("noop_with_empty_axes"):
            return inputs[0]
        keeps = bool(attributes.get("keepdims", 1))
        return np.asarray(kind(inputs[0], axis=tuple(axes) if axes else None, keepdims=keeps))

    return reduce


def _sigmoid(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-inputs[0])))


def _leaky(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    slope = np.float64(np.float32(attributes.get("alpha", 0.01)))
    return np.where(inputs[0] < 0, inputs[0] * slope, inputs[0])


def _log_sum_exp(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """Of infinities it is what the sum says; the evaluator gives NaN."""

    def kind(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
        most = np.max(x, axis=axis, keepdims=True)
        most = np.where(np.isfinite(most), most, 0.0)
        total = np.log(np.sum(np.exp(x - most), axis=axis, keepdims=True)) + most
        return total if keepdims else np.squeeze(total, axis=axis)

    return _reduced(kind)(inputs, attributes, opset)


def _quantise(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    kind = inputs[2].dtype if len(inputs) > 2 else np.dtype(np.uint8)
    zero = inputs[2].astype(np.float64) if len(inputs) > 2 else 0.0
    info = np.iinfo(kind)
    exact = np.float64(1.0) * inputs[0].astype(np.float32) / inputs[1].astype(np.float32)
    return np.clip(np.rint(exact.astype(np.float32)) + zero, info.min, info.max).astype(kind)


def _dequantise(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    zero = inputs[2].astype(np.float64) if len(inputs) > 2 else 0.0
    return np.asarray((inputs[0].astype(np.float64) - zero) * inputs[1])


def _batch_norm(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """At inference; the evaluator takes the statistics of the batch before opset 14."""
    x, *parts = inputs
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale, shift, mean, variance = (p.reshape(shape) for p in parts)
    epsilon = np.float64(np.float32(attributes.get("epsilon", 1e-5)))
    return np.asarray((x - mean) / np.sqrt(variance + epsilon) * scale + shift)


def _group_norm(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """As of opset 21, by channels; the evaluator has none."""
    x, scale, shift = inputs
    groups, shape = attributes["num_groups"], (1, -1, *(1,) * (x.ndim - 2))
    rows = x.reshape(x.shape[0], groups, -1)
    epsilon = np.float64(np.float32(attributes.get("epsilon", 1e-5)))
    centred = rows - rows.mean(-1, keepdims=True)
    even = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return np.asarray(even.reshape(x.shape) * scale.reshape(shape) + shift.reshape(shape))


def _local_norm(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """LRN; the evaluator's window ends a channel early."""
    x, size = inputs[0], attributes["size"]
    alpha, beta, bias = (
        np.float64(np.float32(attributes.get(name, usual)))
        for name, usual in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    before, after = (size - 1) // 2, -(-(size - 1) // 2)
    squares = [(x[:, max(0, c - before) : c + after + 1] ** 2).sum(1) for c in range(x.shape[1])]
    return np.asarray(x / (bias + alpha / size * np.stack(squares, 1)) ** beta)


def _mean_variance(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    axes = tuple(attributes.get("axes", (0, 2, 3)))
    centred = inputs[0] - inputs[0].mean(axes, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axes, keepdims=True))
    return np.asarray(centred / (deviation + np.float64(np.float32(1e-9))))


def _windows(x: Array, attributes: Mapping[str, Any], fill: float) -> Array:
    """The windows of a pool, flat, as the last axis; padded with ``fill``."""
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    pads = attributes.get("pads", [0] * 2 * rank)
    sides = [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    axes = tuple(range(2, 2 + rank))
    wide = np.pad(x, sides, constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(wide, kernel, axes)
    steps = [slice(None, None, step) for step in attributes.get("strides", [1] * rank)]
    found = found[(slice(None), slice(None), *steps)]
    return found.reshape(*found.shape[: 2 + rank], -1)


def _max_pool(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> list[Array]:
    """With NaN, which the evaluator leaves out; the places are not computed."""
    y = _windows(inputs[0], attributes, -np.inf).max(-1)
    return [y, np.zeros(y.shape, np.int64)]


def _average_pool(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    total = _windows(inputs[0], attributes, 0.0).sum(-1)
    counts = bool(attributes.get("count_include_pad", 0))
    terms = _windows(np.ones_like(inputs[0]), attributes, float(counts)).sum(-1)
    return np.asarray(total / terms)


def _global_lp(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    x, power = inputs[0], attributes.get("p", 2)
    places = tuple(range(2, x.ndim))
    return np.asarray((np.abs(x) ** power).sum(places, keepdims=True) ** (1.0 / power))


def _conv_transpose(inputs: list[Array], attributes: Mapping[str, Any], opset: int) -> Array:
    """One group after the other; the evaluator adds the bias of all to each."""
    x, weight, *bias = inputs
    groups, found = attributes.get("group", 1), []
    plain = {n: v for n, v in attributes.items() if n != "group"}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **plain)
    evaluator = _evaluator(node.SerializeToString(), opset, 2)
    parts = zip(np.split(x, groups, 1), np.split(weight, groups, 0), strict=True)
    for part, kernel in parts:
        found.append(evaluator.run(None, {"x": part, "w": kernel})[0])
    y = np.concatenate(found, 1)
    return np.asarray(y + bias[0].reshape(1, -1, *(1,) * (y.ndim - 2)) if bias else y)


_OWN: dict[str, Callable[[list[Array], Mapping[str, Any], int], Any]] = {
    "Cast": _cast,
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
    "Sigmoid": _sigmoid,
    "LeakyRelu": _leaky,
    "LRN": _local_norm,
    "MeanVarianceNormalization": _mean_variance,
    "GlobalLpPool": _global_lp,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "ConvTranspose": _conv_transpose,
    "ReduceLogSumExp": _log_sum_exp,
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "QuantizeLinear": _quantise,
    "DequantizeLinear": _dequantise,
}
