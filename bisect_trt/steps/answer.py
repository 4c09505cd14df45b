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
from bisect_trt.base.limits import give_back
from bisect_trt.base.outcomes import (
    Cause,
    Diagnosis,
    Finding,
    InputKind,
    Reproducibility,
    Validation,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.result import Evaluation, meets
from bisect_trt.metrics.arrays import all_finite
from bisect_trt.model.outputs import unreached
from bisect_trt.steps.baselines import Baselines, traced_inputs
from bisect_trt.steps.confirm import Judgement
from bisect_trt.steps.context import Context, RunStatistics
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.engine_diagnosis import (
    begin_further,
    not_reproducible,
    over_processes,
    runs_of,
)
from bisect_trt.steps.failing_inputs import UnseenInputs, note_held
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
    requirements = known.problem.requirements
    # A metric that sees all inputs at once gives none of them a score.
    alone = any(item.metric not in requirements.collective for item in requirements.items)
    named = [
        *((InputKind.GIVEN, s) for s in known.problem.samples),
        *((InputKind.HOLDOUT, s) for s in known.problem.holdout),
    ]
    plans = {"reduced": known.base.with_pins(())} | ({"plan": answer} if answer else {})
    for kind, sample in named:
        row: dict[str, object] = {"input": sample.name, "kind": kind}
        for label, plan in plans.items():
            for evaluator in context.evaluators:
                asked = context.plan_for(evaluator, plan)
                result = evaluator.known(asked, sample)
                if result is not None:
                    score = result.score if alone else math.nan
                    row[f"{label}_score_{evaluator.runner.name}"] = score
        scores = [v for k, v in row.items() if k.startswith("plan_score_")]
        judge = row.get(f"plan_score_{context.judge.runner.name}")
        decided = [judge] if context.engine is not None and judge is not None else scores
        if decided and not requirements.of_sets:
            row["passed"] = all(float(str(s)) <= 1.0 for s in decided)
        row |= {"shapes": json.dumps(sample.shapes), "sha256": sample.digest}
        rows.append(row)
    return pd.DataFrame(rows)


_SHOWN = 4

_WRONG, _ON = 0.1, 4
"""Share of its largest value by which a layer may be off, up to so many behind the infinities."""


def note_left_overflowing(
    problem: Problem, known: RunState, context: Context, answer: PrecisionPlan
) -> None:
    """Say which layers give infinities in the model that ``answer`` writes, though their inputs are
    right: the outputs may hide it (a normalisation that divides by infinity gives zeros), a mask is
    meant so.
    """
    if known.baselines is None or not problem.settings.precision.is_storage:
        return
    table = known.baselines.layers
    reduced = set(problem.names) - answer.pinned - unreached(problem.graph)
    left = [
        str(name) for name in table.loc[table["overflows"].astype(bool), "layer"] if name in reduced
    ]
    if not left:
        return
    count = "1 layer leaves" if len(left) == 1 else f"{len(left)} layers leave"
    where = f"{problem.settings.precision.value.upper()}'s range with the plan too"
    message = f"{count} {where}: {some_of(left, _SHOWN)}; "
    shown = [context.evaluator.known(answer, sample) for sample in problem.samples]
    missed = sum(found is not None and not meets(found, 1.0) for found in shown)
    lost = [] if missed else _lost(problem, context, answer)
    if missed:
        message += f"fatal on {missed} of {len(shown)} inputs, which need not meet the requirement"
    elif lost:
        message += (
            f"what {some_of(lost, _SHOWN)} should give is lost there. The requirement does not see "
            "it: ask for more, or keep them with --keep-fp32"
        )
    else:
        message += (
            "harmless on these inputs: what reads the infinities bounds or discards them, and the "
            "outputs are right"
        )
    context.note(Finding("overflow-lost" if lost else "left-overflowing", left[0], message))


def _lost(problem: Problem, context: Context, answer: PrecisionPlan) -> list[str]:
    """The layers that are wrong because of what leaves the range before them, though they are
    finite again: a normalisation that divides by infinity gives zeros.
    """
    samples = traced_inputs(problem, context)
    key = context.evaluator.key("lost", answer.digest, *(sample.digest for sample in samples))
    recalled = context.cache.recall(key)
    if recalled is not None:
        return [str(name) for name in recalled[0]]
    reads = {layer.name: set(layer.inputs) for layer in problem.layers}
    lost: list[str] = []
    for sample in samples:
        after = dict[str, int]()  # tensors, and how many layers behind an infinite one they are
        for values in context.emulator.trace(sample, answer, rtx_sums=context.rtx_sums):
            true, made = values.reference, values.accumulated
            if not all_finite(true):
                continue
            behind = min((after[n] for n in reads.get(values.layer, ()) if n in after), default=_ON)
            if not all_finite(made):
                after[values.tensor] = 0
            elif behind < _ON and true.size:
                after[values.tensor] = behind + 1
                off, largest = np.abs(made - true).max(), np.abs(true).max()
                if off > _WRONG * largest:
                    lost.append(values.layer)
    found = list(dict.fromkeys(lost))
    context.cache.record_later(Row(key, "lost", found))
    return found


def best_so_far(
    known: RunState, run_statistics: RunStatistics
) -> tuple[PrecisionPlan, Evaluation] | None:
    """The plan, its pins in FP32, with the evaluation that says that it passes; None if none is
    known to pass yet.
    """
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
    """``known`` when the user has ended the search, with the smallest set that the first emulator
    passed on all that was searched with. Nothing is run for it: it holds on the given inputs, and
    neither the second emulator nor new copies may have a word on it.
    """
    problem, triage, pins = known.problem, known.triage, context.in_hand
    if known.bisection is not None or known.judgement is not None:
        return _with_validation(known, context)
    if triage is None or context.engine is not None:
        return _with_validation_of_best(known, context)
    if problem.settings.fitted:
        run_statistics = context.run_statistics()
        pins = run_statistics.smallest_passing(triage.base, run_statistics.emulators[:1])
    if pins is None or not context.evaluator.knows(plan := triage.base.with_pins(pins)):
        return _with_validation_of_best(known, context)
    context.evaluator.evaluate(plan)
    validation = validation_as_known(problem, context, plan)
    ranked = not problem.settings.fitted
    found = Bisection(pins, {}, triage.limit, False, validation=validation, ranked=ranked)
    return known.with_(bisection=found)


def _with_validation_of_best(known: RunState, context: Context) -> RunState:
    """``known`` before a set was in hand, with what is known of the best plan until then."""
    best = best_so_far(known, context.run_statistics())
    if best is None or known.settled is not None:
        return known
    return known.with_(validation=validation_as_known(known.problem, context, best[1].plan))


def _with_validation(known: RunState, context: Context) -> RunState:
    """``known`` of a search that had ended, with what is known of its answer where its test had not
    ended.
    """
    validation, plan = known.validation, None
    if known.judgement is not None and not known.judgement.passed:
        return known
    if known.judgement is not None:
        validation, plan = validation or known.judgement.validation, known.judgement.plan
    elif known.bisection is not None and context.engine is None:
        validation, plan = (
            validation or known.bisection.validation,
            known.base.with_pins(known.bisection.pinned),
        )
    if validation is None and plan is not None:
        validation = validation_as_known(known.problem, context, plan)
    return known.with_(validation=validation)


def end_search(known: RunState, context: Context) -> RunState:
    """``known`` when the budget has ended the search, after asking every judge of what passed the
    first one; of all pins where nothing did yet.
    """
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
    """The test of the plan that will be written: the search's own where that ended with one, else a
    test on new copies; None where no plan meets the requirement.
    """
    if known.validation is not None:
        return known.validation
    if known.judgement is not None and known.judgement.validation is not None:
        return known.judgement.validation
    if known.judgement is None and known.bisection is not None and known.bisection.validation:
        return known.bisection.validation
    if known.baselines is None and known.settled is None:
        # The budget ended the run before a draw could be priced.
        best = best_so_far(known, context.run_statistics())
        return (
            validation_as_known(known.problem, context, best[1].plan) if best is not None else None
        )
    plan = plan_of_answer(known, context)
    if plan is None or known.baselines is None:
        return None
    context.observer.step("what it holds on")
    settings, judged = known.problem.settings, known.judgement
    if settings.fitted and known.bisection is not None and context.engine is None:
        context.emulator.release()  # hundreds of sets have filled it, and the test is of one
        give_back()
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
    before = context.time.endings
    validation = validate(known.problem, context, context.judges, plan, test)
    kinds = (
        [validation.perturbed, validation.augmented]
        if validation.wanted_of_augmented
        else [validation.perturbed]
    )
    fewest = min(kind.tested for kind in kinds)
    if fewest < wanted and (test.copies < wanted or context.time.endings > before):
        _note_budget(context, validation, wanted)
    return validation


def _note_budget(context: Context, validation: Validation, wanted: int) -> None:
    """Say on how many of the ``wanted`` copies of a kind the budget let the answer be tested."""
    made = (
        f"{validation.perturbed.tested} perturbed copies and "
        f"{validation.augmented.tested} augmented inputs"
    )
    message = (
        f"the budget of {context.time.minutes:g} minutes left time to test the plan on {made}, of "
        f"{wanted} of a kind: the same command with more minutes goes on"
    )
    context.note(Finding("budget", "", message))


def begin_reproducibility(known: RunState, context: Context) -> None:
    """Begin the engines that :func:`with_reproducibility` will ask for."""
    result = _stood_on(known)
    if result is not None and result.verdict.passed:
        begin_further(context, result.plan)


def with_reproducibility(known: RunState, context: Context) -> RunState:
    """With the reproducibility of the engine that the answer stands on, and the diagnosis that
    takes the answer back where its runs decide differently.
    """
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
    engine = known.engine
    if engine is None or (
        known.settled is not None and known.settled.cause is Cause.NOT_REPRODUCIBLE
    ):
        return None
    if known.judgement is not None:
        return known.judgement.result
    if known.settled is not None and known.settled.cause is Cause.NONE:
        return engine.base
    if known.settled is not None and known.settled.cause is Cause.TF32:
        return engine.fp32
    return None


def _inconclusive(known: RunState) -> bool:
    """Whether the budget ended the search before any step came to an answer."""
    decided = known.bisection if known.engine is None else known.judgement
    return known.out_of_time and known.settled is None and decided is None


def plan_of_answer(known: RunState, context: Context) -> PrecisionPlan | None:
    """The plan with the precision that its pins really run in; None if none was found to pass."""
    if known.not_reproducible is not None:
        return None
    if _inconclusive(known):
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
        note_left_overflowing(known.problem, known, context, answer)
    if answer is not None and not known.out_of_time:
        with suppress(BudgetSpentError):  # the answer is there, and what shows it can wait
            note_held(known.problem, context, answer)
            tradeoff = _tradeoff(known, context, answer)
    return known.with_(inputs=inputs_table(known, context, answer), tradeoff=tradeoff)


def _tradeoff(known: RunState, context: Context, answer: PrecisionPlan) -> pd.DataFrame | None:
    """None where nothing was measured, the plan shall be fitted to its inputs, or none is offered
    but FP32 as a whole.
    """
    problem, triage, baselines = known.problem, known.triage, known.baselines
    if baselines is None or problem.settings.fitted or answer.base is not problem.base.base:
        return None
    context.observer.step("tradeoff")
    base, ranking = (problem.base, ()) if triage is None else (triage.base, triage.ranking)
    found = measure_tradeoff(problem, context, base, ranking, answer, known.validation)
    for finding in found.cut_short():
        context.note(finding)
    return found.table
