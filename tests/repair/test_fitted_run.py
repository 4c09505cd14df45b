"""`run --weights fit`: a row of the choices, a model of its own, the same bits again."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import bisect_trt
from bisect_trt.base.limits import Limits
from bisect_trt.report.record import read_run
from bisect_trt.report.summarise import Result
from fixtures.models import healthy, residual
from tests.command import call, saved
from tests.copies import EIGHT
from tests.repair.graphs import run

FIXTURE = residual()


def answered(out: Path, *, limits: Limits = EIGHT, **options: object) -> Result:
    return bisect_trt.bisect(
        FIXTURE.model,
        FIXTURE.inputs,
        require=FIXTURE.require,
        runner="emulated",
        out=out,
        limits=limits,
        **{"weights": "fit", **options},
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return answered(tmp_path_factory.mktemp("fitted") / "run")


def test_fitted_weights_are_a_choice(fitted: Result) -> None:
    rows = {choice.name: choice for choice in fitted.choice_rows}
    assert rows["weights fitted"].fitted and not rows["plan"].fitted
    assert fitted.weights.rows and fitted.weights.samples and fitted.exit_code == 0
    assert [choice.recommended for choice in fitted.choice_rows].count(True) == 1


def test_the_fitted_model_has_numbers_of_fp16_and_computes_nearly_the_same(fitted: Result) -> None:
    made = onnx.load(fitted.folder / "model.fitted.onnx")
    onnx.checker.check_model(made, full_check=True)
    row = next(choice for choice in fitted.choice_rows if choice.fitted)
    # A layer that its row keeps in FP32 has its FP32 weights.
    kept = [r for r in fitted.weights.rows if r.kept and r.layer not in row.pinned]
    chosen = {r.weight for r in kept}
    before = {t.name: numpy_helper.to_array(t) for t in FIXTURE.model.graph.initializer}
    moved = 0
    for tensor in made.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.name in chosen:
            assert np.array_equal(values, values.astype(np.float16).astype(np.float32))
            moved += int((values != before[tensor.name].astype(np.float16)).sum())
        elif tensor.name in before and tensor.name not in {r.bias for r in fitted.weights.rows}:
            assert np.array_equal(values, before[tensor.name])
    assert chosen and moved > 0
    exact = run(FIXTURE.model, FIXTURE.inputs)["y"]
    assert np.abs(run(made, FIXTURE.inputs)["y"] - exact).max() <= 1e-2 * np.abs(exact).max()


def test_the_same_command_gives_the_same_bits_without_an_inference(
    fitted: Result, tmp_path: Path
) -> None:
    files = {
        name: (fitted.folder / name).read_bytes() for name in ("model.fitted.onnx", "pins.csv")
    }
    again = answered(fitted.folder)
    assert again.new_evaluations == 0
    assert {name: (fitted.folder / name).read_bytes() for name in files} == files
    elsewhere = answered(tmp_path / "run")
    assert (tmp_path / "run" / "model.fitted.onnx").read_bytes() == files["model.fitted.onnx"]
    assert [c.as_json() for c in elsewhere.choice_rows] == [c.as_json() for c in fitted.choice_rows]


def test_weights_of_other_held_layers_are_judged_anew(tmp_path: Path) -> None:
    """Whether chosen weights are better depends on what is in FP32 beside them."""
    kinds = "SELECT count(*) FROM answers WHERE kind = 'weights'"
    known = []
    for kept in ((), "^/blocks.0/MatMul$"):
        answered(tmp_path, keep_fp32=kept)
        with closing(sqlite3.connect(tmp_path / "cache.sqlite")) as cache:
            known.append(cache.execute(kinds).fetchone()[0])
    assert known == [1, 2]


def test_the_record_is_read_back_equal(fitted: Result) -> None:
    assert read_run(fitted.folder).weights == fitted.weights


def test_any_row_is_exported_from_its_own_model(fitted: Result, tmp_path: Path) -> None:
    (model, *_) = saved(FIXTURE, tmp_path)
    plan = ["--plan", str(fitted.folder / "plan.json"), "--format", "onnx"]
    made = tmp_path / "made.onnx"
    # The run's model was in memory: its fitted form is told by its own digest.
    source = str(fitted.folder / "model.fitted.onnx")
    ended = call("export", source, *plan, "--choice", "weights-fitted", "-o", str(made))
    assert ended.exit_code == 0, ended.output
    onnx.checker.check_model(onnx.load(made), full_check=True)
    ended = call("export", source, *plan, "--choice", "plan", "-o", str(tmp_path / "other.onnx"))
    assert ended.exit_code == 2 and len(ended.output.splitlines()) == 1
    record = json.loads((fitted.folder / "plan.json").read_text())
    assert record["fitted_sha256"] and record["weights_fitted_on"] and record["weights_fitted_by"]
    assert model


def test_nothing_is_fitted_where_no_layer_is_needed(tmp_path: Path) -> None:
    fixture = healthy()
    found = bisect_trt.bisect(
        fixture.model, fixture.inputs, runner="emulated", out=tmp_path, weights="fit", limits=EIGHT
    )
    assert found.weights.rows == () and not (tmp_path / "model.fitted.onnx").exists()
