"""The other commands know a repaired model: what they take for it, refuse, and say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt import pipeline
from bisect_trt.base.interrupt import Observer, StoppedError
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import digest_of
from bisect_trt.model.tensor_types import infer_types
from bisect_trt.repair.edits import Edit, Proposal, Ranges, Rule, origins_of
from bisect_trt.repair.rules import PROPOSE
from bisect_trt.report.files import to_json
from bisect_trt.report.record import read_run
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.problem import Problem
from fixtures.build import GraphBuilder
from tests.command import call
from tests.copies import FEW
from tests.repair.graphs import run as outputs_of
from tests.repair.test_command import with_tail
from tests.repair.test_proof import folded, joined
from tests.repair.test_rules import batch_norm, normal

Feed = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Ran:
    """A model, its input, and the folder of its run."""

    model: Path
    inputs: Path
    out: Path

    @property
    def plan(self) -> Path:
        return self.out / "plan.json"

    @property
    def repaired(self) -> Path:
        return self.out / "model.repaired.onnx"

    def copy(self, folder: Path) -> Ran:
        """The same with a folder of its own, to be changed."""
        shutil.copytree(self.out, folder / "copy")
        return replace(self, out=folder / "copy")

    def ends(self, command: str, model: Path, *more: object) -> tuple[int, str]:
        """The exit code and the output of ``verify`` or ``export`` with the plan."""
        given: tuple[object, ...] = ("--plan", self.plan, *more)
        if command == "verify":
            given = ("--input", self.inputs, "--out", self.out.parent / "verified", *given)
        ended = call(command, model, *given, limits=FEW)
        return ended.exit_code, ended.output

    def refused(self, command: str, model: Path, *more: object) -> str:
        """The one line with which the command ends with exit code 2."""
        code, output = self.ends(command, model, *more)
        assert code == 2 and len(output.splitlines()) == 1, output
        return output


def saved(model: onnx.ModelProto, feed: Feed, folder: Path) -> Ran:
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "x.npz", **feed)  # type: ignore[arg-type]
    return Ran(folder / "m.onnx", folder / "x.npz", folder / "run")


def made(model: onnx.ModelProto, feed: Feed, folder: Path, *more: object) -> Ran:
    """A run of ``model`` without augmented inputs."""
    ran = saved(model, feed, folder)
    ended = call(
        *("run", ran.model, "--input", ran.inputs, "--out", ran.out),
        *("--augmented", "none", "--runner", "emulated", *more),
        limits=FEW,
    )
    assert ended.exit_code == 0, ended.output
    return ran


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A network whose BatchNormalization is folded; to be read only."""
    return made(*folded(), tmp_path_factory.mktemp("folded"))


@pytest.fixture(scope="module")
def in_part(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A network that is judged at inner tensors; to be read only."""
    feed = {"x": normal(61, 6, 4)}
    folder = tmp_path_factory.mktemp("in_part")
    return made(with_tail(inner=False), feed, folder, "--outputs", "scores,boxes")


def half() -> tuple[onnx.ModelProto, Feed]:
    """An RMSNorm whose squares leave FP16's range; inputs, outputs and weights are FP16."""
    b = GraphBuilder(31, opset=17)
    big = b.op("MatMul", "x", b.normal(8, 8, scale=400.0))
    mean = b.op("ReduceMean", b.op("Mul", big, big), axes=[-1], keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.weight(0.1)))
    b.rename_output(b.op("Mul", b.op("Div", big, root), b.normal(8)), "y")
    model = b.model({"x": [4, 8]}, {"y": [4, 8]})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.checker.check_model(model, full_check=True)
    return model, {"x": normal(5, 4, 8).astype(np.float16)}


# verify


@pytest.mark.parametrize("given", ["model", "repaired"])
@pytest.mark.parametrize("which", ["repaired", "in_part"])
def test_verify_takes_the_original_and_the_repaired_model(
    which: str, given: str, request: pytest.FixtureRequest
) -> None:
    ran: Ran = request.getfixturevalue(which)
    code, output = ran.ends("verify", getattr(ran, given))
    assert code == 0 and "The plan holds." in output, output


def test_verify_refuses_other_models(repaired: Ran, in_part: Ran, tmp_path: Path) -> None:
    assert "neither that nor its original" in repaired.refused("verify", in_part.model)
    ran = repaired.copy(tmp_path)
    ran.repaired.unlink()
    assert "model.repaired.onnx is not there" in ran.refused("verify", ran.model)
    for other in (in_part.repaired, ran.model):
        shutil.copy(other, ran.repaired)
        assert "model.repaired.onnx: has changed since" in ran.refused("verify", ran.model)
    ran.repaired.write_bytes(b"\x08")
    assert "model.repaired.onnx: " in ran.refused("verify", ran.model)
    assert not (tmp_path / "verified").exists()


def test_the_reference_of_the_original_is_its_own_fp32(repaired: Ran, tmp_path: Path) -> None:
    """A repaired model that is wrong is no fault of its own FP32."""
    ran = repaired.copy(tmp_path)
    wrong = onnx.load(ran.repaired)
    for tensor in wrong.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(array * np.float32(1.1), tensor.name))
    onnx.save(wrong, ran.repaired)
    plan = json.loads(ran.plan.read_text())
    ran.plan.write_text(json.dumps({**plan, "repaired_sha256": digest_of(ran.repaired)}))
    assert ran.ends("verify", ran.model)[0] == 1
    assert ran.ends("verify", ran.repaired)[0] == 0


def test_layers_that_an_edit_replaced_are_kept_in_fp32_by_their_successor(tmp_path: Path) -> None:
    ran = made(*joined(), tmp_path, "--keep-fp32", "^/Mul$")
    rows = {row["name"]: row["pinned"] for row in json.loads(ran.plan.read_text())["choices"]}
    assert rows["as it is"] == ["/Mul"] and rows["repaired"] == ["/Div"]
    (kept,) = (n for n in onnx.load(ran.repaired).graph.node if n.name == "/Div")
    assert "/Mul" in origins_of(kept)
    for model in (ran.model, ran.repaired):
        assert ran.ends("verify", model)[0] == 0


# export


ROWS = ["as it is", "As-is", "as_it_is", "AS-IT-IS", "repaired", "PLAN", "bf16", "FP32"]
FORMS = ["onnx", "trtexec", "polygraphy"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_exported_in_every_form(
    repaired: Ran, row: str, form: str, tmp_path: Path
) -> None:
    target = tmp_path / "made.onnx"
    more = ("--choice", row, "--format", form, "--output", target)
    code, output = repaired.ends("export", repaired.model, *more)
    assert code == 0, output
    names = {"repaired": {"Conv"}}.get(row, {"Conv", "BatchNormalization"})
    told = f"note: build from {repaired.repaired}, whose layers it names\n"
    if form != "onnx":
        flag = {"bf16": "--bf16", "FP32": ""}.get(row, "--fp16")
        assert flag in target.read_text() and "--fp32" not in target.read_text()
        assert output == (told if row == "repaired" else "")
        return
    typed, kind = onnx.load(target), {"bf16": TensorProto.BFLOAT16, "FP32": TensorProto.FLOAT}
    onnx.checker.check_model(typed, full_check=True)
    nodes = {n.op_type: n for n in typed.graph.node if n.op_type != "Cast"}
    assert nodes.keys() == names
    types = infer_types(typed)
    wanted = dict.fromkeys(names, kind.get(row, TensorProto.FLOAT16))
    if row == "PLAN":
        wanted["BatchNormalization"] = TensorProto.FLOAT
    assert {name: types.type_of(node.output[0]) for name, node in nodes.items()} == wanted


@pytest.mark.parametrize("form", FORMS)
def test_the_repaired_file_is_exported_as_the_original_is(
    repaired: Ran, form: str, tmp_path: Path
) -> None:
    texts = []
    for model in (repaired.model, repaired.repaired):
        target = tmp_path / f"{model.stem}.onnx"
        assert repaired.ends("export", model, "--format", form, "--output", target)[0] == 0
        texts.append(target.read_bytes())
    assert texts[0] == texts[1]


def test_rows_that_are_not_there_are_told(repaired: Ran, tmp_path: Path) -> None:
    asked = ("--format", "trtexec", "--choice")
    for name in ("pla", "nothing"):
        output = repaired.refused("export", repaired.model, *asked, name)
        assert f"--choice {name}: " in output and "as it is, repaired, plan, BF16, FP32" in output
    output = repaired.refused("export", repaired.repaired, *asked, "as-is")
    assert "is for the model as it was before its repair" in output
    old = saved(*folded(), tmp_path)
    old.out.mkdir()
    old.plan.write_text('{"base": "fp16", "pinned": ["/BatchNormalization"]}')
    assert "it has none; run again" in old.refused("export", old.model, *asked, "repaired")
    assert old.ends("export", old.model, "--format", "trtexec")[0] == 0


def test_what_computes_in_fp32_alone_is_exported_whatever_its_layers_are_called(
    tmp_path: Path,
) -> None:
    """TensorRT gives the layers of a Loop other names, which nothing has to name here."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Mul", ["h", "h"], ["z"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [4]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [4]),
        ],
    )
    b = GraphBuilder(0, opset=17)
    b.rename_output(b.op("Loop", b.weight([2], np.int64), "", "x", body=body), "y")
    ran = saved(b.model({"x": [4]}, {"y": [4]}), {"x": normal(1, 4)}, tmp_path)
    ran.out.mkdir()
    row = {"name": "FP32", "precision": "fp32", "graph": "original", "pinned": ["/Loop"]}
    plan = {"base": "fp16", "pinned": ["/Loop"], "choices": [row]}
    ran.plan.write_text(json.dumps(plan))
    asked = ("--format", "polygraphy")
    assert "cannot be named" in ran.refused("export", ran.model, *asked)
    code, output = ran.ends("export", ran.model, *asked, "--choice", "fp32")
    assert code == 0 and "PINNED = set()" in output


DAMAGE: dict[str, Any] = {
    "graph": ["other", 1, None, ["repaired"]],
    "model_sha256": [7, None, ["a"]],
    "repaired_sha256": [7, {}],
    "choices": [
        5,
        None,
        "rows",
        {"name": "FP32"},
        [None],
        ["FP32"],
        [{}],
        [{"name": 3, "precision": "fp16", "graph": "original", "pinned": []}],
        [{"name": "x", "precision": "fp64", "graph": "original", "pinned": []}],
        [{"name": "x", "precision": "fp16", "graph": "other", "pinned": []}],
        [{"name": "x", "precision": "fp16", "graph": "original", "pinned": "/Conv"}],
        [{"name": "x", "precision": "fp16", "graph": "original", "pinned": [1]}],
        [{"name": "x", "precision": "fp16", "graph": "original", "pinned": None}],
        [{"name": "x", "precision": "fp16", "graph": "original"}],
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in DAMAGE.items() for value in values]
)
def test_a_damaged_plan_is_told_in_one_line(
    repaired: Ran, key: str, value: Any, tmp_path: Path
) -> None:
    plan = {**json.loads(repaired.plan.read_text()), key: value}
    (tmp_path / "run").mkdir()
    ran = replace(repaired, out=tmp_path / "run")
    ran.plan.write_text(json.dumps(plan))
    output = ran.refused("export", ran.model, "--format", "trtexec")
    assert "not a plan that bisect-trt wrote" in output and key in output


def test_a_plan_that_lost_its_digests_names_the_file_to_use(repaired: Ran, tmp_path: Path) -> None:
    ran = repaired.copy(tmp_path)
    plan = json.loads(ran.plan.read_text())
    del plan["model_sha256"], plan["repaired_sha256"]
    ran.plan.write_text(json.dumps(plan))
    assert "neither that nor its original" in ran.refused(
        "export", ran.model, "--format", "trtexec"
    )


# run, repair, reduce, diff, gate, report


def test_a_repaired_plan_is_a_start(repaired: Ran, tmp_path: Path) -> None:
    model, feed = folded()
    plan = json.loads(repaired.plan.read_text())
    for pins, told in (([], 0), (["/Conv"], 0), (["/Conv", "/gone"], 1), (["/gone"], 1)):
        (tmp_path / "plan.json").write_text(json.dumps({**plan, "pinned": pins}))
        result = bisect_trt.bisect(
            model,
            [feed],
            runner="emulated",
            augmented="none",
            start_from=tmp_path / "plan.json",
            limits=FEW,
            out=tmp_path / "out",
        )
        assert result.passed and result.is_repaired and result.pinned == []
        assert len([f for f in result.findings if f.kind == "start-from"]) == told


def test_a_repaired_model_is_a_model_like_any_other(repaired: Ran, tmp_path: Path) -> None:
    given = (repaired.repaired, "--input", repaired.inputs)
    ended = call(
        "run", *given, "--out", tmp_path / "run", "--augmented", "none", "--json", limits=FEW
    )
    found = json.loads(ended.stdout)
    assert ended.exit_code == 0 and found["pinned"] == [] == found["repairs"]
    assert [c["name"] for c in found["choices"] if c["recommended"]] == ["as it is"]
    assert not (tmp_path / "run" / "model.repaired.onnx").exists()
    ended = call("repair", *given, "--out", tmp_path / "repair")
    assert ended.exit_code == 0 and ended.output.startswith("NEEDS NO REPAIR")
    ended = call("reduce", *given, "--check", "false", "--out", tmp_path / "reduced")
    assert ended.exit_code == 0 and "1 of 1 node: /Conv (Conv)" in ended.output
    own = call("run", *given, "--out", repaired.out)
    assert own.exit_code == 2 and "would be written over" in own.output


def test_a_run_is_read_back_with_its_choices_and_its_repair(
    repaired: Ran, in_part: Ran, tmp_path: Path
) -> None:
    for ran in (repaired, in_part):
        text = (ran.out / "run.json").read_text()
        assert json.loads(text)["repairs"] and json.loads(text)["repair_proof"]
        assert to_json(read_run(ran.out).as_json()) == text.rstrip("\n")
    ran = repaired.copy(tmp_path)
    documents = ("report.html", "report.md", "junit.xml")
    before = {name: (ran.out / name).read_text() for name in documents}
    for name in documents:
        (ran.out / name).unlink()
    assert call("report", ran.out).exit_code == 0
    assert {name: (ran.out / name).read_text() for name in documents} == before
    assert "repaired (fold-bn)" in before["report.md"]


def test_diff_says_which_graph_each_answer_is_for(repaired: Ran, tmp_path: Path) -> None:
    plain = made(*folded(), tmp_path, "--repair", "none", "--weights", "nearest")
    for pair, graphs in (
        ((plain, repaired), ("original", "repaired")),
        ((repaired, plain), ("repaired", "original")),
    ):
        folders = [ran.out for ran in pair]
        found = json.loads(call("diff", *folders, "--json").stdout)
        assert (found["graph_before"], found["graph_after"]) == graphs
        changed = "rules_gained" if graphs[1] == "repaired" else "rules_lost"
        assert found[changed] == ["fold-bn"] and found["matched"] == 1
        first, second = ("repaired (fold-bn)" if g == "repaired" else g for g in graphs)
        sentence = f"The first answer is for the {first} graph, the second for the {second} one"
        assert sentence in call("diff", *folders).output
    both = call("diff", repaired.out, repaired.out)
    assert "answer is for" not in both.output and "What else differs" not in both.output


def test_diff_says_which_rules_came_and_went(repaired: Ran) -> None:
    before = read_run(repaired.out)
    (row,) = before.repair.rows
    other = replace(before.repair, rows=(replace(row, rule="scale"),))
    found = bisect_trt.report.diff.diff_runs(before, replace(before, repair=other))
    assert (found.rules_gained, found.rules_lost) == (["scale"], ["fold-bn"])
    (line,) = bisect_trt.report.diff.as_page(found).lines
    assert line.endswith("rules that came: scale, that went: fold-bn.")


def test_a_gate_says_what_each_run_recommends(tmp_path: Path) -> None:
    ran, out = saved(*folded(), tmp_path), tmp_path / "gate"
    common = '[defaults]\naugmented = "none"\nrunner = "emulated"\n'
    entries = [
        f'[models.{name}]\nmodel = "{ran.model}"\ninput = "{ran.inputs}"\nrepair = "{rules}"\n'
        for name, rules in (("whole", "auto"), ("plain", "none"), ("mask", "mask"))
    ]
    config = ("--config", tmp_path / "bisect.toml", "--out", out)
    (tmp_path / "bisect.toml").write_text(common + "".join(entries))
    ended = call("gate", *config, limits=FEW)
    assert ended.exit_code == 0, ended.output
    found = {
        m["name"]: m["recommended"] for m in json.loads((out / "gate.json").read_text())["models"]
    }
    assert found == {
        "whole": "repaired (fold-bn), 0 layers",
        "plain": "plan, 1 layer",
        "mask": "plan, 1 layer",
    }
    assert "repaired (fold-bn), 0 layers" in (out / "gate.md").read_text()
    (tmp_path / "bisect.toml").write_text(common + entries[0].replace("auto", "nothing"))
    ended = call("gate", *config, limits=FEW)
    assert ended.exit_code == 2 and "[models.whole]: --repair nothing: no such rule" in ended.output


class EmulatedEngine(EmulatedRunner):
    """The emulator in the place of an engine."""

    name = "engine"
    versions: Mapping[str, str] = {"engine": "1"}

    def takes(self, sample: Sample) -> bool:
        return True

    def close(self) -> None:
        pass


class Stopper(Observer):
    """Ctrl-C when the search on the original begins."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name == "bisect":
            raise KeyboardInterrupt


def test_an_interrupt_after_the_repaired_graph_was_validated_keeps_it(tmp_path: Path) -> None:
    model, feed = folded()
    given = Settings(
        model=model,
        inputs=[feed],
        runner="emulated",
        augmented="none",
        out=tmp_path / "out",
        limits=FEW,
    )
    observer = Stopper()
    with pytest.raises(StoppedError, match="The graph is repaired"):
        pipeline.run(given, observer)
    found = read_run(tmp_path / "out")
    assert found.validation is not None and found.validation.perturbed.passed > 0
    assert found.interrupted and found.is_repaired and found.passed and found.pinned == []
    assert (tmp_path / "out" / "model.repaired.onnx").is_file()
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["graph"] == "repaired"


@pytest.mark.parametrize("minutes", [1e-6, 0.01, 0.02, 0.025, 0.03, 0.04])
def test_a_small_budget_ends_a_run_in_order(minutes: float, tmp_path: Path) -> None:
    model, feed = folded()
    result = bisect_trt.bisect(
        model, [feed], runner="emulated", augmented="none", budget=minutes, out=tmp_path, limits=FEW
    )
    assert to_json(read_run(tmp_path).as_json()) == to_json(result.as_json())
    chosen = [choice for choice in result.choice_rows if choice.recommended]
    assert len(chosen) == int(result.exit_code == 0)
    assert (tmp_path / "model.repaired.onnx").exists() == bool(result.repair.rows)


@pytest.mark.parametrize("ray", [None, "local"])
def test_an_engine_on_a_cluster_is_opened_once(
    ray: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine's workers hold its GPUs: those of a second would wait for them."""
    opened: list[Problem] = []

    def open_engine(problem: Problem, _: Path) -> EmulatedEngine:
        opened.append(problem)
        return EmulatedEngine(problem.graph)

    monkeypatch.setattr("bisect_trt.steps.context.open_engine", open_engine)
    monkeypatch.setattr("bisect_trt.steps.context.open_emulator_pool", lambda *_: None)
    model, feed = folded()
    result = bisect_trt.bisect(model, [feed], ray=ray, augmented="none", out=tmp_path, limits=FEW)
    told = [f.message for f in result.findings if f.kind == "not-repaired"]
    if ray is None:
        assert [p.settings.precision.value for p in opened] == ["fp16", "fp16", "bf16"]
        assert result.is_repaired and result.passed and told == []
    else:
        assert len(opened) == 1 and told == [pipeline.NOT_ON_RAY]
        assert result.passed and not result.is_repaired
        names = {choice.name for choice in result.choice_rows}
        assert names - {"knee"} == {"as it is", "plan", "FP32"}


# What a repaired model must keep


def signature(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    values = (*model.graph.input, *model.graph.output)
    return [(v.name, v.type.SerializeToString(deterministic=True)) for v in values]


@pytest.mark.parametrize("which", ["repaired", "in_part"])
def test_inputs_and_outputs_stay_as_they_are(which: str, request: pytest.FixtureRequest) -> None:
    ran: Ran = request.getfixturevalue(which)
    assert signature(onnx.load(ran.repaired)) == signature(onnx.load(ran.model))


def test_an_input_that_only_the_rest_of_the_model_reads_stays(tmp_path: Path) -> None:
    model = with_tail(inner=False)
    model.graph.input.append(helper.make_tensor_value_info("least", TensorProto.FLOAT, []))
    node = next(n for n in model.graph.node if n.op_type == "Mul")
    node.input[1] = "least"
    feed = {"x": normal(61, 6, 4), "least": np.array(0.5, np.float32)}
    ran = saved(model, feed, tmp_path)
    more = ("--outputs", "scores,boxes", "--out", ran.out)
    ended = call("repair", ran.model, "--input", ran.inputs, *more)
    assert ended.exit_code == 0, ended.output
    assert signature(onnx.load(ran.repaired)) == signature(model)
    exact, got = (outputs_of(onnx.load(path), feed) for path in (ran.model, ran.repaired))
    for name, array in exact.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max())


def test_what_onnx_refuses_is_no_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime takes a constant that is there twice."""
    b = GraphBuilder(33, opset=17)
    h = batch_norm(b, b.op("Conv", "x", b.normal(6, 4, 1, 1, scale=1e4), b.normal(6)), 6, 1e8)
    last = b.weight(0.5)
    b.rename_output(b.op("Mul", h, last), "y")
    model = b.model({"x": [1, 4, 8, 8]}, {"y": [1, 6, 8, 8]})
    propose = PROPOSE[Rule.FOLD_BN]

    def twice(graph: Graph, ranges: Ranges) -> Proposal:
        edits, refusals = propose(graph, ranges)
        return tuple(map(with_copy, edits)), refusals

    def with_copy(edit: Edit) -> Edit:
        return replace(edit, constants={**edit.constants, last: np.float32(0.5)})

    ran = saved(model, {"x": normal(34, 1, 4, 8, 8)}, tmp_path)
    asked = ("repair", ran.model, "--input", ran.inputs, "--repair", "fold-bn", "--out", ran.out)
    monkeypatch.setitem(PROPOSE, Rule.FOLD_BN, twice)  # type: ignore[arg-type]
    ended = call(*asked)
    assert ended.exit_code == 1, ended.output
    assert "refused: fold-bn: ONNX's own check refuses the repaired model" in ended.output
    assert not ran.repaired.exists()
    monkeypatch.undo()
    assert call(*asked).exit_code == 0


def test_a_source_in_fp16_is_repaired_and_keeps_its_types(tmp_path: Path) -> None:
    model, feed = half()
    ran = made(model, feed, tmp_path)
    found = json.loads((ran.out / "run.json").read_text())
    assert found["pinned"] == [] and [row["rule"] for row in found["repairs"]] == ["scale"]
    for path in (ran.repaired, ran.out / "model.typed.onnx"):
        written = onnx.load(path)
        onnx.checker.check_model(written, full_check=True)
        assert signature(written) == signature(model)
    exact = outputs_of(onnx.load(ran.repaired), feed)["y"]
    assert exact.dtype == np.float16 and np.isfinite(exact).all()
    layers = Graph(onnx.load(ran.repaired)).layers_at(Precision.FP16)
    assert {"MatMul", "Sqrt"} <= {layer.op for layer in layers}, "they are FP32 there"
    for given in (ran.model, ran.repaired):
        code, output = ran.ends("verify", given)
        assert code == 0 and "The plan holds." in output, output
    given = ("--input", ran.inputs, "--out", tmp_path / "alone")
    ended = call("repair", ran.model, *given)
    assert ended.exit_code == 0 and ended.output.startswith("REPAIRED   scale")
    alone = tmp_path / "alone" / "model.repaired.onnx"
    assert alone.read_bytes() == ran.repaired.read_bytes()
    assert call("repair", alone, *given[:2], "--out", tmp_path / "again").output.startswith(
        "NEEDS NO REPAIR"
    )
