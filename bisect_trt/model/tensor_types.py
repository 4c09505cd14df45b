"""Element types and ranks of every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import intern

import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.model.precision_rules import CONTROL_FLOW, formals, is_standard, schema_of

_FIRST = """
Abs Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Bernoulli BitwiseNot Cast
CastLike Ceil Celu Clip Conv ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear
Dropout Elu Erf Exp EyeLike Floor Gelu GlobalAveragePool GlobalLpPool GlobalMaxPool
GroupNormalization HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN
LayerNormalization LeakyRelu Log LogSoftmax LpNormalization LpPool MaxPool
MeanVarianceNormalization Mish Neg Not PRelu Pad QLinearConv QuantizeLinear RMSNormalization
RandomNormalLike RandomUniformLike Reciprocal Relu Resize ReverseSequence Round ScatterElements
ScatterND Selu Shrink Sigmoid Sign Sin Sinh Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Upsample
"""

_LARGEST = """
Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Concat Div Equal Greater GreaterOrEqual Less
LessOrEqual MatMul MatMulInteger Max Mean Min Mod Mul Or Pow Sub Sum Where Xor
"""

_AS_FIRST, _AS_LARGEST = frozenset(_FIRST.split()), frozenset(_LARGEST.split())
"""Operators each of whose outputs has as many dimensions as the first input, or as the largest."""

_FIXED = {"Flatten": 2, "Gemm": 2, "NonZero": 2, "Range": 1, "Shape": 1, "Size": 0}

_STATE = {"Loop": 2}
"""Where the inputs begin that the first outputs are later values of."""

_BY_LENGTH = {"Reshape": 1, "ConstantOfShape": 0}
"""The input whose length is the output's rank."""


def complete_ranks(
    graph: onnx.GraphProto, ranks: dict[str, int], lengths: Mapping[str, int]
) -> None:
    """Add to ``ranks`` what follows from a Reshape's shape, and from that on."""
    known = _RunState(graph, ranks, lengths)
    for node in graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        rank = known.rank_of(node)
        for name, source in zip(
            node.output, node.input[_STATE.get(node.op_type, 0) :], strict=False
        ):
            if node.op_type in _STATE and name and source in known.ranks:
                # What a loop hands on: ranks that change from turn to turn are no engine's.
                known.ranks.setdefault(name, known.ranks[source])
                ranks.setdefault(name, known.ranks[source])
        for slot, name in enumerate(node.output):
            if not name or name in known.ranks or rank is None:
                continue
            of_statistics = slot and node.op_type == "BatchNormalization"
            known.ranks[name] = ranks[name] = 1 if of_statistics else rank
        if len(node.output) == 1 and node.output[0] not in known.lengths:
            length = known.length_of(node)
            if length is not None:
                known.lengths[node.output[0]] = length


class _RunState:
    """Ranks, and the lengths of tensors of one dimension, by tensor."""

    def __init__(
        self, graph: onnx.GraphProto, ranks: Mapping[str, int], lengths: Mapping[str, int]
    ) -> None:
        self._held = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._held[node.output[0]] = node.attribute[0].t
        self.ranks = {n: len(t.dims) for n, t in self._held.items()} | dict(ranks)
        vectors = {n: t.dims[0] for n, t in self._held.items() if len(t.dims) == 1}
        self.lengths = vectors | dict(lengths)

    def rank_of(self, node: onnx.NodeProto) -> int | None:
        """Of the outputs of ``node``; None where it is not told."""
        op, of = node.op_type, [self.ranks.get(name) for name in node.input if name]
        if op in _FIXED:
            return _FIXED[op]
        if op in _BY_LENGTH and len(node.input) > _BY_LENGTH[op]:
            return self.lengths.get(node.input[_BY_LENGTH[op]])
        if not of or of[0] is None:  # without inputs it is an invalid model: its reader says so
            return None
        if op in _AS_FIRST:
            return of[0]
        known = [rank for rank in of if rank is not None]
        if op == "Expand" and len(node.input) > 1:
            length = self.lengths.get(node.input[1])
            return None if length is None else max(of[0], length)
        if len(known) < len(of):
            return None
        if op in _AS_LARGEST:
            # A vector's dimension is summed away.
            return None if op.startswith("MatMul") and 1 in known else max(known)
        if op == "Gather" and len(of) == 2:
            return known[0] + known[1] - 1
        return self._of_axes(node, of[0])

    def _of_axes(self, node: onnx.NodeProto, rank: int) -> int | None:
        """Behind what adds, drops or sums away axes."""
        if node.op_type in ("Unsqueeze", "Squeeze"):
            axes = self._axes(node)
            if axes is None:
                return None
            return rank + axes if node.op_type == "Unsqueeze" else rank - axes
        kept = next((a.i for a in node.attribute if a.name == "keepdims"), 1)
        summed = node.op_type.startswith(("Reduce", "ArgM"))
        return rank if summed and kept else None

    def _axes(self, node: onnx.NodeProto) -> int | None:
        """How many axes a node names; None where it names none, or computes them."""
        for attribute in node.attribute:
            if attribute.name == "axes":
                return len(attribute.ints)
        if len(node.input) < 2:
            return None
        return self.lengths.get(node.input[1])

    def _sliced(self, node: onnx.NodeProto, length: int) -> int | None:
        """The length of a part of a vector of ``length``; None where its ends are computed."""
        told: dict[str, list[int]] = {a.name: list(a.ints) for a in node.attribute}  # of old opsets
        for name, source in zip(("starts", "ends", "axes", "steps"), node.input[1:], strict=False):
            tensor = self._held.get(source)
            if source and (tensor is None or uses_external_data(tensor)):
                return None
            values = numpy_helper.to_array(tensor).ravel() if tensor else ()
            told[name] = [int(value) for value in values]
        starts, ends, steps = (told.get(name) for name in ("starts", "ends", "steps"))
        if not starts or not ends:
            return None
        return len(range(length)[starts[0] : ends[0] : (steps or [1])[0]])

    def length_of(self, node: onnx.NodeProto) -> int | None:
        """Of the one output of ``node``, of one dimension; None where it is not told."""
        if self.ranks.get(node.output[0]) != 1 or not node.input:
            return None
        op, of = node.op_type, [self.lengths.get(name) for name in node.input if name]
        if op == "Shape":
            rank = self.ranks.get(node.input[0])
            part = {a.name: a.i for a in node.attribute}
            taken = slice(part.get("start"), part.get("end"))
            return None if rank is None else len(range(rank)[taken])
        if op == "Slice" and of[0] is not None:
            return self._sliced(node, of[0])
        if op in ("Cast", "Identity", "Abs", "Neg"):
            return of[0]
        if op in ("Unsqueeze", "Reshape"):
            return 1 if self.ranks.get(node.input[0]) == 0 else None
        if op == "Concat" and None not in of:
            return sum(int(length) for length in of if length is not None)
        if op == "Gather":
            return of[1] if len(of) == 2 else None
        if op in _AS_LARGEST and not op.startswith("MatMul"):
            # Scalars beside it have no length.
            vectors = [n for n in node.input if self.ranks.get(n) != 0]
            sizes = [self.lengths.get(name) for name in vectors]
            return max(s for s in sizes if s is not None) if sizes and None not in sizes else None
        return None


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


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let ``graph`` have ``nodes``, which may be its own, in their order."""
    kept = onnx.GraphProto()
    kept.node.extend(nodes)
    graph.ClearField("node")
    graph.node.extend(kept.node)


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
