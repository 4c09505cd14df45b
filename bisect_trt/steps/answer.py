"""The answer: the plan to ship and what is known of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

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
    ValidationVerdict,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, meets, worst_judged
from bisect_trt.metrics.arrays import all_finite
from bisect_trt.model.outputs import unreached
from bisect_trt.steps.baselines import (
    Baselines,
    measure_baselines,
    nothing_to_pin,
    traced_inputs,
)
from bisect_trt.steps.blank_input import note_blank
from bisect_trt.steps.confirm import Judgement
from bisect_trt.steps.context import Context, RunStatistics
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.engine_diagnosis import not_reproducible, over_processes, runs_of
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.fit_weights import FittedWeights
from bisect_trt.steps.judge_list import JudgedList
from bisect_trt.steps.judge_mixed import JudgedMixed
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import Refused, Repair
from bisect_trt.steps.search_set import all_in_fp32
from bisect_trt.steps.select_fitted import Bisection
from bisect_trt.steps.select_robust import ranked_by_worth
from bisect_trt.steps.timing import Timing
from bisect_trt.steps.tradeoff import Tradeoff, measure_tradeoff
from bisect_trt.steps.validation import validate, validate_beside, validation_as_known
from bisect_trt.steps.validation_inputs import (
    MAX_TESTS,
    ValidationTest,
    next_test,
    planned_test,
)


@dataclass(frozen=True)
class Answered:
    """The last state of the steps on the repaired graph, and their statistics."""

    state: RunState
    run_statistics: RunStatistics


@dataclass(frozen=True)
class InOnePrecision:
    """Everything in one precision: the judge's ``evaluation``, its ``validation`` if it passes.

    ``answered`` is the answer that it is, unless new inputs refute it.
    """

    evaluation: Evaluation
    validation: Validation | None
    answered: Answered | None = None


@dataclass(frozen=True)
class RunState:
    """The steps' records; None where a run ended before the step, or did not need it.

    ``settled``: the diagnosis that ended the run early.
    ``repair``: what the graph's repair came to; ``repaired``: the answer on the repaired graph.
    ``bf16``: everything in BF16; ``fp32``: everything in FP32, where that is as fast as the answer.
    ``timing``: times of the choices' engines beside each other.
    ``weights``: weights rounded to fit; ``fitted``: the answer with them.
    ``mixed``: the mixed model of ``--reduced``, judged; ``listed``: the list of ``--start-from``.
    ``inputs``: a row for each input; ``tradeoff``: a row for each plan of the curve, and its knee.
    ``reproducibility``: that of the answer's engine.
    ``not_reproducible``: the diagnosis where that takes the answer back.
    ``out_of_time``: the budget ended the search; ``interrupted``: the user did.
    """

    problem: Problem
    settled: Diagnosis | None = None
    baselines: Baselines | None = None
    engine: EngineBaselines | None = None
    triage: Triage | None = None
    repair: Repair | Refused | None = None
    repaired: Answered | None = None
    weights: FittedWeights | None = None
    fitted: Answered | None = None
    bf16: InOnePrecision | None = None
    fp32: InOnePrecision | None = None
    timing: Timing | None = None
    mixed: JudgedMixed | None = None
    listed: JudgedList | None = None
    bisection: Bisection | None = None
    judgement: Judgement | None = None
    unseen: UnseenInputs | None = None
    validation: Validation | None = None
    inputs: pd.DataFrame | None = None
    tradeoff: Tradeoff | None = None
    reproducibility: Reproducibility | None = None
    not_reproducible: Diagnosis | None = None
    out_of_time: bool = False
    interrupted: bool = False

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


def inputs_table(state: RunState, context: Context, answer: PrecisionPlan | None) -> pd.DataFrame:
    """A row for each given and each held out input, with its known scores. Runs nothing."""
    rows = []
    requirements, judge = state.problem.requirements, context.judge.runner.name
    # A metric that sees all inputs at once gives none of them a score.
    scored = any(item.metric not in requirements.collective for item in requirements.items)
    plans = {"reduced": state.base.with_pins(())} | ({"plan": answer} if answer else {})
    samples = [(InputKind.GIVEN, sample) for sample in state.problem.samples]
    samples += [(InputKind.HOLDOUT, sample) for sample in state.problem.holdout]
    for kind, sample in samples:
        row: dict[str, object] = {"input": sample.name, "kind": kind}
        decided: dict[str, float] = {}
        for label, plan in plans.items():
            for evaluator in context.evaluators:
                result = evaluator.known(context.plan_for(evaluator, plan), sample)
                if result is not None:
                    name = evaluator.runner.name
                    row[f"{label}_score_{name}"] = result.score if scored else math.nan
                    if label == "plan":
                        decided[name] = result.score if scored else math.nan
        # An engine has the last word, whatever the emulators say of the input.
        if context.engine is not None and judge in decided:
            decided = {judge: decided[judge]}
        if decided and not requirements.of_sets:
            row["passed"] = all(score <= 1.0 for score in decided.values())
        rows.append(row | {"shapes": json.dumps(sample.shapes), "sha256": sample.digest})
    return pd.DataFrame(rows)


def note_left_overflowing(state: RunState, context: Context, answer: PrecisionPlan) -> None:
    """Note the layers that give infinities under ``answer`` though their inputs are finite."""
    # The outputs may hide it: a normalisation that divides by infinity gives zeros. A mask of
    # infinities is meant so.
    problem = state.problem
    if state.baselines is None or not problem.settings.precision.is_storage:
        return
    table = state.baselines.layers
    reduced = set(problem.names) - answer.pinned - unreached(problem.graph)
    overflowing = table.loc[table["overflows"].astype(bool), "layer"]
    left = [str(name) for name in overflowing if name in reduced]
    if not left:
        return
    found = [context.evaluator.known(answer, sample) for sample in problem.samples]
    missed = sum(result is not None and not meets(result, 1.0) for result in found)
    lost = [] if missed else _lost(problem, context, answer)
    if missed:
        harm = f"fatal on {missed} of {len(found)} inputs, which need not meet the requirement"
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
    """The layers with finite outputs that infinities before them make wrong."""
    samples = traced_inputs(problem, context)
    inputs_of = {layer.name: set(layer.inputs) for layer in problem.layers}

    def found() -> list[str]:
        lost: list[str] = []
        for sample in samples:
            # How many layers after an infinite tensor each tensor stands; four are looked at.
            after = dict[str, int]()
            for values in context.emulator.trace(sample, answer):
                exact, emulated = values.reference, values.accumulated
                if not all_finite(exact):
                    continue
                read = inputs_of.get(values.layer, set())
                behind = min((after[n] for n in read if n in after), default=4)
                if not all_finite(emulated):
                    after[values.tensor] = 0
                elif behind < 4 and exact.size:
                    after[values.tensor] = behind + 1
                    # Off by a tenth of its largest value: no rounding of FP16 or BF16 does that.
                    if np.abs(emulated - exact).max() > 0.1 * np.abs(exact).max():
                        lost.append(values.layer)
        return list(dict.fromkeys(lost))

    digests = [sample.digest for sample in samples]
    return context.recalled("lost", [answer.digest, *digests], found)


def best_so_far(
    state: RunState, run_statistics: RunStatistics
) -> tuple[PrecisionPlan, Evaluation] | None:
    """The plan with fewest pins that is known to pass, and the evaluation that shows it."""
    everything = frozenset(state.problem.names)
    base = state.base if state.engine is None else state.problem.base
    judges = run_statistics.emulators if state.engine is None else (run_statistics.judge,)
    pinned = run_statistics.smallest_passing(base, judges)
    final: Evaluation | None
    if pinned is not None:
        plan = base.with_pins(pinned)
        final = run_statistics.worst_of(plan, judges)
    elif state.engine is not None and state.problem.kept_reduced:
        return None
    elif state.engine is not None and state.engine.fp32.verdict.passed:
        # Nothing smaller passed yet: all pins are the FP32 engine.
        plan, final = base.with_pins(everything), state.engine.fp32
    else:
        plan = base.with_pins(everything)
        final = run_statistics.of_first(plan)
        if final is None and all_in_fp32(state.problem, base) is not None:
            final = run_statistics.of_first(PrecisionPlan(Precision.FP32))  # the same network
        if final is not None and not final.verdict.passed:
            return None
    return (plan.with_pins_in(Precision.FP32), final) if final is not None else None


def with_set_in_hand(state: RunState, context: Context) -> RunState:
    """``state`` with the best set so far, when the user has ended the search. Runs nothing."""
    found = _set_in_hand(state, context)
    if found is not None:
        return replace(state, bisection=found)
    plan, validation = None, state.validation
    if state.judgement is not None:
        if state.judgement.passed:
            plan, validation = state.judgement.plan, validation or state.judgement.validation
    elif state.bisection is not None:
        if context.engine is None:
            plan = state.base.with_pins(state.bisection.pinned)
            validation = validation or state.bisection.validation
    elif state.settled is None and (best := best_so_far(state, context.run_statistics())):
        plan = best[1].plan
    if validation is None and plan is not None:
        validation = validation_as_known(state.problem, context, plan)
    return replace(state, validation=validation)


def _set_in_hand(state: RunState, context: Context) -> Bisection | None:
    """The smallest set that the first emulator passed in a search that has not ended."""
    triage, pins = state.triage, context.in_hand
    searching = state.bisection is None and state.judgement is None and context.engine is None
    if triage is None or not searching:
        return None
    fitted_search = state.problem.settings.fitted
    if fitted_search:
        run_statistics = context.run_statistics()
        pins = run_statistics.smallest_passing(triage.base, run_statistics.emulators[:1])
    if pins is None or not context.evaluator.knows(plan := triage.base.with_pins(pins)):
        return None
    context.evaluator.evaluate(plan)
    validation = validation_as_known(state.problem, context, plan)
    return Bisection(pins, {}, triage.limit, False, validation=validation, ranked=not fitted_search)


def end_search(state: RunState, context: Context) -> RunState:
    """``state`` when the budget ended the search, after every judge evaluated the best set."""
    context.time.search_ended()
    if state.settled is None and state.judgement is None and context.engine is None:
        with suppress(BudgetSpentError):
            _confirm(state, context)
    return replace(state, out_of_time=True)


def _confirm(state: RunState, context: Context) -> None:
    """Let the second emulator evaluate sets that the first one passed, until it passes one."""
    base, names = state.base, frozenset(state.problem.names)
    first = (context.evaluator.runner.name,)
    for _ in range(4):  # of what the budget leaves most is for the validation
        # Sets that the second emulator has refused are left out.
        pins = context.run_statistics().smallest_passing(base, first)
        if pins is None:
            break
        if context.second.evaluate(base.with_pins(pins)).verdict.passed:
            context.observer.best(len(pins))
            return
    context.observer.best(len(names))
    for judge in context.judges:
        judge.evaluate(base.with_pins(names))


def validation_of_answer(state: RunState, context: Context) -> Validation | None:
    """The validation of the plan that will be written; None where no plan meets the requirement.

    It is the search's own where that ended with one, else one on new inputs.
    """
    source = state.judgement or state.bisection
    before = state.validation or (source.validation if source is not None else None)
    if before is not None:
        return before
    if state.baselines is None and state.settled is None:
        # The budget ended the run before an evaluation could be timed.
        best = best_so_far(state, context.run_statistics())
        return validation_as_known(state.problem, context, best[1].plan) if best else None
    plan = plan_of_answer(state, context)
    if plan is None or state.baselines is None:
        return None
    context.observer.step("validation")
    test = _last_test(state, context)
    # The usual time may be too hopeful, as sessions must be opened: then the clock ends the test.
    seconds = state.baselines.evaluation_seconds(len(state.problem.samples))
    seconds = min(seconds, context.pace.usual_seconds)
    # Two copies are made at a time; of what a budget leaves, two fifths are for the report.
    test = test.within(state.problem, seconds, 2.0 * 0.6 * context.time.left_s)
    return validate(state.problem, context, context.judges, plan, test)


def _last_test(state: RunState, context: Context) -> ValidationTest:
    """The test of the answer, with the risk that the run's other tests have left."""
    problem, usual_seconds = state.problem, context.pace.usual_seconds
    if context.tests == 0 or problem.settings.fitted:
        return planned_test(problem, MAX_TESTS, usual_seconds, last=True)
    test = next_test(problem, context)
    refused = state.bisection is not None and not state.out_of_time
    if state.judgement is not None:
        refused = state.judgement.refused
    limit_s = problem.settings.limits.refused_time_s
    return test.within(problem, usual_seconds, limit_s) if refused else test


def with_reproducibility(state: RunState, context: Context) -> RunState:
    """``state`` with the reproducibility of the answer's engine, which may take the answer back."""
    result = _deciding(state)
    if result is None:
        return state
    context.observer.step("reproducibility")
    runs = over_processes(context, result) if result.verdict.passed else runs_of([result])
    what = "answer's" if state.judgement is not None else result.plan.base.value.upper()
    # One process that misses is enough: users start new ones.
    taken_back = result.verdict.passed and runs.right != runs.processes
    found = not_reproducible(what, runs) if runs.decides or taken_back else None
    return replace(state, reproducibility=runs, not_reproducible=found)


def _deciding(state: RunState) -> Evaluation | None:
    """The engine's evaluation that decided the answer, where there is one."""
    engine, cause = state.engine, state.settled.cause if state.settled is not None else None
    if engine is None or cause is Cause.NOT_REPRODUCIBLE:
        return None
    if state.judgement is not None:
        return state.judgement.result
    return {Cause.NONE: engine.base, Cause.TF32: engine.fp32}.get(cause) if cause else None


def plan_of_answer(state: RunState, context: Context) -> PrecisionPlan | None:
    """The plan with the precision that its pins really run in; None if none was found to pass."""
    if state.not_reproducible is not None:
        return None
    # The budget may have ended the run before a step had an answer.
    decided = state.bisection if state.engine is None else state.judgement
    if state.out_of_time and state.settled is None and decided is None:
        found = best_so_far(state, context.run_statistics())
        return state.base.with_pins(found[0].pinned) if found is not None else None
    if state.judgement is not None:
        judged = state.judgement
        return state.base.with_pins(judged.plan.pinned) if judged.passed else None
    if state.bisection is not None:
        return state.base.with_pins(state.bisection.pinned)
    if state.settled is None or state.baselines is None:
        return None
    judge = state.engine or state.baselines
    if state.settled.cause is Cause.NONE:
        return state.problem.base
    if state.settled.cause is Cause.TF32 and judge.fp32.verdict.passed:
        return PrecisionPlan(Precision.FP32)
    return None


def keeps_matrices(state: RunState) -> bool:
    """Whether the answer keeps layers that multiply matrices in FP32, or no plan is right."""
    settled = state.settled
    if settled is not None:
        return settled.cause is not Cause.NONE
    matrices = state.problem.matrix_layers
    if state.judgement is not None:
        judged = state.judgement
        return not judged.passed or judged.refused or not matrices.isdisjoint(judged.plan.pinned)
    found = state.bisection
    return found is None or not matrices.isdisjoint(found.pinned)


def in_bf16(problem: Problem) -> Problem:
    """``problem`` with everything in BF16."""
    settings = replace(problem.settings, precision=Precision.BF16, repair="none")
    layers = problem.graph.layers_at(Precision.BF16)
    names = {layer.name for layer in layers}
    return replace(
        problem,
        settings=settings,
        layers=layers,
        golden=None,
        held_pins=problem.held_pins & names,
        kept_reduced=problem.kept_reduced & names,
        older=None,
        begin=frozenset(),
    )


def measure_bf16(state: RunState, problem: Problem, context: Context) -> InOnePrecision:
    """Evaluate everything in BF16, and validate it for a while where it passes.

    An engine is built only where the emulator passes it. ``state`` is that of the answer in FP16.
    """
    context.observer.step("bf16")
    emulated = context.evaluator.evaluate(problem.base)
    if not emulated.verdict.passed:
        return InOnePrecision(emulated, None)
    evaluations = [judge.evaluate(problem.base) for judge in context.judges]
    worst = worst_judged(evaluations)
    if not worst.verdict.passed:
        return InOnePrecision(worst, None)
    validation = validate_beside(problem, context, problem.base, context.pace.usual_seconds)
    if validation.word is ValidationVerdict.OVERFITTED:
        return InOnePrecision(worst, validation)
    engine = replace(state.engine, base=worst) if state.engine is not None else None
    answer = RunState(
        problem,
        settled=nothing_to_pin(worst, Precision.BF16),
        baselines=measure_baselines(problem, context),
        engine=engine,
        validation=validation,
    )
    answered = Answered(with_tables(answer, context), context.run_statistics())
    return InOnePrecision(worst, validation, answered)


def measure_fp32(state: RunState, context: Context) -> InOnePrecision | None:
    """Everything in FP32 on the engine, validated; None where it is wrong."""
    engine = state.engine
    if engine is None or not engine.fp32.verdict.passed:
        return None
    test = next_test(state.problem, context)
    plan = engine.fp32.plan
    return InOnePrecision(engine.fp32, validate(state.problem, context, context.judges, plan, test))


def with_tables(state: RunState, context: Context) -> RunState:
    """``state`` with the tables that show the answer beside others, and input by input."""
    answer = plan_of_answer(state, context)
    tradeoff = None
    if answer is not None:
        note_left_overflowing(state, context, answer)
        if not state.out_of_time:
            note_blank(state.problem, context, answer)
    if answer is not None and not state.out_of_time:
        with suppress(BudgetSpentError):  # the answer is there, and what shows it can wait
            tradeoff = _tradeoff(state, context, answer)
    return replace(state, inputs=inputs_table(state, context, answer), tradeoff=tradeoff)


def _tradeoff(state: RunState, context: Context, answer: PrecisionPlan) -> Tradeoff | None:
    """The trade-off curve; None where no reduced plan was measured."""
    problem, triage = state.problem, state.triage
    if state.baselines is None or problem.settings.fitted or answer.base is not problem.base.base:
        return None
    context.observer.step("tradeoff")
    base, ranking = problem.base, list[str]()
    strength: Mapping[str, float] = {}
    if triage is not None:
        base, ranking = triage.base, ranked_by_worth(context.costs, triage)
        strength = triage.sensitivity.strength
    found = measure_tradeoff(problem, context, base, ranking, answer, strength, state.validation)
    if found.knee is not None:
        with suppress(BudgetSpentError):  # the table is there
            context.evaluator.evaluate(found.knee)  # its row says its score on the given inputs
    return found
