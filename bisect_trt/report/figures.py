"""Builds the plots of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.tables import is_measured

ACCENT = "#4c8bf5"
BAD = "#e5484d"
GOOD = "#30a46c"
MUTED = "#8b8d98"
STRONG = "#1f5fd0"
QUIET = "#5f636b"
CONSTANTS = "#d9822b"

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
        font = {"size": 11}  # the page's colour: the line's has too little contrast for words
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
    star = {"symbol": "star", "color": BAD, "size": 14}
    marks = (
        ("pinned", pinned, {"symbol": "circle", "size": 5}),
        ("not finite", np.flatnonzero(broken), {"symbol": "x", "color": BAD, "size": 9}),
        ("source: wrong while its inputs are right", source, star),
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


def curve_figures(tradeoff: pd.DataFrame, choices: Sequence[Choice]) -> list[Figure]:
    """The errors of plans against their layers in FP32, and against their time where it differs.

    Lines are the worst and the 95th-percentile error of tradeoff.csv, marks are ``choices``.
    """
    if not choices:
        return []
    layers = [float(len(choice.pinned)) for choice in choices]
    pins = tradeoff["pins"].astype(float) if len(tradeoff) else pd.Series(dtype=float)
    ticks = _count_ticks(max([*layers, *pins, 1.0]))
    places = [math.log10(1.0 + tick) for tick in ticks]
    axis = {**_title("layers in FP32"), "tickvals": places, "ticktext": [str(t) for t in ticks]}
    alt = "Error, in tolerances, against the number of layers in FP32"
    by_layers = _by(choices, [math.log10(1.0 + n) for n in layers], np.log10(1.0 + pins), tradeoff)
    endless = _endless(choices, tradeoff)
    drawn = _with_axis(by_layers, axis, endless)
    found = [Figure("layers-plot", alt, *drawn, height=_CURVE_HEIGHT)]
    low = choices[0].plan.base.value.upper()
    column, title = "saving_kept", f"predicted time (0 % {low}, 100 % FP32)"
    times = [c.saving_kept if c.saving_kept is not None else math.nan for c in choices]
    is_measured = sum(choice.latency_ms is not None for choice in choices) > 1
    if is_measured:
        column, title = "latency_ms", "measured time, ms"
        times = [c.latency_ms if c.latency_ms is not None else math.nan for c in choices]
    of_curve = tradeoff[column].astype(float) if column in tradeoff else pd.Series(dtype=float)
    if not is_measured:
        times, of_curve = [1.0 - share for share in times], 1.0 - of_curve
    known = [time for time in times if not math.isnan(time)]
    if known and max(known) > min(known):
        axis = {**_title(title), **({} if is_measured else {"tickformat": ".0%"})}
        by_time = _by(choices, times, of_curve, tradeoff)
        alt = f"Error, in tolerances, against {title}"
        data, layout = _with_axis(by_time, axis, endless)
        # The plot above has the same lines.
        layout |= {"showlegend": False}
        found.append(Figure("time-plot", alt, data, layout, height=_CURVE_HEIGHT))
    return found


_CURVE_HEIGHT = 174
LOWEST_SCORE = 1e-2
HIGHEST_SCORE = 1e4
"""Ends of the axis of errors, in tolerances; what is beyond stands there."""
_LINES = (("worst error", "worst_score", "solid"), ("95th percentile", "p95_score", "dot"))
_FILLED = {"line": {"width": 0}, "opacity": 1}


def letter(place: int) -> str:
    """The letter that marks the choice of row ``place``, from 0, in plots and tables."""
    return chr(ord("A") + place)


def _count_ticks(most: float) -> list[int]:
    """0, powers of ten and three times these, and ``most``, for an axis of log(1 + count)."""
    usual = [n * 10**k for k in range(9) for n in (1, 3)]
    return [0, *(n for n in usual if n <= 0.6 * most), int(most)]


def _endless(choices: Sequence[Choice], tradeoff: pd.DataFrame) -> str:
    """What the scores are called that no axis can hold; blank where there are none."""
    scores = [choice.worst_score for choice in choices]
    for _, column, _ in _LINES:
        scores += [*tradeoff.get(column, ())]
    beyond = [score for score in scores if score >= NOTHING_ALLOWED]
    return brief(max(beyond)) if beyond else ""


def _by(
    choices: Sequence[Choice], places: Sequence[float], of_curve: Any, tradeoff: pd.DataFrame
) -> list[Trace]:
    """Lines through the curve at ``of_curve``, and the choices at ``places``."""
    scores = [choice.worst_score for choice in choices]
    known = [s for s in scores if 0.0 < s < NOTHING_ALLOWED]
    for _, column, _ in _LINES:
        known += [s for s in tradeoff.get(column, ()) if 0.0 < s < NOTHING_ALLOWED]
    # Far below the tolerance all is well: shown true to scale, FP32 would press what is near the
    # tolerance into a line.
    low = max(LOWEST_SCORE, min([*known, 1.0]) / 3.0)
    high = min(HIGHEST_SCORE, 3.0 * max([*known, 1.0]))

    def height(score: float) -> float:
        """Where the score stands; what is no number stands above all others."""
        return 3.0 * high if score >= NOTHING_ALLOWED else min(max(score, low), high)

    data: list[Trace] = []
    for words, column, dash in _LINES:
        if column not in tradeoff or len(of_curve.dropna()) < 2:
            continue
        rows = sorted(
            (x, short(height(y)))
            for x, y in zip(of_curve, tradeoff[column], strict=True)
            if not (math.isnan(x) or math.isnan(y))
        )
        style = {"line": {"color": ACCENT, "dash": dash, "width": 2}, "marker": {"size": 5}}
        x, y = [short(row[0]) for row in rows], [row[1] for row in rows]
        data.append(_scatter(words, x, y, "lines+markers", hovertemplate="%{y:.3g}", **style))
    spots = [
        (x, height(s), place)
        for place, (x, s) in enumerate(zip(places, scores, strict=True))
        if not (math.isnan(x) or math.isnan(s))
    ]
    groups = _together(spots, [choice.passes is not Passes.NO for choice in choices])
    # The recommended one is drawn last, above the others.
    groups.sort(key=lambda group: any(choices[place].recommended for _, _, place in group))
    return [*data, *(_spot(group, choices) for group in groups)]


_Spot = tuple[float, float, int]


def _together(spots: Sequence[_Spot], passes: Sequence[bool]) -> list[list[_Spot]]:
    """Groups spots whose marks would cover each other, if both pass or both fail."""
    wide = max((x for x, _, _ in spots), default=0.0) - min((x for x, _, _ in spots), default=0.0)
    ys = [math.log10(y) for _, y, _ in spots]
    tall = max(ys, default=0.0) - min(ys, default=0.0)
    groups: list[list[_Spot]] = []
    for spot in spots:
        for group in groups:
            x, y, _ = group[0]
            far_x = abs(spot[0] - x) / (wide or 1.0)
            far_y = abs(math.log10(spot[1] / y)) / (tall or 1.0)
            alike = passes[spot[2]] == passes[group[0][2]]
            if far_x < 0.05 and far_y < 0.1 and alike:
                group.append(spot)
                break
        else:
            groups.append([spot])
    return groups


def _spot(group: Sequence[_Spot], choices: Sequence[Choice]) -> Trace:
    """A mark with the letters of choices: a square where none of them passes."""
    rows = [choices[place] for _, _, place in group]
    said = [
        f"{letter(place)} {choices[place].name}: {counted(len(choices[place].pinned), 'layer')} "
        f"in FP32, {brief(choices[place].worst_score)}"
        for _, _, place in group
    ]
    marker = {
        **_FILLED,
        "symbol": "square" if rows[0].passes is Passes.NO else "circle",
        "size": 12 + 8 * len(group),
        "color": STRONG if any(row.recommended for row in rows) else QUIET,
    }
    return _scatter(
        "choice",
        [short(group[0][0])],
        [short(group[0][1])],
        "markers+text",
        text=["".join(letter(place) for _, _, place in group)],
        textfont={"color": "#fff", "size": 12},
        marker=marker,
        showlegend=False,
        hovertemplate="<br>".join(said) + "<extra></extra>",
        cliponaxis=False,
    )


def _with_axis(data: list[Trace], xaxis: Layout, endless: str) -> tuple[list[Trace], Layout]:
    """The traces, and a layout with the tolerance as a line; ``endless`` names the axis' top."""
    values = [1.0, *(y for trace in data for y in trace["y"])]
    ends = [math.log10(min(values)), math.log10(max(values))]
    room = 0.12 * (ends[1] - ends[0]) + 0.05
    top = ends[1] + (0.0 if endless else room)
    axis = {**_log_axis("error / tolerance", values), "range": [ends[0] - room, top]}
    levels = _levels((1.0, "tolerance", BAD))
    if endless:
        levels["annotations"].append({**levels["annotations"][0], "y": top, "text": endless})
    # Half a mark stands above the axis.
    return data, {"xaxis": xaxis, "yaxis": axis, "margin": {"t": 16, "b": 36}, **levels}


_SPREAD = [f"channel_peak_{q}" for q in ("p25", "p50", "p75", "max")]


def ranges_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """The magnitudes of each layer's outputs and constants, with the limits of ``precision``.

    Magnitudes far beyond the limits stand at the edge of the plot.
    """
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
    data.append(_line("activations, the largest", largest, ACCENT))
    ends = constant_ends(layers)
    low, high = (ends[0], ends[1]) if ends is not None else (None, None)
    top = [*largest, *(high if high is not None else ())]
    limits, (bottom, ceiling) = _limits("magnitude in FP32", top, precision)
    beyond = largest > LARGEST.get(precision, math.inf)
    heights = largest
    for words, values, symbol in (
        ("constants, the largest", high, "diamond"),
        ("constants, the smallest", low, "diamond-open"),
    ):
        if values is None:
            continue
        rows = np.flatnonzero(values.notna())
        shown = values.clip(bottom, ceiling)
        mark = {"symbol": symbol, "color": CONSTANTS, "size": 5}
        mark["line"] = {"width": 1, "color": CONSTANTS}
        data.append(_marks(words, rows, shown.iloc[rows], mark))
    if high is not None:
        beyond |= high > LARGEST.get(precision, math.inf)
        heights = largest.fillna(0.0).combine(high.fillna(0.0), max)
    if beyond.any():
        rows = np.flatnonzero(beyond)
        mark = {"symbol": "x", "color": BAD, "size": 12, "line": {"width": 0}}
        data.append(_marks("beyond the limit", rows, heights.clip(bottom, ceiling)[beyond], mark))
    layout = {"xaxis": _NETWORK, **limits}
    alt = f"Magnitudes of activations and constants against {precision.value.upper()}'s limits"
    return Figure("ranges-plot", alt, data, layout, of_layers=True, height=360)


def constant_ends(layers: pd.DataFrame) -> tuple[pd.Series[float], pd.Series[float]] | None:
    """The smallest and the largest magnitude of each layer's constants; None where none is known.

    The series are NaN for layers without constants.
    """
    if "constant_max" not in layers or not layers["constant_max"].notna().any():
        return None
    return layers["constant_min"].astype(float), layers["constant_max"].astype(float)


def _limits(
    title: str, values: Sequence[float], precision: Precision
) -> tuple[Layout, tuple[float, float]]:
    """The y axis of magnitudes, with lines at the limits of ``precision`` if FP32's differ.

    Gives the smallest and the largest value that the axis shows too.
    """
    if precision not in LARGEST or precision not in SMALLEST_SUBNORMAL:
        return {"yaxis": _log_axis(title, values)}, (0.0, math.inf)
    name = precision.value.upper()
    largest, smallest = LARGEST[precision], SMALLEST_SUBNORMAL[precision]
    # The axis ends a little below the smallest subnormal, however tiny the values are. A mask of
    # -3e38 would leave all others a line.
    ceiling = _FAR * largest
    top = min(ceiling, max(largest, *(v for v in values if math.isfinite(v))))
    ends = [math.log10(smallest) - 1.2, math.log10(top) + 1.0]
    axis = {**_log_axis(title, [largest, smallest, *values]), "range": ends}
    levels = _levels(
        (largest, f"{name}: infinite beyond {largest:.5g}", BAD),
        (smallest, f"{name}: zero below about {smallest:.1g}", MUTED),
    )
    return {"yaxis": axis, **levels}, (smallest / 10.0, ceiling)


_FAR = 1e5
"""Magnitudes beyond a limit by more than this factor stand at the edge of the plot."""
