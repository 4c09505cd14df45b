"""The knee of the trade-off curve, where the errors and the costs of plans are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.steps.tradeoff import knee_of


class Costs:
    """A plan of n layers gives up the n-th share of the saving."""

    def __init__(self, shares: list[float]) -> None:
        self._shares = shares

    def saving_kept(self, plan: PrecisionPlan) -> float:
        return 1.0 - self._shares[len(plan.pinned)]


def knee(shares: list[float], scores: list[float]) -> int | None:
    """The number of layers at the knee of a curve of these costs and errors."""
    costs: Any = Costs(shares)
    plans = [PrecisionPlan("fp16", frozenset(map(str, range(n)))) for n in range(len(shares))]
    rows = [(plan, {"worst_score": score}) for plan, score in zip(plans, scores, strict=True)]
    found = knee_of(costs, rows)
    return None if found is None else len(found.pinned)


@pytest.mark.parametrize(
    ("shares", "scores", "layers"),
    [
        ([0.0, 0.02, 0.3, 1.0], [20.0, 1.5, 1.4, 0.1], 1),  # one layer does nearly all of the work
        ([0.0, 0.0, 0.0, 1.0], [20.0, 2.0, 1.0, 0.9], 2),  # free layers are taken
        ([0.0, 0.1, 0.2, 0.3], [8.0, 4.0, 2.0, 1.0], 3),  # each tenth halves the error: no knee
        ([0.0, 0.05, 0.5, 1.0], [1.0, 0.95, 0.1, 0.0], 0),
        ([0.0, 0.5, 1.0], [4.0, 1.0, 0.9], 1),  # nothing costs so little more
        ([0.0, 0.1, 0.2, 1.0], [5.0, 1.0, 0.0, 0.0], 2),  # nothing is less than no error
        ([0.0, 0.5], [math.inf, 1.0], None),  # one finite error makes no curve
        ([math.nan, math.nan], [1.0, 0.5], None),  # nothing is saved
    ],
)
def test_behind_the_knee_more_time_buys_little(
    shares: list[float], scores: list[float], layers: int | None
) -> None:
    assert knee(shares, scores) == layers
