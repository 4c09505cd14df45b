"""What other inputs may score by what copies of the given ones do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bisect_trt.numerics.decisions import is_decision
from bisect_trt.numerics.prediction import prediction_limit
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import SampleResult
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case
from bisect_trt.stations.fresh_test import set_size, wanted_of_unseen

_TWO_ANSWERS = 2
"""A decision that scores so many values at most is the same or is not: however often it is, nothing
says how near the next input's is to becoming another."""


def reach(case: Case, bench: Bench, copies: Sequence[SampleResult]) -> float:
    """In tolerances; NaN where nothing was copied, or inputs are judged together, and infinite
    where nothing can be told.

    Args:
        case: the given inputs, and what is asked for.
        bench: where their references are.
        copies: what each copy of them came to, by all who judge.
    """
    if not copies or set_size(case) > 1:
        return math.nan
    floor = min(_floor(case, bench), 1.0)
    scores = [copy.score - floor for copy in copies]
    items = case.requirements.items
    unknown = any(item.own or is_decision(item.metric) for item in items)
    if unknown and len(set(scores)) <= _TWO_ANSWERS:
        return math.inf
    # Half of what may miss is left for what so few inputs tell wrongly of the rest: at the share
    # itself 4 of 33 words from four inputs were wrong, and 5 of 54 from eight.
    share = (1.0 + wanted_of_unseen(case)) / 2.0
    return floor + prediction_limit(scores, len(case.samples), share)


def _floor(case: Case, bench: Bench) -> float:
    """What the first given input's reference scores beside itself: nothing, but by a metric of the
    user's.
    """
    if not any(item.own for item in case.requirements.items):
        return 0.0
    sample = case.samples[0]
    key = bench.prober.key("floor", sample.digest)
    known = bench.journal.recall(key)
    if known is not None:
        return float(known[0])
    exact = bench.references.of(sample)
    floor = case.requirements.score(exact, exact)
    bench.journal.record_later(Row(key, "floor", floor))
    return floor
