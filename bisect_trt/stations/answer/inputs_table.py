"""The answer input by input."""

from __future__ import annotations

import json
import math

import pandas as pd

from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.bench.bench import Bench


def inputs_table(known: Known, bench: Bench, answer: PrecisionPlan | None) -> pd.DataFrame:
    """A row for each given input and each kept apart: its score with everything lowered and under
    the answer, by every runner that was asked; its shapes and SHA-256. Runs nothing.

    Args:
        known: the inputs and the base plan.
        bench: whose answers are read.
        answer: the plan that is written, if one is known to pass.
    """
    rows = []
    requirements = known.case.requirements
    # A metric that sees all inputs at once gives none of them a score.
    alone = any(item.metric not in requirements.collective for item in requirements.items)
    named = [
        *((InputKind.GIVEN, s) for s in known.case.samples),
        *((InputKind.HOLDOUT, s) for s in known.case.holdout),
    ]
    plans = {"lowered": known.base.with_pins(())} | ({"plan": answer} if answer else {})
    for kind, sample in named:
        row: dict[str, object] = {"input": sample.name, "kind": kind}
        for label, plan in plans.items():
            for prober in bench.probers:
                asked = bench.plan_for(prober, plan)
                result = prober.known(asked, sample)
                if result is not None:
                    score = result.score if alone else math.nan
                    row[f"{label}_score_{prober.runner.name}"] = score
        scores = [v for k, v in row.items() if k.startswith("plan_score_")]
        judge = row.get(f"plan_score_{bench.judge.runner.name}")
        decided = [judge] if bench.engine is not None and judge is not None else scores
        if decided and not requirements.of_sets:
            row["passed"] = all(float(str(s)) <= 1.0 for s in decided)
        row |= {"shapes": json.dumps(sample.shapes), "sha256": sample.digest}
        rows.append(row)
    return pd.DataFrame(rows)
