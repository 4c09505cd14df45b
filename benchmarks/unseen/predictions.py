"""What tells the share of unseen inputs that a plan holds on: perturbed copies, or which augmented
inputs?

``python -m benchmarks.unseen.predictions [--cases "det;rec"] [--given 2]`` pins prefixes of the
ranking that one given input makes, so many given inputs of each model in turn, and holds the share
of 24 augmented inputs of a kind, and of 48 perturbed copies, of that input against the share of 48
others. One emulator judges.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common import machine
from benchmarks.models.plan_cases import CASES, PlanCase
from benchmarks.unseen.ranking_prefix import rank
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import InputKind
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.augmentations import KINDS, augmented_input, kinds_for
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import perturbs
from bisect_trt.steps.search_set import search_samples

SIZES = {
    "det": (2, 6, 12, 24, 48, 96),
    "rec": (8, 30, 60, 120, 200, 300),
    "NAFNet": (0, 2, 4, 6, 8, 10),
    "UniMatch": (0, 1, 2, 3, 5, 8),
    "tokens": (0, 4, 8, 16, 24, 32),
}
UNSEEN, UNSEEN_FROM, REDRAWS, AUGMENTED = 48, 100_000, 48, 24
COLUMNS = ("perturbed", *KINDS)


@dataclass(frozen=True)
class Row:
    """The shares that a plan of ``pins`` holds on, made of given input ``number``."""

    number: int
    pins: int
    unseen: float
    shares: dict[str, float]


def measure(problem: PlanCase, given_inputs: int) -> list[Row]:
    """A row for each of ``given_inputs``, and each number of pins."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = problem.model(Path(name))
        unseen: list[Sample] = []
        for number in range(given_inputs):
            given = problem.make(number)
            settings = Settings(
                str(model),
                [given],
                require=problem.require,
                metric=problem.metrics,
                runner="emulated",
                out=Path(name) / f"{number}",
            )
            loaded = load(settings, Observer())
            with open_context(loaded, Observer()) as context:
                ranking = rank(loaded, context, search_samples(loaded, context)).ranking
                kinds = {
                    InputKind.PERTURBED: list(perturbs(loaded, context, 1, REDRAWS, emulated=True))
                }
            unseen = unseen or [Sample("", problem.make(UNSEEN_FROM + n)) for n in range(UNSEEN)]
            for kind in kinds_for(given):
                made = (
                    augmented_input(kind, given, [], np.random.default_rng(n))
                    for n in range(AUGMENTED)
                )
                kinds[kind] = [Sample("", arrays) for arrays in made]
            share = _judge(loaded)
            for pins in SIZES[problem.name]:
                plan = loaded.base.with_pins(ranking[:pins])
                shares = {kind: share(plan, samples) for kind, samples in kinds.items()}
                rows.append(Row(number, pins, share(plan, unseen), shares))
    return rows


def _judge(problem: Problem) -> Callable[[PrecisionPlan, Iterable[Sample]], float]:
    runner = EmulatedRunner(problem.graph)
    references: dict[str, object] = {}

    def share(plan: PrecisionPlan, samples: Iterable[Sample]) -> float:
        passed = []
        for sample in samples:
            if sample.digest not in references:
                references[sample.digest] = problem.reference.outputs(sample)
            exact = references[sample.digest]
            outputs = next(iter(runner.outputs(plan, [sample])))
            passed.append(problem.requirements.score(exact, outputs) <= 1.0)
        return float(np.mean(passed))

    return share


def summary(name: str, rows: list[Row]) -> list[str]:
    """A row for each kind: how far its share is from that of unseen inputs, and how they rank the
    same plans.
    """
    unseen = pd.Series([row.unseen for row in rows])
    found = []
    for kind in rows[0].shares:
        share = pd.Series([row.shares[kind] for row in rows])
        away, above = (share - unseen).abs().mean(), (share - unseen).mean()
        ranks = share.rank().corr(unseen.rank())
        found.append(f"| {name} | {kind} | {away:.2f} | {above:+.2f} | {ranks:.2f} |")
    return found


def main() -> None:
    """Print both tables, a model at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=";".join(SIZES))
    parser.add_argument("--given", type=int, default=2)
    asked = parser.parse_args()
    print(f"`python -m benchmarks.unseen.predictions {shlex.join(sys.argv[1:])}`, {machine()}\n")
    lines: list[str] = []
    print(f"| model | given | pins | unseen | {' | '.join(COLUMNS)} |")
    print(f"| --- | --- | --- | --- |{' --- |' * len(COLUMNS)}", flush=True)
    for name in asked.cases.split(";"):
        rows = measure(CASES[name], asked.given)
        for row in rows:
            shares = " | ".join(
                f"{row.shares[kind]:.2f}" if kind in row.shares else "" for kind in COLUMNS
            )
            print(f"| {name} | {row.number} | {row.pins} | {row.unseen:.2f} | {shares} |")
        lines += summary(name, rows)
        sys.stdout.flush()
    print("\n| model | kind | away from unseen | above it | rank correlation |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
