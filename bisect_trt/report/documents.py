"""The result for a reviewer: one HTML page."""

from __future__ import annotations

from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader

from bisect_trt.core.names import printable
from bisect_trt.numerics.requirements import times
from bisect_trt.report.frontier_plot import frontier_svg
from bisect_trt.report.result import Result
from bisect_trt.report.sentences import (
    engine_sentences,
    headline,
    holds_sentences,
    judged_by,
    number,
    search_sentences,
)
from bisect_trt.report.tables import (
    COST_COLUMNS,
    OUTPUT_COLUMNS,
    shown_pins,
    worst_inputs,
    worst_layers,
)

_FRONTIER_COLUMNS = [
    "pins",
    "set",
    "given_share",
    "redrawn_share",
    "redrawn_lower_bound",
    "variants_share",
    "holdout_share",
    "p50_score",
    "p95_score",
    "worst_score",
    "latency_ms",
    "relative_bytes",
]


def as_html(result: Result) -> str:
    """A page without scripts that works offline."""
    # The template's name ends in .j2: what is chosen by endings would escape nothing.
    environment = Environment(
        loader=PackageLoader("bisect_trt.report"), autoescape=True, finalize=_harmless
    )
    environment.filters["number"] = number
    environment.filters["times"] = times
    return environment.get_template("report.html.j2").render(
        result=result,
        headline=headline(result),
        outputs=_records(result.outputs, OUTPUT_COLUMNS),
        pins=_records(shown_pins(result)),
        proved=bool(result.pins["proved"].any()),
        layers=_records(worst_layers(result.layers)),
        cost=_records(result.cost, COST_COLUMNS),
        engine=engine_sentences(result),
        searched=search_sentences(result),
        holds=holds_sentences(result.holds),
        judged_by=judged_by(result),
        frontier=_records(result.frontier.dropna(axis=1, how="all"), _FRONTIER_COLUMNS),
        plot=frontier_svg(result.frontier),
        inputs=_records(worst_inputs(result.inputs)),
        search=_records(result.search, ["probe", "base", "pins", "verdict", "score", "seconds"]),
    )


def _harmless(value: Any) -> Any:
    """Text without characters that a browser would obey; markup of our own as it is."""
    return printable(value) if type(value) is str else value


def _records(table: pd.DataFrame, columns: list[str] | None = None) -> dict[str, Any]:
    present = list(table.columns) if columns is None else [c for c in columns if c in table]
    return {"columns": present, "rows": table[present].to_numpy(dtype=object).tolist()}
