"""The answer requirement by requirement."""

from __future__ import annotations

import math

import pandas as pd

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.known import Known


def requirements_table(known: Known, bench: Bench, answer: PrecisionPlan | None) -> pd.DataFrame:
    """A row for each requirement: its score on the given inputs with everything lowered and under
    the answer, by the judge who found it worst. Runs nothing.

    Args:
        known: the requirements and the base plan.
        bench: whose answers are read.
        answer: the plan that is written, if one is known to pass.
    """
    texts = known.case.requirements.texts
    table = pd.DataFrame({"requirement": texts})
    for label, plan in (("lowered", known.base.with_pins(())), ("plan", answer)):
        scores = _scores(bench, plan) if plan is not None else ()
        table[f"{label}_score"] = scores or (math.nan,) * len(texts)
    return table


def _scores(bench: Bench, plan: PrecisionPlan) -> tuple[float, ...]:
    """Of each requirement; nothing where no judge ran the plan."""
    asked = [judge.by_condition(bench.plan_for(judge, plan)) for judge in bench.judges]
    found = [scores for scores in asked if scores is not None]
    return tuple(max(column) for column in zip(*found, strict=True))
