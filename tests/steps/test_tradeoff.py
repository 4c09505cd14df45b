"""What the trade-off curve says, where the errors and the costs of plans are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.metrics.requirements import MAX_SCORE, NOTHING_ALLOWED
from bisect_trt.report.first_lines import answer_lines
from bisect_trt.report.record import read_run
from bisect_trt.steps.tradeoff import error_share, knee_of
from fixtures.models import conv_clip
from tests.conftest import Finished


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


RANKING = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("scores", "layers", "share"),
    [
        ([100.0, 0.5, 0.4, 0.3], 1, 0.995),
        ([10.0, 1.0, 1.0, 1.0], 1, 0.9),  # just enough
        ([10.0, 1.01, 0.99, 0.9], 2, 0.901),  # the first alone is a near miss
        ([10.0, math.nan, 5.0, 0.0], 3, 1.0),  # what was not measured is not guessed
        ([1.01, 0.1, 0.0, 0.0], 1, 1.0 - 0.1 / 1.01),
    ],
)
def test_the_fewest_layers_that_make_nearly_all_of_the_error_are_found(
    scores: list[float], layers: int, share: float
) -> None:
    found = error_share(RANKING, scores, {})
    assert found is not None and found.layers == RANKING[:layers]
    assert found.share == pytest.approx(share) and found.left == scores[layers]


@pytest.mark.parametrize(
    "scores",
    [
        [10.0, 5.0, 4.0, 1.01],  # three make less than nine tenths
        [1.0, 0.0, 0.0, 0.0],  # the requirement is met: there is nothing to blame
        [math.nan, 0.1, 0.1, 0.1],
        [10.0, math.nan, math.nan, math.nan],
        [MAX_SCORE, 1.0, 1.0, 1.0],  # it stands for any error beyond it
        [NOTHING_ALLOWED, 0.0, 0.0, 0.0],  # a decision that changed has no size
        [10.0, math.inf, math.inf, math.inf],
        [math.inf, math.inf, math.nan, MAX_SCORE],
    ],
)
def test_no_share_is_said_where_it_is_small_or_unknown(scores: list[float]) -> None:
    assert error_share(RANKING, scores, {}) is None


def test_of_an_infinite_error_what_is_left_is_said() -> None:
    found = error_share(RANKING, [math.inf, math.inf, 30.0, 0.5], {})
    assert found is not None and found.layers == ("a", "b")
    assert math.isnan(found.share) and found.left == 30.0


def test_a_ranking_of_one_layer_has_no_second() -> None:
    assert error_share(["a"], [10.0, 9.0, 0.0, 0.0], {}) is None
    assert error_share([], [10.0, 10.0, 10.0, 10.0], {}) is None


def test_a_run_says_which_layers_make_the_error_as_its_curve_shows(finished: Finished) -> None:
    result = finished(conv_clip, 0.95)
    found = result.error_share
    assert found is not None and {"/stem/Conv"} <= set(found.layers) <= set(result.pinned)
    before = result.tradeoff.set_index("pins")["worst_score"][0]
    assert found.left == pytest.approx((1.0 - found.share) * before)
    assert read_run(result.folder).error_share == found
    assert "99 % of the error" in " ".join(answer_lines(result))


def test_a_layer_that_comes_first_because_it_is_free_is_not_named() -> None:
    strength = {"relu": 1e-6, "add": 1e-4, "conv": 1.0}
    found = error_share(["relu", "add", "conv"], [10.0, 9.9, 9.8, 0.1], strength)
    assert found is not None and found.layers == ("conv",)
    assert found.share == pytest.approx(0.99) and found.left == 0.1
