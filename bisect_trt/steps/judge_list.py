"""Judges a list of another tool as a plan is judged, beside the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bisect_trt.base.outcomes import LISTED, Validation
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, worst_judged
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.validation import validate_beside


@dataclass(frozen=True)
class JudgedList:
    """The worst judge's ``evaluation`` of a list's ``plan`` on the given inputs.

    ``name`` is the list's file. ``validation`` is None where it misses a given input.
    """

    name: str
    plan: PrecisionPlan
    evaluation: Evaluation
    validation: Validation | None = None

    @property
    def label(self) -> str:
        """The name of its row."""
        return f"{LISTED} ({Path(self.name).name})"


def judge_list(problem: Problem, context: Context) -> JudgedList | None:
    """The list of ``--start-from`` on the given inputs; None where there is none."""
    older = problem.older
    if older is None or older.imported is None:
        return None
    plan = problem.base.with_pins(older.plan.pinned.intersection(problem.graph.names))
    worst = worst_judged(judge.evaluate(plan) for judge in context.judges)
    return JudgedList(older.imported.where, plan, worst)


def beginning_elsewhere(problem: Problem, judged: JudgedList | None) -> Problem:
    """``problem`` whose search does not begin at a list that fails."""
    # Its layers would stand before those that matter.
    if judged is None or judged.evaluation.verdict.passed:
        return problem
    return replace(problem, begin=frozenset())


def validate_list(judged: JudgedList, problem: Problem, context: Context) -> JudgedList:
    """``judged`` with its validation, where it passes the given inputs."""
    if not judged.evaluation.verdict.passed:
        return judged
    found = validate_beside(problem, context, judged.plan, context.pace.usual_seconds)
    return replace(judged, validation=found)
