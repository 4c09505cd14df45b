"""Histories against whole runs: what a look sees must be what a set of pins gives, bit for bit, in both arithmetics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph import list_layers
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.runners.histories import Histories
from bisect_trt.runners.optimised import OptimisedRunner
from bisect_trt.runners.sites import rounding_sites
from bisect_trt.runners.whole import WholeModelRunner
from bisect_trt.search.steer import Move
from fixtures.models import branch, encoder_decomposed, residual
from tests.networks import convolutional

Arrays = Mapping[str, NDArray[Any]]


MODELS = {
    "convolutional": convolutional,
    "residual": lambda: (residual().model, residual().inputs),
    "encoder": lambda: (encoder_decomposed().model, encoder_decomposed().inputs),
    "branch": lambda: (branch().model, branch().inputs),
}


def outputs_themselves(_: int, outputs: Arrays) -> tuple[NDArray[np.float32], float]:
    vector = np.concatenate([np.asarray(a, np.float32).ravel() for a in outputs.values()])
    return vector, float(np.abs(vector).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
def test_a_look_is_what_the_plan_gives(name: str, base: Precision) -> None:
    """In the first arithmetic for every network, in the second for the one that is followed exactly."""
    model, inputs = MODELS[name]()
    layers = [layer.name for layer in list_layers(model)]
    samples = [Sample("s", inputs)]
    plain = EmulatedRunner(model, samples, base, threads=1)
    whole = WholeModelRunner(model, samples)
    for seed in range(4):
        random = np.random.default_rng(seed)
        lowered = {n for n in layers if random.random() < 0.7}
        stops = {layers[int(i)] for i in random.integers(len(layers), size=3)} | {layers[-1]}
        with Histories(model, samples, base, layers, outputs_themselves) as histories:
            state = histories.start
            for number, layer in enumerate(layers):
                moves = [Move(state, layer, layer in lowered, layer in stops), Move(state, layer, layer not in lowered, False)]
                (state, look), _ = histories.follow(moves)
                if layer not in stops:
                    assert look is None
                    continue
                pinned = [n for i, n in enumerate(layers) if n not in lowered or i > number]
                plan = PrecisionPlan(base, pinned)
                for arithmetic, expected in ((0, next(plain.walk(plan, kernels=False))), (1, next(whole.outputs(plan)))):
                    vector = outputs_themselves(0, expected)[0]
                    if not np.isfinite(vector).all():
                        assert look is None
                        break
                    assert look is not None
                    if layer == layers[-1] and (arithmetic == 0 or name == "convolutional"):
                        np.testing.assert_array_equal(look.errors[arithmetic], vector)
                    else:  # what follows is exact and summed in whatever order; or the whole is joined in ways not followed
                        close = 1e-5 if arithmetic == 0 or name == "convolutional" else 2e-2
                        np.testing.assert_allclose(look.errors[arithmetic], vector, rtol=close, atol=close * np.abs(vector).max())


def test_the_optimised_walk_has_the_bits_of_an_optimised_session() -> None:
    model, inputs = convolutional()
    layers = [layer.name for layer in list_layers(model)]
    runner, whole = OptimisedRunner(model, [Sample("s", inputs)], threads=1), WholeModelRunner(model, [Sample("s", inputs)])
    other = EmulatedRunner(model, [Sample("s", inputs)], threads=1)
    differs = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        pinned = {n for n in layers if random.random() < seed / 20}
        # A gate whose source and pool are pinned as well is summed in yet another order: not followed.
        plan = PrecisionPlan(Precision.FP16, pinned - {"excite"} if {"conv_se", "pool"} <= pinned else pinned)
        expected = next(whole.outputs(plan))["y"]
        np.testing.assert_array_equal(next(runner.walk(plan, kernels=False))["y"], expected)
        differs += not np.array_equal(next(other.walk(plan, kernels=False))["y"], expected)
    assert differs, "the two arithmetics are not the same here"


def test_single_roundings_are_numpys() -> None:
    """y = relu(x * w) + b: each of its roundings, done by NumPy."""
    x, w, b = (np.random.default_rng(i).standard_normal(64).astype(np.float32) for i in range(3))
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["m"], "mul"),
        helper.make_node("Relu", ["m"], ["r"], "relu"),
        helper.make_node("Add", ["r", "b"], ["y"], "add"),
    ]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [64]) for n in ("x", "y")]
    stored = [numpy_helper.from_array(a, n) for n, a in (("w", w), ("b", b))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", value[:1], value[1:], stored), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )

    def low(a: NDArray[np.float32]) -> NDArray[np.float32]:
        return a.astype(np.float16).astype(np.float32)

    exact = np.maximum(x * w, 0) + b
    expected = {
        ("x", ("mul",)): np.maximum(low(x) * w, 0) + b,
        ("w", ("mul",)): np.maximum(x * low(w), 0) + b,
        ("m", ("mul", "relu")): np.maximum(low(x * w), 0) + b,
        ("r", ("relu", "add")): low(np.maximum(x * w, 0)) + b,
        ("b", ("add",)): np.maximum(x * w, 0) + low(b),
        ("y", ("add",)): low(exact),
    }
    with Histories(model, [Sample("s", {"x": x})], Precision.FP16, ["mul", "relu", "add"], outputs_themselves) as histories:
        found = histories.single_roundings([[Sample("s", {"x": x})], [Sample("t", {"x": 2 * x})]])
    assert {(site.tensor, site.on) for site in found} == set(expected)
    for site, rows in found.items():
        assert site.off == () and len(rows) == (1 if site.constant else 2)
        np.testing.assert_allclose(rows[0], expected[(site.tensor, site.on)] - exact, atol=1e-7)


def test_a_tensor_that_two_layers_read_is_rounded_for_each() -> None:
    """Rounded at its source, it is not rounded again where it is read."""
    nodes = [helper.make_node(op, ["x"], [out], out) for op, out in (("Sigmoid", "a"),)]
    nodes += [helper.make_node("Tanh", ["a"], ["b"], "b"), helper.make_node("Mul", ["a", "b"], ["y"], "y")]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", value[:1], value[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    runner = EmulatedRunner(model, [], threads=1)
    sites = {(s.tensor, s.on, s.off) for s in rounding_sites(runner.steps, runner.constants, ["y"], Precision.FP16)}
    assert sites == {
        ("x", ("a",), ()), ("a", ("a",), ()), ("a", ("b",), ("a",)), ("a", ("y",), ("a",)), ("b", ("b", "y"), ()), ("y", ("y",), ()),
    }  # fmt: skip
