"""The shapes of a model's tensors, where they can be told without running it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from sys import intern
from typing import Any
from weakref import WeakKeyDictionary

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.constants import Constants
from bisect_trt.graph.tensors.tensor_types import captured_names, skeleton, subgraphs

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

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
    """
    return _inferred(graph, inputs)[0]


def bodies_from(graph: Graph, inputs: Mapping[str, tuple[int, ...]]) -> Bodies:
    """The bodies of control flow by the place of their node, with the shapes written into them as
    :func:`shapes_from` has those outside. Read only.

    Args:
        graph: the model.
        inputs: the shapes of its inputs.
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

    Args:
        graph: read only.
        inputs: the shapes of inputs, where they are known better than the model says.
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
