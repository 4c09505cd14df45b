"""The whole command on the detector: pins, time, memory, and whether the result is true under explicit rounding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from benchmarks.common import DETECTOR, RECOGNISER, SHARED, detector_input, load
from bisect_trt.graph import to_emulated
from bisect_trt.precision import PrecisionPlan

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
        "subprocess.run(sys.argv[1:], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(json.dumps([resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, time.perf_counter() - began]))"
    )
    out = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True).stdout
    peak, seconds = json.loads(out)
    return float(peak), float(seconds)


def true_score(model: Path, inputs: Path, plan: PrecisionPlan, atol: float, rtol: float) -> float:
    """The plan's score by another way than the search's: the emulated model as a whole, in one session."""
    feed, proto = load(inputs), onnx.load(model)
    reference = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feed)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(to_emulated(proto, plan).SerializeToString(), options, providers=["CPUExecutionProvider"])
    pairs = zip(reference, session.run(None, feed), strict=True)
    return max(float((np.abs(g - r) / (atol + rtol * np.abs(r))).max()) for r, g in pairs)


def report() -> list[str]:
    """Limits: at most 6 pins for the detector in under 60 s; peak memory 2 times plain plus 200 MB."""
    lines = ["## The whole run (limits for the detector at atol 5e-2: 6 pins, 60 s, 2 x plain + 200 MB)", ""]
    lines += [
        "| model | requirement | pins | probes | single-layer runs | seconds | true score | peak MB | plain peak MB | limit MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cases = [(DETECTOR, detector_input(), 5e-2, 1e-2)]
    if SHARED.exists():
        cases += [(DETECTOR, SHARED / "ocr_det.npz", 1e-2, 1e-2), (RECOGNISER, SHARED / "ocr_rec.npz", 1e-2, 1e-2)]
    for model, inputs, atol, rtol in cases:
        out = Path(tempfile.mkdtemp())
        try:
            requirement = f"atol={atol:g},rtol={rtol:g}"
            command = ["-m", "bisect_trt", "run", str(model), "--input", str(inputs), "--requirement", requirement, "--out", str(out)]
            peak, seconds = peak_mb([sys.executable, *command])
            plain, _ = peak_mb([sys.executable, "-c", _PLAIN, str(model), str(inputs)])
            saved = json.loads((out / "run.json").read_text())
            plan = PrecisionPlan.from_json((out / "plan.json").read_text())
            score = true_score(model, inputs, plan, atol, rtol)
            lines.append(
                f"| {model.stem} | {requirement} | {len(plan.pinned)} | {saved['probes']['emulated']} | {saved['effect_runs']} | "
                f"{seconds:.1f} | {score:.3f} | {peak:.0f} | {plain:.0f} | {2 * plain + 200:.0f} |"
            )
        finally:
            shutil.rmtree(out)
    return lines
