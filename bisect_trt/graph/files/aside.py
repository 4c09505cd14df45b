"""A model for ONNX's own tools, which would look for values that lie in files in their own way."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph.tensors.tensor_types import subgraphs, tensor_names, unused
from bisect_trt.graph.tensors.tensor_values import all_tensors, place_of


def values_aside(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy in which constants whose values lie in files are inputs, or identities
    of some, and those of bodies zeros. Nodes of the main graph keep their places.
    """
    apart = [t for t in model.graph.initializer if place_of(t) is not None]
    large = {i: t for i, n in enumerate(model.graph.node) if (t := _apart(n)) is not None}
    inside = any(
        place_of(tensor) is not None
        for node in model.graph.node
        for _, body in subgraphs(node)
        for tensor in all_tensors(body)
    )
    if not apart and not large and not inside:
        return model
    light = onnx.ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    kept = [t for t in model.graph.initializer if place_of(t) is None]
    declared = {i.name for i in graph.input}
    del graph.initializer[:]
    graph.initializer.extend(kept)
    stand_ins = [(t.name, t) for t in apart if t.name not in declared]
    taken = tensor_names(model.graph) if large else set[str]()
    for index, tensor in large.items():
        node = graph.node[index]
        stand_ins.append((unused(f"{node.output[0]}__value", taken), tensor))
        node.CopyFrom(
            helper.make_node("Identity", [stand_ins[-1][0]], list(node.output), node.name)
        )
    graph.input.extend(
        helper.make_tensor_value_info(name, t.data_type, list(t.dims)) for name, t in stand_ins
    )
    for node in graph.node if inside else ():
        for _, body in subgraphs(node):
            _empty(body)
    return light


def _empty(body: onnx.GraphProto) -> None:
    """Let constants of ``body`` whose values lie in files be zeros of their shape and type."""
    apart = [t for t in body.initializer if place_of(t) is not None]
    kept = [t for t in body.initializer if place_of(t) is None]
    nodes = [node for tensor in apart for node in _zeros(tensor, tensor.name)]
    for node in body.node:
        tensor = _apart(node)
        nodes += [node] if tensor is None else _zeros(tensor, node.output[0])
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del body.initializer[:], body.node[:]
    body.initializer.extend(kept)
    body.node.extend(copies)
    for node in body.node:
        for _, inner in subgraphs(node):
            _empty(inner)


def _zeros(tensor: TensorProto, name: str) -> list[onnx.NodeProto]:
    shape = numpy_helper.from_array(np.asarray(tensor.dims, np.int64))
    zero = helper.make_tensor("", tensor.data_type, [1], [0])
    return [
        helper.make_node("Constant", [], [f"{name}__shape"], value=shape),
        helper.make_node("ConstantOfShape", [f"{name}__shape"], [name], value=zero),
    ]


def _apart(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or not node.attribute or not node.attribute[0].HasField("t"):
        return None
    tensor = node.attribute[0].t
    return tensor if place_of(tensor) is not None else None
