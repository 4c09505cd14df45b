"""On what a plan holds: the given inputs, fresh draws that no search has seen, inputs kept
apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from bisect_trt.core.holds import CONFIDENCE, Holding, Holds, InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.all_judges import judge_all
from bisect_trt.stations.draws.evidence import Refusal, missed_by_every
from bisect_trt.stations.draws.fresh_draws import Draws
from bisect_trt.stations.draws.fresh_test import (
    FreshTest,
    set_size,
    spared,
    wanted_of_unseen,
    wanted_of_variants,
)
from bisect_trt.stations.draws.reach import has_margin, reach

_OF_REST = 0.8
"""The part of the time that is left which a kind may spend; the report comes after."""


def put_to_test(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    test: FreshTest,
    limit: float,
    every: PrecisionPlan | None = None,
) -> tuple[Refusal | None, Holds | None]:
    """What speaks against ``plan`` (:func:`first_refusal`), or else on what it holds. Draws that
    ``every`` layer pinned misses too speak against no plan; they are counted.

    Args:
        case: the given inputs, those kept apart, and what is asked for.
        bench: where the draws' references are.
        judges: who must pass each sample; the first is the one that is asked most cheaply.
        plan: with the precision that a pin really runs in, for the emulators.
        test: which draws, and the confidence of their bounds.
        limit: how many tolerances each may use, so as not to be refused.
        every: the plan with all layers pinned, where that is FP32 as a whole; None where nothing is
            known of it.
    """
    _foretell(bench, judges, plan, test)
    draws = Draws(case, bench, judges, test)
    against = _first_refusal(case, bench, judges, plan, draws, limit)
    while against is not None and every is not None:
        of_no_pins = missed_by_every(case, bench, plan, every, against)
        if not of_no_pins:
            break
        draws.without |= of_no_pins
        against = _first_refusal(case, bench, judges, plan, draws, limit)
    draws.without.clear()
    holds = _measured(case, bench, judges, plan, draws) if against is None else None
    return against, holds


def measure_holds(
    case: Case, bench: Bench, judges: Sequence[Prober], plan: PrecisionPlan, test: FreshTest
) -> Holds:
    """Everything that is claimed of ``plan``, tested.

    Args:
        case: the given inputs and those kept apart.
        bench: where the draws' references are.
        judges: who must pass each sample.
        plan: with the precision that a pin really runs in, for the emulators.
        test: which draws, and the confidence of their bounds.
    """
    _foretell(bench, judges, plan, test)
    draws = Draws(case, bench, judges, test)
    return _measured(case, bench, judges, plan, draws, of_rest=_OF_REST)


def _foretell(bench: Bench, judges: Sequence[Prober], plan: PrecisionPlan, test: FreshTest) -> None:
    if bench.prober in judges:
        bench.emulator.foretell(plan, test.enough)


def _measured(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    draws: Draws,
    of_rest: float = 1.0,
) -> Holds:
    """As :func:`measure_holds`; a kind may spend ``of_rest`` of the time that is left."""
    size, test = set_size(case), draws.test
    set_count = len(case.samples) // size
    given = judge_all(bench, judges, plan, case.samples, size=size, of=set_count)[0]
    alone = given.results
    if size > 1:  # each was run: nothing is run again; a metric of all of them is not of one
        singly = () if case.requirements.tells_of_all else case.samples
        alone = judge_all(bench, judges, plan, singly)[0].results
    apart = size if size == 1 else max(1, len(case.holdout))
    several = len(case.holdout) // apart
    # Where there is a budget none of the kinds leaves nothing to the next; real inputs come first.
    with bench.time.part(of_rest):
        held_out = judge_all(bench, judges, plan, case.holdout, size=apart, of=several)[0]
    both = of_rest < 1.0 and wanted_of_variants(case) > 0.0
    with bench.time.part(0.5 * of_rest if both else of_rest):
        redrawn = _tested(bench, judges, plan, draws.of(InputKind.REDRAWN), test, size=size)[0]
    with bench.time.part(of_rest):
        varied = _tested(bench, judges, plan, draws.of(InputKind.VARIANTS), test, size=size)[0]
    copies = [*redrawn.results, *varied.results]
    return Holds(
        given=holding(given, None),
        redrawn=holding(redrawn, test.confidence),
        variants=holding(varied, test.confidence),
        holdout=holding(held_out, CONFIDENCE),
        wanted=wanted_of_unseen(case),
        wanted_of_variants=wanted_of_variants(case),
        fitted=case.settings.fitted,
        wanted_of_given=1.0 if size > 1 else case.settings.share_of_given,
        set_size=size,
        reach=reach(case, bench, alone, copies),
        holdout_size=apart,
        has_margin=size > 1 or has_margin(case, copies),
        draws=(test.stream, test.draws * size),
    )


def first_refusal(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    test: FreshTest,
    limit: float,
) -> Refusal | None:
    """What speaks against ``plan``; None where nothing does, and :func:`measure_holds` says on what
    it holds. A plan that would just pass may be refused: a test that is going badly ends early.

    What the first judge refuses the others are not asked about. It is the same test: what misses by
    one of them misses.

    Args:
        case: the given inputs, and what is asked for.
        bench: where the draws' references are.
        judges: who must pass each sample; the first is the one that is asked most cheaply.
        plan: with the precision that a pin really runs in, for the emulators.
        test: which draws.
        limit: how many tolerances each may use.
    """
    draws = Draws(case, bench, judges, test)
    return _first_refusal(case, bench, judges, plan, draws, limit)


def _first_refusal(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    draws: Draws,
    limit: float,
) -> Refusal | None:
    """As :func:`first_refusal`."""
    for asked in dict.fromkeys((1, len(judges))):
        against = _refused(case, bench, judges[:asked], plan, draws, limit)
        if against is not None:
            return against
    return None


def _refused(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    draws: Draws,
    limit: float,
) -> Refusal | None:
    """As :func:`first_refusal`, by all of ``judges`` at a time; what one of them was asked before
    it knows.
    """
    against = refused_by(case, bench, judges, plan, limit)
    if against is not None:
        return against
    size, test = set_size(case), draws.test
    for kind in tuple(draws.kinds):
        found, missed = _tested(bench, judges, plan, draws.of(kind), test, limit=limit, size=size)
        count, misses = len(found.results), found.missed(limit)
        # Without a miss the first look is enough; where no more could be made fewer have to tell.
        may = test.misses if count >= test.draws else test.may_miss(count, case)
        if misses > may or (misses > test.may_miss_first and count < test.draws):
            spares = may if case.settings.pick is not None and misses > may else 0
            return Refusal(kind, missed, max(count, draws.seen(kind)), found.score(spares))
        draws.hear(kind, found)
    return None


def refused_by(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    limit: float,
    given: Sequence[Sample] | None = None,
) -> Refusal | None:
    """The given inputs that speak against ``plan``; None if enough of them meet the requirement.

    Args:
        case: the given inputs, and how many of them must.
        bench: knows which judge builds engines.
        judges: who must pass each.
        plan: with the precision that a pin really runs in, for the emulators.
        limit: how many tolerances each may use.
        given: some of the given inputs; None for all.
    """
    given = case.samples if given is None else given
    size = min(set_size(case), len(given))
    may = spared(case, InputKind.GIVEN, len(given)) if size == 1 else 0
    found, missed = judge_all(
        bench, judges, plan, given, limit=limit, misses=may, size=size, of=len(given) // size
    )
    if found.missed(limit) <= may:
        return None
    # What must come down is the worst of those that are not spared.
    return Refusal(InputKind.GIVEN, missed, len(found.results), found.score(may))


def _tested(
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    test: FreshTest,
    *,
    limit: float = math.inf,
    size: int,
) -> tuple[PanelResult, tuple[Sample, ...]]:
    """What :func:`judge_all` finds on a kind's draws: on ``enough`` of them where none missed, else
    on all. Where ``limit`` makes it a test, until so many did that it is refused.
    """
    stream = iter(samples)
    first = islice(stream, test.enough * size)
    few, enough = test.may_miss_first, test.enough
    found, missed = judge_all(
        bench, judges, plan, first, limit=limit, misses=few, size=size, of=enough
    )
    seen = found.missed(min(1.0, limit))
    ended = len(found.results) < test.enough  # no more samples, or no more time
    if seen == 0 or ended or (math.isfinite(limit) and seen > test.may_miss_first):
        return found, missed
    left = test.misses - seen
    further = test.draws - enough
    more, others = judge_all(
        bench, judges, plan, stream, limit=limit, misses=left, size=size, of=further
    )
    together = PanelResult(plan, found.names + more.names, found.results + more.results)
    return together, missed + others


def holding(panel: PanelResult, confidence: float | None) -> Holding:
    """What ``panel`` counts, bounded with ``confidence``; by nothing where that is None."""
    if not panel.results:
        return Holding()
    passed, tested = panel.passed(), len(panel.results)
    bound = lower_bound(passed, tested, confidence) if confidence is not None else 0.0
    name, score = panel.worst
    return Holding(passed, tested, bound, score, name)
