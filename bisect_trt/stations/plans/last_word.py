"""What fresh draws say of a set that the search offers."""

from __future__ import annotations

from bisect_trt.core.holds import Holds
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.engine_ahead import begin
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.evidence import Refusal, all_in_fp32
from bisect_trt.stations.draws.fresh_test import next_test
from bisect_trt.stations.draws.holds import put_to_test
from bisect_trt.stations.draws.refused import refused_by


def last_word(
    case: Case, bench: Bench, plan: PrecisionPlan, limit: float
) -> tuple[Refusal | None, Holds | None]:
    """What refuses ``plan``, or else what it holds on by both emulators. What FP32 as a whole
    misses too refuses nothing.

    What an engine decides is tested there: of it the second emulator is asked about the given
    inputs, while the engine is built.

    Args:
        case: says what is asked for.
        bench: what runs the plan.
        plan: the set, on the plan without pins.
        limit: the share of the tolerance that the emulators are held to.
    """
    if bench.engine is not None and bench.engine.new_probes:  # else it repeats another run
        built = bench.plan_for(bench.engine, plan)
        if not bench.engine.knows(built):
            begin(bench.opened, built)
    if bench.engine is not None:
        judges, given = [bench.second], bench.second_sees
        return refused_by(case, bench, judges, plan, limit, given), None
    judges, test = [bench.prober, bench.second], next_test(case, bench)
    against, holds = put_to_test(case, bench, judges, plan, test, limit, all_in_fp32(case, plan))
    if against is not None:
        bench.refused.add(plan)
    return against, holds
