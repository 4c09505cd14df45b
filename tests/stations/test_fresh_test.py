"""The tests that a run makes, one after the other, are together wrong as rarely as they say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bisect_trt.core.observer import Observer
from bisect_trt.stations.case import Case, load
from bisect_trt.stations.fresh_test import MAX_TESTS, planned_test, shortened
from bisect_trt.stations.settings import Settings
from fixtures.models import healthy


def case_of(tmp_path: Path, share: float, require: str = "max_abs<=1") -> Case:
    fixture = healthy()
    inputs = [fixture.inputs] * 3
    settings = Settings(fixture.model, inputs, robust=share, require=require, out=tmp_path)
    return load(settings, Observer())


def chance(draws: int, misses: int, share: float) -> float:
    """That at most ``misses`` of the draws fail, where ``share`` of all such draws pass."""
    return math.fsum(
        math.comb(draws, k) * (1.0 - share) ** k * share ** (draws - k) for k in range(misses + 1)
    )


@pytest.mark.parametrize("share", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("seconds", [1e-3, 0.01, 0.1, 0.6])
def test_a_plan_below_the_share_is_called_robust_in_five_of_a_hundred_runs_at_most(
    tmp_path: Path, share: float, seconds: float
) -> None:
    case = case_of(tmp_path, share)
    tests = [planned_test(case, number, seconds, last=False) for number in range(MAX_TESTS)]
    assert len({test.stream for test in tests}) == MAX_TESTS, "no two tests share their draws"
    bounding = [t for t in tests if chance(t.draws, t.misses, share) < 1.0 - t.confidence + 1e-9]
    # A slow model's test is made of fewer draws than bound the share: it is never called robust.
    assert math.fsum(chance(t.draws, t.misses, share) for t in bounding) <= 0.05
    if seconds <= 0.01:
        assert bounding == tests
    if seconds == 1e-3:
        assert tests[0].misses > 0
        # A plan with some room passes; asked for no miss at all it would be refused here.
        first = tests[0]
        room = 1.0 - (1.0 - share) / 5.0
        assert chance(first.draws, first.misses, room) > chance(first.draws, 0, room)


def test_sets_are_drawn_as_sets(tmp_path: Path) -> None:
    alone = planned_test(case_of(tmp_path, 0.95), 0, 0.02, last=True)
    sets = planned_test(case_of(tmp_path, 0.95, "max_abs@mean<=1"), 0, 0.02, last=True)
    assert sets.draws < alone.draws and sets.draws >= 59


def test_a_plan_that_was_refused_is_told_of_in_fewer_draws(tmp_path: Path) -> None:
    case = case_of(tmp_path, 0.95)
    for seconds, draws in ((1e-3, None), (0.05, 83), (0.1, 41), (10.0, 32)):
        test = planned_test(case, MAX_TESTS, seconds, last=False)
        less = shortened(test, case, seconds)
        assert less.draws == (test.draws if draws is None else min(draws, test.draws))
        assert (less.stream, less.confidence) == (test.stream, test.confidence)
