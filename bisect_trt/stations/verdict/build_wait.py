"""What the emulators do while an engine is built, and would be asked for once it is there."""

from __future__ import annotations

import math
from itertools import islice

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.runners.base import Anticipating
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.triage import Triage
from bisect_trt.stations.draws.fresh_draws import Draws
from bisect_trt.stations.draws.fresh_test import MAX_TESTS, planned_test, set_size
from bisect_trt.stations.plans.frontier import measure_frontier


def use_build_wait(
    case: Case, bench: Bench, triage: Triage, baselines: Baselines, plan: PrecisionPlan
) -> None:
    """Compute the references of the draws that the engine of ``plan`` will be tested on, and its
    frontier: RT-DETR's engine is built in 20 s, and these take 15.

    Nothing where no engine is built beside this process, or the run's time is limited: the search
    comes first then.

    Args:
        case: the given inputs.
        bench: what runs the plans, and keeps what it finds.
        triage: the ranking and the base plan.
        baselines: the layers' sizes.
        plan: with the precision that a pin really runs in, for the emulators.
    """
    engine, opened = bench.engine, bench.opened
    if engine is None or not isinstance(opened, Anticipating) or not opened.builds_ahead:
        return
    known = engine.knows(bench.plan_for(engine, plan))
    if known or not engine.new_probes or math.isfinite(bench.time.left_s):
        return
    if bench.tests < MAX_TESTS:
        test = planned_test(case, bench.tests, bench.pace.usual_seconds, last=False)
        draws = Draws(case, bench, [engine], test)
        for kind in draws.kinds:
            for _ in islice(draws.of(kind), test.enough * set_size(case)):
                pass
    measure_frontier(case, bench, baselines, triage.base, triage.ranking, plan, again=True)
