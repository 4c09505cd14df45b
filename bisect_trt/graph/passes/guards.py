"""NaN and infinities that ONNX Runtime's CPU kernels swallow, put back into the emulated model.

An engine gives NaN where a recurrent layer reads NaN; ONNX Runtime's LSTM and GRU with a bias give
finite numbers, and a plan that is broken on hardware would pass. Which kernels do so was found by
running every operator that may beside ONNX's reference evaluator
(``tests/graph/test_guards.py``, onnxruntime 1.32.0). The rest keep what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

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

_HAS_IS_NAN, _BOUNDS_ARE_INPUTS, _AXES_ARE_INPUTS = 9, 11, 18


def guarded(
    node: onnx.NodeProto, floats: Collection[int], fresh: Callable[[str], str], opset: int
) -> list[onnx.NodeProto]:
    """``node`` and what puts back the NaN that its kernel swallows; ``node`` alone where it
    swallows none.

    Args:
        node: with its final inputs and outputs; changed in place.
        floats: its input slots that hold FP32 tensors.
        fresh: makes names that nothing uses yet.
        opset: of the model.
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
    if opset >= _HAS_IS_NAN:
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
    if opset >= _AXES_ARE_INPUTS:
        axes = fresh(f"{name}__axes")
        made.append(_constant(axes, np.asarray([axis], np.int64)))
        made.append(helper.make_node("ReduceMax", [seen, axes], [found], keepdims=keeps))
    else:
        made.append(helper.make_node("ReduceMax", [seen], [found], axes=[axis], keepdims=keeps))
    if opset >= _HAS_IS_NAN:
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
    if opset < _BOUNDS_ARE_INPUTS:
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
