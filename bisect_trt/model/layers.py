"""What nodes are to this tool: layers, kept nodes or constants, each with a stable unique id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from sys import intern

import onnx

from bisect_trt.base.plan import Precision
from bisect_trt.model.precision_rules import (
    CONTROL_FLOW,
    FLOAT,
    MATRIX_INPUTS,
    is_standard,
    reducible_slots,
)
from bisect_trt.model.tensor_types import UNKNOWN, Scope, every_node, subgraphs


class Kind(Enum):
    """What a plan may do with a node."""

    LAYER = "layer"
    KEPT = "kept"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Layer:
    """A node with a float output that can run at reduced precision.

    ``name`` is the unique id used in plans, tables and caches: the node's own name where it is
    unique. ``scope`` is the part of the name before the last slash. ``outputs`` are its float
    tensors.
    """

    name: str
    op: str
    index: int
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    precisions: frozenset[Precision]

    @property
    def scope(self) -> str:
        """The path of modules that the name spells, '' where it spells none."""
        return intern(self.name.rpartition("/")[0].strip("/"))


@dataclass(frozen=True, slots=True)
class Role:
    """What one node may do at one precision: the float slots that change, and those that stay FP32.

    ``reduced_in`` and ``reduced_out`` are slots of FP32 tensors that a reduced node reads and
    writes reduced; ``float_in`` are all its FP32 input slots.
    """

    kind: Kind
    reduced_in: tuple[int, ...] = ()
    reduced_out: tuple[int, ...] = ()
    float_in: tuple[int, ...] = ()


def node_names(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """A unique name for each node.

    The first node of several with one name keeps it; the later ones get ``_1``, ``_2``, ... A
    node without a name is called ``Op_output``, which survives edits elsewhere in the graph.
    """
    taken = {n.name for n in nodes if n.name}
    seen: set[str] = set()
    numbers: dict[str, int] = {}
    names = []
    for position, node in enumerate(nodes):
        name = node.name
        if not name or name in seen:
            first_output = next((o for o in node.output if o), str(position))
            stem = name or f"{node.op_type}_{first_output}"
            name, number = stem, numbers.get(stem, 0)
            while name in taken or name in seen:
                number += 1
                name = f"{stem}_{number}"
            numbers[stem] = number
        seen.add(name)
        names.append(name)
    return names


def with_unique_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes bear their ids, without the shapes claimed for inner tensors."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for node, name in zip(named.graph.node, node_names(model.graph.node), strict=True):
        node.name = name
    del named.graph.value_info[:]
    return named


def with_outputs(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """``model``, or a copy with those of ``tensors`` that are no outputs yet as outputs."""
    known = {output.name for output in model.graph.output}
    new = [name for name in dict.fromkeys(tensors) if name not in known]
    if not new:
        return model
    more = onnx.ModelProto()
    more.CopyFrom(model)
    more.graph.output.extend(onnx.ValueInfoProto(name=name) for name in new)
    return more


def _float_slots(names: Sequence[str], scope: Scope) -> tuple[int, ...]:
    """The slots that hold FP32 tensors, in the types of ``scope``."""
    return tuple(i for i, name in enumerate(names) if name and scope.type_of(name) == FLOAT)


_role = cache(Role)
"""Thousands of nodes have the same few roles."""


def role_of(node: onnx.NodeProto, scope: Scope, opset: int, precision: Precision) -> Role:
    """What ``node`` may do at ``precision``; FP32 asks for nothing, so every node is then kept."""
    if node.op_type == "Constant" and is_standard(node):
        return _role(Kind.CONSTANT)
    float_in, float_out = _float_slots(node.input, scope), _float_slots(node.output, scope)
    kept = _role(Kind.KEPT, float_in=float_in)
    if not float_out or not is_standard(node) or precision is Precision.FP32:
        return kept
    if node.op_type in CONTROL_FLOW:
        if precision is not Precision.TF32:
            if _feeds_unknown(node, scope):
                return kept
            return _role(Kind.LAYER, float_in, float_out, float_in)
        return _role(Kind.LAYER, (), (), float_in) if _multiplies_matrices(node) else kept
    if precision is Precision.TF32:
        operands = tuple(i for i in MATRIX_INPUTS.get(node.op_type, ()) if i in float_in)
        return _role(Kind.LAYER, operands, (), float_in) if operands else kept
    ins, outs = reducible_slots(node.op_type, opset, len(node.input), len(node.output), precision)
    if any(node.input[i] and scope.type_of(node.input[i]) == UNKNOWN for i in ins):
        return kept  # behind a custom operator: casting only the other operands would mix types
    reduced_in = tuple(i for i in float_in if i in ins)
    reduced_out = tuple(i for i in float_out if i in outs)
    if not reduced_out or not (reduced_in or node.op_type == "Cast"):
        return kept
    return _role(Kind.LAYER, reduced_in, reduced_out, float_in)


def _feeds_unknown(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a body takes for a float what is given from behind a custom operator, in FP32."""
    return any(
        outer and scope.type_of(outer) == UNKNOWN and inner.type.tensor_type.elem_type == FLOAT
        for _, body in subgraphs(node)
        for outer, inner in zip(node.input, body.input, strict=False)
    )


def _multiplies_matrices(node: onnx.NodeProto) -> bool:
    """Whether a body of ``node`` holds an operator that TF32 touches."""
    return any(
        inner.op_type in MATRIX_INPUTS
        for _, body in subgraphs(node)
        for inner in every_node(body.node)
    )
