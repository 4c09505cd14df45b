"""The constant tensors of a graph, wherever the exporter put them: initialisers and Constant
nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from bisect_trt.graph.operator_rules import FLOAT, is_standard


def constants(graph: onnx.GraphProto, elem_type: int | None = None) -> dict[str, NDArray[Any]]:
    """Every constant tensor of ``graph`` (its bodies apart) by name, or only those of ONNX's
    ``elem_type``.
    """
    found = {
        t.name: numpy_helper.to_array(t)
        for t in graph.initializer
        if elem_type in (None, t.data_type)
    }
    for node in graph.node:
        if node.op_type == "Constant" and is_standard(node) and node.attribute:
            array = _value(node.attribute[0], elem_type)
            if array is not None:
                found[node.output[0]] = array
    return found


def _value(attribute: onnx.AttributeProto, elem_type: int | None) -> NDArray[Any] | None:
    name = attribute.name
    if name == "value":
        return (
            numpy_helper.to_array(attribute.t)
            if elem_type in (None, attribute.t.data_type)
            else None
        )
    if name in ("value_float", "value_floats") and elem_type in (None, FLOAT):
        return np.asarray(attribute.f if name == "value_float" else attribute.floats, np.float32)
    if name in ("value_int", "value_ints") and elem_type in (None, TensorProto.INT64):
        return np.asarray(attribute.i if name == "value_int" else attribute.ints, np.int64)
    return None
