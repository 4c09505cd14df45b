"""Writes a plan as a strongly typed model, and marks tensors as outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import onnx
from onnx import helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Role
from bisect_trt.model.patterns import find_patterns
from bisect_trt.model.precision_rules import FLOAT, STORAGE_TYPE, TYPE_AGNOSTIC, is_standard
from bisect_trt.model.rewriter import Frame, Rewriter
from bisect_trt.model.roundings import with_bf16_operators, with_new_nodes_pinned
from bisect_trt.model.tensor_types import every_node, infer_types, tensors_read


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
        _drop_unread_casts(model.graph, self._lifting)
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

    def chosen(self, precision: Precision) -> Precision:
        return precision if precision.is_storage else Precision.FP32

    def read_slot(self, frame: Frame, node: onnx.NodeProto, slot: int, wanted: Precision) -> str:
        if node.op_type in TYPE_AGNOSTIC and is_standard(node):
            return str(node.input[slot])
        return super().read_slot(frame, node, slot, wanted)

    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        version = self.fresh(f"{name}__{precision}")
        self._cast(frame, name, version, STORAGE_TYPE.get(precision, FLOAT))
        return version

    def stored_as(self, precision: Precision) -> int:
        return STORAGE_TYPE[precision]

    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                attribute.i = STORAGE_TYPE[precision]
        back_to_float = []
        for slot in role.reduced_out:
            name = node.output[slot]
            frame.state[name] = precision
            if name in frame.outputs and frame.parent is None:  # a graph output keeps its type
                node.output[slot] = self.fresh(f"{name}__{precision}")
                frame.versions[(name, precision)] = node.output[slot]
                frame.versions[(name, Precision.FP32)] = name
                back_to_float.append((node.output[slot], name))
                self._reduced_outputs[node.output[slot]] = STORAGE_TYPE[precision]
        frame.graph.node.append(node)
        for reduced, name in back_to_float:
            self._cast(frame, reduced, name, FLOAT)

    def enter_body(self, frame: Frame, precision: Precision) -> None:
        for value in frame.graph.input:
            if (
                value.type.tensor_type.elem_type == FLOAT
                or frame.scope.type_of(value.name) == FLOAT
            ):
                value.type.tensor_type.elem_type = STORAGE_TYPE[precision]
                frame.state[value.name] = precision

    def leave_output(self, frame: Frame, output: onnx.ValueInfoProto, precision: Precision) -> None:
        super().leave_output(frame, output, precision)
        output.type.tensor_type.elem_type = STORAGE_TYPE[precision]

    def _cast(self, frame: Frame, source: str, target: str, elem_type: int) -> None:
        frame.graph.node.append(
            helper.make_node("Cast", [source], [target], self.fresh(f"cast_{target}"), to=elem_type)
        )


def _drop_unread_casts(graph: onnx.GraphProto, casts: set[str]) -> None:
    """Removes the Casts that give one of ``casts`` if nothing reads it."""
    read = {name for node in graph.node for name in tensors_read(node)}
    read.update(output.name for output in graph.output)
    unread = [n for n in graph.node if n.op_type == "Cast" and n.output[0] in casts - read]
    for node in unread:
        graph.node.remove(node)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Renames a tensor wherever nodes give or read it, in bodies too."""
    for node in every_node(graph.node):
        for names in (node.input, node.output):
            for slot, tensor in enumerate(names):
                if tensor == old:
                    names[slot] = new


def select_tensors(model: onnx.ModelProto | Graph, selectors: Iterable[str]) -> list[str]:
    """The float tensors that ``selectors`` match, in the file's order.

    A selector is a layer id, a tensor name, a glob over either, an operator type (``MatMul``) or
    the kind of a pattern (``LayerNorm``).
    """
    graph = as_graph(model)
    layers = graph.layers
    groups: dict[str, set[str]] = {}
    for pattern in find_patterns(graph):
        groups.setdefault(pattern.kind.lower(), set()).update(pattern.layers)
    chosen: set[str] = set()
    for selector in selectors:
        members = groups.get(selector.lower(), set())
        hits = {
            tensor
            for layer in layers
            for tensor in layer.outputs
            if selector in (layer.op, layer.name, tensor)  # a name may look like a glob: a[0]
            or layer.name in members
            or fnmatchcase(layer.name, selector)
            or fnmatchcase(tensor, selector)
        }
        if not hits:
            raise BadInputError(
                f"--mark {selector!r}: matches no layer or tensor; `bisect-trt inspect` lists them"
            )
        chosen |= hits
    return [tensor for layer in layers for tensor in layer.outputs if tensor in chosen]


def with_ranks(
    model: onnx.ModelProto, tensors: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Splits ``tensors`` into those with a known rank, as ONNX's checker requires, and the rest."""
    # If the model's own outputs lack shapes, the checker refuses it anyway.
    declared = all(o.type.tensor_type.HasField("shape") for o in model.graph.output)
    ranks = infer_types(model).ranks
    unknown = [name for name in tensors if name not in ranks] if declared else []
    if unknown and len(unknown) == len(tensors):
        raise BadInputError(
            f"tensor {unknown[0]!r}: nothing says how many dimensions it has, so that no checker "
            "would take it as an output; declare its shape in the model, or mark another"
        )
    return [name for name in tensors if name not in set(unknown)], unknown


def mark_outputs(model: onnx.ModelProto, tensors: Iterable[str]) -> onnx.ModelProto:
    """A copy of ``model`` in which ``tensors`` are outputs too, declared with type and rank."""
    scope = infer_types(model)
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    graph = marked.graph
    existing = {o for node in graph.node for o in node.output}
    existing.update(v.name for v in (*graph.input, *graph.initializer))
    present = {o.name for o in graph.output}
    for name in tensors:
        if name in present:
            continue
        if name not in existing:
            raise BadInputError(
                f"tensor {name!r} is not in the model; `bisect-trt inspect` lists the layers"
            )
        shape = [f"{name}_{axis}" for axis in range(scope.ranks.get(name, 0))]
        graph.output.append(
            helper.make_tensor_value_info(
                name, scope.type_of(name), shape if name in scope.ranks else None
            )
        )
        present.add(name)
    del graph.value_info[:]
    return marked
