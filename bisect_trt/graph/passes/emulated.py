"""The model that shows FP16, BF16 or TF32 on any machine: FP32 arithmetic with every rounding
written out.

A lowered FP16 or BF16 layer gets its float inputs rounded, computes in FP32 (as tensor cores
accumulate) and has its outputs rounded. Rounding is ``Cast`` down and ``Cast`` back, a pair that
ONNX Runtime keeps at every optimisation level. TF32 rounds only the operands of matrix products and
convolutions, by Veltkamp's splitting in three FP32 operations. What is infinite in FP32 itself, or
beyond 4e34, becomes NaN: two further operations would mend that, and double a small model's time.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.graph import Graph, as_graph
from bisect_trt.graph.model.layers import Role
from bisect_trt.graph.model.opset import CAST_HAS_BF16
from bisect_trt.graph.model.roundings import is_rounded
from bisect_trt.graph.passes.capable import with_new_nodes_pinned, with_roundings
from bisect_trt.graph.passes.frame import Frame
from bisect_trt.graph.passes.guards import guarded
from bisect_trt.graph.passes.rewriter import Rewriter
from bisect_trt.graph.tensors.operator_rules import CONTROL_FLOW, FLOAT, STORAGE_TYPE
from bisect_trt.graph.tensors.tensor_types import Scope
from bisect_trt.numerics.rounding import TF32_SPLITTER


def to_emulated(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> onnx.ModelProto:
    """``model`` with the roundings of ``plan`` as explicit nodes.

    Args:
        model: an FP32 model; a :class:`Graph` where several plans are written of one model.
        plan: the base precision and the layers that stay FP32.

    Returns:
        A model whose every tensor keeps its FP32 type and its name.

    Raises:
        BadInputError: the plan pins a layer that the model does not have.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    capable = with_roundings(graph, plan.base)
    return EmulationRewriter(capable, with_new_nodes_pinned(graph, capable, plan)).rewrite()


def rounding_model(precision: Precision) -> onnx.ModelProto:
    """A model that rounds its input ``x`` (float32, any shape) to ``precision`` and gives ``y`` of
    the same shape.
    """
    value = [helper.make_tensor_value_info(n, FLOAT, None) for n in ("x", "y")]
    target = helper.make_graph([], "rounding", value[:1], value[1:])
    rewriter = EmulationRewriter(Graph(onnx.ModelProto()), PrecisionPlan(precision))
    frame = Frame(Scope(), target, None)
    rewriter.round(frame, "x", "y", precision)
    return helper.make_model(
        target, opset_imports=[helper.make_opsetid("", CAST_HAS_BF16)], ir_version=8
    )


class EmulationRewriter(Rewriter):
    """``rounded_inputs`` names the graph inputs that arrive rounded already, so that no nodes are
    spent on them.
    """

    def __init__(
        self,
        graph: Graph,
        plan: PrecisionPlan,
        *,
        rounded_inputs: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(graph, plan)
        self._rounded_inputs = rounded_inputs

    def chosen(self, precision: Precision) -> Precision:
        return precision

    def read(self, frame: Frame, name: str, precision: Precision) -> str:
        owner = frame.owner(name)
        if is_rounded(owner.state.get(name, Precision.FP32), precision):
            return name
        if owner.parent is None and name in self._rounded_inputs:
            return name
        return super().read(frame, name, precision)

    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        version = self.fresh(f"{name}__{precision}")
        self.round(frame, name, version, precision)
        return version

    def stored_as(self, precision: Precision) -> int:
        return FLOAT

    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        names = [(slot, node.output[slot]) for slot in role.reduced_out]
        frame.state.update((name, precision) for _, name in names)
        if node.op_type in CONTROL_FLOW:  # a lowered body rounds what it gives
            frame.graph.node.append(node)
            return
        raw = {name: self.fresh(f"{name}__raw") for _, name in names}
        for slot, name in names:
            node.output[slot] = raw[name]
        self.append(node, role, frame)
        for _, name in names:
            self.round(frame, raw[name], name, precision)

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        frame.graph.node.extend(guarded(node, role.float_in, self.fresh, self.source.opset))

    def enter_body(self, frame: Frame, precision: Precision) -> None:
        for value in frame.graph.input:
            if frame.scope.type_of(value.name) == FLOAT:
                frame.state[value.name] = precision

    def round(self, frame: Frame, source: str, target: str, precision: Precision) -> None:
        """Append the nodes that make ``target`` from ``source``, rounded to ``precision``.

        Args:
            frame: the graph or body that the nodes go to.
            source: a float32 tensor.
            target: the name of the rounded one, float32 too.
            precision: whose values it may take.
        """
        if precision is Precision.TF32:
            self._split(frame, source, target)
            return
        stored = self.fresh(f"{target}__stored")
        down = helper.make_node(
            "Cast", [source], [stored], self.fresh(f"down_{target}"), to=STORAGE_TYPE[precision]
        )
        up = helper.make_node("Cast", [stored], [target], self.fresh(f"up_{target}"), to=FLOAT)
        frame.graph.node.extend([down, up])

    def _split(self, frame: Frame, source: str, target: str) -> None:
        splitter = self._splitter(frame)
        scaled, rest = self.fresh(f"{target}__scaled"), self.fresh(f"{target}__rest")
        frame.graph.node.extend(
            [
                helper.make_node(
                    "Mul", [source, splitter], [scaled], self.fresh(f"scale_{target}")
                ),
                helper.make_node("Sub", [scaled, source], [rest], self.fresh(f"rest_{target}")),
                helper.make_node("Sub", [scaled, rest], [target], self.fresh(f"high_{target}")),
            ]
        )

    def _splitter(self, frame: Frame) -> str:
        key = ("", Precision.TF32)
        if key not in frame.versions:
            name = self.fresh("tf32_splitter")
            frame.graph.initializer.append(numpy_helper.from_array(np.asarray(TF32_SPLITTER), name))
            frame.versions[key] = name
        return frame.versions[key]
