"""Loads the columns of every CSV file from schema/columns.csv; writes and reads the files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd

from bisect_trt.base.display import cell, uncell

TEXT, NUMBER, COUNT, FLAG = "text", "number", "count", "flag"


@dataclass(frozen=True)
class Column:
    """A column of a CSV file."""

    name: str  # header; one that ends in ``*`` stands for a column per runner
    kind: str  # text, number (float), count (integer) or flag
    meaning: str  # what the value is, with its unit
    always: bool = False  # whether cells are never blank

    def covers(self, name: str) -> bool:
        """Whether ``name`` is this column, or one of the runners' columns."""
        return name == self.name or (self.name[-1] == "*" and name.startswith(self.name[:-1]))


def names_in(text: str) -> list[str]:
    """Splits the names of columns in ``text`` at blanks."""
    return text.split()


def _tables() -> dict[str, tuple[Column, ...]]:
    """Reads the columns of each table, in their order."""
    text = (files("bisect_trt.report") / "schema" / "columns.csv").read_text(encoding="utf-8")
    found: dict[str, tuple[Column, ...]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        column = Column(row["column"], row["kind"], row["meaning"], row["always"] == "always")
        found[row["file"]] = (*found.get(row["file"], ()), column)
    return found


TABLES = _tables()
"""The columns of each CSV file, without ".csv", from ``schema/columns.csv``."""

# The model as given, where the answer is for another graph, other weights or BF16.
ORIGINALS = ("original_layers", "original_tradeoff")
TABLES |= {name: TABLES[name.removeprefix("original_")] for name in ORIGINALS}

REQUIREMENTS = TABLES.pop("by_requirement")
PINS = TABLES["pins"]


def as_page() -> str:
    """The content of docs/columns.md."""
    lines = [
        "# Columns of the CSV files",
        "",
        "Printed by `python -m bisect_trt.report.columns`. The files are RFC 4180 (comma,",
        "CRLF, quotes where needed) in UTF-8, a header first. Numbers are written to read back",
        "exactly; `inf` and `-inf` are infinities, a blank cell is unknown, flags are `True` and",
        "`False`. Text that a spreadsheet would take for a formula begins with `'`, and so does",
        "text that begins with `'` itself; control characters are spelled out.",
        "A score of 1e9 is a miss where none is allowed, such as a changed decision; other finite",
        "scores are at most 9.99e8.",
        "Columns keep their order and names; new ones come at the end.",
        "original_layers.csv has the columns of layers.csv, original_tradeoff.csv those of",
        "tradeoff.csv.",
        "",
        "In a notebook the tables of `Result` are pandas DataFrames of the same columns, without",
        "columns without values: `result.layers` is layers.csv and so on,",
        "`result.cost` is engines.csv, and `result.by_requirement` is in run.json.",
    ]
    titles = {
        **{f"{name}.csv": columns for name, columns in TABLES.items() if name not in ORIGINALS},
        "by_requirement": REQUIREMENTS,
    }
    for title, columns in titles.items():
        lines += ["", f"## {title}", "", "| column | kind | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{c.name}` | {c.kind} | {c.meaning} |" for c in columns]
    return "\n".join(lines) + "\n"


def to_csv(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    """Writes ``table`` with all of ``columns`` in their order, then its other columns."""
    shown: list[tuple[str, str]] = []
    for column in columns:
        own = [str(c) for c in table.columns if column.covers(str(c))]
        shown += [(name, column.kind) for name in own or [column.name] if name[-1] != "*"]
    named = {name for name, _ in shown}
    shown += [(str(c), "") for c in table.columns if str(c) not in named]
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\r\n").writerow
    write([cell(name) for name, _ in shown])
    blank = [None] * len(table)
    values = [table[n].to_list() if n in table else blank for n, _ in shown]
    for row in zip(*values, strict=True):
        write([_cell_of(v, kind) for v, (_, kind) in zip(row, shown, strict=True)])
    return text.getvalue()


def from_csv(text: str, columns: Sequence[Column]) -> pd.DataFrame:
    """Reads what :func:`to_csv` wrote; raises ValueError where it is damaged."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # names may exceed 128 kB
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:  # torn inside quotes
        raise ValueError(str(error)) from error
    if not rows:
        return pd.DataFrame()
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("a row has other cells than the header")
    found: dict[str, Any] = {}
    for place, name in enumerate(uncell(n) for n in rows[0]):
        column = next((c for c in columns if c.covers(name)), Column(name, TEXT, ""))
        cells = [row[place] for row in rows[1:]]
        if column.always or any(cells):
            found[name] = _values_of(cells, column.kind)
    return pd.DataFrame(found)


def _cell_of(value: Any, kind: str) -> str:
    """A value as a cell; ``repr`` of a float reads back exactly."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return cell(value)
    if kind == COUNT and math.isfinite(value):
        return str(int(value))
    if kind == NUMBER or isinstance(value, float):
        return repr(float(value))
    return str(value)


def _values_of(cells: Sequence[str], kind: str) -> list[Any]:
    if kind == TEXT:
        return [uncell(c) for c in cells]
    if kind == FLAG:
        return [{"True": True, "False": False, "": math.nan}[c] for c in cells]
    # NumPy's integers have no NaN, so a count with blank cells is read as floats.
    whole = kind == COUNT and all(cells)
    return [int(c) if whole else float(c or "nan") for c in cells]


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_page())
