"""What one inference holds in memory beside the weights, told from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import onnx
from onnx import helper

from bisect_trt.graph.graph import Graph
from bisect_trt.graph.shapes import shapes_from
from bisect_trt.graph.tensor_types import captured_names

_SAME_PLACE = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Relu", "Clip", "Sigmoid", "Tanh"}
    | {"Add", "Sub", "Mul", "Div", "Sqrt", "Erf", "Exp", "Neg", "Abs", "LeakyRelu", "Softmax"}
)
"""Operators whose result may take the place of an operand that nobody reads any more."""

_TOLD: WeakKeyDictionary[Graph, dict[tuple[object, ...], int | None]] = WeakKeyDictionary()


def live_bytes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> int:
    """The most that an inference node by node holds: inputs, what is still to be read, outputs.
    Tensors whose shapes do not follow from those of the inputs are left out.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    return _most_live(graph, inputs, _sizes(graph, inputs))


def inference_bytes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> int | None:
    """As :func:`live_bytes`, where tensors of unknown shape count as much as the others do in the
    mean; None where they are most. Remembered.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    known = _TOLD.setdefault(graph, {})
    key = tuple(sorted(inputs.items()))
    if key not in known:
        made = [o for node in graph.proto.graph.node for o in node.output if o]
        sizes = _sizes(graph, inputs)
        told = sum(sizes.get(name, 0) > 0 for name in made)
        most = _most_live(graph, inputs, sizes)
        known[key] = most * len(made) // told if 2 * told > len(made) else None
    return known[key]


def _sizes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    told = shapes_from(graph, inputs)
    return {name: _bytes(graph, name, shape) for name, shape in told.items()}


def _most_live(
    graph: Graph, inputs: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> int:
    nodes = graph.proto.graph.node
    last = {name: len(nodes) for name in (*graph.outputs, *inputs)}
    for index, node in enumerate(nodes):
        for name in (*node.input, *captured_names(node)):
            last.setdefault(name, index)
            last[name] = max(last[name], index)
    constants = graph.constants
    held = sum(sizes.get(name, 0) for name in inputs)
    most = held
    for index, node in enumerate(nodes):
        made = sum(sizes.get(o, 0) for o in node.output if o and o not in constants)
        gone = [n for n in dict.fromkeys(node.input) if n and last[n] == index]
        freed = sum(sizes.get(n, 0) for n in gone if n not in constants and n not in inputs)
        reused = made if node.op_type in _SAME_PLACE and freed >= made else 0
        most = max(most, held + made - reused)
        unread = sum(sizes.get(o, 0) for o in node.output if o and o not in last)
        held += made - freed - unread
    return most


def _bytes(graph: Graph, name: str, shape: tuple[int | None, ...]) -> int:
    known = [size for size in shape if size is not None]
    elem_type = graph.types.type_of(name)
    if len(known) < len(shape) or elem_type in (
        onnx.TensorProto.UNDEFINED,
        onnx.TensorProto.STRING,
    ):
        return 0
    return int(math.prod(known) * helper.tensor_dtype_to_np_dtype(elem_type).itemsize)
