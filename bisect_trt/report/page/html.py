"""Templates and assets of what a browser shows: names from models and paths are text in it."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bisect_trt.core.names import printable
from bisect_trt.numerics.scores import brief, times
from bisect_trt.report.page.tiles import held_kinds, tiles
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.headline import headline, not_covered
from bisect_trt.report.words.held_on import caption_of, holds_sentences, meaning_of
from bisect_trt.report.words.next_step import next_step
from bisect_trt.report.words.sentences import judged_by, number, scores_told
from bisect_trt.report.words.tone import tone


def answer(result: Record) -> dict[str, Any]:
    """What ``answer.html.j2``, the first screen, is given."""
    return {
        "result": result,
        "tone": tone(result),
        "headline": headline(result),
        # The first sentence is the table's caption and rows.
        "holds": [*holds_sentences(result.holds)[1:], *not_covered(result)],
        "caption": caption_of(result.holds),
        "meaning": meaning_of(result.holds),
        "next_step": next_step(result),
        "held": held_kinds(result.holds),
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
