"""The result for a pull request (Markdown) and for CI (JUnit)."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pandas as pd

from bisect_trt.core.holds import Robustness
from bisect_trt.core.names import markdown, xml_text
from bisect_trt.numerics.requirements import times
from bisect_trt.report.result import Result
from bisect_trt.report.sentences import (
    engine_sentences,
    headline,
    holds_sentences,
    number,
    search_sentences,
)

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


def as_markdown(result: Result) -> str:
    """The answer for a pull request."""
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
