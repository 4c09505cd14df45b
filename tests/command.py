"""The command line in this process, and files for it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from bisect_trt.cli import main
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.fixture import Fixture


def call(*arguments: object) -> Result:
    """``bisect-trt`` with ``arguments``; its lines are not broken."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(a) for a in arguments])


def saved(fixture: Fixture, folder: Path) -> list[str]:
    """Write ``m.onnx`` and ``x.npz`` of ``fixture``; returns the arguments that name them."""
    model, inputs = folder / "m.onnx", folder / "x.npz"
    model.write_bytes(model_bytes(fixture))
    inputs.write_bytes(input_bytes(fixture))
    return [str(model), "--input", str(inputs)]
