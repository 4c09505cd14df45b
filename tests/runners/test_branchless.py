"""A switch that selects, or takes from a list, gives what one that branches gives."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision
from bisect_trt.metrics.rounding import rounded
from bisect_trt.model.graph import Graph
from bisect_trt.model.segment_forms import with_lists, without_branches
from bisect_trt.model.segments import cut
from bisect_trt.model.switched import Segment, to_switched
from bisect_trt.runners.ort_session import switched_session

PAIRS = [
    (Precision.FP16, Precision.FP32),
    (Precision.BF16, Precision.TF32),
    (Precision.TF32, Precision.FP32),
]


@cache
def network() -> Graph:
    """Values of every rank from 0 on, an overflow, a difference of infinities, an empty tensor, and
    an ``If`` of the model's own.
    """
    nodes = [
        helper.make_node("Mul", ["x", "large"], ["far"], "far"),
        helper.make_node("Sub", ["far", "far"], ["none"], "none"),
        helper.make_node("MatMul", ["x", "w"], ["product"], "product"),
        helper.make_node("ReduceSum", ["product"], ["sum"], "sum", keepdims=0),
        helper.make_node("Mul", ["sum", "one"], ["scalar"], "scalar"),
        helper.make_node("Add", ["product", "scalar"], ["shifted"], "shifted"),
        helper.make_node("Mul", ["empty", "one"], ["nothing"], "nothing"),
        helper.make_node("If", ["flag"], ["chosen"], "chosen", **_bodies()),
    ]
    outputs = ["far", "none", "scalar", "shifted", "nothing", "chosen"]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("empty", TensorProto.FLOAT, [0, 4]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [
            numpy_helper.from_array(np.float32([1e5]), "large"),
            numpy_helper.from_array(np.float32(1.0009), "one"),
            numpy_helper.from_array(np.linspace(-1, 1, 16, dtype="f4").reshape(4, 4), "w"),
        ],
    )
    return Graph(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    )


def _bodies() -> dict[str, onnx.GraphProto]:
    def body(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["shifted"], [out.name])], op, [], [out])

    return {"then_branch": body("Exp"), "else_branch": body("Tanh")}


@cache
def all_ways(low: Precision, pin: Precision) -> tuple[Segment, list[ort.InferenceSession]]:
    """The segment with branches, and sessions of it, of what selects and of what has lists."""
    (segment,) = cut(to_switched(network(), low, pin), network(), 1)
    selects, (lists, places) = without_branches(segment), with_lists(segment)
    assert places and places <= set(segment.flags)
    for flat, operator in ((selects, "Where"), (lists, "SequenceAt")):
        kinds = [n.op_type for n in flat.model.graph.node]
        assert kinds.count("If") == 1 and operator in kinds
    return segment, [switched_session(s.model) for s in (segment, selects, lists)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.integers(0, 2**24),
    st.booleans(),
    st.lists(st.floats(-70000, 70000, width=32), min_size=8, max_size=8),
)
def test_selecting_changes_no_number(
    pair: tuple[Precision, Precision], choice: int, flag: bool, values: list[float]
) -> None:
    segment, sessions = all_ways(*pair)
    assert len(segment.flags) + len(segment.weights) <= 24
    feed = {
        "x": np.float32(values).reshape(2, 4),
        "empty": np.zeros((0, 4), np.float32),
        "flag": np.array(flag),
    }
    for place, name in enumerate(segment.flags):
        feed[name] = np.array(bool(choice >> place & 1))
    for place, (name, weight) in enumerate(segment.weights.items(), len(segment.flags)):
        precision = weight.reduced if choice >> place & 1 else weight.pinned
        feed[name] = rounded(network().float_constants[weight.tensor], precision)
    places = with_lists(segment)[1]
    placed = {n: a.astype(np.int64) if n in places else a for n, a in feed.items()}
    feeds = (feed, feed, placed)
    found = [s.run(None, given) for s, given in zip(sessions, feeds, strict=True)]
    for one, other, listed in zip(*found, strict=True):
        assert one.shape == other.shape == listed.shape
        np.testing.assert_array_equal(one, other)  # the CPU's Where gives 0 for -0
        assert one.tobytes() == listed.tobytes()


def test_an_opset_without_where_or_lists_keeps_its_branches() -> None:
    graph = network()
    (segment,) = cut(to_switched(graph, *PAIRS[0]), graph, 1)
    segment.model.opset_import[0].version = 8
    assert without_branches(segment) is segment
    segment.model.opset_import[0].version = 10
    assert without_branches(segment) is not segment
    assert with_lists(segment) == (segment, frozenset())


@pytest.mark.parametrize("pair", PAIRS)
def test_what_it_takes_and_gives_is_the_same(pair: tuple[Precision, Precision]) -> None:
    segment, sessions = all_ways(*pair)
    names = [[v.name for v in s.get_inputs()] for s in sessions]
    assert names[0] == names[1] == names[2]
    assert segment.flags
