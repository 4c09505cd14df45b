"""`run` repairs the graph, searches both graphs, and recommends the better answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Cause
from bisect_trt.report.choices import Choice, Passes, choice_from_json, recommended
from bisect_trt.report.record import read_run
from bisect_trt.report.summarise import Result
from fixtures.blocks import BLOCKS
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy
from tests.copies import EIGHT
from tests.repair.graphs import run, run_fp16, snr_db
from tests.repair.test_proof import folded


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Result:
    model, feed = folded()
    return answered(model, feed, tmp_path_factory.mktemp("repaired"))


def answered(
    model: onnx.ModelProto, feed: Mapping[str, np.ndarray], out: Path, **options: object
) -> Result:
    its = {"runner": "emulated", "out": out, "limits": EIGHT}
    return bisect_trt.bisect(model, dict(feed), **its, **options)


def test_the_repaired_graph_is_recommended_beside_the_others(repaired: Result) -> None:
    rows = {choice.name: choice for choice in repaired.choice_rows}
    assert list(rows) == ["as it is", "repaired", "BF16", "FP32"], "the plan is FP32 here"
    assert recommended(repaired.choice_rows) is rows["repaired"]
    assert repaired.is_repaired and repaired.pinned == [] and repaired.exit_code == 0
    assert rows["as it is"].passes is Passes.NO and rows["as it is"].worst_score > 1.0
    assert rows["repaired"].pinned == () and rows["repaired"].worst_score < 0.5
    assert len(rows["FP32"].pinned) == len(folded()[0].graph.node)
    assert repaired.cause is Cause.OVERFLOW and repaired.base_score > 1.0
    assert repaired.repair.rules == ["fold-bn"]


def test_the_files_are_those_of_the_recommended_row(repaired: Result) -> None:
    model, feed = folded()
    exact = run(model, feed)["y"]
    made = onnx.load(repaired.folder / "model.repaired.onnx")
    np.testing.assert_allclose(run(made, feed)["y"], exact, atol=1e-6 * np.abs(exact).max())
    typed = onnx.load(repaired.folder / "model.typed.onnx")
    onnx.checker.check_model(typed, full_check=True)
    assert snr_db(exact, run_fp16(made, feed)["y"]) > 50
    assert [n.op_type for n in typed.graph.node if n.op_type != "Cast"] == [
        n.op_type for n in made.graph.node
    ]
    plan = json.loads((repaired.folder / "plan.json").read_text())
    assert plan["graph"] == "repaired" and len(plan["repaired_sha256"]) == 64
    record = json.loads((repaired.folder / "run.json").read_text())
    assert [row["recommended"] for row in record["choices"]].count(True) == 1
    assert record["repairs"][0]["rule"] == "fold-bn"
    assert record["repair_proof"]["missed_after"] == 0


def test_choices_are_a_table_with_the_keys_of_run_json(repaired: Result) -> None:
    record = json.loads((repaired.folder / "run.json").read_text())
    table = repaired.choices
    assert list(table.columns) == list(record["choices"][0])
    assert list(table["name"]) == [row["name"] for row in record["choices"]]
    assert list(table.loc[table["recommended"], "name"]) == ["repaired"]
    assert table.loc[~table["recommended"], "worst_score"].max() > 1.0
    assert table["latency_ms"].dtype == float and table["latency_ms"].isna().all()
    nothing = replace(repaired, choice_rows=()).choices
    assert len(nothing) == 0 and list(nothing.columns) == list(table.columns)


def test_the_result_has_the_model_to_ship_and_opens_its_report(
    repaired: Result, tmp_path: Path
) -> None:
    onnx.checker.check_model(repaired.model_path)
    assert repaired.model_path.name == "model.typed.onnx"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/shown\n')
    browser.chmod(0o755)
    # Python looks for browsers once in a process.
    program = (
        "import pathlib, sys\n"
        "from bisect_trt.report.record import read_run\n"
        "sys.exit(not read_run(pathlib.Path(sys.argv[1])).open())\n"
    )
    words = [sys.executable, "-c", program, str(repaired.folder)]
    subprocess.run(words, env={**os.environ, "BROWSER": str(browser)}, check=True)
    report = (repaired.folder / "report.html").resolve()
    assert (tmp_path / "shown").read_text().strip() == report.as_uri()
    with pytest.raises(BadInputError, match=f"`bisect-trt report {tmp_path}` writes it again"):
        replace(repaired, folder=tmp_path).open()


def test_the_record_is_read_back_equal(repaired: Result) -> None:
    found = read_run(repaired.folder)
    assert found.choice_rows == [*map(as_kept, repaired.choice_rows)]
    assert found.repair == repaired.repair


def as_kept(choice: object) -> object:
    """A choice as run.json keeps it: held layers are pins like others."""
    assert isinstance(choice, Choice)
    return choice_from_json(json.loads(json.dumps(choice.as_json())))


def test_the_same_command_runs_nothing_again(repaired: Result) -> None:
    model, feed = folded()
    again = answered(model, feed, repaired.folder)
    assert again.new_evaluations == 0
    assert [c.as_json() for c in again.choice_rows] == [c.as_json() for c in repaired.choice_rows]
    assert again.repair == repaired.repair


def test_none_leaves_the_graph_alone(tmp_path: Path) -> None:
    model, feed = folded()
    found = answered(model, feed, tmp_path, repair="none", weights="nearest")
    assert len(found.pinned) >= 1 and found.repair.rows == ()
    names = [choice.name for choice in found.choice_rows]
    assert set(names) - {"knee", "plan"} == {"as it is", "BF16", "FP32"}
    assert not (tmp_path / "model.repaired.onnx").exists()


def test_rules_that_do_not_fit_repair_nothing(tmp_path: Path) -> None:
    model, feed = folded()
    found = answered(model, feed, tmp_path, repair="mask")
    assert found.repair.rows == () and not found.is_repaired and len(found.pinned) >= 1


def test_rules_named_for_another_precision_are_refused(tmp_path: Path) -> None:
    model, feed = folded()
    with pytest.raises(BadInputError, match="repair edits only for FP16, and its precision is"):
        answered(model, feed, tmp_path, repair="mask", precision="bf16")


def test_a_model_that_is_right_has_its_rows_too(tmp_path: Path) -> None:
    fixture = healthy()
    found = answered(fixture.model, fixture.inputs, tmp_path)
    assert found.cause is Cause.NONE and found.repair.rows == ()
    best = recommended(found.choice_rows)
    assert best is not None and best.name == "as it is"


@pytest.mark.slow
def test_the_plan_of_the_original_is_a_row(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    found = answered(fixture.model, fixture.inputs, tmp_path)
    rows = {choice.name: choice for choice in found.choice_rows}
    assert list(rows) == ["as it is", "repaired", "plan", "BF16", "FP32"]
    assert rows["repaired"].recommended and rows["repaired"].pinned == ()
    assert 1 <= len(rows["plan"].pinned) <= 6 and rows["plan"].passes is not Passes.NO


@pytest.mark.slow
def test_a_repair_that_makes_it_worse_is_not_recommended(tmp_path: Path) -> None:
    """SAM's attention: in range after the repair, and rounding needs more layers there."""
    block = next(b for b in BLOCKS if b.name == "sam_attention")
    found = answered(block.model(), next(iter(block.given())), tmp_path)
    rows = {choice.name: choice for choice in found.choice_rows}
    best = recommended(found.choice_rows)
    assert best is not None and best.name == "plan" and not found.is_repaired
    assert len(rows["repaired"].pinned) >= len(rows["plan"].pinned)
    assert (tmp_path / "model.repaired.onnx").exists()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["graph"] == "original"


def test_what_pins_cannot_cure_is_repaired(tmp_path: Path) -> None:
    """The layer that overflows may not be kept in FP32."""
    model, feed = folded()
    found = answered(model, feed, tmp_path, keep_reduced="BatchNormalization|Conv")
    assert found.is_repaired and found.passed and found.pinned == [] and found.exit_code == 0
