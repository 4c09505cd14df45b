"""report.html: one file that opens without a network. What it shows is told here, how it looks in
the template and the assets.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from markupsafe import Markup

from bisect_trt.core.finding import VANISHING, Finding
from bisect_trt.report.figures.errors import errors_figure
from bisect_trt.report.figures.figure import Figure
from bisect_trt.report.figures.frontier import frontier_figure
from bisect_trt.report.figures.modules import has_modules, modules_figure
from bisect_trt.report.figures.ranges import channels_figure, ranges_figure
from bisect_trt.report.figures.scores import baselines_figure, inputs_figure, search_figure
from bisect_trt.report.page.html import answer, asset, environment
from bisect_trt.report.page.page_tables import (
    cost_rows,
    frontier_rows,
    input_rows,
    layer_data,
    output_rows,
    pin_rows,
    search_rows,
    worst_layer_rows,
)
from bisect_trt.report.page.shipment import folded, recipes
from bisect_trt.report.record.record import Record
from bisect_trt.report.record.requirement_scores import requirement_scores
from bisect_trt.report.words.sentences import (
    engine_sentences,
    misses_alone,
    search_sentences,
    sources,
    unproved,
)

_SCRIPTS = ("plotly-basic.min.js", "dataTables.min.js", "report.js")
_STYLES = ("dataTables.min.css", "report.css", "answer.css")


def as_html(result: Record) -> str:
    """The page. Names from models and paths are text in it: templates escape, the data that
    scripts read is JSON, and no other script than the page's own may run.
    """
    figures = _figures(result)
    data = {"figures": [f.as_json() for f in figures.values()], "layers": layer_data(result.layers)}
    template = environment().get_template("report.html.j2")
    return template.render(
        **answer(result),
        figures=figures,
        frontier=frontier_rows(result.frontier),
        baselines=list(result.outputs["baseline"].unique()) if len(result.outputs) else [],
        scores=requirement_scores(result.by_requirement, result.outputs),
        outputs=output_rows(result.outputs),
        by_modules=len(result.layers) > 0 and has_modules(result.layers),
        inputs=input_rows(result.inputs),
        searched=search_sentences(result),
        search=search_rows(result.search),
        pins=pin_rows(result),
        unproved=unproved(result),
        alone=misses_alone(result.layers),
        sources=sources(result.layers),
        proved=bool(result.pins["proved"].any()),
        cost=cost_rows(result.cost),
        engine=engine_sentences(result),
        layers=worst_layer_rows(result.layers),
        findings=_by_kind(result.findings),
        recipes=recipes(result),
        command=folded(result.command) if result.command else "",
        scripts=[asset(name) for name in _SCRIPTS],
        styles=[asset(name) for name in _STYLES],
        policy=_policy(),
        data=_script_json(data),
    )


def _by_kind(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind together, those first that the headline says; constants that partly
    vanish are many and harmless, and come last.
    """
    kinds: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: (not f.weighty, f.kind == VANISHING)):
        kinds.setdefault(finding.kind, []).append(finding)
    return list(kinds.values())


def _figures(result: Record) -> dict[str, Figure]:
    """Those that there is something to draw of, by name."""
    found = (
        frontier_figure(result.frontier),
        baselines_figure(result.outputs),
        errors_figure(result.layers),
        modules_figure(result.layers),
        ranges_figure(result.layers, result.precision),
        channels_figure(result.layers, result.precision),
        inputs_figure(result.inputs),
        search_figure(result.search),
    )
    return {figure.name: figure for figure in found if figure is not None}


@cache
def _policy() -> str:
    """The Content-Security-Policy: nothing is loaded, and nothing runs but the page's own scripts,
    told by their hashes.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        for name in _SCRIPTS
    ]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    # Plotly and DataTables set styles; pictures are made in the page.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> Markup:
    """JSON as a script element holds it: nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
