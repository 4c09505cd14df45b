"""A result as a notebook shows it: what the page says, with names that are text there too."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import replace
from html.parser import HTMLParser

import nbformat
import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from bisect_trt import Result
from bisect_trt.base.display import printable
from bisect_trt.base.outcomes import Cause
from bisect_trt.report.columns import TABLES
from bisect_trt.report.first_lines import verdict_line
from bisect_trt.report.headline import headline
from bisect_trt.report.html import as_html
from tests.executed_notebook import NOTEBOOK, executed
from tests.report.synthetic import HOSTILE, synthetic_result

ENDS = {
    "pins": synthetic_result(80),
    "nothing ran": replace(
        synthetic_result(80),
        cause=Cause.GOLDEN_MISMATCH,
        passed=False,
        score=np.nan,
        base_score=np.nan,
        validation=None,
        **{name: pd.DataFrame() for name in ("cost", "inputs", "tradeoff", "outputs", "search")},
    ),
}


class Elements(HTMLParser):
    """The elements of a text, and what is written in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("end", ENDS)
def test_a_notebook_shows_the_page_s_first_screen(end: str) -> None:
    page = as_html(ENDS[end])
    screen = page[page.index('<section id="answer"') :]
    inside = screen[screen.index("\n") : screen.index("</section>")].strip()
    assert len(inside) > 200 and inside in ENDS[end]._repr_html_()


@pytest.mark.parametrize("end", ENDS)
def test_every_form_gives_the_answer(end: str) -> None:
    result = ENDS[end]
    page, said = headline(result), verdict_line(result)
    markdown = MarkdownIt().enable("table").parse(result._repr_markdown_())
    shown = "".join(c.content for t in markdown for c in t.children or ())
    html = Elements(result._repr_html_()).words
    for words, answer in ((html, page), (shown, said), (repr(result), said)):
        assert answer in words and result.sentence in words and result.model in words
    assert len(repr(result).splitlines()) < 12


def test_names_are_text_and_nothing_runs() -> None:
    found = Elements(synthetic_result(40, HOSTILE)._repr_html_())
    plain = Elements(synthetic_result(40)._repr_html_())
    assert found.names == plain.names and found.attributes == plain.attributes
    assert not {"script", "img", "a", "iframe"} & set(found.names)
    assert not any(name.startswith("on") for name in found.attributes)
    assert printable(HOSTILE[0]) in found.words
    shown = repr(synthetic_result(40, ("\x1b[31mred\u202e",)))
    assert "\\x1b[31mred\\u202e" in shown and "\x1b" not in shown


def test_every_table_is_named_in_the_docstring_and_documented() -> None:
    frames = {f.name for f in dataclasses.fields(Result) if f.type == "pd.DataFrame"}
    assert frames - {"cost", "by_requirement"} == set(TABLES) - {"engines"}
    said = inspect.getdoc(Result) or ""
    assert all(f"``{name}``" in said for name in frames)


NUMBERS = re.compile(r"\d+(\.\d+)?(e[-+]\d+)?")


def outputs(cell: nbformat.NotebookNode) -> list[tuple[list[str], str]]:
    """What a cell shows, each the forms it has and its text."""
    return [(sorted(o.data), o.data["text/plain"]) for o in cell.outputs]


def test_the_notebook_in_docs_runs_and_shows_what_is_saved() -> None:
    saved = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    made = [c for c in executed().cells if c.cell_type == "code"]
    for old, new in zip(saved, made, strict=True):
        forms, texts = zip(*outputs(new), strict=True) if new.outputs else ((), ())
        old_forms, old_texts = zip(*outputs(old), strict=True) if old.outputs else ((), ())
        assert forms == old_forms, f"make notebook: {new.source}"
        # What is tagged depends on the machine: roundings, how many copies it made, its TensorRT.
        if "varies" not in new.metadata.get("tags", ()):
            assert texts == old_texts, f"make notebook: {new.source}"
    shown, was = (
        next(o.data["text/html"] for c in cells for o in c.outputs if "text/markdown" in o.data)
        for cells in (made, saved)
    )
    assert NUMBERS.sub("0", shown) == NUMBERS.sub("0", was), "make notebook"
    (told,) = (t for c in made for f, t in outputs(c) if "text/markdown" in f)
    assert "VALIDATED after repair" in told
    checks, passed = made[-5], made[-4]
    assert "requirements on emulated" in checks.outputs[0].data["text/plain"]
    assert passed.outputs[0].data["text/plain"] == "(True, 'validated')"
