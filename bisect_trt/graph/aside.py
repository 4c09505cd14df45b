"""A model for ONNX's own tools, which would look for values that lie in files in their own way."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from bisect_trt.graph.tensor_values import place_of


def values_aside(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy in which constants of the main graph whose values lie in files are
    inputs, or identities of some. Nodes keep their places.
    """
    apart = [t for t in model.graph.initializer if place_of(t) is not None]
    large = {i: t for i, n in enumerate(model.graph.node) if (t := _apart(n)) is not None}
    if not apart and not large:
        return model
    light = onnx.ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    kept = [t for t in model.graph.initializer if place_of(t) is None]
    declared = {i.name for i in graph.input}
    del graph.initializer[:]
    graph.initializer.extend(kept)
    stand_ins = [(t.name, t) for t in apart if t.name not in declared]
    for index, tensor in large.items():
        node = graph.node[index]
        stand_ins.append((f"{node.output[0]}__value", tensor))
        node.CopyFrom(
            helper.make_node("Identity", [stand_ins[-1][0]], list(node.output), node.name)
        )
    graph.input.extend(
        helper.make_tensor_value_info(name, t.data_type, list(t.dims)) for name, t in stand_ins
    )
    return light


def _apart(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or not node.attribute or not node.attribute[0].HasField("t"):
        return None
    tensor = node.attribute[0].t
    return tensor if place_of(tensor) is not None else None
