"""A switched model cut into segments: another plan is then run from the first segment it changes.

A segment is a model of its own. What crosses a cut are the tensors that later nodes read; cuts are
made where few do. A segment whose switches all stand alike can be written without them, which for
networks of thousands of small nodes is most of their time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx
from onnx import helper

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.cut_places import Crossing, kinds_of
from bisect_trt.graph.passes.switched import Flag, SwitchedModel, Weight
from bisect_trt.graph.tensors.operator_rules import FLOAT, is_standard
from bisect_trt.graph.tensors.tensor_types import UNKNOWN, captured_names

MOST_SEGMENTS = 16
_FEWEST_NODES = 48
"""A model of fewer nodes a segment is not worth the calls."""


@dataclass(frozen=True)
class Segment:
    """``model`` takes ``takes`` (the model's inputs and tensors of earlier segments), a boolean for
    each of ``flags`` and a tensor for each of ``weights``, and gives ``gives``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


def cut(
    switched: SwitchedModel, graph: Graph, most: int = MOST_SEGMENTS, *, alike: bool = False
) -> list[Segment]:
    """``switched`` as about ``most`` segments at most, to be run one after the other.

    Args:
        switched: written of ``graph``.
        graph: knows the types of its tensors.
        most: segments.
        alike: whether a network that repeats a block is cut where that begins, so that segments are
            the same but for their weights.

    Returns:
        One segment, the model itself, where it is small or no place can be cut.
    """
    nodes = list(switched.model.graph.node)
    wanted = min(most, len(nodes) // _FEWEST_NODES)
    made = {name for node in nodes for name in node.output if name}
    if wanted < 2 or not made.issuperset(graph.outputs):
        whole = tuple(
            i.name
            for i in switched.model.graph.input
            if i.name not in switched.flags and i.name not in switched.weights
        )
        return [Segment(switched.model, whole, graph.outputs, switched.flags, switched.weights)]
    return list(_Cutter(switched, graph, nodes).segments(wanted, alike))


class _Cutter:
    def __init__(
        self, switched: SwitchedModel, graph: Graph, nodes: Sequence[onnx.NodeProto]
    ) -> None:
        self._switched, self._graph = switched, graph
        source = switched.model.graph
        self._inputs = {i.name: i for i in source.input}
        self._outputs = {o.name: o for o in source.output}
        self._initialisers = {t.name: t for t in source.initializer}
        constant = [n for n in nodes if n.op_type == "Constant" and is_standard(n)]
        # A constant stays one in every segment that reads it: kernels prepare those beforehand.
        self._constants = {n.output[0]: n for n in constant}
        self._nodes = [n for n in nodes if n.op_type != "Constant" or not is_standard(n)]
        self._reads = [
            dict.fromkeys((*filter(None, n.input), *captured_names(n))) for n in self._nodes
        ]
        self._made_at = {t: i for i, n in enumerate(self._nodes) for t in n.output if t}
        self._last_read = {t: i for i, reads in enumerate(self._reads) for t in reads}
        self._last_read |= dict.fromkeys(graph.outputs, len(self._nodes))

    def segments(self, wanted: int, alike: bool) -> Iterator[Segment]:
        """The segments in order."""
        ends = [*self._cuts(wanted, alike), len(self._nodes)]
        for start, end in zip([0, *ends], ends, strict=False):
            yield self._segment(start, end)

    def _cuts(self, wanted: int, alike: bool) -> list[int]:
        """Places between nodes at which few tensors are alive, and only such whose type is told."""
        count = len(self._nodes)
        most = len(self._made_at)
        changes = [0] * (count + 2)
        for name, made in self._made_at.items():
            last = self._last_read.get(name, made)
            if last > made:
                # More than any cut has: a tensor without a type cannot be given to a session.
                weight = 1 if self._type_of(name) != UNKNOWN else most + 1
                changes[made + 1] += weight
                changes[last + 1] -= weight
        crossing = Crossing(list(accumulate(changes)), most)
        if alike:
            return crossing.alike(kinds_of(self._nodes, self._told, "If".__eq__), count / wanted)
        return crossing.even(0, count, count / wanted)

    def _told(self, name: str) -> bytes | None:
        """The type of one of the model's inputs, weights and flags among them."""
        given = self._inputs.get(name)
        return None if given is None else given.type.SerializeToString(deterministic=True)

    def _type_of(self, name: str) -> int:
        known = self._graph.types.types
        # What the switched model adds are versions of float tensors.
        return known.get(name, FLOAT)

    def _segment(self, start: int, end: int) -> Segment:
        source = self._switched.model
        target = onnx.ModelProto(ir_version=source.ir_version)
        target.opset_import.extend(source.opset_import)
        target.functions.extend(source.functions)
        graph = target.graph
        graph.name = source.graph.name
        reads = dict.fromkeys(t for names in self._reads[start:end] for t in names)
        flags = {t: f for t in reads if (f := self._switched.flags.get(t))}
        weights = {t: w for t in reads if (w := self._switched.weights.get(t))}
        takes = []
        for name in reads:
            if name in self._inputs:
                graph.input.append(self._inputs[name])
                if name not in flags and name not in weights:
                    takes.append(name)
            elif self._made_at.get(name, end) < start:
                graph.input.append(helper.make_tensor_value_info(name, self._type_of(name), None))
                takes.append(name)
        graph.initializer.extend(self._initialisers[t] for t in reads if t in self._initialisers)
        graph.node.extend(self._constants[t] for t in reads if t in self._constants)
        graph.node.extend(self._nodes[start:end])
        made = (t for node in self._nodes[start:end] for t in node.output if t)
        gives = [t for t in made if self._last_read.get(t, -1) >= end]
        for name in gives:
            graph.output.append(
                self._outputs.get(name)
                or helper.make_tensor_value_info(name, self._type_of(name), None)
            )
        return Segment(target, tuple(takes), tuple(gives), flags, weights)


def settled(segment: Segment, on: Collection[str]) -> Segment:
    """``segment`` with its switches written out as they stand; kernels, and so numbers, stay.

    Args:
        segment: with its switches.
        on: the flags that are true.

    Returns:
        A segment with fewer flags: none but those of the source's control flow.
    """
    source = segment.model.graph
    target = onnx.ModelProto(ir_version=segment.model.ir_version)
    target.opset_import.extend(segment.model.opset_import)
    target.functions.extend(segment.model.functions)
    graph = target.graph
    graph.name = source.name
    graph.initializer.extend(source.initializer)
    graph.output.extend(source.output)
    switches = [is_switch(node, segment.flags) for node in source.node]
    pairs = list(zip(source.node, switches, strict=True))
    # A name that a body reads, or that leaves the segment, stays.
    fixed = {t for n, switch in pairs if not switch for t in captured_names(n)}
    fixed.update(segment.gives)
    alias: dict[str, str] = {}
    for node, switch in pairs:
        if not switch:
            _append(graph, node, alias)
            continue
        (name,) = node.output
        branch = next(a.g for a in node.attribute if a.name == _BRANCH[node.input[0] in on])
        if len(branch.node) == 1 and branch.node[0].op_type == "Identity" and name not in fixed:
            inside = branch.node[0].input[0]
            alias[name] = alias.get(inside, inside)
            continue
        graph.initializer.extend(branch.initializer)
        for inner in branch.node:
            _append(graph, inner, alias, {branch.output[0].name: name})
    read = {t for n in graph.node for t in (*n.input, *captured_names(n))}
    graph.input.extend(i for i in source.input if i.name in read)
    flags = {name: flag for name, flag in segment.flags.items() if name in read}
    # A model may have an input that no node reads.
    takes = tuple(name for name in segment.takes if name in read)
    return Segment(target, takes, segment.gives, flags, segment.weights)


def _append(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    alias: Mapping[str, str],
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Add a copy of ``node`` that reads through ``alias`` and gives under other names."""
    graph.node.append(node)
    added = graph.node[-1]
    for slot, name in enumerate(added.input):
        if name in alias:
            added.input[slot] = alias[name]
    for slot, name in enumerate(added.output):
        if renamed and name in renamed:
            added.output[slot] = renamed[name]


_BRANCH = {True: "then_branch", False: "else_branch"}


_ROUNDS = frozenset({"Identity", "Cast", "Mul", "Sub"})


def is_switch(node: onnx.NodeProto, flags: Collection[str]) -> bool:
    """Whether ``node`` chooses between two roundings of one tensor, and nothing else."""
    return (
        node.op_type == "If"
        and node.input[0] in flags
        and len(node.output) == 1
        and all(n.op_type in _ROUNDS for a in node.attribute for n in a.g.node)
    )
