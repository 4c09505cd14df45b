"""Traces along the network, a place a layer."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from bisect_trt.report.figures.figure import positive, short

NETWORK = {"title": {"text": "layer, in network order"}}
"""The x axis."""


def line_of(words: str, places: Any, values: pd.Series[Any], colour: str) -> dict[str, Any]:
    """A trace through a value a layer, with gaps where a logarithmic axis has no place.

    Args:
        words: for the legend.
        places: of the layers.
        values: a value a place.
        colour: as CSS has it.
    """
    return {
        "type": "scatter",
        "mode": "lines",
        "name": words,
        "x": places.tolist(),
        "y": positive(values),
        "line": {"color": colour, "width": 1.5},
        "hovertemplate": "%{text}<br>%{y:.3g}",
    }


def marks_of(
    words: str, places: Any, values: pd.Series[Any], symbol: str, colour: str, size: Any
) -> dict[str, Any]:
    """A trace of marks at some layers; none where a logarithmic axis has no place.

    Args:
        words: for the legend.
        places: of these layers.
        values: their heights.
        symbol: as Plotly calls it.
        colour: as CSS has it.
        size: in pixels, of all or of each.
    """
    return {
        "type": "scatter",
        "mode": "markers",
        "name": words,
        "x": places.tolist(),
        "y": [short(v) if math.isfinite(v) and v > 0.0 else None for v in values],
        "marker": {
            "symbol": symbol,
            "color": colour,
            "size": size,
            "line": {"width": 2},
            "opacity": 1,  # less, by itself, where sizes differ
        },
        "hovertemplate": "%{text}",
    }
