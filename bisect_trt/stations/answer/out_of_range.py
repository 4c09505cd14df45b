"""Layers that a plan leaves beyond the reduced precision's range, because the requirement does not
see them.
"""

from __future__ import annotations

import numpy as np

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.inspection.unreached import unreached
from bisect_trt.numerics.blocks import all_finite
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import meets
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.baselines.traced_inputs import traced_inputs
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_SHOWN = 4

_WRONG, _ON = 0.1, 4
"""Share of its largest value by which a layer may be off, up to so many behind the infinities."""


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
    lowered = set(case.names) - answer.pinned - unreached(case.graph)
    left = [
        str(name) for name in table.loc[table["overflows"].astype(bool), "layer"] if name in lowered
    ]
    if not left:
        return
    count = "1 layer leaves" if len(left) == 1 else f"{len(left)} layers leave"
    where = f"{case.settings.precision.value.upper()}'s range with the plan too"
    message = f"{count} {where}: {some_of(left, _SHOWN)}; "
    shown = [bench.prober.known(answer, sample) for sample in case.samples]
    missed = sum(found is not None and not meets(found, 1.0) for found in shown)
    lost = [] if missed else _lost(case, bench, answer)
    if missed:
        message += f"fatal on {missed} of {len(shown)} inputs, which need not meet the requirement"
    elif lost:
        message += (
            f"what {some_of(lost, _SHOWN)} should give is lost there. The requirement does not see "
            "it: ask for more, or keep them with --pin"
        )
    else:
        message += (
            "harmless on these inputs: what reads the infinities bounds or discards them, and the "
            "outputs are right"
        )
    bench.note(Finding("overflow-lost" if lost else "left-overflowing", left[0], message))


def _lost(case: Case, bench: Bench, answer: PrecisionPlan) -> list[str]:
    """The layers that are wrong because of what leaves the range before them, though they are
    finite again: a normalisation that divides by infinity gives zeros.
    """
    samples = traced_inputs(case, bench)
    key = bench.prober.key("lost", answer.digest, *(sample.digest for sample in samples))
    recalled = bench.journal.recall(key)
    if recalled is not None:
        return [str(name) for name in recalled[0]]
    reads = {layer.name: set(layer.inputs) for layer in case.layers}
    lost: list[str] = []
    for sample in samples:
        after = dict[str, int]()  # tensors, and how many layers behind an infinite one they are
        for values in bench.emulator.trace(sample, answer, rtx_sums=bench.rtx_sums):
            true, made = values.reference, values.accumulated
            if not all_finite(true):
                continue
            behind = min((after[n] for n in reads.get(values.layer, ()) if n in after), default=_ON)
            if not all_finite(made):
                after[values.tensor] = 0
            elif behind < _ON and true.size:
                after[values.tensor] = behind + 1
                off, largest = np.abs(made - true).max(), np.abs(true).max()
                if off > _WRONG * largest:
                    lost.append(values.layer)
    found = list(dict.fromkeys(lost))
    bench.journal.record_later(Row(key, "lost", found))
    return found
