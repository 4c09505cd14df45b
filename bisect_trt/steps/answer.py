"""The answer: the plan to ship and what is known of it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.base.display import some_of
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import (
    Cause,
    Diagnosis,
    Finding,
    InputKind,
    Reproducibility,
    Validation,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, meets
from bisect_trt.metrics.arrays import all_finite
from bisect_trt.model.outputs import unreached
from bisect_trt.steps.baselines import Baselines, traced_inputs
from bisect_trt.steps.confirm import Judgement
from bisect_trt.steps.context import Context, RunStatistics
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.engine_diagnosis import not_reproducible, over_processes, runs_of
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import all_in_fp32
from bisect_trt.steps.select_fitted import Bisection
from bisect_trt.steps.tradeoff import measure_tradeoff
from bisect_trt.steps.validation import validate, validation_as_known
from bisect_trt.steps.validation_inputs import (
    MAX_TESTS,
    REFUSED_TIME_S,
    next_test,
    planned_test,
)


@dataclass(frozen=True)
class RunState:
    """The steps' records; None where a run ended before the step, or there was no need of it.

    ``inputs`` has a row an input, ``tradeoff`` a row a number of pins. ``settled`` is the diagnosis
    that ended the run early, if one did. ``reproducibility`` is that of the engine that the answer
    stands on, ``not_reproducible`` the diagnosis where it takes the answer back. ``out_of_time`` is
    true if the budget ended the search, ``interrupted`` if the user did.
    """

    problem: Problem
    settled: Diagnosis | None = None
    baselines: Baselines | None = None
    engine: EngineBaselines | None = None
    triage: Triage | None = None
    bisection: Bisection | None = None
    judgement: Judgement | None = None
    unseen: UnseenInputs | None = None
    validation: Validation | None = None
    inputs: pd.DataFrame | None = None
    tradeoff: pd.DataFrame | None = None
    reproducibility: Reproducibility | None = None
    not_reproducible: Diagnosis | None = None
    out_of_time: bool = False
    interrupted: bool = False

    def with_(self, **found: Any) -> RunState:
        """The same with one more record."""
        return replace(self, **found)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The cause, None before it is known."""
        if self.not_reproducible is not None:
            return self.not_reproducible
        return self.triage.diagnosis if self.triage is not None else self.settled

    @property
    def base(self) -> PrecisionPlan:
        """The plan without pins, with the precision that a pin really runs in."""
        if self.engine is None:
            return self.problem.base
        return self.problem.base.with_pins_in(self.engine.pin_precision)


def inputs_table(known: RunState, context: Context, answer: PrecisionPlan | None) -> pd.DataFrame:
    """A row for each given input and each kept apart: its score with everything reduced and under
    the answer, by every runner that was asked; its shapes and SHA-256. Runs nothing.
    """
    rows = []
    requirements, judge = known.problem.requirements, context.judge.runner.name
    # A metric that sees all inputs at once gives none of them a score.
    alone = any(item.metric not in requirements.collective for item in requirements.items)
    plans = {"reduced": known.base.with_pins(())} | ({"plan": answer} if answer else {})
    samples = [(InputKind.GIVEN, sample) for sample in known.problem.samples]
    samples += [(InputKind.HOLDOUT, sample) for sample in known.problem.holdout]
    for kind, sample in samples:
        row: dict[str, object] = {"input": sample.name, "kind": kind}
        decided: dict[str, float] = {}
        for label, plan in plans.items():
            for evaluator in context.evaluators:
                result = evaluator.known(context.plan_for(evaluator, plan), sample)
                if result is not None:
                    name = evaluator.runner.name
                    row[f"{label}_score_{name}"] = result.score if alone else math.nan
                    if label == "plan":
                        decided[name] = result.score if alone else math.nan
        if context.engine is not None and judge in decided:
            decided = {judge: decided[judge]}
        if decided and not requirements.of_sets:
            row["passed"] = all(score <= 1.0 for score in decided.values())
        rows.append(row | {"shapes": json.dumps(sample.shapes), "sha256": sample.digest})
    return pd.DataFrame(rows)


_WRONG_SHARE = 0.1
"""Of its largest value a layer is off by more where what it should give is lost."""

_LAYERS_BEHIND = 4
"""So far behind an infinity a layer is looked at."""


def note_left_overflowing(known: RunState, context: Context, answer: PrecisionPlan) -> None:
    """Say which layers give infinities under ``answer`` though their inputs are right: the outputs
    may hide it (a normalisation that divides by infinity gives zeros), a mask is meant so.
    """
    problem = known.problem
    if known.baselines is None or not problem.settings.precision.is_storage:
        return
    table = known.baselines.layers
    reduced = set(problem.names) - answer.pinned - unreached(problem.graph)
    overflowing = table.loc[table["overflows"].astype(bool), "layer"]
    left = [str(name) for name in overflowing if name in reduced]
    if not left:
        return
    shown = [context.evaluator.known(answer, sample) for sample in problem.samples]
    missed = sum(found is not None and not meets(found, 1.0) for found in shown)
    lost = [] if missed else _lost(problem, context, answer)
    if missed:
        harm = f"fatal on {missed} of {len(shown)} inputs, which need not meet the requirement"
    elif lost:
        harm = (
            f"what {some_of(lost)} should give is lost there. The requirement does "
            "not see it: ask for more, or keep them with --keep-fp32"
        )
    else:
        harm = (
            "harmless on these inputs: what reads the infinities bounds or discards them, and the "
            "outputs are right"
        )
    count = "1 layer leaves" if len(left) == 1 else f"{len(left)} layers leave"
    message = (
        f"{count} {problem.settings.precision.value.upper()}'s range with the plan too: "
        f"{some_of(left)}; {harm}"
    )
    context.note(Finding("overflow-lost" if lost else "left-overflowing", left[0], message))


def _lost(problem: Problem, context: Context, answer: PrecisionPlan) -> list[str]:
    """The finite layers that are wrong because of infinities before them."""
    samples = traced_inputs(problem, context)
    reads = {layer.name: set(layer.inputs) for layer in problem.layers}

    def found() -> list[str]:
        lost: list[str] = []
        for sample in samples:
            after = dict[str, int]()  # tensors, and how many layers behind an infinite one they are
            for values in context.emulator.trace(sample, answer):
                true, made = values.reference, values.accumulated
                if not all_finite(true):
                    continue
                read = reads.get(values.layer, set())
                behind = min((after[n] for n in read if n in after), default=_LAYERS_BEHIND)
                if not all_finite(made):
                    after[values.tensor] = 0
                elif behind < _LAYERS_BEHIND and true.size:
                    after[values.tensor] = behind + 1
                    if np.abs(made - true).max() > _WRONG_SHARE * np.abs(true).max():
                        lost.append(values.layer)
        return list(dict.fromkeys(lost))

    digests = [sample.digest for sample in samples]
    return context.recalled("lost", [answer.digest, *digests], found)


def best_so_far(
    known: RunState, run_statistics: RunStatistics
) -> tuple[PrecisionPlan, Evaluation] | None:
    """The plan known to pass with fewest pins, and the evaluation that says so."""
    everything = frozenset(known.problem.names)
    base = known.base if known.engine is None else known.problem.base
    judges = run_statistics.emulators if known.engine is None else (run_statistics.judge,)
    pinned = run_statistics.smallest_passing(base, judges)
    final: Evaluation | None
    if pinned is not None:
        plan = base.with_pins(pinned)
        final = run_statistics.worst_of(plan, judges)
    elif known.engine is not None and known.problem.kept_reduced:
        return None
    elif known.engine is not None and known.engine.fp32.verdict.passed:
        # Nothing smaller passed yet: all pins are the FP32 engine.
        plan, final = base.with_pins(everything), known.engine.fp32
    else:
        plan = base.with_pins(everything)
        final = run_statistics.of_first(plan)
        if final is None and all_in_fp32(known.problem, base) is not None:
            final = run_statistics.of_first(PrecisionPlan(Precision.FP32))  # the same network
        if final is not None and not final.verdict.passed:
            return None
    return (plan.with_pins_in(Precision.FP32), final) if final is not None else None


def with_set_in_hand(known: RunState, context: Context) -> RunState:
    """``known`` when the user has ended the search, with the best set until then and what is known
    of it. Nothing is run for it.
    """
    found = _set_in_hand(known, context)
    if found is not None:
        return known.with_(bisection=found)
    plan, validation = None, known.validation
    if known.judgement is not None:
        if known.judgement.passed:
            plan, validation = known.judgement.plan, validation or known.judgement.validation
    elif known.bisection is not None:
        if context.engine is None:
            plan = known.base.with_pins(known.bisection.pinned)
            validation = validation or known.bisection.validation
    elif known.settled is None and (best := best_so_far(known, context.run_statistics())):
        plan = best[1].plan
    if validation is None and plan is not None:
        validation = validation_as_known(known.problem, context, plan)
    return known.with_(validation=validation)


def _set_in_hand(known: RunState, context: Context) -> Bisection | None:
    """The smallest set that the first emulator passed, in the middle of a search."""
    triage, pins = known.triage, context.in_hand
    searching = known.bisection is None and known.judgement is None and context.engine is None
    if triage is None or not searching:
        return None
    fitted_search = known.problem.settings.fitted
    if fitted_search:
        run_statistics = context.run_statistics()
        pins = run_statistics.smallest_passing(triage.base, run_statistics.emulators[:1])
    if pins is None or not context.evaluator.knows(plan := triage.base.with_pins(pins)):
        return None
    context.evaluator.evaluate(plan)
    validation = validation_as_known(known.problem, context, plan)
    return Bisection(pins, {}, triage.limit, False, validation=validation, ranked=not fitted_search)


def end_search(known: RunState, context: Context) -> RunState:
    """``known`` when the budget ended the search, after every judge saw the best set."""
    context.time.search_ended()
    if known.settled is None and known.judgement is None and context.engine is None:
        with suppress(BudgetSpentError):
            _confirm(known, context)
    return known.with_(out_of_time=True)


def _confirm(known: RunState, context: Context) -> None:
    base, first = known.base, context.evaluator.runner.name
    passed = {
        one.plan.pinned
        for one in context.log
        if one.on_given
        and one.runner == first
        and one.verdict.passed
        and one.plan == base.with_pins(one.plan.pinned)
    }
    tried = sorted(passed.difference(plan.pinned for plan in context.refused), key=len)
    # What refuses a set mostly refuses those of few pins more: each step is twice the last.
    for pins in (tried[2**step - 1] for step in range(len(tried).bit_length())):
        if context.second.evaluate(base.with_pins(pins)).verdict.passed:
            context.observer.best(len(pins))
            return
    context.observer.best(len(known.problem.names))
    for judge in context.judges:
        judge.evaluate(base.with_pins(known.problem.names))


def validation_of_answer(known: RunState, context: Context) -> Validation | None:
    """The validation of the plan that will be written: the search's own where that ended with one,
    else one on new inputs; None where no plan meets the requirement.
    """
    source = known.judgement or known.bisection
    before = known.validation or (source.validation if source is not None else None)
    if before is not None:
        return before
    if known.baselines is None and known.settled is None:
        # The budget ended the run before an evaluation could be timed.
        best = best_so_far(known, context.run_statistics())
        return validation_as_known(known.problem, context, best[1].plan) if best else None
    plan = plan_of_answer(known, context)
    if plan is None or known.baselines is None:
        return None
    context.observer.step("what it holds on")
    settings, judged = known.problem.settings, known.judgement
    # An evaluation opens sessions too. Where what is counted is too hopeful the clock ends the
    # test.
    seconds = known.baselines.evaluation_seconds(len(known.problem.samples))
    seconds = min(seconds, context.pace.usual_seconds)
    # Tests that were made have refused something, and have spent their part of the risk.
    if context.tests == 0 or settings.fitted:
        test = planned_test(known.problem, MAX_TESTS, context.pace.usual_seconds, last=True)
    else:
        test = next_test(known.problem, context)
        refused = known.bisection is not None and not known.out_of_time
        if judged is not None:
            refused = judged.refused
        if refused:
            test = test.within(known.problem, context.pace.usual_seconds, REFUSED_TIME_S)
    wanted = test.copies
    # Two copies are made at a time; of what a budget leaves, two fifths are for the report.
    test = test.within(known.problem, seconds, 2.0 * 0.6 * context.time.left_s)
    endings = context.time.endings
    validation = validate(known.problem, context, context.judges, plan, test)
    kinds = (
        [validation.perturbed, validation.augmented]
        if validation.wanted_of_augmented
        else [validation.perturbed]
    )
    fewest = min(kind.tested for kind in kinds)
    if fewest < wanted and (test.copies < wanted or context.time.endings > endings):
        _note_budget(context, validation, wanted)
    return validation


def _note_budget(context: Context, validation: Validation, wanted: int) -> None:
    """Say on how many of the ``wanted`` copies of a kind the budget let the answer be tested."""
    message = (
        f"the budget of {context.time.minutes:g} minutes left time to test the plan on "
        f"{validation.perturbed.tested} perturbed copies and {validation.augmented.tested} "
        f"augmented inputs, of {wanted} of a kind: the same command with more minutes goes on"
    )
    context.note(Finding("budget", "", message))


def with_reproducibility(known: RunState, context: Context) -> RunState:
    """With the reproducibility of the answer's engine, which may take the answer back."""
    result = _stood_on(known)
    if result is None:
        return known
    context.observer.step("reproducibility")
    seen = over_processes(context, result) if result.verdict.passed else runs_of([result])
    what = "answer's" if known.judgement is not None else result.plan.base.value.upper()
    taken_back = result.verdict.passed and seen.right != seen.processes
    found = not_reproducible(what, seen) if seen.decides or taken_back else None
    return known.with_(reproducibility=seen, not_reproducible=found)


def _stood_on(known: RunState) -> Evaluation | None:
    """The engine's word that the answer stands on, where it has one."""
    engine, cause = known.engine, known.settled.cause if known.settled is not None else None
    if engine is None or cause is Cause.NOT_REPRODUCIBLE:
        return None
    if known.judgement is not None:
        return known.judgement.result
    return {Cause.NONE: engine.base, Cause.TF32: engine.fp32}.get(cause) if cause else None


def plan_of_answer(known: RunState, context: Context) -> PrecisionPlan | None:
    """The plan with the precision that its pins really run in; None if none was found to pass."""
    if known.not_reproducible is not None:
        return None
    decided = known.bisection if known.engine is None else known.judgement
    if known.out_of_time and known.settled is None and decided is None:
        found = best_so_far(known, context.run_statistics())
        return known.base.with_pins(found[0].pinned) if found is not None else None
    if known.judgement is not None:
        judged = known.judgement
        return known.base.with_pins(judged.plan.pinned) if judged.passed else None
    if known.bisection is not None:
        return known.base.with_pins(known.bisection.pinned)
    if known.settled is None or known.baselines is None:
        return None
    judge = known.engine or known.baselines
    if known.settled.cause is Cause.NONE:
        return known.problem.base
    if known.settled.cause is Cause.TF32 and judge.fp32.verdict.passed:
        return PrecisionPlan(Precision.FP32)
    return None


def looked_at_again(known: RunState, context: Context) -> RunState:
    """With the tables that show the answer beside others, and input by input."""
    answer = plan_of_answer(known, context)
    tradeoff = None
    if answer is not None:
        note_left_overflowing(known, context, answer)
    if answer is not None and not known.out_of_time:
        with suppress(BudgetSpentError):  # the answer is there, and what shows it can wait
            tradeoff = _tradeoff(known, context, answer)
    return known.with_(inputs=inputs_table(known, context, answer), tradeoff=tradeoff)


def _tradeoff(known: RunState, context: Context, answer: PrecisionPlan) -> pd.DataFrame | None:
    """The trade-off curve; None where no reduced plan was measured."""
    problem, triage = known.problem, known.triage
    if known.baselines is None or problem.settings.fitted or answer.base is not problem.base.base:
        return None
    context.observer.step("tradeoff")
    base, ranking = (problem.base, ()) if triage is None else (triage.base, triage.ranking)
    found = measure_tradeoff(problem, context, base, ranking, answer, known.validation)
    for finding in found.cut_short():
        context.note(finding)
    return found.table
