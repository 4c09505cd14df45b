"""The result for a pull request, in GitHub's Markdown; names are text wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted, markdown
from bisect_trt.base.outcomes import InputKind, Validation
from bisect_trt.report.headline import headline, next_step, not_covered, score_after, score_before
from bisect_trt.report.record import Record
from bisect_trt.report.tables import COST_COLUMNS, OUTPUT_COLUMNS, shown_pins
from bisect_trt.report.text import (
    engine_sentences,
    number,
    scores_told,
    search_sentences,
    validation_sentences,
)

_MOST_ROWS = 100
"""A comment on GitHub holds 65,536 characters; the CSV files have the rest."""

_PIN_COLUMNS = [
    "layer",
    "op",
    "sensitivity",
    "proved",
    "proved_on",
    "outcome_without",
    "score_without",
]
_REQUIREMENT_COLUMNS = ["requirement", "reduced_score", "plan_score"]


def as_markdown(result: Record) -> str:
    """The content of report.md."""
    return "\n".join(_lines(result)) + "\n"


def answer_lines(result: Record) -> Iterator[str]:
    """The answer in one sentence, the cause, before and after, and what the plan holds on."""
    yield f"# bisect-trt: {markdown(result.model)} at {result.precision.value.upper()}"
    yield from ("", f"**{markdown(headline(result))}**", "")
    of_inputs = (*validation_sentences(result.validation), *not_covered(result))
    for sentence in (*of_inputs, next_step(result), result.sentence):
        yield from (markdown(sentence), "") if sentence else ()
    yield f"- cause: {result.cause.value}"
    yield f"- requirement: {', '.join(markdown(r) for r in result.requirements)}"
    yield f"- before: {score_before(result)}; after: {score_after(result)}"
    evaluations = sum(result.evaluations.values())
    runs = counted(result.sensitivity_runs, "single-layer run")
    made = f"{counted(evaluations, 'evaluation')}, {runs}"
    yield f"- judged by: `{result.runner}` ({made})"
    if result.validation is not None:
        yield from (
            "",
            "## What it holds on",
            "",
            *table_lines(_validation_table(result.validation)),
        )


def _lines(result: Record) -> Iterator[str]:
    yield from answer_lines(result)
    if len(result.requirements) > 1 and len(result.by_requirement):
        yield from ("", "## Requirements", "")
        yield from table_lines(result.by_requirement, _REQUIREMENT_COLUMNS)
    yield from ("", "## Pinned layers", "")
    for sentence in search_sentences(result):
        yield f"- {markdown(sentence)}"
    yield from ("", *table_lines(shown_pins(result), _PIN_COLUMNS, more="pins.csv"))
    yield from ("", "## Outputs", "", *table_lines(result.outputs, OUTPUT_COLUMNS, "outputs.csv"))
    if result.engine:
        yield from ("", "## Engines", "", *table_lines(result.cost, COST_COLUMNS), "")
        for sentence in engine_sentences(result):
            yield f"- {markdown(sentence)}"
    if result.findings:
        yield from ("", "## Findings", "")
        for finding in result.findings[:_MOST_ROWS]:
            yield f"- {markdown(finding.message)}"
        if len(result.findings) > _MOST_ROWS:
            yield f"- and {len(result.findings) - _MOST_ROWS} more in run.json"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield from ("", "## Versions", "", markdown(versions))


def _validation_table(validation: Validation) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for kind in InputKind:
        found = validation.of(kind)
        if found.tested:
            rows.append(
                {
                    "inputs": kind.words,
                    "passed": found.passed,
                    "tested": found.tested,
                    "at least": f"{100.0 * found.lower_bound:.1f} %" if found.lower_bound else "",
                    "worst score": found.worst_score,
                    "worst": found.worst,
                }
            )
    return pd.DataFrame(rows)


def table_lines(
    table: pd.DataFrame, columns: Sequence[str] | None = None, more: str = ""
) -> Iterator[str]:
    """``table`` in Markdown, "none" where it has no rows."""
    if table.empty:
        yield "none"
        return
    names = [str(c) for c in table if columns is None or c in columns]
    if columns is not None:
        names.sort(key=list(columns).index)
    shown = scores_told(table[names].head(_MOST_ROWS))
    yield _row(names)
    yield _row(
        [
            "---:" if pd.api.types.is_numeric_dtype(t) and t.dtype != bool else "---"
            for _, t in shown.items()
        ]
    )
    for values in shown.to_numpy(dtype=object).tolist():
        yield _row([markdown(number(v)) for v in values])
    if len(table) > _MOST_ROWS:
        yield from ("", f"and {len(table) - _MOST_ROWS} more in {more}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
