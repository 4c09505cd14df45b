"""The whole main job on every fixture: cause, pins, exit code and files; then what happens when it
is run again or killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest

import bisect_trt
from bisect_trt import PrecisionPlan, Result
from bisect_trt.graph import to_typed
from bisect_trt.report.headline import headline
from bisect_trt.runners import emulator as emulated
from fixtures.__main__ import FILES, input_bytes, model_bytes
from fixtures.cases.rtdetr import rtdetr
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, healthy, residual, tf32_victim
from tests.conftest import forbid_inferences, run_model

pytestmark = pytest.mark.usefixtures("few_draws")

FILES_OF_A_RUN = {
    "layers.csv",
    "outputs.csv",
    "search.csv",
    "pins.csv",
    "inputs.csv",
    "run.json",
    "plan.json",
    "report.html",
    "report.md",
    "junit.xml",
    "model.typed.onnx",
    "cache.sqlite",
}


def run(fixture: Fixture, out: Path, **options: object) -> Result:
    return bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        precision=fixture.precision,
        require=fixture.require,
        out=out,
        robust=0,
        **options,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_fixture(make: Callable[[], Fixture], tmp_path: Path) -> None:
    fixture = make()
    result = run(fixture, tmp_path / "run")
    assert (result.cause.value, result.exit_code) == (fixture.cause, fixture.exit_code), (
        result.sentence
    )
    if fixture.pins is None:
        assert 0 < len(result.pinned) <= fixture.most_pins
    else:
        assert set(result.pinned) == fixture.pins
    written = {p.name for p in (tmp_path / "run").iterdir()}
    # The trade-off curve is one of a search; a settled case has none.
    assert written - {"tradeoff.csv"} == FILES_OF_A_RUN
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {
        "model",
        "precision",
        "runner",
        "cause",
        "passed",
        "pinned",
        "layers",
        "evaluations",
        "outputs",
        "versions",
    } <= set(saved)
    assert saved["cause"] == fixture.cause and saved["passed"] is (fixture.exit_code == 0)
    if result.pinned:
        pins = pd.read_csv(tmp_path / "run" / "pins.csv")
        assert pins["proved"].all() and (pins["score_without"].astype(float) > 1.0).all()
        assert result.score <= 1.0 < result.base_score
    typed = onnx.load(tmp_path / "run" / "model.typed.onnx")
    onnx.checker.check_model(typed, full_check=True)
    layers = pd.read_csv(tmp_path / "run" / "layers.csv")
    wanted = [
        "layer",
        "op",
        "scope",
        "max_abs",
        "mean_abs",
        "rmse",
        "cosine",
        "snr_db",
        "finite",
        "introduced_max_abs",
        "ref_min",
        "ref_max",
        "pinned",
    ]
    assert set(wanted) <= set(layers.columns)
    assert set(layers.loc[layers["pinned"], "layer"]) == set(result.pinned)


def test_the_proof_of_each_pin_is_a_probe_of_the_set_without_it(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    result = run(fixture, tmp_path / "run")
    reference = run_model(fixture.model, fixture.inputs)[0]
    assert result.pinned
    for pin in result.pinned:
        rest = set(result.pinned) - {pin}
        probe = result.search.iloc[int(result.pins.set_index("layer").loc[pin, "proof_evaluation"])]
        assert set(json.loads(probe["pinned"])) == rest
        runner = emulated.EmulatedRunner(fixture.model)
        got = next(
            runner.outputs(PrecisionPlan("fp16", rest), [emulated.Sample("s", fixture.inputs)])
        )["logits"]
        assert not np.abs(got - reference).max() <= 2e-3


@pytest.mark.parametrize(
    "make", [encoder_decomposed, residual, tf32_victim, healthy], ids=lambda f: f.__name__
)
def test_the_same_command_again_makes_no_inference(
    make: Callable[[], Fixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(make(), tmp_path / "run")
    forbid_inferences(monkeypatch)
    again = run(make(), tmp_path / "run")
    assert again.new_evaluations == 0 and again.sensitivity_runs == 0
    assert again.pinned == first.pinned and again.cause == first.cause
    pd.testing.assert_frame_equal(again.search, first.search)
    pd.testing.assert_frame_equal(again.layers, first.layers)


def test_another_requirement_is_another_question(tmp_path: Path) -> None:
    fixture = residual()
    tight = run(fixture, tmp_path / "run")
    loose = bisect_trt.bisect(
        fixture.model, fixture.inputs, require="rel_range<=1e-2", out=tmp_path / "run", robust=0
    )
    assert tight.pinned and loose.pinned == [] and loose.new_evaluations > 0


def test_kill_loses_at_most_the_probe_in_flight(tmp_path: Path) -> None:
    fixture = residual()
    out = tmp_path / "run"
    (tmp_path / "m.onnx").write_bytes(model_bytes(fixture))
    (tmp_path / "x.npz").write_bytes(input_bytes(fixture))
    command = [
        sys.executable,
        "-m",
        "bisect_trt",
        "run",
        str(tmp_path / "m.onnx"),
        "--input",
        str(tmp_path / "x.npz"),
        "--requirement",
        fixture.require,
        "--robust",
        "0",
        "--out",
        str(out),
        "-v",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    heard = 0
    for line in process.stderr:
        heard += "pins:" in line
        if heard == 12:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "run.json").exists(), "nothing pretends to be finished"
    whole = run(fixture, tmp_path / "other")
    finished = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    resumed = json.loads(finished.stdout)
    assert finished.returncode == 0 and resumed["pinned"] == whole.pinned
    assert resumed["sensitivity_runs"] == 0
    assert resumed["new_evaluations"] <= sum(resumed["evaluations"].values()) - 12
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]


def test_interrupt_leaves_the_best_plan_on_disk(tmp_path: Path) -> None:
    fixture = residual()
    out = tmp_path / "run"
    (tmp_path / "m.onnx").write_bytes(model_bytes(fixture))
    (tmp_path / "x.npz").write_bytes(input_bytes(fixture))
    command = [
        sys.executable,
        "-m",
        "bisect_trt",
        "run",
        str(tmp_path / "m.onnx"),
        "--input",
        str(tmp_path / "x.npz"),
        "--requirement",
        "rel_range<=2e-4",
        "--robust",
        "0",
        "--out",
        str(out),
        "-v",
    ]
    # A shell's background job ignores SIGINT, and its children inherit that: the tests may run in
    # one.
    answered = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=answered
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "pins:" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130 and "interrupted" in rest and "Traceback" not in rest
    plan = PrecisionPlan.from_json((out / "plan.json").read_text())
    onnx.checker.check_model(to_typed(fixture.model, plan), full_check=True)
    saved = json.loads((out / "run.json").read_text())
    assert saved["passed"] and not saved["complete"] and len(saved["pinned"]) == len(plan.pinned)
    assert saved["cause"] == "rounding" and "best plan so far" in saved["sentence"]
    told = (out / "inputs.csv").read_text().splitlines()
    assert len(told) == 2 and "plan_score_emulated" in told[0] and ",True," in told[1]


def test_golden_outputs_are_compared_first(tmp_path: Path) -> None:
    fixture = healthy()
    golden = {"y": run_model(fixture.model, fixture.inputs)[0]}
    assert run(fixture, tmp_path / "a", golden=golden).cause.value == "none"
    result = run(fixture, tmp_path / "b", golden={"y": golden["y"] + 0.5})
    assert (result.cause.value, result.exit_code) == ("golden-mismatch", 1)
    assert "times the tolerance, in 'y'" in result.sentence
    assert "no requirement is on it" not in result.sentence
    assert (tmp_path / "b" / "run.json").exists() and result.new_evaluations == 0


def test_golden_outputs_that_are_broken_are_told_as_such(tmp_path: Path) -> None:
    fixture = healthy()
    golden = run_model(fixture.model, fixture.inputs)[0].copy()
    golden.flat[1] = np.nan
    found = run(fixture, tmp_path, golden={"y": golden})
    assert found.cause.value == "golden-mismatch"
    assert found.sentence.startswith("Golden output 'y' is NaN or infinite at 1 place where the")


def all_right(references: Sequence[object], candidates: Sequence[object]) -> float:
    return float(len(references) - len(candidates))


@pytest.mark.parametrize(
    ("require", "metrics"),
    [("boxes:rel_range<=1", ()), ("all_right<=1", (f"{__name__}:all_right@all",))],
)
def test_golden_outputs_that_no_requirement_looks_at_are_compared_too(
    require: str, metrics: tuple[str, ...], tmp_path: Path
) -> None:
    fixture = rtdetr()
    right = dict(zip(("logits", "boxes"), run_model(fixture.model, fixture.inputs), strict=True))
    for moved in (0.0, 1.0):
        golden = {"logits": right["logits"] + np.float32(moved)}
        found = bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            require=require,
            metrics=metrics,
            golden=golden,
            runner="emulated",
            robust=0,
            budget=0.1,
            out=tmp_path,
        )
        assert (found.cause.value == "golden-mismatch") == bool(moved), found.sentence
        told = "in 'logits', held to snr_db>=40 since no requirement is on it"
        assert (told in found.sentence) == bool(moved)
        assert any(f.message.startswith("--golden has no boxes") for f in found.findings)


def test_several_samples_are_judged_by_the_worst(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    small = {"tokens": fixture.inputs["tokens"] * 0.5}
    both = bisect_trt.bisect(
        fixture.model,
        [fixture.inputs, small],
        require=fixture.require,
        out=tmp_path / "run",
        robust=0,
    )
    assert both.passed and len(both.samples) == 2 and set(both.pinned) == fixture.pins
    row = both.outputs[both.outputs["baseline"] == "fp16"].iloc[0]
    assert row["max_abs"] >= row["mean_over_samples_max_abs"]


def test_workers_find_the_same_set(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    assert (
        run(fixture, tmp_path / "run", workers=3).pinned == run(fixture, tmp_path / "other").pinned
    )


def test_noise_is_warned_about(tmp_path: Path) -> None:
    fixture = healthy()
    noise = {"x": np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)}
    result = bisect_trt.bisect(
        fixture.model, noise, require=fixture.require, out=tmp_path / "run", robust=0
    )
    assert any("noise" in f.message for f in result.findings)
    constant = {"x": np.ones((4, 16), np.float32)}
    result = bisect_trt.bisect(
        fixture.model, constant, require=fixture.require, out=tmp_path / "run2", robust=0
    )
    assert any("constant" in f.message for f in result.findings)
    assert not run(fixture, tmp_path / "run3").findings


def test_files_of_the_fixtures_are_rebuilt_bit_for_bit() -> None:
    for make in ALL:
        fixture = make()
        assert (FILES / f"{fixture.name}.onnx").read_bytes() == model_bytes(fixture)
        assert (FILES / f"{fixture.name}.npz").read_bytes() == input_bytes(fixture)


def _run_nodes(
    nodes: list[onnx.NodeProto],
    output: onnx.ValueInfoProto,
    x: np.ndarray,
    out: Path,
    **weights: np.ndarray,
) -> Result:
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", [info], [output], tensors)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    return bisect_trt.bisect(model, {"x": x}, out=out, robust=0)


def test_outputs_whose_shape_depends_on_values(tmp_path: Path) -> None:
    """FP16 rounds 1.0001 to 1, so fewer elements exceed 1 and the output shrinks: a failure like
    any other.
    """
    nodes = [
        onnx.helper.make_node("Mul", ["x", "one"], ["m"], "mul"),
        onnx.helper.make_node("Greater", ["m", "one"], ["g"], "greater"),
        onnx.helper.make_node("Compress", ["m", "g"], ["y"], "compress"),
    ]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
    x = np.float32([0.5, 1.0001, 2.0, 1.0001])
    result = _run_nodes(nodes, output, x, tmp_path / "run", one=np.float32(1))
    assert result.passed and result.pinned == ["mul"]
    assert result.search["note"].str.contains("shape of output 'y' changed").any()
    assert "But output 'y' has another shape in FP16 than in FP32." in headline(result)


def test_a_plan_that_cannot_run_is_a_verdict(tmp_path: Path) -> None:
    """The index 2049 is no FP16 number: it becomes 2048, and 4095 becomes 4096, which is out of
    range.
    """
    nodes = [
        onnx.helper.make_node("Mul", ["x", "one"], ["m"], "mul"),
        onnx.helper.make_node("Cast", ["m"], ["i"], "to_index", to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Gather", ["table", "i"], ["y"], "gather"),
    ]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    table = np.arange(4096, dtype=np.float32) / 4096
    result = _run_nodes(
        nodes, output, np.float32([4095.0, 7.0]), tmp_path / "run", one=np.float32(1), table=table
    )
    assert "crashed" in set(result.search["outcome"])
    assert result.passed and result.pinned == ["mul"]
