"""Whether one session serves many parts of a model: some block many times over, or few kinds of
layers.
"""

from __future__ import annotations

from itertools import pairwise

from onnx import TensorProto

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.segments.cut_places import Crossing, Kinds, kinds_of
from bisect_trt.graph.passes.segments.phrases import SESSION, has_phrases, together
from bisect_trt.graph.passes.segments.segmented import MOST_SEGMENTS, is_constant
from bisect_trt.graph.tensors.operator_rules import FLOAT, QUANTISES


def shares_sessions(graph: Graph) -> bool:
    """Whether the segments that the main graph would be cut into are copies of others, with other
    weights of the same shapes, for half of its nodes at least, or many layers are of few kinds;
    told without reading a weight.
    """
    main = graph.proto.graph
    nodes = [node for node in main.node if not is_constant(node)]
    if not {name for node in nodes for name in node.output}.issuperset(graph.outputs):
        return False  # it is not cut
    # What is no weight is part of a segment, by its values.
    fixed = {name for n in nodes if n.op_type in QUANTISES for name in n.input}
    told = {
        t.name: (
            t.data_type,
            *t.dims,
            _content(t) if t.data_type != FLOAT or t.name in fixed else "",
        )
        for t in main.initializer
    }
    kinds = kinds_of(nodes, told.get, lambda _: False)
    anywhere = Crossing([0] * (len(nodes) + 1), 0)
    places = anywhere.alike(kinds, len(nodes) / MOST_SEGMENTS)
    segments = {kinds[a:b].tobytes(): b - a for a, b in pairwise([0, *places, len(nodes)])}
    return 2 * sum(segments.values()) <= len(nodes) or (has_phrases(graph) and _are_few(kinds))


def _are_few(kinds: Kinds) -> bool:
    """Whether the phrases of a network whose layers are of ``kinds`` are worth sharing sessions."""
    (first,) = together([kinds])
    phrases = {kinds[a:b].tobytes(): b - a for a, b in pairwise([*first, len(kinds)])}
    # Each node has a switch beside it there; what reads what makes more kinds of them.
    held = 2 * sum(phrases.values()) + SESSION * len(phrases)
    return 2 * held <= len(kinds)


def _content(tensor: TensorProto) -> bytes:
    """The values of ``tensor``, or where they lie."""
    unnamed = TensorProto()
    unnamed.CopyFrom(tensor)
    unnamed.name = ""
    return bytes(unnamed.SerializeToString(deterministic=True))
