"""The result for people (HTML, Markdown) and for CI (JUnit)."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pandas as pd
from jinja2 import Environment, PackageLoader

from bisect_trt.core.holds import Robustness
from bisect_trt.core.names import markdown, printable, xml_text
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
from bisect_trt.report.tables import worst_inputs, worst_layers

_COST_COLUMNS = [
    "engine",
    "verdict",
    "pins",
    "latency_ms",
    "engine_mb",
    "build_s",
    "context_s",
    "probe_s",
]
_OUTPUT_COLUMNS = [
    "baseline",
    "output",
    "verdict",
    "score",
    "max_abs",
    "mean_abs",
    "median_abs",
    "rel_range",
    "cosine",
    "snr_db",
]
_PIN_COLUMNS = [
    "layer",
    "op",
    "alone_score",
    "proved",
    "proved_on",
    "verdict_without",
    "score_without",
]


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
        outputs=_records(result.outputs, _OUTPUT_COLUMNS),
        pins=_records(_shown_pins(result)),
        proved=bool(result.pins["proved"].any()),
        layers=_records(worst_layers(result.layers)),
        cost=_records(result.cost, _COST_COLUMNS),
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


def as_markdown(result: Result) -> str:
    """The same for a pull request."""
    lines = [
        f"# bisect-trt: {markdown(result.model)} at {result.precision.value.upper()}",
        "",
        f"**{markdown(headline(result))}**",
        "",
        *(markdown(s) for s in holds_sentences(result.holds)),
        "",
        markdown(result.sentence),
        "",
        f"- requirement: {', '.join(markdown(r) for r in result.requirements)}",
        f"- before: {times(result.base_score)}; after: {times(result.score)}",
        f"- judged by: `{result.runner}` ({sum(result.probes.values())} probes, "
        f"{result.effect_runs} single-layer runs)",
        "",
        "## Pinned layers",
        "",
        *(f"- {markdown(s)}" for s in search_sentences(result)),
        "",
        *_markdown(_shown_pins(result), _PIN_COLUMNS),
        "",
        "## Outputs",
        "",
        *_markdown(result.outputs, _OUTPUT_COLUMNS),
    ]
    if result.engine:
        lines += [
            "",
            "## Engines",
            "",
            *_markdown(result.cost, _COST_COLUMNS),
            "",
            *(f"- {markdown(s)}" for s in engine_sentences(result)),
        ]
    if result.findings:
        lines += ["", "## Findings", "", *(f"- {markdown(f.message)}" for f in result.findings)]
    return "\n".join(lines) + "\n"


def _shown_pins(result: Result) -> pd.DataFrame:
    """The pins with their proof; where none is proved, with what each layer does alone."""
    if result.pins["proved"].any() or result.pins.empty:
        return result.pins
    pins = result.pins[["layer", "op", "scope"]]
    if "alone_score" not in result.layers:
        return pins
    return pins.merge(result.layers[["layer", "alone_score"]], on="layer", how="left")


def as_junit(result: Result) -> str:
    """One test case for the requirement and one for each pin's proof."""
    suite = ElementTree.Element("testsuite", name="bisect-trt", time=f"{result.seconds:.3f}")
    cases = [
        ("requirement", "" if result.passed else f"{result.sentence} Score: {times(result.score)}")
    ]
    if result.holds is not None:
        lucky = result.holds.word is Robustness.LUCKY
        said = holds_sentences(result.holds)[0]
        cases.append(("holds beyond the given inputs", said if lucky else ""))
    for row in result.pins.itertuples() if not result.ranked else ():
        if row.held:
            continue
        cases.append((f"pin {row.layer} is needed", "" if row.proved else "not proved"))
    failures = 0
    for name, failure in cases:
        attributes = {"classname": xml_text(result.model), "name": xml_text(name)}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if failure:
            failures += 1
            ElementTree.SubElement(case, "failure", message=xml_text(failure))
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _records(table: pd.DataFrame, columns: list[str] | None = None) -> dict[str, Any]:
    present = list(table.columns) if columns is None else [c for c in columns if c in table]
    return {"columns": present, "rows": table[present].to_numpy(dtype=object).tolist()}


def _markdown(table: pd.DataFrame, columns: list[str]) -> list[str]:
    data = _records(table, columns)
    if not data["rows"]:
        return ["none"]
    rows = [[markdown(number(v)) for v in row] for row in data["rows"]]
    return [
        "| " + " | ".join(r) + " |"
        for r in (data["columns"], ["---"] * len(data["columns"]), *rows)
    ]
