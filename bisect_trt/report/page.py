"""report.html: one file that opens without a network. What it shows is told here, how it looks in
the template and the assets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import printable
from bisect_trt.numerics.requirements import times
from bisect_trt.report.figures.along_network import channels_figure, errors_figure, ranges_figure
from bisect_trt.report.figures.figure import Figure
from bisect_trt.report.figures.frontier import frontier_figure
from bisect_trt.report.figures.modules import has_modules, modules_figure
from bisect_trt.report.figures.scores import baselines_figure, inputs_figure, search_figure
from bisect_trt.report.page_tables import (
    cost_rows,
    frontier_rows,
    input_rows,
    layer_data,
    output_rows,
    pin_rows,
    search_rows,
    worst_layer_rows,
)
from bisect_trt.report.requirement_scores import requirement_scores
from bisect_trt.report.result import Result
from bisect_trt.report.sentences import (
    engine_sentences,
    headline,
    holds_sentences,
    judged_by,
    number,
    search_sentences,
)
from bisect_trt.report.shipment import recipes
from bisect_trt.report.tiles import held_kinds, tiles

_SCRIPTS = ("plotly-basic.min.js", "dataTables.min.js", "report.js")
_STYLES = ("dataTables.min.css", "report.css")


def as_html(result: Result) -> str:
    """The page. Names from models and paths are text in it: templates escape, the data that
    scripts read is JSON, and no other script than the page's own may run.
    """
    figures = _figures(result)
    data = {"figures": [f.as_json() for f in figures.values()], "layers": layer_data(result.layers)}
    template = _environment().get_template("report.html.j2")
    return template.render(
        result=result,
        headline=headline(result),
        holds=holds_sentences(result.holds)[1:],
        word=result.holds.word.value if result.holds is not None else "",
        held=held_kinds(result.holds),
        tiles=tiles(result),
        judged_by=judged_by(result),
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
        proved=bool(result.pins["proved"].any()),
        cost=cost_rows(result.cost),
        engine=engine_sentences(result),
        layers=worst_layer_rows(result.layers),
        findings=_by_kind(result.findings),
        recipes=recipes(result),
        scripts=[_asset(name) for name in _SCRIPTS],
        styles=[_asset(name) for name in _STYLES],
        policy=_policy(),
        data=_script_json(data),
    )


def _by_kind(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind together, those first that the headline says."""
    kinds: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: not f.weighty):
        kinds.setdefault(finding.kind, []).append(finding)
    return list(kinds.values())


def _figures(result: Result) -> dict[str, Figure]:
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
def _environment() -> Environment:
    # The template's name ends in .j2: what is chosen by endings would escape nothing.
    environment = Environment(
        loader=PackageLoader("bisect_trt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "times": times, "cell": _cell, "code": _code}
    return environment


def _harmless(value: Any) -> Any:
    """Text without characters that a browser would obey; markup of our own as it is."""
    return printable(value) if type(value) is str else value


def _code(text: str) -> Markup:
    """Lines of code: what is no line break is spelled out as elsewhere."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def _cell(value: Any) -> str:
    """A table's cell: marks for flags, blank where nothing is known."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    return number(value.item() if hasattr(value, "item") else value)


@cache
def _asset(name: str) -> Markup:
    """A file of ours or of the libraries, as it stands in the page."""
    text = (files("bisect_trt.report") / "assets" / name).read_text(encoding="utf-8")
    return Markup(text)


@cache
def _policy() -> str:
    """The Content-Security-Policy: nothing is loaded, and nothing runs but the page's own scripts,
    told by their hashes.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()
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
