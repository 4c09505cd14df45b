"""Errors along the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.report.figures.along_network import NETWORK, line_of, marks_of
from bisect_trt.report.figures.figure import ACCENT, BAD, GOOD, Figure, log_axis, positive
from bisect_trt.report.record.failure_sources import is_measured

_OWN = "introduced_rel_range"
_FINITE = {"rel_range": "finite", _OWN: "introduced_finite", "engine_rel_range": "engine_finite"}


def errors_figure(layers: pd.DataFrame) -> Figure | None:
    """Accumulated and introduced errors, over each layer's range, with the pins, the layers that
    are not finite, and the sources of failure. None where no errors were measured.
    """
    if "rel_range" not in layers or not len(layers):
        return None
    both = {"everything lowered": ("rel_range", BAD), "the layer alone": (_OWN, ACCENT)}
    if "engine_rel_range" in layers:
        both["on the engine, outputs marked"] = ("engine_rel_range", GOOD)
    places = np.arange(len(layers))
    drawn = {
        words: (layers[column].mask(_broken(layers, column)), colour)
        for words, (column, colour) in both.items()
        if column in layers
    }
    data: list[dict[str, Any]] = [line_of(w, places, *what) for w, what in drawn.items()]
    known = [v for values, _ in drawn.values() for v in positive(values)]
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
