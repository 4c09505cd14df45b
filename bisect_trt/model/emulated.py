"""Writes the emulated model: FP32 with every rounding of a plan as explicit nodes.

A reduced FP16 or BF16 layer has its inputs and outputs rounded and computes in FP32, as tensor
cores accumulate. TF32 rounds only the operands of matrix products and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.rounding import TF32_SPLITTER
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import Role
from bisect_trt.model.opsets import CAST_HAS_BF16, with_new_nodes_pinned, with_roundings
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, STORAGE_TYPE, is_standard
from bisect_trt.model.rewriter import Frame, Rewriter
from bisect_trt.model.roundings import is_rounded
from bisect_trt.model.tensor_types import Scope

# ONNX Runtime's kernels of some operators swallow a NaN or an infinity that an engine would show.
_RECURRENT = frozenset({"LSTM", "GRU"})
"""Operators that give finite numbers for NaN, and for infinities, which gates hide."""

_MAXIMA = frozenset({"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin"})
"""Operators that ignore a NaN, always or at some places of a window."""

_POOLS = frozenset({"MaxPool", "GlobalMaxPool"})
"""Operators that begin with the lowest number, and give it for minus infinities."""

_INDICES = frozenset({"ArgMax", "ArgMin"})
"""Operators that give the index of another element than the NaN."""

SWALLOWING = _RECURRENT | _MAXIMA | _INDICES | {"Clip", "QuantizeLinear"}
"""Operators that need a guard; Clip with one bound turns an infinity into the largest number.

A quantisation makes an integer of NaN; the layer that reads that integer gives NaN again.
"""

LOST = int(np.iinfo(np.int64).min)
"""The index of a NaN in a guarded model; x86 gives the same integer for a cast of NaN."""


def guarded(
    node: onnx.NodeProto,
    floats: Collection[int],
    fresh: Callable[[str], str],
    opset: int,
    quantised: dict[str, str],
) -> list[onnx.NodeProto]:
    """``node`` with nodes that restore the NaN which its kernel swallows, if it swallows any.

    ``quantised`` holds what each integer tensor was quantised from, and gets those of ``node``.
    """
    for name in node.output:  # of another branch, if it is there already
        quantised.pop(name, None)
    if is_standard(node) and node.op_type == "QuantizeLinear":
        quantised[node.output[0]] = node.input[0]
    if is_standard(node) and node.op_type == "DequantizeLinear" and node.input[0] in quantised:
        return _dequantised(node, quantised[node.input[0]], fresh)
    if not is_standard(node) or 0 not in floats:
        return [node]
    if node.op_type in _RECURRENT:
        return _recurrent(node, sorted(floats), fresh)
    if node.op_type == "Clip":
        return _clip(node, fresh, opset)
    if node.op_type in _MAXIMA:
        return _maximum(node, fresh, opset)
    return _index(node, fresh, opset) if node.op_type in _INDICES else [node]


def _is_nan(
    name: str, result: str, fresh: Callable[[str], str], opset: int
) -> list[onnx.NodeProto]:
    """Nodes that compute ``result``: which elements of ``name`` are NaN."""
    if opset >= 9:
        return [helper.make_node("IsNaN", [name], [result])]
    # A NaN is neither below 1 nor above -1.
    one, less, below, above, either = (
        fresh(f"{result}_{what}") for what in ("one", "less", "below", "above", "either")
    )
    return [
        _constant(one, np.float32(1.0)),
        _constant(less, np.float32(-1.0)),
        helper.make_node("Less", [name, one], [below]),
        helper.make_node("Greater", [name, less], [above]),
        helper.make_node("Or", [below, above], [either]),
        helper.make_node("Not", [either], [result]),
    ]


def _recurrent(
    node: onnx.NodeProto, floats: list[int], fresh: Callable[[str], str]
) -> list[onnx.NodeProto]:
    """Adds zero times every input to all outputs: zero, or NaN."""
    # NaN and infinity times zero are NaN, finite numbers times zero add nothing.
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
    """Adds 0 / 0 to the first output where the same operator meets a NaN, else 0 / 1.

    A pool of minus infinities gives the lowest number, which becomes minus infinity again.
    """
    name = node.output[0]
    is_nan, seen, found = (fresh(f"{name}__{what}") for what in ("nan", "seen", "found"))
    one, zero, rest, lost = (fresh(f"{name}__{what}") for what in ("one", "zero", "rest", "lost"))
    node.output[0] = fresh(f"{name}__kernel")
    # The kernel ignores NaN, but not a one where the NaN was: found is 1 in such a window, else 0.
    again = onnx.NodeProto()  # the same operator on ones where a NaN is, and zeros elsewhere
    again.CopyFrom(node)
    again.name = fresh(f"{node.name}__nan")
    again.input[0] = seen
    del again.output[1:]
    again.output[0] = found
    negated = fresh(f"{name}__turned") if node.op_type == "ReduceMin" else ""
    if negated:  # a minimum finds minus one, not one
        again.input[0] = negated
    is_pool = node.op_type in _POOLS and opset >= 9  # Where came with opset 9
    total = fresh(f"{name}__total") if is_pool else name
    return [
        node,
        *_is_nan(node.input[0], is_nan, fresh, opset),
        helper.make_node("Cast", [is_nan], [seen], to=TensorProto.FLOAT),
        *([helper.make_node("Neg", [seen], [negated])] if negated else []),
        again,
        _constant(one, np.float32(1.0)),
        _constant(zero, np.float32(0.0)),
        helper.make_node("Add" if negated else "Sub", [one, found], [rest]),
        helper.make_node("Div", [zero, rest], [lost]),
        helper.make_node("Add", [node.output[0], lost], [total]),
        *(_infinite_again(total, name, fresh) if is_pool else ()),
    ]


def _infinite_again(total: str, name: str, fresh: Callable[[str], str]) -> list[onnx.NodeProto]:
    """Nodes that give ``total`` as ``name``, the lowest number as minus infinity."""
    limit, low, end = (fresh(f"{name}__{what}") for what in ("limit", "low", "end"))
    lowest = np.finfo(np.float32).min
    return [
        _constant(limit, np.nextafter(lowest, np.float32(0.0))),
        _constant(end, np.float32(-np.inf)),
        helper.make_node("Less", [total, limit], [low]),
        helper.make_node("Where", [low, end, total], [name]),
    ]


def _index(node: onnx.NodeProto, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """Gives the index :data:`LOST` where one of the compared values is NaN."""
    name = node.output[0]
    attributes = {a.name: a.i for a in node.attribute}
    axis, keeps = attributes.get("axis", 0), attributes.get("keepdims", 1)
    is_nan, seen, found, is_lost, lost = (
        fresh(f"{name}__{what}") for what in ("nan", "seen", "found", "is_lost", "lost")
    )
    node.output[0] = fresh(f"{name}__kernel")
    made = [
        node,
        *_is_nan(node.input[0], is_nan, fresh, opset),
        helper.make_node("Cast", [is_nan], [seen], to=TensorProto.FLOAT),
        _constant(lost, np.int64(LOST)),
    ]
    if opset >= 18:  # ReduceMax takes its axes as an input
        axes = fresh(f"{name}__axes")
        made.append(_constant(axes, np.asarray([axis], np.int64)))
        made.append(helper.make_node("ReduceMax", [seen, axes], [found], keepdims=keeps))
    else:
        made.append(helper.make_node("ReduceMax", [seen], [found], axes=[axis], keepdims=keeps))
    # Selects by products, because there is no Where before opset 9.
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


def _dequantised(
    node: onnx.NodeProto, source: str, fresh: Callable[[str], str]
) -> list[onnx.NodeProto]:
    """Gives NaN where ``source`` was NaN before it was quantised."""
    name = node.output[0]
    is_nan = fresh(f"{name}__nan")
    node.output[0] = fresh(f"{name}__kernel")
    return [
        node,
        helper.make_node("IsNaN", [source], [is_nan]),
        helper.make_node("Where", [is_nan, source, node.output[0]], [name]),
    ]


def _clip(node: onnx.NodeProto, fresh: Callable[[str], str], opset: int) -> list[onnx.NodeProto]:
    """Makes a missing bound infinite, which the kernel takes for the largest number."""
    if opset < 11:  # bounds are attributes
        present = {attribute.name for attribute in node.attribute}
        for name, end in (("min", -np.inf), ("max", np.inf)):
            if name not in present:
                node.attribute.append(helper.make_attribute(name, float(end)))
        return [node]
    made = []
    while len(node.input) < 3:
        node.input.append("")
    for slot, end in ((1, -np.inf), (2, np.inf)):
        if not node.input[slot]:
            node.input[slot] = fresh("unbounded")
            made.append(_constant(node.input[slot], np.float32(end)))
    # With a given bound of infinity the kernel leaves infinities as they are.
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
    graph = as_graph(model).settled(plan)
    graph.check_plan(plan)
    capable = with_roundings(graph, plan.base)
    return EmulationRewriter(capable, with_new_nodes_pinned(graph, capable, plan)).rewrite()


def rounding_model(precision: Precision) -> onnx.ModelProto:
    """A model that rounds its FP32 input ``x`` of any shape to ``precision`` as ``y``."""
    # Without a shape, so that one session rounds tensors of any rank.
    value = [helper.make_tensor_value_info(n, FLOAT, None) for n in ("x", "y")]
    target = helper.make_graph([], "rounding", value[:1], value[1:])
    rewriter = EmulationRewriter(Graph(onnx.ModelProto()), PrecisionPlan(precision))
    frame = Frame(Scope(), target, None)
    rewriter.round(frame, "x", "y", precision)
    return helper.make_model(
        target, opset_imports=[helper.make_opsetid("", CAST_HAS_BF16)], ir_version=8
    )


class EmulationRewriter(Rewriter):
    """Writes roundings as nodes; ``rounded_inputs`` are graph inputs that are fed rounded."""

    def __init__(
        self,
        graph: Graph,
        plan: PrecisionPlan,
        *,
        rounded_inputs: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(graph, plan)
        self._rounded_inputs = rounded_inputs
        self._quantised: dict[str, str] = {}

    def read(self, frame: Frame, name: str, precision: Precision) -> str:
        owner = frame.owner(name)
        # Rounding is idempotent: what is rounded already needs no second node.
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
        # The rounded tensor keeps the name, so that readers and outputs need no change.
        raw = {name: self.fresh(f"{name}__raw") for _, name in names}
        for slot, name in names:
            node.output[slot] = raw[name]
        self.append(node, role, frame)
        for _, name in names:
            self.round(frame, raw[name], name, precision)

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        made = guarded(node, role.float_in, self.fresh, self.source.opset, self._quantised)
        frame.graph.node.extend(made)

    def round(self, frame: Frame, source: str, target: str, precision: Precision) -> None:
        """Appends the nodes that round ``source`` to ``precision`` as ``target``."""
        if precision is Precision.TF32:
            self._split(frame, source, target)
            return
        # ONNX Runtime keeps this pair of Casts at every optimisation level.
        stored = self.fresh(f"{target}__stored")
        down = helper.make_node(
            "Cast", [source], [stored], self.fresh(f"down_{target}"), to=STORAGE_TYPE[precision]
        )
        up = helper.make_node("Cast", [stored], [target], self.fresh(f"up_{target}"), to=FLOAT)
        frame.graph.node.extend([down, up])

    def _split(self, frame: Frame, source: str, target: str) -> None:
        """Appends Veltkamp's splitting, which keeps the upper mantissa bits of ``source``."""
        # Infinities and values beyond 4e34 become NaN: two more nodes per tensor would mend that.
        # TF32 has FP32's range and 10 explicit mantissa bits; ONNX has no type for it.
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
