"""What run.json says of the engine and of the search, beside outputs and layers."""

from __future__ import annotations

import math

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.model.patterns import find_patterns
from bisect_trt.report.record.pin_words import in_words
from bisect_trt.report.record.record import EngineFacts, ProbeEffect, SearchFacts
from bisect_trt.search.facts import (
    count_violations,
    information_bound,
    ranking_auc,
    regime_of,
)
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.ledger import Ledger
from bisect_trt.stations.cause.sensitivity import suspicion_of
from bisect_trt.stations.plans.bisect import Bisection


def engine_facts(known: Known, ledger: Ledger) -> EngineFacts | None:
    """What run.json says of the engine beside its outputs; None where the emulator judged."""
    baselines, judged = known.engine, known.judgement
    if baselines is None:
        return None
    table = baselines.table
    marked = table.marked_score if table is not None else float("nan")
    return EngineFacts(
        fp32_is=baselines.identity.value,
        fp32_likeness_to_tf32=baselines.fingerprint,
        pins_emulated_as=baselines.pin_precision.value,
        second_emulator=ledger.emulators[1],
        layer_errors_from=table.how if table is not None else None,
        marked_batches=table.batches if table is not None else None,
        probe_effect=ProbeEffect(table.unmarked_score, marked) if table is not None else None,
        builds_beyond_baselines=judged.builds if judged is not None else None,
        tolerance_share=judged.limit if judged is not None else None,
        pins_added_by_engine=sorted(judged.repaired) if judged is not None else None,
        out_of_builds=judged.out_of_budget if judged is not None else None,
        steadiness=known.steadiness or baselines.steadiness,
    )


def search_facts(known: Known, ledger: Ledger, plan: PrecisionPlan) -> SearchFacts | None:
    """What kind of set it is, and what the search spent; None where nothing is pinned.

    Args:
        known: what the stations found.
        ledger: every probe that was made.
        plan: the answer.
    """
    if not plan.pinned:
        return None
    case, judged = known.case, known.judgement
    bisection: Bisection | None = judged.bisection if judged is not None else known.bisection
    ranked = bisection is not None and bisection.ranked
    alone = dict(known.triage.sensitivity.scores) if known.triage is not None else {}
    pinned = [name for name in case.names if name in plan.pinned]
    regime = regime_of(len(pinned), len(case.names))
    suspicion = suspicion_of(known.baselines.layers, alone) if known.baselines is not None else {}
    first = ledger.emulators[0]
    searched = [p for p in ledger.log if p.plan.base is plan.base and p.runner == first]
    # On a panel a probe ends early, and is held to a share of the tolerance: no two compare.
    alike = [(p.plan.pinned, p.verdict.passed) for p in searched if p.on_given]
    return SearchFacts(
        regime=regime.value if regime is not None else "",
        spread_over=len(pinned),
        blocks=in_words(pinned, find_patterns(case.graph), case.layers),
        # What was cut from a ranking is ranked well by what it was ranked by.
        suspicion_auc=math.nan if ranked else ranking_auc(suspicion, pinned),
        emulated_probes=len({p.plan for p in searched}),
        information_bound=information_bound(len(case.names), len(pinned)),
        violations=count_violations(alike),
        superfluous_pins_dropped=bisection.violations if bisection is not None else 0,
    )
