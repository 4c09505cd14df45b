"""The proof: it takes what is right and helps, and refuses every edit with a fault in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.sample import Sample
from bisect_trt.repair.edits import Edit, Rule, applied
from bisect_trt.repair.rules import PROPOSE
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.fp32_proof import fp32_change, probes_of
from bisect_trt.steps.problem import load
from bisect_trt.steps.repair import Refused, Repair, find_repair
from fixtures.build import GraphBuilder
from tests.repair.graphs import graph_of, ranges_of
from tests.repair.test_rules import (
    LOWEST,
    attention,
    batch_norm,
    masked_feed,
    normal,
    normalised,
)

Feed = dict[str, NDArray[Any]]


def scaled() -> tuple[onnx.ModelProto, Feed]:
    """A Gemm with a bias, read by an RMSNorm and by a Sigmoid; it leaves FP16's range."""
    b = GraphBuilder(31, opset=17)
    big = b.op("Gemm", "x", b.normal(8, 8, scale=4e4), b.normal(8, scale=5e4))
    mean = b.op("ReduceMean", b.op("Pow", big, b.weight(2.0)), axes=[-1], keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.weight(3e4)))
    b.rename_output(b.op("Mul", b.op("Div", big, root), b.normal(8)), "y")
    b.rename_output(b.op("Sigmoid", b.op("Mul", big, b.weight(1e-5))), "gate")
    return b.model({"x": [4, 8]}, {"y": [4, 8], "gate": [4, 8]}), {"x": normal(32, 4, 8)}


def folded() -> tuple[onnx.ModelProto, Feed]:
    b = GraphBuilder(33, opset=17)
    y = batch_norm(b, b.op("Conv", "x", b.normal(6, 4, 1, 1, scale=1e4), b.normal(6)), 6, 1e8)
    b.rename_output(y, "y")
    return b.model({"x": [1, 4, 8, 8]}, {"y": [None] * 4}), {"x": normal(34, 1, 4, 8, 8)}


def summed() -> tuple[onnx.ModelProto, Feed]:
    b = GraphBuilder(35, opset=17)
    total = b.op("ReduceSum", b.op("Exp", "x"), b.weight([-1], np.int64), keepdims=1)
    b.rename_output(b.op("Log", total), "y")
    return b.model({"x": [4, 8]}, {"y": [4, 1]}), {"x": normal(36, 4, 8, scale=4.0) + 12}


def shifted() -> tuple[onnx.ModelProto, Feed]:
    b = GraphBuilder(37, opset=17)
    x = b.op("MatMul", "x", b.normal(8, 8))
    x = b.op("Add", x, b.weight(b.random.standard_normal(8) + 300.0))
    b.rename_output(b.op("LayerNormalization", x, b.normal(8)), "y")
    return b.model({"x": [4, 8]}, {"y": [4, 8]}), {"x": normal(38, 4, 8)}


def joined() -> tuple[onnx.ModelProto, Feed]:
    b = GraphBuilder(39, opset=17)
    pooled = b.op("GlobalAveragePool", b.op("Mul", "x", b.weight(3e4)))
    b.rename_output(b.op("Div", pooled, b.weight(1.5e4)), "y")
    return b.model({"x": [1, 4, 8, 8]}, {"y": [1, 4, 1, 1]}), {"x": normal(40, 1, 4, 8, 8) + 5}


def fused() -> tuple[onnx.ModelProto, Feed]:
    b = GraphBuilder(41, opset=17)
    centred = b.op("Sub", "x", b.op("ReduceMean", "x", axes=[-1], keepdims=1))
    variance = b.op("ReduceMean", b.op("Pow", centred, b.weight(2.0)), axes=[-1], keepdims=1)
    y = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.weight(1e-2))))
    b.rename_output(b.op("Add", b.op("Mul", y, b.normal(8)), b.normal(8)), "y")
    return b.model({"x": [4, 8]}, {"y": [4, 8]}), {"x": normal(42, 4, 8)}


def masked() -> tuple[onnx.ModelProto, Feed]:
    return attention("product", LOWEST), masked_feed("product", LOWEST)


def guarded() -> tuple[onnx.ModelProto, Feed]:
    x = normal(11, 4, 8)
    x[1] = 0.0
    return normalised("clip", 1e-12), {"x": x}


MADE = {
    Rule.SCALE: scaled,
    Rule.FOLD_BN: folded,
    Rule.LOG_SUM_EXP: summed,
    Rule.SHIFT_TO_NORM: shifted,
    Rule.CONST_THROUGH: joined,
    Rule.LAYERNORM: fused,
    Rule.MASK: masked,
    Rule.EPSILON: guarded,
}


def edits_of(rule: Rule) -> tuple[Any, Feed, tuple[Edit, ...]]:
    model, feed = MADE[rule]()
    graph = graph_of(model)
    edits, _ = PROPOSE[rule](graph, ranges_of(graph, [feed]))
    assert edits
    return graph, feed, edits


def with_constant(edit: Edit, name: str, array: NDArray[Any]) -> Edit:
    return replace(edit, constants={**edit.constants, name: array})


def faulty(edits: tuple[Edit, ...], rule: Rule) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """The edits with one fault each: a constant that is off, or a constant that was forgotten."""
    for place, edit in enumerate(edits):
        others = edits[:place], edits[place + 1 :]
        for name, array in edit.constants.items():
            if rule is Rule.MASK and name.endswith("__masked"):
                continue  # any number as low will do
            if rule is Rule.EPSILON and name.endswith("__one"):
                continue  # divides zeros
            if rule is Rule.LOG_SUM_EXP and name.endswith(("__min", "__max")):
                continue  # any numbers as large will do
            if array.dtype == np.float32:
                wrong_values = array * np.float32(1.01) + np.float32(0.5)
                if name.endswith("__limit"):  # 0.5 or -1, which any number between does as well
                    wrong_values = -array
                wrong = with_constant(edit, name, wrong_values)
                yield f"{name} is off", (*others[0], wrong, *others[1])


@pytest.mark.parametrize("rule", MADE)
def test_a_right_edit_is_exact_and_each_fault_is_not(rule: Rule) -> None:
    graph, feed, edits = edits_of(rule)
    sample = Sample("given", feed)
    right = fp32_change(graph, applied(graph, edits), probes_of([sample], []))
    assert right.is_exact, right
    wrong = {
        words: fp32_change(graph, applied(graph, mutant), probes_of([sample], []))
        for words, mutant in faulty(edits, rule)
    }
    assert [words for words, change in wrong.items() if change.is_exact] == []


def test_forgetting_a_scaled_constant_or_a_reader_is_caught() -> None:
    """Epsilon's a^2, the bias, the weights, one reader: each reverted alone."""
    graph, feed, edits = edits_of(Rule.SCALE)
    sample, tried = Sample("given", feed), 0
    for edit in edits:
        for index, nodes in edit.replaced.items():
            before = graph.proto.graph.node[index]
            for place, node in enumerate(nodes):
                if node.name != before.name:
                    continue
                for slot, name in enumerate(node.input):
                    if name == before.input[slot]:
                        continue
                    forgetful = onnx.NodeProto()
                    forgetful.CopyFrom(node)
                    forgetful.input[slot] = before.input[slot]
                    new = (*nodes[:place], forgetful, *nodes[place + 1 :])
                    wrong = replace(edit, replaced={**edit.replaced, index: new})
                    found = applied(graph, [wrong if e is edit else e for e in edits])
                    change = fp32_change(graph, found, probes_of([sample], []))
                    assert not change.is_exact, (node.name, slot, change)
                    tried += 1
    assert tried >= 4


def test_a_clamped_mask_is_caught_by_a_row_that_no_input_has() -> None:
    graph, feed, _ = edits_of(Rule.MASK)
    clamped = onnx.ModelProto()
    clamped.CopyFrom(graph.proto)
    for tensor in clamped.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and (array < -1e30).any():
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(-30.0), tensor.name))
    wrong = replace(graph, proto=clamped)
    sample = Sample("given", {**feed, "mask": np.array([[1, 1, 1, 1, 0]] * 2, np.int64)})
    assert not fp32_change(graph, wrong, probes_of([sample], [])).is_exact


def test_a_raised_epsilon_is_caught_by_small_inputs() -> None:
    model, feed = normalised("clip", 1e-12), {"x": normal(11, 4, 8)}
    graph, raised = graph_of(model), graph_of(normalised("clip", 2.0**-14))
    alone = fp32_change(graph, raised, [Sample("given", feed)])
    assert alone.is_exact  # on the given input it is
    tiny = Sample("given", {"x": feed["x"] * np.float32(1e-2)})
    assert not fp32_change(graph, raised, probes_of([tiny], [])).is_exact


def repair_of(model: onnx.ModelProto, feeds: list[Feed], folder: Path) -> Repair | Refused:
    inputs: Any = feeds
    settings = Settings(model=model, inputs=inputs, out=folder, runner="emulated")
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        return find_repair(context.problem, context, tuple(PROPOSE))


def test_a_repair_says_what_it_made_and_what_it_took_back(tmp_path: Path) -> None:
    model, feed = folded()
    found = repair_of(model, [feed], tmp_path / "run")
    assert isinstance(found, Repair)
    assert found.rules == (Rule.FOLD_BN,)  # *scale* would cure it too, and is not needed then
    assert found.original.missed > 0 and found.repaired.missed == 0
    assert found.headroom >= 2
    assert found.change.is_exact


def test_what_needs_no_repair_gets_none(tmp_path: Path) -> None:
    b = GraphBuilder(50, opset=17)
    b.rename_output(b.op("Relu", b.op("MatMul", "x", b.normal(8, 8))), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    assert isinstance(repair_of(model, [{"x": normal(51, 4, 8)}], tmp_path / "run"), Refused)


def test_a_repair_without_room_for_larger_inputs_is_refused(tmp_path: Path) -> None:
    b = GraphBuilder(52, opset=17)
    squares = b.op("Mul", b.op("Mul", "x", b.weight(300.0)), b.op("Mul", "x", b.weight(300.0)))
    b.rename_output(b.op("Mul", squares, b.weight(0.45)), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    feed = {"x": np.ones((4, 8), np.float32)}
    found = repair_of(model, [feed], tmp_path / "run")
    assert isinstance(found, Refused)
    assert any("twice" in r.reason or "2 times as large" in r.reason for r in found.refused)


def test_not_a_number_in_place_of_infinity_is_caught() -> None:
    def logarithm(*, with_nan: bool) -> onnx.ModelProto:
        b = GraphBuilder(53, opset=17)
        y = b.op("Log", b.op("Relu", "x"))
        if with_nan:
            y = b.op("Add", b.op("Sub", y, y), y)
        b.rename_output(y, "y")
        return b.model({"x": [4, 8]}, {"y": [4, 8]})

    sample = Sample("given", {"x": normal(54, 4, 8)})
    right, wrong = (graph_of(logarithm(with_nan=nan)) for nan in (False, True))
    assert fp32_change(right, right, [sample]).is_exact
    assert not fp32_change(right, wrong, [sample]).is_exact
