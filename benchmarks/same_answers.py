"""Whether two checkouts give the same answers: causes, pins, scores and exit codes on every
fixture, case and OCR model.

``python -m benchmarks.same_answers OLD [NEW]`` runs the command of both on the same files,
emulated, and prints a row for each job; NEW is this checkout where it is not given. Arguments after
``--`` go to NEW alone, for an option whose default has changed. The exit code is 1 if an answer
differs.
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

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, ROOT, SHARED
from fixtures import cases
from fixtures.__main__ import input_bytes, model_bytes
from fixtures.fixture import Fixture
from fixtures.models import ALL

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


def jobs(folder: Path) -> Iterator[Job]:
    """Every job, its files written into ``folder``."""
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


def _arguments(fixture: Fixture) -> tuple[str, ...]:
    metrics = [part for metric in fixture.metrics for part in ("--metric", metric)]
    return ("--precision", fixture.precision, "--requirement", fixture.require, *metrics)


@dataclass(frozen=True)
class Answer:
    """What a checkout said.

    ``unsteered`` is how many pins its search had found where a steered walk, which later versions
    do not have, then found fewer; 0 elsewhere.
    """

    code: int
    cause: str
    pins: tuple[str, ...]
    score: str
    evaluations: int
    seconds: float
    unsteered: int

    def same_as(self, other: Answer) -> bool:
        """Equal in all that a user relies on."""
        return (self.code, self.cause, self.pins, self.score) == (
            other.code,
            other.cause,
            other.pins,
            other.score,
        )


def answer(checkout: Path, job: Job, more: tuple[str, ...] = ()) -> Answer:
    """One job by the command of ``checkout``, in a fresh folder."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "bisect_trt",
            "run",
            str(job.model),
            "--input",
            str(job.inputs),
            *job.arguments,
            "--runner",
            "emulated",
            "--json",
            "--out",
            out,
            *more,
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
    seconds = time.perf_counter() - began
    if not done.stdout.strip():
        words = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return Answer(done.returncode, words[0], (), "", 0, seconds, 0)
    said = json.loads(done.stdout)
    score = said["score"]
    text = f"{score:.{SCORE_DIGITS}g}" if isinstance(score, float) else str(score)
    unsteered = said["search"].get("pins_without_steering") or 0
    return Answer(
        done.returncode,
        said["cause"],
        tuple(said["pinned"]),
        text,
        sum(said["evaluations"].values()),
        seconds,
        unsteered,
    )


def main() -> None:
    """Print the table; exit 1 where an answer differs and no steered walk explains it."""
    ours, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    checkouts = [Path(p).resolve() for p in ours.split()]
    old, new = checkouts[0], checkouts[1] if len(checkouts) > 1 else ROOT
    print("| job | same | cause | pins | score | evaluations | seconds |\n" + "| --- " * 7 + "|")
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(Path(folder)):
            before, after = answer(old, job), answer(new, job, tuple(more.split()))
            same = before.same_as(after)
            word = "yes" if same else "NO"
            if not same and before.unsteered:
                word = f"steered before, {before.unsteered} pins without"
            else:
                differing += not same
            pairs = [
                (before.cause, after.cause),
                (len(before.pins), len(after.pins)),
                (before.score, after.score),
                (before.evaluations, after.evaluations),
                (f"{before.seconds:.1f}", f"{after.seconds:.1f}"),
            ]
            cells = [f"{a}" if a == b else f"{a} -> {b}" for a, b in pairs]
            print(f"| {job.name} | {word} | {' | '.join(cells)} |", flush=True)
    print(f"\n{differing} answers differ" if differing else "\nevery answer is the same")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
