"""Scores of baselines, inputs and probes, in multiples of the tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from bisect_trt.core.verdict import Verdict
from bisect_trt.numerics.scores import NOTHING_ALLOWED, brief, times
from bisect_trt.report.figures.figure import (
    ACCENT,
    BAD,
    GOOD,
    MUTED,
    Figure,
    label,
    line_at,
    log_axis,
    short,
)

_TOLERANCE = "the tolerance"
_LEAST, _MOST = 1e-6, 1e6
_SYMBOLS = {"given": "circle", "panel": "diamond", "holdout": "diamond"}


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
            "marker": {"color": [GOOD if v == "pass" else BAD for v in rows["verdict"]]},
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
    lowered = [c for c in inputs if str(c).startswith("lowered_score_")]
    worst = inputs[plan].max(axis=1).sort_values(ascending=False, kind="stable")
    rows = inputs.loc[worst.index]
    names = [label(n) for n in rows["input"]]
    symbols = [_SYMBOLS.get(str(k), "circle") for k in rows["kind"]]
    data: list[dict[str, Any]] = []
    shown = (("under the plan", worst, ACCENT), ("everything lowered", None, BAD))
    for words, values, colour in shown:
        if values is None:
            values = rows[lowered].max(axis=1) if lowered else worst * math.nan
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
    drawn = (most if s >= NOTHING_ALLOWED else max(s, least) for s in scores)
    return [None if math.isnan(s) else short(h) for s, h in zip(scores, drawn, strict=True)]


def search_figure(search: pd.DataFrame) -> Figure | None:
    """A mark a probe: how many layers were pinned, and how it ended. None without probes."""
    if not len(search):
        return None
    passed = search["verdict"] == Verdict.PASS.value
    failed = search["verdict"] == Verdict.FAIL.value
    kinds = (("pass", passed, GOOD), ("fail", failed, BAD), ("other", ~passed & ~failed, MUTED))
    data: list[dict[str, Any]] = []
    for words, where, colour in kinds:
        rows = search[where]
        if len(rows):
            told = zip(rows["runner"], rows["on"], rows["verdict"], rows["score"], strict=True)
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": words,
                    "x": [int(p) for p in rows["probe"]],
                    "y": [int(p) for p in rows["pins"]],
                    "text": [label(f"{r}, on {o}: {v}, {times(s)}") for r, o, v, s in told],
                    "marker": {
                        "color": colour,
                        "size": 8,
                        "symbol": [_SYMBOLS.get(str(o), "circle") for o in rows["on"]],
                    },
                    "hovertemplate": "probe %{x}, %{y} pins<br>%{text}",
                }
            )
    most = max(1, int(search["pins"].max()))
    layout = {
        "xaxis": {"title": {"text": "probe (diamonds: on a panel of draws)"}},
        # Below zero, so that a probe without pins is a whole mark.
        "yaxis": {"title": {"text": "layers pinned"}, "range": [-0.04 * most, 1.05 * most]},
    }
    return Figure("search-plot", "Pins and verdict of each probe, in order", data, layout)
