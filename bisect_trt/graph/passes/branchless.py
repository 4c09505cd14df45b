"""A segment whose switches compute both roundings and select one, for devices that enter the body
of an ``If`` from the host: each costs a GPU more than the rounding does.
"""

from __future__ import annotations

import onnx
from onnx import helper

from bisect_trt.graph.passes.segmented import Segment, is_switch
from bisect_trt.graph.tensor_types import opset_of

_SELECTS = 9
"""The opset that ``Where`` came with."""


def without_branches(segment: Segment) -> Segment:
    """``segment`` with a ``Where`` for each switch; its values are the same.

    Both roundings are computed and one is taken, so an infinity or NaN of the other does not show.
    Control flow of the source stays as it is.

    Args:
        segment: with its switches.

    Returns:
        A segment with the same inputs, flags and outputs; itself where its opset has no such
        ``Where``.
    """
    if opset_of(segment.model) < _SELECTS:
        return segment
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    del graph.node[:]
    for node in segment.model.graph.node:
        if not is_switch(node, segment.flags):
            graph.node.append(node)
            continue
        bodies = {a.name: a.g for a in node.attribute}
        choices = [_inlined(graph, bodies[b]) for b in ("then_branch", "else_branch")]
        # A flag is a scalar: whatever shape the tensor has stays.
        graph.node.append(helper.make_node("Where", [node.input[0], *choices], node.output))
        graph.node[-1].name = node.name
    return Segment(model, segment.takes, segment.gives, segment.flags, segment.weights)


def _inlined(graph: onnx.GraphProto, body: onnx.GraphProto) -> str:
    """The name under which the outer graph has the result of ``body``."""
    if len(body.node) == 1 and body.node[0].op_type == "Identity":
        return str(body.node[0].input[0])
    graph.initializer.extend(body.initializer)
    graph.node.extend(body.node)
    return str(body.output[0].name)
