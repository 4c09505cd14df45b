"""On which of several given inputs a plan misses the requirement, in words."""

from __future__ import annotations

import math

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.prober import Prober
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size

_FEW = 0.1
"""Where strict FP32 misses on no more of the inputs, it is they that are near ties, and not the
model that is wrong."""


def missed_on(case: Case, prober: Prober, plan: PrecisionPlan) -> str:
    """A sentence that counts the given inputs on which ``plan`` misses the requirement, names the
    worst, and where they are few, says how to let so many miss; begins with a space. Nothing where
    one input is given or all are judged together.

    Args:
        case: the inputs.
        prober: has run ``plan`` on them.
        plan: what was run.
    """
    count = len(case.samples)
    if count == 1 or set_size(case) > 1:
        return ""
    scores = [
        (found.score, sample.name)
        for sample in case.samples
        if (found := prober.known(plan, sample)) is not None and not found.score <= 1.0
    ]
    if not scores:
        return ""
    said = f" It misses on {len(scores)} of {count} given inputs, most on {max(scores)[1]}."
    if len(scores) <= _FEW * count and case.settings.share_of_given == 1.0:
        share = math.floor(100.0 * (count - len(scores)) / count) / 100.0
        said += f" If those are near ties, --holds-on {share:g} lets so many miss."
    return said
