"""The float inputs that a model takes for integers or truth values."""

from __future__ import annotations

import onnx

from bisect_trt.graph.tensors.operator_rules import FLOAT, MOVES, is_standard
from bisect_trt.graph.tensors.tensor_types import Scope

_DECIDES = frozenset({"Equal", "NonZero", "OneHot"})
"""Operators that give something else as soon as a value is another, however near."""

_COMPUTES_WHOLE = frozenset(
    {
        "Abs",
        "Add",
        "Ceil",
        "Clip",
        "Div",
        "Floor",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Round",
        "Sub",
    }
)
"""Arithmetic that indices are made with (row * width + column) before they are cast."""

FLOATS = frozenset(
    {
        FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.DOUBLE,
    }
)


def discrete_inputs(graph: onnx.GraphProto, types: Scope) -> frozenset[str]:
    """The names of float inputs that are cast to integers or booleans, or asked for equality, as
    they are, moved, or behind arithmetic: ids, coordinates and masks, where their values are whole.

    Args:
        graph: the main graph; bodies are not looked into.
        types: of its tensors.
    """
    initialised = {t.name for t in graph.initializer}
    # The inputs that a tensor has its values from: a Concat takes them of several.
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
