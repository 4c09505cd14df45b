"""The rules beside *scale*: the right values where they apply, nothing where a condition fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bisect_trt.model.graph import Graph
from bisect_trt.repair.constants import (
    propose_const_through,
    propose_fold_bn,
    propose_shift_to_norm,
)
from bisect_trt.repair.edits import Proposal, Ranges, Rule, applied, origins_of
from bisect_trt.repair.guards import propose_epsilon, propose_log_sum_exp, propose_mask
from bisect_trt.repair.rules import PROPOSE, edited
from fixtures.build import GraphBuilder
from tests.repair.graphs import graph_of, ranges_of, run, run_fp16, snr_db

Propose = Callable[[Graph, Ranges], Proposal]
Feed = dict[str, NDArray[Any]]


def repaired(model: onnx.ModelProto, feeds: list[Feed], propose: Propose) -> Graph | None:
    """The graph after the rule's edits, checked in FP32; None where the rule makes none."""
    graph = graph_of(model)
    edits, _ = propose(graph, ranges_of(graph, feeds))
    if not edits:
        return None
    found = applied(graph, edits)
    onnx.checker.check_model(found.proto, full_check=True)
    for feed in feeds:
        exact, got = run(model, feed), run(found.proto, feed)
        for name, array in exact.items():
            size = np.abs(array[np.isfinite(array)]).max()
            np.testing.assert_allclose(got[name], array, rtol=0, atol=2e-6 * size)
    again, _ = propose(found, ranges_of(found, feeds))
    assert not again, "a second repair changes something"
    return found


def normal(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def batch_norm(b: GraphBuilder, x: str, channels: int, variance: float) -> str:
    size = b.random.uniform(0.5, 2.0, channels) * variance
    parts = b.normal(channels), b.normal(channels), b.normal(channels), b.weight(size)
    return str(b.op("BatchNormalization", x, *parts, epsilon=1e-5))


MATRIX = {
    "Conv": (lambda b, x: b.op("Conv", x, b.normal(6, 4, 3, 3), pads=[1] * 4), 6),
    "Conv of groups": (lambda b, x: b.op("Conv", x, b.normal(6, 2, 3, 3), group=2), 6),
    "Conv with bias": (lambda b, x: b.op("Conv", x, b.normal(6, 4, 1, 1), b.normal(6)), 6),
    "ConvTranspose": (lambda b, x: b.op("ConvTranspose", x, b.normal(4, 6, 2, 2)), 6),
    "ConvTranspose of groups": (
        lambda b, x: b.op("ConvTranspose", x, b.normal(4, 3, 2, 2), b.normal(6), group=2),
        6,
    ),
}


@pytest.mark.parametrize("kind", MATRIX)
def test_a_variance_beyond_the_range_folds_into_the_convolution(kind: str) -> None:
    make, channels = MATRIX[kind]
    b = GraphBuilder(1, opset=17)
    b.rename_output(batch_norm(b, make(b, "x"), channels, 1e8), "y")
    model = b.model({"x": [2, 4, 8, 8]}, {"y": [None] * 4})
    found = repaired(model, [{"x": normal(2, 2, 4, 8, 8)}], propose_fold_bn)
    assert found is not None
    (node,) = [n for n in found.proto.graph.node if n.op_type != "Constant"]
    assert node.output[0] == "y"
    assert origins_of(node) == ("/BatchNormalization",)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_gemm_keeps_its_alpha_and_takes_in_its_beta(trans: int, beta: float) -> None:
    b = GraphBuilder(2, opset=17)
    weight, bias = b.normal(4, 6) if not trans else b.normal(6, 4), b.normal(6)
    x = b.op("Gemm", "x", weight, bias, transB=trans, alpha=0.3, beta=beta)
    b.rename_output(batch_norm(b, x, 6, 1e8), "y")
    model = b.model({"x": [5, 4]}, {"y": [5, 6]})
    found = repaired(model, [{"x": normal(3, 5, 4)}], propose_fold_bn)
    assert found is not None
    assert [n.op_type for n in found.proto.graph.node] == ["Gemm"]


def test_a_linear_layer_of_matmul_and_add_takes_it_in() -> None:
    b = GraphBuilder(3, opset=17)
    x = b.op("Add", b.op("MatMul", "x", b.normal(4, 6)), b.normal(6))
    b.rename_output(batch_norm(b, x, 6, 1e8), "y")
    found = repaired(
        b.model({"x": [5, 4]}, {"y": [5, 6]}), [{"x": normal(3, 5, 4)}], propose_fold_bn
    )
    assert found is not None
    assert [n.op_type for n in found.proto.graph.node] == ["MatMul", "Add"]


@pytest.mark.parametrize("pads", [0, 1])
def test_in_front_of_a_convolution_only_without_padding(pads: int) -> None:
    b = GraphBuilder(4, opset=17)
    y = batch_norm(b, "x", 4, 1e8)
    b.rename_output(
        b.op("Conv", y, b.normal(6, 2, 3, 3), b.normal(6), group=2, pads=[pads] * 4), "y"
    )
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [None] * 4})
    found = repaired(model, [{"x": normal(2, 1, 4, 8, 8, scale=1e4)}], propose_fold_bn)
    assert found is not None
    kinds = [n.op_type for n in found.proto.graph.node]
    assert kinds == (["Conv"] if not pads else ["Mul", "Add", "Conv"])


def test_another_reader_keeps_the_convolution() -> None:
    b = GraphBuilder(5, opset=17)
    x = b.op("Conv", "x", b.normal(6, 4, 1, 1))
    b.rename_output(b.op("Sigmoid", x), "gate")
    b.rename_output(batch_norm(b, x, 6, 1e8), "y")
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [None] * 4, "gate": [None] * 4})
    found = repaired(model, [{"x": normal(2, 1, 4, 8, 8)}], propose_fold_bn)
    assert found is not None
    assert [n.op_type for n in found.proto.graph.node].count("Mul") == 1


def test_a_batch_norm_within_the_range_stays() -> None:
    b = GraphBuilder(6, opset=17)
    b.rename_output(batch_norm(b, b.op("Conv", "x", b.normal(6, 4, 1, 1)), 6, 1.0), "y")
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [None] * 4})
    assert repaired(model, [{"x": normal(2, 1, 4, 8, 8)}], propose_fold_bn) is None


LOWEST = float(np.finfo(np.float32).min)


def attention(
    mask: str, lowest: float, scale: float = 1.0, then: str = "Softmax"
) -> onnx.ModelProto:
    """Scores plus a mask of 0 and ``lowest``, made as ``mask`` says, through a Softmax."""
    b = GraphBuilder(7, opset=17)
    scores = b.op("MatMul", "q", b.op("Transpose", "k", perm=[0, 2, 1]))
    scores = b.op("Mul", scores, b.weight(scale))
    if mask == "product":
        kept = b.op("Cast", "mask", to=1)
        added = b.op("Mul", b.op("Sub", b.weight(1.0), kept), b.weight(lowest))
        added = b.op("Unsqueeze", added, b.weight([1], np.int64))
    elif mask == "where":
        keep = b.op("Unsqueeze", b.op("Cast", "mask", to=9), b.weight([1], np.int64))
        added = b.op("Where", keep, b.weight(0.0), b.weight(lowest))
    elif mask == "constant":
        added = b.weight(np.triu(np.full((5, 5), lowest), 1))
    else:
        added = "added"
    out = b.op(then, b.op("Add", scores, added), axis=-1)
    b.rename_output(b.op("MatMul", out, "k"), "y")
    inputs: dict[str, list[Any]] = {"q": [2, 5, 8], "k": [2, 5, 8]}
    if mask in ("product", "where"):
        inputs["mask"] = [2, 5]
    elif mask == "input":
        inputs["added"] = [2, 1, 5]
    model = b.model(inputs, {"y": [2, 5, 8]})
    for value in model.graph.input:
        if value.name == "mask":
            value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    return model


def masked_feed(mask: str, lowest: float, *, all_off: bool = False) -> Feed:
    feed: Feed = {"q": normal(8, 2, 5, 8), "k": normal(9, 2, 5, 8)}
    keep = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0] if all_off else [1, 1, 1, 1, 0]], np.int64)
    if mask in ("product", "where"):
        feed["mask"] = keep
    elif mask == "input":
        feed["added"] = np.where(keep[:, None] > 0, 0.0, lowest).astype(np.float32)
    return feed


@pytest.mark.parametrize("mask", ["product", "where", "constant", "input"])
@pytest.mark.parametrize("lowest", [LOWEST, -1e9])
def test_a_mask_is_right_also_where_everything_is_masked(mask: str, lowest: float) -> None:
    model = attention(mask, lowest)
    feeds = [masked_feed(mask, lowest), masked_feed(mask, lowest, all_off=True)]
    found = repaired(model, feeds, propose_mask)
    assert found is not None
    for feed in feeds:
        exact = run(model, feed)["y"]
        assert snr_db(exact, run_fp16(found.proto, feed)["y"]) > 50


def test_scores_as_large_as_the_mask_s_last_bit_are_refused() -> None:
    model = attention("where", -1e9, scale=20.0)
    feed = masked_feed("where", -1e9)
    graph = graph_of(model)
    edits, refusals = propose_mask(graph, ranges_of(graph, [feed]))
    assert not edits
    assert "hides them below 32 only" in refusals[0].reason


@pytest.mark.parametrize("why", ["values", "reader", "small"])
def test_other_masks_stay(why: str) -> None:
    lowest = -1e4 if why == "small" else -1e9
    model = attention("input", lowest, then="LogSoftmax" if why == "reader" else "Softmax")
    feed = masked_feed("input", lowest)
    if why == "values":
        feed["added"][0, 0, 0] = -3.0
    assert repaired(model, [feed], propose_mask) is None


def normalised(guard: str, epsilon: float, divided: str = "x") -> onnx.ModelProto:
    b = GraphBuilder(10, opset=17)
    size = b.op("ReduceL2", "x", axes=[-1], keepdims=1)
    if guard == "sqrt":
        total = b.op("ReduceSum", b.op("Mul", "x", "x"), b.weight([-1], np.int64), keepdims=1)
        size = b.op("Sqrt", total)
    bound = (
        b.op("Max", size, b.weight(epsilon))
        if guard == "max"
        else b.op("Clip", size, b.weight(epsilon))
    )
    other = "x" if divided == "x" else b.op("Neg", "x")
    b.rename_output(b.op("Div", other, b.op("Expand", bound, b.op("Shape", "x"))), "y")
    return b.model({"x": [4, 8]}, {"y": [4, 8]})


@pytest.mark.parametrize("guard", ["clip", "max", "sqrt"])
def test_a_norm_of_zeros_divides_by_one(guard: str) -> None:
    model, x = normalised(guard, 1e-12), normal(11, 4, 8)
    x[1] = 0.0
    tiny = {"x": normal(12, 4, 8, scale=1e-14)}  # smaller than epsilon: FP32 must stay the same
    found = repaired(model, [{"x": x}, tiny], propose_epsilon)
    assert found is not None
    assert not np.isfinite(run_fp16(model, {"x": x})["y"]).all()
    assert snr_db(run(model, {"x": x})["y"], run_fp16(found.proto, {"x": x})["y"]) > 55


def test_what_is_no_norm_of_the_dividend_stays() -> None:
    x = {"x": normal(11, 4, 8)}
    assert repaired(normalised("clip", 1e-12, divided="-x"), [x], propose_epsilon) is None
    assert repaired(normalised("clip", 1e-4), [x], propose_epsilon) is None


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_log_sum_exp_takes_out_the_maximum(opset: int, keepdims: int) -> None:
    b = GraphBuilder(13, opset=opset)
    total = b.op("ReduceSum", b.op("Exp", "x"), b.weight([-1], np.int64), keepdims=keepdims)
    b.rename_output(b.op("Log", total), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 1] if keepdims else [4]})
    feed = {"x": normal(14, 4, 8, scale=8.0) + 12}
    found = repaired(model, [feed], propose_log_sum_exp)
    assert found is not None
    assert snr_db(run(model, feed)["y"], run_fp16(found.proto, feed)["y"]) > 55


def test_softmax_and_softplus_written_out() -> None:
    b = GraphBuilder(15, opset=17)
    exp = b.op("Exp", "x")
    total = b.op("ReduceSum", exp, b.weight([-1], np.int64), keepdims=1)
    b.rename_output(b.op("Div", exp, total), "share")
    b.rename_output(b.op("Log", b.op("Add", b.op("Exp", "x"), b.weight(1.0))), "plus")
    model = b.model({"x": [4, 8]}, {"share": [4, 8], "plus": [4, 8]})
    feed = {"x": normal(14, 4, 8, scale=8.0) + 12}
    found = repaired(model, [feed], propose_log_sum_exp)
    assert found is not None
    kinds = [n.op_type for n in found.proto.graph.node if n.op_type != "Constant"]
    assert sorted(kinds) == ["Softmax", "Softplus"]


def test_the_offset_that_a_norm_removes_is_left_out() -> None:
    b = GraphBuilder(16, opset=17)
    x = b.op("Conv", "x", b.normal(6, 4, 1, 1, scale=0.3), b.weight(np.full(6, 3000.0)))
    b.rename_output(b.op("InstanceNormalization", x, b.normal(6), b.normal(6)), "y")
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [1, 6, 8, 8]})
    feed = {"x": normal(17, 1, 4, 8, 8)}
    graph = graph_of(model)
    edits, _ = propose_shift_to_norm(graph, ranges_of(graph, [feed]))
    found = applied(graph, edits)
    exact = run(model, feed)["y"]
    np.testing.assert_allclose(run(found.proto, feed)["y"], exact, atol=1e-2)  # FP32's own error
    assert snr_db(exact, run_fp16(model, feed)["y"]) < 30
    assert snr_db(exact, run_fp16(found.proto, feed)["y"]) > 45


def test_factors_meet_across_pooling() -> None:
    b = GraphBuilder(18, opset=17)
    pooled = b.op("GlobalAveragePool", b.op("Mul", "x", b.weight(3e4)))
    b.rename_output(b.op("Div", pooled, b.weight(1.5e4)), "y")
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [1, 4, 1, 1]})
    feed = {"x": normal(19, 1, 4, 8, 8) + 5}
    found = repaired(model, [feed], propose_const_through)
    assert found is not None
    assert [n.op_type for n in found.proto.graph.node] == ["GlobalAveragePool", "Mul"]
    assert snr_db(run(model, feed)["y"], run_fp16(found.proto, feed)["y"]) > 55


@pytest.mark.parametrize("opset", [13, 17])
def test_layernorm_written_out_becomes_one_operator(opset: int) -> None:
    b = GraphBuilder(20, opset=opset)
    centred = b.op("Sub", "x", b.op("ReduceMean", "x", axes=[-1], keepdims=1))
    variance = b.op("ReduceMean", b.op("Pow", centred, b.weight(2.0)), axes=[-1], keepdims=1)
    y = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.weight(1e-5))))
    b.rename_output(b.op("Add", b.op("Mul", y, b.normal(8)), b.normal(8)), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    feed = {"x": normal(21, 4, 8)}
    rule = next(rule for rule in PROPOSE if rule == "layernorm")
    graph = graph_of(model)
    found = edited(graph, [rule], lambda g: ranges_of(g, [feed]))
    (node,) = found.graph.proto.graph.node
    assert node.op_type == "LayerNormalization"
    assert len(origins_of(node)) == 9
    np.testing.assert_allclose(run(found.graph.proto, feed)["y"], run(model, feed)["y"], atol=1e-6)


def per_place(b: GraphBuilder) -> str:
    """A BatchNormalization of each place, as before opset 9."""
    parts = (b.weight(np.full((4, 8, 8), value)) for value in (1.0, 2.0, 3.0, 1e8))
    return str(b.op("BatchNormalization", "x", *parts, spatial=0))


def in_double(b: GraphBuilder) -> str:
    parts = (b.weight(np.full(4, value), np.float64) for value in (1.0, 2.0, 3.0, 1e8))
    y = b.op("BatchNormalization", b.op("Cast", "x", to=11), *parts)
    return str(b.op("Cast", y, to=1))


def bias_of_rows(b: GraphBuilder) -> str:
    rows = b.op("ReduceMax", "x", axes=[2, 3], keepdims=0)
    product = b.op("MatMul", rows, b.normal(4, 2))
    return batch_norm(b, b.op("Add", product, b.normal(2, 1, scale=1e4)), 2, 1e8)


def masked_in_double(b: GraphBuilder) -> str:
    mask = b.weight(np.triu(np.full((8, 8), -1e9), 1), np.float64)
    y = b.op("Softmax", b.op("Add", b.op("Cast", "x", to=11), mask), axis=3)
    return str(b.op("Cast", y, to=1))


def masked_without_where(b: GraphBuilder) -> str:
    mask = b.weight(np.triu(np.full((8, 8), -1e9), 1))
    return str(b.op("Softmax", b.op("Add", "x", mask), axis=3))


def divided(b: GraphBuilder) -> str:
    size = b.op("ReduceL2", "x", axes=[3], keepdims=1)
    clipped = b.op("Clip", size, min=1e-12)
    return str(b.op("Add", b.op("Div", "x", clipped), b.op("Div", "x", added(b, size))))


def added(b: GraphBuilder, size: str) -> str:
    return str(b.op("Add", size, b.weight(1e-12)))


def softplus_of_higher_rank(b: GraphBuilder) -> str:
    one, exp = b.weight(np.ones((1, 1, 1, 1, 1))), b.op("Exp", b.op("Mul", "x", b.weight(8.0)))
    return str(b.op("Squeeze", b.op("Log", b.op("Add", exp, one)), b.weight([0], np.int64)))


def sum_of_nothing(b: GraphBuilder) -> str:
    exp = b.op("Exp", b.op("Mul", "x", b.weight(8.0)))
    none = b.weight([], np.int64)
    return str(b.op("Log", b.op("ReduceSum", exp, none, noop_with_empty_axes=1)))


def factors_beyond(b: GraphBuilder) -> str:
    small = b.op("Mul", "x", b.weight(1e-30))
    return str(b.op("Mul", b.op("Mul", b.op("Abs", small), b.weight(1e36)), b.weight(1e30)))


def epsilon_of_higher_rank(b: GraphBuilder) -> str:
    centred = b.op("Sub", "x", b.op("ReduceMean", "x", axes=[-1], keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), axes=[-1], keepdims=1)
    root = b.op("Sqrt", b.op("Add", variance, b.weight(np.full([1] * 5, 1e-5))))
    y = b.op("Mul", b.op("Div", centred, root), b.normal(8))
    return str(b.op("Squeeze", y, b.weight([0], np.int64)))


NEAR_MISSES = [
    (Rule.FOLD_BN, 8, per_place),
    (Rule.FOLD_BN, 13, in_double),
    (Rule.FOLD_BN, 13, bias_of_rows),
    (Rule.MASK, 13, masked_in_double),
    (Rule.MASK, 8, masked_without_where),
    (Rule.EPSILON, 8, divided),
    (Rule.EPSILON, 10, divided),
    (Rule.LOG_SUM_EXP, 13, softplus_of_higher_rank),
    (Rule.LOG_SUM_EXP, 13, sum_of_nothing),
    (Rule.CONST_THROUGH, 13, factors_beyond),
    (Rule.LAYERNORM, 17, epsilon_of_higher_rank),
]


@pytest.mark.parametrize("rule,opset,make", NEAR_MISSES)
def test_a_near_miss_changes_no_number(
    rule: Rule, opset: int, make: Callable[[GraphBuilder], str]
) -> None:
    b = GraphBuilder(22, opset=opset)
    b.rename_output(make(b), "y")
    rank = 2 if make is bias_of_rows else 4
    model = b.model({"x": [2, 4, 8, 8]}, {"y": [None] * rank})
    found = repaired(model, [{"x": normal(23, 2, 4, 8, 8)}], PROPOSE[rule])
    # Two of them have another edit of the rule, whose outputs are compared.
    others = {(13, bias_of_rows), (10, divided)}
    assert (found is not None) is ((opset, make) in others)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_factor_of_either_sign_masks(sign: float, shift: float) -> None:
    """(m - 1) 1e9 and m (-1e9) are masks, the others are not."""
    b = GraphBuilder(24, opset=17)
    mask = b.op("Mul", b.op("Sub", "m", b.weight(shift)), b.weight(sign * 1e9))
    b.rename_output(b.op("Softmax", b.op("Add", "x", mask), axis=-1), "y")
    model = b.model({"x": [4, 8], "m": [8]}, {"y": [4, 8]})
    feed = {"x": normal(25, 4, 8), "m": np.arange(8, dtype=np.float32) // 4}
    masks = (sign > 0) == (shift > 0)
    assert (repaired(model, [feed], propose_mask) is not None) == masks


def test_constant_scores_that_a_full_mask_shows_are_refused() -> None:
    b = GraphBuilder(26, opset=17)
    mask = b.op("Mul", "m", b.weight(-1e9))
    scores = b.normal(5, 5, scale=100.0)
    b.rename_output(b.op("Softmax", b.op("Add", scores, mask), axis=-1), "y")
    model = b.model({"m": [5, 5]}, {"y": [5, 5]})
    feeds: list[Feed] = [{"m": np.eye(5, dtype=np.float32)}, {"m": np.ones((5, 5), np.float32)}]
    assert repaired(model, feeds, propose_mask) is None


@pytest.mark.parametrize("opset", [10, 13, 18])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_infinite_exponents_stay_infinite(opset: int, keepdims: int) -> None:
    b = GraphBuilder(27, opset=opset)
    axes: Any = {} if opset >= 13 else {"axes": [1]}
    ins = [b.weight([1], np.int64)] if opset >= 13 else []
    total = b.op("ReduceSum", b.op("Exp", "x"), *ins, keepdims=keepdims, **axes)
    b.rename_output(b.op("Log", total), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 1] if keepdims else [4]})
    x = normal(28, 4, 8, scale=8.0) + 12
    x[1], x[2, 3], x[3, 0] = -np.inf, -np.inf, np.inf
    assert repaired(model, [{"x": x}], propose_log_sum_exp) is not None


def test_a_sum_that_is_large_by_its_length_is_edited_once() -> None:
    b = GraphBuilder(31, opset=17)
    total = b.op("ReduceSum", b.op("Exp", "x"), b.weight([1], np.int64))
    b.rename_output(b.op("Log", total), "y")
    model = b.model({"x": [2, 20000]}, {"y": [2, 1]})
    assert repaired(model, [{"x": normal(32, 2, 20000, scale=0.01)}], propose_log_sum_exp)


def test_a_model_that_cannot_be_raised_is_left_alone() -> None:
    b = GraphBuilder(29, opset=11)
    centred = b.op("Sub", "x", b.op("ReduceMean", "x", axes=[-1], keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), axes=[-1], keepdims=1)
    y = b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.weight(1e-5))))
    b.rename_output(b.op("Hardmax", b.op("Mul", y, b.normal(8))), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    graph = graph_of(model)
    found = edited(graph, [Rule.LAYERNORM], lambda g: ranges_of(g, [{"x": normal(30, 4, 8)}]))
    assert found.graph is graph and not found.edits
    assert "Hardmax" in found.refusals[0].reason
