"""What limits the answer by the model's own making: operators that are not lowered, layers that are
reduced already, quantisation. A result must not look better than it is because of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.core.names import counted, some_of
from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.inputs import InputSpec, dynamic_axes, input_specs
from bisect_trt.graph.model.layers import Kind
from bisect_trt.graph.tensors.operator_rules import QUANTISES, is_standard
from bisect_trt.graph.tensors.tensor_types import every_node, subgraphs

_MANY = 0.1
"""From this share of the float nodes on the first line has to say it."""

_MUCH = 0.5
"""Of the nodes: in one body."""

_SHOWN = 4
_LOW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_RANDOM = frozenset(
    {
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
_LINEAR = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def cautions(graph: Graph) -> list[Finding]:
    """A finding each for custom operators, layers that the source reduces, quantisation, and bodies
    that are a large part of the network.
    """
    nodes = graph.proto.graph.node
    scope = graph.types
    custom = Counter(f"{n.domain}.{n.op_type}" for n in nodes if not is_standard(n))
    reduced = sum(
        is_standard(n) and any(scope.type_of(o) in _LOW for o in n.output if o) for n in nodes
    )
    layers = sum(
        graph.role(index, Precision.FP16).kind is Kind.LAYER for index in range(len(nodes))
    )
    every = layers + sum(custom.values()) + reduced
    found = []
    if custom:
        count = sum(custom.values())
        named = some_of([f"{name} ({n})" for name, n in custom.most_common()], _SHOWN)
        message = (
            f"{count} of {every} nodes are of operators that are never lowered: {named}; "
            "they run in FP32 under every plan here, and an engine may run them otherwise"
        )
        found.append(Finding("custom-operators", "", message, count >= _MANY * every))
    if reduced:
        message = (
            f"{reduced} of {every} nodes already run in FP16 or BF16 in the source: the reference "
            "computes them without most of their roundings, so that nothing tells what these do, "
            "and no pin undoes them; give the FP32 model that it was made from"
        )
        found.append(Finding("already-reduced", "", message, reduced >= _MANY * every))
    double = doubles(graph)
    if double:
        message = (
            f"{counted(double, 'node')} compute{'s' if double == 1 else ''} in double precision, "
            "which TensorRT does in FP32: the reference and every emulated plan keep to double, so "
            "what that costs is seen on an engine alone; cast to float in the model"
        )
        found.append(Finding("double-precision", "", message, True))
    quantised = sum(n.op_type in QUANTISES for n in nodes)
    if quantised:
        message = (
            f"{counted(quantised, 'node')} quantise{'s' if quantised == 1 else ''} or "
            f"dequantise{'s' if quantised == 1 else ''}: the errors of quantisation are in the "
            "reference too, only what is lowered beside it is judged, and a last bit that differs "
            "becomes a whole step"
        )
        found.append(Finding("quantised", "", message, True))
    of_nodes = (*_random(graph), *_of_quantisation(graph), *_whole_bodies(graph))
    return [*found, *of_nodes, *_defaults(graph)]


def doubles(graph: Graph) -> int:
    """The nodes that compute what reaches an output, and not a shape, in double precision."""
    scope, live, count = graph.types, set(graph.outputs), 0
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE)
    for node in reversed(graph.proto.graph.node):
        if live.isdisjoint(node.output):
            continue
        if any(scope.type_of(o) in floats for o in node.output if o):
            live.update(i for i in node.input if i and scope.type_of(i) in floats)
        made = any(scope.type_of(o) == TensorProto.DOUBLE for o in node.output if o)
        count += made and node.op_type not in ("Cast", "Constant")
    return count


def _defaults(graph: Graph) -> Iterator[Finding]:
    """Inputs that a caller may leave out. Before version 4 of the format every weight was listed
    as one.
    """
    weights = {tensor.name for tensor in graph.proto.graph.initializer}
    names = [i.name for i in graph.proto.graph.input if i.name in weights]
    if names and graph.proto.ir_version >= 4:
        are, them = ("is a constant", "it") if len(names) == 1 else ("are constants", "them")
        message = (
            f"{counted(len(names), 'input')} with a default {are} here, as in an engine: "
            f"{some_of(names, _SHOWN)}; the typed model does not take {them}, remove the default "
            f"to feed {them}"
        )
        yield Finding("default-input", names[0], message)


def _random(graph: Graph) -> Iterator[Finding]:
    """Nodes that draw numbers anew at every run."""
    drawing = [
        name
        for node, name in zip(graph.proto.graph.node, graph.names, strict=True)
        if any(n.op_type in _RANDOM or _is_training(graph, n) for n in every_node([node]))
    ]
    if drawing:
        message = (
            f"random numbers are drawn by {some_of(drawing, _SHOWN)}: no two runs are the same, so "
            "no plan can be judged; make them inputs, or export the model for inference"
        )
        yield Finding("random", drawing[0], message, True)


def _is_training(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether it is a Dropout that drops: since opset 12 its third input says so, and its second
    how much.
    """
    if node.op_type != "Dropout" or len(node.input) < 3:
        return False
    share, mode = (graph.constants.get(name) for name in node.input[1:3])
    return mode is not None and bool(np.any(mode)) and (share is None or bool(np.any(share)))


def _whole_bodies(graph: Graph) -> Iterator[Finding]:
    """A body of control flow is lowered or pinned as a whole: where much of the network is in one
    the answer is coarse.
    """
    nodes = graph.proto.graph.node
    inside = {
        name: max((_count(body) for _, body in subgraphs(node)), default=0)
        for node, name in zip(nodes, graph.names, strict=True)
    }
    every = len(nodes) + sum(inside.values())
    for index, (name, count) in enumerate(inside.items()):
        node = nodes[index]
        is_layer = graph.role(index, Precision.FP16).kind is Kind.LAYER
        if is_layer and count >= _MUCH * every:
            message = (
                f"layer {name!r} holds {count} of {every} nodes that run: {_an(node.op_type)} "
                "is lowered or pinned as a whole; where its condition or count is always the same, "
                "make that a constant and fold it, and its layers are told apart"
            )
            yield Finding("control-flow", name, message, True)


def _an(op_type: str) -> str:
    return f"{'an' if op_type[0] in 'AEIOU' else 'a'} {op_type}"


def _count(body: onnx.GraphProto) -> int:
    """The nodes of ``body``, those of its own bodies too."""
    return len(body.node) + sum(_count(b) for node in body.node for _, b in subgraphs(node))


def _of_quantisation(graph: Graph) -> list[Finding]:
    """What engines refuse in a quantised model: UINT8, zero points other than 0, and, on TensorRT
    for RTX, INT8 convolutions (measured with 1.6.1.120, building without a GPU).
    """
    unsigned, shifted = list[str](), list[str]()
    eights = (TensorProto.INT8, TensorProto.UINT8)
    dequantised = set[str]()
    for node, name in zip(graph.proto.graph.node, graph.names, strict=True):
        if node.op_type not in _LINEAR:
            continue
        low = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
        kind = graph.types.type_of(low)
        if kind == TensorProto.UINT8 or node.op_type == "DynamicQuantizeLinear":
            unsigned.append(name)
        if node.op_type == "DequantizeLinear" and kind in eights:
            dequantised.add(node.output[0])
        zero = graph.constants.get(node.input[2]) if len(node.input) > 2 else None
        if zero is not None and np.any(zero.astype(np.float32) != 0.0):
            shifted.append(name)
    convolutions = [
        name
        for node, name in zip(graph.proto.graph.node, graph.names, strict=True)
        if node.op_type in ("Conv", "ConvTranspose") and dequantised.issuperset(node.input[:2])
    ]
    return [
        *refused("uint8", unsigned, "UINT8, which TensorRT refuses: quantise to INT8"),
        *refused("zero-point", shifted, "zero points other than 0, which TensorRT refuses"),
        *refused(
            "int8-convolution",
            convolutions,
            "INT8 convolutions, which TensorRT for RTX does not build (FP8 on newer GPUs does)",
        ),
    ]


def refused(kind: str, names: Sequence[str], what: str) -> Iterator[Finding]:
    """One finding on all of some nodes, if there are any, where the first of them is.

    Args:
        kind: the finding's.
        names: the nodes' ids.
        what: says what they are, and what to do.
    """
    if names:
        yield Finding(kind, names[0], f"{some_of(names, 1)}: {what}")


def open_sizes(graph: Graph) -> list[Finding]:
    """What is said of dynamic axes where no inputs are given."""
    axes = [f"{name} of input {spec.name!r}" for spec, _, name in dynamic_axes(_specs(graph))]
    if not axes:
        return []
    message = (
        f"dynamic axes: {', '.join(axes)}: a plan is tested at the sizes of the given inputs, so "
        "give some of each size that it will meet"
    )
    return [Finding("open-size", axes[0], message)]


def _specs(graph: Graph) -> list[InputSpec]:
    """What the model takes; nothing of one that a run refuses."""
    try:
        return input_specs(graph.proto)
    except BadInputError:
        return []
