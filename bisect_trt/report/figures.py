"""The plots of the report."""

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

ACCENT, BAD, GOOD, MUTED = "#4c8bf5", "#e5484d", "#30a46c", "#8b8d98"
SERIES = {
    InputKind.GIVEN: "#4c8bf5",
    InputKind.PERTURBED: "#e5733c",
    InputKind.AUGMENTED: "#b58b1b",
    InputKind.HOLDOUT: "#30a46c",
}
_LONGEST = 64


@dataclass(frozen=True)
class Figure:
    """``name`` is the plot's id in the page, ``alt`` what it shows in words. Where ``of_layers``,
    the x values are places in the layer table, and the page adds the layers' names.
    """

    name: str
    alt: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    of_layers: bool = False
    height: int = 340

    def as_json(self) -> dict[str, Any]:
        """What the page's script copies."""
        return {
            "name": self.name,
            "data": list(self.data),
            "layout": {**self.layout, "height": self.height},
            "ofLayers": self.of_layers,
        }


def label(name: str) -> str:
    """``name`` as Plotly shows it literally: it reads tags in any text; shortened in the middle."""
    text = printable(name)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\u2026{text[-half:]}"
    return str(escape(text))


def positive(values: Iterable[float]) -> list[float | None]:
    """``values`` for a logarithmic axis: rounded, None where it has no place for them."""
    return [short(v) if 0.0 < v < math.inf else None for v in map(float, values)]


def short(value: float) -> float:
    """Four digits are more than a plot shows, and the file stays small."""
    return float(f"{value:.4g}")


def line_at(value: float, words: str, colour: str = BAD) -> dict[str, Any]:
    """A layout's horizontal line with its words, on a logarithmic y axis."""
    line = {"color": colour, "width": 1.5, "dash": "dash"}
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {
        "shapes": [{**across, "line": line}],
        "annotations": [
            {
                "xref": "paper",
                "x": 1,
                "y": math.log10(value),
                "text": words,
                "showarrow": False,
                "xanchor": "right",
                "yanchor": "bottom",
                "font": {"color": colour, "size": 11},
            }
        ],
    }


def lines_at(*lines: Mapping[str, Any]) -> dict[str, Any]:
    """Several of :func:`line_at` as one part of a layout."""
    parts = ("shapes", "annotations")
    return {part: [entry for line in lines for entry in line[part]] for part in parts}


def log_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis for ``values``, with ticks at powers of ten where they span some."""
    known = [v for v in values if v is not None and 0.0 < v < math.inf]
    decades = math.log10(max(known) / min(known)) if known else 0.0
    axis = {"type": "log", "title": {"text": title}, "exponentformat": "power"}
    # Plotly writes 2 and 5 between the powers, and over many decades finds fewer ticks itself.
    return axis | ({"dtick": 1} if 1.5 < decades < 9.0 else {})


NETWORK = {"title": {"text": "layer, in network order"}}
"""The x axis."""


def line_of(words: str, places: Any, values: pd.Series[Any], colour: str) -> dict[str, Any]:
    """A trace through a value a layer, with gaps where a logarithmic axis has no place."""
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
    """A trace of marks at some layers; none where a logarithmic axis has no place."""
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


_OWN = "introduced_rel_range"
_FINITE = {"rel_range": "finite", _OWN: "introduced_finite", "engine_rel_range": "engine_finite"}


def errors_figure(layers: pd.DataFrame) -> Figure | None:
    """Accumulated and introduced errors, over each layer's range, with the pins, the layers that
    are not finite, and the sources of failure. None where no errors were measured.
    """
    if "rel_range" not in layers or not len(layers):
        return None
    both = {"everything reduced": ("rel_range", BAD), "the layer alone": (_OWN, ACCENT)}
    if "engine_rel_range" in layers:
        both["on the engine, outputs marked"] = ("engine_rel_range", GOOD)
    places = np.arange(len(layers))
    copied = {
        words: (layers[column].mask(_broken(layers, column)), colour)
        for words, (column, colour) in both.items()
        if column in layers
    }
    data: list[dict[str, Any]] = [line_of(w, places, *what) for w, what in copied.items()]
    known = [v for values, _ in copied.values() for v in positive(values)]
    top = 3.0 * max([v for v in known if v is not None], default=1.0)
    broken = _broken(layers, "rel_range")
    # What is left of a layer that overflowed may err little: its marks stand above all others.
    shown = layers["rel_range"].mask(broken, top)
    around = [20 if b else 9 for b in broken[layers["pinned"].astype(bool)]]
    marks = (
        ("not finite", broken, "x", BAD, 9),
        ("source: wrong while its inputs are right", layers.get("source"), "star", BAD, 14),
        ("pinned", layers["pinned"], "circle-open", ACCENT, around),
    )
    for words, where, symbol, colour, size in marks:
        chosen = np.flatnonzero(where.astype(bool)) if where is not None else np.empty(0, int)
        if chosen.size:
            values = shown.iloc[chosen]
            data.append(marks_of(words, chosen, values.fillna(0.0), symbol, colour, size))
    layout = {"xaxis": NETWORK, "yaxis": log_axis("largest error / the layer's range", known)}
    alt = "Error of each layer along the network, accumulated and introduced"
    return Figure("errors-plot", alt, data, layout, of_layers=True, height=400)


def _broken(layers: pd.DataFrame, column: str) -> pd.Series[bool]:
    """The layers whose error in ``column`` is of what was left finite only, or of nothing."""
    endless = layers[column].isin([np.inf])
    finite = layers.get(_FINITE[column])
    return endless if finite is None else endless | (is_measured(layers) & finite.eq(False))


_APART = 0.09
"""Of the axis: so far apart two numbers of three digits stand beside each other at 390 pixels."""


def tradeoff_figure(tradeoff: pd.DataFrame) -> Figure | None:
    """A line a kind of input: the share that meets the requirement over the pins, with the plan
    that was picked marked. None for fewer than two rows.
    """
    if len(tradeoff) < 2:
        return None
    pins = [int(p) for p in tradeoff["pins"]]
    # None pinned has no place on a logarithmic axis, and linear ones hide where it is decided.
    places = [math.log1p(p) for p in pins]
    data: list[dict[str, Any]] = []
    for kind in InputKind:
        if not (tradeoff[f"{kind}_tested"] > 0).any():
            continue
        passed, tested = tradeoff[f"{kind}_passed"], tradeoff[f"{kind}_tested"]
        counts = [f"{p} of {t}" for p, t in zip(passed, tested, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": kind.words,
                "x": [short(x) for x in places],
                "y": [None if math.isnan(s) else short(s) for s in tradeoff[f"{kind}_share"]],
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
            **_ticks(places, pins, tradeoff["set"]),
        },
        "yaxis": {
            "title": {"text": "share that holds"},
            "tickformat": ".0%",
            "range": [-0.04, 1.04],
        },
        **_picked(tradeoff, places, pins),
    }
    alt = "Share of inputs that meet the requirement over the number of layers kept in FP32"
    return Figure("tradeoff-plot", alt, data, layout)


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


def _picked(tradeoff: pd.DataFrame, places: list[float], pins: list[int]) -> dict[str, object]:
    """A line where the plan is that was written."""
    for place, count, source in zip(places, pins, tradeoff["set"], strict=True):
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


_SEPARATORS = re.compile(r"[./]")
_MOST_SHOWN, _DEEPEST = 1500, 12
_CLASSES = (
    (1.0, "a layer misses the requirement alone", BAD),
    (0.1, "up to the tolerance alone", "#d9a83f"),
    (0.01, "up to a tenth of it", "#8da4ef"),
    (-math.inf, "up to a hundredth, or not measured", "#b9bbc6"),
)
"""The worst score that a layer of a box has alone, at least; its words and colour."""


@dataclass
class _Module:
    """A box under construction: layers in it, those pinned, and the one that does most alone."""

    path: tuple[str, ...]
    start: int = 0
    layers: int = 0
    pinned: int = 0
    worst: float = -math.inf
    worst_layer: str = ""
    children: dict[str, _Module] = field(default_factory=dict)


def modules_figure(layers: pd.DataFrame) -> Figure | None:
    """A box a module, as wide as it has layers, coloured by the worst score that one of its layers
    has alone; by operator where the model names no modules. None without such scores.
    """
    if "sensitivity" not in layers or not len(layers):
        return None
    root = _tree(layers)
    _place(root, 0)
    boxes = sorted(_boxes(root), key=lambda box: -box.layers)[:_MOST_SHOWN]
    data = []
    for place, (least, words, colour) in enumerate(_CLASSES):
        most = _CLASSES[place - 1][0] if place else math.inf
        some = [b for b in boxes if least <= b.worst and (b.worst < most or not place)]
        if some:
            data.append(_bars(some, words, colour))
    deepest = max(len(box.path) for box in boxes) + 1
    layout = {
        "xaxis": {"visible": False, "range": [0, len(layers)]},
        "yaxis": {"visible": False, "range": [deepest, 0]},
        "barmode": "overlay",
        "bargap": 0,
        "zooms": True,
        "margin": {"l": 8, "b": 8},
        # Words that have to shrink for their box cannot be read; hovering shows them.
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    alt = "Modules of the model, by layers, pins and what their worst layer does alone"
    return Figure("modules-plot", alt, data, layout, height=110 + 44 * deepest)


def _bars(boxes: Sequence[_Module], words: str, colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": words,
        "x": [box.start + box.layers / 2 for box in boxes],
        "width": [box.layers for box in boxes],
        "y": [0.97] * len(boxes),
        "base": [len(box.path) for box in boxes],
        "text": [_words(box) for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "customdata": [_facts(box) for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "line": {"width": 1}},
    }


def has_modules(layers: pd.DataFrame) -> bool:
    """Whether some layer says which module it is of."""
    return bool((layers["module"] != "").any() or (layers["scope"] != "").any())


def _tree(layers: pd.DataFrame) -> _Module:
    named = has_modules(layers)
    root = _Module(())
    columns = ("layer", "op", "module", "scope", "pinned", "sensitivity")
    for layer, op, module, scope, pinned, alone in zip(*(layers[c] for c in columns), strict=True):
        path = (module or scope) if named else op
        parts = [part for part in _SEPARATORS.split(path) if part][:_DEEPEST]
        here = root
        _count(here, layer, bool(pinned), float(alone))
        for part in parts:
            here = here.children.setdefault(part, _Module((*here.path, part)))
            _count(here, layer, bool(pinned), float(alone))
    return root


def _count(module: _Module, layer: str, pinned: bool, alone: float) -> None:
    module.layers += 1
    module.pinned += pinned
    if alone > module.worst:
        module.worst, module.worst_layer = alone, layer


def _place(module: _Module, start: int) -> None:
    module.start = start
    for child in module.children.values():
        _place(child, start)
        start += child.layers


def _boxes(module: _Module) -> Sequence[_Module]:
    return [module, *(box for child in module.children.values() for box in _boxes(child))]


def _words(box: _Module) -> str:
    name = label(box.path[-1]) if box.path else "the model"
    return f"{name}<br>{box.pinned} of {box.layers}" if box.pinned else name


def _facts(box: _Module) -> str:
    name = label(".".join(box.path)) if box.path else "the model"
    lines = [f"<b>{name}</b>", f"{counted(box.layers, 'layer')}, {box.pinned} pinned"]
    if box.worst_layer:
        lines.append(f"worst alone: {label(box.worst_layer)}, {brief(box.worst)}")
    return "<br>".join(lines)


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


_TOLERANCE = "the tolerance"
_LEAST, _MOST = 1e-6, 1e6
_SYMBOLS = {"given": "circle", "search_set": "diamond", "holdout": "diamond"}


def baselines_figure(outputs: pd.DataFrame) -> Figure | None:
    """A bar a baseline: its score. None where nothing was run."""
    if "score" not in outputs or not len(outputs):
        return None
    rows = outputs.drop_duplicates("baseline")
    scores = [float(s) for s in rows["score"]]
    heights = [min(_MOST, max(_LEAST, s)) if not math.isnan(s) else _LEAST for s in scores]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            # On a phone half the plot would be words.
            "y": [label(b).replace(", ", ",<br>") for b in rows["baseline"]],
            "x": [short(h) for h in heights],
            "marker": {"color": [GOOD if v == "pass" else BAD for v in rows["outcome"]]},
            "text": [brief(s) for s in scores],
            "textposition": "auto",
            "customdata": [times(s) for s in scores],
            "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        }
    ]
    ends = [math.log10(min(*heights, 1.0)) - 0.5, math.log10(max(*heights, 1.0)) + 0.9]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1}
    layout = {
        "xaxis": {
            **log_axis("\u00d7 tolerance: left of the line passes", heights),
            "tickangle": 0,
            "range": ends,
        },
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False},
        "shapes": [{**line, "line": {"color": BAD, "dash": "dash", "width": 1.5}}],
        "showlegend": False,
    }
    alt = "Score of each baseline in multiples of the tolerance"
    return Figure("baselines-plot", alt, data, layout, height=110 + 34 * len(rows))


def inputs_figure(inputs: pd.DataFrame) -> Figure | None:
    """The score of each input, the worst first. None for fewer than two, or without scores."""
    plan = [c for c in inputs if str(c).startswith("plan_score_")]
    if len(inputs) < 2 or not plan:
        return None
    reduced = [c for c in inputs if str(c).startswith("reduced_score_")]
    worst = inputs[plan].max(axis=1).sort_values(ascending=False, kind="stable")
    rows = inputs.loc[worst.index]
    names = [label(n) for n in rows["input"]]
    symbols = [_SYMBOLS.get(str(k), "circle") for k in rows["kind"]]
    data: list[dict[str, Any]] = []
    shown = (("under the plan", worst, ACCENT), ("everything reduced", None, BAD))
    for words, values, colour in shown:
        if values is None:
            values = rows[reduced].max(axis=1) if reduced else worst * math.nan
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words,
                "x": list(range(1, len(rows) + 1)),
                "y": _heights(list(map(float, values))),
                "text": [f"{n}<br>{times(float(v))}" for n, v in zip(names, values, strict=True)],
                "marker": {"color": colour, "size": 8, "symbol": symbols},
                "hovertemplate": "%{text}",
            }
        )
    apart = " (diamonds: held out)" if "diamond" in symbols else ""
    layout = {
        "xaxis": {"title": {"text": f"worst first{apart}"}},
        "yaxis": log_axis("score, \u00d7 tolerance", [1.0, *(y for t in data for y in t["y"])]),
        **line_at(1.0, _TOLERANCE),
    }
    return Figure("inputs-plot", "Score of each input, the worst first", data, layout)


def _heights(scores: Sequence[float]) -> list[float | None]:
    """Where ``scores`` are drawn on a logarithmic axis: those that it has no place for, zero and
    what is beyond every number, a decade below or above the others; None where none is known.
    """
    known = [1.0, *(s for s in scores if 0.0 < s < NOTHING_ALLOWED)]
    least, most = min(known) / 10.0, max(known) * 10.0
    copied = (most if s >= NOTHING_ALLOWED else max(s, least) for s in scores)
    return [None if math.isnan(s) else short(h) for s, h in zip(scores, copied, strict=True)]


def search_figure(search: pd.DataFrame) -> Figure | None:
    """A mark an evaluation: how many layers were pinned, and how it ended. None without
    evaluations."""
    if not len(search):
        return None
    passed = search["outcome"] == Verdict.PASS.value
    failed = search["outcome"] == Verdict.FAIL.value
    kinds = (("pass", passed, GOOD), ("fail", failed, BAD), ("other", ~passed & ~failed, MUTED))
    data: list[dict[str, Any]] = []
    for words, where, colour in kinds:
        rows = search[where]
        if len(rows):
            told = zip(rows["runner"], rows["on"], rows["outcome"], rows["score"], strict=True)
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": words,
                    "x": [int(p) for p in rows["evaluation"]],
                    "y": [int(p) for p in rows["pins"]],
                    "text": [label(f"{r}, on {o}: {v}, {times(s)}") for r, o, v, s in told],
                    "marker": {
                        "color": colour,
                        "size": 8,
                        "symbol": [_SYMBOLS.get(str(o), "circle") for o in rows["on"]],
                    },
                    "hovertemplate": "evaluation %{x}, %{y} pins<br>%{text}",
                }
            )
    most = max(1, int(search["pins"].max()))
    layout = {
        "xaxis": {"title": {"text": "evaluation (diamonds: on copies)"}},
        # Below zero, so that an evaluation without pins is a whole mark.
        "yaxis": {"title": {"text": "layers pinned"}, "range": [-0.04 * most, 1.05 * most]},
    }
    return Figure("search-plot", "Pins and verdict of each evaluation, in order", data, layout)
