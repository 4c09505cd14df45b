"""Raising a model's opset where BF16 needs it, and advice about the opset a model has.

``Cast`` knows bfloat16 from opset 13 on, most operators too, the convolutions and pools from 22 on.
ONNX's own version converter does the work; layers keep their ids, because the names are made unique
before.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import defs

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.layers import list_layers, node_names, with_unique_names
from bisect_trt.graph.operator_rules import schema_of
from bisect_trt.graph.tensor_types import opset_of, subgraphs

PRODUCTS_BROADCAST = 7
"""ONNX Runtime has no products and differences of an earlier opset, which TF32's rounding is made
of.
"""

CAST_HAS_BF16 = 13
ALL_HAVE_BF16 = 22
HAS_LAYER_NORMALIZATION = 17


def with_roundings(model: onnx.ModelProto, base: Precision) -> onnx.ModelProto:
    """``model``, or a copy at the first opset in which the roundings to ``base``, and to TF32, can
    be written and run.

    A model before opset 7 that cannot be converted stays as it is: only its TF32 baseline then
    cannot be run.
    """
    if base is Precision.BF16:
        return raised(model, CAST_HAS_BF16) if opset_of(model) < CAST_HAS_BF16 else model
    if opset_of(model) >= PRODUCTS_BROADCAST:
        return model
    try:
        return raised(model, PRODUCTS_BROADCAST)
    except BadInputError:
        return model


def with_bf16_operators(model: onnx.ModelProto, plan: PrecisionPlan) -> onnx.ModelProto:
    """``model``, or a copy at opset 22 where an operator that ``plan`` lowers has no BF16 form in
    its own opset.
    """
    lowered = {layer.index for layer in list_layers(model) if layer.name not in plan.pinned}
    ops = _operators(node for index, node in enumerate(model.graph.node) if index in lowered)
    return raised(model, ALL_HAVE_BF16) if lacks_bf16(ops, opset_of(model)) else model


def lacks_bf16(ops: set[str], opset: int) -> bool:
    """True if one of the operators ``ops`` (or the casts beside them) has no BF16 form in ``opset``
    but in a later one.
    """
    if not ops or opset >= ALL_HAVE_BF16:
        return False
    return opset < CAST_HAS_BF16 or not all(_has_bf16(op, opset) for op in ops)


def _operators(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The operator types of ``nodes`` and of everything in their bodies."""
    found = set()
    for node in nodes:
        found.add(node.op_type)
        for _, body in subgraphs(node):
            found |= _operators(body.node)
    return found


def raised(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """A copy of ``model`` at opset ``target``. Raises :class:`BadInputError` where the converter
    cannot do it.
    """
    named = with_unique_names(model)
    try:
        converted = onnx.version_converter.convert_version(named, target)
    except Exception as error:  # the converter raises whatever its C++ adapters throw
        raise BadInputError(
            f"model: the precision needs opset {target} and opset {opset_of(model)} cannot be "
            "converted "
            f"({one_line(error, 120)}); export the model again with opset {target}"
        ) from error
    del converted.functions[:]  # the converter drops them, and the imports of their domains
    converted.functions.extend(named.functions)
    known = {o.domain for o in converted.opset_import}
    converted.opset_import.extend(o for o in named.opset_import if o.domain not in known)
    return converted


def with_new_nodes_pinned(
    source: onnx.ModelProto, converted: onnx.ModelProto, plan: PrecisionPlan
) -> PrecisionPlan:
    """``plan`` with pins on the nodes that raising the opset added: they are nobody's layers."""
    if converted is source:
        return plan
    added = set(node_names(converted.graph.node)) - set(node_names(source.graph.node))
    return plan.with_pins(plan.pinned | added)


def _has_bf16(op_type: str, opset: int) -> bool:
    schema, newest = schema_of(op_type, opset), schema_of(op_type, defs.onnx_opset_version())
    if schema is None or newest is None:
        return True
    return _bf16_variables(newest) <= _bf16_variables(schema)


def _bf16_variables(schema: defs.OpSchema) -> set[str]:
    return {
        c.type_param_str
        for c in schema.type_constraints
        if "tensor(bfloat16)" in c.allowed_type_strs
    }
