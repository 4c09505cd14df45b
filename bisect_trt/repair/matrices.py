"""Lays a layer's weight out as matrices, and its input as the rows that they multiply.

A layer of ``G`` groups computes ``rows[:, g] @ matrices[g]`` for each of them, plus its bias.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision
from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import NoMatchError, Wiring

Float = NDArray[np.floating[Any]]
Matrices = NDArray[np.float64]

CHUNK = 1 << 21
"""Values of the rows that are made at once: 16 MB."""

CONVOLUTIONS = ("Conv", "ConvTranspose")
RECURRENT = ("LSTM", "GRU", "RNN")
MATRIX = (*CONVOLUTIONS, *RECURRENT, "MatMul", "Gemm")
"""The operators whose weights can be chosen; others keep the nearest rounding."""


@dataclass(frozen=True)
class MatrixLayer:
    """A layer with a weight of its own, a constant that nothing else reads.

    A recurrent layer has two: for its input, and for its hidden states.

    ``index`` is the node's, ``slot`` the weight's, ``source`` the tensor that it multiplies.
    ``bias`` is a constant with a value for each column, '' where the layer has none of its own.
    """

    name: str
    index: int
    node: onnx.NodeProto = field(repr=False, compare=False)
    slot: int
    weight: str
    source: str
    bias: str = ""


def matrix_layers(graph: Graph, precision: Precision) -> list[MatrixLayer]:
    """The layers at ``precision`` whose weight can be chosen, in the file's order.

    Left out: weights that are computed, or that something else reads too.
    """
    wiring, found = Wiring(graph), []
    for layer in graph.layers_at(precision):
        node = wiring.nodes[layer.index]
        for slot, source in _multiplied(node, graph.float_constants):
            weight = node.input[slot]
            if not wiring.is_inner(weight) or not graph.constants.count(weight):
                continue
            bias = _bias_of(wiring, layer.index, slot)
            found.append(MatrixLayer(layer.name, layer.index, node, slot, weight, source, bias))
    return found


def _multiplied(node: onnx.NodeProto, constants: Container[str]) -> list[tuple[int, str]]:
    """The slots of ``node``'s weights, each with the tensor that it multiplies."""
    if node.op_type not in MATRIX:
        return []
    if node.op_type not in RECURRENT:
        slots = [slot for slot in (0, 1) if node.input[slot] in constants]
        one = len(slots) == 1 and not (node.op_type in CONVOLUTIONS and slots == [0])
        return [(slot, node.input[1 - slot]) for slot in slots if one]
    # The reset gate of this form scales the hidden states before their weight sees them.
    scaled = node.op_type == "GRU" and not attribute(node, "linear_before_reset", 0)
    sources = {1: node.input[0], 2: "" if scaled else node.output[0]}
    batch_first = bool(attribute(node, "layout", 0))
    return [
        (slot, source)
        for slot, source in sources.items()
        if source and not batch_first and node.input[slot] in constants
    ]


def _bias_of(wiring: Wiring, index: int, slot: int) -> str:
    """The constant that is added to each row of the output, '' where there is no such."""
    node = wiring.nodes[index]
    if node.op_type in RECURRENT:
        return ""
    name = node.input[2] if len(node.input) > 2 else ""
    if node.op_type == "MatMul":
        try:
            _, name = wiring.with_constant(wiring.only_reader(node.output[0], "Add"))
        except NoMatchError:
            return ""
    if slot != 1 or not attribute(node, "beta", 1.0):
        return ""
    if name not in wiring.graph.float_constants or not wiring.is_inner(name):
        return ""
    groups, columns = _sizes(node, slot, wiring.constants[node.input[slot]].shape)
    if groups > 1 and node.op_type not in CONVOLUTIONS:  # all groups share the bias
        return ""
    shape = wiring.constants[name].shape
    return name if shape and math.prod(shape) == shape[-1] == groups * columns else ""


def _sizes(node: onnx.NodeProto, slot: int, shape: Sequence[int]) -> tuple[int, int]:
    """How many groups a weight of ``shape`` has, and how many columns each of them."""
    matrices = to_matrices(node, slot, np.empty(shape, np.bool_))
    return int(matrices.shape[0]), int(matrices.shape[2])


def to_matrices(node: onnx.NodeProto, slot: int, weight: NDArray[Any]) -> NDArray[Any]:
    """The weight, input ``slot`` of ``node``, as (groups, K, columns) of the same type."""
    if node.op_type in CONVOLUTIONS:
        groups = int(attribute(node, "group", 1))
        split = weight.reshape(groups, -1, *weight.shape[1:])
        # (groups, out, in, *kernel), or (groups, in, out, *kernel) of a transposed convolution.
        split = np.moveaxis(split, 1 if node.op_type == "Conv" else 2, -1)
        return split.reshape(groups, -1, split.shape[-1])
    turned = _operand(node, slot, weight)
    return turned.reshape(-1, *turned.shape[-2:])


def from_matrices(
    node: onnx.NodeProto, slot: int, matrices: NDArray[Any], shape: Sequence[int]
) -> NDArray[Any]:
    """The weight of ``shape`` whose matrices are ``matrices``."""
    if node.op_type not in CONVOLUTIONS:
        turned = _operand(node, slot, np.empty(shape, np.bool_)).shape
        back = matrices.reshape(turned)
        return (np.swapaxes(back, -1, -2) if _is_turned(node, slot) else back).reshape(shape)
    groups = matrices.shape[0]
    if node.op_type == "Conv":
        return np.moveaxis(matrices, -1, 1).reshape(shape)
    split = matrices.reshape(groups, shape[0] // groups, *shape[2:], shape[1])
    return np.moveaxis(split, -1, 2).reshape(shape)


def _operand(node: onnx.NodeProto, slot: int, array: NDArray[Any]) -> NDArray[Any]:
    """An operand as a product from the right takes it: (..., K, columns)."""
    if array.ndim == 1:  # a row as the first operand, a column as the second
        array = array[None] if slot == 0 else array[:, None]
    return np.swapaxes(array, -1, -2) if _is_turned(node, slot) else array


def _is_turned(node: onnx.NodeProto, slot: int) -> bool:
    """Whether the operand's last two axes change places; the first operand's always do."""
    if node.op_type in RECURRENT:
        return True
    turns = int(attribute(node, "transA" if slot == 0 else "transB", 0))
    return bool(turns) != (slot == 0)


def rows_of(
    layer: MatrixLayer,
    weight_shape: Sequence[int],
    values: Float,
    limit: int,
    random: np.random.Generator,
) -> Iterator[Matrices]:
    """Yields rows of the layer's input ``values`` as (rows, groups, K), a chunk at a time.

    There are at most ``limit``, drawn at random beyond. The first column of a layer with a bias is
    what the bias is multiplied with.
    """
    node = layer.node
    if node.op_type in CONVOLUTIONS:
        windows = _windows(node, weight_shape, values)
        positions = len(weight_shape) - 1
    elif node.op_type in RECURRENT:
        windows, positions = _states(node, layer.slot, weight_shape, values), 2
    else:
        windows, positions = _aligned(node, layer.slot, weight_shape, values)
    shape = windows.shape[:positions]
    count, width = math.prod(shape), math.prod(windows.shape[positions:])
    if not count or not width:
        return
    drawn = np.arange(count)
    if count > limit:
        drawn = np.sort(random.choice(count, limit, replace=False))
    groups, _ = _sizes(node, layer.slot, weight_shape)
    alpha, beta = (float(attribute(node, name, 1.0)) for name in ("alpha", "beta"))
    for start in range(0, drawn.size, step := max(1, CHUNK // width)):
        places = np.unravel_index(drawn[start : start + step], shape)
        rows = windows[places].astype(np.float64).reshape(len(places[0]), groups, -1) * alpha
        if layer.bias:
            rows = np.concatenate([np.full_like(rows[:, :, :1], beta), rows], axis=2)
        yield rows[np.isfinite(rows).all(axis=(1, 2))]


def _states(node: onnx.NodeProto, slot: int, weight_shape: Sequence[int], values: Float) -> Float:
    """What a recurrent layer multiplies, (steps, batch, directions, K): input or hidden states.

    The first step's hidden states, mostly zeros, are left out.
    """
    directions = weight_shape[0]
    if slot == 1:
        shape = (*values.shape[:2], directions, values.shape[2])
        return np.broadcast_to(values[:, :, None], shape)
    kind = bytes(attribute(node, "direction", b"forward"))
    turned = (kind == b"reverse", True)  # the second direction always goes backwards
    before = [values[1:, d] if turned[d] else values[:-1, d] for d in range(directions)]
    return np.stack(before, axis=2)


def _aligned(
    node: onnx.NodeProto, slot: int, weight_shape: Sequence[int], values: Float
) -> tuple[Float, int]:
    """The other operand as (*positions, *groups, K), and how many axes are positions."""
    rows = np.swapaxes(_operand(node, 1 - slot, values), -1, -2)
    batch = _operand(node, slot, np.empty(weight_shape, np.bool_)).shape[:-2]
    common = np.broadcast_shapes(rows.shape[:-2], batch)
    rows = np.broadcast_to(rows, (*common, *rows.shape[-2:]))
    sizes = (*(1,) * (len(common) - len(batch)), *batch)
    shared = [axis for axis, size in enumerate(sizes) if size == 1]
    own = [axis for axis, size in enumerate(sizes) if size > 1]
    last = len(common)
    return rows.transpose(*shared, last, *own, last + 1), len(shared) + 1


def _windows(node: onnx.NodeProto, weight_shape: Sequence[int], values: Float) -> Float:
    """The windows of a convolution as (batch, *places, channels, *kernel)."""
    kernel = weight_shape[2:]
    axes = range(2, 2 + len(kernel))
    strides = list(attribute(node, "strides", [1] * len(kernel)))
    dilations = list(attribute(node, "dilations", [1] * len(kernel)))
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    if node.op_type == "ConvTranspose":
        values = _stuffed(node, values, strides, spans)
        strides = [1] * len(kernel)
    else:
        pads = _conv_pads(node, values.shape[2:], strides, spans)
        values = np.pad(values, [(0, 0), (0, 0), *pads])
    windows = sliding_window_view(values, spans, axis=tuple(axes))
    every = slice(None)
    apart = [slice(None, None, step) for step in (*strides, *dilations)]
    windows = windows[(every, every, *apart)]
    if node.op_type == "ConvTranspose":
        windows = np.flip(windows, axis=tuple(range(-len(kernel), 0)))
    return np.moveaxis(windows, 1, 1 + len(kernel))


def _conv_pads(
    node: onnx.NodeProto, sizes: Sequence[int], strides: Sequence[int], spans: Sequence[int]
) -> list[tuple[int, int]]:
    """The zeros before and behind each axis of a convolution's input."""
    totals = [
        max((-(-size // stride) - 1) * stride + span - size, 0)
        for size, stride, span in zip(sizes, strides, spans, strict=True)
    ]
    return _split_pads(node, _auto_pad(node), totals)


def _auto_pad(node: onnx.NodeProto) -> bytes:
    return bytes(attribute(node, "auto_pad", b"NOTSET"))


def _split_pads(node: onnx.NodeProto, kind: bytes, totals: Sequence[int]) -> list[tuple[int, int]]:
    """What ``kind`` of padding makes of all zeros of each axis, or the node's own pads."""
    axes = len(totals)
    if kind == b"SAME_UPPER":
        return [(total // 2, total - total // 2) for total in totals]
    if kind == b"SAME_LOWER":
        return [(total - total // 2, total // 2) for total in totals]
    own = [0] * 2 * axes if kind == b"VALID" else attribute(node, "pads", [0] * 2 * axes)
    return list(zip(own[:axes], own[axes:], strict=True))


def _stuffed(
    node: onnx.NodeProto, values: Float, strides: Sequence[int], spans: Sequence[int]
) -> Float:
    """The input of a plain convolution, with the kernel flipped, that a transposed one is."""
    sizes, axes = values.shape[2:], len(spans)
    more = list(attribute(node, "output_padding", [0] * axes))
    whole = [
        stride * (size - 1) + extra + span
        for size, stride, extra, span in zip(sizes, strides, more, spans, strict=True)
    ]
    kind, wanted = _auto_pad(node), list(attribute(node, "output_shape", []))[-axes:]
    if wanted:
        kind = kind if kind == b"SAME_UPPER" else b"SAME_LOWER"
        more = [extra + max(w - n, 0) for extra, w, n in zip(more, wanted, whole, strict=True)]
    else:
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    pads = _split_pads(node, kind, [max(n - w, 0) for n, w in zip(whole, wanted, strict=True)])
    apart = np.zeros(
        (*values.shape[:2], *(s * (n - 1) + 1 for n, s in zip(sizes, strides, strict=True))),
        values.dtype,
    )
    apart[(slice(None), slice(None), *(slice(None, None, s) for s in strides))] = values
    around = [
        (span - 1 - before, span - 1 - behind + extra)
        for (before, behind), span, extra in zip(pads, spans, more, strict=True)
    ]
    apart = np.pad(apart, [(0, 0), (0, 0), *((max(b, 0), max(e, 0)) for b, e in around)])
    ends = zip(around, apart.shape[2:], strict=True)
    cut = (slice(max(-before, 0), size - max(-behind, 0)) for (before, behind), size in ends)
    return apart[(slice(None), slice(None), *cut)]
