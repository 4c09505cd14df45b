"""Weights rounded to fit: layouts against ONNX Runtime, the choice against brute force, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.rounding import STORAGE_DTYPE, rounded
from bisect_trt.model.graph import Graph
from bisect_trt.model.typed import to_typed
from bisect_trt.repair.matrices import from_matrices, matrix_layers, rows_of, to_matrices
from bisect_trt.repair.weights import WIDEST, Moments, choose, neighbours
from bisect_trt.runners.device import CPU
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import EmulationServer, server_arguments
from bisect_trt.runners.second_emulator import WholeModelRunner
from bisect_trt.steps.fit_weights import FittedWeights, fit_weights
from fixtures.build import GraphBuilder
from tests.repair.graphs import graph_of, input_value, run, snr_db

FP16, BF16 = Precision.FP16, Precision.BF16
FACTOR = 5.0
"""The mean square of the choice over the least that brute force finds, at worst."""


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Layouts


@dataclass(frozen=True)
class Case:
    """One layer: the shapes of its input and weight, the weight's slot, attributes."""

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    attributes: dict[str, Any]
    slot: int = 1
    bias: bool = False

    def model(self) -> onnx.ModelProto:
        arrays = {"w": normal(0, *self.w)}
        if self.bias:
            whole = self.w[1] * self.attributes["group"] if self.op == "ConvTranspose" else 0
            arrays["b"] = normal(2, whole or self.w[0])
        inputs = ["x", *arrays] if self.slot == 1 else ["w", "x"]
        graph = helper.make_graph(
            [helper.make_node(self.op, inputs, ["y"], "layer", **self.attributes)],
            "layer",
            [input_value("x", self.x)],
            [onnx.ValueInfoProto(name="y")],
            [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        )
        opset = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=opset, ir_version=8)


@st.composite
def convolutions(draw: Any) -> Case:
    """A convolution of one to three dimensions, or a transposed one."""
    axes, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    op = draw(st.sampled_from(["Conv", "ConvTranspose"]))
    kernel, strides, sizes = each(1, 3), each(1, 3), each(5, 8)
    per_in, per_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    auto_pad = draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    dilations = [1] * axes if auto_pad.startswith("SAME") else each(1, 2)
    attributes = {"group": group, "strides": strides, "dilations": dilations, "auto_pad": auto_pad}
    if auto_pad == "NOTSET":
        attributes["pads"] = [*each(0, 1), *each(0, 1)]
    inner = (group * per_in, per_out) if op == "ConvTranspose" else (group * per_out, per_in)
    if op == "ConvTranspose" and auto_pad == "NOTSET":
        if draw(st.booleans()):
            less = [s - 1 for s in strides]
            attributes["output_padding"] = [draw(st.integers(0, n)) for n in less]
        else:
            del attributes["pads"]
            wholes = zip(sizes, strides, dilations, kernel, strict=True)
            whole = [s * (n - 1) + d * (k - 1) + 1 for n, s, d, k in wholes]
            attributes["output_shape"] = [draw(st.integers(n - 1, n + 1)) for n in whole]
            attributes["auto_pad"] = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER"]))
    batch = draw(st.integers(1, 2))
    return Case(op, (batch, group * per_in, *sizes), (*inner, *kernel), attributes, bias=True)


@settings(max_examples=80, deadline=None)
@given(convolutions())
def test_rows_times_matrices_are_the_convolution(case: Case) -> None:
    model = case.model()
    x = normal(1, *case.x)
    try:
        (output,) = run(model, {"x": x}).values()
    except Exception:  # a combination that ONNX Runtime refuses
        assume(False)
    assume(output.size)
    product = product_of(model, case, x)
    expected = np.moveaxis(output, 1, -1).reshape(len(product), -1)
    np.testing.assert_allclose(product.reshape(len(product), -1), expected, atol=1e-4)


MATRICES = [
    Case("MatMul", (3, 4), (4, 5), {}),
    Case("MatMul", (2, 7, 3, 4), (4, 5), {}),
    Case("MatMul", (2, 7, 3, 4), (7, 4, 5), {}),
    Case("MatMul", (3, 4), (7, 4, 5), {}),
    Case("MatMul", (2, 7, 3, 4), (2, 1, 4, 5), {}),
    Case("MatMul", (4,), (4, 5), {}),
    Case("MatMul", (3, 4), (4,), {}),
    Case("MatMul", (2, 4, 5), (3, 4), {}, slot=0),
    Case("MatMul", (2, 4, 5), (2, 3, 4), {}, slot=0),
    Case("MatMul", (2, 4, 5), (4,), {}, slot=0),
    *(
        Case(
            "Gemm",
            *(((4, 3) if a else (3, 4), (5, 4) if b else (4, 5))[:: 1 if slot else -1]),
            {"transA": a, "transB": b},
            slot,
        )
        for a, b, slot in itertools.product((0, 1), repeat=3)
    ),
    Case("Gemm", (3, 4), (4, 5), {"alpha": 0.5}),
]


@pytest.mark.parametrize("case", MATRICES, ids=repr)
def test_rows_times_matrices_are_the_product(case: Case) -> None:
    model, x = case.model(), normal(1, *case.x)
    (output,) = run(model, {"x": x}).values()
    product = product_of(model, case, x)
    # The axes stand in another order.
    np.testing.assert_allclose(np.sort(product, None), np.sort(output, None), atol=1e-5)


def product_of(model: onnx.ModelProto, case: Case, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """(rows, groups, columns), by the layouts."""
    graph = graph_of(model)
    (layer,) = matrix_layers(graph, FP16)
    weight = graph.constants[layer.weight]
    matrices = to_matrices(layer.node, layer.slot, weight)
    back = from_matrices(layer.node, layer.slot, matrices, weight.shape)
    np.testing.assert_array_equal(back, weight)
    if case.bias:
        bias = graph.constants[layer.bias].reshape(matrices.shape[0], 1, -1)
        matrices = np.concatenate([bias, matrices], axis=1)
    random = np.random.default_rng(0)
    rows = np.concatenate(list(rows_of(layer, weight.shape, x, 1 << 20, random)))
    return np.einsum("ngk,gkm->ngm", rows, matrices.astype(np.float64))


def recurrent(
    op: str, direction: str = "forward", *, gives: str = "y", **attributes: Any
) -> onnx.ModelProto:
    """A recurrent layer over 9 steps of 2 rows, 12 values each, with 8 hidden ones."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    directions = 2 if direction == "bidirectional" else 1
    w, r = normal(0, directions, gates * 8, 12) * 0.3, normal(1, directions, gates * 8, 8) * 0.3
    outputs = ["y"] if gives == "y" else ["", gives]
    graph = helper.make_graph(
        [
            helper.make_node(
                op,
                ["x", "w", "r"],
                outputs,
                "layer",
                direction=direction,
                hidden_size=8,
                **attributes,
            )
        ],
        "layer",
        [input_value("x", (9, 2, 12))],
        [onnx.ValueInfoProto(name=gives)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(r, "r")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_rows_times_matrices_are_a_linear_recurrence(direction: str) -> None:
    count = 2 if direction == "bidirectional" else 1
    linear = {"activation_alpha": [1.0] * count, "activation_beta": [0.0] * count}
    model = recurrent("RNN", direction, activations=["Affine"] * count, **linear)
    x, graph = normal(3, 9, 2, 12), graph_of(model)
    output = run(model, {"x": x})["y"]
    sums = []
    for layer, values in zip(matrix_layers(graph, FP16), (x, output), strict=True):
        weight, random = graph.constants[layer.weight], np.random.default_rng(0)
        matrices = to_matrices(layer.node, layer.slot, weight)
        back = from_matrices(layer.node, layer.slot, matrices, weight.shape)
        np.testing.assert_array_equal(back, weight)
        rows = np.concatenate(list(rows_of(layer, weight.shape, values, 1 << 20, random)))
        sums.append(np.einsum("ngk,gkm->ngm", rows, matrices).reshape(-1, 2, count, 8))
    of_input, of_states = sums
    for d in range(count):
        # The first step of each direction has no hidden states yet.
        later = np.s_[:-1] if direction == "reverse" or d else np.s_[1:]
        np.testing.assert_allclose(
            of_input[later, :, d] + of_states[:, :, d], output[later, d], atol=1e-5
        )


def test_rows_are_drawn_beyond_the_limit_and_only_finite_ones() -> None:
    b = GraphBuilder(0)
    model = b.model({"x": [50, 4]}, {b.op("MatMul", "x", b.normal(4, 3)): [50, 3]})
    (layer,) = matrix_layers(graph_of(model), FP16)
    x = np.arange(200, dtype=np.float32).reshape(50, 4)
    x[7, 2] = np.inf
    random = np.random.default_rng(0)
    every = np.concatenate(list(rows_of(layer, (4, 3), x, 50, random)))[:, 0]
    np.testing.assert_array_equal(every, np.delete(x, 7, axis=0))
    few = np.concatenate(list(rows_of(layer, (4, 3), x, 10, random)))[:, 0]
    assert 9 <= len(few) <= 10
    assert {tuple(row) for row in few} < {tuple(row) for row in every}


# The grid


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from([FP16, BF16]))
def test_neighbours_enclose_and_are_next_to_each_other(
    numbers: list[float], precision: Precision
) -> None:
    values = np.asarray(numbers, np.float64)
    near, other = neighbours(values, precision)
    np.testing.assert_array_equal(near, rounded(values.astype(np.float32), precision))
    apart = (near != other) & ~np.isnan(near)
    low, high = np.minimum(near, other)[apart], np.maximum(near, other)[apart]
    assert ((low < values[apart]) & (values[apart] < high)).all()
    # Nothing of the grid lies between: what is halfway rounds to one of them.
    between = rounded(((low + high) / 2).astype(np.float32), precision)
    assert ((between == low) | (between == high)).all()
    smallest = ml_dtypes.finfo(STORAGE_DTYPE[precision]).smallest_normal
    assert (np.abs(other[apart]) >= float(smallest)).all()
    assert np.isfinite(other[apart]).all()


# The choice


def moments_of(rows: NDArray[Any], *, same: bool = True, widest: int = WIDEST) -> Moments:
    """The moments of rows (rows, K) or (rows, groups, K); ``same``: all of them judge too."""
    rows = rows if rows.ndim == 3 else rows[:, None]
    found = Moments(*rows.shape[1:], widest)
    found.add(rows.astype(np.float64))
    if same:
        found.apart = found.fitted
    return found


@pytest.mark.parametrize("precision", [FP16, BF16])
@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_near_the_best_of_all_and_never_worse_than_nearest(
    precision: Precision, seed: int
) -> None:
    random = np.random.default_rng(seed)
    columns, count = int(random.integers(2, 9)), int(random.integers(30, 60))
    mix = np.eye(columns) + random.standard_normal((columns, columns))
    rows = random.standard_normal((count, columns)) @ mix + random.standard_normal() * 2
    weight = random.standard_normal((1, columns, 1))
    moments = moments_of(rows)
    choice = choose(weight, moments, precision)
    near, other = (side[0, :, 0] for side in neighbours(weight, precision))
    least = np.inf
    for far in itertools.product((False, True), repeat=columns):
        error = weight[0, :, 0] - np.where(far, other, near)
        least = min(least, float(error @ moments.fitted[0][0] @ error))
    assert choice.after <= FACTOR * least
    assert choice.after <= choice.before * (1.0 + DAMPED)


DAMPED = 1e-3
"""What damping may cost on the moments themselves."""


@pytest.mark.parametrize("groups", [1, 3])
def test_with_diagonal_moments_nearest_is_chosen(groups: int) -> None:
    size, moments = 6, Moments(groups, 6)
    moments.count = 100
    moments.fitted = moments.apart = [np.stack([np.diag(np.arange(1.0, size + 1))] * groups)]
    weight = normal(0, groups, size, 4).astype(np.float64)
    choice = choose(weight, moments, FP16)
    np.testing.assert_array_equal(choice.matrices, rounded(weight.astype(np.float32), FP16))
    assert choice.moved == 0.0 and not choice.helps


def correlated(seed: int, count: int, columns: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    mix = random.standard_normal((3, columns))
    noise = 0.1 * random.standard_normal((count, columns))
    return random.standard_normal((count, 3)) @ mix + noise


def test_rows_apart_are_not_fitted_to() -> None:
    rows = correlated(0, 100, 5)
    moments = moments_of(rows, same=False)
    np.testing.assert_allclose(moments.apart[0][0], rows[::5].T @ rows[::5])
    rest = np.delete(rows, np.s_[::5], axis=0)
    np.testing.assert_allclose(moments.fitted[0][0], rest.T @ rest)


def test_a_choice_that_fails_on_rows_apart_does_not_help() -> None:
    moments = moments_of(correlated(0, 400, 12))
    weight = normal(1, 1, 12, 8).astype(np.float64)
    assert choose(weight, moments, FP16).helps
    moments.apart = [np.eye(12)[None]]  # other rows than those fitted to
    assert not choose(weight, moments, FP16).helps


def test_correlated_inputs_gain_much() -> None:
    moments = moments_of(correlated(0, 2000, 64), same=False)
    choice = choose(normal(1, 1, 64, 16).astype(np.float64), moments, FP16)
    assert choice.after < choice.before / 20
    assert 0.1 < choice.moved < 0.6


def test_groups_are_chosen_as_if_alone() -> None:
    rows = np.stack([correlated(seed, 500, 9) for seed in range(4)], axis=1)
    weight = normal(1, 4, 9, 2).astype(np.float64)
    together = choose(weight, moments_of(rows), FP16)
    alone = [choose(weight[g : g + 1], moments_of(rows[:, g]), FP16) for g in range(4)]
    np.testing.assert_array_equal(together.matrices, np.concatenate([c.matrices for c in alone]))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 6)),
    st.integers(0, 60),
    st.integers(1, 14),
    st.booleans(),
    st.sampled_from([FP16, BF16]),
)
def test_whatever_the_shape_each_weight_is_a_neighbour(
    shape: tuple[int, int, int], count: int, widest: int, biased: bool, precision: Precision
) -> None:
    groups, width, _ = shape
    weight = normal(1, *shape).astype(np.float64)
    weight[:, width // 2] = 0.0
    rows = np.stack([correlated(g, count, width) for g in range(groups)], axis=1)
    rows[:, :, :biased] = 1.0
    moments = moments_of(rows, same=False, widest=widest)
    choice = choose(weight, moments, precision, biased=biased)
    again = choose(weight, moments, precision, biased=biased)
    np.testing.assert_array_equal(choice.matrices, again.matrices)
    near, other = neighbours(weight, precision)
    inside = (choice.matrices == near) | (choice.matrices == other)
    assert choice.matrices.shape == shape and inside[:, biased:].all()
    np.testing.assert_array_equal(choice.matrices, rounded(choice.matrices, precision))
    np.testing.assert_array_equal(choice.matrices[:, width // 2], 0.0)
    # On the rows apart, the error is what the moments say.
    error = np.einsum("ngk,gkm->ngm", rows[::5], weight - choice.matrices)
    one_block = width <= widest
    assert not one_block or np.isclose(choice.after, float(np.sum(error**2)), rtol=1e-6, atol=1e-12)


def test_wide_layers_are_chosen_in_blocks() -> None:
    rows, weight = correlated(0, 500, 20), normal(1, 1, 20, 3).astype(np.float64)
    moments = moments_of(rows, widest=8)
    assert [len(block[0]) for block in moments.fitted] == [8, 8, 4]
    choice = choose(weight, moments, FP16)
    first = choose(weight[:, :8], moments_of(rows[:, :8], widest=8), FP16)
    np.testing.assert_array_equal(choice.matrices[:, :8], first.matrices)
    assert choice.helps


@pytest.mark.parametrize("rows", [np.zeros((50, 6)), correlated(0, 4, 6)], ids=["dead", "few"])
def test_nothing_is_chosen_without_rows_to_choose_on(rows: NDArray[Any]) -> None:
    weight = normal(1, 1, 6, 3).astype(np.float64)
    choice = choose(weight, moments_of(rows, same=False), FP16)
    np.testing.assert_array_equal(choice.matrices, rounded(weight.astype(np.float32), FP16))
    assert not choice.helps


def test_dead_and_rank_one_inputs() -> None:
    random = np.random.default_rng(0)
    rows = random.standard_normal((200, 1)) * random.standard_normal(16)
    rows[:, [2, 11]] = 0.0
    weight = normal(1, 1, 16, 8).astype(np.float64)
    choice = choose(weight, moments_of(rows, same=False), FP16)
    near, _ = neighbours(weight, FP16)
    np.testing.assert_array_equal(choice.matrices[:, [2, 11]], near[:, [2, 11]])
    assert choice.after < choice.before / 100


def test_moments_that_have_no_factor_still_help() -> None:
    moments = moments_of(correlated(0, 400, 8))
    moments.fitted = [moments.fitted[0] - 0.3 * np.trace(moments.fitted[0][0]) / 8 * np.eye(8)]
    weight = normal(1, 1, 8, 8).astype(np.float64)
    choice = choose(weight, moments, FP16)
    assert np.isfinite(choice.matrices).all() and choice.after <= choice.before


def test_what_cannot_be_rounded_keeps_the_nearest() -> None:
    weight = normal(1, 1, 8, 4).astype(np.float64)
    odd = [np.inf, -np.inf, np.nan, 1e30, 70000.0, 0.0, 1e-9, 65510.0]
    weight[0, :, 0] = odd
    choice = choose(weight, moments_of(correlated(0, 100, 8)), FP16)
    near, _ = neighbours(weight, FP16)
    np.testing.assert_array_equal(choice.matrices[..., 0], near[..., 0])
    assert choice.helps and np.isfinite(choice.after)


def test_a_bias_takes_up_the_mean_of_the_error() -> None:
    random = np.random.default_rng(0)
    rows = np.abs(random.standard_normal((2000, 3))) * 40.0
    rows = np.concatenate([np.ones((2000, 1)), rows], axis=1)
    weight = normal(1, 1, 4, 16).astype(np.float64)
    moments = moments_of(rows)
    with_bias = choose(weight, moments, FP16, biased=True)
    means = moments.fitted[0][0, 0] / moments.fitted[0][0, 0, 0]

    def mean_error(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.abs(means @ (weight - matrices)[0]))

    near, _ = neighbours(weight, FP16)
    steps = np.spacing(np.abs(with_bias.matrices[0, 0]).astype(np.float16)).astype(np.float64)
    assert (mean_error(with_bias.matrices) <= 0.51 * steps).all()
    assert mean_error(with_bias.matrices).max() < mean_error(near).max() / 4


# Graphs


def samples_of(shape: Sequence[int], count: int, first: int = 0) -> list[Sample]:
    """Correlated inputs called x."""
    found = []
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        basis = np.random.default_rng(99).standard_normal((3, shape[1]))
        size = int(np.prod(shape)) // shape[1]
        noise = 0.05 * random.standard_normal((size, shape[1]))
        x = random.standard_normal((size, 3)) @ basis + noise
        x = np.moveaxis(x.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
        found.append(Sample(f"s{seed}", {"x": np.ascontiguousarray(x, np.float32)}))
    return found


def convolutional() -> onnx.ModelProto:
    """Dense, depthwise, strided and transposed convolutions with biases, and a Gemm."""
    b = GraphBuilder(3, opset=17)
    x = b.op("Conv", "x", b.normal(12, 6, 3, 3, scale=0.2), b.normal(12), pads=[1, 1, 1, 1])
    x = b.op("Relu", x)
    x = b.op("Conv", x, b.normal(12, 1, 3, 3, scale=0.3), b.normal(12), group=12, strides=[2, 2])
    x = b.op("ConvTranspose", b.op("Relu", x), b.normal(12, 12, 2, 2, scale=0.3), b.normal(12))
    x = b.op("Conv", x, b.normal(3, 12, 3, 3))
    return b.model({"x": [1, 6, 17, 17]}, {x: [1, 3, None, None]})


def nearest(graph: Graph) -> Graph:
    """``graph`` with every matrix constant rounded to the nearest FP16 number."""
    layers = matrix_layers(graph, FP16)
    names = {name for layer in layers for name in (layer.weight, layer.bias) if name}
    return graph.with_constants({n: rounded(graph.constants[n], FP16) for n in names})


def snr_on(graph: Graph, original: Graph, samples: Sequence[Sample]) -> float:
    """The worst SNR of ``graph`` in FP32."""
    found = []
    for sample in samples:
        exact, other = (run(g.proto, sample.arrays) for g in (original, graph))
        found += [snr_db(exact[name], other[name]) for name in exact]
    return min(found)


def test_a_network_of_convolutions_gains_on_inputs_that_it_was_not_fitted_to() -> None:
    graph = graph_of(convolutional())
    fitted = fit_weights(graph, samples_of((1, 6, 17, 17), 4), FP16)
    assert [row.kept for row in fitted.layers] == [True] * 4
    assert all(row.snr_after > row.snr_before for row in fitted.layers)
    assert len(fitted.constants) == 7
    unseen = samples_of((1, 6, 17, 17), 6, first=50)
    assert snr_on(fitted.graph, graph, unseen) > snr_on(nearest(graph), graph, unseen) + 1.5
    check_neighbours(graph, fitted)


def test_a_wide_network_gains_much() -> None:
    b, x = GraphBuilder(1), "x"
    for _ in range(3):
        x = b.op("MatMul", x, b.normal(64, 64, scale=0.125))
        x = b.op("Relu", b.op("Add", x, b.normal(64)))
    graph = graph_of(b.model({"x": [50, 64]}, {x: [50, 64]}))
    fitted = fit_weights(graph, samples_of((50, 64), 8), FP16)
    assert all(row.kept and row.bias for row in fitted.layers)
    unseen = samples_of((50, 64), 4, first=50)
    assert snr_on(fitted.graph, graph, unseen) > snr_on(nearest(graph), graph, unseen) + 8.0
    check_neighbours(graph, fitted)


def check_neighbours(graph: Graph, fitted: FittedWeights, precision: Precision = FP16) -> None:
    """Every chosen weight is one of its two neighbours, and every constant on the grid."""
    biases = {row.bias for row in fitted.layers}
    for name, values in fitted.constants.items():
        np.testing.assert_array_equal(values, rounded(values, precision))
        np.testing.assert_array_equal(values, fitted.graph.constants[name])
        if name not in biases:
            near, other = neighbours(graph.constants[name].astype(np.float64), precision)
            assert ((values == near) | (values == other)).all()


def test_bf16_by_the_same_code() -> None:
    graph = graph_of(convolutional())
    fitted = fit_weights(graph, samples_of((1, 6, 17, 17), 4), BF16)
    assert any(row.kept for row in fitted.layers)
    check_neighbours(graph, fitted, BF16)


def test_the_same_choice_each_time_whatever_the_passes() -> None:
    graph, samples = graph_of(convolutional()), samples_of((1, 6, 17, 17), 2)
    few = partial(fit_weights, graph, samples, FP16, rows=40)  # rows are drawn
    once, again = few(), few()
    alone = few(moment_bytes=1)  # each layer by itself
    assert once.layers == again.layers == alone.layers
    assert once.graph.proto == again.graph.proto == alone.graph.proto


def unfolded(x: NDArray[np.float32], channels: slice) -> NDArray[np.float32]:
    """The windows of a convolution of 3 x 2, strides 2 and 1, dilations 1 and 2, one a row."""
    _, _, height, width = x.shape
    return np.stack(
        [
            x[n, channels, i : i + 3, j : j + 3 : 2].ravel()
            for n in range(len(x))
            for i in range(0, height - 2, 2)
            for j in range(width - 2)
        ]
    )


def test_a_grouped_strided_convolution_is_chosen_as_dense_products_are() -> None:
    b = GraphBuilder(1)
    weight = b.normal(6, 2, 3, 2)
    y = b.op("Conv", "x", weight, group=2, strides=[2, 1], dilations=[1, 2])
    conv = graph_of(b.model({"x": [1, 4, 9, 9]}, {y: [1, 6, 4, 7]}))
    samples = samples_of((1, 4, 9, 9), 6)
    (chosen,) = fit_weights(conv, samples, FP16).constants.values()
    for group in range(2):
        half = conv.constants[weight][3 * group : 3 * group + 3]
        b = GraphBuilder(1)
        dense = b.weight(half.reshape(3, -1).T.copy())
        product = graph_of(b.model({"x": [28, 12]}, {b.op("MatMul", "x", dense): [28, 3]}))
        channels = np.s_[2 * group : 2 * group + 2]
        rows = [Sample(s.name, {"x": unfolded(s.arrays["x"], channels)}) for s in samples]
        (alone,) = fit_weights(product, rows, FP16).constants.values()
        np.testing.assert_array_equal(alone.T.reshape(3, 2, 3, 2), chosen[3 * group :][:3])


def test_a_matmul_and_the_bias_behind_it() -> None:
    b = GraphBuilder(1)
    x = b.op("Add", b.op("MatMul", "x", b.normal(8, 16)), b.normal(16))
    x = b.op("Add", b.normal(5), b.op("MatMul", x, b.normal(16, 5)))
    shared = b.normal(5)
    x = b.op("Add", b.op("Add", b.op("MatMul", x, b.normal(5, 5)), shared), shared)
    graph = graph_of(b.model({"x": [64, 8]}, {x: [64, 5]}))
    fitted = fit_weights(graph, samples_of((64, 8), 2), FP16)
    assert [bool(row.bias) for row in fitted.layers] == [True, True, False]
    assert {row.bias for row in fitted.layers if row.kept} - {""} <= set(fitted.constants)
    assert any(row.kept for row in fitted.layers)


def test_a_bias_of_another_axis_or_scale_is_none_of_the_layer() -> None:
    b = GraphBuilder(1)
    heads = b.op("Add", b.op("MatMul", "x", b.normal(3, 8, 1)), b.normal(3))
    column = b.op("Add", b.op("MatMul", "x", b.normal(8, 2)), b.normal(3, 64, 2))
    rows = b.op("Gemm", b.op("Flatten", "x", axis=2), b.normal(8, 2), b.normal(192, 1))
    dropped = b.op("Gemm", b.op("Flatten", "x", axis=2), b.normal(8, 2), b.normal(2), beta=0.0)
    shapes = {heads: [3, 64, 3], column: [3, 64, 2], rows: [192, 2], dropped: [192, 2]}
    graph = graph_of(b.model({"x": [3, 64, 8]}, shapes))
    assert [layer.bias for layer in matrix_layers(graph, FP16)] == [""] * 4


def untouched(build: Any) -> None:
    """Checks that no constant of the model that ``build`` makes is chosen."""
    b = GraphBuilder(1)
    graph = graph_of(b.model({"x": [64, 8]}, {build(b): [64, 8]}))
    fitted = fit_weights(graph, samples_of((64, 8), 2), FP16)
    assert fitted.layers == () and dict(fitted.constants) == {}
    assert fitted.graph.proto == graph.proto


def shared_weight(b: GraphBuilder) -> str:
    weight = b.normal(8, 8)
    return str(b.op("MatMul", b.op("MatMul", "x", weight), weight))


def looked_up(b: GraphBuilder) -> str:
    table = b.normal(8, 8)
    rows = b.op("Gather", table, b.weight([0, 1, 2, 3, 4, 5, 6, 7], np.int64))
    return str(b.op("Add", b.op("MatMul", "x", table), b.op("ReduceMean", rows, axes=[0])))


def computed(b: GraphBuilder) -> str:
    return str(b.op("MatMul", "x", b.op("Tanh", b.normal(8, 8))))


@pytest.mark.parametrize("build", [shared_weight, looked_up, computed])
def test_weights_that_are_read_otherwise_or_computed_are_untouched(build: Any) -> None:
    untouched(build)


def test_a_constant_node_takes_the_chosen_weight() -> None:
    b = GraphBuilder(1)
    model = b.model({"x": [64, 8]}, {b.op("MatMul", "x", b.normal(8, 8)): [64, 8]})
    tensor = model.graph.initializer.pop()
    node = helper.make_node("Constant", [], [tensor.name], "c", value=tensor)
    model.graph.node.insert(0, node)
    graph = graph_of(model)
    fitted = fit_weights(graph, samples_of((64, 8), 1), FP16)
    assert fitted.layers[0].kept
    value = numpy_helper.to_array(fitted.graph.proto.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(value, fitted.constants[tensor.name])


def test_infinities_zeros_and_a_single_row() -> None:
    b = GraphBuilder(1)
    weight = normal(0, 8, 8)
    weight[0, 0], weight[1] = -np.inf, 0.0
    graph = graph_of(b.model({"x": [1, 8]}, {b.op("MatMul", "x", b.weight(weight)): [1, 8]}))
    single = fit_weights(graph, samples_of((1, 8), 1), FP16)
    assert [row.kept for row in single.layers] == [False]
    assert single.graph.proto == graph.proto
    many = fit_weights(graph, samples_of((1, 8), 30), FP16)
    assert many.layers[0].kept
    (chosen,) = many.constants.values()
    assert chosen[0, 0] == -np.inf and (chosen[1] == 0.0).all()
    rest = weight.ravel()[1:]
    np.testing.assert_allclose(chosen.ravel()[1:], rest, rtol=2.0**-10)


def test_the_time_is_asked_before_each_inference_and_each_layer() -> None:
    asked: list[int] = []
    graph = graph_of(convolutional())
    samples = samples_of((1, 6, 17, 17), 3)
    found = fit_weights(graph, samples, FP16, before_each=lambda: asked.append(1))
    assert found.layers and len(asked) == 3 + len(found.layers)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_both_weights_of_a_recurrent_layer_gain(op: str) -> None:
    more = {"linear_before_reset": 1} if op == "GRU" else {}
    graph = graph_of(recurrent(op, "bidirectional", **more))
    fitted = fit_weights(graph, steps_of(12), FP16)
    assert [(row.weight, row.kept) for row in fitted.layers] == [("w", True), ("r", True)]
    check_neighbours(graph, fitted)
    unseen = steps_of(6, first=50)
    assert snr_on(fitted.graph, graph, unseen) > snr_on(nearest(graph), graph, unseen) + 1.0


def steps_of(count: int, first: int = 0) -> list[Sample]:
    """Correlated inputs of :func:`recurrent`."""
    found = (sample.arrays["x"] for sample in samples_of((18, 12), count, first))
    return [Sample(f"s{n}", {"x": x.reshape(9, 2, 12)}) for n, x in enumerate(found)]


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (recurrent("GRU"), ["w"]),  # its hidden states are scaled before the product
        (recurrent("LSTM", gives="last"), ["w"]),  # nothing shows the hidden states
        (recurrent("LSTM", layout=1), []),
    ],
    ids=["reset", "last", "batch-first"],
)
def test_recurrent_weights_that_cannot_be_seen_are_left(
    model: onnx.ModelProto, weights: list[str]
) -> None:
    assert [layer.weight for layer in matrix_layers(graph_of(model), FP16)] == weights


# Layers that stay in FP32


def by_name(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """The initialisers of a model."""
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def perceptron() -> Graph:
    """Two MatMuls with an Add behind each."""
    b = GraphBuilder(1)
    x = b.op("Relu", b.op("Add", b.op("MatMul", "x", b.normal(16, 16)), b.normal(16)))
    x = b.op("Add", b.op("MatMul", x, b.normal(16, 4)), b.normal(4))
    return graph_of(b.model({"x": [64, 16]}, {x: [64, 4]}))


def test_layers_kept_in_fp32_keep_their_weights() -> None:
    graph, samples = perceptron(), samples_of((64, 16), 2)
    fitted = fit_weights(graph, samples, FP16)
    first, second = fitted.layers
    assert first.kept and second.kept and first.bias and second.bias
    plan = PrecisionPlan(FP16, frozenset({first.layer}))
    written = by_name(to_typed(fitted.graph, plan))
    np.testing.assert_array_equal(written[first.weight], graph.constants[first.weight])
    # The bias is read by an Add that is reduced, but belongs to the weight.
    half = graph.constants[first.bias].astype(np.float16)
    np.testing.assert_array_equal(written[f"{first.bias}__fp16"], half)
    chosen = fitted.constants[second.weight].astype(np.float16)
    np.testing.assert_array_equal(written[f"{second.weight}__fp16"], chosen)


def values_of(runner: Any, plan: PrecisionPlan, samples: Sequence[Sample]) -> NDArray[Any]:
    """The only output of all samples."""
    return np.stack([next(iter(found.values())) for found in runner.outputs(plan, samples)])


def plans_of(graph: Graph) -> list[PrecisionPlan]:
    """Everything reduced, nothing, all Adds in FP32, each layer alone in FP32."""
    names = [layer.name for layer in graph.layers_at(FP16)]
    adds = frozenset(layer.name for layer in graph.layers if layer.op == "Add")
    sets = [frozenset[str](), frozenset(names), adds, *(frozenset({name}) for name in names)]
    return [PrecisionPlan(FP16, pins) for pins in sets]


def test_all_emulators_read_the_weights_that_the_plan_asks_for() -> None:
    graph, samples = perceptron(), samples_of((64, 16), 2)
    fitted = fit_weights(graph, samples, FP16)
    worker = EmulationServer(**server_arguments(fitted.graph, FP16, 1, CPU))
    emulator, whole = EmulatedRunner(fitted.graph, FP16), WholeModelRunner(fitted.graph)
    for plan in plans_of(fitted.graph):
        restored = {
            name: graph.constants[name]
            for row in fitted.layers
            for name in (row.weight, row.bias)
            if row.layer in plan.pinned
        }
        # A graph that has these constants only, and no others to choose from.
        other = graph.with_constants({**fitted.constants, **restored})
        expected = values_of(EmulatedRunner(other, FP16), plan, samples)
        for one in (emulator, worker):
            np.testing.assert_array_equal(values_of(one, plan, samples), expected)
        expected = values_of(WholeModelRunner(other), plan, samples)
        np.testing.assert_array_equal(values_of(whole, plan, samples), expected)


def test_in_fp32_a_fitted_network_gives_what_the_original_gives() -> None:
    graph, samples = perceptron(), samples_of((64, 16), 2)
    fitted = fit_weights(graph, samples, FP16)
    fp32 = PrecisionPlan(Precision.FP32)
    runners = (EmulatedRunner(g, FP16) for g in (graph, fitted.graph))
    before, after = (values_of(runner, fp32, samples) for runner in runners)
    np.testing.assert_array_equal(before, after)
    assert fitted.graph.settled(PrecisionPlan(FP16)).proto == fitted.graph.proto
