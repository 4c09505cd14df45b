"""The model as it came, with words at its nodes: viewers such as Netron show ``metadata_props``.

It is for looking at. Where a model is large its large constants are left out, since a viewer in a
browser opens no gigabytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.model.tensor_values import size_of

PREFIX = "bisect_trt."
_IR_WITH_NODE_METADATA = 10
_WHOLE_BYTES, _KEPT_BYTES = 64 << 20, 1 << 10
LEFT_OUT = "weights-left-out"


def annotated(
    graph: Graph, of_model: Mapping[str, str], of_layers: Mapping[str, Mapping[str, str]]
) -> onnx.ModelProto:
    """A copy of the model with names and values at itself and at its nodes; it computes the same.

    Models with more than 64 MB of weights keep only constants of 1 kB: the others say where their
    data would be (``LEFT_OUT``), so that the graph can be read and not run.
    """
    source = graph.proto
    if weights_size(source) <= _WHOLE_BYTES:
        model = onnx.ModelProto()
        model.CopyFrom(source)
    else:
        model = _light(source)
    model.ir_version = max(model.ir_version, _IR_WITH_NODE_METADATA)
    _tell(model, of_model)
    for node, name in zip(model.graph.node, graph.names, strict=True):
        if name in of_layers:
            _tell(node, of_layers[name])
    return model


def _tell(told: onnx.ModelProto | onnx.NodeProto, words: Mapping[str, str]) -> None:
    kept = [p for p in told.metadata_props if p.key.removeprefix(PREFIX) not in words]
    del told.metadata_props[:]
    told.metadata_props.extend(kept)
    for key, value in words.items():
        told.metadata_props.add(key=f"{PREFIX}{key}", value=value)


def _light(source: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the data of large initializers, which is never held twice in memory."""
    model = onnx.ModelProto()
    for descriptor, value in source.ListFields():
        if descriptor.name == "graph":
            continue
        if descriptor.is_repeated:
            getattr(model, descriptor.name).extend(value)
        elif descriptor.message_type is not None:
            getattr(model, descriptor.name).CopyFrom(value)
        else:
            setattr(model, descriptor.name, value)
    graph = model.graph
    graph.name = source.graph.name
    for name in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(graph, name).extend(getattr(source.graph, name))
    for tensor in source.graph.initializer:
        if size_of(tensor) <= _KEPT_BYTES:
            graph.initializer.append(tensor)
            continue
        left_out = graph.initializer.add(name=tensor.name, data_type=tensor.data_type)
        left_out.dims.extend(tensor.dims)
        left_out.data_location = TensorProto.EXTERNAL
        left_out.external_data.add(key="location", value=LEFT_OUT)
    return model
