"""A rounded constant outlives the calls that are fed with it, and no more than those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners import emulator
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.emulator import EmulatedRunner, SwitchedSession
from bisect_trt.runners.second_emulator import WholeModelRunner

WIDTH = 256


def tied() -> tuple[Graph, Sample]:
    """Two products with one weight."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "second"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, WIDTH]) for n in "xy"]
    made = helper.make_graph(
        nodes, "g", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]
    )
    opset = [helper.make_opsetid("", 17)]
    x = random.standard_normal((4, WIDTH)).astype(np.float32)
    model = helper.make_model(made, opset_imports=opset, ir_version=8)
    return Graph(onnx.shape_inference.infer_shapes(model)), Sample("s", {"x": x})


@pytest.mark.parametrize("pinned", ["first", "second"])
def test_a_weight_of_two_layers_is_read_in_two_precisions(pinned: str) -> None:
    graph, sample = tied()
    plan = PrecisionPlan(Precision.FP16, frozenset({pinned}), Precision.TF32)
    (expected,) = WholeModelRunner(graph).outputs(plan, [sample])
    for found in EmulatedRunner(graph).outputs(plan, [sample] * 3):
        np.testing.assert_allclose(found["y"], expected["y"], rtol=0, atol=1e-4)


def test_a_call_in_work_keeps_what_another_precision_takes_the_place_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, sample = tied()
    store = ConstantStore(graph)
    session = SwitchedSession(graph, store, Precision.FP16, Precision.FP32, threads=1)
    every = frozenset(layer.name for layer in graph.layers)
    plain = emulator.caller
    seen = []

    def disturbed(made: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            rounded = ref(store.owner("w", Precision.FP16))
            store.owner("w", Precision.TF32)  # as another session's run does meanwhile
            seen.append((rounded, rounded() is not None))
            return plain(made)(*given)

        return call

    expected = {n: a.copy() for n, a in session.run(sample, every).items()}
    monkeypatch.setattr(emulator, "caller", disturbed)
    other = SwitchedSession(graph, store, Precision.FP16, Precision.FP32, threads=1)
    for _ in range(2):
        found = other.run(sample, every)
        assert found["y"].tobytes() == expected["y"].tobytes()
        assert seen and all(alive for _, alive in seen), "held until the call ends"
        assert not any(rounded() is not None for rounded, _ in seen), "and no longer"


def test_a_released_emulator_holds_no_rounded_weight_and_answers_the_same() -> None:
    graph, sample = tied()
    runner, plan = EmulatedRunner(graph), PrecisionPlan(Precision.FP16, {"second"})
    before = next(iter(runner.outputs(plan, [sample])))["y"].copy()
    rounded = ref(runner.constants.owner("w", Precision.FP16))
    assert rounded() is not None
    runner.release()
    assert rounded() is None
    assert np.array_equal(next(iter(runner.outputs(plan, [sample])))["y"], before)
