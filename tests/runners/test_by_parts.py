"""Of tens of thousands of nodes the second emulator runs part by part, and answers the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast
from weakref import ref

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.emulated import to_emulated
from bisect_trt.model.graph import Graph
from bisect_trt.model.segments import Cutter, PackedSegment, _whole
from bisect_trt.model.switched import SwitchedModel
from bisect_trt.runners import second_emulator
from bisect_trt.runners.base import Runner
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import reference_session
from bisect_trt.runners.second_emulator import (
    Parts,
    WholeModelRunner,
    in_parts,
    is_parted,
    run_parts,
)
from tests.runners.test_phrased import sample, tangle
from tests.runners.test_segments import WIDTH

PLANS = [PrecisionPlan(p) for p in (Precision.FP16, Precision.BF16, Precision.TF32)]


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_emulator, "FROM", 1)
    monkeypatch.setattr(second_emulator, "PART", 300)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """The models whose sessions were opened; there are never more than two."""
    models: list[onnx.ModelProto] = []
    alive: list[ref[ort.InferenceSession]] = []
    plain = second_emulator.reference_session

    def watched(made: Any, **options: Any) -> ort.InferenceSession:
        there = sum(session() is not None for session in alive)
        assert there < 2, "the one before the last is closed"
        models.append(made())
        session = plain(models[-1], **options)
        alive.append(ref(session))
        return session

    monkeypatch.setattr(second_emulator, "reference_session", watched)
    return models


def close(one: Iterator[Any], other: Iterator[Any]) -> None:
    for found, expected in zip(list(one), list(other), strict=True):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(
                found[name], values, rtol=0, atol=2e-3 * np.abs(values).max()
            )


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.base.value)
def test_parts_answer_what_the_whole_does(
    plan: PrecisionPlan,
    parted: None,
    opened: list[onnx.ModelProto],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pins = frozenset(layer.name for layer in tangle().layers[::3])
    asked = [plan, plan.with_pins(pins)]
    samples = [sample(seed) for seed in range(5)]
    found = [list(WholeModelRunner(tangle()).outputs(each, samples)) for each in asked]
    assert len(opened) >= 2 * 4
    monkeypatch.setattr(second_emulator, "FROM", 1 << 30)
    opened.clear()
    for each, outputs in zip(asked, found, strict=True):
        runner = WholeModelRunner(tangle())
        close(iter(outputs), runner.outputs(each, samples))
    assert len(opened) == 2


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.base.value)
def test_a_cut_may_be_anywhere(plan: PrecisionPlan) -> None:
    """What a rounding stores in FP16 crosses as that."""
    graph, samples = tangle(40), [sample(0), sample(1)]
    model = to_emulated(graph, plan)
    cutter = Cutter(_whole(SwitchedModel(model), graph), graph)
    whole = list(WholeModelRunner(graph).outputs(plan, samples))
    for place in range(1, len(cutter.nodes) - 1, 3):
        parts = [PackedSegment(part) for part in cutter.between([place])]
        found = run_parts(parts, samples, graph.outputs, reference_session, lambda _: 1)
        close(found, iter(whole))


def test_samples_go_through_together_and_come_in_order(
    parted: None, opened: list[onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_emulator, "_MOST", 16)
    samples = [sample(seed) for seed in range(21)]
    runner = WholeModelRunner(tangle())
    found = list(runner.outputs(PLANS[0], samples))
    parts = len(in_parts(to_emulated(tangle(), PLANS[0]), tangle()))
    assert len(opened) == 2 * parts
    for one, outputs in zip(samples[::7], found[::7], strict=True):
        close(iter([outputs]), WholeModelRunner(tangle()).outputs(PLANS[0], [one]))
    (name, _) = tangle().outputs
    assert len({outputs[name].tobytes() for outputs in found}) == 21


def test_a_plan_is_cut_once(parted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[onnx.ModelProto] = []
    monkeypatch.setattr(
        second_emulator,
        "in_parts",
        lambda model, graph: asked.append(model) or in_parts(model, graph),
    )
    runner = WholeModelRunner(tangle())
    for plan, count in ((PLANS[0], 1), (PLANS[0], 1), (PLANS[1], 2), (PLANS[0], 3)):
        next(iter(runner.outputs(plan, [sample(0)])))
        assert len(asked) == count
    runner.release()
    next(iter(runner.outputs(PLANS[0], [sample(0)])))
    assert len(asked) == 4, "and anew after its memory was let go"


def test_behind_a_cut_shapes_are_as_the_model_says(
    parted: None, opened: list[onnx.ModelProto]
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(tangle().proto)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    still = Graph(model)
    for graph, known in ((still, [3, WIDTH]), (tangle(), [])):
        opened.clear()
        list(WholeModelRunner(graph).outputs(PLANS[0], [sample(0)]))
        taken = [value for model in opened for value in model.graph.input]
        kinds = [value.type.tensor_type for value in taken if value.name not in ("x", "flag")]
        (first, *_) = (kind for kind in kinds if kind.elem_type != TensorProto.INT64)
        assert [size.dim_value for size in first.shape.dim] == known


def misleading() -> tuple[list[onnx.NodeProto], onnx.NodeProto]:
    """What makes ONNX's inference tell a wrong shape of [3, 16]: a body that claims one, and a
    pooling whose last window is outside.
    """
    claimed = [helper.make_tensor_value_info("o", TensorProto.FLOAT, [1, WIDTH])]
    bodies = [
        helper.make_graph([helper.make_node(kind, ["x"], ["o"])], kind, [], claimed)
        for kind in ("Relu", "Abs")
    ]
    chosen = helper.make_node(
        "If", ["flag"], ["i"], "if", then_branch=bodies[0], else_branch=bodies[1]
    )
    pooled = helper.make_node(
        "AveragePool", ["u"], ["i"], "pool", kernel_shape=[1], strides=[3], ceil_mode=1
    )
    axis = helper.make_node("Constant", [], ["axis"], "/axis", value_ints=[0])
    return [axis, helper.make_node("Unsqueeze", ["x", "axis"], ["u"], "up"), pooled], chosen


@pytest.mark.parametrize("kind", ["claim", "pooling"])
def test_a_wrong_shape_that_inference_tells_refuses_no_sample(
    kind: str, parted: None, opened: list[onnx.ModelProto]
) -> None:
    up, chosen = misleading()
    width = WIDTH if kind == "claim" else 11
    nodes, last = ([chosen], "i") if kind == "claim" else (up, "i")
    for place in range(400):
        nodes.append(helper.make_node("Sin", [last], [f"s{place}"], f"sin{place}"))
        last = f"s{place}"
    nodes.append(helper.make_node("Identity", [last], ["y"], "end"))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, width]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", inputs, [output])
    opset = [helper.make_opsetid("", 17)]
    graph = Graph(helper.make_model(made, opset_imports=opset, ir_version=8))
    x = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    given = [Sample(f"s{i}", {"x": x * i, "flag": np.array(True)}) for i in range(1, 4)]
    found = list(WholeModelRunner(graph).outputs(PLANS[0], given))
    assert found[0]["y"].shape == ((3, WIDTH) if kind == "claim" else (1, 3, 4))
    parts = len(in_parts(to_emulated(graph, PLANS[0]), graph))
    assert len(opened) > parts > 2, "what was told a wrong shape was opened again"


def test_those_before_one_that_fails_are_answered(
    parted: None, opened: list[onnx.ModelProto]
) -> None:
    wrong = Sample("crooked", {"x": np.zeros((3, 5), np.float32), "flag": np.array(True)})
    samples = [sample(0), sample(1), wrong, sample(3)]
    answers = WholeModelRunner(tangle()).outputs(PLANS[0], samples)
    close(islice(answers, 2), WholeModelRunner(tangle()).outputs(PLANS[0], samples[:2]))
    with pytest.raises(RunnerFailedError, match="crooked"):
        next(answers)
    assert len(opened) > 4, "and what failed held no session, which would have been a third"


def test_those_before_one_that_cannot_be_read_are_answered(parted: None) -> None:
    def read() -> Iterator[Sample]:
        yield from (sample(0), sample(1))
        raise BadInputError("unreadable")

    answers = WholeModelRunner(tangle()).outputs(PLANS[0], cast(Any, read()))
    assert len(list(islice(answers, 2))) == 2
    with pytest.raises(BadInputError, match="unreadable"):
        next(answers)


def test_a_stale_shape_of_an_output_is_not_believed(parted: None) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(tangle().proto)
    early = helper.make_tensor_value_info("t20_0", TensorProto.FLOAT, [1, WIDTH])
    model.graph.output.append(early)
    (outputs,) = WholeModelRunner(model).outputs(PLANS[0], [sample(0)])
    assert outputs["t20_0"].shape == (3, WIDTH)


@pytest.mark.parametrize("runner", [WholeModelRunner, EmulatedRunner])
def test_an_input_that_is_an_output_outlives_its_sample(
    runner: Callable[[onnx.ModelProto], Runner], parted: None
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(tangle().proto)
    model.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, WIDTH]))
    given = sample(0)
    expected = given.arrays["x"].copy()
    (outputs,) = runner(model).outputs(PLANS[0], [given])
    given.arrays["x"][:] = np.nan  # its memory is somebody else's now
    assert np.array_equal(outputs["x"], expected)


def test_what_cannot_be_cut_has_one_session_that_stays(
    parted: None, opened: list[onnx.ModelProto]
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(tangle().proto)  # no part can give a constant
    model.graph.node.append(helper.make_node("Constant", [], ["c"], "/c", value_float=1.0))
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, []))
    runner = WholeModelRunner(model)
    for seed in range(3):
        (outputs,) = runner.outputs(PLANS[0], [sample(seed)])
        assert outputs["c"] == 1.0
    assert len(opened) == 1


def test_a_sequence_may_be_an_output(parted: None) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"], "relu"),
        helper.make_node("SequenceConstruct", ["y", "x"], ["both"], "both"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy"]
    both = helper.make_tensor_sequence_value_info("both", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", values[:1], [values[1], both])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(made, opset_imports=opset, ir_version=8)
    x = np.ones((2, 3), np.float32)
    (found,) = WholeModelRunner(model).outputs(PLANS[0], [Sample("s", {"x": x})])
    assert np.array_equal(found["y"], x) and len(found["both"]) == 2


def test_types_are_of_the_model_that_is_cut(parted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 needs opset 13, for which the converter writes a Softmax of opset 12 with a Shape."""
    nodes = [helper.make_node("Softmax", ["x"], ["y"], "soft", axis=1)]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4, 5]) for n in "xy"]
    made = helper.make_graph(nodes, "g", values[:1], values[1:])
    opset = [helper.make_opsetid("", 12)]
    model = helper.make_model(made, opset_imports=opset, ir_version=8)
    kinds: list[set[int]] = []

    def watched(emulated: onnx.ModelProto, graph: Graph) -> Parts:
        shapes = [n.output[0] for n in emulated.graph.node if n.op_type == "Shape"]
        kinds.append({graph.types.type_of(name) for name in shapes})
        return in_parts(emulated, graph)

    monkeypatch.setattr(second_emulator, "in_parts", watched)
    x = np.random.default_rng(0).standard_normal((2, 4, 5)).astype(np.float32)
    list(WholeModelRunner(model).outputs(PLANS[1], [Sample("s", {"x": x})]))
    assert kinds == [{TensorProto.INT64}]


def test_what_is_run_as_one(parted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_parts_are(model: onnx.ModelProto) -> bool:
        return is_parted(model, tangle(), sample(0))

    model = to_emulated(tangle(), PLANS[0])
    assert by_parts_are(model)
    scan = onnx.ModelProto()
    scan.CopyFrom(model)
    scan.graph.node[5].op_type = "Scan"
    assert not by_parts_are(scan)
    with monkeypatch.context() as patched:
        patched.setattr(second_emulator, "ROOM_BYTES", 1)
        assert not by_parts_are(model), "its tensors are large"
    monkeypatch.setattr(second_emulator, "FROM", len(model.graph.node) + 1)
    assert not by_parts_are(model), "it has few nodes"
