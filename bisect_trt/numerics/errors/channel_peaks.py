"""How the largest magnitudes spread over a tensor's channels: few channels that need the whole
range beside many that need little of it are what a 16-bit float serves badly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ChannelPeaks:
    """The quartiles of the channels' largest magnitudes, in the tensor's units, and the channel
    with the largest of all; NaN and -1 where there are no channels.
    """

    channels: int = 0
    channel_peak_min: float = math.nan
    channel_peak_p25: float = math.nan
    channel_peak_p50: float = math.nan
    channel_peak_p75: float = math.nan
    channel_peak_max: float = math.nan
    worst_channel: int = -1


def channel_peaks(array: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """The largest magnitude of each channel along ``axis``, (channels,) float32, in the tensor's
    units; values that are not finite are left out. Empty for a tensor of less than two axes, or
    without elements.
    """
    if array.ndim < 2 or not array.size:
        return np.empty(0, np.float32)
    others = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
    sizes = np.abs(array)
    peaks = sizes.max(axis=others)
    if not np.isfinite(peaks).all():
        peaks = np.where(np.isfinite(sizes), sizes, 0.0).max(axis=others)
    return np.asarray(peaks, np.float32)


def quartiles(peaks: NDArray[np.float32]) -> ChannelPeaks:
    """What :func:`channel_peaks` gave, (channels,), in five numbers."""
    if not peaks.size:
        return ChannelPeaks()
    ordered = np.sort(peaks).tolist()
    low, first, middle, third, high = (_quantile(ordered, q) for q in (0.0, 0.25, 0.5, 0.75, 1.0))
    return ChannelPeaks(peaks.size, low, first, middle, third, high, int(peaks.argmax()))


def _quantile(ordered: list[float], share: float) -> float:
    """As NumPy's, linear between neighbours, in a tenth of its time: its cost is that of a call."""
    place = share * (len(ordered) - 1)
    below = int(place)
    one, other = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    part = place - below
    return other - (other - one) * (1.0 - part) if part >= 0.5 else one + (other - one) * part
