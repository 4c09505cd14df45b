"""The command line and runs of fixtures, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import bisect_trt
from bisect_trt.base.limits import Limits
from bisect_trt.cli import main
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.fixture import Fixture


def call(*arguments: object, limits: Limits = Limits()) -> Result:
    """``bisect-trt`` with ``arguments`` and ``limits``; its lines are not broken."""
    words = [str(a) for a in arguments]
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, words, obj=limits)


def saved(fixture: Fixture, folder: Path) -> list[str]:
    """Write ``m.onnx`` and ``x.npz`` of ``fixture``; returns the arguments that name them."""
    model, inputs = folder / "m.onnx", folder / "x.npz"
    model.write_bytes(model_bytes(fixture))
    inputs.write_bytes(input_bytes(fixture))
    return [str(model), "--input", str(inputs)]


def run_of(fixture: Fixture, out: Path, **options: Any) -> bisect_trt.Result:
    """An emulated run of ``fixture`` as it is, with its precision and requirement."""
    its = {"precision": fixture.precision, "require": fixture.require, "runner": "emulated"}
    its |= {"repair": "none", "weights": "nearest"}
    return bisect_trt.bisect(fixture.model, fixture.inputs, out=out, **{**its, **options})
