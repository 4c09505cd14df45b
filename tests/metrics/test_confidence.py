"""Clopper and Pearson's bound: the published cases, and that it is broken as rarely as it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.metrics.statistics import copies_needed, lower_bound


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
