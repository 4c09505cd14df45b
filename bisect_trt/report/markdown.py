"""Writes results in GitHub's Markdown, with all names escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd

from bisect_trt.base.display import counted, markdown
from bisect_trt.base.outcomes import Validation
from bisect_trt.report.choices import saved_by_repair
from bisect_trt.report.columns import names_in
from bisect_trt.report.first_lines import answer_lines
from bisect_trt.report.record import Record
from bisect_trt.report.repairs import proof_sentence, refusal_lines
from bisect_trt.report.tables import (
    COST_COLUMNS,
    OUTPUT_COLUMNS,
    candidates_table,
    choices_table,
    repairs_table,
    shown_pins,
    times_table,
)
from bisect_trt.report.text import (
    engine_sentences,
    number,
    scores_in_words,
    search_sentences,
    sensitivity_sentences,
)
from bisect_trt.report.weights import weights_table

SHOWN_ROWS = 100
"""Rows of a table: a comment on GitHub holds 65,536 characters."""

_PINS = names_in(
    "layer op sensitivity held inherited proved proved_on outcome_without score_without"
)
_REQUIREMENTS = names_in("requirement reduced_score plan_score")


def as_markdown(result: Record) -> str:
    """The content of report.md."""
    return "\n".join((*answer_as_markdown(result), *_detail_lines(result))) + "\n"


def answer_as_markdown(result: Record) -> Iterator[str]:
    """The first lines of the answer, who judged, and the validation."""
    answer, *lines = answer_lines(result, on_page=True)
    yield f"# bisect-trt: {markdown(result.model)} at {result.precision.value.upper()}"
    yield from ("", f"**{markdown(answer)}**", "")
    for line in lines:
        yield from (markdown(line), "")
    yield f"- cause: {result.cause.value}"
    evaluations = counted(sum(result.evaluations.values()), "evaluation")
    runs = counted(result.sensitivity_runs, "single-layer run")
    yield f"- judged by: `{result.runner}` ({evaluations}, {runs})"
    if result.validation is not None:
        table = _validation_table(result.validation)
        yield from ("", "## Validation", "", *table_lines(table))
    if result.choice_rows:
        table = choices_table(result.choice_rows, result.repair.rules, result.requirements)
        yield from ("", "## Choices", "", *table_lines(table))


def _detail_lines(result: Record) -> Iterator[str]:
    """Requirements, pins, outputs, engines, findings and versions."""
    if len(result.requirements) > 1 and len(result.by_requirement):
        yield from ("", "## Requirements", "")
        yield from table_lines(result.by_requirement, _REQUIREMENTS)
    if result.repair.rows or result.repair.refused:
        table = repairs_table(result.repair)
        yield from ("", "## Repair of the graph", "", *table_lines(table), "")
        if result.repair.proof is not None:
            yield f"- {markdown(proof_sentence(result.repair.proof))}"
        if saved := saved_by_repair(result.choice_rows):
            yield f"- {markdown(saved)}"
        for line in refusal_lines(result.repair)[:SHOWN_ROWS]:
            yield f"- {markdown(line)}"
    if result.weights.sentence:
        yield from ("", "## Weights rounded to fit", "", markdown(result.weights.sentence), "")
        yield from table_lines(weights_table(result.weights), more="run.json")
    yield from ("", "## Pinned layers", "")
    for sentence in search_sentences(result):
        yield f"- {markdown(sentence)}"
    for sentence in sensitivity_sentences(result):
        yield f"- {sentence}"
    yield from ("", *table_lines(shown_pins(result), _PINS, more="pins.csv"))
    yield from ("", "## Outputs", "", *table_lines(result.outputs, OUTPUT_COLUMNS, "outputs.csv"))
    if result.engine:
        yield from ("", "## Engines", "", *table_lines(result.cost, COST_COLUMNS), "")
        for table in (candidates_table(result.engine.candidates), times_table(result.engine.times)):
            if len(table):
                yield from (*table_lines(table), "")
        for sentence in engine_sentences(result):
            yield f"- {markdown(sentence)}"
    if result.findings:
        yield from ("", "## Findings", "")
        for finding in result.findings[:SHOWN_ROWS]:
            yield f"- {markdown(finding.message)}"
        if len(result.findings) > SHOWN_ROWS:
            yield f"- and {len(result.findings) - SHOWN_ROWS} more in run.json"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield from ("", "## Versions", "", markdown(versions))


def _validation_table(validation: Validation) -> pd.DataFrame:
    """A row per kind of input that was tested."""
    rows = []
    for kind, tally in validation.tested:
        row = {"inputs": kind.words, "passed": tally.passed, "tested": tally.tested}
        row["at least"] = f"{100.0 * tally.lower_bound:.1f} %" if tally.lower_bound else ""
        rows.append({**row, "worst score": tally.worst_score, "worst": tally.worst})
    return pd.DataFrame(rows)


def table_lines(
    table: pd.DataFrame, columns: Sequence[str] | None = None, more: str = ""
) -> Iterator[str]:
    """Writes ``table``, or "none" where it is empty; ``more`` is the file with all rows."""
    if table.empty:
        yield "none"
        return
    names = [c for c in (table if columns is None else columns) if c in table]
    shown = scores_in_words(table[names].head(SHOWN_ROWS))
    numeric = [pd.api.types.is_numeric_dtype(t) and t.dtype != bool for _, t in shown.items()]
    yield _row([str(name) for name in names])
    yield _row(["---:" if right else "---" for right in numeric])
    for values in shown.to_numpy(dtype=object).tolist():
        yield _row([markdown(number(v)) for v in values])
    if len(table) > SHOWN_ROWS:
        yield from ("", f"and {len(table) - SHOWN_ROWS} more in {more}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Section:
    """A part of a page: sentences, then a table."""

    heading: str
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The output of a command about several runs; ``good`` colours the answer."""

    title: str
    answer: str
    good: bool
    sections: Sequence[Section]
    lines: Sequence[str] = ()


def page_as_markdown(page: Page, more: str) -> str:
    """Writes a page for a pull request; ``more`` is the file with all rows."""
    lines = [f"# {markdown(page.title)}", "", f"**{markdown(page.answer)}**", ""]
    lines += [line for text in page.lines for line in (markdown(text), "")]
    for section in page.sections:
        lines += [f"## {section.heading}", ""]
        lines += [f"- {markdown(line)}" for line in section.lines]
        lines += [""] if section.lines else []
        if len(section.table):
            lines += [*table_lines(section.table, more=more), ""]
    return "\n".join(lines)
