"""Shapes, sizes of activations, and the work of an inference."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.tensor_types import (
    SMALL_CONSTANT_ELEMENTS,
    captured_names,
    skeleton,
    subgraphs,
)
from bisect_trt.model.tensor_values import Constants

_SHAPE_CONSTANT_TYPES = ("i8", "i4", "f4")
"""Of constants that may say what a shape becomes: sizes, axes and scales."""

Shape = tuple[int | None, ...]
Inputs = Mapping[str, tuple[int, ...]]
"""The shapes of a model's inputs, by name."""

Bodies = dict[int, list[onnx.GraphProto]]


def shapes_from(graph: Graph, inputs: Inputs) -> dict[str, Shape]:
    """The shapes of the tensors of ``graph`` where its inputs have those of ``inputs``.

    Remembered until other inputs are asked about. Read only.
    """
    return _inferred(graph, inputs)[0]


def _inferred(graph: Graph, inputs: Inputs) -> tuple[dict[str, Shape], Bodies]:
    """As :func:`shapes_from`, and the bodies of control flow with the shapes written into them."""
    key = tuple(sorted(inputs.items()))
    known = graph.derived.get("shapes")
    if known is None or known[0] != key:
        light = with_shapes(graph, inputs)
        known = graph.derived["shapes"] = (key, (shapes_of(light), _bodies_of(light)))
    found: tuple[dict[str, Shape], Bodies] = known[1]
    return found


def _bodies_of(graph: onnx.GraphProto) -> Bodies:
    """The bodies in ``graph`` by the place of their node."""
    found = {place: [b for _, b in subgraphs(node)] for place, node in enumerate(graph.node)}
    return {place: bodies for place, bodies in found.items() if bodies}


def with_shapes(graph: Graph, inputs: Inputs | None = None) -> onnx.GraphProto:
    """A copy of ``graph`` without large weights, with the shapes that ONNX's inference tells.

    Those of bodies are written too. Nodes keep their places.
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
    if constants.count(name) > SMALL_CONSTANT_ELEMENTS:
        return None
    array = constants[name]
    return array if array.dtype.str[1:] in _SHAPE_CONSTANT_TYPES else None


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


def live_bytes(graph: Graph, inputs: Inputs) -> int:
    """The most that an inference node by node holds: inputs, what is still to be read, outputs.

    Tensors whose shapes do not follow from those of the inputs are left out.
    """
    sizes = {n: size for n, size in _sizes(graph, inputs).items() if n not in graph.constants}
    inside = _inside(_inferred(graph, inputs)[1])
    return _most_live(
        graph.proto.graph.node, given=inputs, outputs=graph.outputs, sizes=sizes, inside=inside
    )


def inference_bytes(graph: Graph, inputs: Inputs) -> int | None:
    """What an inference holds; None where most shapes do not follow from those of the inputs.

    Tensors of unknown shape count as much as the others do in the mean. Remembered.
    """
    known = graph.derived.setdefault("inference_bytes", {})
    key = tuple(sorted(inputs.items()))
    if key not in known:
        made = [o for node in graph.proto.graph.node for o in node.output if o]
        sizes = _sizes(graph, inputs)
        counted = sum(sizes.get(name, 0) > 0 for name in made)
        enough = 2 * counted > len(made)
        known[key] = live_bytes(graph, inputs) * len(made) // counted if enough else None
    found: int | None = known[key]
    return found


def _sizes(graph: Graph, inputs: Inputs) -> dict[str, int]:
    shapes = shapes_from(graph, inputs)
    return {name: _size(graph.types.type_of(name), shape) for name, shape in shapes.items()}


def _inside(bodies: Bodies) -> dict[int, int]:
    """What a node's bodies hold: of an If one of them runs, of a loop one turn at a time."""
    return {place: max(map(_of_body, found)) for place, found in bodies.items()}


def _of_body(body: onnx.GraphProto) -> int:
    """What a body holds, by the shapes and types that inference wrote into it."""
    shapes = shapes_of(body)
    stored = {tensor.name for tensor in body.initializer}
    return _most_live(
        body.node,
        given=[value.name for value in body.input],
        outputs=[value.name for value in body.output],
        sizes={
            value.name: _size(value.type.tensor_type.elem_type, shapes[value.name])
            for value in (*body.input, *body.value_info, *body.output)
            if value.name in shapes and value.name not in stored
        },
        inside=_inside(_bodies_of(body)),
    )


def _most_live(
    nodes: Sequence[onnx.NodeProto],
    *,
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


def _size(elem_type: int, shape: Shape) -> int:
    known = _known(shape)
    if known is None or elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    return int(math.prod(known) * helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


@dataclass(frozen=True)
class InferenceWork:
    """``values`` made, ``products`` added up for them, ``nodes`` run."""

    values: int
    products: int
    nodes: int


def inference_work(graph: Graph, inputs: Inputs) -> InferenceWork:
    """Count the work of the main graph's nodes; bodies are not entered.

    Nodes whose shapes do not follow from the inputs' count as much as the others do in the mean.
    Every weight is read at least once.
    """
    shapes = shapes_from(graph, inputs)
    constants = graph.constants
    values = products = counted = 0
    nodes = [n for n in graph.proto.graph.node if any(o and o not in constants for o in n.output)]
    for node in nodes:
        made = [_known(shapes.get(o)) for o in node.output if o and o not in constants]
        known = [math.prod(shape) for shape in made if shape is not None]
        if len(known) == len(made):
            counted += 1
            values += sum(known)
            products += known[0] * _depth(node, shapes)
    scale = len(nodes) / max(1, counted)
    weights = sum(constants.count(name) for name in constants)
    return InferenceWork(round(values * scale), max(round(products * scale), weights), len(nodes))


def _depth(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    """How many products are added up for one value of ``node``'s result; 0 where unknown."""
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type in ("Conv", "ConvTranspose"):
        weight = _known(shapes.get(node.input[1]))
        if not weight:
            return 0
        # Of a transposed convolution each value of the result has at most a group's channels.
        groups = max(1, attributes.get("group", 1))
        return math.prod(weight[1:]) if node.op_type == "Conv" else weight[0] // groups
    if node.op_type in ("MatMul", "Gemm"):
        left = _known(shapes.get(node.input[0]))
        if left:
            return left[0] if attributes.get("transA") else left[-1]
    return 0


def _known(shape: Shape | None) -> tuple[int, ...] | None:
    sizes = tuple(size for size in shape or () if size is not None)
    return None if shape is None or len(sizes) < len(shape) else sizes
