"""Raises models to an opset that has the operators which a precision needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, defs, helper

from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.precision_rules import HAVE_BF16, schema_of
from bisect_trt.model.tensor_values import Constants
from bisect_trt.model.walk import operators, opset_of, subgraphs

if TYPE_CHECKING:  # Graph raises itself by this module
    from bisect_trt.model.graph import Graph

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
    # The converter may rename or replace nodes, but not their outputs.
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
    # Older schemas of some operators lack the type although nothing else changed.
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


def with_roundings(graph: Graph, base: Precision) -> Graph:
    """``graph``, raised if its opset lacks the operators that round to ``base`` and TF32."""
    if base is Precision.BF16:
        return graph.raised(CAST_HAS_BF16) if graph.opset < CAST_HAS_BF16 else graph
    if graph.opset >= 7:  # Mul and Sub broadcast, as the rounding to TF32 needs
        return graph
    try:
        return graph.raised(7)
    except BadInputError:  # the model then runs without a TF32 baseline
        return graph


def with_bf16_operators(graph: Graph, plan: PrecisionPlan) -> Graph:
    """``graph``, raised to opset 22 if a reduced operator has no BF16 form in its opset."""
    return graph.raised(HAVE_BF16) if _lacks_bf16(graph, plan) else graph


def check_can_be_written(graph: Graph, plan: PrecisionPlan) -> None:
    """Refuses a model for which ``plan`` cannot be written, before a search is in vain."""
    if plan.base is Precision.BF16 and _lacks_bf16(graph, plan):
        raised(graph.proto, HAVE_BF16)  # not Graph.raised, which would keep a second model


def _lacks_bf16(graph: Graph, plan: PrecisionPlan) -> bool:
    """Whether a reduced operator has no BF16 form in the model's opset."""
    nodes = graph.proto.graph.node
    reduced = operators(nodes[x.index] for x in graph.layers if x.name not in plan.pinned)
    return lacks_bf16(reduced, graph.opset)


def with_new_nodes_pinned(source: Graph, converted: Graph, plan: PrecisionPlan) -> PrecisionPlan:
    """``plan`` with the nodes pinned that raising the opset added, which are no layers."""
    if converted is source:
        return plan
    return plan.with_pins(plan.pinned.union(set(converted.names).difference(source.names)))
