"""How a result shows itself where it is a cell's last line: the page's first screen, or its lines.

No script runs, and nothing is said that the page does not say: notebooks are opened by whoever did
not run them.
"""

from __future__ import annotations

from bisect_trt.core.names import printable
from bisect_trt.report.page.html import answer, asset, environment
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.headline import answer_lines, files_line
from bisect_trt.report.words.markdown import answer_lines as markdown_lines
from bisect_trt.report.words.sentences import judged_by


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
