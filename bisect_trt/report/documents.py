"""The result for people (HTML, Markdown) and for CI (JUnit)."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape

from bisect_trt.report.result import Result
from bisect_trt.stations.triage import times

_SHOWN_LAYERS = 40
_LAYER_COLUMNS = [
    "layer",
    "op",
    "pinned",
    "alone_score",
    "introduced_max_abs",
    "max_abs",
    "snr_db",
    "finite",
    "engine_max_abs",
    "engine_finite",
    "ref_min",
    "ref_max",
]
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


def number(value: Any) -> str:
    """A number for a table: short, honest about infinities, blank where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headline(result: Result) -> str:
    """The answer in one sentence."""
    name = result.precision.value.upper()
    if result.cause.value == "golden-mismatch":
        return "The reference itself differs from the golden outputs: nothing was searched."
    if not result.passed:
        return "No plan found meets the requirement."
    if result.cause.value == "none":
        return f"{name} meets the requirement as it is: nothing to pin."
    if result.cause.value == "tf32":
        return "Strict FP32 meets the requirement: turn TF32 off."
    proof = "each proved to be needed" if result.complete else "not yet proved to be minimal"
    return f"Keep {len(result.pinned)} of {result.layer_count} layers in FP32 and the requirement is met; {proof}."


def judged_by(result: Result) -> str:
    """Who decided, and on an engine what the pins cost."""
    if not result.engine:
        return "judged by emulation, not yet by an engine"
    latency = {row["engine"].rpartition(" ")[2]: row["latency_ms"] for row in result.engine["cost"]}
    costs = ", ".join(
        f"{name} {number(ms)} ms"
        for name, ms in latency.items()
        if name in ("fp32", result.precision.value, "plan")
    )
    builds = result.engine.get("builds_beyond_baselines", 0)
    return f"decided on {result.runner}, {builds} builds beyond the baselines" + (
        f"; latency {costs}" if costs else ""
    )


def search_sentences(result: Result) -> list[str]:
    """What kind of set it is and what finding it took, for people."""
    facts = result.search_facts
    if not facts:
        return []
    spread = (
        f" over {facts['spread_over']} layers" if facts["regime"] == "diffuse accumulation" else ""
    )
    lines = [f"{facts['regime']}{spread}; the pins are {'; '.join(facts['blocks'])}."]
    auc = (
        ""
        if math.isnan(facts["suspicion_auc"])
        else f" Suspicion ranked the pins with an AUC of {facts['suspicion_auc']:.3f}."
    )
    lines.append(
        f"{facts['emulated_probes']} emulated probes and {result.effect_runs} single-layer runs; "
        "by yes and no alone, telling "
        f"{len(result.pinned)} of {result.layer_count} layers apart takes "
        f"{facts['information_bound']:.0f} answers at least.{auc}"
    )
    if facts["violations"]:
        lines.append(
            f"{facts['violations']} failing sets held a passing one: here more pins are not always "
            "better."
        )
    return lines


def engine_sentences(result: Result) -> list[str]:
    """What else the engine showed, for people."""
    facts = result.engine
    if not facts:
        return []
    lines = [
        f"The engine's FP32 is {facts['fp32_is']}; pins were emulated as "
        f"{facts['pins_emulated_as'].upper()}."
    ]
    effect = facts.get("probe_effect")
    if effect:
        lines.append(
            f"Layer errors come from {facts['layer_errors_from']} ({facts['marked_batches']} "
            "builds). Marking moved the final "
            f"score from {number(effect['unmarked_score'])} to {number(effect['marked_score'])}: "
            "the unmarked engine decides."
        )
    if "tolerance_share" in facts:
        lines.append(
            f"The emulator was held to {number(facts['tolerance_share'])} of the tolerance; "
            f"{facts['builds_beyond_baselines']} "
            f"builds beyond the baselines, {len(facts['pins_added_by_engine'])} pins added by the "
            "engine's own probes."
        )
    if facts.get("out_of_builds"):
        lines.append(
            "The budget of builds was spent: this is the best plan seen, and not every pin is "
            "proved. Raise --max-builds to go on."
        )
    return lines


def worst_layers(result: Result) -> pd.DataFrame:
    """The rows of the layer table worth showing: pinned layers, then those that do most alone."""
    table = result.layers
    by = (
        "alone_score"
        if "alone_score" in table
        else "introduced_max_abs"
        if "introduced_max_abs" in table
        else "layer"
    )
    ranked = table.sort_values(["pinned", by], ascending=[False, False], kind="stable")
    return ranked[[c for c in _LAYER_COLUMNS if c in ranked]].head(_SHOWN_LAYERS)


def as_html(result: Result) -> str:
    """A page without scripts that works offline."""
    environment = Environment(
        loader=PackageLoader("bisect_trt.report"), autoescape=select_autoescape()
    )
    environment.filters["number"] = number
    environment.filters["times"] = times
    return environment.get_template("report.html.j2").render(
        result=result,
        headline=headline(result),
        outputs=_records(result.outputs, _OUTPUT_COLUMNS),
        pins=_records(result.pins, list(result.pins.columns)),
        layers=_records(worst_layers(result), _LAYER_COLUMNS),
        cost=_records(result.cost, _COST_COLUMNS),
        engine=engine_sentences(result),
        searched=search_sentences(result),
        judged_by=judged_by(result),
        search=_records(result.search, ["probe", "base", "pins", "verdict", "score", "seconds"]),
    )


def as_markdown(result: Result) -> str:
    """The same for a pull request."""
    lines = [
        f"# bisect-trt: {result.model} at {result.precision.value.upper()}",
        "",
        f"**{headline(result)}**",
        "",
        result.sentence,
        "",
        f"- requirement: {', '.join(f'`{r}`' for r in result.requirements)}",
        f"- before: {times(result.base_score)}; after: {times(result.score)}",
        f"- judged by: `{result.runner}` ({sum(result.probes.values())} probes, "
        f"{result.effect_runs} single-layer runs)",
        "",
        "## Pinned layers",
        "",
        *(f"- {s}" for s in search_sentences(result)),
        "",
        *_markdown(
            result.pins, ["layer", "op", "proved", "proved_on", "verdict_without", "score_without"]
        ),
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
            *(f"- {s}" for s in engine_sentences(result)),
        ]
    if result.findings:
        lines += ["", "## Findings", "", *(f"- {f.message}" for f in result.findings)]
    return "\n".join(lines) + "\n"


def as_junit(result: Result) -> str:
    """One test case for the requirement and one for each pin's proof."""
    suite = ElementTree.Element("testsuite", name="bisect-trt", time=f"{result.seconds:.3f}")
    cases = [
        ("requirement", "" if result.passed else f"{result.sentence} Score: {times(result.score)}")
    ]
    for row in result.pins.itertuples():
        cases.append((f"pin {row.layer} is needed", "" if row.proved else "not proved"))
    failures = 0
    for name, failure in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=result.model, name=name)
        if failure:
            failures += 1
            ElementTree.SubElement(case, "failure", message=failure)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _records(table: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    present = [c for c in columns if c in table]
    return {"columns": present, "rows": table[present].to_numpy(dtype=object).tolist()}


def _markdown(table: pd.DataFrame, columns: list[str]) -> list[str]:
    data = _records(table, columns)
    if not data["rows"]:
        return ["none"]
    rows = [[number(v).replace("|", "\\|") for v in row] for row in data["rows"]]
    return [
        "| " + " | ".join(r) + " |"
        for r in (data["columns"], ["---"] * len(data["columns"]), *rows)
    ]
