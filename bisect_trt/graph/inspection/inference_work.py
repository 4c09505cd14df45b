"""How much one inference computes, told from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.shapes import Shape, shapes_from
from bisect_trt.graph.tensors.constants import Constants

_OF_WEIGHT = frozenset({"Conv", "ConvTranspose"})
_OF_OPERANDS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True)
class InferenceWork:
    """``values`` that the nodes make, ``products`` that are multiplied and added up for them,
    ``nodes`` that run.
    """

    values: int
    products: int
    nodes: int


def inference_work(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> InferenceWork:
    """Count the work of the main graph's nodes; those whose shapes do not follow from the inputs'
    count as much as the others do in the mean. Every weight is read at least once. Bodies are not
    entered.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    shapes = shapes_from(graph, inputs)
    constants = graph.constants
    values = products = told = 0
    nodes = [n for n in graph.proto.graph.node if any(o and o not in constants for o in n.output)]
    for node in nodes:
        made = [_count(shapes.get(o)) for o in node.output if o and o not in constants]
        if any(count is None for count in made):
            continue
        told += 1
        values += sum(count or 0 for count in made)
        products += (made[0] or 0) * _depth(node, shapes)
    every = len(nodes) / max(1, told)
    weights = sum(_values_of(constants, name) for name in constants)
    return InferenceWork(round(values * every), max(round(products * every), weights), len(nodes))


def _values_of(constants: Constants, name: str) -> int:
    """How many values a constant has, which are not read."""
    tensor = constants.tensor(name)
    return constants[name].size if tensor is None else math.prod(tensor.dims)


def _depth(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    """How many products are added up for one value of ``node``'s result; 0 where that is not what
    it does, or cannot be told.
    """
    if node.op_type in _OF_WEIGHT:
        weight = _known(shapes.get(node.input[1]))
        if not weight:
            return 0
        # Of a transposed convolution each value of the result has at most a group's channels.
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        return math.prod(weight[1:]) if node.op_type == "Conv" else weight[0] // max(1, group)
    if node.op_type in _OF_OPERANDS:
        left = _known(shapes.get(node.input[0]))
        if not left:
            return 0
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return left[0] if transposed else left[-1]
    if node.op_type == "Einsum":
        return _summed(node, shapes)
    return 0


def _summed(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    """The sizes of the indices of an Einsum that its result lacks, multiplied."""
    text = next((a.s.decode() for a in node.attribute if a.name == "equation"), "")
    terms, arrow, result = text.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, name in zip(terms.split(","), node.input, strict=False):
        sizes.update(zip(term, _known(shapes.get(name)) or (), strict=False))
    return math.prod(size for index, size in sizes.items() if arrow and index not in result)


def _known(shape: Shape | None) -> tuple[int, ...] | None:
    if shape is None or any(size is None for size in shape):
        return None
    return tuple(size for size in shape if size is not None)


def _count(shape: Shape | None) -> int | None:
    known = _known(shape)
    return None if known is None else math.prod(known)
