"""A small page of sections, as HTML and as Markdown: what compares runs, and what lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from bisect_trt.core.names import markdown
from bisect_trt.report.page.html import environment
from bisect_trt.report.words.markdown import table_lines

_MOST_ROWS = 500


@dataclass(frozen=True)
class Section:
    """``lines`` are sentences; ``links`` maps cells of the table's first column to where they
    lead.
    """

    heading: str
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    lines: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """``answer`` is one sentence, ``good`` its colour."""

    title: str
    answer: str
    good: bool
    sections: Sequence[Section]
    lines: Sequence[str] = ()


def page_as_html(page: Page) -> str:
    """A page without scripts that works offline."""
    return environment().get_template("page.html.j2").render(page=page, most=_MOST_ROWS)


def page_as_markdown(page: Page) -> str:
    """The same for a pull request; without the links."""
    said = [f"# {markdown(page.title)}", "", f"**{markdown(page.answer)}**", ""]
    said += [line for text in page.lines for line in (markdown(text), "")]
    for section in page.sections:
        said += [f"## {section.heading}", ""]
        said += [f"- {markdown(line)}" for line in section.lines]
        said += [""] if section.lines else []
        if len(section.table):
            said += [*table_lines(section.table, more="the HTML page"), ""]
    return "\n".join(said)
