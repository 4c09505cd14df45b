"""What every fixture, case, public report and OCR model is answered with: committed, so that the
code can be rebuilt without an answer changing unseen.

``python -m benchmarks.goldens write`` writes ``benchmarks/results/goldens.json``; ``check`` (the
default) makes every answer again, prints what differs and ends with 1 where something does. With
``check NAME ...`` it makes those of these names only. All runs are emulated. Peak memory and
seconds are written down and not compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import ROOT
from benchmarks.same_answers import SCORE_DIGITS, Job, jobs
from fixtures.reports import REPORTS

GOLDENS = ROOT / "benchmarks" / "results" / "goldens.json"
_MEASURED = ("seconds", "peak_mb")


def every_job(folder: Path) -> Iterator[Job]:
    """Those of :mod:`benchmarks.same_answers`, then the public reports."""
    yield from jobs(folder)
    for make in REPORTS:
        report = make()
        inputs = folder / report.name
        inputs.mkdir()
        onnx.save(report.model, folder / f"{report.name}.onnx")
        for number, arrays in enumerate(report.inputs):
            np.savez(inputs / f"{number}.npz", **dict(arrays))
        precision = ("--precision", report.precision)
        yield Job(f"report {report.name}", folder / f"{report.name}.onnx", inputs, precision)


def golden(job: Job, out: Path) -> dict[str, Any]:
    """One job's answer: the exit code, what run.json says, the files and the columns of each CSV.

    Args:
        job: the command.
        out: a folder that does not exist yet.
    """
    command = [sys.executable, "-m", "bisect_trt", "run", str(job.model), "--input"]
    command += [str(job.inputs), *job.arguments, "--runner", "emulated", "--quiet"]
    began = time.perf_counter()
    ran = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(ran.pid, 0)
    ran.returncode = os.waitstatus_to_exitcode(status)
    found: dict[str, Any] = {"exit_code": ran.returncode}
    if (out / "run.json").is_file():
        said = json.loads((out / "run.json").read_text())
        score = said["score"]
        found |= {
            "cause": said["cause"],
            "causes": [cause["name"] for cause in said["causes"]],
            "verdict": said["verdict"],
            "pinned": said["pinned"],
            "score": f"{score:.{SCORE_DIGITS}g}" if isinstance(score, float) else score,
            "findings": sorted({finding["kind"] for finding in said["findings"]}),
            "keys": sorted(said),
        }
    files = sorted(path for path in out.glob("*") if path.is_file())
    found["files"] = [path.name for path in files]
    found["columns"] = {
        path.name: path.read_text().partition("\n")[0] for path in files if path.suffix == ".csv"
    }
    measured = (round(time.perf_counter() - began, 1), used.ru_maxrss // 1024)
    return found | dict(zip(_MEASURED, measured, strict=True))


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What of an answer changed, a line each; measurements do not count."""
    keys = [key for key in {**before, **after} if key not in _MEASURED]
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def main() -> int:
    writes = sys.argv[1:] == ["write"]
    known = {} if writes else json.loads(GOLDENS.read_text())
    found, differing = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(every_job(Path(folder))):
            if sys.argv[2:] and job.name not in sys.argv[2:]:
                continue
            found[job.name] = golden(job, Path(folder) / f"out{number}")
            its = found[job.name]
            wrong = [] if writes else differences(known.get(job.name, {}), its)
            differing += bool(wrong)
            print(job.name, its["seconds"], "s;", "; ".join(wrong) or "same", flush=True)
    if writes:
        GOLDENS.write_text(json.dumps(found, indent=1) + "\n")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
