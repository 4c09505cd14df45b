"""What ``verify`` found as files: for people, for machines, for CI."""

from __future__ import annotations

import pandas as pd

from bisect_trt.core.disk.files import write_whole
from bisect_trt.core.disk.run_files import VERIFY_JUNIT, VERIFY_PAGE, VERIFY_RECORD
from bisect_trt.core.errors import not_written
from bisect_trt.core.holds import Robustness
from bisect_trt.report.files.junit import verification_as_junit
from bisect_trt.report.files.write import to_json
from bisect_trt.report.page.small_page import Page, Section, page_as_html
from bisect_trt.report.words.verified import holds_lines, plan_line, verdict
from bisect_trt.stations.answer.verify import Verification


def write_verification(found: Verification) -> None:
    """Write the three files into the verification's folder.

    Raises:
        MachineError: the disk is full.
        BadInputError: the folder cannot be written.
    """
    files = {
        VERIFY_PAGE: page_as_html(_page(found)),
        VERIFY_RECORD: to_json(found.as_json()) + "\n",
        VERIFY_JUNIT: verification_as_junit(found),
    }
    try:
        for name, text in files.items():
            write_whole(found.folder / name, text.encode(errors="replace"))
    except OSError as error:
        raise not_written(f"--out {found.folder}", error, "; choose another folder") from error


def _page(found: Verification) -> Page:
    said = {True: "ok", False: "no", None: "not looked at"}
    rows = [{"checked": c.what, "says": said[c.holds], "found": c.detail} for c in found.checks]
    lines = [f"{found.model}: {plan_line(found)}.", *holds_lines(found)]
    sections = [Section("What was looked at", pd.DataFrame(rows))]
    lucky = found.holds is not None and found.holds.word is Robustness.LUCKY
    good = found.passed and not lucky
    return Page("bisect-trt verify", verdict(found), good, sections, lines)
