"""Ifs that TensorRT does not build: bodies that differ, recurrent operators inside.

Measured with TensorRT for RTX 1.6.1.120, building without a GPU. An If whose condition follows from
constants and shapes is built with one of its bodies, whatever is in the other; bodies whose outputs
differ in size alone, and RNN, build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from bisect_trt.core.finding import Finding
from bisect_trt.graph.inspection.cautions import refused
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.shapes import shapes_of
from bisect_trt.graph.tensors.tensor_types import UNKNOWN, Scope, subgraphs

_BODIES = {"then_branch", "else_branch"}
_RECURRENT = ("LSTM", "GRU")
_SHAPES = ("Shape", "Size")


@dataclass(frozen=True)
class _Inside:
    """A graph or a body: ``makers`` are the nodes, by output, of it and what is around it."""

    graph: onnx.GraphProto
    scope: Scope
    makers: Mapping[str, onnx.NodeProto]
    constants: frozenset[str]


def if_findings(graph: Graph, light: onnx.GraphProto) -> Iterator[Finding]:
    """A finding for each If whose bodies do not fit, or hold recurrent operators, where its
    condition is known only when the engine runs.

    Args:
        graph: the model.
        light: its graph with shapes (:func:`~bisect_trt.graph.model.shapes.with_shapes`).
    """
    declared = {i.name for i in graph.proto.graph.input}
    constants = {t.name for t in graph.proto.graph.initializer}.difference(declared)
    yield from _ifs_inside(_Inside(light, graph.types, {}, frozenset(constants)), graph.names)


def _ifs_inside(inside: _Inside, names: Sequence[str]) -> Iterator[Finding]:
    nodes = inside.graph.node
    makers = {**inside.makers, **{o: node for node in nodes for o in node.output if o}}
    constants = inside.constants.union(t.name for t in inside.graph.initializer)
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        bodies = {
            kind: _Inside(body, inside.scope.body(index, kind), makers, constants)
            for kind, body in subgraphs(node)
        }
        whole = node.op_type == "If" and bool(node.input) and bodies.keys() >= _BODIES
        if whole and _told_at_run_time(node.input[0], makers, constants):
            yield from _misfits(node, name, bodies["then_branch"], bodies["else_branch"])
            recurrent = [r for body in bodies.values() for r in _recurrent(body.graph)]
            what = (
                f"recurrent operators in the If {name}, which TensorRT for RTX does not build: "
                "export a model for each of its bodies"
            )
            yield from refused("if-recurrent", recurrent, what)
            continue  # what is in its bodies goes with it
        for body in bodies.values():
            yield from _ifs_inside(body, [_called(n) for n in body.graph.node])


def _misfits(node: onnx.NodeProto, name: str, one: _Inside, other: _Inside) -> Iterator[Finding]:
    ranks = [{n: len(s) for n, s in shapes_of(b.graph).items()} for b in (one, other)]
    for output, first, second in zip(
        node.output, one.graph.output, other.graph.output, strict=False
    ):
        types = (one.scope.type_of(first.name), other.scope.type_of(second.name))
        sizes = (ranks[0].get(first.name), ranks[1].get(second.name))
        if UNKNOWN not in types and types[0] != types[1]:
            differ = " and ".join(helper.tensor_dtype_to_string(t).split(".")[-1] for t in types)
        elif None not in sizes and sizes[0] != sizes[1]:
            differ = f"{sizes[0]} and {sizes[1]} dimensions"
        else:
            continue
        message = (
            f"{name} (If): its bodies give output {output!r} {differ}, which TensorRT refuses "
            "where the condition is known only at run time: make them equal (Cast, Reshape), or "
            "export a model for each body"
        )
        yield Finding("if-bodies", name, message)


def _told_at_run_time(
    condition: str, makers: Mapping[str, onnx.NodeProto], constants: frozenset[str]
) -> bool:
    """Whether ``condition`` follows from the values of an input, not from constants and shapes."""
    seen, left = set[str](), [condition]
    while left:
        tensor = left.pop()
        if not tensor or tensor in seen or tensor in constants:
            continue
        seen.add(tensor)
        maker = makers.get(tensor)
        if maker is None:
            return True
        if maker.op_type not in _SHAPES:
            left += maker.input
    return False


def _recurrent(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.op_type in _RECURRENT:
            yield f"{_called(node)} ({node.op_type})"
        for _, body in subgraphs(node):
            yield from _recurrent(body)


def _called(node: onnx.NodeProto) -> str:
    return str(node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}")
