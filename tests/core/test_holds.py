"""The word follows from the tests, and from nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bisect_trt.core.holds import Holding, Holds, Robustness, word_of

GIVEN = Holding(1, 1, 0.0, 0.5, "x")


NONE = Holding()


def of(redrawn: Holding, variants: Holding = NONE, holdout: Holding = NONE) -> Holds:
    return Holds(GIVEN, redrawn, variants, holdout, 0.95, 0.9)


@pytest.mark.parametrize(
    ("holds", "word"),
    [
        (of(Holding(72, 72, 0.95)), Robustness.ROBUST),
        (of(Holding(30, 30, 0.90)), Robustness.UNDECIDED),
        (of(Holding(60, 72, 0.75)), Robustness.LUCKY),
        (of(Holding(70, 72, 0.91)), Robustness.UNDECIDED),
        (of(Holding(72, 72, 0.95), Holding(22, 24, 0.76)), Robustness.UNDECIDED),
        (of(Holding(72, 72, 0.95), Holding(72, 74, 0.91)), Robustness.ROBUST),
        (of(Holding(72, 72, 0.95), Holding(12, 24, 0.32)), Robustness.LUCKY),
        (of(Holding(72, 72, 0.95), holdout=Holding(5, 5, 0.54)), Robustness.ROBUST),
        (of(Holding(72, 72, 0.95), holdout=Holding(4, 5, 0.34)), Robustness.UNDECIDED),
        (of(Holding(72, 72, 0.95), holdout=Holding(0, 1, 0.0)), Robustness.LUCKY),
        (of(Holding(72, 72, 0.95), holdout=Holding(2, 5, 0.08)), Robustness.LUCKY),
        (of(Holding(), Holding(59, 59, 0.95)), Robustness.ROBUST),
        (of(Holding()), Robustness.UNDECIDED),
    ],
)
def test_words(holds: Holds, word: Robustness) -> None:
    assert holds.word is word


def test_nothing_tested_claims_nothing() -> None:
    nothing = Holding()
    assert nothing.lower_bound == 0.0 and math.isnan(nothing.share)
    assert math.isnan(nothing.worst_score)


def test_a_plan_that_misses_the_given_inputs_has_no_word() -> None:
    missed = Holding(0, 1, 0.0, 1.2, "x")
    found = Holds(missed, Holding(72, 72, 0.95), NONE, NONE, 0.95, 0.9)
    assert found.word is None and word_of(found) is None
    assert replace(found, redrawn=Holding(0, 72, 0.0)).word is None
    nine = Holding(9, 10, 0.0, 1.2, "x")
    asked = Holds(nine, Holding(72, 72, 0.95), NONE, NONE, 0.95, 0.9, wanted_of_given=0.9)
    assert asked.word is Robustness.ROBUST


@pytest.mark.parametrize(
    ("worst", "usual", "floor", "word"),
    [
        (0.5, 0.3, 0.0, "robust"),  # 0.5 * 5/3
        (0.5, 0.2, 0.0, "undecided"),
        (0.98, 0.97, 0.0, "robust"),
        (1.2, 1.2, 0.0, "undecided"),
        (0.01, 0.002, 0.0, "robust"),
        (0.5, 0.0, 0.0, "undecided"),  # most copies show nothing at all
        (0.0, 0.0, 0.0, "robust"),
        # A metric may score 0.95 where nothing is wrong, and the same text 1.
        (0.97, 0.965, 0.95, "robust"),
        (0.98, 0.96, 0.95, "undecided"),
        (1.0, 1.0, 1.0, "robust"),
        (0.9, math.nan, 0.0, "robust"),  # nobody asked: an older run's
    ],
)
def test_other_inputs_may_do_worse_than_copies_of_one(
    worst: float, usual: float, floor: float, word: str
) -> None:
    drawn = Holding(72, 72, 0.95, worst, "x, redrawn")
    low = replace(drawn, worst_score=0.0)
    for redrawn, variants in ((drawn, low), (low, drawn), (drawn, NONE)):
        one = replace(of(redrawn, variants), usual=usual, floor=floor)
        assert one.of_one and word_of(one) == word
        # Copies of several inputs, sets of several, and inputs kept apart speak for others.
        several = replace(one, given=Holding(2, 2)), replace(one, set_size=2)
        apart = replace(one, holdout=Holding(72, 72, 0.95))
        assert {word_of(other) for other in (*several, apart)} == {"robust"}
        assert word_of(replace(one, holdout=Holding(5, 5, 0.54))) == word
