"""Sources that are FP16 or BF16 already: lifted, judged with their own roundings, and written with
the types of their inputs and outputs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import bisect_trt
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.lifted import lift
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.tensors.tensor_types import infer_types
from fixtures.reports import t5_fp16src
from tests.conftest import run_model
from tests.test_cli import call

H, F = TensorProto.FLOAT16, TensorProto.FLOAT


def test_the_reported_model_is_judged_as_it_is(tmp_path: Path) -> None:
    """0.4.0 kept 8 of 31 layers, called it robust, and shipped infinities on all 8 inputs."""
    report = t5_fp16src()
    by_numpy = ReferenceEvaluator(report.model)
    with np.errstate(all="ignore"):
        outputs = [by_numpy.run(None, dict(x))[0] for x in report.inputs]
    assert not np.isfinite(np.concatenate([o.ravel() for o in outputs])).all(), "by NumPy's float16"
    result = bisect_trt.bisect(
        report.model, list(report.inputs), runner="emulated", out=tmp_path, robust=0
    )
    verdicts = result.outputs.set_index("baseline")["verdict"]
    assert verdicts["fp16"] == "non-finite" and verdicts["fp32"] == "pass"
    assert set(result.pinned) - result.plan.held == report.layers
    typed = ReferenceEvaluator(onnx.load(tmp_path / "model.typed.onnx"))
    source = lift(report.model)
    assert source is not None and source.reduced == 59
    exact = ReferenceEvaluator(source.model)
    for x in report.inputs:
        shipped, right = typed.run(None, dict(x))[0], exact.run(None, dict(x))[0]
        assert np.isfinite(shipped).all()
        noise = np.sqrt(np.mean((shipped - right) ** 2) / np.mean(right**2))
        assert noise < 1e-2, "40 dB, node by node in NumPy's float16"


def half_model() -> onnx.ModelProto:
    """FP16 inputs, outputs and weights; one output is read inside too."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "one"),
        helper.make_node("Relu", ["a"], ["h"], "relu"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "two"),
    ]
    weight = numpy_helper.from_array(random.normal(0, 0.4, (8, 8)).astype(np.float16), "w")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", H, [4, 8])],
        [helper.make_tensor_value_info(n, H, [4, 8]) for n in ("h", "y")],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


X = {"x": np.sin(np.arange(32)).reshape(4, 8).astype(np.float16)}


@pytest.mark.parametrize("pinned", [(), ("one",), ("relu",), ("two",), ("one", "relu", "two")])
def test_inputs_and_outputs_keep_their_types(pinned: tuple[str, ...]) -> None:
    lifted = lift(half_model())
    assert lifted is not None and lifted.islands == frozenset()
    graph = Graph(lifted.model, stored_inputs=lifted.inputs, stored_outputs=lifted.outputs)
    assert [x.name for x in graph.layers_at(Precision.FP16)] == ["one", "relu", "two"]
    typed = to_typed(graph, PrecisionPlan("fp16", frozenset(pinned)))
    onnx.checker.check_model(typed, full_check=True)
    assert typed.graph.input[0].type.tensor_type.elem_type == H
    assert [o.type.tensor_type.elem_type for o in typed.graph.output] == [H, H]
    types = infer_types(typed)
    made = {n.name: types.type_of(n.output[0]) for n in typed.graph.node}
    assert all(made[n] == (F if n in pinned else H) for n in ("one", "relu", "two"))
    if not pinned:
        assert [n.op_type for n in typed.graph.node] == ["MatMul", "Relu", "MatMul"]
    exact = ReferenceEvaluator(lifted.model).run(None, X)
    for got, right in zip(run_model(typed, X), exact, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=4e-3)


def test_a_run_a_verification_and_an_export_of_it_agree(tmp_path: Path) -> None:
    onnx.save(half_model(), tmp_path / "m.onnx")
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=X["x"] + np.float16(number / 8))
    common = ["--input", str(tmp_path / "*.npz"), "--runner", "emulated"]
    run = call("run", str(tmp_path / "m.onnx"), *common, "--out", str(tmp_path / "run"))
    assert run.exit_code == 0 and "run in FP16 in the source already" in run.output
    plan = tmp_path / "run" / "plan.json"
    model, saved = str(tmp_path / "m.onnx"), ["--plan", str(plan)]
    again = call("verify", model, *common, *saved, "--out", str(tmp_path / "verify"))
    assert again.exit_code == 0, again.output
    target = tmp_path / "out.onnx"
    call("export", model, *saved, "--format", "onnx", "-o", str(target))
    assert target.read_bytes() == (tmp_path / "run" / "model.typed.onnx").read_bytes()
    weak = call("export", model, *saved, "--format", "trtexec")
    assert weak.exit_code == 2 and "use --format onnx" in weak.output


def test_islands_and_bodies(tmp_path: Path) -> None:
    """What is FP32 in the source stays so; bodies are lifted with their types."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2, 4] x, bool c) => (float[2, 4] y) {
        [down] h = Cast<to = 10>(x)
        [choose] b = If(c) <
            then_branch = t () => (float16[2, 4] p) { p = Neg(h) },
            else_branch = e () => (float16[2, 4] q) { q = Abs(h) }
        >
        [up] f = Cast<to = 1>(b)
        [island] s = Exp(f)
        [back] d = Cast<to = 10>(s)
        [last] z = Relu(d)
        [out] y = Cast<to = 1>(z)
    }"""
    model = onnx.parser.parse_model(text)
    lifted = lift(model)
    assert lifted is not None and lifted.islands == {"up", "island", "out"}
    assert lifted.reduced == 4 and lifted.nodes == 7
    onnx.checker.check_model(lifted.model, full_check=True)
    x = {"x": np.float32([[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]]), "c": np.array(True)}
    right = np.maximum(np.exp(-x["x"]), 0)
    np.testing.assert_allclose(run_model(lifted.model, x)[0], right, rtol=1e-6)
    typed = to_typed(Graph(lifted.model), PrecisionPlan("fp16", lifted.islands))
    types = infer_types(typed)
    assert [types.type_of(n) for n in ("h", "s")] == [H, F]


def test_bfloat16_is_lifted_where_nobody_asks_otherwise(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]>
    g (float[2, 4] x) => (float[2, 4] y) {
        [down] h = Cast<to = 16>(x) [double] d = Add(h, h) [up] y = Cast<to = 1>(d)
    }"""
    x = {"x": np.float32([[1.004, 2, 3, 4], [5, 6, 7, 8]])}
    model = onnx.parser.parse_model(text)
    result = bisect_trt.bisect(model, x, runner="emulated", out=tmp_path, robust=0)
    assert result.precision is Precision.BF16
    assert "bf16" in set(result.outputs["baseline"])


def test_an_fp32_model_is_not_lifted() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float16[2] x) => (float[2] y) { y = Cast<to = 1>(x) }"""
    assert lift(onnx.parser.parse_model(text)) is None
