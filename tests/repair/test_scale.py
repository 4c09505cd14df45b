"""Rule *scale*: bit for bit the same in FP32, and within FP16's range."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings

from bisect_trt.repair.edits import LARGEST_FP16, applied
from bisect_trt.repair.scale import propose_scale
from fixtures.build import GraphBuilder
from tests.repair.graphs import graph_of, networks, ranges_of, run, run_fp16, snr_db

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(networks())
def test_fp32_stays_bit_for_bit_and_a_second_repair_does_nothing(case) -> None:  # type: ignore[no-untyped-def]
    model, feeds = case
    graph = graph_of(model)
    with np.errstate(all="ignore"):
        exact = [run(graph.proto, feed) for feed in feeds]
        assume(all(np.isfinite(a).all() for one in exact for a in one.values()))
        ranges = ranges_of(graph, feeds)
        # Beyond that the bound of exponents decides, and a second repair goes on.
        assume(all(r.largest < 2.0**30 and r.median > 2.0**-30 for r in ranges.values()))
        edits, _ = propose_scale(graph, ranges)
        assume(edits)
        repaired = applied(graph, edits)
        onnx.checker.check_model(repaired.proto, full_check=True)
        for factor in (1.0, 2.0, 1e-2):
            for feed in feeds:
                scaled = {n: (a * np.float32(factor)).astype(np.float32) for n, a in feed.items()}
                expected, got = run(graph.proto, scaled), run(repaired.proto, scaled)
                for name, array in expected.items():
                    # FP32's own subnormal numbers lose bits when they move.
                    np.testing.assert_allclose(got[name], array, rtol=2e-6, atol=1e-30)
        again, _ = propose_scale(repaired, ranges_of(repaired, feeds))
    assert not again
    assert [o.name for o in repaired.proto.graph.output] == [o.name for o in model.graph.output]


def rms(opset: int = 17, epsilon: float = 1e-6) -> GraphBuilder:
    """x -> 3000 x -> RMSNorm written out, whose mean of squares leaves FP16's range."""
    b = GraphBuilder(3, opset=opset)
    big = b.op("MatMul", "x", b.normal(8, 8, scale=1000.0))
    mean = b.op("ReduceMean", b.op("Pow", big, b.weight(2.0)), axes=[-1], keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.weight(epsilon)))
    b.rename_output(b.op("Mul", b.op("Div", big, root), b.normal(8)), "y")
    return b


def test_squares_fit_after_scaling_upstream_weights_and_epsilon() -> None:
    model = rms().model({"x": [4, 8]}, {"y": [4, 8]})
    feed = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    graph = graph_of(model)
    edits, refusals = propose_scale(graph, ranges_of(graph, [feed]))
    repaired = applied(graph, edits)
    assert not refusals
    assert len(repaired.proto.graph.node) == len(model.graph.node)  # no Mul was added
    expected = run(model, feed)["y"]
    assert snr_db(expected, run_fp16(graph.proto, feed)["y"]) < 1
    assert np.array_equal(run(repaired.proto, feed)["y"], expected)
    assert snr_db(expected, run_fp16(repaired.proto, feed)["y"]) > 55
    after = ranges_of(repaired, [feed])
    assert max(r.largest for r in after.values()) <= LARGEST_FP16 / 4
    # 2^2e for the mean, and so for epsilon: with another factor the norm would be another.
    (moved,) = {c.name: c for e in edits for c in e.changed if c.before == "1e-06"}.values()
    ratio = np.log2(float(moved.after) / 1e-6)
    assert round(ratio) % 2 == 0 and abs(ratio - round(ratio)) < 1e-3


def test_a_reader_that_is_not_homogeneous_keeps_its_values() -> None:
    b = GraphBuilder(4, opset=17)
    big = b.op("MatMul", "x", b.normal(8, 8, scale=40000.0))
    b.rename_output(b.op("Sigmoid", big), "gate")
    b.rename_output(b.op("LayerNormalization", big, b.normal(8), epsilon=1e-5), "y")
    model = b.model({"x": [4, 8]}, {"gate": [4, 8], "y": [4, 8]})
    feed = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    graph = graph_of(model)
    repaired = applied(graph, propose_scale(graph, ranges_of(graph, [feed]))[0])
    expected, got = run(model, feed), run(repaired.proto, feed)
    assert np.array_equal(got["gate"], expected["gate"])
    assert np.array_equal(got["y"], expected["y"])
    assert [n.op_type for n in repaired.proto.graph.node].count("Mul") == 1  # in front of Sigmoid


def test_an_output_within_the_region_keeps_its_name_and_values() -> None:
    b = GraphBuilder(5, opset=17)
    big = b.rename_output(b.op("MatMul", "x", b.normal(8, 8, scale=3000.0)), "inner")
    squares = b.op("ReduceSum", b.op("Mul", big, big), b.weight([1], np.int64), keepdims=1)
    b.rename_output(b.op("Div", big, b.op("Sqrt", squares)), "y")
    model = b.model({"x": [4, 8]}, {"inner": [4, 8], "y": [4, 8]})
    feed = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    graph = graph_of(model)
    repaired = applied(graph, propose_scale(graph, ranges_of(graph, [feed]))[0])
    expected, got = run(model, feed), run(repaired.proto, feed)
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
    assert snr_db(expected["y"], run_fp16(repaired.proto, feed)["y"]) > 50


def test_an_output_beyond_the_range_is_refused() -> None:
    b = GraphBuilder(6, opset=17)
    b.rename_output(b.op("MatMul", "x", b.normal(8, 8, scale=1e4)), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    graph = graph_of(model)
    feed = {"x": np.full((4, 8), 100, np.float32)}
    edits, refusals = propose_scale(graph, ranges_of(graph, [feed]))
    assert not edits
    assert [r.nodes for r in refusals] == [("y",)]


@pytest.mark.parametrize("op", ["If", "Loop"])
def test_what_bodies_read_stays(op: str) -> None:
    b = GraphBuilder(7, opset=17)
    big = b.rename_output(b.op("MatMul", "x", b.normal(8, 8, scale=3000.0)), "big")
    helper, kinds = onnx.helper, onnx.TensorProto
    made = helper.make_tensor_value_info("out", kinds.FLOAT, None)
    node = helper.make_node("Sigmoid", ["big"], ["out"])
    if op == "If":
        body = helper.make_graph([node], "body", [], [made])
        b.rename_output(
            b.op("If", b.weight(True, np.bool_), then_branch=body, else_branch=body), "gate"
        )
    else:
        keep = helper.make_node("Identity", ["again"], ["go"])
        ins = [
            helper.make_tensor_value_info("i", kinds.INT64, []),
            helper.make_tensor_value_info("again", kinds.BOOL, []),
        ]
        go = helper.make_tensor_value_info("go", kinds.BOOL, [])
        body = helper.make_graph([keep, node], "body", ins, [go, made])
        turns, first = b.weight(1, np.int64), b.weight(True, np.bool_)
        b.rename_output(b.op("Squeeze", b.op("Loop", turns, first, body=body)), "gate")
    squares = b.op("ReduceSum", b.op("Mul", big, big), b.weight([1], np.int64), keepdims=1)
    b.rename_output(b.op("Div", big, b.op("Sqrt", squares)), "y")
    model = b.model({"x": [4, 8]}, {"gate": [4, 8], "y": [4, 8]})
    feed = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    graph = graph_of(model)
    repaired = applied(graph, propose_scale(graph, ranges_of(graph, [feed]))[0])
    expected, got = run(model, feed), run(repaired.proto, feed)
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
