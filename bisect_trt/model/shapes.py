"""Shapes, sizes of activations, and the work of an inference."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any
from weakref import WeakKeyDictionary

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.tensor_types import captured_names, skeleton, subgraphs
from bisect_trt.model.tensor_values import Constants

_SMALL = 1024
"""Elements of a constant that may say what a shape becomes."""

_TOLD_BY = ("i8", "i4", "f4")
"""Types of such constants: sizes, axes, scales."""

Shape = tuple[int | None, ...]

Bodies = dict[int, list[onnx.GraphProto]]

_LAST: WeakKeyDictionary[Graph, tuple[object, dict[str, Shape], Bodies]] = WeakKeyDictionary()


def shapes_from(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
    """The shapes of the tensors of ``graph``, by name, where its inputs have those of ``inputs``;
    remembered until other inputs are asked about. Read only.
    """
    return _inferred(graph, inputs)[0]


def bodies_from(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> Bodies:
    """The bodies of control flow by the place of their node, with the shapes written into them as
    :func:`shapes_from` has those outside. Read only.
    """
    return _inferred(graph, inputs)[1]


def _inferred(
    graph: Graph, inputs: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Shape], Bodies]:
    key = tuple(sorted(inputs.items()))
    known = _LAST.get(graph)
    if known is None or known[0] != key:
        light = with_shapes(graph, inputs)
        known = _LAST[graph] = (key, shapes_of(light), bodies_of(light))
    return known[1], known[2]


def bodies_of(graph: onnx.GraphProto) -> Bodies:
    """The bodies in ``graph`` by the place of their node."""
    found = {}
    for place, node in enumerate(graph.node):
        if bodies := [body for _, body in subgraphs(node)]:
            found[place] = bodies
    return found


def with_shapes(
    graph: Graph, inputs: Mapping[str, tuple[int, ...]] | None = None
) -> onnx.GraphProto:
    """A copy of ``graph`` without large weights, in which ONNX's inference wrote what shapes it
    could tell, bodies included. Nodes keep their places.
    """
    light = skeleton(graph.proto)
    for value in light.graph.input:
        if value.name in (inputs or {}):
            found = helper.make_tensor_value_info(
                value.name, value.type.tensor_type.elem_type, (inputs or {})[value.name]
            )
            value.CopyFrom(found)
    declared = {i.name for i in graph.proto.graph.input}
    small = {
        name: numpy_helper.from_array(array, name)
        for name in graph.constants
        if name not in declared and (array := _small(graph.constants, name)) is not None
    }
    stored = {t.name for t in graph.proto.graph.initializer}.intersection(small)
    unstored = [i for i in light.graph.input if i.name not in stored]
    del light.graph.input[:]
    light.graph.input.extend(unstored)
    there = {t.name for t in light.graph.initializer}
    light.graph.initializer.extend(small[name] for name in sorted(stored - there))
    _give_to_bodies(light.graph, small)
    try:
        return onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except Exception:  # the library raises several kinds; then nothing is known
        return light.graph


def _small(constants: Constants, name: str) -> NDArray[Any] | None:
    """The constant ``name`` where it may say what a shape becomes; a large one is not read."""
    tensor = constants.tensor(name)
    if tensor is not None and math.prod(tensor.dims) > _SMALL:
        return None
    array = constants[name]
    return array if array.size <= _SMALL and array.dtype.str[1:] in _TOLD_BY else None


def _give_to_bodies(graph: onnx.GraphProto, constants: Mapping[str, TensorProto]) -> None:
    """Inference looks at no values outside the body that it is in."""
    for node in graph.node:
        read = [constants[name] for name in captured_names(node) if name in constants]
        for _, body in subgraphs(node):
            body.initializer.extend(read)
            _give_to_bodies(body, constants)


def shapes_of(graph: onnx.GraphProto) -> dict[str, Shape]:
    """The shapes that ``graph`` holds, by tensor; None for a size that is not known."""
    same: dict[Shape, Shape] = {}  # thousands of tensors have a few
    known: dict[str, Shape] = {intern(t.name): tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shape = tuple(
                int(d.dim_value) if d.WhichOneof("value") == "dim_value" else None
                for d in tensor.shape.dim
            )
            known[intern(value.name)] = same.setdefault(shape, shape)
    return known


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
    """
    return _held(graph, inputs, _sizes(graph, inputs))


def inference_bytes(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> int | None:
    """What is held, as :func:`activations` tells it."""
    told = activations(graph, inputs)
    return None if told is None else told.held


def activations(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> Activations | None:
    """What an inference holds; None where most tensors' shapes do not follow from those of the
    inputs. Remembered.
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
    """The most that is held at any node: what is ``given`` and what is still to be read."""
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
