"""Quartiles of the channels' peaks, on tensors whose peaks are known."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_trt.metrics.errors import ChannelPeaks, channel_peaks, quartiles


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
