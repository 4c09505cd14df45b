"""What the first glance at an answer says."""

from __future__ import annotations

from bisect_trt.core.holds import Robustness
from bisect_trt.report.record.record import Record

_NEARLY_ALL = 0.9
"""Of the layers: a plan with so many pins is FP32 with casts around it."""


def tone(result: Record) -> str:
    """What the first glance says: ``bad`` where no plan passes, ``unsure`` where nothing but the
    given inputs speaks for it or it leaves hardly a layer to lower, else ``ok``.
    """
    if not result.passed:
        return "bad"
    known = result.holds is None or result.holds.word is Robustness.ROBUST
    return "ok" if known and not is_nearly_all(result) else "unsure"


def is_nearly_all(result: Record) -> bool:
    """Whether a search that came to its end found hardly another thing than FP32."""
    free = result.layer_count - len(result.plan.held)
    searched = (result.complete or result.ranked) and not result.out_of_time
    found = len(result.plan.chosen)
    return result.passed and searched and found >= max(2.0, _NEARLY_ALL * free)
