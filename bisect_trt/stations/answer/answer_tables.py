"""The tables that show the answer beside others."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.stations.answer.answer import plan_of_answer
from bisect_trt.stations.answer.inputs_table import inputs_table
from bisect_trt.stations.answer.known import Known
from bisect_trt.stations.answer.out_of_range import note_left_overflowing
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.cause.held import note_held
from bisect_trt.stations.plans.frontier import measure_frontier


def looked_at_again(known: Known, bench: Bench) -> Known:
    """With the tables that show the answer beside others, and input by input.

    Args:
        known: what was found, with the answer.
        bench: what runs it.
    """
    answer = plan_of_answer(known, bench)
    frontier = None
    if answer is not None:
        note_left_overflowing(known.case, known, bench, answer)
    if answer is not None and not known.out_of_time:
        with suppress(BudgetSpentError):  # the answer is there, and what shows it can wait
            note_held(known.case, bench, answer)
            frontier = _frontier(known, bench, answer)
    return known.with_(inputs=inputs_table(known, bench, answer), frontier=frontier)


def _frontier(known: Known, bench: Bench, answer: PrecisionPlan) -> pd.DataFrame | None:
    """None where nothing was measured, the plan shall be fitted to its inputs, or none is offered
    but FP32 as a whole.
    """
    case, triage, baselines = known.case, known.triage, known.baselines
    if baselines is None or case.settings.fitted or answer.base is not case.base.base:
        return None
    bench.observer.station("frontier")
    base, ranking = (case.base, ()) if triage is None else (triage.base, triage.ranking)
    found = measure_frontier(case, bench, baselines, base, ranking, answer, known.holds)
    for finding in found.cut_short():
        bench.note(finding)
    return found.table
