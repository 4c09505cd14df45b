"""Numbers of dimensions that ONNX's shape inference leaves open: behind a Reshape whose shape is
computed it gives up, though the shape's length says the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

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
    """Add to ``ranks`` what follows from a Reshape's shape, and from that on.

    Args:
        graph: its nodes in their order; bodies are not looked into.
        ranks: by tensor, what is known so far.
        lengths: of one-dimensional tensors.
    """
    known = _Known(graph, ranks, lengths)
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


class _Known:
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
