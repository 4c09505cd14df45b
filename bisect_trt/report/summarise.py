"""Makes the record of a run from its state."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd

from bisect_trt.base.display import printable
from bisect_trt.base.limits import thread_count
from bisect_trt.base.outcomes import (
    AS_IS,
    BF16,
    FITTED,
    FP32,
    PLAN,
    REPAIRED,
    WRITTEN_OUT,
    Cause,
    Diagnosis,
    Finding,
    ValidationVerdict,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.model.inputs import dynamic_inputs
from bisect_trt.model.patterns import find_patterns
from bisect_trt.report.choices import Choice
from bisect_trt.report.first_lines import answer_lines
from bisect_trt.report.html import as_fragment
from bisect_trt.report.markdown import answer_as_markdown
from bisect_trt.report.record import EngineFacts, MarkingEffect, Record, SearchFacts
from bisect_trt.report.repairs import RepairFacts, facts_of
from bisect_trt.report.rows import choices_of, is_slower, list_judged, timed, with_knee
from bisect_trt.report.tables import (
    cost_table,
    findings_of,
    in_words,
    layers_table,
    outputs_table,
    pins_table,
    requirements_table,
    search_table,
)
from bisect_trt.report.text import judged_by
from bisect_trt.report.weights import weights_of
from bisect_trt.search.find import count_violations, information_bound, ranking_auc, regime_of
from bisect_trt.settings import as_command, as_word
from bisect_trt.steps.answer import Answered, RunState, best_so_far
from bisect_trt.steps.context import RunStatistics
from bisect_trt.steps.fastest import TIMED_KINDS, fastest_right
from bisect_trt.steps.select_fitted import Bisection
from bisect_trt.steps.sensitivity import suspicion_of
from bisect_trt.version import __version__


def engine_facts(state: RunState, run_statistics: RunStatistics) -> EngineFacts | None:
    """Facts on the engine for run.json; None where the emulator judged."""
    baselines, judged = state.engine, state.judgement
    if baselines is None:
        return None
    table = baselines.table
    marked = table.marked_score if table is not None else math.nan
    return EngineFacts(
        fp32_is=baselines.identity.value,
        fp32_likeness_to_tf32=baselines.fingerprint,
        pins_emulated_as=baselines.pin_precision.value,
        second_emulator=run_statistics.emulators[1],
        layer_errors_from=table.how if table is not None else None,
        marked_batches=table.batches if table is not None else None,
        marking_effect=MarkingEffect(table.unmarked_score, marked) if table is not None else None,
        builds_beyond_baselines=judged.builds if judged is not None else None,
        tolerance_share=judged.limit if judged is not None else None,
        pins_added_by_engine=sorted(judged.repaired) if judged is not None else None,
        out_of_builds=judged.out_of_budget if judged is not None else None,
        reproducibility=state.reproducibility or baselines.reproducibility,
        candidates=judged.candidates if judged is not None else (),
        times=state.timing.of_choices() if state.timing is not None else (),
    )


def search_facts(
    state: RunState, run_statistics: RunStatistics, plan: PrecisionPlan
) -> SearchFacts | None:
    """The kind of the set of pins, and the cost of the search; None without pins."""
    if not plan.pinned:
        return None
    problem, judged = state.problem, state.judgement
    bisection: Bisection | None = judged.bisection if judged is not None else state.bisection
    ranked = bisection is not None and bisection.ranked
    scores = dict(state.triage.sensitivity.scores) if state.triage is not None else {}
    pinned = [name for name in problem.names if name in plan.pinned]
    regime = regime_of(len(pinned), len(problem.names))
    suspicion = suspicion_of(state.baselines.layers, scores) if state.baselines is not None else {}
    first = run_statistics.emulators[0]
    # One emulator only: two may disagree on a set, which is no violation.
    searched = [p for p in run_statistics.log if p.plan.base is plan.base and p.runner == first]
    # Evaluations on a search set end early and at shares of the tolerance, so they do not compare.
    comparable = [(p.plan.pinned, p.verdict.passed) for p in searched if p.on_given]
    return SearchFacts(
        regime=regime.value if regime is not None else "",
        spread_over=len(pinned),
        blocks=in_words(pinned, find_patterns(problem.graph), problem.layers),
        # The ranking that pins were cut from would score itself.
        suspicion_auc=math.nan if ranked else ranking_auc(suspicion, pinned),
        emulated_evaluations=len({p.plan for p in searched}),
        information_bound=information_bound(len(problem.names), len(pinned)),
        violations=count_violations(comparable),
        superfluous_pins_dropped=bisection.violations if bisection is not None else 0,
    )


@dataclass(frozen=True, repr=False)
class Result(Record):
    __doc__ = Record.__doc__  # the same record, which can show itself in a notebook

    def __repr__(self) -> str:
        about = f"{self.model} at {self.precision.value.upper()}"
        lines = [about, *answer_lines(self), judged_by(self)]
        return "\n".join(printable(line) for line in lines)

    def _repr_html_(self) -> str:
        return as_fragment(self)

    def _repr_markdown_(self) -> str:
        return "\n".join(answer_as_markdown(self)) + "\n"


@dataclass(frozen=True)
class _Answer:
    """The plan to write."""

    plan: PrecisionPlan  # itself
    final: Evaluation | None  # its last evaluation
    proof: Mapping[str, Evaluation]  # the evaluation without each pin
    complete: bool  # whether the search ended
    limit: float = 1.0  # share of the tolerance that emulators were held to
    ranked: bool = False  # whether pins were cut from a ranking


def summarise(
    state: RunState, run_statistics: RunStatistics, seconds: float, command: str = "run"
) -> Result:
    """Makes the record of a run, or of ``compare`` by ``command``."""
    if command == "run":
        return _with_choices(_of_graph(state, run_statistics, seconds), state, run_statistics)
    diagnosis = state.diagnosis or Diagnosis(Cause.UNKNOWN, "Not searched: error tables only.")
    answer = _answer(state, run_statistics, diagnosis)
    found = _result(state, run_statistics, diagnosis, answer, seconds)
    return replace(found, complete=False, command=_command(state, run_statistics, command))


def _of_graph(state: RunState, run_statistics: RunStatistics, seconds: float) -> Result:
    """The record of a run on the original graph, or of its steps on the repaired one."""
    if state.out_of_time:
        return _summarise_cut_short(state, run_statistics, seconds)
    diagnosis = state.diagnosis
    assert diagnosis is not None, "a run ends with a diagnosis"
    answer = _answer(state, run_statistics, diagnosis)
    return _result(state, run_statistics, diagnosis, answer, seconds)


def summarise_interrupted(
    state: RunState, run_statistics: RunStatistics, seconds: float
) -> Result | None:
    """Makes the record of an interrupted run; None without a plan to write."""
    if state.validation is None and state.judgement is None and state.bisection is not None:
        state = replace(state, validation=state.bisection.validation)
    found = state.diagnosis or Diagnosis(Cause.UNKNOWN, "Interrupted before the cause was known.")
    answer = _answer_so_far(state, run_statistics, found)
    if answer is None or answer.final is None:
        if state.repaired is None and state.fitted is None:
            return None
        # Another graph has an answer already.
        answer = _Answer(state.base.with_pins(state.problem.names), None, {}, False)
    sentence = (
        f"{found.sentence} Interrupted: this is the best plan so far; run the same command again "
        "to go on."
    )
    result = _result(state, run_statistics, replace(found, sentence=sentence), answer, seconds)
    return _with_choices(result, state, run_statistics)


def _summarise_cut_short(state: RunState, run_statistics: RunStatistics, seconds: float) -> Result:
    """Makes the record of a run whose budget ended the search."""
    found = state.diagnosis or Diagnosis(Cause.UNKNOWN, "The cause was not known yet.")
    answer = _answer_so_far(state, run_statistics, found)
    so_far = "this is the best plan so far"
    if answer is None or answer.final is None:
        answer = _Answer(PrecisionPlan(Precision.FP32), None, {}, False)
        so_far = "no plan is known to pass yet"
    elif state.diagnosis is None and answer.final.verdict.passed and not answer.plan.chosen:
        # It passes without any chosen pin, so no smaller set is left to search for.
        name = state.problem.settings.precision.value.upper()
        found = Diagnosis(Cause.NONE, f"{name} meets the requirement on the given inputs.")
        answer = replace(answer, complete=True)
    minutes = state.problem.settings.budget or 0.0
    sentence = (
        f"{found.sentence} The budget of {minutes:g} minutes ended the search: {so_far}; run the "
        "same command again to go on."
    )
    return _result(state, run_statistics, replace(found, sentence=sentence), answer, seconds)


def _answer_so_far(
    state: RunState, run_statistics: RunStatistics, found: Diagnosis
) -> _Answer | None:
    """The answer of the steps if they reached one, else the best plan evaluated."""
    settled = state.settled is not None
    if settled or state.judgement or (state.bisection is not None and state.engine is None):
        return _answer(state, run_statistics, found)
    best = best_so_far(state, run_statistics)
    return _Answer(*best, {}, False) if best is not None else None


def _answer(state: RunState, run_statistics: RunStatistics, diagnosis: Diagnosis) -> _Answer:
    """The answer of the last step that has one: engine, search, baselines."""
    base, held = state.problem.base, state.problem.held_pins
    if state.judgement is not None:
        judged = state.judgement
        emulated = judged.bisection.proof if judged.bisection is not None else {}
        pinned = judged.plan.pinned
        # The engine's proof of a pin counts more than the emulator's.
        proof = {**{n: r for n, r in emulated.items() if n in pinned}, **judged.proof}
        complete = judged.passed and all(
            name in proof for name in pinned - held - judged.plan.inherited
        )
        ranked = judged.bisection is not None and judged.bisection.ranked
        return _Answer(judged.plan, judged.result, proof, complete, judged.limit, ranked)
    if state.bisection is not None:
        # state.base pins in the precision that was emulated, such as TF32; the answer in FP32.
        found, plan = state.bisection, state.base.with_pins(state.bisection.pinned)
        final = run_statistics.worst_of(plan, run_statistics.emulators)
        answer = base.with_pins(found.pinned)
        return _Answer(answer, final, found.proof, found.complete, found.limit, found.ranked)
    fp32 = PrecisionPlan(Precision.FP32)
    judge = state.engine or state.baselines
    if judge is not None and diagnosis.cause is Cause.NONE:
        emulated_base = run_statistics.worst_of(base, run_statistics.emulators)
        reduced = state.engine.base if state.engine is not None else emulated_base
        return _Answer(base, reduced, {}, True)
    if judge is not None and diagnosis.cause is Cause.TF32:
        return _Answer(fp32, judge.fp32, {}, True)
    return _Answer(fp32, None, {}, True)


def _result(
    state: RunState,
    run_statistics: RunStatistics,
    diagnosis: Diagnosis,
    answer: _Answer,
    seconds: float,
) -> Result:
    baselines, engine = state.baselines, state.engine
    searched = state.bisection is not None or state.judgement is not None
    emulated, engines = _shown(state, run_statistics, answer, searched)
    shown = {**emulated, **engines}
    before = engine.base if engine is not None else baselines.reduced if baselines else None
    final, texts = answer.final, state.problem.requirements.texts
    limits = dict.fromkeys(run_statistics.emulators, answer.limit)
    return Result(
        **_of_run(state, run_statistics),
        cause=diagnosis.cause,
        sentence=diagnosis.sentence,
        causes=diagnosis.all_causes,
        passed=final is not None and final.verdict.passed and state.not_reproducible is None,
        complete=answer.complete,
        ranked=answer.ranked,
        plan=answer.plan,
        score=final.score if final is not None else math.nan,
        base_score=before.score if before is not None else math.nan,
        layers=layers_table(state, answer.plan),
        outputs=outputs_table(shown),
        search=search_table(run_statistics.log),
        pins=pins_table(
            state.problem.layers, answer.plan, answer.proof, run_statistics.log, limits
        ),
        cost=cost_table(engines),
        by_requirement=requirements_table(
            texts,
            _judged(state, run_statistics, before),
            _judged(state, run_statistics, final),
            shown,
        ),
        findings=_findings(state, run_statistics, answer.plan),
        search_facts=search_facts(state, run_statistics, answer.plan) if searched else None,
        seconds=round(seconds, 3),  # as run.json has it, so that a record read back is equal
    )


def _with_choices(own: Result, state: RunState, run_statistics: RunStatistics) -> Result:
    """The best of the answers, with what another tool's list is worth beside it."""
    found = _with_best(own, state, run_statistics)
    judged = list_judged(state, found.choice_rows)
    return found if judged is None else replace(found, findings=[*found.findings, judged])


def _with_best(own: Result, state: RunState, run_statistics: RunStatistics) -> Result:
    """The best of the answers on the graph as it is, repaired, and with fitted weights."""
    facts = RepairFacts() if state.repair is None else facts_of(state.repair, state.problem)
    own = replace(own, repair=facts, weights=weights_of(state.weights))
    others = {}
    answers: dict[str, Answered] = {}
    in_bf16 = state.bf16.answered if state.bf16 is not None else None
    for name, answered in ((REPAIRED, state.repaired), (FITTED, state.fitted), (BF16, in_bf16)):
        # Without baselines the budget has left nothing to say of it.
        if answered is None or answered.state.baselines is None:
            continue
        found = _of_graph(answered.state, answered.run_statistics, own.seconds)
        # Fitted weights that no layer uses are no choice.
        if name != FITTED or _is_of_use(found):
            others[name], answers[name] = found, answered
    rows = choices_of(state, own, others)
    rows = timed(rows, state, run_statistics, others)
    # Of equal answers the one that changes less: the original, then the repaired graph.
    best, name = own, ""
    for other in (n for n in others if _is_of_use(others[n]) and _is_within(answers[n], others[n])):
        its_row, best_row = _row(rows, other), _row(rows, name or _name_of(own))
        if other == BF16 and not _is_measured_slower(best_row, its_row):
            continue  # of equal times the one that keeps more digits
        if _is_better(others[other], best, its_row, best_row):
            best, name = others[other], other
    answered = answers.get(name)
    its, its_runs = (
        (answered.state, answered.run_statistics) if answered else (state, run_statistics)
    )
    rows = timed(with_knee(rows, its, its_runs, _row(rows, name)), state, run_statistics, others)
    fp32 = _in_fp32(state, run_statistics, own)
    if fp32 is not None and _rank(fp32) >= _rank(best):
        rows = [replace(choice, recommended=choice.name == FP32) for choice in rows]
        return replace(fp32, choice_rows=rows)
    if not name:
        return replace(own, choice_rows=_recommending(rows, own))
    rows = [replace(choice, recommended=choice.name == name) for choice in rows]
    return replace(_on_other(own, best, name), choice_rows=rows)


def _is_measured_slower(row: Choice | None, other: Choice | None) -> bool:
    """Whether ``row`` is slower than ``other``, by an engine's clock."""
    if row is None or other is None or row.is_estimated or other.is_estimated:
        return False
    return is_slower(row, other)


def _in_fp32(state: RunState, run_statistics: RunStatistics, own: Result) -> Result | None:
    """The answer where FP32 is as fast as what is right: no layer is reduced; None elsewhere."""
    if state.fp32 is None or state.timing is None:
        return None
    plan, timing = state.problem.base.with_pins(state.problem.names), state.timing
    best = fastest_right(state, timing)
    if best is None:
        return None
    sentence = (
        f"{own.sentence} Reduced precision buys nothing here: FP32 takes {timing.ms(FP32):.3f} ms, "
        f"{best} {timing.ms(best):.3f} ms."
    )
    answer = _Answer(plan, state.fp32.evaluation, {}, True)
    diagnosis = Diagnosis(own.cause, sentence, tuple(own.causes))
    state = replace(state, validation=state.fp32.validation)
    return replace(
        _result(state, run_statistics, diagnosis, answer, own.seconds),
        repair=own.repair,
        weights=own.weights,
    )


def _is_of_use(result: Result) -> bool:
    """Whether the answer on another graph is met with some layer reduced."""
    all_fp32 = len(result.pinned) == result.layer_count
    return result.is_met and result.plan.base is not Precision.FP32 and not all_fp32


def _is_within(answered: Answered, result: Result) -> bool:
    """Whether an answer on another graph takes no more time than ``--max-cost`` allows."""
    percent, costs = answered.state.problem.settings.max_cost, answered.run_statistics.costs
    if percent is None or costs is None:
        return True
    # What a repair keeps in FP32 is in no set that the search has chosen. Sums differ by rounding.
    return costs.predicted(result.plan) <= (percent / 100.0 + 1e-9) * costs.reduced


def _is_better(new: Result, old: Result, new_row: Choice | None, old_row: Choice | None) -> bool:
    """Whether an answer is better: met, its validation's word, its time, then fewer layers."""
    ranks = _rank(new), _rank(old)
    if ranks[0] != ranks[1] or new_row is None or old_row is None:
        return ranks[0] > ranks[1]
    if is_slower(new_row, old_row) or is_slower(old_row, new_row):
        return is_slower(old_row, new_row)
    # What a rule keeps in FP32 whatever the search finds is no choice of the answer's.
    return len(new.plan.chosen) < len(old.plan.chosen)


def _rank(result: Result) -> tuple[bool, int]:
    """How sure an answer is: met, and the word of its validation."""
    order = [ValidationVerdict.OVERFITTED, ValidationVerdict.INCONCLUSIVE]
    order.append(ValidationVerdict.VALIDATED)
    word = result.validation.word if result.validation is not None else None
    return result.is_met, order.index(word) if word is not None else -1


def _row(rows: Sequence[Choice], name: str) -> Choice | None:
    return next((row for row in rows if row.name == name), None)


def _name_of(own: Result) -> str:
    """The row of the answer on the original graph."""
    if own.plan.base is Precision.FP32 or len(own.pinned) == own.layer_count:
        return FP32
    return PLAN if own.plan.chosen else AS_IS


def _recommending(choices: Sequence[Choice], own: Result) -> list[Choice]:
    """``choices`` with the row of the answer on the original recommended, if that is met."""
    if not own.is_met:
        return list(choices)
    originals = [c for c in choices if c.name in (AS_IS, PLAN) and c.plan == own.plan]
    name = originals[0].name if originals else FP32
    return [replace(choice, recommended=choice.name == name) for choice in choices]


def _on_other(own: Result, theirs: Result, label: str) -> Result:
    """The answer on another graph, with what the run says of the original."""
    outputs = theirs.outputs
    if len(outputs):  # the budget may have ended the run before its baselines
        outputs = outputs.assign(baseline=f"{label} " + outputs["baseline"])
    by_requirement = theirs.by_requirement.copy()
    if len(own.by_requirement) == len(by_requirement):
        pairs = zip(own.by_requirement["baselines"], by_requirement["baselines"], strict=True)
        by_requirement["baselines"] = pd.Series(
            [mine | {f"{label} {name}": new[name] for name in new} for mine, new in pairs],
            dtype=object,
        )
        by_requirement["reduced_score"] = list(own.by_requirement["reduced_score"])
    counts = Counter(own.evaluations)
    counts.update(theirs.evaluations)
    return replace(
        theirs,
        model=own.model,
        precision=own.precision,
        engine=_with_own_times(theirs.engine, own.engine),
        findings=[*theirs.findings, *(f for f in own.findings if f.kind in TIMED_KINDS)],
        cause=own.cause,
        sentence=own.sentence,
        causes=own.causes,
        error_share=own.error_share,
        base_score=own.base_score,
        outputs=pd.concat([own.outputs, outputs], ignore_index=True),
        by_requirement=by_requirement,
        evaluations=dict(counts),
        new_evaluations=own.new_evaluations + theirs.new_evaluations,
        sensitivity_runs=own.sensitivity_runs + theirs.sensitivity_runs,
        out_of_time=own.out_of_time,
        interrupted=own.interrupted,
        command=own.command,
        model_digest=own.model_digest,
        searched=own.searched,
        repair=own.repair,
        weights=own.weights,
        original_layers=own.layers,
        original_tradeoff=own.tradeoff,
    )


def _with_own_times(theirs: EngineFacts | None, own: EngineFacts | None) -> EngineFacts | None:
    """The facts on another graph's engine, with the times that the whole run took."""
    if theirs is None or own is None:
        return theirs
    return replace(theirs, times=own.times, candidates=theirs.candidates or own.candidates)


def _of_run(state: RunState, run_statistics: RunStatistics) -> dict[str, Any]:
    """The fields of the record that do not depend on the answer."""
    problem, settings = state.problem, state.problem.settings
    triage_runs = state.triage.sensitivity.runs if state.triage is not None else 0
    return {
        "model": problem.model.name,
        "precision": settings.precision,
        "runner": run_statistics.judge,
        "layer_count": len(problem.layers),
        "requirements": problem.requirements.texts,
        "samples": [s.name for s in problem.samples],
        "evaluations": run_statistics.evaluations,
        "new_evaluations": run_statistics.new_evaluations,
        "sensitivity_runs": triage_runs,
        "folder": run_statistics.folder,
        "versions": {**versions(), **run_statistics.versions},
        "engine": engine_facts(state, run_statistics),
        "metrics": [as_word(metric) for metric in settings.metric],
        "validation": state.validation,
        "inputs": state.inputs if state.inputs is not None else pd.DataFrame(),
        "tradeoff": state.tradeoff.table if state.tradeoff is not None else pd.DataFrame(),
        "error_share": state.tradeoff.error_share if state.tradeoff is not None else None,
        "given_share": settings.share_of_given,
        "strict": settings.strict,
        "budget_minutes": settings.budget,
        "threads": thread_count(settings.threads),
        "out_of_time": state.out_of_time,
        "interrupted": state.interrupted,
        "command": _command(state, run_statistics),
        "model_digest": problem.model.digest,
        "dynamic_inputs": dynamic_inputs(problem.graph.proto),
        "searched": problem.searched,
        "scales": problem.requirements.scales,
        "judged": problem.judged,
    }


def _command(state: RunState, run_statistics: RunStatistics, command: str = "run") -> str:
    """The command that repeats the run in the same folder."""
    settings = replace(state.problem.settings, out=run_statistics.folder, fresh=False)
    return as_command(settings, command)


def _shown(
    state: RunState, run_statistics: RunStatistics, answer: _Answer, searched: bool
) -> tuple[dict[str, Evaluation], dict[str, Evaluation]]:
    """The evaluations of the outputs table by label: the emulators', and the engine's."""
    emulated = state.baselines.by_label() if state.baselines is not None else {}
    engines = state.engine.by_label() if state.engine is not None else {}
    if state.judgement is not None:
        engines[f"{run_statistics.judge} plan"] = state.judgement.result
    if state.mixed is not None:
        shown = emulated if state.engine is None else engines
        shown[state.mixed.label] = state.mixed.evaluation
    if searched or not answer.complete:
        plan = state.base.with_pins(answer.plan.pinned)
        labels = ("plan", "plan, second emulator")
        for label, runner in zip(labels, run_statistics.emulators, strict=True):
            found = run_statistics.of(runner, plan)
            if found is not None:
                emulated[label] = found
    return emulated, engines


def _findings(state: RunState, run_statistics: RunStatistics, plan: PrecisionPlan) -> list[Finding]:
    """The findings of every step, in order.

    The first reduced layer that TensorRT computes in steps is said with the answer.
    """
    found = [
        *state.problem.findings,
        *run_statistics.findings,
        *findings_of(run_statistics.engine_results),
    ]
    kept: list[Finding] = []
    for finding in found:
        if finding.kind == WRITTEN_OUT:
            if finding.where in plan.pinned:
                continue
            is_first = not any(other.kind == WRITTEN_OUT for other in kept)
            finding = replace(finding, weighty=is_first)
        kept.append(finding)
    return kept


def _judged(
    state: RunState, run_statistics: RunStatistics, result: Evaluation | None
) -> list[Evaluation]:
    """Every judge's evaluation of the plan of ``result``; empty for None."""
    if result is None:
        return []
    judges = run_statistics.emulators if state.engine is None else (run_statistics.judge,)
    found = (run_statistics.of(runner, result.plan) for runner in judges)
    return [r for r in found if r is not None]


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    return {
        "bisect-trt": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": ort.__version__,
        "pandas": pd.__version__,
    }
