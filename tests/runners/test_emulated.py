"""The node-by-node emulator against the emulated model as a whole on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers, to_emulated
from bisect_trt.model.graph import Graph
from bisect_trt.model.switched import to_switched
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.second_emulator import WholeModelRunner
from fixtures.build import GraphBuilder
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, residual
from tests.conftest import Sessions, run_model

ULP = {Precision.FP16: 2.0**-10, Precision.BF16: 2.0**-7, Precision.TF32: 2e-6}
UNOPTIMISED = ort.GraphOptimizationLevel.ORT_DISABLE_ALL


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16, Precision.TF32])
def test_equals_the_emulated_model(make: Callable[[], Fixture], base: Precision) -> None:
    fixture = make()
    runner = EmulatedRunner(fixture.model, base)
    layers = [layer.name for layer in list_layers(fixture.model)]
    for plan in (
        PrecisionPlan(base),
        PrecisionPlan(base, layers[::2]),
        PrecisionPlan(base, layers[1::2], Precision.TF32),
        PrecisionPlan(base, layers),
        PrecisionPlan("fp32"),
    ):
        expected = run_model(to_emulated(fixture.model, plan), fixture.inputs, UNOPTIMISED)
        got = next(runner.outputs(plan, [Sample("s", fixture.inputs)]))
        for output, value in zip(fixture.model.graph.output, expected, strict=True):
            largest = np.nanmax(np.abs(value), initial=0.0)
            same = np.isclose(
                got[output.name], value, rtol=2e-6, atol=2e-6 * largest, equal_nan=True
            )
            # Sums are taken in another order where a weight is an input: a rounding may then fall
            # to the other side.
            assert same.mean() > 0.85
            np.testing.assert_allclose(
                got[output.name], value, rtol=2 * ULP[base], atol=ULP[base] * largest
            )


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
def test_a_written_out_layernorm_may_be_pinned_as_a_whole(base: Precision) -> None:
    """ONNX Runtime fuses it with the casts beside it, and has no kernel for that in BF16."""
    fixture = encoder_decomposed()
    sample = Sample("s", fixture.inputs)
    names = [layer.name for layer in list_layers(fixture.model)]
    for prefix in ("/head", "/encoder/layers.0/norm1"):
        plan = PrecisionPlan(base, [name for name in names if name.startswith(prefix)])
        assert plan.pinned
        one, other = (
            next(runner.outputs(plan, [sample]))
            for runner in (WholeModelRunner(fixture.model), EmulatedRunner(fixture.model, base))
        )
        for name, value in one.items():
            largest = np.abs(value).max()
            np.testing.assert_allclose(other[name], value, atol=4 * ULP[base] * largest)


def test_trace_gives_accumulated_and_introduced_errors() -> None:
    fixture = encoder_decomposed()
    sample = Sample("s", fixture.inputs)
    runner = EmulatedRunner(fixture.model)
    rows = {v.layer: v for v in runner.trace(sample, PrecisionPlan("fp16"))}
    assert list(rows) == [layer.name for layer in list_layers(fixture.model)]
    square = rows["/encoder/layers.0/norm1/Pow"]
    assert np.isinf(square.introduced).any() and np.isfinite(square.reference).all()
    add = rows["/embed/Add"]
    assert np.array_equal(add.introduced, add.accumulated), "the first layer has nothing upstream"
    last = rows["/head/MatMul"]
    low = next(runner.outputs(PrecisionPlan("fp16"), [sample]))["logits"]
    assert np.array_equal(last.accumulated, low)
    alone = np.abs(last.introduced - last.reference).max()
    assert alone < np.abs(last.accumulated - last.reference).max() / 10


def test_effects_are_the_outputs_with_one_layer_lowered() -> None:
    fixture = residual()
    sample = Sample("s", fixture.inputs)
    runner = EmulatedRunner(fixture.model)
    layers = [layer.name for layer in list_layers(fixture.model)]
    wanted = {layers[0], layers[50], layers[-1]}
    sensitivities = dict(runner.sensitivities(sample, Precision.FP16, wanted))
    assert set(sensitivities) == wanted
    for name, outputs in sensitivities.items():
        others = [other for other in layers if other != name]
        expected = next(runner.outputs(PrecisionPlan("fp16", others), [sample]))
        assert np.array_equal(outputs["y"], expected["y"])


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
def test_runs_that_begin_at_their_layer_give_the_same_bits(
    make: Callable[[], Fixture], base: Precision
) -> None:
    fixture = make()
    sample = Sample("s", fixture.inputs)
    runner = EmulatedRunner(fixture.model, base)
    layers = [layer.name for layer in runner.graph.layers_at(base)]
    whole = dict(runner.sensitivities(sample, base, layers))
    begun = dict(runner.sensitivities_from_there(sample, base, layers))
    assert begun.keys() == whole.keys() == set(layers)
    for layer, outputs in whole.items():
        found = begun[layer]
        assert found is not None and outputs is not None and found.keys() == outputs.keys()
        for name, value in outputs.items():
            assert np.array_equal(found[name], value, equal_nan=True)


def test_a_layer_that_breaks_a_run_breaks_no_other() -> None:
    """Alone in FP16 the first product overflows, and its row is looked up beyond the table."""
    b = GraphBuilder(0)
    large = b.op("Mul", b.op("Add", "x", b.weight(0.1)), b.weight(7e4))
    back = b.op("Mul", large, b.weight(1 / 7e4))
    row = b.op("Cast", back, to=TensorProto.INT64)
    rows = b.op("Gather", b.weight(np.eye(3)), row)
    out = b.op("Add", rows, b.weight(0.1))
    model = b.model({"x": [2]}, {out: [2, 3], large: [2]})
    sample = Sample("s", {"x": np.array([1.2, 0.2], np.float32)})
    runner, wanted = EmulatedRunner(model), ["/Add", "/Mul", "/Add_1"]
    begun = dict(runner.sensitivities_from_there(sample, Precision.FP16, wanted))
    whole = dict(runner.sensitivities(sample, Precision.FP16, wanted))
    assert begun.keys() == whole.keys() and begun["/Mul"] is None and whole["/Mul"] is None
    for layer in wanted[::2]:
        one, other = begun[layer], whole[layer]
        assert one is not None and other is not None
        assert all(np.array_equal(one[name], other[name]) for name in (out, large))


def test_evaluations_open_no_further_sessions(sessions_opened: Sessions) -> None:
    fixture = residual()
    runner = EmulatedRunner(fixture.model)
    layers = [layer.name for layer in list_layers(fixture.model)]
    for plan in (PrecisionPlan("fp16"), PrecisionPlan("fp16", layers)):
        next(runner.outputs(plan, [Sample("s", fixture.inputs)]))
    opened = len(sessions_opened)
    for start in range(0, len(layers), 7):
        next(runner.outputs(PrecisionPlan("fp16", layers[start:]), [Sample("s", fixture.inputs)]))
    assert len(sessions_opened) == opened


def test_weights_stored_in_bf16() -> None:
    """ONNX Runtime gets them as raw bits; the model itself converts them to FP32 before use."""
    info = onnx.helper.make_tensor_value_info
    f = onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.asarray([1.5, -2.0], ml_dtypes.bfloat16), "w")
    nodes = [
        onnx.helper.make_node("Cast", ["w"], ["wf"], "up", to=f),
        onnx.helper.make_node("Mul", ["x", "wf"], ["y"], "mul"),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [info("x", f, [2])], [info("y", f, [2])], [weight])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    runner = EmulatedRunner(model)
    sample = Sample("s", {"x": np.float32([3.0, 5.0])})
    assert next(runner.outputs(PrecisionPlan("fp16"), [sample]))["y"].tolist() == [4.5, -10.0]


def test_inputs_in_another_memory_order_are_read_right() -> None:
    """ONNX Runtime borrows NumPy's memory: a copy made on the way must outlive the walk."""
    fixture = encoder_decomposed()
    (name, array), *_ = fixture.inputs.items()
    plain, turned = (
        Sample("plain", {name: array}),
        Sample("turned", {name: np.asfortranarray(array)}),
    )
    runner = EmulatedRunner(fixture.model)
    plan = PrecisionPlan(Precision.FP16)
    walks = [[row.reference for row in runner.trace(sample, plan)] for sample in (plain, turned)]
    assert all(np.array_equal(one, other) for one, other in zip(*walks, strict=True))
    layer = runner.sensitivities(turned, Precision.FP16, ["/head/MatMul"])
    assert np.isfinite(dict(next(layer)[1] or {})["logits"]).all()


def moving_model() -> onnx.ModelProto:
    """Products with values moved between them: in one line, for two readers, in two parts, to an
    output, and joined.
    """
    f, node = onnx.TensorProto.FLOAT, onnx.helper.make_node
    random = np.random.default_rng(3)
    weights = {
        name: (random.standard_normal(shape) * 300).astype(np.float32)
        for name, shape in (("w", (6, 8)), ("v", (2, 6)), ("u", (2, 5)))
    }
    shapes = {"four": [4, 2, 2], "pick": [0, 0, 2, 3, 1]}
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"),
        node("Reshape", ["a", "four"], ["b"], "reshape"),
        node("Transpose", ["b"], ["c"], "transpose", perm=[1, 0, 2]),
        node("MatMul", ["c", "v"], ["d"], "second"),
        node("Transpose", ["d"], ["e"], "turn", perm=[1, 0, 2]),
        node("Relu", ["e"], ["f"], "relu"),
        node("Gather", ["e", "pick"], ["g"], "gather"),
        node("Split", ["g"], ["h", "i"], "split", axis=2, num_outputs=2),
        node("Exp", ["h"], ["j"], "exp"),
        node("Concat", ["i", "j"], ["k"], "concat", axis=2),
        node("Squeeze", ["i"], ["l"], "squeeze"),
        node("Sin", ["k"], ["m"], "sin"),
    ]
    info = onnx.helper.make_tensor_value_info
    initial = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items() if n != "u"]
    initial += [onnx.numpy_helper.from_array(np.int64(a), n) for n, a in shapes.items()]
    graph = onnx.helper.make_graph(
        nodes, "g", [info("x", f, [2, 6])], [info(o, f, None) for o in "flm"], initial
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8
    )


def test_moved_values_are_rounded_once_and_as_in_the_emulated_model() -> None:
    """Under any set of pins, bit for bit."""
    model = moving_model()
    x = np.random.default_rng(4).standard_normal((2, 6)).astype(np.float32) / 1e4
    sample, names = Sample("s", {"x": x}), [layer.name for layer in list_layers(model)]
    assert len(names) == 12
    runner, graph = EmulatedRunner(model), Graph(model)
    seen = set()
    random = np.random.default_rng(5)
    for _ in range(100):
        plan = PrecisionPlan("fp16", [name for name in names if random.random() < 0.6])
        expected = run_model(to_emulated(graph, plan), {"x": x}, UNOPTIMISED)
        got = next(runner.outputs(plan, [sample]))
        for output, value in zip("flm", expected, strict=True):
            np.testing.assert_array_equal(got[output], value, err_msg=str(plan.pinned))
        seen.add(b"".join(value.tobytes() for value in expected))
    assert len(seen) > 20
    switched = to_switched(graph, Precision.FP16, Precision.FP32)
    results = {n.output[0] for n in switched.model.graph.node if n.op_type == "If"}
    # What only moves has none, unless one layer alone reads it.
    assert results.isdisjoint("eil") and results.issuperset("abcdfgjm")


@pytest.mark.parametrize("op", ["Identity", "Transpose", "MatMul", "Relu", "Reshape"])
@pytest.mark.parametrize("low", ["fp16", "bf16", "tf32"])
def test_what_reads_a_pinned_branch_rounds_it(op: str, low: str) -> None:
    """A body rounds for its own layer only, so the one layer that reads it has to for itself."""
    b = GraphBuilder(0)
    bodies = {}
    for branch in ("then_branch", "else_branch"):
        node = helper.make_node("MatMul", ["x", b.normal(4, 4)], [f"{branch}_y"], branch)
        result = helper.make_tensor_value_info(f"{branch}_y", TensorProto.FLOAT, [4, 4])
        bodies[branch] = helper.make_graph([node], branch, [], [result])
    flag = b.op("Greater", b.op("ReduceMax", "x", keepdims=0), b.weight(-9.0))
    chosen = b.op("If", flag, **bodies)
    rest = {"MatMul": [b.normal(4, 4)], "Reshape": [b.weight([2, 8], np.int64)]}
    b.rename_output(b.op(op, chosen, *rest.get(op, [])), "y")
    model = b.model({"x": [4, 4]}, {"y": [2, 8] if op == "Reshape" else [4, 4]})
    inputs = {"x": np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)}
    layers = ["/If", f"/{op}"]
    runner = EmulatedRunner(model, Precision(low))
    for pinned in ([], layers[:1], layers[1:], layers):
        plan = PrecisionPlan(low, pinned)
        (expected,) = run_model(to_emulated(model, plan), inputs, UNOPTIMISED)
        got = next(runner.outputs(plan, [Sample("s", inputs)]))["y"]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pinned", [("/MatMul",), ("/MatMul", "/Sigmoid"), ()])
def test_an_infinity_that_fp16_makes_goes_through_a_product_pinned_in_tf32(
    pinned: tuple[str, ...],
) -> None:
    """Splitting it would give NaN, and blame the layers before for what saturates behind."""
    b = GraphBuilder(0)
    weight = b.weight(np.abs(b.random.normal(size=(4, 4))))
    b.rename_output(b.op("Sigmoid", b.op("MatMul", b.op("Exp", "x"), weight)), "y")
    model = b.model({"x": [1, 4]}, {"y": [1, 4]})
    sample = Sample("s", {"x": np.float32([[12.0, 1.0, 2.0, 3.0]])})  # e to the 12th is too large
    plan = PrecisionPlan(Precision.FP16, pinned, Precision.TF32)
    runner = EmulatedRunner(model, Precision.FP16)
    for outputs in (
        next(runner.outputs(plan, [sample])),
        next(WholeModelRunner(model).outputs(plan, [sample])),
        {v.tensor: v.accumulated for v in runner.trace(sample, plan)},
    ):
        np.testing.assert_array_equal(outputs["y"], np.ones((1, 4), np.float32))
