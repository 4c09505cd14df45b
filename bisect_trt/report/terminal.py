"""Shows progress and results in the terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import TextWrapper
from threading import Event, Thread
from types import TracebackType
from typing import Any, TextIO

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bisect_trt.base.atomic_files import REPAIRED_MODEL
from bisect_trt.base.display import counted, printable, some_of
from bisect_trt.base.errors import EXIT_OK
from bisect_trt.base.interrupt import STAGES, Observer
from bisect_trt.base.limits import in_words, peak_bytes
from bisect_trt.imports.mapping import ImportedList, Status
from bisect_trt.metrics.requirements import brief
from bisect_trt.model.inspection import Inspection
from bisect_trt.reduction.cures import Cures
from bisect_trt.reduction.oracle import Observation
from bisect_trt.reduction.reduce import Reduced
from bisect_trt.report import text
from bisect_trt.report.first_lines import (
    Line,
    cause_line,
    facts_line,
    finding_lines,
    lines_below,
    note_lines,
    verdict_line,
)
from bisect_trt.report.headline import not_covered
from bisect_trt.report.markdown import Page
from bisect_trt.report.record import Record
from bisect_trt.report.reduced import (
    figures,
    headline_of_cures,
    line_of_cure,
    nothing_bad,
    search_lines,
)
from bisect_trt.report.reduced import headline as headline_of_subgraph
from bisect_trt.report.repairs import Repaired, edit_lines, refusal_lines
from bisect_trt.report.repairs import headline as headline_of_repair
from bisect_trt.report.repairs import lines as lines_of_repair
from bisect_trt.report.tables import (
    OUTPUT_COLUMNS,
    choices_table,
    pins_by_effect,
    suspect_layers,
)
from bisect_trt.steps.verify import Verification


def plain(kind: type[Console] = Console, **more: Any) -> Console:
    """A console that prints text as it is, even names that look like rich's markup."""
    return kind(markup=False, emoji=False, highlight=False, **more)


def screen() -> Console:
    """The console for results."""
    # 200 columns where a program reads them, so that names are not broken into lines.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return plain(_Screen, width=None if is_terminal or "COLUMNS" in os.environ else 200)


class _UncheckedStream:
    """A stream that ignores errors, since a closed terminal must not end the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, words: str) -> int:
        with suppress(OSError):
            return self._stream.write(words)
        return len(words)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Screen(Console):
    """A console that raises on a closed pipe instead of exiting with a code of its own."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


LOG_INTERVAL_S = 5.0
"""Seconds between two lines in a log."""


def progress(
    *, quiet: bool = False, verbose: bool = False, budget: float | None = None, subject: str = ""
) -> ProgressObserver:
    """An observer that writes to standard error, so that it never mixes with JSON."""
    # Without standard error (pythonw), rich discards everything.
    missing = sys.stderr is None
    console = plain(stderr=True) if missing else plain(file=_UncheckedStream(sys.stderr))
    return ProgressObserver(console, quiet=quiet, verbose=verbose, budget=budget, subject=subject)


def _one_line() -> Column:
    """A column of the progress whose words are cut, not wrapped."""
    return Column(no_wrap=True, overflow="ellipsis")


class ProgressObserver(Observer):
    """Shows the current step; with ``verbose`` prints a line per evaluation.

    Without a terminal it logs time, memory, step, best plan and budget every ``interval_s``.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool,
        verbose: bool = False,
        interval_s: float | None = None,
        budget: float | None = None,
        subject: str = "",
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose and not quiet
        self._interval_s = LOG_INTERVAL_S if interval_s is None else interval_s
        self._budget = budget
        self._subject = f"{subject}: " if subject else ""
        self._stage = ""
        self._step = "starting"
        self._done = ""
        self._note = ""
        self._started = self._printed_at = self._counted_at = time.perf_counter()
        self._best: int | None = None
        self._ended = Event()
        self._log: Thread | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=_one_line()),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[note]}", markup=False, table_column=_one_line()),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
            get_time=lambda: time.perf_counter(),
            speed_estimate_period=600.0,  # evaluations may take minutes
        )
        self._task = self._bar.add_task(f"{self._subject}starting", total=None, note="")

    def __enter__(self) -> ProgressObserver:
        self._bar.start()
        if not (self._quiet or self._console.is_terminal):
            self._log = Thread(target=self._write_lines, daemon=True)
            self._log.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._ended.set()
        if self._log is not None:
            self._log.join(self._interval_s)

    def stage(self, name: str) -> None:
        self._stage = f"{STAGES.index(name) + 1}/{len(STAGES)} {name}"

    def _now(self) -> str:
        """The stage and its step, such as ``3/5 cause: triage``."""
        repeats = self._stage.endswith(f" {self._step}")
        steps = [self._stage, *([] if repeats else [self._step])]
        return f"{self._subject}{': '.join(filter(None, steps))}"

    def step(self, name: str) -> None:
        self._step, self._done = name, ""
        former = self._task
        self._task = self._bar.add_task(self._now(), total=None, note="")
        self._bar.remove_task(former)  # last: the log's thread always finds a task

    def progress(self, done: int, expected: int, note: str) -> None:
        if done < self._bar.tasks[-1].completed:  # another loop has begun
            self._bar.reset(self._task)
        self._bar.update(self._task, total=expected or None, completed=done)
        self._counted_at = time.perf_counter()
        unit = "input" if self._step == "load" else "evaluation"
        self._done = f"{done} of {expected}" if expected else f"{unit} {done}"
        self._note = note
        # Beside it stand the spinner, the bar of 16, the clock of 7 and their gaps.
        room = max(10, self._console.width - len(self._now()) - 30)
        shown = printable(f"{self._done}{self._left_in_words()}: {note}"[:room])
        self._bar.update(self._task, note=shown)
        if self._verbose:
            self._printed_at = time.perf_counter()
            self._console.print(printable(f"{self._subject}{self._done}: {note}"))

    def _left_in_words(self) -> str:
        """The time left, blank once the estimate has passed."""
        estimate = self._bar.tasks[-1].time_remaining
        left = (estimate or 0.0) - (time.perf_counter() - self._counted_at)
        return f", about {left:.0f} s left" if estimate and left >= 0.0 else ""

    def best(self, pins: int) -> None:
        self._best = pins

    def finding(self, message: str) -> None:
        if self._verbose:
            self._console.print(printable(f"{self._subject}note: {message}"), style="yellow")

    def _write_lines(self) -> None:
        """Logs from a thread of its own, as a step may take long."""
        while not self._ended.wait(self._interval_s):
            if self._verbose and time.perf_counter() - self._printed_at < self._interval_s:
                continue
            line = printable(self._line(time.perf_counter() - self._started))
            # Not by the console, which on a closed pipe would close standard output too.
            with suppress(OSError, ValueError):
                self._console.file.write(f"{line}\n")
                self._console.file.flush()

    def _line(self, elapsed: float) -> str:
        """The log line ``elapsed`` seconds after the start."""
        parts = [self._now()]
        if self._done:
            parts = [f"{self._now()}, {self._done}{self._left_in_words()}: {self._note}"]
        if self._best is not None:
            parts.append(f"best so far: {counted(self._best, 'layer')} in FP32")
        if self._budget is not None:
            left = max(0.0, 60.0 * self._budget - elapsed)
            parts.append(f"{left:.0f} s of the budget left")
        memory = in_words(peak_bytes())
        return f"[{elapsed:.0f} s, {memory} at most] {'; '.join(parts)}"


SHOWN_ROWS = 20
"""Rows of a table on the screen."""

_COLOURS = {"ok": "green", "unsure": "yellow", "bad": "red"}


MAX_LINES = 25
"""Lines of an answer without its details, at any width of 80 columns or more."""

LABEL_COLUMNS = 11
"""Columns of a line's label."""


def print_verdict(console: Console, result: Record, *, verbose: bool = False) -> None:
    """Prints the verdict, the cause, the choices, the validation, the command to build, the files.

    ``verbose`` adds the details: edits, pins with their proofs, outputs, all notes and counts.
    """
    style = f"bold {_COLOURS[text.tone(result)]}"
    verdict, *rest = _answer_rows(result, console.width, verbose=verbose)
    console.print(printable(verdict), style=style, soft_wrap=True)
    for row in rest:
        console.print(printable(row), soft_wrap=True)
    if verbose:
        _print_details(console, result)


def _answer_rows(result: Record, width: int, *, verbose: bool) -> list[str]:
    """The rows of the screen: at most ``MAX_LINES``, unless ``verbose``."""
    verdict, facts = verdict_line(result), facts_line(result)
    joined = f"{verdict}   {facts}"
    rows = [joined] if len(joined) <= width else [verdict, *_wrapped(facts, width, "  ")]
    cause = cause_line(result)
    if cause is not None:
        rows += _labelled(cause, width, most=None if verbose else 3)
    if result.choice_rows:
        table = choices_table(result.choice_rows, result.repair.rules, result.requirements)
        rows += ["", *_table_rows(table, width), ""]
    for line in lines_below(result):
        rows += _labelled(line, width, most=None if verbose else 3)
    found = [Line("Note", text) for text in finding_lines(result, "report.md")]
    said = dict.fromkeys([*note_lines(result), *found])
    notes = [_labelled(line, width, most=None if verbose else 2) for line in said]
    for place, note in enumerate(notes):
        left = len(notes) - place - 1
        if not verbose and _height([*rows, *note], width) + (left > 0) > MAX_LINES:
            more = f"{counted(left + 1, 'more note')}; -v shows all"
            return [*rows, *_labelled(Line("", more), width)]
        rows += note
    return rows


def _labelled(line: Line, width: int, most: int | None = None) -> list[str]:
    """The rows of ``line``; one that goes on after ``most`` of them ends with a sign."""
    label = f"{line.label:<{LABEL_COLUMNS}}"
    if line.is_code:
        return [f"{label}{line.text}"]
    first, *others = _wrapped(line.text, width, " " * LABEL_COLUMNS)
    rows = [label + first[LABEL_COLUMNS:], *others]
    if most is None or len(rows) <= most:
        return rows
    return [*rows[: most - 1], f"{rows[most - 1][: width - 4]} ..."]


def _wrapped(words: str, width: int, indent: str) -> list[str]:
    """``words`` in rows that begin with ``indent``; a name stays whole."""
    whole = words.replace(" %", "\u00a0%")  # a number and its sign stay on one line
    wrap = TextWrapper(
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace("\u00a0%", " %") for row in wrap.wrap(whole)] or [indent]


def _height(rows: Sequence[str], width: int) -> int:
    """The lines that a terminal shows of ``rows``."""
    return sum(max(1, math.ceil(len(row) / width)) for row in rows)


def _table_rows(table: pd.DataFrame, width: int) -> list[str]:
    """The rows of the choices, numbers to the right; heads take two lines where one is too wide."""
    cells = [[text.number(value) for value in row] for row in table.to_numpy(dtype=object)]
    heads = [[str(name)] for name in table.columns]
    lengths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indent = "  "

    def widths() -> list[int]:
        pairs = zip(lengths, heads, strict=True)
        return [max(length, *map(len, head)) for length, head in pairs]

    if len(indent) + sum(widths()) + 2 * len(heads) > width:
        heads = [head[0].rsplit(" ", 1) if " " in head[0] else ["", head[0]] for head in heads]
    columns = widths()
    lines = [*zip(*heads, strict=True), *cells]
    rows = []
    for line in lines:
        padded = [
            cell.ljust(size) if place in (0, 1, len(columns) - 1) else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(line, columns, strict=True))
        ]
        rows.append(f"{indent}{padded[0]} {'  '.join(padded[1:])}".rstrip())
    return rows


def _print_details(console: Console, result: Record) -> None:
    """Prints the edits, the pins with their proofs, the outputs and the counts."""
    for line in (*edit_lines(result.repair), *refusal_lines(result.repair)):
        console.print(printable(line), soft_wrap=True)
    _print_pins(console, result)
    if len(result.outputs):
        console.print(_baselines(result, {"score", "mean_abs", "median_abs", "rel_range"}))
    evaluations = counted(sum(result.evaluations.values()), "evaluation")
    runs = counted(result.sensitivity_runs, "single-layer run")
    made = f"{evaluations} ({result.new_evaluations} new) and {runs} in {result.seconds:.1f} s"
    console.print(printable(f"{made}; {text.judged_by(result)}"))


def _print_pins(console: Console, result: Record) -> None:
    """Prints the most sensitive pins with their proofs, and what finding them took."""
    if not len(result.pins):
        return
    shown = list(pins_by_effect(result).itertuples())[:SHOWN_ROWS]
    least = any(row.proved and text.is_least(row) for row in shown)
    without = "without it, at least" if least else "without it"
    measured = any(not math.isnan(_sensitivity(row)) for row in shown)
    columns = ["sensitivity, in tolerances"] if measured else []
    table = _table(["layer in FP32", "op", *columns, without])
    for row in shown:
        why = text.unproved(result, row)
        if row.proved:
            why = f"{row.outcome_without}, {text.score_without(row)}"
        cells = [brief(_sensitivity(row))] if measured else []
        table.add_row(printable(str(row.layer)), str(row.op), *cells, why)
    console.print(table)
    if len(result.pins) > SHOWN_ROWS:
        console.print(f"... and {len(result.pins) - SHOWN_ROWS} more in pins.csv")
    if result.search_facts:
        console.print(printable(text.search_sentences(result)[0]))


def _sensitivity(pin: Any) -> float:
    """The sensitivity of a pin; NaN where it was not measured."""
    return float(getattr(pin, "sensitivity", math.nan))


def print_comparison(console: Console, result: Record) -> None:
    """Prints the baselines' outputs and the layers with the largest errors."""
    if result.outputs.empty:
        console.print(printable(result.sentence))
        return
    console.print(_baselines(result, {"median_abs", "rel_range"}))
    console.print(_frame(suspect_layers(result.layers)))
    for line in not_covered(result):
        console.print(printable(line))
    for line in finding_lines(result, "the output of --json"):
        console.print(printable(f"note: {line}"), style="yellow")
    console.print(printable(f"all layers: {result.folder}/layers.csv"))


SHOWN_ENTRIES = 20
"""How many entries of a list are shown without ``--verbose``."""


def print_imported(
    console: Console, found: ImportedList, target: Path | None, verbose: bool
) -> None:
    """Prints what became of a list's entries, those first that were not taken as they are."""
    console.print(printable(f"{found.where}: {found.form.value}, {found.sentence}"), style="bold")
    order = (Status.REFUSED, Status.WIDENED, Status.MAPPED)
    rows = [row for status in order for row in found.rows_of(status)]
    # What was mapped as it says need not be read.
    shown = rows if verbose else [r for r in rows if r.status is not Status.MAPPED][:SHOWN_ENTRIES]
    if shown:
        table = _table(["", "line", "entry", "precision", "layers", "said"])
        for row in shown:
            precision = row.entry.precision.value if row.entry.precision is not None else "-"
            layers = row.layers[0] if len(row.layers) == 1 else f"{len(row.layers):,}"
            entry = row.entry.text[:60] + ("..." if len(row.entry.text) > 60 else "")
            where = str(row.entry.line or "-")
            cells = (row.status.value, where, entry, precision, layers[-60:], row.said)
            table.add_row(*map(printable, cells))
        console.print(table)
    hidden = sum(row.status is not Status.MAPPED for row in rows) - len(shown)
    if hidden > 0:
        console.print(f"{hidden:,} more entries were not taken as they are; -v shows all")
    for note in found.notes:
        console.print(printable(f"note: {note}"), style="yellow")
    if target is not None:
        console.print(printable(f"plan: {target}"))


def print_verification(console: Console, verification: Verification) -> None:
    """Prints the answer and each check of the plan."""
    style = "bold green" if verification.passed else "bold red"
    console.print(text.verdict(verification), style=style)
    for line in text.validation_lines(verification):
        console.print(printable(line))
    table = _table(["", "checked", "found"])
    for check in verification.checks:
        word = {True: "ok", False: "no", None: "-"}[check.validation]
        table.add_row(word, printable(check.what), printable(check.detail))
    console.print(table)
    console.print(printable(text.plan_line(verification)))


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Prints the findings, the patterns and the layers."""
    layers = counted(len(inspection.layers), "layer")
    console.print(f"{printable(inspection.model)}: opset {inspection.opset}, {layers}")
    for line in (*(f.message for f in inspection.findings), *inspection.advice):
        console.print(printable(f"note: {line}"), style="yellow")
    by_reason: dict[str, list[str]] = {}
    for name, reason in inspection.kept.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        console.print(printable(f"kept in FP32: {some_of(names, 3)} ({reason})"))
    for pattern in inspection.patterns:
        how = "written out" if pattern.decomposed else "one operator"
        console.print(printable(f"{pattern.kind} ({how}): {', '.join(pattern.layers)}"))
    columns = {
        "layer": [layer.name for layer in inspection.layers],
        "op": [layer.op for layer in inspection.layers],
        "scope": [layer.scope for layer in inspection.layers],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    table = _table(list(shown))
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(printable, row))
    console.print(table)


def print_cures(console: Console, cures: Cures, folder: Path) -> None:
    """Prints the answer and each cure."""
    good = not cures.needed or cures.smallest is not None
    console.print(printable(headline_of_cures(cures)), style="bold green" if good else "bold red")
    for cure in cures.tried:
        console.print(printable(line_of_cure(cure)), soft_wrap=True)
    console.print(printable(f"table: {folder}"), soft_wrap=True)


def print_repair(console: Console, repaired: Repaired) -> None:
    """Prints the answer, the edits, the proof and what was refused."""
    good = repaired.exit_code == EXIT_OK
    answer = headline_of_repair(repaired.found)
    console.print(printable(answer), style="bold green" if good else "bold red")
    for line in lines_of_repair(repaired.facts):
        console.print(printable(line), soft_wrap=True)
    if repaired.model is not None:
        written = repaired.folder / REPAIRED_MODEL
        console.print(printable(f"repaired model, in FP32: {written}"), soft_wrap=True)


def print_reduced(console: Console, found: Reduced | Observation, folder: Path) -> None:
    """Prints the subgraph, its results, how it was found and its folder."""
    if not isinstance(found, Reduced):
        console.print(printable(nothing_bad(found)), style="bold green")
        return
    console.print(printable(headline_of_subgraph(found)), style="bold red")
    for line in (*figures(found), *search_lines(found)):
        console.print(printable(line))
    console.print(printable(f"reproducer: {folder}"), soft_wrap=True)


def _table(columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _baselines(result: Record, but: Container[str]) -> Table:
    """A row per baseline and output, without the columns ``but``."""
    # The score is of all outputs, so it stands in the first row of a baseline only.
    shown = result.outputs[[c for c in OUTPUT_COLUMNS if c not in but]].astype(object)
    of_all = [c for c in ("baseline", "outcome", "score") if c in shown]
    shown.loc[shown["baseline"].duplicated(), of_all] = ""
    return _frame(shown)


def _frame(frame: pd.DataFrame) -> Table:
    table = _table([str(c) for c in frame.columns])
    for row in text.scores_in_words(frame).to_numpy(dtype=object).tolist():
        table.add_row(*(printable(text.number(v)) for v in row))
    return table


def print_page(console: Console, page: Page) -> None:
    """Prints a page of sections, each table cut at ``SHOWN_ROWS``."""
    console.print(printable(page.answer), style="bold green" if page.good else "bold red")
    for line in page.lines:
        console.print(printable(line))
    for section in page.sections:
        console.print()
        console.print(printable(section.heading), style="bold")
        for line in section.lines:
            console.print(printable(line))
        if len(section.table):
            console.print(_frame(section.table.head(SHOWN_ROWS)))
        if len(section.table) > SHOWN_ROWS:
            console.print(f"... and {len(section.table) - SHOWN_ROWS} more")
