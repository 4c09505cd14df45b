"""Value ranges along the network against the limits of a precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.core.precision import Precision
from bisect_trt.numerics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.report.figures.along_network import NETWORK, line_of, marks_of
from bisect_trt.report.figures.figure import (
    ACCENT,
    MUTED,
    Figure,
    line_at,
    lines_at,
    log_axis,
    short,
)

_SPREAD = [f"channel_peak_{q}" for q in ("min", "p25", "p50", "p75", "max")]
_SHOWN_BOXES = 400
_FLOOR = 1e-12
"""Where a logarithmic axis shows a layer that is all zeros."""


def ranges_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """The largest magnitude of each layer in FP32, and of its channels, against the limits of
    ``precision``. None where no ranges were measured.
    """
    if "ref_max" not in layers or not layers["ref_max"].notna().any():
        return None
    largest = layers[["ref_min", "ref_max"]].abs().max(axis=1)
    places = np.arange(len(layers))
    data: list[dict[str, Any]] = []
    if set(_SPREAD) <= set(layers.columns):
        # Without gaps, which would tear the band: what has no channels is one.
        spread = _alive(layers[_SPREAD].apply(lambda column: column.fillna(largest)))
        spread = spread.fillna(_FLOOR)
        low = line_of("channels, the middle half", places, spread["channel_peak_p25"], MUTED)
        high = line_of("channels, the middle half", places, spread["channel_peak_p75"], MUTED)
        quiet = {"line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None}
        data.append({**low, **quiet, "showlegend": False})
        data.append({**high, **quiet, "fill": "tonexty", "fillcolor": "rgba(139,141,152,.35)"})
    data.append(line_of("the largest value", places, largest, ACCENT))
    pinned = np.flatnonzero(layers["pinned"].astype(bool))
    if pinned.size:
        height = largest.iloc[pinned]
        data.append(marks_of("pinned", pinned, height, "circle-open", ACCENT, 9))
    axis = _magnitudes("magnitude in FP32", largest, precision)
    layout = {"xaxis": NETWORK, "yaxis": axis, **_limits(precision)}
    alt = f"Magnitudes of each layer's values against the limits of {precision.value.upper()}"
    return Figure("ranges-plot", alt, data, layout, of_layers=True, height=360)


def channels_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """A box a pinned layer: how the largest magnitudes of its channels spread. None where nothing
    is pinned, or channels were not measured.
    """
    if not set(_SPREAD) <= set(layers.columns):
        return None
    alive = (layers["channels"] > 0) & (layers["channel_peak_max"] > 0.0)
    pinned = np.flatnonzero(layers["pinned"].astype(bool) & alive)
    if not pinned.size:
        return None
    pinned = pinned[:_SHOWN_BOXES]
    rows = layers.iloc[pinned]
    spread = _alive(rows[_SPREAD])
    low, first, middle, third, high = (spread[c] for c in _SPREAD)
    places = list(range(len(rows)))
    whiskers: list[float | None] = []
    for bottom, top in zip(low, high, strict=True):
        whiskers += [short(bottom), short(top), None]
    names = [int(i) for i in pinned]
    facts = [
        f"{n:.0f} channels; channel {w:.0f} is the largest"
        for n, w in zip(rows["channels"], rows["worst_channel"], strict=True)
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "smallest to largest channel",
            "x": [x for i in places for x in (i, i, None)],
            "y": whiskers,
            "line": {"color": MUTED, "width": 1.5},
            "hoverinfo": "skip",
        },
        {
            "type": "bar",
            "name": "the middle half of the channels",
            "x": places,
            "y": [short(b - a) for a, b in zip(first, third, strict=True)],
            "base": [short(v) for v in first],
            "marker": {"color": ACCENT, "opacity": 0.55},
            "layers": names,
            "customdata": facts,
            "hovertemplate": "%{text}<br>%{customdata}",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "the median channel",
            "x": places,
            "y": [short(v) for v in middle],
            "marker": {"color": ACCENT, "symbol": "line-ew-open", "size": 9},
            "layers": names,
            "hovertemplate": "%{text}<br>%{y:.3g}",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "pinned layer, in network order"}},
        "yaxis": _magnitudes("largest magnitude of a channel", high, precision),
        **_limits(precision),
    }
    alt = "Spread of the largest magnitudes over the channels of each pinned layer"
    return Figure("channels-plot", alt, data, layout, of_layers=True, height=360)


def _alive(spread: pd.DataFrame) -> pd.DataFrame:
    """The spread of channels (columns from small to large) without those that are zero: nothing of
    them is lost in any precision, and there is no place for them on a logarithmic axis.
    """
    return spread.where(spread > 0.0).bfill(axis=1)


def _ends(precision: Precision) -> list[float]:
    """The largest and the smallest number of ``precision``; none where it has FP32's range."""
    return [t[precision] for t in (LARGEST, SMALLEST_SUBNORMAL) if precision in t]


def _magnitudes(title: str, values: pd.Series[Any], precision: Precision) -> dict[str, Any]:
    """An axis that shows the limits, and not how tiny the tiniest values are."""
    ends = _ends(precision)
    axis = log_axis(title, [*ends, *values])
    if not ends:
        return axis
    top = max(ends[0], *(v for v in values if math.isfinite(v)))
    return {**axis, "range": [math.log10(ends[1]) - 1.2, math.log10(top) + 1.0]}


def _limits(precision: Precision) -> dict[str, Any]:
    """Lines at the limits of ``precision``."""
    if not _ends(precision):
        return {}
    name, (largest, smallest) = precision.value.upper(), _ends(precision)
    return lines_at(
        line_at(largest, f"{name}: infinite beyond {largest:.5g}"),
        line_at(smallest, f"{name}: zero below about {smallest:.1g}", MUTED),
    )
