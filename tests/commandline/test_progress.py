"""Every command that may take long says what it is at: of 60,000 layers each takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bisect_trt.report.terminal import ProgressObserver
from fixtures.subgraphs import branch
from tests.command import call, saved


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was told, in order."""
    told: list[str] = []
    monkeypatch.setattr(ProgressObserver, "step", lambda _, name: told.append(name))
    return told


def said(*arguments: object) -> str:
    ended = call(*arguments)
    assert ended.exit_code in (0, 1), ended.output
    return ended.stdout


def test_commands_that_run_nothing_tell_their_stations(tmp_path: Path, steps: list[str]) -> None:
    files, out = saved(branch(), tmp_path), tmp_path / "out"
    model = files[0]
    said("run", *files, "--runner", "emulated", "--robust", 0, "--out", out)
    plan, target = out / "plan.json", tmp_path / "written.onnx"
    for told, arguments in (
        (["load", "inspect"], ["inspect", model]),
        (["load", "mark"], ["mark", model, "--mark", "*", "--output", target]),
        (["load", "export"], ["export", model, "--plan", plan, "--format", "polygraphy"]),
        (["read", "write"], ["report", out]),
        (["read", "compare"], ["diff", out, out]),
    ):
        steps.clear()
        assert said(*arguments).strip()
        assert steps == told, arguments[0]
