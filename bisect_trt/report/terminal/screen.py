"""What a person sees in the terminal at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from bisect_trt.core.finding import VANISHING
from bisect_trt.core.names import counted, printable, some_of
from bisect_trt.graph.inspection.inspection import Inspection
from bisect_trt.report.page.small_page import Page
from bisect_trt.report.pieces.cured import headline_of_cures, lines_of_cures
from bisect_trt.report.pieces.reduced import figures, nothing_bad, reduced_how
from bisect_trt.report.pieces.reduced import headline as headline_of_piece
from bisect_trt.report.record.record import Record
from bisect_trt.report.record.tables import OUTPUT_COLUMNS, suspect_layers
from bisect_trt.report.words.headline import FIRST_KINDS, answer_lines, files_line
from bisect_trt.report.words.sentences import (
    is_least,
    judged_by,
    number,
    score_without,
    scores_told,
    search_sentences,
    unproved,
)
from bisect_trt.report.words.tone import tone
from bisect_trt.report.words.verified import holds_lines, plan_line, verdict
from bisect_trt.stations.answer.verify import Verification
from bisect_trt.stations.pieces.cures import Cures
from bisect_trt.stations.pieces.reduce import Reduced
from bisect_trt.stations.pieces.seen import Seen

_SHOWN_PINS, _SHOWN_FINDINGS, _OF_A_KIND = 20, 5, 2
_KEPT = 3
_COLOURS = {"ok": "green", "unsure": "yellow", "bad": "red"}


def print_verdict(console: Console, result: Record) -> None:
    """The answer, the pins with their proof, the outputs, where the files are."""
    said, *lines = answer_lines(result)
    console.print(printable(said), style=f"bold {_COLOURS[tone(result)]}")
    for line in lines:
        console.print(printable(line))
    if len(result.pins):
        last = [c for c in ("held", "inherited") if c in result.pins]
        first = result.pins.sort_values(last, kind="stable")
        shown = list(first.itertuples())[:_SHOWN_PINS]
        least = any(row.proved and is_least(row) for row in shown)
        table = _table(["pinned layer", "op", "without it, at least" if least else "without it"])
        for row in shown:
            if not row.proved:
                table.add_row(printable(str(row.layer)), str(row.op), unproved(result, row))
                continue
            table.add_row(
                printable(str(row.layer)),
                str(row.op),
                f"{row.verdict_without}, {score_without(row)}",
            )
        console.print(table)
        if len(result.pins) > _SHOWN_PINS:
            console.print(f"... and {len(result.pins) - _SHOWN_PINS} more in pins.csv")
        if result.search_facts:
            console.print(printable(search_sentences(result)[0]))
    if len(result.outputs):
        but = {"score", "mean_abs", "median_abs", "rel_range"}
        console.print(_baselines(result, but))
    _print_findings(console, result, "report.md")
    probes = f"{counted(sum(result.probes.values()), 'probe')} ({result.new_probes} new)"
    made = f"{probes} and {counted(result.effect_runs, 'single-layer run')}"
    console.print(printable(f"{made} in {result.seconds:.1f} s; {judged_by(result)}"))
    console.print(printable(files_line(result)), soft_wrap=True)


def _print_findings(console: Console, result: Record, whole: str) -> None:
    """The findings that may matter, each in full, what inputs look like last, and two of a kind: a
    mask that every block reads hides nothing else. Constants that partly vanish are many and
    harmless, so one line for all. ``whole`` is where the others are.
    """
    vanishing = [f for f in result.findings if f.kind == VANISHING]
    said = (VANISHING, *FIRST_KINDS)
    others = [f for f in result.findings if f.kind not in said]
    others.sort(key=lambda f: (not f.weighty, f.kind == "input"))
    kinds = Counter[str]()
    shown = []
    for finding in others:
        kinds[finding.kind] += 1
        if finding.weighty or kinds[finding.kind] <= _OF_A_KIND:
            shown.append(finding)
    lines = [f.message for f in shown[:_SHOWN_FINDINGS]]
    if len(lines) < len(others):
        more = len(others) - len(lines)
        lines.append(f"{more} more finding{'s' * (more > 1)} in {whole}")
    if vanishing:
        lines.append(
            f"values below {result.precision.value}'s smallest number become zero in "
            f"{len(vanishing)} of the constants; "
            f"{whole} names them"
        )
    for line in lines:
        console.print(printable(f"note: {line}"), style="yellow")


def print_comparison(console: Console, result: Record) -> None:
    """The baselines' outputs and the layers that err most."""
    if result.outputs.empty:
        console.print(printable(result.sentence))
        return
    console.print(_baselines(result, {"median_abs", "rel_range"}))
    console.print(_frame(suspect_layers(result.layers)))
    _print_findings(console, result, "the output of --json")
    console.print(printable(f"all layers: {result.folder}/layers.csv"))


def print_verification(console: Console, verification: Verification) -> None:
    """The answer, then each way in which the plan was looked at."""
    style = "bold green" if verification.passed else "bold red"
    console.print(verdict(verification), style=style)
    for line in holds_lines(verification):
        console.print(printable(line))
    table = _table(["", "checked", "found"])
    for check in verification.checks:
        table.add_row(
            {True: "ok", False: "no", None: "-"}[check.holds],
            printable(check.what),
            printable(check.detail),
        )
    console.print(table)
    console.print(printable(plan_line(verification)))


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Counts first, then what deserves attention."""
    layers = counted(len(inspection.layers), "layer")
    console.print(f"{printable(inspection.model)}: opset {inspection.opset}, {layers}")
    rows = [
        (layer.name, layer.op, layer.scope, inspection.suspects.get(layer.name, ""))
        for layer in inspection.layers
    ]
    # A column that nothing stands in is left out.
    heads = ("layer", "op", "scope", "suspect because")
    shown = [i for i, _ in enumerate(heads) if any(row[i] for row in rows)]
    table = _table([heads[i] for i in shown])
    for row in rows:
        table.add_row(*(printable(row[i]) for i in shown))
    console.print(table)
    for pattern in inspection.patterns:
        how = "written out" if pattern.decomposed else "one operator"
        console.print(printable(f"{pattern.kind} ({how}): {', '.join(pattern.layers)}"))
    alike: dict[str, list[str]] = {}
    for name, reason in inspection.kept.items():
        alike.setdefault(reason, []).append(name)
    for reason, names in alike.items():
        console.print(printable(f"kept in FP32: {some_of(names, _KEPT)} ({reason})"))
    for line in (*(f.message for f in inspection.findings), *inspection.advice):
        console.print(printable(f"note: {line}"), style="yellow")


def print_cures(console: Console, cures: Cures, folder: Path) -> None:
    """The answer, then what was tried.

    Args:
        console: where to.
        cures: what was tried.
        folder: of the table and the model.
    """
    good = not cures.needed or cures.smallest is not None
    console.print(printable(headline_of_cures(cures)), style="bold green" if good else "bold red")
    for line in lines_of_cures(cures):
        console.print(printable(line), soft_wrap=True)
    console.print(printable(f"table: {folder}"), soft_wrap=True)


def print_reduced(console: Console, found: Reduced | Seen, folder: Path) -> None:
    """The piece, what it shows, how it was found and where it is.

    Args:
        console: where to.
        found: the piece, or what the whole shows where it is not bad.
        folder: of the reproducer.
    """
    if not isinstance(found, Reduced):
        console.print(printable(nothing_bad(found)), style="bold green")
        return
    console.print(printable(headline_of_piece(found)), style="bold red")
    for line in (*figures(found), *reduced_how(found)):
        console.print(printable(line))
    console.print(printable(f"reproducer: {folder}"), soft_wrap=True)


def _table(columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _baselines(result: Record, but: Container[str]) -> Table:
    """A row a baseline and output, without the columns ``but``. Its verdict and score are of the
    baseline as a whole: beside each of its outputs they would say that every one of them misses.
    """
    shown = result.outputs[[c for c in OUTPUT_COLUMNS if c not in but]].astype(object)
    of_all = [c for c in ("baseline", "verdict", "score") if c in shown]
    shown.loc[shown["baseline"].duplicated(), of_all] = ""
    return _frame(shown)


def _frame(frame: pd.DataFrame) -> Table:
    table = _table([str(c) for c in frame.columns])
    for row in scores_told(frame).to_numpy(dtype=object).tolist():
        table.add_row(*(printable(number(v)) for v in row))
    return table


def print_page(console: Console, page: Page) -> None:
    """A page of sections, tables cut where they would fill more than a screen."""
    console.print(printable(page.answer), style="bold green" if page.good else "bold red")
    for line in page.lines:
        console.print(printable(line))
    for section in page.sections:
        console.print()
        console.print(printable(section.heading), style="bold")
        for line in section.lines:
            console.print(printable(line))
        if len(section.table):
            console.print(_frame(section.table.head(_SHOWN_PINS)))
        if len(section.table) > _SHOWN_PINS:
            console.print(f"... and {len(section.table) - _SHOWN_PINS} more")
