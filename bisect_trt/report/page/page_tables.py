"""The page's tables: which columns of the result's tables are shown, and how many rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import pandas as pd

from bisect_trt.core.names import printable
from bisect_trt.report.figures.figure import short
from bisect_trt.report.record.record import Record
from bisect_trt.report.record.tables import COST_COLUMNS, OUTPUT_COLUMNS, worst_inputs, worst_layers
from bisect_trt.report.words.sentences import scores_told

_MOST_ROWS = 300
_FRONTIER = ["pins", "set", "given_share", "redrawn_share", "redrawn_lower_bound"]
_FRONTIER += ["variants_share", "holdout_share", "p50_score", "p95_score", "worst_score"]
_FRONTIER += ["latency_ms", "estimated_latency_ms", "relative_bytes"]
_SEARCH = ["probe", "runner", "on", "base", "pins", "verdict", "score", "seconds", "note"]
_PROOF = ["proved", "proved_on", "proof_probe", "verdict_without", "score_without", "missed_on"]
_LAYERS = ["rank", "alone_score", "introduced_rel_range", "rel_range", "max_abs", "snr_db"]
_LAYERS += ["finite", "engine_rel_range", "engine_finite", "ref_min", "ref_max", "channels"]


@dataclass(frozen=True)
class Table:
    """``rows`` under ``columns``; ``left_out`` counts those that only the CSV file has."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left_out: int = 0


def frontier_rows(table: pd.DataFrame) -> Table:
    """A row a number of pins."""
    return _table(table.dropna(axis=1, how="all"), _FRONTIER)


def output_rows(table: pd.DataFrame) -> Table:
    """A row a baseline and output."""
    return _table(table, OUTPUT_COLUMNS)


def cost_rows(table: pd.DataFrame) -> Table:
    """A row an engine."""
    return _table(table, COST_COLUMNS)


def search_rows(table: pd.DataFrame) -> Table:
    """A row a probe."""
    return _table(table, _SEARCH)


def input_rows(table: pd.DataFrame) -> Table:
    """The inputs that are worst off."""
    worst = worst_inputs(table)
    shown = _table(worst, [str(c) for c in worst if c not in ("shapes", "sha256")])
    return Table(shown.columns, shown.rows, len(table) - len(worst))


def worst_layer_rows(table: pd.DataFrame) -> Table:
    """The layers that matter most, for readers without scripts."""
    worst = worst_layers(table)
    shown = _table(worst, [str(c) for c in worst])
    return Table(shown.columns, shown.rows, len(table) - len(worst))


def pin_rows(result: Record) -> Table:
    """The certificate: each pin with the probe that failed without it; where none is proved, with
    what each layer does alone, the worst first.
    """
    pins = result.pins
    if pins.empty:
        return Table((), ())
    known = [c for c in ("alone_score", "module", "file", "line") if c in result.layers]
    told = pins.merge(result.layers[["layer", *known]], on="layer", how="left")
    told["where"] = _places(told)
    proof = [c for c in _PROOF if c != "proved" or not pins["proved"].all()]
    if not pins["proved"].any():
        proof = []
        if "alone_score" in told:
            told = told.sort_values("alone_score", ascending=False, kind="stable")
    shown = _table(_without_blank(told, ("module", "where")), [*_NAMED, "alone_score", *proof])
    return replace(shown, columns=[_TITLES.get(c, c) for c in shown.columns])


_NAMED = ["layer", "op", "module", "where"]
_TITLES = {
    "alone_score": "score alone",
    "introduced_rel_range": "own error / range",
    "rel_range": "error / range",
    "max_abs": "largest error",
    "snr_db": "SNR, dB",
    "engine_rel_range": "engine error / range",
    "engine_finite": "engine finite",
    "ref_min": "smallest value",
    "ref_max": "largest value",
}
"""Of columns in the page; its tooltips say what they are called in layers.csv."""
_FLAGS = frozenset({"pinned", "source", "finite", "engine_finite"})


def layer_data(table: pd.DataFrame) -> dict[str, Any]:
    """Every layer, as the page's script reads it: columns with their kinds, rows of plain values.
    Infinities are the texts "inf" and "-inf".
    """
    told = table.copy()
    told["where"] = _places(told)
    told = _without_blank(told, ("module", "where"))
    columns = [c for c in (*_NAMED, "pinned", "source", *_LAYERS) if c in told]
    kinds = ["text" if c in _NAMED else "flag" if c in _FLAGS else "number" for c in columns]
    made = [_values(told[c], kind) for c, kind in zip(columns, kinds, strict=True)]
    return {
        "columns": [
            {"name": c, "title": _TITLES.get(c, c), "kind": k}
            for c, k in zip(columns, kinds, strict=True)
        ],
        "rows": [list(row) for row in zip(*made, strict=True)],
    }


def _values(column: pd.Series[Any], kind: str) -> list[Any]:
    if kind == "text":
        return [printable(str(v)) for v in column]
    if kind == "flag":
        return [None if pd.isna(v) else int(bool(v)) for v in column]
    return [_number(float("nan") if v is pd.NA else float(v)) for v in column]


def _number(value: float) -> float | int | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0.0 else "-inf"
    return int(value) if value.is_integer() and abs(value) < 1e6 else short(value)


def _places(table: pd.DataFrame) -> list[str]:
    """``net.py:21``: the file's own name is enough to find it by, the path is in layers.csv."""
    if "file" not in table:
        return [""] * len(table)
    rows = zip(table["file"].fillna(""), table["line"], strict=True)
    return [f"{_base(str(f))}:{int(line)}" if f and not pd.isna(line) else "" for f, line in rows]


def _base(path: str) -> str:
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name


def _without_blank(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """``table`` without those of ``names`` that no row has a word in."""
    blank = [n for n in names if n in table and not (table[n].fillna("") != "").any()]
    return table.drop(columns=blank)


def _table(table: pd.DataFrame, columns: Sequence[str]) -> Table:
    present = [c for c in columns if c in table]
    rows = scores_told(table[present].head(_MOST_ROWS)).to_numpy(dtype=object).tolist()
    return Table(present, rows, max(0, len(table) - _MOST_ROWS))
