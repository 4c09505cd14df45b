"""Random networks for the repair rules, and what runs and measures them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import to_emulated
from bisect_trt.model.graph import Graph
from bisect_trt.repair.edits import Range, Ranges, beginning
from bisect_trt.repair.exponents import range_of
from fixtures.build import GraphBuilder
from tests.execute import run

Arrays = Mapping[str, NDArray[Any]]


def run_fp16(model: onnx.ModelProto, feed: Arrays) -> dict[str, NDArray[Any]]:
    """The outputs with every layer in FP16, emulated."""
    return run(to_emulated(model, PrecisionPlan(Precision.FP16)), feed)


def graph_of(model: onnx.ModelProto) -> Graph:
    """The graph that rules edit."""
    return beginning(Graph(model))


def ranges_of(graph: Graph, feeds: Sequence[Arrays]) -> Ranges:
    """The range of each computed FP32 tensor and of the inputs."""
    types, model = graph.types, onnx.ModelProto()
    model.CopyFrom(graph.proto)
    made = [o for n in graph.proto.graph.node for o in n.output if types.type_of(o) == 1]
    present = {o.name for o in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in made if n not in present)
    found: dict[str, Range] = {}
    for feed in feeds:
        for name, array in {**run(model, feed), **feed}.items():
            now, before = range_of(array) if array.dtype == np.float32 else None, found.get(name)
            if now is not None:
                found[name] = now if before is None else now.joined(before)
    return found


def snr_db(exact: NDArray[Any], candidate: NDArray[Any]) -> float:
    """The ratio of signal to error in dB; -inf where the candidate is not finite."""
    if not np.isfinite(candidate).all():
        return -np.inf
    error = np.mean((exact.astype(np.float64) - candidate) ** 2)
    return float(10 * np.log10(np.mean(exact.astype(np.float64) ** 2) / max(error, 1e-300)))


UNARY = ("Relu", "LeakyRelu", "Neg", "Abs", "Transpose", "Reshape", "Clip", "Identity")
UNFIT = ("Sigmoid", "Tanh", "Softmax", "Erf")
NORMS = ("written", "rms", "operator")
CHANNELS = 6
KINDS = ("matrix", "shared", "gemm", "add", "mul", "factor", "bias", "norm", "norm", "unary")
KINDS += ("unfit", "concat", "where")


class Network:
    """Draws a network of the operators that a power of two passes, with a few that it cannot."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.opset = draw(st.sampled_from([13, 15, 17, 18, 21]))
        self.b = GraphBuilder(draw(st.integers(0, 2**16)), opset=self.opset)
        self.tensors = ["x"]
        self.shared = self.b.normal(CHANNELS, CHANNELS, scale=self._scale())
        for _ in range(draw(st.integers(2, 9))):
            self.tensors.append(self._node())

    def model(self) -> onnx.ModelProto:
        """The network; some inner tensors are outputs too."""
        outputs = {
            self.tensors[-1],
            *self._draw(st.sets(st.sampled_from(self.tensors[1:]), max_size=1)),
        }
        rows: Any = self._draw(st.sampled_from([4, "rows"]))
        shape = [rows, CHANNELS]
        return self.b.model({"x": shape}, dict.fromkeys(sorted(outputs), shape))

    def _scale(self) -> float:
        return float(10.0 ** self._draw(st.integers(-4, 4)))

    def _pick(self) -> str:
        return str(self._draw(st.sampled_from(self.tensors[-3:])))

    def _mean(self, x: str) -> str:
        if self.opset >= 18:
            return str(self.b.op("ReduceMean", x, self.b.weight([1], np.int64), keepdims=1))
        return str(self.b.op("ReduceMean", x, axes=[1], keepdims=1))

    def _node(self) -> str:
        b, x = self.b, self._pick()
        kind = self._draw(st.sampled_from(KINDS))
        if kind == "matrix":
            return str(b.op("MatMul", x, b.normal(CHANNELS, CHANNELS, scale=self._scale())))
        if kind == "shared":
            return str(b.op("MatMul", x, self.shared))
        if kind == "gemm":
            weight = b.normal(CHANNELS, CHANNELS, scale=self._scale())
            return str(b.op("Gemm", x, weight, b.normal(CHANNELS), transB=1))
        if kind == "add":
            return str(b.op(self._draw(st.sampled_from(["Add", "Sub", "Max"])), x, self._pick()))
        if kind == "mul":
            return str(b.op("Mul", x, self._pick()))
        if kind == "factor":
            return str(
                b.op(self._draw(st.sampled_from(["Mul", "Div"])), x, b.weight(self._scale()))
            )
        if kind == "bias":
            return str(b.op("Add", x, b.normal(CHANNELS, scale=self._scale())))
        if kind == "norm":
            return self._norm(x)
        if kind == "unary":
            return self._unary(x)
        if kind == "concat":
            both = b.op("Concat", x, self._pick(), axis=1)
            weight = b.normal(2 * CHANNELS, CHANNELS, scale=self._scale())
            return str(b.op("MatMul", both, weight))
        if kind == "where":
            positive = b.op("Greater", x, b.weight(0.0))
            return str(b.op("Where", positive, x, b.weight(-0.5)))
        unfit = self._draw(st.sampled_from(UNFIT))
        return str(b.op(unfit, x, axis=1) if unfit == "Softmax" else b.op(unfit, x))

    def _unary(self, x: str) -> str:
        b, op = self.b, self._draw(st.sampled_from(UNARY))
        if op == "Transpose":
            turned = b.op("Transpose", x, perm=[1, 0])
            return str(b.op("Transpose", turned, perm=[1, 0]))
        if op == "Reshape":
            return str(b.op("Reshape", x, b.weight([-1, CHANNELS], np.int64)))
        if op == "Clip":
            return str(b.op("Clip", x, b.weight(-1e3), b.weight(1e3)))
        return str(b.op(op, x))

    def _norm(self, x: str) -> str:
        b, kind = self.b, self._draw(st.sampled_from(NORMS))
        epsilon = b.weight(self._draw(st.sampled_from([1e-5, 1e-8, 1e-12])))
        if kind == "operator" and self.opset >= 17:
            scale, bias = b.normal(CHANNELS), b.normal(CHANNELS)
            return str(b.op("LayerNormalization", x, scale, bias, epsilon=1e-5))
        if kind == "rms":
            root = b.op("Sqrt", b.op("Add", self._mean(b.op("Pow", x, b.weight(2.0))), epsilon))
            return str(b.op("Mul", b.op("Div", x, root), b.normal(CHANNELS)))
        centred = b.op("Sub", x, self._mean(x))
        variance = self._mean(b.op("Mul", centred, centred))
        return str(b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, epsilon))))


@st.composite
def networks(draw: Any) -> tuple[onnx.ModelProto, list[dict[str, NDArray[np.float32]]]]:
    """A network, and two inputs of a random scale."""
    model = Network(draw).model()
    size = 10.0 ** draw(st.integers(-2, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    feeds = [{"x": (random.standard_normal((4, CHANNELS)) * size).astype(np.float32)} for _ in "ab"]
    return model, feeds


def input_value(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> Any:
    """An input of a hand-made model."""
    return onnx.helper.make_tensor_value_info(name, kind, list(shape))
