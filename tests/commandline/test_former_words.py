"""What version 0.4.0 wrote and called otherwise: plans, runs, options and keys of bisect.toml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.report.gate import read_project
from bisect_trt.settings import FORMER, Settings
from bisect_trt.steps.saved_plan import read_plan
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy
from tests.command import call, saved

PLAN_OF_0_4_0 = """{
  "base": "fp16",
  "pin_precision": "fp32",
  "pinned": %s,
  "requirements": ["rel_range<=1e-2"],
  "metrics": [],
  "holds_on": 0.9,
  "robust": 0.95,
  "searched": {"inputs": "", "chance": "0"}
}"""

RUN_OF_0_4_0 = """{
  "format": 1,
  "model": "m.onnx",
  "precision": "fp16",
  "passed": true,
  "holding": {"given": {"passed": 1, "tested": 1}},
  "robustness": {"word": "robust"},
  "versions": {"bisect-trt": "0.4.0", "python": "3.11.7"}
}"""

OPTIONS = {
    "--variants": ("shift", "augmented", "shift"),
    "--probe-timeout": ("60", "evaluation_timeout", 60.0),
    "--pin": ("Pow", "keep_fp32", ("Pow",)),
    "--lower": ("MatMul", "keep_reduced", ("MatMul",)),
}
OF_COMMAND = {
    "run": tuple(OPTIONS),
    "gate": tuple(OPTIONS),
    "verify": ("--variants", "--probe-timeout"),
    "reduce": ("--probe-timeout",),
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A model and its input; beside them a plan of 0.4.0 and a bisect.toml."""
    fixture = encoder_decomposed()
    pins = json.dumps(sorted(fixture.pins or ()))
    (tmp_path / "plan.json").write_text(PLAN_OF_0_4_0 % pins)
    (tmp_path / "bisect.toml").write_text('[models.a]\nmodel = "m.onnx"\ninput = "x.npz"\n')
    return saved(fixture, tmp_path)


def test_a_plan_of_0_4_0_is_read(files: list[str], tmp_path: Path) -> None:
    saved = read_plan(tmp_path / "plan.json")
    assert saved.requirements == ("rel_range<=1e-2",)
    assert (saved.given_share, saved.robust) == (0.9, 0.95)
    plan, out = ("--plan", tmp_path / "plan.json"), ("--out", tmp_path / "out")
    ended = call("verify", *files, *plan, *out, "--robust", "0", "--runner", "emulated")
    assert ended.exit_code == 0 and "The plan holds." in ended.output, ended.output
    ended = call("export", files[0], *plan, "--format", "trtexec")
    assert ended.exit_code == 0 and "--layerPrecisions" in ended.output
    begin = ("--start-from", tmp_path / "plan.json", "--requirement", "rel_range<=1e-2")
    alone = ("--robust", "0", "--runner", "emulated", "--repair", "none", "--weights", "nearest")
    ended = call("run", *files, *begin, *out, *alone, "--json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == 0 and found["pinned"] and found["passed"]


@pytest.mark.parametrize("command", ["report", "diff"])
def test_a_run_of_0_4_0_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RUN_OF_0_4_0)
    ended = call(command, *[tmp_path] * (2 if command == "diff" else 1))
    assert ended.exit_code == 2 and len(ended.stderr.splitlines()) == 1
    assert "written by bisect-trt 0.4.0 in format 1" in ended.stderr


@pytest.mark.parametrize("command", OF_COMMAND)
def test_former_options_work_and_are_not_shown(
    command: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Settings] = []

    def noted(settings: Settings, *_: Any) -> Any:
        asked.append(settings)
        raise BadInputError("seen")

    job = "run" if command == "gate" else command
    monkeypatch.setattr(f"bisect_trt.commands.{job}", noted)
    arguments = files if command != "gate" else ["--config", str(tmp_path / "bisect.toml")]
    if command == "verify":
        arguments = [*arguments, "--plan", str(tmp_path / "plan.json")]
    for flag in OF_COMMAND[command]:
        value, field, expected = OPTIONS[flag]
        for words in ([flag, value], [f"{flag}={value}"]):
            assert call(command, *arguments, *words).exit_code == 2
            assert getattr(asked.pop(), field) == expected, words
    shown = call(command, "--help").output
    assert not any(f"{flag} " in shown for flag in FORMER)


def test_former_keys_work(tmp_path: Path) -> None:
    keys = "variants = 'shift'\nprobe-timeout = 60\npin = ['Pow']\nlower = ['Mul']\n"
    (tmp_path / "bisect.toml").write_text(
        f'[defaults]\n{keys}[models.a]\nmodel = "absent.onnx"\ninput = "x.npz"\n'
    )
    settings = read_project(tmp_path / "bisect.toml", None, {}).runs["a"]
    assert settings.augmented == "shift"
    assert settings.evaluation_timeout == 60.0
    assert (settings.keep_fp32, settings.keep_reduced) == (("Pow",), ("Mul",))


def test_a_folder_of_an_older_version_is_taken_over(tmp_path: Path) -> None:
    """Its cache has another name, and so has one of its files: both go."""
    fixture = healthy()
    (tmp_path / "run").mkdir()
    for name in ("run.json", "journal.sqlite", "frontier.csv"):
        (tmp_path / "run" / name).write_text("{}")
    result = bisect_trt.bisect(fixture.model, fixture.inputs, out=tmp_path / "run", robust=0)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert result.passed and not left & {"journal.sqlite", "frontier.csv"}
