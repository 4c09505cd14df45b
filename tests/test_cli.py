"""The commands as a user calls them."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from click.testing import CliRunner, Result

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.cli import main
from bisect_trt.graph import list_layers, to_typed
from bisect_trt.model.load import load_model
from bisect_trt.model.weak_typing import polygraphy_script, trtexec_arguments
from fixtures.__main__ import model_bytes
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.fixture import Fixture
from fixtures.models import unsavable
from fixtures.subgraphs import branch, loop
from tests.command import call, saved
from tests.copies import FEW
from tests.model.test_normalised import function_model


def files(fixture: Fixture, folder: Path) -> list[str]:
    asked = ["--requirement", fixture.require, "--out", str(folder / "run")]
    return [*saved(fixture, folder), *asked]


Done = tuple[list[str], Result, Path]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of the encoder: its arguments, what it said, and its folder."""
    folder = tmp_path_factory.mktemp("done")
    arguments = files(encoder_decomposed(), folder)
    arguments[-2:-2] = [
        "--repair",
        "none",
        "--weights",
        "nearest",
    ]  # the search's answer, with its proofs
    return arguments, call("run", *arguments, limits=FEW), folder / "run"


def test_run_says_the_answer_on_one_screen(done: Done) -> None:
    _, result, _ = done
    assert result.exit_code == 0, result.output
    assert "NEEDS MORE DATA with 10 of 75 layers in FP32" in " ".join(result.output.split())
    assert "/head/Pow" in result.output and "report.html" in result.output
    assert len(result.output.splitlines()) <= 25


def test_run_that_cannot_be_met_exits_1(tmp_path: Path) -> None:
    result = call("run", *files(unsavable(), tmp_path), limits=FEW)
    assert result.exit_code == 1 and "not a precision problem" in " ".join(result.output.split())


def test_json_is_run_json_and_quiet_is_quiet(done: Done, tmp_path: Path) -> None:
    arguments, _, folder = done
    shutil.copytree(folder, tmp_path / "run")
    again = [*arguments[:-1], str(tmp_path / "run")]
    printed = json.loads(call("run", *again, "--json", limits=FEW).stdout)
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert printed == written and printed["cause"] == "overflow"
    quiet = call("run", *again, "--quiet", limits=FEW)
    assert quiet.output == "" and quiet.exit_code == 0


@pytest.mark.parametrize("more", [("--dry-run",), ("--robust", "0")])
def test_options_that_only_an_engine_heeds_are_named_without_one(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    asked = ("--runner", "emulated", "--max-builds", "3", "--typing", "weak")
    result = call(
        "run",
        *files(encoder_decomposed(), tmp_path),
        *asked,
        "--out",
        str(tmp_path / "o"),
        *more,
        limits=FEW,
    )
    assert "no engine judges here: --max-builds and --typing weak change nothing" in " ".join(
        result.output.split()
    )


def test_dry_run_prices_and_writes_nothing(tmp_path: Path) -> None:
    result = call("run", *files(encoder_decomposed(), tmp_path), "--dry-run", limits=FEW)
    assert result.exit_code == 0 and "75 layers" in result.output and "evaluations" in result.output
    assert not (tmp_path / "run").exists()


def test_compare_writes_tables_only_and_says_that_it_searched_for_nothing(tmp_path: Path) -> None:
    result = call("compare", *files(encoder_decomposed(), tmp_path), "--json")
    assert result.exit_code == 0
    tables = {"layers.csv", "outputs.csv", "cache.sqlite"}
    assert {p.name for p in (tmp_path / "run").iterdir()} == tables
    said = json.loads(result.stdout)
    assert (said["cause"], said["complete"], said["pinned"]) == ("unknown", False, [])
    assert said["command"].startswith("bisect-trt compare ") and "--out" in said["command"]


def test_inspect_names_patterns_and_advice(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model_bytes(encoder_decomposed()))
    data = json.loads(call("inspect", str(tmp_path / "m.onnx"), "--json").stdout)
    norms = [p for p in data["patterns"] if p["kind"] == "LayerNorm"]
    assert len(norms) == 5 and all(p["decomposed"] and len(p["layers"]) == 9 for p in norms)
    assert [p["kind"] for p in data["patterns"]].count("Softmax") == 2
    assert "opset 17" in data["advice"][0]
    (tmp_path / "n.onnx").write_bytes(model_bytes(encoder_layernorm()))
    data = json.loads(call("inspect", str(tmp_path / "n.onnx"), "--json").stdout)
    assert (
        sum(p["kind"] == "LayerNorm" and not p["decomposed"] for p in data["patterns"]) == 5
        and data["advice"] == []
    )
    text = call("inspect", str(tmp_path / "m.onnx"))
    assert text.exit_code == 0 and "LayerNorm (written out)" in text.output
    places = [text.output.index(part) for part in ("note: ", "LayerNorm (", "layer  ")]
    assert places == sorted(places)


def test_a_folder_is_taken_for_its_plan(tmp_path: Path) -> None:
    onnx.save(encoder_layernorm().model, tmp_path / "m.onnx")
    common = ("export", tmp_path / "m.onnx", "--format", "trtexec", "--plan")
    refused = call(*common, tmp_path)
    assert refused.exit_code == 2 and "no plan.json in this folder" in refused.stderr
    (tmp_path / "plan.json").write_text(PrecisionPlan("fp16", {"/head/Pow"}).to_json())
    in_folder = call(*common, tmp_path)
    assert in_folder.output == call(*common, tmp_path / "plan.json").output


def test_doctor() -> None:
    checks = json.loads(call("doctor", "--json").stdout)
    assert {"runner emulated", "onnxruntime"} <= {c["name"] for c in checks}
    assert next(c for c in checks if c["name"] == "runner emulated")["works"] is True
    warned = CliRunner().invoke(main, ["doctor"], env={"NVIDIA_TF32_OVERRIDE": "0"})
    assert "NVIDIA_TF32_OVERRIDE" in warned.output
    # Where no engine can run, the reason is one of the machine's, never a mistake of ours.
    tensorrt = next(c for c in checks if c["name"] == "runner tensorrt")
    assert tensorrt["works"] or "Error" not in tensorrt["detail"], tensorrt["detail"]


def test_exports_hold_the_plan(done: Done, tmp_path: Path) -> None:
    arguments, _, folder = done
    common = ["export", arguments[0], "--plan", str(folder / "plan.json"), "--format"]
    line = call(*common, "trtexec").output
    assert (
        line.startswith("--fp16 --noTF32 --precisionConstraints=obey") and line.count(":fp32") == 20
    )
    script = call(*common, "polygraphy").output
    assert ast.parse(script) and "'/head/Pow'" in script
    names: dict[str, Any] = {}
    exec(script.replace("import tensorrt as trt", ""), names)
    layer = SimpleNamespace(
        name="fused", metadata="[ONNX Layer: blocks[0]/Relu]\x1e[ONNX Layer: b]"
    )
    assert names["onnx_names"](layer) == {"fused", "blocks[0]/Relu", "b"}
    assert call(*common, "onnx", "-o", str(tmp_path / "t.onnx")).exit_code == 0
    onnx.checker.check_model(onnx.load(tmp_path / "t.onnx"), full_check=True)
    assert (tmp_path / "t.onnx").read_bytes() == (folder / "model.typed.onnx").read_bytes()
    assert call(*common, "onnx").exit_code == 2


def test_names_that_trtexec_cannot_write_are_refused() -> None:
    model = encoder_layernorm().model
    model.graph.node[3].name = "a,b"
    with pytest.raises(BadInputError, match="'a,b' cannot be written"):
        trtexec_arguments(model, PrecisionPlan("fp16", {"a,b"}))


def test_layers_that_tensorrt_calls_otherwise_are_not_written_by_name(tmp_path: Path) -> None:
    """The line matched nothing, and ``verify`` said that it was right."""
    looped, chosen = loop().model, branch().model
    for model, op, scripted in ((looped, "Loop", False), (chosen, "If", True)):
        name = next(x.name for x in list_layers(model) if x.op == op)
        plan = PrecisionPlan("fp16", {name})
        with pytest.raises(BadInputError, match=f"{name}.* cannot be named in --layerPrecisions"):
            trtexec_arguments(model, plan)
        if scripted:
            assert repr(name) in polygraphy_script(model, plan)
        else:
            with pytest.raises(BadInputError, match="cannot be named in the script"):
                polygraphy_script(model, plan)


@pytest.mark.parametrize("form", ["trtexec", "polygraphy"])
def test_layers_inside_functions_are_not_written_by_name(form: str, tmp_path: Path) -> None:
    model = function_model(named=True)
    result = exported(form, model, "one/matmul", tmp_path)
    assert result.exit_code == 2 and "functions are written out here" in result.output
    # What is written of it is a file of its own.
    typed = to_typed(load_model(model).proto, PrecisionPlan("fp32"))
    assert "one/matmul" in exported(form, typed, "one/matmul", tmp_path).output


@pytest.mark.parametrize("form", ["trtexec", "polygraphy"])
def test_unnamed_nodes_are_exported_by_the_names_that_tensorrt_s_parser_gives(
    form: str, tmp_path: Path
) -> None:
    model = encoder_layernorm().model
    for node in model.graph.node:
        node.name = ""
    result = exported(form, model, "Add_/embed/Add_output_0", tmp_path)
    assert result.exit_code == 0 and "Add_/embed" not in result.output
    shown = "=node_of_/embed/Add_output_0:fp32'" if form == "trtexec" else repr(f"node_of_{EMBED}")
    assert shown in result.output


@pytest.mark.parametrize("form", ["trtexec", "polygraphy"])
@pytest.mark.parametrize("first", [True, False])
def test_names_that_several_nodes_share_are_not_exported(
    form: str, first: bool, tmp_path: Path
) -> None:
    model = encoder_layernorm().model
    nodes = [node for node in model.graph.node if node.op_type == "Add"][:2]
    for node in nodes:
        node.name = "twice"
    result = exported(form, model, "twice" if first else "twice_1", tmp_path)
    assert result.exit_code == 2 and "2 nodes are called 'twice'" in result.output


EMBED = "/embed/Add_output_0"


def exported(form: str, model: onnx.ModelProto, pin: str, folder: Path) -> Result:
    onnx.save(model, folder / "m.onnx")
    (folder / "plan.json").write_text(PrecisionPlan("fp16", {pin}).to_json())
    plan = str(folder / "plan.json")
    return call("export", str(folder / "m.onnx"), "--plan", plan, "--format", form)


def test_report_files_are_well_formed(done: Done) -> None:
    _, _, folder = done
    junit = ElementTree.parse(folder / "junit.xml").getroot()
    assert (junit.get("tests"), junit.get("failures")) == ("4", "0")
    page = (folder / "report.html").read_text()
    assert "Keep 10 of 75 layers" in page and "Content-Security-Policy" in page
    assert "| /head/Pow | Pow |" in (folder / "report.md").read_text()


def test_a_pattern_that_the_shell_made_words_of_is_explained(tmp_path: Path) -> None:
    given = files(encoder_decomposed(), tmp_path)
    result = call("compare", *given, "more.npz", "most.npz")
    words = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "extra arguments (more.npz most.npz). Each --input is one file, folder" in words
    assert "Each" not in call("inspect", str(tmp_path / "m.onnx"), "more.npz").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "m.onnx", "real"), "Missing option '--input': write --input real"),
        (("compare", "m.onnx", "a b", "c"), "write --input 'a b' --input c"),
        (("run", "m.onnx"), "Missing option '--input'."),
        (("run", "m.onnx", "--input", "m.onnx"), "m.onnx: a model, not an input; give an .npz"),
        (("run", "m.onnx", "--input", "x.npz", "--tolerance", "1"), "write --requirement 'max_abs"),
        (("run", "m.onnx", "--input", "x.npz", "--threshold=1"), "write --requirement 'max_abs"),
        (("run", "m.onnx", "--input", "x.npz", "--metric", "max_abs"), "or --requirement for a k"),
        (("run", "m.onnx", "--input", "x.npz", "--metrics", "max_abs"), "which names the metric"),
        (("verify", "m.onnx", "--input", "x.npz"), "such as reports/MODEL-fp16/plan.json"),
    ],
)
def test_a_slip_is_told_what_to_write(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(encoder_decomposed(), tmp_path)
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == 2 and said in " ".join(result.output.split())
