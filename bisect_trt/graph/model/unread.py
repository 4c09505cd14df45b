"""Constants that nothing reads any more."""

from __future__ import annotations

import onnx

from bisect_trt.graph.tensors.tensor_types import subgraphs


def drop_unread(graph: onnx.GraphProto, converted: set[str]) -> None:
    """Remove the constants among ``converted`` that nothing reads any more."""
    unread = converted - _names_read(graph) if converted else converted
    if not unread:
        return
    kept = [t for t in graph.initializer if t.name not in unread]
    nodes = [n for n in graph.node if not (n.op_type == "Constant" and n.output[0] in unread)]
    for field_of, remaining in ((graph.initializer, kept), (graph.node, nodes)):
        if len(remaining) < len(field_of):
            del field_of[:]
            field_of.extend(remaining)


def _names_read(graph: onnx.GraphProto) -> set[str]:
    names = {o.name for o in graph.output}
    for node in graph.node:
        names.update(node.input)
        for _, body in subgraphs(node):
            names |= _names_read(body)
    return names
