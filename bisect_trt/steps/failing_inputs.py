"""Which inputs fail, alone and of those that were not given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.outcomes import Finding, Validation, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import Evaluation, SampleResult
from bisect_trt.metrics.requirements import times
from bisect_trt.steps.baselines import MOST_TRACED, Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.layer_errors import trace_layers
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import (
    Refusal,
    SearchSamples,
    all_in_fp32,
    search_samples,
    told_by_pins,
)
from bisect_trt.steps.sensitivity import Sensitivity, affordable, measure_sensitivity
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import next_test, set_size, spared


@dataclass(frozen=True)
class UnseenInputs:
    """What a validated search begins with: its ``samples``, and everything reduced on them.

    ``refused`` is what else spoke against everything reduced; ``validation`` is there if it is
    validated as it is.
    """

    samples: SearchSamples
    reduced: Evaluation
    refused: Refusal | None
    validation: Validation | None


_GLANCE = 4
"""Copies of each kind that everything reduced passes before it is validated: the rest of the search
set is for a search, and there may be none."""


def look_beyond(problem: Problem, context: Context, emulated: Baselines) -> UnseenInputs:
    """Run everything reduced on some of the search set, and validate it where it passes there.

    Where it does not, or new copies refuse it, it is run on the rest of the search set.
    """
    context.observer.step("unseen inputs")
    against = validation = None
    # An engine has a word of its own: its emulators need not be asked for the last one.
    decides = context.engine is None and emulated.reduced.verdict.passed
    if decides:
        few = search_samples(problem, context, _GLANCE)
        found = _on(problem, context, few)
        if found.verdict.passed:
            against, validation = _validated(problem, context)
            if validation is not None:
                return UnseenInputs(few, found, None, validation)
    samples = search_samples(problem, context)
    reduced = _on(problem, context, samples)
    if decides and against is None and reduced.verdict.passed:  # what some missed is spared
        against, validation = _validated(problem, context)
    return UnseenInputs(samples, reduced, against, validation)


def _on(problem: Problem, context: Context, samples: SearchSamples) -> Evaluation:
    """What everything reduced shows on ``samples``: the worst that is not spared."""
    results: list[SampleResult] = []
    score = 0.0
    for kind, those in samples.by_kind().items():
        found = context.evaluator.judge(problem.base, those, size=set_size(problem))
        results += found.results
        score = max(score, found.score(spared(problem, kind, len(those))))
    reduced = Evaluation.over(problem.base, context.evaluator.runner.name, results, score=score)
    if not reduced.verdict.passed:
        context.refused.add(problem.base)
    return reduced


def _validated(problem: Problem, context: Context) -> tuple[Refusal | None, Validation | None]:
    """What on new copies refuses everything reduced, or else what it holds on."""
    judges, test = [context.evaluator, context.second], next_test(problem, context)
    against, validation = put_to_test(problem, context, judges, problem.base, test, 1.0)
    if against is not None:
        context.refused.add(problem.base)
    return against, validation


def worst_seen(given: Evaluation, unseen: UnseenInputs | None) -> Evaluation:
    """Everything reduced where it does worst: on the ``given`` inputs, or on copies."""
    worst = given
    if unseen is not None and unseen.reduced.score > worst.score:
        worst = unseen.reduced
    refused = unseen.refused if unseen is not None else None
    if refused is not None and refused.score > worst.score:
        worst = replace(worst, score=refused.score, verdict=Verdict.FAIL)
    return worst


def with_pins_there(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    pins: frozenset[str],
    unseen: UnseenInputs | None,
) -> tuple[float, float]:
    """The scores of everything reduced, and of everything but ``pins``, on the same inputs.

    These are what everything reduced does worst on (:func:`worst_seen`).
    """
    given, pinned = context.evaluator.evaluate(problem.base), base.with_pins(pins)
    worst = worst_seen(given, unseen)
    kinds: Sequence[Sequence[Sample]] = ()
    if unseen is not None and worst is not given:
        kinds = (unseen.samples.perturbed, unseen.samples.augmented)
        if worst is not unseen.reduced and unseen.refused is not None:
            kinds = (unseen.refused.samples,)
    size = set_size(problem)
    found = [
        (result.score, those[place * size : (place + 1) * size])
        for those in kinds
        for place, result in enumerate(
            context.evaluator.judge(problem.base, those, size=size).results
        )
    ]
    if not found:
        return given.score, context.evaluator.evaluate(pinned).score
    # Those that are spared score more.
    score, asked = max(found, key=lambda one: (one[0] <= worst.score, one[0]))
    return score, context.evaluator.judge(pinned, asked, size=size).score()


_MAX_TRIED = 16
_SHOWN = 4


def note_held(problem: Problem, context: Context, answer: PrecisionPlan) -> None:
    """Say which layers of ``--keep-fp32`` the answer does without.

    Likewise, how much better it would be with those of ``--keep-reduced`` in FP32. The first
    emulator tells, on the given inputs; where it does not pass the answer itself, as it need not
    where an engine decides, it has nothing to say.
    """
    asked_for = problem.held_pins - problem.unsupported - problem.source_fp32
    if not asked_for and not problem.kept_reduced:
        return
    base = replace(problem.base, pin_precision=answer.pin_precision, held=frozenset())
    shown = context.evaluator.evaluate(base.with_pins(answer.pinned))
    if not shown.verdict.passed:
        return
    held = [x.name for x in problem.layers if x.name in asked_for]
    if held:
        tried = held[:_MAX_TRIED]
        plans = [base.with_pins(answer.pinned - {name}) for name in tried]
        results = context.evaluator.evaluate_many(plans)
        needless = [n for n, r in zip(tried, results, strict=True) if r.verdict.passed]
        said = "none could be left out"
        if needless:
            said = f"the set passes without {some_of(needless, _SHOWN)}, each alone"
        asked = "" if len(tried) == len(held) else f" ({_MAX_TRIED} of them were tried)"
        message = (
            f"--keep-fp32 holds {counted(len(held), 'layer')}{asked}; emulated on the given inputs "
            f"{said}"
        )
        context.note(Finding("held", held[0], message))
    if problem.kept_reduced:
        full = context.evaluator.evaluate(base.with_pins(answer.pinned | problem.kept_reduced))
        message = (
            f"--keep-reduced holds {counted(len(problem.kept_reduced), 'layer')}; emulated on the "
            f"given inputs the set uses {times(shown.score)}, with them pinned too "
            f"{times(full.score)}"
        )
        context.note(Finding("held", min(problem.kept_reduced), message))


def blame_reduced(problem: Problem, every: Evaluation) -> str:
    """What to add where all other pins miss the requirement, and ``every`` layer meets it."""
    if not problem.kept_reduced or not every.verdict.passed:
        return ""
    return (
        f" With what --keep-reduced holds pinned too the requirement is met ({times(every.score)})."
    )


_RANKED_ROWS = 800
_MAX_RANKED_SAMPLES = 8
_MIN_RANKED_SAMPLES = 2
"""Layers are ranked over as many samples as make so many rows: by count and not by the clock, so
that the same command gives the same answer."""

_SENSITIVITY_SHARE = 0.4
"""Of what a run's budget leaves for the search."""


def measure_each_alone(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    unseen: UnseenInputs | None,
    suspicion: Mapping[str, float],
    heavy: frozenset[str],
) -> Sensitivity:
    """What each layer does alone, of as many as there is time for: the most suspicious first.

    Beyond the given inputs what overflows by itself, or by a constant as the ``heavy`` ones do, is
    pinned meanwhile, for the others' effects to be seen.
    """
    samples = ranked_on(problem, context, unseen)
    seconds = len(samples) * context.pace.usual_seconds
    count = affordable(len(problem.names), seconds, _SENSITIVITY_SHARE * context.time.left_s)
    reduced = problem.base
    if unseen is not None:
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        reduced = reduced.with_pins(overflowing.intersection(problem.names))
    return measure_sensitivity(problem, context, suspicion, samples, reduced, count)


def nearest_on_all(
    problem: Problem, context: Context, base: PrecisionPlan, sensitivity: Sensitivity
) -> Sensitivity:
    """``sensitivity`` with the scores on all given inputs of the two layers nearest to missing.

    The input on which one misses alone may not be among those that were measured. It decides what
    the cause is called, and no pin.
    """
    if sensitivity.must_pin or len(problem.samples) > 64:
        return sensitivity
    scores = dict(sensitivity.scores)
    # Equal scores stay in the network's order: names must not decide.
    near = [name for name in problem.names if scores.get(name, 0.0) >= 0.5]
    near.sort(key=lambda name: -scores[name])
    names = problem.kept_reduced.union(problem.names)
    for name in near[:2]:
        found = context.evaluator.evaluate(base.with_pins(names - {name}))
        scores[name] = max(scores[name], found.score)
    return replace(sensitivity, scores=scores)


def layers_seen(
    problem: Problem, context: Context, emulated: Baselines, sensitivity: Sensitivity
) -> pd.DataFrame:
    """The table of the layers, with what breaks alone on other inputs than those of the table."""
    layers = emulated.layers
    finite = set(layers.loc[layers["introduced_finite"].astype(bool), "layer"])
    broken = sensitivity.breaks & finite
    samples = [s for s in sensitivity.samples if math.isinf(_score(problem, context, s, 0.0))]
    if not broken or not samples:
        return layers
    there = trace_layers(problem, context, evenly(samples, MOST_TRACED)).set_index("layer")
    columns = ["introduced_finite", "overflows", "underflows"]
    rows = layers["layer"].isin(broken)
    layers = layers.copy()
    layers.loc[rows, columns] = there.loc[layers.loc[rows, "layer"], columns].to_numpy()
    return layers


def _score(problem: Problem, context: Context, sample: Sample, unknown: float) -> float:
    """What everything reduced scores on ``sample``; ``unknown`` where nobody asked."""
    found = context.evaluator.known(problem.base, sample)
    return unknown if found is None else found.score


def ranked_on(
    problem: Problem, context: Context, unseen: UnseenInputs | None
) -> tuple[Sample, ...]:
    """The samples on which each layer alone is measured.

    These are the given inputs that everything reduced does worst on, for where it is hardly noticed
    no layer's effect is seen, and copies of each kind, among them what refused everything reduced.
    """
    if unseen is None:
        return problem.samples
    of_each = _worst_of_each(problem, context, problem.samples)
    count = max(ranked_count(len(problem.layers)), min(_MAX_RANKED_SAMPLES, 2 * len(of_each)))
    # From the end: augmented inputs disturb more than perturbed copies do.
    others = [*reversed(unseen.samples.augmented), *reversed(unseen.samples.perturbed)]
    most = max(1, count // 2) if others else count
    first = [*of_each[:most], *_worst(problem, context, problem.samples, most)]
    first = list({s.digest: s for s in first}.values())[:most]
    # What refused everything reduced shows what is wrong with it; the search set may not.
    refused = unseen.refused.samples if unseen.refused is not None else ()
    missed = evenly(refused, min(len(refused), -(-(count - len(first)) // 2)))
    if not missed:
        # What everything reduced does worst on may be seen on no other: positions beyond 256, say.
        # Of infinities none is the worst.
        worst = _worst(problem, context, others, 1)
        missed = [s for s in worst if math.isfinite(_score(problem, context, s, math.inf))]
    left = [s for s in others if s not in missed]
    copied = [*missed, *evenly(left, max(0, count - len(first) - len(missed)))]
    # Where FP32 misses, so does each layer alone.
    every = all_in_fp32(problem, problem.base) if set_size(problem) == 1 else None
    return (*first, *told_by_pins(problem, context, [context.evaluator], every, copied))


def ranked_count(layers: int) -> int:
    """On how many samples of a search set so many layers are measured, each alone."""
    fitting = min(_MAX_RANKED_SAMPLES, _RANKED_ROWS // max(1, layers))
    return max(_MIN_RANKED_SAMPLES, fitting)


def _worst_of_each(problem: Problem, context: Context, samples: Sequence[Sample]) -> list[Sample]:
    """Of each of several conditions that everything reduced misses, the sample that does by most.

    Each once: one that changes a decision may be far from missing a tolerance.
    """
    items = problem.requirements.items
    known = [(s, context.evaluator.known(problem.base, s)) for s in samples]
    values = [(s, found.values) for s, found in known if found is not None and found.values]
    chosen: dict[str, Sample] = {}
    for place, item in enumerate(items if len(items) > 1 else ()):
        scores = [item.score_of(of_one[place]) for _, of_one in values]
        missed = [score for score in scores if score > 1.0]
        if missed and item.metric not in problem.requirements.collective:
            sample = values[scores.index(max(missed))][0]
            chosen.setdefault(sample.digest, sample)
    return list(chosen.values())


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
