"""The values that a build script computes with, as far as they are known without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import FLOAT
from bisect_trt.model.trt_names import Network, NetworkLayer, parsers_name


class NotUnderstoodError(Exception):
    """A part of a script that cannot be read; ``line`` is where, from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


class TooManyTestsError(Exception):
    """A script that would take too long to read; ``line`` is where it was given up, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would show; ``of_layer`` if a layer decides it."""

    of_layer: bool = False


@dataclass(frozen=True)
class Module:
    """An imported module, by its full name."""

    name: str


@dataclass(frozen=True)
class Member:
    """A name of the module tensorrt, such as ``LayerType.SOFTMAX`` or ``float32``."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class NetworkValue:
    """The network that the script changes."""


@dataclass(frozen=True)
class LayerValue:
    """The layer at ``place`` of the network."""

    place: int
    layer: NetworkLayer


@dataclass(frozen=True)
class TensorValue:
    """An output of a layer."""

    of: LayerValue
    index: int


@dataclass(frozen=True)
class Method:
    """A method of a known value, not called yet."""

    receiver: Any
    name: str


@dataclass(frozen=True)
class Function:
    """A function of the script."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Place(int):
    """The place of a layer that a loop over the whole network gives; no number of the script's."""


DTYPES: Mapping[str, str] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "fp8",
}
"""TensorRT's short names of types, by the members of ``DataType``."""

_KINDS: Mapping[str, Sequence[str]] = {
    "ACTIVATION": ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Softplus", "Clip"),
    "CAST": ("Cast",),
    "CONCATENATION": ("Concat",),
    "CONSTANT": ("Constant",),
    "CONVOLUTION": ("Conv",),
    "DECONVOLUTION": ("ConvTranspose",),
    "EINSUM": ("Einsum",),
    "ELEMENTWISE": ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum"),
    "GATHER": ("Gather", "GatherND", "GatherElements"),
    "MATRIX_MULTIPLY": ("MatMul", "Gemm"),
    "NORMALIZATION": ("LayerNormalization", "InstanceNormalization", "GroupNormalization"),
    "POOLING": ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
    "REDUCE": ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"),
    "RESIZE": ("Resize", "Upsample"),
    "SCALE": ("BatchNormalization",),
    "SELECT": ("Where",),
    "SHAPE": ("Shape",),
    "SHUFFLE": ("Reshape", "Transpose", "Flatten"),
    "SLICE": ("Slice",),
    "SOFTMAX": ("Softmax", "LogSoftmax"),
    "TOPK": ("TopK",),
    "UNARY": ("Exp", "Log", "Sqrt", "Reciprocal", "Abs", "Neg", "Erf", "Sin", "Cos", "Floor"),
}
_FLAGS = frozenset(("A", "ASCII", "I", "IGNORECASE", "M", "MULTILINE", "S", "DOTALL", "VERBOSE"))
_KIND_OF = {operator: kind for kind, operators in _KINDS.items() for operator in operators}


def subjects(graph: Graph, network: Network | None) -> tuple[NetworkLayer, ...]:
    """The layers that a script sees: the network's, or one for each node by the usual rules."""
    if network is not None:
        return network.layers
    layers = []
    for node in graph.proto.graph.node:
        outputs = tuple(name for name in node.output if name)
        types = tuple(
            "FLOAT" if graph.types.type_of(name) == FLOAT else "INT64" for name in outputs
        )
        kind = _KIND_OF.get(node.op_type, node.op_type.upper())
        name = parsers_name(node)
        layers.append(NetworkLayer(name, kind, f"[ONNX Layer: {name}]", outputs, types))
    return tuple(layers)


def member(path: tuple[str, ...]) -> Member:
    """The member at ``path``; ``DataType.FLOAT`` is the same as ``float32``."""
    if path[0] == "DataType" and len(path) == 2:
        return Member((DTYPES.get(path[1], path[1].casefold()),))
    return Member(path)


def attribute_of(value: Any, name: str, line: int) -> Any:
    """``value.name``, as far as it is known."""
    match value:
        case Module(module):
            if module.partition(".")[0] in ("tensorrt", "tensorrt_rtx"):
                return member((name,))
            if module != "re":
                return Unknown()
            return getattr(re, name) if name in _FLAGS else Method(value, name)
        case Member(path):
            return path[-1] if name == "name" else member((*path, name))
        case NetworkValue():
            return Method(value, name)
        case LayerValue():
            return _of_layer(value, name, line)
        case TensorValue(of, index):
            return _of_tensor(of.layer, index, name)
        case Unknown(of_layer):
            network = name in ("network", "network_definition") and not of_layer
            return NetworkValue() if network else Unknown(of_layer)
        case str() | list() | set() | dict() | tuple() | frozenset() | re.Pattern() | re.Match():
            return Method(value, name)
        case None | int() | float() | Method() | TensorValue():
            return Unknown(of_layer=True)  # a layer may have decided it
        case _:
            return Unknown()


def _of_layer(value: LayerValue, name: str, line: int) -> Any:
    layer = value.layer
    match name:
        case "name":
            return layer.name
        case "type":
            return Member(("LayerType", layer.kind))
        case "metadata":
            return layer.metadata
        case "num_outputs":
            return len(layer.outputs)
        case "precision_is_set":
            return False
        case "get_output" | "set_output_type" | "reset_precision" | "reset_output_type":
            return Method(value, name)
        case _:
            return Unknown(of_layer=True)


def _of_tensor(layer: NetworkLayer, index: int, name: str) -> Any:
    match name:
        case "name":
            return layer.outputs[index]
        case "dtype":
            return member(("DataType", layer.types[index]))
        case "is_shape_tensor":
            return layer.is_shape
        case "is_execution_tensor":
            return not layer.is_shape
        case _:
            return Unknown(of_layer=True)
