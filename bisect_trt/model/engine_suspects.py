"""Findings on forms that TensorRT refuses or computes wrongly."""

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
from bisect_trt.model.precision_rules import TYPE_AGNOSTIC, is_standard
from bisect_trt.model.shapes import Shape, shapes_of, with_shapes
from bisect_trt.model.tensor_types import UNKNOWN, Scope, every_node, subgraphs


@dataclass(frozen=True)
class _Body:
    """A graph or a body; ``makers`` are its nodes and those of enclosing graphs, by output."""

    graph: onnx.GraphProto
    scope: Scope
    makers: Mapping[str, onnx.NodeProto]
    constants: frozenset[str]


def _if_findings(graph: Graph, light: onnx.GraphProto) -> Iterator[Finding]:
    """Findings on each If decided at run time whose bodies differ in form or are recurrent."""
    declared = {i.name for i in graph.proto.graph.input}
    constants = {t.name for t in graph.proto.graph.initializer}.difference(declared)
    yield from _ifs_in(_Body(light, graph.types, {}, frozenset(constants)), graph.names)


def _ifs_in(outer: _Body, names: Sequence[str]) -> Iterator[Finding]:
    nodes = outer.graph.node
    makers = {**outer.makers, **{o: node for node in nodes for o in node.output if o}}
    constants = outer.constants.union(t.name for t in outer.graph.initializer)
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        bodies = {
            kind: _Body(body, outer.scope.body(index, kind), makers, constants)
            for kind, body in subgraphs(node)
        }
        is_if = node.op_type == "If" and bodies.keys() >= {"then_branch", "else_branch"}
        if is_if and node.input and _known_at_run_time(node.input[0], makers, constants):
            yield from _misfits(node, name, bodies["then_branch"], bodies["else_branch"])
            recurrent = [r for body in bodies.values() for r in _recurrent(body.graph)]
            what = (
                f"recurrent operators in the If {name}, which TensorRT for RTX does not build: "
                "export a model for each of its bodies"
            )
            yield from refused("if-recurrent", recurrent, what)
            continue  # the advice covers every If inside
        for body in bodies.values():
            yield from _ifs_in(body, [_called(n) for n in body.graph.node])


def _misfits(node: onnx.NodeProto, name: str, one: _Body, other: _Body) -> Iterator[Finding]:
    """Findings on outputs that the two bodies of an If give with other types or ranks."""
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


def _known_at_run_time(
    condition: str, makers: Mapping[str, onnx.NodeProto], constants: frozenset[str]
) -> bool:
    """Whether ``condition`` depends on the values of an input, not only on constants and shapes."""
    visited, waiting = set[str](), [condition]
    while waiting:
        tensor = waiting.pop()
        if not tensor or tensor in visited or tensor in constants:
            continue
        visited.add(tensor)
        maker = makers.get(tensor)
        if maker is None:
            return True
        if maker.op_type not in TYPE_AGNOSTIC:
            waiting += maker.input
    return False


def _recurrent(graph: onnx.GraphProto) -> Iterator[str]:
    for node in every_node(graph.node):
        if node.op_type in ("LSTM", "GRU"):
            yield f"{_called(node)} ({node.op_type})"


def _called(node: onnx.NodeProto) -> str:
    return str(node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}")


_INTEGER = ("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")
_GIVE_UINT8 = ("QuantizeLinear", "DynamicQuantizeLinear", "Constant")
_NOT_PARSED_IN_BF16 = ("HardSwish", "Mish", "GRU", "LpNormalization", "LpPool")
"""Operators that TensorRT for RTX parses in FP32 and FP16 only."""

_ONE_AXIS_SOFTMAX_OPSET = 13
"""From this opset on Softmax runs along one axis, the last by default; before, it flattened."""

Suspects = Callable[[Graph, onnx.NodeProto], bool]

_BY_NODE: tuple[tuple[str, Suspects, str], ...] = (
    # The first two are public reports: NVIDIA/TensorRT #4646 and #4756.
    (
        "grid-sample",
        lambda graph, node: node.op_type == "GridSample" and graph.opset >= 20,
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
"""The kind of a finding, the nodes that it is about, and its text."""


def engine_suspects(graph: Graph, precision: Precision) -> list[Finding]:
    """Findings on forms in ``graph`` that TensorRT refuses or computes wrongly at ``precision``."""
    light = with_shapes(graph)
    return [
        *_long_softmaxes(graph, shapes_of(light), precision),
        *_without_bf16(graph, precision),
        *_if_findings(graph, light),
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
        limit = int(LARGEST[Precision.FP16])  # equal keys give exponentials of 1 each
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
    """The number of exponentials that ``node`` sums; None if there are none or it is unknown."""
    if node.op_type in ("Softmax", "LogSoftmax") and node.input:
        shape = shapes.get(node.input[0])
        axis = 1 if opset < _ONE_AXIS_SOFTMAX_OPSET else -1
        for attribute in node.attribute:
            axis = attribute.i if attribute.name == "axis" else axis
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        along = shape[axis % len(shape) :]
        sizes = along[:1] if opset >= _ONE_AXIS_SOFTMAX_OPSET else along
    elif node.op_type == "Attention" and len(shapes.get(node.input[1], ())) > 1:
        sizes = shapes[node.input[1]][-2:-1]  # the axis that counts the keys
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
    for node, name in graph.named_nodes():
        if is_standard(node):
            yield node, name
