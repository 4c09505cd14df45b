"""Rows, channels and medians of tensors, against NumPy and known values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bisect_trt.metrics.errors import ChannelPeaks, channel_peaks, median, quartiles


def test_each_channel_has_its_own_peak() -> None:
    array = np.zeros((2, 5, 3, 3), np.float32)
    for channel in range(5):
        array[channel % 2, channel, 1, 2] = -(10.0**channel)
    assert channel_peaks(array, 1).tolist() == [1.0, 10.0, 100.0, 1000.0, 10000.0]
    assert channel_peaks(np.moveaxis(array, 1, -1), -1).tolist() == [1, 10, 100, 1000, 10000]
    five = quartiles(channel_peaks(array, 1))
    assert five == ChannelPeaks(5, 1.0, 10.0, 100.0, 1000.0, 10000.0, 4)


def test_values_that_are_not_finite_are_left_out() -> None:
    array = np.array([[np.inf, 1.0], [2.0, np.nan]], np.float32)
    assert channel_peaks(array, 1).tolist() == [2.0, 1.0]


def test_a_tensor_without_channels_has_no_peaks() -> None:
    for array in (np.float32(3.0), np.ones(4, np.float32), np.ones((2, 0), np.float32)):
        assert quartiles(channel_peaks(np.asarray(array), -1)).channels == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.0, 1e30), min_size=1, max_size=40))
def test_quartiles_are_numpys(values: list[float]) -> None:
    found = quartiles(np.asarray(values))
    five = (found.channel_peak_min, found.channel_peak_p25, found.channel_peak_p50)
    five += (found.channel_peak_p75, found.channel_peak_max)
    assert five == tuple(np.quantile(values, (0.0, 0.25, 0.5, 0.75, 1.0)))
    assert values[found.worst_channel] == max(values)


NAN, INF = np.nan, np.inf


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
