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
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.lifted import lift
from bisect_trt.model.tensor_types import infer_types
from bisect_trt.model.typed import to_typed
from fixtures.reports import t5_fp16src
from tests.command import call
from tests.conftest import run_model

H, F = TensorProto.FLOAT16, TensorProto.FLOAT


def test_the_reported_model_is_judged_as_it_is(tmp_path: Path) -> None:
    """0.4.0 kept 8 of 31 layers, called it validated, and shipped infinities on all 8 inputs."""
    report = t5_fp16src()
    by_numpy = ReferenceEvaluator(report.model)
    with np.errstate(all="ignore"):
        outputs = [by_numpy.run(None, dict(x))[0] for x in report.inputs]
    assert not np.isfinite(np.concatenate([o.ravel() for o in outputs])).all(), "by NumPy's float16"
    result = bisect_trt.bisect(
        report.model, list(report.inputs), runner="emulated", out=tmp_path, robust=0, repair="none"
    )
    verdicts = result.outputs.set_index("baseline")["outcome"]
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
    assert lifted.reduced == 4 and lifted.sentence.startswith("4 nodes of 7 run in FP16")
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
    asked = bisect_trt.bisect(
        model, x, precision="fp16", runner="emulated", out=tmp_path / "asked", robust=0
    )
    assert asked.precision is Precision.FP16


def test_an_fp32_model_is_not_lifted() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float16[2] x) => (float[2] y) { y = Cast<to = 1>(x) }"""
    assert lift(onnx.parser.parse_model(text)) is None


def parsed(body: str, inputs: str, outputs: str, weights: str = "") -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g ({inputs}) => ({outputs}) {f"<{weights}>" if weights else ""} {{ {body} }}"""
    return onnx.parser.parse_model(text)


INPUTS = [{"x": np.sin(np.arange(8.0) + n).astype(np.float32).reshape(2, 4)} for n in range(3)]


def finite_by_numpy(folder: Path, inputs: list[dict[str, np.ndarray]]) -> bool:
    """Whether the model to ship is valid and finite in NumPy's float16."""
    model = onnx.load(folder / "model.typed.onnx")
    onnx.checker.check_model(model, full_check=True)
    with np.errstate(all="ignore"):
        outputs = [a for x in inputs for a in ReferenceEvaluator(model).run(None, dict(x))]
    return all(np.isfinite(a).all() for a in outputs)


def test_what_is_reduced_in_a_body_alone_is_judged(tmp_path: Path) -> None:
    model = parsed(
        """[choose] b = If(c) <
            then_branch = t () => (float[2, 4] p) {
                h = Cast<to = 10>(x) k = Constant<value_float = 1000.0>() big = Cast<to = 10>(k)
                m = Mul(h, big) s = Mul(m, m) q = Div(s, big) p = Cast<to = 1>(q)
            },
            else_branch = e () => (float[2, 4] n) { n = Neg(x) }
        >
        [last] y = Neg(b)""",
        "float[2, 4] x, bool c",
        "float[2, 4] y",
    )
    inputs = [x | {"c": np.array(True)} for x in INPUTS]
    result = bisect_trt.bisect(model, inputs, runner="emulated", out=tmp_path, robust=0)
    assert result.passed and "choose" in set(result.pinned) - result.plan.held
    assert finite_by_numpy(tmp_path, inputs)
    assert any("is reduced as a whole" in f.message for f in result.findings)


def test_a_model_of_which_only_the_borders_are_reduced_is_searched(tmp_path: Path) -> None:
    model = parsed(
        """[up] f = Cast<to = 1>(x) [large] l = Mul(f, k) [square] s = Mul(l, l)
        [down] d = Div(s, m) [last] y = Cast<to = 10>(d)""",
        "float16[2, 4] x",
        "float16[2, 4] y",
        "float k = {1e3}, float m = {1e5}",
    )
    inputs = [{"x": x["x"].astype(np.float16)} for x in INPUTS]
    lifted = lift(model)
    assert lifted is not None and (lifted.reduced, lifted.islands) == (0, frozenset())
    result = bisect_trt.bisect(
        model, inputs, runner="emulated", out=tmp_path, robust=0, repair="none"
    )
    assert result.passed and {"square", "down"} <= set(result.pinned) and not result.plan.held
    assert finite_by_numpy(tmp_path, inputs)


def test_outputs_that_other_nodes_do_not_make_alone(tmp_path: Path) -> None:
    """One is an input, one a weight, one is read in a body too."""
    model = parsed(
        """[first] a = Mul(x, w)
        [choose] b = If(c) <
            then_branch = t () => (float16[2, 4] p) { p = Mul(a, a) },
            else_branch = e () => (float16[2, 4] n) { n = Neg(a) }
        >
        [last] y = Div(b, w)""",
        "float16[2, 4] x, bool c",
        "float16[2, 4] y, float16[2, 4] a, float16[4] w, float16[2, 4] x",
    )
    weight = np.float16([300, 200, 100, 50])
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    inputs = [{"x": x["x"].astype(np.float16), "c": np.array(True)} for x in INPUTS]
    result = bisect_trt.bisect(model, inputs, runner="emulated", out=tmp_path, robust=0)
    assert result.passed and "choose" in result.pinned
    assert finite_by_numpy(tmp_path, inputs)
    typed = onnx.load(tmp_path / "model.typed.onnx")
    assert [o.name for o in typed.graph.output] == ["y", "a", "w", "x"]
    assert {o.type.tensor_type.elem_type for o in typed.graph.output} == {H}


def test_an_output_that_its_own_type_cannot_hold_is_no_pass(tmp_path: Path) -> None:
    model = parsed("[large] y = Mul(x, k)", "float16[4] x", "float16[4] y")
    model.graph.initializer.append(numpy_helper.from_array(np.float16(6e4), "k"))
    inputs = {"x": np.float16([1, 2, 3, 4])}
    result = bisect_trt.bisect(model, inputs, runner="emulated", out=tmp_path, robust=0)
    assert not result.passed and result.exit_code == 1
    assert (
        "'y' reaches 2.4e+05" in result.sentence and "declare that output FLOAT" in result.sentence
    )
    fits = {"x": np.float16([1, 0.5, 0.25, -1])}
    again = bisect_trt.bisect(model, fits, runner="emulated", out=tmp_path / "fits", robust=0)
    assert again.passed


def test_an_output_that_is_not_judged_is_asked_nothing(tmp_path: Path) -> None:
    outputs = "float16[4] y, float16[4] a"
    model = parsed("[turned] y = Neg(x) [large] a = Mul(x, k)", "float16[4] x", outputs)
    model.graph.initializer.append(numpy_helper.from_array(np.float16(6e4), "k"))
    inputs = {"x": np.float16([1, 2, 3, 4])}
    for judged, passed in (("a", False), ("y", True)):
        result = bisect_trt.bisect(
            model, inputs, runner="emulated", robust=0, out=tmp_path / judged, outputs=(judged,)
        )
        assert result.passed == passed
        assert passed or "Output 'a' reaches 2.4e+05" in result.sentence


def test_what_is_not_judged_is_refused() -> None:
    both = parsed(
        "a = Cast<to = 10>(x) b = Neg(a) c = Cast<to = 1>(b) d = Cast<to = 16>(c) "
        "e = Neg(d) y = Cast<to = 1>(e)",
        "float[4] x",
        "float[4] y",
    )
    with pytest.raises(BadInputError, match="mixes FP16 and BF16 nodes"):
        lift(both)
    wrong = parsed("[r] y = Relu(x)", "float[4] x", "float16[4] y")
    with pytest.raises(BadInputError, match="'y' is declared FLOAT16, and Relu 'r' makes FLOAT"):
        lift(wrong)


def test_inspect_and_mark_know_the_layers_of_the_source(tmp_path: Path) -> None:
    onnx.save(half_model(), tmp_path / "m.onnx")
    told = call("inspect", str(tmp_path / "m.onnx"))
    assert told.exit_code == 0 and "relu" in told.output and "lift_x" not in told.output
    target = tmp_path / "marked.onnx"
    marked = call(
        "mark", str(tmp_path / "m.onnx"), "--mark", "one", "--mark", "*", "-o", str(target)
    )
    assert marked.exit_code == 0, marked.output
    model = onnx.load(target)
    onnx.checker.check_model(model, full_check=True)
    assert [o.name for o in model.graph.output] == ["h", "y", "a"]


def test_an_island_of_a_written_out_normalisation_is_run(tmp_path: Path) -> None:
    """ONNX Runtime's own fusion makes a node of two types of it."""
    model = parsed(
        """[one] h = MatMul(x, w) [up] f = Cast<to = 1>(h)
        [mean] m = ReduceMean<axes = [-1]>(f) [sub] d = Sub(f, m) [pow] p = Pow(d, two)
        [var] v = ReduceMean<axes = [-1]>(p) [add] e = Add(v, eps) [root] r = Sqrt(e)
        [div] n = Div(d, r) [scale] s = Mul(n, gain) [shift] t = Add(s, bias)
        [down] c = Cast<to = 10>(t) [last] y = MatMul(c, w)""",
        "float16[2, 4] x",
        "float16[2, 4] y",
        "float two = {2.0}, float eps = {1e-5}, float[4] gain = {1.0, 0.9, 1.1, 1.2}, "
        "float[4] bias = {0.0, 0.1, 0.2, 0.3}",
    )
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float16)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    inputs = [{"x": x["x"].astype(np.float16)} for x in INPUTS]
    result = bisect_trt.bisect(model, inputs, runner="emulated", out=tmp_path, robust=0)
    assert result.passed and {"mean", "var", "shift"} <= result.plan.held
    assert finite_by_numpy(tmp_path, inputs)
