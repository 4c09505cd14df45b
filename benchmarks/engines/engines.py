"""The tool on real engines: emulated against measured errors, plans decided by the engine, builds,
latency, time split.

`make gpu-bench` on a machine with a GPU; results/ keeps what was printed, with the date, the
versions and the GPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bisect_trt
from benchmarks.common import SHARED, load
from benchmarks.engines.engine_tables import Tables
from bisect_trt.base.errors import BisectError
from bisect_trt.base.plan import Precision
from bisect_trt.pipeline import compare
from bisect_trt.report.summarise import Result
from bisect_trt.settings import Settings
from fixtures.models import ALL
from tests import models

Problem = tuple[str, Any, Mapping[str, Any], str, str]
SAMPLES = 16


def cases() -> list[Problem]:
    """(name, model, inputs, precision, requirement): every fixture, then the OCR models."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED
    found: list[Problem] = [
        (f.name, f.model, f.inputs, f.precision, f.require) for f in (make() for make in ALL)
    ]
    if models.DETECTOR.exists():
        found += [
            (
                "PP-OCR cls",
                models.CLASSIFIER,
                {"x": models.line(192)},
                "fp16",
                "atol=1e-2,rtol=1e-2",
            ),
            (
                "PP-OCRv4 det",
                models.DETECTOR,
                load(data / "ocr_det.npz"),
                "fp16",
                "atol=1e-1,rtol=1e-2",
            ),
            (
                "PP-OCRv4 rec",
                models.RECOGNISER,
                load(data / "ocr_rec.npz"),
                "fp16",
                "atol=3e-2,rtol=1e-2",
            ),
        ]
    return found


def samples(name: str, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What layers' errors are ranked on: one sample of a layer with few elements says little, so
    small inputs get more.

    A fixture's input is rolled along its last axis; the classifier's lines are cut from other
    places of the page.
    """
    if name == "PP-OCR cls":
        return [
            {"x": models.line(192, top, left)}
            for top in range(20, 140, 30)
            for left in range(0, 160, 40)
        ]
    if name.startswith("PP-OCR"):
        return [dict(inputs)]
    return [
        {
            n: np.roll(a, i * a.shape[-1] // SAMPLES, axis=-1)
            if a.ndim and a.dtype.kind == "f"
            else a
            for n, a in inputs.items()
        }
        for i in range(SAMPLES)
    ]


def layer_errors(
    name: str, model: Any, inputs: Mapping[str, Any], precision: str, requirement: str
) -> Result:
    """The layers' errors, emulated and on the engine."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = samples(name, inputs), Path(folder)
        return compare(
            Settings(
                model=model,
                inputs=given,
                precision=Precision(precision),
                require=(requirement,),
                runner="tensorrt",
                out=out,
            )
        )


def main() -> None:
    """Run every case, or those whose names the second argument, a regular expression, finds."""
    tables, versions = Tables(), dict[str, str]()
    wanted = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    for name, model, inputs, precision, requirement in cases():
        if not wanted.search(name):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = bisect_trt.bisect(
                    model,
                    inputs,
                    precision=precision,
                    require=requirement,
                    runner="tensorrt",
                    out=folder,
                )
                spent = time.perf_counter() - began
                layers = layer_errors(name, model, inputs, precision, requirement).layers
            except BisectError as error:
                print(f"{name}: {error}")
                continue
        versions = dict(result.versions)
        tables.add(name, requirement, result, layers, spent)
        tables.write(versions)
        met = "met" if result.passed else "not met"
        print(
            f"{name}: {result.cause}, {met}, {len(result.pinned)} pins, {spent:.0f} s. "
            f"{result.sentence}"
        )
        for finding in result.findings:
            if finding.kind != "weight-underflow":
                print(f"    {finding.kind} {finding.where}: {finding.message[:160]}")
    print("\n".join(tables.lines(versions)))


if __name__ == "__main__":
    main()
