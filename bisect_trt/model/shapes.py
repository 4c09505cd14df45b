"""Computes shapes, the memory of activations, and the work of an inference."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import intern

import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.tensor_types import SMALL_CONSTANT_ELEMENTS, skeleton
from bisect_trt.model.tensor_values import Constants
from bisect_trt.model.walk import captured_names, subgraphs, tensors_read

Shape = tuple[int | None, ...]
Inputs = Mapping[str, tuple[int, ...]]
"""The shapes of a model's inputs, by name."""

Bodies = dict[int, list[onnx.GraphProto]]


def shapes_from(graph: Graph, inputs: Inputs) -> dict[str, Shape]:
    """The shapes of the tensors of ``graph`` for inputs of the shapes ``inputs``; read only."""
    return _inferred(graph, inputs)[0]


def _inferred(graph: Graph, inputs: Inputs) -> tuple[dict[str, Shape], Bodies]:
    """The tensors' shapes, and the bodies of control flow with shapes written into them."""
    key = tuple(sorted(inputs.items()))
    # Keeps the result for the latest inputs only, because a model may have many tensors.
    latest = graph.derived.get("shapes")
    if latest is None or latest[0] != key:
        light = with_shapes(graph, inputs)
        latest = graph.derived["shapes"] = (key, (shapes_of(light), _bodies_of(light)))
    found: tuple[dict[str, Shape], Bodies] = latest[1]
    return found


def _bodies_of(graph: onnx.GraphProto) -> Bodies:
    """The bodies in ``graph`` by the index of their node."""
    found = {place: [b for _, b in subgraphs(node)] for place, node in enumerate(graph.node)}
    return {place: bodies for place, bodies in found.items() if bodies}


def with_shapes(graph: Graph, inputs: Inputs | None = None) -> onnx.GraphProto:
    """A copy of ``graph`` without large weights, with the shapes that ONNX infers, in bodies too.

    Nodes keep their places.
    """
    light = skeleton(graph.proto)
    for value in light.graph.input:
        if value.name in (inputs or {}):
            found = helper.make_tensor_value_info(
                value.name, value.type.tensor_type.elem_type, (inputs or {})[value.name]
            )
            value.CopyFrom(found)
    _copy_into_bodies(light.graph, graph.constants)
    try:  # data_prop follows the values of computed shapes
        return onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except Exception:  # the library raises several kinds; no shape is known then
        return light.graph


def _copy_into_bodies(graph: onnx.GraphProto, constants: Constants) -> None:
    """Copies small constants that bodies read into them, where ONNX's inference sees the values."""
    for node in graph.node:
        small = [
            numpy_helper.from_array(constants[name], name)
            for name in captured_names(node)
            if name in constants and constants.count(name) <= SMALL_CONSTANT_ELEMENTS
        ]
        for _, body in subgraphs(node):
            body.initializer.extend(small)
            _copy_into_bodies(body, constants)


def shapes_of(graph: onnx.GraphProto) -> dict[str, Shape]:
    """The shapes declared in ``graph``, by tensor; None stands for an unknown size."""
    shared: dict[Shape, Shape] = {}  # thousands of tensors have few different shapes
    shapes: dict[str, Shape] = {intern(t.name): tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shape = tuple(
                int(d.dim_value) if d.WhichOneof("value") == "dim_value" else None
                for d in tensor.shape.dim
            )
            shapes[intern(value.name)] = shared.setdefault(shape, shape)
    return shapes


_IN_PLACE = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Relu", "Clip", "Sigmoid", "Tanh"}
    | {"Add", "Sub", "Mul", "Div", "Sqrt", "Erf", "Exp", "Neg", "Abs", "LeakyRelu", "Softmax"}
)
"""Operators whose result may reuse the memory of an operand that is read no more."""


def live_bytes(graph: Graph, inputs: Inputs) -> int:
    """The peak bytes of activations in an inference node by node, inputs and outputs included.

    Tensors whose shapes do not follow from those of the inputs are left out.
    """
    sizes = {n: size for n, size in _sizes(graph, inputs).items() if n not in graph.constants}
    inside = _inside(_inferred(graph, inputs)[1])
    return _peak_live(
        graph.proto.graph.node, given=inputs, outputs=graph.outputs, sizes=sizes, inside=inside
    )


def inference_bytes(graph: Graph, inputs: Inputs) -> int | None:
    """The peak bytes of activations, scaled for unknown shapes; None if most are unknown."""
    by_inputs = graph.derived.setdefault("inference_bytes", {})
    key = tuple(sorted(inputs.items()))
    if key not in by_inputs:
        made = [o for node in graph.proto.graph.node for o in node.output if o]
        sizes = _sizes(graph, inputs)
        counted = sum(sizes.get(name, 0) > 0 for name in made)
        # Tensors of unknown shape count like the mean of the known ones.
        enough = 2 * counted > len(made)
        by_inputs[key] = live_bytes(graph, inputs) * len(made) // counted if enough else None
    found: int | None = by_inputs[key]
    return found


def _sizes(graph: Graph, inputs: Inputs) -> dict[str, int]:
    shapes = shapes_from(graph, inputs)
    return {name: _size(graph.types.type_of(name), shape) for name, shape in shapes.items()}


def _inside(bodies: Bodies) -> dict[int, int]:
    """The peak bytes in each node's bodies: one branch or one iteration runs at a time."""
    return {place: max(map(_body_bytes, found)) for place, found in bodies.items()}


def _body_bytes(body: onnx.GraphProto) -> int:
    """The peak bytes in a body, by the shapes and types that inference wrote into it."""
    shapes = shapes_of(body)
    stored = {tensor.name for tensor in body.initializer}
    return _peak_live(
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


def _peak_live(
    nodes: Sequence[onnx.NodeProto],
    *,
    given: Collection[str],
    outputs: Iterable[str],
    sizes: Mapping[str, int],
    inside: Mapping[int, int],
) -> int:
    """The peak bytes of the tensors that are ``given`` or still to be read at any node."""
    # The caller holds inputs and outputs until the end.
    last_read = {name: len(nodes) for name in (*outputs, *given)}
    reads = [tensors_read(node) for node in nodes]
    for index, names in enumerate(reads):
        for name in names:
            last_read[name] = max(last_read.get(name, index), index)
    # Weights are left out: they are in memory once, whatever runs.
    live = sum(sizes.get(name, 0) for name in given)
    peak = live
    for index, node in enumerate(nodes):
        made = sum(sizes.get(o, 0) for o in node.output if o)
        done = [n for n in reads[index] if last_read[n] == index and n not in given]
        freed = sum(sizes.get(n, 0) for n in done)
        # ONNX Runtime computes such an operator in the memory of its operand.
        reused = made if node.op_type in _IN_PLACE and freed >= made else 0
        peak = max(peak, live + made - reused + inside.get(index, 0))
        unread = sum(sizes.get(o, 0) for o in node.output if o and o not in last_read)
        live += made - freed - unread
    return peak


def _size(elem_type: int, shape: Shape) -> int:
    sizes = complete(shape)
    if sizes is None or elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    return int(math.prod(sizes) * helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


@dataclass(frozen=True)
class InferenceWork:
    """The numbers of computed ``values``, of ``products`` summed for them, and of ``nodes``."""

    values: int
    products: int
    nodes: int


def inference_work(graph: Graph, inputs: Inputs) -> InferenceWork:
    """The work of the main graph's nodes, scaled for unknown shapes."""
    shapes = shapes_from(graph, inputs)
    constants = graph.constants
    values = products = counted = 0
    nodes = [n for n in graph.proto.graph.node if any(o and o not in constants for o in n.output)]
    for node in nodes:
        made = [complete(shapes.get(o)) for o in node.output if o and o not in constants]
        sizes = [math.prod(shape) for shape in made if shape is not None]
        if len(sizes) == len(made):
            counted += 1
            values += sum(sizes)
            products += round(multiply_adds(node, shapes, sizes[0]))
    scale = len(nodes) / max(1, counted)  # nodes of unknown shape count like the mean
    weights = sum(constants.count(name) for name in constants)  # each is read at least once
    return InferenceWork(round(values * scale), max(round(products * scale), weights), len(nodes))


def multiply_adds(node: onnx.NodeProto, shapes: Mapping[str, Shape], made: float) -> float:
    """The multiply-adds of a matrix layer that makes ``made`` values; 0 where shapes are unknown.

    Known are Conv, ConvTranspose, DeformConv, MatMul, Gemm, Einsum, Attention, LSTM, GRU and RNN.
    """
    known = [complete(shapes.get(name)) for name in node.input]
    if len(known) < 2 or known[0] is None or (known[1] is None and node.op_type != "Einsum"):
        return 0.0
    first, second = known[0], known[1] or ()
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type in ("Conv", "DeformConv"):
        return made * math.prod(second[1:])
    if node.op_type == "ConvTranspose":  # each value of the input meets one kernel of its group
        return float(math.prod(first) * math.prod(second[1:]))
    if node.op_type in ("MatMul", "Gemm"):
        rows_first = node.op_type == "Gemm" and attributes.get("transA")
        return made * (first[0] if rows_first else first[-1] if first else 1)
    if node.op_type in ("LSTM", "GRU", "RNN") and len(known) > 2 and known[2] is not None:
        steps = math.prod(first[:-1])
        return float(steps * (math.prod(second) + math.prod(known[2])))
    if node.op_type == "Einsum":
        return _einsum(node, known)
    if node.op_type == "Attention":  # queries with keys, weights with values
        keys = second[-2] if len(second) > 1 else 1
        return float(2 * math.prod(first) * keys)
    return 0.0


def _einsum(node: onnx.NodeProto, known: Sequence[tuple[int, ...] | None]) -> float:
    """The product of the sizes of an Einsum's letters: its loops, if they are not reordered."""
    equation = next((a.s for a in node.attribute if a.name == "equation"), b"").decode()
    terms = equation.replace(" ", "").partition("->")[0]
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), known, strict=False):
        if shape is None or "." in term or len(term) != len(shape):
            return 0.0
        sizes.update(zip(term, shape, strict=True))
    return float(math.prod(sizes.values()))


def complete(shape: Shape | None) -> tuple[int, ...] | None:
    """``shape`` if every size is known, else None."""
    if shape is None or any(size is None for size in shape):
        return None
    return tuple(size for size in shape if size is not None)
