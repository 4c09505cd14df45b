"""Bounds, prediction limits and numbers of copies: tables, and that they are broken as rarely as
they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.metrics.statistics import (
    copies_needed,
    limit_of_inputs,
    limit_of_sets,
    lower_bound,
    t_quantile,
)


@pytest.mark.parametrize(("tested", "bound"), [(22, 0.87), (29, 0.90), (59, 0.95), (93, 0.97)])
def test_all_passed(tested: int, bound: float) -> None:
    """Sohier et al., arXiv 1807.09655; for k = n the bound is (1 - confidence) ** (1 / n)."""
    assert lower_bound(tested, tested) == pytest.approx(0.05 ** (1 / tested), abs=1e-9)
    assert lower_bound(tested, tested) >= bound - 5e-3
    assert copies_needed(0.95) == 59 and lower_bound(58, 58) < 0.95 <= lower_bound(59, 59)


def test_some_failed() -> None:
    """Clopper and Pearson's tables: 9 of 10 at 95 % one-sided is 0.606; 45 of 50 is 0.799."""
    assert lower_bound(9, 10) == pytest.approx(0.6058, abs=1e-3)
    assert lower_bound(45, 50) == pytest.approx(0.8012, abs=3e-3)
    assert lower_bound(0, 10) == 0.0 and lower_bound(0, 0) == 0.0


@given(st.integers(1, 200), st.data())
def test_more_passes_never_lower_the_bound(tested: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, tested - 1))
    assert lower_bound(passed, tested) <= lower_bound(passed + 1, tested) <= 1.0
    assert lower_bound(passed, tested, 0.99) <= lower_bound(passed, tested, 0.95)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
def test_the_bound_is_broken_in_a_twentieth_of_tests_at_most(share: float) -> None:
    random = np.random.default_rng(0)
    passed = random.binomial(72, share, 4000)
    values, times = np.unique(passed, return_counts=True)
    broken = np.average([lower_bound(int(k), 72) > share for k in values], weights=times)
    assert broken <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)


@pytest.mark.parametrize(
    ("freedom", "share", "t"),
    [
        (1, 0.95, 6.3138),
        (2, 0.95, 2.9200),
        (3, 0.95, 2.3534),
        (4, 0.95, 2.1318),
        (7, 0.95, 1.8946),
        (17, 0.95, 1.7396),
        (100, 0.95, 1.6602),
        (5, 0.90, 1.4759),
        (8, 0.99, 2.8965),
        (3, 0.50, 0.0),
    ],
)
def test_t_is_the_one_of_the_tables(freedom: int, share: float, t: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(t, abs=5e-5)


@pytest.mark.parametrize("inputs", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("share", [0.9, 0.95])
def test_so_many_further_inputs_are_within_the_limit(inputs: int, share: float) -> None:
    """Inputs whose scores are log-normal, one copy of each: the limit is exact then, but for scores
    so small that they do not tell (their spread is counted as less).
    """
    random = np.random.default_rng(inputs)
    copied = np.exp(random.normal(-1.0, 0.5, size=(2000, inputs + 1)))
    limits = [limit_of_inputs(row[:-1].tolist(), inputs, share) for row in copied]
    within = float(np.mean(copied[:, -1] <= limits))
    assert within == pytest.approx(share, abs=0.02)


def test_what_shows_nothing_does_not_widen_it() -> None:
    few = [0.5, 0.45, 0.55, 0.5]
    assert limit_of_inputs([*few, 0.0, 0.0], 6, 0.95) == limit_of_inputs(
        [*few, 1e-9, 1e-3], 6, 0.95
    )
    assert limit_of_inputs([0.0, 0.0], 2, 0.95) == 0.0
    assert limit_of_inputs([-0.5, -0.2], 2, 0.95) == -0.2
    assert limit_of_inputs([0.5, math.inf], 8, 0.95) == math.inf
    assert limit_of_inputs([0.5], 8, 0.95) == math.inf
    assert limit_of_inputs(few, 1, 0.95) == limit_of_inputs([0.0], 1, 0.95) == math.inf
    assert limit_of_inputs(few, 4, 0.2) == limit_of_inputs(few, 4, 0.5)


@pytest.mark.parametrize(("inputs", "width"), [(20, 0.3), (20, 1.0), (64, 1.0)])
def test_so_many_further_sets_are_within_the_limit(inputs: int, width: float) -> None:
    """Means of log-normal scores. Resampling underrates a long tail a little."""
    random = np.random.default_rng(inputs)
    within = 0
    for _ in range(200):
        given, other = np.exp(random.normal(0.0, width, size=(2, inputs)))

        def mean(places: Sequence[int], scores: np.ndarray = given) -> float:
            return float(scores[list(places)].mean())

        within += other.mean() <= limit_of_sets(mean, inputs, inputs, 0.975)
    assert within / 200 >= (0.95 if width < 1.0 else 0.92)


def test_a_set_that_cannot_be_scored_tells_nothing_of_others() -> None:
    assert limit_of_sets(lambda _: math.inf, 20, 20, 0.95) == math.inf
    assert limit_of_sets(lambda _: 0.5, 20, 20, 0.95) == 0.5
