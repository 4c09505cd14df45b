"""Forms that TensorRT refuses or gets wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.rounding import LARGEST
from bisect_trt.model.cautions import refused
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import shared_placeholders
from bisect_trt.model.precision_rules import is_standard
from bisect_trt.model.shapes import Shape, shapes_of, with_shapes
from bisect_trt.model.tensor_types import UNKNOWN, Scope, every_node, subgraphs

_BODIES = {"then_branch", "else_branch"}
_RECURRENT = ("LSTM", "GRU")
_SHAPES = ("Shape", "Size")


@dataclass(frozen=True)
class _Inside:
    """A graph or a body: ``makers`` are the nodes, by output, of it and what is around it."""

    graph: onnx.GraphProto
    scope: Scope
    makers: Mapping[str, onnx.NodeProto]
    constants: frozenset[str]


def if_findings(graph: Graph, light: onnx.GraphProto) -> Iterator[Finding]:
    """A finding for each If decided at run time whose bodies do not fit, or are recurrent."""
    declared = {i.name for i in graph.proto.graph.input}
    constants = {t.name for t in graph.proto.graph.initializer}.difference(declared)
    yield from _ifs_inside(_Inside(light, graph.types, {}, frozenset(constants)), graph.names)


def _ifs_inside(inside: _Inside, names: Sequence[str]) -> Iterator[Finding]:
    nodes = inside.graph.node
    makers = {**inside.makers, **{o: node for node in nodes for o in node.output if o}}
    constants = inside.constants.union(t.name for t in inside.graph.initializer)
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        bodies = {
            kind: _Inside(body, inside.scope.body(index, kind), makers, constants)
            for kind, body in subgraphs(node)
        }
        whole = node.op_type == "If" and bool(node.input) and bodies.keys() >= _BODIES
        if whole and _told_at_run_time(node.input[0], makers, constants):
            yield from _misfits(node, name, bodies["then_branch"], bodies["else_branch"])
            recurrent = [r for body in bodies.values() for r in _recurrent(body.graph)]
            what = (
                f"recurrent operators in the If {name}, which TensorRT for RTX does not build: "
                "export a model for each of its bodies"
            )
            yield from refused("if-recurrent", recurrent, what)
            continue  # what is in its bodies goes with it
        for body in bodies.values():
            yield from _ifs_inside(body, [_called(n) for n in body.graph.node])


def _misfits(node: onnx.NodeProto, name: str, one: _Inside, other: _Inside) -> Iterator[Finding]:
    ranks = [{n: len(s) for n, s in shapes_of(b.graph).items()} for b in (one, other)]
    for output, first, second in zip(
        node.output, one.graph.output, other.graph.output, strict=False
    ):
        types = (one.scope.type_of(first.name), other.scope.type_of(second.name))
        sizes = (ranks[0].get(first.name), ranks[1].get(second.name))
        if UNKNOWN not in types and types[0] != types[1]:
            differ = " and ".join(helper.tensor_dtype_to_string(t).split(".")[-1] for t in types)
        elif None not in sizes and sizes[0] != sizes[1]:
            differ = f"{sizes[0]} and {sizes[1]} dimensions"
        else:
            continue
        message = (
            f"{name} (If): its bodies give output {output!r} {differ}, which TensorRT refuses "
            "where the condition is known only at run time: make them equal (Cast, Reshape), or "
            "export a model for each body"
        )
        yield Finding("if-bodies", name, message)


def _told_at_run_time(
    condition: str, makers: Mapping[str, onnx.NodeProto], constants: frozenset[str]
) -> bool:
    """Whether ``condition`` follows from the values of an input, not from constants and shapes."""
    seen, left = set[str](), [condition]
    while left:
        tensor = left.pop()
        if not tensor or tensor in seen or tensor in constants:
            continue
        seen.add(tensor)
        maker = makers.get(tensor)
        if maker is None:
            return True
        if maker.op_type not in _SHAPES:
            left += maker.input
    return False


def _recurrent(graph: onnx.GraphProto) -> Iterator[str]:
    for node in every_node(graph.node):
        if node.op_type in _RECURRENT:
            yield f"{_called(node)} ({node.op_type})"


def _called(node: onnx.NodeProto) -> str:
    return str(node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}")


_INTEGER = ("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")
_GIVE_UINT8 = ("QuantizeLinear", "DynamicQuantizeLinear", "Constant")
_NOT_PARSED_IN_BF16 = ("HardSwish", "Mish", "GRU", "LpNormalization", "LpPool")
"""What TensorRT for RTX takes in FP32 and in FP16."""

_NEW_GRID_SAMPLE = 20
"""The opset that gave GridSample its volumes and new names of its modes."""

_LAST_AXIS = 13
"""From this opset on Softmax is along one axis, the last by default; before it flattened."""

Suspects = Callable[[Graph, onnx.NodeProto], bool]

_BY_NODE: tuple[tuple[str, Suspects, str], ...] = (
    # Public reports: NVIDIA/TensorRT #4646 and #4756.
    (
        "grid-sample",
        lambda graph, node: node.op_type == "GridSample" and graph.opset >= _NEW_GRID_SAMPLE,
        "GridSample of opset {opset}, which TensorRT is reported to get wrong in FP32 too: "
        "compare its FP32 engine first, or export with opset 16",
    ),
    (
        "one-group",
        lambda _, node: (
            node.op_type == "GroupNormalization"
            and any(a.name == "num_groups" and a.i == 1 for a in node.attribute)
        ),
        "GroupNormalization with one group, which TensorRT is reported to get wrong in FP32 too: "
        "compare its FP32 engine first, or export it as LayerNormalization",
    ),
    (
        "integer-operator",
        lambda _, node: node.op_type in _INTEGER,
        "integer arithmetic that TensorRT for RTX does not parse: export with QuantizeLinear and "
        "DequantizeLinear around the float operator",
    ),
    (
        "uint8-tensor",
        lambda graph, node: (
            node.op_type not in _GIVE_UINT8
            and any(
                graph.types.type_of(o) == TensorProto.UINT8
                for o in node.output
                if o not in graph.outputs
            )
        ),
        "UINT8 between nodes, which TensorRT for RTX takes at inputs and outputs only: cast to "
        "INT32",
    ),
)
"""A kind of finding, which nodes it is about, and what is said of them."""


def engine_suspects(graph: Graph, precision: Precision) -> list[Finding]:
    """A finding for each kind of suspect in ``graph``; some only at ``precision``."""
    light = with_shapes(graph)
    return [
        *_long_softmaxes(graph, shapes_of(light), precision),
        *_without_bf16(graph, precision),
        *if_findings(graph, light),
        *_of_nodes(graph),
        *_placeholders(graph.proto.graph),
    ]


def _long_softmaxes(
    graph: Graph, shapes: Mapping[str, Shape], precision: Precision
) -> Iterator[Finding]:
    for node, name in _nodes(graph):
        if precision is not Precision.FP16 and not _reduced(graph, node):
            continue
        keys = _keys(node, shapes, graph.opset)
        limit = int(LARGEST[Precision.FP16])
        if keys is not None and keys >= limit:
            message = (
                f"{name} ({node.op_type}) is over {keys:,} keys: a fused kernel that sums in FP16 "
                f"leaves its range from {limit:,} equal keys on, where the unfused graph "
                "does not; keep it in FP32 (--keep-fp32) and let the engine judge"
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
        "FP32 (--keep-fp32)"
    )
    yield from refused("bf16-transposed", names, what)
    unparsed = [layer for layer in layers if layer.op in _NOT_PARSED_IN_BF16]
    operators = ", ".join(dict.fromkeys(layer.op for layer in unparsed))
    what = (
        f"{operators}, which TensorRT for RTX does not parse in BF16: with --runner tensorrt they "
        "are held in FP32 by themselves, else keep them so (--keep-fp32)"
    )
    yield from refused("bf16-unparsed", [layer.name for layer in unparsed], what)


def _of_nodes(graph: Graph) -> Iterator[Finding]:
    for kind, is_suspect, what in _BY_NODE:
        names = [name for node, name in _nodes(graph) if is_suspect(graph, node)]
        yield from refused(kind, names, what.format(opset=graph.opset))


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
