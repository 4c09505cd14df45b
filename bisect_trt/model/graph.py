"""The graph that passes read: nodes, tensors, types, layers; and its form at a later opset."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.layers import (
    Kind,
    Layer,
    Role,
    node_names,
    role_of,
    with_unique_names,
)
from bisect_trt.model.precision_rules import (
    FLOAT,
    HAVE_BF16,
    MOVES,
    QUANTISES,
    TYPE_AGNOSTIC,
    is_standard,
    schema_of,
)
from bisect_trt.model.tensor_types import (
    Scope,
    every_node,
    infer_types,
    opset_of,
    part_of,
    replace_nodes,
    subgraphs,
    tensors_read,
    unused,
)
from bisect_trt.model.tensor_values import Constants


def drop_unread(graph: onnx.GraphProto, converted: set[str]) -> None:
    """Removes the constants among ``converted`` that no node and no output reads."""
    if not converted:
        return
    unread = converted - _names_read(graph)
    kept = [n for n in graph.node if not (n.op_type == "Constant" and n.output[0] in unread)]
    if len(kept) < len(graph.node):
        replace_nodes(graph, kept)
    remove_initialisers(graph, unread)


def remove_initialisers(graph: onnx.GraphProto, names: set[str]) -> None:
    """Removes the initialisers ``names`` from ``graph`` without copying the others."""
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name in names:
            del graph.initializer[place]


def _names_read(graph: onnx.GraphProto) -> set[str]:
    names = {o.name for o in graph.output}
    for node in graph.node:
        names.update(node.input)
        for _, body in subgraphs(node):
            names |= _names_read(body)
    return names


_DECIDES = frozenset({"Equal", "NonZero", "OneHot"})
"""Operators whose result jumps when a value changes by any amount."""

_COMPUTES_WHOLE = frozenset(
    {"Abs", "Add", "Ceil", "Clip", "Div", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Round"}
    | {"Sub"}
)
"""Arithmetic on indices (row * width + column) before they are cast."""

FLOATS = frozenset({FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def discrete_inputs(graph: onnx.GraphProto, types: Scope) -> frozenset[str]:
    """The float inputs that become integers or truth values, such as ids, coordinates and masks.

    Operators that move values or compute whole numbers may stand between.
    """
    initialised = {t.name for t in graph.initializer}
    # The inputs that a tensor's values come from: several behind a Concat.
    source = {i.name: frozenset({i.name}) for i in graph.input if i.name not in initialised}
    found: set[str] = set()
    for node in filter(is_standard, graph.node):
        read = frozenset[str]().union(*(source.get(name, ()) for name in node.input))
        if not read:
            continue
        floats = all(types.type_of(o) in FLOATS for o in node.output if o)
        if node.op_type in _DECIDES or (node.op_type == "Cast" and not floats):
            found.update(read)
        elif node.op_type in MOVES | _COMPUTES_WHOLE or node.op_type == "Cast":
            source.update(dict.fromkeys(filter(None, node.output), read))
    return frozenset(name for name in found if types.type_of(name) in FLOATS)


@dataclass(frozen=True)
class Lookup:
    """A float ``tensor`` that node ``index`` gathers from ``table``, or casts where that is blank.

    ``source`` names the input that can replace it.
    """

    index: int
    tensor: str
    table: str
    source: str


def list_lookups(
    model: onnx.ModelProto, layers: Sequence[Layer], tables: Container[str]
) -> tuple[Lookup, ...]:
    """The float tensors gathered from ``tables`` by integers that no layer computes.

    If there are none, the float tensors that such integers are cast to.
    """
    graph = model.graph
    by_index = {layer.index: layer for layer in layers}
    initialised = {t.name for t in graph.initializer}
    # Tensors computed from values of the inputs. Shapes are left out: a perturbed size would be
    # another size.
    from_inputs = {i.name for i in graph.input} - initialised
    rounded: set[str] = set()
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | from_inputs
    gathered, cast = [], []
    for index, node in enumerate(graph.node):
        read = tensors_read(node)
        if rounded.isdisjoint(read) and not from_inputs.isdisjoint(read) and index in by_index:
            tensor = node.output[0]
            source = unused(f"{tensor}__moved", taken)
            if node.op_type == "Gather" and node.input[0] in tables:
                gathered.append(Lookup(index, tensor, node.input[0], source))
            elif node.op_type == "Cast":
                cast.append(Lookup(index, tensor, "", source))
        if not from_inputs.isdisjoint(read) and node.op_type not in TYPE_AGNOSTIC:
            from_inputs.update(o for o in node.output if o)
        if index in by_index or not rounded.isdisjoint(read):
            rounded.update(o for o in node.output if o)
    return tuple(gathered or cast)


def lookup_model(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """The part of ``model`` that computes the ``source`` tensors of ``lookups`` from its inputs."""
    part = part_of(model, (lookup.tensor for lookup in lookups))
    part.ir_version = max(part.ir_version, 4)
    for node in part.graph.node:
        node.name = ""  # ONNX Runtime refuses two nodes of one name
    for lookup in lookups:
        part.graph.node.append(helper.make_node("Identity", [lookup.tensor], [lookup.source]))
        part.graph.output.append(helper.make_tensor_value_info(lookup.source, FLOAT, None))
    return part


def after_lookups(model: onnx.ModelProto, lookups: Sequence[Lookup]) -> onnx.ModelProto:
    """A copy of ``model`` that takes the ``source`` tensors of ``lookups`` as further inputs."""
    new = with_unique_names(model)
    for lookup in lookups:
        node = new.graph.node[lookup.index]
        node.CopyFrom(helper.make_node("Identity", [lookup.source], [lookup.tensor], node.name))
        new.graph.input.append(helper.make_tensor_value_info(lookup.source, FLOAT, None))
    drop_unread(new.graph, {lookup.table for lookup in lookups} - {""})
    return new


PRODUCTS_BROADCAST = 7
"""The opset from which Mul and Sub broadcast, as the rounding to TF32 needs."""

CAST_HAS_BF16 = 13
"""The opset from which Cast takes BF16."""

HAS_LAYER_NORMALIZATION = 17
"""The opset that introduced LayerNormalization."""

_CHANGED_MEANING = {"Scan": (1, 9), "Hardmax": (1, 13), "GroupNormalization": (18, 21)}
"""Operators that ONNX's converter wrongly copies: first opset of the old and of the new meaning."""


def lacks_bf16(ops: set[str], opset: int) -> bool:
    """Whether ``ops`` or the casts beside them have their BF16 forms only in a later opset."""
    if not ops or opset >= HAVE_BF16:
        return False
    return opset < CAST_HAS_BF16 or not all(has_bf16(op, opset) for op in ops)


def operators(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The operator types of ``nodes`` and of the nodes in their bodies."""
    return {node.op_type for node in every_node(nodes)}


def raised(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """A copy of ``model`` at opset ``target``.

    Raises:
        BadInputError: the converter cannot do it, or not without changing what is computed.
    """
    named, before = with_unique_names(model), opset_of(model)
    present = operators(named.graph.node)
    for op_type, (first, changed) in _CHANGED_MEANING.items():
        if first <= before < changed <= target and op_type in present:
            raise BadInputError(
                f"model: the precision needs opset {target}, and {op_type} means something else "
                f"from opset {changed} on; export the model again with opset {target}"
            )
    mends_resize = before < 11 <= target  # opset 11 gave Resize its coordinate modes
    if mends_resize:
        _check_resizes(named.graph, target)
    makers = {node.output[0]: node for node in named.graph.node if node.output and node.output[0]}
    try:
        converted = onnx.version_converter.convert_version(named, target)
    except Exception as error:  # the converter's C++ adapters throw several kinds
        raise BadInputError(
            f"model: the precision needs opset {target} and opset {opset_of(model)} cannot be "
            f"converted ({one_line(error, 120)}); export the model again with opset {target}"
        ) from error
    taken = {node.name for node in converted.graph.node}
    for node in converted.graph.node:
        source = makers.get(node.output[0]) if node.output else None
        if source is None:
            continue
        if not node.name and source.name not in taken:  # the converter drops an Upsample's name
            node.name = source.name
        if node.op_type == "Resize" and before < 11:
            _keep_old_resize(node)
    # The converter drops functions and the imports of their domains.
    del converted.functions[:]
    converted.functions.extend(named.functions)
    domains = {o.domain for o in converted.opset_import}
    converted.opset_import.extend(o for o in named.opset_import if o.domain not in domains)
    return converted


def _check_resizes(graph: onnx.GraphProto, target: int) -> None:
    """Refuses each Resize of opset 10 that is in a body, or is a nearest one that may shrink."""
    constants = Constants(graph).of_type(TensorProto.FLOAT)
    for node in graph.node:
        inside = operators(n for _, body in subgraphs(node) for n in body.node)
        shrinks = False
        if node.op_type == "Resize":
            nearest = all(a.s == b"nearest" for a in node.attribute if a.name == "mode")
            by = constants.get(node.input[1])
            shrinks = nearest and (by is None or bool((by < 1.0).any()))
        if shrinks or not inside.isdisjoint({"Resize", "Upsample"}):
            raise BadInputError(
                f"{node.name}: the precision needs opset {target}, and ONNX's converter changes "
                f"what this Resize computes; export the model again with opset {target}"
            )


def _keep_old_resize(node: onnx.NodeProto) -> None:
    """Gives a Resize the attributes that stand for the behaviour of opset 10."""
    old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    present = {a.name for a in node.attribute}
    node.attribute.extend(helper.make_attribute(k, v) for k, v in old.items() if k not in present)


def has_bf16(op_type: str, opset: int) -> bool:
    """False if ``op_type`` has a BF16 form in opset 22 but none in ``opset``."""
    schema, later = schema_of(op_type, opset), schema_of(op_type, HAVE_BF16)
    if schema is None or later is None:
        return True
    return _bf16_variables(later) <= _bf16_variables(schema)


def _bf16_variables(schema: defs.OpSchema) -> set[str]:
    return {
        c.type_param_str
        for c in schema.type_constraints
        if "tensor(bfloat16)" in c.allowed_type_strs
    }


_REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model with what is derived from it; ``proto`` must not change any more.

    For a lifted model, ``stored_inputs`` are the FP32 casts of its reduced inputs and
    ``stored_outputs`` its reduced outputs with their types. ``derived`` is a memo of other modules.
    """

    proto: onnx.ModelProto
    stored_inputs: frozenset[str] = frozenset()
    stored_outputs: Mapping[str, int] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _roles: dict[tuple[int, Precision], Role] = field(default_factory=dict, init=False, repr=False)
    _raised: dict[int, Graph] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The unique id of each node of the main graph, in the file's order."""
        return tuple(node_names(self.proto.graph.node))

    def named_nodes(self) -> Iterator[tuple[onnx.NodeProto, str]]:
        """The nodes of the main graph with their ids, in the file's order."""
        return zip(self.proto.graph.node, self.names, strict=True)

    @cached_property
    def types(self) -> Scope:
        """The element type of every tensor, bodies included."""
        return infer_types(self.proto)

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators."""
        return opset_of(self.proto)

    @cached_property
    def constants(self) -> Constants:
        """Every constant tensor of the main graph by name: initialisers and Constant nodes."""
        return Constants(self.proto.graph)

    @cached_property
    def float_constants(self) -> Constants:
        """The constants of type FP32."""
        return self.constants.of_type(FLOAT)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The nodes that can run at FP16, BF16 or TF32, in the file's order."""
        found = []
        for index, (node, name) in enumerate(self.named_nodes()):
            precisions = frozenset(p for p in _REDUCED if self.role(index, p).kind is Kind.LAYER)
            if precisions:
                # Interned, because each access to a message makes a new string.
                outputs = tuple(
                    intern(o) for o in node.output if o and self.types.type_of(o) == FLOAT
                )
                inputs = tuple(intern(i) for i in node.input if i)
                found.append(Layer(name, node.op_type, index, outputs, inputs, precisions))
        return tuple(found)

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """The first float tensors computed from integer inputs."""
        return list_lookups(self.proto, self.layers, self.float_constants)

    @cached_property
    def discrete(self) -> frozenset[str]:
        """The float inputs that become integers or truth values."""
        return discrete_inputs(self.proto.graph, self.types)

    @cached_property
    def after_lookups(self) -> Graph:
        """The same model with :attr:`lookups` as further inputs."""
        return Graph(after_lookups(self.proto, self.lookups))

    def taking(self, inputs: Iterable[str]) -> Graph:
        """The form of the model that takes ``inputs``: itself, or :attr:`after_lookups`."""
        sources = {lookup.source for lookup in self.lookups}
        return self if sources.isdisjoint(inputs) else self.after_lookups

    @cached_property
    def quantised(self) -> bool:
        """Whether a node, in a body too, quantises or dequantises."""
        return not QUANTISES.isdisjoint(operators(self.proto.graph.node))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs."""
        return tuple(o.name for o in self.proto.graph.output)

    def layers_at(self, precision: Precision) -> tuple[Layer, ...]:
        """The layers that can run at ``precision``."""
        return tuple(layer for layer in self.layers if precision in layer.precisions)

    def role(self, index: int, precision: Precision) -> Role:
        """What node ``index`` of the main graph may do at ``precision``."""
        key = (index, precision)
        if key not in self._roles:
            node = self.proto.graph.node[index]
            if node.op_type == "Cast" and node.output[0] in self.stored_inputs:
                precision = Precision.FP32  # its values come from a reduced input
            self._roles[key] = role_of(node, self.types, self.opset, precision)
        return self._roles[key]

    def raised(self, target: int) -> Graph:
        """The same model at opset ``target``.

        Raises:
            BadInputError: ONNX's converter cannot do it.
        """
        if target not in self._raised:
            self._raised[target] = Graph(
                raised(self.proto, target),
                stored_inputs=self.stored_inputs,
                stored_outputs=self.stored_outputs,
            )
        return self._raised[target]

    def check_plan(self, plan: PrecisionPlan) -> None:
        """Refuses a plan of another model."""
        unknown = sorted(plan.pinned.difference(self.names))
        if unknown:
            raise BadInputError(
                f"plan: pins layer {unknown[0]!r}, which the model does not have "
                f"({len(unknown)} such); `bisect-trt inspect` lists the layers"
            )


def as_graph(model: onnx.ModelProto | Graph) -> Graph:
    """``model`` as a :class:`Graph`."""
    return model if isinstance(model, Graph) else Graph(model)


def list_layers(model: onnx.ModelProto | Graph) -> list[Layer]:
    """The layers of ``model`` in the file's order, which is topological.

    A layer is a node with an FP32 output that can run at FP16, BF16 or TF32. Integer nodes, custom
    domains, Q/DQ and operators that are never reduced are none.
    """
    return list(as_graph(model).layers)
