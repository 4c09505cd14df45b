"""Validates a plan on inputs that the search has not used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import CONFIDENCE, InputKind, Tally, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import RECENT_BYTES, Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import SampleResult, SearchSetResult, meets
from bisect_trt.inputs.samples import ALIKE, FEW_INPUTS
from bisect_trt.metrics.decisions import is_decision
from bisect_trt.metrics.statistics import copies_needed, limit_of_inputs, limit_of_sets, lower_bound
from bisect_trt.model.outputs import decided_outputs
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal, all_in_fp32, decided_by_pins
from bisect_trt.steps.validation_inputs import (
    ValidationCopies,
    ValidationTest,
    next_test,
    set_size,
    spared,
    wanted_of_augmented,
    wanted_of_given,
    wanted_of_unseen,
)

_CHUNK = 16
"""The most samples that pass from one emulator to the other at once, to bound memory."""


def put_to_test(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    test: ValidationTest,
    limit: float,
) -> tuple[Refusal | None, Validation | None]:
    """The refusal of ``plan`` (:func:`first_refusal`), or else its validation.

    By emulation, copies that FP32 as a whole misses too refuse no plan, but count as missed.
    """
    copies = ValidationCopies(problem, context, judges, test)
    every = None if context.engine in judges else all_in_fp32(problem, plan)
    against = first_refusal(problem, context, judges, plan, copies, limit)
    aside = dict.fromkeys(InputKind, 0)
    while against is not None and every is not None and against.kind is not InputKind.GIVEN:
        left = decided_by_pins(problem, context, judges, every, against.samples)
        hopeless = {s.digest for s in against.samples}.difference(s.digest for s in left)
        if not hopeless:
            break
        copies.without |= hopeless
        tested = against.tested + aside[against.kind]
        aside[against.kind] += len(hopeless) // set_size(problem)
        if aside[against.kind] > test.misses:  # no plan passes: a slow model's test ends sooner
            seconds, least = context.pace.usual_seconds, min(tested, test.copies)
            limit_s = problem.settings.limits.refused_time_s
            copies.test = test.within(problem, seconds, limit_s, least)
        against = first_refusal(problem, context, judges, plan, copies, limit)
    if against is not None:
        return against, None
    copies.without.clear()
    return None, _measured(problem, context, judges, plan, copies)


def validate_next(
    problem: Problem, context: Context, plan: PrecisionPlan, limit: float = 1.0
) -> tuple[Refusal | None, Validation | None]:
    """As :func:`put_to_test`, by the run's judges and in the run's next validation."""
    test = next_test(problem, context)
    refusal, validation = put_to_test(problem, context, context.judges, plan, test, limit)
    if refusal is not None and context.engine is None:
        context.refused.add(plan)
    return refusal, validation


def validate(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    test: ValidationTest,
) -> Validation:
    """Validate ``plan`` on the given inputs, on the holdout and on new inputs."""
    copies = ValidationCopies(problem, context, judges, test)
    # A kind must leave some of the budget to the next one, and the last to the report.
    return _measured(problem, context, judges, plan, copies, time_share=0.8)


def validate_beside(
    problem: Problem, context: Context, plan: PrecisionPlan, usual_seconds: float
) -> Validation:
    """Validate a plan that stands beside the answer, in the time that a refused one has.

    ``usual_seconds`` is what one input takes.
    """
    limit_s = problem.settings.limits.refused_time_s
    test = next_test(problem, context).within(problem, usual_seconds, limit_s)
    return validate(problem, context, context.judges, plan, test)


def first_refusal(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: ValidationCopies,
    limit: float,
) -> Refusal | None:
    """The refusal of ``plan`` by given, then by new inputs; None where nothing refuses it.

    It ends with the first miss too many. The second judge runs only what the first one passes.
    """
    size, test = set_size(problem), copies.test
    for count in dict.fromkeys((1, len(judges))):
        some = judges[:count]
        against = refused_by(problem, context, some, plan, limit)
        if against is not None:
            return against
        for kind in copies.kinds:
            made, worst_of = copies.of(kind), WorstOf(context, some, plan)
            found, missed = worst_of.judge(made, size=size, limit=limit, misses=test.misses)
            tested, misses = len(found.results), found.missed(limit)
            may = test.may_miss(problem, tested)
            if misses > may:
                return Refusal(kind, missed, tested, found.score(0))
    return None


def refused_by(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    limit: float,
) -> Refusal | None:
    """The refusal of ``plan`` by given inputs; None if enough of them meet the requirement."""
    given = problem.samples
    size = min(set_size(problem), len(given))
    may = spared(problem, InputKind.GIVEN, len(given)) if size == 1 else 0
    worst_of = WorstOf(context, judges, plan)
    found, missed = worst_of.judge(given, size=size, limit=limit, misses=may)
    if found.missed(limit) <= may:
        return None
    # What must come down is the worst of those that are not spared.
    return Refusal(InputKind.GIVEN, missed, len(found.results), found.score(may))


class WorstOf:
    """Judges ``plan`` by all of ``judges``, and takes the worst of them for each sample."""

    def __init__(self, context: Context, judges: Sequence[Evaluator], plan: PrecisionPlan) -> None:
        self._context, self._judges, self._plan = context, judges, plan

    def judge(
        self,
        samples: Iterable[Sample],
        *,
        size: int = 1,
        limit: float = math.inf,
        misses: int = 0,
    ) -> tuple[SearchSetResult, tuple[Sample, ...]]:
        """The results of sets of ``size`` samples, and the samples that use more than ``limit``.

        A finite limit makes it a test, which ends with more than ``misses`` of these.
        """
        names: list[str] = []
        results: list[SampleResult] = []
        missed: list[Sample] = []
        violating = 0
        try:
            for chunk in self._chunks(samples, size):
                left = misses - len(missed) // size
                for place, (name, worst) in enumerate(self._on(chunk, size, limit, left)):
                    names.append(name)
                    results.append(worst)
                    violating += not meets(worst, min(1.0, limit))
                    if not meets(worst, limit):
                        missed += chunk[place * size : (place + 1) * size]
                self._context.tell(f"{len(results)} judged, {violating} violate")
                if math.isfinite(limit) and len(missed) > misses * size:
                    break
        except BudgetSpentError:
            # A test that ended early is biased by its misses. A measurement is not: it ended by the
            # clock, whatever the outcomes were.
            if math.isfinite(limit):
                raise
        return SearchSetResult(self._plan, tuple(names), tuple(results)), tuple(missed)

    def _on(
        self, chunk: Sequence[Sample], size: int, limit: float, misses: int
    ) -> Iterator[tuple[str, SampleResult]]:
        """The name and the worst result of each set that the last judge reached."""
        found: list[SearchSetResult] = []
        for judge in self._judges:
            plan = self._context.plan_for(judge, self._plan)
            found.append(judge.judge(plan, chunk, limit=limit, misses=misses, size=size))
            # A judge stops at the last miss allowed: the next one has no use for the rest.
            chunk = chunk[: len(found[-1].results) * size]
        by_judge = zip(*(one.results for one in found), strict=False)
        for name, results in zip(found[0].names, by_judge, strict=False):
            yield name, max(results, key=lambda r: (not meets(r, limit), r.score))

    def _chunks(self, samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
        """``samples`` in lists of whole sets, of a size that suits the judges."""
        context, stream = self._context, iter(samples)
        for first in stream:
            each = max(1, first.nbytes)
            if context.engine in self._judges:
                at_once = 64  # an engine's workers have a fixed cost for each list
            elif context.in_turn:
                at_once = min(context.samples_a_turn, max(_CHUNK, (16 << 20) // each))
            else:
                # Arrays made for the reference are then still in memory for the last judge, beside
                # two that are made ahead.
                at_once = min(_CHUNK, max(2, RECENT_BYTES // each - 2))
            yield [first, *islice(stream, -(-at_once // size) * size - 1)]


def _measured(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: ValidationCopies,
    time_share: float = 1.0,
) -> Validation:
    """As :func:`validate`; each kind may spend ``time_share`` of the time that is left."""
    size, test = set_size(problem), copies.test
    wanted_augmented = wanted_of_augmented(problem)
    worst_of = WorstOf(context, judges, plan)
    given = worst_of.judge(problem.samples, size=size)[0]
    alone = given.results if size == 1 else _one_by_one(problem, worst_of)
    holdout_size = size if size == 1 else max(1, len(problem.holdout))
    with context.time.part(time_share):  # real inputs come first
        held_out = worst_of.judge(problem.holdout, size=holdout_size)[0]
    # Perturbed and augmented inputs get equal parts of a budget.
    divided = 0.5 if time_share < 1.0 and wanted_augmented else 1.0
    with context.time.part(divided * time_share):
        perturbed = worst_of.judge(copies.of(InputKind.PERTURBED), size=size)[0]
    with context.time.part(time_share):
        augmented = worst_of.judge(copies.of(InputKind.AUGMENTED), size=size)[0]
    copied = [*perturbed.results, *augmented.results]
    used_before = wanted_augmented > 0.0 and bool(context.augmented_before(test.stream))
    return Validation(
        given=_tally(given, None),
        perturbed=_tally(perturbed, test.confidence),
        augmented=_tally(augmented, test.confidence),
        holdout=_tally(held_out, CONFIDENCE),
        wanted=wanted_of_unseen(problem),
        wanted_of_augmented=wanted_augmented,
        fitted=problem.settings.fitted,
        wanted_of_given=wanted_of_given(problem),
        set_size=size,
        prediction_limit=_prediction_limit(problem, context, plan, alone, copied),
        holdout_size=holdout_size,
        has_margin=size > 1 or _has_margin(problem, plan, copied),
        spent=used_before and size == 1 and not augmented.results and context.time.left_s > 0.0,
        alike=len(problem.samples) + len(problem.holdout) < FEW_INPUTS
        and (context.noted(ALIKE) or any(f.kind == ALIKE for f in problem.findings)),
    )


def _one_by_one(problem: Problem, worst_of: WorstOf) -> Sequence[SampleResult]:
    """The results of the given inputs one by one; none where a metric needs all of them."""
    samples = () if problem.requirements.tells_of_all else problem.samples
    return worst_of.judge(samples)[0].results


def _tally(search_set: SearchSetResult, confidence: float | None) -> Tally:
    """The counts of ``search_set``, with a lower bound where there is a ``confidence``."""
    if not search_set.results:
        return Tally()
    passed, tested = search_set.passed(), len(search_set.results)
    bound = lower_bound(passed, tested, confidence) if confidence is not None else 0.0
    name, score = search_set.worst
    return Tally(passed, tested, bound, score, name)


def validation_as_known(
    problem: Problem, context: Context, plan: PrecisionPlan
) -> Validation | None:
    """The validation of ``plan`` from evaluations on given inputs alone; None if there are none."""
    judges = [j for j in context.judges if _knows(j, context.plan_for(j, plan), problem.samples)]
    if context.judge not in judges:
        return None
    given = WorstOf(context, judges, plan).judge(problem.samples, size=set_size(problem))[0]
    return Validation(
        given=_tally(given, None),
        perturbed=Tally(),
        augmented=Tally(),
        holdout=Tally(),
        wanted=wanted_of_unseen(problem),
        wanted_of_augmented=wanted_of_augmented(problem),
        fitted=problem.settings.fitted,
        wanted_of_given=wanted_of_given(problem),
        set_size=set_size(problem),
        unfinished=True,
    )


def _knows(judge: Evaluator, plan: PrecisionPlan, samples: Sequence[Sample]) -> bool:
    """Whether ``judge`` has an evaluation of ``plan`` on each of ``samples``."""
    return judge.knows(plan) and all(judge.known(plan, s) is not None for s in samples)


def _prediction_limit(
    problem: Problem,
    context: Context,
    plan: PrecisionPlan,
    given: Sequence[SampleResult],
    copies: Sequence[SampleResult],
) -> float:
    """What an unseen input may score; NaN without copies, infinite where that is unknown.

    It is at least the score of a given input that must meet the requirement.
    """
    if not copies:
        return math.nan
    # Half of the misses allowed is left for the error of an estimate from so few inputs.
    share = (1.0 + wanted_of_unseen(problem)) / 2.0
    if set_size(problem) > 1:
        return _of_sets(problem, plan, given, share)
    if _reduced(problem, plan) and not _shows_errors(copies):  # nothing was at stake in them
        return math.inf
    floor = min(_floor(problem, context), 1.0)
    scores = [copy.score - floor for copy in copies]
    if not given or not _has_margin(problem, plan, copies):  # no time was left to run them
        return math.inf
    by_score = sorted((result.score for result in given), reverse=True)
    least = by_score[min(spared(problem, InputKind.GIVEN, len(given)), len(given) - 1)]
    return max(least, floor + limit_of_inputs(scores, len(problem.samples), share))


def _has_margin(problem: Problem, plan: PrecisionPlan, copies: Sequence[SampleResult]) -> bool:
    """Whether each condition scores ``copies`` by more than pass and fail."""
    # A decision with two scores is the same or not: nothing says how near the next one is to
    # becoming another. The margins of other conditions say nothing of it either.
    decided = decided_outputs(problem.graph, _reduced(problem, plan))
    run = [copy for copy in copies if copy.values]
    for place, item in enumerate(problem.requirements.items):
        if item.own or is_decision(item.metric):
            if len({copy.values[place] for copy in run}) <= 2:
                return False
            continue
        outputs = [n for n in problem.graph.outputs if item.is_on(n, "i" if n in decided else "f")]
        for name in decided.intersection(outputs):
            if len({copy.errors[name].max_abs for copy in run}) <= 2:
                return False
    return True


def _shows_errors(copies: Sequence[SampleResult]) -> bool:
    return any(e.max_abs or not e.finite for copy in copies for e in copy.errors.values())


def _reduced(problem: Problem, plan: PrecisionPlan) -> frozenset[str]:
    names = (layer.name for layer in problem.layers)
    return frozenset(n for n in names if plan.precision_of(n) is not Precision.FP32)


def _of_sets(
    problem: Problem, plan: PrecisionPlan, given: Sequence[SampleResult], share: float
) -> float:
    """What another set of as many inputs may score; infinite where that is unknown.

    So it is for a metric of all inputs at once, and where the given inputs are too few to bound
    the share one by one: a rare kind of input is in few sets.
    """
    requirements, count = problem.requirements, len(given)
    items, values = requirements.items, [result.values for result in given]
    wanted = wanted_of_unseen(problem)
    if count < copies_needed(wanted) or requirements.tells_of_all or not all(values):
        return math.inf
    decided = decided_outputs(problem.graph, _reduced(problem, plan))
    for item, column in zip(items, zip(*values, strict=True), strict=True):
        of_decided = not decided.isdisjoint([item.output] if item.output else problem.graph.outputs)
        no_margin = item.own or (of_decided and not is_decision(item.metric))
        if no_margin and len(set(column)) <= 2:
            return math.inf
    # That no decision has changed yet says little of the next one, so the bootstrap also draws one
    # that has. An input with hundreds of decisions (pixels, rows) has a share that varies itself.
    columns = [set(column) for column in zip(*values, strict=True)]
    alike = [
        is_decision(item.metric) and len(column) <= 2
        for item, column in zip(items, columns, strict=True)
    ]
    if any(alike):
        worst = max(given, key=lambda result: result.score).values
        values.append(tuple(0.0 if same else v for same, v in zip(alike, worst, strict=True)))

    def score(places: Sequence[int]) -> float:
        return requirements.together([values[place] for place in places])

    return limit_of_sets(score, count, len(values), share)


def _floor(problem: Problem, context: Context) -> float:
    """The score of a reference against itself, which only a user's metric does not give as 0."""
    if not any(item.own for item in problem.requirements.items):
        return 0.0
    sample = problem.samples[0]

    def score() -> float:
        exact = context.references.of(sample)
        return problem.requirements.score(exact, exact)

    return float(context.recalled("floor", [sample.digest], score))
