"""How many inputs hold with how many pins."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from bisect_trt.core.holds import InputKind
from bisect_trt.core.names import counted
from bisect_trt.report.figures.figure import MUTED, SERIES, Figure, short

_APART = 0.09
"""Of the axis: so far apart two numbers of three digits stand beside each other at 390 pixels."""


def frontier_figure(frontier: pd.DataFrame) -> Figure | None:
    """A line a kind of input: the share that meets the requirement over the pins, with the plan
    that was picked marked. None for fewer than two rows.
    """
    if len(frontier) < 2:
        return None
    pins = [int(p) for p in frontier["pins"]]
    # None pinned has no place on a logarithmic axis, and linear ones hide where it is decided.
    places = [math.log1p(p) for p in pins]
    data: list[dict[str, Any]] = []
    for kind in InputKind:
        if not (frontier[f"{kind}_tested"] > 0).any():
            continue
        passed, tested = frontier[f"{kind}_passed"], frontier[f"{kind}_tested"]
        counts = [f"{p} of {t}" for p, t in zip(passed, tested, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": kind.words,
                "x": [short(x) for x in places],
                "y": [None if math.isnan(s) else short(s) for s in frontier[f"{kind}_share"]],
                "text": [f"{counted(p, 'pin')}: {c}" for p, c in zip(pins, counts, strict=True)],
                "hovertemplate": "%{text} (%{y:.1%})",
                # Where all hold, or none, lines lie upon each other: each shows around the next.
                "line": {"color": SERIES[kind], "width": 6 - 1.5 * len(data)},
                "marker": {"size": 14 - 3 * len(data)},
            }
        )
    layout = {
        "xaxis": {
            "title": {"text": "layers kept in FP32 (logarithmic)"},
            "tickangle": 0,
            **_ticks(places, pins, frontier["set"]),
        },
        "yaxis": {
            "title": {"text": "share that holds"},
            "tickformat": ".0%",
            "range": [-0.04, 1.04],
        },
        **_picked(frontier, places, pins),
    }
    alt = "Share of inputs that meet the requirement over the number of layers kept in FP32"
    return Figure("frontier-plot", alt, data, layout)


def _ticks(places: list[float], pins: list[int], sets: pd.Series[str]) -> dict[str, object]:
    """Numbers of pins where they stand apart on a phone too; the plan's before its neighbours."""
    least = _APART * (max(places) - min(places))
    kept: list[int] = []
    for i in sorted(range(len(places)), key=lambda i: sets.iloc[i] != "answer"):
        if all(abs(places[i] - places[k]) >= least for k in kept):
            kept.append(i)
    kept.sort()
    return {
        "tickvals": [short(places[i]) for i in kept],
        "ticktext": [str(pins[i]) for i in kept],
    }


def _picked(frontier: pd.DataFrame, places: list[float], pins: list[int]) -> dict[str, object]:
    """A line where the plan is that was written."""
    for place, count, source in zip(places, pins, frontier["set"], strict=True):
        if source == "answer":
            line = {"type": "line", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1}
            words = {
                "x": place,
                "yref": "paper",
                "y": 1,
                "text": f"the plan: {counted(count, 'pin')}",
            }
            return {
                "shapes": [{**line, "line": {"color": MUTED, "dash": "dot", "width": 2}}],
                "annotations": [{**words, "showarrow": False, "yanchor": "bottom"}],
                "legend": {"y": 1.1},  # above the words
            }
    return {}
