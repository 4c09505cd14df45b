"""One node as a session: the unit the emulator executes.

Nodes with equal operator, attributes and input types share a session, because weights and
activations are all passed in. A network of hundreds of layers thereby needs tens of sessions, made
once, and a probe makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.passes.emulated import EmulationRewriter, rounding_model
from bisect_trt.graph.tensor_types import captured_names
from bisect_trt.runners.ort_sessions import piece_session

_ELEMENT = {
    "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
    "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
    "string": TensorProto.STRING,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ,
    "float8e5m2": TensorProto.FLOAT8E5M2,
    "float8e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
}


@dataclass(frozen=True)
class Piece:
    """A ready session: feed ``inputs`` in order, fetch ``outputs`` in order."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def run(self) -> Callable[..., list[Any]]:
        """ONNX Runtime's own call on C values: (feed by name, output names, run options).

        The public wrapper converts every value to a Python object and back, which for a small layer
        costs more than the layer.
        """
        call: Callable[..., list[Any]] = self.session._sess.run_with_ort_values
        return call


def type_proto(text: str) -> onnx.TypeProto:
    """The ONNX type that ONNX Runtime spells ``text``, such as ``tensor(float)`` or
    ``seq(tensor(int64))``.
    """
    outer, _, inner = text.partition("(")
    inner = inner[:-1]
    if outer == "tensor":
        return helper.make_tensor_type_proto(_ELEMENT[inner], None)
    if outer == "seq":
        return helper.make_sequence_type_proto(type_proto(inner))
    return helper.make_optional_type_proto(type_proto(inner))


class PieceStore:
    """Makes and keeps the sessions of one model's nodes."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        self._model = model
        self._threads = threads
        self._pieces: dict[object, Piece] = {}
        self._attributes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def node(
        self, index: int, precision: Precision, types: Sequence[str], rounded: frozenset[int]
    ) -> Piece:
        """The session of node ``index`` at ``precision``, for inputs of ONNX Runtime's ``types``.

        The inputs are the node's own (absent ones left out), then the tensors that its bodies
        capture. Those at the positions ``rounded`` must arrive rounded; the outputs leave rounded.
        """
        node = self._model.graph.node[index]
        captures = captured_names(node)
        if index not in self._attributes:
            self._attributes[index] = b"".join(
                sorted(a.SerializeToString() for a in node.attribute)
            )
        shape = tuple(bool(i) for i in node.input), tuple(bool(o) for o in node.output)
        attributes: object = index if captures else self._attributes[index]
        key = (node.domain, node.op_type, attributes, shape, tuple(types), precision)
        if key not in self._pieces:
            self._pieces[key] = self._make(node, captures, precision, types, rounded)
        return self._pieces[key]

    def rounding(self, precision: Precision) -> Piece:
        """The session that rounds any float tensor to ``precision``."""
        if precision not in self._pieces:
            model = rounding_model(precision)
            self._pieces[precision] = Piece(
                piece_session(model.SerializeToString(), self._threads), ("x",), ("y",)
            )
        return self._pieces[precision]

    def _make(
        self,
        node: onnx.NodeProto,
        captures: tuple[str, ...],
        precision: Precision,
        types: Sequence[str],
        rounded: frozenset[int],
    ) -> Piece:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = "piece"
        own = []
        for slot, name in enumerate(node.input):
            if name:
                new.input[slot] = f"__piece_in_{slot}"
                own.append(new.input[slot])
        for slot, name in enumerate(node.output):
            if name:
                new.output[slot] = f"__piece_out_{slot}"
        names = (*own, *captures)
        inputs = [
            helper.make_value_info(n, type_proto(t)) for n, t in zip(names, types, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=o) for o in new.output if o]
        graph = helper.make_graph([new], "piece", inputs, outputs)
        model = onnx.ModelProto(ir_version=max(self._model.ir_version, 4), graph=graph)
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        emulated = EmulationRewriter(
            model, PrecisionPlan(precision), rounded_inputs=frozenset(names[i] for i in rounded)
        ).rewrite()
        session = piece_session(emulated.SerializeToString(), self._threads)
        return Piece(session, names, tuple(o.name for o in outputs))
