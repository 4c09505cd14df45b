"""What speaks against a plan, and which draws do not: what FP32 as a whole misses too, no pins can
mend.

A reference in one order of sums and an emulator in another differ by what FP32 leaves open; behind
a Round, or at a tie, that is a whole step, on given inputs or on a copy of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bisect_trt.core.finding import Finding
from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import meets
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size

_FINDING = Finding(
    "fp32-misses",
    "",
    "on some copies of the inputs the requirement is missed even with every layer in FP32 (the "
    "order of its sums decides): they are counted, and say nothing of pins",
)


@dataclass(frozen=True)
class Refusal:
    """What spoke against a plan: samples of one ``kind`` that missed, of so many ``tested`` by some
    judge; ``score`` is the worst draw's, or of given inputs the worst that is not spared, in
    tolerances.
    """

    kind: InputKind
    samples: tuple[Sample, ...]
    tested: int
    score: float


def all_in_fp32(case: Case, base: PrecisionPlan) -> PrecisionPlan | None:
    """``base`` with every layer pinned; None where that is not FP32 as a whole: layers are held
    lower, or a pin runs in TF32.

    Args:
        case: says what is held.
        base: the plan without pins.
    """
    if case.held_low or base.pin_precision is not Precision.FP32:
        return None
    return base.with_pins(case.names)


def missed_by_every(
    case: Case, bench: Bench, plan: PrecisionPlan, every: PrecisionPlan, refusal: Refusal
) -> set[str]:
    """The digests of those samples of ``refusal`` that ``every`` layer pinned misses too, by the
    emulator that they are missed by; that there are some is noted.

    Args:
        case: says how many samples make a set.
        bench: the emulators, which know their answers on ``plan``.
        plan: what was refused.
        every: the same with all layers pinned.
        refusal: by which samples; given inputs always speak.
    """
    if refusal.kind is InputKind.GIVEN:
        return set()
    found = set[str]()
    for one in _sets(case, refusal.samples):
        for judge in (bench.prober, bench.second):
            if judge.judge(plan, one, size=len(one)).missed():
                if judge.judge(every, one, size=len(one)).missed():
                    found.update(sample.digest for sample in one)
                break
    if found:
        bench.note(_FINDING)
    return found


def told_by_pins(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    every: PrecisionPlan | None,
    samples: Sequence[Sample],
) -> list[Sample]:
    """Those of ``samples`` that ``every`` layer pinned passes by all of ``judges``; what is left
    out is noted.

    Args:
        case: says how many samples make a set.
        bench: where it is noted.
        judges: who are asked; what one of them misses the next is not asked.
        every: the plan with all layers pinned; None leaves all.
        samples: some draws.
    """
    left = list(samples)
    if every is None:
        return left
    for judge in judges if left else ():
        found = judge.judge(every, left, size=set_size(case)).results
        kept = [one for one, r in zip(_sets(case, left), found, strict=True) if meets(r, 1.0)]
        left = [sample for one in kept for sample in one]
    if len(left) < len(samples):
        bench.note(_FINDING)
    return left


def _sets(case: Case, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    size = set_size(case)
    return [samples[i : i + size] for i in range(0, len(samples), size)]
