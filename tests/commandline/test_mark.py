"""Marks on demand: tables of what was asked, and a model that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest

from fixtures.__main__ import input_bytes, model_bytes
from fixtures.encoders import encoder_decomposed
from fixtures.subgraphs import branch
from tests.command import call, saved
from tests.conftest import run_model


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    return [*saved(encoder_decomposed(), tmp_path), "--runner", "emulated"]


def test_compare_shows_what_was_asked_and_the_same_numbers(
    given: list[str], tmp_path: Path
) -> None:
    assert call("compare", *given, "--out", tmp_path / "all").exit_code == 0
    everything = pd.read_csv(tmp_path / "all" / "layers.csv")
    for selectors, count in ((["Pow"], 5), (["Pow", "/head/MatMul"], 6), (["LayerNorm"], 45)):
        marks = [word for s in selectors for word in ("--mark", s)]
        ended = call("compare", *given, *marks, "--out", tmp_path / "all")  # from the cache
        assert ended.exit_code == 0, ended.output
        table = pd.read_csv(tmp_path / "all" / "layers.csv")
        assert len(table) == count
        same = everything[everything["layer"].isin(table["layer"])].reset_index(drop=True)
        pd.testing.assert_frame_equal(table, same)
        assert ("/head/Softmax" in ended.output) is False


def test_a_quiet_compare_writes_its_tables_and_prints_nothing(
    given: list[str], tmp_path: Path
) -> None:
    told, quiet = (call("compare", *given, "--out", tmp_path / "o", *q) for q in ([], ["--quiet"]))
    assert "max_abs" in told.output and (quiet.exit_code, quiet.output) == (0, "")
    assert len(pd.read_csv(tmp_path / "o" / "layers.csv")) == 75
    wanted = call("compare", *given, "--out", tmp_path / "o", "--quiet", "--json")
    assert json.loads(wanted.stdout)["cause"] is not None, "what was asked for is no noise"


def test_a_run_finds_the_same_pins_whatever_is_shown(tmp_path: Path) -> None:
    fixture = branch()
    assert fixture.pins is not None
    one = min(fixture.pins)
    (tmp_path / "m.onnx").write_bytes(model_bytes(fixture))
    (tmp_path / "x.npz").write_bytes(input_bytes(fixture))
    asked = [tmp_path / "m.onnx", "--input", tmp_path / "x.npz", "--requirement", fixture.require]
    more = ["--runner", "emulated", "--robust", "0", "--out", tmp_path / "run"]
    ended = call("run", *asked, *more, "--mark", one)
    assert ended.exit_code == 0, ended.output
    assert list(pd.read_csv(tmp_path / "run" / "layers.csv")["layer"]) == [one]
    assert set(pd.read_csv(tmp_path / "run" / "pins.csv")["layer"]) == fixture.pins


def test_the_marked_model_shows_inner_tensors(given: list[str], tmp_path: Path) -> None:
    target = tmp_path / "marked.onnx"
    ended = call("mark", given[0], "--mark", "Pow", "-o", target)
    assert (ended.exit_code, ended.output) == (0, "5 more outputs\n")
    marked, fixture = onnx.load(target), encoder_decomposed()
    onnx.checker.check_model(marked, full_check=True)
    answers = run_model(marked, fixture.inputs)
    assert len(answers) == 6
    np.testing.assert_allclose(
        answers[0], run_model(fixture.model, fixture.inputs)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("command", ["compare", "mark"])
def test_a_selector_of_nothing_is_refused(command: str, given: list[str], tmp_path: Path) -> None:
    where = given if command == "compare" else given[:1]
    target = ["--out", tmp_path / "o"] if command == "compare" else ["-o", tmp_path / "o"]
    ended = call(command, *where, "--mark", "Conv", *target)
    assert ended.exit_code == 2 and "--mark 'Conv'" in ended.output
    assert not (tmp_path / "o").exists()
    if command == "mark":
        over = call("mark", given[0], "--mark", "Pow", "-o", given[0])
        assert over.exit_code == 2 and "would be written over" in over.output


def test_a_selector_of_layers_that_stay_as_they_are(given: list[str], tmp_path: Path) -> None:
    ended = call("compare", *given, "--precision", "tf32", "--mark", "Pow", "--out", tmp_path / "o")
    assert ended.exit_code == 2 and "no layer that can run in tf32" in ended.output
