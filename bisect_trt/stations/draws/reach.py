"""What other inputs may score by what copies of the given ones do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.decided import decided_outputs
from bisect_trt.numerics.confidence import draws_needed
from bisect_trt.numerics.prediction import limit_of_sets, prediction_limit
from bisect_trt.numerics.requirements.decisions import is_decision
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import SampleResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size, spared, wanted_of_unseen

_TWO_ANSWERS = 2
"""A decision that scores so many values at most is the same or is not: however often it is, nothing
says how near the next input's is to becoming another."""


def reach(
    case: Case,
    bench: Bench,
    plan: PrecisionPlan,
    given: Sequence[SampleResult],
    copies: Sequence[SampleResult],
) -> float:
    """In tolerances; NaN where nothing was copied, and infinite where nothing can be told. No less
    than what a given input scores that must meet the requirement.

    Args:
        case: the given inputs, and what is asked for.
        bench: where their references are.
        plan: what they were run under.
        given: what each of the given inputs came to, taken alone.
        copies: what each copy of them came to, by all who judge; of sets what each set did.
    """
    if not copies:
        return math.nan
    # Half of what may miss is left for what so few inputs tell wrongly of the rest: at the share
    # itself 4 of 33 words from four inputs were wrong, and 5 of 54 from eight.
    share = (1.0 + wanted_of_unseen(case)) / 2.0
    if set_size(case) > 1:
        return _of_sets(case, plan, given, share)
    if _lowered(case, plan) and not _shows_errors(copies):  # nothing was at stake in them
        return math.inf
    floor = min(_floor(case, bench), 1.0)
    scores = [copy.score - floor for copy in copies]
    if not given or not has_margin(case, plan, copies):  # no time was left to run them
        return math.inf
    found = sorted((result.score for result in given), reverse=True)
    least = found[min(spared(case, InputKind.GIVEN, len(found)), len(found) - 1)]
    return max(least, floor + prediction_limit(scores, len(case.samples), share))


def has_margin(case: Case, plan: PrecisionPlan, copies: Sequence[SampleResult]) -> bool:
    """Whether scores of ``copies`` tell more than whether each holds.

    Args:
        case: what is asked for.
        plan: what they were run under.
        copies: what each copy of an input came to.
    """
    # What is told of a margin by the conditions beside it says nothing of a decision's own.
    decided = decided_outputs(case.graph, _lowered(case, plan))
    run = [copy for copy in copies if copy.values]
    for place, item in enumerate(case.requirements.items):
        told = {copy.values[place] for copy in run}
        if item.own or is_decision(item.metric):
            if len(told) <= _TWO_ANSWERS:
                return False
            continue
        asked = [n for n in case.graph.outputs if item.is_on(n, "i" if n in decided else "f")]
        for name in decided.intersection(asked):
            if len({copy.errors[name].max_abs for copy in run}) <= _TWO_ANSWERS:
                return False
    return True


def _shows_errors(copies: Sequence[SampleResult]) -> bool:
    return any(e.max_abs or not e.finite for copy in copies for e in copy.errors.values())


def _lowered(case: Case, plan: PrecisionPlan) -> frozenset[str]:
    names = (layer.name for layer in case.layers)
    return frozenset(n for n in names if plan.precision_of(n) is not Precision.FP32)


def _of_sets(case: Case, plan: PrecisionPlan, given: Sequence[SampleResult], share: float) -> float:
    """What another set of as many inputs may score; infinite where the given ones are fewer than
    would bound the share one by one, and for a metric of all inputs at once. Of 24 inputs 4 of 20
    words were wrong: a percentile of so few is one of them, and a rare kind of input is in few.
    """
    requirements, count = case.requirements, len(given)
    items, values = requirements.items, [result.values for result in given]
    wanted = wanted_of_unseen(case)
    if count < draws_needed(wanted) or requirements.tells_of_all or not all(values):
        return math.inf
    decided = decided_outputs(case.graph, _lowered(case, plan))
    for item, column in zip(items, zip(*values, strict=True), strict=True):
        of_decided = not decided.isdisjoint([item.output] if item.output else case.graph.outputs)
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


def _floor(case: Case, bench: Bench) -> float:
    """What the first given input's reference scores beside itself: nothing, but by a metric of the
    user's.
    """
    if not any(item.own for item in case.requirements.items):
        return 0.0
    sample = case.samples[0]
    key = bench.prober.key("floor", sample.digest)
    known = bench.journal.recall(key)
    if known is not None:
        return float(known[0])
    exact = bench.references.of(sample)
    floor = case.requirements.score(exact, exact)
    bench.journal.record_later(Row(key, "floor", floor))
    return floor
