"""The median against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bisect_trt.metrics.errors import median

SIZES = (1, 2, 3, 1000, 32767, 32768, 32769, 200_000, 200_001)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_equals_numpy_s(size: int, dtype: type[np.floating]) -> None:
    random = np.random.default_rng(size)
    for values in (
        np.abs(random.normal(size=size)),
        np.maximum(random.normal(size=size), 0.0),
        np.where(random.random(size) < 0.45, 0.0, random.random(size)),
        np.repeat([0.0, *random.random(1 + (size - 1) // 2)], 2)[:size],
        np.append(np.zeros(size // 2), 1.0 + random.random(size - size // 2)),
        random.integers(0, 3, size).astype(np.float64),
        np.zeros(size),
        np.sort(random.random(size)),
    ):
        _agrees(values.astype(dtype))


@given(st.integers(32768, 70_000), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_whatever_the_sample_sees(size: int, seed: int, kinds: int) -> None:
    """Few distinct values in runs, which a sample by stride may miss or see alone."""
    random = np.random.default_rng(seed)
    runs = np.repeat(random.random(kinds), random.multinomial(size, np.ones(kinds) / kinds))
    runs[:: size // (1 << 12)] = random.random()
    _agrees(runs)


def _agrees(values: NDArray[np.floating]) -> None:
    wanted = np.sort(values)
    half = values.size // 2
    exact = float(wanted[half])
    if values.size % 2 == 0:
        exact = (float(wanted[half - 1]) + exact) / 2.0
    assert median(values.copy()) == exact
