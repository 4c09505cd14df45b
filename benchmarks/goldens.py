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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, ROOT, SHARED
from fixtures import cases
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.fixture import Fixture
from fixtures.models import ALL
from fixtures.reports import REPORTS

GOLDENS = ROOT / "benchmarks" / "results" / "goldens.json"
_MEASURED = ("seconds", "peak_mb")


SCORE_DIGITS = 6
"""Scores that agree to so many digits are the same: the order of a sum may differ, no rounding
may.
"""


@dataclass(frozen=True)
class Job:
    """One command: ``arguments`` follow ``run MODEL --input INPUTS``."""

    name: str
    model: Path
    inputs: Path
    arguments: tuple[str, ...]


def every_job(folder: Path) -> Iterator[Job]:
    """Every fixture, case, OCR model and public report, its files written into ``folder``."""
    made = [(make().name, make()) for make in ALL]
    made += [(name, make()) for name, make in cases.AUGMENTED.items()]
    for number, (name, fixture) in enumerate(made):
        model, inputs = folder / f"{number}.onnx", folder / f"{number}.npz"
        model.write_bytes(model_bytes(fixture))
        inputs.write_bytes(input_bytes(fixture))
        yield Job(name, model, inputs, _arguments(fixture))
    page = MODELS / "page.npz"
    yield Job("det, demo's page, max_abs 5e-2", DETECTOR, page, ("--requirement", "max_abs<=5e-2"))
    if SHARED.exists():
        for model, inputs, requirement in (
            (DETECTOR, "ocr_det", "atol=5e-2,rtol=1e-2"),
            (RECOGNISER, "ocr_rec", "atol=1e-2,rtol=1e-2"),
            (DETECTOR, "ocr_det", "atol=1e-2,rtol=1e-2"),
        ):
            yield Job(
                f"{inputs}, {requirement}",
                model,
                SHARED / f"{inputs}.npz",
                ("--requirement", requirement),
            )
    for make in REPORTS:
        report = make()
        inputs = folder / report.name
        inputs.mkdir()
        onnx.save(report.model, folder / f"{report.name}.onnx")
        for number, arrays in enumerate(report.inputs):
            np.savez(inputs / f"{number}.npz", **dict(arrays))
        precision = ("--precision", report.precision)
        yield Job(f"report {report.name}", folder / f"{report.name}.onnx", inputs, precision)


def _arguments(fixture: Fixture) -> tuple[str, ...]:
    metrics = [part for metric in fixture.metrics for part in ("--metric", metric)]
    return ("--precision", fixture.precision, "--requirement", fixture.require, *metrics)


def golden(job: Job, out: Path) -> dict[str, Any]:
    """One job's answer: the exit code, what run.json says, the files and the columns of each CSV.

    Args:
        job: the command.
        out: a folder that does not exist yet.
    """
    command = [sys.executable, "-m", "bisect_trt", "run", str(job.model), "--input"]
    # The search alone: what repairs do is in benchmarks/repairs.py.
    command += [str(job.inputs), *job.arguments, "--runner", "emulated", "--quiet"]
    command += ["--repair", "none", "--weights", "nearest"]
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
        f"{key}: {_change(before.get(key), after.get(key))}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _change(before: Any, after: Any) -> str:
    """How one value became another: of lists and tables what came (+) and went (-)."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        texts = ((name, before.get(name, ""), after.get(name, "")) for name in names)
        return "; ".join(f"{n} {_change(b.split(','), a.split(','))}" for n, b, a in texts)
    if isinstance(before, list) and isinstance(after, list):
        came = [f"+{item}" for item in after if item not in before]
        gone = [f"-{item}" for item in before if item not in after]
        return " ".join([*came, *gone]) or "another order"
    return f"{before} -> {after}"


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
