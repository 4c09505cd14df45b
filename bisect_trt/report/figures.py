"""Builds the plots of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import InputKind
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.report.tables import is_measured

ACCENT = "#4c8bf5"
BAD = "#e5484d"
GOOD = "#30a46c"
MUTED = "#8b8d98"
_KIND_COLOURS = dict(zip(InputKind, (ACCENT, "#e5733c", "#b58b1b", GOOD), strict=True))

Trace = dict[str, Any]
Layout = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A plot for Plotly."""

    name: str  # id in the page
    alt: str  # what it shows, in words
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    # Whether x values are rows of the layer table; the page then adds names.
    of_layers: bool = False
    height: int = 340  # pixels

    def as_json(self) -> dict[str, Any]:
        """The plot as the page's script reads it."""
        return {
            "name": self.name,
            "data": list(self.data),
            "layout": {**self.layout, "height": self.height},
            "ofLayers": self.of_layers,
        }


def short(value: float) -> float:
    """``value`` with four digits, to keep the file small."""
    return float(f"{value:.4g}")


def _positive(values: Iterable[float]) -> list[float | None]:
    """Rounds ``values`` for a logarithmic axis; None where it cannot show them."""
    return [short(v) if 0.0 < v < math.inf else None for v in map(float, values)]


def _scatter(name: str, x: Sequence[Any], y: Sequence[Any], mode: str, **more: Any) -> Trace:
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def _line(name: str, values: pd.Series[Any], colour: str) -> Trace:
    """A line through one value per layer, with gaps where a logarithmic axis cannot show it."""
    line = {"color": colour, "width": 1.5}
    rows = list(range(len(values)))
    hover = "%{text}<br>%{y:.3g}"
    return _scatter(name, rows, _positive(values), "lines", line=line, hovertemplate=hover)


def _marks(name: str, rows: Any, values: Iterable[float], marker: Layout) -> Trace:
    """Marks at some layers."""
    # Plotly makes marks of different sizes transparent unless told their opacity.
    marker = {"color": ACCENT, "line": {"width": 2}, "opacity": 1, **marker}
    x, y = [int(row) for row in rows], _positive(values)
    return _scatter(name, x, y, "markers", marker=marker, hovertemplate="%{text}")


def _title(words: str) -> Layout:
    return {"title": {"text": words}}


def _log_axis(title: str, values: Iterable[float | None]) -> Layout:
    """A logarithmic axis for ``values``, with ticks at powers of ten over several decades."""
    known = [v for v in values if v is not None and 0.0 < v < math.inf]
    decades = math.log10(max(known) / min(known)) if known else 0.0
    axis = {**_title(title), "type": "log", "exponentformat": "power"}
    # Plotly alone labels 2 and 5 between powers; over many decades it thins out ticks well.
    return axis | ({"dtick": 1} if 1.5 < decades < 9.0 else {})


def _levels(*levels: tuple[float, str, str]) -> Layout:
    """Labelled horizontal lines on a logarithmic y axis."""
    layout: Layout = {"shapes": [], "annotations": []}
    for value, words, colour in levels:
        line = {"color": colour, "width": 1.5, "dash": "dash"}
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
        place = {"xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom"}
        font = {"color": colour, "size": 11}
        # On a logarithmic axis Plotly takes values for shapes, but exponents for annotations.
        note = {"y": math.log10(value), "text": words, "showarrow": False, "font": font}
        layout["shapes"].append({**across, "line": line})
        layout["annotations"].append({**place, **note})
    return layout


_NETWORK = _title("layer, in network order")
_ERRORS = (
    ("everything reduced", "rel_range", "finite", BAD),
    ("the layer alone", "introduced_rel_range", "introduced_finite", ACCENT),
    ("on the engine, outputs marked", "engine_rel_range", "engine_finite", GOOD),
)


def errors_figure(layers: pd.DataFrame) -> Figure | None:
    """Accumulated and introduced errors of the layers, with pins and non-finite layers marked.

    Returns None where no errors were measured.
    """
    if "rel_range" not in layers or not len(layers):
        return None
    lines = [
        _line(words, layers[column].mask(_broken(layers, column, finite)), colour)
        for words, column, finite, colour in _ERRORS
        if column in layers
    ]
    drawn = [v for line in lines for v in line["y"] if v is not None]
    broken = _broken(layers, "rel_range", "finite")
    # The finite values of a layer that overflowed may have small errors, so its mark goes on top.
    heights = layers["rel_range"].mask(broken, 3.0 * max(drawn, default=1.0)).fillna(0.0)
    pinned = np.flatnonzero(layers["pinned"].astype(bool))
    source = np.flatnonzero(layers["source"]) if "source" in layers else np.empty(0, int)
    around = [20 if b else 9 for b in broken.iloc[pinned]]
    star = {"symbol": "star", "color": BAD, "size": 14}
    marks = (
        ("not finite", np.flatnonzero(broken), {"symbol": "x", "color": BAD, "size": 9}),
        ("source: wrong while its inputs are right", source, star),
        ("pinned", pinned, {"symbol": "circle-open", "size": around}),
    )
    data = [*lines, *(_marks(w, rows, heights.iloc[rows], m) for w, rows, m in marks if len(rows))]
    layout = {"xaxis": _NETWORK, "yaxis": _log_axis("largest error / the layer's range", drawn)}
    alt = "Error of each layer along the network, accumulated and introduced"
    return Figure("errors-plot", alt, data, layout, of_layers=True, height=400)


def _broken(layers: pd.DataFrame, column: str, finite: str) -> pd.Series[bool]:
    """The layers with an error in ``column`` that covers finite values only, or none."""
    endless = layers[column].isin([np.inf])
    if finite not in layers:
        return endless
    return endless | (is_measured(layers) & layers[finite].eq(False))


def tradeoff_figure(tradeoff: pd.DataFrame) -> Figure | None:
    """The share of each kind of input that meets the requirement, over the number of pins."""
    if len(tradeoff) < 2:
        return None
    pins = [int(p) for p in tradeoff["pins"]]
    # Even distances: a linear axis would crowd the small sets, a logarithmic one has no 0.
    places = [str(p) for p in pins]
    data: list[Trace] = []
    for kind in InputKind:
        passed, tested = tradeoff[f"{kind}_passed"], tradeoff[f"{kind}_tested"]
        if not (tested > 0).any():
            continue
        shares = [None if math.isnan(s) else short(s) for s in tradeoff[f"{kind}_share"]]
        rows = zip(pins, passed, tested, strict=True)
        style = {
            # Each line is thinner than the last, so that equal ones stay visible.
            "line": {"color": _KIND_COLOURS[kind], "width": 6 - 1.5 * len(data)},
            "marker": {"size": 14 - 3 * len(data)},
            "text": [f"{counted(p, 'pin')}: {n} of {of}" for p, n, of in rows],
            "hovertemplate": "%{text} (%{y:.1%})",
        }
        data.append(_scatter(kind.words, places, shares, "lines+markers", **style))
    layout: Layout = {
        "xaxis": {**_title("layers kept in FP32"), "type": "category", "tickangle": 0},
        "yaxis": {**_title("share that holds"), "tickformat": ".0%", "range": [-0.04, 1.04]},
    }
    categories = list(dict.fromkeys(places))
    for place, source in zip(places, tradeoff["set"], strict=True):
        if source == "answer":
            x = categories.index(place)  # Plotly takes "146" for the 146th category
            across = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
            layout["shapes"] = [{**across, "line": {"color": MUTED, "dash": "dot", "width": 2}}]
            words = f"the plan: {counted(int(place), 'pin')}"
            above = {"x": x, "yref": "paper", "y": 1, "yanchor": "bottom"}
            layout["annotations"] = [{**above, "text": words, "showarrow": False}]
            layout["legend"] = {"y": 1.1}  # above the words
    alt = "Share of inputs that meet the requirement over the number of layers kept in FP32"
    return Figure("tradeoff-plot", alt, data, layout)


_SPREAD = [f"channel_peak_{q}" for q in ("p25", "p50", "p75", "max")]


def ranges_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """The largest magnitude of each layer and its channels, with the limits of ``precision``."""
    if "ref_max" not in layers or not layers["ref_max"].notna().any():
        return None
    largest = layers[["ref_min", "ref_max"]].abs().max(axis=1)
    data: list[Trace] = []
    if set(_SPREAD) <= set(layers.columns):
        # Gaps would tear the band, so a layer without channels counts as one channel.
        spread = layers[_SPREAD].apply(lambda column: column.fillna(largest))
        # A zero is exact in every precision, and a logarithmic axis cannot show it: the next
        # larger channel stands for it, and 1e-12 for a layer of zeros.
        spread = spread.where(spread > 0.0).bfill(axis=1).fillna(1e-12)
        quiet = {"line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None}
        fill = {"fill": "tonexty", "fillcolor": "rgba(139,141,152,.35)"}
        for column, more in (("p25", {"showlegend": False}), ("p75", fill)):
            edge = _line("channels, the middle half", spread[f"channel_peak_{column}"], MUTED)
            data.append({**edge, **quiet, **more})
    data.append(_line("the largest value", largest, ACCENT))
    pinned = np.flatnonzero(layers["pinned"].astype(bool))
    if pinned.size:
        mark = {"symbol": "circle-open", "size": 9}
        data.append(_marks("pinned", pinned, largest.iloc[pinned], mark))
    layout = {"xaxis": _NETWORK, **_limits("magnitude in FP32", largest, precision)}
    alt = f"Magnitudes of each layer's values against the limits of {precision.value.upper()}"
    return Figure("ranges-plot", alt, data, layout, of_layers=True, height=360)


def _limits(title: str, values: pd.Series[Any], precision: Precision) -> Layout:
    """The y axis of magnitudes, with lines at the limits of ``precision`` if FP32's differ."""
    if precision not in LARGEST or precision not in SMALLEST_SUBNORMAL:
        return {"yaxis": _log_axis(title, values)}
    name = precision.value.upper()
    largest, smallest = LARGEST[precision], SMALLEST_SUBNORMAL[precision]
    # The axis ends a little below the smallest subnormal, however tiny the values are.
    top = max(largest, *(v for v in values if math.isfinite(v)))
    ends = [math.log10(smallest) - 1.2, math.log10(top) + 1.0]
    axis = {**_log_axis(title, [largest, smallest, *values]), "range": ends}
    levels = _levels(
        (largest, f"{name}: infinite beyond {largest:.5g}", BAD),
        (smallest, f"{name}: zero below about {smallest:.1g}", MUTED),
    )
    return {"yaxis": axis, **levels}
