"""What a run holds in hand when it has to end: the smallest plan that every judge passed."""

from __future__ import annotations

from contextlib import suppress

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.ledger import Ledger
from bisect_trt.stations.draws.evidence import all_in_fp32
from bisect_trt.stations.draws.holds_known import holds_as_known
from bisect_trt.stations.plans.bisect import Bisection


def best_so_far(known: Known, ledger: Ledger) -> tuple[PrecisionPlan, ProbeResult] | None:
    """The plan, its pins in FP32, with the probe that says that it passes; None if none is known to
    pass yet.

    Args:
        known: what the stations found.
        ledger: every probe that was made.
    """
    everything = frozenset(known.case.names)
    base = known.base if known.engine is None else known.case.base
    judges = ledger.emulators if known.engine is None else (ledger.judge,)
    pinned = ledger.smallest_passing(base, judges)
    final: ProbeResult | None
    if pinned is not None:
        plan = base.with_pins(pinned)
        final = ledger.worst_of(plan, judges)
    elif known.engine is not None and known.case.held_low:
        return None
    elif known.engine is not None and known.engine.fp32.verdict.passed:
        # Nothing smaller passed yet: all pins are the FP32 engine.
        plan, final = base.with_pins(everything), known.engine.fp32
    else:
        plan = base.with_pins(everything)
        final = ledger.of_first(plan)
        if final is None and all_in_fp32(known.case, base) is not None:
            final = ledger.of_first(PrecisionPlan(Precision.FP32))  # the same network
        if final is not None and not final.verdict.passed:
            return None
    return (plan.with_pins_in(Precision.FP32), final) if final is not None else None


def with_set_in_hand(known: Known, bench: Bench) -> Known:
    """``known`` when the user has ended the search, with the smallest set that the first emulator
    passed on all that was searched with. Nothing is run for it: it holds on the given inputs, and
    neither the second emulator nor fresh draws may have a word on it.

    Args:
        known: what the stations found.
        bench: knows the set, and what was answered.
    """
    case, triage, pins = known.case, known.triage, bench.in_hand
    if known.bisection is not None or known.judgement is not None:
        return _with_holds(known, bench)
    if triage is None or bench.engine is not None:
        return _with_holds_of_best(known, bench)
    if case.settings.fitted:
        ledger = bench.ledger()
        pins = ledger.smallest_passing(triage.base, ledger.emulators[:1])
    if pins is None or not bench.prober.knows(plan := triage.base.with_pins(pins)):
        return _with_holds_of_best(known, bench)
    bench.prober.probe(plan)
    holds = holds_as_known(case, bench, plan)
    ranked = not case.settings.fitted
    found = Bisection(pins, {}, triage.limit, False, holds=holds, ranked=ranked)
    return known.with_(bisection=found)


def _with_holds_of_best(known: Known, bench: Bench) -> Known:
    """``known`` before a set was in hand, with what is known of the best plan until then."""
    best = best_so_far(known, bench.ledger())
    if best is None or known.settled is not None:
        return known
    return known.with_(holds=holds_as_known(known.case, bench, best[1].plan))


def _with_holds(known: Known, bench: Bench) -> Known:
    """``known`` of a search that had ended, with what is known of its answer where its test had not
    ended.
    """
    holds, plan = known.holds, None
    if known.judgement is not None and not known.judgement.passed:
        return known
    if known.judgement is not None:
        holds, plan = holds or known.judgement.holds, known.judgement.plan
    elif known.bisection is not None and bench.engine is None:
        holds, plan = holds or known.bisection.holds, known.base.with_pins(known.bisection.pinned)
    if holds is None and plan is not None:
        holds = holds_as_known(known.case, bench, plan)
    return known.with_(holds=holds)


def end_search(known: Known, bench: Bench) -> Known:
    """``known`` when the budget has ended the search, after asking every judge of what passed the
    first one; of all pins where nothing did yet.

    Args:
        known: what the stations found.
        bench: what runs the plans, in the time that was kept for that.
    """
    bench.time.search_ended()
    if known.settled is None and known.judgement is None and bench.engine is None:
        with suppress(BudgetSpentError):
            _confirm(known, bench)
    return known.with_(out_of_time=True)


def _confirm(known: Known, bench: Bench) -> None:
    base, first = known.base, bench.prober.runner.name
    passed = {
        probe.plan.pinned
        for probe in bench.log
        if probe.on_given
        and probe.runner == first
        and probe.verdict.passed
        and probe.plan == base.with_pins(probe.plan.pinned)
    }
    tried = sorted(passed.difference(plan.pinned for plan in bench.refused), key=len)
    # What refuses a set mostly refuses those of few pins more: each step is twice the last.
    for pins in (tried[2**step - 1] for step in range(len(tried).bit_length())):
        if bench.second.probe(base.with_pins(pins)).verdict.passed:
            bench.observer.best(len(pins))
            return
    bench.observer.best(len(known.case.names))
    for judge in bench.judges:
        judge.probe(base.with_pins(known.case.names))
