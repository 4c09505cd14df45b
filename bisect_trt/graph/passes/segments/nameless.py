"""A segment under names that say nothing: two that compute the same with other weights are then the
same bytes, and one session serves both.

Networks of thousands of nodes are some block many times over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from sys import intern

import onnx
from onnx import AttributeProto

from bisect_trt.graph.model.opset import operators
from bisect_trt.graph.passes.segments.segment import Segment, is_switch

_NUMBER = re.compile(r"@(node)?(\d+)")


@dataclass(frozen=True, slots=True)
class Names:
    """What a segment's own names are in the one without: of each tensor that it takes, gives, or is
    switched by ``outside``, and in the same place ``numbers``; ``nodes`` are those of its nodes.
    """

    outside: tuple[str, ...]
    numbers: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def inside(self) -> dict[str, str]:
        """The number of each tensor."""
        return dict(zip(self.outside, self.numbers, strict=True))

    def own(self, text: str) -> str:
        """``text``, a message about the segment without names, with its own ones."""
        outside = dict(zip(self.numbers, self.outside, strict=True))
        outside |= {f"@node{number}": name for number, name in enumerate(self.nodes)}
        return _NUMBER.sub(lambda found: outside.get(found[0], found[0]), text)


def nameless(segment: Segment) -> tuple[Segment, Names]:
    """``segment`` with its tensors numbered in the order in which they come up, and without what
    documents it, or the shapes of what it takes: behind a cut they are not known either. (A Scan
    needs them.)

    Args:
        segment: of any model; it stays as it is.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    # A switch is known by its tensor, whose name is there anyway.
    nodes = tuple(
        intern(node.output[0] if is_switch(node, segment.flags) else node.name)
        for node in graph.node
    )
    numbers: dict[str, str] = {}
    _rename(graph, numbers)
    for number, node in enumerate(graph.node):
        node.name = f"@node{number}"
    scans = "Scan" in operators(graph.node)
    taken = set() if scans else {numbers[name] for name in segment.takes}
    for value in graph.input:
        if value.name in taken and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    flags = {numbers[name]: flag for name, flag in segment.flags.items()}
    weights = {numbers[name]: weight for name, weight in segment.weights.items()}
    takes, gives = (tuple(numbers[n] for n in names) for names in (segment.takes, segment.gives))
    outside = (*segment.takes, *segment.gives, *segment.flags, *segment.weights)
    renamed = replace(segment, model=model, takes=takes, gives=gives, flags=flags, weights=weights)
    inside = tuple(intern(numbers[name]) for name in outside)
    return renamed, Names(tuple(map(intern, outside)), inside, nodes)


def _rename(graph: onnx.GraphProto, numbers: dict[str, str]) -> None:
    """Number the tensors of ``graph`` and of its bodies, which may read those around them: one name
    has one number everywhere.
    """
    graph.name, graph.doc_string = "graph", ""
    del graph.value_info[:], graph.metadata_props[:]
    sparse = [tensor.values for tensor in graph.sparse_initializer]
    for value in (*graph.input, *graph.output, *graph.initializer, *sparse):
        value.name = _number(value.name, numbers)
        value.doc_string = ""
        del value.metadata_props[:]
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        for names in (node.input, node.output):
            for slot, name in enumerate(names):
                if name:
                    names[slot] = _number(name, numbers)
        for attribute in node.attribute:
            attribute.doc_string = ""
            if attribute.type == AttributeProto.TENSOR:
                attribute.t.name = attribute.t.doc_string = ""
            for body in _bodies(attribute):
                _rename(body, numbers)


def _number(name: str, numbers: dict[str, str]) -> str:
    return numbers.setdefault(name, f"@{len(numbers)}")


def _bodies(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs
