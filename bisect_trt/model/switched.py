"""Writes one model for all plans of a base precision, in which inputs switch every rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.emulated import EmulationRewriter, guarded
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, MOVES, is_standard
from bisect_trt.model.rewriter import Frame
from bisect_trt.model.roundings import Rounding, list_roundings
from bisect_trt.model.tensor_types import Scope
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
class Switched:
    """A switched model.

    ``model`` takes the inputs ``takes``, a boolean scalar for each of ``flags`` and a tensor for
    each of ``weights``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


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
        self._rounder = EmulationRewriter(graph, PrecisionPlan(low))
        self._rounder.claim_names()
        self._model = without_graph(model, min_ir_version=4)
        self._graph = self._model.graph
        self._flags: dict[str, Flag] = {}
        self._weights: dict[str, Weight] = {}
        self._only_readers = self._find_only_readers()
        casts = (n for n in self._source.node if n.op_type == "Cast" and is_standard(n))
        self._cast = {name for node in casts for name in node.output}
        self._quantised: dict[str, str] = {}

    def write(self) -> Switched:
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
        return Switched(self._model, takes, self._flags, self._weights)

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
        self._graph.node.extend(
            guarded(new, floats, self._rounder.fresh, self._original.opset, self._quantised)
        )
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
