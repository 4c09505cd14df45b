"""Other places of a model that look like some of its nodes: where one block goes wrong, its sisters
may too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from bisect_trt.graph.model.graph import Graph

Neighbours = Mapping[str, Sequence[str]]


def nodes_alike(graph: Graph, names: Collection[str]) -> tuple[str, ...]:
    """The nodes that are connected to each other as ``names`` are, these among them, in the file's
    order.

    A node is like one of ``names`` if its operator is the same, and for each neighbour that the one
    has among ``names`` it has a neighbour that is like that. What fails this is struck off until
    nothing more does (arc consistency: Mackworth, Artificial Intelligence 8, 1977), so that more
    may be found than a match of whole blocks would find, and never less.

    Args:
        graph: the model; its main graph is looked at.
        names: ids of some of its nodes.
    """
    operators = {
        n: node.op_type for n, node in zip(graph.names, graph.proto.graph.node, strict=True)
    }
    before, after = _neighbours(graph)
    like = {one: {n for n, op in operators.items() if op == operators[one]} for one in names}
    sides = [(side, _among(names, side)) for side in (before, after)]
    changed = True
    while changed:
        changed = False
        for one, places in like.items():
            kept = {
                n
                for n in places
                if all(_has(side[n], inside[one], like, operators) for side, inside in sides)
            }
            changed = changed or kept != places
            like[one] = kept
    found = set[str]().union(*like.values())
    return tuple(n for n in graph.names if n in found)


def _has(
    neighbours: Sequence[str],
    wanted: Sequence[str],
    like: Mapping[str, Collection[str]],
    operators: Mapping[str, str],
) -> bool:
    """Whether there are as many neighbours like those ``wanted`` of each operator."""
    for operator, count in Counter(operators[w] for w in wanted).items():
        fitting = set[str]().union(*(like[w] for w in wanted if operators[w] == operator))
        if sum(n in fitting for n in neighbours) < count:
            return False
    return True


def _among(names: Collection[str], side: Neighbours) -> dict[str, list[str]]:
    return {one: [n for n in side[one] if n in names] for one in names}


def _neighbours(graph: Graph) -> tuple[Neighbours, Neighbours]:
    """The nodes that give each node its inputs, and those that read its outputs."""
    nodes = list(zip(graph.names, graph.proto.graph.node, strict=True))
    source = {tensor: name for name, node in nodes for tensor in node.output if tensor}
    before = {name: _sources(node.input, source) for name, node in nodes}
    after: dict[str, list[str]] = {name: [] for name, _ in nodes}
    for name, givers in before.items():
        for giver in dict.fromkeys(givers):
            after[giver].append(name)
    return before, after


def _sources(tensors: Iterable[str], source: Mapping[str, str]) -> list[str]:
    return [source[t] for t in tensors if t in source]
