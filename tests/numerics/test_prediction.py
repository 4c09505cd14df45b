"""The prediction limit, against the tables and against lots of inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bisect_trt.numerics.prediction import prediction_limit, t_quantile


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
    drawn = np.exp(random.normal(-1.0, 0.5, size=(2000, inputs + 1)))
    limits = [prediction_limit(row[:-1].tolist(), inputs, share) for row in drawn]
    within = float(np.mean(drawn[:, -1] <= limits))
    assert within == pytest.approx(share, abs=0.02)


def test_what_shows_nothing_does_not_widen_it() -> None:
    few = [0.5, 0.45, 0.55, 0.5]
    assert prediction_limit([*few, 0.0, 0.0], 6, 0.95) == prediction_limit(
        [*few, 1e-9, 1e-3], 6, 0.95
    )
    assert prediction_limit([0.0, 0.0], 2, 0.95) == 0.0
    assert prediction_limit([-0.5, -0.2], 2, 0.95) == -0.2
    assert prediction_limit([0.5, math.inf], 8, 0.95) == math.inf
    assert prediction_limit([0.5], 8, 0.95) == math.inf
    assert prediction_limit(few, 1, 0.95) == prediction_limit([0.0], 1, 0.95) == math.inf
    assert prediction_limit(few, 4, 0.2) == prediction_limit(few, 4, 0.5)
