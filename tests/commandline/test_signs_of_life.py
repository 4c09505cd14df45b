"""Every command that may take long says what it is at: of 60,000 layers each takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bisect_trt.cli import main
from bisect_trt.report.terminal import ProgressObserver
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.subgraphs import branch


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was told, in order."""
    told: list[str] = []
    monkeypatch.setattr(ProgressObserver, "step", lambda _, name: told.append(name))
    return told


def call(*arguments: object) -> str:
    ended = CliRunner().invoke(main, [str(a) for a in arguments])
    assert ended.exit_code in (0, 1), ended.output
    return ended.stdout


def test_commands_that_run_nothing_tell_their_stations(tmp_path: Path, steps: list[str]) -> None:
    model, inputs, out = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "out"
    model.write_bytes(model_bytes(branch()))
    inputs.write_bytes(input_bytes(branch()))
    call("run", model, "--input", inputs, "--runner", "emulated", "--robust", 0, "--out", out)
    plan, target = out / "plan.json", tmp_path / "written.onnx"
    for told, arguments in (
        (["load", "inspect"], ["inspect", model]),
        (["load", "mark"], ["mark", model, "--mark", "*", "--output", target]),
        (["load", "export"], ["export", model, "--plan", plan, "--format", "polygraphy"]),
        (["read", "write"], ["report", out]),
        (["read", "compare"], ["diff", out, out]),
    ):
        steps.clear()
        assert call(*arguments).strip()
        assert steps == told, arguments[0]
