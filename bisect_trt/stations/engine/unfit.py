"""Layers that an engine does not take at the reduced precision, whatever their numbers are."""

from __future__ import annotations

from dataclasses import replace

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.runners.base import UNFIT
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.engine.baselines import EngineBaselines

_SHOWN = 4


def holding_unfit(case: Case, bench: Bench, engine: EngineBaselines) -> Case | None:
    """``case`` with the layers held in FP32 for whose sake the engine of everything lowered could
    not be had; None where it could, or nobody named them. Which layers do harm is another matter,
    that nothing tells before they are out of the way.

    Args:
        case: what is asked.
        bench: hears of it.
        engine: what the engine's baselines showed.

    Raises:
        BadInputError: such a layer was asked to be lowered.
    """
    if engine.base.worst or engine.diagnosis is not None:
        return None
    named = frozenset(engine.base.facts.get(UNFIT, ()))
    unfit, asked_for = named.intersection(case.names), named & case.held_low
    precision = case.settings.precision.value.upper()
    if asked_for:
        raise BadInputError(
            f"--lower: the engine does not take {min(asked_for)!r} in {precision} "
            f"({engine.base.note}); leave it out"
        )
    if not unfit:
        return None
    said = some_of(sorted(unfit), _SHOWN)
    told = f"the engine does not take {said} in {precision}, so it stays in FP32 from the start"
    bench.note(Finding("held", min(unfit), f"{told} ({engine.base.note})"))
    return replace(case, held_pins=case.held_pins | unfit, unfit=case.unfit | unfit)
