"""Is it luck that everything lowered passes the given inputs? Asked of a panel, then of fresh
draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from bisect_trt.core.holds import Holds
from bisect_trt.probe.result import ProbeResult, SampleResult
from bisect_trt.stations.baselines import Baselines
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case
from bisect_trt.stations.fresh_test import planned_test, set_size, spared
from bisect_trt.stations.holds import Refusal, first_refusal, measure_holds
from bisect_trt.stations.panel import PanelSamples, panel_samples


@dataclass(frozen=True)
class Unseen:
    """What a robust search begins with: its ``samples``, what everything lowered shows on them
    (``lowered``), and what else ``refused`` it.

    ``holds`` is there if everything lowered is robust as it is; ``tests`` counts the tests on fresh
    draws that were made of it.
    """

    samples: PanelSamples
    lowered: ProbeResult
    refused: Refusal | None
    holds: Holds | None
    tests: int


def look_beyond(case: Case, bench: Bench, emulated: Baselines) -> Unseen:
    """Run everything lowered on the panel; where it passes that, on fresh draws too.

    Args:
        case: the inputs, and what is asked for.
        bench: what runs the plans.
        emulated: the emulators' baselines.
    """
    bench.observer.station("unseen inputs")
    plan = case.base
    samples = panel_samples(case, bench)
    results: list[SampleResult] = []
    score = 0.0
    for kind, those in samples.by_kind().items():
        found = bench.prober.judge(plan, those, size=set_size(case))
        results += found.results
        score = max(score, found.score(spared(case, kind, len(those))))
    lowered = ProbeResult.over(plan, bench.prober.runner.name, results, {}, score=score)
    # An engine has a word of its own: its emulators need not be asked for the last one.
    decides = bench.engine is None and emulated.lowered.verdict.passed
    if not decides or not lowered.verdict.passed:
        return Unseen(samples, lowered, None, None, 0)
    judges = [bench.prober, bench.second]
    picked = case.settings.pick is not None
    test = planned_test(case, 0, bench.usual_seconds, last=picked)
    if picked:
        holds = measure_holds(case, bench, judges, plan, test)
        return Unseen(samples, lowered, None, holds, 1)
    against = first_refusal(case, bench, judges, plan, test, 1.0)
    if against is not None:
        return Unseen(samples, lowered, against, None, 1)
    return Unseen(samples, lowered, None, measure_holds(case, bench, judges, plan, test), 1)
