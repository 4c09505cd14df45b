"""Cuts the switched model into segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.model.switched import Segment, SwitchedModel, is_switch
from bisect_trt.model.tensor_types import UNKNOWN, captured_names

Kinds = NDArray[np.intp]
"""One number a node, the same for nodes that do the same with other values."""

_WINDOW = 4
"""A cut is looked for within a fourth of a segment's length of its even place."""

_LOOKED_AT = 32
"""Distances at which most kinds come again; of those the one is taken that holds longest."""

_PROJECTIONS = 4
"""Random phases a kind, by which matches are counted: of 10,000 nodes to half a percent."""


@dataclass(frozen=True)
class Block:
    """From node ``start`` to ``end`` every kind comes again after ``period`` more; ``step`` is as
    many periods as a segment has.
    """

    start: int
    end: int
    period: int
    step: int


@dataclass(frozen=True)
class Crossing:
    """``alive`` counts the tensors that are alive before each node and after the last; where it is
    more than ``most`` no cut can be.
    """

    alive: Sequence[int]
    most: int

    def even(self, start: int, end: int, length: float) -> list[int]:
        """Places about ``length`` nodes apart at which few tensors cross."""
        count = end - start
        wanted = max(1, round(count / length))
        length, found = count / wanted, []
        for number in range(1, wanted):
            even = start + round(number * length)
            near = range(
                max(start + 1, even - int(length / _WINDOW)),
                min(end, even + int(length / _WINDOW) + 1),
            )
            best = min(near, key=lambda place: (self.alive[place], abs(place - even)), default=even)
            if self.alive[best] <= self.most:
                found.append(best)
        return sorted(set(found))

    def alike(self, kinds: Kinds, length: float) -> list[int]:
        """Places between which a network that repeats a block has the same nodes, about ``length``
        nodes apart or a block; what does not repeat is cut evenly.
        """
        found, behind = [], 0
        for block in repeated_blocks(kinds, length):
            places = self._of_block(block)
            if len(places) > 1:
                found += [*self.even(behind, places[0], length), *places]
                behind = places[-1]
        found += self.even(behind, len(kinds), length)
        return sorted(set(found) - {0, len(kinds)})

    def _of_block(self, block: Block) -> list[int]:
        """Where each ``step`` of ``block`` begins and the last ends: at the node of the block at
        which fewest tensors cross.
        """
        alive = np.asarray(self.alive)
        starts = np.arange(block.start, block.end + 1, block.step)
        # Each offset into the block, with all the places that it stands for.
        places = starts + np.arange(block.period)[:, None]
        there = places <= block.end
        crossing = np.where(there, alive[np.minimum(places, block.end)], 0)
        best = int(np.lexsort((crossing.sum(1) / there.sum(1), crossing.max(1)))[0])
        return [int(p) for p in places[best] if p <= block.end and alive[p] <= self.most]


def kinds_of(
    nodes: Sequence[onnx.NodeProto],
    told: Callable[[str], object],
    apart: Callable[[str], bool],
    known: dict[tuple[object, ...], int] | None = None,
) -> Kinds:
    """The kind of each node: its operator, its attributes but bodies, and what is told of what it
    reads.
    """
    numbers = {} if known is None else known
    found = np.empty(len(nodes), np.intp)
    for index, node in enumerate(nodes):
        attributes = tuple(
            a.SerializeToString(deterministic=True)
            for a in (() if apart(node.op_type) else node.attribute)
            if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
        )
        kind = (node.domain, node.op_type, attributes, tuple(map(told, node.input)))
        found[index] = numbers.setdefault(kind, len(numbers))
    return found


def repeated_blocks(kinds: Kinds, length: float) -> list[Block]:
    """The longest part of a network that is one block several times, and those before and behind
    it, in order.
    """

    def within(start: int, end: int) -> list[Block]:
        found = _repeated(kinds[start:end], length) if end - start > 2 * length else None
        if found is None:
            return []
        block = Block(start + found.start, start + found.end, found.period, found.step)
        return [*within(start, block.start), block, *within(block.end, end)]

    return within(0, len(kinds))


def _repeated(kinds: Kinds, length: float) -> Block | None:
    """The longest part that is one block at least twice; None where there is none.

    The distances to look at are told by the autocorrelation (Wiener and Khinchin) of a random phase
    for each kind: what matches adds one, what does not adds nothing on average (Alon, Matias and
    Szegedy, STOC 1996).
    """
    count = len(kinds)
    lags = np.arange(1, count // 2 + 1)
    phases = np.random.default_rng(0).random((_PROJECTIONS, int(kinds.max()) + 1))
    spectra = np.fft.fft(np.exp(2j * np.pi * phases[:, kinds]), 2 * count)
    matches = np.fft.ifft(np.mean(np.abs(spectra) ** 2, axis=0)).real
    share = np.round(matches[lags] / (count - lags), 6)
    # Blocks of which a segment holds several; larger ones, made of those, where there are none.
    short, long = lags <= length, lags > length
    return _longest(kinds, lags[short], share[short], length) or _longest(
        kinds, lags[long], share[long], length
    )


def _longest(
    kinds: Kinds, lags: NDArray[np.intp], share: NDArray[np.float64], length: float
) -> Block | None:
    """The longest part that repeats at one of ``lags``, by which ``share`` of all nodes come again,
    and of those that are as long the one of the shortest period.
    """
    count, found = len(kinds), []
    for lag in (int(lags[i]) for i in np.lexsort((lags, -share))[:_LOOKED_AT]):
        differs = np.flatnonzero(kinds[lag:] != kinds[:-lag])
        bounds = np.concatenate(([-1], differs, [count - lag]))
        longest = int(np.argmax(np.diff(bounds)))
        start, end = int(bounds[longest]) + 1, int(bounds[longest + 1]) + lag
        step = max(1, int(length / lag)) * lag
        if end - start >= 2 * step:
            found.append(Block(start, end, lag, step))
    return max(found, key=lambda b: (b.end - b.start, -b.period), default=None)


MOST_SEGMENTS = 16
_FEWEST_NODES = 48
"""A model of fewer nodes a segment is not worth the calls."""


def cut(
    switched: SwitchedModel, graph: Graph, most: int = MOST_SEGMENTS, *, alike: bool = False
) -> Iterator[Segment]:
    """``switched`` as about ``most`` segments at most, to be run one after the other; each is made
    when it is asked for.
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
    """Cuts ``segment`` between any of its ``nodes``, which are those but its constants."""

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
        """The segments in order, but those of which nothing is read."""
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


_MOST = 1 << 30
"""Bytes of a model from which on it stays as it is: no message may have more than twice that."""


class PackedSegment:
    """``named`` is the segment with everything but its model; :meth:`unpacked` is all of it."""

    def __init__(self, segment: Segment) -> None:
        self._whole: Segment | None = None
        self._packed = b""
        if segment.model.ByteSize() < _MOST:
            self._packed = segment.model.SerializeToString()
            self.named = replace(segment, model=onnx.ModelProto())
        else:
            self._whole = self.named = segment

    def unpacked(self) -> Segment:
        """The segment; its model is a new object where it was packed."""
        if self._whole is not None:
            return self._whole
        return replace(self.named, model=onnx.ModelProto.FromString(self._packed))
