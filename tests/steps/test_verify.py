"""``verify``: a plan that holds, one that new weights break, and plans that are none of the
model's.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.tensorrt.timing import RoundTimes
from bisect_trt.steps.timing import Build, PlanTime, Timer, Timing
from fixtures.build import GraphBuilder
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy, tf32_victim
from tests.command import call
from tests.conftest import run_model
from tests.copies import FEW
from tests.engines import Engine, Timed

Files = tuple[Path, Path, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The encoder's model, input, and the plan that a run finds."""
    fixture = encoder_decomposed()
    model, inputs, plan = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "plan.json"
    onnx.save(fixture.model, model)
    np.savez(inputs, **fixture.inputs)  # type: ignore[arg-type]
    assert fixture.pins is not None
    plan.write_text(PrecisionPlan(Precision.FP16, fixture.pins).to_json())
    return model, inputs, plan


def ended(result: Result) -> tuple[int, str]:
    return result.exit_code, result.output


def verify(files: Files, *more: object, requirement: str = "max_abs<=2e-3") -> tuple[int, str]:
    model, inputs, plan = files
    given = (model, "--input", inputs, "--plan", plan, "--requirement", requirement)
    where = ("--runner", "emulated", "--out", model.parent / "out")
    return ended(call("verify", *given, *where, *more, limits=FEW))


def test_a_plan_that_holds(files: Files) -> None:
    code, output = verify(files)
    assert code == 0 and "The plan holds." in output
    assert (
        "10 layers FLOAT, 65 FP16" in output
        and "75 of 75 layers seen, each of the plan's type" in output
    )
    code, output = verify(files, "--json")
    answer = json.loads(output)
    assert code == 0 and answer["passed"] and len(answer["plan"]["pinned"]) == 10
    assert {c["what"]: c["validation"] for c in answer["checks"]} == dict.fromkeys(
        [
            "requirements on emulated",
            "requirements on emulated-whole",
            "typed ONNX",
            "TensorRT's parser",
        ],
        True,
    )
    assert verify(files, "--quiet") == (0, "")


def test_what_it_found_is_written_for_people_machines_and_ci(files: Files, tmp_path: Path) -> None:
    said = {}
    for pins in (10, 0):
        plan = PrecisionPlan.from_json(files[2].read_text())
        files[2].write_text(plan.with_pins(sorted(plan.pinned)[:pins]).to_json())
        code, output = verify(files, "--json", "--out", str(tmp_path / "out"))
        assert code == (0 if pins else 1)
        assert json.loads((tmp_path / "out" / "verify.json").read_text()) == json.loads(output)
        said[pins] = ElementTree.parse(tmp_path / "out" / "verify.junit.xml").getroot()
    cases = {problem.get("name"): problem for problem in said[10].iter("testcase")}
    assert {"requirements on emulated", "typed ONNX", "holds on perturbed inputs"} <= set(cases)
    assert said[10].get("failures") == "0" and int(said[0].get("failures", 0)) >= 3
    properties = {p.get("name"): p.get("value", "") for p in said[10].iter("property")}
    assert properties["validation"].startswith("Inconclusive. Passed: 1 of 1 inputs")


def test_no_file_that_is_read_is_written_over_and_no_answer_outlives_the_next(
    files: Files, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    given = tmp_path / "here" / "verify.json"
    with np.load(files[1]) as arrays:
        feeds = []
        for name, array in arrays.items():
            stream = io.BytesIO()
            np.save(stream, array)
            feeds.append({name: {"array": base64.b64encode(stream.getvalue()).decode()}})
    given.write_text(json.dumps(feeds))
    code, output = verify((files[0], given, files[2]), "--out", str(given.parent))
    assert code == 2 and "verify.json" in output and json.loads(given.read_text()) == feeds
    there = tmp_path / "there"
    assert verify(files, "--out", str(there))[0] == 0 and (there / "verify.junit.xml").exists()
    other = tmp_path / "metric.py"
    other.write_text("def broken(reference, candidate):\n    raise ValueError('boom')\n")
    more = ("--metric", f"{other}:broken", "--requirement", "broken<=1")
    assert verify(files, "--out", str(there), *more)[0] == 2
    assert not (there / "verify.junit.xml").exists()


def test_golden_outputs_are_checked(files: Files, tmp_path: Path) -> None:
    with np.load(files[1]) as arrays:
        outputs = run_model(onnx.load(files[0]), dict(arrays))
    name = onnx.load(files[0]).graph.output[0].name
    for factor, validation in ((1.0, True), (1.3, False)):
        np.savez(tmp_path / "golden.npz", **{name: outputs[0] * np.float32(factor)})
        code, output = verify(files, "--json", "--golden", str(tmp_path / "golden.npz"))
        answer = json.loads(output)
        assert code == (0 if validation else 1)
        (check,) = (c for c in answer["checks"] if c["what"] == "golden outputs")
        assert check["validation"] is validation and (
            validation or "itself differs" in check["detail"]
        )
    code, output = verify(files, "--golden", str(tmp_path / "golden.npz"))
    assert code == 1 and "But the reference does not give the golden outputs" in " ".join(
        output.split()
    )


def test_a_missing_pin_is_seen(files: Files) -> None:
    plan = PrecisionPlan.from_json(files[2].read_text())
    files[2].write_text(plan.with_pins(plan.pinned - {"/head/Pow"}).to_json())
    code, output = verify(files)
    assert code == 1 and "The plan does not hold." in output and "602 times the tolerance" in output
    # What it is on other inputs is no question where it misses the given ones.
    assert "Lucky" not in output and "Passed: 0 of 1 inputs \u00b7 0 of" in output
    answer = json.loads(verify(files, "--json")[1])
    assert answer["verdict"] is None and answer["validation"]["given"]["passed"] == 0


def test_new_weights_break_it(files: Files) -> None:
    """Retrained weights with a larger outlier: another layer now overflows."""
    model = onnx.load(files[0])
    embed = next(n for n in model.graph.node if n.name == "/embed/Add")
    weight = next(i for i in model.graph.initializer if i.name in embed.input)
    weight.CopyFrom(numpy_helper.from_array(200.0 * numpy_helper.to_array(weight), weight.name))
    onnx.save(model, files[0])
    code, output = verify(files)
    assert code == 1 and "does not hold" in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not a plan that bisect-trt wrote"),
        (
            '{"base": "fp16", "pinned": ["/nobody"]}',
            "pins layer '/nobody', which the model does not have",
        ),
        ("\x00\xff", "not a plan"),
    ],
)
def test_a_plan_of_something_else_is_refused(files: Files, text: str, words: str) -> None:
    files[2].write_text(text)
    code, output = verify(files)
    assert code == 2 and words in output and "Traceback" not in output
    assert not (files[0].parent / "out").exists()


def test_a_missing_plan_and_a_contradicting_precision_are_refused(
    files: Files,
) -> None:
    code, output = verify(files, "--precision", "bf16")
    assert code == 2 and "is a plan for fp16" in output
    files[2].unlink()
    code, output = verify(files)
    assert code == 2 and "plan.json: cannot be read" in output


@pytest.mark.parametrize(("base", "validation"), [("tf32", False), ("fp32", True)])
def test_plans_without_types(base: str, validation: bool, tmp_path: Path) -> None:
    fixture = tf32_victim()
    found = bisect_trt.verify(
        fixture.model,
        fixture.inputs,
        PrecisionPlan(base),
        require=fixture.require,
        runner="emulated",
        out=tmp_path,
        limits=FEW,
    )
    assert found.passed is validation
    assert next(c for c in found.checks if c.what == "typed ONNX").validation is None


def test_a_plan_for_a_model_that_0_4_0_rewrote_names_that_model(
    files: Files, tmp_path: Path
) -> None:
    model, inputs, _ = files
    plan = {"base": "fp16", "pinned": [], "rewritten": ["/norm/LayerNormalization"]}
    (tmp_path / "old.json").write_text(json.dumps(plan))
    given = ("--input", inputs, "--runner", "emulated", "--out", tmp_path / "v")
    for command in (("verify", model, *given), ("export", model, "--format", "trtexec")):
        code, output = ended(call(*command, "--plan", tmp_path / "old.json", limits=FEW))
        assert code == 2 and "model.rewritten.onnx" in output


def test_an_array_without_a_name_is_refused_from_a_notebook(tmp_path: Path) -> None:
    with pytest.raises(bisect_trt.BadInputError, match="an array without a name"):
        bisect_trt.verify(
            healthy().model,
            np.zeros((4, 16), np.float32),
            PrecisionPlan("fp16"),
            out=tmp_path,
        )  # type: ignore[arg-type]


def test_every_given_input_counts(tmp_path: Path) -> None:
    """Nothing is searched: an input kept apart would only hide that it misses."""
    fixture = encoder_decomposed()
    for number in range(20):
        scale = 1e5 if number == 4 else 1.0 + number / 100  # what run would keep apart
        scaled = {n: (a * scale).astype(np.float32) for n, a in fixture.inputs.items()}
        np.savez(tmp_path / f"x{number:02}.npz", **scaled)  # type: ignore[arg-type]
    np.savez(tmp_path / "x99.npz", **fixture.inputs)  # type: ignore[arg-type]
    assert fixture.pins is not None
    plan, model = tmp_path / "plan.json", tmp_path / "m.onnx"
    plan.write_text(PrecisionPlan(Precision.FP16, fixture.pins).to_json())
    onnx.save(fixture.model, model)
    code, text = verify((model, tmp_path, plan), requirement="max_abs<=1e-2")
    assert code == 1 and "The plan does not hold." in text
    assert "Passed: 19 of 20 inputs" in text and "x04.npz: " in text
    assert "1 of the inputs is a copy of another" in text


def test_weights_inside_a_branch_are_no_complaint(tmp_path: Path) -> None:
    """They lie in the model's file too, and ONNX's own check would look for another."""
    b = GraphBuilder(0)
    flag = b.op("Greater", b.op("ReduceMax", "x", keepdims=0), b.weight(-9.0))
    bodies = {}
    for branch in ("then_branch", "else_branch"):
        weight = numpy_helper.from_array(np.ones((128, 256), np.float32), f"{branch}_w")
        other = numpy_helper.from_array(np.ones((256, 256), np.float32))
        nodes = [
            helper.make_node("Constant", [], [f"{branch}_c"], value=other),
            helper.make_node("MatMul", ["x", f"{branch}_w"], [f"{branch}_m"]),
            helper.make_node("MatMul", [f"{branch}_m", f"{branch}_c"], [f"{branch}_y"]),
        ]
        result = helper.make_tensor_value_info(f"{branch}_y", TensorProto.FLOAT, [1, 256])
        bodies[branch] = helper.make_graph(nodes, branch, [], [result], [weight])
    b.rename_output(b.op("If", flag, **bodies), "y")
    model, inputs, plan = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "plan.json"
    onnx.save(b.model({"x": [1, 128]}, {"y": [1, 256]}), model)
    np.savez(inputs, x=np.ones((1, 128), np.float32))
    plan.write_text(PrecisionPlan(Precision.FP16, {"/If"}).to_json())
    code, text = verify((model, inputs, plan))
    assert code == 0 and "typed ONNX" in text and "refuses" not in text, text


def test_each_thing_that_nobody_asks_for_is_the_plan_s(tmp_path: Path) -> None:
    fixture = healthy()
    plan = {"base": "fp16", "pinned": [], "requirements": ["max_abs<=1"], "holds_on": 0.5}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for more in ({}, {"require": "max_abs<=1"}):
        found = bisect_trt.verify(
            fixture.model,
            fixture.inputs,
            tmp_path / "plan.json",
            runner="emulated",
            out=tmp_path / "out",
            **more,
            limits=FEW,
        )
        assert found.validation is not None and found.validation.wanted_of_given == 0.5


def on_engine(
    files: Files, engine: Engine, *limits: str, timer: Timer | None = None
) -> tuple[int, str]:
    """``verify --hold`` where ``engine`` and ``timer`` are in the place of TensorRT's."""
    model, inputs, plan = files
    given = (model, "--input", inputs, "--plan", plan, "--requirement", "max_abs<=2e-3")
    held = [word for text in limits for word in ("--hold", text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisect_trt.steps.context.open_engine", lambda *_: engine)
        patch.setattr("bisect_trt.steps.context.timer_of", lambda *_, **__: timer)
        more = ("--out", model.parent / str(id(engine)), "--json")
        return ended(call("verify", *given, *held, *more, limits=FEW))


def test_the_plan_s_engine_is_held_to_its_time(files: Files) -> None:
    """Its 10 pins take 3 ms of FP16's 2 and FP32's 4: half of the saving is kept."""
    engine = Timed(encoder_decomposed())
    code, output = on_engine(files, engine, "latency_ms<=3", "saving_kept>=0.5")
    checks = {c["what"]: c for c in json.loads(output)["checks"]}
    assert code == 0 and checks["latency_ms<=3"]["detail"] == "3 ms"
    assert checks["saving_kept>=0.5"]["detail"] == "0.5"
    code, output = on_engine(files, engine, "latency_ms<=2.9", "saving_kept>=0.6")
    missed = [c["what"] for c in json.loads(output)["checks"] if c["validation"] is False]
    assert code == 1 and missed == ["latency_ms<=2.9", "saving_kept>=0.6"]


def test_engines_that_can_be_timed_beside_each_other_are(files: Files) -> None:
    """As in a run: one clock for both, and no more engines than a limit needs."""
    timed: list[list[str]] = []

    def timer(builds: Mapping[str, Build], _: Sample) -> Timing:
        timed.append(list(builds))
        ms = {"plan": 1.25, "as it is": 1.0, "FP32": 2.0}
        rounds = {name: RoundTimes((ms[name],) * 9, (9.0,) * 9) for name in builds}
        return Timing({name: PlanTime(times) for name, times in rounds.items()}, {})

    engine = Timed(encoder_decomposed())
    code, output = on_engine(files, engine, "latency_ms<=1.25", "saving_kept>=0.75", timer=timer)
    details = {c["what"]: c["detail"] for c in json.loads(output)["checks"]}
    assert code == 0 and details["latency_ms<=1.25"] == "1.25 ms"
    assert details["saving_kept>=0.75"] == "0.75"
    assert on_engine(files, engine, "latency_ms<=1.2", timer=timer)[0] == 1
    assert timed == [["plan", "as it is", "FP32"], ["plan"]]


def test_a_limit_that_cannot_be_judged_never_passes(files: Files) -> None:
    untimed = Engine(encoder_decomposed())
    code, output = on_engine(files, untimed, "latency_ms<=3")
    assert (code, output) == (
        3,
        "bisect-trt: latency_ms<=3: cannot be judged; its engine was not timed\n",
    )
    assert not list(files[0].parent.glob("*/verify.json"))
    code, output = verify(files, "--hold", "latency_ms<=3")
    assert code == 2 and "--runner emulated times no engine" in output
    broken = Engine(encoder_decomposed(), breaks=lambda _: True)
    code, output = on_engine(files, broken, "latency_ms<=3")
    checks = {c["what"]: c["validation"] for c in json.loads(output)["checks"]}
    assert code == 1 and checks["latency_ms<=3"] is None, "the plan fails for another reason"


def test_a_saving_is_estimated_without_an_engine(files: Files) -> None:
    code, output = verify(files, "--hold", "saving_kept>=0.9", "--json")
    (check,) = (c for c in json.loads(output)["checks"] if c["what"] == "saving_kept>=0.9")
    assert code == 0 and check["detail"].endswith(", estimated")
    assert 0.9 < float(check["detail"].split(",")[0]) < 1.0
    files[2].write_text(PrecisionPlan(Precision.FP32).to_json())
    code, output = verify(files, "--hold", "saving_kept>=0.1", "--json")
    missed = {c["what"]: c["detail"] for c in json.loads(output)["checks"] if not c["validation"]}
    assert code == 1 and missed["saving_kept>=0.1"] == "0, estimated"
