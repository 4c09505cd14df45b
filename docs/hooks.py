"""What the site shows that is written elsewhere: the figures, the changelog, the reference.

MkDocs calls the functions named on_*. The pages stay Markdown that reads well in a checkout too:
links out of docs/ are turned here into the site's own pages, or into the path where it has none.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import bisect_trt
import bisect_trt.graph
import bisect_trt.search
from bisect_trt.cli import main
from bisect_trt.settings import Settings, options

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "bisect_trt" / "report" / "schema" / "run.schema.json"
RESULTS = ROOT / "benchmarks" / "results"
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"benchmarks/results/{p.name}": f"figures/{p.name}" for p in sorted(RESULTS.glob("*.md"))},
}
"""Pages of the site by where they lie in the repository, outside docs/."""

_SOUGHT_LAST = "---\nsearch:\n  boost: 0.2\n---\n\n"
"""Figures and changes name everything; who searches wants the page that explains it."""

_PLACE = re.compile(r"<!-- generated: ([\w-]+) -->(?:\n[^\n]+)*")
"""With the paragraph behind it, which says in a checkout what is missing there."""

# Sphinx's roles in docstrings, as Markdown leaves them in the page.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):(<code>)~?(?:[\w.]+\.)?(\w+)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_MISSING = logging.getLogger("mkdocs.hooks.links")


def on_config(config: Any) -> Any:
    """The measured figures are a section of the menu."""
    pages = [{_title(ROOT / at): page} for at, page in ELSEWHERE.items() if "figures/" in page]
    config.nav.append({"Figures": pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages that lie elsewhere in the repository."""
    from mkdocs.structure.files import File  # the tests use this file without MkDocs

    for at, page in ELSEWHERE.items():
        text = (ROOT / at).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_SOUGHT_LAST + text))
    files.append(File.generated(config, "notebook.md", content=_notebook()))
    return files


def _notebook() -> str:
    """The executed notebook with its outputs, as a page."""
    from nbconvert import MarkdownExporter

    text, _ = MarkdownExporter().from_filename(str(ROOT / "docs" / "notebook.ipynb"))
    return str(text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Generated parts in, the repository's links turned into the site's, tables in HTML."""
    markdown = markdown.replace("<details>", '<details markdown="1">')
    markdown = _PLACE.sub(lambda m: GENERATED[m[1]](), markdown)
    return _LINK.sub(lambda m: _link(m, page.file.src_uri), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings' roles as plain code."""
    return _ROLE.sub(r"\1\2", html)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _link(match: re.Match[str], page: str) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if ":" in target:
        return match[0]
    lies = next((at for at, is_page in ELSEWHERE.items() if is_page == page), f"docs/{page}")
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(lies), target))
    if not (ROOT / meant).exists():
        _MISSING.warning("%s links to %s, which is not there", lies, meant)
    if meant == "docs/notebook.ipynb":
        shown = "notebook.md"
    elif meant in ELSEWHERE:
        shown = ELSEWHERE[meant]
    elif meant.startswith("docs/"):
        shown = meant.removeprefix("docs/")
    else:
        return f"{text} (`{meant}`)" if meant not in text else f"`{meant}`"
    return f"[{text}]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{anchor})"


def command_reference() -> str:
    """Every command with its arguments and options, as ``--help`` has them."""
    return "\n\n".join(_command(name, its) for name, its in main.commands.items())


def _command(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"bisect-trt {name}", max_content_width=110)
    arguments = " ".join(command.collect_usage_pieces(context)[1:])
    head = f"## {name}\n\n{command.help}\n\n    bisect-trt {name} {arguments} [OPTIONS]\n"
    rows = ["| option | value | meaning |", "| --- | --- | --- |"]
    for record in filter(None, (p.get_help_record(context) for p in command.get_params(context))):
        flags, said = record
        if not flags.startswith("-"):  # an argument: the line above has it
            continue
        names = ", ".join(f"`{word.strip(',')}`" for word in flags.split() if word[0] == "-")
        value = flags.split()[-1] if flags.split()[-1][0] != "-" else ""
        choices = ", ".join(f"`{word}`" for word in value.strip("[]").split("|") if word)
        rows.append(f"| {names} | {choices} | {said.replace('|', '&#124;')} |")
    return "\n".join([head, *rows])


def _public_names() -> str:
    """What the doors offer, a directive each: what is added to them is on the page."""
    doors = {
        "bisect_trt": bisect_trt,
        "bisect_trt.search": bisect_trt.search,
        "bisect_trt.graph": bisect_trt.graph,
    }
    parts, shown = [], set()
    for door, module in doors.items():
        names = [n for n in module.__all__ if n != "__version__" and n not in shown]
        shown |= set(names)
        things = sorted((getattr(module, n) for n in names), key=lambda t: isinstance(t, type))
        parts += [f"## {door}", *(_directive(thing) for thing in things)]
    return "\n\n".join(parts)


def _directive(thing: Any) -> str:
    kin = thing.__mro__ if isinstance(thing, type) else (thing,)
    described = [one for one in kin if one.__doc__ == thing.__doc__][-1]  # a record, by its base
    options = f"heading_level: 3, heading: {thing.__name__}"
    said = f"::: {described.__module__}.{described.__qualname__}\n    options: {{{options}}}"
    if thing.__module__ == "bisect_trt.api":
        said += "\n\n" + _chosen(thing.__name__)
    return said


def _chosen(call: str) -> str:
    """What the arguments of a call mean: help() shows it, the source does not."""
    command = "run" if call == "bisect" else call
    rows = ["| argument | default | as an option | meaning |", "| --- | --- | --- | --- |"]
    for name, its in options().items():
        if command in its.commands:
            default = Settings.__dataclass_fields__[name].default
            shown = str(default) if isinstance(default, str) else default
            said = its.help_of.get(command, its.help).replace("|", "&#124;")
            rows.append(f"| `{name}` | `{shown!r}` | `{its.flag}` | {said} |")
    return "\n".join(rows)


def _schema_table() -> str:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    head = ["| key | type | meaning |", "| --- | --- | --- |"]
    rows = [f"| `{k}` | {t} | {m} |" for k, t, m in _rows(schema, schema, "")]
    return "\n".join([*head, *rows])


def _rows(schema: Mapping[str, Any], root: Mapping[str, Any], within: str) -> Iterator[list[str]]:
    """Every key with its type and meaning; those of records in it below it."""
    required = schema.get("required", [])
    for name, its in schema.get("properties", {}).items():
        said = its.get("description", "")
        if "$ref" in its:
            its = {**root["$defs"][its["$ref"].rpartition("/")[2]], **its}
            said = said or its.get("description", "")
        key = f"{within}{name}"
        optional = "" if name in required else "; not always there"
        yield [key, _type(its, root), said + optional if said else optional.removeprefix("; ")]
        yield from _rows(its, root, f"{key}.")
        if isinstance(its.get("items"), Mapping):
            yield from _rows(its["items"], root, f"{key}[].")


def _type(its: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "const" in its:
        return f"`{json.dumps(its['const'])}`"
    if "enum" in its:
        return ", ".join(f"`{json.dumps(value)}`" for value in its["enum"])
    if "$ref" in its:
        return its["$ref"].rpartition("/")[2]
    for several in ("oneOf", "anyOf"):
        if several in its:
            return " or ".join(_type(one, root) for one in its[several])
    kind = its.get("type", "any")
    if kind == "array" and "items" in its:
        return f"list of {_type(its['items'], root)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _ci_file(name: str) -> Callable[[], str]:
    return lambda: f"```yaml\n{(ROOT / 'docs' / 'ci' / name).read_text(encoding='utf-8')}```"


GENERATED = {
    "python": _public_names,
    "schema": _schema_table,
    "commands": command_reference,
    "github-actions": _ci_file("github-actions.yml"),
    "gitlab-ci": _ci_file("gitlab-ci.yml"),
}
"""What stands where a page says ``<!-- generated: ... -->``."""
