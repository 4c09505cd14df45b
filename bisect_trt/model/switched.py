"""The model for all plans of one base precision: every rounding has a switch that is fed.

A sub-graph of it that is run by a session of its own is a segment (see :mod:`.segments`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.emulated import EmulationRewriter, guarded
from bisect_trt.model.graph import Graph, drop_unread
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, MOVES, is_standard
from bisect_trt.model.rewriter import Frame
from bisect_trt.model.roundings import NodeRoundings, Rounding, list_roundings
from bisect_trt.model.tensor_types import Scope, captured_names


@dataclass(frozen=True, slots=True)
class Flag:
    """True where a layer of ``on`` is reduced and none of ``off`` is (its output is rounded
    already).
    """

    on: tuple[str, ...]
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """The constant ``tensor`` as ``layer`` reads it: rounded to ``reduced`` where the layer is
    reduced, else to ``pinned``.
    """

    tensor: str
    layer: str
    reduced: Precision
    pinned: Precision


@dataclass(frozen=True)
class Segment:
    """A switched model, or a part of one that is run by itself.

    ``model`` takes ``takes`` (the source's inputs and tensors of earlier segments), a boolean
    scalar for each of ``flags`` and a tensor for each of ``weights``; it gives ``gives``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


@dataclass(frozen=True)
class _Use:
    """Who reads a float tensor, in which of its slots it may be reduced, and whether it reads it
    otherwise too.
    """

    reader: int
    reduced: tuple[int, ...]
    otherwise: bool


def to_switched(graph: Graph, low: Precision, pin: Precision, *, selects: bool = False) -> Segment:
    """The model in which each layer may run in ``low`` or in ``pin``, as one segment.

    The roundings are those of :func:`~bisect_trt.model.roundings.list_roundings`. A switch branches
    to the rounding that is asked for; with ``selects`` it computes both and selects one, which
    suits a GPU: a branch would wait for the host.
    """
    return _Writer(graph, low, pin, selects).write()


_WHERE_OPSET = 9
"""The opset that ``Where`` came with."""


class _Writer:
    def __init__(self, graph: Graph, low: Precision, pin: Precision, selects: bool) -> None:
        self._low, self._pin = low, pin
        self._selects = selects and graph.opset >= _WHERE_OPSET
        model = graph.proto
        self._source = model.graph
        self._of = graph
        self._reduced = list_roundings(graph, low)
        self._pinned = list_roundings(graph, pin)
        self._rounders = {p: EmulationRewriter(graph, PrecisionPlan(p)) for p in (low, pin)}
        self._rounder = self._rounders[low]
        self._rounder.claim_names()
        self._rounders[pin].share_names(self._rounder)
        new = onnx.ModelProto(ir_version=max(model.ir_version, 4))
        new.opset_import.extend(model.opset_import)
        new.functions.extend(model.functions)
        self._model, self._graph = new, new.graph
        self._flags: dict[str, Flag] = {}
        self._weights: dict[str, Weight] = {}
        # Those that a switch rounds; a body does as its own layer says, whoever reads it.
        self._switched = {
            r.tensor
            for node, its in zip(self._source.node, self._reduced, strict=True)
            for r in its.results.values()
            if node.op_type not in CONTROL_FLOW
        }
        self._uses = self._find_uses()
        casts = (n for n in self._source.node if n.op_type == "Cast" and is_standard(n))
        self._cast = {name for node in casts for name in node.output}
        # The flag that a layer's result is rounded by, also where that happens further up.
        self._flag_of: dict[str, str] = {}

    def write(self) -> Segment:
        graph, source = self._graph, self._source
        graph.name = source.name or "graph"
        initialised = {t.name for t in source.initializer}
        graph.input.extend(i for i in source.input if i.name not in initialised)
        graph.output.extend(source.output)
        graph.initializer.extend(source.initializer)
        for index, node in enumerate(source.node):
            if node.op_type in CONTROL_FLOW and self._is_layer(index):
                self._choose_body(index, node)
            else:
                self._choose_roundings(index, node)
        drop_unread(graph, set(self._of.float_constants))
        switches = self._flags.keys() | self._weights.keys()
        takes = tuple(i.name for i in graph.input if i.name not in switches)
        return Segment(self._model, takes, self._of.outputs, self._flags, self._weights)

    def _choose_roundings(self, index: int, node: onnx.NodeProto) -> None:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = self._of.names[index]
        low, pin = self._reduced[index], self._pinned[index]
        versions: dict[tuple[str, bool], str] = {}
        for slot in sorted({*low.operands, *pin.operands}):
            by_low, by_pin = low.operands.get(slot), pin.operands.get(slot)
            key = (node.input[slot], by_pin is not None)
            if key not in versions:
                versions[key] = self._operand(index, by_low, by_pin)
            new.input[slot] = versions[key]
        switched = [
            rounding
            for rounding in low.results.values()
            if not self._is_rounded_before(index, node, rounding.tensor)
        ]
        raws = {r.tensor: self._rounder.fresh(f"{r.tensor}__raw") for r in switched}
        for rounding in switched:
            new.output[rounding.slot] = raws[rounding.tensor]
        self._append(index, new, node)
        for rounding in switched:
            reader = self._only_reader(rounding.tensor)
            on = (rounding.layer,) if reader is None else (rounding.layer, self._of.names[reader])
            raw, tensor = raws[rounding.tensor], rounding.tensor
            self._flag_of[tensor] = self._switch(Flag(on), raw, tensor, self._low, Precision.FP32)

    def _append(self, index: int, new: onnx.NodeProto, source: onnx.NodeProto) -> None:
        """Add what ``source`` became. Of two Casts that undo each other ONNX Runtime takes the
        second away, whatever it is told, and what bodies read of that is missing then: a copy
        stands between.
        """
        floats = self._of.role(index, self._low).float_in
        self._graph.node.extend(guarded(new, floats, self._rounder.fresh, self._of.opset))
        undoes = source.op_type == "Cast" and is_standard(source) and source.input[0] in self._cast
        if undoes and self._of.types.type_of(source.output[0]) == FLOAT:
            result = new.output[0]
            made = self._graph.node[-1].output[0] = self._rounder.fresh(f"{result}__cast")
            self._graph.node.append(helper.make_node("Identity", [made], [result]))

    def _is_rounded_before(self, index: int, node: onnx.NodeProto, tensor: str) -> bool:
        """Whether the result ``tensor`` of ``node`` needs no switch of its own: a node that moves
        values gives them rounded where it reads them so. What its only reader wants rounded is
        rounded at the source then, if nobody else reads that.
        """
        operands = self._reduced[index].operands
        read = {s for s, n in enumerate(node.input) if n and self._of.types.type_of(n) == FLOAT}
        if node.op_type not in MOVES or not is_standard(node) or not read.issubset(operands):
            return False
        reader = self._only_reader(tensor)
        if reader is None:
            return True
        source = node.input[min(read)]
        name = self._flag_of.get(source)
        alone = len(read) == 1 and len(node.output) == 1 and self._only_reader(source) == index
        if name is None or not alone:
            return False
        flag = self._flags[name]
        self._flags[name] = replace(flag, on=(*flag.on, self._of.names[reader]))
        self._flag_of[tensor] = name
        return True

    def _operand(self, index: int, by_low: Rounding | None, by_pin: Rounding | None) -> str:
        """The name under which layer ``index`` reads an operand as the plan has it; at least one
        of the roundings is there.
        """
        rounding = by_low or by_pin
        assert rounding is not None
        tensor, layer = rounding.tensor, rounding.layer
        low = self._low if by_low else Precision.FP32
        pin = self._pin if by_pin else Precision.FP32
        if rounding.constant:
            name = self._rounder.fresh(f"{tensor}__weight")
            self._weights[name] = Weight(tensor, layer, low, pin)
            shape = self._of.float_constants[tensor].shape
            self._graph.input.append(helper.make_tensor_value_info(name, FLOAT, shape))
            return name
        if by_pin is None and self._only_reader(tensor) == index:
            return tensor
        version = self._rounder.fresh(f"{tensor}__{low}")
        makers = (rounding.maker,) if rounding.maker and low.is_storage else ()
        # What its maker rounded stays as it is. Splitting would leave it too, but for an infinity
        # that FP16 made, which would become NaN: where pins are split it is rounded once more.
        flag = Flag((layer,), makers) if by_pin is None else Flag((layer, *makers))
        self._switch(flag, tensor, version, low, pin)
        return version

    def _choose_body(self, index: int, node: onnx.NodeProto) -> None:
        """A control-flow layer: the whole node twice, its bodies reduced in one branch."""
        name = self._of.names[index]
        flag, bodies = self._flag(Flag((name,))), {}
        for branch, precision in (("then_branch", self._low), ("else_branch", self._pin)):
            body = onnx.GraphProto(name=branch)
            rounder = self._rounders[precision]
            rounder.rewrite_node(index, node, name, Frame(self._of.types, body, None))
            for slot, tensor in enumerate(node.output):
                if tensor:
                    body.node[-1].output[slot] = rounder.fresh(f"{tensor}__{branch}")
            body.output.extend(onnx.ValueInfoProto(name=o) for o in body.node[-1].output if o)
            bodies[branch] = body
        outputs = [o for o in node.output if o]
        self._graph.node.append(helper.make_node("If", [flag], outputs, name=name, **bodies))

    def _switch(self, flag: Flag, source: str, target: str, low: Precision, pin: Precision) -> str:
        """The flag's name; ``target`` is ``source`` rounded to the one or the other."""
        name, asked = self._rounder.fresh(f"switch_{target}"), self._flag(flag)
        if self._selects:
            choices = [self._rounded(self._graph, source, target, p) for p in (low, pin)]
            self._graph.node.append(helper.make_node("Where", [asked, *choices], [target], name))
            return asked
        bodies = {}
        for branch, precision in (("then_branch", low), ("else_branch", pin)):
            body = onnx.GraphProto(name=branch)
            result = self._rounded(body, source, f"{target}__{branch}", precision)
            if result == source:
                result = self._rounder.fresh(f"{target}__{branch}")
                body.node.append(helper.make_node("Identity", [source], [result]))
            body.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, None))
            bodies[branch] = body
        self._graph.node.append(helper.make_node("If", [asked], [target], name=name, **bodies))
        return asked

    def _rounded(
        self, graph: onnx.GraphProto, source: str, target: str, precision: Precision
    ) -> str:
        """The tensor of ``graph`` that is ``source`` rounded to ``precision``."""
        if precision is Precision.FP32:
            return source
        result = self._rounder.fresh(f"{target}__{precision}")
        self._rounder.round(Frame(Scope(), graph, None), source, result, precision)
        return result

    def _flag(self, flag: Flag) -> str:
        name = self._rounder.fresh(f"reduce_{flag.on[0]}")
        self._flags[name] = flag
        self._graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, []))
        return name

    def _is_layer(self, index: int) -> bool:
        roles = (self._of.role(index, p) for p in (self._low, self._pin))
        return any(role.kind is Kind.LAYER for role in roles)

    def _only_reader(self, tensor: str) -> int | None:
        """The one layer that reads ``tensor`` and only ever reduced: rounding it for the reader is
        rounding it at the source.
        """
        uses = self._uses.get(tensor, [])
        if (
            len(uses) != 1
            or uses[0].otherwise
            or tensor in self._of.outputs
            or tensor not in self._switched
        ):
            return None
        # TF32 rounds operands, not results: the source's switch must not do it for a storage
        # format's sake alone.
        reader = uses[0].reader
        split = any(s in self._pinned[reader].operands for s in uses[0].reduced)
        return None if split else reader

    def _find_uses(self) -> Mapping[str, list[_Use]]:
        uses: dict[str, list[_Use]] = {}
        for index, (node, its) in enumerate(zip(self._source.node, self._reduced, strict=True)):
            captured = captured_names(node)
            for tensor in dict.fromkeys((*node.input, *captured)):
                if tensor:
                    uses.setdefault(tensor, []).append(
                        _use(index, node, its, tensor, tensor in captured)
                    )
        return uses


def _use(index: int, node: onnx.NodeProto, its: NodeRoundings, tensor: str, captured: bool) -> _Use:
    slots = [slot for slot, name in enumerate(node.input) if name == tensor]
    reduced = tuple(s for s in slots if s in its.operands)
    return _Use(
        index, reduced, captured or node.op_type in CONTROL_FLOW or len(reduced) < len(slots)
    )


_ROUNDS = frozenset({"Identity", "Cast", "Mul", "Sub"})


def is_switch(node: onnx.NodeProto, flags: Collection[str]) -> bool:
    """Whether ``node`` branches to one of two roundings of a tensor."""
    return (
        node.op_type == "If"
        and node.input[0] in flags
        and len(node.output) == 1
        and all(n.op_type in _ROUNDS for a in node.attribute for n in a.g.node)
    )
