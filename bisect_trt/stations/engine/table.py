"""The table of the layers on an engine, and what it says of the engine.

Marks break fusions and so change the numbers: the table explains, the unmarked engine decides, and
how far marking moved the final outputs is reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bisect_trt.core.finding import Finding
from bisect_trt.numerics.scores import times

OUT_OF_LINE = 1e-2
"""An error of a hundredth of a layer's range is none that FP32 or TF32 arithmetic makes."""


@dataclass(frozen=True)
class EngineTable:
    """``rows`` by layer: ``engine_max_abs``, ``engine_rmse``, ``engine_rel_range``,
    ``engine_finite``, ``engine_nonfinite``, ``engine_mean_over_samples_rmse``.

    ``how`` says where they come from. ``marked_score`` is the final score of the (first) marked
    engine, to be held against ``unmarked_score``, on the same samples; NaN where nothing was
    marked. ``note`` says why rows are missing, if they are.
    """

    rows: Mapping[str, Mapping[str, Any]]
    how: str
    marked_score: float
    batches: int
    note: str = ""
    unmarked_score: float = math.nan

    def joined(self, table: pd.DataFrame) -> pd.DataFrame:
        """``table`` with the engine's columns."""
        own = pd.DataFrame([{"layer": name, **row} for name, row in self.rows.items()])
        return table.merge(own, on="layer", how="left") if len(own) else table


def first_out_of_line(table: EngineTable) -> str | None:
    """The first layer in network order whose error is none that rounding explains; None if there is
    none.
    """
    return next(
        (name for name, row in table.rows.items() if not row["engine_rel_range"] <= OUT_OF_LINE),
        None,
    )


def probe_effect_matters(unmarked: float, marked: float) -> bool:
    """True if marking turned the verdict, or moved the score by more than half; NaN where nothing
    was marked never does.
    """
    if math.isnan(marked) or math.isnan(unmarked):
        return False
    if (unmarked <= 1.0) is not (marked <= 1.0) or math.isinf(unmarked) is not math.isinf(marked):
        return True
    return (
        math.isfinite(marked)
        and max(marked, unmarked) > 1.5 * max(min(marked, unmarked), 1e-9)
        and max(marked, unmarked) > 0.1
    )


def findings_of(table: EngineTable) -> list[Finding]:
    """Why rows are missing, if they are, and that marking moved the outputs, if it did."""
    found = [Finding("engine-layers", "", table.note)] if table.note else []
    if probe_effect_matters(table.unmarked_score, table.marked_score):
        message = (
            "marking all outputs changes this engine's result from "
            f"{times(table.unmarked_score)} to "
            f"{times(table.marked_score)}: the tables of layers explain, the unmarked engine "
            "decides"
        )
        found.append(Finding("probe-effect", "", message))
    return found
