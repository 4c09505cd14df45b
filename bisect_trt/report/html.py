"""report.html: its first screen and its pages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bisect_trt.base.display import counted, markdown, printable
from bisect_trt.base.outcomes import InputKind, Validation
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief, times
from bisect_trt.report.headline import answer_lines, files_line, headline, next_step, not_covered
from bisect_trt.report.markdown import answer_lines as markdown_lines
from bisect_trt.report.markdown import table_lines
from bisect_trt.report.record import Record
from bisect_trt.report.text import (
    caption_of,
    judged_by,
    meaning_of,
    number,
    scores_told,
    tone,
    validation_sentences,
)


@dataclass(frozen=True)
class Tile:
    """A figure (``value``), what it is (``name``), and what to know about it (``note``)."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Held:
    """One kind of input: the ``passed`` of ``tested``, their ``share``, what is known of all such
    inputs (``bound``, blank where the tested ones are all), the ``worst`` score and whose it is.
    """

    name: str
    passed: int
    tested: int
    share: float
    bound: str
    worst: str
    worst_name: str


def tiles(result: Record) -> list[Tile]:
    """Cause, the plan's size, before and after, and what it costs."""
    found = [Tile("cause", result.cause.value, "")]
    if result.passed:
        note = f"of {counted(result.layer_count, 'layer')} stay in FP32"
        found.append(Tile("pins", str(len(result.pinned)), note))
    reduced = result.precision.value.upper()
    before, of = _score(result.base_score)
    # A larger score on an input that may miss is not the plan's.
    count = ", on the inputs that count" if result.given_share < 1.0 else ""
    found.append(Tile("before", before, f"{of}everything in {reduced}{count}"))
    if not math.isnan(result.score):
        after, of = _score(result.score)
        found.append(Tile("after", after, f"{of}with the plan{count}"))
    cost = _cost(result)
    return [*found, cost] if cost is not None else found


def _score(score: float) -> tuple[str, str]:
    """A score, and what it is a multiple of."""
    return brief(score), "tolerance, " if score < NOTHING_ALLOWED else ""


def _cost(result: Record) -> Tile | None:
    """The latency, where engines were built."""
    if "latency_ms" in result.cost:
        rows = result.cost.itertuples()
        latency = {str(row.engine).rpartition(" ")[2]: float(str(row.latency_ms)) for row in rows}
        others = [n for n in ("fp32", result.precision.value) if n in latency]
        if "plan" in latency:
            beside = ", ".join(f"{n.upper()} {number(latency[n])} ms" for n in others)
            return Tile("latency", f"{number(latency['plan'])} ms", beside)
    return None


def held_kinds(validation: Validation | None) -> list[Held]:
    """What the plan was tested on, a kind a row; nothing where no plan passes."""
    if validation is None:
        return []
    found = []
    for kind in InputKind:
        its = validation.of(kind)
        if its.tested:
            copied = kind is not InputKind.GIVEN
            bound = f"at least {100.0 * its.lower_bound:.1f} % of all" if copied else ""
            worst = brief(its.worst_score)
            # The file's own name: the path is in inputs.csv.
            of = re.split(r"[\\/]", its.worst)[-1]
            found.append(Held(kind.words, its.passed, its.tested, its.share, bound, worst, of))
    return found


def answer(result: Record) -> dict[str, Any]:
    """What ``answer.html.j2``, the first screen, is given."""
    return {
        "result": result,
        "tone": tone(result),
        "headline": headline(result),
        # The first sentence is the table's caption and rows.
        "validation": [*validation_sentences(result.validation)[1:], *not_covered(result)],
        "caption": caption_of(result.validation),
        "meaning": meaning_of(result.validation),
        "next_step": next_step(result),
        "held": held_kinds(result.validation),
        "tiles": tiles(result),
        "judged_by": judged_by(result),
    }


@cache
def environment() -> Environment:
    """The package's templates; they escape what they are given."""
    # The template's name ends in .j2: what is chosen by endings would escape nothing.
    made = _templates(autoescape=True, finalize=_harmless)
    made.filters |= {"number": number, "times": times, "brief": brief}
    made.filters |= {"told": scores_told, "cell": _cell, "code": _code}
    return made


@cache
def text_environment() -> Environment:
    """The same for files that no browser reads; whoever fills them escapes."""
    return _templates(autoescape=False, keep_trailing_newline=True)


def _templates(**more: Any) -> Environment:
    return Environment(
        loader=PackageLoader("bisect_trt.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **more,
    )


@cache
def asset(name: str) -> Markup:
    """A file of ours or of the libraries, as it stands in the page."""
    text = (files("bisect_trt.report") / "assets" / name).read_text(encoding="utf-8")
    return Markup(text)


def _harmless(value: Any) -> Any:
    """Text without characters that a browser would obey; markup of our own as it is."""
    return printable(value) if type(value) is str else value


def _code(text: str) -> Markup:
    """Lines of code: what is no line break is spelled out as elsewhere."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def _cell(value: Any) -> str:
    """A table's cell: marks for flags, blank where nothing is known."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    return number(value.item() if hasattr(value, "item") else value)


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


def as_fragment(result: Record) -> str:
    """The first screen as an element of somebody else's page, in its colours."""
    style = asset("notebook.css") + asset("answer.css")
    template = environment().get_template("notebook.html.j2")
    return template.render(style=style, files=files_line(result), **answer(result))


def as_markdown(result: Record) -> str:
    """The first lines of report.md, and what the plan holds on."""
    return "\n".join(markdown_lines(result)) + "\n"


def as_text(result: Record) -> str:
    """The first lines of the screen."""
    about = f"{result.model} at {result.precision.value.upper()}"
    lines = [about, *answer_lines(result), judged_by(result), files_line(result)]
    return "\n".join(printable(line) for line in lines)
