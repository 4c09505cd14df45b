"""Element types and ranks of tensors, and walks over nodes and bodies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from sys import intern

import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from bisect_trt.model.precision_rules import CONTROL_FLOW, formals, is_standard, schema_of

UNKNOWN = TensorProto.UNDEFINED

_TYPES = {f"tensor({name.lower()})": value for name, value in TensorProto.DataType.items()}
"""ONNX's element types by their names in operator schemas."""

SMALL_CONSTANT_ELEMENTS = 1024
"""Constant nodes of up to this many elements stay in a skeleton."""

_SHAPE_INPUT = {"Reshape": 1, "ConstantOfShape": 0}
"""The input slot that holds the shape of an operator's output."""


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


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators that ``model`` imports; 1 if it imports none."""
    return next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of a control-flow node, by attribute name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes`` and the nodes of their bodies, each before its bodies."""
    for node in nodes:
        yield node
        for _, body in subgraphs(node):
            yield from every_node(body.node)


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replaces the nodes of ``graph`` by ``nodes``, which may be its own."""
    kept = onnx.GraphProto()  # copies first: clearing the field would empty its own nodes
    kept.node.extend(nodes)
    graph.ClearField("node")
    graph.node.extend(kept.node)


def captured_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The outer tensors that the bodies of ``node`` read, in order of first use."""
    if not node.attribute:  # a shortcut for most nodes of a large model
        return ()
    found: dict[str, None] = {}

    def visit(graph: onnx.GraphProto, outer: frozenset[str]) -> None:
        inside = set(outer) | {i.name for i in graph.input} | {t.name for t in graph.initializer}
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


def tensors_read(node: onnx.NodeProto) -> tuple[str, ...]:
    """The tensors that ``node`` and its bodies read, each once."""
    return tuple(dict.fromkeys((*filter(None, node.input), *captured_names(node))))


def without_graph(model: onnx.ModelProto, *, min_ir_version: int = 0) -> onnx.ModelProto:
    """A model with the opsets, functions and graph name of ``model``, and an empty graph."""
    empty = onnx.ModelProto(ir_version=max(model.ir_version, min_ir_version))
    empty.opset_import.extend(model.opset_import)
    empty.functions.extend(model.functions)
    empty.graph.name = model.graph.name or "graph"
    return empty


def part_of(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """The part of ``model`` that computes ``outputs``, which are not declared as outputs yet."""
    wanted = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(tensors_read(node))
            kept.append(node)
    part = without_graph(model)
    weights = {t.name for t in model.graph.initializer}
    part.graph.input.extend(
        i for i in model.graph.input if i.name not in weights or i.name in wanted
    )
    part.graph.initializer.extend(t for t in model.graph.initializer if t.name in wanted)
    part.graph.node.extend(reversed(kept))
    return part


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
    """Adds ranks that ONNX's inference leaves open; True if there were any."""
    # They follow from the length of a computed shape, or from the values that a Loop begins with:
    # no engine takes ranks that change from turn to turn.
    values = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
    found = False
    for node in graph.node:
        if node.op_type == "Loop":
            for name, given in zip(node.output, node.input[2:], strict=False):
                first, last = values.get(given), values.get(name)
                if first is None or last is None or last.HasField("shape") or not last.elem_type:
                    continue
                if first.HasField("shape"):
                    ranks = [onnx.TensorShapeProto.Dimension()] * len(first.shape.dim)
                    last.shape.dim.extend(ranks)
                    found = True
            continue
        slot = _SHAPE_INPUT.get(node.op_type, len(node.input))
        if slot >= len(node.input):
            continue
        shape, result = values.get(node.input[slot]), values.get(node.output[0])
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
        # Inference reads the values of shapes and axes, which are short.
        if tensor.data_type == TensorProto.INT64 and math.prod(tensor.dims) <= 16:
            graph.initializer.append(tensor)
        else:
            add_input(tensor.name, tensor.data_type, tensor.dims)
    for sparse in source.sparse_initializer:
        add_input(sparse.values.name, sparse.values.data_type, sparse.dims)
    taken = set[str]()
    for node in source.node:
        large = _large_constant(node)
        if large is None:
            graph.node.append(node)
            continue
        # An Identity in its place keeps the indices of the nodes.
        taken = taken or tensor_names(source)
        stand_in = unused(f"{node.output[0]}__value", taken)
        add_input(stand_in, large.data_type, large.dims)
        graph.node.append(helper.make_node("Identity", [stand_in], list(node.output)))
    return light


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


def tensor_names(graph: onnx.GraphProto) -> set[str]:
    """The names of inputs, initialisers and node outputs, in bodies too."""
    names = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    names.update(o for node in every_node(graph.node) for o in node.output)
    return names


def unused(name: str, taken: set[str]) -> str:
    """``name``, with underscores appended until it is not in ``taken``, and adds it there."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


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
