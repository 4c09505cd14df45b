"""Layers whose values are not finite on few inputs only: what disturbs most on others says nothing
of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.effect_rows import EffectRows
from bisect_trt.stations.cause.sensitivity import TIME_BUDGET_S

_LOOKED_AT = 4


def first_that_break(
    case: Case,
    bench: Bench,
    base: PrecisionPlan,
    samples: Sequence[Sample],
    ranking: Sequence[str],
) -> list[str]:
    """``ranking`` with the layers first that make outputs which are not finite on some of
    ``samples``, each of them lowered alone; as it is where nothing breaks, or the layers are too
    many to be asked.

    Args:
        case: the layers.
        bench: runs each of them.
        base: the plan without pins.
        samples: on which the outputs are not finite.
        ranking: the layers, most harmful first.
    """
    looked_at = evenly(samples, _LOOKED_AT)
    # By count and not by the clock, so that the same command gives the same answer.
    expected_s = len(looked_at) * len(ranking) * bench.pace.usual_seconds
    if not looked_at or expected_s > TIME_BUDGET_S:
        return list(ranking)
    rows = EffectRows(case, bench, looked_at, base.with_pins(ranking))
    rows.take(list(ranking), math.inf)
    bench.further_rows += rows.runs
    breaks = {name for name, its in rows.rows.items() if any(math.isinf(s) for s, _ in its)}
    return sorted(ranking, key=lambda name: name not in breaks)
