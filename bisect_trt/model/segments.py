"""Cuts a switched model into segments that are run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import onnx
from onnx import helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.model.switched import Segment, is_switch
from bisect_trt.model.tensor_types import UNKNOWN, captured_names

SEGMENTS = 16
"""What a model is cut into at most."""

SEGMENT_NODES = 48
"""A model of fewer nodes a segment is not worth the calls."""


def cut(whole: Segment, graph: Graph, segments: int = SEGMENTS) -> Iterator[Segment]:
    """``whole`` as ``segments`` or fewer, in order, each made when it is asked for."""
    nodes = whole.model.graph.node
    wanted = min(segments, len(nodes) // SEGMENT_NODES)
    # A constant is no segment's to give.
    made = {name for node in nodes if not _is_constant(node) for name in node.output if name}
    if wanted < 2 or not made.issuperset(graph.outputs):
        yield whole
        return
    yield from _Cutter(whole, graph).segments(wanted)


def _is_constant(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Constant" and is_standard(node))


class _Cutter:
    """Cuts ``segment`` between any of its nodes but its constants."""

    def __init__(self, segment: Segment, graph: Graph) -> None:
        self._of, self._graph = segment, graph
        source = segment.model.graph
        self._inputs = {i.name: i for i in source.input}
        self._outputs = {o.name: o for o in source.output}
        self._initialisers = {t.name: t for t in source.initializer}
        # A constant stays one in every segment that reads it: kernels prepare those beforehand.
        self._constants = {n.output[0]: n for n in filter(_is_constant, source.node)}
        self._nodes = [node for node in source.node if not _is_constant(node)]
        self._reads = [
            dict.fromkeys((*filter(None, n.input), *captured_names(n))) for n in self._nodes
        ]
        # What a rewriter adds are versions of float tensors, and what roundings store in between.
        self._stored = {
            node.output[0]: attribute.i
            for node in self._nodes
            if node.op_type == "Cast"
            for attribute in node.attribute
            if attribute.name == "to"
        }
        self._made_at = {t: i for i, n in enumerate(self._nodes) for t in n.output if t}
        self._last_read = {t: i for i, reads in enumerate(self._reads) for t in reads}
        self._last_read |= dict.fromkeys(segment.gives, len(self._nodes))

    def segments(self, wanted: int) -> Iterator[Segment]:
        """The segments in order, but those of which nothing is read."""
        for start, end in pairwise([0, *self._places(wanted), len(self._nodes)]):
            segment = self._segment(start, end)
            if segment.gives:
                yield segment

    def _places(self, wanted: int) -> list[int]:
        """Nodes to cut before: near even places, where few tensors cross."""
        alive, count = self._alive(), len(self._nodes)
        length = count / wanted
        found = set[int]()
        for number in range(1, wanted):
            even = round(number * length)
            near = range(
                max(1, even - int(length / 4)),
                min(count, even + int(length / 4) + 1),
            )
            best = min(near, key=lambda place: (alive[place], abs(place - even)), default=even)
            if alive[best] < self._untyped:
                found.add(best)
        return sorted(found)

    @property
    def _untyped(self) -> int:
        """What a tensor of unknown type counts: more than cross any cut.

        Such a tensor cannot be given to a session, so no cut may be where one is alive.
        """
        return len(self._made_at) + 1

    def _alive(self) -> Sequence[int]:
        """How many tensors are alive before each node, and after the last."""
        changes = [0] * (len(self._nodes) + 2)
        for name, made in self._made_at.items():
            last = self._last_read.get(name, made)
            if last > made:
                weight = 1 if self._type_of(name) != UNKNOWN else self._untyped
                changes[made + 1] += weight
                changes[last + 1] -= weight
        return list(accumulate(changes))

    def _declared(self, name: str, *, ranked: bool) -> onnx.ValueInfoProto:
        """``name`` with its type, and if ``ranked`` its rank."""
        rank = self._graph.types.ranks.get(name) if ranked else None
        shape = None if rank is None else [None] * rank
        return helper.make_tensor_value_info(name, self._type_of(name), shape)

    def _type_of(self, name: str) -> int:
        known = self._graph.types.types
        return known[name] if name in known else self._stored.get(name, FLOAT)

    def _segment(self, start: int, end: int) -> Segment:
        source = self._of.model
        target = onnx.ModelProto(ir_version=source.ir_version)
        target.opset_import.extend(source.opset_import)
        target.functions.extend(source.functions)
        graph = target.graph
        graph.name = source.graph.name
        reads = dict.fromkeys(t for names in self._reads[start:end] for t in names)
        flags = {t: f for t in reads if (f := self._of.flags.get(t))}
        weights = {t: w for t in reads if (w := self._of.weights.get(t))}
        # The body of a Scan has shapes only where what it scans has a rank, which ONNX Runtime does
        # not infer through roundings.
        bodies = (n for n in self._nodes[start:end] if not is_switch(n, flags))
        scanned = dict.fromkeys(t for n in bodies for t in captured_names(n))
        takes = []
        for name in reads:
            if name in self._inputs:
                graph.input.append(self._inputs[name])
                if name not in flags and name not in weights:
                    takes.append(name)
            elif self._made_at.get(name, end) < start:
                graph.input.append(self._declared(name, ranked=name in scanned))
                takes.append(name)
        graph.initializer.extend(self._initialisers[t] for t in reads if t in self._initialisers)
        graph.node.extend(self._constants[t] for t in reads if t in self._constants)
        graph.node.extend(self._nodes[start:end])
        inside = (t for t in scanned if self._made_at.get(t, -1) >= start)
        graph.value_info.extend(self._declared(t, ranked=True) for t in inside)
        made = (t for node in self._nodes[start:end] for t in node.output if t)
        gives = [t for t in made if self._last_read.get(t, -1) >= end]
        for name in gives:
            graph.output.append(
                self._outputs.get(name)
                or helper.make_tensor_value_info(name, self._type_of(name), None)
            )
        return Segment(target, tuple(takes), tuple(gives), flags, weights)
