"""Pages are short, and the first ones are written in short sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, name_of

MAX_WORDS = 25
MAX_LINES = 150
MAX_README_LINES = 119

GENERATED = {DOCS / "columns.md"}
"""Pages that a command writes whole."""

PLAIN = (ROOT / "README.md", DOCS / "get-started.md", DOCS / "symptoms.md")
"""What a stranger reads first."""

_FENCE = re.compile(r"^```.*?^```$", flags=re.M | re.S)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LINE = re.compile(r"^(?:#|\|).*$", flags=re.M)
_MARK = re.compile(r"^(?:[-*>]|\d+\.) +", flags=re.M)


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a Markdown page without its fenced parts.

    Headings, list items and cells of tables end a sentence; code in backquotes is one word.
    """
    text = re.sub(r"`[^`\n]+`", "code", _LINK.sub(r"\1", _FENCE.sub("\n\n", text)))
    text = _LINE.sub(lambda row: "\n\n" + row[0].replace("|", "\n\n") + "\n\n", text)
    for part in re.split(r"\n\s*\n", _MARK.sub("\n\n", text)):
        yield from filter(None, re.split(r"(?<=[.?!])\s+", " ".join(part.split())))


def too_long(text: str) -> list[str]:
    """The sentences of more than ``MAX_WORDS`` words."""
    counted = ((s, re.findall(r"[^\s]*\w[^\s]*", s)) for s in sentences_of(text))
    return [sentence for sentence, words in counted if len(words) > MAX_WORDS]


@pytest.mark.parametrize("page", PLAIN, ids=name_of)
def test_first_pages_have_short_sentences(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


LONG = " ".join(["word"] * MAX_WORDS + ["more."])
SHORT = " ".join(["word"] * (MAX_WORDS - 1) + ["end."])


@pytest.mark.parametrize(
    "written",
    [
        LONG,
        LONG.replace("word word", "word\nword"),
        f"{SHORT} {LONG} {SHORT}",
        f"- {SHORT}\n- {LONG}",
        f"| {SHORT} | {LONG} |",
        f"# {LONG}",
        LONG.replace("word word", "[word word](a.md)"),
        f"```sh\nbisect-trt --help\n```\n{LONG}",
    ],
    ids=["plain", "lines", "amid", "list", "table", "heading", "link", "fence"],
)
def test_a_long_sentence_is_found(written: str) -> None:
    assert len(too_long(written)) == 1


@pytest.mark.parametrize(
    "written",
    [
        f"{SHORT} {SHORT}\n{SHORT}",
        f"# Title\n{SHORT}\n\nshort\n\n{SHORT}",
        f"- {SHORT}\n- {SHORT}",
        f"| {SHORT} | {SHORT} |\n| --- | --- |\n| short | {SHORT} |",
        f"```text\n{LONG}\n```",
        f"{SHORT.replace('word', '`a command of several words`')}",
    ],
    ids=["lines", "paragraphs", "list", "table", "fence", "code"],
)
def test_short_sentences_pass(written: str) -> None:
    assert too_long(written) == []


@pytest.mark.parametrize("page", sorted({*PAGES} - GENERATED), ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    most = MAX_README_LINES if page == ROOT / "README.md" else MAX_LINES
    assert len(page.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("page", sorted(GENERATED), ids=name_of)
def test_a_page_that_may_be_long_says_what_writes_it(page: Path) -> None:
    assert "python -m bisect_trt.report.columns" in page.read_text(encoding="utf-8")
