"""A segment whose switches compute both roundings and take one: for devices that enter the body of
an ``If`` from the host, where each costs more than the rounding does, and for thousands of small
tensors, whose bodies take most of a session's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from bisect_trt.graph.passes.segments.segment import Segment, is_switch
from bisect_trt.graph.tensors.tensor_types import opset_of

_SELECTS, _LISTS = 9, 11
"""The opsets that ``Where`` and ``SequenceConstruct`` came with."""


def without_branches(segment: Segment) -> Segment:
    """``segment`` with a ``Where`` for each switch; its values are the same.

    An infinity or NaN of the rounding that is not taken does not show. Control flow of the source
    stays as it is. The CPU's ``Where`` gives 0 for -0; :func:`with_lists` does not.

    Args:
        segment: with its switches.

    Returns:
        A segment with the same inputs, flags and outputs; itself where its opset has no such
        ``Where``.
    """
    if opset_of(segment.model) < _SELECTS:
        return segment

    # A flag is a scalar: whatever shape the tensor has stays.
    def select(node: onnx.NodeProto, if_true: str, if_false: str) -> list[onnx.NodeProto]:
        inputs = [node.input[0], if_true, if_false]
        return [helper.make_node("Where", inputs, node.output, name=node.name)]

    return _flat(segment, select)[0]


def with_lists(segment: Segment) -> tuple[Segment, frozenset[str]]:
    """``segment`` with a list of both roundings for each switch, and its flag as the place in it;
    its values are the same bit for bit.

    Args:
        segment: with its switches.

    Returns:
        A segment with the same inputs, flags and outputs, and which of the flags are 64-bit
        integers in it, 0 or 1; itself and none where its opset has no lists.
    """
    if opset_of(segment.model) < _LISTS:
        return segment, frozenset()

    def select(node: onnx.NodeProto, if_true: str, if_false: str) -> list[onnx.NodeProto]:
        both = [node.name]  # no tensor is called so: the name was made fresh
        return [
            helper.make_node("SequenceConstruct", [if_false, if_true], both),
            helper.make_node("SequenceAt", [*both, node.input[0]], node.output, name=node.name),
        ]

    flat, places = _flat(segment, select)
    for given in flat.model.graph.input:
        if given.name in places:
            given.type.tensor_type.elem_type = TensorProto.INT64
    return flat, places


def _flat(
    segment: Segment, select: Callable[[onnx.NodeProto, str, str], list[onnx.NodeProto]]
) -> tuple[Segment, frozenset[str]]:
    """``segment`` with what ``select`` makes of each switch, whose two results are computed before
    it, and the flags of those.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    del graph.node[:]
    flags = set()
    for node in segment.model.graph.node:
        if not is_switch(node, segment.flags):
            graph.node.append(node)
            continue
        bodies = {a.name: a.g for a in node.attribute}
        choices = [_inlined(graph, bodies[b]) for b in ("then_branch", "else_branch")]
        graph.node.extend(select(node, *choices))
        flags.add(node.input[0])
    return replace(segment, model=model), frozenset(flags)


def _inlined(graph: onnx.GraphProto, body: onnx.GraphProto) -> str:
    """The name under which the outer graph has the result of ``body``."""
    if len(body.node) == 1 and body.node[0].op_type == "Identity":
        return str(body.node[0].input[0])
    graph.initializer.extend(body.initializer)
    graph.node.extend(body.node)
    return str(body.output[0].name)
