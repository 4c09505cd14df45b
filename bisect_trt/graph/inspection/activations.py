"""What one inference holds in memory beside the weights, told from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import onnx
from onnx import helper

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.shapes import Bodies, bodies_from, bodies_of, shapes_from, shapes_of
from bisect_trt.graph.tensors.tensor_types import captured_names

_SAME_PLACE = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Relu", "Clip", "Sigmoid", "Tanh"}
    | {"Add", "Sub", "Mul", "Div", "Sqrt", "Erf", "Exp", "Neg", "Abs", "LeakyRelu", "Softmax"}
)
"""Operators whose result may take the place of an operand that nobody reads any more."""

_TOLD: WeakKeyDictionary[Graph, dict[tuple[object, ...], Activations | None]] = WeakKeyDictionary()


SMALL = 32 << 10
"""Bytes of the usual tensor up to which a node takes microseconds: what is done once a node then
costs more than what is done once a byte."""


@dataclass(frozen=True)
class Activations:
    """Bytes of an inference's tensors: the most that is ``held`` at a time, what the ``usual`` one
    takes (the mean). Those of unknown shape count as much as the others do in the mean.
    """

    held: int
    usual: float

    @property
    def small(self) -> bool:
        """Whether the usual tensor is."""
        return self.usual <= SMALL


def live_bytes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> int:
    """The most that an inference node by node holds: inputs, what is still to be read, outputs.
    Tensors whose shapes do not follow from those of the inputs are left out.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    return _held(graph, inputs, _sizes(graph, inputs))


def inference_bytes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> int | None:
    """What is held, as :func:`activations` tells it.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    told = activations(graph, inputs)
    return None if told is None else told.held


def activations(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> Activations | None:
    """What an inference holds; None where most tensors' shapes do not follow from those of the
    inputs. Remembered.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    known = _TOLD.setdefault(graph, {})
    key = tuple(sorted(inputs.items()))
    if key not in known:
        made = [o for node in graph.proto.graph.node for o in node.output if o]
        sizes = _sizes(graph, inputs)
        told = [size for name in made if (size := sizes.get(name, 0)) > 0]
        known[key] = None
        if 2 * len(told) > len(made):
            most = _held(graph, inputs, sizes) * len(made) // len(told)
            known[key] = Activations(most, sum(told) / len(told))
    return known[key]


def _sizes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    told = shapes_from(graph, inputs)
    return {name: _bytes(graph, name, shape) for name, shape in told.items()}


def _held(graph: Graph, inputs: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> int:
    """As :func:`_most_live`, of a whole model."""
    made = {name: size for name, size in sizes.items() if name not in graph.constants}
    inside = _inside(bodies_from(graph, inputs))
    return _most_live(graph.proto.graph.node, inputs, graph.outputs, made, inside)


def _inside(bodies: Bodies) -> dict[int, int]:
    """What a node's bodies hold while they run: of an If one of them does, of a loop one turn at a
    time.
    """
    return {place: max(map(_of_body, found)) for place, found in bodies.items()}


def _of_body(body: onnx.GraphProto) -> int:
    """What a body holds, by the shapes and types that inference wrote into it."""
    shapes = shapes_of(body)
    stored = {tensor.name for tensor in body.initializer}
    sizes = {
        value.name: _size(value.type.tensor_type.elem_type, shapes[value.name])
        for value in (*body.input, *body.value_info, *body.output)
        if value.name in shapes and value.name not in stored
    }
    given = [value.name for value in body.input]
    outputs = [value.name for value in body.output]
    return _most_live(body.node, given, outputs, sizes, _inside(bodies_of(body)))


def _most_live(
    nodes: Sequence[onnx.NodeProto],
    given: Collection[str],
    outputs: Iterable[str],
    sizes: Mapping[str, int],
    inside: Mapping[int, int],
) -> int:
    """The most that is held at any node: what is ``given`` and what is still to be read.

    Args:
        nodes: in the order in which they run.
        given: what the caller holds throughout.
        outputs: what is held to the end.
        sizes: bytes by tensor; of constants nothing.
        inside: what a node's bodies hold, by its place.
    """
    last = {name: len(nodes) for name in (*outputs, *given)}
    read = [dict.fromkeys(filter(None, (*n.input, *captured_names(n)))) for n in nodes]
    for index, names in enumerate(read):
        for name in names:
            last[name] = max(last.get(name, index), index)
    held = sum(sizes.get(name, 0) for name in given)
    most = held
    for index, node in enumerate(nodes):
        made = sum(sizes.get(o, 0) for o in node.output if o)
        gone = [n for n in read[index] if last[n] == index and n not in given]
        freed = sum(sizes.get(n, 0) for n in gone)
        reused = made if node.op_type in _SAME_PLACE and freed >= made else 0
        most = max(most, held + made - reused + inside.get(index, 0))
        unread = sum(sizes.get(o, 0) for o in node.output if o and o not in last)
        held += made - freed - unread
    return most


def _bytes(graph: Graph, name: str, shape: tuple[int | None, ...]) -> int:
    return _size(graph.types.type_of(name), shape)


def _size(elem_type: int, shape: tuple[int | None, ...]) -> int:
    known = [size for size in shape if size is not None]
    if len(known) < len(shape) or elem_type in (
        onnx.TensorProto.UNDEFINED,
        onnx.TensorProto.STRING,
    ):
        return 0
    return int(math.prod(known) * helper.tensor_dtype_to_np_dtype(elem_type).itemsize)
