"""The word follows from the tests, and from nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bisect_trt.base.outcomes import Holding, Holds, Robustness, word_of

GIVEN = Holding(2, 2, 0.0, 0.5, "x")


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
    ("reach", "word"),
    [(0.9, "robust"), (1.0, "robust"), (1.01, "undecided"), (math.inf, "undecided")],
)
def test_other_inputs_may_do_worse_than_copies_of_a_few(reach: float, word: str) -> None:
    drawn = Holding(72, 72, 0.95, 0.9, "x, redrawn")
    few = replace(of(drawn, drawn), reach=reach)
    assert word_of(few) == word and not few.of_one
    alone = replace(few, given=Holding(1, 1))
    assert alone.of_one and word_of(alone) == word
    for kind in ("redrawn", "variants"):  # of what there is
        assert word_of(replace(few, **{kind: NONE})) == word
    # Of 58 the next may still be worse, and inputs kept apart speak for others.
    assert word_of(replace(few, given=Holding(58, 58))) == word
    apart = replace(alone, holdout=Holding(72, 72, 0.95))
    assert word_of(apart) == "robust"
    many = replace(few, given=Holding(59, 59)), replace(few, given=Holding(29, 29), wanted=0.9)
    assert {word_of(other) for other in many} == {"robust"}
    bounding = replace(few, given=Holding(48, 48), holdout=Holding(11, 11, 0.76))
    assert word_of(bounding) == "robust"
    assert word_of(replace(bounding, given=Holding(47, 47))) == word
    # However many a set has, it is one.
    assert word_of(replace(few, given=Holding(1, 1), set_size=200)) == word
    assert word_of(replace(few, holdout=Holding(5, 5, 0.54))) == word


def test_one_set_that_was_kept_apart_and_misses_is_not_called_luck() -> None:
    drawn, one = Holding(72, 72, 0.95, 0.9, "x"), Holding(0, 1, 0.0)
    together = replace(of(drawn, drawn, one), set_size=40)
    assert word_of(together) == "lucky"
    assert word_of(replace(together, holdout_size=10)) == "undecided"


@pytest.mark.parametrize(("size", "word"), [(1, "robust"), (200, "undecided")])
def test_inputs_kept_apart_bound_the_share_where_no_copy_can_be_made(size: int, word: str) -> None:
    given, apart = Holding(40, 40), Holding(200, 200, 0.985)
    holds = Holds(given, Holding(), Holding(), apart, 0.95, holdout_size=size)
    assert holds.word == word
