"""Finds the floats that stand for integers: inputs that become ids, and what ids look up."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from bisect_trt.model.layers import Layer, with_unique_names
from bisect_trt.model.precision_rules import FLOAT, FLOATS, MOVES, TYPE_AGNOSTIC, is_standard
from bisect_trt.model.tensor_types import Scope
from bisect_trt.model.walk import drop_unread, fed_inputs, part_of, tensors_read, unused

_DECIDES = frozenset({"Equal", "NonZero", "OneHot"})
"""Operators whose result jumps when a value changes by any amount."""

_COMPUTES_WHOLE = frozenset(
    {"Abs", "Add", "Ceil", "Clip", "Div", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Round"}
    | {"Sub"}
)
"""Arithmetic on indices (row * width + column) before they are cast."""


def discrete_inputs(graph: onnx.GraphProto, types: Scope) -> frozenset[str]:
    """The float inputs that become integers or truth values, such as ids, coordinates and masks.

    Operators that move values or compute whole numbers may stand between.
    """
    # The inputs that a tensor's values come from: several behind a Concat.
    source = {i.name: frozenset({i.name}) for i in fed_inputs(graph)}
    found: set[str] = set()
    for node in filter(is_standard, graph.node):
        read = frozenset[str]().union(*(source.get(name, ()) for name in node.input))
        if not read:
            continue
        floats = all(types.type_of(o) in FLOATS for o in node.output if o)
        if node.op_type in _DECIDES or (node.op_type == "Cast" and not floats):
            found.update(read)
        elif node.op_type in MOVES | _COMPUTES_WHOLE or node.op_type == "Cast":
            source.update(dict.fromkeys(filter(None, node.output), read))
    return frozenset(name for name in found if types.type_of(name) in FLOATS)


@dataclass(frozen=True)
class Lookup:
    """A float ``tensor`` that node ``index`` gathers from ``table``, or casts where that is blank.

    ``source`` names the input that can replace it.
    """

    index: int
    tensor: str
    table: str
    source: str


def list_lookups(
    model: onnx.ModelProto, layers: Sequence[Layer], tables: Container[str]
) -> tuple[Lookup, ...]:
    """The float tensors gathered from ``tables`` by integers that no layer computes.

    If there are none, the float tensors that such integers are cast to.
    """
    graph = model.graph
    by_index = {layer.index: layer for layer in layers}
    # Tensors computed from values of the inputs. Shapes are left out: a perturbed size would be
    # another size.
    from_inputs = {i.name for i in fed_inputs(graph)}
    rounded: set[str] = set()
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | from_inputs
    gathered, cast = [], []
    for index, node in enumerate(graph.node):
        read = tensors_read(node)
        if rounded.isdisjoint(read) and not from_inputs.isdisjoint(read) and index in by_index:
            tensor = node.output[0]
            source = unused(f"{tensor}__moved", taken)
            if node.op_type == "Gather" and node.input[0] in tables:
                gathered.append(Lookup(index, tensor, node.input[0], source))
            elif node.op_type == "Cast":
                cast.append(Lookup(index, tensor, "", source))
        if not from_inputs.isdisjoint(read) and node.op_type not in TYPE_AGNOSTIC:
            from_inputs.update(o for o in node.output if o)
        # What follows from a layer differs between plans, even where it is an integer.
        if index in by_index or not rounded.isdisjoint(read):
            rounded.update(o for o in node.output if o)
    return tuple(gathered or cast)


def lookup_model(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """The part of ``model`` that computes the ``source`` tensors of ``lookups`` from its inputs."""
    part = part_of(model, (lookup.tensor for lookup in lookups))
    part.ir_version = max(part.ir_version, 4)
    for node in part.graph.node:
        node.name = ""  # ONNX Runtime refuses two nodes of one name
    for lookup in lookups:
        part.graph.node.append(helper.make_node("Identity", [lookup.tensor], [lookup.source]))
        part.graph.output.append(helper.make_tensor_value_info(lookup.source, FLOAT, None))
    return part


def after_lookups(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """A copy of ``model`` that takes the ``source`` tensors of ``lookups`` as further inputs."""
    new = with_unique_names(model)
    for lookup in lookups:
        node = new.graph.node[lookup.index]
        node.CopyFrom(helper.make_node("Identity", [lookup.source], [lookup.tensor], node.name))
        new.graph.input.append(helper.make_tensor_value_info(lookup.source, FLOAT, None))
    drop_unread(new.graph, {lookup.table for lookup in lookups} - {""})
    return new
