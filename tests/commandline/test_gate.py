"""Many models, one answer: bisect.toml, the gate over it, and what CI is shown of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from click.testing import Result as Ended

from bisect_trt import Result
from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import FP32, PLAN
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.cli import main
from bisect_trt.metrics.time_limits import parse_time_limits
from bisect_trt.pipeline import run
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.gate import Gate, gate_page, judged_entry, read_project
from bisect_trt.report.junit import as_junit
from bisect_trt.settings import Settings
from bisect_trt.steps.run_folder import held_folder
from fixtures.__main__ import FILES
from fixtures.models import healthy
from tests.conftest import forbid_inferences
from tests.engines import Timed
from tests.report.synthetic import synthetic_result

ROOT = Path(__file__).resolve().parents[2]


def entry(name: str, file: str, more: str = "") -> str:
    where = f'model = "{FILES / file}.onnx"\ninput = "{FILES / file}.npz"\n'
    return f"[models.{name}]\n{where}{more}\n"


DEFAULTS = '[defaults]\nrunner = "emulated"\nrobust = 0\nrequirement = "max_abs<=1e-2"\n\n'


def gate(folder: Path, *arguments: str) -> Ended:
    config = ["--config", str(folder / "bisect.toml")]
    return CliRunner().invoke(main, ["gate", *config, *arguments])


def test_an_error_that_nobody_foresaw_is_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own mistake over one model, or the memory that it lacked, keeps no other from its run."""
    models = ("ours", "large", "good")
    text = DEFAULTS + "".join(entry(name, "healthy") for name in models)
    (tmp_path / "bisect.toml").write_text(text)
    errors: dict[str, Exception] = {"ours": ValueError("a slip"), "large": MemoryError()}

    def run_or_break(settings: Settings, observer: Observer) -> Result:
        for name, error in errors.items():
            if settings.out is not None and settings.out.name == name:
                raise error
        return run(settings, observer)

    monkeypatch.setattr("bisect_trt.commands.run", run_or_break)
    ended = gate(tmp_path)
    assert ended.exit_code == 70 and "a slip" in ended.stderr
    made = json.loads((tmp_path / "reports" / "gate" / "gate.json").read_text())
    assert [m["exit_code"] for m in made["models"]] == [70, 4, 0]
    assert "out of memory" in made["models"][1]["said"]


def test_ctrl_c_that_comes_out_as_another_error_ends_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bisect.toml").write_text(DEFAULTS + entry("a", "healthy") + entry("b", "healthy"))
    runs = []

    def stopped(settings: Settings, observer: Observer) -> Result:
        runs.append(settings)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("cannot release un-acquired lock") from error

    monkeypatch.setattr("bisect_trt.commands.run", stopped)
    assert gate(tmp_path).exit_code == 130 and len(runs) == 1


def test_a_gate_has_its_folder_to_itself(tmp_path: Path) -> None:
    (tmp_path / "bisect.toml").write_text(DEFAULTS + entry("good", "healthy"))
    out = tmp_path / "reports" / "gate"
    with held_folder(out):
        ended = gate(tmp_path)
    assert ended.exit_code == 2 and "another run is using this folder" in ended.stderr
    assert list(out.iterdir()) == []
    (tmp_path / "bisect.toml").write_text(DEFAULTS + entry("'gate.json'", "healthy"))
    ended = gate(tmp_path)
    assert ended.exit_code == 2 and "[models.gate.json]: the gate writes a file" in ended.stderr


def test_a_gate_is_closed_by_one_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DEFAULTS.replace("max_abs<=1e-2", "overridden") + entry("good", "healthy")
    (tmp_path / "bisect.toml").write_text(text + entry("bad", "unsavable"))
    asked = ["--requirement", "max_abs<=1e-2"]
    ended = gate(tmp_path, *asked, "--verbose")
    assert "good: 1 of " in ended.stderr and "bad: 1 of " in ended.stderr
    assert ended.exit_code == 1, ended.output
    assert "Closed: bad missed the requirements." in ended.output
    out = tmp_path / "reports" / "gate"
    made = {"gate.md", "gate.json", "junit.xml", "good", "bad"}
    assert {p.name for p in out.iterdir()} == made
    first = json.loads((out / "gate.json").read_text())
    assert all(m["new_evaluations"] > 0 for m in first["models"])
    assert "| good | pass |" in (out / "gate.md").read_text()
    suites = ElementTree.parse(out / "junit.xml").getroot()
    assert [s.get("name") for s in suites] == ["good", "bad"]
    assert [s.get("failures") for s in suites] == ["0", "1"]
    forbid_inferences(monkeypatch)
    assert gate(tmp_path, *asked, "--quiet").exit_code == 1
    again = json.loads((out / "gate.json").read_text())
    assert [m["new_evaluations"] for m in again["models"]] == [0, 0]


def test_what_cannot_be_judged_does_not_keep_the_others(tmp_path: Path) -> None:
    lost = entry("lost", "healthy").replace("healthy.npz", "absent.npz")
    missed = entry("missed", "unsavable", 'requirement = "max_abs<=1e-30"')
    (tmp_path / "bisect.toml").write_text(DEFAULTS + lost + missed)
    ended = gate(tmp_path, "--json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == found["exit_code"] == 2
    assert [m["exit_code"] for m in found["models"]] == [2, 1]
    assert "absent.npz" in found["models"][0]["said"]
    page = (tmp_path / "reports" / "gate" / "gate.md").read_text()
    assert "Not decided: lost could not be judged." in page and "missed" in page
    suites = ElementTree.parse(tmp_path / "reports" / "gate" / "junit.xml").getroot()
    assert [s.get("errors") for s in suites] == ["1", "0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no model"),
        ("x = [", "cannot be read"),
        ("[model.a]\n", "unknown key 'model'; did you mean 'models'"),
        ("[defaults]\nrequirment = 'x'\n", "requirment'; did you mean 'requirement'"),
        (entry("a", "healthy", "precison = 'fp16'"), r"\[models.a\]: unknown key 'precison'"),
        (entry("a", "healthy", "out = 'x'"), "unknown key 'out'"),
        ("[models.a]\nmodel = 'm.onnx'\n", r"\[models.a\]: lacks 'input'"),
        (entry("a", "healthy", "robust = 'much'"), "robust must be a number"),
        (entry("a", "healthy", "stacked = 1"), "stacked must be true or false"),
        (entry("a", "healthy", "requirement = [1]"), "requirement must be a list of texts"),
        (entry("a", "healthy", "precision = 'fp8'"), r"\[models.a\]: --precision fp8: unknown"),
        (entry("a", "healthy", "requirement = ['max_abs<<1']"), r"\[models.a\]: --requirement"),
        (entry("a", "healthy", "pin = ['(']"), r"--keep-fp32 '\(': no regular expression"),
        (entry("a", "healthy", "augmented = 'shfit'"), "--augmented shfit: unknown"),
        (entry("a", "healthy", "hold = 'latency_ms<=x'"), r"\[models.a\]: --hold .* no number"),
        (entry("a", "healthy", "hold = 4.5"), "hold must be a list of texts"),
        (
            entry("a", "healthy", "runner = 'emulated'\nhold = 'latency_ms<=4'"),
            "--hold latency_ms<=4: --runner emulated times no engine; take tensorrt",
        ),
        ("[models]\na = 1\n", "must be a table"),
        ("models = 1\n", "models must be a table"),
        ("out = 1\n" + entry("a", "healthy"), "out must be a path"),
        (entry("'../up'", "healthy"), "a name is letters"),
    ],
)
def test_a_mistake_in_the_file_is_told_before_anything_runs(
    text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "bisect.toml").write_text(text)
    with pytest.raises(BadInputError, match=words):
        read_project(tmp_path / "bisect.toml", None, {})
    ended = gate(tmp_path)
    assert ended.exit_code == 2 and len(ended.output.splitlines()) == 1
    assert not (tmp_path / "reports").exists()


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    lines = '[models.a]\nmodel = "m.onnx"\ninput = ["x", "pkg.mod:load", "l.py:load"]\n'
    more = 'metric = "t.py:f1"\nvariants = "shift,flip"\nstart-from = "p.json"\nholdout = "none"\n'
    (tmp_path / "bisect.toml").write_text(lines + more)
    settings = read_project(tmp_path / "bisect.toml", None, {}).runs["a"]
    at = str(tmp_path)
    assert settings.model == f"{at}/m.onnx" and settings.start_from == tmp_path / "p.json"
    assert settings.inputs == [f"{at}/x", "pkg.mod:load", f"{at}/l.py:load"]
    assert settings.metric == (f"{at}/t.py:f1",) and settings.augmented == "shift,flip"
    assert settings.holdout == ("none",) and settings.out == tmp_path / "reports/gate/a"
    (tmp_path / "v.py").write_text("def f(arrays, random): return arrays\n")
    (tmp_path / "bisect.toml").write_text(lines + 'augmented = "shift, v.py:f,noise"\n')
    mixed = read_project(tmp_path / "bisect.toml", None, {}).runs["a"]
    assert mixed.augmented == f"shift,{at}/v.py:f,noise"
    (tmp_path / "bisect.toml").write_text(lines + more)
    other = read_project(tmp_path / "bisect.toml", Path("o"), {"holdout": ("y",)}).runs["a"]
    assert other.out == Path("o/a") and other.holdout == ("y",)


def test_the_table_says_which_requirement_is_missed_and_why(tmp_path: Path) -> None:
    both = "requirement = ['max_abs<=2e-3', 'rmse<=1e-9']"
    text = DEFAULTS + entry("a", "encoder_decomposed", both)
    (tmp_path / "bisect.toml").write_text(text)
    assert gate(tmp_path, "--quiet").exit_code == 1
    (model,) = json.loads((tmp_path / "reports/gate/gate.json").read_text())["models"]
    assert "Missed: rmse<=1e-9 (" in model["said"] and "Missed: max_abs" not in model["said"]
    assert "Strict FP32 already misses" in model["said"]


def test_a_folder_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bisect.toml").write_text(DEFAULTS + entry("a", "healthy"))
    (tmp_path / "gate.md").write_text("mine")
    ended = gate(tmp_path, "--out", str(tmp_path))
    assert ended.exit_code == 2 and "holds gate.md" in ended.output
    assert (tmp_path / "gate.md").read_text() == "mine"
    assert gate(tmp_path / "absent").exit_code == 2


def test_the_example_s_makefile(tmp_path: Path) -> None:
    """As a user would call it, from its own folder."""
    tool = f"{sys.executable} -m bisect_trt"
    out = f"{tool} gate --out {tmp_path / 'gate'} --robust 0"
    command = ["make", "precision-gate", f"BISECT_TRT={out} #"]
    where = ROOT / "examples" / "precision_gate"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Open: 2 of 2 models" in done.stdout
    assert not (where / "reports").exists()
    ignored = (where / ".gitignore").read_text().splitlines()
    assert "reports/" in ignored and 'out = "reports/gate"' in (where / "bisect.toml").read_text()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps 2 of 4 ms in FP16, in the place of TensorRT."""
    engine = Timed(healthy())
    monkeypatch.setattr("bisect_trt.steps.context.open_engine", lambda *_: engine)


ON_ENGINE = DEFAULTS.replace('runner = "emulated"', 'repair = "none"')


def judged(folder: Path) -> dict[str, Any]:
    """The only model in gate.json."""
    (model,) = json.loads((folder / "reports/gate/gate.json").read_text())["models"]
    return dict(model)


def suite_of(folder: Path) -> ElementTree.Element:
    """The suite of the only model in junit.xml."""
    (suite,) = ElementTree.parse(folder / "reports/gate/junit.xml").getroot()
    return suite


@pytest.mark.usefixtures("timed")
def test_a_model_is_held_to_the_latency_of_its_recommended_engine(tmp_path: Path) -> None:
    held = entry("a", "healthy", "hold = ['latency_ms<=2.5', 'saving_kept>=0.9']")
    (tmp_path / "bisect.toml").write_text(ON_ENGINE + held)
    ended = gate(tmp_path)
    assert ended.exit_code == 0, ended.output
    model = judged(tmp_path)
    assert (model["latency_ms"], model["saving_kept"]) == (2.0, 1.0)
    assert not model["estimated_latency"]
    assert model["hold"] == [
        {"limit": "latency_ms<=2.5", "met": True, "value": 2.0, "estimated": False},
        {"limit": "saving_kept>=0.9", "met": True, "value": 1.0, "estimated": False},
    ]
    assert "Fast enough: latency_ms<=2.5 (2 ms), saving_kept>=0.9 (1)." in model["said"]
    page = (tmp_path / "reports/gate/gate.md").read_text()
    assert "| ms | saving kept |" in page and "| 2.000 | 100 % |" in page
    assert suite_of(tmp_path).get("failures") == suite_of(tmp_path).get("errors") == "0"

    ended = gate(tmp_path, "--hold", "latency_ms<=1.5")
    assert ended.exit_code == 1 and "Closed: a missed a time limit." in ended.output
    assert "Too slow: latency_ms<=1.5 (2 ms)." in judged(tmp_path)["said"]
    cases = {case.get("name"): case for case in suite_of(tmp_path).iter("testcase")}
    failure = cases["latency_ms<=1.5"].find("failure")
    assert failure is not None and failure.get("message") == "2 ms"
    assert suite_of(tmp_path).get("failures") == "1"


def test_a_share_is_judged_by_the_estimate_where_no_engine_is_there(tmp_path: Path) -> None:
    held = entry("a", "healthy", "hold = 'saving_kept>=0.9'")
    (tmp_path / "bisect.toml").write_text(DEFAULTS + held)
    assert gate(tmp_path).exit_code == 0
    model = judged(tmp_path)
    assert model["latency_ms"] is None and model["estimated_latency"]
    assert "Fast enough: saving_kept>=0.9 (1, estimated)." in model["said"]


def test_a_latency_without_an_engine_is_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is missing ends that model before it is searched, by --runner auto too."""

    def missing(*_: object, **__: object) -> None:
        raise RunnerUnavailableError("no GPU")

    monkeypatch.setattr("bisect_trt.steps.open_runners.TensorRTRunner", missing)
    text = ON_ENGINE + entry("a", "healthy", "hold = 'latency_ms<=4.5'")
    (tmp_path / "bisect.toml").write_text(text)
    forbid_inferences(monkeypatch)
    ended = gate(tmp_path)
    assert ended.exit_code == 3 and "Not decided: a could not be judged." in ended.output
    said = "latency_ms<=4.5: cannot be judged; --runner tensorrt: no GPU"
    assert judged(tmp_path)["said"] == said


def test_what_was_not_timed_is_not_judged_by_an_estimate() -> None:
    """Such as a row whose engine is not among those that were timed."""
    row = Choice(PLAN, PrecisionPlan("fp16"), (), False, 0.5, Passes.VALIDATED, recommended=True)
    found = replace(synthetic_result(20), choice_rows=[replace(row, saving_kept=0.99)])
    limits = parse_time_limits(["latency_ms<=9", "saving_kept>=0.9"])
    entry = judged_entry("a", found, limits[1:])
    assert entry.exit_code == 0 and "0.99, estimated" in entry.said
    other = replace(row, name=FP32, recommended=False, latency_ms=4.0)
    entry = judged_entry("a", replace(found, choice_rows=[*found.choice_rows, other]), limits)
    assert entry.exit_code == 3 and [limit.met for limit in entry.limits] == [None, None]
    assert "Time not judged: latency_ms<=9 (its engine was not timed)" in entry.said
    page = gate_page(Gate(Path(), [entry], 1))
    assert page.answer == "Not decided: a could not be judged." and not page.good
    suite = ElementTree.fromstring(as_junit(found, entry.limits))
    assert suite.get("errors") == "2"
    missed = replace(found, passed=False, choice_rows=[])
    entry = judged_entry("a", missed, limits)
    assert entry.exit_code == 1, "nothing is there to be timed"
    suite = ElementTree.fromstring(as_junit(missed, entry.limits))
    assert (suite.get("errors"), suite.get("skipped")) == ("0", "2")
