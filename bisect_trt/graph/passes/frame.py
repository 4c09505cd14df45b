"""A graph or body while it is written: its tensors, their versions, and what nobody reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from bisect_trt.core.precision import Precision
from bisect_trt.graph.constants import Constants
from bisect_trt.graph.tensor_types import Scope, subgraphs


@dataclass
class Frame:
    """One graph being written (nodes go straight into it), what its tensors are, and which versions
    of them exist.

    ``state`` says at which precision a tensor already is (stored so, or rounded so); absent means
    FP32. ``versions`` maps (tensor, precision) to the name under which that version can be read.
    """

    scope: Scope
    graph: onnx.GraphProto
    parent: Frame | None
    state: dict[str, Precision] = field(default_factory=dict)
    versions: dict[tuple[str, Precision], str] = field(default_factory=dict)
    constants: Constants = field(default_factory=lambda: Constants(onnx.GraphProto()))
    outputs: frozenset[str] = frozenset()
    converted: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Frame:
        """The frame that defines ``name``."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.scope.types:
                return frame
            frame = frame.parent
        return self


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
