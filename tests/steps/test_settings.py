"""Options are declared once: the command line, the notebook calls and the settings agree."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.cli import main
from bisect_trt.settings import Settings, options
from fixtures.models import healthy


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


def test_values_are_normalised_and_wrong_ones_refused() -> None:
    made = Settings(
        model="m", inputs=[], precision="bf16", require="a<=1", out="x", evaluation_timeout_s=3
    )
    assert made.precision is Precision.BF16 and made.require == ("a<=1",)
    assert made.out == Path("x") and made.evaluation_timeout_s == 3.0
    for wrong, words in (
        ({"precision": "fp32"}, "that is the reference"),
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
