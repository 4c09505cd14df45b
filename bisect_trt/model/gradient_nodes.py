"""Writes the nodes that take a gradient from a node's outputs back to its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.walk import attribute

REVERSE_OPSET = 18
"""The opset of the written nodes, whatever the model's: its tensors are inputs of theirs."""

Shape = tuple[int, ...]


class NoRuleError(Exception):
    """The gradient of this form of an operator is not written."""


@dataclass
class GradientWriter:
    """Collects nodes, constants and the names of the tensors that they read.

    ``prefix`` begins the names of all that is written.

    Args:
        shapes: the shape of each tensor of the model on one sample.
        integers: the values of its integer tensors on that sample.
        scales: the values of its constants of few floats, which may be a Resize's scales.
    """

    shapes: Mapping[str, Shape]
    integers: Mapping[str, NDArray[Any]]
    scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    reads: dict[str, None] = field(default_factory=dict)
    prefix: str = "gradient__"
    _known: dict[tuple[str, Shape, bytes], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose a prefix that no tensor of the model has."""
        while any(name.startswith(self.prefix) for name in self.shapes):
            self.prefix += "_"

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Appends a node with one output, and returns the output's name."""
        return self.ops(op_type, 1, *inputs, **attributes)[0]

    def ops(self, op_type: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Appends a node with ``count`` outputs, and returns their names."""
        outputs = [f"{self.prefix}{len(self.nodes)}_{number}" for number in range(count)]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, **attributes))
        return outputs

    def read(self, name: str) -> str:
        """The tensor ``name`` of the model, which is fed."""
        self.reads[name] = None
        return name

    def constant(self, array: NDArray[Any]) -> str:
        """The name of a constant; equal ones are one."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            name = f"{self.prefix}constant_{len(self.constants)}"
            self.constants.append(numpy_helper.from_array(array, name))
            self._known[key] = name
        return self._known[key]

    def number(self, value: float) -> str:
        """A float scalar."""
        return self.constant(np.asarray(value, np.float32))

    def ints(self, values: Sequence[int]) -> str:
        """A vector of INT64."""
        return self.constant(np.asarray(values, np.int64))

    def reshaped(self, name: str, shape: Sequence[int]) -> str:
        """``name`` in another shape."""
        return self.op("Reshape", name, self.ints(shape))

    def expanded(self, name: str, shape: Sequence[int]) -> str:
        """``name`` broadcast to ``shape``."""
        return self.op("Expand", name, self.ints(shape))

    def summed(self, name: str, axes: Sequence[int]) -> str:
        """``name`` summed over ``axes``, which stay with length 1."""
        return self.op("ReduceSum", name, self.ints(axes), keepdims=1) if axes else name

    def mean(self, name: str, axes: Sequence[int]) -> str:
        """The mean of ``name`` over ``axes``, which stay with length 1."""
        return self.op("ReduceMean", name, self.ints(axes), keepdims=1) if axes else name

    def times(self, *names: str) -> str:
        """The product of tensors."""
        product = names[0]
        for name in names[1:]:
            product = self.op("Mul", product, name)
        return product

    def where(self, condition: str, yes: str | float, no: str | float) -> str:
        """``yes`` where ``condition`` holds, else ``no``."""
        chosen = [self.number(v) if isinstance(v, float) else v for v in (yes, no)]
        return self.op("Where", condition, *chosen)

    def as_float(self, name: str) -> str:
        """Truth values as 0 and 1."""
        return self.op("Cast", name, to=TensorProto.FLOAT)

    def unbroadcast(self, name: str, given: Shape, wanted: Shape) -> str:
        """``name`` of shape ``given`` summed to ``wanted``, which was broadcast to it."""
        if given == wanted:
            return name
        padded = (1,) * (len(given) - len(wanted)) + wanted
        axes = [i for i, (a, b) in enumerate(zip(given, padded, strict=True)) if a != b]
        total = self.summed(name, axes)
        return self.reshaped(total, wanted) if padded != wanted else total

    def scattered(self, name: str, places: NDArray[np.int64], shape: Shape) -> str:
        """Zeros of ``shape``, to which the elements of ``name`` are added at flat ``places``."""
        zeros = self.expanded(self.number(0.0), [prod(shape)])
        flat = self.reshaped(name, [places.size])
        at = self.ints(np.ascontiguousarray(places).reshape(-1).tolist())
        found = self.op("ScatterElements", zeros, at, flat, axis=0, reduction="add")
        return self.reshaped(found, shape)

    def along(self, name: str, rank: int, matrices: Mapping[int, NDArray[np.float32]]) -> str:
        """``name`` multiplied along axes by matrices of shape (given length, wanted length)."""
        for axis, matrix in matrices.items():
            if axis == rank - 1:
                name = self.op("MatMul", name, self.constant(matrix))
            elif axis == rank - 2:
                name = self.op("MatMul", self.constant(np.ascontiguousarray(matrix.T)), name)
            else:
                order = [i for i in range(rank) if i != axis] + [axis]
                back = [order.index(i) for i in range(rank)]
                last = self.op("Transpose", name, perm=order)
                product = self.op("MatMul", last, self.constant(matrix))
                name = self.op("Transpose", product, perm=back)
        return name


@dataclass(frozen=True)
class Site:
    """A node whose gradient is written with ``to``.

    Args:
        node: the node of the model.
        opset: the model's opset.
        to: takes the nodes.
        gradients: the gradients of the node's outputs that have one, by slot.
        wanted: the input slots whose gradients are asked for.
    """

    node: onnx.NodeProto
    opset: int
    to: GradientWriter
    gradients: Mapping[int, str]
    wanted: frozenset[int]

    @property
    def g(self) -> str:
        """The gradient of the first output, where no other output has one."""
        if self.gradients.keys() != {0}:
            raise NoRuleError
        return self.gradients[0]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value; a text as ``str``."""
        value = attribute(self.node, name, default)
        return value.decode() if isinstance(value, bytes) else value

    def has(self, slot: int) -> bool:
        """Whether the node reads an input there."""
        return slot < len(self.node.input) and bool(self.node.input[slot])

    def x(self, slot: int = 0) -> str:
        """An input of the node."""
        return self.to.read(self.node.input[slot])

    def y(self, slot: int = 0) -> str:
        """An output of the node."""
        return self.to.read(self.node.output[slot])

    def shape(self, slot: int = 0) -> Shape:
        """The shape of an input."""
        return self.to.shapes[self.node.input[slot]]

    def result_shape(self, slot: int = 0) -> Shape:
        """The shape of an output."""
        return self.to.shapes[self.node.output[slot]]

    def values(self, slot: int) -> NDArray[Any]:
        """The values of an integer input."""
        return self.known(self.node.input[slot])

    def known(self, name: str) -> NDArray[Any]:
        """The values of an integer tensor."""
        if name not in self.to.integers:
            raise NoRuleError
        return self.to.integers[name]

    def listed(self, attribute: str, slot: int) -> list[int] | None:
        """Integers that older opsets have as an attribute, and newer ones as an input."""
        given = self.attribute(attribute)
        if given is not None:
            return [int(v) for v in given]
        return [int(v) for v in self.values(slot).reshape(-1)] if self.has(slot) else None

    def axis(self, default: int, rank: int | None = None) -> int:
        """The attribute ``axis``, counted from the front."""
        return int(self.attribute("axis", default)) % (rank or len(self.shape()))

    def everywhere(self, gradient: str) -> dict[int, str]:
        """``gradient``, of the output's shape, for every wanted input, which was broadcast."""
        to, given = self.to, self.result_shape()
        return {s: to.unbroadcast(gradient, given, self.shape(s)) for s in self.wanted}
