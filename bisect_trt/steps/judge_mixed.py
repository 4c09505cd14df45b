"""Judges a mixed model, which another tool made, as a plan is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import MIXED, Finding, Validation
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, worst_judged
from bisect_trt.model.graph import Graph
from bisect_trt.model.mixed import MixedModel
from bisect_trt.model.outputs import judged_part
from bisect_trt.steps.context import Context, open_beside
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import problem_on
from bisect_trt.steps.saved_plan import SavedPlan
from bisect_trt.steps.validation import validate_beside

NOT_ON_RAY = (
    "--ray: the engine's workers hold the cluster's GPUs, so the model of --reduced is not judged; "
    "`bisect-trt verify --reduced` judges it"
)
"""Says why a run on a cluster's engine leaves the mixed model out."""


@dataclass(frozen=True)
class JudgedMixed:
    """The worst judge's ``evaluation`` of a mixed model on the given inputs, and more.

    ``plan`` is what its types say for the FP32 model's layers. ``by_runner`` are the evaluations of
    all judges. ``validation`` is None where it misses a given input.
    """

    name: str
    plan: PrecisionPlan
    evaluation: Evaluation
    by_runner: Mapping[str, Evaluation]
    validation: Validation | None = None

    @property
    def label(self) -> str:
        """The name of its row."""
        return f"{MIXED} ({Path(self.name).name})"


def mixed_problem(problem: Problem, mixed: MixedModel) -> Problem:
    """``problem`` on the mixed model; the reference stays the FP32 model.

    Raises:
        BadInputError: a judged inner tensor is not in the mixed model.
    """
    part = mixed.graph
    if problem.judged:
        made = {name for node in part.proto.graph.node for name in node.output}
        for name in problem.judged:
            if name not in made:
                raise BadInputError(
                    f"{mixed.name}: has no tensor {name!r}, at which the FP32 model is judged; "
                    "name another one with --outputs"
                )
        part = Graph(judged_part(part.proto, problem.judged))
    found = problem_on(problem, part, mixed.graph)
    return replace(found, held_pins=frozenset(), golden=problem.golden)


def judge_mixed(problem: Problem, context: Context) -> JudgedMixed | None:
    """The mixed model of ``--reduced`` on the given inputs; None where there is none."""
    mixed = problem.mixed
    if mixed is None:
        return None
    if not context.opens_beside:
        context.note(Finding("not-judged", "", NOT_ON_RAY))
        return None
    context.observer.step("reduced model")
    with open_beside(context, mixed_problem(problem, mixed)) as inner:
        exact = plan_of_part(mixed, inner.problem)
        found = {judge.runner.name: judge.evaluate(exact) for judge in inner.judges}
    return JudgedMixed(mixed.name, mixed.plan, worst_judged(found.values()), found)


def validate_mixed(judged: JudgedMixed, problem: Problem, context: Context) -> JudgedMixed:
    """``judged`` with its validation on inputs of its own, where it passes the given ones."""
    mixed = problem.mixed
    if mixed is None or not judged.evaluation.verdict.passed:
        return judged
    with open_beside(context, mixed_problem(problem, mixed)) as inner:
        exact = plan_of_part(mixed, inner.problem)
        found = validate_beside(inner.problem, inner, exact, context.pace.usual_seconds)
    return replace(judged, validation=found)


def plan_of_part(mixed: MixedModel, problem: Problem) -> PrecisionPlan:
    """The roundings of the mixed model in the judged part of it."""
    return replace(mixed.exact, pinned=mixed.exact.pinned.intersection(problem.graph.names))


def beginning_at(problem: Problem, judged: JudgedMixed | None) -> Problem:
    """``problem`` whose search begins at the plan of a mixed model that passes."""
    # The layers of one that fails would stand before those that matter.
    if judged is None or not judged.evaluation.verdict.passed or problem.older is not None:
        return problem
    begin = judged.plan.pinned.intersection(problem.names)
    return replace(problem, older=SavedPlan(judged.plan, Path(judged.name)), begin=begin)
