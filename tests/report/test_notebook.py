"""A result as a notebook shows it: what the page says, with names that are text there too."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from bisect_trt import Result
from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.names import printable
from bisect_trt.report.columns import FRAMES
from bisect_trt.report.page import as_html
from bisect_trt.report.sentences import headline
from tests.report.synthetic import synthetic_result
from tests.report.test_page import HOSTILE

ENDS = {
    "pins": synthetic_result(80),
    "nothing ran": replace(
        synthetic_result(80),
        cause=Cause.GOLDEN_MISMATCH,
        passed=False,
        score=np.nan,
        base_score=np.nan,
        holds=None,
        **{name: pd.DataFrame() for name in ("cost", "inputs", "frontier", "outputs", "search")},
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
    said = headline(result)
    markdown = MarkdownIt().enable("table").parse(result._repr_markdown_())
    shown = "".join(c.content for t in markdown for c in t.children or ())
    for words in (Elements(result._repr_html_()).words, shown, repr(result)):
        assert said in words and result.sentence in words and result.model in words
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
    assert frames == set(FRAMES)
    said = inspect.getdoc(Result) or ""
    assert all(f"- ``{name}``: a row" in said for name in frames)
