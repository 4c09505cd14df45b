"""A plot as data: traces and a layout in Plotly's JSON, drawn by the page itself.

Nothing here imports Plotly: its figures are plain mappings, and its JavaScript is among the assets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import escape

from bisect_trt.core.holds import InputKind
from bisect_trt.core.names import printable

ACCENT, BAD, GOOD, MUTED = "#4c8bf5", "#e5484d", "#30a46c", "#8b8d98"
SERIES = {
    InputKind.GIVEN: "#4c8bf5",
    InputKind.REDRAWN: "#e5733c",
    InputKind.VARIANTS: "#b58b1b",
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
        """What the page's script draws."""
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
    """A layout's horizontal line with its words, on a logarithmic y axis.

    Args:
        value: where, above 0.
        words: at its right end.
        colour: of both.
    """
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
