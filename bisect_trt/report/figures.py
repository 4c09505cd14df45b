"""Builds the plots of the report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import escape

from bisect_trt.base.display import counted, printable
from bisect_trt.base.outcomes import InputKind, Verdict
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief, times
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


def label(name: str) -> str:
    """Escapes ``name`` for Plotly, which reads tags, and shortens it in the middle."""
    text = printable(name)
    if len(text) > 64:
        text = f"{text[:32]}\u2026{text[-32:]}"
    return str(escape(text))


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


def _bar(name: str, x: Sequence[Any], y: Sequence[Any], marker: Layout, **more: Any) -> Trace:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": marker, **more}


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


def _upright(place: float, colour: str, dash: str) -> Layout:
    """A vertical line over the whole plot."""
    line = {"color": colour, "dash": dash, "width": 2}
    ends = {"x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "line", **ends, "line": line}


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
    # log1p: a logarithmic axis cannot show 0 pins, and a linear one crowds the small sets.
    places = [short(math.log1p(p)) for p in pins]
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
    is_answer = [source == "answer" for source in tradeoff["set"]]
    ticks = _ticks(places, is_answer)
    axis = {"tickvals": [places[i] for i in ticks], "ticktext": [str(pins[i]) for i in ticks]}
    layout: Layout = {
        "xaxis": {**_title("layers kept in FP32 (logarithmic)"), "tickangle": 0, **axis},
        "yaxis": {**_title("share that holds"), "tickformat": ".0%", "range": [-0.04, 1.04]},
    }
    if any(is_answer):
        answer = is_answer.index(True)
        words = f"the plan: {counted(pins[answer], 'pin')}"
        above = {"x": places[answer], "yref": "paper", "y": 1, "yanchor": "bottom"}
        layout["shapes"] = [_upright(places[answer], MUTED, "dot")]
        layout["annotations"] = [{**above, "text": words, "showarrow": False}]
        layout["legend"] = {"y": 1.1}  # above the words
    alt = "Share of inputs that meet the requirement over the number of layers kept in FP32"
    return Figure("tradeoff-plot", alt, data, layout)


def _ticks(places: list[float], is_answer: list[bool]) -> list[int]:
    """The rows whose numbers fit on a narrow screen; the plan's row has priority."""
    # Numbers of three digits take less than 9 % of a narrow axis.
    distance = 0.09 * (max(places) - min(places))
    kept: list[int] = []
    for row in sorted(range(len(places)), key=lambda row: not is_answer[row]):
        if all(abs(places[row] - places[other]) >= distance for other in kept):
            kept.append(row)
    return sorted(kept)


_SEPARATORS = re.compile(r"[./]")
_CLASSES = (
    (1.0, "a layer misses the requirement alone", BAD),
    (0.1, "up to the tolerance alone", "#d9a83f"),
    (0.01, "up to a tenth of it", "#8da4ef"),
    (-math.inf, "up to a hundredth, or not measured", "#b9bbc6"),
)
"""Lower bound of a module's worst sensitivity, its description and its colour."""


@dataclass
class _Module:
    """A module as a box, with its number of layers and pins, and its most sensitive layer."""

    path: tuple[str, ...]
    start: int = 0
    free: int = 0
    layers: int = 0
    pinned: int = 0
    worst: float = -math.inf
    worst_layer: str = ""

    @property
    def title(self) -> str:
        name = label(self.path[-1]) if self.path else "the model"
        return f"{name}<br>{self.pinned} of {self.layers}" if self.pinned else name

    @property
    def facts(self) -> str:
        name = label(".".join(self.path)) if self.path else "the model"
        lines = [f"<b>{name}</b>", f"{counted(self.layers, 'layer')}, {self.pinned} pinned"]
        if self.worst_layer:
            lines.append(f"worst alone: {label(self.worst_layer)}, {brief(self.worst)}")
        return "<br>".join(lines)


def has_modules(layers: pd.DataFrame) -> bool:
    """Whether some layer has a module or a scope."""
    return bool((layers["module"] != "").any() or (layers["scope"] != "").any())


def modules_figure(layers: pd.DataFrame) -> Figure | None:
    """A box per module, or per operator where there are no modules, as wide as its layers.

    The colour is its worst sensitivity. Returns None without sensitivities.
    """
    if "sensitivity" not in layers or not len(layers):
        return None
    boxes = sorted(_modules(layers), key=lambda box: -box.layers)[:1500]  # more slow the page
    data = []
    rest = boxes
    for least, words, colour in _CLASSES:
        some = [box for box in rest if box.worst >= least]
        rest = [box for box in rest if box.worst < least]
        if some:
            data.append(_boxes(some, words, colour))
    deepest = max(len(box.path) for box in boxes) + 1
    layout = {
        "xaxis": {"visible": False, "range": [0, len(layers)]},
        "yaxis": {"visible": False, "range": [deepest, 0]},
        # Text that would shrink below 10 points is hidden; hovering shows it.
        "uniformtext": {"minsize": 10, "mode": "hide"},
        **{"barmode": "overlay", "bargap": 0, "zooms": True, "margin": {"l": 8, "b": 8}},
    }
    alt = "Modules of the model, by layers, pins and what their worst layer does alone"
    return Figure("modules-plot", alt, data, layout, height=110 + 44 * deepest)


def _boxes(boxes: Sequence[_Module], words: str, colour: str) -> Trace:
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    return _bar(
        words,
        [box.start + box.layers / 2 for box in boxes],
        [0.97] * len(boxes),
        {"color": colour, "line": {"width": 1}},
        width=[box.layers for box in boxes],
        base=[len(box.path) for box in boxes],
        text=[box.title for box in boxes],
        customdata=[box.facts for box in boxes],
        hovertemplate="%{customdata}<extra></extra>",
        **inside,
    )


def _modules(layers: pd.DataFrame) -> Iterable[_Module]:
    """Every module with its position, parents before their children."""
    named = has_modules(layers)
    found: dict[tuple[str, ...], _Module] = {}
    columns = ("layer", "op", "module", "scope", "pinned", "sensitivity")
    for layer, op, module, scope, pinned, score in zip(*(layers[c] for c in columns), strict=True):
        parts = [part for part in _SEPARATORS.split((module or scope) if named else op) if part]
        path = tuple(parts[:12])
        for depth in range(len(path) + 1):
            box = found.setdefault(path[:depth], _Module(path[:depth]))
            box.layers += 1
            box.pinned += bool(pinned)
            if score > box.worst:
                box.worst, box.worst_layer = float(score), layer
    for box in found.values():
        if box.path:
            parent = found[box.path[:-1]]
            box.start = box.free = parent.free
            parent.free += box.layers
    return found.values()


_SPREAD = [f"channel_peak_{q}" for q in ("min", "p25", "p50", "p75", "max")]


def ranges_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """The largest magnitude of each layer and its channels, with the limits of ``precision``."""
    if "ref_max" not in layers or not layers["ref_max"].notna().any():
        return None
    largest = layers[["ref_min", "ref_max"]].abs().max(axis=1)
    data: list[Trace] = []
    if set(_SPREAD) <= set(layers.columns):
        # Gaps would tear the band, so a layer without channels counts as one channel.
        spread = _alive(layers[_SPREAD].apply(lambda column: column.fillna(largest)))
        spread = spread.fillna(1e-12)  # layers of zeros only
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


def channels_figure(layers: pd.DataFrame, precision: Precision) -> Figure | None:
    """A box per pinned layer, from the largest magnitudes of its channels."""
    if not set(_SPREAD) <= set(layers.columns):
        return None
    alive = (layers["channels"] > 0) & (layers["channel_peak_max"] > 0.0)
    pinned = np.flatnonzero(layers["pinned"].astype(bool) & alive)[:400]
    if not pinned.size:
        return None
    rows = layers.iloc[pinned]
    spread = _alive(rows[_SPREAD])
    low, first, middle, third, high = (spread[c].map(short).to_list() for c in _SPREAD)
    places = list(range(len(rows)))
    of_layer = {"layers": [int(i) for i in pinned]}
    facts = [
        f"{n:.0f} channels; channel {w:.0f} is the largest"
        for n, w in zip(rows["channels"], rows["worst_channel"], strict=True)
    ]
    half = [short(b - a) for a, b in zip(first, third, strict=True)]
    bar = {"base": first, "customdata": facts, "hovertemplate": "%{text}<br>%{customdata}"}
    colour = {"color": ACCENT, "opacity": 0.55}
    whiskers = [y for ends in zip(low, high, strict=True) for y in (*ends, None)]
    between = [x for i in places for x in (i, i, None)]
    line = {"line": {"color": MUTED, "width": 1.5}, "hoverinfo": "skip"}
    marker = {"color": ACCENT, "symbol": "line-ew-open", "size": 9}
    median = {"marker": marker, "hovertemplate": "%{text}<br>%{y:.3g}"}
    data = [
        _scatter("smallest to largest channel", between, whiskers, "lines", **line),
        _bar("the middle half of the channels", places, half, colour, **bar, **of_layer),
        _scatter("the median channel", places, middle, "markers", **median, **of_layer),
    ]
    limits = _limits("largest magnitude of a channel", spread[_SPREAD[-1]], precision)
    layout = {"xaxis": _title("pinned layer, in network order"), **limits}
    alt = "Spread of the largest magnitudes over the channels of each pinned layer"
    return Figure("channels-plot", alt, data, layout, of_layers=True, height=360)


def _alive(spread: pd.DataFrame) -> pd.DataFrame:
    """Replaces zeros in the spread of channels by the next larger value."""
    # A zero is exact in every precision, and a logarithmic axis cannot show it.
    return spread.where(spread > 0.0).bfill(axis=1)


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


_SYMBOLS = {"given": "circle", "search_set": "diamond", "holdout": "diamond"}


def _symbols(kinds: Iterable[Any]) -> list[str]:
    return [_SYMBOLS.get(str(kind), "circle") for kind in kinds]


def baselines_figure(outputs: pd.DataFrame) -> Figure | None:
    """A bar per baseline with its score; None where nothing was run."""
    if "score" not in outputs or not len(outputs):
        return None
    rows = outputs.drop_duplicates("baseline")
    scores = [float(s) for s in rows["score"]]
    heights = [1e-6 if math.isnan(s) else min(1e6, max(1e-6, s)) for s in scores]
    # Long names would take half the plot on a phone.
    names = [label(b).replace(", ", ",<br>") for b in rows["baseline"]]
    colours = [GOOD if outcome == "pass" else BAD for outcome in rows["outcome"]]
    labels = {"text": [brief(s) for s in scores], "textposition": "auto", "orientation": "h"}
    words = list(map(times, scores))
    hover = {"customdata": words, "hovertemplate": "%{y}: %{customdata}<extra></extra>"}
    bar = _bar("", [short(h) for h in heights], names, {"color": colours}, **labels, **hover)
    ends = [math.log10(min(*heights, 1.0)) - 0.5, math.log10(max(*heights, 1.0)) + 0.9]
    axis = _log_axis("\u00d7 tolerance: left of the line passes", heights)
    layout = {
        "xaxis": {**axis, "tickangle": 0, "range": ends},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
        "shapes": [_upright(1, BAD, "dash")],
        "showlegend": False,
    }
    alt = "Score of each baseline in multiples of the tolerance"
    return Figure("baselines-plot", alt, [bar], layout, height=110 + 34 * len(rows))


def inputs_figure(inputs: pd.DataFrame) -> Figure | None:
    """The score of each input, the worst first; None for fewer than two."""
    plan = [c for c in inputs if str(c).startswith("plan_score_")]
    if len(inputs) < 2 or not plan:
        return None
    reduced = [c for c in inputs if str(c).startswith("reduced_score_")]
    worst = inputs[plan].max(axis=1).sort_values(ascending=False, kind="stable")
    rows = inputs.loc[worst.index]
    names = [label(n) for n in rows["input"]]
    symbols = _symbols(rows["kind"])
    before = rows[reduced].max(axis=1) if reduced else worst * math.nan
    places = list(range(1, len(rows) + 1))
    data: list[Trace] = []
    shown = (("under the plan", worst, ACCENT), ("everything reduced", before, BAD))
    for words, values, colour in shown:
        scores = [float(v) for v in values]
        text = [f"{n}<br>{times(s)}" for n, s in zip(names, scores, strict=True)]
        marker = {"color": colour, "size": 8, "symbol": symbols}
        more = {"text": text, "marker": marker, "hovertemplate": "%{text}"}
        data.append(_scatter(words, places, _heights(scores), "markers", **more))
    apart = " (diamonds: held out)" if "diamond" in symbols else ""
    layout = {
        "xaxis": _title(f"worst first{apart}"),
        "yaxis": _log_axis("score, \u00d7 tolerance", [1.0, *(y for t in data for y in t["y"])]),
        **_levels((1.0, "the tolerance", BAD)),
    }
    return Figure("inputs-plot", "Score of each input, the worst first", data, layout)


def _heights(scores: Sequence[float]) -> list[float | None]:
    """Heights of ``scores`` on a logarithmic axis; zero and infinity go beyond the rest."""
    finite = [1.0, *(s for s in scores if 0.0 < s < NOTHING_ALLOWED)]
    least, most = min(finite) / 10.0, max(finite) * 10.0
    return [
        None if math.isnan(s) else short(most if s >= NOTHING_ALLOWED else max(s, least))
        for s in scores
    ]


def search_figure(search: pd.DataFrame) -> Figure | None:
    """A mark per evaluation, with its number of pins and its outcome."""
    if not len(search):
        return None
    passed = search["outcome"] == Verdict.PASS.value
    failed = search["outcome"] == Verdict.FAIL.value
    kinds = (("pass", passed, GOOD), ("fail", failed, BAD), ("other", ~passed & ~failed, MUTED))
    data: list[Trace] = []
    for words, where, colour in kinds:
        rows = search[where]
        if len(rows):
            facts = zip(rows["runner"], rows["on"], rows["outcome"], rows["score"], strict=True)
            style = {
                "text": [label(f"{r}, on {on}: {v}, {times(s)}") for r, on, v, s in facts],
                "marker": {"color": colour, "size": 8, "symbol": _symbols(rows["on"])},
                "hovertemplate": "evaluation %{x}, %{y} pins<br>%{text}",
            }
            x, y = rows["evaluation"].map(int).to_list(), rows["pins"].map(int).to_list()
            data.append(_scatter(words, x, y, "markers", **style))
    most = max(1, int(search["pins"].max()))
    layout = {
        "xaxis": _title("evaluation (diamonds: on copies)"),
        # From below zero, so that marks of evaluations without pins are whole.
        "yaxis": {**_title("layers pinned"), "range": [-0.04 * most, 1.05 * most]},
    }
    return Figure("search-plot", "Pins and verdict of each evaluation, in order", data, layout)
