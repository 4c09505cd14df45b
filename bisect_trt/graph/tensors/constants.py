"""The constant tensors of a graph, wherever the exporter put them: initialisers and Constant
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from sys import intern
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from bisect_trt.graph.tensors.mapped_files import let_go
from bisect_trt.graph.tensors.operator_rules import FLOAT, is_standard
from bisect_trt.graph.tensors.tensor_values import array_of, place_of


class Constants(Mapping[str, NDArray[Any]]):
    """Every constant tensor of a graph (its bodies apart) by name, unpacked when it is first asked
    for. What lies in a file is mapped, not read.

    Args:
        graph: the main graph, or a body.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        found: dict[str, TensorProto | NDArray[Any]] = {
            intern(t.name): t for t in graph.initializer
        }
        for node in graph.node:
            if node.op_type == "Constant" and is_standard(node) and node.attribute:
                value = _value(node.attribute[0])
                if value is not None:
                    found[node.output[0]] = value
        self._kept = found
        self._known: dict[str, NDArray[Any]] = {}

    def of_type(self, elem_type: int) -> Constants:
        """Those of one of ONNX's types; what is unpacked is shared."""
        found = Constants(onnx.GraphProto())
        found._kept = {n: v for n, v in self._kept.items() if _type_of(v) == elem_type}
        found._known = self._known
        return found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._known:
            return self._known[name]
        value = self._kept[name]
        if isinstance(value, np.ndarray):
            return value
        found = array_of(value)
        place = place_of(value)
        if place is None or place.rounding is None:  # a rounded one would be a copy
            self._known[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def let_go(self) -> None:
        """Give back the memory of those that are mapped; they are read again when needed."""
        for array in self._known.values():
            let_go(array)

    def tensor(self, name: str) -> TensorProto | None:
        """The constant ``name`` as ONNX has it; None where it is an attribute's number."""
        value = self._kept[name]
        return None if isinstance(value, np.ndarray) else value


def _value(attribute: onnx.AttributeProto) -> TensorProto | NDArray[Any] | None:
    name = attribute.name
    if name == "value":
        return attribute.t
    if name in ("value_float", "value_floats"):
        return np.asarray(attribute.f if name == "value_float" else attribute.floats, np.float32)
    if name in ("value_int", "value_ints"):
        return np.asarray(attribute.i if name == "value_int" else attribute.ints, np.int64)
    return None


def _type_of(value: TensorProto | NDArray[Any]) -> int:
    if isinstance(value, np.ndarray):
        return FLOAT if value.dtype == np.float32 else TensorProto.INT64
    return value.data_type
