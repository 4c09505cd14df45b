"""Whether a model is some block many times over: one session then serves all of them."""

from __future__ import annotations

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.cut_places import kinds_of, repeated_blocks
from bisect_trt.graph.passes.segmented import MOST_SEGMENTS
from bisect_trt.graph.tensors.operator_rules import is_standard


def repeats_a_block(graph: Graph) -> bool:
    """Whether at least half of the main graph's nodes are copies of others, with other weights of
    the same shapes; told without reading a weight.
    """
    main = graph.proto.graph
    shapes = {t.name: (t.data_type, *t.dims) for t in main.initializer}
    nodes = [n for n in main.node if n.op_type != "Constant" or not is_standard(n)]
    if not nodes:
        return False
    kinds = kinds_of(nodes, shapes.get, lambda _: False)
    copies = sum(b.copies for b in repeated_blocks(kinds, len(nodes) / MOST_SEGMENTS))
    return 2 * copies >= len(nodes)
