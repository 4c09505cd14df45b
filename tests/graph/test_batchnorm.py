"""BatchNormalization at reduced precision: folded offline, so that only one factor and one shift are rounded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph import to_emulated, to_typed
from bisect_trt.graph.batchnorm import folded_constants
from bisect_trt.graph.constants import float_constants
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.sessions import reference_session, run_all

CHANNELS = 6


def model(scale: float = 1.0, shared: bool = False, mean: float = 0.0) -> onnx.ModelProto:
    random = np.random.default_rng(3)
    values = {
        "scale": scale * random.uniform(0.5, 2.0, CHANNELS), "shift": random.normal(size=CHANNELS),
        "mean": mean + random.normal(size=CHANNELS), "variance": random.uniform(0.1, 4.0, CHANNELS),
    }  # fmt: skip
    nodes = [helper.make_node("BatchNormalization", ["x", *values], ["y"], "norm", epsilon=1e-3)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, CHANNELS, 8])]
    if shared:
        nodes.append(helper.make_node("Relu", ["mean"], ["z"], "other"))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [CHANNELS]))
    weights = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in values.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, CHANNELS, 8])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float64)


def test_the_lowered_layer_is_one_rounded_factor_and_shift() -> None:
    source = model()
    x = np.random.default_rng(4).normal(size=(1, CHANNELS, 8)).astype(np.float32)
    w = {k: v.astype(np.float64)[:, None] for k, v in float_constants(source.graph).items()}
    factor = w["scale"] / np.sqrt(w["variance"] + np.float32(1e-3))
    shift = w["shift"] - (w["mean"] - half(w["mean"])) * factor
    expected = half((half(x) - half(w["mean"])) * half(factor) + half(shift))
    emulated = to_emulated(source, PrecisionPlan(Precision.FP16))
    got = run_all(reference_session(emulated.SerializeToString()), {"x": x}, "x")["y"]
    assert np.abs(got - expected).max() <= 2.0**-10 * np.abs(expected).max()
    assert np.mean(got == expected) > 0.9  # the rest differs by the order of FP32 operations


def test_the_typed_model_holds_the_folded_constants() -> None:
    source = model()
    typed = to_typed(source, PrecisionPlan(Precision.FP16))
    held = {i.name: numpy_helper.to_array(i) for i in typed.graph.initializer}
    norm = next(n for n in typed.graph.node if n.name == "norm")
    variance = held[norm.input[4]]
    assert variance.dtype == np.float16
    assert np.sqrt(variance + np.float16(1e-3)).tolist() == [1.0] * CHANNELS


def test_a_rounded_mean_moves_nothing() -> None:
    """A mean that FP16 cannot hold, before a large factor: plain rounding would be off by half a unit of the mean's times the factor."""
    source = model(mean=517.3)
    x = (517.3 + np.random.default_rng(5).normal(size=(1, CHANNELS, 8))).astype(np.float16).astype(np.float32)
    exact = run_all(reference_session(source.SerializeToString()), {"x": x}, "x")["y"]
    got = run_all(reference_session(to_emulated(source, PrecisionPlan(Precision.FP16)).SerializeToString()), {"x": x}, "x")["y"]
    assert np.abs(got - exact).max() < 2.0**-9 * np.abs(exact).max()


def test_a_pinned_layer_keeps_its_constants() -> None:
    source = model()
    typed = to_typed(source, PrecisionPlan(Precision.FP16, frozenset({"norm"})))
    before, after = (float_constants(m.graph) for m in (source, typed))
    assert all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("source", [model(scale=1e6), model(scale=1e-6), model(shared=True)], ids=["overflow", "underflow", "shared"])
def test_what_folding_would_harm_is_left_alone(source: onnx.ModelProto) -> None:
    assert folded_constants(source.graph, float_constants(source.graph), Precision.FP16) == {}
