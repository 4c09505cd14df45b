"""What a person sees in the terminal: progress while it runs, one screen at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from types import TracebackType

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bisect_trt.core.observer import Observer
from bisect_trt.graph.inspection import Inspection
from bisect_trt.numerics.requirements import times
from bisect_trt.report.result import Result
from bisect_trt.report.sentences import (
    headline,
    holds_sentences,
    judged_by,
    number,
    search_sentences,
)
from bisect_trt.report.tables import worst_layers
from bisect_trt.stations.verify import Verification

_SHOWN_PINS = 20


class ProgressObserver(Observer):
    """Draws a line for the station in work; with ``verbose`` every step is a line of its own."""

    def __init__(self, console: Console, *, quiet: bool, verbose: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, note="")
        self._began = time.perf_counter()

    def __enter__(self) -> ProgressObserver:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def station(self, name: str) -> None:
        self._began = time.perf_counter()
        self._bar.reset(self._task, total=None, description=name, note="")

    def progress(self, done: int, expected: int, note: str) -> None:
        left = ""
        if expected:
            spent = time.perf_counter() - self._began
            left = f", about {spent / max(done, 1) * max(expected - done, 0):.0f} s left"
        of = f"{done} of {expected}" if expected else f"probe {done}"
        self._bar.update(
            self._task,
            total=expected or None,
            completed=done,
            note=escape(f"{of}{left}: {note}"[:90]),
        )
        if self._verbose and not self._quiet:
            self._console.print(escape(f"{of}: {note}"), highlight=False)

    def finding(self, message: str) -> None:
        if self._verbose and not self._quiet:
            self._console.print(escape(f"note: {message}"), style="yellow", highlight=False)


def screen() -> Console:
    """The console for results: wide where a program reads it, so that no name is broken over two
    lines.
    """
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)


def print_verdict(console: Console, result: Result) -> None:
    """The answer, the pins with their proof, the outputs, where the files are."""
    colour = "green" if result.passed else "red"
    console.print(f"[bold {colour}]{escape(headline(result))}[/]", highlight=False)
    for line in holds_sentences(result.holds)[:2]:
        console.print(escape(line), highlight=False)
    console.print(escape(result.sentence), highlight=False)
    if not math.isnan(result.base_score):
        after = f"   after: {times(result.score)}" if result.passed else ""
        requirement = escape(", ".join(result.requirements))
        console.print(
            f"before: {times(result.base_score)}{after}   requirement: {requirement}",
            highlight=False,
        )
    if len(result.pins):
        table = _table(["pinned layer", "op", "without it"])
        for row in list(result.pins.itertuples())[:_SHOWN_PINS]:
            if not row.proved:
                table.add_row(escape(str(row.layer)), str(row.op), "ranked, not proved")
                continue
            table.add_row(
                escape(str(row.layer)),
                str(row.op),
                f"{row.verdict_without}, {times(float(str(row.score_without)))}",
            )
        console.print(table)
        if len(result.pins) > _SHOWN_PINS:
            console.print(
                f"... and {len(result.pins) - _SHOWN_PINS} more in pins.csv", highlight=False
            )
        console.print(
            escape(search_sentences(result)[0]) if result.search_facts else "", highlight=False
        )
    if len(result.outputs):
        console.print(
            _frame(result.outputs[["baseline", "output", "verdict", "max_abs", "cosine", "snr_db"]])
        )
    _print_findings(console, result)
    probes = f"{sum(result.probes.values())} probes ({result.new_probes} new)"
    made = f"{probes} and {result.effect_runs} single-layer runs"
    counted = f"{made} in {result.seconds:.1f} s"
    console.print(f"{counted}; {judged_by(result)}", highlight=False)
    files = f"report: {result.folder}/report.html"
    if result.passed:
        files += f"   model to ship: {result.folder}/model.typed.onnx"
    console.print(escape(files), highlight=False, soft_wrap=True)


def _print_findings(console: Console, result: Result) -> None:
    """The findings that may matter, each in full; constants that partly vanish are many and
    harmless, so one line for all.
    """
    vanishing = [f for f in result.findings if f.kind == "weight-underflow"]
    others = [f for f in result.findings if f.kind != "weight-underflow"]
    lines = [f.message for f in others[:5]]
    if len(others) > 5:
        lines.append(f"{len(others) - 5} more findings in report.md")
    if vanishing:
        lines.append(
            f"values below {result.precision.value}'s smallest number become zero in "
            f"{len(vanishing)} of the constants; "
            "report.md names them"
        )
    for line in lines:
        console.print(escape(f"note: {line}"), highlight=False, style="yellow")


def print_comparison(console: Console, result: Result) -> None:
    """The baselines' outputs and the layers that err most."""
    if result.outputs.empty:
        console.print(escape(result.sentence), highlight=False)
        return
    console.print(
        _frame(
            result.outputs[
                [
                    "baseline",
                    "output",
                    "verdict",
                    "score",
                    "max_abs",
                    "mean_abs",
                    "cosine",
                    "snr_db",
                ]
            ]
        )
    )
    console.print(_frame(worst_layers(result.layers)))
    console.print(escape(f"all layers: {result.folder}/layers.csv"), highlight=False)


def print_verification(console: Console, verification: Verification) -> None:
    """The answer, then each way in which the plan was looked at."""
    answer = "The plan holds." if verification.passed else "The plan does not hold."
    console.print(f"[bold {'green' if verification.passed else 'red'}]{answer}[/]", highlight=False)
    table = _table(["", "checked", "found"])
    for check in verification.checks:
        table.add_row(
            {True: "ok", False: "no", None: "-"}[check.holds],
            escape(check.what),
            escape(check.detail),
        )
    console.print(table)
    for line in holds_sentences(verification.holds):
        console.print(escape(line), highlight=False)
    pins, base = len(verification.plan.pinned), verification.plan.base.value.upper()
    console.print(
        escape(
            f"{pins} layers in FP32, the rest in {base}; requirement: "
            f"{', '.join(verification.requirements)}"
        ),
        highlight=False,
    )


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Counts first, then what deserves attention."""
    console.print(
        f"{inspection.model}: opset {inspection.opset}, {len(inspection.layers)} layers",
        highlight=False,
    )
    table = _table(["layer", "op", "scope", "suspect because"])
    for layer in inspection.layers:
        table.add_row(
            escape(layer.name),
            layer.op,
            escape(layer.scope),
            escape(inspection.suspects.get(layer.name, "")),
        )
    console.print(table)
    for pattern in inspection.patterns:
        how = "written out" if pattern.decomposed else "one operator"
        console.print(
            escape(f"{pattern.kind} ({how}): {', '.join(pattern.layers)}"), highlight=False
        )
    for name, reason in inspection.kept.items():
        console.print(escape(f"kept in FP32: {name} ({reason})"), highlight=False)
    for line in (*(f.message for f in inspection.findings), *inspection.advice):
        console.print(escape(f"note: {line}"), style="yellow", highlight=False)


def _table(columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _frame(frame: pd.DataFrame) -> Table:
    table = _table([str(c) for c in frame.columns])
    for row in frame.to_numpy(dtype=object).tolist():
        table.add_row(*(escape(number(v)) for v in row))
    return table
