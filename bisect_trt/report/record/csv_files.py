"""Tables as CSV files and back: RFC 4180, numbers exact, names harmless to spreadsheets.

Source: RFC 4180; OWASP, CSV injection.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from bisect_trt.core.names import cell, uncell
from bisect_trt.report.record.columns import COUNT, FLAG, NUMBER, TEXT, Column


def to_csv(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    """``table`` with all of ``columns`` in their order, blank where it has none of them; others of
    its own come last.
    """
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
        write([_written(v, kind) for v, (_, kind) in zip(row, shown, strict=True)])
    return text.getvalue()


def from_csv(text: str, columns: Sequence[Column]) -> pd.DataFrame:
    """What :func:`to_csv` wrote, its names with control characters still spelled out.

    Raises:
        ValueError: a cell is not of its column's kind, or a row has other cells than the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # names may be of any length
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:  # torn inside quotes
        raise ValueError(str(error)) from error
    if not rows:
        return pd.DataFrame()
    found: dict[str, Any] = {}
    for place, name in enumerate(uncell(n) for n in rows[0]):
        column = next((c for c in columns if c.covers(name)), Column(name, TEXT, ""))
        cells = [row[place] if len(row) == len(rows[0]) else _torn() for row in rows[1:]]
        if column.always or any(cells):
            found[name] = _read(cells, column.kind)
    return pd.DataFrame(found)


def _torn() -> str:
    raise ValueError("a row has other cells than the header")


def _written(value: Any, kind: str) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return cell(value)
    if kind == COUNT and math.isfinite(value):
        return str(int(value))
    if kind == NUMBER or isinstance(value, float):
        return repr(float(value))
    return str(value)


def _read(cells: Sequence[str], kind: str) -> list[Any]:
    if kind == TEXT:
        return [uncell(c) for c in cells]
    if kind == FLAG:
        return [{"True": True, "False": False, "": math.nan}[c] for c in cells]
    whole = kind == COUNT and all(cells)
    return [int(c) if whole else float(c or "nan") for c in cells]
