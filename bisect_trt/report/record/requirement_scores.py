"""The answer requirement by requirement: what the judges showed, and each baseline by output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from bisect_trt.core.errors import BadInputError
from bisect_trt.numerics.requirements.aggregates import WORST
from bisect_trt.numerics.requirements.requirement_text import parse_requirements
from bisect_trt.numerics.requirements.requirements import METRICS, Requirement
from bisect_trt.probe.result import ProbeResult


@dataclass(frozen=True)
class Cell:
    """One output of one baseline under one requirement: the metric's ``value``, NaN where no error
    of the output is it, and its ``score`` in tolerances, at most 1 passes.
    """

    value: float
    score: float


@dataclass(frozen=True)
class Row:
    """``cells`` has one for each baseline, None where it gave no such output. ``output`` is blank
    where a score is of all outputs that the requirement is on.
    """

    requirement: str
    output: str
    cells: tuple[Cell | None, ...]


def requirements_table(
    texts: Sequence[str],
    lowered: Sequence[ProbeResult],
    plan: Sequence[ProbeResult],
    baselines: Mapping[str, ProbeResult],
) -> pd.DataFrame:
    """A row for each requirement: its score on the given inputs with everything lowered and under
    the plan, by the judge who found it worst, and (``baselines``) by the label of each baseline.

    Args:
        texts: the requirements.
        lowered: what the judges showed of everything lowered.
        plan: what they showed of the plan that is written.
        baselines: the rows of outputs.csv, by their labels.
    """
    each = {label: r.by_condition for label, r in baselines.items() if r.by_condition}
    rows = []
    for place, text in enumerate(texts):
        row: dict[str, object] = {"requirement": text}
        for name, found in (("lowered", lowered), ("plan", plan)):
            scores = [r.by_condition[place] for r in found if r.by_condition]
            row[f"{name}_score"] = max(scores, default=math.nan)
        row["baselines"] = {label: scores[place] for label, scores in each.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def judged_scores(table: pd.DataFrame) -> dict[str, float]:
    """The score that decides each requirement: the plan's. Where none was written FP32's, if that
    misses one, for then the others are not to blame, else that of everything lowered.

    Args:
        table: as :func:`requirements_table` makes it.
    """
    if not len(table):
        return {}
    fp32 = table["baselines"].map(
        lambda scores: max((s for label, s in scores.items() if label.endswith("fp32")), default=0)
    )
    other = fp32.astype(float) if fp32.max() > 1.0 else table["lowered_score"]
    return dict(zip(table["requirement"], table["plan_score"].fillna(other), strict=True))


def requirement_scores(table: pd.DataFrame, outputs: pd.DataFrame) -> list[Row]:
    """A row for each requirement and output that it is on, a cell a baseline.

    A requirement whose values are not among an output's errors (a decision, a metric of the user's,
    an elementwise tolerance, a mean over inputs, the default) has one row, of all its outputs.

    Args:
        table: as :func:`requirements_table` makes it.
        outputs: the rows of outputs.csv.
    """
    if "output" not in outputs or not len(table):
        return []
    names = [str(n) for n in outputs["output"].unique() if n]
    baselines = list(outputs["baseline"].unique())
    found = {(r.baseline, r.output): r for r in outputs.itertuples()}
    rows = []
    for text, scores in zip(table["requirement"], table["baselines"], strict=True):
        item = _of_errors(text, names)
        if item is None:
            told = tuple(Cell(math.nan, scores[b]) if b in scores else None for b in baselines)
            rows.append(Row(text, "", told))
            continue
        for name in names:
            if item.output in (None, name):
                cells = tuple(_cell(item, found.get((b, name))) for b in baselines)
                rows.append(Row(text, name, cells))
    return rows


def _of_errors(text: str, names: Sequence[str]) -> Requirement | None:
    """The requirement, where the worst of an output's errors decides it."""
    try:
        (item,) = parse_requirements([text], names).items
    except BadInputError:  # a metric of the user's, whose code is not here
        return None
    told = item.metric in METRICS and item.aggregate == WORST
    # A slice's error, or a group's, is not among an output's.
    return item if told and not item.by_scale and not item.part else None


def _cell(item: Requirement, row: object) -> Cell | None:
    value = getattr(row, item.metric, None)
    if value is None:
        return None
    finite = bool(getattr(row, "finite", True))
    seen = float(value) if finite else math.nan
    return Cell(float(value), item.score_of(seen))
