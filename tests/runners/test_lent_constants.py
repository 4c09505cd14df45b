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
from bisect_trt.runners import segment_session
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.node_by_node import NodeSession
from bisect_trt.runners.second_emulator import WholeModelRunner
from bisect_trt.runners.switched_session import SwitchedSession

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
    session = SwitchedSession(graph, store, Precision.FP16, Precision.FP32, 1)
    every = frozenset(layer.name for layer in graph.layers)
    plain = segment_session.caller
    seen = []

    def disturbed(made: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            rounded = ref(store.owner("w", Precision.FP16))
            store.owner("w", Precision.TF32)  # as another session's run does meanwhile
            seen.append((rounded, rounded() is not None))
            return plain(made)(*given)

        return call

    expected = {n: a.copy() for n, a in session.run(sample, every).items()}
    monkeypatch.setattr(segment_session, "caller", disturbed)
    other = SwitchedSession(graph, store, Precision.FP16, Precision.FP32, 1)
    for _ in range(2):
        found = other.run(sample, every)
        assert found["y"].tobytes() == expected["y"].tobytes()
        assert seen and all(alive for _, alive in seen), "held until the call ends"
        assert not any(rounded() is not None for rounded, _ in seen), "and no longer"


def test_all_constants_may_be_let_go_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference does that is opened ahead while the emulator runs, of many nodes."""
    graph, sample = tied()
    plan = PrecisionPlan(Precision.FP16)

    def answers() -> list[bytes]:
        runner = EmulatedRunner(graph)
        evaluations = [outputs["y"].tobytes() for outputs in runner.outputs(plan, [sample] * 3)]
        traced = [v for row in runner.trace(sample, plan) for v in (row.reference, row.introduced)]
        by_node = runner.outputs_by_node(plan, sample, rtx_sums=False)["y"]
        return [*evaluations, *(values.tobytes() for values in traced), by_node.tobytes()]

    expected = answers()
    stores: list[ConstantStore] = []
    plain, plain_call, begun = ConstantStore.__init__, segment_session.caller, []
    monkeypatch.setattr(
        ConstantStore, "__init__", lambda self, of: stores.append(self) or plain(self, of)
    )

    def let_go(call: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed(*given: Any) -> Any:
            exact, rounded = (
                ref(stores[0].owner("w", p)) for p in (Precision.FP32, Precision.FP16)
            )
            stores[0].release()
            begun.append((exact, rounded))
            # What was let go too early is written over.
            spoilt = [np.full((WIDTH, WIDTH), np.nan, np.float32) for _ in range(4)]
            found = call(*given)
            del spoilt
            return found

        return disturbed

    monkeypatch.setattr(segment_session, "caller", lambda session: let_go(plain_call(session)))
    plain_run = NodeSession.run
    monkeypatch.setattr(NodeSession, "run", lambda *asked: let_go(plain_run)(*asked))
    assert answers() == expected
    assert begun and not any(owner() for owners in begun for owner in owners), "nobody keeps them"
