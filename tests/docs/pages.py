"""The pages of the documentation as the tests read them: what is to be run, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))

CASES_RUN = {
    "reports/nafnet-fp16": "1 NAFNet, FP16",
    "reports/encoder_decomposed-fp16": "2 encoder, LayerNorm written out, FP16",
    "reports/unimatch-fp16": "3 UniMatch, FP16",
    "reports/rtdetr-tf32": "4 RT-DETR, TF32",
    "reports/clip_inputs-tf32": "5 convolution and Clip (inputs), TF32",
    "reports/clip_inputs-fp16": "5 convolution and Clip, FP16",
}
"""The folders that the pages of the cases make, and the augmented inputs of fixtures.cases in
them."""

_FENCE = re.compile(r'^```(\w+)(?: title="(.+)")?$')
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SHELL = ("sh", "bash", "console")


@dataclass(frozen=True)
class Block:
    """A fenced part of a page. ``title`` is the file that it shows, '' for none."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def needs(self) -> str:
        """What the reader is told that the commands need and this machine may lack."""
        first = self.text.splitlines()[0]
        return first.removeprefix("# needs ") if first.startswith("# needs ") else ""

    @property
    def commands(self) -> list[str]:
        """The commands, a line each: continued lines joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.removeprefix("$ ") for line in lines if line.strip() and line[0] != "#"]


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced parts of ``page``, in order."""
    head, kept = None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if head is None:
            found = _FENCE.match(line)
            assert found or not line.startswith("```"), f"{name_of(page)}:{number}: {line}"
            head, kept = (number, found) if found else None, []
        elif line == "```":
            number, found = head
            yield Block(page, number, found[1], found[2] or "", "\n".join(kept) + "\n")
            head = None
        else:
            kept.append(line)
    assert head is None, f"{name_of(page)}: a fence is not closed"


def inline_code(page: Path) -> list[str]:
    """What stands in single backquotes, outside the fenced parts."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(code.split()) for code in _CODE.findall(text)]
