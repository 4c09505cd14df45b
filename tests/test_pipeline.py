"""The whole main job on every fixture: cause, pins, exit code and files; then what happens when it
is run again or killed.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest

import bisect_trt
from bisect_trt import PrecisionPlan
from bisect_trt.graph import to_typed
from bisect_trt.report.headline import headline
from bisect_trt.runners import emulator as emulated
from fixtures.__main__ import FILES, input_bytes, model_bytes
from fixtures.cases.rtdetr import rtdetr
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, healthy, residual, tf32_victim
from tests.command import run_of, saved
from tests.conftest import Finished, forbid_inferences, run_model
from tests.networks import parsed

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


run = partial(run_of, robust=0)


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_fixture(make: Callable[[], Fixture], finished: Finished) -> None:
    fixture, result = make(), finished(make)
    folder = result.folder
    assert (result.cause.value, result.exit_code) == (fixture.cause, fixture.exit_code), (
        result.sentence
    )
    if fixture.pins is None:
        assert 0 < len(result.pinned) <= fixture.most_pins
    else:
        assert set(result.pinned) == fixture.pins
    written = {p.name for p in folder.iterdir()}
    # The trade-off curve is one of a search; a settled case has none.
    assert written - {"tradeoff.csv"} == FILES_OF_A_RUN
    saved = json.loads((folder / "run.json").read_text())
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
        pins = pd.read_csv(folder / "pins.csv")
        assert pins["proved"].all() and (pins["score_without"].astype(float) > 1.0).all()
        assert result.score <= 1.0 < result.base_score
    typed = onnx.load(folder / "model.typed.onnx")
    onnx.checker.check_model(typed, full_check=True)
    layers = pd.read_csv(folder / "layers.csv")
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


def test_the_proof_of_each_pin_is_an_evaluation_of_the_set_without_it(finished: Finished) -> None:
    fixture, result = encoder_decomposed(), finished(encoder_decomposed)
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
    make: Callable[[], Fixture], finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finished(make)
    shutil.copytree(first.folder, tmp_path / "run")
    forbid_inferences(monkeypatch)
    again = run(make(), tmp_path / "run")
    assert again.new_evaluations == 0 and again.sensitivity_runs == 0
    assert again.pinned == first.pinned and again.cause == first.cause
    pd.testing.assert_frame_equal(again.search, first.search)
    pd.testing.assert_frame_equal(again.layers, first.layers)


def test_another_requirement_is_another_question(finished: Finished, tmp_path: Path) -> None:
    fixture, tight = residual(), finished(residual)
    shutil.copytree(tight.folder, tmp_path / "run")
    loose = bisect_trt.bisect(
        fixture.model, fixture.inputs, require="rel_range<=1e-2", out=tmp_path / "run", robust=0
    )
    assert tight.pinned and loose.pinned == [] and loose.new_evaluations > 0


def command_of(fixture: Fixture, require: str, folder: Path) -> list[str]:
    """A verbose run of ``fixture`` in a process of its own, into ``run``."""
    asked = ("--requirement", require, "--robust", "0", "--weights", "nearest", "-v")
    asked += ("--out", str(folder / "run"))
    return [sys.executable, "-m", "bisect_trt", "run", *saved(fixture, folder), *asked]


def test_kill_loses_at_most_the_evaluation_in_flight(finished: Finished, tmp_path: Path) -> None:
    fixture, out = residual(), tmp_path / "run"
    command = command_of(fixture, fixture.require, tmp_path)
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
    whole = finished(residual)
    finished = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    resumed = json.loads(finished.stdout)
    assert finished.returncode == 0 and resumed["pinned"] == whole.pinned
    assert resumed["sensitivity_runs"] == 0
    assert resumed["new_evaluations"] <= sum(resumed["evaluations"].values()) - 12
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]


def test_interrupt_leaves_the_best_plan_on_disk(tmp_path: Path) -> None:
    fixture, out = residual(), tmp_path / "run"
    command = command_of(fixture, "rel_range<=2e-4", tmp_path)
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
    assert "preprocessing" in result.sentence
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
            metric=metrics,
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
        repair="none",
        weights="nearest",
    )
    assert both.passed and len(both.samples) == 2 and set(both.pinned) == fixture.pins
    row = both.outputs[both.outputs["baseline"] == "fp16"].iloc[0]
    assert row["max_abs"] >= row["mean_over_samples_max_abs"]


def test_workers_find_the_same_set(finished: Finished, tmp_path: Path) -> None:
    result = run(encoder_decomposed(), tmp_path / "run", workers=3)
    assert result.pinned == finished(encoder_decomposed).pinned


def test_noise_is_warned_about(finished: Finished, tmp_path: Path) -> None:
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
    assert not finished(healthy).findings


def test_files_of_the_fixtures_are_rebuilt_bit_for_bit() -> None:
    for make in ALL:
        fixture = make()
        assert (FILES / f"{fixture.name}.onnx").read_bytes() == model_bytes(fixture)
        assert (FILES / f"{fixture.name}.npz").read_bytes() == input_bytes(fixture)


def test_outputs_whose_shape_depends_on_values(tmp_path: Path) -> None:
    """FP16 rounds 1.0001 to 1, so fewer elements exceed 1 and the output shrinks: a failure like
    any other.
    """
    body = "[mul] m = Mul(x, one) [greater] g = Greater(m, one) [compress] y = Compress(m, g)"
    model = parsed(body, "float[4] x", "float[n] y", one=np.float32(1))
    x = np.float32([0.5, 1.0001, 2.0, 1.0001])
    result = bisect_trt.bisect(model, {"x": x}, out=tmp_path / "run", robust=0)
    assert result.passed and result.pinned == ["mul"]
    assert result.search["note"].str.contains("shape of output 'y' changed").any()
    assert "But output 'y' has another shape in FP16 than in FP32." in headline(result)


def test_a_plan_that_cannot_run_is_a_verdict(tmp_path: Path) -> None:
    """The index 2049 is no FP16 number: it becomes 2048, and 4095 becomes 4096, which is out of
    range.
    """
    body = "[mul] m = Mul(x, one) [to_index] i = Cast<to = 7>(m) [gather] y = Gather(table, i)"
    table = np.arange(4096, dtype=np.float32) / 4096
    model = parsed(body, "float[2] x", "float[2] y", one=np.float32(1), table=table)
    x = np.float32([4095.0, 7.0])
    result = bisect_trt.bisect(model, {"x": x}, out=tmp_path / "run", robust=0, repair="none")
    assert "crashed" in set(result.search["outcome"])
    assert result.passed and result.pinned == ["mul"]
