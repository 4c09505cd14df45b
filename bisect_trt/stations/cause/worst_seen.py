"""Everything lowered where it does worst, and what is left there with some layers pinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.verdict import Verdict
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.draws.fresh_test import set_size


def worst_seen(given: ProbeResult, unseen: Unseen | None) -> ProbeResult:
    """Everything lowered where it does worst: on the ``given`` inputs, or on draws."""
    worst = given
    if unseen is not None and unseen.lowered.score > worst.score:
        worst = unseen.lowered
    refused = unseen.refused if unseen is not None else None
    if refused is not None and refused.score > worst.score:
        worst = replace(worst, score=refused.score, verdict=Verdict.FAIL)
    return worst


def with_pins_there(
    case: Case, bench: Bench, base: PrecisionPlan, pins: frozenset[str], unseen: Unseen | None
) -> tuple[float, float]:
    """The scores, in tolerances, of everything lowered and of everything but ``pins``, of the same
    inputs: those that everything lowered does worst on (:func:`worst_seen`). What draws score says
    nothing beside what the given inputs do.

    Args:
        case: the given inputs.
        bench: whose first emulator is asked.
        base: the plan without pins, with the precision that a pin really runs in.
        pins: some layers.
        unseen: the draws; None where only the given inputs count.
    """
    given, pinned = bench.prober.probe(case.base), base.with_pins(pins)
    worst = worst_seen(given, unseen)
    kinds: Sequence[Sequence[Sample]] = ()
    if unseen is not None and worst is not given:
        kinds = (unseen.samples.redrawn, unseen.samples.variants)
        if worst is not unseen.lowered and unseen.refused is not None:
            kinds = (unseen.refused.samples,)
    size = set_size(case)
    found = [
        (result.score, those[place * size : (place + 1) * size])
        for those in kinds
        for place, result in enumerate(bench.prober.judge(case.base, those, size=size).results)
    ]
    if not found:
        return given.score, bench.prober.probe(pinned).score
    # Those that are spared score more.
    score, asked = max(found, key=lambda one: (one[0] <= worst.score, one[0]))
    return score, bench.prober.judge(pinned, asked, size=size).score()
