"""From a job's stations to the one record that all files are written from."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd

from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.patterns import find_patterns
from bisect_trt.probe.prober import ProbeResult
from bisect_trt.report.pin_words import (
    count_violations,
    in_words,
    information_bound,
    ranking_auc,
    regime_of,
)
from bisect_trt.report.result import Result, outputs_table, search_table
from bisect_trt.stations.bisect import Bisection
from bisect_trt.stations.engine_baselines import cost_table, findings_of
from bisect_trt.stations.engine_verdict import Judgement
from bisect_trt.stations.job import Job
from bisect_trt.stations.layer_errors import suspicion_of
from bisect_trt.stations.triage import Cause, Diagnosis
from bisect_trt.version import __version__


@dataclass(frozen=True)
class _Answer:
    """The plan to write, the probe that says whether it meets the requirements, and each pin's
    proof.
    """

    plan: PrecisionPlan
    final: ProbeResult | None
    proof: dict[str, ProbeResult]
    complete: bool
    limit: float = 1.0


def assemble(
    job: Job, diagnosis: Diagnosis, found: Bisection | Judgement | None, seconds: float
) -> Result:
    """Everything found, as one record."""
    answer = _answer(job, diagnosis, found)
    shown = dict(job.baselines)
    engines: dict[str, ProbeResult] = {}
    if job.engine is not None and job.engine_baselines is not None:
        engines = job.engine_baselines.by_label(job.engine.runner.name)
        if isinstance(found, Judgement):
            engines[f"{job.engine.runner.name} plan"] = found.result
    if found is not None:
        emulated = job.base.with_pins(answer.plan.pinned)
        shown["plan"] = job.prober.probe(emulated)
        shown["plan, second emulator"] = job.second.probe(emulated)
    judge = job.engine or job.prober
    base = (
        job.engine_baselines.base
        if job.engine_baselines is not None
        else job.baselines.get(job.settings.precision.value)
    )
    probers = [p for p in (job.prober, job.second, job.engine) if p is not None]
    return Result(
        model=job.material.model.name,
        precision=job.settings.precision,
        runner=judge.runner.name,
        cause=diagnosis.cause,
        sentence=diagnosis.sentence,
        passed=answer.final is not None and answer.final.verdict.passed,
        complete=answer.complete,
        plan=answer.plan,
        score=answer.final.score if answer.final is not None else float("nan"),
        base_score=base.score if base is not None else float("nan"),
        layer_count=len(job.material.layers),
        layers=_layers_table(job, answer.plan),
        outputs=outputs_table({**shown, **engines}),
        search=search_table(job.prober.log),
        pins=_pins_table(job, answer),
        requirements=job.material.requirements.texts,
        samples=[s.name for s in job.material.samples],
        findings=[
            *job.findings,
            *findings_of([r for p in probers if p is job.engine for r in p.done.values()]),
        ],
        probes={p.runner.name: len(p.done) for p in probers if p.done},
        new_probes=sum(p.new_probes for p in probers),
        effect_runs=job.sensitivity.runs if job.sensitivity is not None else 0,
        seconds=seconds,
        folder=job.folder.path,
        versions={
            **versions(),
            **(dict(job.engine.runner.versions) if job.engine is not None else {}),
        },
        cost=cost_table(engines),
        engine=_engine_facts(job, found, engines),
        search_facts=_search_facts(job, found, answer.plan),
        metrics=job.settings.metrics,
        rewritten=list(job.material.rewritten),
    )


def assemble_partial(job: Job, seconds: float) -> Result | None:
    """After an interruption: the best plan so far; None if none is known to pass yet."""
    if not job.savable:
        return None
    found = job.diagnosis or Diagnosis(Cause.UNKNOWN, "Interrupted before the cause was known.")
    sentence = f"{found.sentence} Interrupted: this is the best plan so far; run the same command again to go on."
    best: Bisection | Judgement
    if job.judge is not None and job.judge.tried:
        best = job.judge.so_far()
    else:
        pins = job.bisector.best if job.bisector is not None else frozenset(job.material.names)
        best = Bisection(pins, {}, False)
    return assemble(job, Diagnosis(found.cause, sentence, True), best, seconds)


def _answer(job: Job, diagnosis: Diagnosis, found: Bisection | Judgement | None) -> _Answer:
    base = PrecisionPlan(job.settings.precision)
    if isinstance(found, Judgement):
        proof = dict(found.bisection.proof) if found.bisection is not None else {}
        proof = {**{n: r for n, r in proof.items() if n in found.plan.pinned}, **found.proof}
        complete = found.passed and all(name in proof for name in found.plan.pinned)
        return _Answer(found.plan, found.result, proof, complete, found.limit)
    if found is not None:
        plan = job.base.with_pins(found.pinned)
        worse = max(job.prober.probe(plan), job.second.probe(plan), key=lambda r: r.score)
        final = worse if job.engine is None else None
        return _Answer(base.with_pins(found.pinned), final, dict(found.proof), found.complete)
    engine = job.engine_baselines
    if diagnosis.cause is Cause.NONE:
        return _Answer(
            base, engine.base if engine is not None else job.baselines[base.base.value], {}, True
        )
    fp32 = PrecisionPlan(Precision.FP32)
    if diagnosis.cause is Cause.TF32:
        return _Answer(fp32, engine.fp32 if engine is not None else job.baselines["fp32"], {}, True)
    return _Answer(fp32, None, {}, True)


def _layers_table(job: Job, plan: PrecisionPlan) -> pd.DataFrame:
    if job.table is None:
        return pd.DataFrame(
            [
                {"layer": x.name, "op": x.op, "scope": x.scope, "pinned": False}
                for x in job.material.layers
            ]
        )
    table = job.table.copy()
    table["pinned"] = table["layer"].isin(plan.pinned)
    if job.sensitivity is not None:
        table["alone_score"] = table["layer"].map(dict(job.sensitivity.scores))
    if job.engine_baselines is not None and job.engine_baselines.table is not None:
        table = job.engine_baselines.table.joined(table)
    return table


def _pins_table(job: Job, answer: _Answer) -> pd.DataFrame:
    """A row a pin; ``tolerance_share`` is the part of the tolerance that the proving runner was
    held to.
    """
    order = {(p.runner, p.plan): i for i, p in enumerate(job.prober.log)}
    rows: list[dict[str, Any]] = []
    for layer in job.material.layers:
        if layer.name in answer.plan.pinned:
            proof = answer.proof.get(layer.name)
            engine_proof = (
                proof is not None
                and job.engine is not None
                and proof.runner == job.engine.runner.name
            )
            rows.append(
                {
                    "layer": layer.name,
                    "op": layer.op,
                    "scope": layer.scope,
                    "proved": proof is not None,
                    "proved_on": proof.runner if proof is not None else "",
                    "tolerance_share": (1.0 if engine_proof else answer.limit)
                    if proof is not None
                    else math.nan,
                    "verdict_without": proof.verdict.value if proof is not None else "",
                    "score_without": proof.score if proof is not None else math.nan,
                    "proof_probe": order[(proof.runner, proof.plan)] if proof is not None else -1,
                }
            )
    columns = [
        "layer",
        "op",
        "scope",
        "proved",
        "proved_on",
        "tolerance_share",
        "verdict_without",
        "score_without",
        "proof_probe",
    ]
    return pd.DataFrame(rows, columns=columns)


def _engine_facts(
    job: Job, found: Bisection | Judgement | None, engines: dict[str, ProbeResult]
) -> dict[str, Any]:
    """What run.json says of the engine beside its outputs; empty where the emulator judged."""
    baselines = job.engine_baselines
    if baselines is None:
        return {}
    facts: dict[str, Any] = {
        "fp32_is": baselines.identity.value,
        "fp32_likeness_to_tf32": baselines.fingerprint,
        "pins_emulated_as": job.base.pin_precision.value,
        "second_emulator": job.second.runner.name,
        "cost": cost_table(engines).to_dict(orient="records"),
    }
    if baselines.table is not None:
        facts |= {
            "layer_errors_from": baselines.table.how,
            "marked_batches": baselines.table.batches,
            "probe_effect": {
                "unmarked_score": baselines.base.score,
                "marked_score": baselines.table.marked_score,
            },
        }
    if isinstance(found, Judgement):
        facts |= {
            "builds_beyond_baselines": found.builds,
            "tolerance_share": found.limit,
            "pins_added_by_engine": sorted(found.repaired),
            "out_of_builds": found.out_of_budget,
        }
    return facts


def _search_facts(
    job: Job, found: Bisection | Judgement | None, plan: PrecisionPlan
) -> dict[str, Any]:
    """What kind of set it is, in the model's words, and what the search spent; empty where nothing
    was searched.
    """
    if found is None or not plan.pinned:
        return {}
    alone = dict(job.sensitivity.scores) if job.sensitivity is not None else {}
    pinned = [name for name in job.material.names if name in plan.pinned]
    regime, spread = regime_of(pinned, alone)
    suspicion = suspicion_of(job.table, alone) if job.table is not None else {}
    searched = [
        p for p in job.prober.log if p.plan.base is plan.base and p.runner == job.prober.runner.name
    ]
    bisection = found.bisection if isinstance(found, Judgement) else found
    return {
        "regime": regime.value,
        "spread_over": spread,
        "blocks": in_words(pinned, find_patterns(job.material.model.proto), job.material.layers),
        "suspicion_auc": ranking_auc(suspicion, pinned),
        "emulated_probes": len(searched),
        "information_bound": information_bound(len(job.material.names), len(pinned)),
        "violations": count_violations([(p.plan.pinned, p.verdict.passed) for p in searched]),
        "superfluous_pins_dropped": bisection.violations if bisection is not None else 0,
    }


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
