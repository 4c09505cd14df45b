"""Layers that a plan leaves beyond the reduced precision's range, because the requirement does not
see them.
"""

from __future__ import annotations

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.inspection.unreached import unreached
from bisect_trt.probe.result import meets
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_SHOWN = 4


def note_left_overflowing(case: Case, known: Known, bench: Bench, answer: PrecisionPlan) -> None:
    """Say which layers give infinities in the model that ``answer`` writes, though their inputs are
    right: the outputs may hide it (a normalisation that divides by infinity gives zeros), a mask is
    meant so.

    Args:
        case: the model's layers.
        known: has the layers' errors.
        bench: keeps what is said.
        answer: the plan that is written.
    """
    if known.baselines is None or not case.settings.precision.is_storage:
        return
    table = known.baselines.layers
    finite = table["introduced_finite"].astype(bool) | table["underflows"].astype(bool)
    lowered = set(case.names) - answer.pinned - unreached(case.graph)
    left = [str(name) for name in table.loc[~finite, "layer"] if name in lowered]
    if not left:
        return
    count = "1 layer leaves" if len(left) == 1 else f"{len(left)} layers leave"
    shown = [bench.prober.known(answer, sample) for sample in case.samples]
    missed = sum(found is not None and not meets(found, 1.0) for found in shown)
    told = (
        "harmless on these inputs: what reads the infinities bounds or discards them, and the "
        "outputs are right"
    )
    if missed:
        told = f"fatal on {missed} of {len(shown)} inputs, which need not meet the requirement"
    message = (
        f"{count} {case.settings.precision.value.upper()}'s range with the plan too: "
        f"{some_of(left, _SHOWN)}; {told}"
    )
    bench.note(Finding("left-overflowing", left[0], message))
