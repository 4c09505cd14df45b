"""``--reduced``: another tool's mixed model beside the plans, in compare, verify and run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import list_layers, to_typed
from fixtures.models import conv_clip
from tests.command import call, saved
from tests.copies import EIGHT

RIGHT = frozenset({"/stem/Conv", "/head/Conv"})
"""The layers that the fixture needs in FP32."""

NAME = "reduced model given (other.onnx)"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The fixture's model and input as arguments, its requirement and the run's folder."""
    fixture = conv_clip()
    common = ["--requirement", fixture.require, "--runner", "emulated", "--out", tmp_path / "out"]
    return [*saved(fixture, tmp_path), *map(str, common)]


def mixed(folder: Path, pinned: frozenset[str]) -> Path:
    """A mixed model of the fixture with ``pinned`` in FP32, as a tool would write it."""
    model = to_typed(conv_clip().model, PrecisionPlan("fp16", pinned))
    path = folder / "other.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("pinned, code", [(RIGHT, 0), (frozenset(), 1)], ids=["holds", "does not"])
def test_verify_judges_a_mixed_model(
    pinned: frozenset[str], code: int, files: list[str], tmp_path: Path
) -> None:
    other = mixed(tmp_path, pinned)
    ended = call("verify", *files, "--reduced", other, "--json", limits=EIGHT)
    assert ended.exit_code == code, ended.output
    found = json.loads(ended.stdout)
    assert found["reduced"] == str(other) and found["passed"] is not bool(code)
    assert found["plan"] == {"base": "fp16", "pinned": sorted(pinned)}
    # Both kinds of unseen inputs were judged, not the given one alone.
    assert found["validation"]["perturbed"]["tested"] >= 8
    assert found["validation"]["augmented"]["tested"] >= 8
    said = call("verify", *files, "--reduced", other, limits=EIGHT).stdout
    assert said.startswith("With one input: The reduced model") and f"{len(pinned)} of " in said


def test_compare_shows_a_mixed_model_beside_the_baselines(files: list[str], tmp_path: Path) -> None:
    ended = call("compare", *files, "--reduced", mixed(tmp_path, RIGHT), limits=EIGHT)
    assert ended.exit_code == 0, ended.output
    table = pd.read_csv(tmp_path / "out" / "outputs.csv").set_index("baseline")
    assert table.loc["fp32", "max_abs"] < table.loc[NAME, "max_abs"] < table.loc["fp16", "max_abs"]
    assert table.loc[NAME, "outcome"] == "pass" and NAME in ended.stdout


@pytest.mark.parametrize("pinned", [RIGHT, frozenset({"/stem/Clip"})], ids=["right", "wrong"])
def test_run_has_a_row_for_a_mixed_model(
    pinned: frozenset[str], files: list[str], tmp_path: Path
) -> None:
    ended = call("run", *files, "--reduced", mixed(tmp_path, pinned), "--json", limits=EIGHT)
    assert ended.exit_code == 0, ended.output
    record = json.loads(ended.stdout)
    rows = {row["name"]: row for row in record["choices"]}
    row = rows[NAME]
    assert row["pinned"] == [x.name for x in list_layers(conv_clip().model) if x.name in pinned]
    assert (row["passes"] == "no") is (pinned != RIGHT)
    assert (row["worst_score"] <= 1.0) is (pinned == RIGHT)
    assert 0.0 <= row["saving_kept"] <= 1.0 and not row["recommended"]
    assert RIGHT.issubset(record["pinned"])
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    # The search begins at a plan that passes; one that fails would lead it astray.
    assert bool(plan["searched"]["chance"]) is (pinned == RIGHT)
    assert NAME not in {choice["name"] for choice in plan["choices"]}  # its file is its own
    shown = call("report", tmp_path / "out")
    assert shown.exit_code == 0 and NAME in (tmp_path / "out" / "report.html").read_text()


def test_a_mixed_model_is_judged_where_the_fp32_model_is(files: list[str], tmp_path: Path) -> None:
    other = mixed(tmp_path, RIGHT)
    inner = conv_clip().model.graph.node[1].output[0]
    call("compare", *files, "--reduced", other, "--outputs", inner, limits=EIGHT)
    table = pd.read_csv(tmp_path / "out" / "outputs.csv").set_index("baseline")
    assert table.loc[NAME, "output"] == inner
    assert table.loc["fp32", "max_abs"] < table.loc[NAME, "max_abs"] < table.loc["fp16", "max_abs"]
    model = onnx.load(other)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"other_{name}" if name == inner else name for name in names]
    onnx.save(model, other)
    ended = call("verify", *files, "--reduced", other, "--outputs", inner, limits=EIGHT)
    assert ended.exit_code == 2 and f"has no tensor '{inner}'" in ended.stderr


def test_python_takes_a_mixed_model(tmp_path: Path) -> None:
    fixture, other = conv_clip(), mixed(tmp_path, RIGHT)
    common = {"require": fixture.require, "runner": "emulated", "limits": EIGHT}
    found = bisect_trt.verify(
        fixture.model, fixture.inputs, reduced=other, out=tmp_path / "out", **common
    )
    assert found.passed and found.plan == PrecisionPlan("fp16", RIGHT)
    with pytest.raises(BadInputError, match="give one of plan and reduced"):
        bisect_trt.verify(fixture.model, fixture.inputs, **common)


def other_weights(path: Path) -> None:
    model = onnx.load(path)
    large = max(model.graph.initializer, key=lambda t: np.prod(t.dims))
    values = numpy_helper.to_array(large)
    large.CopyFrom(numpy_helper.from_array((values * 1.01).astype(values.dtype), large.name))
    onnx.save(model, path)


def without_reduced_nodes(path: Path) -> None:
    onnx.save(conv_clip().model, path)


def no_model(path: Path) -> None:
    path.write_bytes(b"no model")


@pytest.mark.parametrize(
    "harm, words",
    [
        (other_weights, "is more than a rounding apart"),
        (without_reduced_nodes, "no node of it gives FP16 or BF16"),
        (no_model, "not an ONNX file"),
        (Path.unlink, "no such file"),
    ],
)
def test_what_is_no_mixed_model_of_it_is_one_line_and_exit_code_2(
    harm: object, words: str, files: list[str], tmp_path: Path
) -> None:
    other = mixed(tmp_path, RIGHT)
    harm(other)  # type: ignore[operator]
    for command in ("run", "compare", "verify"):
        ended = call(command, *files, "--reduced", other)
        assert ended.exit_code == 2
        said = [line for line in ended.stderr.splitlines() if line.startswith("bisect-trt: ")]
        assert len(said) == 1 and words in said[0] and str(other) in said[0]
        assert not (tmp_path / "out").exists()


def test_verify_takes_a_plan_or_a_mixed_model(files: list[str], tmp_path: Path) -> None:
    ended = call("verify", *files)
    assert ended.exit_code == 2 and "give one of --plan and --reduced" in ended.stderr
    other = mixed(tmp_path, RIGHT)
    plan = tmp_path / "plan.json"
    plan.write_text(PrecisionPlan("fp16", RIGHT).to_json())
    ended = call("verify", *files, "--plan", plan, "--reduced", other)
    assert ended.exit_code == 2 and "--plan and --reduced, not both" in ended.stderr


def test_a_mixed_model_of_a_reduced_model_is_refused(files: list[str], tmp_path: Path) -> None:
    other = mixed(tmp_path, RIGHT)
    ended = call("verify", other, *files[1:], "--reduced", other)
    assert ended.exit_code == 2 and "give the FP32 model instead" in ended.stderr


def test_the_precision_is_the_mixed_model_s(files: list[str], tmp_path: Path) -> None:
    ended = call("verify", *files, "--reduced", mixed(tmp_path, RIGHT), "--precision", "bf16")
    assert ended.exit_code == 2 and "--precision bf16" in ended.stderr
    onnx.save(to_typed(conv_clip().model, PrecisionPlan("bf16")), tmp_path / "other.onnx")
    ended = call("compare", *files, "--reduced", tmp_path / "other.onnx", limits=EIGHT)
    assert ended.exit_code == 0, ended.output
    table = pd.read_csv(tmp_path / "out" / "outputs.csv").set_index("baseline")
    assert {"bf16", NAME} <= set(table.index)
    assert table.loc[NAME, "max_abs"] == table.loc["bf16", "max_abs"]
