"""Infers the element types and ranks of tensors, in bodies too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import intern

import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import one_line
from bisect_trt.model.precision_rules import CONTROL_FLOW, formals, is_standard, schema_of
from bisect_trt.model.walk import opset_of, subgraphs, tensor_names, unused, without_graph

UNKNOWN = TensorProto.UNDEFINED

_TYPES = {f"tensor({name.lower()})": value for name, value in TensorProto.DataType.items()}
"""ONNX's element types by their names in operator schemas."""

SMALL_CONSTANT_ELEMENTS = 64
"""Constants of up to this many elements stay in a skeleton: shapes, axes, pads, scales."""


@dataclass
class Scope:
    """The element types (``types``) and inferred ranks (``ranks``) of one graph's tensors.

    ``bodies`` holds the scopes of its bodies by (node index, attribute name).
    """

    types: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    parent: Scope | None = None
    bodies: dict[tuple[int, str], Scope] = field(default_factory=dict)

    def type_of(self, name: str) -> int:
        """The element type of ``name`` here or in an enclosing scope; UNKNOWN if there is none."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.types.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return UNKNOWN

    def body(self, index: int, attribute: str) -> Scope:
        """The scope of a body."""
        return self.bodies[(index, attribute)]


def infer_types(model: onnx.ModelProto) -> Scope:
    """The element types and ranks of every tensor of ``model``, bodies included."""
    light, complete = skeleton(model), False
    while not complete:  # each added rank lets ONNX infer further tensors
        try:
            light = onnx.shape_inference.infer_shapes(light)
        except Exception:  # it raises several kinds; operator schemas give the types left open
            break
        complete = not _give_ranks(light.graph)
    return _collect(light.graph, opset_of(model), None)


def _give_ranks(graph: onnx.GraphProto) -> bool:
    """Adds the ranks behind computed shapes, which ONNX's inference leaves open; True if any."""
    values = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
    found = False
    for node in graph.node:
        if node.op_type != "Reshape" or len(node.input) < 2:
            continue
        shape, result = values.get(node.input[1]), values.get(node.output[0])
        if shape is None or result is None or result.HasField("shape") or not result.elem_type:
            continue
        if len(shape.shape.dim) == 1 and shape.shape.dim[0].dim_value > 0:
            rank = shape.shape.dim[0].dim_value
            result.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * rank)
            found = True
    return found


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` without value_info whose weights are inputs; nodes keep their places.

    Large Constant nodes become identities of inputs; shapes and axes stay constants.
    """
    light = without_graph(model, min_ir_version=4)
    source, graph = model.graph, light.graph
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    declared = {i.name for i in source.input}

    def add_input(name: str, data_type: int, dims: Iterable[int]) -> None:
        graph.input.append(helper.make_tensor_value_info(name, data_type, list(dims)))

    for tensor in source.initializer:
        if tensor.name in declared:
            continue
        # Inference reads the values of shapes, axes and scales.
        if math.prod(tensor.dims) <= SMALL_CONSTANT_ELEMENTS:
            graph.initializer.append(tensor)
        else:
            add_input(tensor.name, tensor.data_type, tensor.dims)
    taken = set[str]()
    for node in source.node:
        large = _large_constant(node)
        if large is None:
            graph.node.append(node)
            continue
        # Inference copies the model, which takes as long as its weights are large.
        # An Identity in its place keeps the indices of the nodes.
        taken = taken or tensor_names(source)
        stand_in = unused(f"{node.output[0]}__value", taken)
        add_input(stand_in, large.data_type, large.dims)
        graph.node.append(helper.make_node("Identity", [stand_in], list(node.output)))
    return light


def complaint_of(model: onnx.ModelProto) -> str:
    """The error of ONNX's own check of ``model``, types and shapes included; empty if it passes."""
    model = skeleton(model)  # ONNX's check cannot take more than 2 GB
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the library has its own classes for each of its checks
        # Every runtime takes an output without a shape.
        if "Field 'shape' of 'type' is required" not in str(error):
            return one_line(error, 160)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:
        return one_line(error, 160)
    return ""


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` that computes in float64 what ``model`` computes in float32."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    _make_double(double.graph)
    return double


def _make_double(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    tensors = [*graph.initializer]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                tensors.append(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
        for _, body in subgraphs(node):
            _make_double(body)
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT:
            wide = numpy_helper.to_array(tensor).astype("float64")
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def _large_constant(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or not node.attribute or not node.attribute[0].HasField("t"):
        return None
    tensor = node.attribute[0].t
    return tensor if math.prod(tensor.dims) > SMALL_CONSTANT_ELEMENTS else None


def _collect(graph: onnx.GraphProto, opset: int, parent: Scope | None) -> Scope:
    scope = Scope(parent=parent)
    types = scope.types
    for info in (*graph.value_info, *graph.output, *graph.input):
        tensor = info.type.tensor_type
        name = intern(info.name)  # each access to a message makes a new string
        types[name] = tensor.elem_type if info.type.HasField("tensor_type") else UNKNOWN
        if tensor.HasField("shape"):
            scope.ranks[name] = len(tensor.shape.dim)
    types.update((intern(t.name), t.data_type) for t in graph.initializer)
    # Registers each output here, without a type yet, so that a lookup does not find a tensor of
    # the same name in an enclosing graph.
    for node in graph.node:
        for name in filter(None, node.output):
            types.setdefault(name, UNKNOWN)
    for index, node in enumerate(graph.node):
        for name, body in subgraphs(node):
            scope.bodies[(index, name)] = _collect(body, opset, scope)
        if is_standard(node) and any(
            scope.type_of(t) == UNKNOWN for t in (*node.input, *node.output) if t
        ):
            _bind(node, index, opset, scope)
    return scope


def _bind(node: onnx.NodeProto, index: int, opset: int, scope: Scope) -> None:
    """Gives ``node``'s untyped outputs the types that its bodies, attributes or schema imply."""
    found: dict[int, int] = {}
    if node.op_type in CONTROL_FLOW:
        skip = 1 if node.op_type == "Loop" else 0  # a Loop's body gives its condition first
        for name, body in subgraphs(node):
            inner = scope.body(index, name)
            for slot, output in enumerate(body.output[skip:]):
                # The type may be known in one branch only.
                found[slot] = found.get(slot) or inner.type_of(output.name)
    elif node.op_type in ("Cast", "ConstantOfShape", "Constant"):
        for attribute in node.attribute:
            if attribute.name == "to":
                found[0] = attribute.i
            elif attribute.name == "value":
                found[0] = attribute.t.data_type
    else:
        found = _by_schema(node, opset, scope)
    for slot, name in enumerate(node.output):
        if name and scope.types.get(name, UNKNOWN) == UNKNOWN and slot in found:
            scope.types[name] = found[slot]


def _by_schema(node: onnx.NodeProto, opset: int, scope: Scope) -> dict[int, int]:
    schema = schema_of(node.op_type, opset)
    if schema is None:
        return {}
    bound: dict[str, int] = {}
    for slot, formal in formals(list(schema.inputs), len(node.input)):
        elem_type = scope.type_of(node.input[slot]) if node.input[slot] else UNKNOWN
        if elem_type != UNKNOWN:
            bound.setdefault(formal.type_str, elem_type)
    for slot, formal in formals(list(schema.inputs), len(node.input)):
        name = node.input[slot]
        # The output of a custom operator takes the type that another operand of its reader has.
        if name and formal.type_str in bound and scope.type_of(name) == UNKNOWN:
            scope.types[name] = bound[formal.type_str]
    # A variable that admits one type is known without any input.
    for constraint in schema.type_constraints:
        if len(constraint.allowed_type_strs) == 1:
            only = _TYPES.get(constraint.allowed_type_strs[0], UNKNOWN)
            bound.setdefault(constraint.type_param_str, only)
    found = {}
    for slot, formal in formals(list(schema.outputs), len(node.output)):
        if formal.type_str in bound:
            found[slot] = bound[formal.type_str]
        elif formal.type_str.startswith("tensor("):
            found[slot] = _TYPES.get(formal.type_str, UNKNOWN)
    return found
