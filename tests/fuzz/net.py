"""Builds random networks: what every block and every fault is written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fixtures.build import GraphBuilder

Item = TypeVar("Item")
Arrays = dict[str, NDArray[Any]]

LOCAL = "fuzz.local"
"""The domain of local functions."""

HAVE_IR = {range(13, 15): 7, range(15, 19): 8, range(19, 21): 9, range(21, 23): 10}
"""The IR version of each range of opsets; later ones have 11."""


class Tensor(NamedTuple):
    """A float tensor: its name and its shape. The first dimension may be dynamic."""

    name: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """The size of the dimension that holds features: channels, or the last one."""
        return self.shape[1] if len(self.shape) == 4 else self.shape[-1]


class Net(GraphBuilder):
    """A network that is being built from random choices.

    ``feeds`` are arrays for its inputs, several for each; ``taps`` are further outputs.
    """

    def __init__(self, seed: int, opset: int, batches: Sequence[int]) -> None:
        super().__init__(seed, opset)
        self.batches = batches
        self.feeds: list[Arrays] = [{} for _ in batches]
        self.taps: list[tuple[str, int]] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._functions: dict[str, onnx.FunctionProto] = {}

    def pick(self, choices: Sequence[Item]) -> Item:
        """One of ``choices``."""
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        """True in ``share`` of the cases."""
        return bool(self.random.random() < share)

    def ints(self, *values: int) -> str:
        """A constant of int64, of one dimension."""
        return self.constant(np.asarray(values, np.int64))

    def constant(self, value: NDArray[Any] | float) -> str:
        """A constant: an initialiser, or in a fifth of the cases a Constant node."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        if self.chance(0.2):
            return str(self.op("Constant", value=numpy_helper.from_array(array)))
        return self.weight(array, array.dtype)

    def matrix(self, *shape: int, gain: float = 1.0) -> str:
        """Random weights that keep the size of what they multiply; the last but one is summed."""
        return self.normal(*shape, scale=gain / np.sqrt(shape[-2]))

    def unary(self, kind: str, x: Tensor, *more: str, **attributes: Any) -> Tensor:
        """A node whose output has the shape of ``x``, its first input."""
        return Tensor(self.op(kind, x.name, *more, **attributes), x.shape)

    def reduce(self, kind: str, name: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """A reduction in the form of this opset: axes are an attribute before 18."""
        if self.opset >= 18 or kind == "ReduceSum":
            return str(self.op(kind, name, self.ints(*axes), keepdims=keepdims))
        return str(self.op(kind, name, axes=list(axes), keepdims=keepdims))

    def entry(self, stem: str, shape: Sequence[int], scale: float, offset: float = 0.0) -> Tensor:
        """A float input with smooth values of ``scale`` around ``offset``."""
        name = f"{stem}{len(self._values)}"
        for feed, batch in zip(self.feeds, self.batches, strict=True):
            feed[name] = (self._smooth((batch, *shape)) * scale + offset).astype(np.float32)
        self.declare(name, TensorProto.FLOAT, shape)
        return Tensor(name, (self.batches[0], *shape))

    def declare(self, name: str, kind: int, shape: Sequence[int]) -> None:
        """Declares an input whose first dimension is the batch."""
        dynamic = len(set(self.batches)) > 1
        first: list[Any] = ["N" if dynamic else self.batches[0]]
        self._values.append(helper.make_tensor_value_info(name, kind, [*first, *shape]))

    def _smooth(self, shape: Sequence[int]) -> NDArray[np.float64]:
        """Values of size 1 of which neighbours correlate, as in real signals."""
        steps = np.linspace(0.0, 3.0, shape[-1])
        rate = self.random.uniform(0.5, 3.0, shape[:-1])[..., None]
        phase = self.random.uniform(0.0, 6.28, shape[:-1])[..., None]
        noise = self.random.normal(0.0, 0.3, shape)
        return np.asarray(1.3 * np.sin(steps * rate + phase) + noise)

    def function(self, name: str, x: Tensor, nodes: Sequence[onnx.NodeProto]) -> Tensor:
        """A call of the local function ``name``, whose ``nodes`` compute y from x."""
        if name not in self._functions:
            imports = [helper.make_opsetid("", self.opset)]
            made = helper.make_function(LOCAL, name, ["x"], ["y"], list(nodes), imports)
            self._functions[name] = made
        return self.unary(name, x, domain=LOCAL)

    def finished(self, outputs: Sequence[str], nameless: float = 0.0) -> onnx.ModelProto:
        """The model; a share ``nameless`` of its nodes loses its name.

        Raises:
            onnx.checker.ValidationError: the builder is wrong.
        """
        for node in self._nodes:
            if nameless and self.chance(nameless):
                node.name = ""
        given = [(name, TensorProto.FLOAT) for name in outputs]
        graph = helper.make_graph(
            self._nodes,
            "fuzz",
            self._values,
            [
                helper.make_tensor_value_info(name, kind, None)
                for name, kind in dict((*given, *self.taps)).items()
            ],
            self._weights,
        )
        imports = [helper.make_opsetid("", self.opset)]
        if self._functions:
            imports.append(helper.make_opsetid(LOCAL, 1))
        version = next((v for r, v in HAVE_IR.items() if self.opset in r), 11)
        model = helper.make_model(
            graph,
            opset_imports=imports,
            ir_version=max(version, 8) if self._functions else version,
            functions=list(self._functions.values()),
        )
        return with_shapes(model)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with the shapes of its outputs, checked."""
    # Without strictness: ONNX infers no shape behind a GroupNormalization.
    inferred = onnx.shape_inference.infer_shapes(model)
    for kept, found in zip(model.graph.output, inferred.graph.output, strict=True):
        kept.type.CopyFrom(found.type)
    if all(o.type.tensor_type.HasField("shape") for o in model.graph.output):
        onnx.checker.check_model(model)
    return model


def body(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    constants: Mapping[str, NDArray[Any] | np.generic] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> onnx.GraphProto:
    """A body of If, Loop or Scan; inputs and outputs by name with their element types."""

    def value(tensor: str, kind: int) -> onnx.ValueInfoProto:
        shape = None if ranks is None or tensor not in ranks else [None] * ranks[tensor]
        return helper.make_tensor_value_info(tensor, kind, shape)

    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    taken = [value(n, k) for n, k in inputs.items()]
    return helper.make_graph(
        list(nodes), name, taken, [value(n, k) for n, k in outputs.items()], stored
    )
