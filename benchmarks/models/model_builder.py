"""Writes networks node by node, with ONNX's helper alone and seeded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
FLOAT = TensorProto.FLOAT
Inputs = dict[str, NDArray[Any]]


@dataclass
class Builder:
    """Writes nodes one after the other; every call gives the name of what it made.

    Args:
        random: copies the weights.
    """

    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    scope: str = ""

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """One node with one output."""
        return self.add_many(op, 1, *inputs, **attributes)[0]

    def add_many(self, op: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """One node with ``count`` outputs."""
        number = len(self.nodes)
        outputs = [f"v{number}" if count == 1 else f"v{number}_{i}" for i in range(count)]
        name = f"{self.scope}/{op}_{number}"
        self.nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs

    def constant(self, array: NDArray[Any]) -> str:
        """An initialiser."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, *values: int) -> str:
        """A vector of INT64."""
        return self.constant(np.asarray(values, np.int64))

    def scalar(self, value: float) -> str:
        """A scalar of FLOAT."""
        return self.constant(np.asarray(value, np.float32))

    def normal(self, *shape: int, deviation: float) -> str:
        """Seeded weights."""
        copied = self.random.standard_normal(shape, np.float32)
        return self.constant(copied * np.float32(deviation))

    def linear(self, x: str, inside: int, outside: int, scale: float = 1.0) -> str:
        """``MatMul`` and ``Add``, as exporters write a linear layer of three dimensions."""
        weight = self.normal(inside, outside, deviation=scale * inside**-0.5)
        product = self.add("MatMul", x, weight)
        return self.add("Add", product, self.normal(outside, deviation=0.02 * scale))

    def convolution(self, x: str, inside: int, outside: int, size: int, stride: int = 1) -> str:
        """A convolution with its batch normalisation folded in, as exporters leave it."""
        spread = (2.0 / (inside * size * size)) ** 0.5
        weight = self.normal(outside, inside, size, size, deviation=spread)
        bias = self.normal(outside, deviation=0.02)
        pads = [size // 2] * 4
        return self.add("Conv", x, weight, bias, pads=pads, strides=[stride, stride])

    def layer_norm(self, x: str, width: int) -> str:
        """As an operator, which exporters write from opset 17 on."""
        scale = self.constant(1 + 0.1 * self.random.standard_normal(width).astype(np.float32))
        return self.add("LayerNormalization", x, scale, self.normal(width, deviation=0.02), axis=-1)

    def gelu(self, x: str) -> str:
        """The exact one, in five nodes."""
        error = self.add("Erf", self.add("Div", x, self.scalar(2**0.5)))
        return self.add(
            "Mul", self.add("Mul", x, self.add("Add", error, self.scalar(1.0))), self.scalar(0.5)
        )

    def silu(self, x: str) -> str:
        """In two nodes."""
        return self.add("Mul", x, self.add("Sigmoid", x))

    def reshape(self, x: str, *shape: int) -> str:
        """To a constant shape."""
        return self.add("Reshape", x, self.integers(*shape))

    def attention(
        self,
        x: str,
        key: str,
        width: int,
        heads: int,
        places: int,
        seen: int,
        scale: float = 1.0,
    ) -> str:
        """Several heads over ``seen`` places of ``key``, as exporters write it: the products scaled
        on both sides, the output by ``scale``.
        """
        each = width // heads

        def split(y: str, count: int) -> str:
            return self.reshape(self.linear(y, width, width), 1, count, heads, each)

        query = self.add("Transpose", split(x, places), perm=[0, 2, 1, 3])
        keys = self.add("Transpose", split(key, seen), perm=[0, 2, 3, 1])
        values = self.add("Transpose", split(key, seen), perm=[0, 2, 1, 3])
        root = self.scalar(each**-0.25)
        scaled = self.add("Mul", query, root), self.add("Mul", keys, root)
        weights = self.add("Softmax", self.add("MatMul", *scaled), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        return self.linear(self.reshape(mixed, 1, places, width), width, width, scale)

    def model(self, inputs: Inputs, outputs: Sequence[str]) -> onnx.ModelProto:
        """What was written."""
        given = [helper.make_tensor_value_info(n, FLOAT, a.shape) for n, a in inputs.items()]
        taken = [helper.make_tensor_value_info(n, FLOAT, None) for n in outputs]
        graph = helper.make_graph(self.nodes, "made", given, taken, self.weights)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8
        )


Made = tuple[onnx.ModelProto, Inputs]
