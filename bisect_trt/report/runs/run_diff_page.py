"""What changed between two runs, for people, pull requests and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bisect_trt.core.names import counted, some_of
from bisect_trt.report.files.owned_folder import OwnedFolder
from bisect_trt.report.files.write import to_json
from bisect_trt.report.page.small_page import Page, Section, page_as_html, page_as_markdown
from bisect_trt.report.runs.run_diff import RunDiff

HTML, MARKDOWN, RECORD = "diff.html", "diff.md", "diff.json"
FOLDER = OwnedFolder("bisect-trt diff", frozenset({HTML, MARKDOWN, RECORD}), RECORD)

_SHOWN_NAMES = 8


def as_page(found: RunDiff) -> Page:
    """The sections: what must be known first comes first."""
    sections = [
        Section("Requirements", found.requirements),
        Section("What the plans hold on", found.holds),
        Section("Pins", found.pins, [_pins_line(found)]),
        Section("Layers", found.layers, list(_layer_lines(found))),
        Section("What else differs", found.changed),
    ]
    shown = [s for s in sections if len(s.table) or s.lines]
    title = f"bisect-trt: {found.before.folder} and {found.after.folder}"
    return Page(title, headline(found), not (found.worse or found.unasked), shown, found.worse[1:])


def headline(found: RunDiff) -> str:
    """Whether the second run is worse, and why, in one sentence."""
    unasked = f"cannot be compared: {'; '.join(found.unasked)}." if found.unasked else ""
    if found.worse:
        return f"Worse: {found.worse[0]}" + (f" The rest {unasked}" if unasked else "")
    if unasked:
        return unasked
    if found.after.passed and not found.before.passed:
        return "Better: no plan met the requirements, and now one does."
    return "Not worse: every requirement that was met still is."


def as_record(found: RunDiff) -> dict[str, Any]:
    """The content of diff.json."""
    return {
        "kind": FOLDER.command,
        "before": str(found.before.folder),
        "after": str(found.after.folder),
        "worse": list(found.worse),
        "not_compared": list(found.unasked),
        "requirements": found.requirements.to_dict(orient="records"),
        "holds": found.holds.to_dict(orient="records"),
        "pins_gained": found.gained,
        "pins_lost": found.lost,
        "measure": found.measure,
        "layers": found.layers.to_dict(orient="records"),
        "matched": found.matched,
        "unmatched_before": list(found.unmatched_before),
        "unmatched_after": list(found.unmatched_after),
    }


def write_diff(found: RunDiff, folder: Path) -> None:
    """Write diff.html, diff.md and diff.json.

    Raises:
        BadInputError: the folder holds other files, or cannot be written.
        MachineError: the disk is full.
    """
    FOLDER.check(folder)
    page = as_page(found)
    texts = {
        HTML: page_as_html(page),
        MARKDOWN: page_as_markdown(page),
        RECORD: to_json(as_record(found)) + "\n",
    }
    with FOLDER.written(folder) as draft:
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8", errors="replace")


def _pins_line(found: RunDiff) -> str:
    old, new = len(found.before.pinned), len(found.after.pinned)
    kept = new - len(found.gained)
    return f"{old} before, {new} after: {kept} kept, {len(found.gained)} gained, {old - kept} lost."


def _layer_lines(found: RunDiff) -> list[str]:
    worse = int(found.layers["change"].str.startswith("worse").sum())
    better = len(found.layers) - worse
    lines = []
    if found.measure:
        lines.append(
            f"Of {found.matched} layers with the same name in both, {worse} are worse and {better} "
            f"better by more than half, by {found.measure} with everything lowered."
        )
    else:
        lines.append("The layers' errors are not known in both runs, so they are not compared.")
    for names, where in (
        (found.unmatched_before, "first"),
        (found.unmatched_after, "second"),
    ):
        if names:
            lines.append(
                f"{counted(len(names), 'layer')} of the {where} run could not be matched by name "
                f"with any of the other: {some_of(names, _SHOWN_NAMES)}."
            )
    return lines
