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
from bisect_trt.steps.sensitivity import Sensitivity, measure_sensitivity, time_allowed
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import next_test, set_size, spared


@dataclass(frozen=True)
class UnseenInputs:
    """What a validated search begins with: its ``samples``, what everything reduced shows on them
    (``reduced``), and what else ``refused`` it.

    ``validation`` is there if everything reduced is validated as it is.
    """

    samples: SearchSamples
    reduced: Evaluation
    refused: Refusal | None
    validation: Validation | None


_GLANCE = 4
"""Copies of each kind that everything reduced passes before it is tested; the rest of the search
set is for the search, which there may be none of."""


def look_beyond(problem: Problem, context: Context, emulated: Baselines) -> UnseenInputs:
    """Run everything reduced on some of the search set; where it passes those, on new copies; where
    these refuse it, on the rest of the search set.
    """
    context.observer.step("unseen inputs")
    # An engine has a word of its own: its emulators need not be asked for the last one.
    decides = context.engine is None and emulated.reduced.verdict.passed
    if decides:
        few = search_samples(problem, context, _GLANCE)
        found = _on(problem, context, few)
        if found.verdict.passed:
            against, validation = _tested(problem, context)
            if validation is not None:
                return UnseenInputs(few, found, None, validation)
            samples = search_samples(problem, context)
            return UnseenInputs(samples, _on(problem, context, samples), against, None)
    samples = search_samples(problem, context)
    reduced = _on(problem, context, samples)
    if not decides or not reduced.verdict.passed:
        return UnseenInputs(samples, reduced, None, None)
    against, validation = _tested(problem, context)
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


def _tested(problem: Problem, context: Context) -> tuple[Refusal | None, Validation | None]:
    """What on new copies refuses everything reduced, or on what it holds."""
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
    """The scores, in tolerances, of everything reduced and of everything but ``pins``, of the same
    inputs: those that everything reduced does worst on (:func:`worst_seen`). What copies score says
    nothing beside what the given inputs do.
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


_MOST_TRIED = 16
_SAID = "emulated on the given inputs"
_SHOWN = 4


def note_held(problem: Problem, context: Context, answer: PrecisionPlan) -> None:
    """Say which layers of ``--keep-fp32`` the answer does without.

    Likewise, how much better it would be with those of ``--keep-reduced`` in FP32.

    The first emulator tells, on the given inputs: an evaluation a held pin (sixteen at most) and
    one for the rest. Where it does not pass the answer itself, as it need not where an engine
    decides, it has nothing to say.
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
        tried = held[:_MOST_TRIED]
        plans = [base.with_pins(answer.pinned - {name}) for name in tried]
        results = context.evaluator.evaluate_many(plans)
        needless = [n for n, r in zip(tried, results, strict=True) if r.verdict.passed]
        said = "none could be left out"
        if needless:
            said = f"the set passes without {some_of(needless, _SHOWN)}, each alone"
        asked = "" if len(tried) == len(held) else f" ({_MOST_TRIED} of them were tried)"
        context.note(
            Finding(
                "held",
                held[0],
                f"--keep-fp32 holds {counted(len(held), 'layer')}{asked}; {_SAID} {said}",
            )
        )
    if problem.kept_reduced:
        full = context.evaluator.evaluate(base.with_pins(answer.pinned | problem.kept_reduced))
        context.note(
            Finding(
                "held",
                min(problem.kept_reduced),
                f"--keep-reduced holds {counted(len(problem.kept_reduced), 'layer')}; {_SAID} the "
                "set uses "
                f"{times(shown.score)}, with them pinned too {times(full.score)}",
            )
        )


def blame_reduced(problem: Problem, every: Evaluation) -> str:
    """What to add where even all other pins miss the requirement; empty where nothing is held, or
    where ``every`` layer pinned misses it too.
    """
    if not problem.kept_reduced or not every.verdict.passed:
        return ""
    return (
        f" With what --keep-reduced holds pinned too the requirement is met ({times(every.score)})."
    )


_MOST_RANKED, _FEWEST_RANKED, _RANKED_ROWS = 8, 2, 800
"""Layers are ranked over as many samples as make so many rows: by count and not by the clock, so
that the same command gives the same answer. Four or eight samples rank the text models' layers no
better than two (benchmarks/results/search.md)."""

_ROW = 0.5
"""A row takes about half an inference: it starts at its layer, and some are made side by side."""

_NEAREST, _NEAR, _MOST_ASKED = 2, 0.5, 64
"""So many layers are asked about on all given inputs, from this share of the tolerance on, where
the inputs are no more than that: it decides what the cause is called, and no pin."""

_SHARE_OF_TIME = 0.4
"""Of what a run's budget leaves for the search."""


def measure_each_alone(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    unseen: UnseenInputs | None,
    suspicion: Mapping[str, float],
    heavy: frozenset[str],
) -> Sensitivity:
    """What each layer does alone, of those for which there is time: the most suspicious first.

    Beyond the given inputs what overflows by itself, or by a constant as the ``heavy`` ones do, is
    pinned meanwhile, for the others' effects to be seen.
    """
    samples = ranked_on(problem, context, unseen)
    seconds = emulated.evaluation_seconds(len(problem.samples))
    # By the clock a busy machine's rows would not fit: of 279 layers 95 were measured where there
    # is time for all of them, and all were pinned where 6 are enough.
    usual = min(seconds, context.pace.usual_seconds)
    budget_s = time_allowed(len(problem.names) * len(samples) * usual * _ROW)
    budget_s = min(budget_s, max(0.0, _SHARE_OF_TIME * context.time.left_s))
    reduced = problem.base
    if unseen is not None:
        finite = emulated.layers["introduced_finite"].astype(bool)
        overflowing = heavy.union(str(n) for n in emulated.layers.loc[~finite, "layer"])
        reduced = reduced.with_pins(overflowing.intersection(problem.names))
    return measure_sensitivity(problem, context, suspicion, samples, reduced, budget_s, seconds)


def nearest_on_all(
    problem: Problem, context: Context, base: PrecisionPlan, sensitivity: Sensitivity
) -> Sensitivity:
    """``sensitivity`` with the scores on all given inputs of the layers that come nearest to
    missing the requirement alone on those that were measured, where none was seen to: the one on
    which a layer does may not be among so few.
    """
    if sensitivity.must_pin or len(problem.samples) > _MOST_ASKED:
        return sensitivity
    scores = dict(sensitivity.scores)
    # Equal scores stay in the network's order: names must not decide.
    near = sorted(
        (n for n in problem.names if scores.get(n, 0.0) >= _NEAR), key=lambda n: -scores[n]
    )
    names = problem.kept_reduced.union(problem.names)
    for name in near[:_NEAREST]:
        found = context.evaluator.evaluate(base.with_pins(names - {name}))
        scores[name] = max(scores[name], found.score)
    return replace(sensitivity, scores=scores)


def layers_seen(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    sensitivity: Sensitivity,
) -> pd.DataFrame:
    """The table of the layers; of one that breaks alone on another input than those of the table it
    says what it says of it there.
    """
    layers = emulated.layers
    finite = set(layers.loc[layers["introduced_finite"].astype(bool), "layer"])
    broken = sensitivity.breaks & finite
    samples = [s for s in sensitivity.samples if _breaks(problem, context, s)]
    if not broken or not samples:
        return layers
    there = trace_layers(problem, context, evenly(samples, MOST_TRACED)).set_index("layer")
    columns = ["introduced_finite", "overflows", "underflows"]
    rows = layers["layer"].isin(broken)
    layers = layers.copy()
    layers.loc[rows, columns] = there.loc[layers.loc[rows, "layer"], columns].to_numpy()
    return layers


def _breaks(problem: Problem, context: Context, sample: Sample) -> bool:
    """Whether everything reduced gives values there that are not finite."""
    found = context.evaluator.known(problem.base, sample)
    return found is not None and math.isinf(found.score)


def ranked_on(
    problem: Problem, context: Context, unseen: UnseenInputs | None
) -> tuple[Sample, ...]:
    """The samples on which each layer alone is measured: the given ones that everything reduced
    does worst on, for where it is hardly noticed no layer's effect is seen, and copies, spread over
    their kinds, among them what refused everything reduced.
    """
    if unseen is None:
        return problem.samples
    of_each = _worst_of_each(problem, context, problem.samples)
    count = max(ranked_count(len(problem.layers)), min(_MOST_RANKED, 2 * len(of_each)))
    # From the end: augmented inputs disturb more than perturbed copies do.
    others = [*reversed(unseen.samples.augmented), *reversed(unseen.samples.perturbed)]
    most = max(1, count // 2) if others else count
    first = [*of_each[:most], *_worst(problem, context, problem.samples, most)]
    first = list({s.digest: s for s in first}.values())[:most]
    # What refused everything reduced shows what is wrong with it; the search set may not.
    refused = unseen.refused.samples if unseen.refused is not None else ()
    missed = evenly(refused, min(len(refused), -(-(count - len(first)) // 2)))
    # What everything reduced does worst on may be seen on no other: positions beyond 256, say. Of
    # infinities none is the worst.
    worst = _worst(problem, context, others, 1) if not missed else []
    known = [context.evaluator.known(problem.base, s) for s in worst]
    worst = worst if all(k is not None and math.isfinite(k.score) for k in known) else []
    left = [s for s in others if s not in worst]
    copied = [*missed, *worst, *evenly(left, max(0, count - len(first) - len(missed) - len(worst)))]
    # Where FP32 misses, so does each layer alone.
    every = all_in_fp32(problem, problem.base) if set_size(problem) == 1 else None
    return (*first, *told_by_pins(problem, context, [context.evaluator], every, copied))


def _worst_of_each(problem: Problem, context: Context, samples: Sequence[Sample]) -> list[Sample]:
    """Of each of several conditions that everything reduced misses, the sample that does so by
    most, each once: one that changes a decision may be far from missing a tolerance.
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
        found = context.evaluator.known(problem.base, sample)
        score = math.inf if found is None or math.isnan(found.score) else found.score
        by_score.setdefault(score, []).append(sample)
    chosen: list[Sample] = []
    for score in sorted(by_score, reverse=True):
        chosen += evenly(by_score[score], most - len(chosen))
    return chosen


def ranked_count(layers: int) -> int:
    """On how many samples of a search set so many layers are measured, each alone."""
    return max(_FEWEST_RANKED, min(_MOST_RANKED, _RANKED_ROWS // max(1, layers)))
