"""Retired words stay retired: in names, run.json, CSV columns, kinds of findings and --help."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bisect_trt.cli import main
from bisect_trt.report.columns import TABLES
from bisect_trt.settings import FORMER

PACKAGE = Path(__file__).resolve().parents[1] / "bisect_trt"

RETIRED = frozenset(
    re.findall(
        r"\w+",
        """
        lowered lowers redraw redrawn redraws draws variant variants prober probers probed probing
        journal journals unsteady steadiness lucky undecided station stations ledger ledgers panel
        panels frontier frontiers unfit crew fleet bench piece pieces holds_on last_word
        fresh_test
        """,
    )
)
"""Words that have another name today; with underscores, several in a row."""


def parts(name: str) -> list[str]:
    """The words of ``max_abs``, ``MaxAbs`` or ``max-abs``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [part.lower() for part in re.split(r"[^A-Za-z]+", apart) if part]


def retired(name: str) -> list[str]:
    """The retired words in ``name``."""
    inside = f"_{'_'.join(parts(name))}_"
    return [word for word in sorted(RETIRED) if f"_{word}_" in inside]


def identifiers(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives: not what it calls of others' libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Attribute):
            yield node.attr


def keys(schema: Any) -> Iterator[str]:
    """The keys that a JSON schema names."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from keys(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keys(value)


def finding_kinds(tree: ast.AST) -> Iterator[str]:
    """The first argument of each ``Finding(...)`` that is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def test_no_identifier_has_a_retired_word() -> None:
    found = {f"{where}: {n}" for where, tree in trees() for n in identifiers(tree) if retired(n)}
    assert sorted(found) == []
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    assert [str(m) for m in modules for part in m.with_suffix("").parts if retired(part)] == []
    tests = Path(__file__).parent.rglob("test_*.py")
    assert [path.name for path in tests if retired(path.stem)] == []


def test_no_key_column_or_finding_has_a_retired_word() -> None:
    schema = json.loads((PACKAGE / "report/schema/run.schema.json").read_text(encoding="utf-8"))
    named = {key for key in keys(schema) if retired(key)}
    named |= {c.name for columns in TABLES.values() for c in columns if retired(c.name)}
    named |= {kind for _, tree in trees() for kind in finding_kinds(tree) if retired(kind)}
    assert named == set()


@pytest.mark.parametrize("command", sorted(main.commands))
def test_no_help_has_a_retired_word_or_a_former_option(command: str) -> None:
    its = main.commands[command]
    help_text = its.get_help(click.Context(its, info_name=command))
    words = {word for word in re.findall(r"[A-Za-z]+", help_text) if retired(word)}
    assert words == set()
    flags = set(re.findall(r"(?<![\w-])--[a-z0-9-]+", help_text))
    assert not flags & FORMER.keys()


def test_the_list_of_words_is_a_list_of_words() -> None:
    assert all(re.fullmatch("[a-z_]+", word) and not keyword.iskeyword(word) for word in RETIRED)
    assert retired("isUnsteady") == retired("UNSTEADY_AT") == ["unsteady"]
    assert retired("lower") == retired("lower_bound") == retired("mapping") == []
