"""The baselines by requirement and output, from the errors that outputs.csv holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from bisect_trt.core.errors import BadInputError
from bisect_trt.numerics.aggregates import WORST
from bisect_trt.numerics.requirement_text import parse_requirements
from bisect_trt.numerics.requirements import METRICS, Requirement


@dataclass(frozen=True)
class Cell:
    """One output of one baseline under one requirement: the metric's ``value``, and its ``score``
    in tolerances, at most 1 passes.
    """

    value: float
    score: float


@dataclass(frozen=True)
class Row:
    """``cells`` has one for each baseline, None where it gave no such output."""

    requirement: str
    output: str
    cells: tuple[Cell | None, ...]


def requirement_scores(requirements: Sequence[str], outputs: pd.DataFrame) -> list[Row]:
    """A row for each requirement and output that it is on, a cell a baseline.

    Requirements whose values are not among an output's errors (decisions, metrics of the user's,
    elementwise tolerances, means over inputs) have no rows: the score of all together judges them.
    """
    if "output" not in outputs:
        return []
    names = [str(n) for n in outputs["output"].unique() if n]
    baselines = list(outputs["baseline"].unique())
    found = {(r.baseline, r.output): r for r in outputs.itertuples()}
    rows = []
    for item in _of_errors(requirements, names):
        for name in names:
            if item.output in (None, name):
                cells = tuple(_cell(item, found.get((b, name))) for b in baselines)
                rows.append(Row(item.text, name, cells))
    return rows


def _of_errors(texts: Sequence[str], names: Sequence[str]) -> list[Requirement]:
    found = []
    for text in texts:
        try:
            (item,) = parse_requirements([text], names).items
        except BadInputError:  # a metric of the user's, whose code is not here
            continue
        if item.metric in METRICS and item.aggregate == WORST:
            found.append(item)
    return found


def _cell(item: Requirement, row: object) -> Cell | None:
    value = getattr(row, item.metric, None)
    if value is None:
        return None
    finite = bool(getattr(row, "finite", True))
    seen = float(value) if finite else math.nan
    return Cell(float(value), item.score_of(seen))
