"""The pages of measured figures stay short, and each names the command that makes it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
MAX_LINES = 120

_COMMAND = re.compile(r"`(?:python -m |make |pytest |bisect-trt )[^`\n]+`")


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_a_page_of_results_is_short_and_names_its_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{page.name}: older tables go, git keeps them"
    assert _COMMAND.search(text), f"{page.name} names no command that makes its tables"


def test_there_are_pages_of_results() -> None:
    assert RESULTS
