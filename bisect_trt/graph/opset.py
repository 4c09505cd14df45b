"""Which opset BF16 and the roundings need, and raising a model to it.

``Cast`` knows bfloat16 from opset 13 on, most operators too, the convolutions and pools from 22 on.
ONNX's own version converter does the work; layers keep their ids, because the names are made unique
before.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import defs

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.graph.layers import with_unique_names
from bisect_trt.graph.operator_rules import schema_of
from bisect_trt.graph.tensor_types import opset_of, subgraphs

PRODUCTS_BROADCAST = 7
"""ONNX Runtime has no products and differences of an earlier opset, which TF32's rounding is made
of."""

CAST_HAS_BF16 = 13
ALL_HAVE_BF16 = 22
HAS_LAYER_NORMALIZATION = 17


def lacks_bf16(ops: set[str], opset: int) -> bool:
    """True if one of the operators ``ops`` (or the casts beside them) has no BF16 form in ``opset``
    but in a later one.
    """
    if not ops or opset >= ALL_HAVE_BF16:
        return False
    return opset < CAST_HAS_BF16 or not all(has_bf16(op, opset) for op in ops)


def operators(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The operator types of ``nodes`` and of everything in their bodies."""
    found = set()
    for node in nodes:
        found.add(node.op_type)
        for _, body in subgraphs(node):
            found |= operators(body.node)
    return found


def raised(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """A copy of ``model`` at opset ``target``.

    Raises:
        BadInputError: the converter cannot do it.
    """
    named = with_unique_names(model)
    try:
        converted = onnx.version_converter.convert_version(named, target)
    except Exception as error:  # the converter raises whatever its C++ adapters throw
        raise BadInputError(
            f"model: the precision needs opset {target} and opset {opset_of(model)} cannot be "
            f"converted ({one_line(error, 120)}); export the model again with opset {target}"
        ) from error
    del converted.functions[:]  # the converter drops them, and the imports of their domains
    converted.functions.extend(named.functions)
    known = {o.domain for o in converted.opset_import}
    converted.opset_import.extend(o for o in named.opset_import if o.domain not in known)
    return converted


def has_bf16(op_type: str, opset: int) -> bool:
    """False where ``op_type`` has a BF16 form in a later opset than ``opset`` only."""
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
