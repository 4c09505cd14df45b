"""What a gate over many models found: a table, a page, one exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from bisect_trt.core.disk.files import write_whole
from bisect_trt.core.errors import BadInputError, not_written
from bisect_trt.core.holds import word_of
from bisect_trt.core.names import xml_text
from bisect_trt.numerics.scores import times
from bisect_trt.report.files.junit import as_junit
from bisect_trt.report.files.owned_folder import OwnedFolder
from bisect_trt.report.files.write import to_json
from bisect_trt.report.page.small_page import Page, Section, page_as_html, page_as_markdown
from bisect_trt.report.record.record import Record
from bisect_trt.report.record.requirement_scores import judged_scores
from bisect_trt.report.words.headline import headline

INDEX, MARKDOWN, RECORD, JUNIT = "index.html", "gate.md", "gate.json", "junit.xml"
_OWNED = OwnedFolder("bisect-trt gate", frozenset({INDEX, MARKDOWN, RECORD, JUNIT}), RECORD)


@dataclass(frozen=True)
class Entry:
    """One model: what its run found, or in ``error`` why there was none; ``exit_code`` that of a
    command of its own.
    """

    name: str
    exit_code: int
    result: Record | None = None
    error: str = ""

    @property
    def is_refuted(self) -> bool:
        """Whether its plan meets the requirements on the given inputs and closes the gate still."""
        return self.exit_code == 1 and self.result is not None and self.result.passed

    @property
    def said(self) -> str:
        """The answer in one sentence; where the requirements are missed, which, and why."""
        found = self.result
        if found is None:
            return self.error
        if self.exit_code == 0:
            return headline(found)
        scores = judged_scores(found.by_requirement)
        missed = [f"{r} ({times(score)})" for r, score in scores.items() if not score <= 1.0]
        which = f" Missed: {', '.join(missed)}." if missed else ""
        return f"{headline(found)}{which} {found.sentence}"


@dataclass(frozen=True)
class Gate:
    """``entries`` in the file's order, of so many ``planned``."""

    folder: Path
    entries: Sequence[Entry]
    planned: int

    @property
    def exit_code(self) -> int:
        """The largest of the models': an error beside a requirement that is missed says more."""
        return max((entry.exit_code for entry in self.entries), default=0)


def check_gate_folder(folder: Path, models: Iterable[str]) -> None:
    """Refuse a folder with files of the gate's names that no gate wrote.

    Args:
        folder: where the files will be.
        models: their names, which are those of folders there.

    Raises:
        BadInputError: there is one, it is no folder, or a model is called as one of the files.
    """
    if taken := sorted(_OWNED.files.intersection(models)):
        raise BadInputError(f"[models.{taken[0]}]: the gate writes a file of that name")
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"--out {folder}: not a folder; choose another name")
    strange = sorted(name for name in _OWNED.files if (folder / name).exists())
    if strange and not _OWNED.is_ours(folder):
        raise BadInputError(
            f"--out {folder}: holds {strange[0]}, which no `bisect-trt gate` wrote; choose another "
            "folder, or move it away"
        )


def gate_table(gate: Gate) -> pd.DataFrame:
    """A row a model."""
    rows: list[dict[str, Any]] = []
    for entry in gate.entries:
        row: dict[str, Any] = {"model": entry.name, "gate": _word(entry)}
        found = entry.result
        if found is not None:
            robust = word_of(found.holds) or ""
            row |= {"pins": f"{len(found.pinned)} of {found.layer_count}", "score": found.score}
            row |= {"inputs": robust, "judged by": found.runner}
            row |= {"new probes": str(found.new_probes), "seconds": round(found.seconds, 1)}
        rows.append({**row, "answer": entry.said})
    return pd.DataFrame(rows)


def _word(entry: Entry) -> str:
    return {0: "pass", 1: "MISSED"}.get(entry.exit_code, f"ERROR {entry.exit_code}")


def gate_page(gate: Gate) -> Page:
    """The table, with a link to each model's report."""
    missed = _names(e for e in gate.entries if e.exit_code == 1 and not e.is_refuted)
    refuted = _names(e for e in gate.entries if e.is_refuted)
    broken = _names(e for e in gate.entries if e.exit_code > 1)
    done = len(gate.entries)
    closed = [f"{missed} missed the requirements"] if missed else []
    closed += [f"{refuted} ended the budget with a plan that a test refutes"] if refuted else []
    lines = []
    if broken:
        answer = f"Not decided: {broken} could not be judged."
        lines = [f"{'; '.join(closed)}."] if closed else []
    elif closed:
        answer = f"Closed: {'; '.join(closed)}."
    else:
        answer = f"Open: {done} of {gate.planned} models meet their requirements."
    if done < gate.planned:
        lines.append(f"{gate.planned - done} models have not been run yet.")
    links = {e.name: f"{e.name}/report.html" for e in gate.entries if e.result is not None}
    good = gate.exit_code == 0 and done == gate.planned
    return Page(
        "bisect-trt gate", answer, good, [Section("Models", gate_table(gate), (), links)], lines
    )


def _names(entries: Iterable[Entry]) -> str:
    return ", ".join(entry.name for entry in entries)


def gate_record(gate: Gate) -> dict[str, Any]:
    """The content of gate.json."""
    return {
        "kind": _OWNED.command,
        "exit_code": gate.exit_code,
        "planned": gate.planned,
        "models": [
            {
                "name": entry.name,
                "exit_code": entry.exit_code,
                "said": entry.said,
                "folder": entry.name,
                "new_probes": entry.result.new_probes if entry.result is not None else None,
                "score": entry.result.score if entry.result is not None else None,
                "pinned": entry.result.pinned if entry.result is not None else None,
            }
            for entry in gate.entries
        ],
    }


def write_gate(gate: Gate) -> None:
    """Write index.html, gate.md, junit.xml and gate.json, each whole.

    Raises:
        MachineError: the disk is full.
        BadInputError: the folder cannot be written.
    """
    page = gate_page(gate)
    texts = {
        RECORD: to_json(gate_record(gate)) + "\n",  # first: it says whose the others are
        INDEX: page_as_html(page),
        MARKDOWN: page_as_markdown(page),
        JUNIT: _junit(gate),
    }
    try:
        gate.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(gate.folder / name, text.encode(errors="replace"))
    except OSError as error:
        raise not_written(f"--out {gate.folder}", error, "; choose another folder") from error


def _junit(gate: Gate) -> str:
    """The models' suites as one file; one that has no result is an error."""
    suites = ElementTree.Element("testsuites", name="bisect-trt gate")
    for entry in gate.entries:
        if entry.result is not None:
            suite = ElementTree.fromstring(as_junit(entry.result))
            suite.set("name", entry.name)
            suites.append(suite)
            continue
        counts = {"tests": "1", "failures": "0", "errors": "1"}
        suite = ElementTree.SubElement(suites, "testsuite", {"name": entry.name, **counts})
        case = ElementTree.SubElement(suite, "testcase", classname=entry.name, name="run")
        ElementTree.SubElement(case, "error", message=xml_text(entry.error))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
