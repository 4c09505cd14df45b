"""Is it luck that everything lowered passes the given inputs? Asked of a panel, then of fresh
draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from bisect_trt.core.holds import Holds
from bisect_trt.probe.result import ProbeResult, SampleResult
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.evidence import Refusal, all_in_fp32
from bisect_trt.stations.draws.fresh_test import next_test, set_size, spared
from bisect_trt.stations.draws.holds import put_to_test
from bisect_trt.stations.draws.panel import PanelSamples, panel_samples


@dataclass(frozen=True)
class Unseen:
    """What a robust search begins with: its ``samples``, what everything lowered shows on them
    (``lowered``), and what else ``refused`` it.

    ``holds`` is there if everything lowered is robust as it is.
    """

    samples: PanelSamples
    lowered: ProbeResult
    refused: Refusal | None
    holds: Holds | None


_GLANCE = 4
"""Copies of each kind that everything lowered passes before it is tested; the rest of the panel is
for the search, which there may be none of."""


def look_beyond(case: Case, bench: Bench, emulated: Baselines) -> Unseen:
    """Run everything lowered on some of the panel; where it passes those, on fresh draws; where
    these refuse it, on the rest of the panel.

    Args:
        case: the inputs, and what is asked for.
        bench: what runs the plans.
        emulated: the emulators' baselines.
    """
    bench.observer.station("unseen inputs")
    # An engine has a word of its own: its emulators need not be asked for the last one.
    decides = bench.engine is None and emulated.lowered.verdict.passed
    if decides:
        few = panel_samples(case, bench, _GLANCE)
        found = _on(case, bench, few)
        if found.verdict.passed:
            against, holds = _tested(case, bench)
            if holds is not None:
                return Unseen(few, found, None, holds)
            samples = panel_samples(case, bench)
            return Unseen(samples, _on(case, bench, samples), against, None)
    samples = panel_samples(case, bench)
    lowered = _on(case, bench, samples)
    if not decides or not lowered.verdict.passed:
        return Unseen(samples, lowered, None, None)
    against, holds = _tested(case, bench)
    return Unseen(samples, lowered, against, holds)


def _on(case: Case, bench: Bench, samples: PanelSamples) -> ProbeResult:
    """What everything lowered shows on ``samples``: the worst that is not spared."""
    results: list[SampleResult] = []
    score = 0.0
    for kind, those in samples.by_kind().items():
        found = bench.prober.judge(case.base, those, size=set_size(case))
        results += found.results
        score = max(score, found.score(spared(case, kind, len(those))))
    lowered = ProbeResult.over(case.base, bench.prober.runner.name, results, {}, score=score)
    if not lowered.verdict.passed:
        bench.refused.add(case.base)
    return lowered


def _tested(case: Case, bench: Bench) -> tuple[Refusal | None, Holds | None]:
    """What on fresh draws refuses everything lowered, or on what it holds."""
    judges, every = [bench.prober, bench.second], all_in_fp32(case, case.base)
    test = next_test(case, bench)
    against, holds = put_to_test(case, bench, judges, case.base, test, 1.0, every)
    if against is not None:
        bench.refused.add(case.base)
    return against, holds
