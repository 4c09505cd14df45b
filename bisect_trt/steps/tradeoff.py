"""The trade-off curve: how many inputs each number of pins holds on, along the ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import CONFIDENCE, Finding, InputKind, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import SearchSetResult, meets
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.validation_inputs import TRADEOFF, TRADEOFF_COPIES, set_size

STEPS = (0, 2, 8, 32, 128, 512, 2048)
"""How many of the ranked layers are pinned, beside the answer, its neighbours and all layers."""

TIME_BUDGET_S = 12.0
"""Of a slow model each row is judged on fewer copies, and rows far from the answer are left out.

Counted by the usual time of an inference, so that a repeated command gives the same rows."""

_SAMPLES_A_ROW = {InputKind.GIVEN: 24, InputKind.PERTURBED: 16, InputKind.AUGMENTED: 8}
_HARD_INPUTS = 8
_NAMED_INPUTS = 3
_QUANTILES = {"p50_score": 0.5, "p95_score": 0.95, "worst_score": 1.0}


@dataclass(frozen=True)
class Tradeoff:
    """``table`` has a row for each number of pins; ``rows`` counts those with the left out."""

    table: pd.DataFrame
    rows: int

    def cut_short(self) -> list[Finding]:
        """That rows were left out, where some were."""
        if len(self.table) == self.rows:
            return []
        message = (
            f"tradeoff.csv has {len(self.table)} of {self.rows} rows, those next to the answer: "
            f"this model's take longer than the {TIME_BUDGET_S:.0f} s that it may take"
        )
        return [Finding("tradeoff", "", message)]


def measure_tradeoff(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    ranking: Sequence[str],
    answer: PrecisionPlan,
    validation: Validation | None = None,
) -> Tradeoff:
    """What each number of pins holds on, with its scores, by the first emulator.

    The answer's row says what its validation counted, and has the scores of those copies: on
    others it would be a second validation.
    """
    sets = [(answer, "answer"), *_beside(base, ranking, answer)]
    if context.engine is not None or validation is None or validation.copies is None:
        validation = None
    # Where nothing was searched the validation has said it all.
    said = validation is not None and not ranking
    kinds = _samples(problem, context, 0 if said else len(sets), answer)
    row_seconds = context.pace.usual_seconds * sum(map(len, kinds.values()))
    asked = sets[: max(1, int(TIME_BUDGET_S / max(row_seconds, 1e-9)))]
    rows: list[dict[str, object]] = []
    with context.counting(lambda: (len(rows), len(sets))):
        for plan, source in asked:
            context.tell(counted(len(plan.pinned), "pin"))
            judged = dict(kinds)
            if source == "answer" and context.evaluator.knows(answer):
                judged[InputKind.GIVEN] = problem.samples
            if source == "answer" and validation is not None:
                judged |= _validated_copies(problem, context, kinds, validation)
            row = _row(problem, context, plan, source, judged)
            if source == "answer" and validation is not None:
                row |= _validated(validation)
            rows.append(row)
    rows.sort(key=lambda row: (row["pins"], row["set"] == "answer"))
    return Tradeoff(pd.DataFrame(rows), len(sets))


def _beside(
    base: PrecisionPlan, ranking: Sequence[str], answer: PrecisionPlan
) -> list[tuple[PrecisionPlan, str]]:
    """The prefixes of the ranking that are shown beside the answer, the nearest to it first."""
    lengths = _lengths(len(ranking), min(len(answer.chosen), len(ranking)))
    plans = [base.with_pins(ranking[:length]) for length in lengths]
    others = [plan for plan in plans if plan.pinned != answer.pinned]
    others.sort(key=lambda plan: abs(len(plan.pinned) - len(answer.pinned)))
    return [(plan, "ranking") for plan in others]


def _lengths(every: int, answer: int) -> list[int]:
    """Numbers of pins: the steps, all, and half way from the answer to the steps beside it."""
    steps = {n for n in STEPS if n < every} | {every}
    below = max((n for n in steps if n < answer), default=answer)
    above = min((n for n in steps if n > answer), default=answer)
    between = {(below + answer) // 2, (answer + above) // 2}
    # Nearly as many pins as the answer has tell nothing beside it.
    return sorted(steps.union(n for n in between if abs(n - answer) > answer / 10.0))


def _copies(rows: int, usual_seconds: float) -> tuple[int, int]:
    """How many perturbed and augmented inputs each of ``rows`` rows is judged on."""
    perturbed, varied = (
        _SAMPLES_A_ROW[kind] for kind in (InputKind.PERTURBED, InputKind.AUGMENTED)
    )
    fewer = max(1.0, (perturbed + varied) * rows * usual_seconds / TIME_BUDGET_S)
    return max(TRADEOFF_COPIES, int(perturbed / fewer)), max(TRADEOFF_COPIES, int(varied / fewer))


def _samples(
    problem: Problem, context: Context, rows: int, answer: PrecisionPlan
) -> dict[InputKind, Sequence[Sample]]:
    """What each of ``rows`` rows is judged on; no copies where there is no row."""
    size = set_size(problem)
    counts = _copies(rows, context.pace.usual_seconds)
    perturbed, varied = (size * max(1, n // size) if rows else 0 for n in counts)
    return {
        InputKind.GIVEN: problem.samples if size > 1 else _some_given(problem, context, answer),
        InputKind.HOLDOUT: evenly(problem.holdout, _SAMPLES_A_ROW[InputKind.GIVEN]),
        InputKind.PERTURBED: list(perturbs(problem, context, TRADEOFF, perturbed, emulated=True)),
        InputKind.AUGMENTED: list(augmented(problem, context, TRADEOFF, varied)),
    }


def _some_given(problem: Problem, context: Context, answer: PrecisionPlan) -> list[Sample]:
    """Some given inputs, among them those that everything reduced, or the answer, misses by most.

    A row that left these out would promise more.
    """

    def missed_by(plan: PrecisionPlan, sample: Sample) -> float:
        found = context.evaluator.known(plan, sample)
        return 0.0 if found is None or meets(found, 1.0) else found.score

    most = _SAMPLES_A_ROW[InputKind.GIVEN]
    by_reduced = [s for s in problem.samples if missed_by(problem.base, s) > 0.0]
    by_reduced.sort(key=lambda sample: -missed_by(problem.base, sample))
    by_answer = [s for s in problem.samples if missed_by(answer, s) > 0.0]
    chosen = [*evenly(problem.samples, most), *by_reduced[:_HARD_INPUTS], *evenly(by_answer, most)]
    digests = {sample.digest for sample in chosen}
    return [sample for sample in problem.samples if sample.digest in digests]


def _validated_copies(
    problem: Problem,
    context: Context,
    kinds: dict[InputKind, Sequence[Sample]],
    validation: Validation,
) -> dict[InputKind, Sequence[Sample]]:
    """As many copies as ``kinds`` has, of those of the answer's validation."""
    assert validation.copies is not None
    stream, count = validation.copies
    perturbed, varied = (len(kinds[kind]) for kind in (InputKind.PERTURBED, InputKind.AUGMENTED))
    copies = perturbs(problem, context, stream, count, emulated=True)
    return {
        InputKind.PERTURBED: list(islice(copies, perturbed)),
        InputKind.AUGMENTED: list(islice(augmented(problem, context, stream, count), varied)),
    }


def _row(
    problem: Problem,
    context: Context,
    plan: PrecisionPlan,
    source: str,
    kinds: dict[InputKind, Sequence[Sample]],
) -> dict[str, object]:
    """What ``plan`` holds on by the first emulator, its scores, and its engine's latency."""
    row: dict[str, object] = {"pins": len(plan.pinned), "set": source}
    scores: list[float] = []
    missed: dict[str, object] = {}
    for kind, samples in kinds.items():
        size = set_size(problem)
        if kind == InputKind.HOLDOUT and size > 1:
            size = max(1, len(samples))
        found = context.evaluator.judge(plan, samples, size=size)
        tested, passed = len(found.results), found.passed()
        copied = kind != InputKind.GIVEN and tested > 0
        bound = lower_bound(passed, tested, CONFIDENCE) if copied else np.nan
        row |= _share(kind, passed, tested, bound)
        if kind == InputKind.GIVEN and size == 1:
            missed["given_missed"] = _missed(found)
        scores += [r.score for r in found.results]
    scores.sort()
    for name, share in _QUANTILES.items():
        row[name] = scores[max(0, math.ceil(share * len(scores)) - 1)] if scores else np.nan
    return {**row, "latency_ms": _latency(problem, context, plan), **missed}


def _validated(validation: Validation) -> dict[str, object]:
    """What a validation counted, of every kind and by every judge."""
    found: dict[str, object] = {}
    worst: list[float] = []
    for kind in InputKind:
        tally = validation.of(kind)
        bound = tally.lower_bound if kind != InputKind.GIVEN and tally.tested else np.nan
        found |= _share(kind, tally.passed, tally.tested, bound)
        if tally.tested:
            worst.append(tally.worst_score)
    return found | {"worst_score": max(worst, default=np.nan)}


def _share(kind: InputKind, passed: int, tested: int, bound: float) -> dict[str, object]:
    return {
        f"{kind}_passed": passed,
        f"{kind}_tested": tested,
        f"{kind}_share": passed / tested if tested else np.nan,
        f"{kind}_lower_bound": bound,
    }


def _missed(found: SearchSetResult) -> str:
    """The names of the samples that missed, the worst first: a few, and how many more."""
    results = zip(found.names, found.results, strict=True)
    worst = sorted((-r.score, name) for name, r in results if not meets(r, 1.0))
    more = [f"{len(worst) - _NAMED_INPUTS} more"] if len(worst) > _NAMED_INPUTS else []
    return ", ".join([*(name for _, name in worst[:_NAMED_INPUTS]), *more])


def _latency(problem: Problem, context: Context, plan: PrecisionPlan) -> float:
    """What the engine of ``plan`` takes, NaN where none was built."""
    if context.engine is None:
        return math.nan
    asked = context.plan_for(context.engine, plan)
    if plan.pinned.issuperset(problem.names) and not problem.kept_reduced:  # the same network
        asked = PrecisionPlan(Precision.FP32)
    built = context.engine.done.get(asked)
    return float(built.facts.get("latency_ms", math.nan)) if built is not None else math.nan
