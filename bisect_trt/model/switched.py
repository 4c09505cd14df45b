"""Writes one model for all plans of a base precision, in which inputs switch every rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.emulated import EmulationRewriter, guarded
from bisect_trt.model.graph import Graph, drop_unread
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, MOVES, is_standard
from bisect_trt.model.rewriter import Frame
from bisect_trt.model.roundings import Rounding, list_roundings
from bisect_trt.model.tensor_types import (
    Scope,
    captured_names,
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
class Switched:
    """A switched model.

    ``model`` takes the inputs ``takes``, a boolean scalar for each of ``flags`` and a tensor for
    each of ``weights``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


@dataclass(frozen=True)
class _Use:
    """A node that reads a float tensor: its index, and the slots that it may read reduced.

    ``otherwise`` says that it also reads the tensor in other ways.
    """

    reader: int
    reduced: tuple[int, ...]
    otherwise: bool


def to_switched(graph: Graph, low: Precision, pin: Precision, *, selects: bool = False) -> Switched:
    """The model in which each layer may run at ``low`` or at ``pin``.

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
        self._rounders = {p: EmulationRewriter(graph, PrecisionPlan(p)) for p in (low, pin)}
        self._rounder = self._rounders[low]
        self._rounder.claim_names()
        self._rounders[pin].share_names(self._rounder)
        self._model = without_graph(model, min_ir_version=4)
        self._graph = self._model.graph
        self._flags: dict[str, Flag] = {}
        self._weights: dict[str, Weight] = {}
        # The results that a switch rounds; a body's results are rounded inside.
        self._switched = {
            r.tensor
            for node, roundings in zip(self._source.node, self._reduced, strict=True)
            for r in roundings.results.values()
            if node.op_type not in CONTROL_FLOW
        }
        self._uses = self._find_uses()
        casts = (n for n in self._source.node if n.op_type == "Cast" and is_standard(n))
        self._cast = {name for node in casts for name in node.output}
        # The flag that rounds a layer's result, possibly at an earlier node.
        self._flag_of: dict[str, str] = {}

    def write(self) -> Switched:
        graph, source = self._graph, self._source
        initialised = {t.name for t in source.initializer}
        graph.input.extend(i for i in source.input if i.name not in initialised)
        graph.output.extend(source.output)
        graph.initializer.extend(source.initializer)
        for index, node in enumerate(source.node):
            if node.op_type in CONTROL_FLOW and self._is_layer(index):
                self._choose_body(index, node)
            else:
                self._choose_roundings(index, node)
        drop_unread(graph, set(self._original.float_constants))
        switches = self._flags.keys() | self._weights.keys()
        takes = tuple(i.name for i in graph.input if i.name not in switches)
        return Switched(self._model, takes, self._flags, self._weights)

    def _choose_roundings(self, index: int, node: onnx.NodeProto) -> None:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = self._original.names[index]
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
            on = (
                (rounding.layer,)
                if reader is None
                else (rounding.layer, self._original.names[reader])
            )
            raw, tensor = raws[rounding.tensor], rounding.tensor
            self._flag_of[tensor] = self._switch(Flag(on), raw, tensor, self._low, Precision.FP32)

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
        # A node that only moves values gives rounded ones if it reads rounded ones. The rounding
        # for its only reader then moves to its source, if the node is the only reader of that.
        operands = self._reduced[index].operands
        read = {
            s for s, n in enumerate(node.input) if n and self._original.types.type_of(n) == FLOAT
        }
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
        self._flags[name] = replace(flag, on=(*flag.on, self._original.names[reader]))
        self._flag_of[tensor] = name
        return True

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
        if by_pin is None and self._only_reader(tensor) == index:
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
            rounder = self._rounders[precision]
            rounder.rewrite_node(index, node, name, Frame(self._original.types, body, None))
            for slot, tensor in enumerate(node.output):
                if tensor:
                    body.node[-1].output[slot] = rounder.fresh(f"{tensor}__{branch}")
            body.output.extend(onnx.ValueInfoProto(name=o) for o in body.node[-1].output if o)
            bodies[branch] = body
        outputs = [o for o in node.output if o]
        self._graph.node.append(helper.make_node("If", [flag], outputs, name=name, **bodies))

    def _switch(self, flag: Flag, source: str, target: str, low: Precision, pin: Precision) -> str:
        """Appends a switch that rounds ``source`` to ``low`` or ``pin``; returns its flag."""
        name, condition = self._rounder.fresh(f"switch_{target}"), self._flag(flag)
        if self._selects:
            choices = [self._rounded(self._graph, source, target, p) for p in (low, pin)]
            self._graph.node.append(
                helper.make_node("Where", [condition, *choices], [target], name)
            )
            return condition
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
        return condition

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

    def _only_reader(self, tensor: str) -> int | None:
        """The index of the only reader of ``tensor``, if it reads nothing but the reduced form."""
        # Rounding for such a reader can move to the node that makes the tensor.
        uses = self._uses.get(tensor, [])
        if (
            len(uses) != 1
            or uses[0].otherwise
            or tensor in self._original.outputs
            or tensor not in self._switched
        ):
            return None
        # A pinned reader in TF32 rounds the operand too, which the maker's switch cannot do.
        reader = uses[0].reader
        split = any(s in self._pinned[reader].operands for s in uses[0].reduced)
        return None if split else reader

    def _find_uses(self) -> Mapping[str, list[_Use]]:
        uses: dict[str, list[_Use]] = {}
        for index, node in enumerate(self._source.node):
            captured = captured_names(node)
            for tensor in tensors_read(node):
                slots = [slot for slot, name in enumerate(node.input) if name == tensor]
                reduced = tuple(s for s in slots if s in self._reduced[index].operands)
                # Bodies round what they read themselves.
                inside = tensor in captured or node.op_type in CONTROL_FLOW
                use = _Use(index, reduced, otherwise=inside or len(reduced) < len(slots))
                uses.setdefault(tensor, []).append(use)
        return uses
