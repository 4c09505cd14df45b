"""Validates a plan on inputs that the search has not used."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import CONFIDENCE, Finding, InputKind, Tally, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import MOST_BYTES, Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import SampleResult, SearchSetResult, meets
from bisect_trt.inputs.samples import ALIKE, FEW_INPUTS
from bisect_trt.metrics.decisions import is_decision
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.statistics import copies_needed, limit_of_inputs, limit_of_sets, lower_bound
from bisect_trt.model.outputs import decided_outputs
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal, missed_by_every
from bisect_trt.steps.validation_inputs import (
    TestCopies,
    ValidationTest,
    out_of_reach,
    set_size,
    spared,
    wanted_of_augmented,
    wanted_of_given,
    wanted_of_unseen,
)

_CHUNK, _FOR_ENGINES = 16, 64
"""So many samples go to one judge after the other; more where a judge's turn costs something, as an
engine's workers and the opening of sessions do."""

_CHUNK_BYTES = 16 << 20
"""Of a large chunk's samples."""

_AHEAD = 2
"""Samples are made while those before them are in work."""


def judge_all(
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    *,
    limit: float = math.inf,
    misses: int = 0,
    size: int = 1,
    of: int = 0,
) -> tuple[SearchSetResult, tuple[Sample, ...]]:
    """``plan`` on ``samples`` by every judge, the worst of them for each sample."""
    tally, began = _Tally(limit, size), time.perf_counter()
    search_set: Sequence[Sample] = ()
    stream = iter(samples)
    try:
        # A few samples are in memory at a time.
        for search_set in _chunks(context, judges, stream, size):
            left = misses - len(tally.missed) // size
            found: list[SearchSetResult] = []
            asked = search_set
            for judge in judges:
                its = context.plan_for(judge, plan)
                found.append(judge.judge(its, asked, limit=limit, misses=left, size=size))
                # What refuses a plan ends it for the next judge too.
                asked = asked[: len(found[-1].results) * size]
            tally.add(search_set, found[0].names, zip(*(f.results for f in found), strict=False))
            search_set = ()
            context.tell(
                _progress(len(tally.results), of, tally.violating, time.perf_counter() - began)
            )
            if math.isfinite(limit) and len(tally.missed) > misses * size:
                break
    except BudgetSpentError:
        if math.isfinite(limit):
            raise  # half a test is none
        # Where the time ends a measurement, what it has tested counts: the clock knows no outcome.
        if size == 1 and not judges[0].requirements.collective:
            _add_known(context, judges, plan, search_set, stream, tally)
    return SearchSetResult(plan, tuple(tally.names), tuple(tally.results)), tuple(tally.missed)


class _Tally:
    """The worst judge's result of each set of ``size`` samples; ``missed`` are samples that use
    more than ``limit`` tolerances, and ``violating`` counts sets that use more than 1.
    """

    def __init__(self, limit: float, size: int) -> None:
        self._limit, self._size = limit, size
        self.names: list[str] = []
        self.results: list[SampleResult] = []
        self.missed: list[Sample] = []
        self.violating = 0

    def add(
        self,
        samples: Sequence[Sample],
        names: Sequence[str],
        by_judge: Iterable[Sequence[SampleResult]],
    ) -> None:
        """Take what every judge found on each set, as far as the last one came."""
        for place, each in enumerate(by_judge):
            worst = max(each, key=lambda r: (not meets(r, self._limit), r.score))
            self.names.append(names[place])
            self.results.append(worst)
            self.violating += not meets(worst, min(1.0, self._limit))
            if not meets(worst, self._limit):
                self.missed += samples[place * self._size : (place + 1) * self._size]


def _add_known(
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    search_set: Sequence[Sample],
    stream: Iterator[Sample],
    tally: _Tally,
) -> None:
    """Count what every judge was asked about before the time ended, up to the first sample that one
    was not: what one judge alone saw would count only where it missed. That it did is noted.
    """

    def known(sample: Sample) -> list[SampleResult]:
        found = (judge.known(context.plan_for(judge, plan), sample) for judge in judges)
        return [result for result in found if result is not None]

    counted = 0
    with suppress(BudgetSpentError):  # further copies are not made
        for sample in chain(search_set, stream):
            told = known(sample)
            if len(told) < len(judges):
                break
            tally.add([sample], [sample.name], [told])
            counted += 1
    missed = [
        (s.name, r.score) for s in search_set[counted:] for r in known(s) if not meets(r, 1.0)
    ]
    if missed:
        name, score = max(missed, key=lambda one: one[1])
        message = (
            f"the time ended before every judge was asked about {name}, which is not counted: by "
            f"one of them it misses ({times(score)})"
        )
        context.note(Finding("budget", name, message))


def _progress(done: int, of: int, violating: int, spent: float) -> str:
    """How far it is, in words; ``spent`` in seconds."""
    if not 0 < done < of:
        return f"{done} judged, {violating} violate"
    left = spent / done * (of - done)
    return f"{done} of {of} judged, {violating} violate, about {left:.0f} s left of these"


def _chunks(
    context: Context, judges: Sequence[Evaluator], samples: Iterable[Sample], size: int
) -> Iterator[list[Sample]]:
    """``samples`` in whole sets of ``size``, so many at once as the judges like."""
    stream = iter(samples)
    for first in stream:
        each = max(1, first.nbytes)
        if context.engine in judges:
            at_once = _FOR_ENGINES
        elif context.in_turn:
            at_once = min(context.samples_a_turn, max(_CHUNK, _CHUNK_BYTES // each))
        else:
            # What is made for the reference is still there for the last judge.
            at_once = min(_CHUNK, max(_AHEAD, MOST_BYTES // each - _AHEAD))
        yield [first, *islice(stream, -(-at_once // size) * size - 1)]


_TWO_ANSWERS = 2
"""A decision that scores so many values at most is the same or is not: however often it is, nothing
says how near the next input's is to becoming another."""


def prediction_limit_of(
    problem: Problem,
    context: Context,
    plan: PrecisionPlan,
    given: Sequence[SampleResult],
    copies: Sequence[SampleResult],
) -> float:
    """In tolerances; NaN where nothing was copied, and infinite where nothing can be told. No less
    than what a given input scores that must meet the requirement.
    """
    if not copies:
        return math.nan
    # Half of what may miss is left for what so few inputs tell wrongly of the rest: at the share
    # itself 4 of 33 words from four inputs were wrong, and 5 of 54 from eight.
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
    # What is told of a margin by the conditions beside it says nothing of a decision's own.
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
    """What another set of as many inputs may score; infinite where the given ones are fewer than
    would bound the share one by one, and for a metric of all inputs at once. Of 24 inputs 4 of 20
    words were wrong: a percentile of so few is one of them, and a rare kind of input is in few.
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
    """What the first given input's reference scores beside itself: nothing, but by a metric of the
    user's.
    """
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


def first_refusal(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: TestCopies,
    limit: float,
) -> Refusal | None:
    """What speaks against ``plan``; None where nothing does. A plan that would just pass may be
    refused: a test that is going badly ends early.

    What the first judge refuses the others are not asked about. It is the same test: what misses by
    one of them misses.
    """
    size, test = set_size(problem), copies.test
    for asked in dict.fromkeys((1, len(judges))):
        some = judges[:asked]
        against = refused_by(problem, context, some, plan, limit)
        if against is not None:
            return against
        for kind in tuple(copies.kinds):
            found, missed = on_perturbed(
                context, some, plan, copies.of(kind), test, limit=limit, size=size
            )
            count, misses = len(found.results), found.missed(limit)
            # Without a miss the first look is enough; where no more could be made fewer tell.
            may = test.misses if count >= test.copies else test.may_miss(count, problem)
            if misses > may or (misses > test.may_miss_first and count < test.copies):
                spares = may if problem.settings.pick is not None and misses > may else 0
                return Refusal(kind, missed, max(count, copies.seen(kind)), found.score(spares))
            copies.hear(kind, found)
    return None


def refused_by(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    limit: float,
    given: Sequence[Sample] | None = None,
) -> Refusal | None:
    """The given inputs that speak against ``plan``; None if enough of them meet the requirement."""
    given = problem.samples if given is None else given
    size = min(set_size(problem), len(given))
    may = spared(problem, InputKind.GIVEN, len(given)) if size == 1 else 0
    found, missed = judge_all(
        context, judges, plan, given, limit=limit, misses=may, size=size, of=len(given) // size
    )
    if found.missed(limit) <= may:
        return None
    # What must come down is the worst of those that are not spared.
    return Refusal(InputKind.GIVEN, missed, len(found.results), found.score(may))


def on_perturbed(
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    test: ValidationTest,
    *,
    limit: float = math.inf,
    size: int,
) -> tuple[SearchSetResult, tuple[Sample, ...]]:
    """What :func:`judge_all` finds on a kind's copies: on ``enough`` of them where none missed,
    else on all. Where ``limit`` makes it a test, until so many did that it is refused.
    """
    stream = iter(samples)
    first = islice(stream, test.enough * size)
    few, enough = test.may_miss_first, test.enough
    found, missed = judge_all(
        context, judges, plan, first, limit=limit, misses=few, size=size, of=enough
    )
    seen = found.missed(min(1.0, limit))
    ended = len(found.results) < test.enough  # no more samples, or no more time
    if seen == 0 or ended or (math.isfinite(limit) and seen > test.may_miss_first):
        return found, missed
    left = test.misses - seen
    further = test.copies - enough
    rest = islice(stream, further * size)
    more, others = judge_all(
        context, judges, plan, rest, limit=limit, misses=left, size=size, of=further
    )
    together = SearchSetResult(plan, found.names + more.names, found.results + more.results)
    return together, missed + others


_OF_REST = 0.8
"""The part of the time that is left which a kind may spend; the report comes after."""


def put_to_test(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    test: ValidationTest,
    limit: float,
    every: PrecisionPlan | None = None,
) -> tuple[Refusal | None, Validation | None]:
    """What speaks against ``plan`` (:func:`first_refusal`), or else on what it holds. Copies that
    ``every`` layer pinned misses too speak against no plan; they are counted. Where there are more
    of them than may miss, no plan passes, and a slow model's test ends sooner.
    """
    copies = TestCopies(problem, context, judges, test)
    against = first_refusal(problem, context, judges, plan, copies, limit)
    aside = dict.fromkeys(InputKind, 0)
    while against is not None and every is not None:
        of_no_pins = missed_by_every(problem, context, plan, every, against)
        if not of_no_pins:
            break
        copies.without |= of_no_pins
        seen = max(against.tested + aside[against.kind], *map(copies.seen, copies.kinds))
        aside[against.kind] += len(of_no_pins) // set_size(problem)
        if aside[against.kind] > copies.test.misses:
            copies.test = out_of_reach(copies.test, problem, context.pace.usual_seconds, seen)
        against = first_refusal(problem, context, judges, plan, copies, limit)
    copies.without.clear()
    validation = _measured(problem, context, judges, plan, copies) if against is None else None
    return against, validation


def validate(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    test: ValidationTest,
) -> Validation:
    """Everything that is claimed of ``plan``, tested."""
    copies = TestCopies(problem, context, judges, test)
    return _measured(problem, context, judges, plan, copies, of_rest=_OF_REST)


def _measured(
    problem: Problem,
    context: Context,
    judges: Sequence[Evaluator],
    plan: PrecisionPlan,
    copies: TestCopies,
    of_rest: float = 1.0,
) -> Validation:
    """As :func:`validate`; a kind may spend ``of_rest`` of the time that is left."""
    size, test = set_size(problem), copies.test
    set_count = len(problem.samples) // size
    given = judge_all(context, judges, plan, problem.samples, size=size, of=set_count)[0]
    alone = given.results
    if size > 1:  # each was run: nothing is run again; a metric of all of them is not of one
        singly = () if problem.requirements.tells_of_all else problem.samples
        alone = judge_all(context, judges, plan, singly)[0].results
    apart = size if size == 1 else max(1, len(problem.holdout))
    several = len(problem.holdout) // apart
    # Where there is a budget none of the kinds leaves nothing to the next; real inputs come first.
    with context.time.part(of_rest):
        held_out = judge_all(context, judges, plan, problem.holdout, size=apart, of=several)[0]
    both = of_rest < 1.0 and wanted_of_augmented(problem) > 0.0
    with context.time.part(0.5 * of_rest if both else of_rest):
        perturbed = on_perturbed(
            context, judges, plan, copies.of(InputKind.PERTURBED), test, size=size
        )[0]
    with context.time.part(of_rest):
        varied = on_perturbed(
            context, judges, plan, copies.of(InputKind.AUGMENTED), test, size=size
        )[0]
    all_copied = [*perturbed.results, *varied.results]
    known = wanted_of_augmented(problem) > 0.0 and bool(context.augmented_before(test.stream))
    spent = known and size == 1 and not varied.results and context.time.left_s > 0.0
    return Validation(
        given=holding(given, None),
        perturbed=holding(perturbed, test.confidence),
        augmented=holding(varied, test.confidence),
        holdout=holding(held_out, CONFIDENCE),
        wanted=wanted_of_unseen(problem),
        wanted_of_augmented=wanted_of_augmented(problem),
        fitted=problem.settings.fitted,
        wanted_of_given=wanted_of_given(problem),
        set_size=size,
        prediction_limit=prediction_limit_of(problem, context, plan, alone, all_copied),
        holdout_size=apart,
        has_margin=size > 1 or has_margin(problem, plan, all_copied),
        copies=(test.stream, test.copies * size),
        spent=spent,
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
    """What is known of ``plan`` where there is no time to run it: that it was run on the given
    inputs; None where it was not.
    """
    judges = [j for j in context.judges if _knows(j, context.plan_for(j, plan), problem.samples)]
    if context.judge not in judges:
        return None
    given = judge_all(context, judges, plan, problem.samples, size=set_size(problem))[0]
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
