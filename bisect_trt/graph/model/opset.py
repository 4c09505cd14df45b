"""Which opset BF16 and the roundings need, and raising a model to it.

``Cast`` knows bfloat16 from opset 13 on, most operators too, the convolutions and pools from 22 on.
ONNX's own version converter does the work; layers keep their ids, because the names are made unique
before.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto, defs, helper

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.graph.model.layers import with_unique_names
from bisect_trt.graph.tensors.constants import Constants
from bisect_trt.graph.tensors.operator_rules import HAVE_BF16, schema_of
from bisect_trt.graph.tensors.tensor_types import opset_of, subgraphs

PRODUCTS_BROADCAST = 7
"""ONNX Runtime has no products and differences of an earlier opset, which TF32's rounding is made
of."""

CAST_HAS_BF16 = 13
HAS_LAYER_NORMALIZATION = 17

_RESIZE_SAYS_WHERE = 11

_OTHERWISE = {"Scan": (1, 9), "Hardmax": (1, 13), "GroupNormalization": (18, 21)}
"""Operators that ONNX's converter carries over as they are, the opset they are in from, and the one
from which on they mean something else: a scan without a batch, one axis in place of all from it on,
a scale for each channel in place of each group."""


def lacks_bf16(ops: set[str], opset: int) -> bool:
    """True if one of the operators ``ops`` (or the casts beside them) has no BF16 form in ``opset``
    but in a later one.
    """
    if not ops or opset >= HAVE_BF16:
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

    Where ONNX's converter writes nodes that mean something else, they are mended or refused: a
    ``Resize`` before opset 11 took pixels' corners, and later ones say so.

    Raises:
        BadInputError: the converter cannot do it, or not without changing what is computed.
    """
    named, before = with_unique_names(model), opset_of(model)
    present = operators(named.graph.node)
    for op_type, (first, changed) in _OTHERWISE.items():
        if first <= before < changed <= target and op_type in present:
            raise BadInputError(
                f"model: the precision needs opset {target}, and {op_type} means something else "
                f"from opset {changed} on; export the model again with opset {target}"
            )
    if before < _RESIZE_SAYS_WHERE <= target:
        _check_resizes(named.graph, target)
    of = {node.output[0]: node for node in named.graph.node if node.output and node.output[0]}
    try:
        converted = onnx.version_converter.convert_version(named, target)
    except Exception as error:  # the converter raises whatever its C++ adapters throw
        raise BadInputError(
            f"model: the precision needs opset {target} and opset {opset_of(model)} cannot be "
            f"converted ({one_line(error, 120)}); export the model again with opset {target}"
        ) from error
    taken = {node.name for node in converted.graph.node}
    for node in converted.graph.node:
        source = of.get(node.output[0]) if node.output else None
        if source is None:
            continue
        if not node.name and source.name not in taken:  # the converter drops an Upsample's
            node.name = source.name
        if node.op_type == "Resize" and before < _RESIZE_SAYS_WHERE:
            _as_before(node)
    del converted.functions[:]  # the converter drops them, and the imports of their domains
    converted.functions.extend(named.functions)
    known = {o.domain for o in converted.opset_import}
    converted.opset_import.extend(o for o in named.opset_import if o.domain not in known)
    return converted


def _check_resizes(graph: onnx.GraphProto, target: int) -> None:
    """Refuse those of opset 10 that are not mended: in bodies, and nearest ones that may shrink.

    Raises:
        BadInputError: names the node.
    """
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


def _as_before(node: onnx.NodeProto) -> None:
    """Let a ``Resize`` compute what one of opset 10 does."""
    meant = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    said = {a.name for a in node.attribute}
    node.attribute.extend(helper.make_attribute(k, v) for k, v in meant.items() if k not in said)


def has_bf16(op_type: str, opset: int) -> bool:
    """False where ``op_type`` has no BF16 form in ``opset``, and one in opset 22."""
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
