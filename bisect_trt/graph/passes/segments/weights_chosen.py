"""A segment that holds both versions of each weight and selects one, for sessions whose inputs may
not change their place: a CUDA graph replays addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from bisect_trt.graph.passes.segments.segment import Segment


@dataclass(frozen=True)
class Choice:
    """The inputs in place of one weight: its two versions and what says that the lowered one is
    read.
    """

    pinned: str
    lowered: str
    switch: str


def with_weights_chosen(segment: Segment) -> tuple[onnx.ModelProto, Mapping[str, Choice]]:
    """The model of ``segment`` with a ``Where`` for each weight, and the inputs of each.

    Args:
        segment: of an opset that has ``Where``.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken.update(i.name for i in graph.input)

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    declared = {i.name: i for i in graph.input}
    choices, selected = {}, []
    for name in segment.weights:
        choice = Choice(
            fresh(f"{name}__pinned"), fresh(f"{name}__lowered"), fresh(f"{name}__switch")
        )
        for version in (choice.pinned, choice.lowered):
            taken_as = onnx.ValueInfoProto()
            taken_as.CopyFrom(declared[name])
            taken_as.name = version
            graph.input.append(taken_as)
        graph.input.append(helper.make_tensor_value_info(choice.switch, TensorProto.BOOL, []))
        inputs = [choice.switch, choice.lowered, choice.pinned]
        selected.append(helper.make_node("Where", inputs, [name], fresh(f"{name}__selected")))
        choices[name] = choice
    kept = [i for i in graph.input if i.name not in segment.weights]
    nodes = [*selected, *graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(kept)
    graph.node.extend(nodes)
    return model, choices
