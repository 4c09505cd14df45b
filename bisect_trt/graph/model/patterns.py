"""Groups of nodes that are one idea: normalisations written out in primitive operators, found by
their shape.

The decomposed forms are those that exporters write before opset 17 (LayerNormalization) and 23
(RMSNormalization).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from bisect_trt.graph.model.graph import Graph, as_graph


@dataclass(frozen=True)
class Pattern:
    """``kind`` names the idea ("LayerNorm"), ``layers`` the ids of its nodes in network order,
    ``decomposed`` how it is written.
    """

    kind: str
    layers: tuple[str, ...]
    decomposed: bool


_SINGLE = {
    "LayerNormalization": "LayerNorm",
    "RMSNormalization": "RMSNorm",
    "Softmax": "Softmax",
    "Gelu": "GELU",
}


def find_patterns(model: onnx.ModelProto | Graph) -> list[Pattern]:
    """The normalisations, softmaxes and GELUs of ``model``'s main graph, in network order."""
    source = as_graph(model)
    nodes = source.proto.graph.node
    ids = {o: n for node, n in zip(nodes, source.names, strict=True) for o in node.output}
    order = {name: position for position, name in enumerate(dict.fromkeys(ids.values()))}
    graph = gs.import_onnx(_light(source.proto))
    found = []
    for node in graph.nodes:
        if node.op in _SINGLE:
            members, kind, decomposed = [node], _SINGLE[node.op], False
        elif node.op == "Sqrt":
            members, decomposed = _normalisation(node), True
            kind = _kind_of(members)
        elif node.op == "Erf":
            members, kind, decomposed = _gelu(node), "GELU", True
        else:
            continue
        names = sorted({ids[m.outputs[0].name] for m in members}, key=order.__getitem__)
        if names:
            found.append(Pattern(kind, tuple(names), decomposed))
    return sorted(found, key=lambda p: order[p.layers[0]])


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph without its weights: patterns are about wiring."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = model.graph.name
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    light.graph.node.extend(n for n in model.graph.node if n.op_type != "Constant")
    return light


def _producer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The node that feeds ``node`` and is one of ``ops``."""
    for tensor in node.inputs:
        for producer in tensor.inputs:
            if producer.op in ops:
                return producer
    return None


def _consumer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The node that reads ``node``'s first output and is one of ``ops``."""
    for consumer in node.outputs[0].outputs:
        if consumer.op in ops:
            return consumer
    return None


def _normalisation(sqrt: gs.Node) -> list[gs.Node]:
    """From the square root outwards: mean, (Sub), square, mean, add epsilon, root, divide, scale
    and shift.
    """
    add = _producer(sqrt, "Add")
    mean = _producer(add, "ReduceMean") if add is not None else None
    square = _producer(mean, "Pow", "Mul") if mean is not None else None
    divide = _consumer(sqrt, "Div", "Reciprocal")
    if add is None or mean is None or square is None or divide is None:
        return []
    members = [square, mean, add, sqrt, divide]
    centre = _producer(square, "Sub")
    if centre is not None:
        members.append(centre)
        first_mean = _producer(centre, "ReduceMean")
        if first_mean is not None:
            members.append(first_mean)
    scale = _consumer(divide, "Mul")
    if scale is not None:
        members.append(scale)
        shift = _consumer(scale, "Add")
        if shift is not None and centre is not None and not _reads_layer(shift, scale):
            members.append(shift)
    return members


def _kind_of(members: list[gs.Node]) -> str:
    """Which normalisation ``members`` are: an RMSNorm where no mean is subtracted, and between two
    reshapes one of groups of channels.
    """
    centre = next((m for m in members if m.op == "Sub"), None)
    if centre is None:
        return "RMSNorm"
    divide = next((m for m in members if m.op == "Div"), None)
    grouped = _producer(centre, "Reshape") is not None
    back = divide is not None and _consumer(divide, "Reshape") is not None
    return "GroupNorm" if grouped and back else "LayerNorm"


def _reads_layer(node: gs.Node, known: gs.Node) -> bool:
    """True if ``node`` reads another computed tensor than ``known``'s: a residual addition, not the
    shift.
    """
    return any(producer is not known for tensor in node.inputs for producer in tensor.inputs)


def _gelu(erf: gs.Node) -> list[gs.Node]:
    """x * 0.5 * (1 + erf(x / sqrt(2))), in either order of the products."""
    divide, add = _producer(erf, "Div", "Mul"), _consumer(erf, "Add")
    product = _consumer(add, "Mul") if add is not None else None
    if divide is None or add is None or product is None:
        return []
    last = _consumer(product, "Mul")
    return [divide, erf, add, product, *([last] if last is not None else [])]
