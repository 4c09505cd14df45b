"""The whole command on the detector: pins, time, memory, and whether the result is true under
explicit rounding.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from benchmarks.common import DETECTOR, RECOGNISER, SHARED, detector_input, load
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph import to_emulated

_PLAIN = """
import sys, numpy as np, onnxruntime as ort
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
with np.load(sys.argv[2]) as arrays:
    session.run(None, {n: arrays[n] for n in arrays.files})
"""


def peak_mb(command: list[str]) -> tuple[float, float]:
    """(peak resident MB, seconds) of a command, as a process of its own measures its child."""
    code = (
        "import json, resource, subprocess, sys, time\n"
        "began = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=False, stdout=subprocess.DEVNULL, "
        "stderr=subprocess.DEVNULL)\n"
        "print(json.dumps([resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, "
        "time.perf_counter() - began]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    ).stdout
    peak, seconds = json.loads(out)
    return float(peak), float(seconds)


def true_score(model: Path, inputs: Path, plan: PrecisionPlan, atol: float, rtol: float) -> float:
    """The plan's score by another way than the search's: the emulated model as a whole, in one
    session.
    """
    feed, proto = load(inputs), onnx.load(model)
    reference = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        to_emulated(proto, plan).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    pairs = zip(reference, session.run(None, feed), strict=True)
    return max(float((np.abs(g - r) / (atol + rtol * np.abs(r))).max()) for r, g in pairs)


@dataclass(frozen=True)
class Run:
    """One command's figures; ``score`` is the plan's by another way than the search's."""

    model: Path
    inputs: Path
    atol: float
    rtol: float
    plan: PrecisionPlan
    probes: int
    effects: int
    seconds: float
    score: float
    peak: float
    plain: float

    @property
    def requirement(self) -> str:
        """As the command takes it."""
        return f"atol={self.atol:g},rtol={self.rtol:g}"


@cache
def runs() -> tuple[Run, ...]:
    """The command on the detector and the recogniser, each once."""
    cases = [(DETECTOR, detector_input(), 5e-2, 1e-2)]
    if SHARED.exists():
        cases += [
            (DETECTOR, SHARED / "ocr_det.npz", 1e-2, 1e-2),
            (RECOGNISER, SHARED / "ocr_rec.npz", 1e-2, 1e-2),
        ]
    return tuple(_run(*case) for case in cases)


def _run(model: Path, inputs: Path, atol: float, rtol: float) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [
            "-m",
            "bisect_trt",
            "run",
            str(model),
            "--input",
            str(inputs),
            "--requirement",
            f"atol={atol:g},rtol={rtol:g}",
        ]
        peak, seconds = peak_mb(
            [sys.executable, *command, "--runner", "emulated", "--out", str(out)]
        )
        plain, _ = peak_mb([sys.executable, "-c", _PLAIN, str(model), str(inputs)])
        saved = json.loads((out / "run.json").read_text())
        plan = PrecisionPlan.from_json((out / "plan.json").read_text())
    score = true_score(model, inputs, plan, atol, rtol)
    return Run(
        model,
        inputs,
        atol,
        rtol,
        plan,
        saved["probes"]["emulated"],
        saved["effect_runs"],
        seconds,
        score,
        peak,
        plain,
    )


def report() -> list[str]:
    """Limits: at most 6 pins for the detector in under 60 s; peak memory 2 times plain plus 200
    MB.
    """
    lines = [
        "## The whole run (limits for the detector at atol 5e-2: 6 pins, 60 s, 2 x plain + 200 MB)",
        "",
    ]
    lines += [
        "| model | requirement | pins | probes | single-layer runs | seconds | true score | peak "
        "MB | plain peak MB | limit MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs():
        lines.append(
            f"| {run.model.stem} | {run.requirement} | {len(run.plan.pinned)} | {run.probes} | "
            f"{run.effects} | "
            f"{run.seconds:.1f} | {run.score:.3f} | {run.peak:.0f} | {run.plain:.0f} | "
            f"{2 * run.plain + 200:.0f} |"
        )
    return lines
