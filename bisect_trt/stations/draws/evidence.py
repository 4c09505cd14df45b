"""Which draws speak against pins: what FP32 as a whole misses too, no pins can mend.

A reference in one order of sums and an emulator in another differ by what FP32 leaves open; behind
a Round, or at a tie, that is a whole step, on given inputs or on a copy of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bisect_trt.core.finding import Finding
from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import meets
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size
from bisect_trt.stations.draws.holds import Refusal

_FINDING = Finding(
    "fp32-misses",
    "",
    "on some copies of the inputs the requirement is missed even with every layer in FP32 (the "
    "order of its sums decides): they are counted, and say nothing of pins",
)


def evidence_of(
    case: Case, bench: Bench, plan: PrecisionPlan, every: PrecisionPlan, refusal: Refusal
) -> Refusal | None:
    """What of ``refusal`` speaks against ``plan``: the samples that ``every`` layer pinned passes,
    by the emulator that they are missed by. None where there is none; that is noted.

    Args:
        case: says how many samples make a set.
        bench: the emulators, which know their answers on ``plan``.
        plan: what was refused.
        every: the same with all layers pinned.
        refusal: by which samples.
    """
    if refusal.kind is InputKind.GIVEN:
        return refusal
    size = set_size(case)
    sets = [refusal.samples[i : i + size] for i in range(0, len(refusal.samples), size)]
    speaks = [one for one in sets if not _missed_by_all(bench, plan, every, one)]
    if len(speaks) < len(sets):
        bench.note(_FINDING)
    if not speaks:
        return None
    return replace(refusal, samples=tuple(sample for one in speaks for sample in one))


def left_over(
    bench: Bench,
    judges: Sequence[Prober],
    every: PrecisionPlan,
    samples: Sequence[Sample],
    size: int,
) -> list[Sample]:
    """Those of ``samples`` that ``every`` layer pinned passes by all of ``judges``; what is left
    out is noted.

    Args:
        bench: where it is noted.
        judges: who are asked.
        every: the plan with all layers pinned.
        samples: some draws.
        size: how many of them make a set.
    """
    for judge in judges:
        found = judge.judge(every, samples, size=size).results
        sets = [samples[i : i + size] for i in range(0, len(samples), size)]
        kept = [one for one, result in zip(sets, found, strict=True) if meets(result, 1.0)]
        if len(kept) < len(sets):
            bench.note(_FINDING)
        samples = [sample for one in kept for sample in one]
    return list(samples)


def _missed_by_all(
    bench: Bench, plan: PrecisionPlan, every: PrecisionPlan, samples: Sequence[Sample]
) -> bool:
    """Whether what ``plan`` misses the requirement by, ``every`` layer pinned does too."""
    size = len(samples)
    for judge in (bench.prober, bench.second):
        if judge.judge(plan, samples, size=size).missed():
            return judge.judge(every, samples, size=size).missed() > 0
    return False
