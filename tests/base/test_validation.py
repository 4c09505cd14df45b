"""The word follows from the tests, and from nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bisect_trt.base.outcomes import Tally, Validation, ValidationVerdict, word_of

GIVEN = Tally(2, 2, 0.0, 0.5, "x")


NONE = Tally()


def of(perturbed: Tally, augmented: Tally = NONE, holdout: Tally = NONE) -> Validation:
    return Validation(GIVEN, perturbed, augmented, holdout, 0.95, 0.9)


@pytest.mark.parametrize(
    ("validation", "word"),
    [
        (of(Tally(72, 72, 0.95)), ValidationVerdict.VALIDATED),
        (of(Tally(30, 30, 0.90)), ValidationVerdict.INCONCLUSIVE),
        (of(Tally(60, 72, 0.75)), ValidationVerdict.OVERFITTED),
        (of(Tally(70, 72, 0.91)), ValidationVerdict.INCONCLUSIVE),
        (of(Tally(72, 72, 0.95), Tally(22, 24, 0.76)), ValidationVerdict.INCONCLUSIVE),
        (of(Tally(72, 72, 0.95), Tally(72, 74, 0.91)), ValidationVerdict.VALIDATED),
        (of(Tally(72, 72, 0.95), Tally(12, 24, 0.32)), ValidationVerdict.OVERFITTED),
        (of(Tally(72, 72, 0.95), holdout=Tally(5, 5, 0.54)), ValidationVerdict.VALIDATED),
        (of(Tally(72, 72, 0.95), holdout=Tally(4, 5, 0.34)), ValidationVerdict.INCONCLUSIVE),
        (of(Tally(72, 72, 0.95), holdout=Tally(0, 1, 0.0)), ValidationVerdict.OVERFITTED),
        (of(Tally(72, 72, 0.95), holdout=Tally(2, 5, 0.08)), ValidationVerdict.OVERFITTED),
        (of(Tally(), Tally(59, 59, 0.95)), ValidationVerdict.VALIDATED),
        (of(Tally()), ValidationVerdict.INCONCLUSIVE),
    ],
)
def test_words(validation: Validation, word: ValidationVerdict) -> None:
    assert validation.word is word


def test_nothing_tested_claims_nothing() -> None:
    nothing = Tally()
    assert nothing.lower_bound == 0.0 and math.isnan(nothing.share)
    assert math.isnan(nothing.worst_score)


def test_a_plan_that_misses_the_given_inputs_has_no_word() -> None:
    missed = Tally(0, 1, 0.0, 1.2, "x")
    found = Validation(missed, Tally(72, 72, 0.95), NONE, NONE, 0.95, 0.9)
    assert found.word is None and word_of(found) is None
    assert replace(found, perturbed=Tally(0, 72, 0.0)).word is None
    nine = Tally(9, 10, 0.0, 1.2, "x")
    asked = Validation(nine, Tally(72, 72, 0.95), NONE, NONE, 0.95, 0.9, wanted_of_given=0.9)
    assert asked.word is ValidationVerdict.VALIDATED


@pytest.mark.parametrize(
    ("prediction_limit", "word"),
    [(0.9, "validated"), (1.0, "validated"), (1.01, "inconclusive"), (math.inf, "inconclusive")],
)
def test_other_inputs_may_do_worse_than_copies_of_a_few(prediction_limit: float, word: str) -> None:
    copied = Tally(72, 72, 0.95, 0.9, "x, perturbed")
    few = replace(of(copied, copied), prediction_limit=prediction_limit)
    assert word_of(few) == word and not few.of_one
    alone = replace(few, given=Tally(1, 1))
    assert alone.of_one and word_of(alone) == word
    for kind in ("perturbed", "augmented"):  # of what there is
        assert word_of(replace(few, **{kind: NONE})) == word
    # Of 58 the next may still be worse, and inputs kept apart speak for others.
    assert word_of(replace(few, given=Tally(58, 58))) == word
    apart = replace(alone, holdout=Tally(72, 72, 0.95))
    assert word_of(apart) == "validated"
    many = replace(few, given=Tally(59, 59)), replace(few, given=Tally(29, 29), wanted=0.9)
    assert {word_of(other) for other in many} == {"validated"}
    bounding = replace(few, given=Tally(48, 48), holdout=Tally(11, 11, 0.76))
    assert word_of(bounding) == "validated"
    assert word_of(replace(bounding, given=Tally(47, 47))) == word
    # However many a set has, it is one.
    assert word_of(replace(few, given=Tally(1, 1), set_size=200)) == word
    assert word_of(replace(few, holdout=Tally(5, 5, 0.54))) == word


def test_one_set_that_was_kept_apart_and_misses_is_not_called_luck() -> None:
    copied, one = Tally(72, 72, 0.95, 0.9, "x"), Tally(0, 1, 0.0)
    together = replace(of(copied, copied, one), set_size=40)
    assert word_of(together) == "overfitted"
    assert word_of(replace(together, holdout_size=10)) == "inconclusive"


@pytest.mark.parametrize(("size", "word"), [(1, "validated"), (200, "inconclusive")])
def test_inputs_kept_apart_bound_the_share_where_no_copy_can_be_made(size: int, word: str) -> None:
    given, apart = Tally(40, 40), Tally(200, 200, 0.985)
    validation = Validation(given, Tally(), Tally(), apart, 0.95, holdout_size=size)
    assert validation.word == word
