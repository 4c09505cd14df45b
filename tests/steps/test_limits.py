"""Answers that would look better than they are: each says what limits it, or is refused."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Cause
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.report.headline import headline
from bisect_trt.runners.ort_session import reference_session
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import waves
from fixtures.models import healthy, residual, unsavable
from tests.command import run_of
from tests.conftest import Finished, run_model, same
from tests.copies import FEW
from tests.model.test_normalised import function_model
from tests.models import DETECTOR, page
from tests.networks import parsed

F = TensorProto.FLOAT
SQUARE = "float[4, 4] x"


def model_of(
    nodes: list[onnx.NodeProto],
    shape: list[int],
    out: dict[str, Any] | None = None,
    domains: tuple[str, ...] = (),
    **weights: Any,
) -> onnx.ModelProto:
    """A model from x of ``shape`` to y, or to the outputs with the shapes of ``out``."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", F, shape)],
        [helper.make_tensor_value_info(n, F, s) for n, s in (out or {"y": None}).items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(model: onnx.ModelProto, x: NDArray[np.float32], out: Path, **options: Any) -> Any:
    return bisect_trt.bisect(model, {"x": x}, out=out, **{"robust": 0, **options}, limits=FEW)


def test_layers_in_functions_are_lowered(tmp_path: Path) -> None:
    model = function_model()
    x = np.sin(np.arange(16, dtype=np.float32)).reshape(4, 4)
    result = run(model, x, tmp_path / "run", require="max_abs<=1e-12")
    assert "one/first/tanh" in result.pinned, "the layers inside err, and it is seen"
    assert "one/first/tanh" in set(result.layers["layer"])
    assert result.outputs.set_index("baseline").loc["fp16", "max_abs"] > 1e-6


def test_operators_that_are_not_lowered_are_in_the_headline(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["a"], "fused", domain="com.microsoft"),
        helper.make_node("Gelu", ["a"], ["b"], "gelu", domain="com.microsoft"),
        helper.make_node("MatMul", ["b", "w"], ["y"], "plain"),
    ]
    model = model_of(nodes, [4, 8], domains=("com.microsoft",), w=np.eye(8, dtype=np.float32))
    result = run(model, waves(0, 4, 8), tmp_path / "run")
    said = headline(result)
    assert "2 of 3 nodes are of operators that are never reduced" in said
    assert any("com.microsoft.FusedMatMul (1)" in f.message for f in result.findings)
    assert (
        said in json.loads(json.dumps(said))
        and said.partition("But ")[2].rstrip(".") in (tmp_path / "run/report.md").read_text()
    )


def test_a_half_precision_model_inside_fp32_borders_is_told(tmp_path: Path) -> None:
    body = """[relu] r = Relu(x) [down] h = Cast<to = 10>(r) [one] a = MatMul(h, w)
        [two] b = MatMul(a, w) [up] y = Cast<to = 1>(b)"""
    model = parsed(body, "float[4, 8] x", "float[4, 8] y", w=np.eye(8, dtype=np.float16))
    result = run(model, waves(0, 4, 8), tmp_path / "run")
    assert result.passed
    (told,) = (f.message for f in result.findings if f.kind == "lifted")
    assert told == (
        "3 nodes of 5 run in FP16 in the source already, and 2 nodes stay in FP32. The reference "
        "runs all of them in FP32, with the weights as stored"
    )
    assert set(result.plan.pinned) == {"relu", "up"}, "what it keeps in FP32 stays so"


def test_a_reference_of_which_nothing_can_be_compared_is_refused(tmp_path: Path) -> None:
    log = "[log] y = Log(x)"
    for value in (-1.0, 0.0):
        x = np.full((4, 4), value, np.float32)
        with pytest.raises(BadInputError, match="'y' of the FP32 reference is NaN or infinite"):
            run(parsed(log, SQUARE, "float[4, 4] y"), x, tmp_path / "run", require="cosine>=0.99")
        assert not (tmp_path / "run" / "run.json").exists()
    model = parsed(f"{log} [relu] z = Relu(x)", SQUARE, "float[4, 4] y, float[4, 4] z")
    x = np.full((4, 4), -1.0, np.float32)
    assert run(model, x, tmp_path / "run", require="z:max_abs<=1").passed, "the other is looked at"


def test_a_reference_that_can_be_compared_in_part_says_which(tmp_path: Path) -> None:
    x = np.linspace(-3.0, 1.0, 16, dtype=np.float32).reshape(4, 4)
    result = run(parsed("[log] y = Log(x)", SQUARE, "float[4, 4] y"), x, tmp_path / "run")
    assert "12 NaN or infinite values" in headline(result)
    assert any("the other 25 % of its elements" in f.message for f in result.findings)


def test_outputs_that_are_empty_are_told(tmp_path: Path) -> None:
    body = """[g] g = Greater(x, high) [flatten] flat = Reshape(g, minus)
        [compress] y = Compress(x, flat) [m] z = MatMul(x, w)"""
    weights: dict[str, Any] = {"high": np.float32(9), "minus": np.array([-1])}
    weights["w"] = np.eye(4, dtype=np.float32)
    x = waves(0, 4, 4)
    with pytest.raises(BadInputError, match="'y' is empty on the given inputs"):
        run(parsed(body, SQUARE, "float[n] y", **weights), x, tmp_path / "run")
    both = run(parsed(body, SQUARE, "float[n] y, float[4, 4] z", **weights), x, tmp_path / "run")
    assert "output 'y' is empty on the given inputs" in headline(both)


def test_a_plan_is_verified_on_the_share_that_it_was_found_for(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    scales = (1.0, 0.9, 0.8, 1e5)  # the last needs more pins, and may miss
    inputs = [{n: (a * s).astype(np.float32) for n, a in fixture.inputs.items()} for s in scales]
    for number, scaled in enumerate(inputs):
        np.savez(tmp_path / f"x{number}.npz", **scaled)
    given = [str(tmp_path / f"x{n}.npz") for n in range(4)]
    found = bisect_trt.bisect(
        fixture.model,
        given,
        require="max_abs<=1e-2",
        allow_misses=0.25,
        robust=0,
        out=tmp_path / "run",
    )
    assert found.passed
    path = tmp_path / "run" / "plan.json"
    assert json.loads(path.read_text())["holds_on"] == 0.75
    assert bisect_trt.verify(fixture.model, given, path, out=tmp_path / "v", limits=FEW).passed
    asked_of_all = bisect_trt.verify(
        fixture.model, given, path, out=tmp_path / "v", allow_misses=0, limits=FEW
    )
    assert not asked_of_all.passed


def test_one_score_has_one_meaning(tmp_path: Path) -> None:
    for number, fixture in enumerate((healthy(), encoder_decomposed())):
        result = run_of(fixture, tmp_path / str(number), require="rel_range<=0.5", robust=0)
        rows = result.outputs[result.outputs["baseline"].str.startswith("fp16")]
        worst = float(rows["score"].max())
        assert result.base_score == worst
        if result.cause.value == "none":
            assert result.score == worst
            told = re.search(r"\(([\d.e-]+) times the tolerance\)", result.sentence)
            assert told is not None and float(told.group(1)) == pytest.approx(worst, rel=1e-2)


def quantised_network() -> tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]:
    """Convolutions and an activation between quantising nodes, as a quantiser writes them."""
    random = np.random.default_rng(3)
    weights: dict[str, Any] = {"scale": np.float32(0.02), "zero": np.uint8(128), "z8": np.int8(0)}
    nodes, last = [], "x"
    for layer in range(3):
        weights[f"w{layer}"] = random.integers(-127, 127, (8, 8, 3, 3)).astype(np.int8)
        weights[f"s{layer}"] = np.float32(0.004)
        nodes += [
            helper.make_node("QuantizeLinear", [last, "scale", "zero"], [f"q{layer}"], f"q{layer}"),
            helper.make_node("DequantizeLinear", [f"q{layer}", "scale", "zero"], [f"d{layer}"]),
            helper.make_node("DequantizeLinear", [f"w{layer}", f"s{layer}", "z8"], [f"k{layer}"]),
            helper.make_node(
                "Conv", [f"d{layer}", f"k{layer}"], [f"c{layer}"], f"conv{layer}", pads=[1] * 4
            ),
            helper.make_node("Sigmoid", [f"c{layer}"], [f"y{layer}" if layer < 2 else "y"]),
        ]
        last = f"y{layer}"
    return model_of(nodes, [1, 8, 16, 16], **weights), {"x": waves(1, 1, 8, 16, 16)}


def test_the_reference_of_a_quantised_model_is_that_of_its_nodes(tmp_path: Path) -> None:
    model, inputs = quantised_network()
    as_written = run_model(model, inputs, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    session = reference_session(model, quantised=True)
    assert same(session.run(None, inputs), as_written)
    result = run(model, inputs["x"], tmp_path / "run")
    assert "quantise or dequantise" in headline(result)
    assert result.outputs.set_index("baseline").loc["fp32", "max_abs"] < 1e-5


@pytest.mark.skipif(not DETECTOR.exists(), reason="make demo has not fetched the detector")
def test_the_quantised_detector_is_compared_with_itself(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.left = [{"x": page()}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    path = tmp_path / "det.int8.onnx"
    quantization.quantize_static(str(DETECTOR), str(path), Reader())
    feed = {"x": page()}
    as_written = run_model(onnx.load(path), feed, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)[0]
    ours = reference_session(onnx.load(path), quantised=True).run(None, feed)[0]
    assert same(ours, as_written)
    fused = run_model(onnx.load(path), feed)[0]
    assert float(np.abs(fused - as_written).max()) > 0.1, "what the fusions would have done"


def masked() -> onnx.ModelProto:
    """Attention scores, a mask that is added to them, and a softmax."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["s"], "scores"),
        helper.make_node("Add", ["s", "mask"], ["m"], "masked"),
        helper.make_node("Softmax", ["m"], ["p"], "softmax", axis=-1),
        helper.make_node("MatMul", ["p", "w"], ["y"], "mix"),
    ]
    model = model_of(nodes, [8, 8], w=np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8) * 9)
    model.graph.input.append(helper.make_tensor_value_info("mask", F, [8, 8]))
    return model


def test_a_mask_of_minus_infinity_has_a_way_through(tmp_path: Path) -> None:
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    inputs = {"x": waves(0, 8, 8), "mask": mask}
    with pytest.raises(BadInputError, match="if it is a mask, pass infinite='mask'"):
        bisect_trt.bisect(masked(), inputs, out=tmp_path / "run")
    result = bisect_trt.bisect(
        masked(), inputs, infinite="mask", require="max_abs<=5e-3", out=tmp_path / "run", limits=FEW
    )
    assert (
        result.passed and result.validation is not None and result.validation.perturbed.tested > 0
    )
    for bad in (np.nan, np.inf):
        spoilt = mask.copy()
        spoilt[0, 0] = bad
        with pytest.raises(BadInputError, match="NaN or infinite"):
            bisect_trt.bisect(masked(), {**inputs, "mask": spoilt}, infinite="mask")
    with pytest.raises(BadInputError, match="no such input"):
        bisect_trt.bisect(masked(), inputs, infinite="musk")


@pytest.mark.parametrize("robust", [0, 0.95])
def test_layers_are_held_in_fp32_or_reduced(robust: float, tmp_path: Path) -> None:
    fixture = encoder_decomposed()

    held = partial(run_of, fixture, tmp_path / "run", robust=robust)
    pinned = held(keep_fp32=["^/encoder/layers.0/attention/MatMul_1$", "^/head/Pow$"])
    assert pinned.passed and {"/encoder/layers.0/attention/MatMul_1", "/head/Pow"} <= set(
        pinned.pinned
    )
    assert "(2 of them held by --keep-fp32)" in headline(pinned)
    saved = pd.read_csv(tmp_path / "run" / "pins.csv").set_index("layer")
    assert saved["held"].sum() == 2
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert "/encoder/layers.0/attention/MatMul_1" in plan["pinned"]
    reduced = held(keep_reduced="^/head/Pow$")
    assert "/head/Pow" not in reduced.pinned and not reduced.passed
    assert "but the 1 layer of --keep-reduced" in reduced.sentence
    assert "With what --keep-reduced holds pinned too the requirement is met" in reduced.sentence
    assert reduced.cause is Cause.OVERFLOW, "which strict FP32 has no part in"


def test_what_is_held_does_not_mix_up_the_cache(finished: Finished, tmp_path: Path) -> None:
    """The signed errors that a search grows from are those of the same elements in every run."""
    fixture = residual()

    shutil.copytree(finished(residual).folder, tmp_path / "one")
    again, fresh = (
        run_of(fixture, tmp_path / out, robust=0, keep_fp32="blocks.7/") for out in ("one", "other")
    )
    assert again.pinned == fresh.pinned and again.passed


def test_what_cannot_be_held_is_refused(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    for options, words in (
        ({"keep_fp32": "nothing_like_it"}, "names no layer"),
        ({"keep_reduced": "("}, "no regular expression"),
        ({"keep_fp32": "/head/", "keep_reduced": "/head/Pow"}, "both name layer"),
    ):
        with pytest.raises(BadInputError, match=words):
            run_of(fixture, tmp_path, **options)


@pytest.mark.parametrize(
    "text",
    (
        *("nonsense", "x:1x2", "x:1x2/1x2", "x:a/b/c", "x:4x8/2x8/4x8", "x:0x8/4x8/4x8"),
        *(":1/1/1", "x:-1x8/4x8/9x8", "x:4/4x8/4x8", "z:4x16/4x16/4x16", "x:9x99/9x99/9x99"),
    ),
)
def test_profiles_are_checked_whatever_runs(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"\bprofile\b"):
        run_of(healthy(), tmp_path, profile=text)


def test_a_plan_for_a_model_without_declared_shapes_is_verified(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    for shape in (None, [1], ["a", "b", "c", "d", "e"]):
        model = onnx.ModelProto()
        model.CopyFrom(fixture.model)
        name = model.graph.output[0].name
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info(name, F, shape))
        assert fixture.pins is not None
        try:
            checked = bisect_trt.verify(
                model,
                fixture.inputs,
                PrecisionPlan("fp16", fixture.pins),
                require=fixture.require,
                out=tmp_path / "verify",
                robust=0,
            )
        except BadInputError as error:
            assert "ONNX Runtime cannot load it" in str(error) and shape is not None
            continue
        assert checked.passed, checked.checks


def test_where_fp32_misses_on_few_of_many_inputs_they_are_counted_and_named(
    tmp_path: Path,
) -> None:
    fixture = unsavable()
    # Saturated, the chaotic map stays at zero, and at FP32 nothing is to be seen of it.
    calm = [{"x": np.full_like(fixture.inputs["x"], 1e6 * (n + 1))} for n in range(11)]
    samples = [*calm, fixture.inputs]
    options = {"robust": 0, "require": fixture.require, "runner": "emulated"}
    result = bisect_trt.bisect(fixture.model, samples, out=tmp_path / "a", **options, limits=FEW)
    assert result.cause.value == "not-precision"
    assert "misses on 1 of 12 given inputs, most on sample 11." in result.sentence
    assert "--allow-misses 0.09 " in result.sentence
    allowed = bisect_trt.bisect(
        fixture.model, samples, out=tmp_path / "b", allow_misses=0.09, **options, limits=FEW
    )
    assert allowed.cause.value != "not-precision"
