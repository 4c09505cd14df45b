"""What engines are known to refuse, or to get wrong, by a model's form alone.

What does not build was measured with TensorRT for RTX 1.6.1.120, building without a GPU
(``tests/graph/test_engine_suspects.py``). Where a shape, a rank or a type is not known nothing is
claimed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx
from onnx import TensorProto

from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import Precision
from bisect_trt.graph.inspection.cautions import refused
from bisect_trt.graph.inspection.if_bodies import if_findings
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.shapes import Shape, shapes_of, with_shapes
from bisect_trt.graph.tensors.dims import shared_placeholders
from bisect_trt.graph.tensors.operator_rules import is_standard

_LARGEST_FP16 = 65_504
_INTEGER = ("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")
_GIVE_UINT8 = ("QuantizeLinear", "DynamicQuantizeLinear", "Constant")
_NOT_PARSED_IN_BF16 = ("HardSwish", "Mish", "GRU", "LpNormalization", "LpPool")
"""What it takes in FP32 and in FP16."""

_NEW_GRID_SAMPLE = 20
"""The opset that gave GridSample its volumes and new names of its modes."""

_LAST_AXIS = 13
"""From this opset on Softmax is along one axis, the last by default; before it flattened."""


def engine_suspects(graph: Graph, precision: Precision) -> list[Finding]:
    """A finding for each kind of suspect in ``graph``; some only at ``precision``."""
    light = with_shapes(graph)
    return [
        *_long_softmaxes(graph, shapes_of(light), precision),
        *_without_bf16(graph, precision),
        *if_findings(graph, light),
        *_wrong_in_fp32(graph),
        *_integers(graph),
        *_placeholders(graph.proto.graph),
    ]


def _long_softmaxes(
    graph: Graph, shapes: Mapping[str, Shape], precision: Precision
) -> Iterator[Finding]:
    for node, name in _nodes(graph):
        if precision is not Precision.FP16 and not _reduced(graph, node):
            continue
        keys = _keys(node, shapes, graph.opset)
        if keys is not None and keys >= _LARGEST_FP16:
            message = (
                f"{name} ({node.op_type}) is over {keys:,} keys: a fused kernel that sums in FP16 "
                f"leaves its range from {_LARGEST_FP16:,} equal keys on, where the unfused graph "
                "does not; keep it in FP32 (--pin) and let the engine judge"
            )
            yield Finding("long-softmax", name, message)


def _reduced(graph: Graph, node: onnx.NodeProto) -> bool:
    return any(graph.types.type_of(o) == TensorProto.FLOAT16 for o in node.output if o)


def _keys(node: onnx.NodeProto, shapes: Mapping[str, Shape], opset: int) -> int | None:
    """How many exponentials ``node`` adds up; None where it adds none, or it is not known."""
    if node.op_type in ("Softmax", "LogSoftmax") and node.input:
        shape = shapes.get(node.input[0])
        axis = 1 if opset < _LAST_AXIS else -1
        for attribute in node.attribute:
            axis = attribute.i if attribute.name == "axis" else axis
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        along = shape[axis % len(shape) :]
        sizes = along[:1] if opset >= _LAST_AXIS else along
    elif node.op_type == "Attention" and len(shapes.get(node.input[1], ())) > 1:
        sizes = shapes[node.input[1]][-2:-1]
    else:
        return None
    return None if None in sizes else math.prod(s for s in sizes if s is not None)


def _without_bf16(graph: Graph, precision: Precision) -> Iterator[Finding]:
    if precision is not Precision.BF16:
        return
    layers = graph.layers_at(precision)
    names = [layer.name for layer in layers if layer.op == "ConvTranspose"]
    what = (
        "transposed convolutions, which TensorRT for RTX does not build in BF16: keep them in "
        "FP32 (--pin)"
    )
    yield from refused("bf16-transposed", names, what)
    unparsed = [layer for layer in layers if layer.op in _NOT_PARSED_IN_BF16]
    operators = ", ".join(dict.fromkeys(layer.op for layer in unparsed))
    what = (
        f"{operators}, which TensorRT for RTX does not parse in BF16: with --runner tensorrt they "
        "are held in FP32 by themselves, else keep them so (--pin)"
    )
    yield from refused("bf16-unparsed", [layer.name for layer in unparsed], what)


def _wrong_in_fp32(graph: Graph) -> Iterator[Finding]:
    """What public reports of 2025 and 2026 say that engines compute wrongly in FP32 too:
    NVIDIA/TensorRT #4646 (GridSample) and #4756 (GroupNormalization).
    """
    grids = [name for node, name in _nodes(graph) if node.op_type == "GridSample"]
    what = (
        f"GridSample of opset {graph.opset}, which TensorRT is reported to get wrong in FP32 too: "
        "compare its FP32 engine first, or export with opset 16"
    )
    yield from refused("grid-sample", grids if graph.opset >= _NEW_GRID_SAMPLE else [], what)
    single = [
        name
        for node, name in _nodes(graph)
        if node.op_type == "GroupNormalization"
        and any(a.name == "num_groups" and a.i == 1 for a in node.attribute)
    ]
    what = (
        "GroupNormalization with one group, which TensorRT is reported to get wrong in FP32 too: "
        "compare its FP32 engine first, or export it as LayerNormalization"
    )
    yield from refused("one-group", single, what)


def _integers(graph: Graph) -> Iterator[Finding]:
    operators = [n for node, n in _nodes(graph) if node.op_type in _INTEGER]
    outputs = set(graph.outputs)
    unsigned = [
        name
        for node, name in _nodes(graph)
        if node.op_type not in _GIVE_UINT8
        and any(
            graph.types.type_of(o) == TensorProto.UINT8 for o in node.output if o not in outputs
        )
    ]
    yield from refused(
        "integer-operator",
        operators,
        "integer arithmetic that TensorRT for RTX does not parse: export with QuantizeLinear and "
        "DequantizeLinear around the float operator",
    )
    yield from refused(
        "uint8-tensor",
        unsigned,
        "UINT8 between nodes, which TensorRT for RTX takes at inputs and outputs only: cast to "
        "INT32",
    )


def _placeholders(graph: onnx.GraphProto) -> Iterator[Finding]:
    for name, inputs in shared_placeholders(graph).items():
        message = (
            f"several dimensions of {', '.join(map(repr, inputs))} are called {name!r}, which "
            "TensorRT takes for one size: give each a name of its own in what you build (the "
            "models written here do)"
        )
        yield Finding("shared-dimension", inputs[0], message)


def _nodes(graph: Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    """The nodes of ONNX's own operators, with their ids."""
    for node, name in zip(graph.proto.graph.node, graph.names, strict=True):
        if is_standard(node):
            yield node, name
