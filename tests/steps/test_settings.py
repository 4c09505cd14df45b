"""Options are declared once: the command line, the notebook calls and the settings agree."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import Precision
from bisect_trt.cli import main
from bisect_trt.settings import Option, Settings, as_command, options
from bisect_trt.steps.problem import load
from fixtures.models import healthy
from tests.command import call, saved
from tests.copies import EIGHT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", ["run", "compare", "verify"])
def test_the_command_line_follows_the_settings(command: str) -> None:
    flags = {o for p in main.commands[command].params for o in p.opts}
    for its in options().values():
        assert (its.flag in flags) is (command in its.commands), its.flag


CALLS = {
    "run": bisect_trt.bisect,
    "verify": bisect_trt.verify,
    "reduce": bisect_trt.reduce,
    "cure": bisect_trt.cure,
}


def accepted(name: str, its: Option) -> str:
    """The type of an option's argument, from that of its field."""
    field = inspect.signature(Settings).parameters[name].annotation
    if its.choices:
        enum = "Precision | " if its.kind is Precision else ""
        none = " | None" if field.endswith("| None") else ""
        return f"{enum}Literal[{', '.join(map(repr, its.choices))}]{none}"
    if its.repeatable:
        return f"{field.removeprefix('Sequence[').removesuffix(']')} | {field}"
    return field.replace("Path | None", "str | Path | None") if its.kind is Path else field


def test_arguments_are_typed_as_the_settings_are() -> None:
    """A new option is an argument of each call of its commands, in bisect_trt/api.py."""
    for command, function in CALLS.items():
        wanted = {
            name: (accepted(name, its), Settings.__dataclass_fields__[name].default)
            for name, its in options().items()
            if command in its.commands
        }
        if command == "verify":  # a plan knows its precision
            wanted["precision"] = (f"{wanted['precision'][0]} | None", None)
        found = inspect.signature(function).parameters
        arguments = {name: (p.annotation, p.default) for name, p in found.items()}
        assert {name: arguments.get(name) for name in wanted} == wanted, command
        own = {"model", "inputs", "plan", "precision", "check", "subgraph", "observer", "limits"}
        assert arguments.keys() - wanted.keys() <= own


def test_arguments_have_the_options_names() -> None:
    """But for one that Python programs have as ``require=`` since the first version."""
    flags = {name: its.flag for name, its in options().items() if name != "require"}
    assert flags == {name: f"--{name.replace('_', '-')}" for name in flags}


def test_the_help_of_a_call_fits_a_terminal_and_names_no_flag() -> None:
    for command, function in CALLS.items():
        text = pydoc.plain(pydoc.render_doc(function))
        assert max(map(len, text.splitlines())) <= 80
        assert not [flag for flag in re.findall(r"--[a-z][a-z0-9-]+", text) if flag != "--check"], (
            command
        )
        said = " ".join(text.split())
        taken = [name for name, its in options().items() if command in its.commands]
        assert taken and all(f" {name}: " in said for name in taken)


USE = """
import bisect_trt

result: bisect_trt.Result = bisect_trt.bisect(
    "m.onnx", [{}], require=["max_abs<=1"], precision="bf16", robust=0, out="there"
)
checked: bool = bisect_trt.verify("m.onnx", "x.npz", result.plan).passed
"""
WRONG = {
    'bisect_trt.bisect("m.onnx", "x.npz", requires="max_abs<=1")': "call-arg",
    'bisect_trt.bisect("m.onnx", "x.npz", require=0.01)': "arg-type",
    'bisect_trt.bisect("m.onnx", "x.npz", precision="fp8")': "arg-type",
    'bisect_trt.verify("m.onnx", "x.npz", 3)': "arg-type",
    'bisect_trt.reduce("m.onnx", "x.npz", workers="two")': "arg-type",
    'bisect_trt.cure("m.onnx", "x.npz", robust=0)': "call-arg",
}


@pytest.mark.slow
def test_a_type_checker_passes_right_calls_and_refuses_wrong_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USE + "\n".join(WRONG) + "\n")
    words = ["--config-file", str(ROOT / "pyproject.toml"), "--strict", str(program)]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True
    )
    first = USE.count("\n") + 1
    said = re.findall(r"^\S+program\.py:(\d+): error: .*\[(.+)\]$", ran.stdout, flags=re.M)
    wanted = [(str(first + n), kind) for n, kind in enumerate(WRONG.values())]
    assert said == wanted, ran.stdout + ran.stderr


def test_limits_are_no_option_and_ask_no_other_question(tmp_path: Path) -> None:
    usual = Settings(healthy().model, [healthy().inputs], out=tmp_path)
    other = replace(usual, limits=Limits(max_misses=0, large_bytes=1))
    assert "limits" not in options() and as_command(other) == as_command(usual)
    assert load(other, Observer()).key == load(usual, Observer()).key


@pytest.mark.parametrize("command", ["run", "verify", "gate"])
def test_a_command_has_the_limits_of_its_caller(command: str, tmp_path: Path) -> None:
    model, flag, inputs = saved(healthy(), tmp_path)
    (tmp_path / "plan.json").write_text('{"base": "fp16", "pin_precision": "fp32", "pinned": []}')
    table = f"[models.m]\nmodel = '{model}'\ninput = '{inputs}'\n"
    (tmp_path / "bisect.toml").write_text(table)
    words = {
        "run": [model, flag, inputs],
        "verify": [model, flag, inputs, "--plan", tmp_path / "plan.json"],
        "gate": ["--config", tmp_path / "bisect.toml"],
    }
    asked = [command, *words[command], "--runner", "emulated", "--out", tmp_path / "out"]
    assert call(*asked, limits=EIGHT).exit_code == 0
    (record,) = (tmp_path / "out").glob("verify.json" if command == "verify" else "**/run.json")
    assert json.loads(record.read_text())["validation"]["perturbed"]["tested"] == 8


def test_values_are_normalised_and_wrong_ones_refused() -> None:
    made = Settings(
        model="m", inputs=[], precision="bf16", require="a<=1", out="x", evaluation_timeout=3
    )
    assert made.precision is Precision.BF16 and made.require == ("a<=1",)
    assert made.out == Path("x") and made.evaluation_timeout == 3.0
    for wrong, words in (
        ({"precision": "fp32"}, "that is the reference"),
        ({"precision": "FP16"}, "choose one of fp16, bf16, tf32; did you mean fp16?"),
        ({"runner": "abacus"}, "unknown; choose one of auto"),
        ({"workers": 0}, "at least 1"),
        ({"evaluation_timeout": 0}, "more than 0"),
        ({"max_builds": "many"}, "not a int"),
    ):
        with pytest.raises(BadInputError, match=words):
            Settings(model="m", inputs=[], **wrong)


def test_an_unknown_argument_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="did you mean 'require'"):
        bisect_trt.bisect("m.onnx", "x.npz", requires="max_abs<=1")


def test_arguments_of_the_last_version_go_on_working() -> None:
    with pytest.raises(BadInputError, match="evaluation_timeout=0: must be more than 0"):
        bisect_trt.bisect("m.onnx", "x.npz", evaluation_timeout_s=0)
    with pytest.raises(BadInputError, match="metric=1: not a text"):
        bisect_trt.bisect("m.onnx", "x.npz", metrics=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "precision='fp8': unknown; choose one of fp16, bf16, tf32"),
        ({"max_cost": 5, "robust": 0}, "max_cost=5: with robust=0 no layers"),
        ({"require": "max_abs<1e-2,"}, "require='max_abs<1e-2,': "),
        ({"holdout": "the inputs"}, "holdout names every given input: leave some"),
        ({"keep_fp32": "a", "keep_reduced": "a"}, "keep_fp32 and keep_reduced: both name layer"),
        ({"repair": "magic"}, "repair='magic': no such rule"),
    ],
)
def test_errors_speak_of_arguments(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    fixture = healthy()
    inputs = {"holdout": fixture.inputs} if "holdout" in options else {}
    with pytest.raises(BadInputError) as error:
        bisect_trt.bisect(
            fixture.model, fixture.inputs, out=tmp_path / "out", **{**options, **inputs}
        )
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"require": 1e-2}, "require=0.01: not a text"),
        ({"require": [1e-2]}, "require=.0.01.: not a text"),
        ({"mark": None}, "mark=None: not a text"),
        ({"model": b"x"}, "model: neither a path nor an onnx.ModelProto but bytes"),
        ({"model": None}, "model: neither a path nor an onnx.ModelProto but NoneType"),
    ],
)
def test_other_types_than_asked_for_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    fixture = healthy()
    call = {"model": fixture.model, "inputs": fixture.inputs, "out": tmp_path / "out"}
    with pytest.raises(BadInputError, match=said):
        bisect_trt.bisect(**{**call, **changes})
