"""Do engines make up their minds? Every model at every precision, in several fresh processes.

``python -m benchmarks.engines.reproducibility [--models FOLDER] [--only NAMES] [--precisions
fp32,fp16] [--processes 3] [--repeats 3] [--at-once 4] [--inputs 6]`` needs a GPU; FOLDER holds what
``benchmarks.models.exported`` wrote. Each process builds its engines and runs every input so many
times in two contexts, further where answers differ. An error is the largest over the reference's
range.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import CLASSIFIER, DETECTOR, MODELS, RECOGNISER, load, machine
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.augmentations import augmented_input
from bisect_trt.inputs.perturbations import can_be_perturbed, perturbed
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import farthest_apart
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from examples.text_inputs import line
from fixtures.cases import FILES as CASES
from fixtures.models import ALL

WRONG = {"fp32": 1e-3, "tf32": 3e-2, "fp16": 3e-2, "bf16": 2e-1}
"""From this error on a run counts as wrong: far more than rounding makes of a sane network."""


@dataclass(frozen=True)
class Observation:
    """One process: the runs, those that differed from most of their input, and the errors of the
    distinct answers; ``failed`` says why there are none.
    """

    runs: int
    differing: int
    wrong: int
    best: float
    worst: float
    answers: int
    apart: float
    failed: str = ""


def everything(folder: Path | None) -> dict[str, tuple[Any, Arrays]]:
    """Models and one input each, by name."""
    found: dict[str, tuple[Any, Arrays]] = {}
    for make in (*ALL, *CASES):
        fixture = make()
        found[fixture.name] = (fixture.model, fixture.inputs)
    if DETECTOR.exists():
        found["PP-OCRv4 det"] = (DETECTOR, load(MODELS / "page.npz"))
        found["PP-OCRv4 rec"] = (RECOGNISER, {"x": line(0)})
        found["PP-OCR cls"] = (CLASSIFIER, {"x": line(0)[..., :192].copy()})
    for path in sorted(folder.glob("*.onnx")) if folder is not None else ():
        found[path.stem] = (path, load(path.with_suffix(".npz")))
    return found


def samples_of(arrays: Arrays, count: int) -> list[Sample]:
    """The input and others like it: a tenth of its deviation away, or its ids swapped."""
    random = np.random.default_rng(1)
    found = [Sample("given", arrays)]
    for number in range(1, count):
        moves = can_be_perturbed(arrays)
        other = (
            perturbed(arrays, random, 0.1) if moves else augmented_input("swap", arrays, (), random)
        )
        found.append(Sample(f"other {number}", other))
    return found


def look(
    name: str, model: Any, arrays: Arrays, asked: argparse.Namespace
) -> dict[str, Observation]:
    """What one fresh process shows of a model, by precision."""
    graph = Graph(load_model(model).proto)
    samples = samples_of(arrays, asked.inputs)
    reference = Reference(graph)
    exact = [reference.outputs(sample) for sample in samples]
    found: dict[str, Observation] = {}
    runner = TensorRTRunner(graph, samples, timeout_s=300.0, repeats=asked.repeats)
    try:
        for precision in asked.precisions.split(","):
            plan = PrecisionPlan(Precision(precision))
            try:
                outputs = list(runner.outputs(plan, samples))
            except RunnerFailedError as error:
                found[precision] = Observation(0, 0, 0, math.nan, math.nan, 0, 0.0, str(error)[:90])
                continue
            found[precision] = _seen(exact, outputs, WRONG[precision])
    finally:
        runner.close()
    return found


def _seen(exact: list[Arrays], outputs: list[Any], limit: float) -> Observation:
    runs = differing = wrong = 0
    errors: list[float] = []
    apart = 0.0
    most = 1
    for reference, found in zip(exact, outputs, strict=True):
        assert isinstance(found, Repeated)
        others = sum(count for _, count in found.others)
        counted: list[tuple[Arrays, int]] = [(found, found.runs - others), *found.others]
        for answer, count in counted:
            error = farthest_apart(reference, [reference, _as_float(answer)])[1]
            errors.append(error)
            wrong += count * (not error <= limit)
        runs += found.runs
        differing += others
        most = max(most, len(counted))
        apart = max(apart, farthest_apart(reference, [_as_float(a) for a, _ in counted])[1])
    return Observation(runs, differing, wrong, min(errors), max(errors), most, apart)


def _as_float(arrays: Arrays) -> Arrays:
    return {n: a.astype(np.float32) if a.dtype.kind in "fV" else a for n, a in arrays.items()}


def rows(asked: argparse.Namespace) -> Iterator[str]:
    """A row a model and precision, as soon as its processes are done."""
    wanted = asked.only.split(";") if asked.only else None
    models = everything(Path(asked.models) if asked.models else None)
    with ThreadPoolExecutor(asked.at_once) as pool:
        pending = {
            name: [
                pool.submit(partial(look, name, model, arrays, asked))
                for _ in range(asked.processes)
            ]
            for name, (model, arrays) in models.items()
            if wanted is None or name in wanted
        }
        for name, futures in pending.items():
            try:
                found = [future.result() for future in futures]
            except Exception as error:  # the other models are still of interest
                yield f"| {name} | | | | | | | {type(error).__name__}: {str(error)[:90]} |"
                continue
            for precision in asked.precisions.split(","):
                yield _row(name, precision, [one[precision] for one in found])


def _row(name: str, precision: str, seen: list[Observation]) -> str:
    failed = next((s.failed for s in seen if s.failed), "")
    if failed:
        return f"| {name} | {precision} | {len(seen)} | | | | | {failed.replace('|', '/')} |"
    runs, wrong = sum(s.runs for s in seen), sum(s.wrong for s in seen)
    mixed = sum(s.differing > 0 for s in seen)
    lowest, highest = min(s.best for s in seen), max(s.worst for s in seen)
    apart = max(s.apart for s in seen)
    words = (
        f"up to {max(s.answers for s in seen)} answers, {apart:.2g} apart"
        if mixed
        else "reproducible"
    )
    return (
        f"| {name} | {precision} | {len(seen)} | {mixed} | {wrong} of {runs} | {lowest:.2g} "
        f"| {highest:.2g} | {words} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--precisions", default="fp32,tf32,fp16,bf16")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inputs", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=4)
    asked = parser.parse_args()
    print(f"`python -m benchmarks.engines.steadiness {shlex.join(sys.argv[1:])}`, {machine()}\n")
    print(
        "| model | precision | processes | of these mixed | runs wrong | least error | largest "
        "| answers |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for row in rows(asked):
        print(row, flush=True)


if __name__ == "__main__":
    main()
