"""Whether one session serves many parts of a model: some block many times over, or few kinds of
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from bisect_trt.model.graph import Graph, operators
from bisect_trt.model.precision_rules import FLOAT, QUANTISES
from bisect_trt.model.segments import (
    MOST_SEGMENTS,
    Crossing,
    Cutter,
    Kinds,
    PackedSegment,
    is_constant,
    kinds_of,
)
from bisect_trt.model.switched import Segment, is_switch
from bisect_trt.model.tensor_types import captured_names

SESSION = 16
"""Nodes that take as much memory as a session of none: 0.17 MB."""

FEWEST_NODES = 8_000
"""Of a model in phrases. With fewer a session for every segment keeps to what is promised of memory
too, and takes 0.6 of the time: two runs side by side are no faster than one of phrases."""

_FREQUENT = 128
"""Times that a pair stands together before it is worth a session: of so many phrases the objects
take what its sessions do, and each run saves as many calls of 11 us."""


def in_phrases(parts: Sequence[PackedSegment], graph: Graph) -> Iterator[Iterator[Segment]]:
    """Each of ``parts`` as phrases, to be run one after the other, made when they are asked for."""
    known: dict[tuple[object, ...], int] = {}
    numbers: dict[bytes, int] = {}
    layers, begins = [], []
    for part in parts:
        segment = part.unpacked()
        cutter = Cutter(segment, graph)
        asked = segment.flags.keys() | segment.weights.keys()
        told = {
            i.name: i.type.SerializeToString(deterministic=True)
            for i in segment.model.graph.input
            if i.name in asked
        }
        kinds = kinds_of(cutter.nodes, told.get, "If".__eq__, known)
        begin = _begins(cutter, segment)
        own = (kinds[a:b].tobytes() for a, b in pairwise([0, *begin, len(kinds)]))
        layers.append(np.asarray([numbers.setdefault(one, len(numbers)) for one in own], np.intp))
        begins.append(begin)
    for part, begin, first in zip(parts, begins, together(layers), strict=True):
        places = [begin[i - 1] for i in first if i]
        yield Cutter(part.unpacked(), graph).between(places)


def has_phrases(graph: Graph) -> bool:
    """Whether a model may be run by phrases. A Scan may not stand alone: ONNX Runtime derives
    shapes for it from the nodes before.
    """
    nodes = graph.proto.graph.node
    return len(nodes) >= FEWEST_NODES and "Scan" not in operators(nodes)


def _begins(cutter: Cutter, segment: Segment) -> list[int]:
    """The nodes that layers begin with, but for the first: a switch of what the layer before made
    belongs to that, any other to the layer that reads it.
    """
    crossing = cutter.crossing()
    found, made, has_operator = [], set[str](), False
    for place, node in enumerate(cutter.nodes):
        switch = is_switch(node, segment.flags)
        belongs = switch and not made.isdisjoint(captured_names(node))
        if has_operator and not belongs and crossing.alive[place] <= crossing.most:
            found.append(place)
            made, has_operator = set(), False
        made.update(node.output)
        has_operator |= not switch
    return found


def together(rows: Sequence[Kinds]) -> list[list[int]]:
    """Where phrases begin in each row."""
    row = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    start = np.concatenate([np.arange(len(one)) for one in rows])
    tokens = np.concatenate(rows)
    fresh = 1 + int(tokens.max(initial=0))
    while True:
        within = row[:-1] == row[1:]
        pairs = np.where(within, tokens[:-1] * fresh + tokens[1:], -1)
        values, counts = np.unique(pairs[within], return_counts=True)
        if not len(counts) or counts.max() < _FREQUENT:
            break
        first = _apart(np.flatnonzero(pairs == values[np.argmax(counts)]))
        tokens[first] = fresh
        fresh += 1
        left = np.ones(len(tokens), np.bool_)
        left[first + 1] = False
        tokens, row, start = tokens[left], row[left], start[left]
    return [start[row == place].tolist() for place in range(len(rows))]


def _apart(places: NDArray[np.intp]) -> NDArray[np.intp]:
    """Every second of ``places`` that follow each other: a pair of one kind overlaps itself."""
    order = np.arange(len(places))
    begins = np.concatenate(([True], np.diff(places) != 1))
    within = order - np.maximum.accumulate(np.where(begins, order, 0))
    return np.asarray(places[within % 2 == 0])


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
