"""Walks over nodes and their bodies, and cuts and edits graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import AttributeProto, helper


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators that ``model`` imports; 1 if it imports none."""
    return next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of a control-flow node, by attribute name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def fed_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs without an initialiser; those with one are constants, as in an engine."""
    initialised = {t.name for t in graph.initializer}
    return [i for i in graph.input if i.name not in initialised]


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes`` and the nodes of their bodies, each before its bodies."""
    for node in nodes:
        yield node
        for _, body in subgraphs(node):
            yield from every_node(body.node)


def operators(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The operator types of ``nodes`` and of the nodes in their bodies."""
    return {node.op_type for node in every_node(nodes)}


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replaces the nodes of ``graph`` by ``nodes``, which may be its own."""
    kept = onnx.GraphProto()  # copies first: clearing the field would empty its own nodes
    kept.node.extend(nodes)
    graph.ClearField("node")
    graph.node.extend(kept.node)


def captured_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The outer tensors that the bodies of ``node`` read, in order of first use."""
    if not node.attribute:  # a shortcut for most nodes of a large model
        return ()
    found: dict[str, None] = {}

    def visit(graph: onnx.GraphProto, outer: frozenset[str]) -> None:
        inside = set(outer) | {i.name for i in graph.input} | {t.name for t in graph.initializer}
        for inner in graph.node:
            for name in inner.input:
                if name and name not in inside:
                    found.setdefault(name)
            # A name is captured only if no graph between defines it.
            for _, body in subgraphs(inner):
                visit(body, frozenset(inside))
            inside.update(inner.output)
        for output in graph.output:
            if output.name not in inside:
                found.setdefault(output.name)

    for _, body in subgraphs(node):
        visit(body, frozenset())
    return tuple(found)


def tensors_read(node: onnx.NodeProto) -> tuple[str, ...]:
    """The tensors that ``node`` and its bodies read, each once."""
    return tuple(dict.fromkeys((*filter(None, node.input), *captured_names(node))))


def names_read(graph: onnx.GraphProto) -> set[str]:
    """The tensors that nodes, their bodies and the outputs of ``graph`` read."""
    return {o.name for o in graph.output}.union(*map(tensors_read, graph.node))


def drop_unread(graph: onnx.GraphProto, names: set[str]) -> None:
    """Removes the constants and Casts among ``names`` that no node and no output reads."""
    if not names:
        return
    unread = names - names_read(graph)
    kept = [
        node
        for node in graph.node
        if node.op_type not in ("Constant", "Cast") or node.output[0] not in unread
    ]
    if len(kept) < len(graph.node):
        replace_nodes(graph, kept)
    remove_initialisers(graph, unread)


def remove_initialisers(graph: onnx.GraphProto, names: set[str]) -> None:
    """Removes the initialisers ``names`` from ``graph`` without copying the others."""
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name in names:
            del graph.initializer[place]


def tensor_names(graph: onnx.GraphProto) -> set[str]:
    """The names of inputs, initialisers and node outputs, in bodies too."""
    names = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        names.update(node.output)
        for _, body in subgraphs(node):
            names |= tensor_names(body)
    return names


def unused(name: str, taken: set[str]) -> str:
    """``name``, with underscores appended until it is not in ``taken``, and adds it there."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def without_graph(model: onnx.ModelProto, *, min_ir_version: int = 0) -> onnx.ModelProto:
    """A model with the opsets, functions and graph name of ``model``, and an empty graph."""
    empty = onnx.ModelProto(ir_version=max(model.ir_version, min_ir_version))
    empty.opset_import.extend(model.opset_import)
    empty.functions.extend(model.functions)
    empty.graph.name = model.graph.name or "graph"
    return empty


def part_of(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """The part of ``model`` that computes ``outputs``, which are not declared as outputs yet."""
    wanted = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(tensors_read(node))
            kept.append(node)
    part = without_graph(model)
    weights = {t.name for t in model.graph.initializer}
    part.graph.input.extend(
        i for i in model.graph.input if i.name not in weights or i.name in wanted
    )
    part.graph.initializer.extend(t for t in model.graph.initializer if t.name in wanted)
    part.graph.node.extend(reversed(kept))
    return part


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, or ``default`` where the node has none."""
    for found in node.attribute:
        if found.name == name:
            return helper.get_attribute_value(found)
    return default
