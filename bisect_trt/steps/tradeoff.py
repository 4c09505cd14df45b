"""The trade-off curve: error and predicted time against what is kept in FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import CONFIDENCE, ErrorShare, Finding, InputKind, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import SearchSetResult, meets
from bisect_trt.metrics.requirements import MAX_SCORE
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.model.cost import CostTable
from bisect_trt.search.prefix import longest
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.validation_inputs import TRADEOFF, TRADEOFF_COPIES, set_size

STEPS = (0, 1, 2, 8)
"""How many of the ranked layers are pinned, beside the answer and all layers."""

COST_STEPS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of FP16's saving that further rows give up at most."""

KNEE_COST, KNEE_GAIN = 0.1, 0.25
"""Behind the knee so much of FP16's saving lowers the worst error by less than this part."""

GIVEN_A_ROW = 24
"""Given inputs, and as many held out ones, that a row is judged on, beside those that miss most."""


FEW_LAYERS, NEARLY_ALL = 3, 0.9
"""So few layers are named where they make this part of the error."""

PART = 0.05**2
"""The share of the strongest layer's mean square from which on a layer is named."""


@dataclass(frozen=True)
class Tradeoff:
    """A row for each plan of the curve; ``knee`` is its plan where more time buys little.

    ``error_share``: the few layers that make nearly all of the error; None where none do.
    """

    table: pd.DataFrame
    knee: PrecisionPlan | None = None
    error_share: ErrorShare | None = None


def measure_tradeoff(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    ranking: Sequence[str],
    answer: PrecisionPlan,
    strength: Mapping[str, float],
    validation: Validation | None = None,
) -> Tradeoff:
    """The errors and the inputs that pass along ``ranking``, by the first emulator.

    ``strength`` is the mean square of each layer's error alone.
    The answer's row has the counts of its validation: on other copies there would be a second one.
    """
    sets = [(answer, "answer"), *_beside(context.costs, base, ranking, answer)]
    if context.engine is not None or validation is None or validation.unfinished:
        validation = None
    # Where nothing was searched the validation says it all.
    rows_with_copies = 0 if validation is not None and not ranking else len(sets)
    kinds = _samples(problem, context, rows_with_copies)
    # By the usual time and not by the clock, so that a repeated command gives the same rows.
    row_seconds = context.pace.usual_seconds * sum(map(len, kinds.values()))
    limit_s = problem.settings.limits.tradeoff_time_s
    fitting = max(1, int(limit_s / max(row_seconds, 1e-9)))
    rows: list[dict[str, object]] = []
    worst = dict[frozenset[str], float]()
    for plan, source in sets[:fitting]:
        pins = counted(len(plan.pinned), "pin")
        context.observer.progress(len(rows), len(sets), pins)
        judged = dict(kinds)
        if source == "answer" and context.evaluator.knows(answer):
            judged[InputKind.GIVEN] = problem.samples
        row = _row(problem, context, plan, source, judged)
        worst[plan.pinned] = float(row["worst_score"])  # type: ignore[arg-type]
        if source == "answer" and validation is not None:
            row |= _validated(validation)
        rows.append(row)
    if len(rows) < len(sets):
        message = (
            f"tradeoff.csv has {len(rows)} of {len(sets)} rows, those next to the answer: this "
            f"model's take longer than the {limit_s:.0f} s that it may take"
        )
        context.note(Finding("tradeoff", "", message))
    measured = sorted(
        zip((plan for plan, _ in sets), rows, strict=False),
        key=lambda one: (one[1]["pins"], one[1]["set"] == "answer"),
    )
    few = [base.with_pins(ranking[:count]).pinned for count in range(FEW_LAYERS + 1)]
    scores = [worst.get(pinned, math.nan) for pinned in few]
    share = error_share(ranking, scores, strength) if _are_errors(problem) else None
    table = pd.DataFrame([row for _, row in measured])
    return Tradeoff(table, knee_of(context.costs, measured), share)


def error_share(
    ranking: Sequence[str], scores: Sequence[float], strength: Mapping[str, float]
) -> ErrorShare | None:
    """The few first layers of ``ranking`` that make nearly all of the error; None where none do.

    A layer that does far less alone than another one, by ``strength``, is not named.

    ``scores`` are the worst with none of them in FP32, the first one, the first two and so on, in
    tolerances; NaN where that was not measured.
    """
    before, *after = scores
    for count, left in enumerate(after[: len(ranking)], 1):
        layers = tuple(ranking[:count])
        if math.isinf(before) and left < MAX_SCORE:
            return ErrorShare(layers, math.nan, left)
        if 1.0 < before < MAX_SCORE and left <= (1.0 - NEARLY_ALL + 1e-9) * before:
            # A layer may come early because it costs nothing, and do next to nothing.
            most = max(strength.get(name, math.inf) for name in layers)
            named = (n for n in layers if not strength.get(n, math.inf) < PART * most)
            return ErrorShare(tuple(named), 1.0 - left / before, left)
    return None


def _are_errors(problem: Problem) -> bool:
    """Whether scores grow as errors do: those of a user's bound from below do not."""
    return not any(
        item.own and (item.at_least or item.limit < 0.0) for item in problem.requirements.items
    )


def knee_of(
    costs: CostTable, measured: Sequence[tuple[PrecisionPlan, Mapping[str, object]]]
) -> PrecisionPlan | None:
    """The plan behind which a further tenth of the saving lowers the worst error by little.

    ``measured`` are plans and their rows. None where nothing is saved, or fewer than two errors are
    finite.
    """
    points = [
        (1.0 - costs.saving_kept(plan), float(row["worst_score"]), plan)  # type: ignore[arg-type]
        for plan, row in measured
    ]
    points = [point for point in points if all(map(math.isfinite, point[:2]))]
    points.sort(key=lambda point: (point[0], len(point[2].pinned)))
    for place, (cost, score, plan) in enumerate(points if len(points) > 1 else ()):
        rest = points[place + 1 :]
        near = [s for c, s, _ in rest if c <= cost + KNEE_COST]
        # Where no plan costs so little more, the next one says what more time buys.
        if min(near or [s for _, s, _ in rest[:1]], default=math.inf) >= (1 - KNEE_GAIN) * score:
            return plan
    return None


def _beside(
    costs: CostTable, base: PrecisionPlan, ranking: Sequence[str], answer: PrecisionPlan
) -> list[tuple[PrecisionPlan, str]]:
    """The prefixes of the ranking that are shown beside the answer, the nearest to it first."""
    lengths = {*(n for n in STEPS if n < len(ranking)), len(ranking)}
    lengths |= {_length_within(costs, base, ranking, share) for share in COST_STEPS}
    plans = [base.with_pins(ranking[:length]) for length in sorted(lengths)]
    # Different lengths may close to the same pins, as layers that only move values follow others.
    others = [plan for plan in plans if plan.pinned != answer.pinned]
    cost = costs.predicted(answer)
    others.sort(key=lambda plan: abs(costs.predicted(plan) - cost))
    return [(plan, "ranking") for plan in others]


def _length_within(
    costs: CostTable, base: PrecisionPlan, ranking: Sequence[str], share: float
) -> int:
    """The longest prefix that gives up at most ``share`` of FP16's saving."""
    limit = share * costs.extra

    def fits(length: int) -> bool:
        return costs.predicted(base.with_pins(ranking[:length])) <= limit

    return longest(len(ranking), fits)


def _samples(problem: Problem, context: Context, rows: int) -> dict[InputKind, Sequence[Sample]]:
    """The samples that each of ``rows`` rows is judged on; no copies where there is no row."""
    size = set_size(problem)
    most = {InputKind.PERTURBED: 16, InputKind.AUGMENTED: 8}
    seconds = sum(most.values()) * rows * context.pace.usual_seconds
    fewer = max(1.0, seconds / problem.settings.limits.tradeoff_time_s)
    copies = {kind: max(TRADEOFF_COPIES, int(count / fewer)) for kind, count in most.items()}
    counts = {k: size * max(1, count // size) if rows else 0 for k, count in copies.items()}
    perturbed = perturbs(problem, context, TRADEOFF, counts[InputKind.PERTURBED], emulated=True)
    return {
        InputKind.GIVEN: problem.samples if size > 1 else _some_given(problem, context),
        InputKind.HOLDOUT: evenly(problem.holdout, GIVEN_A_ROW),
        InputKind.PERTURBED: list(perturbed),
        InputKind.AUGMENTED: list(
            augmented(problem, context, TRADEOFF, counts[InputKind.AUGMENTED])
        ),
    }


def _some_given(problem: Problem, context: Context) -> list[Sample]:
    """Some given inputs, among them the eight that everything reduced misses by most."""
    # A row without these would promise more than it holds.
    results = [(s, context.evaluator.known(problem.base, s)) for s in problem.samples]
    missed = [(s, found.score) for s, found in results if found and not meets(found, 1.0)]
    missed.sort(key=lambda one: -one[1])
    chosen = [*evenly(problem.samples, GIVEN_A_ROW), *(sample for sample, _ in missed[:8])]
    digests = {sample.digest for sample in chosen}
    return [sample for sample in problem.samples if sample.digest in digests]


def _row(
    problem: Problem,
    context: Context,
    plan: PrecisionPlan,
    source: str,
    kinds: Mapping[InputKind, Sequence[Sample]],
) -> dict[str, object]:
    """The inputs that ``plan`` holds on by the first emulator, its scores, its engine's latency."""
    row: dict[str, object] = {"pins": len(plan.pinned), "set": source}
    scores: list[float] = []
    missed: dict[str, object] = {}
    for kind, samples in kinds.items():
        size = set_size(problem)
        # Where inputs are judged together the held out ones are one set.
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
    for name, share in (("p50_score", 0.5), ("p95_score", 0.95), ("worst_score", 1.0)):
        row[name] = scores[max(0, math.ceil(share * len(scores)) - 1)] if scores else np.nan
    times = {"saving_kept": context.costs.saving_kept(plan)}
    return {**row, **times, "latency_ms": _latency(problem, context, plan), **missed}


def _validated(validation: Validation) -> dict[str, object]:
    """The counts of a validation, of every kind and by every judge."""
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
    """The names of the three samples that missed by most, and how many more did."""
    results = zip(found.names, found.results, strict=True)
    worst = sorted((-r.score, name) for name, r in results if not meets(r, 1.0))
    more = [f"{len(worst) - 3} more"] if len(worst) > 3 else []
    return ", ".join([*(name for _, name in worst[:3]), *more])


def _latency(problem: Problem, context: Context, plan: PrecisionPlan) -> float:
    """The latency of the engine of ``plan``, NaN where none was built."""
    if context.engine is None:
        return math.nan
    built_as = context.plan_for(context.engine, plan)
    if plan.pinned.issuperset(problem.names) and not problem.kept_reduced:  # the same network
        built_as = PrecisionPlan(Precision.FP32)
    built = context.engine.done.get(built_as)
    return float(built.facts.get("latency_ms", math.nan)) if built is not None else math.nan
