"""On what a plan holds: the given inputs, fresh draws that no search has seen, inputs kept
apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.holds import CONFIDENCE, Holding, Holds, InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.case.coverage import ALIKE
from bisect_trt.stations.case.given_inputs import FEW_INPUTS
from bisect_trt.stations.draws.all_judges import judge_all
from bisect_trt.stations.draws.evidence import Refusal, missed_by_every
from bisect_trt.stations.draws.fresh_draws import Draws
from bisect_trt.stations.draws.fresh_test import (
    FreshTest,
    out_of_reach,
    set_size,
    wanted_of_given,
    wanted_of_unseen,
    wanted_of_variants,
)
from bisect_trt.stations.draws.reach import has_margin, reach
from bisect_trt.stations.draws.refused import first_refusal, on_draws

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
    ``every`` layer pinned misses too speak against no plan; they are counted. Where there are more
    of them than may miss, no plan passes, and a slow model's test ends sooner.

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
    against = first_refusal(case, bench, judges, plan, draws, limit)
    aside = dict.fromkeys(InputKind, 0)
    while against is not None and every is not None:
        of_no_pins = missed_by_every(case, bench, plan, every, against)
        if not of_no_pins:
            break
        draws.without |= of_no_pins
        seen = max(against.tested + aside[against.kind], *map(draws.seen, draws.kinds))
        aside[against.kind] += len(of_no_pins) // set_size(case)
        if aside[against.kind] > draws.test.misses:
            draws.test = out_of_reach(draws.test, case, bench.pace.usual_seconds, seen)
        against = first_refusal(case, bench, judges, plan, draws, limit)
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
        redrawn = on_draws(bench, judges, plan, draws.of(InputKind.REDRAWN), test, size=size)[0]
    with bench.time.part(of_rest):
        varied = on_draws(bench, judges, plan, draws.of(InputKind.VARIANTS), test, size=size)[0]
    copies = [*redrawn.results, *varied.results]
    known = wanted_of_variants(case) > 0.0 and bool(bench.variants_before(test.stream))
    spent = known and size == 1 and not varied.results and bench.time.left_s > 0.0
    return Holds(
        given=holding(given, None),
        redrawn=holding(redrawn, test.confidence),
        variants=holding(varied, test.confidence),
        holdout=holding(held_out, CONFIDENCE),
        wanted=wanted_of_unseen(case),
        wanted_of_variants=wanted_of_variants(case),
        fitted=case.settings.fitted,
        wanted_of_given=wanted_of_given(case),
        set_size=size,
        reach=reach(case, bench, plan, alone, copies),
        holdout_size=apart,
        has_margin=size > 1 or has_margin(case, plan, copies),
        draws=(test.stream, test.draws * size),
        spent=spent,
        alike=len(case.samples) + len(case.holdout) < FEW_INPUTS and are_alike(case, bench),
    )


def are_alike(case: Case, bench: Bench) -> bool:
    """Whether something was said of inputs that are of one kind."""
    return bench.noted(ALIKE) or any(f.kind == ALIKE for f in case.findings)


def holding(panel: PanelResult, confidence: float | None) -> Holding:
    """What ``panel`` counts, bounded with ``confidence``; by nothing where that is None."""
    if not panel.results:
        return Holding()
    passed, tested = panel.passed(), len(panel.results)
    bound = lower_bound(passed, tested, confidence) if confidence is not None else 0.0
    name, score = panel.worst
    return Holding(passed, tested, bound, score, name)
