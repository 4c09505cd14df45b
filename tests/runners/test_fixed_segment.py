"""What follows from shapes becomes a constant, and no number changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.precision import Precision
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.graph.passes.segments.segmented import cut
from bisect_trt.graph.passes.switched import to_switched
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.switched import captured_segment
from bisect_trt.runners.emulator.switched.captured_segment import CapturedSegment
from bisect_trt.runners.emulator.switched.captured_session import CapturedSession
from bisect_trt.runners.emulator.switched.fixed_segment import fixed_segment
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.ort.devices import CPU
from bisect_trt.runners.ort.values import owned, value_of, viewed
from tests.conftest import run_model, same
from tests.graph.node_models import cases, feed_of
from tests.networks import asking_for_shapes


def parts(most: int) -> list[Segment]:
    switched = to_switched(asking_for_shapes(), Precision.FP16, Precision.FP32)
    return list(cut(switched, asking_for_shapes(), most))


def captured(segment: Segment) -> CapturedSegment:
    return CapturedSegment(PackedSegment(segment), ConstantStore(asking_for_shapes()), 0, CPU)


def fed(segment: Segment) -> SegmentSession:
    packed = PackedSegment(segment)
    return SegmentSession(segment, ConstantStore(asking_for_shapes()), SegmentForm(packed, 0, CPU))


def ops(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_nothing_is_left_that_asks_for_a_shape() -> None:
    (segment,) = parts(1)
    fixed, given_ = fixed_segment(segment, {"x": (3, 4)}, {})
    assert {"Shape", "Slice", "Concat"} <= ops(segment.model)
    assert not {"Shape", "Slice", "Concat"} & ops(fixed.model)
    assert fixed.gives == ("y",) and given_.keys() == {"count"}
    np.testing.assert_array_equal(given_["count"], np.int32([3]), strict=True)


def test_what_depends_on_values_stays() -> None:
    """How many are not zero is no question of shapes."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"], "places"),
        helper.make_node("Shape", ["places"], ["shape"], "shape"),
        helper.make_node("Cast", ["shape"], ["y"], "y", to=TensorProto.FLOAT),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    segment = Segment(model, ("x",), ("y",), {}, {})
    assert fixed_segment(segment, {"x": (5,)}, {}) == (segment, {})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
def test_no_number_changes(sizes: list[tuple[int, int]], seed: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisect_trt.graph.passes.segments.segmented._FEWEST_NODES", 2)
        segments = parts(most)
    random = np.random.default_rng(seed)
    pairs = [(fed(segment), captured(segment)) for segment in segments]
    for rows, half in sizes:
        x = owned(random.standard_normal((rows, 2 * half)).astype(np.float32))
        tensors = {"x": value_of(x)}
        for segment, (one, other) in zip(segments, pairs, strict=True):
            setting = random.random(len(segment.flags) + len(segment.weights)) < 0.5
            wanted = one.run(tensors, setting)
            got = other.run(tensors, setting)
            assert other.captures
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_array_equal(viewed(got[name]), viewed(value), strict=True)
            tensors |= wanted


def test_a_shape_of_another_segment_is_taken_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host would read it: such a session is refused."""
    monkeypatch.setattr("bisect_trt.graph.passes.segments.segmented._FEWEST_NODES", 2)
    segments = parts(3)
    reader = next(s for s in segments if "batch" in s.takes)
    opened: list[tuple[str, ...]] = []

    class Choosy(CapturedSession):
        def __init__(self, segment: Segment, *others: Any) -> None:
            if "batch" in segment.takes:
                raise RunnerFailedError("the host reads the input 'batch'")
            super().__init__(segment, *others)
            opened.append(segment.takes)

    monkeypatch.setattr(captured_segment, "CapturedSession", Choosy)
    session, beside = captured(reader), fed(reader)
    setting = np.ones(len(reader.flags) + len(reader.weights), np.bool_)
    random = np.random.default_rng(0)
    for rows in (3, 2, 3):
        owners = {
            name: owned(random.standard_normal((rows, 2, 2)).astype(np.float32))
            for name in reader.takes
        }
        owners["batch"] = owned(np.int32([rows]))
        tensors = {name: value_of(owner) for name, owner in owners.items()}
        wanted = beside.run(tensors, setting)
        got = session.run(tensors, setting)
        for name, value in wanted.items():
            np.testing.assert_array_equal(viewed(got[name]), viewed(value), strict=True)
    assert session.captures
    assert len(opened) == 2  # one for each value, and none for the one that came again


def test_a_shape_too_many_ends_the_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_segment, "MOST_SHAPES", 2)
    (segment,) = parts(1)
    session, beside = captured(segment), fed(segment)
    setting = np.zeros(len(segment.flags) + len(segment.weights), np.bool_)
    for rows, replayed in ((1, True), (2, True), (3, False), (1, False)):
        owner = owned(np.ones((rows, 4), np.float32))
        got = session.run({"x": value_of(owner)}, setting)
        wanted = beside.run({"x": value_of(owner)}, setting)
        assert session.captures is replayed
        np.testing.assert_array_equal(viewed(got["y"]), viewed(wanted["y"]))


def test_every_node_model_of_onnx_keeps_its_outputs() -> None:
    """Short integers are constants in half of them, as what another segment gives is."""
    told = 0
    problems = []
    for number, case in enumerate(cases().values()):
        feed = feed_of(case)
        outputs = [o.name for o in case.model.graph.output]
        if not all(isinstance(array, np.ndarray) for array in feed.values()):
            continue
        level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            wanted, again = (run_model(case.model, feed, level) for _ in range(2))
        except Exception:  # every class of ONNX Runtime's errors means the same: not runnable
            continue
        if not same(wanted, again):
            continue  # random
        segment = Segment(case.model, tuple(feed), tuple(outputs), {}, {})
        values = _short(feed) if number % 2 else {}
        fixed, known = fixed_segment(segment, {n: a.shape for n, a in feed.items()}, values)
        if fixed is segment:
            continue
        told += 1
        left = {name: feed[name] for name in fixed.takes}
        found = dict(known)
        if fixed.gives:
            found |= zip(fixed.gives, run_model(fixed.model, left, level), strict=True)
        if not same([found[name] for name in outputs], wanted):
            problems.append(case.name)
    assert problems == []
    assert told >= 100


def _short(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n: a for n, a in feed.items() if a.dtype.kind == "i" and a.ndim <= 1}
