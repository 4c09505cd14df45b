"""How names are shown in terminals, CSV cells, XML and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKDOWN = re.compile(
    r"([\\`*\[\]|]|<(?=[A-Za-z/!?])|~(?=~)|&(?=[#\w])|^[#+-](?=\s)|^>|(?<![^\W_])_|_(?![^\W_]))"
)
"""What Markdown interprets; an underscore inside a word is literal."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20", "'")
"""What starts a spreadsheet's formula, also full-width; and the quote, so that :func:`uncell` can
undo it."""


def some_of(names: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint on the entry of ``known`` that is most like ``word``; empty if none is."""
    by_case = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), by_case, 1)
    return f"; did you mean {by_case[close[0]]}?" if close else ""


def counted(number: int, thing: str) -> str:
    """``1 layer``, ``3 layers``."""
    return f"{number:,} {thing if number == 1 else plural(thing)}"


def plural(thing: str) -> str:
    """``layers``, ``passes``, ``Softmaxes``."""
    return f"{thing}{'es' if thing.endswith(('s', 'x')) else 's'}"


def printable(text: str) -> str:
    """``text`` with control and direction characters and lone surrogates as escapes."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)


def xml_text(text: str) -> str:
    """``text`` with the characters that XML 1.0 cannot hold spelled out as escapes."""
    return _NOT_XML.sub(lambda found: ascii(found.group())[1:-1], text)


def cell(text: str) -> str:
    """``text`` for a spreadsheet's cell: a formula gets a quote in front (OWASP, CSV injection)."""
    harmless = printable(text)
    return f"'{harmless}" if harmless.startswith(_FORMULA) else harmless


def uncell(text: str) -> str:
    """The text of a :func:`cell`, with its control characters still as escapes."""
    return text[1:] if text.startswith("'") else text


def markdown(text: str) -> str:
    """``text`` as Markdown shows it literally, also in a table's cell."""
    escaped = _MARKDOWN.sub(r"\\\1", printable(text))
    # A bare address would become a link.
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;")
