"""The measured FP16 arithmetic: against sums written out term by term, ONNX Runtime on exact
values, and what an engine gave.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

import bisect_trt
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners import node_by_node, rtx
from bisect_trt.runners import rtx as rtx_arithmetic
from bisect_trt.runners import rtx as rtx_operators
from bisect_trt.runners.emulator import EmulatedRunner, RtxRunner
from fixtures.layers import layers_side_by_side
from fixtures.models import residual

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "layers-fp16.npz"
FP16 = PrecisionPlan(Precision.FP16)


def small(seed: int, *shape: int) -> NDArray[np.float32]:
    """Multiples of 1/16 below 4: products and sums of them are exact in FP32."""
    return (np.random.default_rng(seed).integers(-63, 64, shape) / 16).astype(np.float32)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 70))
def test_a_product_is_rounded_after_every_sixteen_terms(seed: int, terms: int) -> None:
    a, b = small(seed, 3, terms), small(seed + 1, terms, 5)
    for i, j in np.ndindex(3, 5):
        total = np.float16(0)
        for start in range(0, terms, 16):
            exact = sum(
                float(a[i, k]) * float(b[k, j]) for k in range(start, min(start + 16, terms))
            )
            total = np.float16(float(total) + exact)
        assert rtx_arithmetic.matrix_product(a, b)[i, j] == total


FORMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 20, 5, 6), (7, 20, 1, 1), {}),
    ((1, 1, 9, 8), (4, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 0, 0, 2], "strides": [2, 1]}),
    ((1, 48, 7, 7), (5, 48, 3, 2), {"pads": [2, 1, 2, 1], "dilations": [2, 3]}),
    ((2, 48, 11), (5, 48, 3), {"pads": [0, 2], "strides": [2]}),
]


@pytest.mark.parametrize(("shape", "weights", "attributes"), FORMS)
def test_a_convolution_of_whole_numbers_is_exact(
    shape: tuple[int, ...], weights: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    """Small whole numbers need no rounding, so geometry alone is compared, with ONNX Runtime's."""
    random = np.random.default_rng(1)
    x, w, b = (random.integers(-2, 3, s).astype(np.float32) for s in (shape, weights, weights[:1]))
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    ins = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xwb"]
    graph = helper.make_graph(
        [node], "conv", ins, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(
        rtx_operators.run_operator(node, [x, w, b]), session.run(None, {"x": x, "w": w, "b": b})[0]
    )


def test_where_a_spatial_convolution_rounds() -> None:
    """2048 swallows a 1 that is added alone, in FP16: which ones are lost tells what was added
    together.
    """
    image = np.zeros((1, 64, 3, 3), np.float32)
    image[0, 0, 0, 0] = 2048.0  # in the first block of 32 channels, the first place
    image[0, [1, 20, 40], 0, 0] = 1.0  # with it, in the block's other half, in the next block
    total = rtx_arithmetic.convolution(
        image, np.ones((1, 64, 3, 3), np.float32), None, (1, 1), (0, 0, 0, 0), (1, 1)
    )
    assert total.item() == 2048.0  # 2049 rounds to 2048, and so does each 1 that follows alone
    image[0, [20, 40], 0, 0], image[0, 2, 0, 0] = 0.0, 1.0
    total = rtx_arithmetic.convolution(
        image, np.ones((1, 64, 3, 3), np.float32), None, (1, 1), (0, 0, 0, 0), (1, 1)
    )
    assert total.item() == 2050.0  # two of them arrive together


def test_up_to_four_channels_are_added_four_places_at_a_time() -> None:
    image = np.zeros((1, 3, 3, 3), np.float32)
    image[0, 0, 0, 0], image[0, 2, 1, 0], image[0, 1, 0, 2] = (
        2048.0,
        1.0,
        1.0,
    )  # places 0, 3 and 2: one rounding
    ones = np.ones((1, 3, 3, 3), np.float32)
    assert rtx_arithmetic.convolution(image, ones, None, (1, 1), (0,) * 4, (1, 1)).item() == 2050.0
    image[0, 1, 0, 2], image[0, 1, 1, 1] = 0.0, 1.0  # place 4: the second rounding
    assert rtx_arithmetic.convolution(image, ones, None, (1, 1), (0,) * 4, (1, 1)).item() == 2048.0


def test_a_bias_is_added_to_the_rounded_sum() -> None:
    x, w = np.float32([[[[2048.0]], [[1.0]]]]), np.ones((1, 2, 1, 1), np.float32)
    assert (
        rtx_arithmetic.convolution(x, w, np.float32([1.0]), (1, 1), (0,) * 4, (1, 1)).item()
        == 2048.0
    )


def test_the_constants_of_a_batch_normalization_are_rounded_once_combined() -> None:
    x = np.float32([[3.0], [5.0]])
    scale, bias, mean, variance = (np.float32([v]) for v in (0.3, 0.7, 1.25, 2.0))
    factor = np.float16(0.3 / np.sqrt(2.0 + 1e-5))
    shift = np.float16(np.float32(0.7) - np.float32(1.25) * np.float32(factor))
    expected = (x * np.float32(factor) + np.float32(shift)).astype(np.float16)
    np.testing.assert_array_equal(
        rtx_arithmetic.batch_normalization(x, scale, bias, mean, variance, 1e-5), expected
    )


def test_an_engine_gave_what_the_kernels_give() -> None:
    """Recorded on an H100 by ``python -m benchmarks.engines.arithmetic``; the terms of one rounding
    are added in an unknown order.
    """
    model, inputs = layers_side_by_side()
    sample = Sample("layers", inputs)
    runner = EmulatedRunner(model)
    measured = dict(np.load(RECORDED))
    ops = {n.name: n.op_type for n in model.graph.node}
    better = 0
    for plain, row in zip(
        runner.trace(sample, FP16), runner.trace(sample, FP16, rtx_sums=True), strict=True
    ):
        if ops[row.layer] in rtx_operators.OPERATORS and not np.array_equal(
            plain.accumulated, row.accumulated
        ):
            engine = measured[row.layer].astype(np.float32)
            assert np.mean(engine == row.accumulated) > 0.99, row.layer
            assert np.mean(engine == plain.accumulated) < 0.85, row.layer
            better += 1
    assert better == 17


def test_gemm_transposes_and_softmax_takes_the_last_axis_only() -> None:
    a, b, c = small(1, 40, 3), small(2, 5, 40), small(3, 5)
    node = onnx.helper.make_node("Gemm", ["a", "b", "c"], ["y"], transA=1, transB=1)
    np.testing.assert_array_equal(
        rtx_operators.run_operator(node, [a, b, c]),
        rtx_arithmetic.half(rtx_arithmetic.matrix_product(a.T, b.T) + c),
    )
    assert (
        rtx_operators.run_operator(onnx.helper.make_node("Softmax", ["a"], ["y"], axis=0), [a])
        is None
    )
    rows = rtx_operators.run_operator(onnx.helper.make_node("Softmax", ["a"], ["y"], axis=1), [a])
    assert rows is not None and np.abs(rows.sum(axis=1) - 1.0).max() < 2e-3


def test_node_by_node_without_these_sums_is_the_probe() -> None:
    model, inputs = layers_side_by_side()
    runner, sample = EmulatedRunner(model), Sample("layers", inputs)
    plan = FP16.with_pins({"conv 3x3, 48 channels", "softmax"})
    whole = next(runner.outputs(plan, [sample]))
    by_node = runner.outputs_by_node(plan, sample, rtx_sums=False)
    for name, array in whole.items():
        np.testing.assert_array_equal(by_node[name], array, err_msg=name)
    walked = next(RtxRunner(runner).outputs(plan, [sample]))
    changed = {
        name.removesuffix(": out")
        for name in walked
        if not np.array_equal(walked[name], whole[name])
    }
    assert "conv 3x3, 96 channels, stride 2" in changed and not changed & {
        "conv 3x3, 48 channels",
        "softmax",
        "sigmoid",
    }


def test_an_engine_with_fp16_sums_gets_its_plan_confirmed_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fixture = residual()
    emulator = EmulatedRunner(fixture.model)

    class Engine(RtxRunner):
        name = "engine"

        def close(self) -> None:
            pass

    module = "bisect_trt.steps.context"
    monkeypatch.setattr(f"{module}.open_engine", lambda *_: Engine(emulator))
    monkeypatch.setattr(f"{module}.has_rtx_sums", lambda *_: True)
    result = bisect_trt.bisect(
        fixture.model, fixture.inputs, require=fixture.require, out=tmp_path, robust=0
    )
    assert result.passed and result.pinned
    assert (
        result.engine is not None and result.engine.builds_beyond_baselines == 1
    )  # the emulator knows what the engine will say
    assert result.evaluations["emulated-kernels"] > len(result.pinned)


def test_forms_that_were_not_measured_are_left_to_the_emulator() -> None:
    x, w = small(1, 1, 24, 6, 6), small(2, 4, 24, 3, 3)
    assert (
        rtx_operators.run_operator(onnx.helper.make_node("Conv", ["x", "w"], ["y"]), [x, w]) is None
    )
    x, w = small(1, 1, 8, 6, 6), small(2, 4, 4, 3, 3)
    assert (
        rtx_operators.run_operator(
            onnx.helper.make_node("Conv", ["x", "w"], ["y"], group=2), [x, w]
        )
        is None
    )
    assert (
        rtx_operators.run_operator(
            onnx.helper.make_node("MatMul", ["x", "w"], ["y"]), [small(1, 8), small(2, 8, 3)]
        )
        is None
    )
    empty = np.zeros((0, 4), np.float32)
    assert (
        rtx_operators.run_operator(onnx.helper.make_node("Softmax", ["x"], ["y"], axis=1), [empty])
        is None
    )
    norm = onnx.helper.make_node("BatchNormalization", list("xsbmv"), ["y"])
    assert (
        rtx_operators.run_operator(norm, [small(1, 2, 3, 4), *(small(i, 3, 4) for i in range(4))])
        is None
    )
    bare = onnx.helper.make_node("Softmax", ["x"], ["y"])
    assert (
        rtx_operators.run_operator(bare, [small(1, 2, 3, 4)], 11) is None
        and rtx_operators.run_operator(bare, [small(1, 2, 3, 4)], 13) is not None
    )
    scaled = onnx.helper.make_node("Gemm", ["a", "b"], ["y"], alpha=0.5)
    assert rtx_operators.run_operator(scaled, [small(1, 2, 8), small(2, 8, 3)]) is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 300)),
    st.booleans(),
    st.booleans(),
    st.integers(1, 16),
)
@example(10170255, (4, 3, 1, 141), False, True, 3)
def test_parts_of_a_product_are_the_bits_of_the_whole(
    seed: int, shape: tuple[int, int, int, int], one_a: bool, one_b: bool, threads: int
) -> None:
    subgraphs, batch, rows, columns = shape
    random = np.random.default_rng(seed)
    a = rtx_arithmetic.half(
        random.standard_normal((subgraphs, 1 if one_a else batch, rows, 16)).astype(np.float32)
    )
    b = rtx_arithmetic.half(
        random.standard_normal((subgraphs, 1 if one_b else batch, 16, columns)).astype(np.float32)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtx, "thread_count", lambda: 1)
        whole = rtx.rounded_sums(a, b)
        patch.setattr(rtx, "thread_count", lambda: threads)
        parts = rtx.rounded_sums(a, b)
    assert whole.shape == (1 if one_a and one_b else batch, rows, columns)
    assert np.array_equal(whole, parts)


@pytest.mark.parametrize("rtx_sums", [False, True])
def test_histories_beside_each_other_are_those_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, rtx_sums: bool
) -> None:
    fixture = residual()
    sample = Sample("s", fixture.inputs)
    shown = []
    for small, large in ((0, 1 << 40), (1 << 40, 1 << 41)):  # all on two threads, none
        monkeypatch.setattr(node_by_node, "_SMALL", small)
        monkeypatch.setattr(node_by_node, "_LARGE", large)
        runner = EmulatedRunner(fixture.model)
        traced = runner.trace(sample, FP16, rtx_sums=rtx_sums)
        shown.append([(v.tensor, *map(np.array, _histories(v)), v.in_range) for v in traced])
    for one, other in zip(*shown, strict=True):
        assert one[0] == other[0] and one[-1] == other[-1]
        assert all(np.array_equal(a, b) for a, b in zip(one[1:-1], other[1:-1], strict=True))
    exact = {
        tensor: np.array(values)
        for _, tensor, values in EmulatedRunner(fixture.model).exact(sample, Precision.FP16)
    }
    assert list(exact) == [row[0] for row in shown[0]]
    assert all(np.array_equal(exact[row[0]], row[1]) for row in shown[0])


def _histories(values: node_by_node.LayerValues) -> tuple[NDArray[np.float32], ...]:
    return values.reference, values.accumulated, values.introduced


def test_overflowing_attention_warns_nobody_from_any_thread() -> None:
    scores = np.full((4, 400, 300), np.inf, np.float32)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rtx_operators.run_operator(node, [scores])
    assert found is not None and np.isnan(found).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(7,), (3, 5), (300, 400), (2, 3, 50, 60)]))
def test_a_softmax_in_parts_is_the_whole(seed: int, shape: tuple[int, ...]) -> None:
    x = rtx_arithmetic.half(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    half = rtx_arithmetic.half
    powers = half(np.exp(half(x - x.max(axis=-1, keepdims=True))))
    whole = half(powers / half(powers.sum(axis=-1, keepdims=True)))
    assert np.array_equal(rtx_arithmetic.softmax(x, -1), whole)
