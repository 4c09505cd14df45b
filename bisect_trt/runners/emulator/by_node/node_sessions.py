"""One node as a session: the unit the emulator executes.

Nodes with equal operator, attributes and input types share a session, because weights and
activations are all passed in. A network of hundreds of layers thereby needs tens of sessions, made
once, and a probe makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.emulated import EmulationRewriter, rounding_model
from bisect_trt.graph.tensors.tensor_types import captured_names
from bisect_trt.runners.ort.sessions import node_session
from bisect_trt.runners.ort.values import Value, caller

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
    **{
        name.lower(): getattr(TensorProto, name)
        for name in ("INT2", "UINT2", "FLOAT4E2M1", "FLOAT8E8M0")
        if hasattr(TensorProto, name)  # an older onnx lacks them
    },
}


@dataclass(frozen=True)
class NodeSession:
    """A ready session: fed with ``inputs`` in order, it gives ``outputs`` in order."""

    session: ort.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, values: Sequence[Value]) -> list[Value]:
        """The results for ``values``, one for each input."""
        feed = dict(zip(self.inputs, values, strict=True))
        results = self._call(feed, self.outputs, None)
        return [results[i] for i in range(len(self.outputs))]

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return caller(self.session)


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


class NodeSessions:
    """Makes and keeps the sessions of one model's nodes."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        self._model = model
        self._threads = threads
        self._sessions: dict[object, NodeSession] = {}
        self._attributes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def node(
        self, index: int, precision: Precision, types: Sequence[str], rounded: Collection[int]
    ) -> NodeSession:
        """The session of one node.

        Args:
            index: its place in the graph.
            precision: what it runs in; the outputs leave rounded to it.
            types: ONNX Runtime's types of the inputs: the node's own (absent ones left out), then
                the tensors that its bodies capture.
            rounded: the positions of those inputs that must arrive rounded.
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
        if key not in self._sessions:
            self._sessions[key] = self._make(node, captures, precision, types, rounded)
        return self._sessions[key]

    def rounding(self, precision: Precision) -> NodeSession:
        """The session that rounds any float tensor to ``precision``."""
        if precision not in self._sessions:
            model = rounding_model(precision)
            self._sessions[precision] = NodeSession(
                node_session(model, self._threads), ("x",), ("y",)
            )
        return self._sessions[precision]

    def _make(
        self,
        node: onnx.NodeProto,
        captures: tuple[str, ...],
        precision: Precision,
        types: Sequence[str],
        rounded: Collection[int],
    ) -> NodeSession:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = "node"
        own = []
        for slot, name in enumerate(node.input):
            if name:
                new.input[slot] = f"__node_in_{slot}"
                own.append(new.input[slot])
        for slot, name in enumerate(node.output):
            if name:
                new.output[slot] = f"__node_out_{slot}"
        names = (*own, *captures)
        inputs = [
            helper.make_value_info(n, type_proto(t)) for n, t in zip(names, types, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=o) for o in new.output if o]
        graph = helper.make_graph([new], "node", inputs, outputs)
        model = onnx.ModelProto(ir_version=max(self._model.ir_version, 4), graph=graph)
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        given = frozenset(names[i] for i in rounded)
        plan = PrecisionPlan(precision)
        emulated = EmulationRewriter(Graph(model), plan, rounded_inputs=given).rewrite()
        session = node_session(emulated, self._threads)
        return NodeSession(session, names, tuple(o.name for o in outputs))
