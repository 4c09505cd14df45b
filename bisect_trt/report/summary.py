"""From what the stations found to the one record that all files are written from. Runs nothing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.patterns import find_patterns
from bisect_trt.probe.result import GIVEN, ProbeResult
from bisect_trt.report.pin_words import in_words
from bisect_trt.report.result import EngineFacts, ProbeEffect, Result, SearchFacts
from bisect_trt.report.tables import (
    cost_table,
    findings_of,
    outputs_table,
    pins_table,
    search_table,
)
from bisect_trt.search.facts import (
    count_violations,
    information_bound,
    ranking_auc,
    regime_of,
)
from bisect_trt.stations.bench import Ledger
from bisect_trt.stations.bisect import Bisection
from bisect_trt.stations.cut_short import best_so_far
from bisect_trt.stations.known import Known
from bisect_trt.stations.sensitivity import suspicion_of
from bisect_trt.version import __version__


@dataclass(frozen=True)
class _Answer:
    """The plan to write, the probe that says whether it meets the requirements, each pin's proof,
    and the share of the tolerance that the emulators were held to.
    """

    plan: PrecisionPlan
    final: ProbeResult | None
    proof: Mapping[str, ProbeResult]
    complete: bool
    limit: float = 1.0
    ranked: bool = False


def summarise(known: Known, ledger: Ledger, seconds: float) -> Result:
    """Everything found, as one record.

    Args:
        known: what the stations found.
        ledger: what was run for it.
        seconds: the wall time of the run.
    """
    if known.out_of_time:
        return _summarise_cut_short(known, ledger, seconds)
    diagnosis = known.diagnosis
    if diagnosis is None:
        sentence = "Not searched: error tables only."
        diagnosis = Diagnosis(Cause.ACCUMULATION, sentence)
    return _result(known, ledger, diagnosis, _answer(known, ledger, diagnosis), seconds)


def summarise_interrupted(known: Known, ledger: Ledger, seconds: float) -> Result | None:
    """What was found until an interruption.

    Args:
        known: what the stations found.
        ledger: what was run for it.
        seconds: the wall time of the run.

    Returns:
        The smallest plan that every judge passed; None if none is known to pass yet.
    """
    if known.holds is None and known.judgement is None and known.bisection is not None:
        known = known.with_(holds=known.bisection.holds)
    found = known.diagnosis or Diagnosis(Cause.UNKNOWN, "Interrupted before the cause was known.")
    answer = _answer_so_far(known, ledger, found)
    if answer is None or answer.final is None:
        return None
    sentence = (
        f"{found.sentence} Interrupted: this is the best plan so far; run the same command again "
        "to go on."
    )
    return _result(known, ledger, Diagnosis(found.cause, sentence, True), answer, seconds)


def _summarise_cut_short(known: Known, ledger: Ledger, seconds: float) -> Result:
    """What was found until the budget ended the search."""
    found = known.diagnosis or Diagnosis(Cause.UNKNOWN, "The cause was not known yet.")
    answer = _answer_so_far(known, ledger, found)
    so_far = "this is the best plan so far"
    if answer is None or answer.final is None:
        answer, so_far = (
            _Answer(PrecisionPlan(Precision.FP32), None, {}, False),
            ("no plan is known to pass yet"),
        )
    minutes = known.case.settings.budget or 0.0
    sentence = (
        f"{found.sentence} The budget of {minutes:g} minutes ended the search: {so_far}; run the "
        "same command again to go on."
    )
    return _result(known, ledger, Diagnosis(found.cause, sentence, True), answer, seconds)


def _answer_so_far(known: Known, ledger: Ledger, found: Diagnosis) -> _Answer | None:
    """The stations' own where they came to one, else the best of all probes."""
    settled = known.settled is not None
    if settled or known.judgement or (known.bisection is not None and known.engine is None):
        return _answer(known, ledger, found)
    best = best_so_far(known, ledger)
    return _Answer(*best, {}, False) if best is not None else None


def _answer(known: Known, ledger: Ledger, diagnosis: Diagnosis) -> _Answer:
    base, held = known.case.base, known.case.held_pins
    if known.judgement is not None:
        judged = known.judgement
        emulated = judged.bisection.proof if judged.bisection is not None else {}
        pinned = judged.plan.pinned
        proof = {**{n: r for n, r in emulated.items() if n in pinned}, **judged.proof}
        complete = judged.passed and all(name in proof for name in pinned - held)
        ranked = judged.bisection is not None and judged.bisection.ranked
        return _Answer(judged.plan, judged.result, proof, complete, judged.limit, ranked)
    if known.bisection is not None:
        found, plan = known.bisection, known.base.with_pins(known.bisection.pinned)
        final = ledger.worst_of(plan, ledger.emulators)
        answer = base.with_pins(found.pinned)
        return _Answer(answer, final, found.proof, found.complete, found.limit, found.ranked)
    fp32 = PrecisionPlan(Precision.FP32)
    judge = known.engine or known.baselines
    if judge is not None and diagnosis.cause is Cause.NONE:
        shown = ledger.worst_of(base, ledger.emulators)
        reduced = known.engine.base if known.engine is not None else shown
        return _Answer(base, reduced, {}, True)
    if judge is not None and diagnosis.cause is Cause.TF32:
        return _Answer(fp32, judge.fp32, {}, True)
    return _Answer(fp32, None, {}, True)


def _result(
    known: Known, ledger: Ledger, diagnosis: Diagnosis, answer: _Answer, seconds: float
) -> Result:
    case, settings = known.case, known.case.settings
    baselines, engine = known.baselines, known.engine
    shown = baselines.by_label() if baselines is not None else {}
    engines = engine.by_label() if engine is not None else {}
    if known.judgement is not None:
        engines[f"{ledger.judge} plan"] = known.judgement.result
    searched = known.bisection is not None or known.judgement is not None
    if searched or not answer.complete:
        emulated = known.base.with_pins(answer.plan.pinned)
        labels = ("plan", "plan, second emulator")
        for label, runner in zip(labels, ledger.emulators, strict=True):
            found = ledger.of(runner, emulated)
            if found is not None:
                shown[label] = found
    before = engine.base if engine is not None else baselines.lowered if baselines else None
    cost = cost_table(engines)
    findings = [
        *case.findings,
        *ledger.findings,
        *(baselines.findings if baselines is not None else ()),
        *(engine.findings if engine is not None else ()),
        *findings_of(ledger.engine_results),
    ]
    limits = dict.fromkeys(ledger.emulators, answer.limit)
    passed = answer.final is not None and answer.final.verdict.passed and known.unsteady is None
    return Result(
        model=case.model.name,
        precision=settings.precision,
        runner=ledger.judge,
        cause=diagnosis.cause,
        sentence=diagnosis.sentence,
        passed=passed,
        complete=answer.complete,
        plan=answer.plan,
        score=answer.final.score if answer.final is not None else float("nan"),
        base_score=before.score if before is not None else float("nan"),
        layer_count=len(case.layers),
        layers=_layers_table(known, answer.plan),
        outputs=outputs_table({**shown, **engines}),
        search=search_table(ledger.log),
        pins=pins_table(case.layers, answer.plan, answer.proof, ledger.log, limits),
        requirements=case.requirements.texts,
        samples=[s.name for s in case.samples],
        findings=findings,
        probes=ledger.probes,
        new_probes=ledger.new_probes,
        effect_runs=known.triage.sensitivity.runs if known.triage is not None else 0,
        seconds=seconds,
        folder=ledger.folder,
        versions={**versions(), **ledger.versions},
        cost=cost,
        engine=_engine_facts(known, ledger),
        search_facts=_search_facts(known, ledger, answer.plan) if searched else None,
        metrics=[m if isinstance(m, str) else _named(m) for m in settings.metrics],
        rewritten=list(case.rewritten),
        holds=known.holds,
        inputs=known.inputs if known.inputs is not None else pd.DataFrame(),
        frontier=known.frontier if known.frontier is not None else pd.DataFrame(),
        ranked=answer.ranked,
        holds_on=settings.share_of_given,
        budget_minutes=settings.budget,
        out_of_time=known.out_of_time,
    )


def _layers_table(known: Known, plan: PrecisionPlan) -> pd.DataFrame:
    if known.baselines is None:
        rows = [{"layer": x.name, "op": x.op, "scope": x.scope} for x in known.case.layers]
        return pd.DataFrame([{**row, "pinned": False} for row in rows])
    table = known.baselines.layers.copy()
    table["pinned"] = table["layer"].isin(plan.pinned)
    if known.triage is not None:
        table["alone_score"] = table["layer"].map(dict(known.triage.sensitivity.scores))
        places = {name: place for place, name in enumerate(known.triage.ranking, start=1)}
        table["rank"] = table["layer"].map(places)
    if known.engine is not None and known.engine.table is not None:
        table = known.engine.table.joined(table)
    return table


def _engine_facts(known: Known, ledger: Ledger) -> EngineFacts | None:
    """What run.json says of the engine beside its outputs; None where the emulator judged."""
    baselines, judged = known.engine, known.judgement
    if baselines is None:
        return None
    table = baselines.table
    marked = table.marked_score if table is not None else float("nan")
    return EngineFacts(
        fp32_is=baselines.identity.value,
        fp32_likeness_to_tf32=baselines.fingerprint,
        pins_emulated_as=baselines.pin_precision.value,
        second_emulator=ledger.emulators[1],
        layer_errors_from=table.how if table is not None else None,
        marked_batches=table.batches if table is not None else None,
        probe_effect=ProbeEffect(table.unmarked_score, marked) if table is not None else None,
        builds_beyond_baselines=judged.builds if judged is not None else None,
        tolerance_share=judged.limit if judged is not None else None,
        pins_added_by_engine=sorted(judged.repaired) if judged is not None else None,
        out_of_builds=judged.out_of_budget if judged is not None else None,
        steadiness=known.steadiness or baselines.steadiness,
    )


def _search_facts(known: Known, ledger: Ledger, plan: PrecisionPlan) -> SearchFacts | None:
    """What kind of set it is, and what the search spent; None where nothing is pinned."""
    if not plan.pinned:
        return None
    case, judged = known.case, known.judgement
    bisection: Bisection | None = judged.bisection if judged is not None else known.bisection
    alone = dict(known.triage.sensitivity.scores) if known.triage is not None else {}
    pinned = [name for name in case.names if name in plan.pinned]
    regime, spread = regime_of(pinned, alone)
    suspicion = suspicion_of(known.baselines.layers, alone) if known.baselines is not None else {}
    first = ledger.emulators[0]
    searched = [p for p in ledger.log if p.plan.base is plan.base and p.runner == first]
    # On a panel a probe ends early, and is held to a share of the tolerance: no two compare.
    alike = [(p.plan.pinned, p.verdict.passed) for p in searched if p.on == GIVEN]
    return SearchFacts(
        regime=regime.value,
        spread_over=spread,
        blocks=in_words(pinned, find_patterns(case.graph), case.layers),
        suspicion_auc=ranking_auc(suspicion, pinned),
        emulated_probes=len({p.plan for p in searched}),
        information_bound=information_bound(len(case.names), len(pinned)),
        violations=count_violations(alike),
        superfluous_pins_dropped=bisection.violations if bisection is not None else 0,
    )


def _named(metric: Callable[..., float]) -> str:
    """How a function that was given as such would be named on the command line."""
    name = getattr(metric, "__qualname__", type(metric).__qualname__)
    return f"{getattr(metric, '__module__', '')}:{name}"


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
