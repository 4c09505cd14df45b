"""Which layers of a model only move values, and what stands around them."""

from __future__ import annotations

from bisect_trt.core.movers import EXACT, Movers
from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.layers import Kind
from bisect_trt.graph.tensors.operator_rules import FLOAT, MOVES
from bisect_trt.graph.tensors.tensor_types import captured_names

_MOVE_TOO = frozenset({"Dropout"})
"""At inference."""


def list_movers(graph: Graph, precision: Precision) -> Movers:
    """The layers that move values and read no constant, where layers run in ``precision``; none of
    TF32, which rounds no values between layers.
    """
    if not precision.is_storage:
        return Movers()
    names, types = graph.names, graph.types
    layers = {x.index for x in graph.layers_at(precision)}
    maker: dict[str, str] = {}
    readers: dict[str, list[str]] = {name: [EXACT] for name in graph.outputs}
    nodes = graph.proto.graph.node
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        is_layer = index in layers
        reduced = graph.role(index, precision).reduced_in if is_layer else ()
        for slot, tensor in enumerate(node.input):
            if tensor and types.type_of(tensor) == FLOAT:
                readers.setdefault(tensor, []).append(name if slot in reduced else EXACT)
        for tensor in captured_names(node):
            readers.setdefault(tensor, []).append(name if is_layer else EXACT)
        if is_layer:
            maker.update((o, name) for o in node.output if o)
    sources: dict[str, tuple[str, ...]] = {}
    read_by: dict[str, tuple[str, ...]] = {}
    for index in sorted(layers):
        node, role = nodes[index], graph.role(index, precision)
        if node.op_type not in MOVES | _MOVE_TOO or role.kind is not Kind.LAYER:
            continue
        read = [node.input[slot] for slot in role.reduced_in]
        if any(tensor in graph.float_constants for tensor in read):
            continue
        sources[names[index]] = tuple(dict.fromkeys(maker.get(t, EXACT) for t in read))
        given = [r for o in node.output if o for r in readers.get(o, ())]
        read_by[names[index]] = tuple(dict.fromkeys(given))
    return Movers(sources, read_by)
