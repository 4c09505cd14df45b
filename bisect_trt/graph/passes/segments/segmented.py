"""A switched model cut into segments: another plan is then run from the first segment it changes.

A segment is a model of its own. What crosses a cut are the tensors that later nodes read; cuts are
made where few do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import onnx
from onnx import helper

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.segments.cut_places import Crossing, kinds_of
from bisect_trt.graph.passes.segments.segment import Segment, is_switch
from bisect_trt.graph.passes.switched import SwitchedModel
from bisect_trt.graph.tensors.operator_rules import FLOAT, is_standard
from bisect_trt.graph.tensors.tensor_types import UNKNOWN, captured_names

MOST_SEGMENTS = 16
_FEWEST_NODES = 48
"""A model of fewer nodes a segment is not worth the calls."""


def cut(
    switched: SwitchedModel, graph: Graph, most: int = MOST_SEGMENTS, *, alike: bool = False
) -> Iterator[Segment]:
    """``switched`` as about ``most`` segments at most, to be run one after the other; each is made
    when it is asked for.

    Args:
        switched: written of ``graph``.
        graph: knows the types of its tensors.
        most: segments.
        alike: whether a network that repeats a block is cut where that begins, so that segments are
            the same but for their weights.

    Yields:
        One segment, the model itself, where it is small or no place can be cut.
    """
    whole = _whole(switched, graph)
    nodes = switched.model.graph.node
    wanted = min(most, len(nodes) // _FEWEST_NODES)
    # A constant is no segment's to give.
    made = {name for node in nodes if not is_constant(node) for name in node.output if name}
    if wanted < 2 or not made.issuperset(graph.outputs):
        yield whole
        return
    cutter = Cutter(whole, graph)
    crossing, length = cutter.crossing(), len(cutter.nodes) / wanted
    places = (
        crossing.alike(kinds_of(cutter.nodes, cutter.told, "If".__eq__), length)
        if alike
        else crossing.even(0, len(cutter.nodes), length)
    )
    yield from cutter.between(places)


def _whole(switched: SwitchedModel, graph: Graph) -> Segment:
    apart = switched.flags.keys() | switched.weights.keys()
    takes = tuple(i.name for i in switched.model.graph.input if i.name not in apart)
    return Segment(switched.model, takes, graph.outputs, switched.flags, switched.weights)


def is_constant(node: onnx.NodeProto) -> bool:
    """Whether ``node`` is one of ONNX's constants."""
    return bool(node.op_type == "Constant" and is_standard(node))


class Cutter:
    """Cuts ``segment`` between any of its ``nodes``, which are those but its constants.

    Args:
        segment: makes all that it gives.
        graph: knows the types of its tensors.
    """

    def __init__(self, segment: Segment, graph: Graph) -> None:
        self._of, self._graph = segment, graph
        source = segment.model.graph
        self._inputs = {i.name: i for i in source.input}
        self._outputs = {o.name: o for o in source.output}
        self._initialisers = {t.name: t for t in source.initializer}
        constant = filter(is_constant, source.node)
        # A constant stays one in every segment that reads it: kernels prepare those beforehand.
        self._constants = {n.output[0]: n for n in constant}
        self.nodes = [node for node in source.node if not is_constant(node)]
        self._reads = [
            dict.fromkeys((*filter(None, n.input), *captured_names(n))) for n in self.nodes
        ]
        # What a rewriter adds are versions of float tensors, and what roundings store in between.
        self._stored = {
            node.output[0]: attribute.i
            for node in self.nodes
            if node.op_type == "Cast"
            for attribute in node.attribute
            if attribute.name == "to"
        }
        self._made_at = {t: i for i, n in enumerate(self.nodes) for t in n.output if t}
        self._last_read = {t: i for i, reads in enumerate(self._reads) for t in reads}
        self._last_read |= dict.fromkeys(segment.gives, len(self.nodes))

    def between(self, places: Sequence[int]) -> Iterator[Segment]:
        """The segments in order, but those of which nothing is read.

        Args:
            places: the nodes that all but the first begin with, ascending.
        """
        ends = [*places, len(self.nodes)]
        for start, end in zip([0, *ends], ends, strict=False):
            segment = self._segment(start, end)
            if segment.gives:
                yield segment

    def crossing(self) -> Crossing:
        """How many tensors are alive between nodes; only one whose type is told may cross a cut."""
        most = len(self._made_at)
        changes = [0] * (len(self.nodes) + 2)
        for name, made in self._made_at.items():
            last = self._last_read.get(name, made)
            if last > made:
                # More than any cut has: a tensor without a type cannot be given to a session.
                weight = 1 if self._type_of(name) != UNKNOWN else most + 1
                changes[made + 1] += weight
                changes[last + 1] -= weight
        return Crossing(list(accumulate(changes)), most)

    def told(self, name: str) -> bytes | None:
        """The type of one of the model's inputs, weights and flags among them."""
        given = self._inputs.get(name)
        return None if given is None else given.type.SerializeToString(deterministic=True)

    def _declared(self, name: str, *, ranked: bool) -> onnx.ValueInfoProto:
        """``name`` with its type, and if ``ranked`` its rank. The body of a Scan has shapes only
        where what it scans has one, which ONNX Runtime does not infer through a list of roundings.
        """
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
        bodies = (n for n in self.nodes[start:end] if not is_switch(n, flags))
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
        graph.node.extend(self.nodes[start:end])
        inside = (t for t in scanned if self._made_at.get(t, -1) >= start)
        graph.value_info.extend(self._declared(t, ranked=True) for t in inside)
        made = (t for node in self.nodes[start:end] for t in node.output if t)
        gives = [t for t in made if self._last_read.get(t, -1) >= end]
        for name in gives:
            graph.output.append(
                self._outputs.get(name)
                or helper.make_tensor_value_info(name, self._type_of(name), None)
            )
        return Segment(target, tuple(takes), tuple(gives), flags, weights)
