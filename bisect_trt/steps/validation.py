"""Validates a plan on inputs that the search has not used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import CONFIDENCE, InputKind, Tally, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import RECENT_BYTES, Sample
from bisect_trt.evaluate.cache import Row
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
    REFUSED_TIME_S,
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
_ENGINE_CHUNK = 64
_CHUNK_BYTES = 16 << 20
"""How many samples go to one judge after the other: more to engines, whose workers cost a turn."""

_SAMPLES_AHEAD = 2
"""Samples are made while those before them are in work."""


def put_to_test(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    test: ValidationTest,
    limit: float,
) -> tuple[Refusal | None, Validation | None]:
    """What speaks against ``plan`` (:func:`first_refusal`), or else on what it holds.

    By emulation, copies that FP32 as a whole misses too speak against no plan, and are counted.
    """
    copies = ValidationCopies(problem, context, judges, test)
    every = None if context.engine in judges else all_in_fp32(problem, plan)
    against = first_refusal(problem, context, judges, plan, copies, limit)
    aside = dict.fromkeys(InputKind, 0)
    while against is not None and every is not None and against.kind is not InputKind.GIVEN:
        left = decided_by_pins(problem, context, judges, every, against.samples)
        of_no_pins = {s.digest for s in against.samples}.difference(s.digest for s in left)
        if not of_no_pins:
            break
        copies.without |= of_no_pins
        seen = against.tested + aside[against.kind]
        aside[against.kind] += len(of_no_pins) // set_size(problem)
        if aside[against.kind] > test.misses:  # no plan passes: a slow model's test ends sooner
            seconds, least = context.pace.usual_seconds, min(seen, test.copies)
            copies.test = test.within(problem, seconds, REFUSED_TIME_S, least)
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
    """Everything that is claimed of ``plan``, tested."""
    copies = ValidationCopies(problem, context, judges, test)
    # Of what a budget has left no kind leaves nothing to the next, and the report comes after.
    return _measured(problem, context, judges, plan, copies, of_rest=0.8)


def first_refusal(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: ValidationCopies,
    limit: float,
) -> Refusal | None:
    """What speaks against ``plan``, the given inputs first; None where nothing does.

    It ends with the first miss too many. What the first judge refuses the others are not asked.
    """
    size, test = set_size(problem), copies.test
    for asked in dict.fromkeys((1, len(judges))):
        some = judges[:asked]
        against = refused_by(problem, context, some, plan, limit)
        if against is not None:
            return against
        for kind in copies.kinds:
            made, worst_of = copies.of(kind), WorstOf(context, some, plan)
            found, missed = worst_of.judge(made, size=size, limit=limit, misses=test.misses)
            tested, misses = len(found.results), found.missed(limit)
            may = test.may_miss(problem, tested)
            if misses > may:
                spares = may if problem.settings.pick is not None else 0
                return Refusal(kind, missed, tested, found.score(spares))
    return None


def refused_by(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    limit: float,
) -> Refusal | None:
    """The given inputs that speak against ``plan``; None if enough of them meet the requirement."""
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
            # A few samples are in memory at a time.
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
            # Half a test is none. Of a measurement what was tested counts: the clock that ended it
            # knows no outcome.
            if math.isfinite(limit):
                raise
        return SearchSetResult(self._plan, tuple(names), tuple(results)), tuple(missed)

    def _on(
        self, chunk: Sequence[Sample], size: int, limit: float, misses: int
    ) -> Iterator[tuple[str, SampleResult]]:
        """The name and the worst result of each set, as far as the last judge came."""
        found: list[SearchSetResult] = []
        for judge in self._judges:
            plan = self._context.plan_for(judge, self._plan)
            found.append(judge.judge(plan, chunk, limit=limit, misses=misses, size=size))
            # What refuses a plan ends it for the next judge too.
            chunk = chunk[: len(found[-1].results) * size]
        by_judge = zip(*(one.results for one in found), strict=False)
        for name, results in zip(found[0].names, by_judge, strict=False):
            yield name, max(results, key=lambda r: (not meets(r, limit), r.score))

    def _chunks(self, samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
        """``samples`` in whole sets, as many at once as the judges like."""
        context, stream = self._context, iter(samples)
        for first in stream:
            each = max(1, first.nbytes)
            if context.engine in self._judges:
                at_once = _ENGINE_CHUNK
            elif context.in_turn:
                at_once = min(context.samples_a_turn, max(_CHUNK, _CHUNK_BYTES // each))
            else:
                # What is made for the reference is still there for the last judge.
                at_once = min(_CHUNK, max(_SAMPLES_AHEAD, RECENT_BYTES // each - _SAMPLES_AHEAD))
            yield [first, *islice(stream, -(-at_once // size) * size - 1)]


def _measured(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: ValidationCopies,
    of_rest: float = 1.0,
) -> Validation:
    """As :func:`validate`; a kind may spend ``of_rest`` of the time that is left."""
    size, test = set_size(problem), copies.test
    wanted_augmented = wanted_of_augmented(problem)
    worst_of = WorstOf(context, judges, plan)
    given = worst_of.judge(problem.samples, size=size)[0]
    alone = given.results
    if size > 1:  # each was run: nothing is run again; a metric of all of them is not of one
        singly = () if problem.requirements.tells_of_all else problem.samples
        alone = worst_of.judge(singly)[0].results
    holdout_size = size if size == 1 else max(1, len(problem.holdout))
    with context.time.part(of_rest):  # real inputs come first
        held_out = worst_of.judge(problem.holdout, size=holdout_size)[0]
    with context.time.part(0.5 * of_rest if of_rest < 1.0 and wanted_augmented else of_rest):
        perturbed = worst_of.judge(copies.of(InputKind.PERTURBED), size=size)[0]
    with context.time.part(of_rest):
        varied = worst_of.judge(copies.of(InputKind.AUGMENTED), size=size)[0]
    copied = [*perturbed.results, *varied.results]
    used_before = wanted_augmented > 0.0 and bool(context.augmented_before(test.stream))
    return Validation(
        given=holding(given, None),
        perturbed=holding(perturbed, test.confidence),
        augmented=holding(varied, test.confidence),
        holdout=holding(held_out, CONFIDENCE),
        wanted=wanted_of_unseen(problem),
        wanted_of_augmented=wanted_augmented,
        fitted=problem.settings.fitted,
        wanted_of_given=wanted_of_given(problem),
        set_size=size,
        prediction_limit=prediction_limit_of(problem, context, plan, alone, copied),
        holdout_size=holdout_size,
        has_margin=size > 1 or has_margin(problem, plan, copied),
        spent=used_before and size == 1 and not varied.results and context.time.left_s > 0.0,
        alike=len(problem.samples) + len(problem.holdout) < FEW_INPUTS
        and are_alike(problem, context),
    )


def are_alike(problem: Problem, context: Context) -> bool:
    """Whether something was said of inputs that are of one kind."""
    return context.noted(ALIKE) or any(f.kind == ALIKE for f in problem.findings)


def holding(search_set: SearchSetResult, confidence: float | None) -> Tally:
    """What ``search_set`` counts, bounded with ``confidence``; by nothing where that is None."""
    if not search_set.results:
        return Tally()
    passed, tested = search_set.passed(), len(search_set.results)
    bound = lower_bound(passed, tested, confidence) if confidence is not None else 0.0
    name, score = search_set.worst
    return Tally(passed, tested, bound, score, name)


def validation_as_known(
    problem: Problem, context: Context, plan: PrecisionPlan
) -> Validation | None:
    """What is known of ``plan`` on the given inputs, where there is no time; None if nothing is."""
    judges = [j for j in context.judges if _knows(j, context.plan_for(j, plan), problem.samples)]
    if context.judge not in judges:
        return None
    given = WorstOf(context, judges, plan).judge(problem.samples, size=set_size(problem))[0]
    return Validation(
        holding(given, None),
        Tally(),
        Tally(),
        Tally(),
        wanted_of_unseen(problem),
        wanted_of_augmented(problem),
        problem.settings.fitted,
        wanted_of_given(problem),
        set_size(problem),
        unfinished=True,
    )


def _knows(judge: Evaluator, plan: PrecisionPlan, samples: Sequence[Sample]) -> bool:
    """Whether nothing has to be run to say what ``plan`` shows on ``samples``."""
    return judge.knows(plan) and all(judge.known(plan, s) is not None for s in samples)


_TWO_ANSWERS = 2
"""A decision that scores no more values is the same or is not: nothing says how near the next
input's is to becoming another."""


def prediction_limit_of(
    problem: Problem,
    context: Context,
    plan: PrecisionPlan,
    given: Sequence[SampleResult],
    copies: Sequence[SampleResult],
) -> float:
    """What an unseen input may score; NaN where nothing was copied, infinite where nothing tells.

    No less than what a given input scores that must meet the requirement.
    """
    if not copies:
        return math.nan
    # Half of what may miss is left for what so few inputs tell wrongly of the rest.
    share = (1.0 + wanted_of_unseen(problem)) / 2.0
    if set_size(problem) > 1:
        return _of_sets(problem, plan, given, share)
    if _reduced(problem, plan) and not _shows_errors(copies):  # nothing was at stake in them
        return math.inf
    floor = min(_floor(problem, context), 1.0)
    scores = [copy.score - floor for copy in copies]
    if not given or not has_margin(problem, plan, copies):  # no time was left to run them
        return math.inf
    found = sorted((result.score for result in given), reverse=True)
    least = found[min(spared(problem, InputKind.GIVEN, len(found)), len(found) - 1)]
    return max(least, floor + limit_of_inputs(scores, len(problem.samples), share))


def has_margin(problem: Problem, plan: PrecisionPlan, copies: Sequence[SampleResult]) -> bool:
    """Whether scores of ``copies`` tell more than whether each holds."""
    # The margin of other conditions says nothing of a decision's own.
    decided = decided_outputs(problem.graph, _reduced(problem, plan))
    run = [copy for copy in copies if copy.values]
    for place, item in enumerate(problem.requirements.items):
        told = {copy.values[place] for copy in run}
        if item.own or is_decision(item.metric):
            if len(told) <= _TWO_ANSWERS:
                return False
            continue
        asked = [n for n in problem.graph.outputs if item.is_on(n, "i" if n in decided else "f")]
        for name in decided.intersection(asked):
            if len({copy.errors[name].max_abs for copy in run}) <= _TWO_ANSWERS:
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
    """What another set of as many inputs may score.

    Infinite where the given ones are fewer than would bound the share one by one (a rare kind of
    input is in few sets), and for a metric of all inputs at once.
    """
    requirements, count = problem.requirements, len(given)
    items, values = requirements.items, [result.values for result in given]
    wanted = wanted_of_unseen(problem)
    if count < copies_needed(wanted) or requirements.tells_of_all or not all(values):
        return math.inf
    decided = decided_outputs(problem.graph, _reduced(problem, plan))
    for item, column in zip(items, zip(*values, strict=True), strict=True):
        of_decided = not decided.isdisjoint([item.output] if item.output else problem.graph.outputs)
        unsaid = item.own or (of_decided and not is_decision(item.metric))
        if unsaid and len(set(column)) <= _TWO_ANSWERS:
            return math.inf
    # That no decision was another says little of the next: one that is takes part in the lot. Where
    # an input has hundreds (pixels, rows), their shares lie apart and tell it themselves.
    columns = [set(column) for column in zip(*values, strict=True)]
    alike = [
        is_decision(item.metric) and len(column) <= _TWO_ANSWERS
        for item, column in zip(items, columns, strict=True)
    ]
    if any(alike):
        worst = max(given, key=lambda result: result.score).values
        values.append(tuple(0.0 if same else v for same, v in zip(alike, worst, strict=True)))

    def score(places: Sequence[int]) -> float:
        return requirements.together([values[place] for place in places])

    return limit_of_sets(score, count, len(values), share)


def _floor(problem: Problem, context: Context) -> float:
    """What a reference scores beside itself: nothing, but by a metric of the user's."""
    if not any(item.own for item in problem.requirements.items):
        return 0.0
    sample = problem.samples[0]
    key = context.evaluator.key("floor", sample.digest)
    known = context.cache.recall(key)
    if known is not None:
        return float(known[0])
    exact = context.references.of(sample)
    floor = problem.requirements.score(exact, exact)
    context.cache.record_later(Row(key, "floor", floor))
    return floor
