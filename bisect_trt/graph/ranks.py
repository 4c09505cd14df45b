"""Numbers of dimensions that ONNX's shape inference leaves open: behind a Reshape whose shape is
computed it gives up, though the shape's length says the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

_AS_FIRST = frozenset(
    {
        "BatchNormalization",
        "Cast",
        "Clip",
        "Dropout",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LayerNormalization",
        "LeakyRelu",
        "LogSoftmax",
        "Neg",
        "PRelu",
        "Relu",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Sqrt",
        "Tanh",
        "Transpose",
    }
)
_AS_LARGEST = frozenset({"Add", "Concat", "Div", "MatMul", "Max", "Min", "Mul", "Pow", "Sub"})


def complete_ranks(
    graph: onnx.GraphProto, ranks: dict[str, int], lengths: Mapping[str, int]
) -> None:
    """Add to ``ranks`` what follows from a Reshape's shape, and from that on.

    Args:
        graph: its nodes in their order; bodies are not looked into.
        ranks: by tensor, what is known so far.
        lengths: of one-dimensional tensors.
    """
    known = {t.name: len(t.dims) for t in graph.initializer} | ranks
    sizes = {t.name: t.dims[0] for t in graph.initializer if len(t.dims) == 1} | dict(lengths)
    for node in graph.node:
        if not node.output or node.output[0] in known or node.domain not in ("", "ai.onnx"):
            continue
        of = [known.get(name) for name in node.input if name]
        found: int | None = None
        if not of:  # an invalid model: who reads it later says so
            continue
        if node.op_type == "Reshape" and len(node.input) > 1:
            found = sizes.get(node.input[1])
        elif node.op_type in _AS_FIRST:
            found = of[0]
        elif node.op_type in _AS_LARGEST and None not in of:
            found = max(rank for rank in of if rank is not None)
            if node.op_type == "MatMul" and 1 in of:  # a vector's dimension is summed away
                found = None
        if found is not None:
            known[node.output[0]] = ranks[node.output[0]] = found
