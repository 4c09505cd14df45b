"""Nodes as layers, kept nodes or constants, each with a stable unique id."""

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
from bisect_trt.model.tensor_types import UNKNOWN, Scope
from bisect_trt.model.walk import every_node, subgraphs


class Kind(Enum):
    """What a plan may do with a node."""

    LAYER = "layer"
    KEPT = "kept"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Layer:
    """A node with an FP32 output that can run at one of ``precisions``.

    ``name`` is its unique id in plans, tables and caches, ``op`` its operator type, ``index`` its
    place in the graph, ``outputs`` its FP32 outputs.
    """

    name: str
    op: str
    index: int
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    precisions: frozenset[Precision]

    @property
    def scope(self) -> str:
        """The part of the name before the last slash; '' if there is none."""
        return intern(self.name.rpartition("/")[0].strip("/"))


@dataclass(frozen=True, slots=True)
class Role:
    """What one node may do at one precision.

    ``reduced_in`` and ``reduced_out`` are the FP32 slots that the node reads and writes reduced;
    ``float_in`` are all its FP32 input slots.
    """

    kind: Kind
    reduced_in: tuple[int, ...] = ()
    reduced_out: tuple[int, ...] = ()
    float_in: tuple[int, ...] = ()


def node_names(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """A unique name for each node.

    The first of several nodes with one name keeps it, later ones get ``_1``, ``_2``, ...
    """
    taken = {n.name for n in nodes if n.name}  # a made-up name never takes an explicit one
    given: set[str] = set()
    numbers: dict[str, int] = {}
    names = []
    for position, node in enumerate(nodes):
        name = node.name
        if not name or name in given:
            # An unnamed node is named after its output, which survives edits elsewhere.
            first_output = next((o for o in node.output if o), str(position))
            stem = name or f"{node.op_type}_{first_output}"
            name, number = stem, numbers.get(stem, 0)
            while name in taken or name in given:
                number += 1
                name = f"{stem}_{number}"
            numbers[stem] = number
        given.add(name)
        names.append(name)
    return names


def with_unique_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes are named by their ids, without value_info."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for node, name in zip(named.graph.node, node_names(model.graph.node), strict=True):
        node.name = name
    del named.graph.value_info[:]
    return named


def with_outputs(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """``model``, or a copy in which ``tensors`` are outputs too."""
    present = {output.name for output in model.graph.output}
    new = [name for name in dict.fromkeys(tensors) if name not in present]
    if not new:
        return model
    more = onnx.ModelProto()
    more.CopyFrom(model)
    more.graph.output.extend(onnx.ValueInfoProto(name=name) for name in new)
    return more


def _float_slots(names: Sequence[str], scope: Scope) -> tuple[int, ...]:
    """The slots that hold FP32 tensors, in the types of ``scope``."""
    return tuple(i for i, name in enumerate(names) if name and scope.type_of(name) == FLOAT)


_role = cache(Role)  # thousands of nodes share a few roles


def role_of(node: onnx.NodeProto, scope: Scope, opset: int, precision: Precision) -> Role:
    """What ``node`` may do at ``precision``; at FP32 every node but constants is kept."""
    if node.op_type == "Constant" and is_standard(node):
        return _role(Kind.CONSTANT)
    float_in, float_out = _float_slots(node.input, scope), _float_slots(node.output, scope)
    # A kept node still reads FP32: what a reduced node gives it is converted back.
    kept = _role(Kind.KEPT, float_in=float_in)
    if not float_out or not is_standard(node) or precision is Precision.FP32:
        return kept
    # A plan reduces a body as a whole: engines report no layers inside by name.
    if node.op_type in CONTROL_FLOW:
        if precision is not Precision.TF32:
            return _role(Kind.LAYER, float_in, float_out, float_in)
        # TF32 rounds operands inside bodies; the tensors at their borders stay FP32.
        return _role(Kind.LAYER, (), (), float_in) if _multiplies_matrices(node) else kept
    if precision is Precision.TF32:
        operands = tuple(i for i in MATRIX_INPUTS.get(node.op_type, ()) if i in float_in)
        return _role(Kind.LAYER, operands, (), float_in) if operands else kept
    ins, outs = reducible_slots(node.op_type, opset, len(node.input), len(node.output), precision)
    if any(node.input[i] and scope.type_of(node.input[i]) == UNKNOWN for i in ins):
        return kept  # a custom operator gives this input: casting the others would mix types
    reduced_in = tuple(i for i in float_in if i in ins)
    reduced_out = tuple(i for i in float_out if i in outs)
    # A Cast to FP32 can be reduced whatever it reads; other nodes need a reduced input.
    if not reduced_out or not (reduced_in or node.op_type == "Cast"):
        return kept
    return _role(Kind.LAYER, reduced_in, reduced_out, float_in)


def _multiplies_matrices(node: onnx.NodeProto) -> bool:
    """Whether a body of ``node`` holds an operator whose operands TF32 rounds."""
    return any(
        inner.op_type in MATRIX_INPUTS
        for _, body in subgraphs(node)
        for inner in every_node(body.node)
    )
