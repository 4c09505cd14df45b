"""On what a plan is known to hold where there is no time to test it."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.holds import Holding, Holds
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.all_judges import judge_all
from bisect_trt.stations.draws.fresh_test import (
    set_size,
    wanted_of_given,
    wanted_of_unseen,
    wanted_of_variants,
)
from bisect_trt.stations.draws.holds import holding


def holds_as_known(case: Case, bench: Bench, plan: PrecisionPlan) -> Holds | None:
    """What is known of ``plan`` where there is no time to run it: that it was run on the given
    inputs; None where it was not.

    Args:
        case: what is asked for.
        bench: whose judge was asked.
        plan: with the precision that a pin really runs in, for the emulators.
    """
    judges = [j for j in bench.judges if _knows(j, bench.plan_for(j, plan), case.samples)]
    if bench.judge not in judges:
        return None
    given = judge_all(bench, judges, plan, case.samples, size=set_size(case))[0]
    return Holds(
        holding(given, None),
        Holding(),
        Holding(),
        Holding(),
        wanted_of_unseen(case),
        wanted_of_variants(case),
        case.settings.fitted,
        wanted_of_given(case),
        set_size(case),
        unfinished=True,
    )


def _knows(judge: Prober, plan: PrecisionPlan, samples: Sequence[Sample]) -> bool:
    """Whether nothing has to be run to say what ``plan`` shows on ``samples``."""
    return judge.knows(plan) and all(judge.known(plan, s) is not None for s in samples)
