"""The element type of every tensor, in every scope, without trusting what the file says about inner
tensors.

ONNX's own shape inference does the work, on a copy that holds no large weights (so that a 2 GB
model costs a few MB here). Where it stops, behind a custom operator for example, the schemas' type
variables carry the types on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from sys import intern

import onnx
from onnx import AttributeProto, TensorProto, helper

from bisect_trt.graph.tensors.operator_rules import CONTROL_FLOW, formals, is_standard, schema_of
from bisect_trt.graph.tensors.ranks import complete_ranks

_LARGE, _A_SHAPE = 1024, 16
UNKNOWN = TensorProto.UNDEFINED


@dataclass
class Scope:
    """The tensors' element types of one graph, and of the bodies inside it by (node index,
    attribute name).

    ``ranks`` holds the number of dimensions where it could be inferred.
    """

    types: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    parent: Scope | None = None
    bodies: dict[tuple[int, str], Scope] = field(default_factory=dict)

    def type_of(self, name: str) -> int:
        """The element type of ``name`` here or in an enclosing scope; UNDEFINED where nothing is
        known.
        """
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


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operator set the model uses; 1 where it names none."""
    return next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of a control-flow node, by attribute name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes`` and those of all bodies within them, each before its bodies."""
    for node in nodes:
        yield node
        for _, body in subgraphs(node):
            yield from every_node(body.node)


def captured_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The outer tensors that the bodies of ``node`` read, in order of first use."""
    if not node.attribute:  # most nodes of a large model
        return ()
    found: dict[str, None] = {}

    def visit(graph: onnx.GraphProto, known: frozenset[str]) -> None:
        inside = set(known) | {i.name for i in graph.input} | {t.name for t in graph.initializer}
        for inner in graph.node:
            for name in inner.input:
                if name and name not in inside:
                    found.setdefault(name)
            for _, body in subgraphs(inner):
                visit(body, frozenset(inside))
            inside.update(inner.output)
        for output in graph.output:
            if output.name not in inside:
                found.setdefault(output.name)

    for _, body in subgraphs(node):
        visit(body, frozenset())
    return tuple(found)


def infer_types(model: onnx.ModelProto) -> Scope:
    """The element types of every tensor of ``model``, bodies included. The model is not changed."""
    light = skeleton(model)
    try:
        light = onnx.shape_inference.infer_shapes(light)
    except (
        Exception
    ):  # the library raises several kinds; what it could not infer is bound below by the schemas
        light = skeleton(model)
    return _collect(light.graph, opset_of(model), None)


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` without weights: they are inputs, large constants identities of some, and
    nothing is claimed of inner tensors. Shapes and axes stay. Nodes keep their places.
    """
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name or "graph"
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    declared = {i.name for i in source.input}
    taken = set[str]()
    for tensor in source.initializer:
        if tensor.name in declared:
            continue
        if tensor.data_type == TensorProto.INT64 and math.prod(tensor.dims) <= _A_SHAPE:
            graph.initializer.append(tensor)
        else:
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    for sparse in source.sparse_initializer:
        values = sparse.values
        graph.input.append(
            helper.make_tensor_value_info(values.name, values.data_type, list(sparse.dims))
        )
    for node in source.node:
        large = _large_constant(node)
        if large is None:
            graph.node.append(node)
            continue
        taken = taken or tensor_names(source)
        stand_in = unused(f"{node.output[0]}__value", taken)
        graph.input.append(
            helper.make_tensor_value_info(stand_in, large.data_type, list(large.dims))
        )
        graph.node.append(helper.make_node("Identity", [stand_in], list(node.output)))
    return light


def tensor_names(graph: onnx.GraphProto) -> set[str]:
    """The names of inputs, initialisers and what nodes make, in bodies too."""
    known = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    known.update(o for node in every_node(graph.node) for o in node.output)
    return known


def unused(name: str, taken: set[str]) -> str:
    """``name``, or a longer one, that is not in ``taken``; it is then."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _large_constant(node: onnx.NodeProto) -> TensorProto | None:
    if (
        node.op_type != "Constant"
        or not node.attribute
        or node.attribute[0].type != AttributeProto.TENSOR
    ):
        return None
    tensor = node.attribute[0].t
    return tensor if math.prod(tensor.dims) > _LARGE else None


def _collect(graph: onnx.GraphProto, opset: int, parent: Scope | None) -> Scope:
    scope = Scope(parent=parent)
    types, lengths = scope.types, dict[str, int]()
    for info in (*graph.value_info, *graph.output, *graph.input):
        tensor = info.type.tensor_type
        name = intern(info.name)  # each access to a message makes a new string
        types[name] = tensor.elem_type if info.type.HasField("tensor_type") else UNKNOWN
        if tensor.HasField("shape"):
            scope.ranks[name] = len(tensor.shape.dim)
            if len(tensor.shape.dim) == 1 and tensor.shape.dim[0].dim_value > 0:
                lengths[name] = tensor.shape.dim[0].dim_value
    complete_ranks(graph, scope.ranks, lengths)
    types.update((intern(t.name), t.data_type) for t in graph.initializer)
    # Known to be made here before it is known of what type: a tensor of an enclosing graph that has
    # its name, but comes behind this body or is hidden by it, is another one.
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
    """Give ``node``'s untyped outputs the type its schema derives from its typed inputs."""
    found: dict[int, int] = {}
    if node.op_type in CONTROL_FLOW:
        skip = 1 if node.op_type == "Loop" else 0
        for name, body in subgraphs(node):
            inner = scope.body(index, name)
            for slot, output in enumerate(body.output[skip:]):
                # One branch may know what the other does not.
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
        # A custom operator's output: its reader's type variable, bound by another operand, gives
        # the type.
        if name and formal.type_str in bound and scope.type_of(name) == UNKNOWN:
            scope.types[name] = bound[formal.type_str]
    for constraint in schema.type_constraints:
        if len(constraint.allowed_type_strs) == 1:
            bound.setdefault(constraint.type_param_str, _elem_type(constraint.allowed_type_strs[0]))
    found = {}
    for slot, formal in formals(list(schema.outputs), len(node.output)):
        if formal.type_str in bound:
            found[slot] = bound[formal.type_str]
        elif formal.type_str.startswith("tensor("):
            found[slot] = _elem_type(formal.type_str)
    return found


def _elem_type(text: str) -> int:
    if not text.startswith("tensor("):
        return UNKNOWN
    return {
        "float": TensorProto.FLOAT,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
        "double": TensorProto.DOUBLE,
        "bool": TensorProto.BOOL,
        "int64": TensorProto.INT64,
        "int32": TensorProto.INT32,
        "uint8": TensorProto.UINT8,
        "string": TensorProto.STRING,
    }.get(text[len("tensor(") : -1], UNKNOWN)
