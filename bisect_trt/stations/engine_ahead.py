"""What an engine is about to be asked, begun beside what the emulators do."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Anticipating
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case


def baseline_plans(case: Case) -> tuple[PrecisionPlan, ...]:
    """FP32 with TF32 cleared, TF32 allowed, everything lowered."""
    return PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), case.base


def begin_baselines(case: Case, bench: Bench) -> None:
    """Begin the engines of the baselines that the journal does not know."""
    for plan in dict.fromkeys(baseline_plans(case)):
        if bench.engine is not None and not bench.engine.knows(plan):
            begin(bench, plan)


def begin(bench: Bench, plan: PrecisionPlan, tensors: Sequence[str] = (), copies: int = 1) -> None:
    """Begin what the engine will be asked; nothing where the runner cannot.

    Args:
        bench: whose engine.
        plan: what it is built from.
        tensors: what is wanted beside the outputs.
        copies: how many shall be there in all, each for another process.
    """
    if isinstance(bench.opened, Anticipating):
        bench.opened.build_ahead(plan, tensors, copies)


def give_up(bench: Bench) -> None:
    """Nothing that was begun and is not in use will be asked for."""
    if isinstance(bench.opened, Anticipating):
        bench.opened.give_up()
