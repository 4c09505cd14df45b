"""Writes a plan as a strongly typed model."""

from __future__ import annotations

import onnx
from onnx import helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Role
from bisect_trt.model.opsets import with_bf16_operators, with_new_nodes_pinned
from bisect_trt.model.precision_rules import FLOAT, STORAGE_TYPE
from bisect_trt.model.rewriter import Frame, Rewriter
from bisect_trt.model.walk import drop_unread, every_node


def to_typed(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> onnx.ModelProto:
    """``model`` with the types of ``plan``, as a new model.

    A TF32 plan gives the FP32 model, because TF32 is an option of the engine and no type. A BF16
    plan raises the opset if the model's opset has no BF16 form of a reduced operator.

    Args:
        model: an FP32 model; a :class:`Graph` where several plans are written of one model.
        plan: the base precision and the layers that stay FP32.

    Returns:
        A strongly typed model; its graph inputs and outputs keep their types and names.

    Raises:
        BadInputError: the plan pins a layer that the model does not have, or the opset cannot be
            raised.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    # Without TF32, which is no type, neither as the base nor for pinned layers.
    plan = PrecisionPlan(plan.base if plan.base.is_storage else Precision.FP32, plan.pinned)
    graph = graph.settled(plan)
    if plan.base is not Precision.BF16:
        return _TypedRewriter(graph, plan).rewrite()
    capable = with_bf16_operators(graph, plan)
    return _TypedRewriter(capable, with_new_nodes_pinned(graph, capable, plan)).rewrite()


class _TypedRewriter(Rewriter):
    def __init__(self, graph: Graph, plan: PrecisionPlan) -> None:
        super().__init__(graph, plan)
        self._lifting: set[str] = set()  # FP32 casts of reduced inputs and outputs
        self._reduced_outputs: dict[str, int] = {}  # the reduced forms of outputs, with their types

    def rewrite(self) -> onnx.ModelProto:
        model = super().rewrite()
        for name, kind in self.source.stored_outputs.items():
            self._store_output(model.graph, name, kind)
        drop_unread(model.graph, self._lifting)
        return model

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        super().append(node, role, frame)
        if frame.parent is not None or node.output[0] not in self.source.stored_inputs:
            return
        kind = frame.scope.type_of(node.input[0])
        for precision, stored in STORAGE_TYPE.items():
            if kind == stored:  # reduced readers read the input itself, not its cast
                frame.versions[(node.output[0], precision)] = node.input[0]
                self._lifting.add(node.output[0])

    def _store_output(self, graph: onnx.GraphProto, name: str, kind: int) -> None:
        """Makes the model give the output ``name`` as ``kind``, as its source does."""
        # The writer gives FP32 outputs; the source of a lifted model declares a reduced one.
        exact = self.fresh(f"{name}__exact")
        _rename(graph, name, exact)
        maker = next((n for n in graph.node if exact in n.output), None)
        source = maker.input[0] if maker is not None and maker.op_type == "Cast" else ""
        if source and self._reduced_outputs.get(source) == kind:  # no second rounding is needed
            _rename(graph, source, name)
            self._lifting.add(exact)
        else:
            graph.node.append(
                helper.make_node("Cast", [exact], [name], self.fresh(f"cast_{name}"), to=kind)
            )
        output = next(o for o in graph.output if o.name == name)
        output.type.tensor_type.elem_type = kind

    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        version = self.fresh(f"{name}__{precision}")
        self._cast(frame, name, version, STORAGE_TYPE.get(precision, FLOAT))
        return version

    def stored_as(self, precision: Precision) -> int:
        return STORAGE_TYPE[precision]

    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        # A reduced Cast to FP32 casts to the reduced type at once.
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                attribute.i = STORAGE_TYPE[precision]
        back_to_float = []
        for slot in role.reduced_out:
            name = node.output[slot]
            frame.state[name] = precision
            if name in frame.outputs and frame.parent is None:  # a graph output keeps its type
                node.output[slot] = self.fresh(f"{name}__{precision}")
                # Reduced readers take the tensor before the cast, the others the output itself.
                frame.versions[(name, precision)] = node.output[slot]
                frame.versions[(name, Precision.FP32)] = name
                back_to_float.append((node.output[slot], name))
                self._reduced_outputs[node.output[slot]] = STORAGE_TYPE[precision]
        frame.graph.node.append(node)
        for reduced, name in back_to_float:
            self._cast(frame, reduced, name, FLOAT)

    def enter_input(self, frame: Frame, value: onnx.ValueInfoProto, precision: Precision) -> None:
        super().enter_input(frame, value, precision)
        value.type.tensor_type.elem_type = STORAGE_TYPE[precision]

    def leave_output(self, frame: Frame, output: onnx.ValueInfoProto, precision: Precision) -> None:
        super().leave_output(frame, output, precision)
        output.type.tensor_type.elem_type = STORAGE_TYPE[precision]

    def _cast(self, frame: Frame, source: str, target: str, elem_type: int) -> None:
        frame.graph.node.append(
            helper.make_node("Cast", [source], [target], self.fresh(f"cast_{target}"), to=elem_type)
        )


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Renames a tensor wherever nodes give or read it, in bodies too."""
    for node in every_node(graph.node):
        for names in (node.input, node.output):
            for slot, tensor in enumerate(names):
                if tensor == old:
                    names[slot] = new
