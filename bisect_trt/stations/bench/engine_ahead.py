"""What an engine is about to be asked, begun beside what the emulators do."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Anticipating, Runner
from bisect_trt.stations.case.case import Case


def baseline_plans(case: Case) -> tuple[PrecisionPlan, ...]:
    """FP32 with TF32 cleared, TF32 allowed, everything lowered."""
    return PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), case.base


def begin(
    engine: Runner | None,
    plan: PrecisionPlan,
    tensors: Sequence[str] = (),
    copies: int = 1,
    *,
    spare: bool = False,
) -> None:
    """Begin what the engine will be asked; nothing where the runner cannot, or there is none.

    Args:
        engine: the runner that builds.
        plan: what it is built from.
        tensors: what is wanted beside the outputs.
        copies: how many shall be there in all, each for another process.
        spare: whether it only may be asked for, and others are to be done first.
    """
    if isinstance(engine, Anticipating):
        engine.build_ahead(plan, tensors, copies, spare=spare)


def give_up(engine: Runner | None, but: PrecisionPlan) -> None:
    """Nothing that was begun and is not in use will be asked for, ``but`` one plan's engines."""
    if isinstance(engine, Anticipating):
        engine.give_up(but)
