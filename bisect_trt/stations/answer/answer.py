"""The answer's plan, whoever found it, and on what it holds."""

from __future__ import annotations

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.finding import Finding
from bisect_trt.core.holds import Holds
from bisect_trt.core.machine.memory import give_back
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.answer.cut_short import best_so_far
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.draws.fresh_test import (
    MAX_TESTS,
    fitted,
    next_test,
    planned_test,
    shortened,
)
from bisect_trt.stations.draws.holds import measure_holds
from bisect_trt.stations.draws.holds_known import holds_as_known
from bisect_trt.stations.engine.steadiness import (
    begin_further,
    over_processes,
    runs_of,
    unsteady,
)


def holds_of_answer(known: Known, bench: Bench) -> Holds | None:
    """The test of the plan that will be written: the search's own where that ended with one, else a
    test on fresh draws; None where no plan meets the requirement.
    """
    if known.holds is not None:
        return known.holds
    if known.judgement is not None and known.judgement.holds is not None:
        return known.judgement.holds
    if known.judgement is None and known.bisection is not None and known.bisection.holds:
        return known.bisection.holds
    if known.baselines is None and known.settled is None:
        # The budget ended the run before a draw could be priced.
        best = best_so_far(known, bench.ledger())
        return holds_as_known(known.case, bench, best[1].plan) if best is not None else None
    plan = plan_of_answer(known, bench)
    if plan is None or known.baselines is None:
        return None
    bench.observer.station("what it holds on")
    settings, judged = known.case.settings, known.judgement
    if settings.fitted and known.bisection is not None and bench.engine is None:
        bench.emulator.release()  # hundreds of sets have filled it, and the test is of one
        give_back()
    # A probe opens sessions too. Where what is counted is too hopeful the clock ends the test.
    seconds = known.baselines.probe_seconds(len(known.case.samples))
    seconds = min(seconds, bench.pace.usual_seconds)
    # Tests that were made have refused something, and have spent their part of the risk.
    if bench.tests == 0 or settings.fitted:
        test = planned_test(known.case, MAX_TESTS, bench.pace.usual_seconds, last=True)
    else:
        test = next_test(known.case, bench)
        refused = known.bisection is not None and not known.out_of_time
        if judged is not None:
            refused = judged.refused
        if refused:
            test = shortened(test, known.case, bench.pace.usual_seconds)
    wanted = test.enough
    test = fitted(test, known.case, seconds, bench.time.left_s)
    before = bench.time.endings
    holds = measure_holds(known.case, bench, bench.judges, plan, test)
    kinds = [holds.redrawn, holds.variants] if holds.wanted_of_variants else [holds.redrawn]
    fewest = min(kind.tested for kind in kinds)
    if fewest < wanted and (test.enough < wanted or bench.time.endings > before):
        _note_budget(bench, holds, wanted)
    return holds


def _note_budget(bench: Bench, holds: Holds, wanted: int) -> None:
    """Say on how many of the ``wanted`` draws of a kind the budget let the answer be tested."""
    made = f"{holds.redrawn.tested} redrawn copies and {holds.variants.tested} variants"
    message = (
        f"the budget of {bench.time.minutes:g} minutes left time to test the plan on {made}, of "
        f"{wanted} of a kind: the same command with more minutes goes on"
    )
    bench.note(Finding("budget", "", message))


def begin_steadiness(known: Known, bench: Bench) -> None:
    """Begin the engines that :func:`with_steadiness` will ask for.

    Args:
        known: what the stations found.
        bench: what builds.
    """
    result = _stood_on(known)
    if result is not None and result.verdict.passed:
        begin_further(bench, result.plan)


def with_steadiness(known: Known, bench: Bench) -> Known:
    """With the steadiness of the engine that the answer stands on, and the diagnosis that takes the
    answer back where its runs decide differently.
    """
    result = _stood_on(known)
    if result is None:
        return known
    bench.observer.station("steadiness")
    seen = over_processes(bench, result) if result.verdict.passed else runs_of([result])
    what = "answer's" if known.judgement is not None else result.plan.base.value.upper()
    taken_back = result.verdict.passed and seen.right != seen.processes
    found = unsteady(what, seen) if seen.decides or taken_back else None
    return known.with_(steadiness=seen, unsteady=found)


def _stood_on(known: Known) -> ProbeResult | None:
    """The engine's word that the answer stands on, where it has one."""
    engine = known.engine
    if engine is None or (known.settled is not None and known.settled.cause is Cause.UNSTEADY):
        return None
    if known.judgement is not None:
        return known.judgement.result
    if known.settled is not None and known.settled.cause is Cause.NONE:
        return engine.base
    if known.settled is not None and known.settled.cause is Cause.TF32:
        return engine.fp32
    return None


def _undecided(known: Known) -> bool:
    """Whether the budget ended the search before any station came to an answer."""
    decided = known.bisection if known.engine is None else known.judgement
    return known.out_of_time and known.settled is None and decided is None


def plan_of_answer(known: Known, bench: Bench) -> PrecisionPlan | None:
    """The plan with the precision that its pins really run in; None if none was found to pass.

    Args:
        known: what the stations found.
        bench: whose probes hold the best plan where the budget ended the search.
    """
    if known.unsteady is not None:
        return None
    if _undecided(known):
        found = best_so_far(known, bench.ledger())
        return known.base.with_pins(found[0].pinned) if found is not None else None
    if known.judgement is not None:
        judged = known.judgement
        return known.base.with_pins(judged.plan.pinned) if judged.passed else None
    if known.bisection is not None:
        return known.base.with_pins(known.bisection.pinned)
    if known.settled is None or known.baselines is None:
        return None
    judge = known.engine or known.baselines
    if known.settled.cause is Cause.NONE:
        return known.case.base
    if known.settled.cause is Cause.TF32 and judge.fp32.verdict.passed:
        return PrecisionPlan(Precision.FP32)
    return None
