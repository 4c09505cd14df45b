"""The outputs that decide: integers and truth values that come from what layers compute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from bisect_trt.graph.model.discrete import FLOATS
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.tensor_types import captured_names

_OF_SHAPES = frozenset({"Shape", "Size"})
"""Operators that read no value."""


def decided_outputs(graph: Graph, layers: Collection[str]) -> frozenset[str]:
    """The names of outputs that are integers or truth values, and of which some of ``layers`` may
    change a value: a class, an index, a mask. Such a value is another or is not, by no margin.

    Args:
        graph: the model.
        layers: ids of those that run reduced.
    """
    made_by = {
        tensor: place
        for place, node in enumerate(graph.proto.graph.node)
        for tensor in node.output
        if tensor
    }
    lowered = frozenset(layers)
    return frozenset(
        name
        for name in graph.outputs
        if graph.types.type_of(name) not in FLOATS and _comes_from(graph, name, made_by, lowered)
    )


_KEEP_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the elements and their order."""


@dataclass(frozen=True)
class Decision:
    """An output that is the place of the largest (or smallest) value of ``tensor`` along ``axis``,
    in whatever shape.
    """

    tensor: str
    axis: int
    smallest: bool


def list_decisions(model: onnx.ModelProto) -> dict[str, Decision]:
    """The outputs of ``model`` that an ArgMax or ArgMin makes, by name."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    found = {}
    for output in model.graph.output:
        node = makers.get(output.name)
        for _ in model.graph.node:  # no more often: a file may hold a circle
            if node is None or node.op_type not in _KEEP_ORDER:
                break
            node = makers.get(node.input[0])
        if node is not None and node.op_type in ("ArgMax", "ArgMin"):
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found[output.name] = Decision(node.input[0], axis, node.op_type == "ArgMin")
    return found


def _comes_from(graph: Graph, output: str, made_by: dict[str, int], layers: frozenset[str]) -> bool:
    left, seen = [output], set[str]()
    while left:
        name = left.pop()
        place = made_by.get(name)
        if name in seen or place is None:
            continue
        seen.add(name)
        if graph.names[place] in layers:
            return True
        node = graph.proto.graph.node[place]
        if node.op_type not in _OF_SHAPES:
            left += [*node.input, *captured_names(node)]
    return False
