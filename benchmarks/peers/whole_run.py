"""The whole command on the detector and the recogniser: pins, time, memory, and whether the result
is true under explicit rounding; by default, and fitted to the one input.
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

from benchmarks.common import DETECTOR, RECOGNISER, SHARED, detector_input, load, table
from bisect_trt.base.plan import PrecisionPlan
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


def true_score(problem: Problem, plan: PrecisionPlan) -> float:
    """The plan's score by another way than the search's: the emulated model as a whole, in one
    session.
    """
    feed, proto = load(problem.inputs), onnx.load(problem.model)
    plain = ort.InferenceSession(str(problem.model), providers=["CPUExecutionProvider"])
    reference = plain.run(None, feed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        to_emulated(proto, plan).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    pairs = zip(reference, session.run(None, feed), strict=True)
    return max(
        float((np.abs(g - r) / (problem.atol + problem.rtol * np.abs(r))).max()) for r, g in pairs
    )


@dataclass(frozen=True)
class Problem:
    """A model, its input and what is asked of it."""

    model: Path
    inputs: Path
    atol: float
    rtol: float

    @property
    def requirement(self) -> str:
        """As the command takes it."""
        return f"atol={self.atol:g},rtol={self.rtol:g}"


@dataclass(frozen=True)
class Run:
    """One command's figures; ``score`` is the plan's by another way than the search's."""

    problem: Problem
    plan: PrecisionPlan
    evaluations: int
    sensitivities: int
    seconds: float
    score: float
    peak: float
    plain: float


def cases() -> list[Problem]:
    """The detector at one tolerance; where the shared inputs are, at two, and the recogniser."""
    found = [Problem(DETECTOR, detector_input(), 5e-2, 1e-2)]
    if SHARED.exists():
        found += [
            Problem(DETECTOR, SHARED / "ocr_det.npz", 1e-2, 1e-2),
            Problem(RECOGNISER, SHARED / "ocr_rec.npz", 1e-2, 1e-2),
        ]
    return found


@cache
def ran(problem: Problem, *options: str) -> Run:
    """The command on ``problem`` with ``options``, once however often it is asked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [
            *(sys.executable, "-m", "bisect_trt", "run", str(problem.model)),
            *("--input", str(problem.inputs), "--requirement", problem.requirement, *options),
            *("--runner", "emulated", "--out", str(out)),
        ]
        peak, seconds = peak_mb(command)
        plain, _ = peak_mb([sys.executable, "-c", _PLAIN, str(problem.model), str(problem.inputs)])
        saved = json.loads((out / "run.json").read_text())
        plan = PrecisionPlan.from_json((out / "plan.json").read_text())
    score = true_score(problem, plan)
    return Run(
        problem,
        plan,
        saved["evaluations"]["emulated"],
        saved["sensitivity_runs"],
        seconds,
        score,
        peak,
        plain,
    )


def report() -> list[str]:
    """Limits: at most 6 pins for the fitted detector, in under 60 s; peak memory 2 times plain plus
    200 MB.
    """
    lines = [
        "## The whole run (limits for the detector at atol 5e-2, fitted: 6 layers in FP32, 60 s, "
        "2 x plain + 200 MB)",
        "",
        "`--robust 0` fits the plan to the one input and reports whether it is overfitted. The "
        "default searches on perturbed and augmented inputs too, and validates on new ones.",
        "",
    ]
    rows = []
    for problem in cases():
        ways = {"default": ran(problem), "`--robust 0`": ran(problem, "--robust", "0")}
        for way, run in ways.items():
            rows.append(
                (
                    *(
                        problem.model.stem,
                        problem.requirement,
                        way,
                        len(run.plan.pinned),
                        run.evaluations,
                    ),
                    *(
                        run.sensitivities,
                        f"{run.seconds:.1f}",
                        f"{run.score:.3f}",
                        f"{run.peak:.0f}",
                    ),
                    *(f"{run.plain:.0f}", f"{2 * run.plain + 200:.0f}"),
                )
            )
    head = (
        *("model", "requirement", "way", "in FP32", "evaluations", "single-layer runs", "seconds"),
        *("true score", "peak MB", "plain peak MB", "limit MB"),
    )
    return [*lines, *table(head, rows)]
