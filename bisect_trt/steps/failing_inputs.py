"""The inputs that fail with everything reduced, and what each layer does to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bisect_trt.base.outcomes import InputKind, Validation, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import Evaluation, SampleResult
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import (
    Refusal,
    SearchSamples,
    all_in_fp32,
    decided_by_pins,
    search_samples,
)
from bisect_trt.steps.sensitivity import (
    Sensitivity,
    affordable,
    measure_sensitivity,
    passes_affordable,
)
from bisect_trt.steps.validation import validate_next
from bisect_trt.steps.validation_inputs import set_size, spared

MAX_RANKED_SAMPLES = 8
"""The most samples on which each layer is reduced alone; of many layers fewer, but two."""


@dataclass(frozen=True)
class UnseenInputs:
    """The ``samples`` that a validated search begins with, and everything reduced on them.

    ``refused``: the new copies that refused everything reduced.
    ``validation``: the one that everything reduced passed, if it did.
    """

    samples: SearchSamples
    reduced: Evaluation
    refused: Refusal | None
    validation: Validation | None


def look_beyond(problem: Problem, context: Context, emulated: Baselines) -> UnseenInputs:
    """Run everything reduced on the search set, and validate it where it passes there."""
    context.observer.step("unseen inputs")
    refusal = validation = None
    # An engine has a word of its own, so that the emulators need not give the last one.
    decides = context.engine is None and emulated.reduced.verdict.passed
    if decides:
        # Four copies of each kind come first: the others are for a search, and there may be none.
        few = search_samples(problem, context, 4)
        found = _evaluate_reduced(problem, context, few)
        if found.verdict.passed:
            refusal, validation = validate_next(problem, context, problem.base)
            if validation is not None:
                return UnseenInputs(few, found, None, validation)
    samples = search_samples(problem, context)
    reduced = _evaluate_reduced(problem, context, samples)
    if decides and refusal is None and reduced.verdict.passed:  # what some missed is spared
        refusal, validation = validate_next(problem, context, problem.base)
    return UnseenInputs(samples, reduced, refusal, validation)


def _evaluate_reduced(problem: Problem, context: Context, samples: SearchSamples) -> Evaluation:
    """Everything reduced on ``samples``, with the worst score that is not spared."""
    results: list[SampleResult] = []
    score = 0.0
    for kind, of_kind in samples.items():
        found = context.evaluator.judge(problem.base, of_kind, size=set_size(problem))
        results += found.results
        score = max(score, found.score(spared(problem, kind, len(of_kind))))
    reduced = Evaluation.over(problem.base, context.evaluator.runner.name, results, score=score)
    if not reduced.verdict.passed:
        context.refused.add(problem.base)
    return reduced


def worst_seen(given: Evaluation, unseen: UnseenInputs | None) -> Evaluation:
    """Everything reduced where it does worst: on the ``given`` inputs, or on copies."""
    if unseen is None:
        return given
    worst = unseen.reduced if unseen.reduced.score > given.score else given
    if unseen.refused is not None and unseen.refused.score > worst.score:
        worst = replace(worst, score=unseen.refused.score, verdict=Verdict.FAIL)
    return worst


def with_pins_there(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    pins: frozenset[str],
    unseen: UnseenInputs | None,
) -> tuple[float, float]:
    """The scores of everything reduced, and of everything but ``pins``, where the first is worst.

    Both are on the same inputs (:func:`worst_seen`), so that they can be compared.
    """
    given, pinned = context.evaluator.evaluate(problem.base), base.with_pins(pins)
    worst = worst_seen(given, unseen)
    copies: Sequence[Sample] = ()
    if unseen is not None and worst is unseen.reduced:
        copies = (*unseen.samples[InputKind.PERTURBED], *unseen.samples[InputKind.AUGMENTED])
    elif unseen is not None and worst is not given and unseen.refused is not None:
        copies = unseen.refused.samples
    if not copies:
        return given.score, context.evaluator.evaluate(pinned).score
    size = set_size(problem)
    scores = [r.score for r in context.evaluator.judge(problem.base, copies, size=size).results]
    # Those that are spared score more than the worst.
    place = max(range(len(scores)), key=lambda i: (scores[i] <= worst.score, scores[i]))
    samples = copies[place * size : (place + 1) * size]
    return scores[place], context.evaluator.judge(pinned, samples, size=size).score()


def measure_each_alone(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    unseen: UnseenInputs | None,
    suspicion: Mapping[str, float],
    heavy: frozenset[str],
) -> Sensitivity:
    """The sensitivity of as many layers as there is time for, the most suspicious first."""
    samples = ranked_on(problem, context, unseen)
    seconds = len(samples) * context.pace.usual_seconds
    # A budget leaves the rest of its time for the search.
    budget_s = min(0.4 * context.time.left_s, problem.settings.limits.sensitivity_time_s)
    count = affordable(len(problem.names), seconds, budget_s)
    reduced = problem.base
    if unseen is not None:
        # What overflows, by itself or by a constant (``heavy``), would hide the others' effects.
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        reduced = reduced.with_pins(overflowing.intersection(problem.names))
    limits = problem.settings.limits
    passes = passes_affordable(
        len(samples),
        context.pace.usual_seconds,
        limits.ranking_time_s,
        0.4 * context.time.left_s,
    )
    return measure_sensitivity(problem, context, suspicion, samples, reduced, count, passes)


def _score(problem: Problem, context: Context, sample: Sample, unknown: float) -> float:
    """The score of everything reduced on ``sample``; ``unknown`` where that was not run."""
    found = context.evaluator.known(problem.base, sample)
    return unknown if found is None else found.score


def ranked_on(
    problem: Problem, context: Context, unseen: UnseenInputs | None
) -> tuple[Sample, ...]:
    """The samples on which each layer is reduced alone.

    These are the given inputs that everything reduced does worst on, and copies of each kind.
    """
    if unseen is None:
        return problem.samples
    # By count and not by the clock, so that the same command gives the same answer.
    count = max(2, min(MAX_RANKED_SAMPLES, 800 // max(1, len(problem.layers))))
    # From the end: augmented inputs disturb more than perturbed copies do.
    others = [
        *reversed(unseen.samples[InputKind.AUGMENTED]),
        *reversed(unseen.samples[InputKind.PERTURBED]),
    ]
    # Where everything reduced hardly shows, no layer's effect does.
    first = _worst(problem, context, problem.samples, max(1, count // 2) if others else count)
    # What refused everything reduced shows what is wrong with it; the search set may not.
    refused = unseen.refused.samples if unseen.refused is not None else ()
    missed = evenly(refused, min(len(refused), -(-(count - len(first)) // 2)))
    if not missed:
        # An error may show on one input only: in positions beyond 256, say. Infinite scores are
        # equal, so that none of them is the worst.
        worst = _worst(problem, context, others, 1)
        missed = [s for s in worst if math.isfinite(_score(problem, context, s, math.inf))]
    left = [s for s in others if s not in missed]
    copies = [*missed, *evenly(left, max(0, count - len(first) - len(missed)))]
    # Where FP32 misses, so does each layer alone.
    fp32 = all_in_fp32(problem, problem.base) if set_size(problem) == 1 else None
    return (*first, *decided_by_pins(problem, context, [context.evaluator], fp32, copies))


def _worst(
    problem: Problem, context: Context, samples: Sequence[Sample], most: int
) -> list[Sample]:
    """At most ``most`` of ``samples`` with the largest scores; of equal ones some, spread."""
    by_score: dict[float, list[Sample]] = {}
    for sample in samples:
        score = _score(problem, context, sample, math.inf)
        by_score.setdefault(math.inf if math.isnan(score) else score, []).append(sample)
    chosen: list[Sample] = []
    for score in sorted(by_score, reverse=True):
        chosen += evenly(by_score[score], most - len(chosen))
    return chosen
