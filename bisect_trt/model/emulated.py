"""The model that shows FP16, BF16 or TF32 on any machine: FP32 with explicit roundings.

A reduced FP16 or BF16 layer gets its float inputs rounded, computes in FP32 (as tensor cores
accumulate) and has its outputs rounded. Rounding is ``Cast`` down and ``Cast`` back, a pair that
ONNX Runtime keeps at every optimisation level. TF32 rounds only the operands of matrix products and
convolutions, by Veltkamp's splitting in three FP32 operations. What is infinite in FP32 itself, or
beyond 4e34, becomes NaN: two further operations would mend that, and double a small model's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.rounding import TF32_SPLITTER
from bisect_trt.model.graph import CAST_HAS_BF16, Graph, as_graph
from bisect_trt.model.layers import Role
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, STORAGE_TYPE
from bisect_trt.model.rewriter import Frame, Rewriter
from bisect_trt.model.roundings import is_rounded, with_new_nodes_pinned, with_roundings
from bisect_trt.model.tensor_types import Scope

RECURRENT = frozenset({"LSTM", "GRU"})
"""Give finite numbers for NaN. An infinity that they read counts too: gates hide it."""

MAXIMA = frozenset({"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin"})
"""Leave a NaN out of the comparison, at some places of a window or at all."""

PLACES = frozenset({"ArgMax", "ArgMin"})
"""Give a place that is not the NaN's."""

SWALLOWING = RECURRENT | MAXIMA | PLACES | {"Clip"}
"""Clip without one of its bounds turns an infinity into the largest number there."""

LOST = int(np.iinfo(np.int64).min)
"""The integer that a cast of NaN gives on x86, and that stands for the place of a NaN here."""

# The opsets from which on IsNaN exists, Clip's bounds are inputs, and so are reductions' axes.
_IS_NAN_OPSET = 9
_BOUNDS_OPSET = 11
_AXES_OPSET = 18


def guarded(
    node: onnx.NodeProto, floats: Collection[int], fresh: Callable[[str], str], opset: int
) -> list[onnx.NodeProto]:
    """``node`` and what puts back the NaN that its kernel swallows; ``node`` alone where it
    swallows none.
    """
    if node.domain not in ("", "ai.onnx") or 0 not in floats:
        return [node]
    if node.op_type in RECURRENT:
        return _recurrent(node, sorted(floats), fresh)
    if node.op_type == "Clip":
        return _clip(node, fresh, opset)
    if node.op_type in MAXIMA:
        return _maximum(node, fresh, opset)
    return _place(node, fresh, opset) if node.op_type in PLACES else [node]


def _is_nan(name: str, given: str, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """What makes the truth values ``given``: whether those of ``name`` are NaN, which are neither
    below 1 nor above -1.
    """
    if opset >= _IS_NAN_OPSET:
        return [helper.make_node("IsNaN", [name], [given])]
    one, less, below, above, either = (
        fresh(f"{given}_{what}") for what in ("one", "less", "below", "above", "either")
    )
    return [
        _constant(one, np.float32(1.0)),
        _constant(less, np.float32(-1.0)),
        helper.make_node("Less", [name, one], [below]),
        helper.make_node("Greater", [name, less], [above]),
        helper.make_node("Or", [below, above], [either]),
        helper.make_node("Not", [either], [given]),
    ]


def _recurrent(
    node: onnx.NodeProto, floats: list[int], fresh: Callable[[str], str]
) -> list[onnx.NodeProto]:
    """All outputs plus the sum of zero times whatever is read: zero, or NaN."""
    zero = fresh("zero")
    made, sums = [_constant(zero, np.float32(0.0))], []
    for slot in floats:
        product, total = fresh(f"{zero}_times"), fresh(f"{zero}_sum")
        made.append(helper.make_node("Mul", [node.input[slot], zero], [product]))
        made.append(helper.make_node("ReduceSum", [product], [total], keepdims=0))
        sums.append(total)
    lost = fresh("lost")
    made.append(helper.make_node("Sum", sums, [lost]))
    after = []
    for slot, name in enumerate(node.output):
        if name:
            node.output[slot] = fresh(f"{name}__kernel")
            after.append(helper.make_node("Add", [node.output[slot], lost], [name]))
    return [*made, node, *after]


def _maximum(node: onnx.NodeProto, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """The first output plus 0 / 0 where the same operator meets a NaN, else 0 / 1."""
    name = node.output[0]
    broken, seen, found = (fresh(f"{name}__{what}") for what in ("nan", "seen", "found"))
    one, zero, rest, lost = (fresh(f"{name}__{what}") for what in ("one", "zero", "rest", "lost"))
    node.output[0] = fresh(f"{name}__kernel")
    again = onnx.NodeProto()
    again.CopyFrom(node)
    again.name = fresh(f"{node.name}__nan")
    again.input[0] = seen
    del again.output[1:]
    again.output[0] = found
    negated = fresh(f"{name}__turned") if node.op_type == "ReduceMin" else ""
    if negated:  # the smallest of minus one and zero
        again.input[0] = negated
    return [
        node,
        *_is_nan(node.input[0], broken, fresh, opset),
        helper.make_node("Cast", [broken], [seen], to=TensorProto.FLOAT),
        *([helper.make_node("Neg", [seen], [negated])] if negated else []),
        again,
        _constant(one, np.float32(1.0)),
        _constant(zero, np.float32(0.0)),
        helper.make_node("Add" if negated else "Sub", [one, found], [rest]),
        helper.make_node("Div", [zero, rest], [lost]),
        helper.make_node("Add", [node.output[0], lost], [name]),
    ]


def _place(node: onnx.NodeProto, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """:data:`LOST` for a decision among values of which one is NaN."""
    name = node.output[0]
    told = {a.name: a.i for a in node.attribute}
    axis, keeps = told.get("axis", 0), told.get("keepdims", 1)
    broken, seen, found, is_lost, lost = (
        fresh(f"{name}__{what}") for what in ("nan", "seen", "found", "is_lost", "lost")
    )
    node.output[0] = fresh(f"{name}__kernel")
    made = [
        node,
        *_is_nan(node.input[0], broken, fresh, opset),
        helper.make_node("Cast", [broken], [seen], to=TensorProto.FLOAT),
        _constant(lost, np.int64(LOST)),
    ]
    if opset >= _AXES_OPSET:
        axes = fresh(f"{name}__axes")
        made.append(_constant(axes, np.asarray([axis], np.int64)))
        made.append(helper.make_node("ReduceMax", [seen, axes], [found], keepdims=keeps))
    else:
        made.append(helper.make_node("ReduceMax", [seen], [found], axes=[axis], keepdims=keeps))
    if opset >= _IS_NAN_OPSET:
        made.append(helper.make_node("Cast", [found], [is_lost], to=TensorProto.BOOL))
        made.append(helper.make_node("Where", [is_lost, lost, node.output[0]], [name]))
        return made
    one, rest, kept, put = (fresh(f"{name}__{what}") for what in ("one", "rest", "kept", "put"))
    return [
        *made,
        helper.make_node("Cast", [found], [is_lost], to=TensorProto.INT64),
        _constant(one, np.int64(1)),
        helper.make_node("Sub", [one, is_lost], [rest]),
        helper.make_node("Mul", [node.output[0], rest], [kept]),
        helper.make_node("Mul", [is_lost, lost], [put]),
        helper.make_node("Add", [kept, put], [name]),
    ]


def _clip(node: onnx.NodeProto, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """The bound that is not given is infinite, not the largest number."""
    ends = {1: -np.inf, 2: np.inf}
    if opset < _BOUNDS_OPSET:
        given = {attribute.name for attribute in node.attribute}
        for name, end in (("min", -np.inf), ("max", np.inf)):
            if name not in given:
                node.attribute.append(helper.make_attribute(name, float(end)))
        return [node]
    made = []
    while len(node.input) < len(ends) + 1:
        node.input.append("")
    for slot, end in ends.items():
        if not node.input[slot]:
            node.input[slot] = fresh("unbounded")
            made.append(_constant(node.input[slot], np.float32(end)))
    return [*made, node]


def _constant(name: str, value: np.generic | np.ndarray) -> onnx.NodeProto:
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(np.asarray(value))
    )


def to_emulated(model: onnx.ModelProto | Graph, plan: PrecisionPlan) -> onnx.ModelProto:
    """``model`` with the roundings of ``plan`` as explicit nodes.

    Args:
        model: an FP32 model; a :class:`Graph` where several plans are written of one model.
        plan: the base precision and the layers that stay FP32.

    Returns:
        A model whose every tensor keeps its FP32 type and its name.

    Raises:
        BadInputError: the plan pins a layer that the model does not have.
    """
    graph = as_graph(model)
    graph.check_plan(plan)
    capable = with_roundings(graph, plan.base)
    return EmulationRewriter(capable, with_new_nodes_pinned(graph, capable, plan)).rewrite()


def rounding_model(precision: Precision) -> onnx.ModelProto:
    """A model that rounds its input ``x`` (float32, any shape) to ``precision`` and gives ``y`` of
    the same shape.
    """
    value = [helper.make_tensor_value_info(n, FLOAT, None) for n in ("x", "y")]
    target = helper.make_graph([], "rounding", value[:1], value[1:])
    rewriter = EmulationRewriter(Graph(onnx.ModelProto()), PrecisionPlan(precision))
    frame = Frame(Scope(), target, None)
    rewriter.round(frame, "x", "y", precision)
    return helper.make_model(
        target, opset_imports=[helper.make_opsetid("", CAST_HAS_BF16)], ir_version=8
    )


class EmulationRewriter(Rewriter):
    """``rounded_inputs`` names the graph inputs that arrive rounded already, so that no nodes are
    spent on them.
    """

    def __init__(
        self,
        graph: Graph,
        plan: PrecisionPlan,
        *,
        rounded_inputs: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(graph, plan)
        self._rounded_inputs = rounded_inputs

    def chosen(self, precision: Precision) -> Precision:
        return precision

    def read(self, frame: Frame, name: str, precision: Precision) -> str:
        owner = frame.owner(name)
        if is_rounded(owner.state.get(name, Precision.FP32), precision):
            return name
        if owner.parent is None and name in self._rounded_inputs:
            return name
        return super().read(frame, name, precision)

    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        version = self.fresh(f"{name}__{precision}")
        self.round(frame, name, version, precision)
        return version

    def stored_as(self, precision: Precision) -> int:
        return FLOAT

    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        names = [(slot, node.output[slot]) for slot in role.reduced_out]
        frame.state.update((name, precision) for _, name in names)
        if node.op_type in CONTROL_FLOW:  # a reduced body rounds what it gives
            frame.graph.node.append(node)
            return
        raw = {name: self.fresh(f"{name}__raw") for _, name in names}
        for slot, name in names:
            node.output[slot] = raw[name]
        self.append(node, role, frame)
        for _, name in names:
            self.round(frame, raw[name], name, precision)

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        frame.graph.node.extend(guarded(node, role.float_in, self.fresh, self.source.opset))

    def enter_body(self, frame: Frame, precision: Precision) -> None:
        for value in frame.graph.input:
            if frame.scope.type_of(value.name) == FLOAT:
                frame.state[value.name] = precision

    def round(self, frame: Frame, source: str, target: str, precision: Precision) -> None:
        """Append the nodes that make ``target`` from ``source``, rounded to ``precision``."""
        if precision is Precision.TF32:
            self._split(frame, source, target)
            return
        stored = self.fresh(f"{target}__stored")
        down = helper.make_node(
            "Cast", [source], [stored], self.fresh(f"down_{target}"), to=STORAGE_TYPE[precision]
        )
        up = helper.make_node("Cast", [stored], [target], self.fresh(f"up_{target}"), to=FLOAT)
        frame.graph.node.extend([down, up])

    def _split(self, frame: Frame, source: str, target: str) -> None:
        splitter = self._splitter(frame)
        scaled, rest = self.fresh(f"{target}__scaled"), self.fresh(f"{target}__rest")
        frame.graph.node.extend(
            [
                helper.make_node(
                    "Mul", [source, splitter], [scaled], self.fresh(f"scale_{target}")
                ),
                helper.make_node("Sub", [scaled, source], [rest], self.fresh(f"rest_{target}")),
                helper.make_node("Sub", [scaled, rest], [target], self.fresh(f"high_{target}")),
            ]
        )

    def _splitter(self, frame: Frame) -> str:
        key = ("", Precision.TF32)
        if key not in frame.versions:
            name = self.fresh("tf32_splitter")
            frame.graph.initializer.append(numpy_helper.from_array(np.asarray(TF32_SPLITTER), name))
            frame.versions[key] = name
        return frame.versions[key]
