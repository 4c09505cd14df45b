"""Writes one model for all plans of a base precision, in which inputs switch every rounding.

It can be cut into segments that run one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import onnx
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.emulated import EmulationRewriter, guarded
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, MOVES, is_standard
from bisect_trt.model.rewriter import Frame
from bisect_trt.model.roundings import Rounding, list_roundings
from bisect_trt.model.tensor_types import UNKNOWN, Scope
from bisect_trt.model.walk import (
    captured_names,
    drop_unread,
    fed_inputs,
    tensors_read,
    without_graph,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A switch that is true if a layer of ``on`` is reduced and none of ``off`` is."""

    on: tuple[str, ...]
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """The constant ``tensor`` as ``layer`` reads it.

    It is rounded to ``reduced`` if the layer is reduced, else to ``pinned``.
    """

    tensor: str
    layer: str
    reduced: Precision
    pinned: Precision


@dataclass(frozen=True)
class Segment:
    """A switched model, or a part of one that runs in a session of its own.

    ``model`` takes ``takes`` (inputs, and outputs of earlier segments), a boolean scalar for each
    of ``flags`` and a tensor for each of ``weights``. Its outputs are ``gives``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


def to_switched(graph: Graph, low: Precision, pin: Precision, *, selects: bool = False) -> Segment:
    """The model in which each layer may run at ``low`` or at ``pin``, as one segment.

    A switch branches to one of two roundings; with ``selects`` it computes both and selects one.
    """
    return _Writer(graph, low, pin, selects).write()


class _Writer:
    def __init__(self, graph: Graph, low: Precision, pin: Precision, selects: bool) -> None:
        self._low, self._pin = low, pin
        # Selecting suits a GPU, where a branch waits for the host. Opset 9 introduced Where.
        self._selects = selects and graph.opset >= 9
        model = graph.proto
        self._source = model.graph
        self._original = graph
        self._reduced = list_roundings(graph, low)
        self._pinned = list_roundings(graph, pin)
        self._rounder = EmulationRewriter(graph, PrecisionPlan(low))
        self._rounder.claim_names()
        self._model = without_graph(model, min_ir_version=4)
        self._graph = self._model.graph
        self._flags: dict[str, Flag] = {}
        self._weights: dict[str, Weight] = {}
        self._only_readers = self._find_only_readers()
        casts = (n for n in self._source.node if n.op_type == "Cast" and is_standard(n))
        self._cast = {name for node in casts for name in node.output}

    def write(self) -> Segment:
        graph, source = self._graph, self._source
        graph.input.extend(fed_inputs(source))
        graph.output.extend(source.output)
        graph.initializer.extend(source.initializer)
        for index, node in enumerate(source.node):
            if node.op_type in CONTROL_FLOW and self._is_layer(index):
                self._choose_body(index, node)
            else:
                self._choose_roundings(index, node)
        # Float constants that layers read are fed as inputs; their initialisers may be unread now.
        drop_unread(graph, set(self._original.float_constants))
        switches = self._flags.keys() | self._weights.keys()
        takes = tuple(i.name for i in graph.input if i.name not in switches)
        return Segment(self._model, takes, self._original.outputs, self._flags, self._weights)

    def _choose_roundings(self, index: int, node: onnx.NodeProto) -> None:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = self._original.names[index]
        low, pin = self._reduced[index], self._pinned[index]
        versions: dict[tuple[str, bool], str] = {}
        for slot in sorted({*low.operands, *pin.operands}):
            by_low, by_pin = low.operands.get(slot), pin.operands.get(slot)
            # A slot that pinned layers round too needs another switch than one that they do not.
            key = (node.input[slot], by_pin is not None)
            if key not in versions:
                versions[key] = self._operand(index, by_low, by_pin)
            new.input[slot] = versions[key]
        switched = [
            rounding
            for rounding in low.results.values()
            if not self._is_rounded_before(index, node, rounding.tensor)
        ]
        # As in the emulated model, the rounded tensor keeps the name.
        raws = {r.tensor: self._rounder.fresh(f"{r.tensor}__raw") for r in switched}
        for rounding in switched:
            new.output[rounding.slot] = raws[rounding.tensor]
        self._append(index, new, node)
        for rounding in switched:
            reader = self._only_readers.get(rounding.tensor)
            # One rounding serves the layer that gives the tensor and the only one that reads it.
            on = (
                (rounding.layer,)
                if reader is None
                else (rounding.layer, self._original.names[reader])
            )
            raw = raws[rounding.tensor]
            self._switch(Flag(on), raw, rounding.tensor, self._low, Precision.FP32)

    def _append(self, index: int, new: onnx.NodeProto, source: onnx.NodeProto) -> None:
        """Appends ``new``, the rewritten ``source``."""
        floats = self._original.role(index, self._low).float_in
        self._graph.node.extend(guarded(new, floats, self._rounder.fresh, self._original.opset))
        # ONNX Runtime removes the second of two Casts that undo each other, at every optimisation
        # level, although bodies read its result. An Identity between keeps the result.
        undoes = source.op_type == "Cast" and is_standard(source) and source.input[0] in self._cast
        if undoes and self._original.types.type_of(source.output[0]) == FLOAT:
            result = new.output[0]
            cast = self._graph.node[-1].output[0] = self._rounder.fresh(f"{result}__cast")
            self._graph.node.append(helper.make_node("Identity", [cast], [result]))

    def _is_rounded_before(self, index: int, node: onnx.NodeProto, tensor: str) -> bool:
        """Whether the result ``tensor`` of ``node`` needs no switch of its own."""
        # A node that only moves values gives rounded ones if it reads rounded ones.
        operands = self._reduced[index].operands
        read = {
            s for s, n in enumerate(node.input) if n and self._original.types.type_of(n) == FLOAT
        }
        moves = node.op_type in MOVES and is_standard(node) and read.issubset(operands)
        return moves and tensor not in self._only_readers

    def _operand(self, index: int, by_low: Rounding | None, by_pin: Rounding | None) -> str:
        """The name of an operand as layer ``index`` reads it; one of the roundings is not None."""
        rounding = by_low or by_pin
        assert rounding is not None
        tensor, layer = rounding.tensor, rounding.layer
        low = self._low if by_low else Precision.FP32
        pin = self._pin if by_pin else Precision.FP32
        if rounding.constant:  # rounded outside once, and fed like an input
            name = self._rounder.fresh(f"{tensor}__weight")
            self._weights[name] = Weight(tensor, layer, low, pin)
            shape = self._original.float_constants[tensor].shape
            self._graph.input.append(helper.make_tensor_value_info(name, FLOAT, shape))
            return name
        if by_pin is None and self._only_readers.get(tensor) == index:
            return tensor  # the switch at its maker rounds it for this layer
        version = self._rounder.fresh(f"{tensor}__{low}")
        makers = (rounding.maker,) if rounding.maker and low.is_storage else ()
        # What a reduced maker has rounded is left as it is. Where a pinned reader would split it,
        # it is rounded to ``low`` once more: splitting turns an infinity of FP16 into NaN.
        flag = Flag((layer,), makers) if by_pin is None else Flag((layer, *makers))
        self._switch(flag, tensor, version, low, pin)
        return version

    def _choose_body(self, index: int, node: onnx.NodeProto) -> None:
        """Appends a control-flow layer as an If between the reduced and the pinned node."""
        name = self._original.names[index]
        flag, bodies = self._flag(Flag((name,))), {}
        for branch, precision in (("then_branch", self._low), ("else_branch", self._pin)):
            body = onnx.GraphProto(name=branch)
            frame = Frame(self._original.types, body, None)
            self._rounder.rewrite_node(index, node, name, frame, precision)
            for slot, tensor in enumerate(node.output):
                if tensor:
                    body.node[-1].output[slot] = self._rounder.fresh(f"{tensor}__{branch}")
            body.output.extend(onnx.ValueInfoProto(name=o) for o in body.node[-1].output if o)
            bodies[branch] = body
        outputs = [o for o in node.output if o]
        self._graph.node.append(helper.make_node("If", [flag], outputs, name=name, **bodies))

    def _switch(self, flag: Flag, source: str, target: str, low: Precision, pin: Precision) -> None:
        """Appends a switch that rounds ``source`` to ``low`` or ``pin``."""
        name, condition = self._rounder.fresh(f"switch_{target}"), self._flag(flag)
        # An If runs one of its branches, so that an unused rounding costs nothing.
        if self._selects:
            choices = [self._rounded(self._graph, source, target, p) for p in (low, pin)]
            self._graph.node.append(
                helper.make_node("Where", [condition, *choices], [target], name)
            )
            return
        bodies = {}
        for branch, precision in (("then_branch", low), ("else_branch", pin)):
            body = onnx.GraphProto(name=branch)
            result = self._rounded(body, source, f"{target}__{branch}", precision)
            if result == source:
                result = self._rounder.fresh(f"{target}__{branch}")
                body.node.append(helper.make_node("Identity", [source], [result]))
            body.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, None))
            bodies[branch] = body
        self._graph.node.append(helper.make_node("If", [condition], [target], name=name, **bodies))

    def _rounded(
        self, graph: onnx.GraphProto, source: str, target: str, precision: Precision
    ) -> str:
        """The name of ``source`` rounded to ``precision`` in ``graph``."""
        if precision is Precision.FP32:
            return source
        result = self._rounder.fresh(f"{target}__{precision}")
        self._rounder.round(Frame(Scope(), graph, None), source, result, precision)
        return result

    def _flag(self, flag: Flag) -> str:
        """Adds an input for ``flag``, and returns its name."""
        name = self._rounder.fresh(f"reduce_{flag.on[0]}")
        self._flags[name] = flag
        self._graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, []))
        return name

    def _is_layer(self, index: int) -> bool:
        roles = (self._original.role(index, p) for p in (self._low, self._pin))
        return any(role.kind is Kind.LAYER for role in roles)

    def _find_only_readers(self) -> dict[str, int]:
        """By tensor that a switch rounds, its only reader if that reads only the reduced form."""
        # Rounding for such a reader can move to the node that makes the tensor.
        readers: dict[str, list[int]] = {}
        for index, node in enumerate(self._source.node):
            for tensor in tensors_read(node):
                readers.setdefault(tensor, []).append(index)
        found = {}
        # Results of a body are rounded inside.
        switched = {
            r.tensor
            for node, roundings in zip(self._source.node, self._reduced, strict=True)
            for r in roundings.results.values()
            if node.op_type not in CONTROL_FLOW
        }
        for tensor in switched.difference(self._original.outputs):
            if len(readers.get(tensor, ())) != 1:
                continue
            index = readers[tensor][0]
            node = self._source.node[index]
            slots = {slot for slot, name in enumerate(node.input) if name == tensor}
            # Bodies round what they read themselves. A pinned reader in TF32 rounds the operand
            # too, which the maker's switch cannot do.
            inside = node.op_type in CONTROL_FLOW or tensor in captured_names(node)
            low, pin = self._reduced[index].operands.keys(), self._pinned[index].operands.keys()
            if not inside and slots <= low and slots.isdisjoint(pin):
                found[tensor] = index
        return found


def is_switch(node: onnx.NodeProto, flags: Collection[str]) -> bool:
    """Whether ``node`` branches to one of two roundings of a tensor."""
    return (
        node.op_type == "If"
        and node.input[0] in flags
        and len(node.output) == 1
        and all(
            n.op_type in ("Identity", "Cast", "Mul", "Sub")
            for a in node.attribute
            for n in a.g.node
        )
    )


SEGMENTS = 16
"""The number of segments that a model is cut into at most."""


def cut(whole: Segment, graph: Graph, segments: int = SEGMENTS) -> Iterator[Segment]:
    """Yields ``whole`` in order as at most ``segments`` segments."""
    nodes = whole.model.graph.node
    wanted = min(segments, len(nodes) // 48)  # with fewer nodes the calls cost more than they save
    # Constants are copied into segments, so that none of them can give one as an output.
    made = {name for node in nodes if not _is_constant(node) for name in node.output if name}
    if wanted < 2 or not made.issuperset(graph.outputs):
        yield whole
        return
    yield from _Cutter(whole, graph).segments(wanted)


def _is_constant(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Constant" and is_standard(node))


class _Cutter:
    """Cuts ``segment`` between any two nodes that are no constants."""

    def __init__(self, segment: Segment, graph: Graph) -> None:
        self._whole, self._graph = segment, graph
        source = segment.model.graph
        self._inputs = {i.name: i for i in source.input}
        self._outputs = {o.name: o for o in source.output}
        self._initialisers = {t.name: t for t in source.initializer}
        # Each segment has its own copy of a constant, which kernels pack when a session opens.
        self._constants = {n.output[0]: n for n in filter(_is_constant, source.node)}
        self._nodes = [node for node in source.node if not _is_constant(node)]
        self._reads = [tensors_read(node) for node in self._nodes]
        # Casts of a rewriter store FP16 or BF16; its other tensors are FP32.
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
        """The segments in order, without those that give nothing."""
        for start, end in pairwise([0, *self._places(wanted), len(self._nodes)]):
            segment = self._segment(start, end)
            if segment.gives:
                yield segment

    def _places(self, wanted: int) -> list[int]:
        """The nodes to cut before: near evenly spaced places, where few tensors cross."""
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
        """The weight of a tensor of unknown type: more than that of all tensors at any cut."""
        # A session cannot take such a tensor, so no cut may be where one is alive.
        return len(self._made_at) + 1

    def _alive(self) -> Sequence[int]:
        """The number of tensors that are alive before each node, and after the last."""
        changes = [0] * (len(self._nodes) + 2)
        for name, made in self._made_at.items():
            last = self._last_read.get(name, made)
            if last > made:
                weight = 1 if self._type_of(name) != UNKNOWN else self._untyped
                changes[made + 1] += weight
                changes[last + 1] -= weight
        return list(accumulate(changes))

    def _declared(self, name: str, *, ranked: bool) -> onnx.ValueInfoProto:
        """The declaration of ``name`` with its type, and with its rank if ``ranked``."""
        rank = self._graph.types.ranks.get(name) if ranked else None
        shape = None if rank is None else [None] * rank
        return helper.make_tensor_value_info(name, self._type_of(name), shape)

    def _type_of(self, name: str) -> int:
        types = self._graph.types.types
        return types[name] if name in types else self._stored.get(name, FLOAT)

    def _segment(self, start: int, end: int) -> Segment:
        target = without_graph(self._whole.model)
        graph = target.graph
        reads = dict.fromkeys(t for names in self._reads[start:end] for t in names)
        flags = {t: f for t in reads if (f := self._whole.flags.get(t))}
        weights = {t: w for t in reads if (w := self._whole.weights.get(t))}
        # Shapes in the body of a Scan need the ranks of what it scans, which ONNX Runtime does not
        # infer through roundings.
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
