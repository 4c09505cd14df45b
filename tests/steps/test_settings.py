"""Options are declared once: the command line, the notebook calls and the settings agree."""

from __future__ import annotations

import inspect
import json
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
from bisect_trt.settings import Settings, as_command, options
from bisect_trt.steps.problem import load
from fixtures.models import healthy
from tests.command import call, saved
from tests.copies import EIGHT


@pytest.mark.parametrize("command", ["run", "compare", "verify"])
def test_the_command_line_follows_the_settings(command: str) -> None:
    flags = {o for p in main.commands[command].params for o in p.opts}
    for its in options().values():
        assert (its.flag in flags) is (command in its.commands), its.flag


@pytest.mark.parametrize("command", ["run", "verify"])
def test_the_notebook_follows_the_settings(command: str) -> None:
    call = {"run": bisect_trt.bisect, "verify": bisect_trt.verify}[command]
    parameters = inspect.signature(call).parameters
    for name, its in options().items():
        assert (name in parameters) is (command in its.commands)
        if command in its.commands:
            assert its.help in (call.__doc__ or "")
            assert parameters[name].default == Settings.__dataclass_fields__[name].default


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
        model="m", inputs=[], precision="bf16", require="a<=1", out="x", evaluation_timeout_s=3
    )
    assert made.precision is Precision.BF16 and made.require == ("a<=1",)
    assert made.out == Path("x") and made.evaluation_timeout_s == 3.0
    for wrong, words in (
        ({"precision": "fp32"}, "that is the reference"),
        ({"precision": "FP16"}, "choose one of fp16, bf16, tf32; did you mean fp16?"),
        ({"runner": "abacus"}, "unknown; choose one of auto"),
        ({"workers": 0}, "at least 1"),
        ({"evaluation_timeout_s": 0}, "more than 0"),
        ({"max_builds": "many"}, "not a int"),
    ):
        with pytest.raises(BadInputError, match=words):
            Settings(model="m", inputs=[], **wrong)


def test_an_unknown_option_of_the_notebook_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="did you mean 'require'"):
        bisect_trt.bisect("m.onnx", "x.npz", requires="max_abs<=1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"require": 1e-2}, "--requirement 0.01: not a text"),
        ({"require": [1e-2]}, "--requirement .0.01.: not a text"),
        ({"mark": None}, "--mark None: not a text"),
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
