"""The first float tensors of a model that reads integers, and the model that begins with them.

Token ids cannot be moved a little, and what they look up can. Each node that gives such a tensor
becomes an ``Identity`` of the same id, and so the same layer, that reads it from an input.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from bisect_trt.graph.model.layers import Layer, with_unique_names
from bisect_trt.graph.model.unread import drop_unread
from bisect_trt.graph.tensors.operator_rules import FLOAT, TYPE_AGNOSTIC
from bisect_trt.graph.tensors.tensor_types import captured_names


@dataclass(frozen=True)
class Lookup:
    """Node ``index`` of the main graph gives the float ``tensor``, of what it looks up in ``table``
    (empty where it only casts); ``source`` is the input that may stand for it.
    """

    index: int
    tensor: str
    table: str
    source: str


def list_lookups(
    model: onnx.ModelProto, layers: Sequence[Layer], tables: Container[str]
) -> tuple[Lookup, ...]:
    """What is gathered from constant tables by the inputs' integers, or by others that no layer
    computes of them; where nothing is, what such integers are cast to.

    What comes of the inputs' shapes alone is left: moved, a size would be another size.

    Args:
        model: the FP32 model.
        layers: its layers: what these give is rounded, so that indices made of it may change.
        tables: the names of its FP32 constants.
    """
    graph = model.graph
    by_index = {layer.index: layer for layer in layers}
    initialised = {t.name for t in graph.initializer}
    from_inputs = {i.name for i in graph.input} - initialised
    rounded: set[str] = set()
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | from_inputs
    gathered, cast = [], []
    for index, node in enumerate(graph.node):
        read = {*node.input, *captured_names(node)}
        if rounded.isdisjoint(read) and not from_inputs.isdisjoint(read) and index in by_index:
            tensor = node.output[0]
            source = f"{tensor}__moved"
            while source in taken:
                source += "_"
            if node.op_type == "Gather" and node.input[0] in tables:
                gathered.append(Lookup(index, tensor, node.input[0], source))
            elif node.op_type == "Cast":
                cast.append(Lookup(index, tensor, "", source))
        if not from_inputs.isdisjoint(read) and node.op_type not in TYPE_AGNOSTIC:
            from_inputs.update(o for o in node.output if o)
        if index in by_index or not rounded.isdisjoint(read):
            rounded.update(o for o in node.output if o)
    return tuple(gathered or cast)


def lookup_model(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """The part of ``model`` that gives what is looked up, from the same inputs, by ``source``.

    Args:
        model: read only.
        lookups: of :func:`list_lookups`.
    """
    source = model.graph
    wanted = {lookup.tensor for lookup in lookups}
    kept: list[onnx.NodeProto] = []
    for node in reversed(source.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(name for name in (*node.input, *captured_names(node)) if name)
            kept.append(node)
    new = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    new.opset_import.extend(model.opset_import)
    new.functions.extend(model.functions)
    new.graph.name = source.name or "graph"
    initialised = {t.name for t in source.initializer}
    new.graph.input.extend(i for i in source.input if i.name not in initialised)
    new.graph.initializer.extend(t for t in source.initializer if t.name in wanted)
    new.graph.node.extend(reversed(kept))
    for node in new.graph.node:
        node.name = ""  # ONNX Runtime refuses two of one name
    for lookup in lookups:
        new.graph.node.append(helper.make_node("Identity", [lookup.tensor], [lookup.source]))
        new.graph.output.append(helper.make_tensor_value_info(lookup.source, FLOAT, None))
    return new


def after_lookups(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """A copy of ``model`` that reads what it would look up from inputs named ``source``, beside its
    own; its nodes bear their ids.

    Args:
        model: read only.
        lookups: of :func:`list_lookups`.
    """
    new = with_unique_names(model)
    for lookup in lookups:
        node = new.graph.node[lookup.index]
        given = helper.make_node("Identity", [lookup.source], [lookup.tensor], node.name)
        node.CopyFrom(given)
        value = helper.make_tensor_value_info(lookup.source, FLOAT, None)
        new.graph.input.append(value)
    drop_unread(new.graph, {lookup.table for lookup in lookups} - {""})
    return new
