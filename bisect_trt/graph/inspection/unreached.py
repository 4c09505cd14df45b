"""Layers whose results reach no output: engines drop them, and nothing they do is seen."""

from __future__ import annotations

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.tensor_types import captured_names


def unreached(graph: Graph) -> frozenset[str]:
    """The names of those nodes of ``graph``."""
    live, found = set(graph.outputs), set[str]()
    for node, name in zip(reversed(graph.proto.graph.node), reversed(graph.names), strict=True):
        if live.isdisjoint(node.output):
            found.add(name)
        else:
            live.update(i for i in (*node.input, *captured_names(node)) if i)
    return frozenset(found)
