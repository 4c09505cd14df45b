"""What follows from shapes becomes a constant, and no number changes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import bisect_trt.runners.captured as module
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.segment_forms import without_branches
from bisect_trt.model.segments import PackedSegment, cut
from bisect_trt.model.switched import Segment, to_switched
from bisect_trt.runners.captured import CapturedSegment, CapturedSession, fixed_segment
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU
from bisect_trt.runners.segment_session import SegmentForm, SegmentSession
from bisect_trt.runners.values import owned, value_of, viewed
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
    x = owned(np.ones((3, 4), np.float32))

    def run(part: Segment) -> Arrays:
        once = CapturedSession(part, ConstantStore(asking_for_shapes()), 0, CPU, replays=False)
        setting = np.zeros(len(part.flags) + len(part.weights), np.bool_)
        got = once.run({"x": value_of(x)}, setting)
        assert got is not None
        return {name: viewed(value) for name, value in got.items()}

    fixed, given_ = fixed_segment(without_branches(segment), {"x": (3, 4)}, {}, run)
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
    # Declared as it was for one input, as exporters do.
    segment = segment_of(nodes, {"x": [None]}, {"y": [2], "places": [1, 3]}, 17)
    assert fixed_segment(segment, {"x": (5,)}, {}, fails) == (segment, {})


def test_a_declared_shape_of_another_input_is_not_believed() -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["y"], "y"),
        helper.make_node("Shape", ["y"], ["shape"], "shape"),
        helper.make_node("Cast", ["shape"], ["z"], "z", to=TensorProto.FLOAT),
    ]
    segment = segment_of(nodes, {"x": ["n", 4]}, {"y": [1, 4], "z": [2]}, 17)
    feed = {"x": np.zeros((3, 4), np.float32)}
    _, told = fixed_segment(segment, {"x": (3, 4)}, {}, lambda part: plain(part, feed))
    np.testing.assert_array_equal(told["z"], np.float32([3, 4]))


def test_a_shape_is_what_the_runtime_makes_of_it() -> None:
    """ONNX's inference says 6 of ten pixels at 0.7, ONNX Runtime makes 7."""
    scales = numpy_helper.from_array(np.float32([1, 1, 1, 0.7]), "scales")
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["y"], "y", mode="nearest"),
        helper.make_node("Shape", ["y"], ["shape"], "shape"),
        helper.make_node("Cast", ["shape"], ["z"], "z", to=TensorProto.FLOAT),
    ]
    segment = segment_of(nodes, {"x": [1, 1, 1, "w"]}, {"y": None, "z": [4]}, 13)
    segment.model.graph.initializer.append(scales)
    feed = {"x": np.zeros((1, 1, 1, 10), np.float32)}
    _, told = fixed_segment(segment, {"x": (1, 1, 1, 10)}, {}, lambda part: plain(part, feed))
    assert told["z"][3] == plain(segment, feed)["y"].shape[3] == 7


def segment_of(
    nodes: list[onnx.NodeProto], takes: dict[str, Any], gives: dict[str, Any], opset: int
) -> Segment:
    """A segment without switches, of float tensors but for those of ``NonZero``."""
    values = [
        [
            helper.make_tensor_value_info(
                name, TensorProto.INT64 if name == "places" else TensorProto.FLOAT, shape
            )
            for name, shape in tensors.items()
        ]
        for tensors in (takes, gives)
    ]
    graph = helper.make_graph(nodes, "g", *values)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return Segment(model, tuple(takes), tuple(gives), {}, {})


def plain(part: Segment, feed: Arrays) -> Arrays:
    level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found = run_model(part.model, {name: feed[name] for name in part.takes}, level)
    return dict(zip(part.gives, found, strict=True))


def fails(part: Segment) -> Arrays:
    raise AssertionError(f"nothing follows, and {part.gives} is asked for")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
def test_no_number_changes(sizes: list[tuple[int, int]], seed: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisect_trt.model.segments._FEWEST_NODES", 2)
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
    monkeypatch.setattr("bisect_trt.model.segments._FEWEST_NODES", 2)
    segments = parts(3)
    reader = next(s for s in segments if "batch" in s.takes)
    opened: list[tuple[tuple[str, ...], bool]] = []

    class Choosy(CapturedSession):
        def __init__(self, segment: Segment, *others: Any, replays: bool = True) -> None:
            if "batch" in segment.takes and replays:
                raise RunnerFailedError("the host reads the input 'batch'")
            super().__init__(segment, *others, replays=replays)
            opened.append((segment.takes, replays))

    monkeypatch.setattr(module, "CapturedSession", Choosy)
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
    # One for each value, and none for the one that came again.
    assert sum(replays for _, replays in opened) == 2
    packed = PackedSegment(reader)
    data = CapturedSegment(packed, ConstantStore(asking_for_shapes()), 0, CPU, reader.takes)
    data.run(tensors, setting)
    assert not data.captures  # an input of the model's is another in each sample


def test_a_shape_too_many_ends_the_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FIXED", 2)
    (segment,) = parts(1)
    session, beside = captured(segment), fed(segment)
    setting = np.zeros(len(segment.flags) + len(segment.weights), np.bool_)
    for rows, replayed in ((1, True), (2, True), (3, False), (1, False)):
        owner = owned(np.ones((rows, 4), np.float32))
        got = session.run({"x": value_of(owner)}, setting)
        wanted = beside.run({"x": value_of(owner)}, setting)
        assert session.captures is replayed
        np.testing.assert_array_equal(viewed(got["y"]), viewed(wanted["y"]))


def test_what_shapes_tell_outlives_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FIXED", 1)
    (segment,) = parts(1)
    session = captured(segment)
    setting = np.zeros(len(segment.flags) + len(segment.weights), np.bool_)
    answers = []
    for rows in (3, 5):  # the second ends the replays and lets all sessions go
        owner = owned(np.ones((rows, 4), np.float32))
        answers.append(session.run({"x": value_of(owner)}, setting))
    assert not session.captures
    np.testing.assert_array_equal(viewed(answers[0]["count"]), np.int32([3]))


@pytest.mark.slow
def test_every_node_model_of_onnx_keeps_its_outputs() -> None:
    """Short integers are constants in half of them, as what another segment gives is."""
    told = 0
    problems = []
    for number, problem in enumerate(cases().values()):
        feed = feed_of(problem)
        outputs = [o.name for o in problem.model.graph.output]
        if not all(isinstance(array, np.ndarray) for array in feed.values()):
            continue
        level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            wanted, again = (run_model(problem.model, feed, level) for _ in range(2))
        except Exception:  # every class of ONNX Runtime's errors means the same: not runnable
            continue
        if not same(wanted, again):
            continue  # random
        segment = Segment(problem.model, tuple(feed), tuple(outputs), {}, {})
        values = _short(feed) if number % 2 else {}
        shapes = {n: a.shape for n, a in feed.items()}
        fixed, known = fixed_segment(segment, shapes, values, partial(plain, feed=feed))
        if fixed is segment:
            continue
        told += 1
        left = {name: feed[name] for name in fixed.takes}
        found = dict(known)
        if fixed.gives:
            found |= zip(fixed.gives, run_model(fixed.model, left, level), strict=True)
        if not same([found[name] for name in outputs], wanted):
            problems.append(problem.name)
    assert problems == []
    assert told >= 100


def _short(feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n: a for n, a in feed.items() if a.dtype.kind == "i" and a.ndim <= 1}
